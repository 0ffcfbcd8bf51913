/* Tiles of the attention scorer's crews: how a warpgroup fetches 64 keys, multiplies them with up
 * to 128 query rows, and what a lane then has. Included by attention.cu.
 *
 * Keys are the 64-row operand of a product and queries its columns, both in shared memory in
 * wgmma's 128-byte permuted layout: eight rows are dimensions / 64 blocks of 1024 bytes, a block is
 * eight rows of 128 bytes, whose 16-byte columns are permuted by the row's number.
 */
#ifndef DKV_KERNELS_CUDA_ATTENTION_CREW_TILES_CUH
#define DKV_KERNELS_CUDA_ATTENTION_CREW_TILES_CUH

#include <type_traits>

#include "kernels/cuda/attention_tiles.cuh"
#include "kernels/cuda/fast_wgmma.cuh"

namespace
{

constexpr uint32_t crew_max = 32; /* thread blocks of a crew */
constexpr uint32_t crew_tile_keys = 64;
constexpr int group_threads = 128;

constexpr uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* A kernel's sizes, for `blocks` of 32 dimensions and `columns` of 8 slots. More groups hide more
 * of each other's latency, and have fewer registers. */
template <bool is_bf16, int n_blocks, int n_columns> struct crew_shape {
    static constexpr bool bf16 = is_bf16;
    static constexpr int blocks = n_blocks;
    static constexpr int columns = n_columns;
    static constexpr uint32_t slots = 8 * columns;
    static constexpr int groups = columns == 4 ? 4 : columns == 8 ? 3 : 2;
    static constexpr int threads = groups * group_threads;
    /* Tiles on their way, of a group; and those whose terms there is room for. */
    static constexpr int ring_tiles = (columns == 4 ? 1 : 2) * (4 / blocks);
    static constexpr int kept_tiles = columns == 4 ? 4 : columns == 8 ? 2 : 1;
    static constexpr int held_tiles = columns == 4 ? 2 : columns == 8 ? 1 : 0;

    static constexpr uint32_t pieces = blocks * 4;                   /* of 16 bytes, of a row */
    static constexpr uint32_t rows_at_once = group_threads / pieces; /* that a group copies */
    static constexpr uint32_t rows_of_warp = 32 / pieces;
    static constexpr uint32_t eight_rows = blocks / 2 * 1024;
    static constexpr uint32_t query_bytes = columns * eight_rows;
    static constexpr uint32_t tile_bytes = crew_tile_keys / 8 * eight_rows;
    static constexpr uint32_t kept_bytes = crew_tile_keys * slots * sizeof(float);
    static constexpr uint32_t room_bytes = kept_tiles * kept_bytes;
    /* Until there are terms, the end of their room has tiles on their way, too: as many as are read
     * before terms of the tiles before them get there. */
    static constexpr int early_tiles = smaller(room_bytes / tile_bytes,
                                               (room_bytes - tile_bytes) / kept_bytes + 1);
    static constexpr int places = early_tiles + ring_tiles;
    static constexpr uint32_t group_bytes = room_bytes + ring_tiles * tile_bytes;
    static constexpr size_t shared_bytes = 1024 + query_bytes + groups * group_bytes;
};

/* A lane has products, logits or terms of two keys and 2 * columns slots: x[j][c] and x[j][2 + c]
 * are of slot 8 j + 2 (lane % 4) + c, and of key crew_place.key of the tile and eight behind. */
template <int columns> using crew_values = float[columns][4];

/* Where a thread stands in its group. */
struct crew_place {
    int group; /* the same for all lanes */
    int thread;
    int warp;
    int lane;
    int column; /* the first of its pairs of slots */
    int key;    /* the first of its keys in a tile */
};

__device__ inline crew_place crew_place_of_thread()
{
    crew_place at;
    at.group = __shfl_sync(~0u, threadIdx.x / group_threads, 0);
    at.thread = threadIdx.x % group_threads;
    at.warp = at.thread / 32;
    at.lane = threadIdx.x % 32;
    at.column = at.lane % 4 * 2;
    at.key = at.warp * 16 + at.lane / 4;
    return at;
}

/* ---- fetching ---- */

/* A group's places for tiles, and what a thread needs to fill them. Those from
 * shape::early_tiles on are a ring. */
template <class shape> struct crew_ring {
    uint32_t tiles;                         /* shared address of place 0 */
    uint32_t copy_to;                       /* offset of the thread's piece in a tile */
    const unsigned char *from;              /* its piece of key 0 */
    int64_t stride;                         /* of rows */
    bool simple;                            /* rows follow each other, all are full */
    unsigned char (*there)[crew_tile_keys]; /* of each place: which keys there are */
};

template <class shape> __device__ inline uint32_t piece_offset(uint32_t row, uint32_t piece)
{
    return row / 8 * shape::eight_rows + piece / 8 * 1024 + row % 8 * 128 +
           ((piece % 8 ^ row % 8) << 4);
}

template <class shape>
__device__ inline crew_ring<shape> crew_ring_of(const job &work, const crew_place &at,
                                                uint32_t tiles,
                                                unsigned char (*there)[crew_tile_keys])
{
    const dkv_cu_rows &rows = work.block.k;
    const uint32_t row = at.thread / shape::pieces;
    const uint32_t piece = at.thread % shape::pieces;
    crew_ring<shape> ring;
    ring.tiles = tiles;
    ring.copy_to = piece_offset<shape>(row, piece);
    ring.from = work.unit.k + (work.block.valid_from + row) * rows.token_stride + piece * 16;
    ring.stride = rows.token_stride;
    ring.simple = rows.page_tokens == 0 && !work.unit.mask &&
                  work.block.head_dim == 8 * shape::pieces;
    ring.there = there;
    return ring;
}

template <class shape>
__device__ inline bool is_simple_tile(const job &work, const crew_ring<shape> &ring,
                                      uint32_t first_key)
{
    return ring.simple && first_key + crew_tile_keys <= work.block.n_valid;
}

/* Any keys: masked, paged, with fewer dimensions, behind the end. A lane finds one of the rows that
 * its warp copies. */
template <class shape>
__device__ inline void fetch_any_tile(const job &work, const crew_ring<shape> &ring, uint32_t place,
                                      uint32_t first_key)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x % group_threads / 32;
    const uint32_t piece = lane % shape::pieces;
    const uint32_t found = warp * shape::rows_of_warp + lane % shape::rows_of_warp +
                           lane / shape::rows_of_warp * shape::rows_at_once;
    const unsigned char *row = nullptr;
    if (lane < 16) {
        const uint32_t key = first_key + found;
        if (key < work.block.n_valid && !dkv_cu_masked(work.unit, key))
            row = dkv_cu_row(work.block.k, work.unit.k, work.block.valid_from + key,
                             &work.unit.report->bad_k_entry);
        ring.there[place][found] = row != nullptr;
    }
    uint32_t to = ring.tiles + place * shape::tile_bytes + ring.copy_to;
#pragma unroll
    for (uint32_t i = 0; i < crew_tile_keys / shape::rows_at_once; i++) {
        const unsigned char *const from = reinterpret_cast<const unsigned char *>(
            __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row),
                        i * shape::rows_of_warp + lane / shape::pieces));
        const bool exists = from && piece * 8 < work.block.head_dim;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(exists ? from + piece * 16 : work.unit.k), "r"(exists ? 16 : 0)
                     : "memory");
        to += shape::rows_at_once / 8 * shape::eight_rows;
    }
}

/* Sends for a tile, if there is one; a group of copies either way. */
template <class shape>
__device__ inline void fetch_tile(const job &work, const crew_ring<shape> &ring, uint32_t place,
                                  bool exists, uint32_t first_key)
{
    if (exists && is_simple_tile(work, ring, first_key)) {
        const unsigned char *from = ring.from + first_key * ring.stride;
        const uint32_t to = ring.tiles + place * shape::tile_bytes + ring.copy_to;
#pragma unroll
        for (uint32_t i = 0; i < crew_tile_keys / shape::rows_at_once; i++)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             to + i * (shape::rows_at_once / 8 * shape::eight_rows)),
                         "l"(from + i * shape::rows_at_once * ring.stride)
                         : "memory");
    } else if (exists) {
        fetch_any_tile(work, ring, place, first_key);
    }
    dkv_fast::copies_commit();
}

/* The row that a slot is of. */
struct slot_row {
    uint32_t head;
    uint32_t t;
};

__device__ inline slot_row row_of_slot(const place &at, uint32_t slot)
{
    const uint32_t head = slot * at.head_inverse >> 16;
    return {head, slot - head * at.per_head};
}

/* The queries that a thread places. They are loaded before any keys are sent for, since they would
 * have to wait for all of those. */
template <class shape> struct crew_queries {
    static constexpr uint32_t each = (shape::slots * shape::pieces + shape::threads - 1) /
                                     shape::threads;
    uint4 words[each];
};

template <class shape>
__device__ inline void load_crew_queries(const job &work, crew_queries<shape> &queries)
{
    const dkv_cu_block &block = work.block;
#pragma unroll
    for (uint32_t i = 0; i < queries.each; i++) {
        const uint32_t at = i * shape::threads + threadIdx.x;
        const uint32_t slot = at / shape::pieces;
        const uint32_t piece = at % shape::pieces;
        const slot_row row = row_of_slot(work.at, slot);
        queries.words[i] = {0, 0, 0, 0};
        if (slot < work.at.n_slots && row.t < block.window && piece * 8 < block.head_dim)
            queries.words[i] = *reinterpret_cast<const uint4 *>(
                work.unit.q + row.head * block.q_head_stride + row.t * block.q_row_stride +
                piece * 16);
    }
}

/* As the other operand, by all threads. */
template <class shape>
__device__ inline void place_queries(const crew_queries<shape> &queries, uint32_t to)
{
#pragma unroll
    for (uint32_t i = 0; i < queries.each; i++) {
        const uint32_t at = i * shape::threads + threadIdx.x;
        const uint4 &words = queries.words[i];
        if (at < shape::slots * shape::pieces)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                             to + piece_offset<shape>(at / shape::pieces, at % shape::pieces)),
                         "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                         : "memory");
    }
}

/* The last keys that rows see; -1: there is no row. */
template <class shape> __device__ inline void place_last_keys(const job &work, int *last_keys)
{
    const dkv_cu_block &block = work.block;
    const uint32_t slot = threadIdx.x;
    if (slot >= shape::slots)
        return;
    const slot_row row = row_of_slot(work.at, slot);
    const bool exists = slot < work.at.n_slots && row.t < block.window;
    last_keys[slot] = exists ? static_cast<int>(block.n_valid - block.window + row.t) : -1;
}

/* ---- logits ---- */

/* What turns products into logits, for a whole unit. */
struct crew_rule {
    uint32_t queries;   /* shared address */
    uint32_t open_keys; /* keys before this one are seen by every row */
    const int *last;    /* [slots] the last key that a row sees */
    scaling scale;
};

/* Products to logits, but for the factor that is returned; `odd` becomes NaN with the first that is
 * no number. */
template <int columns>
__device__ inline float scale_products(const scaling &scale, crew_values<columns> &x, float &odd)
{
#pragma unroll
    for (int k = 0; k < 4 * columns; k++)
        odd = fmaf(x[k / 4][k % 4], 0.0f, odd);
    if (!(scale.outer > 0))
        return scale.plain;
#pragma unroll
    for (int k = 0; k < 4 * columns; k++)
        x[k / 4][k % 4] = scale.outer * tanh_fast(x[k / 4][k % 4] * scale.inner);
    return 1.0f;
}

/* Logits of keys that a row does not see become -inf. */
template <int columns>
__device__ inline void hide_keys(const crew_place &at, const int *last, uint32_t first_key,
                                 const bool (&there)[2], float scale, crew_values<columns> &x)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = there[half] ? static_cast<int>(first_key + at.key + half * 8) : INT32_MAX;
#pragma unroll
        for (int k = 0; k < 2 * columns; k++) {
            float &one = x[k / 2][half * 2 + k % 2];
            one = key > last[k / 2 * 8 + at.column + k % 2] ? -INFINITY : one * scale;
        }
    }
}

/* Products of the tile in `place` and the queries. More than 64 slots are two products. */
template <class shape>
__device__ inline void multiply_tile(const crew_ring<shape> &ring, uint32_t place, uint32_t queries,
                                     crew_values<shape::columns> &x)
{
    typedef std::conditional_t<shape::bf16, dkv_fast::bf16_type, dkv_fast::fp16_type> type;
    constexpr int at_once = shape::columns < 8 ? shape::columns : 8;
    const uint64_t keys = dkv_fast::matrix_descriptor(ring.tiles + place * shape::tile_bytes, 16,
                                                      shape::eight_rows);
    const uint64_t rows = dkv_fast::matrix_descriptor(queries, 16, shape::eight_rows);
    dkv_fast::warpgroup_fence();
#pragma unroll
    for (int k = 0; k < 2 * shape::blocks; k++) {
        const int step = (k / 4 * 1024 + k % 4 * 32) >> 4;
#pragma unroll
        for (int j = 0; j < shape::columns; j += at_once)
            dkv_fast::warpgroup_mma_shared<type>(*reinterpret_cast<crew_values<at_once> *>(&x[j]),
                                                 keys + step,
                                                 rows + step + j * (shape::eight_rows >> 4), k > 0);
    }
    dkv_fast::warpgroup_commit();
    dkv_fast::warpgroup_wait<0>();
    dkv_fast::hold(x);
}

/* The tile in `place` is there: for this thread, all but as many groups of copies as there are
 * places, of the ring or all. */
template <class shape> __device__ inline void await_tile(bool early)
{
    if (early)
        asm volatile("cp.async.wait_group %0;" ::"n"(shape::places - 1) : "memory");
    else
        asm volatile("cp.async.wait_group %0;" ::"n"(shape::ring_tiles - 1) : "memory");
}

/* The logits of the oldest tile that was sent for, which is in `place`, but for the factor that is
 * returned; then sends for another one there. By all of a group. `early`: it was sent for before
 * anything was multiplied. */
template <class shape>
__device__ inline float next_logits(const job &work, const crew_ring<shape> &ring,
                                    const crew_place &at, const crew_rule &rule, uint32_t place,
                                    bool early, uint32_t first_key, bool more, uint32_t next_key,
                                    float &odd, crew_values<shape::columns> &x)
{
    bool there[2] = {true, true};
    const bool simple = is_simple_tile(work, ring, first_key);
    await_tile<shape>(early);
    dkv_fast::fence_async_proxy();
    dkv_fast::group_barrier(1 + at.group);
    multiply_tile<shape>(ring, place, rule.queries, x);
    if (!simple) {
        there[0] = ring.there[place][at.key];
        there[1] = ring.there[place][at.key + 8];
    }
    dkv_fast::group_barrier(1 + at.group); /* everyone has read it */
    fetch_tile(work, ring, place, more, next_key);
    const float scale = scale_products<shape::columns>(rule.scale, x, odd);
    if (simple && first_key + crew_tile_keys <= rule.open_keys)
        return scale;
    hide_keys<shape::columns>(at, rule.last, first_key, there, scale, x);
    return 1.0f;
}

} // namespace

#endif
