/* What the host and the kernel of selection agree on: seats, shares and shared memory. */
#ifndef DKV_KERNELS_CUDA_SELECT_PLAN_CUH
#define DKV_KERNELS_CUDA_SELECT_PLAN_CUH

#include "kernels/cuda/select_cut.cuh"

constexpr int select_crowd_threads = 128;

/* What one thread block of a launch does. */
struct alignas(8) select_seat {
    uint32_t task;
    uint16_t rank;
    uint16_t size; /* of the crew; 0: nothing to do */
};

/* Tokens of each block of a crew of 1 << log_size but the last ones. */
__host__ __device__ inline uint32_t select_share(uint32_t n, uint32_t log_size)
{
    return (((n + (1u << log_size) - 1) >> log_size) + 31) & ~31u;
}

/* The kernel for launches with or without crews of several: (tasks, seats, blocks in a cluster,
 * scores pooled at a time). */
const void *select_kernel(uint32_t threads, bool crews);

#endif
