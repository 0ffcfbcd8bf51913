/* Where groups of four warps meet that work at the same tiles of 16-bit caches: sides and those who
 * fetch (stream_16bit_sides.cuh). A group that is alone meets itself. */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_MEETING_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_MEETING_CUH

#include "kernels/cuda/fast_ptx.cuh"

namespace dkv_stream_16bit
{

using namespace dkv_fast;

/* Named barriers after those of two sides, 1 and 2. */
constexpr int BARRIER_ALL = 3;
constexpr int BARRIER_LOGITS = 4;  /* a step has its logits: its keys are read no more */
constexpr int BARRIER_SQUARES = 5; /* those of a tile are there */
constexpr int BARRIER_SUMS = 6;    /* a side's of a tile are there */

template <int barrier, int threads> __device__ __forceinline__ void arrive_at(void)
{
    asm volatile("bar.arrive %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}
template <int barrier, int threads> __device__ __forceinline__ void meet_at(void)
{
    asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(threads) : "memory");
}

/* Meeting point of all of an item. `barrier`: the group's own. */
template <class S> __device__ __forceinline__ void meet(int barrier)
{
    if constexpr (S::FETCHED)
        meet_at<BARRIER_ALL, S::THREADS>();
    else
        group_barrier(barrier);
}

/* The same; whether x is true for any thread. */
template <class S> __device__ __forceinline__ bool meet_any(int barrier, bool x)
{
    if constexpr (!S::FETCHED)
        return group_any(barrier, x);
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred mine, one;\n"
                 "setp.ne.u32 mine, %3, 0;\n"
                 "bar.red.or.pred one, %1, %2, mine;\n"
                 "selp.u32 %0, 1, 0, one;\n"
                 "}"
                 : "=r"(any)
                 : "n"(BARRIER_ALL), "n"(S::THREADS), "r"(static_cast<uint32_t>(x))
                 : "memory");
    return any;
}

} // namespace dkv_stream_16bit

#endif
