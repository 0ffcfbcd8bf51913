/* The attention scorer's first pass: the softmax of each row over a range of keys, and, by the
 * range that is through last, over all of them. Included by attention.cu. */
#ifndef DKV_KERNELS_CUDA_ATTENTION_WEIGH_CUH
#define DKV_KERNELS_CUDA_ATTENTION_WEIGH_CUH

#include "kernels/cuda/attention_tiles.cuh"

namespace
{

/* A logit is above this, so nothing has to be said about differences of infinities. */
constexpr partial nothing = {-FLT_MAX, 0.0f};

__device__ inline void join(partial &a, const partial &b)
{
    const float top = fmaxf(a.top, b.top);
    a.sum = a.sum * exp2_fast(a.top - top) + b.sum * exp2_fast(b.top - top);
    a.top = top;
}

/* Adds a tile's logits to the lane's rows. */
__device__ inline void absorb(const logits &z, partial (&mine)[n_columns])
{
#pragma unroll
    for (int r = 0; r < n_columns; r++) {
        partial &state = mine[r];
        const float top = fmaxf(state.top, fmaxf(fmaxf(z[r][0], z[r][1]), fmaxf(z[r][2], z[r][3])));
        const float sum = (exp2_fast(z[r][0] - top) + exp2_fast(z[r][1] - top)) +
                          (exp2_fast(z[r][2] - top) + exp2_fast(z[r][3] - top));
        state.sum = fmaf(state.sum, exp2_fast(state.top - top), sum);
        state.top = top;
    }
}

/* Four lanes have the same rows; the first of them gets the result. */
__device__ inline void join_lanes(partial (&mine)[n_columns])
{
#pragma unroll
    for (int r = 0; r < n_columns; r++)
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
            join(mine[r], {__shfl_down_sync(~0u, mine[r].top, step),
                           __shfl_down_sync(~0u, mine[r].sum, step)});
}

/* ---- the last range of a row group ---- */

/* The partials of every `parts`-th range from `part` on. */
__device__ inline partial join_ranges(const partial *of_slot, size_t stride, uint32_t part,
                                      uint32_t parts, uint32_t n_ranges)
{
    constexpr int batch = 8; /* loads at once */
    partial all = nothing;
    for (uint32_t range = part; range < n_ranges; range += batch * parts) {
        float2 loaded[batch];
        float top = all.top;
#pragma unroll
        for (int i = 0; i < batch; i++)
            loaded[i] = range + i * parts < n_ranges ? __ldcg(reinterpret_cast<const float2 *>(
                                                           of_slot + (range + i * parts) * stride))
                                                     : make_float2(nothing.top, nothing.sum);
#pragma unroll
        for (int i = 0; i < batch; i++)
            top = fmaxf(top, loaded[i].x);
        all.sum *= exp2_fast(all.top - top);
#pragma unroll
        for (int i = 0; i < batch; i++)
            all.sum = fmaf(loaded[i].y, exp2_fast(loaded[i].x - top), all.sum);
        all.top = top;
    }
    return all;
}

/* A row's softmax from that of all keys; `t`: which row of its head. */
__device__ inline row_result result_of(const job &work, partial state, uint32_t head, uint32_t t)
{
    const dkv_cu_block &block = work.block;
    row_result result = no_row;
    if (t >= block.window)
        return result;
    result.weight = row_weight(block, t);
    result.last = static_cast<int>(block.n_valid - block.window + t);
    if (!(state.sum > 0)) /* it sees nothing */
        return result;
    if (work.unit.sink_logits)
        join(state, {work.unit.sink_logits[head] * log2e, 1.0f});
    result.top = state.top;
    result.inverse = 1.0f / state.sum;
    return result;
}

/* `room`: one partial per thread. */
__device__ void settle(const job &work, const row_group &group, uint32_t sharing, partial *room)
{
    const place &at = work.at;
    const uint32_t slots = sharing * chunk_slots;
    const uint32_t mine = threadIdx.x % slots;
    const partial *partials = reinterpret_cast<const partial *>(work.unit.work) + group.first_slot;
    room[threadIdx.x] = mine < group.n_slots
                            ? join_ranges(partials + mine, at.n_slots, threadIdx.x / slots,
                                          threads / slots, at.n_ranges)
                            : nothing;
    __syncthreads();
    if (threadIdx.x >= slots || mine >= group.n_slots)
        return;
    partial state = room[mine];
    for (uint32_t part = 1; part < threads / slots; part++)
        join(state, room[part * slots + mine]);
    const uint32_t slot = group.first_slot + mine;
    results_of(work)[slot] = result_of(work, state, slot / at.per_head, slot % at.per_head);
    if (slot == 0)
        *work.unit.exponent = 0;
}

/* A range is through: its partials, of warps with the same chunk together, and if it is the last
 * one, everything. `room`: one partial per thread. */
__device__ inline void finish_range(const attention_args &args, const job &work,
                                    const row_group &group, uint32_t range, uint32_t index,
                                    uint32_t sharing, partial (&mine)[n_columns], partial *room)
{
    __shared__ bool is_last;
    const place &at = work.at;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    join_lanes(mine);
    if (lane % 4 == 0)
#pragma unroll
        for (int r = 0; r < n_columns; r++)
            room[warp * 32 + r * 8 + lane / 4] = mine[r];
    __syncthreads();
    if (threadIdx.x < group.n_slots) { /* of chunk `warp`: warps with its number, and so on */
        partial state = room[threadIdx.x];
        for (uint32_t w = warp + sharing; w < warps; w += sharing)
            join(state, room[w * 32 + lane]);
        reinterpret_cast<partial *>(work.unit.work)[static_cast<size_t>(range) * at.n_slots +
                                                    group.first_slot + threadIdx.x] = state;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        is_last = atomicAdd(args.counters + at.counter + index, 1u) + 1 == at.n_ranges;
    __syncthreads();
    if (!is_last)
        return;
    __threadfence();
    settle(work, group, sharing, room);
}

/* ---- the kernel ---- */

/* Item = (range, row group) of a unit. A group's chunks go to warps in turn; warps of the same
 * chunk share the range's tiles. */
template <bool bf16, int blocks>
__global__ void __launch_bounds__(threads, resident) weigh(const attention_args args)
{
    __shared__ job work;
    __shared__ uint4 queries[group_slots_max / 8 * blocks * 32];
    __shared__ int last_keys[group_slots_max];
    static_assert(group_slots_max == threads, "a slot each thread");
    __shared__ partial room[threads];
    start_dependents();
    const uint32_t item = open_job(args, 0, blockIdx.x, work);
    const place &at = work.at;
    const dkv_cu_block &block = work.block;
    const uint32_t range = item / at.n_groups;
    const row_group group = group_of(at, item % at.n_groups);
    const uint32_t sharing = group.n_chunks > 2 ? 4 : group.n_chunks;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t chunk = warp % sharing;
    const uint32_t end_key = chunk < group.n_chunks
                                 ? min(block.n_valid, (range + 1) * at.range_keys)
                                 : 0;
    const uint32_t stride = warps / sharing * tile_keys;
    const scaling scale = scaling_of(block);
    uint32_t first_key = range * at.range_keys + warp / sharing * tile_keys;
    key_tile<blocks> tile;
    const key_source source = source_of<blocks>(work);
    partial mine[n_columns];
    float odd = 0;

    if (first_key < end_key)
        load_keys(work, source, first_key, end_key, tile);
    load_queries<blocks>(work, group, queries);
    last_keys[threadIdx.x] = last_key_of(work, group, threadIdx.x);
#pragma unroll
    for (int r = 0; r < n_columns; r++)
        mine[r] = nothing;
    __syncthreads();

    const uint4 *my_queries = queries + chunk * n_columns * blocks * 32;
    while (first_key < end_key) {
        logits z;
        const unsigned there[2] = {tile.there[0], tile.there[1]};
        products<bf16, blocks>(tile, my_queries, z);
        if (first_key + stride < end_key)
            load_keys(work, source, first_key + stride, end_key, tile);
        to_logits(scale, z, odd);
        if (!is_plain(work, there, first_key))
            hide(there, first_key, last_keys + chunk * chunk_slots, 1, z);
        absorb(z, mine);
        first_key += stride;
    }
    if (odd != 0)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);

    finish_range(args, work, group, range, item % at.n_groups, sharing, mine, room);
}

} // namespace

#endif
