/* Pass A of the stream scorer for up to 64 rows: softmax partials of chunks of keys, as
 * fast_pass_a.cuh says, and |v|^2 of every key. */
#ifndef DKV_KERNELS_CUDA_STREAM_FEW_PASS_A_CUH
#define DKV_KERNELS_CUDA_STREAM_FEW_PASS_A_CUH

#include "kernels/cuda/fast_merge.cuh"
#include "kernels/cuda/stream_few_shape.cuh"
#include "kernels/cuda/stream_pass_a.cuh"

namespace dkv_stream
{

/* The thread's query rows of a unit as operand of wgmma. */
template <class S>
__device__ __forceinline__ void load_query_rows(const job &work, const place<S> &at,
                                                uint32_t (&q)[S::K_STEPS][4])
{
#pragma unroll
    for (int i = 0; i < S::R; i++) {
        const unsigned char *from = query_row(work, work.item.row_group * S::ROWS + at.row(i));
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q[k][2 * half + i] = from ? __ldg(reinterpret_cast<const uint32_t *>(
                                                from + 4 * at.t + 32 * k + 16 * half))
                                          : 0;
    }
}

/* Closes row i of the chunk, as store_partial() in fast_pass_a.cuh; by all lanes of its quad. */
template <class S>
__device__ __forceinline__ partial_head close_row(softmax_state<S> &state, int i, int t)
{
    float sum = state.sum[i] * (1.0f / S::WEIGHT_ONE);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float below = exp2_fast(state.base[i] - state.top[i]); /* NO_KEY both: 1 */
    const bool joins = sum * below >= 0.125f;
    state.rescale(i, (joins ? below : 1.0f) * (1.0f / S::WEIGHT_ONE), joins ? 1.0f : 0.0f, t);
    return {state.top[i], joins ? state.top[i] : state.base[i],
            joins ? fmaf(sum, below, 1.0f) : -sum, state.key[i]};
}

/* a x + b y, the same if the two change places. */
__device__ __forceinline__ float add_products(float a, float x, float b, float y)
{
    return __fadd_rn(__fmul_rn(a, x), __fmul_rn(b, y));
}

/* The thread's part of a row's sums after a chunk. */
template <class S> struct row_part_sums {
    partial_head head;
    float2 output[S::D_TILES];

    /* Closes row i. */
    __device__ __forceinline__ row_part_sums(softmax_state<S> &state, int i, int t)
        : head(close_row(state, i, t))
    {
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const float *o = state.output[d];
            output[d] = S::R == 1 ? make_float2(o[0] + o[2], o[1] + o[3])
                                  : make_float2(o[2 * i], o[2 * i + 1]);
        }
    }

    /* A top key that stands outside its sums joins them. Rare. */
    __device__ __forceinline__ void join(const job &work, const partial_head &of, int t)
    {
        const unsigned char *row = dkv_cu_row(work.block.v, work.unit.v,
                                              work.block.valid_from + of.key,
                                              &work.unit.report->bad_v_entry);
        const float weight = exp2_fast(of.top - head.base);
        head.sum += weight;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const uint32_t word =
                row ? __ldg(reinterpret_cast<const uint32_t *>(row + 16 * d + 4 * t)) : 0;
            const float2 v = unpack<typename S::type>(word);
            output[d].x = fmaf(weight, v.x, output[d].x);
            output[d].y = fmaf(weight, v.y, output[d].y);
        }
    }

    /* Adds the other group's, as the merge adds chunks' partials (fast_merge.cuh). */
    __device__ __forceinline__ void add(const job &work, uint32_t other_head, uint32_t other_output,
                                        int t)
    {
        float words[4];
        load_shared(other_head, words);
        const partial_head own = head;
        const partial_head other = {words[0], words[1], words[2], __float_as_int(words[3])};
        lead(head, other);
        const bool joined = !signbit(head.sum);
        const float weight = exp2_fast(own.base - head.base);
        const float other_weight = exp2_fast(other.base - head.base);
        head.sum = add_products(weight, fabsf(own.sum), other_weight, fabsf(other.sum));
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const float2 from = load_shared_pair(other_output ^ 32 * d);
            output[d].x = add_products(weight, output[d].x, other_weight, from.x);
            output[d].y = add_products(weight, output[d].y, other_weight, from.y);
        }
        if (stands_outside(own) && own.key != head.key)
            join(work, own, t);
        if (stands_outside(other) && other.key != head.key)
            join(work, other, t);
        if (!joined)
            head.sum = -head.sum;
    }
};

/* A group's part of pass A. */
template <class S> struct few_group_a {
    few_shared_a<S> &shared;
    place<S> at;
    int group;
    tile_pair<S> now;
    uint32_t items = 0;  /* done so far */
    uint32_t unit = ~0u; /* whose query is q */
    uint32_t q[S::K_STEPS][4] = {};
    softmax_state<S> state;

    __device__ __forceinline__ few_group_a(few_shared_a<S> &in, int number, int thread)
        : shared(in), at(thread), group(number)
    {
        now.at.advance(2 * group);
    }

    __device__ __forceinline__ uint32_t room_head(int row) const
    {
        return shared_address(shared.room) + row * static_cast<int>(sizeof(partial_head));
    }
    /* Dimensions 2t and the next, in place of the row's number of eight; those of 8d and on are at
     * this address ^ 32 d, so that eight rows meet eight banks. */
    __device__ __forceinline__ uint32_t room_output(int row) const
    {
        return shared_address(shared.room) + S::ROWS * static_cast<int>(sizeof(partial_head)) +
               row * S::DIM * 4 + 32 * at.g + 8 * at.t;
    }

    __device__ __forceinline__ void hand_over(void)
    {
        mbarrier_wait(shared_address(&shared.room_empty), (items & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < S::R; i++) {
            const row_part_sums<S> sums(state, i, at.t);
            const int row = at.row(i);
            if (at.t == 0)
                store_shared(room_head(row), sums.head.top, sums.head.base, sums.head.sum,
                             __int_as_float(sums.head.key));
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                store_shared(room_output(row) ^ 32 * d, sums.output[d].x, sums.output[d].y);
        }
        __syncwarp();
        if (at.lane == 0)
            mbarrier_arrive(shared_address(&shared.room_full));
    }

    /* Stores the partial of both groups. They take turns at it. */
    __device__ __forceinline__ void store_both(const job &work)
    {
        unsigned char *partial = few_partials_of<S>(work) +
                                 work.item.chunk * static_cast<size_t>(S::PARTIAL_BYTES);
        mbarrier_wait(shared_address(&shared.room_full), items & 1);
#pragma unroll
        for (int i = 0; i < S::R; i++) {
            row_part_sums<S> sums(state, i, at.t);
            const int row = at.row(i);
            sums.add(work, room_head(row), room_output(row), at.t);
            if (at.t == 0)
                __stcg(reinterpret_cast<float4 *>(partial) + row,
                       *reinterpret_cast<const float4 *>(&sums.head));
            float2 *output = reinterpret_cast<float2 *>(partial + S::ROWS * sizeof(partial_head)) +
                             row * S::DIM / 2 + at.t;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                __stcg(output + 4 * d, sums.output[d]);
        }
        __syncwarp();
        if (at.lane == 0)
            mbarrier_arrive(shared_address(&shared.room_empty));
    }

    /* The query of an item, while nobody waits for it yet. */
    __device__ __forceinline__ void load_query(uint32_t turn, uint32_t turns)
    {
        if (turn >= turns)
            return;
        const job &next = item_wait(shared.items, turn);
        if (next.item.chunks == 0 || next.item.unit == unit)
            return;
        unit = next.item.unit;
        load_query_rows(next, at, q);
    }

    /* Leaves the query as operand for pass B. */
    __device__ __forceinline__ void store_query(const job &work) const
    {
        unsigned char *to = rows_of<S>(work).query;
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < S::R; i++)
                    *reinterpret_cast<uint32_t *>(to + element_offset<S>(at.row(i), 2 * k + half) +
                                                  4 * at.t) = q[k][2 * half + i];
    }

    /* Weights of the tile `now`, whose dot products are z, and their product with its values. */
    __device__ __forceinline__ void weigh(const job &work, const logit_rule &rule, int first_key,
                                          float (&z)[8][4], weights<S> &w)
    {
        rule.template apply<8, 2 * S::R>(z);
        if (first_key + TILE > rule.open_keys)
            hide_keys(work, at, first_key, z);
        bool exceeds = false;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 2 * S::R; c++)
                exceeds |= z[j][c] > state.base[c >> 1] + SLACK;
        if (__any_sync(~0u, exceeds))
            raise<S>(state, z, at, now.values(shared), first_key, INT_MAX);
        w.set(z, state);
        hold(state.output);
        warpgroup_fence();
        w.start_product(state.output, now.values(shared));
        warpgroup_commit();
    }

    /* The chunk `work` of this turn; at the end q is the next one's. */
    __device__ __forceinline__ void run(const job &work, uint32_t turn, uint32_t turns)
    {
        const logit_rule rule(work);
        const int tiles = few_tiles(work);
        const int chunk_key = item_first_key(work.item);
        float lowest = 0.0f;
        float z[8][4];
        weights<S> w;
        tile_pair<S> before = now;
        if (work.item.chunk == 0 && group == 0)
            store_query(work);
        state.clear();
#pragma unroll 1
        for (int tile = group; tile < tiles; tile += GROUPS) {
            mbarrier_wait_both(now.keys_full(shared), now.at.parity, now.values_full(shared),
                               now.at.parity);
            fence_async_proxy();
            hold(z);
            warpgroup_fence();
            start_dots<S>(z, q, now.keys(shared));
            warpgroup_commit();
            warpgroup_wait<0>();
            hold(z);
            hold(state.output);
            if (tile >= GROUPS)
                before.release_values(shared, at.lane);
            now.release_keys(shared, at.lane);
            if (tile + GROUPS >= tiles)
                load_query(turn + 1, turns);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int c = 0; c < 2 * S::R; c++)
                    lowest = fminf(lowest, z[j][c]);
            weigh(work, rule, chunk_key + tile * TILE, z, w);
            before = now;
            now.advance(GROUPS);
        }
        warpgroup_wait<0>();
        hold(state.output);
        before.release_values(shared, at.lane);
        if (lowest == -INFINITY)
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        if (group == static_cast<int>(items % GROUPS))
            store_both(work);
        else
            hand_over();
        items++;
    }
};

template <class S>
__device__ __forceinline__ void run_few_a(few_shared_a<S> &shared, const stream_args &args,
                                          int group, int thread)
{
    few_group_a<S> work(shared, group, thread);
    work.load_query(0, args.turns);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &item = item_wait(shared.items, turn);
        if (item.item.chunks != 0)
            work.run(item, turn, args.turns);
        else
            work.load_query(turn + 1, args.turns);
        item_release(shared.items, turn, work.at.lane);
    }
}

/* Leaves |v|^2 of the keys of half of each tile for pass B; two warps do. */
template <class S>
__device__ __forceinline__ void few_squares(few_shared_a<S> &shared, const job &work, int half,
                                            tile_pair<S> &now, int lane)
{
    const int tiles = few_tiles(work);
    float *to = few_squares_of<S>(work) + item_first_key(work.item) + HALF * half;
    for (int tile = 0; tile < tiles; tile++) {
        mbarrier_wait(now.values_full(shared), now.at.parity);
        sum_half_squares<S>(now.values(shared) + half * S::HALF_BYTES, to + TILE * tile, lane);
        now.release_values(shared, lane);
        now.advance();
    }
}

template <class S>
__device__ __forceinline__ void load_few_a(few_shared_a<S> &shared, const stream_args &args,
                                           int thread)
{
    const int lane = thread & 31;
    if (thread < 64) {
        tile_stream<S, S::TILES> stream(shared.places, shared.tiles.full, shared.tiles.empty, lane);
        const uint64_t policy = policy_normal();
        if (thread >= 32)
            stream.next.advance();
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            const job &work = item_wait(shared.items, turn);
            fetch_tiles<S>(stream, work, thread < 32, few_tiles(work), policy, lane);
            item_release(shared.items, turn, lane);
        }
    } else {
        tile_pair<S> now;
        if (thread < 96)
            load_item(shared.items, args, 0, lane);
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (thread < 96)
                load_item(shared.items, args, turn + 1, lane);
            few_squares<S>(shared, item_wait(shared.items, turn), thread / 32 - 2, now, lane);
            item_release(shared.items, turn, lane);
        }
    }
}

/* Empty except for sm_90a. */
template <class S>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_few_a(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    few_shared_a<S> &shared = *reinterpret_cast<few_shared_a<S> *>(shared_bytes);
    if (threadIdx.x == 0) {
        /* A group reads a tile, two warps |v|^2 of its values. */
        init_tiles(shared.tiles, 1, 4, 2);
        init_items(shared.items, 4 * GROUPS + 4);
        mbarrier_init(shared_address(&shared.room_full), 4);
        mbarrier_init(shared_address(&shared.room_empty), 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group < GROUPS) {
        registers_set<COMPUTE_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        run_few_a<S>(shared, args, group, thread_in_group());
    } else {
        registers_set<LOAD_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        load_few_a<S>(shared, args, thread_in_group());
    }
#endif
}

} // namespace dkv_stream

#endif
