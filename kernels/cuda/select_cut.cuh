/* The cut: the k-th best token of a unit, found by radix selection.
 *
 * The numbers that order tokens (select_keys.cuh) are looked at 11 bits a round, the highest first:
 * a histogram of those bits, over the tokens that share all bits decided so far, says which bin
 * the k-th best is in. That goes on until the bin is kept as a whole, or until the tokens in it are
 * so few that every block of the crew gets a list of them (select_list.cuh) and needs the others no
 * more. Padding is in no histogram.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_CUT_CUH
#define DKV_KERNELS_CUDA_SELECT_CUT_CUH

#include "kernels/cuda/select_keys.cuh"

constexpr unsigned select_no_index = 0x3fffffu; /* behind all tokens */

/* A token in full; `index` is select_order(). */
struct alignas(16) select_candidate {
    unsigned long long second;
    unsigned key;
    unsigned raw;
    unsigned index;
    unsigned unused[3];
};

/* The bin that the cut is in. */
struct alignas(16) select_found {
    unsigned bin;
    unsigned above;  /* tokens in higher bins */
    unsigned inside; /* and in it */
    unsigned first;  /* how many of those are of lower ranks */
};

/* In shared memory, followed by a select_exchange if the launch has clusters. `tokens` is what is
 * selected from: a select_task, or a select_any_task (select_any.cuh). */
template <class tokens> struct alignas(16) select_state {
    select_mailbox box;
    unsigned histogram[select_bins];           /* of this block */
    select_listing ranked[select_ranked];      /* candidates */
    unsigned long long seconds[select_ranked]; /* of them, where there are such */
    unsigned n_mine;                           /* of this block in the list */
    unsigned n_ranked;                         /* candidates so far */
    unsigned ahead;                            /* tokens that blocks of lower ranks keep */
    unsigned warp_counts[select_threads / 32];
    unsigned beside[2]; /* keys of the last candidate that is kept, and of the next */
    select_found found;
    select_candidate cut; /* what of it is decided so far; at first 0, 0, 0, select_no_index */
    tokens task;          /* for functions out of line */
};

/* The scores outside the scope of pooling, of plain tasks: select_outside before it and as many
 * behind it. They have the place of `seconds`, which comes later. */
template <class tokens> __device__ inline float *select_outside_of(select_state<tokens> &s)
{
    static_assert(sizeof(s.seconds) >= 2 * select_outside * sizeof(float), "room for them");
    return reinterpret_cast<float *>(s.seconds);
}

template <class tokens>
__device__ inline select_exchange &select_exchange_of(select_state<tokens> &s)
{
    return *reinterpret_cast<select_exchange *>(&s + 1);
}

/* Round r looks at `width` bits from `shift` on of a number. The first one looks at the keys' bits
 * from select_first_shift() on, of which a window is told apart (select_window_bin()). Where the
 * cut is not in it, the search begins anew with all bits. */
struct select_digit {
    int number; /* 0 key, 1 second, 2 raw, 3 index */
    int shift;
    int width;
};

enum { select_round_window = 0, select_round_whole = 3, select_round_ties = 6, select_rounds = 17 };
__device__ constexpr select_digit select_tie_digits[select_rounds - select_round_ties] = {
    {1, 53, 11}, {1, 42, 11}, {1, 31, 11}, {1, 20, 11}, {1, 9, 11}, {1, 0, 9},
    {2, 21, 11}, {2, 10, 11}, {2, 0, 10},  {3, 11, 11}, {3, 0, 11}};

/* Of all rounds but the first, whose bits begin at `first`. Those of the key are made up: a table
 * would have to be fetched. */
__device__ inline select_digit select_digit_of(int round, int first)
{
    if (round >= select_round_ties)
        return select_tie_digits[round - select_round_ties];
    if (round >= select_round_whole)
        return {0, round == 3 ? 21 : round == 4 ? 10 : 0, round == 5 ? 10 : 11};
    return {0, round == 1 ? first - 11 : 0, round == 2 ? first - 11 : 11};
}

/* Adds the first digits of four keys. One at a time: the hardware counts lanes that add one to the
 * same bin, and bins of neighbours often agree, since pooling makes plateaus. */
template <class tokens>
__device__ inline void select_count_four(const tokens &t, unsigned *histogram, const uint4 &four)
{
    const unsigned key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int q = 0; q < 4; q++)
        if (key[q] != 0)
            atomicAdd(histogram + select_window_bin(t, key[q]), 1u);
}

/* A number of a token, complemented where low ones come first. */
template <class tokens>
__device__ inline unsigned long long select_number(const tokens &t, int number, unsigned key,
                                                   uint32_t i)
{
    switch (number) {
    case 0: return key;
    case 1: return select_second(t, i);
    case 2: return select_raw_of(t, i);
    default: return ~select_order(t, i) & select_no_index;
    }
}

/* True if all numbers before `number` are the decided ones, and of that one the bits from `shift`
 * on. */
template <class tokens>
static __device__ __noinline__ bool select_agrees(const select_state<tokens> &s, int number,
                                                  int shift, unsigned key, uint32_t i)
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
template <int threads, class tokens, typename Use>
__device__ __forceinline__ void select_for_matching(const select_state<tokens> &s,
                                                    const select_part &p, int below, Use use)
{
    const unsigned want = s.cut.key;
    const unsigned mask = below < 32 ? ~0u << below : 0;
#pragma unroll 1
    for (uint32_t i = p.begin + 4 * threadIdx.x; i < p.end; i += 4 * threads) {
        const unsigned *keys = p.keys + (i - p.begin);
        const uint4 four = *reinterpret_cast<const uint4 *>(keys);
        unsigned matching = (((four.x ^ want) & mask) == 0 && four.x != 0 ? 1 : 0) |
                            (((four.y ^ want) & mask) == 0 && four.y != 0 ? 2 : 0) |
                            (((four.z ^ want) & mask) == 0 && four.z != 0 ? 4 : 0) |
                            (((four.w ^ want) & mask) == 0 && four.w != 0 ? 8 : 0);
#pragma unroll 1
        while (matching) { /* few, as a rule: the code should be short */
            const unsigned q = __ffs(matching) - 1;
            matching &= matching - 1;
            use(keys[q], i + q);
        }
    }
}

/* The same for tokens with the cut's key that agree in the numbers behind it. Out of line, as all
 * that is needed where keys tie. */
template <int threads, class tokens, typename Use>
__device__ __forceinline__ void select_for_ties(const select_state<tokens> &s, const select_part &p,
                                                int number, int shift, Use use)
{
    select_for_matching<threads>(s, p, 0, [&](unsigned key, uint32_t i) {
        if (select_agrees(s, number, shift, key, i))
            use(key, i);
    });
}

template <int threads, class tokens>
static __device__ __noinline__ void select_count_ties(select_state<tokens> &s, select_part p,
                                                      select_digit d)
{
    const int above = d.shift + d.width;
    const bool whole = above >= (d.number == 1 ? 64 : d.number == 2 ? 31 : 22);
    const unsigned mask = (1u << d.width) - 1;
    select_for_ties<threads>(s, p, d.number, whole ? 64 : above, [&](unsigned key, uint32_t i) {
        const unsigned long long number = select_number(s.task, d.number, key, i);
        atomicAdd(s.histogram + (static_cast<unsigned>(number >> d.shift) & mask), 1u);
    });
}

/* Histogram of digit d, not the first, over the part's tokens that share all digits before. */
template <int threads, class tokens>
__device__ inline void select_count(select_state<tokens> &s, const select_part &p,
                                    const select_digit &d)
{
    if (d.number > 0) {
        select_count_ties<threads>(s, p, d);
        return;
    }
    const unsigned mask = (1u << d.width) - 1;
    select_for_matching<threads>(s, p, d.shift + d.width, [&](unsigned key, uint32_t) {
        atomicAdd(s.histogram + (key >> d.shift & mask), 1u);
    });
}

/* The cut's bits of digit d are the bin. */
__device__ inline void select_decide(select_candidate &cut, const select_digit &d, unsigned bin)
{
    const unsigned long long bits = static_cast<unsigned long long>(bin) << d.shift;
    switch (d.number) {
    case 0: cut.key |= static_cast<unsigned>(bits); break;
    case 1: cut.second |= bits; break;
    case 2: cut.raw |= static_cast<unsigned>(bits); break;
    default: cut.index &= ~static_cast<unsigned>(bits);
    }
}

/* Finds the bin that holds the `wanted`-th best of the tokens counted, of which each thread has the
 * `per` bins below those of the thread before it. `before`: of each bin, what lower ranks have. */
template <int threads, int per, class tokens>
__device__ __forceinline__ select_found select_scan(select_state<tokens> &s,
                                                    const uint4 (&bins)[per / 4],
                                                    const unsigned *before, unsigned wanted)
{
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int first = select_bins - per * (static_cast<int>(threadIdx.x) + 1);
    unsigned sum = 0;
#pragma unroll
    for (int b = 0; b < per / 4; b++)
        sum += bins[b].x + bins[b].y + bins[b].z + bins[b].w;
    unsigned upto = sum; /* of this warp's bins up to this lane's */
#pragma unroll
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
            const bool further = above + inside < wanted;
            above += further ? inside : 0;
            inside = further ? n : inside;
            bin = further ? first + b : bin;
        }
        s.found = {bin, above, inside, before ? before[bin] : 0};
    }
    __syncthreads();
    return s.found;
}

/* The same of the block's histogram, which is cleared. Out of line, since it comes again: code is
 * slow where it runs for the first time. */
template <int threads, class tokens>
static __device__ __noinline__ select_found select_find_own_bin(select_state<tokens> &s,
                                                                unsigned wanted)
{
    constexpr int per = select_bins / threads;
    uint4 *own = reinterpret_cast<uint4 *>(s.histogram + select_bins - per * (threadIdx.x + 1));
    uint4 bins[per / 4];
    __syncthreads();
#pragma unroll
    for (int b = 0; b < per / 4; b++) {
        bins[b] = own[b];
        own[b] = {0, 0, 0, 0};
    }
    return select_scan<threads, per>(s, bins, nullptr, wanted);
}

/* The same of the crew's, if it has several blocks. */
template <int threads, bool crews, class tokens>
__device__ __forceinline__ select_found select_find_bin(const select_crew &crew,
                                                        select_state<tokens> &s, unsigned wanted,
                                                        select_parity &parity)
{
#if __CUDA_ARCH__ >= 900
    if (crews && crew.size > 1) {
        const unsigned first = select_bins - 4 * (threadIdx.x + 1);
        select_exchange &exchange = select_exchange_of(s);
        __syncthreads();
        const uint4 mine = *reinterpret_cast<const uint4 *>(s.histogram + first);
        crew_add_histograms(crew, s.box, exchange, mine, first / 4,
                            reinterpret_cast<uint4 *>(s.histogram), parity.totals);
        parity.totals ^= 1;
        const uint4 bins[1] = {*reinterpret_cast<const uint4 *>(exchange.totals + first)};
        return select_scan<select_threads, 4>(s, bins, exchange.before, wanted);
    }
#endif
    return select_find_own_bin<threads>(s, wanted);
}

/* Adds to s.ahead what lower ranks have in bins from `lowest` on. */
template <class tokens>
__device__ inline void select_add_ahead(select_state<tokens> &s, unsigned lowest)
{
    const unsigned first = 4 * threadIdx.x;
    const uint4 before = *reinterpret_cast<const uint4 *>(select_exchange_of(s).before + first);
    unsigned sum = first >= lowest ? before.x : 0;
    sum += first + 1 >= lowest ? before.y : 0;
    sum += first + 2 >= lowest ? before.z : 0;
    sum += first + 3 >= lowest ? before.w : 0;
    sum = __reduce_add_sync(~0u, sum);
    if (threadIdx.x % 32 == 0 && sum > 0)
        atomicAdd(&s.ahead, sum);
}

__device__ inline bool select_better(const select_candidate &a, const select_candidate &b)
{
    if (a.key != b.key)
        return a.key > b.key;
    if (a.second != b.second)
        return a.second > b.second;
    return a.raw != b.raw ? a.raw > b.raw : a.index < b.index;
}

/* A token of the part, which has this key, in full. */
template <class tokens>
__device__ inline select_candidate select_candidate_of(const tokens &t, unsigned key, uint32_t i)
{
    return {select_has_second(t) ? select_second(t, i) : 0ull,
            key,
            select_raw_of(t, i),
            select_order(t, i),
            {0, 0, 0}};
}

/* Clears the keys of tokens that tie with the cut's key and are behind it. */
template <int threads, class tokens>
static __device__ __noinline__ void select_settle_ties(select_state<tokens> &s, select_part p)
{
    select_for_matching<threads>(s, p, 0, [&](unsigned key, uint32_t i) {
        if (select_better(s.cut, select_candidate_of(s.task, key, i)))
            p.keys[i - p.begin] = 0;
    });
    __syncthreads();
}

#endif
