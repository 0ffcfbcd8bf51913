/* Selection on the device: pooling, classes, the k best of every unit, ascending indices.
 *
 * scores float32 [n] of a unit -> keep_out int32 [k]; same order, bit for bit, as kernels/select.c.
 *
 * A token becomes one 64-bit key whose order is the order of tokens: two bits of class, then the
 * pooled score, then (max pooling) the raw score. Of the average's double only 61 bits are needed.
 * The k-th best key is found by radix selection, 11 bits a round, until the tokens that share the
 * decided bits are few; those are then ranked against each other in full, by key, raw score and
 * index. What was found is the cut: every token that is not behind it is kept, so writing the
 * indices in order needs no flags, only a count and a second look.
 *
 * Long units are spread over a cluster of thread blocks that add their histograms through
 * distributed shared memory; of short ones each block of the cluster takes its own. How a unit is
 * spread cannot show in the answer, which is exact. Devices without clusters use one block a unit.
 *
 * 512 threads: four blocks fill a multiprocessor when keys are few.
 */
#include <cooperative_groups.h>

#include "kernels/cuda/device.cuh"

namespace cg = cooperative_groups;

namespace
{

constexpr int threads = 512;
constexpr int n_warps = threads / 32;
constexpr int n_bins = 2048;
constexpr int max_ranked = 512;    /* tokens ranked against each other */
constexpr int stage_tokens = 2048; /* pooled at a time */
constexpr int max_cluster = 16;

/* Tokens per block: wanted, and more than which a unit is spread over the cluster. */
constexpr uint32_t block_tokens = 8192;
constexpr uint32_t alone_tokens = 4096;

struct team {
    uint32_t first_unit;
    uint32_t n_units; /* 1: the whole cluster works on it; else one block each */
};

struct candidate {
    unsigned long long key;
    unsigned raw;
    uint32_t index;
};

struct shared_state {
    unsigned histogram[n_bins];
    unsigned total[n_bins]; /* a slice of the cluster's sum; the whole of it when alone */
    union {
        float stage[stage_tokens + DKV_KERNEL_MAX + 1];
        candidate ranked[max_ranked];
    };
    candidate mine[max_ranked];
    unsigned n_mine;
    unsigned n_kept; /* of this block, read by the others */
    unsigned warp_counts[n_warps];
    unsigned bin;
    unsigned above; /* tokens in higher bins */
    unsigned inside;
    candidate cut;
    uint32_t lone_key;
};

/* The blocks that work on one unit. */
struct crew {
    uint32_t size;
    uint32_t rank;
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

/* ---- keys ---- */

/* Sum of `width` (a power of two) values in the order that kernels/select.h fixes. */
template <int width> __device__ double tree_sum(const float *x)
{
    if constexpr (width == 1)
        return x[0];
    else
        return tree_sum<width / 2>(x) + tree_sum<width / 2>(x + width / 2);
}

template <int width> __device__ __noinline__ double far_tree_sum(const float *x)
{
    if constexpr (width <= 32)
        return tree_sum<width>(x);
    else
        return far_tree_sum<width / 2>(x) + far_tree_sum<width / 2>(x + width / 2);
}

template <int width> __device__ void add_block(double &sum, const float *&x, uint32_t kernel)
{
    if (kernel & width) {
        sum += width <= 16 ? tree_sum<(width <= 16 ? width : 1)>(x) : far_tree_sum<width>(x);
        x += width;
    }
}

/* Sum over the window of `kernel` tokens from `x` on. */
__device__ double pooled_sum(const float *x, uint32_t kernel)
{
    double sum = *x++; /* the kernel is odd */
    add_block<2>(sum, x, kernel);
    add_block<4>(sum, x, kernel);
    add_block<8>(sum, x, kernel);
    add_block<16>(sum, x, kernel);
    add_block<32>(sum, x, kernel);
    add_block<64>(sum, x, kernel);
    add_block<128>(sum, x, kernel);
    add_block<256>(sum, x, kernel);
    return sum;
}

__device__ float pooled_max(const float *x, uint32_t kernel)
{
    float largest = x[0];
    for (uint32_t i = 1; i < kernel; i++)
        largest = fmaxf(largest, x[i]);
    return largest;
}

/* A double that is a sum of up to 511 floats >= 0, in 61 bits: its exponent field is within
 * 873..1161, or it is zero. */
__device__ unsigned long long average_bits(double sum)
{
    return sum > 0 ? static_cast<unsigned long long>(__double_as_longlong(sum)) - (873ULL << 52)
                   : 0;
}

__device__ unsigned raw_bits(float raw)
{
    return __float_as_uint(raw + 0.0f) & 0x7fffffffu; /* -0 equals +0 */
}

__device__ unsigned long long class_of(const dkv_cu_block &block, const dkv_cu_unit &unit,
                                       uint32_t i, uint32_t lone_key)
{
    if (dkv_cu_masked(unit, i))
        return 0;
    return i < block.sinks || i >= block.n_valid - block.recent || i == lone_key ? 2 : 1;
}

/* The key that is the only one some row sees, or ~0. Without a mask that is key 0, if the window
 * is the whole block. */
__device__ uint32_t find_lone_key(const dkv_cu_block &block, const dkv_cu_unit &unit)
{
    if (!unit.mask)
        return block.window == block.n_valid ? 0 : ~0u;
    uint32_t first = ~0u;
    for (uint32_t i = 0; i < block.n_valid; i++) {
        if (i % 32 == 0 && unit.mask[i / 32] == ~0u) {
            i += 31;
            continue;
        }
        if (dkv_cu_masked(unit, i))
            continue;
        if (first != ~0u)
            return i > block.n_valid - block.window ? first : ~0u;
        first = i;
    }
    return first;
}

/* Pools tokens begin..end-1 and stores their keys from `keys` on. */
__device__ void build_keys(const dkv_cu_block &block, const dkv_cu_unit &unit, shared_state &s,
                           uint32_t begin, uint32_t end, unsigned long long *keys)
{
    const uint32_t n = block.n_valid;
    const uint32_t scope_begin = block.pool_prefix ? block.sinks : 0;
    const uint32_t scope_end = block.pool_prefix ? n - block.recent : n;
    const uint32_t kernel = block.pool == DKV_POOL_NONE ? 1 : block.kernel;
    const int half = static_cast<int>(kernel / 2);
    const float descale = unit.scores_out ? ldexpf(1.0f, -*unit.exponent) : 0.0f;

    for (uint32_t first = begin; first < end; first += stage_tokens) {
        const int count = static_cast<int>(min(end - first, static_cast<uint32_t>(stage_tokens)));
        __syncthreads();
        for (int i = threadIdx.x; i < count + 2 * half; i += threads) {
            const long long token = static_cast<long long>(first) - half + i;
            s.stage[i] = token >= scope_begin && token < scope_end ? unit.scores[token] : 0.0f;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += threads) {
            const uint32_t token = first + i;
            const bool pooled = token >= scope_begin && token < scope_end;
            const float raw = pooled ? s.stage[i + half] : unit.scores[token];
            unsigned long long key = class_of(block, unit, token, s.lone_key) << 62;
            if (block.pool == DKV_POOL_AVG) {
                key |= average_bits(pooled ? pooled_sum(s.stage + i, kernel) : raw);
            } else {
                const float best = pooled && kernel > 1 ? pooled_max(s.stage + i, kernel) : raw;
                key |= static_cast<unsigned long long>(raw_bits(best)) << 31 | raw_bits(raw);
            }
            keys[token - begin] = key;
            if (unit.scores_out)
                unit.scores_out[token] = raw * descale * descale;
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
    unsigned long long word[3];
};

__device__ words words_of(const dkv_cu_unit &unit, unsigned long long key, uint32_t index, int upto)
{
    words w = {{key, 0, 0}};
    if (upto > 0)
        w.word[1] = raw_bits(unit.scores[index]);
    if (upto > 1)
        w.word[2] = ~index & 0x3fffffu;
    return w;
}

/* True if all digits before round r are those decided. */
__device__ bool matches(const words &w, const words &decided, const digit &d)
{
    for (int i = 0; i < d.word; i++)
        if (w.word[i] != decided.word[i])
            return false;
    const int above = d.shift + d.width;
    return above >= 64 || (w.word[d.word] ^ decided.word[d.word]) >> above == 0;
}

/* Adds the crew's histograms: every block gets the whole sum, bin by bin, in s.histogram. */
__device__ void add_histograms(const crew &c, shared_state &s)
{
    crew_sync(c);
    if (c.size == 1)
        return;
    const int slice = n_bins / static_cast<int>(c.size);
    const int first = slice * static_cast<int>(c.rank);
    for (int i = threadIdx.x; i < slice; i += threads) {
        unsigned sum = 0;
        for (uint32_t rank = 0; rank < c.size; rank++)
            sum += of_rank(c, s.histogram, rank)[first + i];
        s.total[first + i] = sum;
    }
    crew_sync(c);
    for (int i = threadIdx.x; i < n_bins; i += threads)
        s.histogram[i] = of_rank(c, s.total, static_cast<uint32_t>(i / slice))[i];
    __syncthreads();
}

/* Finds the bin that holds the `wanted`-th best token: s.bin, s.above, s.inside. */
__device__ void find_bin(shared_state &s, unsigned wanted)
{
    constexpr int per_thread = n_bins / threads;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int top = n_bins - 1 - per_thread * static_cast<int>(threadIdx.x); /* best first */
    unsigned sum = 0;
    for (int i = 0; i < per_thread; i++)
        sum += s.histogram[top - i];
    unsigned upto = sum; /* of this warp's bins up to this lane's */
    for (int step = 1; step < 32; step <<= 1) {
        const unsigned lower = __shfl_up_sync(~0u, upto, step);
        upto += lane >= step ? lower : 0;
    }
    if (lane == 31)
        s.warp_counts[warp] = upto;
    __syncthreads();
    unsigned above = upto - sum;
    for (int w = 0; w < warp; w++)
        above += s.warp_counts[w];
    if (above < wanted && above + sum >= wanted) {
        int i = 0;
        while (above + s.histogram[top - i] < wanted)
            above += s.histogram[top - i++];
        s.bin = top - i;
        s.above = above;
        s.inside = s.histogram[top - i];
    }
    __syncthreads();
}

__device__ bool better(const candidate &a, const candidate &b)
{
    if (a.key != b.key)
        return a.key > b.key;
    return a.raw != b.raw ? a.raw > b.raw : a.index < b.index;
}

/* Ranks the few tokens that share all decided digits; the `wanted`-th best is the cut. */
__device__ void rank_candidates(const dkv_cu_unit &unit, const crew &c, shared_state &s,
                                const unsigned long long *keys, uint32_t begin, uint32_t end,
                                const words &decided, const digit &next, unsigned wanted)
{
    if (threadIdx.x == 0)
        s.n_mine = 0;
    __syncthreads();
    for (uint32_t i = begin + threadIdx.x; i < end; i += threads) {
        const unsigned long long key = keys[i - begin];
        if (matches(words_of(unit, key, i, next.word), decided, next))
            s.mine[atomicAdd(&s.n_mine, 1u)] = {key, raw_bits(unit.scores[i]), i};
    }
    crew_sync(c);
    unsigned count = 0;
    for (uint32_t rank = 0; rank < c.size; rank++) {
        const unsigned n = *of_rank(c, &s.n_mine, rank);
        const candidate *from = of_rank(c, s.mine, rank);
        for (unsigned i = threadIdx.x; i < n; i += threads)
            s.ranked[count + i] = from[i];
        count += n;
    }
    __syncthreads();
    if (threadIdx.x < count) {
        const candidate mine = s.ranked[threadIdx.x];
        unsigned ahead = 0;
        for (unsigned i = 0; i < count; i++)
            ahead += better(s.ranked[i], mine);
        if (ahead + 1 == wanted)
            s.cut = mine;
    }
    __syncthreads();
}

/* Finds the k-th best token of the unit: s.cut. */
__device__ void find_cut(const dkv_cu_block &block, const dkv_cu_unit &unit, const crew &c,
                         shared_state &s, const unsigned long long *keys, uint32_t begin,
                         uint32_t end)
{
    words decided = {{0, 0, 0}};
    unsigned wanted = block.keep;
    for (int round = 0; round < n_rounds; round++) {
        const digit d = rounds[round];
        if (d.word == 1 && block.pool != DKV_POOL_AVG) {
            decided.word[1] = decided.word[0] & 0x7fffffffu; /* the key holds the raw score */
            continue;
        }
        for (int i = threadIdx.x; i < n_bins; i += threads)
            s.histogram[i] = 0;
        __syncthreads();
        for (uint32_t i = begin + threadIdx.x; i < end; i += threads) {
            const words w = words_of(unit, keys[i - begin], i, d.word);
            if (matches(w, decided, d))
                atomicAdd(&s.histogram[w.word[d.word] >> d.shift & ((1u << d.width) - 1)], 1u);
        }
        add_histograms(c, s);
        find_bin(s, wanted);
        wanted -= s.above;
        decided.word[d.word] |= static_cast<unsigned long long>(s.bin) << d.shift;
        const unsigned inside = s.inside;
        if (inside == wanted) { /* the whole bin is kept: its lower end is the cut */
            if (threadIdx.x == 0)
                s.cut = {decided.word[0], static_cast<unsigned>(decided.word[1]),
                         d.word == 2 ? ~static_cast<uint32_t>(decided.word[2]) & 0x3fffffu : ~0u};
            __syncthreads();
            return;
        }
        if (inside <= max_ranked) {
            const digit next = d.shift > 0 ? digit{d.word, 0, d.shift} : digit{d.word + 1, 0, 32};
            rank_candidates(unit, c, s, keys, begin, end, decided, next, wanted);
            return;
        }
        __syncthreads();
    }
}

/* ---- writing ---- */

__device__ bool is_kept(const dkv_cu_unit &unit, const candidate &cut, unsigned long long key,
                        uint32_t index)
{
    if (key != cut.key)
        return key > cut.key;
    return !better(cut, {key, raw_bits(unit.scores[index]), index});
}

/* Writes the kept indices in order: each warp owns a run of tokens. */
__device__ void write_kept(const dkv_cu_block &block, const dkv_cu_unit &unit, const crew &c,
                           shared_state &s, const unsigned long long *keys, uint32_t begin,
                           uint32_t end)
{
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const uint32_t run = ((end - begin + n_warps - 1) / n_warps + 31) & ~31u;
    const uint32_t from = min(end, begin + warp * run);
    const uint32_t to = min(end, from + run);
    const candidate cut = s.cut;

    unsigned count = 0;
    for (uint32_t i = from + lane; i < to; i += 32)
        count += is_kept(unit, cut, keys[i - begin], i);
    count = __reduce_add_sync(~0u, count);
    if (lane == 0)
        s.warp_counts[warp] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
        s.n_kept = 0;
        for (int w = 0; w < n_warps; w++)
            s.n_kept += s.warp_counts[w];
    }
    crew_sync(c);
    unsigned at = 0;
    for (uint32_t rank = 0; rank < c.rank; rank++)
        at += *of_rank(c, &s.n_kept, rank);
    for (int w = 0; w < warp; w++)
        at += s.warp_counts[w];
    for (uint32_t first = from; first < to; first += 32) {
        const uint32_t i = first + lane;
        const bool kept = i < to && is_kept(unit, cut, keys[i - begin], i);
        const unsigned all = __ballot_sync(~0u, kept);
        const unsigned mine = at + __popc(all & ((1u << lane) - 1));
        if (kept && mine < block.keep) /* always, unless scores were not numbers */
            unit.keep_out[mine] = static_cast<int32_t>(block.valid_from + i);
        at += __popc(all);
    }
}

__global__ void __launch_bounds__(threads)
    select_tokens(const dkv_cu_block *blocks, const dkv_cu_unit *units, const team *teams,
                  uint32_t cluster)
{
    extern __shared__ __align__(16) unsigned char memory[];
    shared_state &s = *reinterpret_cast<shared_state *>(memory);
    const team t = teams[blockIdx.x / cluster];
    const uint32_t place = blockIdx.x % cluster;
    const crew c = {t.n_units == 1 ? cluster : 1, t.n_units == 1 ? place : 0};
    if (t.n_units > 1 && place >= t.n_units)
        return;
    const dkv_cu_unit &unit = units[t.first_unit + (t.n_units == 1 ? 0 : place)];
    const dkv_cu_block &block = blocks[unit.block];
    const uint32_t share = ((block.n_valid + c.size - 1) / c.size + 31) & ~31u;
    const uint32_t begin = min(block.n_valid, c.rank * share);
    const uint32_t end = min(block.n_valid, begin + share);
    unsigned long long *keys = unit.keys ? unit.keys + begin
                                         : reinterpret_cast<unsigned long long *>(&s + 1);
    if (threadIdx.x == 0)
        s.lone_key = find_lone_key(block, unit);
    build_keys(block, unit, s, begin, end, keys);
    find_cut(block, unit, c, s, keys, begin, end);
    write_kept(block, unit, c, s, keys, begin, end);
    crew_sync(c); /* nobody leaves while others read its shared memory */
}

/* ---- launching ---- */

struct shape {
    uint32_t cluster;
    uint32_t n_teams;
    size_t shared_bytes;
};

uint32_t shared_tokens(const dkv_cu_device *device)
{
    return static_cast<uint32_t>((device->shared_bytes_max - sizeof(shared_state)) /
                                 sizeof(unsigned long long)) &
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

/* Walks the wave's teams for a cluster size; `out` may be NULL. Returns their number. */
uint32_t make_teams(const dkv_cu_wave *wave, uint32_t cluster, team *out)
{
    uint32_t n_teams = 0;
    uint32_t open = 0; /* units of the team that is being filled with short ones */
    for (uint32_t u = 0; u < wave->n_units; u++) {
        const bool alone = cluster > 1 && block_of(wave, u).n_valid <= alone_tokens;
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
        n_long += block.n_valid > alone_tokens;
    }
    shape s = {1, 0, 0};
    const uint32_t fits = shared_tokens(device) < block_tokens ? shared_tokens(device)
                                                               : block_tokens;
    while (s.cluster < device->cluster_max && longest > alone_tokens &&
           (block_share(longest, s.cluster) > fits ||
            (block_share(longest, s.cluster) > 2048 &&
             n_long * s.cluster * 2 <= static_cast<uint32_t>(device->multiprocessors))))
        s.cluster *= 2;
    uint32_t tokens = 0;
    for (uint32_t u = 0; u < wave->n_units; u++) {
        const dkv_cu_block &block = block_of(wave, u);
        const bool spread = s.cluster > 1 && block.n_valid > alone_tokens;
        const uint32_t share = block_share(block.n_valid, spread ? s.cluster : 1);
        if (!wave->units_host[u].keys && share > tokens)
            tokens = share;
    }
    s.n_teams = make_teams(wave, s.cluster, nullptr);
    s.shared_bytes = sizeof(shared_state) + tokens * sizeof(unsigned long long);
    return s;
}

cudaLaunchConfig_t launch_config(uint32_t n_blocks, uint32_t cluster,
                                 cudaLaunchAttribute *attribute)
{
    *attribute = {};
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(threads);
    config.attrs = attribute;
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
    error = cudaFuncSetAttribute(select_tokens, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    for (uint32_t size = max_cluster; error == cudaSuccess && size > 1; size /= 2) {
        int fit = 0;
        const size_t shared = sizeof(shared_state) + block_tokens * sizeof(unsigned long long);
        cudaLaunchAttribute attribute;
        cudaLaunchConfig_t config = launch_config(size, size, &attribute);
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
    return block_share(n_valid, n_valid > alone_tokens ? device->cluster_max : 1) >
           shared_tokens(device);
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
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = launch_config(s.n_teams * s.cluster, s.cluster, &attribute);
    config.dynamicSmemBytes = s.shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, select_tokens, wave->blocks, wave->units,
                              static_cast<const team *>(extra_device), s.cluster);
}
