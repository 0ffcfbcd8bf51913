/* Probabilities are computed once per block and kept: dropping tokens only leaves some of them out
 * and divides by what is left. */
#include "client/cli/compare_error.h"

#include "kernels/convert.h"

#include <math.h>
#include <stdlib.h>

static double element_scale(const struct dkv_view *view, uint64_t head)
{
    if (view->dtype != DKV_F8_E4M3 && view->dtype != DKV_F8_E5M2)
        return 1;
    if (view->head_scales != NULL)
        return (double)view->head_scales[head];
    return view->scale != 0 ? (double)view->scale : 1;
}

/* One row of a dense view. False if an element is not finite. */
static bool read_row(const struct dkv_view *view, uint64_t head, uint64_t token, uint32_t dim,
                     float *to)
{
    const uint8_t *row = (const uint8_t *)view->base + view->offset +
                         (int64_t)head * view->head_stride + (int64_t)token * view->token_stride;
    const size_t size = dkv_dtype_bytes(view->dtype);
    const double scale = element_scale(view, head);
    bool finite = true;
    for (uint32_t d = 0; d < dim; d++) {
        to[d] = (float)((double)dkv_element_to_f32(row + d * size, view->dtype) * scale);
        finite = finite && isfinite(to[d]);
    }
    return finite;
}

static enum dkv_status read_head(const struct dkv_view *view, const char *name, uint64_t head,
                                 uint64_t first, uint64_t n, uint32_t dim, float *to,
                                 struct dkv_error *err)
{
    for (uint64_t t = first; t < n; t++)
        if (!read_row(view, head, t, dim, to + t * dim))
            return dkv_error_set(err, DKV_E_INVALID, "%s: not finite at head %llu, token %llu",
                                 name, (unsigned long long)head, (unsigned long long)t);
    return DKV_OK;
}

/* p and a of one query row, which sees tokens first .. last. */
static void attend(const struct dkv_outputs *o, const struct dkv_block *block,
                   const struct dkv_plan *plan, const float *query, const float *key,
                   const float *value, uint64_t last, double *p, double *all)
{
    double max = -INFINITY, sum = 0;
    for (uint64_t j = block->valid_from; j <= last; j++) {
        double z = 0;
        for (uint32_t d = 0; d < block->head_dim; d++)
            z += (double)query[d] * (double)key[j * block->head_dim + d];
        z *= plan->scale;
        p[j] = o->softcap > 0 ? o->softcap * tanh(z / o->softcap) : z;
        max = p[j] > max ? p[j] : max;
    }
    for (uint64_t j = block->valid_from; j <= last; j++) {
        p[j] = exp(p[j] - max);
        sum += p[j];
    }
    for (uint64_t j = block->valid_from; j <= last; j++) {
        p[j] /= sum;
        for (uint32_t e = 0; e < o->v_dim; e++)
            all[e] += p[j] * (double)value[j * o->v_dim + e];
    }
}

static enum dkv_status fill(struct dkv_outputs *o, const struct dkv_block *block,
                            const struct dkv_plan *plan, float *key, float *query,
                            struct dkv_error *err)
{
    for (uint32_t h = 0; h < block->kv_heads; h++) {
        float *value = o->value + h * o->n * o->v_dim;
        enum dkv_status status = read_head(&block->key, "key", h, block->valid_from, o->n,
                                           block->head_dim, key, err);
        if (status == DKV_OK)
            status = read_head(&block->value, "value", h, block->valid_from, o->n, o->v_dim, value,
                               err);
        if (status != DKV_OK)
            return status;
        for (uint32_t r = 0; r < o->group * o->rows; r++) {
            const uint32_t q_head = h * o->group + r / o->rows, t = r % o->rows;
            const uint64_t at = (uint64_t)h * o->group * o->rows + r;
            if (!read_row(&block->query, q_head, plan->first_row + t, block->head_dim, query))
                return dkv_error_set(err, DKV_E_INVALID, "query: not finite at head %u, row %llu",
                                     q_head, (unsigned long long)(plan->first_row + t));
            attend(o, block, plan, query, key, value, o->n - o->rows + t, o->p + at * o->n,
                   o->all + at * o->v_dim);
        }
    }
    return DKV_OK;
}

enum dkv_status dkv_outputs_new(const struct dkv_block *block, const struct dkv_plan *plan,
                                double logit_softcap, struct dkv_outputs **out,
                                struct dkv_error *err)
{
    struct dkv_outputs *o = calloc(1, sizeof(*o));
    const size_t all_rows = (size_t)block->q_heads * plan->window, n = block->n_tokens;
    float *key = calloc(n * block->head_dim, sizeof(*key));
    float *query = calloc(block->head_dim, sizeof(*query));
    enum dkv_status status = DKV_E_NOMEM;
    if (o != NULL) {
        *o = (struct dkv_outputs){
            .n = n,
            .first = block->valid_from,
            .group = plan->group,
            .rows = plan->window,
            .v_dim = plan->v_dim,
            .softcap = logit_softcap,
            .p = calloc(all_rows * n, sizeof(double)),
            .all = calloc(all_rows * plan->v_dim, sizeof(double)),
            .value = calloc(block->kv_heads * n * plan->v_dim, sizeof(float))};
    }
    if (o == NULL || key == NULL || query == NULL || o->p == NULL || o->all == NULL ||
        o->value == NULL)
        dkv_error_set(err, status, "no memory to compare outputs");
    else
        status = fill(o, block, plan, key, query, err);
    free(key);
    free(query);
    if (status != DKV_OK) {
        dkv_outputs_free(o);
        return status;
    }
    *out = o;
    return DKV_OK;
}

void dkv_outputs_free(struct dkv_outputs *o)
{
    if (o == NULL)
        return;
    free(o->p);
    free(o->all);
    free(o->value);
    free(o);
}

enum dkv_status dkv_outputs_error(const struct dkv_outputs *o, uint32_t kv_head,
                                  const int32_t *keep, uint64_t count, struct dkv_output_error *sum,
                                  struct dkv_error *err)
{
    const float *value = o->value + kv_head * o->n * o->v_dim;
    double *kept = calloc(o->v_dim, sizeof(*kept));
    if (kept == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory to compare outputs");
    for (uint32_t r = 0; r < o->group * o->rows; r++) {
        const uint64_t at = (uint64_t)kv_head * o->group * o->rows + r;
        const double *p = o->p + at * o->n, *all = o->all + at * o->v_dim;
        double mass = 0, distance = 0, length = 0;
        for (uint32_t e = 0; e < o->v_dim; e++)
            kept[e] = 0;
        for (uint64_t i = 0; i < count; i++) {
            const double weight = p[keep[i]];
            mass += weight;
            for (uint32_t e = 0; e < o->v_dim; e++)
                kept[e] += weight * (double)value[(uint64_t)keep[i] * o->v_dim + e];
        }
        for (uint32_t e = 0; e < o->v_dim; e++) {
            const double x = (mass > 0 ? kept[e] / mass : 0) - all[e];
            distance += x * x;
            length += all[e] * all[e];
        }
        sum->squared += distance;
        sum->relative += length > 0 ? sqrt(distance / length) : distance > 0 ? 1 : 0;
        sum->n++;
    }
    free(kept);
    return DKV_OK;
}
