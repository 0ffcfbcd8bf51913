/* Pass A of 16-bit caches of up to 64 rows in the stream scorer: softmax partials of chunks of
 * keys, a chunk by each group of four warps.
 *
 *   logits    [keys][rows]        = K                * query
 *   output    [dimensions][rows] += V, read across   * weights
 *
 * Threads have of the logits what stream_fp8_pass_a.cuh says, and of every 64 dimensions of the
 * output 16 warp + g and eight after.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_PASS_A_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_PASS_A_CUH

#include "kernels/cuda/stream_16bit_softmax.cuh"

namespace dkv_stream_16bit
{

template <class S, class room_type = room_a<S>> struct group_a {
    room_type &room;
    place<S> at;
    int side; /* the group's number, where several have the same tiles */
    int barrier;
    streams_a<S> stream;
    sums<S> state;

    __device__ __forceinline__ group_a(room_type &in, int group, int thread)
        : room(in), at(thread), side(group), barrier(1 + group)
    {
        stream.policy = policy_normal();
    }

    /* The chunk that is in the room. */
    __device__ __forceinline__ void run(void)
    {
        const job &work = room.work;
        const float factor = logit_factor(logit_rule(work)).factor;
        const int tiles = item_tiles(work);
        const int plain = plain_tiles(work);
        begin(work, tiles);
        float lowest[4] = {};
        float z[S::COLUMNS][4];
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            start_row_product<S, 1>(z, stream.keys(), shared_address(room.query), 0);
            row_shifts<S> shifts;
            shifts.load(room, at);
            warpgroup_wait<0>();
            hold(z);
            state.hold_output();
            take_least(z, lowest);
            if (tile >= plain)
                make_logits(work, tile, at, z);
            if constexpr (S::KEEPS)
                keep_logits(work, tile, z);
            tile_sums<S> added;
            const bool large = make_weights(z, factor, shifts, room, tile & 1, at, added);
            if constexpr (S::FETCHED)
                fence_async_proxy();
            else
                stream.wait();
            if (meet_any<S>(barrier, large || tile == 0)) {
                const place<S> again(here(at.thread));
                raise_bases(room, state, z, factor, again, barrier,
                            static_cast<int>(item_first_key(work.item)) + tile * TILE);
                shifts.load(room, again);
                make_weights(z, factor, shifts, room, tile & 1, again, added);
                fence_async_proxy();
                group_barrier(barrier);
            }
            state.add(added);
            start_value_product(tile);
            if constexpr (!S::FETCHED)
                stream.copy(work, at);
            stream.advance();
        }
        warpgroup_wait<0>();
        state.hold_output();
        if (fminf(fminf(lowest[0], lowest[1]), fminf(lowest[2], lowest[3])) == -INFINITY)
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        store_partial(state, room, place<S>(here(at.thread)), side, barrier,
                      partials_of<S>(work) +
                          work.item.chunk * static_cast<size_t>(S::PARTIAL_BYTES));
    }

    /* Leaves a tile's logits / factor for pass B. */
    __device__ __forceinline__ void keep_logits(const job &work, int tile,
                                                const float (&z)[S::COLUMNS][4]) const
    {
        const uint32_t bytes = logit_bytes(work);
        const uint32_t key = item_first_key(work.item) + tile * TILE + 16 * at.warp + at.g;
        unsigned char *to = logits_of<S>(work) + key * static_cast<size_t>(bytes) + 8 * at.t;
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++) {
            if (32 * j >= bytes)
                break;
            __stcg(reinterpret_cast<float2 *>(to + 32 * j), make_float2(z[j][0], z[j][1]));
            __stcg(reinterpret_cast<float2 *>(to + 8 * bytes + 32 * j),
                   make_float2(z[j][2], z[j][3]));
        }
    }

    /* Nothing is in the sums; the query is there, the first keys, too, and others are on their way.
     */
    __device__ __forceinline__ void begin(const job &work, int tiles)
    {
        const place<S> once(here(at.thread));
        query_rows<S> query;
        query.load(work, once);
        if constexpr (S::FETCHED)
            stream.open(room.rings);
        else
            stream.begin(work, room.rings, tiles, once);
        state.clear();
        clear_rows(room, once);
        query.store(shared_address(room.query), once);
        if constexpr (S::FETCHED)
            fence_async_proxy();
        else
            stream.template wait<2 * (S::A_KEYS - 1)>();
        meet<S>(barrier);
    }

    /* Four chains, not one that waits for itself. */
    __device__ __forceinline__ static void take_least(const float (&z)[S::COLUMNS][4],
                                                      float (&lowest)[4])
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                lowest[c] = fminf(lowest[c], z[j][c]);
    }

    /* Starts output += values * weights. Where a tile's weights go: while they are written, other
     * warps' products may still read those of the tile before; those of the tile before that one
     * nobody reads. */
    __device__ __forceinline__ void start_value_product(int tile)
    {
        const uint64_t weights = matrix_descriptor(
            shared_address(room.weights) + (tile & 1) * (TILE * 128), 1024, 1024);
        const uint64_t values = values_operand<S>(stream.values());
        state.hold_output();
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
                for (int part = 0; part < S::PARTS; part++)
                    warpgroup_mma_shared<typename S::type, 1>(
                        state.output[m], values + values_step<S>(s) + (m * 1024 >> 4),
                        weights + (2 * s * 1024 + part * 64 >> 4), 1);
        warpgroup_commit();
    }
};

/* Empty except for sm_90a. */
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_16bit_a(const __grid_constant__ stream_args args)
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

} // namespace dkv_stream_16bit

#endif
