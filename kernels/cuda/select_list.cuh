/* The end of a search: the tokens that the cut is among are few.
 *
 * A block alone ranks them against each other. In a crew every block gets a list of all of them and
 * goes on alone, all to the same end: it narrows the list by the rest of the keys, eleven bits at a
 * time, ranks what is left, and drops the keys of its own tokens that are behind the cut.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_LIST_CUH
#define DKV_KERNELS_CUDA_SELECT_LIST_CUH

#include "kernels/cuda/select_cut.cuh"

/* Calls put(place, key, raw score, token) for the part's tokens that agree with the cut from bit
 * `low` of the key on; places are counted in *n. */
template <typename Put>
__device__ __forceinline__ void select_collect(const select_state &s, const select_part &p, int low,
                                               unsigned *n, Put put)
{
    const unsigned want = s.cut.key;
    const bool by_raw = p.raw != nullptr;
    const float *raw = p.raw - p.raw_first;
#pragma unroll 1
    for (uint32_t i = p.begin + 4 * threadIdx.x; i < p.end; i += 4 * blockDim.x) {
        const uint4 four = *reinterpret_cast<const uint4 *>(p.keys + (i - p.begin));
        const bool is_one[4] = {
            (four.x ^ want) >> low == 0 && four.x != 0, (four.y ^ want) >> low == 0 && four.y != 0,
            (four.z ^ want) >> low == 0 && four.z != 0, (four.w ^ want) >> low == 0 && four.w != 0};
        if (!(is_one[0] | is_one[1] | is_one[2] | is_one[3]))
            continue;
        const unsigned key[4] = {four.x, four.y, four.z, four.w};
        float score[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
            score[q] = is_one[q] && by_raw ? raw[i + q] : 0.0f;
        unsigned at = atomicAdd(n, is_one[0] + is_one[1] + is_one[2] + is_one[3]);
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (is_one[q])
                put(at++, key[q], select_raw_bits(score[q]), i + q);
    }
}

/* The `wanted`-th best of the `count` candidates is the cut; the keys of this block's tokens that
 * tie with its key and are behind it are cleared, and what lower ranks keep is added to s.ahead.
 * Several threads a candidate, each comparing it with its share of the others. */
template <int threads>
__device__ __forceinline__ void select_rank(select_state &s, const select_part &p, unsigned count,
                                            unsigned wanted)
{
    constexpr int log_threads = threads == select_threads ? select_log_threads : 7;
    static_assert(1 << log_threads == threads, "a shift, as division would be much code");
    const int log_per = min(5, __clz(count - 1) - (32 - log_threads));
    const unsigned per = 1u << log_per;
    const unsigned which = threadIdx.x >> log_per;
    unsigned ahead = 0; /* and from bit 16 on, those with higher keys */
    __syncthreads();
    if (select_has_second(s.task)) {
        if (threadIdx.x < count)
            s.ranked[threadIdx.x].second = select_second(s.task, s.ranked[threadIdx.x].index);
        __syncthreads();
    }
    if (which < count) {
        const select_candidate mine = s.ranked[which];
#pragma unroll 1
        for (unsigned i = threadIdx.x & (per - 1); i < count; i += per)
            ahead += select_better(s.ranked[i], mine) + (s.ranked[i].key > mine.key ? 1u << 16 : 0);
    }
#pragma unroll 1
    for (unsigned step = per / 2; step; step /= 2)
        ahead += __shfl_xor_sync(~0u, ahead, step);
    if (which < count && (threadIdx.x & (per - 1)) == 0) {
        const unsigned index = s.ranked[which].index;
        const bool ties = ahead >> 16 < wanted; /* its key is the cut's, or above it */
        ahead &= 0xffff;
        if (ahead + 1 == wanted)
            s.cut = s.ranked[which];
        if (ahead < wanted && index < p.begin)
            atomicAdd(&s.ahead, 1u);
        if (ahead >= wanted && ties && index >= p.begin && index < p.end)
            p.keys[index - p.begin] = 0;
    }
    __syncthreads();
}

/* In a crew: settles which of its `all` tokens that agree with the cut from bit `low` on are kept,
 * `wanted` of them. False if more tie in their keys than can be ranked here; `wanted` of those are
 * then kept. */
template <int threads>
__device__ __forceinline__ bool select_finish_crew(const select_crew &crew, select_state &s,
                                                   const select_part &p, int low, unsigned all,
                                                   unsigned &wanted, select_parity &parity)
{
    select_listing *list = select_exchange_of(s).list;
    const unsigned first = s.first;
    unsigned count = all;
    select_collect(s, p, low, &s.n_mine, [&](unsigned at, unsigned key, unsigned raw, uint32_t i) {
        list[first + at] = {key, raw, i, 0};
    });
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    crew_share_list(crew, s.box, list, first, s.n_mine, all, parity.list);
    parity.list ^= 1;
#endif
#pragma unroll 1
    while (count > select_ranked && count > wanted && low > 0) {
        const int high = low;
        low = high > 11 ? high - 11 : 0;
        const unsigned key = s.cut.key;
        const unsigned mask = (1u << (high - low)) - 1;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < all; i += threads) {
            const unsigned other = list[i].key;
            if ((other ^ key) >> high == 0)
                atomicAdd(s.histogram + (other >> low & mask), 1u);
        }
        const select_digit d = {0, low, high - low, false};
        select_find_bin<threads, true>(crew, s, d, wanted, false, 0);
        wanted -= s.above;
        count = s.inside;
    }
    /* What is left, unless all of it is kept or it is too much; what is before it is kept. */
    const bool ranks = count > wanted && count <= select_ranked;
    const unsigned key = s.cut.key;
    unsigned ahead = 0;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < all; i += threads) {
        const select_listing l = list[i];
        if ((l.key ^ key) >> low != 0)
            ahead += l.key > key && l.index < p.begin;
        else if (ranks)
            s.ranked[atomicAdd(&s.n_ranked, 1u)] = {0, l.key, l.raw, l.index, {0, 0, 0}};
        else
            ahead += count == wanted && l.index < p.begin;
    }
    if (ahead > 0)
        atomicAdd(&s.ahead, ahead);
    if (ranks)
        select_rank<threads>(s, p, count, wanted);
    else
        __syncthreads();
    return ranks || count == wanted;
}

/* The same of a block alone, which has room for all of them in s.ranked. */
template <int threads>
__device__ __forceinline__ void select_finish_alone(select_state &s, const select_part &p, int low,
                                                    unsigned all, unsigned wanted)
{
    select_collect(s, p, low, &s.n_ranked,
                   [&](unsigned at, unsigned key, unsigned raw, uint32_t i) {
                       s.ranked[at] = {0, key, raw, i, {0, 0, 0}};
                   });
    select_rank<threads>(s, p, all, wanted);
}

/* Finds the `wanted`-th best token of the unit: those up to it are those whose keys are not below
 * s.cut.key, once this returns; the keys of others that tie with it are 0. The first digit is
 * counted already; `listed` is how long a list can
 * be. */
template <int threads, bool crews>
__device__ __forceinline__ void select_find_cut(const select_crew &crew, select_state &s,
                                                const select_part &p, unsigned wanted,
                                                unsigned listed, select_parity &parity)
{
    const bool several = crews && crew.size > 1;
    const unsigned few = several ? listed : min(threads / 4, select_ranked);
    int round = select_round_window;
#pragma unroll 1 /* the code should fit the instruction cache */
    for (;;) {
        const select_digit d = select_digit_of(round);
        if (round > select_round_window)
            select_count(s, p, d);
        select_find_bin<threads, crews>(crew, s, d, wanted, several, parity.totals);
        parity.totals ^= 1;
        if (d.window && (s.bin == 0 || s.bin == select_bins - 1)) {
            round = select_round_whole;
            continue;
        }
        wanted -= s.above;
        const unsigned inside = s.inside;
        if (several)
            select_add_ahead(s, inside == wanted ? s.bin : s.bin + 1);
        if (inside == wanted) /* the whole bin is kept: its lower end is the cut */
            break;
        if (d.number == 0 && inside <= few) {
            if (!several) {
                select_finish_alone<threads>(s, p, d.shift, inside, wanted);
                return;
            }
#if __CUDA_ARCH__ >= 900
            if (crews) {
                if (select_finish_crew<threads>(crew, s, p, d.shift, inside, wanted, parity))
                    return;
                crew_wait_for_all(crew, s.box, parity.here);
                parity.here ^= 1;
                round = select_round_ties - 1;
            }
#endif
        }
        round = round == select_round_whole - 1 ? int(select_round_ties) : round + 1;
        if (round == select_round_ties && !select_has_second(s.task))
            round += 6; /* on to raw scores */
    }
    __syncthreads(); /* s.ahead */
    if (round >= select_round_ties)
        select_settle_ties(s, p);
}

#endif
