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

/* Copies raw scores first .. first+count-1, with zeros outside [begin, end). Positions are signed:
 * a window may begin before token 0. Adding 0 turns -0 into +0, so that bit patterns order like
 * the values. */
static void load(float *out, const float *raw, const struct dkv_pool_spec *spec, int64_t first,
                 size_t count)
{
    const int64_t begin = (int64_t)spec->begin, end = (int64_t)spec->end;
    for (size_t i = 0; i < count; i++) {
        const int64_t token = first + (int64_t)i;
        out[i] = token >= begin && token < end ? raw[token] + 0.0f : 0.0f;
    }
}

static inline float max_of(float a, float b)
{
    return a > b ? a : b;
}

static void max_tile(float *x, size_t count, uint32_t kernel, double *pooled_out)
{
    uint32_t p = 1;
    for (; 2 * p <= kernel; p *= 2)
        for (size_t i = 0; i < count + kernel - 2 * p; i++)
            x[i] = max_of(x[i], x[i + p]);
    for (size_t i = 0; i < count; i++)
        pooled_out[i] = (double)max_of(x[i], x[i + kernel - p]);
}

static void sum_tile(double *x, size_t count, uint32_t kernel, double *pooled_out)
{
    memset(pooled_out, 0, count * sizeof(*pooled_out));
    uint32_t done = 0; /* tokens of the window that are in pooled_out */
    for (uint32_t p = 1; done < kernel; p *= 2) {
        if (kernel & p) {
            for (size_t i = 0; i < count; i++)
                pooled_out[i] += x[i + done];
            done += p;
        }
        if (2 * p <= kernel)
            for (size_t i = 0; i < count + kernel - 2 * p; i++)
                x[i] += x[i + p];
    }
}

void dkv_pool_tile(const struct dkv_pool_spec *spec, const float *raw, uint64_t first, size_t count,
                   struct dkv_pool_scratch *scratch, double *pooled_out)
{
    assert(count <= DKV_POOL_TILE);
    const uint64_t last = first + count;
    const bool touches = spec->pool != DKV_POOL_NONE && first < spec->end && last > spec->begin;
    if (touches) {
        const uint32_t kernel = spec->kernel;
        assert(kernel % 2 == 1 && kernel <= DKV_KERNEL_MAX);
        load(scratch->raw, raw, spec, (int64_t)first - kernel / 2, count + kernel - 1);
        if (spec->pool == DKV_POOL_MAX) {
            max_tile(scratch->raw, count, kernel, pooled_out);
        } else {
            for (size_t i = 0; i < count + kernel - 1; i++)
                scratch->sums[i] = (double)scratch->raw[i];
            sum_tile(scratch->sums, count, kernel, pooled_out);
        }
    }
    for (size_t i = 0; i < count; i++)
        if (!touches || first + i < spec->begin || first + i >= spec->end)
            pooled_out[i] = (double)(raw[first + i] + 0.0f);
}
