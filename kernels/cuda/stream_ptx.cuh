/* Instructions of the stream scorer beyond those of the fast one. */
#ifndef DKV_KERNELS_CUDA_STREAM_PTX_CUH
#define DKV_KERNELS_CUDA_STREAM_PTX_CUH

#include "kernels/cuda/fast_ptx.cuh"

namespace dkv_stream
{

using namespace dkv_fast;

/* `types`: as in fast_wgmma.cuh. */
#define DKV_WGMMA_FIRST_64(types)                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "         \
                 "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "          \
                 "%28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"             \
                 : "=f"(c[0][0]), "=f"(c[0][1]), "=f"(c[0][2]), "=f"(c[0][3]), "=f"(c[1][0]), \
                   "=f"(c[1][1]), "=f"(c[1][2]), "=f"(c[1][3]), "=f"(c[2][0]), "=f"(c[2][1]), \
                   "=f"(c[2][2]), "=f"(c[2][3]), "=f"(c[3][0]), "=f"(c[3][1]), "=f"(c[3][2]), \
                   "=f"(c[3][3]), "=f"(c[4][0]), "=f"(c[4][1]), "=f"(c[4][2]), "=f"(c[4][3]), \
                   "=f"(c[5][0]), "=f"(c[5][1]), "=f"(c[5][2]), "=f"(c[5][3]), "=f"(c[6][0]), \
                   "=f"(c[6][1]), "=f"(c[6][2]), "=f"(c[6][3]), "=f"(c[7][0]), "=f"(c[7][1]), \
                   "=f"(c[7][2]), "=f"(c[7][3])                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* c = a * b as warpgroup_mma() with `adds` 0, for 64 columns; what c was is no input, so that the
 * compiler need not keep it. */
template <class type>
__device__ __forceinline__ void warpgroup_mma_first(float (&c)[8][4], const uint32_t (&a)[4],
                                                    uint64_t b)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_FIRST_64("f16.f16");
    else
        DKV_WGMMA_FIRST_64("bf16.bf16");
}

#undef DKV_WGMMA_FIRST_64

/* Operands of the products with 128 columns: the registers of c, and what of them. */
#define DKV_C_REGISTERS                                                       \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "  \
    "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "  \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "  \
    "%58, %59, %60, %61, %62, %63}"
#define DKV_C_FOUR(mode, j) mode(c[j][0]), mode(c[j][1]), mode(c[j][2]), mode(c[j][3])
#define DKV_C_SIXTEEN(mode, j) \
    DKV_C_FOUR(mode, j), DKV_C_FOUR(mode, j + 1), DKV_C_FOUR(mode, j + 2), DKV_C_FOUR(mode, j + 3)
#define DKV_C_ALL(mode) \
    DKV_C_SIXTEEN(mode, 0), DKV_C_SIXTEEN(mode, 4), DKV_C_SIXTEEN(mode, 8), DKV_C_SIXTEEN(mode, 12)

#define DKV_WGMMA_FIRST_128(types)                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                               \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " DKV_C_REGISTERS \
                 ", {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"                            \
                 : DKV_C_ALL("=f")                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define DKV_WGMMA_SHARED_128(types)                                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " DKV_C_REGISTERS \
                 ", %64, %65, 1, 1, 1, 0, 0;"                                             \
                 : DKV_C_ALL("+f")                                                        \
                 : "l"(a), "l"(b))

/* The same for 128 columns. */
template <class type>
__device__ __forceinline__ void warpgroup_mma_first(float (&c)[16][4], const uint32_t (&a)[4],
                                                    uint64_t b)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_FIRST_128("f16.f16");
    else
        DKV_WGMMA_FIRST_128("bf16.bf16");
}

/* c += a * b, both in shared memory. */
template <class type>
__device__ __forceinline__ void warpgroup_mma_shared(float (&c)[16][4], uint64_t a, uint64_t b)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_SHARED_128("f16.f16");
    else
        DKV_WGMMA_SHARED_128("bf16.bf16");
}

#undef DKV_WGMMA_FIRST_128
#undef DKV_WGMMA_SHARED_128
#undef DKV_C_REGISTERS
#undef DKV_C_FOUR
#undef DKV_C_SIXTEEN
#undef DKV_C_ALL

#define DKV_WGMMA_8(types)                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." types " "       \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"        \
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* c += a * b for 8 columns. */
template <class type>
__device__ __forceinline__ void warpgroup_mma_8(float (&c)[1][4], const uint32_t (&a)[4],
                                                uint64_t b)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_8("f16.f16");
    else
        DKV_WGMMA_8("bf16.bf16");
}

#undef DKV_WGMMA_8

/* Waits for two barriers, both at once, because a look at one takes a hundred cycles. */
__device__ __forceinline__ void mbarrier_wait_both(uint32_t first, uint32_t first_parity,
                                                   uint32_t second, uint32_t second_parity)
{
    asm volatile("{\n"
                 ".reg .pred a, b;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 a, [%0], %1;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 b, [%2], %3;\n"
                 "and.pred a, a, b;\n"
                 "@a bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(first),
                 "r"(first_parity), "r"(second), "r"(second_parity)
                 : "memory");
}

__device__ __forceinline__ void store_shared_words(uint32_t address, const uint4 &words)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

} // namespace dkv_stream

#endif
