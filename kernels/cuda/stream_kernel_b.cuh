/* The kernel of pass B: its groups, the warp that adds up what they leave, and those that fetch. */
#ifndef DKV_KERNELS_CUDA_STREAM_KERNEL_B_CUH
#define DKV_KERNELS_CUDA_STREAM_KERNEL_B_CUH

#include "kernels/cuda/stream_pass_b.cuh"

namespace dkv_stream
{

/* The score of a key, if there is such a key. */
__device__ __forceinline__ void store_score(const score_sink &sink, float sum, uint32_t key)
{
    if (key >= sink.n_keys)
        return;
    float score = sum * sink.factor;
    if (sink.adds)
        score += sink.scores[key];
    sink.scores[key] = score;
    if (!dkv_cu_finite(score))
        atomicOr(sink.flags, DKV_CU_RETRY);
}

/* Adds up the warps' sums of every tile and stores scores. By one warp: a lane has four keys. */
template <class S>
__device__ __forceinline__ void store_scores(shared_b<S> &shared, const job &work,
                                             ring<PARTS> &parts, int lane)
{
    const score_sink sink(work);
    const int tiles = range_tiles(work.item);
    uint32_t key = item_first_key(work.item) + 4 * lane;
    for (int tile = 0; tile < tiles; tile++, key += S::STEP) {
        mbarrier_wait(shared_address(&shared.parts_full[parts.index]), parts.parity);
        float4 sums[2] = {};
#pragma unroll
        for (int row = 0; row < 4 * GROUPS * PART_ROWS; row++) {
            const float4 part = *reinterpret_cast<const float4 *>(
                &shared.parts[parts.index][row][part_place(row, 4 * lane)]);
            sums[row % 2] = scale_add(1.0f, part, sums[row % 2]);
        }
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(&shared.parts_empty[parts.index]));
        parts.advance();
        store_score(sink, 2.0f * (sums[0].x + sums[1].x), key);
        store_score(sink, 2.0f * (sums[0].y + sums[1].y), key + 1);
        store_score(sink, 2.0f * (sums[0].z + sums[1].z), key + 2);
        store_score(sink, 2.0f * (sums[0].w + sums[1].w), key + 3);
    }
}

template <class S>
__device__ __forceinline__ void run_group_b(shared_b<S> &shared, const stream_args &args, int group,
                                            int thread)
{
    group_b<S> work(shared, group, thread);
    griddepcontrol_wait();
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &item = item_wait(shared.items, turn);
        if (item.item.chunks != 0)
            work.run(item);
        item_release(shared.items, turn, work.at.lane);
    }
}

/* Copies |v|^2 of a tile's keys beside its values. */
template <class S>
__device__ __forceinline__ void fetch_values(shared_b<S> &shared, tile_stream<S, S::TILES> &stream,
                                             const job &work, uint64_t policy, int lane)
{
    const int tiles = range_tiles(work.item);
    const float *squares = squares_of<S>(work) + item_first_key(work.item) + 4 * lane;
    tile_source<S> from(work, false, lane);
    for (int tile = 0; tile < tiles; tile++, squares += S::STEP) {
        const int place = stream.next.index;
        stream.fetch(from, work, tile, policy);
        stream.next.advance();
        copy_16(shared_address(&shared.squares[place / 2][4 * lane]), squares, true, policy);
        mbarrier_arrive_after_copies(shared_address(&shared.tiles.full[place]));
    }
}

template <class S> __device__ __forceinline__ void init_b(shared_b<S> &shared)
{
    init_tiles(shared.tiles, 2, 4 * GROUPS, 0); /* |v|^2 comes with the values */
    init_items(shared.items, 4 * GROUPS + 3);
    for (int i = 0; i < PARTS; i++) {
        mbarrier_init(shared_address(&shared.parts_full[i]), 4 * GROUPS);
        mbarrier_init(shared_address(&shared.parts_empty[i]), 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Empty except for sm_90a. What it reads before griddepcontrol_wait(), no kernel before it writes.
 */
template <class S>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_b(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_b<S> &shared = *reinterpret_cast<shared_b<S> *>(shared_bytes);
    if (threadIdx.x == 0)
        init_b(shared);
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group < GROUPS) {
        registers_set<COMPUTE_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        run_group_b<S>(shared, args, group, thread_in_group());
    } else {
        registers_set<LOAD_REGISTERS, STREAM_LAUNCH_REGISTERS>();
        const int thread = thread_in_group();
        const int lane = thread & 31;
        if (thread < 64) {
            tile_stream<S, S::TILES> stream(shared.places, shared.tiles.full, shared.tiles.empty,
                                            lane);
            const uint64_t policy = policy_evict_first();
            if (thread >= 32) {
                stream.next.advance();
                griddepcontrol_wait(); /* for |v|^2 */
            }
            for (uint32_t turn = 0; turn < args.turns; turn++) {
                const job &work = item_wait(shared.items, turn);
                if (thread < 32)
                    fetch_tiles<S>(stream, work, true, range_tiles(work.item), policy, lane);
                else if (work.item.chunks != 0)
                    fetch_values<S>(shared, stream, work, policy, lane);
                item_release(shared.items, turn, lane);
            }
        } else if (thread < 96) {
            for (uint32_t turn = 0; turn < args.turns; turn++)
                load_item(shared.items, args, turn, lane);
        } else {
            ring<PARTS> parts;
            for (uint32_t turn = 0; turn < args.turns; turn++) {
                const job &work = item_wait(shared.items, turn);
                if (work.item.chunks != 0)
                    store_scores<S>(shared, work, parts, lane);
                item_release(shared.items, turn, lane);
            }
        }
    }
#endif
}

} // namespace dkv_stream

#endif
