/* Tiles of fp8 in the stream scorer's registers. Both formats are exact in fp16, which products are
 * made of. Tiles stay as they are stored: who multiplies loads them into registers, as the operand
 * that may lie there, and converts them on the way. Scales stay outside: of keys and queries in the
 * logits' factor, of values in the scores'.
 *
 * A thread's first address is made once, the others differ from it by constants; and the high half
 * of a word is converted without a shift.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FP8_TILES_CUH
#define DKV_KERNELS_CUDA_STREAM_FP8_TILES_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_stream_fp8
{

using namespace dkv_fast;

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

/* The tile's keys as the 64-row operand, dimensions as depth: of keys g and g + 8 of the warp's
 * sixteen a thread has quarter t of every 64 dimensions. A step's depth is four dimensions of each
 * quarter; the other operand has them in that order (pair_offset()). */
template <class S> struct fp8_keys {
    uint32_t bytes[S::DIM / 64][2][4];
    uint32_t words[S::K_STEPS][4];

    /* Where the thread's first bytes lie in a tile. */
    static __device__ __forceinline__ uint32_t offset(const place<S> &at)
    {
        return 16 * at.warp * S::DIM + raw_offset<S>(at.g, at.t);
    }
    /* From there. */
    __device__ __forceinline__ void load(uint32_t first)
    {
#pragma unroll
        for (int part = 0; part < S::DIM / 64; part++) {
            load_shared(first ^ 64 * part, bytes[part][0]);
            load_shared((first ^ 64 * part) + 8 * S::DIM, bytes[part][1]);
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, const place<S> &at)
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
                    fp16_of_four<e5m2>(bytes[part][r][i], words[4 * part + i][r],
                                       words[4 * part + i][r + 2]);
    }
    __device__ __forceinline__ void convert(bool e5m2)
    {
        if (__any_sync(~0u, e5m2))
            convert<true>();
        else
            convert<false>();
    }
};

/* The tile's dimensions as the 64-row operand, 64 at a time, keys as depth: a thread has the
 * DIM / 32 adjacent dimensions `first`() and on, two of each 64, and of every sixteen keys 2t, 2t +
 * 1, 2t + 8 and 2t + 9. */
template <class S> struct fp8_values {
    static constexpr int DIMENSIONS = S::DIM / 32;
    uint32_t bytes[8][2]; /* of keys 8i + 2t and the next */
    uint32_t words[4][S::DIM / 64][4];

    static __device__ __forceinline__ int first(const place<S> &at)
    {
        return DIMENSIONS * (8 * at.warp + at.g);
    }
    /* Bytes of the thread's dimensions of one key. */
    static __device__ __forceinline__ uint32_t bytes_of(uint32_t address)
    {
        return DIMENSIONS == 4 ? load_shared(address) : load_shared_16(address);
    }
    static __device__ __forceinline__ void store_bytes(uint32_t address, uint32_t bytes)
    {
        if (DIMENSIONS == 4)
            store_shared(address, bytes);
        else
            store_shared_16(address, bytes);
    }
    static __device__ __forceinline__ uint32_t offset(int key, const place<S> &at)
    {
        return raw_offset<S>(key, first(at) / 16) + first(at) % 16;
    }

    /* From where the first of the thread's keys lies. */
    __device__ __forceinline__ void load(uint32_t even)
    {
        const uint32_t odd = (even ^ (S::DIM == 128 ? 64 : 0)) + S::DIM;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bytes[i][0] = bytes_of(even + 8 * i * S::DIM);
            bytes[i][1] = bytes_of(odd + 8 * i * S::DIM);
        }
    }
    __device__ __forceinline__ void load(uint32_t tile, const place<S> &at)
    {
        load(tile + offset(2 * at.t, at));
    }
    /* Keeps the compiler from converting them before this point. */
    __device__ __forceinline__ void hold_bytes(void)
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("" : "+r"(bytes[i][0]), "+r"(bytes[i][1])::"memory");
    }
    template <bool e5m2> __device__ __forceinline__ void convert(void)
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++) {
                const uint32_t pairs = __byte_perm(bytes[i][0], bytes[i][1],
                                                   m == 0 ? 0x5140 : 0x7362);
                fp16_of_four<e5m2>(pairs, words[i / 2][m][i % 2 * 2],
                                   words[i / 2][m][i % 2 * 2 + 1]);
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

/* |v|^2 of the thread's two keys: the four lanes of a quad share both. */
template <class S>
__device__ __forceinline__ void sum_squares(const fp8_keys<S> &keys, float (&square)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x = 0.0f;
        float y = 0.0f;
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 v = unpack<fp16_type>(keys.words[k][2 * half + i]);
                x = fmaf(v.x, v.x, x);
                y = fmaf(v.y, v.y, y);
            }
        square[i] = x + y;
        square[i] += __shfl_xor_sync(~0u, square[i], 1);
        square[i] += __shfl_xor_sync(~0u, square[i], 2);
    }
}

} // namespace dkv_stream_fp8

#endif
