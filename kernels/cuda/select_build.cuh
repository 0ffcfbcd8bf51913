/* Keys of a block's part of a unit: scores come to shared memory, are pooled, and their first
 * digits counted. Included by select.cu.
 *
 * Most tokens are plain: their keys are made four at a time. Where the last tokens are not pooled,
 * nor the first, these are a few at the edges of some blocks' parts, for which all others would
 * wait: what handles them is short, and its loads are under way with the others.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_BUILD_CUH
#define DKV_KERNELS_CUDA_SELECT_BUILD_CUH

#include <cuda_pipeline.h>

#include "kernels/cuda/select_cut.cuh"

namespace
{

/* Starts bringing a score, if there is such a token, to where those outside the scope are kept. */
__device__ __forceinline__ void stage_outside(const select_task &t, int i, const float *score,
                                              float *outside)
{
    if (i >= 0 && i < static_cast<int>(t.n))
        __pipeline_memcpy_async(outside + select_outside_at(t, static_cast<uint32_t>(i)), score,
                                sizeof(float));
}

/* stage_scores() of a task with edges, where not all four are in the scope of pooling. Short, since
 * it is executed once. */
static __device__ __noinline__ void stage_edge(const select_task &t, int first, float *to,
                                               float *outside)
{
#pragma unroll 1
    for (int i = first; i < first + 4; i++, to++) {
        if (i >= static_cast<int>(t.scope_begin) && i < static_cast<int>(t.scope_end)) {
            __pipeline_memcpy_async(to, t.scores + i, sizeof(float));
        } else {
            *to = 0.0f;
            stage_outside(t, i, t.scores + i, outside);
        }
    }
}

/* Starts bringing scores first .. first+3 to `to`, `first` a multiple of four; 0 outside the scope
 * of pooling. */
__device__ __forceinline__ void stage_scores(const select_task &t, int first, float *to,
                                             select_state<select_task> &s)
{
    const int begin = static_cast<int>(t.scope_begin);
    const int end = static_cast<int>(t.scope_end);
    if (first >= begin && first + 4 <= end) {
        __pipeline_memcpy_async(to, t.scores + first, sizeof(float4));
        return;
    }
    if (t.has_edges) {
        stage_edge(s.task, first, to, select_outside_of(s));
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
                                                float *to, float *outside)
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
            if (t.has_edges && inside && !in_scope && i + q < static_cast<int>(t.n))
                outside[select_outside_at(t, i + q)] = mean[q];
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
    const uint32_t whole = (p.end + 3) & ~3u;
    if (t.has_edges)
        return {p.begin, whole};
    if (!t.plain)
        return {p.begin, p.begin};
    const uint32_t begin = max(p.begin, (t.scope_begin + 3) & ~3u);
    const uint32_t end = min(whole, t.scope_end == t.n ? (t.n + 3) & ~3u : t.scope_end & ~3u);
    return {min(begin, max(begin, end)), max(begin, end)};
}

/* Keys of a chunk's plain fours first .. last-1, of which `window` is where the first one's window
 * starts. */
template <int threads, int kernel, bool average>
__device__ __forceinline__ void build_plain(const select_task &t, select_state<select_task> &s,
                                            uint32_t first, uint32_t last, const float *window,
                                            unsigned *keys)
{
#pragma unroll 1
    for (uint32_t i = 4 * threadIdx.x; first + i < last; i += 4 * threads) {
        uint4 key = select_pooled_bits<kernel, average>(window + i);
        if (first + i >= t.protected_end && first + i + 4 <= t.protected_begin) {
            key = {key.x + 2, key.y + 2, key.z + 2, key.w + 2};
        } else if (t.has_edges) {
            *reinterpret_cast<uint4 *>(keys + i) = key;
            select_edge_keys(s.task, first + i, keys + i, select_outside_of(s));
            key = *reinterpret_cast<const uint4 *>(keys + i);
        } else {
            key = select_plain_keys(t, first + i, key);
        }
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
    __syncthreads(); /* everybody has a copy of the task; scores are on their way meanwhile */
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
    if (p.end - p.begin <= pool_tokens &&
        (t.keeps_protected || (p.begin >= t.scope_begin && p.end <= t.scope_end))) {
        p.raw = stage + margin;
        p.raw_first = p.begin;
    }
    uint32_t first = p.begin;
#pragma unroll 1
    do { /* no part is empty: blocks of a crew have a thousand tokens or so each, at least */
        const uint32_t last = min((p.end + 3) & ~3u, first + pool_tokens);
        const uint32_t staged = last - first + 2 * margin;
        if (first > p.begin)
            __syncthreads();
        const int before = static_cast<int>(first) - static_cast<int>(margin);
        if (t.rows)
            stage_means<threads>(s.task, before, staged, stage, select_outside_of(s));
#pragma unroll 1
        for (uint32_t i = 4 * threadIdx.x; i < staged && !t.rows; i += 4 * threads)
            stage_scores(t, before + static_cast<int>(i), stage + i, s);
        __pipeline_commit();
        if (first == p.begin)
            place_window(t, s);
        __pipeline_wait_prior(0);
        __syncthreads();
        const float *window = stage + (margin - half); /* of token `first` */
        unsigned *keys = p.keys + (first - p.begin);
        const uint32_t from = min(max(first, plain.begin), last);
        const uint32_t to = max(from, min(last, plain.end));
        const float *plain_window = window + (from - first);
        unsigned *plain_keys = keys + (from - first);
        switch (t.plain) {
        case select_max_of_11:
            build_plain<threads, 11, false>(t, s, from, to, plain_window, plain_keys);
            break;
        case select_max_of_7:
            build_plain<threads, 7, false>(t, s, from, to, plain_window, plain_keys);
            break;
        case select_max_of_5:
            build_plain<threads, 5, false>(t, s, from, to, plain_window, plain_keys);
            break;
        case select_unpooled:
            build_plain<threads, 1, false>(t, s, from, to, plain_window, plain_keys);
            break;
        case select_mean_of_5:
            build_plain<threads, 5, true>(t, s, from, to, plain_window, plain_keys);
            break;
        case select_mean_of_7:
            build_plain<threads, 7, true>(t, s, from, to, plain_window, plain_keys);
            break;
        case select_mean_of_11:
            build_plain<threads, 11, true>(t, s, from, to, plain_window, plain_keys);
            break;
        default: break;
        }
        if (from > first)
            build_any<threads>(s, first, from, window, keys);
        if (to < last)
            build_any<threads>(s, to, last, window + (to - first), keys + (to - first));
        first += pool_tokens;
    } while (first < p.end);
}

} // namespace

#endif
