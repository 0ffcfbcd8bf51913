/* Choices on the device: the selection of blocks whose heads are looked at together, or whose
 * scores may have any sign, or come in chunks or stages. What kernels/choose.c does, in its steps
 * and its order, with scores in float32:
 *
 *   settle   one unit for all heads' scores, earlier calls' scores, the mean of a layer, classes
 *   pool     pooled scores, of tokens or summed up to chunks
 *   deal     how many each head keeps: all alike, or by the best of all heads
 *   keep     each head's best, in two stages where the policy has two
 *   write    indices head after head, and how many
 *
 * Simple choices are left to selection (select_plan.cu).
 *
 * A choice has a crew of up to 16 thread blocks, a cluster; between steps all of them meet. What
 * concerns a head alone is one block's work (choose_rank.cuh: solo). 1024 threads, which the
 * ranking passes need to have enough loads under way.
 */
#include "kernels/cuda/choose_pool.cuh"

namespace
{

constexpr unsigned kept_bit = 0x80; /* of a class, once ranking is over */

/* ---- deal ---- */

/* Units of a head that are above the candidates once the best `safe` are safe. */
__device__ inline uint32_t above(const choosing &w, uint32_t safe)
{
    if (w.choice.mask || w.choice.window == w.choice.n)
        return unknown;
    return safe > w.protect ? safe : w.protect;
}

__device__ inline ranked solo(const choosing &w, uint32_t head, uint32_t safe)
{
    return {w.pooled, w.raw, w.cls, w.choice.stride, w.units, head, 1, above(w, safe), false};
}

__device__ inline ranked joint(const choosing &w, uint32_t safe)
{
    return {w.pooled,       w.raw,          w.cls, w.choice.stride, w.units, 0,
            w.choice.heads, above(w, safe), true};
}

/* Makes the best `count` units of a head safe, of which the best `safe` are. */
__device__ void make_safe(const choosing &w, uint32_t head, uint32_t count, uint32_t safe,
                          shared_state &s)
{
    const ranked units = solo(w, head, safe);
    find_cut(units, count, w.c, s, nullptr);
    const cut_point cut = s.cut;
    for_each_unit(units, w.c, [&](uint32_t, uint32_t i, unsigned cls, float pooled) {
        if (cls < class_protected && is_kept(units, cut, head, i, cls, pooled))
            w.cls[row_of(w.choice, head) + i] = class_protected;
    });
    __syncthreads();
}

/* adakv_mix: counts of each head among the best of all, to counts_out. */
__device__ void count_best(const choosing &w, uint32_t total, uint32_t safe, shared_state &s)
{
    const ranked units = joint(w, safe);
    find_cut(units, total, w.c, s, w.choice.bins);
    const cut_point cut = s.cut;
    uint32_t of = 0;
    unsigned count = 0;
    for_each_unit(units, w.c, [&](uint32_t head, uint32_t i, unsigned cls, float pooled) {
        if (head != of && count > 0) {
            atomicAdd(&w.choice.counts_out[of], count);
            count = 0;
        }
        of = head;
        count += is_kept(units, cut, head, i, cls, pooled);
    });
    if (count > 0)
        atomicAdd(&w.choice.counts_out[of], count);
    crew_barrier(w.c);
}

/* The authors' mix of a head's count and the mean; all, where the mean is. */
__device__ uint32_t mixed(const choosing &w, uint32_t count, uint32_t mean, uint32_t least)
{
    if (mean == w.units)
        return mean;
    const double share = mean - w.protect;
    const double best = count > w.protect ? static_cast<double>(count - w.protect) : 0.0;
    const double sum = rint((1 - w.choice.alpha) * best + floor(w.choice.alpha * share));
    const uint32_t units = w.protect + static_cast<uint32_t>(sum);
    return units < least ? least : units > w.units ? w.units : units;
}

/* Marks what is kept, of all heads at once or of one. */
__device__ void mark_kept(const choosing &w, const ranked &units, const cut_point &cut)
{
    for_each_unit(units, w.c, [&](uint32_t head, uint32_t i, unsigned cls, float pooled) {
        if (is_kept(units, cut, head, i, cls, pooled))
            w.cls[row_of(w.choice, head) + i] = static_cast<uint8_t>(cls | kept_bit);
    });
}

/* ---- keep ---- */

/* criticalkv: what the first stage keeps is safe, and scores become the second stage's. */
__device__ void second_stage(const choosing &w, uint32_t head, uint32_t half, uint32_t safe,
                             shared_state &s)
{
    const dkv_cu_choice &choice = w.choice;
    const float *weight = choice.weight ? choice.weight + static_cast<size_t>(head) * choice.n
                                        : nullptr;
    if (half > 0)
        make_safe(w, head, half, safe, s);
    for (uint32_t i = threadIdx.x; i < choice.n; i += threads) {
        const size_t at = row_of(choice, head) + i;
        const float x = (w.pooled[at] + 1e-4f) * (weight ? weight[i] : 1.0f);
        w.raw[at] = x;
        w.pooled[at] = x;
    }
    __syncthreads();
}

/* A head's `count` best, in two stages where there are two; 0 where masked tokens leave nothing.
 * The best `safe` are safe. */
__device__ void keep_head(const choosing &w, uint32_t head, uint32_t count, uint32_t safe,
                          shared_state &s)
{
    if (w.choice.two_stages) {
        second_stage(w, head, count / 2, safe, s);
        safe = max(safe, count / 2);
    }
    if (count == 0)
        return;
    const ranked units = solo(w, head, safe);
    find_cut(units, count, w.c, s, nullptr);
    mark_kept(w, units, s.cut);
    __syncthreads();
}

/* Each head's best, as many as it has been dealt. */
__device__ void keep_each(const choosing &w, uint32_t mean, uint32_t least, shared_state &s)
{
    const dkv_cu_choice &choice = w.choice;
    for (uint32_t head = w.c.rank; head < choice.heads; head += w.c.size) {
        uint32_t count = choice.each ? units_for(w, choice.each[head]) : mean;
        if (choice.mode == DKV_HEADS_ADAKV_MIX)
            count = mixed(w, choice.counts_out[head], mean, least);
        keep_head(w, head, count, 0, s);
    }
}

/* Deals out, and marks what every head keeps. */
__device__ void deal_and_keep(const choosing &w, shared_state &s)
{
    const dkv_cu_choice &choice = w.choice;
    const uint32_t mean = units_for(w, choice.keep);
    uint32_t least = units_for(w, choice.min_keep + choice.chunk - 1);
    least = least < 1 ? 1 : least > mean ? mean : least;
    if (choice.mode == DKV_HEADS_UNIFORM || choice.mode == DKV_HEADS_ADAKV_MIX) {
        if (choice.mode == DKV_HEADS_ADAKV_MIX)
            count_best(w, choice.heads * mean, 0, s);
        keep_each(w, mean, least, s);
        crew_barrier(w.c);
        return;
    }
    uint32_t safe = least;
    if (choice.mode == DKV_HEADS_ADAKV_FLOOR) {
        const double share = floor(choice.alpha * choice.keep);
        safe = max(safe, units_for(w, static_cast<uint32_t>(share)));
    }
    for (uint32_t head = w.c.rank; head < choice.heads && safe > w.protect; head += w.c.size)
        make_safe(w, head, safe, 0, s);
    crew_barrier(w.c);
    if (choice.two_stages) { /* heads get their counts first */
        count_best(w, choice.heads * mean, safe, s);
        for (uint32_t head = w.c.rank; head < choice.heads; head += w.c.size)
            keep_head(w, head, choice.counts_out[head], safe, s);
        crew_barrier(w.c);
        return;
    }
    const ranked units = joint(w, safe);
    find_cut(units, choice.heads * mean, w.c, s, choice.bins);
    mark_kept(w, units, s.cut);
    crew_barrier(w.c);
}

/* ---- write ---- */

/* Which of tokens i .. i+3 of a head are kept, one bit each. */
__device__ unsigned kept_of_four(const choosing &w, uint32_t head, uint32_t i)
{
    const uint8_t *cls = w.cls + row_of(w.choice, head);
    unsigned kept = 0;
    for (uint32_t q = 0; q < 4 && i + q < w.choice.n; q++)
        kept |= (cls[unit_of(w.choice, i + q)] & kept_bit ? 1u : 0u) << q;
    return kept;
}

/* A warp's run of a head's tokens. */
struct run {
    uint32_t begin;
    uint32_t end;
};

__device__ run run_of(const dkv_cu_choice &choice)
{
    constexpr uint32_t n_warps = threads / 32;
    const uint32_t length = ((choice.n + n_warps - 1) / n_warps + 127) & ~127u;
    const uint32_t begin = min(choice.n, threadIdx.x / 32 * length);
    return {begin, min(choice.n, begin + length)};
}

/* How many tokens of the warp's run are kept, to s.warp_sums; then all warps see all of them. */
__device__ void count_runs(const choosing &w, uint32_t head, shared_state &s)
{
    const run mine = run_of(w.choice);
    unsigned count = 0;
    for (uint32_t i = mine.begin + threadIdx.x % 32 * 4; i < mine.end; i += 128)
        count += __popc(kept_of_four(w, head, i));
    count = warp_sum(count);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        s.warp_sums[threadIdx.x / 32] = count;
    __syncthreads();
}

__device__ void write_head(const choosing &w, uint32_t head, shared_state &s)
{
    const dkv_cu_choice &choice = w.choice;
    const run mine = run_of(choice);
    uint32_t at = 0;
    count_runs(w, head, s);
    for (uint32_t h = 0; h < head; h++)
        at += choice.counts_out[h];
    for (uint32_t warp = 0; warp < threadIdx.x / 32; warp++)
        at += s.warp_sums[warp];
    for (uint32_t first = mine.begin; first < mine.end; first += 128) {
        const uint32_t i = first + threadIdx.x % 32 * 4;
        const unsigned kept = i < mine.end ? kept_of_four(w, head, i) : 0;
        unsigned upto = __popc(kept);
        for (unsigned step = 1; step < 32; step <<= 1) {
            const unsigned lower = __shfl_up_sync(~0u, upto, step);
            upto += threadIdx.x % 32 >= step ? lower : 0;
        }
        uint32_t to = at + upto - __popc(kept);
        for (uint32_t q = 0; q < 4; q++)
            if ((kept >> q & 1) && to < choice.capacity) /* always below: the gate's promise */
                choice.keep_out[to++] = static_cast<int32_t>(choice.first_index + i + q);
        at += __shfl_sync(~0u, upto, 31);
    }
}

__device__ void write(const choosing &w, int exponent, shared_state &s)
{
    const dkv_cu_choice &choice = w.choice;
    for (uint32_t head = w.c.rank; head < choice.heads; head += w.c.size) {
        count_runs(w, head, s);
        if (threadIdx.x == 0) {
            uint32_t count = 0;
            for (uint32_t warp = 0; warp < threads / 32; warp++)
                count += s.warp_sums[warp];
            choice.counts_out[head] = count;
        }
    }
    crew_barrier(w.c);
    for (uint32_t head = w.c.rank; head < choice.heads; head += w.c.size)
        write_head(w, head, s);
    const float descale = ldexpf(1.0f, -exponent);
    for (uint32_t head = 0; choice.scores_out && head < choice.heads; head++)
        for (uint32_t i = w.c.rank * threads + threadIdx.x; i < choice.n; i += w.c.size * threads)
            choice.scores_out[static_cast<size_t>(head) * choice.n + i] =
                choice.raw[row_of(choice, head) + i] * descale * descale;
}

__global__ void __launch_bounds__(threads) choose(const dkv_cu_choice *choices, uint32_t crew_size)
{
    __shared__ shared_state s;
    __shared__ dkv_cu_choice choice;
    if (threadIdx.x == 0) {
        choice = choices[blockIdx.x / crew_size];
        s.n_histograms = 0;
    }
    __syncthreads();
    if (choice.simple)
        return;
    const choosing w = begin_choice(choice, {crew_size, blockIdx.x % crew_size});
    const int exponent = smallest_exponent(choice);
    settle(w, exponent, s);
    pool(w);
    deal_and_keep(w, s);
    write(w, exponent, s);
}

/* ---- launching ---- */

constexpr uint32_t most_blocks = 16; /* of a cluster, where the device has such */
constexpr size_t share_tokens = 16384;

/* Blocks for the largest choice of the wave; a power of two. */
uint32_t crew_of(const dkv_cu_device *device, const dkv_cu_wave *wave)
{
    size_t most = 0;
    uint32_t size = 1;
    for (uint32_t i = 0; i < wave->n_choices; i++) {
        const dkv_cu_choice &choice = wave->choices_host[i];
        const size_t tokens = static_cast<size_t>(choice.heads) * choice.n;
        most = tokens > most ? tokens : most;
    }
    while (size < device->choice_cluster && size * share_tokens < most)
        size *= 2;
    return size;
}

cudaLaunchConfig_t launch_config(uint32_t blocks, uint32_t size, cudaLaunchAttribute *cluster)
{
    cudaLaunchConfig_t config = {};
    *cluster = {};
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim = {size, 1, 1};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.attrs = cluster;
    config.numAttrs = size > 1;
    return config;
}

} // namespace

extern "C" cudaError_t dkv_cu_choose_prepare(struct dkv_cu_device *device)
{
    const void *kernel = reinterpret_cast<const void *>(choose);
    cudaFuncAttributes attributes = {};
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    device->choice_cluster = 1;
    if (error != cudaSuccess || attributes.ptxVersion < 90) /* code without clusters */
        return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    for (uint32_t size = most_blocks; error == cudaSuccess && size > 1; size /= 2) {
        int fit = 0;
        cudaLaunchAttribute cluster;
        const cudaLaunchConfig_t config = launch_config(size, size, &cluster);
        if (cudaOccupancyMaxActiveClusters(&fit, kernel, &config) == cudaSuccess && fit > 0) {
            device->choice_cluster = size;
            break;
        }
        (void)cudaGetLastError(); /* this size is not for this device */
    }
    return error;
}

extern "C" cudaError_t dkv_cu_choose_launch(const struct dkv_cu_device *device,
                                            const struct dkv_cu_wave *wave, cudaStream_t stream)
{
    bool any = false;
    for (uint32_t i = 0; i < wave->n_choices; i++)
        any = any || !wave->choices_host[i].simple;
    if (!any)
        return cudaSuccess;
    uint32_t size = crew_of(device, wave);
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = launch_config(wave->n_choices * size, size, &cluster);
    config.stream = stream;
    const dkv_cu_choice *choices = wave->choices;
    void *arguments[] = {&choices, &size};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void *>(choose), arguments);
}
