/* Pass A of the stream scorer: softmax partials of chunks of keys, and |v|^2 of every key. */
#ifndef DKV_KERNELS_CUDA_STREAM_PASS_A_CUH
#define DKV_KERNELS_CUDA_STREAM_PASS_A_CUH

#include "kernels/cuda/stream_rows.cuh"

namespace dkv_stream
{

/* A group's part of pass A. While it makes weights of a tile's logits, the tensor cores multiply
 * the values of the tile before. */
template <class S> struct group_a {
    shared_a<S> &shared;
    place<S> at;
    int first_row; /* of the group */
    tile_pair<S> now;
    uint32_t q[S::K_STEPS][4];
    float z[8][4];
    row_sums<S> rows;
    weight_operand<S> weights; /* of the tile before */

    __device__ __forceinline__ group_a(shared_a<S> &in, int group, int thread)
        : shared(in), at(thread), first_row(64 * group)
    {
    }

    /* Whether a row's largest logit, of this thread's, outweighs the base. */
    __device__ __forceinline__ bool is_much(const float (&x)[8][4], float factor, int i) const
    {
        float first = x[0][2 * i];
        float second = x[0][2 * i + 1];
#pragma unroll
        for (int j = 1; j < 8; j++) {
            first = fmaxf(first, x[j][2 * i]);
            second = fmaxf(second, x[j][2 * i + 1]);
        }
        return fmaf(fmaxf(first, second), factor, -rows.base[i]) > SLACK;
    }

    /* Weights of a tile some of whose logits are not the dot products themselves, or outweigh the
     * base. */
    __device__ __forceinline__ void weigh_slowly(const job &work, const logit_rule &rule,
                                                 const logit_factor &logits, int first_key,
                                                 tile_weights<S> &tile)
    {
        float x[8][4];
        logits_of<S>(work, rule, logits, first_row, at, first_key, z, x);
        const bool much[2] = {is_much(x, logits.factor, 0), is_much(x, logits.factor, 1)};
        if (__any_sync(~0u, much[0] || much[1])) {
            warpgroup_wait<0>();
            hold_sums();
            raise_rows<S>(rows, x, logits.factor, much, work, first_key, at.t);
        }
        tile.set(x, logits.factor, rows.base, look_of(z));
    }

    __device__ __forceinline__ void start_values(const tile_pair<S> &tile)
    {
        weights.start_product(rows, tile.values(shared), shared_address(shared.ones));
    }

    __device__ __forceinline__ void hold_sums(void)
    {
        hold(rows.output);
        hold(rows.rounded);
    }

    /* The tile `now`. */
    __device__ __forceinline__ void step(const job &work, const logit_rule &rule,
                                         const logit_factor &logits, int first_key,
                                         const tile_pair<S> &before, bool is_first)
    {
        mbarrier_wait_both(now.keys_full(shared), now.at.parity, before.values_full(shared),
                           before.at.parity);
        fence_async_proxy();
        start_row_dots<S>(z, q, now.keys(shared));
        start_values(before);
        warpgroup_wait<1>();
        hold(z);
        now.release_keys(shared, at.lane);
        const bool much = is_much(z, logits.factor, 0) | is_much(z, logits.factor, 1);
        tile_weights<S> tile;
        if (logits.plain && first_key + TILE <= rule.open_keys && !__any_sync(~0u, much))
            tile.set(z, logits.factor, rows.base, look_of(z));
        else
            weigh_slowly(work, rule, logits, first_key, tile);
        if (__any_sync(~0u, !(tile.sum[0] + tile.sum[1] < INFINITY)))
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        /* Behind a branch that needs the weights, or the compiler would compute them behind this.
         */
        warpgroup_wait<0>();
        hold_sums();
        if (!is_first)
            before.release_values(shared, at.lane);
        rows.sum[0] += tile.sum[0];
        rows.sum[1] += tile.sum[1];
        weights.set(tile.w);
    }

    /* The chunk `work`; at the end q is the next one's. */
    __device__ __forceinline__ void run(const job &work, job_ring &items, uint32_t next_turn,
                                        uint32_t turns)
    {
        const logit_rule rule(work);
        const logit_factor logits(rule);
        const int tiles = item_tiles(work);
        int first_key = item_first_key(work.item);
        rows.clear();
        /* The first tile has no other before it: its own values by weights of 0. */
        tile_pair<S> before = now;
        weights.clear();
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, first_key += TILE) {
            step(work, rule, logits, first_key, before, tile == 0);
            before = now;
            now.advance();
        }
        uint32_t tops[2][S::D_TILES]; /* on their way while the last product is */
        rows.load_top(work, 0, at.t, tops[0]);
        rows.load_top(work, 1, at.t, tops[1]);
        mbarrier_wait(before.values_full(shared), before.at.parity);
        fence_async_proxy();
        start_values(before);
        warpgroup_wait<0>();
        hold_sums();
        before.release_values(shared, at.lane);
        load_next_query(items, next_turn, turns);
        store_rows(rows, tops, first_row, at,
                   partials_of<S>(work) + work.item.chunk * static_cast<size_t>(S::PARTIAL_BYTES));
    }

    /* The query of the next item, while nobody waits for it yet. */
    __device__ __forceinline__ void load_next_query(job_ring &items, uint32_t next_turn,
                                                    uint32_t turns)
    {
        if (next_turn >= turns)
            return;
        const job &next = item_wait(items, next_turn);
        if (next.item.chunks != 0)
            load_rows_of_query(next, first_row, at, q);
    }
};

template <class S>
__device__ __forceinline__ void run_group_a(shared_a<S> &shared, const stream_args &args, int group,
                                            int thread)
{
    group_a<S> work(shared, group, thread);
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            work.q[k][c] = 0;
    work.load_next_query(shared.items, 0, args.turns);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &item = item_wait(shared.items, turn);
        if (item.item.chunks != 0)
            work.run(item, shared.items, turn + 1, args.turns);
        else
            work.load_next_query(shared.items, turn + 1, args.turns);
        item_release(shared.items, turn, work.at.lane);
    }
}

/* |v|^2 of 32 keys, a key each lane. Eight lanes have eight rows of a block, whose permuted columns
 * are in different banks. */
template <class S>
__device__ __forceinline__ void sum_squares_of_half(uint32_t half, float *to, int lane)
{
    const uint32_t row = half + lane / 8 * S::EIGHT_BYTES + lane % 8 * 128;
    float sum[4] = {};
#pragma unroll
    for (int column = 0; column < S::DIM / 8; column += 4) {
        uint32_t words[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load_shared(row + column / 8 * 1024 + (((column % 8 + i) ^ lane % 8) << 4), words[i]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const float2 v = unpack<typename S::type>(words[i][w]);
                sum[w % 2 * 2] = fmaf(v.x, v.x, sum[w % 2 * 2]);
                sum[w % 2 * 2 + 1] = fmaf(v.y, v.y, sum[w % 2 * 2 + 1]);
            }
    }
    to[lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Leaves |v|^2 of the keys of half of each tile for pass B; two warps do. */
template <class S>
__device__ __forceinline__ void sum_squares_of(shared_a<S> &shared, const job &work, int half,
                                               tile_pair<S> &now, int lane)
{
    const int tiles = work.item.chunks ? item_tiles(work) : 0;
    float *to = squares_of<S>(work) + item_first_key(work.item) + HALF * half;
    for (int tile = 0; tile < tiles; tile++) {
        mbarrier_wait(now.values_full(shared), now.at.parity);
        if (work.item.row_group == 0)
            sum_squares_of_half<S>(now.values(shared) + half * S::HALF_BYTES, to + TILE * tile,
                                   lane);
        now.release_values(shared, lane);
        now.advance();
    }
    /* Pass B looks at whole tiles of its own. */
    const uint32_t end = item_first_key(work.item) + TILE * tiles;
    if (tiles > 0 && work.item.chunk == work.item.chunks - 1 && work.item.row_group == 0 &&
        end < tiles_of(work.block.n_valid) * STEP_B)
        to[TILE * tiles + lane] = 0.0f;
}

/* Empty except for sm_90a. */
template <class S>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_a(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_a<S> &shared = *reinterpret_cast<shared_a<S> *>(shared_bytes);
    if (threadIdx.x == 0) {
        init_tiles(shared.tiles, 1, 4 * GROUPS, 2);
        init_items(shared.items, 4 * GROUPS + 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < sizeof(shared.ones) / 4) {
        shared.ones[threadIdx.x] = pack<typename S::type>(1.0f, 1.0f);
        fence_async_proxy();
    }
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group < GROUPS) {
        registers_set<COMPUTE_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        run_group_a<S>(shared, args, group, thread_in_group());
    } else {
        registers_set<LOAD_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        const int thread = thread_in_group();
        const int lane = thread & 31;
        if (thread < 64) {
            tile_stream<S, S::TILES> stream(shared.places, shared.tiles.full, shared.tiles.empty,
                                            lane);
            const uint64_t policy = policy_normal();
            if (thread >= 32)
                stream.next.advance();
            for (uint32_t turn = 0; turn < args.turns; turn++) {
                const job &work = item_wait(shared.items, turn);
                const int tiles = work.item.chunks ? item_tiles(work) : 0;
                fetch_tiles<S>(stream, work, thread < 32, tiles, policy, lane);
                item_release(shared.items, turn, lane);
            }
        } else {
            tile_pair<S> now;
            if (thread < 96)
                load_item(shared.items, args, 0, lane);
            for (uint32_t turn = 0; turn < args.turns; turn++) {
                if (thread < 96)
                    load_item(shared.items, args, turn + 1, lane);
                sum_squares_of<S>(shared, item_wait(shared.items, turn), thread / 32 - 2, now,
                                  lane);
                item_release(shared.items, turn, lane);
            }
        }
    }
#endif
}

} // namespace dkv_stream

#endif
