/* Terms of the attention scorer's crews: 2^(logit - base), what a lane keeps of them, and how they
 * become scores. Included by attention_crew.cuh. */
#ifndef DKV_KERNELS_CUDA_ATTENTION_CREW_TERMS_CUH
#define DKV_KERNELS_CUDA_ATTENTION_CREW_TERMS_CUH

#include "kernels/cuda/attention_crew_tiles.cuh"
#include "kernels/cuda/attention_score.cuh"
#include "kernels/cuda/attention_weigh.cuh"

namespace
{

/* A lane's slots: sum of 2^(logit - base) over the keys it has had. */
template <int columns> struct crew_softmax {
    float base[2 * columns];
    float sum[2 * columns];
};

/* A sum beyond this asks for new bases; none of its terms is lost before. */
constexpr float sum_max = 1099511627776.0f; /* 2^40 */
/* Factors below 2^ this are put into the terms, lest they be 0 where p is not. */
constexpr float factor_min = -60.0f;

/* ---- kept terms ---- */

/* A thread's own. */
template <class shape> struct kept_terms {
    uint32_t tiles; /* shared address of tile 0 */
    /* The last tile's come first. */
    crew_values<shape::columns> held[shape::held_tiles > 0 ? shape::held_tiles : 1];
};

template <class shape>
__device__ inline void store_terms(const kept_terms<shape> &kept, int t,
                                   const crew_values<shape::columns> &x)
{
#pragma unroll
    for (int j = 0; j < shape::columns; j++)
        dkv_fast::store_shared(kept.tiles + t * shape::kept_bytes + j * group_threads * 16, x[j][0],
                               x[j][1], x[j][2], x[j][3]);
}

template <class shape>
__device__ inline void load_terms(const kept_terms<shape> &kept, int t,
                                  crew_values<shape::columns> &x)
{
#pragma unroll
    for (int j = 0; j < shape::columns; j++)
        dkv_fast::load_shared(kept.tiles + t * shape::kept_bytes + j * group_threads * 16, x[j]);
}

template <class shape>
__device__ inline void push_terms(kept_terms<shape> &kept, const crew_values<shape::columns> &x)
{
#pragma unroll
    for (int k = 0; k < 4 * shape::columns; k++) {
#pragma unroll
        for (int h = shape::held_tiles - 1; h > 0; h--)
            kept.held[h][k / 4][k % 4] = kept.held[h - 1][k / 4][k % 4];
        kept.held[0][k / 4][k % 4] = x[k / 4][k % 4];
    }
}

template <class shape>
__device__ inline void pop_terms(kept_terms<shape> &kept, crew_values<shape::columns> &x)
{
#pragma unroll
    for (int k = 0; k < 4 * shape::columns; k++) {
        x[k / 4][k % 4] = kept.held[0][k / 4][k % 4];
#pragma unroll
        for (int h = 0; h + 1 < shape::held_tiles; h++)
            kept.held[h][k / 4][k % 4] = kept.held[h + 1][k / 4][k % 4];
    }
}

/* Moves bases down by `shift` octaves (at most 0): all terms so far, of `n` tiles, times 2^shift,
 * by halves, since those of a lane with large terms may be representable where the factor is not.
 */
template <class shape>
__device__ __forceinline__ void shift_terms(kept_terms<shape> &kept, int n,
                                            const float (&shift)[2 * shape::columns])
{
    constexpr int columns = shape::columns;
    float root[2 * columns];
#pragma unroll
    for (int k = 0; k < 2 * columns; k++)
        root[k] = exp2_fast(0.5f * shift[k]);
#pragma unroll 1
    for (int t = 0; t < n && t < shape::kept_tiles; t++) {
        crew_values<columns> x;
        load_terms(kept, t, x);
#pragma unroll
        for (int k = 0; k < 4 * columns; k++)
            x[k / 4][k % 4] = x[k / 4][k % 4] * root[k / 4 * 2 + k % 2] * root[k / 4 * 2 + k % 2];
        store_terms(kept, t, x);
    }
    if (n <= shape::kept_tiles)
        return;
#pragma unroll
    for (int h = 0; h < shape::held_tiles; h++)
#pragma unroll
        for (int k = 0; k < 4 * columns; k++)
            kept.held[h][k / 4][k % 4] *= root[k / 4 * 2 + k % 2] * root[k / 4 * 2 + k % 2];
}

/* ---- making them ---- */

/* Logits, times `scale`, to terms. */
template <int columns>
__device__ inline void make_terms(const crew_softmax<columns> &softmax, float scale,
                                  const crew_values<columns> &x, crew_values<columns> &terms_out)
{
#pragma unroll
    for (int k = 0; k < 4 * columns; k++)
        terms_out[k / 4][k % 4] = exp2_fast(
            fmaf(x[k / 4][k % 4], scale, -softmax.base[k / 4 * 2 + k % 2]));
}

/* Takes as bases what the sums or this tile have reached. */
template <class shape>
__device__ __forceinline__ void raise_bases(crew_softmax<shape::columns> &softmax,
                                            kept_terms<shape> &kept, int t, float scale,
                                            const crew_values<shape::columns> &x)
{
    float shift[2 * shape::columns];
#pragma unroll
    for (int k = 0; k < 2 * shape::columns; k++) {
        const float sum = softmax.base[k] + fmaxf(dkv_fast::log2_fast(softmax.sum[k]), 0.0f);
        const float top = fmaxf(scale * x[k / 2][k % 2], scale * x[k / 2][2 + k % 2]);
        const float base = fmaxf(sum, top);
        shift[k] = softmax.base[k] - base;
        softmax.sum[k] *= exp2_fast(shift[k]);
        softmax.base[k] = base;
    }
    shift_terms(kept, t, shift);
}

/* The first bases: what the first tile reaches. */
template <int columns>
__device__ inline void set_bases(crew_softmax<columns> &softmax, float scale,
                                 const crew_values<columns> &x)
{
#pragma unroll
    for (int k = 0; k < 2 * columns; k++)
        softmax.base[k] = fmaxf(nothing.top,
                                fmaxf(scale * x[k / 2][k % 2], scale * x[k / 2][2 + k % 2]));
}

/* Adds tile t, the group's next, and keeps its terms. */
template <class shape>
__device__ inline void absorb_tile(crew_softmax<shape::columns> &softmax, kept_terms<shape> &kept,
                                   int t, float scale, const crew_values<shape::columns> &x)
{
    constexpr int columns = shape::columns;
    crew_values<columns> e;
    float largest = 0;
    if (t == 0)
        set_bases<columns>(softmax, scale, x);
    make_terms<columns>(softmax, scale, x, e);
#pragma unroll
    for (int k = 0; k < 2 * columns; k++)
        largest = fmaxf(largest, softmax.sum[k] + (e[k / 2][k % 2] + e[k / 2][2 + k % 2]));
    if (__any_sync(~0u, largest > sum_max)) {
        raise_bases(softmax, kept, t, scale, x);
        make_terms<columns>(softmax, scale, x, e);
    }
#pragma unroll
    for (int k = 0; k < 2 * columns; k++)
        softmax.sum[k] += e[k / 2][k % 2] + e[k / 2][2 + k % 2];
    if (t < shape::kept_tiles)
        store_terms(kept, t, e);
    else if (shape::held_tiles > 0)
        push_terms(kept, e);
}

/* ---- scores ---- */

/* How a lane's terms become scores. */
template <int columns> struct crew_fold {
    float factor[2 * columns]; /* of a term; a sum's weights are in it unless p is rounded */
    uint32_t counts;           /* bit k: the slot is a row's */
    bool rounded;
    bool largest; /* over heads */
    uint32_t window;
    float per_row;  /* 1 / window */
    float per_gap;  /* gamma / (window - 1); 0: one row */
    float per_head; /* what a mean over heads divides by, inverse */
};

template <class shape, int fold>
__device__ __forceinline__ crew_fold<shape::columns> fold_of(const job &work, const crew_place &at,
                                                             const row_result *results, int n,
                                                             crew_softmax<shape::columns> &softmax,
                                                             kept_terms<shape> &kept)
{
    constexpr int columns = shape::columns;
    const dkv_cu_block &block = work.block;
    const bool mean = block.gqa == DKV_GQA_MEAN || block.gqa == DKV_GQA_LAYER;
    const float window = static_cast<float>(block.window);
    crew_fold<columns> of;
    float shift[2 * columns];
    float lowest = 0;
    of.counts = 0;
    of.rounded = block.p_round != 0;
    of.largest = block.gqa == DKV_GQA_MAX;
    of.window = block.window;
    of.per_row = dkv_fast::rcp_fast(window);
    of.per_gap = block.window > 1 ? block.gamma * dkv_fast::rcp_fast(window - 1.0f) : 0.0f;
    of.per_head = mean ? dkv_fast::rcp_fast(static_cast<float>(block.group)) : 1.0f;
#pragma unroll
    for (int k = 0; k < 2 * columns; k++) {
        const row_result row = results[k / 2 * 8 + at.column + k % 2];
        shift[k] = row.inverse > 0 ? softmax.base[k] - row.top : 0.0f;
        lowest = fminf(lowest, shift[k]);
        of.counts |= static_cast<uint32_t>(row.weight != 0) << k;
        of.factor[k] = row.inverse;
        if (fold == fold_sum && !of.rounded)
            of.factor[k] *= row.weight;
    }
    if (__any_sync(~0u, lowest < factor_min)) {
        shift_terms(kept, n, shift);
#pragma unroll
        for (int k = 0; k < 2 * columns; k++) {
            softmax.base[k] -= shift[k];
            shift[k] = 0;
        }
    }
#pragma unroll
    for (int k = 0; k < 2 * columns; k++)
        of.factor[k] *= exp2_fast(shift[k]);
    return of;
}

/* Of two keys' values the sum or maximum over the four lanes that have them; lane % 2 says whose a
 * lane gets. */
template <bool largest> __device__ inline float fold_four_lanes(float a, float b)
{
    const bool odd = threadIdx.x & 1;
    const float one = fold_two<largest>(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 1));
    return fold_two<largest>(one, __shfl_xor_sync(~0u, one, 2));
}

/* A head's mean and variance from two keys' sums over a lane's rows of differences to the pivot,
 * and of their squares. */
template <int columns>
__device__ inline float fold_head(const crew_fold<columns> &of, const float (&pivot)[2],
                                  const float (&gaps)[2], const float (&squares)[2])
{
    const bool upper = threadIdx.x & 2; /* these lanes get the squares */
    const bool odd = threadIdx.x & 1;
    float mine[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        mine[half] = (upper ? squares[half] : gaps[half]) +
                     __shfl_xor_sync(~0u, upper ? gaps[half] : squares[half], 2);
    const float one = (odd ? mine[1] : mine[0]) + __shfl_xor_sync(~0u, odd ? mine[0] : mine[1], 1);
    const float other = __shfl_xor_sync(~0u, one, 2);
    const float all_gaps = upper ? other : one;
    const float mean_gap = all_gaps * of.per_row;
    const float spread = fmaxf(fmaf(-all_gaps, mean_gap, upper ? one : other), 0.0f);
    return fmaf(of.per_gap, spread, (odd ? pivot[1] : pivot[0]) + mean_gap);
}

/* By query head: mean and variance of p. Squares are of differences to the head's first row: since
 * that is one of the values, what cancels afterwards is at most `window` times the result. */
template <int columns>
__device__ inline float fold_heads(const crew_fold<columns> &of, const crew_values<columns> &p)
{
    float pivot[2] = {}, gaps[2] = {}, squares[2] = {};
    float heads = 0;
    uint32_t t = 0; /* rows of the head so far */
#pragma unroll
    for (int j = 0; j < columns; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (t == 0) {
                pivot[half] = __shfl_sync(~0u, p[j][half * 2], threadIdx.x % 32 & ~3u);
                gaps[half] = squares[half] = 0;
            }
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float gap = of.counts >> (2 * j + c) & 1 ? p[j][half * 2 + c] - pivot[half]
                                                               : 0.0f;
                gaps[half] += gap;
                squares[half] = fmaf(gap, gap, squares[half]);
            }
        }
        t += 8;
        if (t < of.window)
            continue;
        t = 0;
        const float head = fold_head<columns>(of, pivot, gaps, squares);
        heads = of.largest ? fmaxf(heads, head) : heads + head;
    }
    return heads;
}

/* A tile's terms to one number a key, which lanes 0 and 1 of four have. */
template <class shape, int fold>
__device__ inline float fold_terms(const crew_fold<shape::columns> &of, const row_result *results,
                                   const crew_place &at, crew_values<shape::columns> &x)
{
    constexpr int columns = shape::columns;
    float of_key[2] = {};
    if (fold == fold_sum && !of.rounded) {
#pragma unroll
        for (int k = 0; k < 4 * columns; k++)
            of_key[k % 4 / 2] = fmaf(x[k / 4][k % 4], of.factor[k / 4 * 2 + k % 2],
                                     of_key[k % 4 / 2]);
        return fold_four_lanes<false>(of_key[0], of_key[1]);
    }
#pragma unroll
    for (int k = 0; k < 4 * columns; k++)
        x[k / 4][k % 4] *= of.factor[k / 4 * 2 + k % 2];
    if (of.rounded)
#pragma unroll
        for (int k = 0; k < 4 * columns; k++)
            x[k / 4][k % 4] = dkv_cu_round(x[k / 4][k % 4], shape::bf16 ? DKV_BF16 : DKV_FP16);
    if constexpr (fold == fold_variance) {
        return fold_heads<columns>(of, x);
    } else {
#pragma unroll
        for (int k = 0; k < 4 * columns; k++) {
            float &so_far = of_key[k % 4 / 2];
            const float p = x[k / 4][k % 4];
            so_far = fold == fold_max
                         ? fmaxf(so_far, p)
                         : fmaf(p, results[k / 4 * 8 + at.column + k % 2].weight, so_far);
        }
        return fold_four_lanes<fold == fold_max>(of_key[0], of_key[1]);
    }
}

/* store_score() without a division. */
template <int columns>
__device__ inline void store_total(const job &work, const crew_fold<columns> &of, uint32_t key,
                                   float total)
{
    const dkv_cu_block &block = work.block;
    if (key >= block.n_valid)
        return;
    total *= of.per_head;
    if (block.reduce == DKV_REDUCE_MEAN_SEEN)
        total /= static_cast<float>(min(block.n_valid - key, block.window));
    if (!dkv_cu_finite(total))
        atomicOr(&work.unit.report->flags, DKV_CU_OVERFLOW);
    work.unit.scores[key] = total;
}

} // namespace

#endif
