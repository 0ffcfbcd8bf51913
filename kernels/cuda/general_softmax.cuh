/* The general scorer's online softmax: weights relative to the largest logit but one, with the key
 * of the largest left out until a larger one comes. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_SOFTMAX_CUH
#define DKV_KERNELS_CUDA_GENERAL_SOFTMAX_CUH

#include "kernels/cuda/general_tiles.cuh"

namespace
{

/* The largest logit, its key, and the largest of the others. */
struct top_two {
    float first;
    int key;
    float second;
};

__device__ top_two join(const top_two &a, const top_two &b)
{
    const bool b_first = b.first > a.first || (b.first == a.first && b.key < a.key);
    const top_two &win = b_first ? b : a;
    const top_two &lose = b_first ? a : b;
    return {win.first, win.key, fmaxf(win.second, lose.first)};
}

__device__ top_two warp_top_two(top_two mine)
{
    for (int step = 16; step; step >>= 1) {
        const top_two other = {__shfl_xor_sync(~0u, mine.first, step),
                               __shfl_xor_sync(~0u, mine.key, step),
                               __shfl_xor_sync(~0u, mine.second, step)};
        mine = join(mine, other);
    }
    return mine;
}

template <class number> __device__ number warp_sum(number x)
{
    for (int step = 16; step; step >>= 1)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* exp(x - reference), where both may be -inf. */
__device__ float weight(float x, float reference)
{
    return x == -INFINITY ? 0.0f : expf(x - reference);
}

/* One row's softmax over one tile: turns the row's logits in `z` into weights relative to the new
 * state.second and updates the state. What the accumulated sums must be multiplied by, and the
 * weight and key of the value that now joins them, are returned. */
struct rescale {
    float keep;
    float join_weight; /* 0: none joins */
    int join_key;
};

__device__ rescale absorb(partial &state, float *z, int lane, int first_key)
{
    const float x[2] = {z[lane], z[lane + 32]};
    const top_two low = {x[0], first_key + lane, -INFINITY};
    const top_two high = {x[1], first_key + lane + 32, -INFINITY};
    const top_two tile = warp_top_two(join(low, high));

    const bool larger = tile.first > state.top; /* of equals the first stays out */
    const float second = fmaxf(state.second, larger ? fmaxf(state.top, tile.second) : tile.first);
    rescale r = {weight(state.second, second), 0.0f, -1};
    if (larger && state.top_key >= 0) {
        r.join_weight = weight(state.top, second);
        r.join_key = state.top_key;
    }
    float sum = 0;
    for (int i = 0; i < 2; i++) {
        const bool left_out = larger && first_key + lane + 32 * i == tile.key;
        const float p = left_out ? 0.0f : weight(x[i], second);
        z[lane + 32 * i] = p;
        sum += p;
    }
    state.sum = state.sum * r.keep + r.join_weight + warp_sum(sum);
    state.second = second;
    if (larger) {
        state.top = tile.first;
        state.top_key = tile.key;
    }
    return r;
}

/* The same for the second pass of p_round: the final, rounded probabilities of all keys but the
 * row's largest. */
__device__ rescale absorb_rounded(const row_result &row, uint32_t dtype, float *z, int lane,
                                  int first_key)
{
    for (int i = 0; i < 2; i++) {
        float &x = z[lane + 32 * i];
        const bool left_out = first_key + lane + 32 * i == row.top_key;
        x = left_out ? 0.0f : dkv_cu_round(weight(x, row.top) * row.p_top, dtype);
    }
    return {1.0f, 0.0f, -1};
}

/* Adds the value that was left out so far to the lane's columns of one row's sums. */
template <int columns>
__device__ __forceinline__ void join_value(const dkv_cu_block &block, const dkv_cu_unit &unit,
                                           const rescale &change, const float *center, int lane,
                                           float (&sums)[columns])
{
#pragma unroll
    for (int i = 0; i < columns; i++) {
        const uint32_t dim = i / 2 * chunk_dims + lane * 2 + i % 2;
        if (dim < block.v_dim)
            sums[i] = fmaf(change.join_weight, value_at(block, unit, center, change.join_key, dim),
                           sums[i]);
    }
}

} // namespace

#endif
