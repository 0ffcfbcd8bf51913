/* The end of a search: the tokens that the cut is among are few.
 *
 * A block alone ranks them against each other. In a crew every block gets a list of all of them and
 * goes on alone, all to the same end: it narrows the list by the rest of the keys, eleven bits at a
 * time, ranks what is left, and drops the keys of its own tokens that are behind the cut.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_LIST_CUH
#define DKV_KERNELS_CUDA_SELECT_LIST_CUH

#include "kernels/cuda/select_cut.cuh"

/* Calls put(place, listing) for the part's tokens that agree with `want` from bit `low` of the key
 * on; places are counted in *n. */
template <int threads, class tokens, typename Put>
__device__ __forceinline__ void select_collect(const tokens &t, const select_part &p, unsigned want,
                                               int low, unsigned *n, Put put)
{
#pragma unroll 1
    for (uint32_t i = p.begin + 4 * threadIdx.x; i < p.end; i += 4 * threads) {
        const uint4 four = *reinterpret_cast<const uint4 *>(p.keys + (i - p.begin));
        const bool is_one[4] = {
            (four.x ^ want) >> low == 0 && four.x != 0, (four.y ^ want) >> low == 0 && four.y != 0,
            (four.z ^ want) >> low == 0 && four.z != 0, (four.w ^ want) >> low == 0 && four.w != 0};
        if (!(is_one[0] | is_one[1] | is_one[2] | is_one[3]))
            continue;
        const unsigned key[4] = {four.x, four.y, four.z, four.w};
        unsigned raw[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
            raw[q] = is_one[q] ? select_listed_raw(t, p, i + q) : 0;
        unsigned at = atomicAdd(n, is_one[0] + is_one[1] + is_one[2] + is_one[3]);
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (is_one[q])
                put(at++, select_listing{raw[q], key[q], select_order(t, i + q), 0});
    }
}

/* What is known of a candidate that `ahead` others are better than: it is the cut, or behind it and
 * its key is cleared, if `clears`, or one that a lower rank keeps. */
template <class tokens>
__device__ __forceinline__ void select_place(select_state<tokens> &s, const select_part &p,
                                             const select_candidate &mine, unsigned ahead,
                                             unsigned wanted, bool clears)
{
    const uint32_t token = select_token_of(s.task, mine.index);
    if (ahead + 1 == wanted)
        s.cut = mine;
    if (ahead < wanted && token < p.begin)
        atomicAdd(&s.ahead, 1u);
    if (clears && ahead >= wanted && token >= p.begin && token < p.end)
        p.keys[token - p.begin] = 0;
}

/* select_rank() where keys leave something out. */
template <int threads, class tokens>
static __device__ __noinline__ void select_rank_seconds(select_state<tokens> &s, select_part p,
                                                        unsigned count, unsigned wanted,
                                                        bool clears)
{
    if (threadIdx.x < count)
        s.seconds[threadIdx.x] = select_second(
            s.task, select_token_of(s.task, s.ranked[threadIdx.x].index));
    __syncthreads();
    if (threadIdx.x < count) {
        const auto candidate = [&](unsigned i) {
            return select_candidate{
                s.seconds[i], s.ranked[i].key, s.ranked[i].raw, s.ranked[i].index, {0, 0, 0}};
        };
        const select_candidate mine = candidate(threadIdx.x);
        unsigned ahead = 0;
        for (unsigned i = 0; i < count; i++)
            ahead += select_better(candidate(i), mine);
        select_place(s, p, mine, ahead, wanted, clears);
    }
    __syncthreads();
}

/* The `wanted`-th best of the `count` candidates is the cut; the keys of this block's tokens that
 * are behind it are cleared, and what lower ranks keep is added to s.ahead. Several threads a
 * candidate, each comparing it with its share of the others. */
template <int threads, class tokens>
__device__ __forceinline__ void select_rank(select_state<tokens> &s, const select_part &p,
                                            unsigned count, unsigned wanted, bool clears)
{
    constexpr int log_threads = threads == select_threads ? select_log_threads : 7;
    static_assert(1 << log_threads == threads, "a shift, as division would be much code");
    const int log_per = min(5, __clz(count - 1) - (32 - log_threads));
    const unsigned per = 1u << log_per;
    const unsigned which = min(threadIdx.x >> log_per, count - 1);
    const unsigned part = threadIdx.x & (per - 1);
    unsigned ahead = 0;
    __syncthreads();
    const select_listing mine = s.ranked[which];
    const unsigned long long number = static_cast<unsigned long long>(mine.key) << 32 | mine.raw;
#pragma unroll 1
    for (unsigned i = part; i < count; i += per) {
        const select_listing l = s.ranked[i];
        const unsigned long long other = static_cast<unsigned long long>(l.key) << 32 | l.raw;
        ahead += (other > number) | ((other == number) & (l.index < mine.index));
    }
#pragma unroll 1
    for (unsigned step = per / 2; step; step /= 2)
        ahead += __shfl_xor_sync(~0u, ahead, step);
    const bool is_first = part == 0 && threadIdx.x >> log_per == which; /* of the candidate's */
    if (select_has_second(s.task)) {
        /* What keys leave out counts only if the last one that is kept ties with the next. */
        if (is_first && (ahead == wanted || ahead + 1 == wanted))
            s.beside[ahead + 1 - wanted] = mine.key;
        __syncthreads();
        if (s.beside[0] == s.beside[1]) {
            select_rank_seconds<threads>(s, p, count, wanted, clears);
            return;
        }
    }
    if (is_first)
        select_place(s, p, {0, mine.key, mine.raw, mine.index, {0, 0, 0}}, ahead, wanted, clears);
    __syncthreads();
}

/* In a crew: settles which of its `all` tokens that agree with `key` from bit `low` on are kept,
 * `wanted` of them. False if more tie in their keys than can be ranked here; `wanted` of those are
 * then kept, and their key is the cut's. */
template <int threads, class tokens>
__device__ __forceinline__ bool select_finish_crew(const select_crew &crew, select_state<tokens> &s,
                                                   const select_part &p, unsigned key, int low,
                                                   const select_found &found, unsigned &wanted,
                                                   bool clears, select_parity &parity)
{
    select_listing *list = select_exchange_of(s).list;
    const unsigned all = found.inside;
    unsigned count = all;
    select_collect<threads>(
        s.task, p, key, low, &s.n_mine,
        [&](unsigned at, const select_listing &l) { list[found.first + at] = l; });
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    crew_share_list(crew, s.box, list, found.first, s.n_mine, all, parity.list);
    parity.list ^= 1;
#endif
#pragma unroll 1
    while (count > select_ranked && count > wanted && low > 0) {
        const int high = low;
        low = high > 11 ? high - 11 : 0;
        const unsigned mask = (1u << (high - low)) - 1;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < all; i += threads) {
            const unsigned other = list[i].key;
            if ((other ^ key) >> high == 0)
                atomicAdd(s.histogram + (other >> low & mask), 1u);
        }
        const select_found narrower = select_find_own_bin<threads>(s, wanted);
        wanted -= narrower.above;
        count = narrower.inside;
        key |= narrower.bin << low;
    }
    /* What is left, unless all of it is kept or it is too much; what is before it is kept. */
    const bool ranks = count > wanted && count <= select_ranked;
    unsigned ahead = 0;
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < all; i += threads) {
        const select_listing l = list[i];
        if ((l.key ^ key) >> low != 0)
            ahead += l.key > key && select_token_of(s.task, l.index) < p.begin;
        else if (ranks)
            s.ranked[atomicAdd(&s.n_ranked, 1u)] = l;
        else
            ahead += count == wanted && select_token_of(s.task, l.index) < p.begin;
    }
    if (ahead > 0)
        atomicAdd(&s.ahead, ahead);
    if (ranks) {
        select_rank<threads>(s, p, count, wanted, clears);
        return true;
    }
    if (threadIdx.x == 0)
        s.cut.key = key;
    __syncthreads();
    return count == wanted;
}

/* The same of a block alone, which has room for all of them in s.ranked. */
template <int threads, class tokens>
__device__ __forceinline__ void select_finish_alone(select_state<tokens> &s, const select_part &p,
                                                    unsigned key, int low, unsigned all,
                                                    unsigned wanted, bool clears)
{
    select_collect<threads>(s.task, p, key, low, &s.n_ranked,
                            [&](unsigned at, const select_listing &l) { s.ranked[at] = l; });
    select_rank<threads>(s, p, all, wanted, clears);
}

/* select_find_cut() from a later round on: the cut has the digits before. */
template <int threads, bool crews, class tokens>
static __device__ __noinline__ void select_find_late(const select_crew &crew,
                                                     select_state<tokens> &s, select_part p,
                                                     unsigned wanted, unsigned few, bool clears,
                                                     int round, select_parity &parity)
{
    const bool several = crews && crew.size > 1;
    for (;;) {
        if (round == select_round_ties && !select_has_second(s.task))
            round += 6; /* on to raw scores */
        const select_digit d = select_digit_of(round, select_first_shift(s.task));
        select_count<threads>(s, p, d);
        const select_found found = select_find_bin<threads, crews>(crew, s, wanted, parity);
        wanted -= found.above;
        if (threadIdx.x == 0)
            select_decide(s.cut, d, found.bin);
        if (several)
            select_add_ahead(s, found.inside == wanted ? found.bin : found.bin + 1);
        __syncthreads();
        if (found.inside == wanted) /* the whole bin is kept: its lower end is the cut */
            break;
        round = round == select_round_whole - 1 ? int(select_round_ties) : round + 1;
        if (d.number > 0 || found.inside > few)
            continue;
        if (!several) {
            select_finish_alone<threads>(s, p, s.cut.key, d.shift, found.inside, wanted, clears);
            return;
        }
#if __CUDA_ARCH__ >= 900
        if (crews) {
            if (select_finish_crew<threads>(crew, s, p, s.cut.key, d.shift, found, wanted, clears,
                                            parity))
                return;
            crew_wait_for_all(crew, s.box, parity.here);
            parity.here ^= 1;
            round = select_round_ties;
        }
#endif
    }
    if (round >= select_round_ties && clears)
        select_settle_ties<threads>(s, p);
}

/* Finds the `wanted`-th best token of the unit: those up to it are those whose keys are not below
 * s.cut.key, once this returns, but that the keys of others that tie with it are 0, or still there
 * unless this `clears` them. The first digit is counted already; `listed` is how long a list can
 * be. */
template <int threads, bool crews, class tokens>
__device__ __forceinline__ void select_find_cut(const select_crew &crew, select_state<tokens> &s,
                                                const select_part &p, unsigned wanted,
                                                unsigned listed, bool clears, select_parity &parity)
{
    const int shift = select_first_shift(s.task);
    const bool several = crews && crew.size > 1;
    const unsigned few = several ? listed : min(threads / 4, select_ranked);
    const select_found found = select_find_bin<threads, crews>(crew, s, wanted, parity);
    if (select_is_end(s.task, found.bin)) {
        select_find_late<threads, crews>(crew, s, p, wanted, few, clears, select_round_whole,
                                         parity);
        return;
    }
    const unsigned key = select_lowest_in(s.task, found.bin);
    wanted -= found.above;
    if (threadIdx.x == 0)
        s.cut.key = key;
    if (several)
        select_add_ahead(s, found.inside == wanted ? found.bin : found.bin + 1);
    int late = 1;
    if (found.inside == wanted) { /* the whole bin is kept: its lower end is the cut */
        __syncthreads();
        return;
    }
    if (found.inside <= few && !several) {
        select_finish_alone<threads>(s, p, key, shift, found.inside, wanted, clears);
        return;
    }
#if __CUDA_ARCH__ >= 900
    if (crews && found.inside <= few) {
        if (select_finish_crew<threads>(crew, s, p, key, shift, found, wanted, clears, parity))
            return;
        crew_wait_for_all(crew, s.box, parity.here);
        parity.here ^= 1;
        late = select_round_ties;
    }
#endif
    __syncthreads(); /* s.cut */
    select_find_late<threads, crews>(crew, s, p, wanted, few, clears, late, parity);
}

#endif
