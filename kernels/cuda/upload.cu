/* Brings a wave's descriptors and work lists to the device by a kernel that reads the pinned memory
 * they were written to. They are a few dozen kilobytes; a copy engine is as fast, but kernels that
 * wait for it end up to 5 us later (docs/notes-cuda.md). */
#include "kernels/cuda/plan.h"

namespace
{

constexpr unsigned threads = 256;
constexpr unsigned words = 4; /* of 16 bytes, under way at once in a thread */

__global__ void __launch_bounds__(threads) upload(uint4 *to, const uint4 *from, unsigned n)
{
    const unsigned first = blockIdx.x * threads * words + threadIdx.x;
    uint4 word[words];
#pragma unroll
    for (unsigned i = 0; i < words; i++)
        if (first + i * threads < n)
            word[i] = __ldcv(from + first + i * threads);
#pragma unroll
    for (unsigned i = 0; i < words; i++)
        if (first + i * threads < n)
            to[first + i * threads] = word[i];
}

} // namespace

extern "C" cudaError_t dkv_cu_upload_launch(void *to, const void *from, size_t bytes,
                                            cudaStream_t stream)
{
    const unsigned n = static_cast<unsigned>(bytes / sizeof(uint4));
    upload<<<(n + threads * words - 1) / (threads * words), threads, 0, stream>>>(
        static_cast<uint4 *>(to), static_cast<const uint4 *>(from), n);
    return cudaGetLastError();
}
