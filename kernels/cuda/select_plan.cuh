/* What the host and the kernel of selection agree on: seats, shares and shared memory. */
#ifndef DKV_KERNELS_CUDA_SELECT_PLAN_CUH
#define DKV_KERNELS_CUDA_SELECT_PLAN_CUH

#include "kernels/cuda/select_list.cuh"

constexpr int select_crowd_threads = 128;

/* What one thread block of a launch does. */
struct alignas(8) select_seat {
    uint32_t task;
    uint16_t rank;
    uint16_t size; /* of the crew; 0: nothing to do */
};

/* Which unit, and as which member of which crew. Without seats the units follow each other, a
 * cluster each. */
__device__ __forceinline__ select_seat select_seat_of(const select_seat *seats, uint32_t cluster)
{
    if (seats)
        return seats[blockIdx.x];
    return {blockIdx.x >> (31 - __clz(cluster)), static_cast<uint16_t>(blockIdx.x & (cluster - 1)),
            static_cast<uint16_t>(cluster)};
}

/* Tokens of each block of a crew of 1 << log_size but the last ones. */
__host__ __device__ inline uint32_t select_share(uint32_t n, uint32_t log_size)
{
    return (((n + (1u << log_size) - 1) >> log_size) + 31) & ~31u;
}

/* Bytes of a select_exchange whose list has room for `listed`, select_least_listed or more. */
constexpr size_t select_slices_bytes = sizeof(select_exchange::slices);
constexpr uint32_t select_least_listed = select_slices_bytes / sizeof(select_listing);

__host__ __device__ inline size_t select_exchange_bytes(uint32_t listed)
{
    return sizeof(select_exchange) + (listed - select_least_listed) * sizeof(select_listing);
}

/* The kernel for launches with or without crews of several: (tasks, seats, blocks in a cluster,
 * scores pooled at a time, room in the list). Seats are NULL where each unit has a whole cluster.
 */
const void *select_kernel(uint32_t threads, bool crews);

/* The same for select_any_tasks, of select_threads; no scores are pooled in shared memory. */
const void *select_any_kernel(bool crews);

#endif
