/* What scorers of rules with query rows share: the work list, which row sees which key, what a row
 * counts, and how a key's total becomes its score. */
#ifndef DKV_KERNELS_CUDA_ROWS_CUH
#define DKV_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/device.cuh"

namespace
{

__host__ __device__ inline uint32_t ceil_div(uint32_t a, uint32_t b)
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

__device__ inline uint32_t find_unit(const work_list &work, uint32_t item)
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

__device__ inline bool sees(const dkv_cu_block &block, uint32_t row, uint32_t key)
{
    return key <= block.n_valid - block.window + row % block.window;
}

/* What row t of a head counts in the reduction over its rows. */
__device__ inline float row_weight(const dkv_cu_block &block, uint32_t t)
{
    if (block.reduce == DKV_REDUCE_MEAN)
        return 1.0f / static_cast<float>(block.window);
    if (block.reduce != DKV_REDUCE_EMA && block.reduce != DKV_REDUCE_EMA_FIRST)
        return 1.0f;
    const double alpha = block.ema_alpha;
    return static_cast<float>(pow(1.0 - alpha, block.window - 1.0 - t) * (t > 0 ? alpha : 1.0));
}

/* The mean over query heads, if it is one; reduce=mean_seen divides by the rows that see the key.
 */
__device__ inline float finish_total(const dkv_cu_block &block, uint32_t key, float total)
{
    if (block.gqa == DKV_GQA_MEAN || block.gqa == DKV_GQA_LAYER)
        total /= static_cast<float>(block.group);
    if (block.reduce == DKV_REDUCE_MEAN_SEEN)
        total /= static_cast<float>(min(block.n_valid - key, block.window));
    return total;
}

__device__ inline void store_score(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t key,
                                   float total)
{
    if (key >= block.n_valid)
        return;
    const float score = finish_total(block, key, total);
    if (!dkv_cu_finite(score))
        atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
    unit.scores[key] = score;
}

} // namespace

#endif
