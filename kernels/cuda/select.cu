/* Selection on the device: pooling, classes, the k best of every unit, ascending indices.
 *
 * scores float32 [n] of a unit -> keep_out int32 [k]; same order, bit for bit, as kernels/select.c.
 *
 * A token becomes one 64-bit key whose order is the order of tokens (select_keys.cuh). The k-th
 * best key is found by radix selection, 11 bits a round, until the tokens that share the decided
 * bits are few; those are then ranked against each other in full, by key, raw score and index. What
 * was found is the cut: every token that is not behind it is kept, so writing the indices in order
 * needs no flags, only a count and a second look.
 *
 * Long units are spread over a cluster of thread blocks that add their histograms through
 * distributed shared memory; of short ones each block of the cluster takes its own. How a unit is
 * spread cannot show in the answer, which is exact. Devices without clusters use one block a unit.
 *
 * 512 threads, or 128 for a crowd of short units; each has four adjacent tokens at a time: what
 * bounds this kernel is instructions and barriers, not bytes.
 */
#include <cooperative_groups.h>

#include "kernels/cuda/select_keys.cuh"

namespace cg = cooperative_groups;

namespace
{

constexpr int max_threads = 512;
constexpr int min_threads = 128;
constexpr int max_warps = max_threads / 32;
constexpr int n_bins = 2048;
constexpr int max_ranked = 128; /* tokens ranked against each other */
constexpr int max_cluster = 16;

constexpr uint32_t block_tokens = 8192;     /* of a unit that one block takes at most, if it can */
constexpr uint32_t spread_tokens = 2048;    /* that are worth a block, while there are idle ones */
constexpr uint32_t worthwhile_tokens = 256; /* with fewer in each block a unit is not spread */
constexpr uint32_t crowd_tokens = 2048;     /* up to which few threads do, if units are many */
constexpr uint32_t min_pool_tokens = 1024;

struct team {
    uint32_t first_unit;
    uint32_t n_units; /* 1: the whole cluster works on it; else one block each */
};

struct candidate {
    unsigned long long key;
    unsigned raw;
    uint32_t index;
};

struct alignas(16) shared_state {
    unsigned histogram[n_bins]; /* of this block */
    candidate mine[max_ranked];
    candidate ranked[max_ranked]; /* of the whole crew */
    unsigned ahead[max_ranked];   /* how many of them are better */
    unsigned n_mine;
    unsigned n_kept; /* of this block, read by the others */
    unsigned warp_counts[max_warps];
    unsigned bin;
    unsigned above; /* tokens in higher bins */
    unsigned inside;
    candidate cut;
    select_task task;
};

/* The blocks that work on one unit. */
struct crew {
    uint32_t size;
    uint32_t rank;
    unsigned *total; /* [n_bins] if size > 1: the crew's sum, in the slice this block adds up */
};

__device__ void crew_sync(const crew &c)
{
#if __CUDA_ARCH__ >= 900
    if (c.size > 1) {
        cg::this_cluster().sync();
        return;
    }
#endif
    __syncthreads();
}

/* The same variable in the block of another rank. */
template <typename T> __device__ T *of_rank(const crew &c, T *mine, uint32_t rank)
{
#if __CUDA_ARCH__ >= 900
    if (c.size > 1)
        return cg::this_cluster().map_shared_rank(mine, rank);
#endif
    return mine;
}

/* One block's share of a unit: tokens begin..end-1 and their keys. */
struct part {
    unsigned long long *keys; /* padded to whole fours */
    uint32_t begin;
    uint32_t end;
};

__device__ void load_four(const part &p, uint32_t i, unsigned long long (&key)[4])
{
    const ulonglong2 *from = reinterpret_cast<const ulonglong2 *>(p.keys + (i - p.begin));
    const ulonglong2 low = from[0];
    const ulonglong2 high = from[1];
    key[0] = low.x, key[1] = low.y, key[2] = high.x, key[3] = high.y;
}

/* ---- keys ---- */

/* Adds four digits; neighbours often share one, since pooling makes plateaus. */
__device__ void count_four(unsigned *histogram, const unsigned (&digit)[4])
{
    unsigned run = 1;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        if (q < 3 && digit[q + 1] == digit[q]) {
            run++;
        } else {
            atomicAdd(histogram + digit[q], run);
            run = 1;
        }
    }
}

/* Scores of four adjacent tokens, the first a multiple of four; 0 outside the scope of pooling. */
__device__ float4 load_scores(const select_task &t, int first)
{
    const int begin = static_cast<int>(t.scope_begin);
    const int end = static_cast<int>(t.scope_end);
    if (first >= begin && first + 4 <= end)
        return *reinterpret_cast<const float4 *>(t.scores + first);
    float4 x = {0, 0, 0, 0};
    float *at[4] = {&x.x, &x.y, &x.z, &x.w};
    for (int q = 0; q < 4; q++)
        if (first + q >= begin && first + q < end)
            *at[q] = t.scores[first + q];
    return x;
}

/* Pools the part's tokens, stores their keys and counts their first digits. `stage` holds
 * pool_tokens scores and a window's margins. */
__device__ void build_keys(const select_task &t, shared_state &s, const part &p,
                           uint32_t pool_tokens, float *stage)
{
    const int half = static_cast<int>(t.kernel / 2);
    const int margin = (half + 3) & ~3; /* so that loads stay aligned to 16 bytes */
    for (uint32_t first = p.begin; first < p.end; first += pool_tokens) {
        const int count = static_cast<int>(min(p.end - first, pool_tokens));
        const int staged = ((count + 3) & ~3) + 2 * margin;
        __syncthreads();
#pragma unroll 4
        for (int i = 4 * threadIdx.x; i < staged; i += 4 * blockDim.x)
            *reinterpret_cast<float4 *>(stage + i) = load_scores(t, static_cast<int>(first) -
                                                                        margin + i);
        __syncthreads();
        for (int i = 4 * threadIdx.x; i < count; i += 4 * blockDim.x) {
            unsigned long long key[4];
            select_keys(t, first + i, stage + (margin - half) + i, key);
            ulonglong2 *to = reinterpret_cast<ulonglong2 *>(p.keys + (first - p.begin) + i);
            to[0] = {key[0], key[1]};
            to[1] = {key[2], key[3]};
            const unsigned digit[4] = {
                static_cast<unsigned>(key[0] >> 53), static_cast<unsigned>(key[1] >> 53),
                static_cast<unsigned>(key[2] >> 53), static_cast<unsigned>(key[3] >> 53)};
            count_four(s.histogram, digit);
        }
    }
    __syncthreads();
}

/* ---- radix selection ---- */

/* Round r looks at `width` bits from `shift` on of a word: the key, then the raw score (where the
 * key does not hold it), then the index, complemented because low ones come first. */
struct digit {
    int word;
    int shift;
    int width;
};

constexpr int n_rounds = 11;
__device__ constexpr digit rounds[n_rounds] = {{0, 53, 11}, {0, 42, 11}, {0, 31, 11}, {0, 20, 11},
                                               {0, 9, 11},  {0, 0, 9},   {1, 21, 11}, {1, 10, 11},
                                               {1, 0, 10},  {2, 11, 11}, {2, 0, 11}};

struct words {
    unsigned long long key;
    unsigned raw;
    unsigned index; /* complemented */
};

/* True if the token's digits before d, a digit of the raw score or the index, are the decided ones.
 * Later words are only looked up where the earlier ones agree. */
__device__ bool matches(const select_task &t, const words &decided, const digit &d,
                        unsigned long long key, uint32_t i)
{
    const int above = d.shift + d.width;
    if (key != decided.key)
        return false;
    const unsigned raw = select_raw_bits(t.scores[i]);
    if (d.word == 1)
        return above >= 32 || (raw ^ decided.raw) >> above == 0;
    return raw == decided.raw && (above >= 32 || ((~i & 0x3fffffu) ^ decided.index) >> above == 0);
}

__device__ unsigned digit_of(const select_task &t, const digit &d, unsigned long long key,
                             uint32_t i)
{
    const unsigned long long word = d.word == 0   ? key
                                    : d.word == 1 ? select_raw_bits(t.scores[i])
                                                  : ~i & 0x3fffffu;
    return static_cast<unsigned>(word >> d.shift) & ((1u << d.width) - 1);
}

/* Calls use(key, token) for the part's tokens that share all digits before d. In rounds of the key
 * a padding token may be among them: it is behind all real ones, so that counts stay right. */
template <typename Use>
__device__ __forceinline__ void for_matching(const select_task &t, const part &p,
                                             const words &decided, const digit &d, Use use)
{
    const int above = d.shift + d.width;
    const bool all = d.word == 0 && above >= 64;
    const unsigned long long want = all ? 0 : decided.key >> above;
    for (uint32_t i = p.begin + 4 * threadIdx.x; i < p.end; i += 4 * blockDim.x) {
        unsigned long long key[4];
        load_four(p, i, key);
#pragma unroll
        for (int q = 0; q < 4; q++)
            if (d.word == 0 ? all || key[q] >> above == want
                            : i + q < p.end && matches(t, decided, d, key[q], i + q))
                use(key[q], i + q);
    }
}

/* Histogram of digit d over the part's tokens that share all digits before. */
__device__ void count_round(const select_task &t, shared_state &s, const part &p,
                            const words &decided, const digit &d)
{
    for (int i = threadIdx.x; i < n_bins; i += blockDim.x)
        s.histogram[i] = 0;
    __syncthreads();
    for_matching(t, p, decided, d, [&](unsigned long long key, uint32_t i) {
        atomicAdd(s.histogram + digit_of(t, d, key, i), 1u);
    });
}

/* Adds up the crew's histograms, each block its slice of bins. */
__device__ void add_histograms(const crew &c, shared_state &s)
{
    crew_sync(c);
    if (c.size == 1)
        return;
    const int slice = n_bins / static_cast<int>(c.size);
    const int first = slice * static_cast<int>(c.rank);
    const int threads = static_cast<int>(blockDim.x);
    const int per_bin = slice < threads ? threads / slice : 1; /* threads; 4 at most */
    for (int i = threadIdx.x / per_bin; i < slice; i += threads / per_bin) {
        unsigned sum = 0;
#pragma unroll 4
        for (uint32_t rank = threadIdx.x % per_bin; rank < c.size; rank += per_bin)
            sum += of_rank(c, s.histogram, rank)[first + i];
        for (int step = per_bin / 2; step; step /= 2)
            sum += __shfl_xor_sync(~0u, sum, step);
        c.total[first + i] = sum;
    }
    crew_sync(c);
}

/* Finds the bin that holds the `wanted`-th best token: s.bin, s.above, s.inside. */
__device__ void find_bin(const crew &c, shared_state &s, unsigned wanted)
{
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int per = n_bins / static_cast<int>(blockDim.x); /* bins a thread, a multiple of 4 */
    const int first = n_bins - per * (static_cast<int>(threadIdx.x) + 1);
    const unsigned *from = c.size == 1 ? s.histogram
                                       : of_rank(c, c.total,
                                                 static_cast<uint32_t>(first) * c.size / n_bins);
    unsigned sum = 0;
    for (int b = first; b < first + per; b += 4) {
        const uint4 four = *reinterpret_cast<const uint4 *>(from + b);
        sum += four.x + four.y + four.z + four.w;
        if (c.size > 1) /* nobody reads this block's own histogram any more */
            *reinterpret_cast<uint4 *>(s.histogram + b) = four;
    }
    unsigned upto = sum; /* of this warp's bins up to this lane's */
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned lower = __shfl_up_sync(~0u, upto, step);
        upto += lane >= step ? lower : 0;
    }
    if (lane == 31)
        s.warp_counts[warp] = upto;
    __syncthreads();
    const unsigned above_warp = __reduce_add_sync(~0u, lane < warp ? s.warp_counts[lane] : 0);
    unsigned above = above_warp + upto - sum;
    if (above < wanted && above + sum >= wanted) { /* one thread */
        int bin = first + per - 1;
        while (above + s.histogram[bin] < wanted)
            above += s.histogram[bin--];
        s.bin = bin;
        s.above = above;
        s.inside = s.histogram[bin];
    }
    __syncthreads();
}

__device__ bool better(const candidate &a, const candidate &b)
{
    if (a.key != b.key)
        return a.key > b.key;
    return a.raw != b.raw ? a.raw > b.raw : a.index < b.index;
}

/* Collects the crew's tokens that share all digits before `next` into every block's s.ranked. */
__device__ unsigned gather_candidates(const select_task &t, const crew &c, shared_state &s,
                                      const part &p, const words &decided, const digit &next)
{
    if (threadIdx.x == 0)
        s.n_mine = 0;
    for (int i = threadIdx.x; i < max_ranked; i += blockDim.x)
        s.ahead[i] = 0;
    __syncthreads();
    for_matching(t, p, decided, next, [&](unsigned long long key, uint32_t i) {
        if (i < p.end)
            s.mine[atomicAdd(&s.n_mine, 1u)] = {key, select_raw_bits(t.scores[i]), i};
    });
    crew_sync(c);
    /* Warp w copies what the block of rank w has; all remote reads are in flight together. */
    static_assert(max_warps == max_cluster, "a warp a block, if there is more than one");
    const int lane = threadIdx.x % 32;
    const uint32_t rank = threadIdx.x / 32;
    const unsigned n = static_cast<uint32_t>(lane) < c.size ? *of_rank(c, &s.n_mine, lane) : 0;
    const unsigned count = __reduce_add_sync(~0u, n);
    const unsigned first = __reduce_add_sync(~0u, static_cast<uint32_t>(lane) < rank ? n : 0);
    const unsigned here = __shfl_sync(~0u, n, rank);
    if (rank < c.size) {
        const candidate *from = of_rank(c, s.mine, rank);
        for (unsigned i = lane; i < here; i += 32)
            s.ranked[first + i] = from[i];
    }
    __syncthreads();
    return count;
}

/* Ranks the few tokens that share all decided digits; the `wanted`-th best is the cut. Several
 * threads a candidate, each comparing it with its share of the others. */
__device__ void rank_candidates(shared_state &s, unsigned count, unsigned wanted)
{
    unsigned per = 1;
    while (per < 32 && count * per * 2 <= blockDim.x)
        per *= 2;
    const unsigned which = threadIdx.x / per;
    if (which < count) {
        const candidate mine = s.ranked[which];
        unsigned ahead = 0;
        for (unsigned i = threadIdx.x % per; i < count; i += per)
            ahead += better(s.ranked[i], mine);
        atomicAdd(&s.ahead[which], ahead);
    }
    __syncthreads();
    if (threadIdx.x < count && s.ahead[threadIdx.x] + 1 == wanted)
        s.cut = s.ranked[threadIdx.x];
    __syncthreads();
}

/* Finds the k-th best token of the unit: s.cut. The first digit is counted already. */
__device__ void find_cut(const select_task &t, const crew &c, shared_state &s, const part &p)
{
    words decided = {0, 0, 0};
    unsigned wanted = t.keep;
    for (int round = 0; round < n_rounds; round++) {
        const digit d = rounds[round];
        if (d.word == 1 && !t.average) {
            decided.raw = static_cast<unsigned>(decided.key) & 0x7fffffffu; /* it is in the key */
            continue;
        }
        if (round > 0)
            count_round(t, s, p, decided, d);
        add_histograms(c, s);
        find_bin(c, s, wanted);
        wanted -= s.above;
        const unsigned inside = s.inside;
        if (d.word == 0)
            decided.key |= static_cast<unsigned long long>(s.bin) << d.shift;
        else if (d.word == 1)
            decided.raw |= s.bin << d.shift;
        else
            decided.index |= s.bin << d.shift;
        if (inside == wanted) { /* the whole bin is kept: its lower end is the cut */
            if (threadIdx.x == 0)
                s.cut = {decided.key, decided.raw, d.word == 2 ? ~decided.index & 0x3fffffu : ~0u};
            __syncthreads();
            return;
        }
        if (inside <= max_ranked) {
            const digit next = d.shift > 0 ? digit{d.word, 0, d.shift} : digit{d.word + 1, 0, 32};
            rank_candidates(s, gather_candidates(t, c, s, p, decided, next), wanted);
            return;
        }
        __syncthreads();
    }
}

/* ---- writing ---- */

__device__ bool is_kept(const select_task &t, const candidate &cut, unsigned long long key,
                        uint32_t index)
{
    if (key != cut.key)
        return key > cut.key;
    return !better(cut, {key, select_raw_bits(t.scores[index]), index});
}

/* Which of tokens i .. i+3 are kept, one bit each. */
__device__ unsigned kept_of_four(const select_task &t, const candidate &cut, const part &p,
                                 uint32_t i)
{
    unsigned long long key[4];
    unsigned kept = 0;
    if (i >= p.end)
        return 0;
    load_four(p, i, key);
#pragma unroll
    for (int q = 0; q < 4; q++)
        kept |= static_cast<unsigned>(i + q < p.end && is_kept(t, cut, key[q], i + q)) << q;
    return kept;
}

/* Writes the kept indices in order: each warp owns a run of tokens, each lane four at a time. */
__device__ void write_kept(const select_task &t, const crew &c, shared_state &s, const part &p)
{
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t n_warps = blockDim.x / 32;
    const uint32_t run = ((p.end - p.begin + n_warps - 1) / n_warps + 127) & ~127u;
    const uint32_t from = min(p.end, p.begin + warp * run);
    const uint32_t to = min(p.end, from + run);
    const candidate cut = s.cut;

    unsigned count = 0;
    for (uint32_t i = from + 4 * lane; i < to; i += 128)
        count += __popc(kept_of_four(t, cut, p, i));
    count = __reduce_add_sync(~0u, count);
    if (lane == 0)
        s.warp_counts[warp] = count;
    __syncthreads();
    if (warp == 0) {
        count = __reduce_add_sync(~0u,
                                  static_cast<uint32_t>(lane) < n_warps ? s.warp_counts[lane] : 0);
        if (lane == 0)
            s.n_kept = count;
    }
    crew_sync(c);
    unsigned at = 0;
    if (static_cast<uint32_t>(lane) < c.rank)
        at = *of_rank(c, &s.n_kept, lane);
    if (lane < warp)
        at += s.warp_counts[lane];
    at = __reduce_add_sync(~0u, at);
    for (uint32_t first = from; first < to; first += 128) {
        const uint32_t i = first + 4 * lane;
        const unsigned kept = kept_of_four(t, cut, p, i);
        const unsigned mine = __popc(kept);
        unsigned upto = mine;
        for (int step = 1; step < 32; step <<= 1) {
            const unsigned lower = __shfl_up_sync(~0u, upto, step);
            upto += lane >= step ? lower : 0;
        }
        unsigned to_write = at + upto - mine;
        for (int q = 0; q < 4; q++)
            if ((kept >> q & 1) && to_write < t.keep) /* always below, if scores are numbers */
                t.keep_out[to_write++] = static_cast<int32_t>(t.first_index + i + q);
        at += __shfl_sync(~0u, upto, 31);
    }
}

/* Dynamic shared memory: the state, in a cluster the slices of its histogram, then pool_tokens
 * scores with a window's margins, then the keys of the block's part (unless they are in unit.keys).
 */
__global__ void __launch_bounds__(max_threads, 2)
    select_tokens(const dkv_cu_block *blocks, const dkv_cu_unit *units, const team *teams,
                  uint32_t cluster, uint32_t pool_tokens)
{
    extern __shared__ __align__(16) unsigned char memory[];
    shared_state &s = *reinterpret_cast<shared_state *>(memory);
    unsigned *total = reinterpret_cast<unsigned *>(&s + 1);
    float *stage = reinterpret_cast<float *>(total + (cluster > 1 ? n_bins : 0));
    const team team = teams[blockIdx.x / cluster];
    const uint32_t place = blockIdx.x % cluster;
    const bool together = team.n_units == 1;
    const crew c = {together ? cluster : 1, together ? place : 0, total};
    if (!together && place >= team.n_units)
        return;
    const dkv_cu_unit &unit = units[team.first_unit + (together ? 0 : place)];
    if (threadIdx.x == 0)
        s.task = select_task_of(blocks[unit.block], unit);
    for (int i = threadIdx.x; i < n_bins; i += blockDim.x)
        s.histogram[i] = 0;
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize(); /* all above was there before scoring began */
#endif
    if (threadIdx.x == 0)
        select_after_scoring(s.task, unit);
    __syncthreads();
    const select_task t = s.task;
    const uint32_t share = ((t.n + c.size - 1) / c.size + 31) & ~31u;
    part p;
    p.begin = min(t.n, c.rank * share);
    p.end = min(t.n, p.begin + share);
    p.keys = t.keys
                 ? t.keys + p.begin
                 : reinterpret_cast<unsigned long long *>(stage + pool_tokens + DKV_KERNEL_MAX + 1);
    build_keys(t, s, p, pool_tokens, stage);
    find_cut(t, c, s, p);
    write_kept(t, c, s, p);
    crew_sync(c); /* nobody leaves while others read its shared memory */
}

/* ---- launching ---- */

struct shape {
    uint32_t cluster;
    uint32_t n_teams;
    uint32_t threads;
    uint32_t pool_tokens;
    size_t shared_bytes;
};

size_t shared_bytes_of(uint32_t cluster, uint32_t pool_tokens, uint32_t key_tokens)
{
    return sizeof(shared_state) + (cluster > 1 ? n_bins * sizeof(unsigned) : 0) +
           (pool_tokens + DKV_KERNEL_MAX + 1) * sizeof(float) +
           key_tokens * sizeof(unsigned long long);
}

/* Keys that fit into one block's shared memory, pooled in pieces if need be. */
uint32_t shared_tokens(const dkv_cu_device *device)
{
    const size_t fixed = shared_bytes_of(max_cluster, min_pool_tokens, 0);
    return static_cast<uint32_t>((device->shared_bytes_max - fixed) / sizeof(unsigned long long)) &
           ~31u;
}

uint32_t block_share(uint32_t n, uint32_t cluster)
{
    return ((n + cluster - 1) / cluster + 31) & ~31u;
}

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

/* True if one block of the cluster takes the whole unit. */
bool is_alone(uint32_t n, uint32_t cluster)
{
    return n <= worthwhile_tokens * cluster;
}

/* Walks the wave's teams for a cluster size; `out` may be NULL. Returns their number. */
uint32_t make_teams(const dkv_cu_wave *wave, uint32_t cluster, team *out)
{
    uint32_t n_teams = 0;
    uint32_t open = 0; /* units of the team that is being filled with short ones */
    for (uint32_t u = 0; u < wave->n_units; u++) {
        const bool alone = cluster > 1 && is_alone(block_of(wave, u).n_valid, cluster);
        if (alone && open > 0 && open < cluster) {
            open++;
            if (out)
                out[n_teams - 1].n_units++;
            continue;
        }
        if (out)
            out[n_teams] = {u, 1};
        n_teams++;
        open = alone ? 1 : 0;
    }
    return n_teams;
}

/* A cluster large enough that no block has more than block_tokens, and larger while the device
 * has room. */
shape shape_of(const dkv_cu_device *device, const dkv_cu_wave *wave)
{
    uint32_t longest = 1;
    uint32_t n_long = 0;
    for (uint32_t u = 0; u < wave->n_units; u++) {
        const dkv_cu_block &block = block_of(wave, u);
        longest = block.n_valid > longest ? block.n_valid : longest;
        n_long += block.n_valid > spread_tokens;
    }
    shape s = {1, 0, max_threads, min_pool_tokens, 0};
    const uint32_t fits = shared_tokens(device) < block_tokens ? shared_tokens(device)
                                                               : block_tokens;
    while (s.cluster < device->cluster_max &&
           (block_share(longest, s.cluster) > fits ||
            (block_share(longest, s.cluster) > spread_tokens &&
             n_long * s.cluster * 2 <= static_cast<uint32_t>(device->multiprocessors))))
        s.cluster *= 2;
    uint32_t keys = 0;
    uint32_t tokens = 0;
    for (uint32_t u = 0; u < wave->n_units; u++) {
        const dkv_cu_block &block = block_of(wave, u);
        const bool spread = s.cluster > 1 && !is_alone(block.n_valid, s.cluster);
        const uint32_t share = block_share(block.n_valid, spread ? s.cluster : 1);
        tokens = share > tokens ? share : tokens;
        if (!wave->units_host[u].keys && share > keys)
            keys = share;
    }
    while (s.pool_tokens < tokens && s.pool_tokens < block_tokens &&
           shared_bytes_of(s.cluster, 2 * s.pool_tokens, keys) <=
               static_cast<size_t>(device->shared_bytes_max / 2 - 1024)) /* two fit */
        s.pool_tokens *= 2;
    const uint32_t at_once = 2 * static_cast<uint32_t>(device->multiprocessors);
    if (s.cluster == 1 && longest <= crowd_tokens && wave->n_units > at_once)
        s.threads = min_threads;
    s.n_teams = make_teams(wave, s.cluster, nullptr);
    s.shared_bytes = shared_bytes_of(s.cluster, s.pool_tokens, keys);
    return s;
}

/* `attributes` has room for two. The kernel may be scheduled while the scorer's last blocks still
 * run: it waits for them itself. */
cudaLaunchConfig_t launch_config(uint32_t n_blocks, uint32_t threads, uint32_t cluster,
                                 cudaLaunchAttribute *attributes)
{
    attributes[0] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster, 1, 1};
    attributes[1] = {};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(threads);
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 1 : 0;
    return config;
}

} // namespace

extern "C" cudaError_t dkv_cu_select_prepare(struct dkv_cu_device *device)
{
    cudaError_t error = cudaFuncSetAttribute(
        select_tokens, cudaFuncAttributeMaxDynamicSharedMemorySize, device->shared_bytes_max);
    cudaFuncAttributes attributes = {};
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, select_tokens);
    device->cluster_max = 1;
    if (error != cudaSuccess || attributes.ptxVersion < 90) /* code without cluster barriers */
        return error;
    device->waits_for_scores = true;
    error = cudaFuncSetAttribute(select_tokens, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    for (uint32_t size = max_cluster; error == cudaSuccess && size > 1; size /= 2) {
        int fit = 0;
        const size_t shared = shared_bytes_of(size, block_tokens, block_tokens);
        cudaLaunchAttribute attributes[2];
        cudaLaunchConfig_t config = launch_config(size, max_threads, size, attributes);
        config.dynamicSmemBytes = shared < static_cast<size_t>(device->shared_bytes_max)
                                      ? shared
                                      : device->shared_bytes_max;
        if (cudaOccupancyMaxActiveClusters(&fit, select_tokens, &config) == cudaSuccess &&
            fit > 0) {
            device->cluster_max = size;
            break;
        }
        (void)cudaGetLastError(); /* this size is not for this device */
    }
    return error;
}

extern "C" bool dkv_cu_select_needs_keys(const struct dkv_cu_device *device, uint32_t n_valid)
{
    return block_share(n_valid, device->cluster_max) > shared_tokens(device);
}

extern "C" size_t dkv_cu_select_extra_bytes(const struct dkv_cu_wave *wave)
{
    return sizeof(team) * wave->n_units;
}

extern "C" void dkv_cu_select_fill(const struct dkv_cu_device *device,
                                   const struct dkv_cu_wave *wave, void *extra)
{
    make_teams(wave, shape_of(device, wave).cluster, static_cast<team *>(extra));
}

extern "C" cudaError_t dkv_cu_select_launch(const struct dkv_cu_device *device,
                                            const struct dkv_cu_wave *wave, const void *,
                                            const void *extra_device, cudaStream_t stream)
{
    const shape s = shape_of(device, wave);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = launch_config(s.n_teams * s.cluster, s.threads, s.cluster,
                                              attributes);
    if (device->waits_for_scores) {
        config.attrs = attributes + (s.cluster > 1 ? 0 : 1);
        config.numAttrs = s.cluster > 1 ? 2 : 1;
    }
    config.dynamicSmemBytes = s.shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, select_tokens, wave->blocks, wave->units,
                              static_cast<const team *>(extra_device), s.cluster, s.pool_tokens);
}
