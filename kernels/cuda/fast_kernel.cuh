/* The fast scorer's kernel: its roles and how they meet.
 *
 *   pass a   one group of four warps, a turn after the other
 *   merge    one group: publishes pass A's partial; as soon as every chunk of item s's unit is in,
 *            merges this thread block's slice of it
 *   pass b   one group: as soon as every slice of item s's unit is merged
 *   fetch    one group: a warp each for K and V of pass A, (K and) V of pass B, and for
 *            descriptors and merged rows
 *
 * They meet at mbarriers (tiles, slots of logits, descriptors, partials, merged rows) and,
 * across thread blocks, at two counters per unit. What waits: the merge of turn s for passes A of
 * turn s, pass B of turn s for merges of turn s, pass A of a later turn for slots that pass B of
 * turn s frees and for the place of its partial in the ring, which is free when the unit that it
 * was part of is merged. Every wait is for something earlier in that order, so nothing deadlocks as
 * long as all thread blocks run at the same time, which the grid's size (at most one per
 * multiprocessor) sees to.
 */
#ifndef DKV_KERNELS_CUDA_FAST_KERNEL_CUH
#define DKV_KERNELS_CUDA_FAST_KERNEL_CUH

#include "kernels/cuda/fast_fetch.cuh"
#include "kernels/cuda/fast_merge.cuh"
#include "kernels/cuda/fast_pass_a.cuh"
#include "kernels/cuda/fast_pass_b.cuh"

namespace dkv_fast
{

template <class S>
__device__ __forceinline__ void run_a(shared_memory<S> &shared, const dkv_fast_args &args,
                                      int thread)
{
    const place<S> at(thread);
    a_reader<S> reader;
    ring<S::SLOTS> slots;
    ring<S::TURNS> partials;
    softmax_state<S> state;
    uint32_t q[S::K_STEPS][4] = {};
    load_query(shared, 0, args.turns, at, q);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0)
            pass_a(shared, work, turn, args.turns, reader, slots, at, q, state);
        else
            load_query(shared, turn + 1, args.turns, at, q);
        mbarrier_wait(shared_address(&shared.partial_empty[partials.index]), partials.parity ^ 1);
        if (work.item.chunks != 0)
            store_partial(state, at, partial_of<S>(args, partials.index, blockIdx.x));
        mbarrier_arrive(shared_address(&shared.partial_full[partials.index]));
        partials.advance();
        job_release(shared, turn, at.lane);
    }
}

template <class S>
__device__ __forceinline__ void run_b(shared_memory<S> &shared, const dkv_fast_args &args,
                                      int thread)
{
    const place<S> at(thread);
    b_reader<S> reader;
    ring<S::SLOTS> slots;
    uint32_t parity = 0;
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0) {
            mbarrier_wait(shared_address(&shared.rows_full), parity);
            parity ^= 1;
            fence_async_proxy();
            pass_b<S>(shared, work, reader, slots, at);
            __syncwarp();
            if (at.lane == 0)
                mbarrier_arrive(shared_address(&shared.rows_empty));
        }
        job_release(shared, turn, at.lane);
    }
}

/* Publishes pass A's partial and merges a slice of the unit. */
template <class S>
__device__ __forceinline__ void merge_item(shared_memory<S> &shared, const dkv_fast_args &args,
                                           const job &work, const ring<S::TURNS> &partials,
                                           int thread)
{
    dkv_fast_counters *counters = args.counters + work.item.counter;
    if (thread == 0) {
        mbarrier_wait(shared_address(&shared.partial_full[partials.index]), partials.parity);
        counter_publish(&counters->partials);
        counter_wait(&counters->partials, work.item.chunks);
    }
    group_barrier(BARRIER_MERGE);
    merge_slice<S>(shared.merge, work,
                   partial_of<S>(args, partials.index, blockIdx.x - work.item.chunk),
                   work.item.chunk, work.item.chunks, thread);
    if (thread == 0 && work.item.chunk == 0)
        *work.unit.exponent = exponent_of<S>();
    group_barrier(BARRIER_MERGE);
    if (thread == 0)
        counter_publish(&counters->merged);
}

template <class S>
__device__ __forceinline__ void run_merge(shared_memory<S> &shared, const dkv_fast_args &args,
                                          int thread)
{
    ring<S::TURNS> partials;
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0) {
            merge_item(shared, args, work, partials, thread);
        } else if (thread == 0) {
            mbarrier_wait(shared_address(&shared.partial_full[partials.index]), partials.parity);
            mbarrier_arrive(shared_address(&shared.partial_empty[partials.index]));
        }
        partials.advance();
        job_release(shared, turn, thread & 31);
    }
}

template <class S> __device__ __forceinline__ void init_barriers(shared_memory<S> &shared)
{
    for (int i = 0; i < S::A_TILES; i++) {
        mbarrier_init(shared_address(&shared.a_full[i]), 32);
        mbarrier_init(shared_address(&shared.a_empty[i]), 4);
    }
    for (int i = 0; i < S::B_TILES; i++) {
        mbarrier_init(shared_address(&shared.b_full[i]), 32);
        mbarrier_init(shared_address(&shared.b_empty[i]), 4);
    }
    for (int i = 0; i < S::SLOTS; i++)
        mbarrier_init(shared_address(&shared.slot_empty[i]), 4);
    for (int i = 0; i < JOBS; i++) {
        mbarrier_init(shared_address(&shared.job_full[i]), 1);
        mbarrier_init(shared_address(&shared.job_empty[i]), WARPS);
    }
    for (int i = 0; i < S::TURNS; i++) {
        mbarrier_init(shared_address(&shared.partial_full[i]), GROUP_THREADS);
        mbarrier_init(shared_address(&shared.partial_empty[i]), 1);
    }
    mbarrier_init(shared_address(&shared.rows_full), 32 + 1);
    mbarrier_init(shared_address(&shared.rows_empty), 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Read anew by each role: what is computed before the roles part would be spilled for the one with
 * the fewest registers. */
__device__ __forceinline__ int thread_in_group(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % GROUP_THREADS;
}

/* Empty except for sm_90a: fast_takes() knows. */
template <class S>
__global__ void __launch_bounds__(THREADS, 1) score(const __grid_constant__ dkv_fast_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    /* Selection may take over multiprocessors as they fall free; it waits for the last one. */
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_memory<S> &shared = *reinterpret_cast<shared_memory<S> *>(shared_bytes);
    if (threadIdx.x == 0)
        init_barriers(shared);
    __syncthreads();
    const int group = threadIdx.x / GROUP_THREADS;
    if (group == 0) {
        registers_set<S::A_REGISTERS, LAUNCH_REGISTERS>();
        run_a<S>(shared, args, thread_in_group());
    } else if (group == 1) {
        registers_set<S::B_REGISTERS, LAUNCH_REGISTERS>();
        run_b<S>(shared, args, thread_in_group());
    } else if (group == 2) {
        registers_set<S::MERGE_REGISTERS, LAUNCH_REGISTERS>();
        run_merge<S>(shared, args, thread_in_group());
    } else {
        registers_set<S::FETCH_REGISTERS, LAUNCH_REGISTERS>();
        const int thread = thread_in_group();
        const int lane = thread & 31;
        if (thread < 64)
            fetch_a<S>(shared, args, thread < 32, lane);
        else if (thread < 96)
            fetch_b<S>(shared, args, lane);
        else
            fetch_items<S>(shared, args, lane);
    }
#endif
}

} // namespace dkv_fast

#endif
