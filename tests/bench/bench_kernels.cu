/* Device side of bench_cuda: fresh random data, one plain read of every byte, and a delay that lets
 * the host queue a whole batch before the device starts it. */
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <mma.h>
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

/* c += a b, 4096 x 4096, bf16 by tensor cores: a warp holds 64 x 64 of c. Not a fast product, but
 * one that fills every multiprocessor for over a millisecond, as an engine's prefill does. */
constexpr int hog_n = 4096;

__global__ void __launch_bounds__(128)
    product(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *c)
{
    using namespace nvcuda;
    const int warp = threadIdx.x / 32;
    const int row = blockIdx.y * 128 + warp / 2 * 64, column = blockIdx.x * 128 + warp % 2 * 64;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[4][4];
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++)
            wmma::fill_fragment(sum[i][k], 0.0f);
    for (int at = 0; at < hog_n; at += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left[4];
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> right[4];
        for (int i = 0; i < 4; i++) {
            wmma::load_matrix_sync(left[i], a + static_cast<size_t>(row + 16 * i) * hog_n + at,
                                   hog_n);
            wmma::load_matrix_sync(right[i], b + static_cast<size_t>(column + 16 * i) * hog_n + at,
                                   hog_n);
        }
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 4; k++)
                wmma::mma_sync(sum[i][k], left[i], right[k], sum[i][k]);
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++)
            wmma::store_matrix_sync(c + static_cast<size_t>(row + 16 * i) * hog_n + column + 16 * k,
                                    sum[i][k], hog_n, wmma::mem_row_major);
}

} // namespace

extern "C" void bench_hog(void)
{
    __nv_bfloat16 *a = nullptr, *b = nullptr;
    float *c = nullptr;
    const size_t n = static_cast<size_t>(hog_n) * hog_n;
    cudaEvent_t done[8];
    if (cudaMalloc(&a, n * 2) != cudaSuccess || cudaMalloc(&b, n * 2) != cudaSuccess ||
        cudaMalloc(&c, n * 4) != cudaSuccess)
        return;
    for (cudaEvent_t &event : done)
        if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess)
            return;
    for (unsigned i = 0;; i++) {
        if (cudaEventSynchronize(done[i % 8]) != cudaSuccess)
            return;
        product<<<dim3(hog_n / 128, hog_n / 128), 128>>>(a, b, c);
        cudaEventRecord(done[i % 8]);
    }
}

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
