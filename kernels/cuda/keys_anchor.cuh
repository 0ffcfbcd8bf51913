/* The anchor of keydiff: the sum of a unit's keys, each over its length or as it is.
 *
 * A thread block sums a range of keys, which depends on the block's length alone, and leaves it in
 * unit.work; the last one of a unit adds up all ranges, in order, and leaves their direction. Few
 * keys at a time are added in float32, everything else in double precision: the sum may be small
 * where its terms are not. Included by keys.cu.
 */
#ifndef DKV_KERNELS_CUDA_KEYS_ANCHOR_CUH
#define DKV_KERNELS_CUDA_KEYS_ANCHOR_CUH

#include "kernels/cuda/keys_rows.cuh"

namespace
{

constexpr uint32_t max_ranges = 32;
constexpr uint32_t min_range_keys = 256;

/* Under way, of a lane: fewer than for scores, since sums take registers. */
template <class way> constexpr int anchor_loads = way::loads / 2;

__host__ __device__ inline uint32_t range_keys(uint32_t n)
{
    const uint32_t keys = (n + max_ranges - 1) / max_ranges;
    return keys < min_range_keys ? min_range_keys : (keys + 63) & ~63u;
}

__host__ __device__ inline uint32_t ranges_of(uint32_t n)
{
    return (n + range_keys(n) - 1) / range_keys(n);
}

/* Where things are in unit.work: the anchor's direction, 0 if it has none, then the ranges' sums;
 * [head_dim] each. */
struct anchor_memory {
    float *direction;
    double *ranges;
};

__device__ inline anchor_memory memory_of(const job &work)
{
    return {reinterpret_cast<float *>(work.unit.work),
            reinterpret_cast<double *>(work.unit.work) + DKV_HEAD_DIM_MAX / 2};
}

__host__ __device__ inline size_t anchor_bytes(uint32_t n, uint32_t head_dim)
{
    return sizeof(double) * (DKV_HEAD_DIM_MAX / 2 + static_cast<size_t>(ranges_of(n)) * head_dim);
}

/* Shared memory of a thread block. */
struct anchor_state {
    double sums[warps / 2][DKV_HEAD_DIM_MAX];
    double squares[warps];
    unsigned is_last;
};

/* A lane's sums; handed over by value, so that they stay in registers. */
template <int rounds> struct lane_sums {
    double x[rounds][8];
};

/* Adds a batch of keys in double precision. */
template <class way>
__device__ __noinline__ lane_sums<way::rounds> add_slowly(const job &work, uint32_t first,
                                                          uint32_t end, lane_sums<way::rounds> sums)
{
    constexpr uint32_t step = 32 / way::lanes;
#pragma unroll 1
    for (int i = 0; i < anchor_loads<way>; i++) {
        const uint32_t key = first + i * step + lane_of() / way::lanes;
        const auto part = load_slowly<way::lanes, way::rounds>(work, key, end);
        const double length = work.block.plain_anchor ? 1.0 : length_of(part);
        const double weight = length > 0 ? 1.0 / length : 0.0;
#pragma unroll
        for (int r = 0; r < way::rounds; r++)
            for (int e = 0; e < 8; e++)
                sums.x[r][e] = fma(weight, static_cast<double>(part.x[r][e]), sums.x[r][e]);
    }
    return sums;
}

/* Adds a batch of keys; false, and nothing is added, if a square or a key is not for float32. */
template <class way>
__device__ __forceinline__ bool add_fast(const job &work, uint32_t first, uint32_t end,
                                         lane_sums<way::rounds> &sums)
{
    constexpr uint32_t step = 32 / way::lanes;
    const uint32_t mine = first + lane_of() / way::lanes;
    const unsigned char *rows[anchor_loads<way>];
    eight_elements<way::dtype> parts[anchor_loads<way>];
    find_rows(work, mine, step, end, lane_of() % way::lanes * 8, rows);
#pragma unroll
    for (int i = 0; i < anchor_loads<way>; i++)
        fetch(rows[i], parts[i]);
    const bool plain = work.block.plain_anchor;
    bool fine = true;
    float of_batch[8] = {};
#pragma unroll
    for (int i = 0; i < anchor_loads<way>; i++) {
        float x[8];
        unpack(parts[i], x);
        float square = square_of(x);
        float weight = 1.0f;
        if (!plain) {
            square = sum_of_key<way::lanes>(square);
            weight = square > 0 ? rsqrtf(square) : 0.0f;
            fine = fine && (square > least_square || mine + i * step >= end);
        }
        fine = fine && square < most_square;
#pragma unroll
        for (int e = 0; e < 8; e++)
            of_batch[e] = fmaf(weight, x[e], of_batch[e]);
    }
    if (!__all_sync(~0u, fine))
        return false;
#pragma unroll
    for (int e = 0; e < 8; e++)
        sums.x[0][e] += static_cast<double>(of_batch[e]);
    return true;
}

/* The thread block's sum of keys first .. end-1, to `to`. */
template <class way>
__device__ __forceinline__ void add_range(const job &work, uint32_t first, uint32_t end,
                                          anchor_state &s, double *to)
{
    constexpr uint32_t batch = anchor_loads<way> * 32 / way::lanes;
    const uint32_t warp = threadIdx.x / 32;
    lane_sums<way::rounds> sums = {};
#pragma unroll 1
    for (uint32_t key = first + warp * batch; key < end; key += warps * batch) {
        if constexpr (way::fast)
            if (add_fast<way>(work, key, end, sums))
                continue;
        sums = add_slowly<way>(work, key, end, sums);
    }
    for (int turn = 1; turn >= 0; turn--) { /* the upper half of the warps, then the lower */
#pragma unroll
        for (int r = 0; r < way::rounds; r++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                double sum = sums.x[r][e];
#pragma unroll
                for (int step = way::lanes; step < 32; step *= 2)
                    sum += __shfl_xor_sync(~0u, sum, step);
                double &at =
                    s.sums[warp % (warps / 2)][lane_of() % way::lanes * 8 + r * way::lanes * 8 + e];
                if (warp / (warps / 2) == turn && lane_of() < way::lanes)
                    at = turn == 1 ? sum : at + sum;
            }
        __syncthreads();
    }
    for (uint32_t dim = threadIdx.x; dim < work.block.head_dim; dim += threads) {
        double sum = 0;
        for (uint32_t w = 0; w < warps / 2; w++)
            sum += s.sums[w][dim];
        to[dim] = sum;
    }
}

/* True in the thread block that is the unit's last one, which sees what the others left. */
__device__ inline bool is_last(unsigned *counter, uint32_t n, anchor_state &s)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        s.is_last = atomicAdd(counter, 1u) + 1 == n;
    __syncthreads();
    if (!s.is_last)
        return false;
    __threadfence();
    return true;
}

/* Adds up the ranges, several threads a dimension, and writes their direction. */
__device__ inline void settle(const job &work, anchor_state &s)
{
    const anchor_memory memory = memory_of(work);
    const uint32_t dims = work.block.head_dim;
    const uint32_t n_ranges = ranges_of(work.block.n_valid);
    const uint32_t slices = min(threads / dims, warps / 2); /* one at least */
    const uint32_t slice = threadIdx.x / dims;
    const uint32_t dim = threadIdx.x % dims;
    if (slice < slices) {
        double sum = 0;
#pragma unroll 8
        for (uint32_t range = slice; range < n_ranges; range += slices)
            sum += __ldcg(memory.ranges + static_cast<size_t>(range) * dims + dim);
        s.sums[slice][dim] = sum;
    }
    __syncthreads();
    double sum = 0;
    for (uint32_t i = 0; i < slices && threadIdx.x < dims; i++)
        sum += s.sums[i][threadIdx.x];
    const double square = sum_of_key<32>(sum * sum);
    if (lane_of() == 0)
        s.squares[threadIdx.x / 32] = square;
    __syncthreads();
    double length = 0;
    for (uint32_t w = 0; w < warps; w++)
        length += s.squares[w];
    length = sqrt(length);
    if (threadIdx.x < dims)
        memory.direction[threadIdx.x] = length > 0 ? static_cast<float>(sum / length) : 0.0f;
}

} // namespace

#endif
