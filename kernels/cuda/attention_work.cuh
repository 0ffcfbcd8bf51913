/* The attention scorer's work: what an item is of, how it finds its unit, and what one pass leaves
 * for the other. Included by attention.cu.
 *
 * A slot is the place of a query row: rows of a unit lie in slots one after the other, or, where
 * each query head is reduced by itself, a head begins at a multiple of 8 slots. Slots are taken 32
 * at a time (a chunk, which a warp multiplies with a tile of 16 keys) and at most 128 at a time (a
 * row group, whose queries are in shared memory).
 */
#ifndef DKV_KERNELS_CUDA_ATTENTION_WORK_CUH
#define DKV_KERNELS_CUDA_ATTENTION_WORK_CUH

#include <float.h>

#include "kernels/cuda/fast_ptx.cuh"
#include "kernels/cuda/rows.cuh"

namespace
{

using dkv_fast::exp2_fast;
using dkv_fast::rcp_fast;

constexpr int threads = 128;
constexpr int warps = threads / 32;
constexpr uint32_t tile_keys = 16;
constexpr uint32_t chunk_slots = 32;
constexpr int n_columns = chunk_slots / 8; /* products of 8 slots */
constexpr uint32_t group_slots_max = 128;
constexpr uint32_t score_keys_max = 512;
constexpr int resident = 5; /* thread blocks of a multiprocessor, at least */
constexpr float log2e = 1.4426950408889634f;

/* Where a unit is in the work list. */
struct place {
    uint32_t first_item[2]; /* of weigh and of score */
    uint32_t unit;
    uint32_t block;
    uint32_t counter; /* of the unit's first row group */
    uint32_t n_ranges;
    uint32_t range_keys;
    uint32_t n_slots;
    uint32_t per_head; /* slots */
    uint32_t group_slots;
    uint32_t n_groups;
    /* Of a crew, which has no row groups: */
    uint32_t head_inverse; /* 2^16 / per_head, rounded up */
    uint32_t tiles_each;   /* of a crew's warpgroups, at least */
    uint32_t tiles_over;   /* the first so many have one more */
    uint32_t padding[2];
};

struct attention_args {
    const dkv_cu_block *blocks;
    const dkv_cu_unit *units;
    const place *places;
    unsigned *counters; /* of ranges that are through, for each row group; 0 at first */
    uint32_t n_places;
    uint32_t score_keys; /* of an item of score */
    uint32_t at_once;    /* thread blocks that run at the same time, at least */
};

/* What weigh leaves per (range, slot). */
struct partial {
    float top; /* largest logit */
    float sum; /* of 2^(logit - top); 0: no key of this range is seen */
};

/* What weigh's last range leaves per slot: p = 2^(logit - top) * inverse. */
struct __align__(16) row_result
{
    float top;
    float inverse;
    float weight; /* in the reduction over rows; 0: no row */
    int last;     /* key that it sees; -1: no row */
};

constexpr row_result no_row = {FLT_MAX, 0.0f, 0.0f, -1}; /* its p is 0 */

/* Where results are in unit.work, behind the partials of [n_ranges][n_slots]. */
__host__ __device__ inline size_t results_offset(uint32_t n_ranges, uint32_t n_slots)
{
    const size_t bytes = sizeof(partial) * n_ranges * n_slots;
    return (bytes + 15) / 16 * 16;
}

/* In shared memory, because descriptors in global memory are far. */
struct job {
    dkv_cu_unit unit;
    dkv_cu_block block;
    place at;
};

/* The row group an item works on. */
struct row_group {
    uint32_t first_slot;
    uint32_t n_slots;
    uint32_t n_chunks;
};

__device__ inline row_group group_of(const place &at, uint32_t index)
{
    row_group group;
    group.first_slot = index * at.group_slots;
    group.n_slots = min(at.group_slots, at.n_slots - group.first_slot);
    group.n_chunks = ceil_div(group.n_slots, chunk_slots);
    return group;
}

__device__ inline row_result *results_of(const job &work)
{
    return reinterpret_cast<row_result *>(work.unit.work +
                                          results_offset(work.at.n_ranges, work.at.n_slots));
}

/* The last key that a slot's row sees; -1: there is no row. */
__device__ inline int last_key_of(const job &work, const row_group &group, uint32_t slot)
{
    const uint32_t t = (group.first_slot + slot) % work.at.per_head;
    return slot < group.n_slots && t < work.block.window
               ? static_cast<int>(work.block.n_valid - work.block.window + t)
               : -1;
}

/* Brings the descriptors of a place, a word each thread, so that it takes one trip. */
__device__ inline void copy_job(const dkv_cu_unit *unit, const dkv_cu_block *block, const place *at,
                                job &work)
{
    constexpr uint32_t unit_words = sizeof(*unit) / 4;
    constexpr uint32_t block_words = sizeof(*block) / 4;
    static_assert(sizeof(job) == sizeof(*unit) + sizeof(*block) + sizeof(*at) &&
                      sizeof(job) / 4 <= threads,
                  "a word each thread");
    const uint32_t i = threadIdx.x;
    const uint32_t *from = i < unit_words ? reinterpret_cast<const uint32_t *>(unit) + i
                           : i < unit_words + block_words
                               ? reinterpret_cast<const uint32_t *>(block) + (i - unit_words)
                               : reinterpret_cast<const uint32_t *>(at) +
                                     (i - unit_words - block_words);
    if (i < sizeof(job) / 4)
        reinterpret_cast<uint32_t *>(&work)[i] = *from;
    __syncthreads();
}

/* Finds the unit of an item, 32 places at a look; returns the item's number within the unit. */
__device__ inline uint32_t open_job(const attention_args &args, int pass, uint32_t item, job &work)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t low = 0;
    uint32_t count = args.n_places;
    for (;;) {
        const uint32_t step = ceil_div(count, 32);
        const uint32_t at = lane * step;
        uint4 head = {0, 0, 0, 0};
        if (at < count)
            head = *reinterpret_cast<const uint4 *>(args.places + low + at);
        const uint32_t first = pass == 0 ? head.x : head.y;
        const int last = 31 - __clz(__ballot_sync(~0u, at < count && first <= item));
        if (step == 1) {
            copy_job(args.units + __shfl_sync(~0u, head.z, last),
                     args.blocks + __shfl_sync(~0u, head.w, last), args.places + low + last, work);
            return item - __shfl_sync(~0u, first, last);
        }
        low += last * step;
        count = min(step, count - last * step);
    }
}

/* Score is launched while weigh still runs, and waits for it before it reads what that left. */
__device__ inline void start_dependents()
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void wait_for_weigh()
{
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

} // namespace

#endif
