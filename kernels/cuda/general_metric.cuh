/* value_metric in the general scorer: distances behind a matrix per query head. M v is a product of
 * its own for each head and tile, 32 of its elements at a time. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_METRIC_CUH
#define DKV_KERNELS_CUDA_GENERAL_METRIC_CUH

#include "kernels/cuda/general_terms.cuh"

namespace
{

/* Elements first .. first+31 of M (v - origin) of 64 keys, for query head `head`: thread (y, x) has
 * elements y, y+16 and keys x, x+16, x+32, x+48. `origin` has v_dim floats. */
__device__ void transform_values(const dkv_cu_block &block, const dkv_cu_unit &unit,
                                 const shared_tiles &s, uint32_t head, uint32_t first,
                                 const float *origin, float (&out)[2][4])
{
    const int x = threadIdx.x % 16;
    const int y = threadIdx.x / 16;
    const float *matrix = unit.metric + static_cast<size_t>(head) * block.v_dim * block.v_dim;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            out[r][k] = 0;
    for (uint32_t dim = 0; dim < block.v_dim; dim += chunk_dims) {
        __syncthreads();
        load_tile(block.v, s.value_rows, s, unit.v_scale, origin, dim, block.v_dim, nullptr, 2, 0);
        load_vectors(matrix, first, block.v_dim, dim, block.v_dim, s);
        __syncthreads();
        for (int d = 0; d < chunk_dims; d++)
            for (int r = 0; r < 2; r++)
                for (int k = 0; k < 4; k++)
                    out[r][k] = fmaf(s.terms[(y + 16 * r) * tile_stride + d],
                                     s.tile[(x + 16 * k) * tile_stride + d], out[r][k]);
    }
}

/* Puts what threads have of 32 elements and 64 keys into s.terms, [element][key]. */
__device__ void share_elements(const shared_tiles &s, const float (&mine)[2][4])
{
    __syncthreads();
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            s.terms[(threadIdx.x / 16 + 16 * r) * tile_stride + threadIdx.x % 16 + 16 * k] =
                mine[r][k];
    __syncthreads();
}

/* |M a - M v|^2 for the thread's 2 rows x 4 keys. */
__device__ void hold_against_metric(const dkv_cu_block &block, const dkv_cu_unit &unit,
                                    const layout &l, const shared_tiles &s, uint32_t first_row,
                                    float (&out)[2][4])
{
    const float *projected = reinterpret_cast<const float *>(unit.work + l.projected);
    const uint32_t last_row = min(first_row + chunk_rows, l.rows) - 1;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            out[r][k] = 0;
    for (uint32_t head = first_row / block.window; head <= last_row / block.window; head++)
        for (uint32_t first = 0; first < block.v_dim; first += chunk_rows) {
            float elements[2][4];
            transform_values(block, unit, s, head, first, s.center, elements);
            share_elements(s, elements);
            const uint32_t count = min(block.v_dim - first, static_cast<uint32_t>(chunk_rows));
            for (int r = 0; r < 2; r++) {
                const uint32_t row = first_row + threadIdx.x / 16 + 16 * r;
                if (row > last_row || row / block.window != head)
                    continue;
                const float *a = projected + static_cast<size_t>(row) * block.v_dim + first;
                for (uint32_t i = 0; i < count; i++)
                    for (int k = 0; k < 4; k++) {
                        const float gap = a[i] -
                                          s.terms[i * tile_stride + threadIdx.x % 16 + 16 * k];
                        out[r][k] = fmaf(gap, gap, out[r][k]);
                    }
            }
        }
}

/* |M (v - origin)|^2 of key threadIdx.x % 64, for one query head; threads with the same key have a
 * quarter of the sum each. */
__device__ float metric_length(const dkv_cu_block &block, const dkv_cu_unit &unit,
                               const shared_tiles &s, uint32_t head, const float *origin)
{
    float sum = 0;
    for (uint32_t first = 0; first < block.v_dim; first += chunk_rows) {
        float elements[2][4];
        transform_values(block, unit, s, head, first, origin, elements);
        share_elements(s, elements);
        for (uint32_t i = threadIdx.x / tile_keys; i < chunk_rows && first + i < block.v_dim;
             i += threads / tile_keys) {
            const float x = s.terms[i * tile_stride + threadIdx.x % tile_keys];
            sum = fmaf(x, x, sum);
        }
    }
    return sum;
}

} // namespace

#endif
