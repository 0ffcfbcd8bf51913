/* Instructions that this version needs beyond those of kernels/cuda/fast_ptx.cuh: products with
 * both operands in shared memory, bulk copies, and a cheaper way to publish. */
#ifndef DKV_KERNELS_CUDA_NEXT_FAST_PTX_CUH
#define DKV_KERNELS_CUDA_NEXT_FAST_PTX_CUH

#include "kernels/cuda/fast_ptx.cuh"

namespace dkv_fast
{

/* As warpgroup_mma(), with both operands in shared memory, rows of 16-bit elements. */
template <class type>
__device__ __forceinline__ void warpgroup_mma_shared(float (&c)[4][4], uint64_t a, uint64_t b,
                                                     int adds)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                     "%16, %17, p, 1, 1, 0, 0;\n}"
                     : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                       "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                       "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                       "+f"(c[3][3])
                     : "l"(a), "l"(b), "r"(adds));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                     "%16, %17, p, 1, 1, 0, 0;\n}"
                     : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                       "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                       "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                       "+f"(c[3][3])
                     : "l"(a), "l"(b), "r"(adds));
}

template <class type>
__device__ __forceinline__ void warpgroup_mma_shared(float (&c)[8][4], uint64_t a, uint64_t b,
                                                     int adds)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
                     "%31}, %32, %33, p, 1, 1, 0, 0;\n}"
                     : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                       "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                       "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                       "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
                       "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),
                       "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
                       "+f"(c[7][2]), "+f"(c[7][3])
                     : "l"(a), "l"(b), "r"(adds));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
                     "%31}, %32, %33, p, 1, 1, 0, 0;\n}"
                     : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                       "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                       "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                       "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
                       "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),
                       "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
                       "+f"(c[7][2]), "+f"(c[7][3])
                     : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ float load_shared_float(uint32_t address)
{
    return __uint_as_float(load_shared(address));
}

__device__ __forceinline__ void store_shared(uint32_t address, float a, float b)
{
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&words)[4])
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

/* Arrives, and adds bytes that copies will bring before the phase ends. */
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Copies a multiple of 16 bytes from global to shared memory, counted by the barrier; from what
 * this thread has seen of global memory. */
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier)
{
    asm volatile("fence.proxy.async;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* 4 bytes from global to shared memory, or zeros if there is nothing to read. */
__device__ __forceinline__ void copy_4(uint32_t to, const void *from, bool exists)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 4 : 0)
                 : "memory");
}

/* As counter_add(), by one fence that counter_wait()'s acquire meets, instead of two. */
__device__ __forceinline__ void counter_publish(unsigned *counter)
{
    asm volatile("fence.acq_rel.gpu;\n"
                 "red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
                 : "memory");
}

} // namespace dkv_fast

#endif
