/* The general scorer's second pass: logits again, a term for each row and key, reduced over rows.
 * Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_SCORE_CUH
#define DKV_KERNELS_CUDA_GENERAL_SCORE_CUH

#include "kernels/cuda/general_metric.cuh"

namespace
{

/* What p is multiplied by: of the rule's form, for the thread's 2 rows x 4 keys. */
template <int form>
__device__ void find_against(const dkv_cu_block &block, const dkv_cu_unit &unit, const layout &l,
                             const shared_tiles &s, uint32_t first_row, float (&against)[2][4])
{
    const float *output = reinterpret_cast<const float *>(unit.work + l.output);
    if (form == DKV_CU_FORM_DIST && block.metric)
        hold_against_metric(block, unit, l, s, first_row, against);
    else
        hold_against<form == DKV_CU_FORM_PROJ>(block, unit, s, output, first_row, l.rows, against);
}

/* The thread's flat sums of 4 keys, with those of the other rows; thread i gets key i's. */
template <int fold> __device__ float join_flat(const shared_tiles &s, const float (&flat)[4])
{
    __syncthreads();
    for (int k = 0; k < 4; k++)
        s.terms[threadIdx.x / 16 * tile_stride + threadIdx.x % 16 + 16 * k] = flat[k];
    __syncthreads();
    float total = 0;
    for (int y = 0; threadIdx.x < tile_keys && y < threads / 16; y++) {
        const float part = s.terms[y * tile_stride + threadIdx.x];
        total = fold == fold_flat_max ? fmaxf(total, part) : total + part;
    }
    return total;
}

template <int form, int fold, bool spread>
__global__ void __launch_bounds__(threads, 2) score(work_list work)
{
    constexpr bool flat = fold == fold_flat || fold == fold_flat_max;
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t first_key = (blockIdx.x - work.first_item[index]) * tile_keys;
    const shared_tiles s = carve(memory, block.head_dim);
    const row_result *results = reinterpret_cast<const row_result *>(unit.work + l.results);
    const float *weights = reinterpret_cast<const float *>(unit.work + l.weights);
    const float factor = ldexpf(1.0f, *unit.exponent);
    gatherer sum = {};
    float flat_sum[4] = {};

    if (form == DKV_CU_FORM_PROJ && block.gqa == DKV_GQA_MAX)
        sum.total = -INFINITY; /* terms may be negative */

    find_rows(block, unit, s, first_key, block.n_valid);
    if (form != DKV_CU_FORM_P)
        load_center(block, unit, s.center);
    for (uint32_t first_row = 0; first_row < l.rows; first_row += chunk_rows) {
        __syncthreads();
        load_query(block, unit, s, first_row, l.rows);
        float z[2][4];
        float against[2][4];
        products(block, unit, s, nullptr, first_key, z);
        if (form != DKV_CU_FORM_P) {
            find_against<form>(block, unit, l, s, first_row, against);
            __syncthreads(); /* s.terms changes from outputs to terms */
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int slot_row = threadIdx.x / 16 + 16 * r;
            const uint32_t row = first_row + slot_row;
            const row_result result = row < l.rows ? results[row] : row_result{0, 0, -1, 0, 0, 0};
            const float base = form == DKV_CU_FORM_P ? result.top : result.second;
            const float p_base = form == DKV_CU_FORM_P ? result.p_top : result.p_second;
            const float weight = fold == fold_flat && row < l.rows ? weights[row] : 0.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int slot = threadIdx.x % 16 + 16 * k;
                const uint32_t key = first_key + slot;
                float term = 0;
                if (s.key_rows[slot] && result.top_key >= 0 && sees(block, row, key)) {
                    const float p = expf(logit_above(block, z[r][k], base)) * p_base;
                    term = form != DKV_CU_FORM_P && static_cast<int>(key) == result.top_key
                               ? result.top_term
                               : term_of<form>(block, p, form == DKV_CU_FORM_P ? 0 : against[r][k],
                                               factor);
                }
                if (fold == fold_flat)
                    flat_sum[k] = fmaf(term, weight, flat_sum[k]);
                else if (fold == fold_flat_max)
                    flat_sum[k] = fmaxf(flat_sum[k], term);
                else
                    s.terms[slot_row * tile_stride + slot] = term;
            }
        }
        if (flat)
            continue;
        __syncthreads();
        if (threadIdx.x < tile_keys)
            for (uint32_t r = 0; r < chunk_rows && first_row + r < l.rows; r++)
                gather<fold, spread>(sum, block, first_row + r,
                                     fold == fold_weighted ? weights[first_row + r] : 0.0f,
                                     s.terms[r * tile_stride + threadIdx.x]);
    }
    if (flat)
        sum.total = join_flat<fold>(s, flat_sum);
    if (threadIdx.x < tile_keys)
        store_score(block, unit, first_key + threadIdx.x, sum.total);
    if (spread)
        store_spread(block, unit, l, s, first_key, sum);
}

/* layers=cake: the sums over a unit's tiles. */
__global__ void __launch_bounds__(tile_keys) sum_spread(work_list work)
{
    __shared__ double shared[tile_keys];
    const dkv_cu_unit &unit = work.units[blockIdx.x];
    const dkv_cu_block &block = work.blocks[unit.block];
    if (!block.spread)
        return;
    const layout l = layout_of(block);
    const double *tiles = reinterpret_cast<const double *>(unit.work + l.spread);
    double sums[2] = {};
    for (uint32_t i = threadIdx.x; i < ceil_div(block.n_valid, tile_keys); i += tile_keys)
        for (int which = 0; which < 2; which++)
            sums[which] += tiles[2 * i + which];
    const double entropy = sum_of_keys(sums[0], shared);
    const double variance = sum_of_keys(sums[1], shared);
    if (threadIdx.x == 0) {
        unit.report->entropy = entropy;
        unit.report->variance = variance;
    }
}

} // namespace

#endif
