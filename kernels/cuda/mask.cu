/* nonfinite=mask: which tokens of which unit have a key or value that is not a number, of those
 * that their policy reads.
 *
 * keys [n][D], values [n][Dv] of a unit -> unit.mask, one bit a key. One item is one unit's 32
 * keys, a warp looks at 4 of them in turn, 32 lanes at 8 elements each. A token behind a bad table
 * entry counts as masked here; its entry is reported and fails the block. 256 threads.
 */
#include "kernels/cuda/device.cuh"

namespace
{

constexpr int threads = 256;
constexpr int keys_per_warp = 32 / (threads / 32);

/* True in every lane if one of the row's elements is not finite. */
__device__ bool is_bad(const dkv_cu_rows &rows, const unsigned char *row, uint32_t dims,
                       float scale)
{
    bool bad = row == nullptr;
    for (uint32_t dim = threadIdx.x % 32 * 8; row && dim < dims; dim += 32 * 8) {
        float x[8];
        dkv_cu_load8(row + dim * dkv_cu_dtype_bytes(rows.dtype), rows.dtype, rows.align, scale, x);
        for (int e = 0; e < 8; e++)
            bad = bad || !dkv_cu_finite(x[e]);
    }
    return __any_sync(~0u, bad);
}

/* blockIdx.x walks the words of one unit after the other. */
__global__ void __launch_bounds__(threads)
    mask_tokens(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t n_units)
{
    __shared__ unsigned word;
    for (uint32_t u = 0; u < n_units; u++) {
        const dkv_cu_unit &unit = units[u];
        const dkv_cu_block &block = blocks[unit.block];
        if (!unit.mask || block.source > DKV_SOURCE_KEY_ANGLE) /* keys.cu writes those */
            continue;
        for (uint32_t at = blockIdx.x; at * 32 < block.n_valid; at += gridDim.x) {
            if (threadIdx.x == 0)
                word = 0;
            __syncthreads();
            for (int i = 0; i < keys_per_warp; i++) {
                const uint32_t bit = threadIdx.x / 32 * keys_per_warp + i;
                const uint32_t token = block.valid_from + at * 32 + bit;
                if (at * 32 + bit >= block.n_valid)
                    break;
                const unsigned char *key = dkv_cu_row(block.k, unit.k, token,
                                                      &unit.report->bad_k_entry);
                const unsigned char *value = block.v_dim > 0 ? dkv_cu_row(block.v, unit.v, token,
                                                                          &unit.report->bad_v_entry)
                                                             : key;
                if (is_bad(block.k, key, block.head_dim, unit.k_scale) ||
                    is_bad(block.v, value, block.v_dim, unit.v_scale))
                    if (threadIdx.x % 32 == 0)
                        atomicOr(&word, 1u << bit);
            }
            __syncthreads();
            if (threadIdx.x == 0)
                unit.mask[at] = word;
        }
    }
}

} // namespace

extern "C" cudaError_t dkv_cu_mask_prepare(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, mask_tokens);
}

extern "C" cudaError_t dkv_cu_mask_launch(const struct dkv_cu_wave *wave, cudaStream_t stream)
{
    bool any = false;
    for (uint32_t u = 0; u < wave->n_units; u++)
        any = any || wave->units_host[u].mask;
    if (!any)
        return cudaSuccess;
    mask_tokens<<<1024, threads, 0, stream>>>(wave->blocks, wave->units, wave->n_units);
    return cudaGetLastError();
}
