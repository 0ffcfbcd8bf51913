/* Centres of keys and values: vectors to subtract before float32 products are summed.
 *
 * Softmax does not change when one vector is added to every key, nor the score when one is added to
 * every value; but sums of products lose digits to a common offset. The centre is, per component,
 * the median of a few tokens: robust against sinks, and exactly the common value where all tokens
 * are the same, which makes those scores exactly 0. Any finite centre gives the right answer; this
 * only decides how many digits are kept.
 *
 * The samples are sorted as whole rows, component by component at once: compare and exchange of two
 * rows is a loop that compilers turn into vector minima and maxima.
 */
#include "kernels/cpu/head.h"

#include <float.h>
#include <math.h>

#define SAMPLES 7u /* at most DKV_TILE_KEYS */

static void compare_exchange(float *DKV_RESTRICT low, float *DKV_RESTRICT high, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d++) {
        const float a = low[d], b = high[d];
        low[d] = a < b ? a : b;
        high[d] = a < b ? b : a;
    }
}

/* Odd-even transposition: as many rounds as rows. */
static void sort_rows(float *rows, unsigned n, uint32_t dim)
{
    for (unsigned round = 0; round < n; round++) {
        for (unsigned i = round % 2; i + 1 < n; i += 2)
            compare_exchange(rows + i * dim, rows + (i + 1) * dim, dim);
    }
}

static bool load_samples(const struct dkv_head *head, const struct dkv_reader *reader, uint32_t dim,
                         unsigned n, float *rows)
{
    const void *src[SAMPLES] = {NULL}; /* set, so that gcc sees that nothing unset is passed */
    float top;
    for (unsigned i = 0; i < n; i++) {
        const uint64_t token = head->item->block->valid_from + (2 * i + 1) * head->n / (2 * n);
        if (!dkv_reader_rows(reader, token, 1, &src[i]))
            return false;
    }
    head->ops->load(rows, dim, src, n, dim, reader->dtype, 1.0f, NULL, &top);
    for (size_t i = 0; !(top <= FLT_MAX) && i < (size_t)n * dim; i++)
        rows[i] = isfinite(rows[i]) ? rows[i] : 0.0f;
    return true;
}

bool dkv_head_centre(const struct dkv_head *head, const struct dkv_reader *reader, uint32_t dim,
                     float *scratch, float *shift_out, double *offset_out)
{
    const unsigned n = head->n < SAMPLES ? (unsigned)head->n : SAMPLES;
    double length = 0.0, spread = 0.0;
    if (!load_samples(head, reader, dim, n, scratch))
        return false;
    sort_rows(scratch, n, dim);
    const float *centre = scratch + n / 2 * dim;
    for (uint32_t d = 0; d < dim; d++) {
        const double low = (double)scratch[d] - (double)centre[d];
        const double high = (double)scratch[(n - 1) * dim + d] - (double)centre[d];
        length += (double)centre[d] * (double)centre[d];
        spread += 0.5 * (low * low + high * high);
        shift_out[d] = -centre[d];
    }
    *offset_out = length / spread; /* NaN where all is zero */
    return true;
}
