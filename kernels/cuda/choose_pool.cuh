/* The first steps of a choice: what is ranked, in one unit for all heads, classified and pooled.
 * Included by choose.cu. */
#ifndef DKV_KERNELS_CUDA_CHOOSE_POOL_CUH
#define DKV_KERNELS_CUDA_CHOOSE_POOL_CUH

#include "kernels/cuda/choose_rank.cuh"

namespace
{

/* A choice at work: what is ranked, and its crew. */
struct choosing {
    const dkv_cu_choice &choice;
    crew c;
    uint32_t units;   /* of a head */
    uint32_t protect; /* of them, by position */
    float *pooled;    /* of units */
    float *raw;
    uint8_t *cls;
};

__device__ inline size_t row_of(const dkv_cu_choice &choice, uint32_t head)
{
    return static_cast<size_t>(head) * choice.stride;
}

__device__ inline uint32_t unit_of(const dkv_cu_choice &choice, uint32_t t)
{
    return choice.chunk == 1
               ? t
               : (choice.first_index + t) / choice.chunk - choice.first_index / choice.chunk;
}

/* Units that a head keeps of k tokens. */
__device__ uint32_t units_for(const choosing &w, uint32_t k)
{
    const uint32_t tokens = w.choice.sinks + w.choice.recent;
    if (k >= w.choice.n)
        return w.units;
    return w.protect + (k > tokens ? (k - tokens) / w.choice.chunk : 0);
}

__device__ choosing begin_choice(const dkv_cu_choice &choice, const crew &c)
{
    const bool chunks = choice.chunk > 1;
    const bool pools = choice.pool != DKV_POOL_NONE || chunks;
    choosing w = {choice,
                  c,
                  choice.n,
                  choice.sinks + choice.recent,
                  pools ? choice.pooled : choice.raw,
                  chunks ? choice.chunk_raw : choice.raw,
                  chunks ? choice.chunk_class : choice.token_class};
    if (chunks) {
        w.units = unit_of(choice, choice.n - 1) + 1;
        w.protect = (choice.sinks > 0 ? unit_of(choice, choice.sinks - 1) + 1 : 0) +
                    (choice.recent > 0 ? w.units - unit_of(choice, choice.n - choice.recent) : 0);
    }
    return w;
}

/* ---- settle ---- */

__device__ uint8_t class_of(const dkv_cu_choice &choice, const unsigned *mask, uint32_t lone,
                            uint32_t i)
{
    if (mask && (mask[i / 32] >> (i % 32) & 1))
        return class_lowest;
    const bool safe = i < choice.sinks || i >= choice.n - choice.recent || i == lone;
    return safe ? class_protected : class_candidate;
}

__device__ int smallest_exponent(const dkv_cu_choice &choice)
{
    int least = choice.exponents[0];
    for (uint32_t h = 1; h < choice.heads; h++)
        least = min(least, choice.exponents[h]);
    return least;
}

/* A score of head `head` in the unit of all, with what earlier calls had. */
__device__ float settled(const dkv_cu_choice &choice, uint32_t head, uint32_t i, float raw,
                         float factor)
{
    const float x = raw * factor * factor;
    if (!choice.carry || i >= choice.n)
        return x;
    const float carry = choice.carry[static_cast<size_t>(head) * choice.n + i];
    return choice.carry_largest ? fmaxf(x, carry) : x + carry;
}

/* One head's scores and classes, four tokens at a time. */
__device__ void settle_head(const choosing &w, uint32_t head, int exponent, shared_state &s)
{
    const dkv_cu_choice &choice = w.choice;
    const unsigned *mask = choice.mask ? choice.mask + static_cast<size_t>(head) * choice.mask_words
                                       : nullptr;
    const float factor = ldexpf(1.0f, exponent - choice.exponents[head]);
    uint32_t lone = choice.window == choice.n ? 0 : ~0u;
    if (mask && choice.window > 0) {
        __syncthreads();
        if (threadIdx.x == 0)
            s.offset = dkv_cu_lone_key(mask, choice.n, choice.window);
        __syncthreads();
        lone = s.offset;
    }
    for (uint32_t i = 4 * (w.c.rank * threads + threadIdx.x); i < choice.n;
         i += 4 * w.c.size * threads) {
        float4 &raw = *reinterpret_cast<float4 *>(choice.raw + row_of(choice, head) + i);
        const float4 x = raw;
        uchar4 cls = {class_of(choice, mask, lone, i), 0, 0, 0};
        if (i + 1 < choice.n)
            cls.y = class_of(choice, mask, lone, i + 1);
        if (i + 2 < choice.n)
            cls.z = class_of(choice, mask, lone, i + 2);
        if (i + 3 < choice.n)
            cls.w = class_of(choice, mask, lone, i + 3);
        raw = {settled(choice, head, i, x.x, factor), settled(choice, head, i + 1, x.y, factor),
               settled(choice, head, i + 2, x.z, factor),
               settled(choice, head, i + 3, x.w, factor)};
        *reinterpret_cast<uchar4 *>(choice.token_class + row_of(choice, head) + i) = cls;
    }
}

/* gqa=layer: the mean over heads in the place of each, and a token is lowest if it is in any. */
__device__ void average_heads(const choosing &w)
{
    const dkv_cu_choice &choice = w.choice;
    for (uint32_t i = w.c.rank * threads + threadIdx.x; i < choice.n; i += w.c.size * threads) {
        double sum = 0;
        bool lowest = false;
        bool safe = false;
        for (uint32_t h = 0; h < choice.heads; h++) {
            const unsigned cls = choice.token_class[row_of(choice, h) + i];
            sum += choice.raw[row_of(choice, h) + i];
            lowest = lowest || cls == class_lowest;
            safe = safe || cls == class_protected;
        }
        for (uint32_t h = 0; h < choice.heads; h++) {
            choice.raw[row_of(choice, h) + i] = static_cast<float>(sum / choice.heads);
            choice.token_class[row_of(choice, h) + i] = lowest ? class_lowest
                                                        : safe ? class_protected
                                                               : class_candidate;
        }
    }
}

__device__ void settle(const choosing &w, int exponent, shared_state &s)
{
    for (uint32_t i = w.c.rank * threads + threadIdx.x; i < DKV_CU_CHOICE_BINS;
         i += w.c.size * threads)
        w.choice.bins[i] = 0;
    for (uint32_t h = w.c.rank * threads + threadIdx.x; h < w.choice.heads; h += w.c.size * threads)
        w.choice.counts_out[h] = 0;
    for (uint32_t head = 0; head < w.choice.heads; head++)
        settle_head(w, head, exponent, s);
    crew_barrier(w.c);
    if (!w.choice.one_set)
        return;
    average_heads(w);
    crew_barrier(w.c);
}

/* ---- pool ---- */

/* Outside the scope of pooling nothing is added, and nothing wins a maximum. */
__device__ float pooled_score(const dkv_cu_choice &choice, const float *raw, uint32_t i)
{
    if (choice.pool == DKV_POOL_NONE || i < choice.scope_begin || i >= choice.scope_end)
        return raw[i];
    const uint32_t half = choice.kernel / 2;
    const uint32_t begin = i > choice.scope_begin + half ? i - half : choice.scope_begin;
    const uint32_t end = min(i + half + 1, choice.scope_end);
    if (choice.pool == DKV_POOL_MAX) {
        float most = raw[begin];
        for (uint32_t at = begin + 1; at < end; at++)
            most = fmaxf(most, raw[at]);
        return most;
    }
    double sum = 0;
    for (uint32_t at = begin; at < end; at++)
        sum += raw[at];
    return static_cast<float>(sum / choice.kernel);
}

/* Joins the windows of tokens i .. i+3, all inside the scope and of a kernel of 5 or more: most of
 * each is common to all. */
template <class value, class function>
__device__ void join_windows(const float *raw, uint32_t i, uint32_t half, function join,
                             value (&out)[4])
{
    const float *left = raw + i - half;
    const float *right = raw + i + half;
    value common = left[3];
    for (const float *at = left + 4; at <= right; at++)
        common = join(common, *at);
    out[0] = join(join(join(common, left[0]), left[1]), left[2]);
    out[1] = join(join(join(common, left[1]), left[2]), right[1]);
    out[2] = join(join(join(common, left[2]), right[1]), right[2]);
    out[3] = join(join(join(common, right[1]), right[2]), right[3]);
}

/* Pooled scores of tokens i .. i+3; what is behind the last token means nothing. */
__device__ float4 pooled_four(const dkv_cu_choice &choice, const float *raw, uint32_t i)
{
    const uint32_t half = choice.kernel / 2;
    if (half < 2 || i < choice.scope_begin + half || i + 3 + half >= choice.scope_end) {
        float each[4] = {};
        for (uint32_t q = 0; q < 4 && i + q < choice.n; q++)
            each[q] = pooled_score(choice, raw, i + q);
        return {each[0], each[1], each[2], each[3]};
    }
    if (choice.pool == DKV_POOL_MAX) {
        float most[4];
        join_windows(
            raw, i, half, [](float a, float b) { return fmaxf(a, b); }, most);
        return {most[0], most[1], most[2], most[3]};
    }
    double sum[4];
    join_windows(
        raw, i, half, [](double a, double b) { return a + b; }, sum);
    return {static_cast<float>(sum[0] / choice.kernel), static_cast<float>(sum[1] / choice.kernel),
            static_cast<float>(sum[2] / choice.kernel), static_cast<float>(sum[3] / choice.kernel)};
}

/* Sums tokens up to chunk `unit`, by a warp or a thread: `lanes` of them. */
__device__ void gather_chunk(const choosing &w, uint32_t head, uint32_t unit, uint32_t lanes)
{
    const dkv_cu_choice &choice = w.choice;
    const float *raw = choice.raw + row_of(choice, head);
    const uint8_t *cls = choice.token_class + row_of(choice, head);
    const uint32_t first = choice.first_index / choice.chunk + unit; /* chunk, from ordinal 0 */
    const uint32_t begin = unit == 0 ? 0 : first * choice.chunk - choice.first_index;
    const uint32_t end = min(choice.n, (first + 1) * choice.chunk - choice.first_index);
    double pooled_sum = 0;
    double raw_sum = 0;
    unsigned best = class_lowest;
    for (uint32_t t = begin + (lanes > 1 ? threadIdx.x % 32 : 0); t < end; t += lanes) {
        pooled_sum += pooled_score(choice, raw, t);
        raw_sum += raw[t];
        best = max(best, static_cast<unsigned>(cls[t]));
    }
    for (uint32_t step = lanes / 2; step; step /= 2) {
        pooled_sum += __shfl_xor_sync(~0u, pooled_sum, step);
        raw_sum += __shfl_xor_sync(~0u, raw_sum, step);
        best = max(best, __shfl_xor_sync(~0u, best, step));
    }
    if (begin < choice.sinks || begin >= choice.n - choice.recent)
        best = class_place;
    const size_t at = row_of(choice, head) + unit;
    w.pooled[at] = static_cast<float>(pooled_sum);
    w.raw[at] = static_cast<float>(raw_sum);
    w.cls[at] = static_cast<uint8_t>(best);
}

__device__ void pool(const choosing &w)
{
    const dkv_cu_choice &choice = w.choice;
    const uint32_t me = w.c.rank * threads + threadIdx.x;
    const uint32_t all = w.c.size * threads;
    const uint32_t lanes = choice.chunk < 16 ? 1 : 32;
    if (w.pooled == choice.raw)
        return;
    for (uint32_t head = 0; head < choice.heads; head++) {
        if (choice.chunk > 1)
            for (uint32_t unit = me / lanes; unit < w.units; unit += all / lanes)
                gather_chunk(w, head, unit, lanes);
        else
            for (uint32_t i = 4 * me; i < choice.n; i += 4 * all)
                *reinterpret_cast<float4 *>(w.pooled + row_of(choice, head) + i) = pooled_four(
                    choice, choice.raw + row_of(choice, head), i);
    }
    crew_barrier(w.c);
}

} // namespace

#endif
