/* What the host and the kernel of selection agree on: seats, shares and shared memory. */
#ifndef DKV_KERNELS_CUDA_SELECT_PLAN_CUH
#define DKV_KERNELS_CUDA_SELECT_PLAN_CUH

#include "kernels/cuda/select_cut.cuh"

constexpr int select_crowd_threads = 128;

/* What one thread block of a launch does. */
struct select_seat {
    uint32_t unit;
    uint32_t block;
    uint16_t rank;
    uint16_t size; /* of the crew; 0: nothing to do */
};

/* Tokens of each block of a crew but the last ones. */
__host__ __device__ inline uint32_t select_share(uint32_t n, uint32_t crew)
{
    return ((n + crew - 1) / crew + 31) & ~31u;
}

/* The kernel: (blocks, units, seats, blocks in a cluster, scores pooled at a time). */
const void *select_kernel(uint32_t threads);

#endif
