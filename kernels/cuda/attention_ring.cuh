/* Keys of the attention scorer by way of shared memory: each warp has a ring of tiles of its own,
 * so that several are on their way while it computes, and no thread block has to meet. Included by
 * attention.cu.
 *
 * A tile is [16 keys][dimensions] in pieces of 16 bytes; of odd keys each pair of four pieces is
 * exchanged, so that the lanes of a product read from different banks.
 */
#ifndef DKV_KERNELS_CUDA_ATTENTION_RING_CUH
#define DKV_KERNELS_CUDA_ATTENTION_RING_CUH

#include "kernels/cuda/attention_tiles.cuh"

namespace
{

constexpr int ring_tiles = 3;

/* What does not fit into the keys: which of them are there, for tiles that are not plain rows. */
typedef unsigned ring_flags[ring_tiles][2];

template <int blocks> struct key_ring {
    static constexpr uint32_t pieces = blocks * 4; /* of a row */
    static constexpr uint32_t tile_bytes = tile_keys * pieces * 16;
    static constexpr uint32_t rows_at_once = 32 / pieces;
    static constexpr uint32_t bytes = ring_tiles * tile_bytes; /* of a warp */

    uint32_t tiles;                  /* shared address of the warp's */
    uint32_t copy_to;                /* offsets of the lane in a tile */
    uint32_t even, odd;              /* .. of its words of even and odd blocks of dimensions */
    const unsigned char *lane_words; /* what the lane copies of key 0 */
    int64_t stride;
    bool simple;
    unsigned (*flags)[2];
};

template <int blocks>
__device__ inline key_ring<blocks> open_ring(const job &work, unsigned char *memory,
                                             ring_flags *flags)
{
    typedef key_ring<blocks> ring_type;
    const dkv_cu_rows &rows = work.block.k;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = lane / ring_type::pieces;
    const uint32_t piece = lane % ring_type::pieces;
    ring_type ring;
    ring.tiles = dkv_fast::shared_address(memory) + threadIdx.x / 32 * ring_type::bytes;
    ring.copy_to = (row * ring_type::pieces + (piece ^ (row & 1) << 2)) * 16;
    ring.even = (lane / 4 * ring_type::pieces + lane % 4 + (lane / 4 & 1) * 4) * 16;
    ring.odd = ring.even ^ 64;
    ring.lane_words = work.unit.k + (work.block.valid_from + row) * rows.token_stride + piece * 16;
    ring.stride = rows.token_stride;
    ring.simple = rows.page_tokens == 0 && !work.unit.mask && work.block.head_dim == 32 * blocks;
    ring.flags = flags[threadIdx.x / 32];
    return ring;
}

__device__ inline void copy_piece(uint32_t to, const unsigned char *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Any keys: masked, paged, with fewer dimensions. Two lanes have a row. */
template <int blocks>
__device__ inline void copy_any_tile(const job &work, const key_ring<blocks> &ring, uint32_t slot,
                                     uint32_t first_key, uint32_t end_key)
{
    constexpr uint32_t pieces = key_ring<blocks>::pieces;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t key = first_key + lane / 2;
    const unsigned char *row = nullptr;
    if (key < end_key && !dkv_cu_masked(work.unit, key))
        row = dkv_cu_row(work.block.k, work.unit.k, work.block.valid_from + key,
                         &work.unit.report->bad_k_entry);
#pragma unroll
    for (uint32_t j = 0; j < pieces / 2; j++) {
        const uint32_t piece = lane % 2 * (pieces / 2) + j;
        const uint32_t to = ring.tiles + slot * key_ring<blocks>::tile_bytes +
                            (lane / 2 * pieces + (piece ^ (lane / 2 & 1) << 2)) * 16;
        const bool exists = row && piece * 8 < work.block.head_dim;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(exists ? row + piece * 16 : work.unit.k), "r"(exists ? 16 : 0)
                     : "memory");
    }
    for (int i = 0; i < 2; i++) { /* as load_any_keys() has it */
        const bool there = __shfl_sync(~0u, row != nullptr, lane / 4 * 2 + 16 * i);
        const unsigned all = __ballot_sync(~0u, there);
        if (lane == 0)
            ring.flags[slot][i] = all;
    }
}

template <int blocks>
__device__ inline bool is_simple_tile(const key_ring<blocks> &ring, uint32_t first_key,
                                      uint32_t end_key)
{
    return ring.simple && first_key + tile_keys <= end_key;
}

/* Sends for a tile, if there is one; a group of copies either way. */
template <int blocks>
__device__ inline void send_for(const job &work, const key_ring<blocks> &ring, uint32_t slot,
                                bool exists, uint32_t first_key, uint32_t end_key)
{
    typedef key_ring<blocks> ring_type;
    if (exists && is_simple_tile(ring, first_key, end_key)) {
        const unsigned char *from = ring.lane_words + first_key * ring.stride;
        const uint32_t to = ring.tiles + slot * ring_type::tile_bytes + ring.copy_to;
#pragma unroll
        for (uint32_t j = 0; j < tile_keys / ring_type::rows_at_once; j++)
            copy_piece(to + j * 512, from + j * ring_type::rows_at_once * ring.stride);
    } else if (exists) {
        copy_any_tile(work, ring, slot, first_key, end_key);
    }
    dkv_fast::copies_commit();
}

/* The oldest tile that was sent for is there, for the whole warp. */
__device__ inline void await_tile()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(ring_tiles - 1) : "memory");
    __syncwarp();
}

template <int blocks>
__device__ inline uint4 tile_words(const key_ring<blocks> &ring, uint32_t slot, int octet, int b)
{
    uint32_t words[4];
    dkv_fast::load_shared(ring.tiles + slot * key_ring<blocks>::tile_bytes +
                              (b % 2 ? ring.odd : ring.even) + b / 2 * 128 +
                              octet * 8 * key_ring<blocks>::pieces * 16,
                          words);
    return {words[0], words[1], words[2], words[3]};
}

/* A chunk's queries, the words of products, for as long as a warp has no other chunk. */
template <int blocks> struct held_queries {
    uint4 words[n_columns / 2][blocks][2];
};

template <int blocks>
__device__ inline void hold_queries(const job &work, const row_group &group,
                                    held_queries<blocks> &held)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < n_columns / 2 * blocks; k++) {
        const uint32_t slot = k / blocks * 16 + lane / 4;
        const uint32_t dim = k % blocks * 32 + lane % 4 * 8;
        const uint4 low = query_words<blocks>(work, group, slot, dim);
        const uint4 high = query_words<blocks>(work, group, slot + 8, dim);
        held.words[k / blocks][k % blocks][0] = {low.x, high.x, low.y, high.y};
        held.words[k / blocks][k % blocks][1] = {low.z, high.z, low.w, high.w};
    }
}

/* As products(). */
template <bool bf16, int blocks>
__device__ inline void ring_products(const key_ring<blocks> &ring, uint32_t slot,
                                     const held_queries<blocks> &held, logits &z)
{
#pragma unroll
    for (int k = 0; k < n_columns * 4; k++)
        z[k / 4][k % 4] = 0.0f;
#pragma unroll
    for (int b = 0; b < blocks; b++) {
        const uint4 keys[2] = {tile_words(ring, slot, 0, b), tile_words(ring, slot, 1, b)};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < n_columns; r += 2)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    multiply<bf16>(z[r][2 * i], z[r][2 * i + 1], z[r + 1][2 * i],
                                   z[r + 1][2 * i + 1], held.words[r / 2][b][half],
                                   half ? keys[i].z : keys[i].x, half ? keys[i].w : keys[i].y);
    }
}

} // namespace

#endif
