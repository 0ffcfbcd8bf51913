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
#include "kernels/cuda/select_crew.cuh"

/* Tokens before the scope of pooling, and as many behind it, whose scores a block keeps. */
constexpr uint32_t select_outside = 128;

/* Pooling that is done four tokens at a time, where there is no more to do. */
enum select_plain {
    select_not_plain = 0,
    select_unpooled,
    select_max_of_5,
    select_max_of_7,
    select_max_of_11,
    select_mean_of_5,
    select_mean_of_7,
    select_mean_of_11,
};

/* What selection needs to know of a unit; made by the host. Kernels keep it in registers, since the
 * compiler must take memory for changing; rarely used functions out of line read a copy in shared
 * memory. */
struct select_task {
    const float *scores;
    const unsigned *mask;
    const int *exponent; /* [heads] of rows */
    float *scores_out;
    int32_t *keep_out;
    uint32_t *keys; /* NULL: shared memory */
    /* NULL, or [heads] rows, `stride` apart, whose mean is selected by; it is written to `scores`.
     */
    const float *rows;
    const float *weight;  /* of the second stage; NULL: 1 */
    uint32_t *counts_out; /* [heads], each `keep`; NULL: not wanted */
    uint32_t heads;       /* that get the answer, one after the other in keep_out */
    uint32_t stride;
    uint32_t two_stages; /* half by pooled score, the rest by (pooled + 1e-4) * weight */
    uint32_t second;     /* it is the second one now: raw scores do not count */
    uint32_t n;
    uint32_t window;
    uint32_t keep;
    uint32_t first_index;
    uint32_t protected_end;   /* tokens before it, */
    uint32_t protected_begin; /* or from here on, are protected */
    uint32_t lone_key;        /* and this one; ~0: none. Known after scoring, if there is a mask */
    uint32_t scope_begin;     /* of pooling */
    uint32_t scope_end;
    uint32_t kernel;    /* 1: no pooling */
    uint32_t plain;     /* enum select_plain: whether keys are made four at a time */
    uint32_t has_edges; /* and so it is, though protected tokens, not too many, are not pooled */
    uint32_t keeps_protected; /* and all that is protected is kept, so that none is a candidate */
    uint32_t average;
    float descale; /* applied twice; known after scoring, as are the next two */
    int32_t shift; /* of the first digit */
    int32_t base;  /* where its window begins, in bins */
};

/* One block's share of a unit: tokens begin..end-1 and their keys. */
struct select_part {
    uint32_t *keys;   /* padded to whole fours */
    const float *raw; /* scores from token raw_first on; NULL: they do not count */
    uint32_t raw_first;
    uint32_t begin;
    uint32_t end;
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

/* The windows of `kernel` that start at window, window + 1, .., which is half a kernel before a
 * multiple of 16 bytes. */
template <int kernel> struct select_windows_of_four {
    static constexpr int before = 3 - (kernel / 2 + 3) % 4; /* floats from such a multiple */
    static constexpr int n = (before + kernel + 3 + 3) / 4 * 4;
    float aligned[n];

    __device__ __forceinline__ explicit select_windows_of_four(const float *window)
    {
#pragma unroll
        for (int i = 0; i < n; i += 4)
            *reinterpret_cast<float4 *>(aligned +
                                        i) = *reinterpret_cast<const float4 *>(window - before + i);
    }
};

/* Sums over them, as floats. */
template <int kernel> __device__ __forceinline__ float4 select_sums_of_four(const float *window)
{
    const select_windows_of_four<kernel> windows(window);
    const float *x = windows.aligned + windows.before;
    return {static_cast<float>(select_pooled_sum(x, kernel)),
            static_cast<float>(select_pooled_sum(x + 1, kernel)),
            static_cast<float>(select_pooled_sum(x + 2, kernel)),
            static_cast<float>(select_pooled_sum(x + 3, kernel))};
}

/* Largest of them; four at once share most of their work. */
template <int kernel> __device__ __forceinline__ float4 select_max_of_four(const float *window)
{
    const select_windows_of_four<kernel> windows(window);
    const float *x = windows.aligned + windows.before;
    if constexpr (kernel == 1)
        return {x[0], x[1], x[2], x[3]};
    float common = x[3]; /* x[3] to x[kernel - 1] are in all four */
#pragma unroll
    for (int i = 4; i < kernel; i++)
        common = fmaxf(common, x[i]);
    const float left = fmaxf(x[1], x[2]);
    const float right = fmaxf(x[kernel], x[kernel + 1]);
    return {fmaxf(common, fmaxf(x[0], left)), fmaxf(common, fmaxf(left, x[kernel])),
            fmaxf(common, fmaxf(x[2], right)), fmaxf(common, fmaxf(right, x[kernel + 2]))};
}

__device__ inline float select_max_of(const float *window, uint32_t kernel)
{
    float best = window[0];
    for (uint32_t i = 1; i < kernel; i++)
        best = fmaxf(best, window[i]);
    return best;
}

/* ---- the first digit ---- */

/* Bins of equal parts of octaves, half of them above the largest of 32 scores that every block of a
 * crew looks at. How fine they are goes by how far that one is from the mean of the 32, so that a
 * bin has a few thousandths of the tokens, whether their scores are within half an octave of each
 * other or spread over dozens. The first and the last bin have what is outside the window. */
constexpr int select_finest_shift = 13;   /* 1,024ths of octaves, two octaves in all */
constexpr int select_coarsest_shift = 19; /* sixteenths */

struct select_window {
    int shift;
    int base;
};

/* By a whole warp, of what its lanes have sampled, as select_raw_bits(). */
__device__ __forceinline__ select_window select_window_of(unsigned sampled)
{
    const unsigned most = __reduce_max_sync(~0u, sampled);
    const unsigned mean = __reduce_add_sync(~0u, sampled >> 5);
    /* Four to eight times the distance between the two are in the window. */
    const int shift = min(max(23 - __clz(most - mean), select_finest_shift), select_coarsest_shift);
    return {shift, static_cast<int>(most >> shift) - select_bins / 2};
}

/* The score that a lane samples, as the scorer left it. Of several heads not the first's: means may
 * be written there already. */
__device__ __forceinline__ float select_sampled(const select_task &t, uint32_t at)
{
    if (!t.rows)
        return t.scores[at];
    const uint32_t head = t.heads > 1 ? 1 + threadIdx.x % 32 % (t.heads - 1) : 0;
    return t.rows[head * static_cast<size_t>(t.stride) + at];
}

/* Where. */
__device__ __forceinline__ uint32_t select_sample_at(const select_task &t)
{
    return (2 * (threadIdx.x % 32) + 1) * t.n >> 6;
}

__device__ inline int select_first_shift(const select_task &t)
{
    return t.shift;
}

__device__ inline unsigned select_window_bin(const select_task &t, unsigned key)
{
    const int bin = static_cast<int>(key >> t.shift) - t.base;
    return static_cast<unsigned>(min(max(bin, 0), select_bins - 1));
}

__device__ inline bool select_is_end(const select_task &, unsigned bin)
{
    return bin == 0 || bin == select_bins - 1;
}

/* The lowest key in a bin that is no end. */
__device__ inline unsigned select_lowest_in(const select_task &t, unsigned bin)
{
    return (bin + static_cast<unsigned>(t.base)) << t.shift;
}

/* ---- keys ---- */

__device__ inline unsigned select_raw_bits(float raw)
{
    return __float_as_uint(raw + 0.0f) & 0x7fffffffu; /* -0 equals +0 */
}

/* That of token i; equal for all where only the pooled score counts. */
__device__ inline unsigned select_raw_of(const select_task &t, uint32_t i)
{
    return t.second ? 0 : select_raw_bits(t.scores[i]);
}

/* The same, of a candidate. */
__device__ inline unsigned select_listed_raw(const select_task &, const select_part &p, uint32_t i)
{
    return p.raw ? select_raw_bits(p.raw[i - p.raw_first]) : 0;
}

__device__ inline bool select_has_second(const select_task &t)
{
    return t.average || t.mask;
}

/* A token's number in the order that decides last, and back. */
__device__ inline uint32_t select_order(const select_task &, uint32_t i)
{
    return i;
}

__device__ inline uint32_t select_token_of(const select_task &, uint32_t order)
{
    return order;
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

/* The key of token i, whatever it is. `window` is where its pooling window starts; scores outside
 * the scope of pooling are 0 there, and such tokens are their own pooled score (for an average,
 * whose sums are compared, the sum of a window full of it). */
static __device__ __noinline__ unsigned select_any_key(const select_task &t, uint32_t i,
                                                       const float *window)
{
    const bool pooled = i >= t.scope_begin && i < t.scope_end;
    const float raw = pooled ? window[t.kernel / 2] : t.scores[i];
    float score = raw;
    if (t.average)
        score = static_cast<float>(pooled ? select_pooled_sum(window, t.kernel)
                                          : static_cast<double>(raw) * t.kernel);
    else if (pooled)
        score = select_max_of(window, t.kernel);
    if (t.scores_out)
        t.scores_out[i] = raw * t.descale * t.descale;
    return select_key(t, i, score);
}

/* Where the score of a token outside the scope of pooling is kept. */
__device__ __forceinline__ uint32_t select_outside_at(const select_task &t, uint32_t i)
{
    return i < t.scope_begin ? i : select_outside + i - t.scope_end;
}

/* Turns the bits of the pooled scores of tokens i .. i+3, of a task with edges, to their keys;
 * those past the end get 0. Short, since it is executed once. */
static __device__ __noinline__ void select_edge_keys(const select_task &t, uint32_t i,
                                                     unsigned *keys, const float *outside)
{
#pragma unroll 1
    for (const unsigned *end = keys + 4; keys < end; keys++, i++) {
        unsigned bits = *keys;
        if (i >= t.n) {
            *keys = 0;
            continue;
        }
        if (i < t.scope_begin || i >= t.scope_end) { /* its own pooled score */
            const float raw = outside[select_outside_at(t, i)];
            bits = select_raw_bits(
                t.average ? static_cast<float>(static_cast<double>(raw) * t.kernel) : raw);
        }
        *keys = i < t.protected_end || i >= t.protected_begin ? bits | 0x80000000u : bits + 2;
    }
}

/* The pooled scores of four tokens, of which the first one's window is given, as bits. */
template <int kernel, bool average>
__device__ __forceinline__ uint4 select_pooled_bits(const float *window)
{
    const float4 pooled = average ? select_sums_of_four<kernel>(window)
                                  : select_max_of_four<kernel>(window);
    return {select_raw_bits(pooled.x), select_raw_bits(pooled.y), select_raw_bits(pooled.z),
            select_raw_bits(pooled.w)};
}

/* Keys of tokens i .. i+3, all inside the scope of pooling or past the end (those get 0), of a unit
 * whose classes go by position alone. `bits` are their pooled scores'. */
__device__ __forceinline__ uint4 select_plain_keys(const select_task &t, uint32_t i,
                                                   const uint4 &bits)
{
    const auto key = [&](uint32_t token, unsigned b) {
        if (token >= t.n)
            return 0u;
        return token < t.protected_end || token >= t.protected_begin ? b | 0x80000000u : b + 2;
    };
    return {key(i, bits.x), key(i + 1, bits.y), key(i + 2, bits.z), key(i + 3, bits.w)};
}

#endif
