/* The scorer of attention alone: rules that sum p over rows, or take its maximum, of bf16 or fp16
 * queries and keys on tensor cores. Two reads of the keys are all it costs.
 *
 *   weigh    item = (unit, key range, 32 rows). Each row's largest logit, and the sum of exp2 of
 * the differences to it. settle   item = (unit, 256 rows). The ranges joined in their order, sink
 * logits with them. score    item = (unit, 256 keys). Logits again, p, reduced over all rows.
 *
 * Keys [n][D], D up to 128. A warp takes 32 keys: keys are the rows of its products (16 x 8 x 16),
 * query rows the columns. The order in which dimensions are added up is free, so a lane's four
 * words of a product are one load of 16 bytes, straight from where the keys lie; queries wait in
 * shared memory in the same order. Logits are in units of log2. Nothing here is left out of sums,
 * since p itself needs no 1 - p. 256 threads.
 *
 * A logit that is no number sets DKV_CU_RETRY: the general scorer then finds the place.
 */
#include "kernels/cuda/rows.cuh"

namespace
{

constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr uint32_t tile_keys = 32; /* of a warp */
constexpr uint32_t item_keys = tile_keys * warps;
constexpr uint32_t chunk_rows = 32;
constexpr int n_columns = chunk_rows / 8; /* products of 8 rows */
constexpr uint32_t max_ranges = 64;
constexpr uint32_t min_range_keys = 512;
constexpr size_t unit_partial_bytes = 4u << 20;
constexpr float log2e = 1.4426950408889634f;

/* What weigh leaves per (range, row). */
struct partial {
    float top; /* largest logit, -inf if the row sees no key of this range */
    float sum; /* of exp2(logit - top) */
};

/* What settle leaves per row: p = exp2(logit - top) * inverse. */
struct row_result {
    float top;
    float inverse; /* 0: the row sees nothing */
    float weight;  /* in the reduction over rows */
};

/* Where things are in unit.work. */
struct layout {
    uint32_t rows;
    uint32_t n_ranges;
    uint32_t range_keys;
    size_t results; /* row_result [rows] */
    size_t bytes;
};

__host__ __device__ inline layout layout_of(const dkv_cu_block &block)
{
    layout l;
    l.rows = block.group * block.window;
    size_t ranges = unit_partial_bytes / (l.rows * sizeof(partial));
    ranges = ranges > max_ranges ? max_ranges : ranges < 4 ? 4 : ranges;
    size_t keys = (block.n_valid + ranges - 1) / ranges;
    keys = keys < min_range_keys ? min_range_keys : keys;
    l.range_keys = static_cast<uint32_t>((keys + item_keys - 1) / item_keys * item_keys);
    l.n_ranges = ceil_div(block.n_valid, l.range_keys);
    l.results = static_cast<size_t>(l.n_ranges) * l.rows * sizeof(partial);
    l.bytes = l.results + l.rows * sizeof(row_result);
    return l;
}

/* ---- products ---- */

/* c += a b for 16 keys, 8 query rows and 16 dimensions. */
template <bool bf16>
__device__ inline void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                unsigned b0, unsigned b1)
{
    if (bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* A lane's part of a warp's 32 keys: keys lane / 4 + 8 i, of every 32 dimensions the 8 from
 * lane % 4 * 8 on. */
template <int blocks> struct key_tile {
    uint4 words[4][blocks];
    bool there[4]; /* not masked, not behind the end or a bad table entry */
};

template <int blocks>
__device__ key_tile<blocks> load_keys(const dkv_cu_block &block, const dkv_cu_unit &unit,
                                      uint32_t first_key, uint32_t end_key)
{
    key_tile<blocks> tile;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t key = first_key + lane / 4 + 8 * i;
        const unsigned char *row = key < end_key && !dkv_cu_masked(unit, key)
                                       ? dkv_cu_row(block.k, unit.k, block.valid_from + key,
                                                    &unit.report->bad_k_entry)
                                       : nullptr;
        tile.there[i] = row != nullptr;
#pragma unroll
        for (int b = 0; b < blocks; b++) {
            const uint32_t dim = b * 32 + lane % 4 * 8;
            tile.words[i][b] = row && dim < block.head_dim
                                   ? *reinterpret_cast<const uint4 *>(row + dim * 2)
                                   : uint4{0, 0, 0, 0};
        }
    }
    return tile;
}

/* Queries of rows first_row.. in the order of products: [8 rows][32 dimensions][lane]. */
template <int blocks>
__device__ void load_queries(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t first_row,
                             uint32_t rows, uint4 *queries)
{
    for (int i = threadIdx.x; i < n_columns * blocks * 32; i += threads) {
        const uint32_t lane = i % 32;
        const uint32_t row = first_row + i / (32 * blocks) * 8 + lane / 4;
        const uint32_t dim = i / 32 % blocks * 32 + lane % 4 * 8;
        uint4 words = {0, 0, 0, 0};
        if (row < rows && dim < block.head_dim)
            words = *reinterpret_cast<const uint4 *>(
                unit.q + row / block.window * block.q_head_stride +
                row % block.window * block.q_row_stride + dim * 2);
        queries[i] = words;
    }
}

/* Products of the warp's keys and 8 rows: out[i][e] is of key lane / 4 + 8 i and row
 * lane % 4 * 2 + e. Both passes call this, so that they see the same logits. */
template <bool bf16, int blocks>
__device__ void products(const key_tile<blocks> &tile, const uint4 *queries, float (&out)[4][2])
{
    float c[2][4] = {};
#pragma unroll
    for (int b = 0; b < blocks; b++) {
        const uint4 q = queries[b * 32 + threadIdx.x % 32];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint4 &low = tile.words[2 * m][b];
            const uint4 &high = tile.words[2 * m + 1][b];
            multiply<bf16>(c[m], low.x, high.x, low.y, high.y, q.x, q.y);
            multiply<bf16>(c[m], low.z, high.z, low.w, high.w, q.z, q.w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        for (int e = 0; e < 2; e++)
            out[i][e] = c[i / 2][i % 2 * 2 + e];
}

/* A logit in units of log2. */
__device__ inline float logit(const dkv_cu_block &block, float product)
{
    if (block.softcap > 0)
        return block.softcap * tanhf(product * block.scale / block.softcap) * log2e;
    return __fmul_rn(product, block.scale * log2e);
}

/* True if every row sees all of a warp's 32 keys. */
__device__ inline bool all_see(const dkv_cu_block &block, uint32_t first_key)
{
    return first_key + tile_keys <= block.n_valid - block.window + 1;
}

/* ---- weigh ---- */

__device__ inline void join(partial &a, const partial &b)
{
    const float top = fmaxf(a.top, b.top);
    if (top == -INFINITY)
        return;
    a.sum = a.sum * exp2f(a.top - top) + b.sum * exp2f(b.top - top);
    a.top = top;
}

template <bool bf16, int blocks> __global__ void __launch_bounds__(threads, 2) weigh(work_list work)
{
    __shared__ uint4 queries[n_columns * blocks * 32];
    __shared__ partial of_warp[warps][chunk_rows];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t n_chunks = ceil_div(l.rows, chunk_rows);
    const uint32_t item = blockIdx.x - work.first_item[index];
    const uint32_t range = item / n_chunks;
    const uint32_t first_row = item % n_chunks * chunk_rows;
    const uint32_t end_key = min(block.n_valid, (range + 1) * l.range_keys);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    partial mine[n_columns][2];
    bool odd = false;
    for (int column = 0; column < n_columns; column++)
        mine[column][0] = mine[column][1] = {-INFINITY, 0.0f};
    load_queries<blocks>(block, unit, first_row, l.rows, queries);
    __syncthreads();

    for (uint32_t first_key = range * l.range_keys + warp * tile_keys; first_key < end_key;
         first_key += item_keys) {
        const key_tile<blocks> tile = load_keys<blocks>(block, unit, first_key, end_key);
        const bool plain = all_see(block, first_key);
#pragma unroll
        for (int column = 0; column < n_columns; column++) {
            float z[4][2];
            products<bf16, blocks>(tile, queries + column * blocks * 32, z);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const uint32_t row = first_row + column * 8 + lane % 4 * 2 + e;
                partial &state = mine[column][e];
                float top = state.top;
                for (int i = 0; i < 4; i++) {
                    const uint32_t key = first_key + lane / 4 + 8 * i;
                    z[i][e] = logit(block, z[i][e]);
                    if (!tile.there[i] || row >= l.rows || (!plain && !sees(block, row, key)))
                        z[i][e] = -INFINITY;
                    else
                        odd = odd || !dkv_cu_finite(z[i][e]);
                    top = fmaxf(top, z[i][e]);
                }
                if (top == -INFINITY)
                    continue;
                float sum = state.sum * exp2f(state.top - top);
                for (int i = 0; i < 4; i++)
                    sum += exp2f(z[i][e] - top);
                state = {top, sum};
            }
        }
    }
    if (odd)
        atomicOr(&unit.report->flags, DKV_CU_RETRY);

        /* Lanes with the same rows, then warps. */
#pragma unroll
    for (int column = 0; column < n_columns; column++)
        for (int e = 0; e < 2; e++) {
            partial &state = mine[column][e];
            for (int step = 4; step < 32; step *= 2) {
                const partial other = {__shfl_xor_sync(~0u, state.top, step),
                                       __shfl_xor_sync(~0u, state.sum, step)};
                if (lane & step) { /* in one order, so that both have the same bits */
                    partial lower = other;
                    join(lower, state);
                    state = lower;
                } else {
                    join(state, other);
                }
            }
            if (lane < 4)
                of_warp[warp][column * 8 + lane * 2 + e] = state;
        }
    __syncthreads();
    if (threadIdx.x >= chunk_rows || first_row + threadIdx.x >= l.rows)
        return;
    partial state = of_warp[0][threadIdx.x];
    for (int w = 1; w < warps; w++)
        join(state, of_warp[w][threadIdx.x]);
    reinterpret_cast<partial *>(
        unit.work)[static_cast<size_t>(range) * l.rows + first_row + threadIdx.x] = state;
}

/* ---- settle ---- */

__global__ void __launch_bounds__(threads) settle(work_list work)
{
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t row = (blockIdx.x - work.first_item[index]) * threads + threadIdx.x;
    const partial *partials = reinterpret_cast<const partial *>(unit.work);
    if (row == 0)
        *unit.exponent = 0;
    if (row >= l.rows)
        return;
    partial state = partials[row];
    for (uint32_t range = 1; range < l.n_ranges; range++)
        join(state, partials[static_cast<size_t>(range) * l.rows + row]);
    const bool seeing = state.top != -INFINITY;
    if (seeing && unit.sink_logits) {
        const float sink = unit.sink_logits[row / block.window] * log2e;
        join(state, {sink, 1.0f});
    }
    reinterpret_cast<row_result *>(unit.work + l.results)[row] = {
        seeing ? state.top : 0.0f, seeing ? 1.0f / state.sum : 0.0f,
        row_weight(block, row % block.window)};
}

/* ---- score ---- */

/* Adds the terms of 32 rows to the lane's 4 keys. */
template <bool bf16, int blocks, bool largest>
__device__ void add_rows(const dkv_cu_block &block, const key_tile<blocks> &tile,
                         const uint4 *queries, const row_result *results, uint32_t first_row,
                         uint32_t first_key, float (&sums)[4])
{
    const uint32_t lane = threadIdx.x % 32;
    const bool plain = all_see(block, first_key);
#pragma unroll
    for (int column = 0; column < n_columns; column++) {
        float z[4][2];
        products<bf16, blocks>(tile, queries + column * blocks * 32, z);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t slot = column * 8 + lane % 4 * 2 + e;
            const row_result result = results[slot];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t key = first_key + lane / 4 + 8 * i;
                float p = exp2f(logit(block, z[i][e]) - result.top) * result.inverse;
                if (block.p_round)
                    p = dkv_cu_round(p, block.q_dtype);
                if (!tile.there[i] || result.inverse == 0 ||
                    (!plain && !sees(block, first_row + slot, key)))
                    p = 0;
                sums[i] = largest ? fmaxf(sums[i], p) : fmaf(p, result.weight, sums[i]);
            }
        }
    }
}

template <bool bf16, int blocks, bool largest>
__global__ void __launch_bounds__(threads, 2) score(work_list work)
{
    __shared__ uint4 queries[n_columns * blocks * 32];
    __shared__ row_result results[chunk_rows];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t first_key = (blockIdx.x - work.first_item[index]) * item_keys +
                               threadIdx.x / 32 * tile_keys;
    const row_result *all = reinterpret_cast<const row_result *>(unit.work + l.results);
    const key_tile<blocks> tile = load_keys<blocks>(block, unit, first_key, block.n_valid);
    float sums[4] = {};
    for (uint32_t first_row = 0; first_row < l.rows; first_row += chunk_rows) {
        __syncthreads();
        load_queries<blocks>(block, unit, first_row, l.rows, queries);
        if (threadIdx.x < chunk_rows)
            results[threadIdx.x] = first_row + threadIdx.x < l.rows ? all[first_row + threadIdx.x]
                                                                    : row_result{0, 0, 0};
        __syncthreads();
        add_rows<bf16, blocks, largest>(block, tile, queries, results, first_row, first_key, sums);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        for (int step = 1; step < 4; step *= 2) {
            const float other = __shfl_xor_sync(~0u, sums[i], step);
            sums[i] = largest ? fmaxf(sums[i], other) : sums[i] + other;
        }
        if (threadIdx.x % 4 == 0)
            store_score(block, unit, first_key + threadIdx.x % 32 / 4 + 8 * i, sums[i]);
    }
}

/* ---- launching ---- */

typedef void (*kernel_fn)(work_list);

/* One compiled pair of passes. */
struct variant {
    uint32_t dtype;
    uint32_t head_dim; /* at most */
    bool largest;
    kernel_fn weigh;
    kernel_fn score;
};

template <bool bf16, int blocks, bool largest> constexpr variant row_of()
{
    return {bf16 ? static_cast<uint32_t>(DKV_BF16) : static_cast<uint32_t>(DKV_FP16), 32 * blocks,
            largest, weigh<bf16, blocks>, score<bf16, blocks, largest>};
}

const variant variants[] = {
    row_of<true, 2, false>(),  row_of<true, 2, true>(),   row_of<true, 4, false>(),
    row_of<true, 4, true>(),   row_of<false, 2, false>(), row_of<false, 2, true>(),
    row_of<false, 4, false>(), row_of<false, 4, true>(),
};
constexpr uint32_t n_variants = sizeof(variants) / sizeof(variants[0]);

/* n_variants: none. */
uint32_t variant_of(const dkv_cu_block &block)
{
    const bool largest = block.reduce == DKV_REDUCE_MAX;
    uint32_t v = 0;
    while (v < n_variants &&
           !(variants[v].dtype == block.k.dtype && block.head_dim <= variants[v].head_dim &&
             variants[v].largest == largest))
        v++;
    return v;
}

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

enum kernel_index { kernel_weigh, kernel_settle, kernel_score, n_kernels };

uint32_t items_of(const dkv_cu_block &block, int kernel)
{
    const layout l = layout_of(block);
    switch (kernel) {
    case kernel_weigh: return l.n_ranges * ceil_div(l.rows, chunk_rows);
    case kernel_settle: return ceil_div(l.rows, threads);
    default: return ceil_div(block.n_valid, item_keys);
    }
}

cudaError_t prepare(const dkv_cu_device *)
{
    cudaFuncAttributes attributes; /* loads kernels now, not at their first launch */
    cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(settle));
    for (const variant &v : variants) {
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(v.weigh));
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(v.score));
    }
    return error;
}

/* A maximum over rows is one over query heads too, and a sum is one; what is made by query head
 * first goes to the general scorer. */
bool takes(const dkv_cu_device *, const dkv_cu_block *block)
{
    const bool flat = (block->reduce == DKV_REDUCE_MAX) == (block->gqa == DKV_GQA_MAX);
    return block->form == DKV_CU_FORM_P && flat && !block->variance && !block->spread &&
           block->q_dtype == block->k.dtype && block->q_align >= 16 && block->k.align >= 16 &&
           variant_of(*block) < n_variants;
}

size_t unit_bytes(const dkv_cu_block *block)
{
    return layout_of(*block).bytes;
}

/* For each variant, for each kernel: the first item of every unit, and how many there are. */
size_t extra_bytes(const dkv_cu_device *, const dkv_cu_wave *, uint32_t, uint32_t n)
{
    return sizeof(uint32_t) * (n + 1) * n_kernels * n_variants;
}

void fill(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n, void *extra)
{
    uint32_t *at = static_cast<uint32_t *>(extra);
    for (uint32_t v = 0; v < n_variants; v++)
        for (int kernel = 0; kernel < n_kernels; kernel++) {
            uint32_t items = 0;
            for (uint32_t u = 0; u < n; u++) {
                const dkv_cu_block &block = block_of(wave, first + u);
                *at++ = items;
                items += variant_of(block) == v ? items_of(block, kernel) : 0;
            }
            *at++ = items;
        }
}

cudaError_t launch(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const uint32_t *counts = static_cast<const uint32_t *>(extra_host);
    const uint32_t *lists = static_cast<const uint32_t *>(extra_device);
    for (const variant &v : variants) {
        const kernel_fn kernels[n_kernels] = {v.weigh, settle, v.score};
        for (int kernel = 0; kernel < n_kernels; kernel++) {
            const work_list work = {wave->blocks, wave->units + first, lists, n};
            const uint32_t items = counts[n];
            if (items > 0)
                kernels[kernel]<<<items, threads, 0, stream>>>(work);
            counts += n + 1;
            lists += n + 1;
        }
    }
    return cudaGetLastError();
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_attention = {
    "attention", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch, true};
