/* Selection on the device: pooling, classes, the k best of every unit, ascending indices.
 *
 * scores float32 [n] of a unit -> keep_out int32 [k]; same order, bit for bit, as kernels/select.c.
 *
 * Every token gets a key (select_keys.cuh); radix selection finds the k-th best token, the cut
 * (select_cut.cuh). Every token that is not behind the cut is kept, so writing the indices in order
 * needs no flags, only a count and a second look.
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
#include <cuda_pipeline.h>

#include "kernels/cuda/select_plan.cuh"

namespace
{

/* ---- keys ---- */

/* Starts bringing scores first .. first+3 to `to`, `first` a multiple of four; 0 outside the scope
 * of pooling. */
__device__ __forceinline__ void stage_scores(const select_task &t, int first, float *to)
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

/* The mean of several heads' scores, of the four tokens from `first` on. */
__device__ float4 mean_of_four(const select_task &t, uint32_t first)
{
    double sum[4] = {};
    int least = t.exponent[0]; /* the unit of all */
    for (uint32_t h = 1; h < t.heads; h++)
        least = min(least, t.exponent[h]);
    for (uint32_t h = 0; h < t.heads; h++) {
        const float factor = ldexpf(1.0f, least - t.exponent[h]);
        const float4 x = *reinterpret_cast<const float4 *>(
            t.rows + static_cast<size_t>(h) * t.stride + first);
        sum[0] += x.x * factor * factor;
        sum[1] += x.y * factor * factor;
        sum[2] += x.z * factor * factor;
        sum[3] += x.w * factor * factor;
    }
    return {static_cast<float>(sum[0] / t.heads), static_cast<float>(sum[1] / t.heads),
            static_cast<float>(sum[2] / t.heads), static_cast<float>(sum[3] / t.heads)};
}

/* stage_scores() for `count` tokens, of such means, which are written to t.scores, too. */
template <int threads>
static __device__ __noinline__ void stage_means(const select_task &t, int first, uint32_t count,
                                                float *to)
{
    for (uint32_t at = 4 * threadIdx.x; at < count; at += 4 * threads) {
        const int i = first + static_cast<int>(at);
        const bool inside = i >= 0 && i < static_cast<int>(t.n);
        const float4 four = inside ? mean_of_four(t, i) : float4{0, 0, 0, 0};
        const float mean[4] = {four.x, four.y, four.z, four.w};
        for (int q = 0; q < 4; q++) {
            const bool in_scope = i + q >= static_cast<int>(t.scope_begin) &&
                                  i + q < static_cast<int>(t.scope_end);
            to[at + q] = in_scope ? mean[q] : 0;
            if (inside && i + q < static_cast<int>(t.n))
                const_cast<float *>(t.scores)[i + q] = mean[q];
        }
    }
}

/* The fours of a part that select_plain_keys() can do. */
struct plain_range {
    uint32_t begin;
    uint32_t end;
};

__device__ __forceinline__ plain_range plain_of(const select_task &t, const select_part &p)
{
    if (!t.plain)
        return {p.begin, p.begin};
    const uint32_t begin = max(p.begin, (t.scope_begin + 3) & ~3u);
    const uint32_t end = min((p.end + 3) & ~3u,
                             t.scope_end == t.n ? (t.n + 3) & ~3u : t.scope_end & ~3u);
    return {min(begin, max(begin, end)), max(begin, end)};
}

/* Keys of a chunk's plain fours first .. last-1, of which `window` is where the first one's window
 * starts. */
template <int threads, int kernel>
__device__ __forceinline__ void build_plain(const select_task &t, select_state<select_task> &s,
                                            uint32_t first, uint32_t last, const float *window,
                                            unsigned *keys)
{
#pragma unroll 1
    for (uint32_t i = 4 * threadIdx.x; first + i < last; i += 4 * threads) {
        const uint4 key = select_plain_keys<kernel>(t, first + i, window + i);
        *reinterpret_cast<uint4 *>(keys + i) = key;
        select_count_four(t, s.histogram, key);
    }
}

/* Those of any tokens first .. last-1, which end in whole fours; past the end of the unit they are
 * 0. */
template <int threads>
static __device__ __noinline__ void build_any(select_state<select_task> &s, uint32_t first,
                                              uint32_t last, const float *window, unsigned *keys)
{
    for (uint32_t i = threadIdx.x; first + i < last; i += threads) {
        const unsigned key = first + i < s.task.n ? select_any_key(s.task, first + i, window + i)
                                                  : 0;
        keys[i] = key;
        if (key != 0)
            atomicAdd(s.histogram + select_window_bin(s.task, key), 1u);
    }
}

/* Decides on the first digit, while scores are on their way to shared memory. */
__device__ __forceinline__ void place_window(select_task &t, select_state<select_task> &s)
{
    const float sampled = select_sampled(t, select_sample_at(t));
    const select_window window = select_window_of(
        select_raw_bits(t.average ? sampled * static_cast<float>(t.kernel) : sampled));
    t.shift = window.shift;
    t.base = window.base;
    if (threadIdx.x == 0) {
        s.task.shift = window.shift;
        s.task.base = window.base;
    }
}

/* Pools the part's tokens, stores their keys and counts their first digits. `stage` holds
 * pool_tokens scores and a window's margins; where it has all raw scores they are left there. */
template <int threads>
__device__ __forceinline__ void build_keys(select_task &t, select_state<select_task> &s,
                                           select_part &p, uint32_t pool_tokens, float *stage)
{
    const uint32_t half = t.kernel / 2;
    const uint32_t margin = (half + 3) & ~3; /* so that loads stay aligned to 16 bytes */
    const plain_range plain = plain_of(t, p);
    if (p.end - p.begin <= pool_tokens && p.begin >= t.scope_begin && p.end <= t.scope_end) {
        p.raw = stage + margin;
        p.raw_first = p.begin;
    }
    uint32_t first = p.begin;
#pragma unroll 1
    do {
        const uint32_t last = min((p.end + 3) & ~3u, first + pool_tokens);
        const uint32_t staged = last - first + 2 * margin;
        if (first > p.begin)
            select_meet<threads>();
        const int before = static_cast<int>(first) - static_cast<int>(margin);
        if (t.rows)
            stage_means<threads>(s.task, before, staged, stage);
#pragma unroll 1
        for (uint32_t i = 4 * threadIdx.x; i < staged && !t.rows; i += 4 * threads)
            stage_scores(t, before + static_cast<int>(i), stage + i);
        __pipeline_commit();
        if (first == p.begin)
            place_window(t, s);
        __pipeline_wait_prior(0);
        select_meet<threads>();
        const float *window = stage + (margin - half); /* of token `first` */
        unsigned *keys = p.keys + (first - p.begin);
        const uint32_t from = min(max(first, plain.begin), last);
        const uint32_t to = max(from, min(last, plain.end));
        if (t.plain == 11)
            build_plain<threads, 11>(t, s, from, to, window + (from - first), keys + (from - first));
        else if (t.plain == 7)
            build_plain<threads, 7>(t, s, from, to, window + (from - first), keys + (from - first));
        else if (t.plain == 5)
            build_plain<threads, 5>(t, s, from, to, window + (from - first), keys + (from - first));
        else if (t.plain == 1)
            build_plain<threads, 1>(t, s, from, to, window + (from - first), keys + (from - first));
        if (from > first)
            build_any<threads>(s, first, from, window, keys);
        if (to < last)
            build_any<threads>(s, to, last, window + (to - first), keys + (to - first));
        first += pool_tokens;
    } while (first < p.end);
}

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
    select_meet<threads>();
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
    select_meet<threads>();
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
    select_meet<threads>(); /* if the first stage keeps nothing, its keys may still be counted */
    const select_candidate cut = s.cut;
    for (int i = threadIdx.x; i < select_bins; i += threads)
        s.histogram[i] = 0;
    const select_window window = select_window_of(select_raw_bits(sampled));
    select_meet<threads>();
    if (threadIdx.x == 0) {
        s.task.shift = window.shift;
        s.task.base = window.base;
    }
    select_meet<threads>();
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
    select_meet<threads>();
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
    select_meet<threads>();
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
    cudaGridDependencySynchronize(); /* all above was there before scoring began */
#endif
    if (threadIdx.x == 0 && (t.mask || t.scores_out))
        finish_task(s.task); /* seen after the first barrier */
    build_keys<threads>(t, s, p, pool_tokens, stage);
#if __CUDA_ARCH__ >= 900
    if (crews)
        crew_meet();
#endif
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
