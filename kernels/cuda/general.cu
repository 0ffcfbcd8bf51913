/* The general scorer: every shape, type, view and profile, in plain float32 arithmetic.
 *
 * It answers what no faster scorer takes and is the judge of those, so it is written to be read.
 * Keys [n][D], values [n][Dv], rows R = g * w of a unit; three kernels, each launched once a wave:
 *
 *   accumulate   item = (unit, key range, 32 rows). Online softmax over the range's keys, 64 at a
 *                time: logits, then sum of exp(z) v over all keys but the row's largest so far.
 *   merge        item = (unit, row). Joins the ranges in their order: where the row's largest
 *                logit is, the output without that key (b), the output (a).
 *   score        item = (unit, 64 keys). Logits again, and p^2 |b_j - v_j|^2 added up over rows.
 *
 * The key that is left out of the sums is what makes the answer exact at attention sinks: with p
 * near 1 neither 1 - p nor a - v survives float32, but p, b and v do (docs/numerics.md).
 * When a later key turns out larger, the one left out so far joins the sums, its value read again.
 *
 * With eps > 0 and p_round the output is made of rounded probabilities, which need the softmax's
 * sum first: such blocks run accumulate and merge a second time.
 *
 * Key ranges depend on the block alone and are joined in order, so the split of the work over the
 * chip never shows in the bits. 256 threads: 2 rows x 4 keys of logits each, or (warp) 4 rows x
 * (lane) 2 columns of every 64 values.
 */
#include "kernels/cuda/general_softmax.cuh"

namespace
{

template <int chunks>
__global__ void __launch_bounds__(threads, 2) accumulate(work_list work, bool rounded)
{
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float warp_largest[threads / 32];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    if (rounded && !rounds_output(block))
        return;
    const layout l = layout_of(block);
    const uint32_t n_chunks = ceil_div(l.rows, chunk_rows);
    const uint32_t item = blockIdx.x - work.first_item[index];
    const uint32_t range = item / n_chunks;
    const uint32_t first_row = item % n_chunks * chunk_rows;
    const uint32_t range_end = min(block.n_valid, (range + 1) * l.range_keys);
    const shared_tiles s = carve(memory, block.head_dim);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const dkv_cu_unit *report_to = rounded ? nullptr : &unit;
    const row_result *results = reinterpret_cast<row_result *>(unit.work + l.results);

    partial state[4];
    float sums[4][2 * chunks] = {};
    float largest = 0;
    for (int r = 0; r < 4; r++)
        state[r] = {-INFINITY, -1, -INFINITY, 0.0f};
    load_query(block, unit, s, first_row, l.rows);
    load_center(block, unit, s.center);

    for (uint32_t first_key = range * l.range_keys; first_key < range_end; first_key += tile_keys) {
        __syncthreads();
        find_rows(block, unit, s, first_key, range_end);
        float z[2][4];
        products(block, unit, s, report_to, first_key, z);
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++) {
                const int row = threadIdx.x / 16 + 16 * r;
                const int slot = threadIdx.x % 16 + 16 * k;
                const bool visible = s.key_rows[slot] &&
                                     sees(block, first_row + row, first_key + slot);
                const float logit_here = logit(block, z[r][k]);
                if (visible && !dkv_cu_finite(logit_here) && first_row + row < l.rows)
                    atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
                s.terms[row * tile_stride + slot] = visible ? logit_here : -INFINITY;
            }
        __syncthreads();

#pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint32_t row = first_row + warp * 4 + r;
            float *terms = s.terms + (warp * 4 + r) * tile_stride;
            const rescale change = !rounded
                                       ? absorb(state[r], terms, lane, static_cast<int>(first_key))
                                   : row < l.rows
                                       ? absorb_rounded(results[row], block.q_dtype, terms, lane,
                                                        static_cast<int>(first_key))
                                       : rescale{1.0f, 0.0f, -1};
#pragma unroll
            for (int c = 0; c < chunks; c++) {
                sums[r][2 * c] *= change.keep;
                sums[r][2 * c + 1] *= change.keep;
            }
            if (change.join_weight > 0) /* the whole warp agrees */
                join_value(block, unit, change, s.center, lane, sums[r]);
        }

#pragma unroll
        for (int c = 0; c < chunks; c++) {
            if (c * chunk_dims >= block.v_dim)
                break;
            __syncthreads();
            largest = fmaxf(largest, load_tile(block.v, s.value_rows, s, unit.v_scale, s.center,
                                               c * chunk_dims, block.v_dim, report_to, 2,
                                               block.valid_from + first_key));
            __syncthreads();
#pragma unroll 2
            for (int slot = 0; slot < tile_keys; slot += 4) {
                float2 v[4];
                for (int i = 0; i < 4; i++)
                    v[i] = *reinterpret_cast<const float2 *>(s.tile + (slot + i) * tile_stride +
                                                             lane * 2);
                for (int r = 0; r < 4; r++) {
                    const float4 p = *reinterpret_cast<const float4 *>(
                        s.terms + (warp * 4 + r) * tile_stride + slot);
                    const float weights[4] = {p.x, p.y, p.z, p.w};
                    for (int i = 0; i < 4; i++) {
                        sums[r][2 * c] = fmaf(weights[i], v[i].x, sums[r][2 * c]);
                        sums[r][2 * c + 1] = fmaf(weights[i], v[i].y, sums[r][2 * c + 1]);
                    }
                }
            }
        }
    }

    float *partials = reinterpret_cast<float *>(unit.work) +
                      static_cast<size_t>(range) * l.rows * l.partial_floats;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint32_t row = first_row + warp * 4 + r;
        if (row >= l.rows)
            continue;
        float *to = partials + static_cast<size_t>(row) * l.partial_floats;
        if (lane == 0)
            *reinterpret_cast<partial *>(to) = state[r];
#pragma unroll
        for (int c = 0; c < chunks; c++)
            if (const uint32_t dim = c * chunk_dims + lane * 2; dim < block.v_dim)
                *reinterpret_cast<float2 *>(to + sizeof(partial) / sizeof(float) +
                                            dim) = make_float2(sums[r][2 * c], sums[r][2 * c + 1]);
    }
    for (int step = 16; step; step >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (lane == 0)
        warp_largest[warp] = largest;
    __syncthreads();
    if (threadIdx.x == 0 && first_row == 0 && !rounded) {
        for (int w = 1; w < threads / 32; w++)
            largest = fmaxf(largest, warp_largest[w]);
        reinterpret_cast<float *>(unit.work + l.value_max)[range] = largest;
    }
}

/* The exponent e of the range factor: 40, or less where |v| or 1/eps would let the sum of R terms
 * (p 2^e)^2 |b - v|^2 leave float32. */
__device__ int factor_exponent(const dkv_cu_block &block, const layout &l, float value_max)
{
    const float octaves = 2 * log2f(fmaxf(value_max, 1e-18f)) +
                          log2f(4.0f * static_cast<float>(block.v_dim * l.rows)) -
                          (block.eps > 0 ? 2 * fminf(log2f(block.eps), 0.0f) : 0.0f);
    return min(DKV_CU_EXPONENT, static_cast<int>(floorf((126.0f - octaves) / 2)));
}

constexpr int merge_threads = 128;

__device__ float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < merge_threads / 32; w++)
        x += shared[w];
    return x;
}

/* The term of the row's largest key: p is known to the last bit of 1 - p only here. */
__device__ float top_term(const dkv_cu_block &block, float p, float rest, float distance,
                          float factor)
{
    const float front = block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    if (block.eps == 0) {
        const float x = front * factor;
        return x * x * distance;
    }
    const float x = p / (rest + block.eps) * rest * factor;
    return x * x * distance;
}

__global__ void __launch_bounds__(merge_threads) merge(work_list work)
{
    __shared__ partial ranges[max_ranges];
    __shared__ float shared[merge_threads / 32];
    __shared__ float center[DKV_HEAD_DIM_MAX];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t row = blockIdx.x - work.first_item[index];
    const float *partials = reinterpret_cast<float *>(unit.work) +
                            static_cast<size_t>(row) * l.partial_floats;
    const size_t range_stride = static_cast<size_t>(l.rows) * l.partial_floats;
    const float *range_values = reinterpret_cast<float *>(unit.work + l.value_max);
    float *output = reinterpret_cast<float *>(unit.work + l.output) +
                    static_cast<size_t>(row) * block.v_dim;

    if (threadIdx.x < l.n_ranges)
        ranges[threadIdx.x] = *reinterpret_cast<const partial *>(partials +
                                                                 threadIdx.x * range_stride);
    load_center(block, unit, center);
    __syncthreads();

    uint32_t best = 0;
    float value_max = 0;
    for (uint32_t i = 0; i < l.n_ranges; i++) {
        if (ranges[i].top > ranges[best].top)
            best = i;
        value_max = fmaxf(value_max, range_values[i]);
    }
    float second = -INFINITY;
    for (uint32_t i = 0; i < l.n_ranges; i++)
        second = fmaxf(second, fmaxf(ranges[i].second, i == best ? -INFINITY : ranges[i].top));
    const bool alone = second == -INFINITY; /* one visible key, or none */
    const float sink = unit.sink_logits ? unit.sink_logits[row / block.window] : -INFINITY;
    second = fmaxf(second, sink);

    const float top = ranges[best].top;
    const int top_key = ranges[best].top_key;
    float sum = weight(sink, second);
    for (uint32_t i = 0; i < l.n_ranges; i++) {
        sum = fmaf(weight(ranges[i].second, second), ranges[i].sum, sum);
        sum += i == best ? 0.0f : weight(ranges[i].top, second);
    }
    const float others = alone ? 0.0f : sum * expf(second - top); /* relative to the top key */
    const float p = 1.0f / (1.0f + others);
    const float rest = others > 1e30f ? 1.0f : others / (1.0f + others);

    float distance = 0;
    for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads) {
        float b = -weight(sink, second) * center[dim]; /* the sink's value is 0 */
        for (uint32_t i = 0; i < l.n_ranges; i++) {
            const float *sums = partials + i * range_stride + sizeof(partial) / sizeof(float);
            b = fmaf(weight(ranges[i].second, second), sums[dim], b);
            if (i != best && ranges[i].top_key >= 0)
                b = fmaf(weight(ranges[i].top, second),
                         value_at(block, unit, center, ranges[i].top_key, dim), b);
        }
        b = alone ? 0.0f : b / sum;
        const float v = top_key >= 0 ? value_at(block, unit, center, top_key, dim) : 0.0f;
        output[dim] = fmaf(p, v, rest * b);
        distance = fmaf(b - v, b - v, distance);
    }
    distance = block_sum(distance, shared);

    if (threadIdx.x == 0) {
        const int exponent = factor_exponent(block, l, value_max);
        row_result result = {0.0f, 0.0f, -1, 0.0f};
        if (!alone) {
            result = {top, p, top_key, top_term(block, p, rest, distance, ldexpf(1.0f, exponent))};
        }
        reinterpret_cast<row_result *>(unit.work + l.results)[row] = result;
        if (row == 0)
            *unit.exponent = exponent;
        if (!(value_max <= 1e18f) || !dkv_cu_finite(distance))
            atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
    }
}

/* After the second accumulate: the output of rounded probabilities, and the term of the row's
 * largest key: a - v = (output without it) - (1 - p) v, where a itself may be all rounding error.
 */
__global__ void __launch_bounds__(merge_threads) merge_rounded(work_list work)
{
    __shared__ float shared[merge_threads / 32];
    __shared__ float center[DKV_HEAD_DIM_MAX]; /* all 0 here */
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    if (!rounds_output(block))
        return;
    const layout l = layout_of(block);
    const uint32_t row = blockIdx.x - work.first_item[index];
    const float *sums = reinterpret_cast<float *>(unit.work) +
                        static_cast<size_t>(row) * l.partial_floats +
                        sizeof(partial) / sizeof(float);
    float *output = reinterpret_cast<float *>(unit.work + l.output) +
                    static_cast<size_t>(row) * block.v_dim;
    row_result &result = reinterpret_cast<row_result *>(unit.work + l.results)[row];
    const float p = dkv_cu_round(result.p_top, block.q_dtype);
    load_center(block, unit, center);
    __syncthreads();

    float distance = 0;
    for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads) {
        float rest = 0;
        for (uint32_t i = 0; i < l.n_ranges; i++)
            rest += sums[static_cast<size_t>(i) * l.rows * l.partial_floats + dim];
        const float v = result.top_key >= 0 ? value_at(block, unit, center, result.top_key, dim)
                                            : 0.0f;
        const float difference = fmaf(p - 1.0f, v, rest);
        output[dim] = fmaf(p, v, rest);
        distance = fmaf(difference, difference, distance);
    }
    distance = block_sum(distance, shared);
    if (threadIdx.x == 0 && result.p_top > 0) {
        const float x = p / (1.0f - p + block.eps) * ldexpf(1.0f, *unit.exponent);
        result.top_term = x * x * distance;
    }
}

/* p / (1 - p), as the block's profile wants it, for every key but the row's largest. */
__device__ float odds(const dkv_cu_block &block, float p)
{
    const float front = block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    return block.eps == 0 ? front / (1.0f - p) : front / (1.0f - front + block.eps);
}

/* Sums of rows, per key: over t inside a query head, then over heads as `gqa` says. */
struct gatherer {
    float head;
    float total;
};

__device__ void gather(gatherer &g, const dkv_cu_block &block, uint32_t row, float term)
{
    g.head += term;
    if ((row + 1) % block.window == 0) {
        g.total = block.gqa == DKV_GQA_MAX ? fmaxf(g.total, g.head) : g.total + g.head;
        g.head = 0;
    }
}

/* |a - v|^2 for the thread's 2 rows x 4 keys. */
__device__ void distances(const dkv_cu_block &block, const dkv_cu_unit &unit, const layout &l,
                          const shared_tiles &s, uint32_t first_row, float (&d2)[2][4])
{
    const float *output = reinterpret_cast<const float *>(unit.work + l.output);
    const int x = threadIdx.x % 16;
    const int y = threadIdx.x / 16;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            d2[r][k] = 0;
    for (uint32_t dim = 0; dim < block.v_dim; dim += chunk_dims) {
        __syncthreads();
        load_tile(block.v, s.value_rows, s, unit.v_scale, s.center, dim, block.v_dim, nullptr, 2,
                  0);
        for (int i = threadIdx.x; i < chunk_rows * chunk_dims; i += threads) {
            const uint32_t row = first_row + i / chunk_dims;
            const uint32_t at = dim + i % chunk_dims;
            s.terms[i / chunk_dims * tile_stride + i % chunk_dims] =
                row < l.rows && at < block.v_dim
                    ? output[static_cast<size_t>(row) * block.v_dim + at]
                    : 0.0f;
        }
        __syncthreads();
        float sum[2][4][2] = {};
#pragma unroll 4
        for (int d = 0; d < chunk_dims; d += 4) {
            float4 a[2];
            for (int r = 0; r < 2; r++)
                a[r] = *reinterpret_cast<const float4 *>(s.terms + (y + 16 * r) * tile_stride + d);
            for (int k = 0; k < 4; k++) {
                const float4 v = *reinterpret_cast<const float4 *>(s.tile +
                                                                   (x + 16 * k) * tile_stride + d);
                for (int r = 0; r < 2; r++) {
                    sum[r][k][0] = fmaf(a[r].x - v.x, a[r].x - v.x, sum[r][k][0]);
                    sum[r][k][1] = fmaf(a[r].y - v.y, a[r].y - v.y, sum[r][k][1]);
                    sum[r][k][0] = fmaf(a[r].z - v.z, a[r].z - v.z, sum[r][k][0]);
                    sum[r][k][1] = fmaf(a[r].w - v.w, a[r].w - v.w, sum[r][k][1]);
                }
            }
        }
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++)
                d2[r][k] += sum[r][k][0] + sum[r][k][1];
    }
}

__global__ void __launch_bounds__(threads, 2) score(work_list work)
{
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t first_key = (blockIdx.x - work.first_item[index]) * tile_keys;
    const shared_tiles s = carve(memory, block.head_dim);
    const row_result *results = reinterpret_cast<const row_result *>(unit.work + l.results);
    const float factor = ldexpf(1.0f, *unit.exponent);
    gatherer sum = {0.0f, 0.0f};

    find_rows(block, unit, s, first_key, block.n_valid);
    load_center(block, unit, s.center);
    for (uint32_t first_row = 0; first_row < l.rows; first_row += chunk_rows) {
        __syncthreads();
        load_query(block, unit, s, first_row, l.rows);
        float z[2][4];
        float d2[2][4];
        products(block, unit, s, nullptr, first_key, z);
        distances(block, unit, l, s, first_row, d2);
        __syncthreads(); /* s.terms changes from outputs to terms */
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int slot_row = threadIdx.x / 16 + 16 * r;
            const uint32_t row = first_row + slot_row;
            const row_result result = row < l.rows ? results[row] : row_result{0, 0, -1, 0};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int slot = threadIdx.x % 16 + 16 * k;
                const uint32_t key = first_key + slot;
                float term = 0;
                if (s.key_rows[slot] && result.p_top > 0 && sees(block, row, key)) {
                    const float x = odds(block, expf(logit_above(block, z[r][k], result.top)) *
                                                    result.p_top) *
                                    factor;
                    term = static_cast<int>(key) == result.top_key ? result.top_term
                                                                   : x * x * d2[r][k];
                }
                s.terms[slot_row * tile_stride + slot] = term;
            }
        }
        __syncthreads();
        if (threadIdx.x < tile_keys)
            for (uint32_t r = 0; r < chunk_rows && first_row + r < l.rows; r++)
                gather(sum, block, first_row + r, s.terms[r * tile_stride + threadIdx.x]);
    }
    const uint32_t key = first_key + threadIdx.x;
    if (threadIdx.x < tile_keys && key < block.n_valid) {
        const float total = block.gqa == DKV_GQA_MEAN ? sum.total / static_cast<float>(block.group)
                                                      : sum.total;
        if (!dkv_cu_finite(total))
            atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
        unit.scores[key] = total;
    }
}

/* ---- launching ---- */

enum kernel_index { kernel_accumulate, kernel_merge, kernel_score, n_kernels };

uint32_t items_of(const dkv_cu_block &block, int kernel)
{
    const layout l = layout_of(block);
    switch (kernel) {
    case kernel_accumulate: return l.n_ranges * ceil_div(l.rows, chunk_rows);
    case kernel_merge: return l.rows;
    default: return ceil_div(block.n_valid, tile_keys);
    }
}

typedef void (*accumulate_fn)(work_list, bool);

/* By the largest v_dim of the launch, in chunks of 64. */
accumulate_fn accumulate_for(uint32_t v_dim)
{
    return v_dim <= 64    ? accumulate<1>
           : v_dim <= 128 ? accumulate<2>
           : v_dim <= 256 ? accumulate<4>
                          : accumulate<8>;
}

cudaError_t prepare(const dkv_cu_device *)
{
    const int most = static_cast<int>(shared_bytes(DKV_HEAD_DIM_MAX));
    const void *plain[] = {reinterpret_cast<const void *>(merge),
                           reinterpret_cast<const void *>(merge_rounded)};
    for (const void *kernel : plain) {
        cudaFuncAttributes attributes; /* loads the kernel now, not at its first launch */
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error != cudaSuccess)
            return error;
    }
    for (uint32_t v_dim = 64; v_dim <= DKV_HEAD_DIM_MAX; v_dim *= 2) {
        const cudaError_t error = cudaFuncSetAttribute(
            accumulate_for(v_dim), cudaFuncAttributeMaxDynamicSharedMemorySize, most);
        if (error != cudaSuccess)
            return error;
    }
    return cudaFuncSetAttribute(score, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

bool takes(const dkv_cu_device *, const dkv_cu_block *)
{
    return true;
}

size_t unit_bytes(const dkv_cu_block *block)
{
    return layout_of(*block).bytes;
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
    uint32_t head_dim = 0;
    uint32_t v_dim = 0;
    bool rounded = false;
    for (uint32_t u = 0; u < n; u++) {
        const dkv_cu_block &block = wave->blocks_host[wave->units_host[first + u].block];
        head_dim = head_dim > block.head_dim ? head_dim : block.head_dim;
        v_dim = v_dim > block.v_dim ? v_dim : block.v_dim;
        rounded = rounded || rounds_output(block);
    }
    work_list work[n_kernels];
    uint32_t items[n_kernels];
    for (int kernel = 0; kernel < n_kernels; kernel++) {
        work[kernel] = {wave->blocks, wave->units + first, lists + kernel * (n + 1), n};
        items[kernel] = counts[kernel * (n + 1) + n];
    }
    const size_t plain = shared_bytes(head_dim);
    accumulate_for(v_dim)<<<items[kernel_accumulate], threads, plain, stream>>>(
        work[kernel_accumulate], false);
    merge<<<items[kernel_merge], merge_threads, 0, stream>>>(work[kernel_merge]);
    if (rounded) {
        accumulate_for(v_dim)<<<items[kernel_accumulate], threads, plain, stream>>>(
            work[kernel_accumulate], true);
        merge_rounded<<<items[kernel_merge], merge_threads, 0, stream>>>(work[kernel_merge]);
    }
    score<<<items[kernel_score], threads, shared_bytes(head_dim), stream>>>(work[kernel_score]);
    return cudaGetLastError();
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_general = {
    "general", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch};
