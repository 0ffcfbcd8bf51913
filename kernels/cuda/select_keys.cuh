/* Keys of selection: one 64-bit number per token whose order is the order of tokens.
 *
 * Two bits of class, then the pooled score, then (max pooling) the raw score. Averages are sums in
 * double, added in the order that kernels/select.h fixes; of such a double 61 bits are needed.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_KEYS_CUH
#define DKV_KERNELS_CUDA_SELECT_KEYS_CUH

#include "kernels/cuda/device.cuh"

/* What selection needs to know of a unit, in registers: the descriptors are in memory that the
 * compiler must take for changing. */
struct select_task {
    const float *scores;
    const unsigned *mask;
    float *scores_out;
    int32_t *keep_out;
    unsigned long long *keys; /* NULL: shared memory */
    uint32_t n;
    uint32_t window;
    uint32_t keep;
    uint32_t first_index;
    uint32_t protected_end;   /* tokens before it, */
    uint32_t protected_begin; /* or from here on, are protected */
    uint32_t lone_key;        /* and this one; ~0: none */
    uint32_t scope_begin;     /* of pooling */
    uint32_t scope_end;
    uint32_t kernel;      /* 1: no pooling */
    uint32_t plain_begin; /* candidates whose max is pooled, and nothing else to do */
    uint32_t plain_end;
    bool average;
    float descale; /* applied twice */
};

/* Sum of `width` (a power of two) values, halves first. */
template <int width> __device__ double select_tree_sum(const float *x)
{
    if constexpr (width == 1)
        return x[0];
    else
        return select_tree_sum<width / 2>(x) + select_tree_sum<width / 2>(x + width / 2);
}

/* The same, out of line where the code would be long. */
template <int width> __device__ __noinline__ double select_far_tree_sum(const float *x)
{
    if constexpr (width <= 32)
        return select_tree_sum<width>(x);
    else
        return select_far_tree_sum<width / 2>(x) + select_far_tree_sum<width / 2>(x + width / 2);
}

template <int width> __device__ void select_add_block(double &sum, const float *&x, uint32_t kernel)
{
    if (kernel & width) {
        if constexpr (width <= 16)
            sum += select_tree_sum<width>(x);
        else
            sum += select_far_tree_sum<width>(x);
        x += width;
    }
}

/* Sum over the window of `kernel` tokens from `x` on. */
__device__ inline double select_pooled_sum(const float *x, uint32_t kernel)
{
    double sum = *x++; /* the kernel is odd */
    select_add_block<2>(sum, x, kernel);
    select_add_block<4>(sum, x, kernel);
    select_add_block<8>(sum, x, kernel);
    select_add_block<16>(sum, x, kernel);
    select_add_block<32>(sum, x, kernel);
    select_add_block<64>(sum, x, kernel);
    select_add_block<128>(sum, x, kernel);
    select_add_block<256>(sum, x, kernel);
    return sum;
}

/* Largest of the windows that start at window, window + 1, ..; four at once share most of their
 * work for the default kernel, whose window, five tokens on either side, starts three floats behind
 * a multiple of 16 bytes. */
__device__ inline void select_pooled_max(const float *window, uint32_t kernel, float (&best)[4])
{
    if (kernel == 11) {
        float aligned[20];
        const float *x = aligned + 3;
#pragma unroll
        for (int i = 0; i < 20; i += 4)
            *reinterpret_cast<float4 *>(aligned + i) = *reinterpret_cast<const float4 *>(window -
                                                                                         3 + i);
        float common = x[3]; /* x[3] to x[10] are in all four */
#pragma unroll
        for (int i = 4; i < 11; i++)
            common = fmaxf(common, x[i]);
        const float left = fmaxf(x[1], x[2]);
        const float right = fmaxf(x[11], x[12]);
        best[0] = fmaxf(common, fmaxf(x[0], left));
        best[1] = fmaxf(common, fmaxf(left, x[11]));
        best[2] = fmaxf(common, fmaxf(x[2], right));
        best[3] = fmaxf(common, fmaxf(right, x[13]));
        return;
    }
    for (int q = 0; q < 4; q++) {
        best[q] = window[q];
        for (uint32_t i = 1; i < kernel; i++)
            best[q] = fmaxf(best[q], window[q + i]);
    }
}

/* A double that is a sum of up to 511 floats >= 0, in 61 bits: its exponent field is within
 * 873..1161, or it is zero. */
__device__ inline unsigned long long select_average_bits(double sum)
{
    return sum > 0 ? static_cast<unsigned long long>(__double_as_longlong(sum)) - (873ULL << 52)
                   : 0;
}

__device__ inline unsigned select_raw_bits(float raw)
{
    return __float_as_uint(raw + 0.0f) & 0x7fffffffu; /* -0 equals +0 */
}

__device__ inline unsigned long long select_class(const select_task &t, uint32_t i)
{
    if (t.mask && (t.mask[i / 32] >> (i % 32) & 1))
        return 0;
    return i < t.protected_end || i >= t.protected_begin || i == t.lone_key ? 2 : 1;
}

/* Keys of tokens i .. i+3. `window` is where the pooling window of token i starts; scores outside
 * the scope of pooling are 0 there, and such tokens are their own pooled score (for an average,
 * whose sums are compared, the sum of a window full of it). Tokens past the end get 0, which is
 * behind everything that can be kept. */
__device__ inline void select_keys(const select_task &t, uint32_t i, const float *window,
                                   unsigned long long (&key)[4])
{
    const uint32_t half = t.kernel / 2;
    float best[4];
    if (!t.average)
        select_pooled_max(window, t.kernel, best);
    if (i >= t.plain_begin && i + 4 <= t.plain_end) { /* most of them */
#pragma unroll
        for (int q = 0; q < 4; q++)
            key[q] = 1ULL << 62 | static_cast<unsigned long long>(select_raw_bits(best[q])) << 31 |
                     select_raw_bits(window[half + q]);
        return;
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const uint32_t token = i + q;
        key[q] = 0;
        if (token >= t.n)
            continue;
        const bool pooled = token >= t.scope_begin && token < t.scope_end;
        const float raw = pooled ? window[half + q] : t.scores[token];
        const unsigned long long order = select_class(t, token) << 62;
        if (t.average)
            key[q] = order | select_average_bits(pooled ? select_pooled_sum(window + q, t.kernel)
                                                        : static_cast<double>(raw) * t.kernel);
        else
            key[q] = order |
                     static_cast<unsigned long long>(select_raw_bits(pooled ? best[q] : raw))
                         << 31 |
                     select_raw_bits(raw);
        if (t.scores_out)
            t.scores_out[token] = raw * t.descale * t.descale;
    }
}

/* The key that is the only one some row sees, or ~0. Without a mask that is key 0, if the window
 * is the whole block. */
__device__ inline uint32_t select_lone_key(const unsigned *mask, uint32_t n, uint32_t window)
{
    if (!mask)
        return window == n ? 0 : ~0u;
    uint32_t first = ~0u;
    for (uint32_t i = 0; i < n; i++) {
        if (i % 32 == 0 && mask[i / 32] == ~0u) {
            i += 31;
            continue;
        }
        if (mask[i / 32] >> (i % 32) & 1)
            continue;
        if (first != ~0u)
            return i > n - window ? first : ~0u;
        first = i;
    }
    return first;
}

__device__ inline select_task select_task_of(const dkv_cu_block &block, const dkv_cu_unit &unit)
{
    select_task t;
    t.scores = unit.scores;
    t.mask = unit.mask;
    t.scores_out = unit.scores_out;
    t.keep_out = unit.keep_out;
    t.keys = unit.keys;
    t.n = block.n_valid;
    t.window = block.window;
    t.keep = block.keep;
    t.first_index = block.valid_from;
    t.protected_end = block.sinks;
    t.protected_begin = block.n_valid - block.recent;
    t.scope_begin = block.pool_prefix ? block.sinks : 0;
    t.scope_end = block.pool_prefix ? t.protected_begin : t.n;
    t.kernel = block.pool == DKV_POOL_NONE ? 1 : block.kernel;
    t.average = block.pool == DKV_POOL_AVG;
    return t;
}

/* The rest, known only after scoring. */
__device__ inline void select_after_scoring(select_task &t, const dkv_cu_unit &unit)
{
    t.lone_key = select_lone_key(t.mask, t.n, t.window);
    const bool plain = !t.average && !t.mask && !t.scores_out && t.lone_key == ~0u;
    t.plain_begin = max(t.scope_begin, t.protected_end);
    t.plain_end = plain ? min(t.scope_end, t.protected_begin) : 0;
    t.descale = t.scores_out ? ldexpf(1.0f, -*unit.exponent) : 0.0f;
}

#endif
