/* The scorer of rules that have no query rows: of keys, of positions, of the caller.
 *
 *   anchor   item = (unit, key range). Sum of the range's keys, each over its length or as it is.
 *   settle   item = unit. Sums of all ranges, in order, and their length.
 *   score    item = (unit, 128 tokens). -|k_j|, -cos(k_j, anchor), or what needs no tensor.
 *
 * Keys [n][D]; a warp takes a key at a time, a lane 8 adjacent elements of every 256. Sums are in
 * double precision: a cosine's products cancel, and squares of finite keys may leave float32. 256
 * threads. Ranges depend on the block's length alone.
 */
#include "kernels/cuda/device.cuh"
#include "kernels/policies/random.h"

namespace
{

constexpr int threads = 256;
constexpr uint32_t warps = threads / 32;
constexpr uint32_t item_tokens = 128;
constexpr uint32_t max_ranges = 128;
constexpr uint32_t min_range_keys = 1024;
constexpr int eights = DKV_HEAD_DIM_MAX / 256; /* of elements, of a lane */

uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* The wave's work: item i of a kernel belongs to the last unit whose first item is <= i. */
struct work_list {
    const dkv_cu_block *blocks;
    const dkv_cu_unit *units;
    const uint32_t *first_item; /* [n_units + 1] */
    uint32_t n_units;
};

__device__ uint32_t find_unit(const work_list &work, uint32_t item)
{
    uint32_t lo = 0;
    uint32_t hi = work.n_units;
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (work.first_item[mid] <= item)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

__host__ __device__ inline uint32_t range_keys(uint32_t n)
{
    const uint32_t keys = (n + max_ranges - 1) / max_ranges;
    return keys < min_range_keys ? min_range_keys : keys;
}

/* Where things are in unit.work: the anchor and its length, then the ranges' sums, [D] each. */
struct anchor_memory {
    double *sum;
    double *length;
    double *ranges;
};

__device__ anchor_memory memory_of(const dkv_cu_block &block, const dkv_cu_unit &unit)
{
    double *at = reinterpret_cast<double *>(unit.work);
    return {at, at + block.head_dim, at + block.head_dim + 1};
}

/* ---- keys ---- */

__device__ double warp_sum(double x)
{
    for (int step = 16; step; step >>= 1)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* The lane's elements of a key; zeros where it is masked or not there. */
struct key_part {
    float x[eights][8];
};

__device__ key_part load_key(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t key,
                             bool report)
{
    key_part part = {};
    const uint32_t token = block.valid_from + key;
    const unsigned char *row = dkv_cu_masked(unit, key)
                                   ? nullptr
                                   : dkv_cu_row(block.k, unit.k, token, &unit.report->bad_k_entry);
#pragma unroll
    for (int i = 0; i < eights; i++) {
        const uint32_t dim = threadIdx.x % 32 * 8 + i * 256;
        if (!row || dim >= block.head_dim)
            continue;
        dkv_cu_load8(row + dim * dkv_cu_dtype_bytes(block.k.dtype), block.k.dtype, block.k.align,
                     unit.k_scale, part.x[i]);
        for (int e = 0; e < 8 && report; e++)
            if (!dkv_cu_finite(part.x[i][e]))
                atomicMin(&unit.report->nonfinite, DKV_CU_PLACE(1, unit.head, token, dim + e));
    }
    return part;
}

__device__ double length_of(const key_part &part)
{
    double sum = 0;
#pragma unroll
    for (int i = 0; i < eights; i++)
        for (int e = 0; e < 8; e++) {
            const double x = part.x[i][e];
            sum = fma(x, x, sum);
        }
    return sqrt(warp_sum(sum));
}

/* ---- the anchor ---- */

__global__ void __launch_bounds__(threads) anchor(work_list work)
{
    __shared__ double shared[warps][DKV_HEAD_DIM_MAX];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const uint32_t range = blockIdx.x - work.first_item[index];
    const uint32_t first = range * range_keys(block.n_valid);
    const uint32_t end = min(block.n_valid, first + range_keys(block.n_valid));
    const uint32_t lane = threadIdx.x % 32;
    double sums[eights][8] = {};
    for (uint32_t key = first + threadIdx.x / 32; key < end; key += warps) {
        const key_part part = load_key(block, unit, key, true);
        const double length = block.plain_anchor ? 1.0 : length_of(part);
        const double weight = length > 0 ? 1.0 / length : 0.0;
#pragma unroll
        for (int i = 0; i < eights; i++)
            for (int e = 0; e < 8; e++)
                sums[i][e] = fma(weight, static_cast<double>(part.x[i][e]), sums[i][e]);
    }
#pragma unroll
    for (int i = 0; i < eights; i++)
        for (int e = 0; e < 8; e++)
            shared[threadIdx.x / 32][lane * 8 + i * 256 + e] = sums[i][e];
    __syncthreads();
    double *to = memory_of(block, unit).ranges + static_cast<size_t>(range) * block.head_dim;
    for (uint32_t dim = threadIdx.x; dim < block.head_dim; dim += threads) {
        double sum = 0;
        for (uint32_t w = 0; w < warps; w++)
            sum += shared[w][dim];
        to[dim] = sum;
    }
}

__global__ void __launch_bounds__(threads) settle(work_list work)
{
    __shared__ double shared[warps];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const anchor_memory memory = memory_of(block, unit);
    const uint32_t n_ranges = (block.n_valid + range_keys(block.n_valid) - 1) /
                              range_keys(block.n_valid);
    double squares = 0;
    for (uint32_t dim = threadIdx.x; dim < block.head_dim; dim += threads) {
        double sum = 0;
        for (uint32_t range = 0; range < n_ranges; range++)
            sum += memory.ranges[static_cast<size_t>(range) * block.head_dim + dim];
        memory.sum[dim] = sum;
        squares = fma(sum, sum, squares);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (uint32_t w = 0; w < warps; w++)
            sum += shared[w];
        *memory.length = sqrt(sum);
    }
}

/* ---- scores ---- */

/* -|k_j|, or -cos(k_j, anchor), by a warp; a key or an anchor of length 0 has cosine 0. */
__device__ float score_key(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t key)
{
    const bool angle = block.source == DKV_SOURCE_KEY_ANGLE;
    const key_part part = load_key(block, unit, key, !angle);
    const double length = length_of(part);
    if (!angle)
        return static_cast<float>(-length);
    const anchor_memory memory = memory_of(block, unit);
    double product = 0;
#pragma unroll
    for (int i = 0; i < eights; i++) {
        const uint32_t dim = threadIdx.x % 32 * 8 + i * 256;
        for (int e = 0; e < 8 && dim < block.head_dim; e++)
            product = fma(static_cast<double>(part.x[i][e]), memory.sum[dim + e], product);
    }
    product = warp_sum(product);
    const double reach = *memory.length;
    return length > 0 && reach > 0 ? static_cast<float>(-product / length / reach) : 0.0f;
}

/* Scores that need no tensor, a token a thread; nonfinite=mask heeds the caller's scores alone. */
__device__ void score_token(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t key)
{
    const bool inside = key < block.n_valid;
    float score = 0;
    if (block.source == DKV_SOURCE_HASH)
        score = static_cast<float>(dkv_random_bits(block.hash, unit.head, key)) * 0x1p-24f;
    else if (block.source == DKV_SOURCE_POSITION)
        score = static_cast<float>(key + 1);
    else if (inside)
        score = unit.given[key];
    const bool masked = inside && !dkv_cu_finite(score);
    const unsigned word = __ballot_sync(~0u, masked);
    if (unit.mask && threadIdx.x % 32 == 0 && inside)
        unit.mask[key / 32] = word;
    if (inside)
        unit.scores[key] = masked ? 0.0f : score;
}

__global__ void __launch_bounds__(threads) score(work_list work)
{
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const uint32_t first = (blockIdx.x - work.first_item[index]) * item_tokens;
    if (first == 0 && threadIdx.x == 0)
        *unit.exponent = 0;
    if (block.source != DKV_SOURCE_KEY_NORM && block.source != DKV_SOURCE_KEY_ANGLE) {
        if (threadIdx.x < item_tokens)
            score_token(block, unit, first + threadIdx.x);
        return;
    }
    const uint32_t end = min(block.n_valid, first + item_tokens);
    for (uint32_t key = first + threadIdx.x / 32; key < end; key += warps) {
        const float x = score_key(block, unit, key);
        if (threadIdx.x % 32 == 0)
            unit.scores[key] = x;
    }
}

/* ---- launching ---- */

enum kernel_index { kernel_anchor, kernel_settle, kernel_score, n_kernels };

uint32_t items_of(const dkv_cu_block &block, int kernel)
{
    const bool angle = block.source == DKV_SOURCE_KEY_ANGLE;
    switch (kernel) {
    case kernel_anchor: return angle ? ceil_div(block.n_valid, range_keys(block.n_valid)) : 0;
    case kernel_settle: return angle;
    default: return ceil_div(block.n_valid, item_tokens);
    }
}

cudaError_t prepare(const dkv_cu_device *)
{
    const void *kernels[] = {reinterpret_cast<const void *>(anchor),
                             reinterpret_cast<const void *>(settle),
                             reinterpret_cast<const void *>(score)};
    for (const void *kernel : kernels) {
        cudaFuncAttributes attributes; /* loads the kernel now, not at its first launch */
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

bool takes(const dkv_cu_device *, const dkv_cu_block *block)
{
    return block->form == DKV_CU_FORM_UNSEEN;
}

size_t unit_bytes(const dkv_cu_block *block)
{
    const size_t ranges = items_of(*block, kernel_anchor);
    return sizeof(double) * ((ranges + 1) * block->head_dim + 1);
}

size_t extra_bytes(const dkv_cu_device *, const dkv_cu_wave *, uint32_t, uint32_t n)
{
    return sizeof(uint32_t) * (n + 1) * n_kernels;
}

void fill(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n, void *extra)
{
    uint32_t *at = static_cast<uint32_t *>(extra);
    for (int kernel = 0; kernel < n_kernels; kernel++) {
        uint32_t items = 0;
        for (uint32_t u = 0; u < n; u++) {
            *at++ = items;
            items += items_of(wave->blocks_host[wave->units_host[first + u].block], kernel);
        }
        *at++ = items;
    }
}

cudaError_t launch(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const uint32_t *counts = static_cast<const uint32_t *>(extra_host);
    const uint32_t *lists = static_cast<const uint32_t *>(extra_device);
    void (*const kernels[n_kernels])(work_list) = {anchor, settle, score};
    for (int kernel = 0; kernel < n_kernels; kernel++) {
        const work_list work = {wave->blocks, wave->units + first, lists + kernel * (n + 1), n};
        const uint32_t items = counts[kernel * (n + 1) + n];
        if (items > 0)
            kernels[kernel]<<<items, threads, 0, stream>>>(work);
    }
    return cudaGetLastError();
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_keys = {
    "keys", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch, true};
