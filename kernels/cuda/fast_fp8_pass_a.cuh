/* Pass A of fp8 caches: what fast_pass_a.cuh does, turned round. There rows are the operand in
 * registers and tiles the one in shared memory; here tiles are in registers, because that is where
 * fp8 becomes fp16, and never lie in shared memory as fp16.
 *
 *   logits    [keys][rows]        = K                * query
 *   output    [dimensions][rows] += V, read across   * weights
 *
 * A warp has 16 keys of the logits, a thread keys g and g + 8 and of every eight rows 2t and 2t +
 * 1: z[j][c] with c = 2 * (key is g + 8) + (row is odd). That is what pass B's threads have, so
 * logits are kept as they lie in registers. Of the output a warp has a quarter of the dimensions,
 * see fp8_values. Weights go through shared memory, since every warp needs those of all keys.
 */
#ifndef DKV_KERNELS_CUDA_FAST_FP8_PASS_A_CUH
#define DKV_KERNELS_CUDA_FAST_FP8_PASS_A_CUH

#include "kernels/cuda/fast_fp8_softmax.cuh"

namespace dkv_fast
{

/* ---- queries ---- */

/* A thread's part of the query rows on their way into shared memory. */
template <class S> struct query_rows {
    static constexpr int PARTS = S::ROWS * S::DIM / 4 / GROUP_THREADS; /* of four dimensions */
    uint2 words[PARTS];

    static __device__ __forceinline__ int row(int i, const place<S> &at)
    {
        return (i * GROUP_THREADS + at.thread) / (S::DIM / 4);
    }

    /* Those of a turn, as convert_query() left them; nothing past the last turn. */
    __device__ __forceinline__ void load(shared_memory<S> &shared, uint32_t turn, uint32_t turns,
                                         const place<S> &at)
    {
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            words[i] = make_uint2(0, 0);
        if (turn >= turns)
            return;
        const job &work = job_wait(shared, turn);
        mbarrier_wait(shared_address(&shared.fp8.query_full[turn % JOBS]), turn / JOBS & 1);
        if (work.item.chunks == 0)
            return;
        const int rows = static_cast<int>(work.block.group * work.block.window -
                                          work.item.row_group * S::ROWS);
        const uint2 *from = reinterpret_cast<const uint2 *>(fp8_query<S>(work)) + at.thread;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            if (row(i, at) < rows)
                words[i] = __ldcg(from + i * GROUP_THREADS);
    }
    /* When nobody multiplies with the rows before them any more. */
    __device__ __forceinline__ void store(fp8_room<S> &room, const place<S> &at) const
    {
        const uint32_t to = shared_address(room.query);
        const int pair = at.thread % (S::DIM / 4) * 2;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            store_shared(to + pair_offset<S>(row(i, at), pair), words[i].x);
            store_shared(to + pair_offset<S>(row(i, at), pair + 1), words[i].y);
        }
        fence_async_proxy();
    }
};

/* ---- the pass ---- */

/* -inf where a row does not see a key of the tile, by the group: the last tile of a unit alone. */
template <class S>
__device__ __forceinline__ void fp8_hide_keys(fp8_room<S> &room, const job &work,
                                              const place<S> &at, int first_key,
                                              float (&z)[S::ROWS / 8][4])
{
    if (at.thread < S::ROWS) /* `hidden` has its own meaning only while bases are raised */
        room.hidden[at.thread] = last_key_of(work, work.item.row_group * S::ROWS + at.thread);
    group_barrier(BARRIER_A);
    const int key = first_key + 16 * at.warp + at.g;
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++) {
        const int2 last = *reinterpret_cast<const int2 *>(&room.hidden[8 * j + 2 * at.t]);
#pragma unroll
        for (int c = 0; c < 4; c++)
            z[j][c] = key + 8 * (c >> 1) > (c & 1 ? last.y : last.x) ? -INFINITY : z[j][c];
    }
    group_barrier(BARRIER_A);
}

/* Logits as they lie in registers, see load_fp8_logits(). */
template <class S>
__device__ __forceinline__ void fp8_keep_logits(shared_memory<S> &shared, ring<S::SLOTS> &slots,
                                                const float (&z)[S::ROWS / 8][4],
                                                const place<S> &at)
{
    mbarrier_wait(shared_address(&shared.slot_empty[slots.index]), slots.parity ^ 1);
    const uint32_t slot = shared_address(shared.slots[slots.index]) + 16 * at.thread;
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++)
        store_shared(slot + j * GROUP_THREADS * 16, z[j][0], z[j][1], z[j][2], z[j][3]);
    slots.advance();
}

/* The group's waits for the place of the weights. */
template <class S> struct weights_turn {
    uint32_t parity = 0;

    /* This warp's product with what is there is done. */
    __device__ __forceinline__ void release(fp8_room<S> &room, int lane)
    {
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(&room.weights_empty));
    }
    __device__ __forceinline__ void wait(fp8_room<S> &room)
    {
        mbarrier_wait(shared_address(&room.weights_empty), parity);
        parity ^= 1;
    }
};

/* Starts the products of the tile's keys, which are in registers, with the query. */
template <class S>
__device__ __forceinline__ void start_key_product(fp8_keys<S> &keys, uint32_t query,
                                                  float (&z)[S::ROWS / 8][4])
{
    const uint64_t rows = keys_operand<S>(query);
    hold(z);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
        warpgroup_mma<fp16_type, 0>(z, keys.words[k], rows + keys_step(k), k > 0);
    warpgroup_commit();
}

template <class S>
__device__ __forceinline__ void fp8_pass_a(shared_memory<S> &shared, const job &work,
                                           a_reader<S> &reader, ring<S::SLOTS> &slots,
                                           weights_turn<S> &turn, const place<S> &at,
                                           fp8_softmax<S> &state)
{
    fp8_room<S> &room = shared.fp8;
    const logit_rule rule(work);
    const bool k_e5m2 = work.block.k.dtype == DKV_F8_E5M2;
    const bool v_e5m2 = work.block.v.dtype == DKV_F8_E5M2;
    const int tiles = item_tiles(work);
    const int first_kept = first_kept_tile<S>(tiles);
    int first_key = item_first_key(work.item);
    float lowest = 0.0f;
    float z[S::ROWS / 8][4];
    fp8_keys<S> keys;
    fp8_values<S> values;
    state.clear();
    clear_rows(room, at);
    group_barrier(BARRIER_A); /* and the query is there */
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        const uint32_t k_tile = reader.wait(shared.a_tiles, shared.a_full);
        keys.load(k_tile, at);
        keys.convert(k_e5m2);
        reader.release(shared.a_tiles, shared.a_empty, k_tile, at.lane);
        start_key_product(keys, shared_address(room.query), z);
        const uint32_t v_tile = reader.wait(shared.a_tiles, shared.a_full);
        values.load(v_tile, at);
        warpgroup_wait<0>();
        turn.release(room, at.lane);
        hold(z);
        state.hold_output();
#pragma unroll
        for (int j = 0; j < S::ROWS / 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                lowest = fminf(lowest, z[j][c]);
        rule.apply<S::ROWS / 8, 4>(z);
        if (first_key + TILE > rule.open_keys)
            fp8_hide_keys(room, work, at, first_key, z);
        if (tile >= first_kept)
            fp8_keep_logits(shared, slots, z, at);
        const bool exceeds = exceeds_base(z, room, at);
        float sum[S::ROWS / 8][2];
        turn.wait(room);
        /* Bases are raised before the first tile's weights and, rarely, after another's. */
        for (bool raises = tile == 0;; raises = true) {
            if (raises)
                raise_bases(room, state, z, at, v_tile, first_key, tile == 0, v_e5m2);
            make_weights(z, room, at, sum);
            values.convert(v_e5m2);
            fence_async_proxy();
            if (!group_any(BARRIER_A, exceeds && !raises))
                break;
        }
        reader.release(shared.a_tiles, shared.a_empty, v_tile, at.lane);
#pragma unroll
        for (int j = 0; j < S::ROWS / 8; j++) {
            state.sum[j][0] += sum[j][0];
            state.sum[j][1] += sum[j][1];
        }
        start_value_product<S>(state.output, values, shared_address(room.weights));
        first_key += TILE;
    }
    warpgroup_wait<0>();
    state.hold_output();
    turn.release(room, at.lane);
    turn.wait(room);
    if (lowest == -INFINITY)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
}

/* Closes one row of the chunk, of whose sums the thread has a part: as store_partial(). */
template <class S>
__device__ __forceinline__ void close_row(fp8_room<S> &room, const row_share<S> &mine,
                                          unsigned char *partial)
{
    constexpr int SHARERS = row_share<S>::SHARERS;
    const uint32_t from = shared_address(room.weights) + mine.row * 128;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 32 / SHARERS; i++)
        sum += load_shared_float(from + 4 * (mine.part * (32 / SHARERS) + i));
#pragma unroll
    for (int lanes = 1; lanes < SHARERS; lanes *= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes);
    sum *= 1.0f / S::WEIGHT_ONE;
    const float top = room.top[mine.row];
    const float base = room.base[mine.row];
    const float below = exp2_fast(base - top); /* NO_KEY both: 1 */
    const bool joins = sum * below >= 0.125f;
    if (mine.part != 0)
        return;
    room.factor[mine.row] = (joins ? below : 1.0f) * (1.0f / S::WEIGHT_ONE);
    room.joins[mine.row] = joins ? 1.0f : 0.0f;
    const partial_head head = {top, joins ? top : base, joins ? fmaf(sum, below, 1.0f) : -sum,
                               room.key[mine.row]};
    __stcg(reinterpret_cast<float4 *>(partial) + mine.row,
           *reinterpret_cast<const float4 *>(&head));
}

/* Stores the chunk's partial, by the group. */
template <class S>
__device__ __forceinline__ void store_fp8_partial(fp8_softmax<S> &state, fp8_room<S> &room,
                                                  const place<S> &at, bool e5m2,
                                                  unsigned char *partial)
{
    const uint32_t sums = shared_address(room.weights) + 4 * (8 * at.warp + at.g);
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            store_shared(sums + (8 * j + 2 * at.t + e) * 128, __float_as_uint(state.sum[j][e]));
    group_barrier(BARRIER_A);
    close_row(room, row_share<S>(at.thread), partial);
    group_barrier(BARRIER_A);
    unsigned char *output = partial + S::ROWS * sizeof(partial_head) +
                            fp8_values<S>::first(at) * sizeof(float);
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++) {
        const int row = 8 * j + 2 * at.t;
        const uint32_t held = shared_address(room.held[row]) + fp8_values<S>::first(at);
        const uint32_t bytes[2] = {fp8_values<S>::bytes_of(held),
                                   fp8_values<S>::bytes_of(held + S::DIM)};
        state.rescale_output(j, *reinterpret_cast<const float2 *>(&room.factor[row]),
                             *reinterpret_cast<const float2 *>(&room.joins[row]), bytes, e5m2);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float o[S::DIM / 32];
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    o[2 * m + i] = state.output[m][j][2 * i + e] +
                                   (S::R == 1 ? state.output[m][4 + j % 4][2 * i + e] : 0.0f);
            float *to = reinterpret_cast<float *>(output) + (row + e) * S::DIM;
            if constexpr (S::DIM == 128)
                __stcg(reinterpret_cast<float4 *>(to), make_float4(o[0], o[1], o[2], o[3]));
            else
                __stcg(reinterpret_cast<float2 *>(to), make_float2(o[0], o[1]));
        }
    }
}

template <class S>
__device__ __forceinline__ void run_fp8_a(shared_memory<S> &shared, const dkv_fast_args &args,
                                          int thread)
{
    const place<S> at(thread);
    a_reader<S> reader;
    ring<S::SLOTS> slots;
    ring<S::TURNS> partials;
    weights_turn<S> weights;
    fp8_softmax<S> state;
    query_rows<S> query;
    query.load(shared, 0, args.turns, at);
    query.store(shared.fp8, at);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        const bool e5m2 = work.block.v.dtype == DKV_F8_E5M2;
        if (work.item.chunks != 0)
            fp8_pass_a(shared, work, reader, slots, weights, at, state);
        query.load(shared, turn + 1, args.turns, at);
        mbarrier_wait(shared_address(&shared.partial_empty[partials.index]), partials.parity ^ 1);
        if (work.item.chunks != 0)
            store_fp8_partial(state, shared.fp8, at, e5m2,
                              partial_of<S>(args, partials.index, blockIdx.x));
        mbarrier_arrive(shared_address(&shared.partial_full[partials.index]));
        partials.advance();
        query.store(shared.fp8, at);
        job_release(shared, turn, at.lane);
    }
}

} // namespace dkv_fast

#endif
