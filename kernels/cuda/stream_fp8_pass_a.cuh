/* Pass A of fp8 caches in the stream scorer: softmax partials of chunks of keys, a chunk by each
 * group of four warps.
 *
 *   logits    [keys][rows]        = K                * query
 *   output    [dimensions][rows] += V, read across   * weights
 *
 * A warp has 16 keys of the logits, a thread keys g and g + 8 and of every eight rows 2t and 2t +
 * 1: z[j][c] with c = 2 * (key is g + 8) + (row is odd). Of the output a warp has a quarter of the
 * dimensions, see fp8_values. Weights go through shared memory, since every warp needs those of all
 * keys; the next tile's have a place of their own, so that one barrier a tile is enough.
 *
 * Sums, top keys and bases are what fast_pass_a.cuh says. They lie in shared memory; the largest
 * key of a tile is looked for only when weights turn out to be large (LARGE).
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FP8_PASS_A_CUH
#define DKV_KERNELS_CUDA_STREAM_FP8_PASS_A_CUH

#include "kernels/cuda/stream_fp8_softmax.cuh"

namespace dkv_stream_fp8
{

/* ---- a chunk's end ---- */

/* Stores the chunk's partial, by the group. */
template <class S>
__device__ __forceinline__ void store_partial(sums<S> &state, room_a<S> &room, const place<S> &at,
                                              int barrier, uint32_t dtype, unsigned char *partial)
{
    group_barrier(barrier); /* nobody reads weights any more */
    share_sums(room, state, at);
    group_barrier(barrier);
    close_row(room, row_share<S>(at.thread), partial);
    group_barrier(barrier);
    unsigned char *output = partial + S::ROWS * sizeof(partial_head) +
                            fp8_values<S>::first(at) * sizeof(float);
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++) {
        const int row = 8 * j + 2 * at.t;
        const uint32_t held = shared_address(room.held[row]) + fp8_values<S>::first(at);
        const uint32_t bytes[2] = {fp8_values<S>::bytes_of(held),
                                   fp8_values<S>::bytes_of(held + S::DIM)};
        state.rescale_output(j, *reinterpret_cast<const float2 *>(&room.factor[row]),
                             *reinterpret_cast<const float2 *>(&room.joins[row]), bytes, dtype);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float o[S::DIM / 32];
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    o[2 * m + i] = state.output[m][j][2 * i + e];
            float *to = reinterpret_cast<float *>(output) + (row + e) * S::DIM;
            if constexpr (S::DIM == 128)
                __stcg(reinterpret_cast<float4 *>(to), make_float4(o[0], o[1], o[2], o[3]));
            else
                __stcg(reinterpret_cast<float2 *>(to), make_float2(o[0], o[1]));
        }
    }
}

/* ---- the pass ---- */

template <class S> struct group_a {
    room_a<S> &room;
    place<S> at;
    int barrier;
    pair_stream<S> stream;
    sums<S> state;

    __device__ __forceinline__ group_a(room_a<S> &in, int group, int thread)
        : room(in), at(thread), barrier(1 + group)
    {
        stream.policy = policy_normal();
    }

    /* The chunk that is in the room. */
    __device__ __forceinline__ void run(void)
    {
        const job &work = room.work;
        const float factor = logit_factor(logit_rule(work)).factor;
        const uint32_t v_type = work.block.v.dtype;
        const int tiles = item_tiles(work);
        const int plain = plain_tiles(work);
        begin(work, tiles);
        float lowest = 0.0f;
        float z[S::COLUMNS][4];
        fp8_keys<S> keys;
        fp8_values<S> values;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const uint32_t pair = shared_address(room.ring) +
                                  stream.slot * static_cast<uint32_t>(sizeof(tile_pair<S>));
            keys.load(pair, at);
            convert_keys(work, keys);
            start_row_product<S, 1>(z, keys, shared_address(room.query), 0);
            values.load(pair + S::TILE_BYTES, place<S>(here(at.thread))); /* no register is left */
            row_shifts<S> shifts;
            shifts.load(room, at);
            warpgroup_wait<0>();
            hold(z);
            state.hold_output();
            if (!S::E4M3)
                lowest = least(z, lowest);
            if (tile >= plain)
                make_logits(work, tile, at, z);
            tile_sums<S> added;
            const bool large = make_weights(z, factor, shifts, room, tile & 1, at, added);
            fence_async_proxy();
            stream.template wait<S::DEPTH - 2>(); /* the next tile, whose values all will read */
            if (group_any(barrier, large || tile == 0)) {
                const place<S> again(here(at.thread));
                raise_bases(room, state, z, factor, again, barrier, pair + S::TILE_BYTES,
                            item_first_key(work.item) + tile * TILE, tile == 0, v_type);
                shifts.load(room, again);
                make_weights(z, factor, shifts, room, tile & 1, again, added);
                fence_async_proxy();
                group_barrier(barrier);
            }
            values.hold_bytes(); /* they take fewer registers */
            state.add(added);
            convert<S>(values, v_type);
            start_value_product(values, weights_place(tile));
            stream.copy(work, tiles, at);
            stream.advance();
        }
        warpgroup_wait<0>();
        state.hold_output();
        if (lowest == -INFINITY)
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        store_partial(state, room, place<S>(here(at.thread)), barrier, v_type,
                      partials_of<S>(work) +
                          work.item.chunk * static_cast<size_t>(S::PARTIAL_BYTES));
    }

    /* By a branch whatever S says: without one ptxas serialises the products (C7513), since the
     * values' is under way. */
    __device__ __forceinline__ void convert_keys(const job &work, fp8_keys<S> &keys) const
    {
        keys.convert(S::E4M3 ? barrier == 0 : work.block.k.dtype == DKV_F8_E5M2);
    }

    /* Nothing is in the sums; the query is there, the first tile, too, and others are on their way.
     */
    __device__ __forceinline__ void begin(const job &work, int tiles)
    {
        const place<S> once(here(at.thread));
        query_rows<S> query;
        query.load(work, once);
        stream.begin(work, shared_address(room.ring), tiles, once);
        state.clear();
        clear_held(room, once);
        clear_rows(room, once);
        bool fits = query.store(work, shared_address(room.query), once);
        const float k = work.unit.k_scale;
        const float v = work.unit.v_scale;
        fits &= k >= SCALE_MIN && k <= SCALE_MAX && v >= SCALE_MIN && v <= SCALE_MAX;
        if (!fits)
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        fence_async_proxy();
        stream.template wait<S::DEPTH - 1>();
        group_barrier(barrier);
    }

    __device__ __forceinline__ static float least(const float (&z)[S::COLUMNS][4], float lowest)
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                lowest = fminf(lowest, z[j][c]);
        return lowest;
    }

    /* Where a tile's weights go. While they are written, other warps' products may still read those
     * of the tile before; those of the tile before that one nobody reads. */
    __device__ __forceinline__ uint32_t weights_place(int tile) const
    {
        return shared_address(room.weights) + (tile & 1) * (S::R == 1 ? 64 : TILE * 128);
    }

    /* Starts output += values * weights. */
    __device__ __forceinline__ void start_value_product(const fp8_values<S> &values,
                                                        uint32_t weights)
    {
        const uint64_t operand = matrix_descriptor(weights, 1024, 1024);
        state.hold_output();
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++)
                warpgroup_mma<fp16_type, 1>(state.output[m], values.words[s][m],
                                            operand + (2 * s * 1024 >> 4), 1);
        warpgroup_commit();
    }
};

/* Empty except for sm_90a. */
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_fp8_a(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    room_a<S> *rooms = reinterpret_cast<room_a<S> *>(shared_bytes);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
    group_a<S> work(rooms[group], group, thread_in_group());
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        if (take_item<S>(work.room.work, args, turn, group, work.barrier, work.at))
            work.run();
    }
#endif
}

} // namespace dkv_stream_fp8

#endif
