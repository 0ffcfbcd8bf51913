/* Selection of scores of any sign, of chunks, and of the best of several heads together: a kernel
 * of its own, so that the usual one does not get longer. What is different are the keys
 * (select_any.cuh) and what is written; how the cut is found is the same, and so are crews and
 * seats (select.cu).
 *
 * Keys are made from scores in global memory, where they have just been written: a window of 11 is
 * read five times, from the first cache.
 */
#include "kernels/cuda/select_any.cuh"
#include "kernels/cuda/select_plan.cuh"

namespace
{

constexpr int threads = select_threads;
using any_state = select_state<select_any_task>;

/* ---- keys ---- */

__device__ inline void store_four(const select_any_task &t, any_state &s, unsigned *keys,
                                  const uint4 &four)
{
    *reinterpret_cast<uint4 *>(keys) = four;
    select_count_four(t, s.histogram, four);
}

/* Those of the part's plain fours; some at a time, so that their loads are under way together. */
template <int form>
__device__ __forceinline__ void build_plain(const select_any_task &t, any_state &s,
                                            const select_part &p)
{
    constexpr int at_once = form == 1 ? 4 : 2;
    const uint32_t first = p.begin + 4 * threadIdx.x;
    uint32_t head = select_unit_at(t, first).head;
    float factor = select_factor(t, min(head, t.heads - 1));
#pragma unroll 1
    for (uint32_t from = first; from < p.end; from += at_once * 4 * threads) {
        uint4 key[at_once];
        bool is_plain[at_once];
#pragma unroll
        for (int i = 0; i < at_once; i++) {
            const uint32_t at = from + i * 4 * threads;
            is_plain[i] = false;
            if (at >= p.end)
                continue;
            while (at >= (head + 1) * t.row) {
                head++;
                factor = select_factor(t, head);
            }
            const uint32_t unit = at - head * t.row;
            is_plain[i] = unit >= t.plain_begin && unit < t.plain_end;
            if (is_plain[i])
                key[i] = select_any_four<form>(t, t.scores + static_cast<size_t>(head) * t.stride,
                                               unit, factor);
        }
#pragma unroll
        for (int i = 0; i < at_once; i++)
            if (is_plain[i])
                store_four(t, s, p.keys + (from + i * 4 * threads - p.begin), key[i]);
    }
}

/* Those of all other units, one a thread: of each head the ones before and behind its plain ones.
 */
static __device__ __noinline__ void build_others(any_state &s, select_part p)
{
    const select_any_task &t = s.task;
    const uint32_t each = t.plain_begin + (t.row - t.plain_end);
    const uint32_t first_head = select_unit_at(t, p.begin).head;
    const uint32_t heads = select_unit_at(t, p.end - 1).head + 1 - first_head;
    if (p.begin >= p.end)
        return;
    for (uint32_t i = threadIdx.x; i < heads * each; i += threads) {
        const uint32_t head = first_head + i / each;
        const uint32_t which = i % each;
        const uint32_t unit = which < t.plain_begin ? which : which - t.plain_begin + t.plain_end;
        const uint32_t at = head * t.row + unit;
        if (at < p.begin || at >= p.end)
            continue;
        const unsigned key = select_any_key(t, {head, unit});
        p.keys[at - p.begin] = key;
        if (key != 0)
            atomicAdd(s.histogram + select_window_bin(t, key), 1u);
    }
}

__device__ __forceinline__ void build_keys(const select_any_task &t, any_state &s,
                                           const select_part &p)
{
    if (t.plain_begin < t.plain_end) {
        if (t.chunk > 1)
            build_plain<select_by_4>(t, s, p);
        else if (t.kernel == 1)
            build_plain<1>(t, s, p);
        else if (t.kernel == 5)
            build_plain<5>(t, s, p);
        else if (t.kernel == 7)
            build_plain<7>(t, s, p);
        else
            build_plain<11>(t, s, p);
    }
    build_others(s, p);
}

/* ---- writing ---- */

/* Tokens that are kept before unit `at` of all, if `units` are. A head's first chunk and its last
 * one may have fewer tokens, and are always kept. */
__device__ inline uint32_t tokens_before(const select_any_task &t, uint32_t at, uint32_t units)
{
    if (t.chunk == 1)
        return units;
    const select_unit unit = select_unit_at(t, at);
    const select_tokens_of first = select_chunk(t, 0);
    const select_tokens_of last = select_chunk(t, t.units - 1);
    const uint32_t less_first = t.chunk - (first.end - first.begin);
    const uint32_t less_last = t.units > 1 ? t.chunk - (last.end - last.begin) : 0;
    return units * t.chunk - unit.head * (less_first + less_last) -
           (unit.index > 0 ? less_first : 0) - (unit.index >= t.units ? less_last : 0);
}

/* How many tokens of units at .. at+3 are kept, and which of the units, one bit each. */
struct kept_four {
    unsigned units;
    unsigned tokens;
};

__device__ __forceinline__ kept_four kept_of_four(const select_any_task &t, const select_part &p,
                                                  uint32_t at, unsigned lowest)
{
    if (at >= p.end)
        return {0, 0};
    const uint4 key = *reinterpret_cast<const uint4 *>(p.keys + (at - p.begin));
    const unsigned units = (key.x >= lowest ? 1 : 0) | (key.y >= lowest ? 2 : 0) |
                           (key.z >= lowest ? 4 : 0) | (key.w >= lowest ? 8 : 0);
    if (t.chunk == 1 || units == 0)
        return {units, static_cast<unsigned>(__popc(units))};
    const uint32_t first = select_unit_at(t, at).index;
    kept_four kept = {units, 0};
    for (int q = 0; q < 4; q++) {
        const select_tokens_of tokens = select_chunk(t, first + q);
        kept.tokens += units >> q & 1 ? tokens.end - tokens.begin : 0;
    }
    return kept;
}

/* Writes the tokens of a four, of which the first is the `to`-th of all, and where heads end. */
__device__ __forceinline__ void write_four(const select_any_task &t, uint32_t at, unsigned units,
                                           uint32_t to)
{
    const select_unit first = select_unit_at(t, at);
    const bool has_last = first.index < t.units && first.index + 4 >= t.units;
    if (units == 0 && !has_last)
        return;
    for (uint32_t q = 0; q < 4; q++) {
        const select_tokens_of tokens = select_chunk(t, first.index + q);
        for (uint32_t i = tokens.begin; (units >> q & 1) && i < tokens.end; i++, to++)
            if (to < t.capacity) /* always, if scores are numbers */
                t.keep_out[to] = static_cast<int32_t>(t.first_index + i);
        if (first.index + q + 1 == t.units)
            t.ends_out[first.head] = to;
    }
}

/* Writes the kept tokens in order: each warp has a run of units, each lane four at a time. */
template <bool crews>
__device__ __forceinline__ void write_kept(const select_crew &crew, const select_any_task &t,
                                           any_state &s, const select_part &p)
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
        count += kept_of_four(t, p, i, lowest).tokens;
    count = __reduce_add_sync(~0u, count);
    if (lane == 0)
        s.warp_counts[warp] = count;
    __syncthreads();
    const unsigned of_lane = lane < n_warps ? s.warp_counts[lane] : 0;
    unsigned at = __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
    at += tokens_before(t, p.begin, crews && crew.size > 1 ? s.ahead : 0);
#pragma unroll 1
    for (uint32_t first = from; first < to; first += 128) {
        const uint32_t i = first + 4 * lane;
        const kept_four kept = kept_of_four(t, p, i, lowest);
        unsigned upto = kept.tokens;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const unsigned lower = __shfl_up_sync(~0u, upto, step);
            upto += lane >= step ? lower : 0;
        }
        if (i < to)
            write_four(t, i, kept.units, at + upto - kept.tokens);
        at += __shfl_sync(~0u, upto, 31);
    }
}

/* ---- the kernel ---- */

/* What is known only after scoring; by the first warp. */
__device__ inline void finish_task(select_any_task &t)
{
    int least = t.exponents ? t.exponents[0] : 0;
    for (uint32_t h = threadIdx.x; t.exponents && h < t.heads; h += 32)
        least = min(least, t.exponents[h]);
    least = __reduce_min_sync(~0u, least);
    select_window window;
    if (t.shift > 0) {
        window = {t.shift, (127 + t.base + 2 * least) * (1 << (23 - t.shift))};
    } else {
        const uint32_t head = threadIdx.x % t.heads;
        const float factor = t.exponents ? ldexpf(1.0f, least - t.exponents[head]) : 1.0f;
        const uint32_t at = (2 * threadIdx.x + 1) * t.n >> 6;
        const float score = t.scores[static_cast<size_t>(head) * t.stride + at];
        window = select_window_of(select_raw_bits(score * factor * factor * t.chunk));
    }
    if (threadIdx.x == 0) {
        t.exponent = least;
        t.shift = window.shift;
        t.base = window.base;
    }
}

/* Dynamic shared memory: the state, in a cluster the exchange with a list of `listed`, then the
 * keys of the block's part (unless they are in task.keys). */
template <bool crews>
__global__ void __launch_bounds__(threads, 2)
    select_any(const select_any_task *tasks, const select_seat *seats, uint32_t cluster, uint32_t,
               uint32_t listed)
{
    extern __shared__ __align__(16) unsigned char memory[];
    any_state &s = *reinterpret_cast<any_state *>(memory);
    const select_seat seat = select_seat_of(seats, cluster);
    if (seat.size == 0)
        return;
    const select_crew crew = {seat.size, 31 - static_cast<uint32_t>(__clz(seat.size)), seat.rank,
                              (blockIdx.x & (cluster - 1)) - seat.rank};
    static_assert(sizeof(select_any_task) % 4 == 0 && sizeof(select_any_task) / 4 <= threads,
                  "a word each");
    if (threadIdx.x < sizeof(select_any_task) / 4)
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
#if __CUDA_ARCH__ >= 900
    if (crews)
        crew_meet();
    cudaGridDependencySynchronize(); /* all above was there before scoring began */
#endif
    if (threadIdx.x < 32)
        finish_task(s.task);
    __syncthreads();
    const select_any_task t = s.task;
    const uint32_t all = t.heads * t.row;
    const uint32_t share = select_share(all, crew.log_size);
    select_part p;
    p.begin = min(all, crew.rank * share);
    p.end = min(all, p.begin + share);
    p.keys = t.keys ? t.keys + p.begin
                    : reinterpret_cast<uint32_t *>(memory + sizeof(any_state) +
                                                   (crews ? select_exchange_bytes(listed) : 0));
    p.raw = nullptr;
    p.raw_first = 0;
    build_keys(t, s, p);
    select_parity parity = {0, 0, 0};
    select_find_cut<threads, crews>(crew, s, p, t.keep, listed, true, parity);
    write_kept<crews>(crew, t, s, p);
}

} // namespace

const void *select_any_kernel(bool crews)
{
    return crews ? reinterpret_cast<const void *>(select_any<true>)
                 : reinterpret_cast<const void *>(select_any<false>);
}
