/* The cut: the k-th best token of a unit, found by radix selection.
 *
 * The numbers that order tokens (select_keys.cuh) are looked at 11 bits a round, the highest first:
 * a histogram of those bits, over the tokens that share all bits decided so far, says which bin
 * the k-th best is in. That goes on until the bin is kept as a whole, or until the tokens in it are
 * few: those are then ranked against each other. Padding is in no histogram.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_CUT_CUH
#define DKV_KERNELS_CUDA_SELECT_CUT_CUH

#include "kernels/cuda/select_crew.cuh"
#include "kernels/cuda/select_keys.cuh"

constexpr unsigned select_no_index = 0x3fffffu; /* behind all tokens */

/* One block's share of a unit: tokens begin..end-1 and their keys. */
struct select_part {
    uint32_t *keys; /* padded to whole fours */
    uint32_t begin;
    uint32_t end;
};

/* In shared memory, followed by a select_exchange if the launch has clusters. */
struct alignas(16) select_state {
    select_mailbox box;
    unsigned histogram[select_bins]; /* of this block */
    unsigned n_mine;
    unsigned place;
    unsigned warp_counts[select_threads / 32];
    unsigned bin;
    unsigned above; /* tokens in higher bins */
    unsigned inside;
    select_candidate cut; /* what of it is decided so far; at first 0, 0, 0, select_no_index */
    select_task task;     /* for functions out of line */
};

__device__ inline select_exchange &select_exchange_of(select_state &s)
{
    return *reinterpret_cast<select_exchange *>(&s + 1);
}

/* Round r looks at `width` bits from `shift` on of a number. The first one looks at the keys' bits
 * from 19 on, sixteenths of octaves, of which a window of 128 octaves is told apart: raw scores of
 * 2^-109 to 2^19. Where the cut is not in it, the search begins anew with all bits. */
struct select_digit {
    int number; /* 0 key, 1 second, 2 raw, 3 index */
    int shift;
    int width;
};

constexpr int select_window_shift = 19;
constexpr int select_window_base = 98 * 16;
enum { select_round_window = 0, select_round_whole = 3, select_round_ties = 6, select_rounds = 17 };
__device__ constexpr select_digit select_tie_digits[select_rounds - select_round_ties] = {
    {1, 53, 11}, {1, 42, 11}, {1, 31, 11}, {1, 20, 11}, {1, 9, 11}, {1, 0, 9},
    {2, 20, 11}, {2, 9, 11},  {2, 0, 9},   {3, 11, 11}, {3, 0, 11}};

/* Those of the key are made up: a table would have to be fetched. */
__device__ inline select_digit select_digit_of(int round)
{
    if (round >= select_round_ties)
        return select_tie_digits[round - select_round_ties];
    if (round >= select_round_whole)
        return {0, round == 3 ? 21 : round == 4 ? 10 : 0, round == 5 ? 10 : 11};
    return {0, round == 0 ? select_window_shift : round == 1 ? 8 : 0, round == 2 ? 8 : 11};
}

__device__ inline unsigned select_window_bin(unsigned key)
{
    const int bin = static_cast<int>(key >> select_window_shift) - select_window_base;
    return static_cast<unsigned>(min(max(bin, 0), select_bins - 1));
}

__device__ inline bool select_has_second(const select_task &t)
{
    return t.average || t.mask;
}

/* Adds the first digits of four keys. One at a time: the hardware counts lanes that add one to the
 * same bin, and bins of neighbours often agree, since pooling makes plateaus. */
__device__ inline void select_count_four(unsigned *histogram, const uint4 &four)
{
    const unsigned key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int q = 0; q < 4; q++)
        if (key[q] != 0)
            atomicAdd(histogram + select_window_bin(key[q]), 1u);
}

/* A number of a token, complemented where low ones come first. */
__device__ inline unsigned long long select_number(const select_task &t, int number, unsigned key,
                                                   uint32_t i)
{
    switch (number) {
    case 0: return key;
    case 1: return select_second(t, i);
    case 2: return select_raw_bits(t.scores[i]);
    default: return ~i & select_no_index;
    }
}

/* True if all numbers before `number` are the decided ones, and of that one the bits from `shift`
 * on. */
static __device__ __noinline__ bool select_agrees(const select_state &s, int number, int shift,
                                                  unsigned key, uint32_t i)
{
    for (int n = 0; n <= number; n++) {
        if (n == 1 && !select_has_second(s.task))
            continue;
        const unsigned long long want = n == 0   ? s.cut.key
                                        : n == 1 ? s.cut.second
                                        : n == 2 ? s.cut.raw
                                                 : ~s.cut.index & select_no_index;
        const int below = n < number ? 0 : shift;
        if (below < 64 && (select_number(s.task, n, key, i) ^ want) >> below != 0)
            return false;
    }
    return true;
}

/* Calls use(key, token) for the part's tokens whose keys agree with the cut from bit `below` on. */
template <typename Use>
__device__ __forceinline__ void select_for_matching(const select_state &s, const select_part &p,
                                                    int below, Use use)
{
    const unsigned want = s.cut.key;
    const unsigned mask = below < 32 ? ~0u << below : 0;
    for (uint32_t i = p.begin + 4 * threadIdx.x; i < p.end; i += 4 * blockDim.x) {
        const uint4 four = *reinterpret_cast<const uint4 *>(p.keys + (i - p.begin));
        const unsigned key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (((key[q] ^ want) & mask) == 0 && key[q] != 0)
                use(key[q], i + q);
    }
}

/* The same for tokens with the cut's key that agree in the numbers behind it. Out of line, as all
 * that is needed where keys tie. */
template <typename Use>
__device__ __forceinline__ void select_for_ties(const select_state &s, const select_part &p,
                                                int number, int shift, Use use)
{
    select_for_matching(s, p, 0, [&](unsigned key, uint32_t i) {
        if (select_agrees(s, number, shift, key, i))
            use(key, i);
    });
}

static __device__ __noinline__ void select_count_ties(select_state &s, select_part p,
                                                      select_digit d)
{
    const int above = d.shift + d.width;
    const bool whole = above >= (d.number == 1 ? 64 : d.number == 2 ? 31 : 22);
    const unsigned mask = (1u << d.width) - 1;
    select_for_ties(s, p, d.number, whole ? 64 : above, [&](unsigned key, uint32_t i) {
        const unsigned long long number = select_number(s.task, d.number, key, i);
        atomicAdd(s.histogram + (static_cast<unsigned>(number >> d.shift) & mask), 1u);
    });
}

/* Histogram of digit d, not the first, over the part's tokens that share all digits before. */
__device__ inline void select_count(select_state &s, const select_part &p, const select_digit &d)
{
    if (d.number > 0) {
        select_count_ties(s, p, d);
        return;
    }
    const unsigned mask = (1u << d.width) - 1;
    select_for_matching(s, p, d.shift + d.width, [&](unsigned key, uint32_t) {
        atomicAdd(s.histogram + (key >> d.shift & mask), 1u);
    });
}

/* The cut's bits of digit d, not one of the key, are the bin. */
static __device__ __noinline__ void select_decide_tie(select_candidate &cut, select_digit d,
                                                      unsigned bin)
{
    const unsigned long long bits = static_cast<unsigned long long>(bin) << d.shift;
    if (d.number == 1)
        cut.second |= bits;
    else if (d.number == 2)
        cut.raw |= static_cast<unsigned>(bits);
    else
        cut.index &= ~static_cast<unsigned>(bits);
}

/* Finds the bin that holds the `wanted`-th best token: s.bin, and how many tokens are s.above and
 * s.inside. Clears the histogram. */
template <int threads, bool crews>
__device__ void select_find_bin(const select_crew &crew, select_state &s, unsigned wanted,
                                uint32_t parity)
{
    constexpr int per = select_bins / threads; /* bins a thread */
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int first = select_bins - per * (static_cast<int>(threadIdx.x) + 1);
    uint4 *own = reinterpret_cast<uint4 *>(s.histogram + first);
    uint4 bins[per / 4];
    __syncthreads();
#pragma unroll
    for (int b = 0; b < per / 4; b++) {
        bins[b] = own[b];
        own[b] = {0, 0, 0, 0};
    }
#if __CUDA_ARCH__ >= 900
    if (crews && crew.size > 1) {
        crew_add_histograms(crew, s.box, select_exchange_of(s), bins[0], first / 4, parity);
        bins[0] = *reinterpret_cast<const uint4 *>(select_exchange_of(s).total + first);
    }
#endif
    unsigned sum = 0;
#pragma unroll
    for (int b = 0; b < per / 4; b++)
        sum += bins[b].x + bins[b].y + bins[b].z + bins[b].w;
    unsigned upto = sum; /* of this warp's bins up to this lane's */
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned lower = __shfl_up_sync(~0u, upto, step);
        upto += lane >= step ? lower : 0;
    }
    if (lane == 31)
        s.warp_counts[warp] = upto;
    __syncthreads();
    unsigned above = __reduce_add_sync(~0u, lane < warp ? s.warp_counts[lane] : 0) + upto - sum;
    if (above < wanted && above + sum >= wanted) { /* one thread */
        unsigned bin = first + per - 1;
        unsigned inside = bins[per / 4 - 1].w;
#pragma unroll
        for (int b = per - 2; b >= 0; b--) {
            const uint4 &four = bins[b / 4];
            const unsigned n = b % 4 == 3   ? four.w
                               : b % 4 == 2 ? four.z
                               : b % 4 == 1 ? four.y
                                            : four.x;
            if (above + inside < wanted) {
                above += inside;
                inside = n;
                bin = first + b;
            }
        }
        s.bin = bin;
        s.above = above;
        s.inside = inside;
    }
    __syncthreads();
}

__device__ inline bool select_better(const select_candidate &a, const select_candidate &b)
{
    if (a.key != b.key)
        return a.key > b.key;
    if (a.second != b.second)
        return a.second > b.second;
    return a.raw != b.raw ? a.raw > b.raw : a.index < b.index;
}

static __device__ __noinline__ void select_list_ties(select_state &s, select_part p, select_digit d,
                                                     select_candidate *to)
{
    select_for_ties(s, p, d.number, d.shift, [&](unsigned key, uint32_t i) {
        const unsigned at = atomicAdd(&s.n_mine, 1u);
        to[at].key = key;
        to[at].index = i;
    });
}

/* Collects the crew's `all` tokens that agree up to digit d in every block's box.ranked. */
template <bool crews>
__device__ void select_gather(const select_crew &crew, select_state &s, const select_part &p,
                              const select_digit &d, unsigned all)
{
    const bool several = crews && crew.size > 1;
    select_candidate *to = several ? select_exchange_of(s).mine : s.box.ranked;
    if (d.number == 0)
        select_for_matching(s, p, d.shift, [&](unsigned key, uint32_t i) {
            const unsigned at = atomicAdd(&s.n_mine, 1u);
            to[at].key = key;
            to[at].index = i;
        });
    else
        select_list_ties(s, p, d, to);
    __syncthreads();
    if (threadIdx.x < s.n_mine) {
        select_candidate &mine = to[threadIdx.x];
        mine.raw = select_raw_bits(s.task.scores[mine.index]);
        mine.second = select_has_second(s.task) ? select_second(s.task, mine.index) : 0;
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (several)
        crew_share_candidates(crew, s.box, to, s.n_mine, all, &s.place);
#endif
}

/* The `wanted`-th best of the gathered tokens is the cut; the keys of those behind it are cleared.
 * Several threads a candidate, each comparing it with its share of the others. */
template <int threads>
__device__ void select_rank(select_state &s, const select_part &p, unsigned count, unsigned wanted)
{
    int log_per = 0; /* a shift, since a division by what is not a constant is much code */
    while (log_per < 5 && count << (log_per + 1) <= threads)
        log_per++;
    const unsigned per = 1u << log_per;
    const unsigned which = threadIdx.x >> log_per;
    const unsigned part = threadIdx.x & (per - 1);
    unsigned ahead = 0;
    if (which < count) {
        const select_candidate mine = s.box.ranked[which];
        for (unsigned i = part; i < count; i += per)
            ahead += select_better(s.box.ranked[i], mine);
    }
    for (unsigned step = per / 2; step; step /= 2)
        ahead += __shfl_xor_sync(~0u, ahead, step);
    if (which < count && part == 0) {
        const select_candidate &mine = s.box.ranked[which];
        if (ahead + 1 == wanted)
            s.cut = mine;
        else if (ahead >= wanted && mine.index >= p.begin && mine.index < p.end)
            p.keys[mine.index - p.begin] = 0;
    }
    __syncthreads();
}

/* Clears the keys of tokens that tie with the cut's key and are behind it. */
static __device__ __noinline__ void select_settle_ties(select_state &s, select_part p)
{
    select_for_matching(s, p, 0, [&](unsigned key, uint32_t i) {
        const select_candidate mine = {select_has_second(s.task) ? select_second(s.task, i) : 0ull,
                                       key,
                                       select_raw_bits(s.task.scores[i]),
                                       i,
                                       {0, 0, 0}};
        if (select_better(s.cut, mine))
            p.keys[i - p.begin] = 0;
    });
    __syncthreads();
}

/* The cut's bits of this round's digit are the bin; by one thread. Returns in every thread whether
 * they are: the first round may have to be done anew. */
__device__ inline bool select_decide(select_state &s, int round, const select_digit &d)
{
    const unsigned bin = s.bin;
    if (round == select_round_window && (bin == 0 || bin == select_bins - 1))
        return false;
    if (threadIdx.x == 0) {
        if (round == select_round_window)
            s.cut.key = (bin + select_window_base) << d.shift;
        else if (d.number == 0)
            s.cut.key |= bin << d.shift;
        else
            select_decide_tie(s.cut, d, bin);
    }
    __syncthreads();
    return true;
}

/* Finds the k-th best token of the unit: the tokens to keep are those whose keys are not below
 * s.cut.key, once this returns. The first digit is counted already. */
template <int threads, bool crews>
__device__ void select_find_cut(const select_crew &crew, select_state &s, const select_part &p)
{
    /* Another round costs a crew of several more than a crew of one. */
    const unsigned few = crew.size > 1 ? select_ranked : max(32, threads / 8);
    unsigned wanted = s.task.keep;
    uint32_t parity = 0;
    int round = select_round_window;
#pragma unroll 1 /* the code should fit the instruction cache */
    for (;;) {
        const select_digit d = select_digit_of(round);
        if (round > select_round_window)
            select_count(s, p, d);
        select_find_bin<threads, crews>(crew, s, wanted, parity);
        parity ^= 1;
        if (!select_decide(s, round, d)) {
            round = select_round_whole;
            continue;
        }
        wanted -= s.above;
        const unsigned inside = s.inside;
        if (inside == wanted) /* the whole bin is kept: its lower end is the cut */
            break;
        if (inside <= few) {
            select_gather<crews>(crew, s, p, d, inside);
            select_rank<threads>(s, p, inside, wanted);
            break;
        }
        round = round == select_round_whole - 1 ? int(select_round_ties) : round + 1;
        if (round == select_round_ties && !select_has_second(s.task))
            round += 6; /* on to raw scores */
    }
    if (round >= select_round_ties)
        select_settle_ties(s, p);
}

#endif
