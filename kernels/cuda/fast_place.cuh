/* What a thread of passes A and B needs in both: where it stands, how tiles and logits lie in
 * shared memory, and what makes logits of dot products. The stream scorers use it, too, whose fp8
 * tiles (S::FP8) stay as they are stored.
 *
 * Tiles lie as wgmma's 128-byte permuted layout wants them, for both operand orders at once: eight
 * keys are DIM / 64 blocks of 1024 bytes; a block is eight rows of 128 bytes (64 dimensions of one
 * key each), whose 16-byte columns are permuted by the row's number. Pass B's row operands lie the
 * same way.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PLACE_CUH
#define DKV_KERNELS_CUDA_FAST_PLACE_CUH

#include "kernels/cuda/fast_shape.cuh"

namespace dkv_fast
{

/* Two fp8 numbers (the low 16 bits of `bytes`) as a pair of fp16. */
template <bool e5m2> __device__ __forceinline__ uint32_t fp16_of_fp8(uint32_t bytes)
{
    uint32_t pair;
    if constexpr (e5m2)
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    return pair;
}

/* Four of them. */
__device__ __forceinline__ uint2 fp16_of_fp8(uint32_t bytes, uint32_t dtype)
{
    return dtype == DKV_F8_E5M2
               ? make_uint2(fp16_of_fp8<true>(bytes), fp16_of_fp8<true>(bytes >> 16))
               : make_uint2(fp16_of_fp8<false>(bytes), fp16_of_fp8<false>(bytes >> 16));
}

template <class S> __device__ __forceinline__ uint32_t element_offset(int key, int column)
{
    return key / 8 * S::EIGHT_BYTES + column / 8 * 1024 + key % 8 * 128 +
           ((column % 8 ^ key % 8) << 4);
}

/* Where 16 bytes of a key lie in an fp8 tile. Columns are permuted so that neither loads of keys
 * nor of values meet a bank twice. */
template <class S> __device__ __forceinline__ uint32_t raw_offset(int key, int column)
{
    const int permutation = S::DIM == 128 ? (key >> 1 & 3) << 1 ^ (key & 1) << 2 : key >> 1 & 3;
    return key * S::DIM + ((column ^ permutation) << 4);
}

/* Where dimensions 2 * pair and the next of a row lie in an operand of pass B. Beside fp8 keys the
 * dimensions of 64 are in the order in which a thread has them in registers: a quarter of a key
 * each, of which a step of a product takes four (stream_fp8_tiles.cuh). */
template <class S> __device__ __forceinline__ uint32_t pair_offset(int row, int pair)
{
    const int quarter = pair % 32 / 8;
    const int step = pair / 32 * 4 + pair % 8 / 2;
    return S::FP8 ? element_offset<S>(row, 2 * step + pair % 2) + 4 * quarter
                  : element_offset<S>(row, pair / 4) + 4 * (pair % 4);
}

/* A tile as operand with dimensions as depth; `+ keys_step(k)`: dimensions 16 k and up. */
template <class S> __device__ __forceinline__ uint64_t keys_operand(uint32_t tile)
{
    return matrix_descriptor(tile, 16, S::EIGHT_BYTES);
}
__device__ __forceinline__ constexpr int keys_step(int k)
{
    return (k / 4 * 1024 + k % 4 * 32) >> 4;
}

/* And with dimensions as columns; `+ values_step(s)`: keys 16 s and up as depth. */
template <class S> __device__ __forceinline__ uint64_t values_operand(uint32_t tile)
{
    return matrix_descriptor(tile, 1024, S::EIGHT_BYTES);
}
template <class S> __device__ __forceinline__ constexpr int values_step(int s)
{
    return (2 * s * S::EIGHT_BYTES) >> 4;
}

/* A thread's place in its group of four warps. */
template <class S> struct place {
    int thread; /* 0..127 */
    int warp;
    int lane;
    int g;
    int t;

    __device__ __forceinline__ explicit place(int index)
        : thread(index), warp(index >> 5), lane(index & 31), g((index & 31) >> 2), t(index & 3)
    {
    }
    /* The thread's row i of the row group. */
    __device__ __forceinline__ int row(int i) const
    {
        return warp * 8 * S::R + 8 * i + g;
    }
};

/* Where the logits of a row begin in a slot, and what its keys are permuted with: float32
 * [ROWS][TILE], permuted so that neither pass A's order (eight rows by four pairs of keys at a
 * time) nor pass B's (four rows by eight keys) meets a bank twice. */
__device__ __forceinline__ uint32_t slot_row(int row)
{
    return row * TILE * 4;
}
__device__ __forceinline__ int slot_permutation(int row)
{
    return ((row >> 1 & 3) ^ (row & 1) << 1) * 8;
}

/* The last key that a row of the unit sees; rows past the end see all. */
__device__ __forceinline__ int last_key_of(const job &work, uint32_t row)
{
    const dkv_cu_block &block = work.block;
    return static_cast<int>(row < block.group * block.window
                                ? block.n_valid - block.window + row % block.window
                                : block.n_valid);
}

/* Logits of one unit: how a dot product becomes octaves. */
struct logit_rule {
    float to_octaves; /* scale * log2(e) */
    float cap;        /* soft cap in octaves; 0: none */
    float inner;      /* 2 log2(e) scale / soft cap */
    int open_keys;    /* keys below this are visible to every row */

    __device__ __forceinline__ explicit logit_rule(const job &work)
    {
        const dkv_cu_block &block = work.block;
        const float log2e = 1.4426950408889634f;
        const float scale = block.scale * work.unit.k_scale * block.q_scale;
        to_octaves = scale * log2e;
        cap = block.softcap * log2e;
        inner = block.softcap != 0.0f ? 2.0f * log2e * scale / block.softcap : 0.0f;
        open_keys = static_cast<int>(block.n_valid - block.window) + 1;
    }

    /* Pass B calls this again for tiles that were not kept. */
    template <int columns, int per_column>
    __device__ __forceinline__ void apply(float (&z)[columns][4]) const
    {
        if (cap == 0.0f) {
#pragma unroll
            for (int j = 0; j < columns; j++)
#pragma unroll
                for (int c = 0; c < per_column; c++)
                    z[j][c] *= to_octaves;
        } else {
#pragma unroll
            for (int j = 0; j < columns; j++)
#pragma unroll
                for (int c = 0; c < per_column; c++) /* cap * tanh() */
                    z[j][c] = fmaf(-2.0f * cap, rcp_fast(exp2_fast(z[j][c] * inner) + 1.0f), cap);
        }
    }
};

/* The query row of the row group, or NULL past the end. */
__device__ __forceinline__ const unsigned char *query_row(const job &work, uint32_t row)
{
    const dkv_cu_block &block = work.block;
    if (row >= block.group * block.window)
        return nullptr;
    return work.unit.q + (row / block.window) * block.q_head_stride +
           (row % block.window) * block.q_row_stride;
}

/* The tiles that a pass reads. */
template <class S, int size> struct tile_reader {
    ring<size> next;

    /* Waits for the next tile; its shared address. */
    __device__ __forceinline__ uint32_t wait(unsigned char (&tiles)[size][S::TILE_BYTES],
                                             unsigned long long (&full)[size])
    {
        const uint32_t tile = shared_address(tiles[next.index]);
        mbarrier_wait(shared_address(&full[next.index]), next.parity);
        next.advance();
        fence_async_proxy();
        return tile;
    }
    /* This warp has read the tile at this address. */
    __device__ __forceinline__ void release(unsigned char (&tiles)[size][S::TILE_BYTES],
                                            unsigned long long (&empty)[size], uint32_t tile,
                                            int lane) const
    {
        const int place = (tile - shared_address(tiles)) / S::TILE_BYTES;
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(&empty[place]));
    }
};

/* Copies a descriptor, by a warp. */
template <class T> __device__ __forceinline__ void copy_words(T &to, const T *from, int lane)
{
    static_assert(sizeof(T) % 4 == 0, "descriptors are copied by words");
    for (uint32_t i = lane; i < sizeof(T) / 4; i += 32)
        reinterpret_cast<uint32_t *>(&to)[i] = reinterpret_cast<const uint32_t *>(from)[i];
}

} // namespace dkv_fast

#endif
