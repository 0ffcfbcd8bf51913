/* Launchers of bench_kernels.cu. */
#ifndef DKV_TESTS_BENCH_KERNELS_H
#define DKV_TESTS_BENCH_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Normal numbers of `dtype` (BF16, FP32 or F8_E4M3), a function of the seed. */
cudaError_t bench_fill(void *data, size_t elements, enum dkv_dtype dtype, uint32_t seed);

/* Reads every byte once, 16 at a time. */
cudaError_t bench_read_once(const void *data, size_t bytes, uint32_t *sink, int multiprocessors,
                            cudaStream_t stream);

/* Keeps the stream busy for about 0.4 ms. */
cudaError_t bench_delay(cudaStream_t stream);

/* Keeps a device full of matrix products, a queue of them ahead, until the process is killed. */
void bench_hog(void);

#ifdef __cplusplus
}
#endif
#endif
