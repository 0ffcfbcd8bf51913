/* Tiles of fp8 in the stream scorer's registers: those of fast_fp8.cuh with fewer instructions. A
 * thread's first address is made once, the others differ from it by constants; and the high half of
 * a word is converted without a shift.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FP8_TILES_CUH
#define DKV_KERNELS_CUDA_STREAM_FP8_TILES_CUH

#include "kernels/cuda/fast_fp8.cuh"

namespace dkv_stream_fp8
{

/* Four fp8 numbers as fp16: the low two and the high two. In one piece, so that the high ones need
 * no shift. */
template <bool e5m2>
__device__ __forceinline__ void fp16_of_four(uint32_t bytes, uint32_t &low, uint32_t &high)
{
    if constexpr (e5m2)
        asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
            "cvt.rn.f16x2.e5m2x2 %0, l;\ncvt.rn.f16x2.e5m2x2 %1, h;}"
            : "=r"(low), "=r"(high)
            : "r"(bytes));
    else
        asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;}"
            : "=r"(low), "=r"(high)
            : "r"(bytes));
}

template <class S> struct fp8_keys : dkv_fast::fp8_keys<S> {
    /* Where the thread's first bytes lie in a tile. */
    static __device__ __forceinline__ uint32_t offset(const dkv_fast::place<S> &at)
    {
        return 16 * at.warp * S::DIM + dkv_fast::raw_offset<S>(at.g, at.t);
    }
    /* From there. */
    __device__ __forceinline__ void load(uint32_t first)
    {
#pragma unroll
        for (int part = 0; part < S::DIM / 64; part++) {
            dkv_fast::load_shared(first ^ 64 * part, this->bytes[part][0]);
            dkv_fast::load_shared((first ^ 64 * part) + 8 * S::DIM, this->bytes[part][1]);
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, const dkv_fast::place<S> &at)
    {
        load(tile + offset(at));
    }
    template <bool e5m2> __device__ __forceinline__ void convert(void)
    {
#pragma unroll
        for (int part = 0; part < S::DIM / 64; part++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    fp16_of_four<e5m2>(this->bytes[part][r][i], this->words[4 * part + i][r],
                                       this->words[4 * part + i][r + 2]);
    }
    __device__ __forceinline__ void convert(bool e5m2)
    {
        if (__any_sync(~0u, e5m2))
            convert<true>();
        else
            convert<false>();
    }
};

template <class S> struct fp8_values : dkv_fast::fp8_values<S> {
    /* From where the first of the thread's keys lies. */
    __device__ __forceinline__ void load(uint32_t even)
    {
        const uint32_t odd = (even ^ (S::DIM == 128 ? 64 : 0)) + S::DIM;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            this->bytes[i][0] = this->bytes_of(even + 8 * i * S::DIM);
            this->bytes[i][1] = this->bytes_of(odd + 8 * i * S::DIM);
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, const dkv_fast::place<S> &at)
    {
        load(tile + this->offset(2 * at.t, at));
    }
    /* Keeps the compiler from converting them before this point. */
    __device__ __forceinline__ void hold_bytes(void)
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("" : "+r"(this->bytes[i][0]), "+r"(this->bytes[i][1])::"memory");
    }
    template <bool e5m2> __device__ __forceinline__ void convert(void)
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++) {
                const uint32_t pairs = __byte_perm(this->bytes[i][0], this->bytes[i][1],
                                                   m == 0 ? 0x5140 : 0x7362);
                fp16_of_four<e5m2>(pairs, this->words[i / 2][m][i % 2 * 2],
                                   this->words[i / 2][m][i % 2 * 2 + 1]);
            }
    }
    __device__ __forceinline__ void convert(bool e5m2)
    {
        if (__any_sync(~0u, e5m2))
            convert<true>();
        else
            convert<false>();
    }
};

} // namespace dkv_stream_fp8

#endif
