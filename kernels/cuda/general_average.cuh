/* reduce=ema_first in the general scorer: the rows of a query head become one before the term is
 * taken,
 *
 *   pbar_j = sum over t of c_t p_tj      abar = sum over the prefix of pbar_j v_j
 *
 * abar is linear in the rows, whose outputs without their largest keys merge has left. One key of a
 * query head, the candidate, may have pbar > 1/2. Where 1 - pbar and abar - v are small
 * differences, its term is built from what the other keys weigh:
 *
 *   1 - pbar = sum of c_t (1 - p_t)      abar - v = (sum over the others) - (1 - pbar) v
 *
 * which a row whose largest key it is knows without cancellation. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_AVERAGE_CUH
#define DKV_KERNELS_CUDA_GENERAL_AVERAGE_CUH

#include "kernels/cuda/general_merge.cuh"
#include "kernels/cuda/general_metric.cuh"

namespace
{

/* ---- per query head ---- */

/* A query head's rows, as average sees them. */
struct head_rows {
    const row_result *results; /* [window] */
    const float *weights;
    const float *outputs; /* [window][v_dim], without the largest keys */
    uint32_t first;       /* the first of them in the unit */
};

/* The key with most of pbar among the rows' largest ones, -1 if no row has one; by thread 0. */
__device__ int find_candidate(const dkv_cu_block &block, const head_rows &rows)
{
    int found = -1;
    float most = 0;
    for (uint32_t t = 0; t < block.window; t++) {
        float mass = 0;
        for (uint32_t other = 0; other < block.window; other++)
            if (rows.results[other].top_key == rows.results[t].top_key)
                mass = fmaf(rows.weights[other], rows.results[other].p_top, mass);
        if (mass > most) {
            most = mass;
            found = rows.results[t].top_key;
        }
    }
    return found;
}

/* p of a key in a row whose largest one is another; by a warp. */
__device__ float p_of(const dkv_cu_block &block, const dkv_cu_unit &unit, const head_rows &rows,
                      uint32_t t, int key)
{
    const row_result &result = rows.results[t];
    if (!sees(block, rows.first + t, key) || result.p_top == 0)
        return 0.0f;
    const uint32_t head = rows.first / block.window;
    const unsigned char *k = dkv_cu_row(block.k, unit.k, block.valid_from + key,
                                        &unit.report->bad_k_entry);
    const unsigned char *q = unit.q + head * block.q_head_stride + t * block.q_row_stride;
    const float q_scale = unit.q_scales ? unit.q_scales[head] : 1.0f;
    float sum = 0;
    for (uint32_t dim = threadIdx.x % 32; k && dim < block.head_dim; dim += 32)
        sum = fmaf(
            dkv_cu_load1(q + dim * dkv_cu_dtype_bytes(block.q_dtype), block.q_dtype, q_scale),
            dkv_cu_load1(k + dim * dkv_cu_dtype_bytes(block.k.dtype), block.k.dtype, unit.k_scale),
            sum);
    return expf(logit_above(block, warp_sum(sum), result.top)) * result.p_top;
}

/* Item: a query head of a unit. */
__global__ void __launch_bounds__(merge_threads) average(work_list work)
{
    __shared__ float shared[merge_threads / 32];
    __shared__ float center[DKV_HEAD_DIM_MAX]; /* all 0 here */
    __shared__ float gap[DKV_HEAD_DIM_MAX];
    __shared__ float p[DKV_ROWS_MAX]; /* of the candidate in each row */
    __shared__ int candidate;
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t head = blockIdx.x - work.first_item[index];
    const head_rows rows = {
        reinterpret_cast<const row_result *>(unit.work + l.results) + head * block.window,
        reinterpret_cast<const float *>(unit.work + l.weights) + head * block.window,
        reinterpret_cast<const float *>(unit.work + l.output) +
            static_cast<size_t>(head) * block.window * block.v_dim,
        head * block.window};
    float *bar = reinterpret_cast<float *>(unit.work + l.bar_output) +
                 static_cast<size_t>(head) * block.v_dim;

    load_center(block, unit, center);
    if (threadIdx.x == 0)
        candidate = find_candidate(block, rows);
    __syncthreads();
    const int key = candidate;
    for (uint32_t t = threadIdx.x / 32; key >= 0 && t < block.window; t += merge_threads / 32) {
        const bool largest = rows.results[t].top_key == key;
        const float of_row = largest ? rows.results[t].p_top : p_of(block, unit, rows, t, key);
        if (threadIdx.x % 32 == 0)
            p[t] = of_row;
    }
    __syncthreads();

    const bool outside = key >= 0 && left_out(block, key);
    float weighed = 0; /* pbar of the candidate, and 1 - pbar */
    float left = 0;
    for (uint32_t t = 0; key >= 0 && t < block.window; t++) {
        const row_result &result = rows.results[t];
        weighed = fmaf(rows.weights[t], p[t], weighed);
        left = fmaf(rows.weights[t], result.top_key == key ? result.top_term : 1.0f - p[t], left);
    }
    float distance = 0;
    for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads) {
        const float v = key >= 0 ? value_at(block, unit, center, key, dim) : 0.0f;
        float others = 0;
        for (uint32_t t = 0; key >= 0 && t < block.window; t++) {
            const row_result &result = rows.results[t];
            float of_row = rows.outputs[static_cast<size_t>(t) * block.v_dim + dim];
            if (result.top_key != key) {
                if (result.top_key >= 0 && !left_out(block, result.top_key))
                    of_row = fmaf(result.p_top, value_at(block, unit, center, result.top_key, dim),
                                  of_row);
                if (!outside)
                    of_row = fmaf(-p[t], v, of_row);
            }
            others = fmaf(rows.weights[t], of_row, others);
        }
        bar[dim] = outside ? others : fmaf(weighed, v, others);
        gap[dim] = outside ? others - v : fmaf(-left, v, others);
        distance = fmaf(gap[dim], gap[dim], distance);
    }
    __syncthreads();
    if (block.metric)
        distance = multiply_metric(block, unit, head, gap, nullptr);
    distance = block_sum(distance, shared);
    if (threadIdx.x == 0) {
        /* A token that nothing else stands beside has no odds: it is protected. */
        const float term = key >= 0 && left > 0 ? weighed / left * sqrtf(distance) : 0.0f;
        reinterpret_cast<bar_result *>(unit.work + l.bars)[head] = {key, term};
        if (!dkv_cu_finite(distance))
            atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
    }
}

/* ---- per 64 keys ---- */

__host__ __device__ inline size_t average_shared_bytes(uint32_t head_dim)
{
    return shared_bytes(head_dim) + chunk_rows * tile_stride * sizeof(float);
}

/* pbar of 64 keys and query heads first_head .. end_head-1, at most 32 of them, to bars
 * [head][key]. */
__device__ void weigh_bars(const dkv_cu_block &block, const dkv_cu_unit &unit, const layout &l,
                           const shared_tiles &s, uint32_t first_key, uint32_t first_head,
                           uint32_t end_head, float *bars)
{
    const row_result *results = reinterpret_cast<const row_result *>(unit.work + l.results);
    const float *weights = reinterpret_cast<const float *>(unit.work + l.weights);
    const uint32_t end_row = end_head * block.window;
    for (int i = threadIdx.x; i < chunk_rows * tile_stride; i += threads)
        bars[i] = 0;
    for (uint32_t first_row = first_head * block.window; first_row < end_row;
         first_row += chunk_rows) {
        __syncthreads();
        load_query(block, unit, s, first_row, end_row);
        float z[2][4];
        products(block, unit, s, nullptr, first_key, z);
        for (int r = 0; r < 2; r++) {
            const int slot_row = threadIdx.x / 16 + 16 * r;
            const uint32_t row = first_row + slot_row;
            const row_result result = row < end_row ? results[row] : row_result{0, 0, -1, 0, 0, 0};
            for (int k = 0; k < 4; k++) {
                const int slot = threadIdx.x % 16 + 16 * k;
                const uint32_t key = first_key + slot;
                float p = 0;
                if (s.key_rows[slot] && result.p_top > 0 && sees(block, row, key))
                    p = term_of<DKV_CU_FORM_P>(
                        block, expf(logit_above(block, z[r][k], result.top)) * result.p_top, 0, 0);
                s.terms[slot_row * tile_stride + slot] = p;
            }
        }
        __syncthreads();
        for (uint32_t r = 0; threadIdx.x < tile_keys && r < chunk_rows && first_row + r < end_row;
             r++) {
            float &bar =
                bars[((first_row + r) / block.window - first_head) * tile_stride + threadIdx.x];
            bar = fmaf(weights[first_row + r], s.terms[r * tile_stride + threadIdx.x], bar);
        }
    }
    __syncthreads();
}

/* The term of a query head and a key whose squared distance to abar is given. */
__device__ float bar_term(const bar_result &bar, uint32_t key, float pbar, float squared)
{
    return static_cast<int>(key) == bar.key ? bar.term : pbar / (1.0f - pbar) * sqrtf(squared);
}

/* Turns pbar of query heads first_head .. into terms, in place. */
__device__ void bar_terms(const dkv_cu_block &block, const dkv_cu_unit &unit, const layout &l,
                          const shared_tiles &s, uint32_t first_key, uint32_t first_head,
                          uint32_t end_head, float *bars)
{
    const bar_result *results = reinterpret_cast<const bar_result *>(unit.work + l.bars);
    const float *outputs = reinterpret_cast<const float *>(unit.work + l.bar_output);
    if (!block.metric) {
        float squared[2][4];
        hold_against<false>(block, unit, s, outputs, first_head, end_head, squared);
        for (int r = 0; r < 2; r++) {
            const uint32_t at = threadIdx.x / 16 + 16 * r;
            for (int k = 0; k < 4 && first_head + at < end_head; k++) {
                const uint32_t slot = threadIdx.x % 16 + 16 * k;
                float &bar = bars[at * tile_stride + slot];
                bar = bar_term(results[first_head + at], first_key + slot, bar, squared[r][k]);
            }
        }
        return;
    }
    for (uint32_t head = first_head; head < end_head; head++) {
        const float part = metric_length(block, unit, s, head,
                                         outputs + static_cast<size_t>(head) * block.v_dim);
        __syncthreads();
        s.terms[threadIdx.x / tile_keys * tile_stride + threadIdx.x % tile_keys] = part;
        __syncthreads();
        if (threadIdx.x < tile_keys) {
            float squared = 0;
            for (int i = 0; i < threads / tile_keys; i++)
                squared += s.terms[i * tile_stride + threadIdx.x];
            float &bar = bars[(head - first_head) * tile_stride + threadIdx.x];
            bar = bar_term(results[head], first_key + threadIdx.x, bar, squared);
        }
    }
}

__global__ void __launch_bounds__(threads, 2) score_average(work_list work)
{
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t first_key = (blockIdx.x - work.first_item[index]) * tile_keys;
    const shared_tiles s = carve(memory, block.head_dim);
    float *bars = s.query + chunk_rows * s.query_stride; /* [32 query heads][tile_stride] */
    float total = 0;

    find_rows(block, unit, s, first_key, block.n_valid);
    load_center(block, unit, s.center);
    for (uint32_t first_head = 0; first_head < block.group; first_head += chunk_rows) {
        const uint32_t end_head = min(first_head + chunk_rows, block.group);
        __syncthreads();
        weigh_bars(block, unit, l, s, first_key, first_head, end_head, bars);
        bar_terms(block, unit, l, s, first_key, first_head, end_head, bars);
        __syncthreads();
        for (uint32_t i = 0; threadIdx.x < tile_keys && first_head + i < end_head; i++) {
            const float term = s.key_rows[threadIdx.x] ? bars[i * tile_stride + threadIdx.x] : 0.0f;
            total = block.gqa == DKV_GQA_MAX ? fmaxf(total, term) : total + term;
        }
    }
    if (threadIdx.x < tile_keys)
        store_score(block, unit, first_key + threadIdx.x, total);
}

} // namespace

#endif
