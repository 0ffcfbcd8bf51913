/* value_metric: distances behind a matrix per query head, |M (a - v)|.
 *
 * M a is taken once per output, M v once per value and query head, a matrix product of a tile: that
 * is what such a request costs. A difference of the two loses digits where they are close, so there
 * it is M (a - v) that is taken, in double precision.
 */
#include "kernels/cpu/head_pass.h"

#include <math.h>
#include <string.h>

#define CANCELLED (1.0 / 64)

static const float *matrix_of(const struct dkv_head *head, uint32_t g)
{
    const size_t q_head = head->index * head->item->plan->group + g;
    return head->item->block->value_metric + q_head * head->v_dim * head->v_dim;
}

bool dkv_head_take_metric(struct dkv_head *head)
{
    const size_t dim = head->v_dim, padded = head->metric_dim;
    bool finite = true;
    for (uint32_t g = 0; g < head->item->plan->group; g++) {
        const float *matrix = matrix_of(head, g);
        float *panel = head->metric + g * dim * padded;
        memset(panel, 0, sizeof(*panel) * dim * padded);
        for (size_t row = 0; row < dim; row++)
            for (size_t d = 0; d < dim; d++) {
                panel[d * padded + row] = matrix[row * dim + d];
                finite = finite && isfinite(matrix[row * dim + d]);
            }
    }
    return finite;
}

double dkv_head_metric_length(const struct dkv_head *head, uint32_t g, const double *x)
{
    const float *matrix = matrix_of(head, g);
    double length = 0.0;
    for (size_t row = 0; row < head->v_dim; row++) {
        double sum = 0.0;
        for (size_t d = 0; d < head->v_dim; d++)
            sum += (double)matrix[row * head->v_dim + d] * x[d];
        length += sum * sum;
    }
    return sqrt(length);
}

/* The outputs that values are held against, a panel of `ld` columns. */
struct outputs {
    const float *panel;
    size_t ld;
    uint32_t per_head; /* columns of one query head */
};

static struct outputs outputs_of(const struct dkv_head *head)
{
    if (head->averaged)
        return (struct outputs){head->bar_outputs, head->n_bars, 1};
    return (struct outputs){head->outputs, head->n_rows, head->window};
}

void dkv_head_metric_outputs(struct dkv_head *head)
{
    const struct outputs outputs = outputs_of(head);
    const size_t dim = head->v_dim, padded = head->metric_dim;
    memset(head->metric_output, 0, sizeof(float) * outputs.ld * padded);
    for (uint32_t column = 0; column < outputs.per_head * head->item->plan->group; column++) {
        const float *matrix = matrix_of(head, column / outputs.per_head);
        for (size_t row = 0; row < dim; row++) {
            double sum = 0.0;
            for (size_t d = 0; d < dim; d++)
                sum += (double)matrix[row * dim + d] *
                       (double)outputs.panel[d * outputs.ld + column];
            head->metric_output[column * padded + row] = (float)sum;
        }
    }
}

static double square(const float *x, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sum;
}

/* |M (a - v)|^2 of one output and value, from the difference. */
static float difference_first(const struct dkv_head *head, const struct dkv_tile *tile,
                              const struct outputs *outputs, uint32_t column, const float *value)
{
    for (size_t d = 0; d < head->v_dim; d++)
        tile->wide[d] = (double)outputs->panel[d * outputs->ld + column] - (double)value[d];
    const double length = dkv_head_metric_length(head, column / outputs->per_head, tile->wide);
    return (float)(length * length);
}

/* The distances that cancelled, of one query head. */
static void repair(const struct dkv_head *head, const struct dkv_tile *tile,
                   const struct outputs *outputs, uint32_t g, size_t n, float *out, size_t ld)
{
    for (size_t k = 0; k < n; k++) {
        const double limit = CANCELLED *
                             square(tile->metric_values + k * head->metric_dim, head->metric_dim);
        for (uint32_t i = 0; i < outputs->per_head; i++) {
            const uint32_t column = g * outputs->per_head + i;
            if ((double)out[k * ld + column] < limit)
                out[k * ld + column] = difference_first(head, tile, outputs, column,
                                                        tile->rows + k * head->v_dim);
        }
    }
}

void dkv_head_metric_distances(const struct dkv_head *head, const struct dkv_tile *tile, size_t n,
                               float *out, size_t ld)
{
    const struct outputs outputs = outputs_of(head);
    const size_t padded = head->metric_dim;
    memset(out, 0, sizeof(*out) * n * ld);
    for (uint32_t g = 0; g < head->item->plan->group; g++) {
        const uint32_t column = g * outputs.per_head;
        head->ops->dot(tile->metric_values, head->metric + g * head->v_dim * padded, padded,
                       tile->rows, head->v_dim, n, head->v_dim, 1.0f, NULL);
        head->ops->apart(out + column, ld, head->metric_output + column * padded, outputs.per_head,
                         tile->metric_values, n, padded);
        repair(head, tile, &outputs, g, n, out, ld);
    }
}
