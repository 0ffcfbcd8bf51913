/* What a thread of passes A and B needs in both: where it stands, how tiles lie in shared memory,
 * and the logits of a tile.
 *
 * Tiles lie as wgmma's 128-byte permuted layout wants them, for both operand orders at once: eight
 * keys are DIM / 64 blocks of 1024 bytes; a block is eight rows of 128 bytes (64 dimensions of one
 * key each), whose 16-byte columns are permuted by the row's number.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PLACE_CUH
#define DKV_KERNELS_CUDA_FAST_PLACE_CUH

#include "kernels/cuda/fast_shape.cuh"

namespace dkv_fast
{

template <class S> __device__ __forceinline__ uint32_t element_offset(int key, int column)
{
    return key / 8 * S::EIGHT_BYTES + column / 8 * 1024 + key % 8 * 128 +
           ((column % 8 ^ key % 8) << 4);
}

/* A tile as operand with keys as columns; `+ keys_step(k)`: dimensions 16 k and up as depth. */
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
    /* Where logits of row i and keys 16 q .. 16 q + 15 of a tile lie in a slot. */
    __device__ __forceinline__ uint32_t slot_cell(int i, int q) const
    {
        return ((i * 4 + q) * GROUP_THREADS + thread) * 16;
    }
};

/* Logits of one unit: how a dot product becomes octaves, and what each row sees. */
template <class S> struct logit_rule {
    float to_octaves;   /* scale * log2(e) */
    float cap;          /* soft cap in octaves; 0: none */
    float inner;        /* 2 log2(e) scale / soft cap */
    int last_key[S::R]; /* that this thread's rows see; padding rows see all */
    int open_keys;      /* keys below this are visible to every row */

    __device__ __forceinline__ logit_rule(const job &work, const place<S> &at)
    {
        const dkv_cu_block &block = work.block;
        const float log2e = 1.4426950408889634f;
        const float scale = block.scale * work.unit.k_scale * block.q_scale;
        to_octaves = scale * log2e;
        cap = block.softcap * log2e;
        inner = block.softcap != 0.0f ? 2.0f * log2e * scale / block.softcap : 0.0f;
        open_keys = static_cast<int>(block.n_valid - block.window) + 1;
        const uint32_t rows = block.group * block.window;
#pragma unroll
        for (int i = 0; i < S::R; i++) {
            const uint32_t row = work.item.row_group * S::ROWS + at.row(i);
            last_key[i] = static_cast<int>(row < rows ? open_keys - 1 + row % block.window
                                                      : block.n_valid);
        }
    }

    /* Dot products of `columns` times 8 keys from first_key on become logits, -inf where a row does
     * not see the key. Pass B calls this again for tiles that were not kept: same order, same
     * bits. */
    template <int columns>
    __device__ __forceinline__ void apply(float (&z)[columns][4], int first_key, int t) const
    {
        if (cap == 0.0f) {
#pragma unroll
            for (int j = 0; j < columns; j++)
#pragma unroll
                for (int c = 0; c < 2 * S::R; c++)
                    z[j][c] *= to_octaves;
        } else {
#pragma unroll
            for (int j = 0; j < columns; j++)
#pragma unroll
                for (int c = 0; c < 2 * S::R; c++) /* cap * tanh() */
                    z[j][c] = fmaf(-2.0f * cap, rcp_fast(exp2_fast(z[j][c] * inner) + 1.0f), cap);
        }
        if (first_key + 8 * columns <= open_keys)
            return;
#pragma unroll
        for (int j = 0; j < columns; j++)
#pragma unroll
            for (int c = 0; c < 2 * S::R; c++) {
                if (first_key + 8 * j + 2 * t + (c & 1) > last_key[c >> 1])
                    z[j][c] = -INFINITY;
            }
    }
};

/* Two elements of a query row. A converted one was written by this very kernel. */
template <class S> __device__ __forceinline__ uint32_t load_query_word(const unsigned char *from)
{
    const uint32_t *word = reinterpret_cast<const uint32_t *>(from);
    return S::FP8 ? __ldcg(word) : __ldg(word);
}

/* The query rows as operand of wgmma: `steps` times 16 dimensions from 16 * first on. */
template <class S, int steps>
__device__ __forceinline__ void load_query(const job &work, const place<S> &at, int first,
                                           uint32_t (&q)[steps][4])
{
    const dkv_cu_block &block = work.block;
    const uint32_t rows = block.group * block.window;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t row = work.item.row_group * S::ROWS + at.row(i);
        const bool exists = i < S::R && row < rows;
        const unsigned char *from = work.unit.q + (row / block.window) * block.q_head_stride +
                                    (row % block.window) * block.q_row_stride + 32 * first +
                                    4 * at.t;
#pragma unroll
        for (int k = 0; k < steps; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q[k][2 * half + i] = exists ? load_query_word<S>(from + 32 * k + 16 * half) : 0;
    }
}

/* Starts the dot products of those dimensions of the rows with 8 * `columns` keys. */
template <class S, int columns, int steps>
__device__ __forceinline__ void start_dots(float (&z)[columns][4], const uint32_t (&q)[steps][4],
                                           uint32_t k_tile, int first)
{
    const uint64_t keys = keys_operand<S>(k_tile + first / 4 * 1024);
#pragma unroll
    for (int k = 0; k < steps; k++)
        warpgroup_mma<typename S::type, 0>(z, q[k], keys + keys_step(first % 4 + k), first + k > 0);
}

/* The tiles that a pass reads, as two adjacent halves each. */
template <class S, int size> struct tile_reader {
    ring<size> next;

    /* Waits for the next tile; its shared address. */
    __device__ __forceinline__ uint32_t wait(unsigned char (&halves)[size][S::HALF_BYTES],
                                             unsigned long long (&full)[size])
    {
        const uint32_t tile = shared_address(halves[next.index]);
        for (int h = 0; h < 2; h++)
            mbarrier_wait(shared_address(&full[next.index + h]), next.parity);
        next.advance(2);
        fence_async_proxy();
        return tile;
    }
    /* This warp has read the tile at this address. */
    __device__ __forceinline__ void release(unsigned char (&halves)[size][S::HALF_BYTES],
                                            unsigned long long (&empty)[size], uint32_t tile,
                                            int lane) const
    {
        const int first = (tile - shared_address(halves)) / S::HALF_BYTES;
        __syncwarp();
        if (lane < 2)
            mbarrier_arrive(shared_address(&empty[first + lane]));
    }
};

} // namespace dkv_fast

#endif
