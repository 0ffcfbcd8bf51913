/* The attention scorer for up to 128 slots on compute capability 9.0: one kernel that reads keys
 * once. Included by attention.cu.
 *
 * A unit has a crew of thread blocks, one a multiprocessor, that take its tiles in turn; so do the
 * warpgroups of a block. A term is 2^(logit - base), where a lane's base of a slot is near the
 * largest logit it has seen there. A group keeps the terms of its first tiles in shared memory,
 * those of its last in registers. Then the crew exchanges bases and sums of terms, which makes a
 * row's p of a term by one factor, and everyone makes scores of what it kept. Terms between the
 * two, for which there was no room, are made again, the last first, since those keys are still in
 * L2.
 *
 * Waiting. A block waits for the others of its crew. They are next to each other in the order in
 * which blocks start: the numbers of a grid that fits the device, else tickets. So the oldest crew
 * that is not through has its blocks running, or gets them as others end.
 *
 * How keys are dealt out depends on the block of the batch alone, and so do the bits.
 */
#ifndef DKV_KERNELS_CUDA_ATTENTION_CREW_CUH
#define DKV_KERNELS_CUDA_ATTENTION_CREW_CUH

#include "kernels/cuda/attention_crew_terms.cuh"

namespace
{

/* ---- what a crew knows ---- */

/* Joins the states of the eight lanes that have the same slots; each puts a part of them into
 * `room`. */
template <int columns>
__device__ inline void join_crew_lanes(const crew_place &at, const crew_softmax<columns> &softmax,
                                       partial *room)
{
    partial states[2 * columns];
#pragma unroll
    for (int k = 0; k < 2 * columns; k++)
        states[k] = {softmax.base[k], softmax.sum[k]};
#pragma unroll
    for (int step = 0; step < 3; step++) {
        const int bit = 16 >> step;
        const int half = columns >> step;
        const bool upper = at.lane & bit;
#pragma unroll
        for (int k = 0; k < half; k++) {
            const partial other = upper ? states[k] : states[half + k];
            states[k] = upper ? states[half + k] : states[k];
            join(states[k],
                 {__shfl_xor_sync(~0u, other.top, bit), __shfl_xor_sync(~0u, other.sum, bit)});
        }
    }
    const uint32_t first = (at.lane >> 4 & 1) * columns + (at.lane >> 3 & 1) * (columns / 2) +
                           (at.lane >> 2 & 1) * (columns / 4);
#pragma unroll
    for (int i = 0; i < columns / 4; i++) {
        const uint32_t k = first + i;
        room[k / 2 * 8 + at.column + k % 2] = states[i];
    }
}

/* Joins them all at once. */
template <int n> __device__ inline partial join_all(const partial (&of)[n])
{
    partial all = nothing;
#pragma unroll
    for (int i = 0; i < n; i++)
        all.top = fmaxf(all.top, of[i].top);
#pragma unroll
    for (int i = 0; i < n; i++)
        all.sum = fmaf(of[i].sum, exp2_fast(of[i].top - all.top), all.sum);
    return all;
}

template <int n, uint32_t slots>
__device__ inline partial join_room(const partial (*room)[slots], uint32_t slot)
{
    partial of[n];
#pragma unroll
    for (int i = 0; i < n; i++)
        of[i] = room[i][slot];
    return join_all(of);
}

/* From the lanes' states to results. */
template <class shape>
__device__ inline void settle_crew(const attention_args &args, const job &work,
                                   const crew_place &at, uint32_t member,
                                   const crew_softmax<shape::columns> &softmax,
                                   partial (*room)[shape::slots], row_result *results)
{
    constexpr uint32_t slots = shape::slots;
    constexpr uint32_t parts = shape::threads / slots;
    const uint32_t crew = work.at.n_ranges;
    const uint32_t slot = threadIdx.x % slots;
    const uint32_t part = threadIdx.x / slots;
    partial *const partials = reinterpret_cast<partial *>(work.unit.work);
    join_crew_lanes<shape::columns>(at, softmax, room[threadIdx.x / 32]);
    __syncthreads();
    partial all = nothing;
    if (part == 0)
        all = join_room<shape::threads / 32, slots>(room, slot);
    if (crew > 1) {
        constexpr int each = (crew_max + parts - 1) / parts;
        partial of[each];
        if (part == 0)
            partials[member * slots + slot] = all;
        __syncthreads();
        if (threadIdx.x == 0) {
            dkv_fast::counter_publish(args.counters + work.at.counter);
            dkv_fast::counter_wait(args.counters + work.at.counter, crew);
        }
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < each; i++) {
            const uint32_t m = i * parts + part;
            const float2 one =
                m < crew ? __ldcg(reinterpret_cast<const float2 *>(partials + m * slots + slot))
                         : make_float2(nothing.top, nothing.sum);
            of[i] = {one.x, one.y};
        }
        room[part][slot] = join_all(of);
        __syncthreads();
        if (part == 0)
            all = join_room<parts, slots>(room, slot);
    }
    if (part == 0) {
        const slot_row row = row_of_slot(work.at, slot);
        results[slot] = slot < work.at.n_slots ? result_of(work, all, row.head, row.t) : no_row;
    }
    if (threadIdx.x == 0 && member == 0)
        *work.unit.exponent = 0;
    __syncthreads();
}

/* ---- the kernel ---- */

/* The item of this thread block: its number, or a ticket where not all blocks run at once. The
 * counter before those of crews has the tickets. */
__device__ inline uint32_t crew_item(const attention_args &args)
{
    __shared__ uint32_t ticket;
    if (gridDim.x <= args.at_once)
        return blockIdx.x;
    if (threadIdx.x == 0)
        ticket = atomicAdd(args.counters, 1u);
    __syncthreads();
    return ticket;
}

/* Where the t-th tile is that is sent for. */
template <class shape> __device__ inline uint32_t place_of_tile(int t)
{
    return t < shape::places ? t
                             : shape::early_tiles + (t - shape::early_tiles) % shape::ring_tiles;
}

/* A group's tiles: of the unit's, those at first, first + step, .. */
struct crew_share {
    uint32_t first; /* key */
    uint32_t step;
    int n;
};

__device__ inline crew_share share_of(const place &at, uint32_t member, uint32_t group,
                                      uint32_t groups)
{
    const uint32_t crew = at.n_ranges;
    const uint32_t first = member + crew * group;
    return {first * crew_tile_keys, crew * groups * crew_tile_keys,
            static_cast<int>(at.tiles_each + (first < at.tiles_over))};
}

/* Empty except for sm_90a: attention.cu knows. */
template <class shape, int fold>
__global__ void __launch_bounds__(shape::threads, 1) attend(const attention_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int columns = shape::columns;
    extern __shared__ unsigned char crew_memory[];
    __shared__ job work;
    __shared__ unsigned char there[shape::groups][shape::places][crew_tile_keys];
    __shared__ int last_keys[shape::slots];
    __shared__ partial room[shape::threads / 32][shape::slots];
    __shared__ row_result results[shape::slots];
    start_dependents();
    const crew_place at = crew_place_of_thread();
    const uint32_t member = open_job(args, 0, crew_item(args), work);
    const uint32_t queries = (dkv_fast::shared_address(crew_memory) + 1023) / 1024 * 1024;
    const uint32_t room_at = queries + shape::query_bytes + at.group * shape::group_bytes;
    const crew_ring<shape> ring = crew_ring_of<shape>(
        work, at, room_at + shape::room_bytes - shape::early_tiles * shape::tile_bytes,
        there[at.group]);
    const crew_share share = share_of(work.at, member, at.group, shape::groups);
    crew_queries<shape> my_queries;
    load_crew_queries(work, my_queries);
#pragma unroll 1
    for (int t = 0; t < shape::places; t++) {
        fetch_tile(work, ring, t, t < share.n, share.first + t * share.step);
        if (t == 0) { /* while that is on its way */
            place_queries(my_queries, queries);
            place_last_keys<shape>(work, last_keys);
        }
    }

    kept_terms<shape> kept;
    kept.tiles = room_at + at.thread * 16;
    crew_softmax<columns> softmax;
#pragma unroll
    for (int k = 0; k < 2 * columns; k++) {
        softmax.base[k] = nothing.top;
        softmax.sum[k] = nothing.sum;
    }
    const crew_rule rule = {queries, work.block.n_valid - work.block.window + 1, last_keys,
                            scaling_of(work.block)};
    float odd = 0;
    dkv_fast::fence_async_proxy();
    __syncthreads();

#pragma unroll 1
    for (int t = 0; t < share.n; t++) {
        crew_values<columns> x;
        const int next = t + shape::ring_tiles;
        const float scale = next_logits<shape>(work, ring, at, rule, place_of_tile<shape>(t),
                                               t < shape::places, share.first + t * share.step,
                                               t >= shape::early_tiles && next < share.n,
                                               share.first + next * share.step, odd, x);
        absorb_tile(softmax, kept, t, scale, x);
    }
    if (odd != 0)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);

    /* Terms of tiles up to this one are not held; the ring begins anew with those not kept. */
    const int again = share.n - shape::held_tiles - 1;
    uint32_t turn = shape::early_tiles;
#pragma unroll 1
    for (int t = 0; t < shape::ring_tiles; t++)
        fetch_tile(work, ring, turn + t, again - t >= shape::kept_tiles,
                   share.first + (again - t) * share.step);
    settle_crew<shape>(args, work, at, member, softmax, room, results);
    const crew_fold<columns> of = fold_of<shape, fold>(work, at, results, share.n, softmax, kept);

    /* Tiles that are made again take turns with others, so that keys come meanwhile. */
    int made = again;
    int stored = share.n - 1;
#pragma unroll 1
    for (int i = 0; i < share.n; i++) {
        if (stored <= again && stored >= shape::kept_tiles)
            stored = shape::kept_tiles - 1;
        const bool makes = made >= shape::kept_tiles && (i % 2 == 0 || stored < 0);
        const int t = makes ? made-- : stored--;
        const uint32_t first_key = share.first + t * share.step;
        crew_values<columns> x;
        if (makes) {
            const int next = t - shape::ring_tiles;
            const float scale = next_logits<shape>(
                work, ring, at, rule, place_of_tile<shape>(turn++), false, first_key,
                next >= shape::kept_tiles, share.first + next * share.step, odd, x);
            make_terms<columns>(softmax, scale, x, x);
        } else if (t < shape::kept_tiles) {
            load_terms(kept, t, x);
        } else {
            pop_terms(kept, x);
        }
        const float total = fold_terms<shape, fold>(of, results, at, x);
        if ((at.lane & 2) == 0)
            store_total(work, of, first_key + at.key + (at.lane & 1) * 8, total);
    }
#endif
}

} // namespace

#endif
