/* Selection on the device: pooling, classes, the k best of every unit, ascending indices.
 *
 * scores float32 [n] of a unit -> keep_out int32 [k]; same order, bit for bit, as kernels/select.c.
 *
 * Every token gets a key (select_keys.cuh); radix selection finds the k-th best token, the cut
 * (select_cut.cuh). Every token that is not behind the cut is kept, so writing the indices in order
 * needs no flags, only a count and a second look.
 *
 * A launch is a list of seats, one per thread block: which unit, and as which member of how large
 * a crew (select_crew.cuh). Short units have a block each, long ones up to 16, so that the blocks
 * of a wave have similar shares (select_plan.cu). How a unit is spread cannot show in the answer,
 * which is exact.
 *
 * 512 threads, or 128 for a crowd of short units; each has four adjacent tokens at a time: what
 * bounds this kernel is latency, not bytes. It may be scheduled while the scorer still runs, and
 * waits for it itself.
 */
#include <cuda_pipeline.h>

#include "kernels/cuda/select_plan.cuh"

namespace
{

/* ---- keys ---- */

/* Starts bringing scores first .. first+3 to `to`, `first` a multiple of four; 0 outside the scope
 * of pooling. */
__device__ void stage_scores(const select_task &t, int first, float *to)
{
    const int begin = static_cast<int>(t.scope_begin);
    const int end = static_cast<int>(t.scope_end);
    if (first >= begin && first + 4 <= end) {
        __pipeline_memcpy_async(to, t.scores + first, sizeof(float4));
        return;
    }
    for (int q = 0; q < 4; q++)
        to[q] = first + q >= begin && first + q < end ? t.scores[first + q] : 0.0f;
}

/* All four tokens from i on. */
__device__ bool is_plain(const select_task &t, uint32_t i)
{
    return i >= t.plain_begin && i + 4 <= t.plain_end;
}

/* Pools the part's tokens, stores their keys and counts their first digits. `stage` holds
 * pool_tokens scores and a window's margins. */
__device__ void build_keys(const select_task &t, select_state &s, const select_part &p,
                           uint32_t pool_tokens, float *stage)
{
    const int half = static_cast<int>(t.kernel / 2);
    const int margin = (half + 3) & ~3; /* so that loads stay aligned to 16 bytes */
    for (uint32_t first = p.begin; first < p.end; first += pool_tokens) {
        const int count = static_cast<int>(min(p.end - first, pool_tokens));
        const int staged = ((count + 3) & ~3) + 2 * margin;
        __syncthreads();
        for (int i = 4 * threadIdx.x; i < staged; i += 4 * blockDim.x)
            stage_scores(t, static_cast<int>(first) - margin + i, stage + i);
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
        const float *window = stage + (margin - half);
        unsigned *keys = p.keys + (first - p.begin);
        /* Most tokens are plain: two loops, so that the call does not burden the first. */
        for (int i = 4 * threadIdx.x; i < count; i += 4 * blockDim.x)
            if (is_plain(t, first + i)) {
                const uint4 key = select_plain_keys(window + i);
                *reinterpret_cast<uint4 *>(keys + i) = key;
                select_count_four(s.histogram, key);
            }
        if (first >= t.plain_begin && first + ((count + 3) & ~3) <= t.plain_end)
            continue;
        for (int i = 4 * threadIdx.x; i < count; i += 4 * blockDim.x)
            if (!is_plain(t, first + i)) {
                const uint4 key = select_any_keys(s.task, first + i, window + i);
                *reinterpret_cast<uint4 *>(keys + i) = key;
                select_count_four(s.histogram, key);
            }
    }
}

/* ---- writing ---- */

/* Which of tokens i .. i+3 are kept, one bit each: those whose keys are not below `lowest`. */
__device__ unsigned kept_of_four(const select_part &p, uint32_t i, unsigned lowest)
{
    if (i >= p.end)
        return 0;
    const uint4 key = *reinterpret_cast<const uint4 *>(p.keys + (i - p.begin));
    return (key.x >= lowest ? 1 : 0) | (key.y >= lowest ? 2 : 0) | (key.z >= lowest ? 4 : 0) |
           (key.w >= lowest ? 8 : 0);
}

/* Writes the kept indices in order: each warp owns a run of tokens, each lane four at a time. */
template <int threads, bool crews>
__device__ void write_kept(const select_crew &crew, select_state &s, const select_part &p)
{
    constexpr int n_warps = threads / 32;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t run = ((p.end - p.begin + n_warps - 1) / n_warps + 127) & ~127u;
    const uint32_t from = min(p.end, p.begin + warp * run);
    const uint32_t to = min(p.end, from + run);
    const unsigned lowest = max(s.cut.key, 1u); /* padding and what is behind the cut have 0 */

    unsigned count = 0;
    for (uint32_t i = from + 4 * lane; i < to; i += 128)
        count += __popc(kept_of_four(p, i, lowest));
    count = __reduce_add_sync(~0u, count);
    if (lane == 0)
        s.warp_counts[warp] = count;
    __syncthreads();
    const unsigned of_lane = lane < n_warps ? s.warp_counts[lane] : 0;
    unsigned at = __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
#if __CUDA_ARCH__ >= 900
    if (crews && crew.size > 1)
        at += crew_prefix(crew, s.box, __reduce_add_sync(~0u, of_lane));
#endif
    int32_t *const out = s.task.keep_out;
    const uint32_t keep = s.task.keep;
    const uint32_t first_index = s.task.first_index;
    for (uint32_t first = from; first < to; first += 128) {
        const uint32_t i = first + 4 * lane;
        const unsigned kept = kept_of_four(p, i, lowest);
        const unsigned mine = __popc(kept);
        unsigned upto = mine;
        for (int step = 1; step < 32; step <<= 1) {
            const unsigned lower = __shfl_up_sync(~0u, upto, step);
            upto += lane >= step ? lower : 0;
        }
        unsigned to_write = at + upto - mine;
        for (int q = 0; q < 4; q++)
            if ((kept >> q & 1) && to_write < keep) /* always below, if scores are numbers */
                out[to_write++] = static_cast<int32_t>(first_index + i + q);
        at += __shfl_sync(~0u, upto, 31);
    }
}

/* ---- the kernel ---- */

/* What is known only after scoring; by one thread. */
__device__ void finish_task(select_task &t)
{
    if (t.mask)
        t.lone_key = dkv_cu_lone_key(t.mask, t.n, t.window);
    if (t.scores_out)
        t.descale = ldexpf(1.0f, -*t.exponent);
}

/* Dynamic shared memory: the state, in a cluster the exchange, then pool_tokens scores with a
 * window's margins, then the keys of the block's part (unless they are in task.keys). */
template <int threads, bool crews>
__global__ void __launch_bounds__(threads, 1024 / threads)
    select_tokens(const select_task *tasks, const select_seat *seats, uint32_t cluster,
                  uint32_t pool_tokens)
{
    extern __shared__ __align__(16) unsigned char memory[];
    select_state &s = *reinterpret_cast<select_state *>(memory);
    float *stage = crews ? reinterpret_cast<float *>(&select_exchange_of(s) + 1)
                         : reinterpret_cast<float *>(&s + 1);
    const select_seat seat = seats[blockIdx.x];
    if (seat.size == 0)
        return;
    const uint32_t log_size = 31 - __clz(seat.size);
    const select_crew crew = {seat.size, log_size, seat.rank,
                              (blockIdx.x & (cluster - 1)) - seat.rank};
    static_assert(sizeof(select_task) % 4 == 0 && sizeof(select_task) <= 128, "a word a lane");
    if (threadIdx.x < sizeof(select_task) / 4)
        reinterpret_cast<uint32_t *>(&s.task)[threadIdx.x] = reinterpret_cast<const uint32_t *>(
            tasks + seat.task)[threadIdx.x];
    for (int i = threadIdx.x; i < select_bins / 4; i += threads)
        reinterpret_cast<uint4 *>(s.histogram)[i] = {0, 0, 0, 0};
    if (threadIdx.x == 0) {
        s.cut = {0, 0, 0, select_no_index, {0, 0, 0}};
        s.n_mine = 0;
    }
#if __CUDA_ARCH__ >= 900
    if (crews)
        crew_open(crew, s.box);
#endif
    __syncthreads();
    const select_task t = s.task;
    select_part p;
    const uint32_t share = select_share(t.n, crew.log_size);
    p.begin = min(t.n, crew.rank * share);
    p.end = min(t.n, p.begin + share);
    p.keys = t.keys ? t.keys + p.begin
                    : reinterpret_cast<uint32_t *>(stage + pool_tokens + DKV_KERNEL_MAX + 1);
#if __CUDA_ARCH__ >= 900
    if (crews)
        crew_meet();
    cudaGridDependencySynchronize(); /* all above was there before scoring began */
#endif
    if (threadIdx.x == 0)
        finish_task(s.task); /* seen after the first barrier */
    build_keys(t, s, p, pool_tokens, stage);
    select_find_cut<threads, crews>(crew, s, p);
    write_kept<threads, crews>(crew, s, p);
}

} // namespace

const void *select_kernel(uint32_t threads, bool crews)
{
    if (crews)
        return reinterpret_cast<const void *>(select_tokens<select_threads, true>);
    return threads == select_threads
               ? reinterpret_cast<const void *>(select_tokens<select_threads, false>)
               : reinterpret_cast<const void *>(select_tokens<select_crowd_threads, false>);
}
