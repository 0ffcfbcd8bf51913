/* The general scorer's second pass, what rules differ in: terms of rows and keys, and how rows are
 * reduced. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_TERMS_CUH
#define DKV_KERNELS_CUDA_GENERAL_TERMS_CUH

#include "kernels/cuda/general_tiles.cuh"

namespace
{

/* ---- terms ---- */

/* p / (1 - p), as the block's profile wants it, for every key but the row's largest. */
__device__ float odds(const dkv_cu_block &block, float p)
{
    const float front = block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    return block.eps == 0 ? front / (1.0f - p) : front / (1.0f - front + block.eps);
}

/* The term of a row and a key that is not the row's largest, from p and what `against` has. */
template <int form>
__device__ float term_of(const dkv_cu_block &block, float p, float against, float factor)
{
    if (form == DKV_CU_FORM_P)
        return block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    if (form == DKV_CU_FORM_PROJ)
        return (block.p_round ? dkv_cu_round(p, block.q_dtype) : p) * against;
    if (form == DKV_CU_FORM_DIST)
        return odds(block, p) * sqrtf(against);
    const float x = odds(block, p) * factor;
    return x * x * against;
}

/* Loads dimensions first_dim.. of 32 vectors of v_dim floats, from vector `first` on, to s.terms.
 */
__device__ void load_vectors(const float *vectors, uint32_t first, uint32_t count,
                             uint32_t first_dim, uint32_t dims, const shared_tiles &s)
{
    for (int i = threadIdx.x; i < chunk_rows * chunk_dims; i += threads) {
        const uint32_t row = first + i / chunk_dims;
        const uint32_t at = first_dim + i % chunk_dims;
        s.terms[i / chunk_dims * tile_stride + i % chunk_dims] =
            row < count && at < dims ? vectors[static_cast<size_t>(row) * dims + at] : 0.0f;
    }
}

/* |a - v|^2, or a . v, of 32 of `count` vectors a and 64 keys, for the thread's 2 x 4 of them. */
template <bool product>
__device__ void hold_against(const dkv_cu_block &block, const dkv_cu_unit &unit,
                             const shared_tiles &s, const float *vectors, uint32_t first,
                             uint32_t count, float (&out)[2][4])
{
    const int x = threadIdx.x % 16;
    const int y = threadIdx.x / 16;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            out[r][k] = 0;
    for (uint32_t dim = 0; dim < block.v_dim; dim += chunk_dims) {
        __syncthreads();
        load_tile(block.v, s.value_rows, s, unit.v_scale, s.center, dim, block.v_dim, nullptr, 2,
                  0);
        load_vectors(vectors, first, count, dim, block.v_dim, s);
        __syncthreads();
        float sum[2][4][2] = {};
#pragma unroll 4
        for (int d = 0; d < chunk_dims; d += 4) {
            float4 a[2];
            for (int r = 0; r < 2; r++)
                a[r] = *reinterpret_cast<const float4 *>(s.terms + (y + 16 * r) * tile_stride + d);
            for (int k = 0; k < 4; k++) {
                const float4 v = *reinterpret_cast<const float4 *>(s.tile +
                                                                   (x + 16 * k) * tile_stride + d);
                for (int r = 0; r < 2; r++) {
                    const float left[4] = {a[r].x, a[r].y, a[r].z, a[r].w};
                    const float right[4] = {v.x, v.y, v.z, v.w};
                    for (int i = 0; i < 4; i++) {
                        const float gap = left[i] - right[i];
                        sum[r][k][i % 2] = product ? fmaf(left[i], right[i], sum[r][k][i % 2])
                                                   : fmaf(gap, gap, sum[r][k][i % 2]);
                    }
                }
            }
        }
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++)
                out[r][k] += sum[r][k][0] + sum[r][k][1];
    }
}

/* ---- reduction ---- */

/* Over rows, then over query heads. */
enum fold {
    fold_flat,     /* one weighted sum over all of them */
    fold_flat_max, /* one maximum */
    fold_plain,    /* by head: a sum */
    fold_weighted, /* by head: a weighted one */
    fold_max,      /* by head: a maximum */
    fold_variance, /* by head: mean + gamma * unbiased variance */
};

/* One key's rows, in order. */
struct gatherer {
    uint32_t t;
    float head;
    float mean, squares; /* of the head so far, and squared differences to it */
    float total;
    double entropy, variance;
};

template <bool spread> __device__ void note_spread(gatherer &g, float p)
{
    g.t++;
    const float gap = p - g.mean;
    g.mean += gap / static_cast<float>(g.t);
    g.squares = fmaf(gap, p - g.mean, g.squares);
    if (spread)
        g.entropy -= static_cast<double>(p * logf(p + 1e-10f));
}

template <int fold, bool spread>
__device__ void gather(gatherer &g, const dkv_cu_block &block, uint32_t row, float weight,
                       float term)
{
    if (fold == fold_weighted)
        g.head = fmaf(term, weight, g.head);
    else if (fold == fold_max)
        g.head = fmaxf(g.head, term);
    else if (fold == fold_plain)
        g.head += term;
    if (fold == fold_variance || spread)
        note_spread<spread>(g, term);
    if ((row + 1) % block.window != 0)
        return;
    const float variance = block.window > 1 ? g.squares / static_cast<float>(block.window - 1)
                                            : 0.0f;
    const float head = fold == fold_variance ? fmaf(block.gamma, variance, g.mean) : g.head;
    g.total = block.gqa == DKV_GQA_MAX ? fmaxf(g.total, head) : g.total + head;
    if (spread)
        g.variance += variance;
    g.head = g.mean = g.squares = 0;
    g.t = 0;
}

/* The sum of one number per thread of the first 64, in order; to thread 0. */
__device__ double sum_of_keys(double x, double *shared)
{
    __syncthreads();
    if (threadIdx.x < tile_keys)
        shared[threadIdx.x] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; threadIdx.x == 0 && i < tile_keys; i++)
        sum += shared[i];
    return sum;
}

/* layers=cake: what a tile adds to the layer's entropy and variance, over the prefix. */
__device__ void store_spread(const dkv_cu_block &block, const dkv_cu_unit &unit, const layout &l,
                             const shared_tiles &s, uint32_t first_key, const gatherer &g)
{
    const bool counts = first_key + threadIdx.x < block.n_valid - block.window;
    double *shared = reinterpret_cast<double *>(s.tile);
    const double entropy = sum_of_keys(counts ? g.entropy : 0.0, shared);
    const double variance = sum_of_keys(counts ? g.variance : 0.0, shared);
    if (threadIdx.x == 0) {
        double *to = reinterpret_cast<double *>(unit.work + l.spread) + first_key / tile_keys * 2;
        to[0] = entropy;
        to[1] = variance;
    }
}

} // namespace

#endif
