/* Keys of selection: how tokens are ordered.
 *
 * A token's place in the order is four numbers, compared one after the other:
 *
 *   key      32 bits: class and pooled score; nearly always enough, and the only one that is kept.
 *            0 is padding, 1 the lowest class, a candidate's is its pooled score + 2, a protected
 *            token's has the top bit set. Averages are sums in double, rounded to float here.
 *   second   64 bits: what the key leaves out, the sum behind an average (or, with a mask, the
 *            pooled score of the lowest class); 0 where it leaves out nothing
 *   raw      the raw score
 *   index    low ones first
 *
 * The last three are looked up again where keys are equal. Sums are added in the order that
 * kernels/select.h fixes.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_KEYS_CUH
#define DKV_KERNELS_CUDA_SELECT_KEYS_CUH

#include "kernels/cuda/device.cuh"

/* What selection needs to know of a unit; made by the host. Kernels keep it in registers, since the
 * compiler must take memory for changing; rarely used functions out of line read a copy in shared
 * memory. */
struct select_task {
    const float *scores;
    const unsigned *mask;
    const int *exponent;
    float *scores_out;
    int32_t *keep_out;
    uint32_t *keys; /* NULL: shared memory */
    uint32_t n;
    uint32_t window;
    uint32_t keep;
    uint32_t first_index;
    uint32_t protected_end;   /* tokens before it, */
    uint32_t protected_begin; /* or from here on, are protected */
    uint32_t lone_key;        /* and this one; ~0: none. Known after scoring, if there is a mask */
    uint32_t scope_begin;     /* of pooling */
    uint32_t scope_end;
    uint32_t kernel;      /* 1: no pooling */
    uint32_t plain_begin; /* candidates whose max of 11 is pooled, and nothing else to do */
    uint32_t plain_end;
    uint32_t average;
    float descale; /* applied twice; known after scoring */
};

/* ---- pooling ---- */

/* A window of scores in global memory; 0 outside the scope of pooling. */
struct scoped_window {
    const select_task &task;
    int first;

    __device__ float operator[](int i) const
    {
        const int at = first + i;
        return at >= static_cast<int>(task.scope_begin) && at < static_cast<int>(task.scope_end)
                   ? task.scores[at]
                   : 0.0f;
    }
    __device__ scoped_window operator+(int i) const
    {
        return {task, first + i};
    }
};

/* Sum of `width` (a power of two) values, halves first. */
template <int width, class window> __device__ double select_tree_sum(window x)
{
    if constexpr (width == 1)
        return x[0];
    else
        return select_tree_sum<width / 2>(x) + select_tree_sum<width / 2>(x + width / 2);
}

/* The same, out of line where the code would be long. */
template <int width, class window> __device__ __noinline__ double select_far_tree_sum(window x)
{
    if constexpr (width <= 32)
        return select_tree_sum<width>(x);
    else
        return select_far_tree_sum<width / 2>(x) + select_far_tree_sum<width / 2>(x + width / 2);
}

template <int width, class window>
__device__ void select_add_block(double &sum, window x, int &at, uint32_t kernel)
{
    if (kernel & width) {
        if constexpr (width <= 16)
            sum += select_tree_sum<width>(x + at);
        else
            sum += select_far_tree_sum<width>(x + at);
        at += width;
    }
}

/* Sum over the window of `kernel` tokens. */
template <class window> __device__ double select_pooled_sum(window x, uint32_t kernel)
{
    double sum = x[0]; /* the kernel is odd */
    int at = 1;
    select_add_block<2>(sum, x, at, kernel);
    select_add_block<4>(sum, x, at, kernel);
    select_add_block<8>(sum, x, at, kernel);
    select_add_block<16>(sum, x, at, kernel);
    select_add_block<32>(sum, x, at, kernel);
    select_add_block<64>(sum, x, at, kernel);
    select_add_block<128>(sum, x, at, kernel);
    select_add_block<256>(sum, x, at, kernel);
    return sum;
}

/* Largest of the windows that start at window, window + 1, ..; four at once share most of their
 * work for the default kernel of 11, whose window, five tokens on either side, starts three floats
 * behind a multiple of 16 bytes. */
__device__ inline float4 select_max_of_11(const float *window)
{
    float aligned[20];
    const float *x = aligned + 3;
#pragma unroll
    for (int i = 0; i < 20; i += 4)
        *reinterpret_cast<float4 *>(aligned + i) = *reinterpret_cast<const float4 *>(window - 3 +
                                                                                     i);
    float common = x[3]; /* x[3] to x[10] are in all four */
#pragma unroll
    for (int i = 4; i < 11; i++)
        common = fmaxf(common, x[i]);
    const float left = fmaxf(x[1], x[2]);
    const float right = fmaxf(x[11], x[12]);
    return {fmaxf(common, fmaxf(x[0], left)), fmaxf(common, fmaxf(left, x[11])),
            fmaxf(common, fmaxf(x[2], right)), fmaxf(common, fmaxf(right, x[13]))};
}

__device__ inline float select_max_of(const float *window, uint32_t kernel)
{
    float best = window[0];
    for (uint32_t i = 1; i < kernel; i++)
        best = fmaxf(best, window[i]);
    return best;
}

/* ---- keys ---- */

__device__ inline unsigned select_raw_bits(float raw)
{
    return __float_as_uint(raw + 0.0f) & 0x7fffffffu; /* -0 equals +0 */
}

/* What the key leaves out of token i's pooled score. */
static __device__ __noinline__ unsigned long long select_second(const select_task &t, uint32_t i)
{
    const bool pooled = i >= t.scope_begin && i < t.scope_end;
    const scoped_window window = {t, static_cast<int>(i) - static_cast<int>(t.kernel / 2)};
    if (t.average) {
        const double sum = pooled ? select_pooled_sum(window, t.kernel)
                                  : static_cast<double>(t.scores[i]) * t.kernel;
        return sum > 0 ? static_cast<unsigned long long>(__double_as_longlong(sum)) : 0;
    }
    if (!t.mask)
        return 0;
    float best = t.scores[i];
    for (uint32_t k = 0; pooled && k < t.kernel; k++)
        best = fmaxf(best, window[static_cast<int>(k)]);
    return select_raw_bits(best);
}

__device__ inline unsigned select_key(const select_task &t, uint32_t i, float pooled)
{
    const unsigned bits = select_raw_bits(pooled);
    if (t.mask && (t.mask[i / 32] >> (i % 32) & 1))
        return 1;
    return i < t.protected_end || i >= t.protected_begin || i == t.lone_key ? 0x80000000u | bits
                                                                            : bits + 2;
}

/* Keys of tokens i .. i+3, whatever they are. `window` is where the pooling window of token i
 * starts; scores outside the scope of pooling are 0 there, and such tokens are their own pooled
 * score (for an average, whose sums are compared, the sum of a window full of it). Tokens past the
 * end get 0. */
static __device__ __noinline__ uint4 select_any_keys(const select_task &t, uint32_t i,
                                                     const float *window)
{
    unsigned key[4];
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        const uint32_t token = i + q;
        key[q] = 0;
        if (token >= t.n)
            continue;
        const bool pooled = token >= t.scope_begin && token < t.scope_end;
        const float raw = pooled ? window[t.kernel / 2 + q] : t.scores[token];
        float score = raw;
        if (t.average)
            score = static_cast<float>(pooled ? select_pooled_sum(window + q, t.kernel)
                                              : static_cast<double>(raw) * t.kernel);
        else if (pooled)
            score = select_max_of(window + q, t.kernel);
        key[q] = select_key(t, token, score);
        if (t.scores_out)
            t.scores_out[token] = raw * t.descale * t.descale;
    }
    return {key[0], key[1], key[2], key[3]};
}

/* Those of t.plain_begin .. t.plain_end - 1. */
__device__ inline uint4 select_plain_keys(const float *window)
{
    const float4 best = select_max_of_11(window);
    return {select_raw_bits(best.x) + 2, select_raw_bits(best.y) + 2, select_raw_bits(best.z) + 2,
            select_raw_bits(best.w) + 2};
}

#endif
