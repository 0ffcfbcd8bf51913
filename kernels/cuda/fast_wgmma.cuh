/* Tensor core products of a warpgroup (wgmma): the instructions, and what orders them. */
#ifndef DKV_KERNELS_CUDA_FAST_WGMMA_CUH
#define DKV_KERNELS_CUDA_FAST_WGMMA_CUH

#include "kernels/cuda/fast_ptx.cuh"

namespace dkv_fast
{

/* The instructions: one text for both element types, `types` being "f16.f16" or "bf16.bf16". They
 * name what the functions below have: c, a, b, adds, transposed. */
#define DKV_WGMMA_32(types)                                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." types " "                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "   \
                 "{%16, %17, %18, %19}, %20, p, 1, 1, %22;\n}"                                \
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), \
                   "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), \
                   "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), \
                   "+f"(c[3][3])                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(transposed))
#define DKV_WGMMA_64(types)                                                                 \
    asm volatile(                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                             \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                       \
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),        \
          "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),        \
          "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),        \
          "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),        \
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),        \
          "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),        \
          "+f"(c[7][2]), "+f"(c[7][3])                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(transposed))
#define DKV_WGMMA_128(types)                                                                \
    asm volatile(                                                                           \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                        \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " "                            \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
        "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"                                       \
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),        \
          "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),        \
          "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),        \
          "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),        \
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),        \
          "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),        \
          "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]),        \
          "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),        \
          "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]),   \
          "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]), "+f"(c[12][0]), "+f"(c[12][1]),   \
          "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]),   \
          "+f"(c[13][3]), "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]),   \
          "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(transposed))
#define DKV_WGMMA_SHARED_8(types)                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"                  \
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32." types " "       \
                 "{%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"                \
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]) \
                 : "l"(a), "l"(b), "r"(adds))
#define DKV_WGMMA_SHARED_32(types)                                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." types " "                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "   \
                 "%16, %17, p, 1, 1, %19, %19;\n}"                                            \
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), \
                   "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), \
                   "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), \
                   "+f"(c[3][3])                                                              \
                 : "l"(a), "l"(b), "r"(adds), "n"(transposed))
#define DKV_WGMMA_SHARED_64(types)                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." types " "                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "     \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
                 "%31}, %32, %33, p, 1, 1, %35, %35;\n}"                                       \
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),  \
                   "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),  \
                   "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),  \
                   "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),  \
                   "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]),  \
                   "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),  \
                   "+f"(c[7][2]), "+f"(c[7][3])                                                \
                 : "l"(a), "l"(b), "r"(adds), "n"(transposed))

/* c += a * b for a warpgroup: 64 rows by 8 * `columns` columns, 16 deep. a in registers, 16
 * rows a warp; b in shared memory behind a descriptor. With g = lane / 4 and t = lane % 4 a thread
 * holds a[0] (g, 2t..), a[1] (g + 8, 2t..), a[2] (g, 2t + 8..), a[3] (g + 8, 2t + 8..), and of
 * every 8 columns c[0] (g, 2t), c[1] (g, 2t + 1), c[2] (g + 8, 2t), c[3] (g + 8, 2t + 1).
 * Asynchronous: between issue and warpgroup_wait() nothing may touch c or a. `adds` 0: c = a * b.
 */
template <class type, int transposed, int columns>
__device__ __forceinline__ void warpgroup_mma(float (&c)[columns][4], const uint32_t (&a)[4],
                                              uint64_t b, int adds)
{
    constexpr bool half = std::is_same<type, fp16_type>::value;
    if constexpr (columns == 4) {
        if constexpr (half)
            DKV_WGMMA_32("f16.f16");
        else
            DKV_WGMMA_32("bf16.bf16");
    } else if constexpr (columns == 8) {
        if constexpr (half)
            DKV_WGMMA_64("f16.f16");
        else
            DKV_WGMMA_64("bf16.bf16");
    } else if constexpr (columns == 16) {
        if constexpr (half)
            DKV_WGMMA_128("f16.f16");
        else
            DKV_WGMMA_128("bf16.bf16");
    }
}

/* Register and shared memory accesses before it come before the wgmmas after it. */
__device__ __forceinline__ void warpgroup_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending> __device__ __forceinline__ void warpgroup_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Keeps the compiler from moving uses of c across this point. */
template <int columns> __device__ __forceinline__ void hold(float (&c)[columns][4])
{
#pragma unroll
    for (int j = 0; j < columns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm volatile("" : "+f"(c[j][i])::"memory");
}

/* Descriptor of a matrix in shared memory with 128-byte rows permuted by row mod 8: `lead` and
 * `stride` are the bytes between its blocks (see fast_place.cuh). */
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t lead,
                                                      uint32_t stride)
{
    return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(lead >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}

/* As warpgroup_mma(), with both operands in shared memory, rows of 16-bit elements; `transposed`
 * says that both are. */
template <class type>
__device__ __forceinline__ void warpgroup_mma_shared(float (&c)[1][4], uint64_t a, uint64_t b,
                                                     int adds)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_SHARED_8("f16.f16");
    else
        DKV_WGMMA_SHARED_8("bf16.bf16");
}

template <class type, int transposed = 0>
__device__ __forceinline__ void warpgroup_mma_shared(float (&c)[4][4], uint64_t a, uint64_t b,
                                                     int adds)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_SHARED_32("f16.f16");
    else
        DKV_WGMMA_SHARED_32("bf16.bf16");
}

template <class type, int transposed = 0>
__device__ __forceinline__ void warpgroup_mma_shared(float (&c)[8][4], uint64_t a, uint64_t b,
                                                     int adds)
{
    if constexpr (std::is_same<type, fp16_type>::value)
        DKV_WGMMA_SHARED_64("f16.f16");
    else
        DKV_WGMMA_SHARED_64("bf16.bf16");
}

#undef DKV_WGMMA_32
#undef DKV_WGMMA_64
#undef DKV_WGMMA_128
#undef DKV_WGMMA_SHARED_8
#undef DKV_WGMMA_SHARED_32
#undef DKV_WGMMA_SHARED_64

} // namespace dkv_fast

#endif
