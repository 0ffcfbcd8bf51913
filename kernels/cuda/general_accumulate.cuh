/* The general scorer's first pass: each row's softmax over a range of keys, and the weighted sum of
 * the range's values, with the row's largest key left out. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_ACCUMULATE_CUH
#define DKV_KERNELS_CUDA_GENERAL_ACCUMULATE_CUH

#include "kernels/cuda/general_softmax.cuh"

namespace
{

/* The window's keys count in an averaged row's softmax, their values do not in its output. */
__device__ void leave_out(const dkv_cu_block &block, float *weights, int lane, uint32_t first_key)
{
    for (int i = lane; i < tile_keys; i += 32)
        if (left_out(block, first_key + i))
            weights[i] = 0.0f;
}

/* `chunks` of 64 values; 0: the rule does not read them. */
template <int chunks>
__global__ void __launch_bounds__(threads, 2) accumulate(work_list work, bool rounded)
{
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float warp_largest[threads / 32];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    if (rounded && !rounds_output(block))
        return;
    const layout l = layout_of(block);
    const uint32_t n_chunks = ceil_div(l.rows, chunk_rows);
    const uint32_t item = blockIdx.x - work.first_item[index];
    const uint32_t range = item / n_chunks;
    const uint32_t first_row = item % n_chunks * chunk_rows;
    const uint32_t range_end = min(block.n_valid, (range + 1) * l.range_keys);
    const shared_tiles s = carve(memory, block.head_dim);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const dkv_cu_unit *report_to = rounded ? nullptr : &unit;
    const row_result *results = reinterpret_cast<row_result *>(unit.work + l.results);

    partial state[4];
    float sums[4][chunks > 0 ? 2 * chunks : 1] = {};
    float largest = 0;
    for (int r = 0; r < 4; r++)
        state[r] = {-INFINITY, -1, -INFINITY, 0.0f};
    load_query(block, unit, s, first_row, l.rows);
    if (chunks > 0)
        load_center(block, unit, s.center);

    for (uint32_t first_key = range * l.range_keys; first_key < range_end; first_key += tile_keys) {
        __syncthreads();
        find_rows(block, unit, s, first_key, range_end);
        float z[2][4];
        products(block, unit, s, report_to, first_key, z);
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++) {
                const int row = threadIdx.x / 16 + 16 * r;
                const int slot = threadIdx.x % 16 + 16 * k;
                const bool visible = s.key_rows[slot] &&
                                     sees(block, first_row + row, first_key + slot);
                const float logit_here = logit(block, z[r][k]);
                if (visible && !dkv_cu_finite(logit_here) && first_row + row < l.rows)
                    atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
                s.terms[row * tile_stride + slot] = visible ? logit_here : -INFINITY;
            }
        __syncthreads();

#pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint32_t row = first_row + warp * 4 + r;
            float *terms = s.terms + (warp * 4 + r) * tile_stride;
            const rescale change = !rounded
                                       ? absorb(state[r], terms, lane, static_cast<int>(first_key))
                                   : row < l.rows
                                       ? absorb_rounded(results[row], block.q_dtype, terms, lane,
                                                        static_cast<int>(first_key))
                                       : rescale{1.0f, 0.0f, -1};
#pragma unroll
            for (int c = 0; c < chunks; c++) {
                sums[r][2 * c] *= change.keep;
                sums[r][2 * c + 1] *= change.keep;
            }
            if (chunks > 0 && change.join_weight > 0 && /* the whole warp agrees */
                !left_out(block, change.join_key))
                join_value(block, unit, change, s.center, lane, sums[r]);
            if (chunks > 0 && left_out(block, first_key + tile_keys - 1))
                leave_out(block, terms, lane, first_key);
        }

#pragma unroll
        for (int c = 0; c < chunks; c++) {
            if (c * chunk_dims >= block.v_dim)
                break;
            __syncthreads();
            largest = fmaxf(largest, load_tile(block.v, s.value_rows, s, unit.v_scale, s.center,
                                               c * chunk_dims, block.v_dim, report_to, 2,
                                               block.valid_from + first_key));
            __syncthreads();
#pragma unroll 2
            for (int slot = 0; slot < tile_keys; slot += 4) {
                float2 v[4];
                for (int i = 0; i < 4; i++)
                    v[i] = *reinterpret_cast<const float2 *>(s.tile + (slot + i) * tile_stride +
                                                             lane * 2);
                for (int r = 0; r < 4; r++) {
                    const float4 p = *reinterpret_cast<const float4 *>(
                        s.terms + (warp * 4 + r) * tile_stride + slot);
                    const float weights[4] = {p.x, p.y, p.z, p.w};
                    for (int i = 0; i < 4; i++) {
                        sums[r][2 * c] = fmaf(weights[i], v[i].x, sums[r][2 * c]);
                        sums[r][2 * c + 1] = fmaf(weights[i], v[i].y, sums[r][2 * c + 1]);
                    }
                }
            }
        }
    }

    float *partials = reinterpret_cast<float *>(unit.work) +
                      static_cast<size_t>(range) * l.rows * l.partial_floats;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint32_t row = first_row + warp * 4 + r;
        if (row >= l.rows)
            continue;
        float *to = partials + static_cast<size_t>(row) * l.partial_floats;
        if (lane == 0)
            *reinterpret_cast<partial *>(to) = state[r];
#pragma unroll
        for (int c = 0; c < chunks; c++)
            if (const uint32_t dim = c * chunk_dims + lane * 2; dim < block.v_dim)
                *reinterpret_cast<float2 *>(to + sizeof(partial) / sizeof(float) +
                                            dim) = make_float2(sums[r][2 * c], sums[r][2 * c + 1]);
    }
    for (int step = 16; step; step >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (lane == 0)
        warp_largest[warp] = largest;
    __syncthreads();
    if (threadIdx.x == 0 && first_row == 0 && !rounded) {
        for (int w = 1; w < threads / 32; w++)
            largest = fmaxf(largest, warp_largest[w]);
        reinterpret_cast<float *>(unit.work + l.value_max)[range] = largest;
    }
}

} // namespace

#endif
