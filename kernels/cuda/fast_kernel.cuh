/* The fast scorer's kernel: its roles and how they meet.
 *
 *   fetch a, b   one warp each: stream half tiles in the order the passes read them
 *   pass a       4 warps, a turn after the other, never waiting for another thread block
 *   merge        2 warps: copies the descriptors of item s + 2 into shared memory; then, as soon as
 *                every chunk of item s's unit is in, merges this thread block's slice of it
 *   pass b       8 warps: as soon as every slice of item s's unit is merged
 *
 * They meet at mbarriers (half tiles, slots of logits, descriptors) and, across thread blocks, at
 * two counters per unit. What waits: the merge of turn s for passes A of turn s, pass B of turn s
 * for merges of turn s, pass A of turn s + 2 for the slots that pass B of turn s reads. Every wait
 * is for something earlier in that order, so nothing deadlocks as long as all thread blocks run at
 * the same time, which the grid's size (one per multiprocessor) sees to.
 *
 * The ring of partials has two turns: a thread block writes its partial of turn s + 2 after its own
 * pass B of turn s began, and that waited for every slice of the merge that reads it.
 */
#ifndef DKV_KERNELS_CUDA_FAST_KERNEL_CUH
#define DKV_KERNELS_CUDA_FAST_KERNEL_CUH

#include "kernels/cuda/fast_merge.cuh"
#include "kernels/cuda/fast_pass_a.cuh"
#include "kernels/cuda/fast_pass_b.cuh"

namespace dkv_fast
{

template <class S>
__device__ __forceinline__ const job &job_wait(shared_memory<S> &shared, uint32_t turn)
{
    const uint32_t slot = turn % JOBS;
    mbarrier_wait(shared_address(&shared.job_full[slot]), turn / JOBS & 1);
    return shared.jobs[slot];
}

template <class S>
__device__ __forceinline__ void job_release(shared_memory<S> &shared, uint32_t turn, int lane)
{
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(shared_address(&shared.job_empty[turn % JOBS]));
}

template <class T>
__device__ __forceinline__ void copy_words(T &to, const T *from, int lane)
{
    static_assert(sizeof(T) % 4 == 0, "descriptors are copied by words");
    for (uint32_t i = lane; i < sizeof(T) / 4; i += 32)
        reinterpret_cast<uint32_t *>(&to)[i] = reinterpret_cast<const uint32_t *>(from)[i];
}

/* Fetches the descriptors of this thread block's item of `turn`; by one warp. */
template <class S>
__device__ __forceinline__ void plan(shared_memory<S> &shared, const dkv_fast_args &args,
                                     uint32_t turn, int lane)
{
    if (turn >= args.turns)
        return;
    const uint32_t slot = turn % JOBS;
    const dkv_fast_item item = args.items[turn * gridDim.x + blockIdx.x];
    mbarrier_wait(shared_address(&shared.job_empty[slot]), (turn / JOBS & 1) ^ 1);
    job &to = shared.jobs[slot];
    if (item.chunks != 0) {
        copy_words(to.unit, args.units + item.unit, lane);
        copy_words(to.block, args.blocks + args.units[item.unit].block, lane);
    }
    if (lane == 0)
        to.item = item;
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(shared_address(&shared.job_full[slot]));
}

/* A side of an item, keys or values, as one fetching warp sees it. */
struct tile_source {
    const dkv_cu_rows &rows;
    const unsigned char *base;
    unsigned long long *bad;
    uint32_t first; /* token of the chunk's first key */
    uint32_t last;  /* the unit's last token */
};

/* Starts the copies of 32 rows, 16 bytes a lane. Rows past the unit's end repeat the last key:
 * finite numbers that nobody looks at. A row behind a bad page table entry is zeros; the entry is
 * reported and the unit's result void. */
template <class S>
__device__ __forceinline__ void fetch_half(const tile_source &from, uint32_t token, uint32_t half,
                                           uint32_t empty, uint32_t full, uint32_t parity,
                                           uint64_t policy, int lane)
{
    constexpr int COLUMNS = S::ROW_BYTES / 16;
    constexpr int AT_ONCE = 32 / COLUMNS; /* rows */
    constexpr int COPIES = HALF / AT_ONCE;
    constexpr int PERIOD = 8 / AT_ONCE; /* the columns' permutation repeats */
    uint32_t to[PERIOD];
#pragma unroll
    for (int i = 0; i < PERIOD; i++)
        to[i] = half + element_offset<S>(i * AT_ONCE + lane / COLUMNS, lane % COLUMNS);
    if (from.rows.page_tokens == 0 && token + HALF - 1 <= from.last) {
        const int64_t stride = from.rows.token_stride;
        const unsigned char *row =
            from.base + (token + lane / COLUMNS) * stride + 16 * (lane % COLUMNS);
        mbarrier_wait(empty, parity ^ 1);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            copy_16(to[i % PERIOD] + i / PERIOD * 8 * S::ROW_BYTES, row, true, policy);
            row += AT_ONCE * stride;
        }
    } else {
        const unsigned char *mine =
            dkv_cu_row(from.rows, from.base, min(token + lane, from.last), from.bad);
        mbarrier_wait(empty, parity ^ 1);
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const unsigned char *row = reinterpret_cast<const unsigned char *>(
                __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine),
                            i * AT_ONCE + lane / COLUMNS));
            copy_16(to[i % PERIOD] + i / PERIOD * 8 * S::ROW_BYTES,
                    row ? row + 16 * (lane % COLUMNS) : from.base, row != nullptr, policy);
        }
    }
    mbarrier_arrive_after_copies(full);
}

/* Streams both halves of a tile into a ring of half tiles. */
template <class S, int size>
__device__ __forceinline__ void fetch_tile(const tile_source &from, int tile,
                                           unsigned char (&halves)[size][S::HALF_BYTES],
                                           unsigned long long (&full)[size],
                                           unsigned long long (&empty)[size], ring<size> &next,
                                           uint64_t policy, int lane)
{
    for (int h = 0; h < 2; h++) {
        fetch_half<S>(from, from.first + tile * TILE + h * HALF,
                      shared_address(halves[next.index]), shared_address(&empty[next.index]),
                      shared_address(&full[next.index]), next.parity, policy, lane);
        next.advance(1);
    }
}

__device__ __forceinline__ tile_source keys_of(const job &work)
{
    const dkv_cu_block &block = work.block;
    return {block.k, work.unit.k, &work.unit.report->bad_k_entry,
            block.valid_from + item_first_key(work.item), block.valid_from + block.n_valid - 1};
}

__device__ __forceinline__ tile_source values_of(const job &work)
{
    const dkv_cu_block &block = work.block;
    return {block.v, work.unit.v, &work.unit.report->bad_v_entry,
            block.valid_from + item_first_key(work.item), block.valid_from + block.n_valid - 1};
}

/* What pass A reads: K and V of every tile. K of kept tiles is never read again. */
template <class S>
__device__ __forceinline__ void fetch_a(shared_memory<S> &shared, const dkv_fast_args &args,
                                        int lane)
{
    ring<S::A_HALVES> next;
    const uint64_t once = policy_evict_first();
    const uint64_t again = policy_normal();
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        const int tiles = work.item.chunks != 0 ? item_tiles(work) : 0;
        for (int tile = 0; tile < tiles; tile++) {
            fetch_tile<S>(keys_of(work), tile, shared.a_halves, shared.a_full, shared.a_empty, next,
                          tile < S::KEPT_TILES ? once : again, lane);
            fetch_tile<S>(values_of(work), tile, shared.a_halves, shared.a_full, shared.a_empty,
                          next, again, lane);
        }
        job_release(shared, turn, lane);
    }
}

/* What pass B reads: V, and K of the tiles that were not kept. */
template <class S>
__device__ __forceinline__ void fetch_b(shared_memory<S> &shared, const dkv_fast_args &args,
                                        int lane)
{
    ring<S::B_HALVES> next;
    const uint64_t once = policy_evict_first();
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        const int tiles = work.item.chunks != 0 ? item_tiles(work) : 0;
        for (int tile = 0; tile < tiles; tile++) {
            if (tile >= S::KEPT_TILES)
                fetch_tile<S>(keys_of(work), tile, shared.b_halves, shared.b_full, shared.b_empty,
                              next, once, lane);
            fetch_tile<S>(values_of(work), tile, shared.b_halves, shared.b_full, shared.b_empty,
                          next, once, lane);
        }
        job_release(shared, turn, lane);
    }
}

__device__ __forceinline__ unsigned char *partial_of(const dkv_fast_args &args, uint32_t turn,
                                                     uint32_t thread_block, size_t bytes)
{
    return args.ring + ((turn & 1) * gridDim.x + thread_block) * bytes;
}

template <class S>
__device__ __forceinline__ void run_a(shared_memory<S> &shared, const dkv_fast_args &args,
                                      int thread)
{
    const place_a<S> at(thread);
    a_reader<S> reader;
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0)
            pass_a<S>(shared, work, turn, reader, at,
                      partial_of(args, turn, blockIdx.x, S::PARTIAL_BYTES),
                      args.counters + work.item.counter);
        job_release(shared, turn, at.lane);
    }
}

template <class S>
__device__ __forceinline__ void run_b(shared_memory<S> &shared, const dkv_fast_args &args,
                                      int thread)
{
    const place_b<S> at(thread);
    b_reader<S> reader(at);
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0)
            pass_b<S>(shared, work, turn & 1, reader, at, args.counters + work.item.counter);
        else
            release_slots(shared, turn & 1, 0, S::KEPT_TILES, at.lane);
        job_release(shared, turn, at.lane);
    }
}

template <class S>
__device__ __forceinline__ void merge(shared_memory<S> &shared, const dkv_fast_args &args,
                                      int thread)
{
    const int lane = thread & 31;
    if (thread < 32) {
        plan(shared, args, 0, lane);
        plan(shared, args, 1, lane);
    }
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        if (thread < 32)
            plan(shared, args, turn + 2, lane);
        const job &work = job_wait(shared, turn);
        if (work.item.chunks != 0) {
            dkv_fast_counters *counters = args.counters + work.item.counter;
            if (thread == 0)
                counter_wait(&counters->partials, work.item.chunks);
            barrier<BARRIER_MERGE, MERGE_THREADS>();
            const partial_set partials = {
                partial_of(args, turn, blockIdx.x - work.item.chunk, S::PARTIAL_BYTES),
                S::PARTIAL_BYTES};
            merge_slice<S>(shared.merge, work, partials, thread);
            if (thread == 0 && work.item.chunk == 0)
                *work.unit.exponent = DKV_CU_EXPONENT;
            barrier<BARRIER_MERGE, MERGE_THREADS>();
            if (thread == 0)
                counter_add(&counters->merged);
        }
        job_release(shared, turn, lane);
    }
}

template <class S> __device__ __forceinline__ void init_barriers(shared_memory<S> &shared)
{
    constexpr int A_READERS = a_reader<S>::BOTH ? A_WARPS : A_WARPS / 2;
    for (int i = 0; i < S::A_HALVES; i++) {
        mbarrier_init(shared_address(&shared.a_full[i]), 32);
        mbarrier_init(shared_address(&shared.a_empty[i]), A_READERS);
    }
    for (int i = 0; i < S::B_HALVES; i++) {
        mbarrier_init(shared_address(&shared.b_full[i]), 32);
        mbarrier_init(shared_address(&shared.b_empty[i]), B_WARPS / 2);
    }
    for (int i = 0; i < 2 * S::KEPT_TILES; i++)
        mbarrier_init(shared_address(&shared.slot_empty[i / S::KEPT_TILES][i % S::KEPT_TILES]),
                      B_WARPS);
    for (int i = 0; i < JOBS; i++) {
        mbarrier_init(shared_address(&shared.job_full[i]), 1);
        mbarrier_init(shared_address(&shared.job_empty[i]), WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

template <class S>
__global__ void __launch_bounds__(THREADS, 1) score(const __grid_constant__ dkv_fast_args args)
{
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_memory<S> &shared = *reinterpret_cast<shared_memory<S> *>(shared_bytes);
    if (threadIdx.x == 0)
        init_barriers(shared);
    __syncthreads();
    int thread = threadIdx.x;
    if (thread < A_THREADS) {
        registers_set<A_REGISTERS, 65536 / THREADS>();
        run_a<S>(shared, args, thread);
    } else if (thread < A_THREADS + B_THREADS) {
        thread -= A_THREADS;
        registers_set<B_REGISTERS, 65536 / THREADS>();
        run_b<S>(shared, args, thread);
    } else {
        thread -= A_THREADS + B_THREADS;
        registers_set<OTHER_REGISTERS, 65536 / THREADS>();
        if (thread < 32)
            fetch_a<S>(shared, args, thread);
        else if (thread < 64)
            fetch_b<S>(shared, args, thread - 32);
        else
            merge<S>(shared, args, thread - 64);
    }
}

} // namespace dkv_fast

#endif
