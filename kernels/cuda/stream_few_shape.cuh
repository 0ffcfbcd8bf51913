/* Shapes and shared memory of the stream scorer's kernels for up to 64 rows of a KV head.
 *
 * There the tensor cores need a fraction of what memory takes, so both passes should take as long
 * as K and V do: all that counts is that copies are always on their way. Both computing groups have
 * the same rows and take tiles in turn, which gives each twice the time for one; a deep ring
 * bridges what an item's beginning and end take. Pass B goes through the items in the opposite
 * order, and through an item from its end: what pass A has read last is still in the L2 cache.
 *
 * An item has an even number of tiles, so that a place of the ring always belongs to the same
 * group. A tile past the unit's end repeats its last key, which no row sees.
 *
 * What a group does with a tile is what the fast scorer does (fast_pass_a.cuh, fast_pass_b.cuh):
 * rows as the 64-row operand in pass A, with hi and lo of the weights; in pass B keys, beside 32
 * rows at a time. Between them a merge of its own (stream_few_merge.cuh).
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FEW_SHAPE_CUH
#define DKV_KERNELS_CUDA_STREAM_FEW_SHAPE_CUH

#include "kernels/cuda/stream_shape.cuh"

namespace dkv_stream
{

template <class element, int head_dim> struct few_shape : shape<element, head_dim, 2> {
    static constexpr int TILES = 12 * 128 / head_dim; /* of the ring: K V K V .. */
};

/* The same for pass B, which has its rows in shared memory, too. */
template <class S> struct few_shape_b : S {
    static constexpr int TILES = 8 * 128 / S::DIM;
};

constexpr int FEW_CHUNKS_MAX = 64; /* of a unit */

/* What pass B needs of a unit's rows, which copies it whole. At the start of unit.work; |v|^2 of
 * the keys and the chunks' partials follow. */
template <class S> struct few_rows {
    unsigned char query[S::OPERAND_BYTES]; /* as operand */
    merged<S> rows;
};

template <class S> __device__ __forceinline__ few_rows<S> &rows_of(const job &work)
{
    return *reinterpret_cast<few_rows<S> *>(work.unit.work);
}

/* Keys that there is room for |v|^2 of. */
__host__ __device__ __forceinline__ uint32_t padded_keys(uint32_t keys)
{
    return (tiles_of(keys) + GROUPS - 1) / GROUPS * GROUPS * TILE;
}

template <class S> __device__ __forceinline__ float *few_squares_of(const job &work)
{
    return reinterpret_cast<float *>(work.unit.work + sizeof(few_rows<S>));
}

template <class S> __device__ __forceinline__ unsigned char *few_partials_of(const job &work)
{
    return reinterpret_cast<unsigned char *>(few_squares_of<S>(work) +
                                             padded_keys(work.block.n_valid));
}

/* What the merge makes of a row: with s the sum of its partials and v its top key's value, the
 * output is a_s s + a_v v, and what is left of it without that key, less v, d_s s + d_v v. */
struct __align__(16) row_factors
{
    float a_s;
    float a_v;
    float d_s; /* 0: no key is singled out */
    float d_v;
    float base;                 /* what sums are relative to */
    int top;                    /* the top key, -1: its value is not wanted */
    unsigned long long outside; /* bit c: chunk c's top key is not in its sums, and is to join */
};

/* Where the threads that merge meet. */
template <class S> struct few_merge_room {
    float weights[FEW_CHUNKS_MAX][S::ROWS]; /* of the chunks' partials */
    row_factors rows[S::ROWS];
};

template <class S> struct few_shared_a {
    unsigned char places[S::TILES][S::TILE_BYTES];
    unsigned char room[S::PARTIAL_BYTES]; /* a group's partial, for the other */
    tile_ring<S> tiles;
    job_ring items;
    unsigned long long room_full;
    unsigned long long room_empty;
};

template <class S> struct few_shared_b {
    unsigned char places[S::TILES][S::TILE_BYTES];
    few_rows<S> rows;
    float squares[S::TILES / 2][TILE]; /* |v|^2 of the keys of each tile of the ring */
    tile_ring<S> tiles;
    job_ring items;
    unsigned long long rows_full;
    unsigned long long rows_empty;
};

/* Tiles of an item. */
__device__ __forceinline__ int few_tiles(const job &work)
{
    return work.item.chunks ? (item_tiles(work) + GROUPS - 1) / GROUPS * GROUPS : 0;
}

} // namespace dkv_stream

#endif
