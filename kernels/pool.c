/* Sliding maximum and sliding sum by doubling.
 *
 * Starting from the scores themselves, x[i] = op(x[i], x[i + p]) for p = 1, 2, 4, ... makes x[i]
 * cover the 1, 2, 4, 8, ... tokens from i on. A window of `kernel` tokens is then two overlapping
 * blocks for the maximum, and one block per set bit of `kernel` for the sum. That is log2(kernel)
 * plain loops over the tile that every compiler vectorises, instead of a queue with branches; and,
 * unlike a running sum, it does not drift: the order of additions is a property of the window
 * alone, so equal windows have equal sums and a token's sum does not depend on its tile.
 *
 * The loops run in place: element i reads i and i + p, which no earlier step has overwritten.
 */
#include "kernels/pool.h"

#include <assert.h>
#include <string.h>

/* Copies scores first .. first+count-1, with zeros outside [begin, end). Positions are signed: a
 * window may begin before token 0. Adding 0 turns -0 into +0, so that bit patterns order like the
 * values. */
static void load(float *out, const float *raw, int64_t begin, int64_t end, int64_t first,
                 int64_t count)
{
    const int64_t from = first < begin ? begin : first;
    const int64_t to = first + count > end ? end : first + count;
    if (from > first)
        memset(out, 0, (size_t)(from - first) * sizeof(*out));
    for (int64_t token = from; token < to; token++)
        out[token - first] = raw[token] + 0.0f;
    if (to < first + count)
        memset(out + (to - first), 0, (size_t)(first + count - to) * sizeof(*out));
}

static inline float max_of(float a, float b)
{
    return a > b ? a : b;
}

static void max_tile(float *DKV_RESTRICT pooled_out, float *x, size_t count, uint32_t kernel)
{
    uint32_t p = 1;
    for (; 2 * p <= kernel; p *= 2)
        for (size_t i = 0; i < count + kernel - 2 * p; i++)
            x[i] = max_of(x[i], x[i + p]);
    for (size_t i = 0; i < count; i++)
        pooled_out[i] = max_of(x[i], x[i + kernel - p]);
}

static void sum_tile(double *DKV_RESTRICT sum_out, double *x, size_t count, uint32_t kernel)
{
    memset(sum_out, 0, count * sizeof(*sum_out));
    uint32_t done = 0; /* tokens of the window that are in sum_out */
    for (uint32_t p = 1; done < kernel; p *= 2) {
        if (kernel & p) {
            for (size_t i = 0; i < count; i++)
                sum_out[i] += x[i + done];
            done += p;
        }
        if (2 * p <= kernel)
            for (size_t i = 0; i < count + kernel - 2 * p; i++)
                x[i] += x[i + p];
    }
}

/* The raw score stands for the pooled one: for an average as the sum of a window full of it, which
 * is exact in double, so that it compares with real sums. */
static void copy_raw(const struct dkv_pool_spec *spec, struct dkv_pool_tile *tile, const float *raw,
                     uint64_t first, size_t from, size_t to)
{
    const double times = spec->pool == DKV_POOL_AVG ? (double)spec->kernel : 1.0;
    for (size_t i = from; i < to; i++) {
        tile->sum[i] = (double)(raw[first + i] + 0.0f) * times;
        tile->pooled[i] = (float)tile->sum[i];
    }
}

void dkv_pool_tile(const struct dkv_pool_spec *spec, const float *raw, uint64_t first, size_t count,
                   struct dkv_pool_tile *tile)
{
    const uint64_t last = first + count;
    const uint32_t kernel = spec->kernel;
    assert(count <= DKV_POOL_TILE);
    if (spec->pool == DKV_POOL_NONE || first >= spec->end || last <= spec->begin) {
        copy_raw(spec, tile, raw, first, 0, count);
        return;
    }
    assert(kernel % 2 == 1 && kernel <= DKV_KERNEL_MAX);
    const size_t padded = count + kernel - 1;
    load(tile->x, raw, (int64_t)spec->begin, (int64_t)spec->end, (int64_t)first - kernel / 2,
         (int64_t)padded);
    if (spec->pool == DKV_POOL_MAX) {
        max_tile(tile->pooled, tile->x, count, kernel);
    } else {
        for (size_t i = 0; i < padded; i++)
            tile->wide[i] = (double)tile->x[i];
        sum_tile(tile->sum, tile->wide, count, kernel);
        for (size_t i = 0; i < count; i++)
            tile->pooled[i] = (float)tile->sum[i];
    }
    if (first < spec->begin)
        copy_raw(spec, tile, raw, first, 0, (size_t)(spec->begin - first));
    if (last > spec->end)
        copy_raw(spec, tile, raw, first, (size_t)(spec->end - first), count);
}
