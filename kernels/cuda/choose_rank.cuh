/* Ranking in a choice: the k best of one head's units, or of all heads' together.
 *
 * A unit (a token, or a chunk) has a place in one total order: class, pooled score, raw score,
 * lower index, lower head. The first is found by counting; the others are 32-bit keys, larger ones
 * first, each narrowed eleven bits at a time among the units that equal the cut so far. So there
 * are no ties, and what is kept is what is not behind the cut.
 *
 * Solo: one thread block ranks a head on its own. Joint: all blocks of the crew rank all heads, and
 * add up their histograms in global memory between barriers. Included by choose.cu. */
#ifndef DKV_KERNELS_CUDA_CHOOSE_RANK_CUH
#define DKV_KERNELS_CUDA_CHOOSE_RANK_CUH

#include "kernels/cuda/device.cuh"

namespace
{

constexpr int threads = 1024;
constexpr int digit_bits = 11;
constexpr int n_bins = 1 << digit_bits;
constexpr int bins_per_thread = n_bins / threads;
constexpr unsigned most_rivals = 256;
constexpr unsigned unknown = ~0u;

/* A chunk that sinks or recent tokens are in is kept before everything else (kernels/choose.c). */
enum token_class { class_lowest, class_candidate, class_protected, class_place, n_classes };

enum tier { tier_pooled, tier_raw, tier_place, n_tiers };

/* The thread blocks of a choice, a cluster. */
struct crew {
    uint32_t size;
    uint32_t rank;
};

struct cut_point {
    unsigned cls;
    unsigned key[n_tiers];
};

/* Shared memory of a thread block. */
struct shared_state {
    unsigned bins[n_bins];
    unsigned warp_sums[threads / 32];
    unsigned bin;    /* found */
    unsigned ties;   /* how many of it are kept */
    unsigned in_bin; /* how many it has */
    cut_point cut;
    unsigned rivals[n_tiers][most_rivals]; /* what is left, few enough to be compared directly */
    unsigned n_rivals;
    unsigned n_histograms; /* joint ones so far: which of the global ones is next */
    unsigned offset;
};

/* Every thread of the crew; what was written to global memory before is seen after. */
__device__ inline void crew_barrier(const crew &c)
{
#if __CUDA_ARCH__ >= 900
    if (c.size > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\n"
                     "barrier.cluster.wait.acquire.aligned;" ::
                         : "memory");
        return;
    }
#endif
    __syncthreads();
}

/* ---- units ---- */

/* What is ranked: `n` units of each of `heads` heads from `first_head` on. `above` of each head are
 * known to be of classes above the candidates', and none below; `unknown`: count them. */
struct ranked {
    const float *pooled;
    const float *raw;
    const uint8_t *cls;
    uint32_t stride;
    uint32_t n;
    uint32_t first_head;
    uint32_t heads;
    uint32_t above;
    bool joint;
};

/* Floats as integers that order alike; -0 is 0. */
__device__ inline unsigned key_of(float x)
{
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The unit's key in a tier behind the first. */
__device__ inline unsigned late_key(const ranked &units, int tier, uint32_t head, uint32_t i)
{
    if (tier == tier_raw)
        return key_of(units.raw[static_cast<size_t>(head) * units.stride + i]);
    return ~(i * units.heads + (head - units.first_head)); /* below 2^31: lower ones are larger */
}

/* Whether a unit is kept by a cut. */
__device__ inline bool is_kept(const ranked &units, const cut_point &cut, uint32_t head, uint32_t i,
                               unsigned cls, float pooled)
{
    if (cls != cut.cls)
        return cls > cut.cls;
    const unsigned first = key_of(pooled);
    if (first != cut.key[tier_pooled])
        return first > cut.key[tier_pooled];
    for (int tier = tier_raw; tier < n_tiers; tier++) {
        const unsigned key = late_key(units, tier, head, i);
        if (key != cut.key[tier])
            return key > cut.key[tier];
    }
    return true;
}

/* Calls visit(head, i, class, pooled score) for the thread's share of the units, four adjacent ones
 * at a time: arrays are aligned, and rows whole fours long. */
template <class function>
__device__ void for_each_unit(const ranked &units, const crew &c, function visit)
{
    const uint32_t begin = 4 * (units.joint ? c.rank * threads + threadIdx.x : threadIdx.x);
    const uint32_t step = 4 * (units.joint ? c.size * threads : threads);
    for (uint32_t head = units.first_head; head < units.first_head + units.heads; head++) {
        const size_t row = static_cast<size_t>(head) * units.stride;
        for (uint32_t i = begin; i < units.n; i += step) {
            const uchar4 cls = *reinterpret_cast<const uchar4 *>(units.cls + row + i);
            const float4 pooled = *reinterpret_cast<const float4 *>(units.pooled + row + i);
            visit(head, i, cls.x, pooled.x);
            if (i + 1 < units.n)
                visit(head, i + 1, cls.y, pooled.y);
            if (i + 2 < units.n)
                visit(head, i + 2, cls.z, pooled.z);
            if (i + 3 < units.n)
                visit(head, i + 3, cls.w, pooled.w);
        }
    }
}

/* ---- histograms ---- */

__device__ inline void clear_bins(shared_state &s)
{
    __syncthreads();
    for (int i = threadIdx.x; i < n_bins; i += threads)
        s.bins[i] = 0;
    __syncthreads();
}

/* The crew's histogram in every block's bins. The global ones are three in turn: the one that the
 * next round adds to is cleared now, when nobody reads it any more. */
__device__ void join_bins(const crew &c, shared_state &s, unsigned *global)
{
    __syncthreads();
    unsigned *const mine = global + s.n_histograms % 3 * n_bins;
    unsigned *const next = global + (s.n_histograms + 1) % 3 * n_bins;
    for (int i = threadIdx.x; i < n_bins; i += threads)
        if (s.bins[i] > 0)
            atomicAdd(mine + i, s.bins[i]);
    for (int i = c.rank * threads + threadIdx.x; i < n_bins; i += c.size * threads)
        next[i] = 0;
    crew_barrier(c);
    for (int i = threadIdx.x; i < n_bins; i += threads)
        s.bins[i] = mine[i];
    if (threadIdx.x == 0)
        s.n_histograms++;
    __syncthreads();
}

__device__ inline unsigned warp_sum(unsigned x)
{
    return __reduce_add_sync(~0u, x);
}

/* From the last bin down, the one in which the s.ties-th unit is: s.bin, s.in_bin, and in s.ties
 * how many of it are still to be kept. */
__device__ void find_bin(shared_state &s)
{
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    unsigned mine[bins_per_thread]; /* the thread's bins, in descending order */
    unsigned sum = 0;
    for (int i = 0; i < bins_per_thread; i++) {
        mine[i] = s.bins[n_bins - 1 - (threadIdx.x * bins_per_thread + i)];
        sum += mine[i];
    }
    unsigned upto = sum;
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned lower = __shfl_up_sync(~0u, upto, step);
        upto += lane >= step ? lower : 0;
    }
    if (lane == 31)
        s.warp_sums[warp] = upto;
    const unsigned wanted = s.ties;
    __syncthreads();
    unsigned before = upto - sum;
    for (int w = 0; w < warp; w++)
        before += s.warp_sums[w];
    for (int i = 0; i < bins_per_thread; i++) {
        if (before < wanted && before + mine[i] >= wanted) {
            s.bin = n_bins - 1 - (threadIdx.x * bins_per_thread + i);
            s.in_bin = mine[i];
            s.ties = wanted - before;
        }
        before += mine[i];
    }
    __syncthreads();
}

/* ---- the cut ---- */

/* Which class the cut falls into, by counting. */
__device__ void count_classes(const ranked &units, uint32_t k, const crew &c, shared_state &s,
                              unsigned *global)
{
    clear_bins(s);
    unsigned counts[n_classes] = {};
    for_each_unit(units, c, [&](uint32_t, uint32_t, unsigned cls, float) {
        for (unsigned q = 0; q < n_classes; q++)
            counts[q] += cls == q;
    });
    for (unsigned q = 0; q < n_classes; q++) {
        const unsigned sum = warp_sum(counts[q]);
        if (threadIdx.x % 32 == 0 && sum > 0)
            atomicAdd(&s.bins[q], sum);
    }
    if (units.joint)
        join_bins(c, s, global);
    __syncthreads();
    if (threadIdx.x == 0)
        s.ties = k;
    __syncthreads();
    find_bin(s);
    if (threadIdx.x == 0) {
        s.cut = {};
        s.cut.cls = s.bin;
    }
}

/* Which class the cut falls into. True if all of it are kept. */
__device__ bool find_class(const ranked &units, uint32_t k, const crew &c, shared_state &s,
                           unsigned *global)
{
    const bool known = units.above != unknown && k > units.above * units.heads;
    __syncthreads();
    if (!known) {
        count_classes(units, k, c, s, global);
    } else if (threadIdx.x == 0) {
        s.cut = {};
        s.cut.cls = class_candidate;
        s.ties = k - units.above * units.heads;
        s.in_bin = (units.n - units.above) * units.heads;
    }
    __syncthreads();
    return s.ties == s.in_bin;
}

/* Narrows a tier by the bits low .. high-1, among the units that equal the cut in class, in all
 * tiers before, and in the bits of this one from `high` up. True if all units that are left are
 * kept. */
__device__ bool narrow(const ranked &units, int tier, int high, int low, const crew &c,
                       shared_state &s, unsigned *global)
{
    const unsigned mask = (1u << (high - low)) - 1;
    const cut_point cut = s.cut;
    clear_bins(s);
    for_each_unit(units, c, [&](uint32_t head, uint32_t i, unsigned cls, float pooled) {
        unsigned key = key_of(pooled);
        if (cls != cut.cls || (tier > tier_pooled && key != cut.key[tier_pooled]))
            return;
        if (tier == tier_place && late_key(units, tier_raw, head, i) != cut.key[tier_raw])
            return;
        if (tier > tier_pooled)
            key = late_key(units, tier, head, i);
        if (high == 32 || key >> high == cut.key[tier] >> high)
            atomicAdd(&s.bins[key >> low & mask], 1);
    });
    if (units.joint)
        join_bins(c, s, global);
    __syncthreads();
    find_bin(s);
    if (threadIdx.x == 0)
        s.cut.key[tier] |= s.bin << low;
    __syncthreads();
    return s.ties == s.in_bin;
}

/* The end of a solo search: the few units that equal the cut in class and in the pooled key's bits
 * from `low` up are compared with each other. The cut is the s.ties-th best of them. */
__device__ void compare_rivals(const ranked &units, int low, const crew &c, shared_state &s)
{
    const cut_point cut = s.cut;
    __syncthreads();
    if (threadIdx.x == 0)
        s.n_rivals = 0;
    __syncthreads();
    for_each_unit(units, c, [&](uint32_t head, uint32_t i, unsigned cls, float pooled) {
        const unsigned key = key_of(pooled);
        if (cls != cut.cls || key >> low != cut.key[tier_pooled] >> low)
            return;
        const unsigned at = atomicAdd(&s.n_rivals, 1);
        if (at >= most_rivals) /* there are s.in_bin of them */
            return;
        s.rivals[tier_pooled][at] = key;
        s.rivals[tier_raw][at] = late_key(units, tier_raw, head, i);
        s.rivals[tier_place][at] = late_key(units, tier_place, head, i);
    });
    __syncthreads();
    const unsigned n = min(s.n_rivals, most_rivals);
    if (threadIdx.x < n) {
        unsigned mine[n_tiers];
        unsigned better = 0;
        for (int tier = 0; tier < n_tiers; tier++)
            mine[tier] = s.rivals[tier][threadIdx.x];
        for (unsigned other = 0; other < n; other++) {
            int tier = 0;
            while (tier < tier_place && s.rivals[tier][other] == mine[tier])
                tier++;
            better += s.rivals[tier][other] > mine[tier];
        }
        if (better + 1 == s.ties)
            for (int tier = 0; tier < n_tiers; tier++)
                s.cut.key[tier] = mine[tier];
    }
    __syncthreads();
}

/* s.cut for the k best, 1 <= k <= units; every thread of the block, or of the crew if joint. Bits
 * and tiers below the last one looked at are 0 there: nothing that is left is behind them. */
__device__ void find_cut(const ranked &units, uint32_t k, const crew &c, shared_state &s,
                         unsigned *global)
{
    if (find_class(units, k, c, s, global))
        return;
    for (int tier = 0; tier < n_tiers; tier++)
        for (int high = 32; high > 0; high = high > digit_bits ? high - digit_bits : 0) {
            const int low = high > digit_bits ? high - digit_bits : 0;
            if (narrow(units, tier, high, low, c, s, global))
                return;
            if (tier == tier_pooled && !units.joint && s.in_bin <= most_rivals) {
                compare_rivals(units, low, c, s);
                return;
            }
        }
}

} // namespace

#endif
