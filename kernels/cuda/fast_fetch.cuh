/* The fetching warps: what brings descriptors, tiles, queries and merged rows into shared memory.
 *
 * K and V of pass A have a warp each, which take turns at the places of one ring of tiles; so
 * a place's next tile comes from the other warp, and pass A must give places back in the order in
 * which they were filled (fast_pass_a.cuh). Pass B's ring and the descriptors have a warp each.
 */
#ifndef DKV_KERNELS_CUDA_FAST_FETCH_CUH
#define DKV_KERNELS_CUDA_FAST_FETCH_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

/* Keys or values of an item, as a fetching warp sees them. */
template <class S> struct tile_source {
    static constexpr int COLUMNS = S::STORED_BYTES < 128 ? 4 : 8; /* of 16 bytes, side by side */
    static constexpr int ROWS = 32 / COLUMNS;                     /* at once */
    static constexpr int BLOCKS = S::STORED_BYTES / 16 / COLUMNS;
    static constexpr int PERIOD = 8 / ROWS; /* rounds after which rows are permuted alike again */
    static constexpr int EIGHT_BYTES = 8 * S::STORED_BYTES;

    const unsigned char *dense; /* the lane's place in the first rows, if they are adjacent */
    int dense_halves;           /* which are, and within the unit */
    const unsigned char *ahead; /* the lane's row of half `ahead_of`, whose table entry is loaded
                                 * while nobody waits for it */
    int ahead_of = -1;
    bool keys; /* or values */

    __device__ __forceinline__ const dkv_cu_rows &rows_of(const job &work) const
    {
        return keys ? work.block.k : work.block.v;
    }

    __device__ __forceinline__ tile_source(const job &work, bool of_keys, int lane) : keys(of_keys)
    {
        const dkv_cu_rows &rows = rows_of(work);
        const uint32_t first = item_first_key(work.item);
        dense = (keys ? work.unit.k : work.unit.v) +
                (work.block.valid_from + first + lane / COLUMNS) *
                    static_cast<size_t>(S::STORED_BYTES) +
                16 * (lane % COLUMNS);
        dense_halves = rows.token_stride == S::STORED_BYTES && rows.page_tokens == 0
                           ? static_cast<int>(work.block.n_valid - first) / HALF
                           : 0;
    }

    __device__ __forceinline__ const unsigned char *row_of_half(const job &work, int half_index,
                                                                int lane) const
    {
        unsigned long long *bad = keys ? &work.unit.report->bad_k_entry
                                       : &work.unit.report->bad_v_entry;
        const uint32_t key = min(item_first_key(work.item) + half_index * HALF + lane,
                                 work.block.n_valid - 1);
        return dkv_cu_row(rows_of(work), keys ? work.unit.k : work.unit.v,
                          work.block.valid_from + key, bad);
    }

    /* Starts the copies of 32 rows, 16 bytes a lane. Rows past the unit's end repeat the last key:
     * finite numbers that nobody looks at. A row behind a bad page table entry is zeros; the entry
     * is reported and the unit's result void. */
    __device__ __forceinline__ void copy_half(const job &work, int half_index, uint32_t half,
                                              uint64_t policy, int lane_of_warp)
    {
        const int lane = here(lane_of_warp);
        const int row_of = lane / COLUMNS;
        const int column = lane % COLUMNS;
        uint32_t to[PERIOD];
#pragma unroll
        for (int i = 0; i < PERIOD; i++)
            to[i] = half + element_offset<S>(ROWS * i + row_of, column);
        if (half_index < dense_halves) {
            const unsigned char *row = dense +
                                       half_index * static_cast<size_t>(HALF * S::STORED_BYTES);
#pragma unroll
            for (int i = 0; i < HALF / ROWS; i++)
#pragma unroll
                for (int block = 0; block < BLOCKS; block++)
                    copy_16(to[i % PERIOD] + i / PERIOD * EIGHT_BYTES + 1024 * block,
                            row + ROWS * i * S::STORED_BYTES + 128 * block, true, policy);
            return;
        }
        const unsigned char *base = keys ? work.unit.k : work.unit.v;
        const unsigned char *mine = half_index == ahead_of ? ahead
                                                           : row_of_half(work, half_index, lane);
#pragma unroll
        for (int i = 0; i < HALF / ROWS; i++) {
            const unsigned char *row = reinterpret_cast<const unsigned char *>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), ROWS * i + row_of));
            const bool exists = row != nullptr;
            row = (exists ? row : base) + 16 * column;
#pragma unroll
            for (int block = 0; block < BLOCKS; block++)
                copy_16(to[i % PERIOD] + i / PERIOD * EIGHT_BYTES + 1024 * block, row + 128 * block,
                        exists, policy);
        }
        ahead_of = half_index + 1;
        ahead = row_of_half(work, ahead_of, lane);
    }
};

/* One warp's part of filling a ring of tiles: all halves that it copies pass through here. */
template <class S, int size> struct tile_stream {
    unsigned char (&tiles)[size][S::TILE_BYTES];
    unsigned long long (&full)[size];
    unsigned long long (&empty)[size];
    int lane;
    ring<size> next;

    __device__ __forceinline__ tile_stream(unsigned char (&in)[size][S::TILE_BYTES],
                                           unsigned long long (&full_of)[size],
                                           unsigned long long (&empty_of)[size], int of_lane)
        : tiles(in), full(full_of), empty(empty_of), lane(of_lane)
    {
    }

    /* All halves of a tile. */
    __device__ __forceinline__ void fetch(tile_source<S> &from, const job &work, int tile,
                                          uint64_t policy)
    {
        mbarrier_wait(shared_address(&empty[next.index]), next.parity ^ 1);
#pragma unroll 1
        for (int h = 0; h < S::TILE_BYTES / S::HALF_BYTES; h++)
            from.copy_half(work, S::TILE_BYTES / S::HALF_BYTES * tile + h,
                           shared_address(tiles[next.index]) + h * S::HALF_BYTES, policy, lane);
        mbarrier_arrive_after_copies(shared_address(&full[next.index]));
        next.advance();
    }
};

/* What pass A reads: K and V of every tile, in turn; one warp for each, which run the same code, so
 * that it stays in the instruction caches. K of kept tiles is never read again. */
template <class S>
__device__ __forceinline__ void fetch_a(shared_memory<S> &shared, const dkv_fast_args &args,
                                        bool keys, int lane)
{
    tile_stream<S, S::A_TILES> stream(shared.a_tiles, shared.a_full, shared.a_empty, lane);
    if (!keys)
        stream.next.advance();
    const uint64_t once = policy_evict_first();
    const uint64_t again = policy_normal();
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        const int tiles = work.item.chunks != 0 ? item_tiles(work) : 0;
        const int first_kept = first_kept_tile<S>(tiles);
        tile_source<S> from(work, keys, lane);
        for (int tile = 0; tile < tiles; tile++) {
            stream.fetch(from, work, tile, keys && tile >= first_kept ? once : again);
            stream.next.advance(); /* the other warp's place */
        }
        job_release(shared, turn, lane);
    }
}

/* What pass B reads, in its order of tiles: K where the logits were not kept, then V. */
template <class S>
__device__ __forceinline__ void fetch_b(shared_memory<S> &shared, const dkv_fast_args &args,
                                        int lane)
{
    tile_stream<S, S::B_TILES> stream(shared.b_tiles, shared.b_full, shared.b_empty, lane);
    const uint64_t once = policy_evict_first();
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        const int tiles = work.item.chunks != 0 ? item_tiles(work) : 0;
        const int first_kept = first_kept_tile<S>(tiles);
        tile_source<S> keys(work, true, lane);
        tile_source<S> values(work, false, lane);
        for (int i = 0; i < tiles; i++) {
            const bool kept = first_kept + i < tiles;
            const int tile = kept ? first_kept + i : first_kept + i - tiles;
            if (!kept)
                stream.fetch(keys, work, tile, once);
            stream.fetch(values, work, tile, once);
        }
        job_release(shared, turn, lane);
    }
}

/* Brings the descriptors of a turn. */
template <class S>
__device__ __forceinline__ void fetch_job(shared_memory<S> &shared, const dkv_fast_args &args,
                                          uint32_t turn, int lane)
{
    if (turn >= args.turns)
        return;
    const uint32_t slot = turn % JOBS;
    const dkv_fast_item item = args.items[turn * gridDim.x + blockIdx.x];
    mbarrier_wait(shared_address(&shared.job_empty[slot]), (turn / JOBS & 1) ^ 1);
    job &to = shared.jobs[slot];
    if (item.chunks != 0) {
        copy_words(to.unit, args.units + item.unit, lane);
        copy_words(to.block, args.blocks + item.block, lane);
    }
    if (lane == 0)
        to.item = item;
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(shared_address(&shared.job_full[slot]));
}

/* Copies the query of an item as operand of pass B. */
template <class S>
__device__ __forceinline__ void copy_query(shared_memory<S> &shared, const job &work, int lane)
{
    for (int row = 0; row < S::ROWS; row++) {
        const uint32_t unit_row = work.item.row_group * S::ROWS + row;
        const unsigned char *from = query_row(work, unit_row);
        for (int word = lane; word < S::DIM / 2; word += 32)
            copy_4(shared_address(shared.query) + pair_offset<S>(row, word),
                   (from ? from : work.unit.work) + 4 * word, from != nullptr);
    }
}

/* Brings what pass B needs of an item's rows as soon as they are merged. */
template <class S>
__device__ __forceinline__ void fetch_rows(shared_memory<S> &shared, const dkv_fast_args &args,
                                           const job &work, uint32_t empty_parity, int lane)
{
    const uint32_t full = shared_address(&shared.rows_full);
    mbarrier_wait(shared_address(&shared.rows_empty), empty_parity);
    if (item_tiles(work) > S::SLOTS)
        copy_query(shared, work, lane);
    mbarrier_arrive_after_copies(full);
    if (lane == 0) {
        counter_wait(&args.counters[work.item.counter].merged, work.item.chunks);
        mbarrier_arrive_expecting(full, sizeof(shared.rows));
        copy_bulk(shared_address(&shared.rows),
                  &reinterpret_cast<const merged<S> *>(work.unit.work)[work.item.row_group],
                  sizeof(shared.rows), full);
    }
    __syncwarp();
}

/* Keeps descriptors at hand, and feeds pass B with merged rows. */
template <class S>
__device__ __forceinline__ void fetch_items(shared_memory<S> &shared, const dkv_fast_args &args,
                                            int lane)
{
    ring<S::TURNS> partials;
    uint32_t empty_parity = 1;
    for (uint32_t turn = 0; turn < JOBS - 1; turn++)
        fetch_job(shared, args, turn, lane);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0) {
            fetch_rows(shared, args, work, empty_parity, lane);
            empty_parity ^= 1;
            /* The unit is merged: nobody reads this thread block's partial any more. */
            if (lane == 0)
                mbarrier_arrive(shared_address(&shared.partial_empty[partials.index]));
        }
        partials.advance();
        job_release(shared, turn, lane);
        fetch_job(shared, args, turn + JOBS - 1, lane);
    }
}

} // namespace dkv_fast

#endif
