/* Launches a scorer's kernel from the host: one argument, by value. */
#ifndef DKV_KERNELS_CUDA_LAUNCH_CUH
#define DKV_KERNELS_CUDA_LAUNCH_CUH

#include <stdint.h>

#include <cuda_runtime.h>

/* `early`: may start before the kernel before it ends, for which it waits itself. */
template <class arguments>
cudaError_t dkv_cu_launch(const void *kernel, uint32_t grid, uint32_t threads, size_t shared_bytes,
                          arguments args, bool early, cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    void *pointers[] = {&args};
    return cudaLaunchKernelExC(&config, kernel, pointers);
}

#endif
