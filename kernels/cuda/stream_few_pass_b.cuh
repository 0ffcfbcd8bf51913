/* Pass B of the stream scorer for up to 64 rows: the score of every key, as fast_pass_b.cuh says,
 * from logits made again; |v|^2 comes from pass A. A group has a tile to itself, and a warp 16 keys
 * of it: nobody waits for another warp.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FEW_PASS_B_CUH
#define DKV_KERNELS_CUDA_STREAM_FEW_PASS_B_CUH

#include "kernels/cuda/fast_pass_b.cuh"
#include "kernels/cuda/stream_few_shape.cuh"

namespace dkv_stream
{

/* In pass B an item is a range of pairs of tiles: chunk_keys = GROUPS * TILE, chunk the first one,
 * chunks how many. */
__device__ __forceinline__ int pair_tiles(const dkv_fast_item &item)
{
    return item.chunks * GROUPS;
}

/* It goes through items and their tiles from the end: the row of the list of a turn. */
__device__ __forceinline__ uint32_t item_row(const stream_args &args, uint32_t turn)
{
    return args.turns - 1 - turn;
}

/* x in another register: what else is written to where the tensor cores put their results costs
 * their running beside other work. */
__device__ __forceinline__ float copied(float x)
{
    float y;
    asm volatile("mov.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* A group's part of pass B. It waits for a tile's products, since the other group has work
 * meanwhile and memory takes longer than both. */
template <class S> struct few_group_b {
    static constexpr int BLOCKS = S::ROWS / BLOCK_ROWS;

    few_shared_b<S> &shared;
    place<S> at;
    int group;
    tile_pair<S> now;
    uint32_t rows_parity = 0;
    uint32_t unit = ~0u; /* whose rows are there */
    row_constants rows[BLOCKS][ROW_TILES][2] = {};
    float largest_norm = 0.0f; /* |a|^2 of the thread's rows */

    __device__ __forceinline__ few_group_b(few_shared_b<S> &in, int number, int thread)
        : shared(in), at(thread), group(number)
    {
        now.at.advance(2 * group);
    }

    /* Waits for another unit's rows: none is read any more of the one before. */
    __device__ __forceinline__ void wait_rows(uint32_t of_unit)
    {
        if (unit != ~0u) {
            __syncwarp();
            if (at.lane == 0)
                mbarrier_arrive(shared_address(&shared.rows_empty));
        }
        unit = of_unit;
        mbarrier_wait(shared_address(&shared.rows_full), rows_parity);
        rows_parity ^= 1;
        fence_async_proxy();
        largest_norm = 0.0f;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            load_rows(shared.rows.rows, block, at.t, rows[block]);
#pragma unroll
            for (int j = 0; j < ROW_TILES; j++)
                largest_norm = fmaxf(largest_norm,
                                     fmaxf(rows[block][j][0].norm, rows[block][j][1].norm));
        }
    }

    /* |a - v|^2 of 32 rows from a.v by hi and lo of a; whether none may be noise. */
    __device__ __forceinline__ bool make_distances(const float (&dot)[2 * ROW_TILES][4],
                                                   const float (&square)[2], int block,
                                                   float (&distance)[ROW_TILES][4]) const
    {
        float least = INFINITY;
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                distance[j][c] = fmaf(-2.0f, dot[j][c] + dot[ROW_TILES + j][c],
                                      rows[block][j][c & 1].norm + square[c >> 1]);
                least = fminf(least, distance[j][c]);
            }
        return least >= CANCELS * (largest_norm + fmaxf(square[0], square[1]));
    }

    /* Those that cancel are summed again the plain way. Rare. */
    __device__ __forceinline__ void distances_that_cancel(const job &work, const float (&square)[2],
                                                          int block,
                                                          float (&distance)[ROW_TILES][4]) const
    {
        unsigned cancels = 0; /* a bit 4j + c each */
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (distance[j][c] < CANCELS * (rows[block][j][c & 1].norm + square[c >> 1]))
                    cancels |= 1u << (4 * j + c);
            }
        distances_again<S>(cancels, shared_address(shared.rows.rows.a[block]), now.values(shared),
                           work.block.v.dtype, at, distance);
    }

    /* Starts dot = a.v and key_dot = q.k of the tile `now` and 32 rows. */
    __device__ __forceinline__ void start_block(int block, float (&dot)[2 * ROW_TILES][4],
                                                float (&key_dot)[ROW_TILES][4]) const
    {
        start_row_product<S>(key_dot, now.keys(shared),
                             shared_address(shared.rows.query) +
                                 block * ROW_TILES * S::EIGHT_BYTES);
        start_row_product<S>(dot, now.values(shared), shared_address(shared.rows.rows.a[block]));
    }

    /* Adds (p / (1 - p))^2 |a - v|^2 of 32 rows to the sums of the thread's keys: of all ways to
     * write it 1 / (1 / p - 1) takes least. p has the range factor. */
    __device__ __forceinline__ void add(const job &work, const logit_rule &rule,
                                        const logit_factor &logits, int block, int first_key,
                                        float (&z)[ROW_TILES][4],
                                        const float (&distance)[ROW_TILES][4],
                                        float (&sum)[2]) const
    {
        const merged<S> &from = shared.rows.rows;
        const int first_row = block * BLOCK_ROWS;
        const bool is_plain = logits.plain && (first_key + TILE <= rule.open_keys ||
                                               first_key >= static_cast<int>(work.block.n_valid));
        if (!is_plain)
            make_logits(work, rule, first_row, first_key, at, z);
        const float factor = is_plain ? rule.to_octaves : 1.0f;
        const int mine = from.top[first_row + at.lane] - first_key - 16 * at.warp;
        if (__any_sync(~0u, static_cast<unsigned>(mine) < 16))
            take_top_terms(from, first_row, mine, at, z, sum);
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float odds = rcp_fast(
                    exp2_fast(fmaf(z[j][c], -factor, rows[block][j][c & 1].shift)) - RANGE);
                sum[c >> 1] = fmaf(odds * odds, distance[j][c], sum[c >> 1]);
            }
    }

    /* While the tensor cores are at 32 rows of a tile, the terms of those before are added. */
    __device__ __forceinline__ void run(const job &work)
    {
        const logit_rule rule(work);
        const logit_factor logits(rule);
        const score_sink sink(work);
        const int tiles = pair_tiles(work.item);
        int first_key = static_cast<int>(item_first_key(work.item)) + (tiles - 1 - group) * TILE;
        if (unit != work.item.unit)
            wait_rows(work.item.unit);
        float z[ROW_TILES][4]; /* of the rows before: at first none, of a key that is none */
        float distance[ROW_TILES][4];
        float sum[2] = {0.0f, 0.0f};
        int key_before = static_cast<int>(sink.n_keys);
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                z[j][c] = -INFINITY;
                distance[j][c] = 0.0f;
            }
#pragma unroll 1
        for (int tile = group; tile < tiles; tile += GROUPS, first_key -= GROUPS * TILE) {
            mbarrier_wait_both(now.keys_full(shared), now.at.parity, now.values_full(shared),
                               now.at.parity);
            fence_async_proxy();
            const float *squares = shared.squares[now.at.index / 2] + 16 * at.warp + at.g;
            const float square[2] = {squares[0], squares[8]};
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                float dot[2 * ROW_TILES][4];
                float key_dot[ROW_TILES][4];
                start_block(block, dot, key_dot);
                add(work, rule, logits, block ? block - 1 : BLOCKS - 1,
                    block ? first_key : key_before, z, distance, sum);
                if (block == 0) {
                    sink.store(sum, key_before + 16 * at.warp + at.g, at.t);
                    sum[0] = 0.0f;
                    sum[1] = 0.0f;
                }
                warpgroup_wait<0>();
                hold(dot);
                hold(key_dot);
                if (block == BLOCKS - 1)
                    now.release_keys(shared, at.lane);
#pragma unroll
                for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        z[j][c] = copied(key_dot[j][c]);
                if (!__all_sync(~0u, make_distances(dot, square, block, distance)))
                    distances_that_cancel(work, square, block, distance);
            }
            now.release_values(shared, at.lane);
            now.advance(GROUPS);
            key_before = first_key;
        }
        add(work, rule, logits, BLOCKS - 1, key_before, z, distance, sum);
        sink.store(sum, key_before + 16 * at.warp + at.g, at.t);
    }
};

template <class S>
__device__ __forceinline__ void run_few_b(few_shared_b<S> &shared, const stream_args &args,
                                          int group, int thread)
{
    few_group_b<S> work(shared, group, thread);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &item = item_wait(shared.items, turn);
        if (item.item.chunks != 0)
            work.run(item);
        item_release(shared.items, turn, work.at.lane);
    }
}

/* Copies an item's keys or values, from the last tile to the first. */
template <class S>
__device__ __forceinline__ void fetch_backwards(tile_stream<S, S::TILES> &stream, const job &work,
                                                bool keys, uint64_t policy, int lane)
{
    tile_source<S> from(work, keys, lane);
    for (int tile = pair_tiles(work.item) - 1; tile >= 0; tile--) {
        stream.fetch(from, work, tile, policy);
        stream.next.advance();
        const int next_half = 2 * (tile - 1); /* not the one that copy_half() expects */
        if (tile > 0 && next_half >= from.dense_halves) {
            from.ahead_of = next_half;
            from.ahead = from.row_of_half(work, next_half, lane);
        }
    }
}

/* Copies |v|^2 of a tile's keys beside its values. */
template <class S>
__device__ __forceinline__ void fetch_squares(few_shared_b<S> &shared, const job &work,
                                              tile_pair<S> &now, int lane)
{
    const int tiles = pair_tiles(work.item);
    const float *squares = few_squares_of<S>(work) + item_first_key(work.item) + 2 * lane;
    for (int tile = tiles - 1; tile >= 0; tile--) {
        mbarrier_wait(shared_address(shared.tiles.empty) + 8 * (now.at.index + 1),
                      now.at.parity ^ 1);
        copy_8(shared_address(&shared.squares[now.at.index / 2][2 * lane]), squares + TILE * tile);
        mbarrier_arrive_after_copies(now.values_full(shared));
        now.advance();
    }
}

/* Brings items' descriptors, and their rows as soon as they are merged. */
template <class S>
__device__ __forceinline__ void fetch_items(few_shared_b<S> &shared, const stream_args &args,
                                            int lane)
{
    const uint32_t full = shared_address(&shared.rows_full);
    uint32_t units = 0; /* so far */
    uint32_t unit = ~0u;
    load_item(shared.items, args, 0, item_row(args, 0), lane);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        load_item(shared.items, args, turn + 1, item_row(args, turn + 1), lane);
        const job &work = shared.items.jobs[turn % STREAM_JOBS];
        if (work.item.chunks == 0 || work.item.unit == unit)
            continue;
        unit = work.item.unit;
        mbarrier_wait(shared_address(&shared.rows_empty), (units & 1) ^ 1);
        if (units == 0)
            griddepcontrol_wait();
        if (lane == 0) {
            mbarrier_arrive_expecting(full, sizeof(shared.rows));
            copy_bulk(shared_address(&shared.rows), work.unit.work, sizeof(shared.rows), full);
        }
        __syncwarp();
        units++;
    }
}

template <class S>
__device__ __forceinline__ void load_few_b(few_shared_b<S> &shared, const stream_args &args,
                                           int thread)
{
    const int lane = thread & 31;
    if (thread < 64) {
        tile_stream<S, S::TILES> stream(shared.places, shared.tiles.full, shared.tiles.empty, lane);
        const uint64_t policy = policy_evict_first();
        if (thread >= 32)
            stream.next.advance();
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            fetch_backwards<S>(stream, item_wait(shared.items, turn), thread < 32, policy, lane);
            item_release(shared.items, turn, lane);
        }
    } else if (thread < 96) {
        fetch_items<S>(shared, args, lane);
    } else {
        tile_pair<S> now;
        griddepcontrol_wait();
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            fetch_squares<S>(shared, item_wait(shared.items, turn), now, lane);
            item_release(shared.items, turn, lane);
        }
    }
}

/* Empty except for sm_90a. What it reads before griddepcontrol_wait(), no kernel before it writes.
 */
template <class S>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_few_b(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    few_shared_b<S> &shared = *reinterpret_cast<few_shared_b<S> *>(shared_bytes);
    if (threadIdx.x == 0) {
        init_tiles(shared.tiles, 2, 4, 0); /* |v|^2 comes with the values */
        init_items(shared.items, 4 * GROUPS + 3);
        mbarrier_init(shared_address(&shared.rows_full), 1);
        mbarrier_init(shared_address(&shared.rows_empty), 4 * GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group < GROUPS) {
        registers_set<COMPUTE_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        run_few_b<S>(shared, args, group, thread_in_group());
    } else {
        registers_set<LOAD_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        load_few_b<S>(shared, args, thread_in_group());
    }
#endif
}

} // namespace dkv_stream

#endif
