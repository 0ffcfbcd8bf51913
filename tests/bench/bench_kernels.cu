/* Device side of bench_cuda: fresh random data, one plain read of every byte, and a delay that lets
 * the host queue a whole batch before the device starts it. */
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "tests/bench/bench_kernels.h"

namespace
{

__device__ float normal(uint64_t i, uint32_t seed)
{
    uint64_t z = i * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<uint32_t>(z >> 40) + 0.5f) / 16777216.0f;
    const float v = static_cast<uint32_t>(z & 0xffffff) / 16777216.0f;
    return sqrtf(-2 * logf(u)) * cospif(2 * v);
}

__global__ void fill(void *data, size_t n, int dtype, uint32_t seed)
{
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const float x = normal(i, seed);
        if (dtype == DKV_BF16)
            static_cast<__nv_bfloat16 *>(data)[i] = __float2bfloat16(x);
        else if (dtype == DKV_FP32)
            static_cast<float *>(data)[i] = x;
        else
            static_cast<__nv_fp8_storage_t *>(data)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE,
                                                                               __NV_E4M3);
    }
}

__global__ void __launch_bounds__(512) read_once(const uint4 *data, size_t n, uint32_t *sink)
{
    constexpr int unrolled = 8;
    uint32_t sum = 0;
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + (unrolled - 1) * step < n; i += unrolled * step) {
        uint4 v[unrolled];
#pragma unroll
        for (int u = 0; u < unrolled; u++)
            v[u] = __ldcs(data + i + u * step);
#pragma unroll
        for (int u = 0; u < unrolled; u++)
            sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < n; i += step)
        sum ^= data[i].x;
    if (sum == 0x12345678u) /* never, but the compiler cannot know */
        *sink = sum;
}

__global__ void delay(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles)
        ;
}

} // namespace

extern "C" cudaError_t bench_fill(void *data, size_t elements, enum dkv_dtype dtype, uint32_t seed)
{
    fill<<<2048, 256>>>(data, elements, dtype, seed);
    return cudaGetLastError();
}

extern "C" cudaError_t bench_read_once(const void *data, size_t bytes, uint32_t *sink,
                                       int multiprocessors, cudaStream_t stream)
{
    read_once<<<multiprocessors * 4, 512, 0, stream>>>(static_cast<const uint4 *>(data),
                                                       bytes / sizeof(uint4), sink);
    return cudaGetLastError();
}

extern "C" cudaError_t bench_delay(cudaStream_t stream)
{
    delay<<<1, 1, 0, stream>>>(700000);
    return cudaGetLastError();
}
