/* Selection on the device: pooling, classes, the k best of every unit, ascending indices.
 *
 * scores float32 [n] of a unit -> keep_out int32 [k]; same order, bit for bit, as kernels/select.c.
 *
 * Every token gets a key (select_keys.cuh, select_build.cuh); radix selection finds the k-th best
 * token, the cut (select_cut.cuh). Every token that is not behind the cut is kept, so writing the
 * indices in order needs no flags, only a count and a second look.
 *
 * A launch is a list of seats, one per thread block: which unit, and as which member of how large
 * a crew (select_crew.cuh); where all crews are alike there is no list. Short units have a block
 * each, long ones up to 16, so that the blocks of a wave have similar shares (select_plan.cu). How
 * a unit is spread cannot show in the answer, which is exact.
 *
 * 512 threads, or 128 for a crowd of short units; each has four adjacent tokens at a time: what
 * bounds this kernel is latency, not bytes. It may be scheduled while the scorer still runs, and
 * waits for it itself.
 */
#include "kernels/cuda/select_build.cuh"
#include "kernels/cuda/select_plan.cuh"

namespace
{

/* ---- writing ---- */

/* Which of tokens i .. i+3 are kept, one bit each: those whose keys are not below `lowest`. */
__device__ __forceinline__ unsigned kept_of_four(const select_part &p, uint32_t i, unsigned lowest)
{
    if (i >= p.end)
        return 0;
    const uint4 key = *reinterpret_cast<const uint4 *>(p.keys + (i - p.begin));
    return (key.x >= lowest ? 1 : 0) | (key.y >= lowest ? 2 : 0) | (key.z >= lowest ? 4 : 0) |
           (key.w >= lowest ? 8 : 0);
}

/* What this block has written of the first head, its `count` indices from `first` on, is that of
 * all other heads, too. */
template <int threads>
static __device__ __noinline__ void copy_to_heads(const select_task &t, uint32_t first,
                                                  uint32_t count)
{
    __syncthreads();
    for (uint32_t i = first + threadIdx.x; i < min(first + count, t.keep); i += threads)
        for (uint32_t h = 1; h < t.heads; h++)
            t.keep_out[h * t.keep + i] = t.keep_out[i];
}

/* Writes the kept indices in order: each warp owns a run of tokens, each lane four at a time. */
template <int threads, bool crews>
__device__ __forceinline__ void write_kept(const select_crew &crew, select_state<select_task> &s,
                                           const select_part &p)
{
    constexpr int n_warps = threads / 32;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t run = ((p.end - p.begin + n_warps - 1) / n_warps + 127) & ~127u;
    const uint32_t from = min(p.end, p.begin + warp * run);
    const uint32_t to = min(p.end, from + run);
    const unsigned lowest = max(s.cut.key, 1u); /* padding and what is behind the cut have 0 */

    unsigned count = 0;
#pragma unroll 1
    for (uint32_t i = from + 4 * lane; i < to; i += 128)
        count += __popc(kept_of_four(p, i, lowest));
    count = __reduce_add_sync(~0u, count);
    if (lane == 0)
        s.warp_counts[warp] = count;
    __syncthreads();
    const unsigned of_lane = lane < n_warps ? s.warp_counts[lane] : 0;
    unsigned at = __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
    const unsigned ahead = crews && crew.size > 1 ? s.ahead : 0;
    at += ahead;
    const uint32_t keep = s.task.keep;
    const unsigned lower_lanes = (1u << lane) - 1;
    const int32_t first_index = static_cast<int32_t>(s.task.first_index);
#pragma unroll 1
    for (uint32_t first = from; first < to; first += 128) {
        const uint32_t i = first + 4 * lane;
        const unsigned kept = kept_of_four(p, i, lowest);
        unsigned to_write = at;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const unsigned lanes = __ballot_sync(~0u, kept >> q & 1);
            to_write += __popc(lanes & lower_lanes);
            at += __popc(lanes);
        }
        if (kept == 0 || to_write + __popc(kept) > keep) /* never above, if scores are numbers */
            continue;
        int32_t *out = s.task.keep_out + to_write;
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (kept >> q & 1)
                *out++ = first_index + static_cast<int32_t>(i) + q;
    }
    if (s.task.heads > 1)
        copy_to_heads<threads>(s.task, ahead, __reduce_add_sync(~0u, of_lane));
}

/* ---- two stages ---- */

/* What token i is selected by in the second stage. */
__device__ __forceinline__ float second_score(const select_task &t, float pooled, uint32_t i)
{
    return (pooled + 1e-4f) * (t.weight ? t.weight[i] : 1.0f);
}

/* What the first stage keeps, those that the cut is not before, becomes safe; keys become those of
 * the second stage, and their first digits are counted. */
template <int threads>
static __device__ __noinline__ void begin_second_stage(select_state<select_task> &s, select_part p)
{
    const uint32_t at = select_sample_at(s.task);
    const float sampled = second_score(s.task, select_sampled(s.task, at), at);
    __syncthreads(); /* if the first stage keeps nothing, its keys may still be counted */
    const select_candidate cut = s.cut;
    for (int i = threadIdx.x; i < select_bins; i += threads)
        s.histogram[i] = 0;
    const select_window window = select_window_of(select_raw_bits(sampled));
    if (threadIdx.x == 0) {
        s.task.shift = window.shift;
        s.task.base = window.base;
    }
    __syncthreads();
    for (uint32_t i = p.begin + threadIdx.x; i < p.end; i += threads) {
        const unsigned first = p.keys[i - p.begin];
        bool is_safe = first & 0x80000000u; /* protected */
        const float pooled = __uint_as_float(is_safe ? first & 0x7fffffffu : first - 2);
        is_safe = is_safe || (cut.key != 0 && first > cut.key) ||
                  (first == cut.key && !select_better(cut, select_candidate_of(s.task, first, i)));
        const unsigned bits = select_raw_bits(second_score(s.task, pooled, i));
        const unsigned key = is_safe ? 0x80000000u | bits : bits + 2;
        p.keys[i - p.begin] = key;
        atomicAdd(s.histogram + select_window_bin(s.task, key), 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        s.cut = {0, 0, 0, select_no_index, {0, 0, 0}};
        s.n_mine = 0;
        s.n_ranked = 0;
        s.ahead = 0;
        s.task.second = 1;
    }
}

/* ---- the kernel ---- */

/* What is known only after scoring; by one thread. */
__device__ __noinline__ void finish_task(select_task &t)
{
    if (t.mask)
        t.lone_key = dkv_cu_lone_key(t.mask, t.n, t.window);
    if (t.scores_out)
        t.descale = ldexpf(1.0f, -*t.exponent);
}

/* Dynamic shared memory: the state, in a cluster the exchange with a list of `listed`, then
 * pool_tokens scores with a window's margins, then the keys of the block's part (unless they are in
 * task.keys). */
template <int threads, bool crews>
__global__ void __launch_bounds__(threads, 1024 / threads)
    select_tokens(const select_task *tasks, const select_seat *seats, uint32_t cluster,
                  uint32_t pool_tokens, uint32_t listed)
{
    extern __shared__ __align__(16) unsigned char memory[];
    select_state<select_task> &s = *reinterpret_cast<select_state<select_task> *>(memory);
    float *stage = reinterpret_cast<float *>(memory + sizeof(select_state<select_task>) +
                                             (crews ? select_exchange_bytes(listed) : 0));
    const select_seat seat = select_seat_of(seats, cluster);
    if (seat.size == 0)
        return;
    const uint32_t log_size = 31 - __clz(seat.size);
    const select_crew crew = {seat.size, log_size, seat.rank,
                              (blockIdx.x & (cluster - 1)) - seat.rank};
    static_assert(sizeof(select_task) % 4 == 0 && sizeof(select_task) / 4 <= threads,
                  "a word each");
    if (threadIdx.x < sizeof(select_task) / 4)
        reinterpret_cast<uint32_t *>(&s.task)[threadIdx.x] = reinterpret_cast<const uint32_t *>(
            tasks + seat.task)[threadIdx.x];
#pragma unroll 1
    for (int i = threadIdx.x; i < select_bins / 4; i += threads)
        reinterpret_cast<uint4 *>(s.histogram)[i] = {0, 0, 0, 0};
    if (threadIdx.x == 0) {
        s.cut = {0, 0, 0, select_no_index, {0, 0, 0}};
        s.n_mine = 0;
        s.n_ranked = 0;
        s.ahead = 0;
    }
#if __CUDA_ARCH__ >= 900
    if (crews)
        crew_open(crew, s.box);
#endif
    __syncthreads();
    select_task t = s.task;
    select_part p;
    const uint32_t share = select_share(t.n, crew.log_size);
    p.begin = min(t.n, crew.rank * share);
    p.end = min(t.n, p.begin + share);
    p.keys = t.keys ? t.keys + p.begin
                    : reinterpret_cast<uint32_t *>(stage + pool_tokens + DKV_KERNEL_MAX + 1);
    p.raw = t.scores;
    p.raw_first = 0;
#if __CUDA_ARCH__ >= 900
    if (crews)
        crew_meet();
    cudaGridDependencySynchronize(); /* all above was there before scoring began */
#endif
    if (threadIdx.x == 0 && (t.mask || t.scores_out))
        finish_task(s.task); /* seen after the first barrier */
    build_keys<threads>(t, s, p, pool_tokens, stage);
    select_parity parity = {0, 0, 0};
    bool stages = t.two_stages;
#pragma unroll 1
    for (;;) {
        const unsigned wanted = stages ? t.keep / 2 : t.keep;
        if (wanted > 0)
            select_find_cut<threads, crews>(crew, s, p, wanted, listed, !stages, parity);
        if (!stages)
            break;
#if __CUDA_ARCH__ >= 900
        if (crews && crew.size > 1) {
            crew_wait_for_all(crew, s.box, parity.here);
            parity.here ^= 1;
        }
#endif
        begin_second_stage<threads>(s, p);
        p.raw = nullptr;
        stages = false;
    }
    for (uint32_t h = threadIdx.x; t.counts_out && crew.rank == 0 && h < t.heads; h += threads)
        t.counts_out[h] = t.keep;
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
