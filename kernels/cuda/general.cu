/* The general scorer: every rule with query rows, every shape, type, view and profile, in plain
 * float32 arithmetic.
 *
 * It answers what no faster scorer takes and is the judge of those, so it is written to be read.
 * Keys [n][D], values [n][Dv], rows R = g * w of a unit; three kernels, each launched once a wave
 * for all units of one form of rule (general_accumulate.cuh, general_merge.cuh, general_score.cuh):
 *
 *   accumulate   item = (unit, key range, 32 rows). Online softmax over the range's keys, 64 at a
 *                time: logits, then sum of exp(z) v over all keys but the row's largest so far.
 *   merge        item = (unit, row). Joins the ranges in their order: where the row's largest
 *                logit is, the output without that key (b), the output (a).
 *   score        item = (unit, 64 keys). Logits again, and p^2 |b_j - v_j|^2, or the rule's term,
 *                reduced over rows.
 *
 * A form is a compiled kernel, and so is a way to reduce rows: the table below. A rule that
 * combines what there is needs no change here.
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
#include "kernels/cuda/general_accumulate.cuh"
#include "kernels/cuda/general_average.cuh"
#include "kernels/cuda/general_merge.cuh"
#include "kernels/cuda/general_score.cuh"

namespace
{

typedef void (*score_fn)(work_list);

/* One compiled second pass. */
struct variant {
    uint32_t form;
    int fold;
    bool spread;
    score_fn kernel;
};

template <int form, int fold, bool spread> constexpr variant row_of()
{
    return {form, fold, spread, score<form, fold, spread>};
}

const variant variants[] = {
    row_of<DKV_CU_FORM_DROPKV, fold_plain, false>(),
    row_of<DKV_CU_FORM_P, fold_flat, false>(),
    row_of<DKV_CU_FORM_P, fold_flat_max, false>(),
    row_of<DKV_CU_FORM_P, fold_weighted, false>(),
    row_of<DKV_CU_FORM_P, fold_weighted, true>(),
    row_of<DKV_CU_FORM_P, fold_max, false>(),
    row_of<DKV_CU_FORM_P, fold_max, true>(),
    row_of<DKV_CU_FORM_P, fold_variance, false>(),
    row_of<DKV_CU_FORM_P, fold_variance, true>(),
    row_of<DKV_CU_FORM_PROJ, fold_flat, false>(),
    row_of<DKV_CU_FORM_PROJ, fold_weighted, false>(),
    row_of<DKV_CU_FORM_DIST, fold_flat, false>(),
    row_of<DKV_CU_FORM_DIST, fold_weighted, false>(),
    {DKV_CU_FORM_AVERAGE, fold_flat, false, score_average},
};
constexpr uint32_t n_variants = sizeof(variants) / sizeof(variants[0]);

int fold_of(const dkv_cu_block &block)
{
    const bool by_head = block.gqa == DKV_GQA_MAX || block.spread;
    if (block.form == DKV_CU_FORM_DROPKV)
        return fold_plain;
    if (block.form == DKV_CU_FORM_AVERAGE)
        return fold_flat;
    if (block.variance)
        return fold_variance;
    if (block.reduce == DKV_REDUCE_MAX)
        return block.gqa == DKV_GQA_MAX && !block.spread ? fold_flat_max : fold_max;
    return by_head ? fold_weighted : fold_flat;
}

uint32_t variant_of(const dkv_cu_block &block)
{
    const int fold = fold_of(block);
    uint32_t v = 0;
    while (v + 1 < n_variants && !(variants[v].form == block.form && variants[v].fold == fold &&
                                   variants[v].spread == (block.spread != 0)))
        v++;
    return v;
}

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

/* Bit v: some of the units need variant v. */
uint32_t variants_in(const dkv_cu_wave *wave, uint32_t first, uint32_t n)
{
    uint32_t found = 0;
    for (uint32_t u = 0; u < n; u++)
        found |= 1u << variant_of(block_of(wave, first + u));
    return found;
}

/* ---- launching ---- */

enum kernel_index { kernel_accumulate, kernel_merge, kernel_average, kernel_score, n_kernels };

uint32_t items_of(const dkv_cu_block &block, int kernel)
{
    const layout l = layout_of(block);
    switch (kernel) {
    case kernel_accumulate: return l.n_ranges * ceil_div(l.rows, chunk_rows);
    case kernel_merge: return l.rows;
    case kernel_average: return block.form == DKV_CU_FORM_AVERAGE ? block.group : 0;
    default: return ceil_div(block.n_valid, tile_keys);
    }
}

typedef void (*accumulate_fn)(work_list, bool);

/* By the largest v_dim of the launch, in chunks of 64. */
accumulate_fn accumulate_for(uint32_t v_dim)
{
    return v_dim == 0     ? accumulate<0>
           : v_dim <= 64  ? accumulate<1>
           : v_dim <= 128 ? accumulate<2>
           : v_dim <= 256 ? accumulate<4>
                          : accumulate<8>;
}

/* Raises a kernel's limit, and loads it now, not at its first launch. */
template <class kernel> cudaError_t prepare_kernel(kernel function)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(function),
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(average_shared_bytes(DKV_HEAD_DIM_MAX)));
}

cudaError_t prepare(const dkv_cu_device *)
{
    const void *plain[] = {
        reinterpret_cast<const void *>(merge), reinterpret_cast<const void *>(merge_rounded),
        reinterpret_cast<const void *>(average), reinterpret_cast<const void *>(sum_spread)};
    cudaError_t error = prepare_kernel(accumulate_for(0));
    for (uint32_t v_dim = 64; v_dim <= DKV_HEAD_DIM_MAX && error == cudaSuccess; v_dim *= 2)
        error = prepare_kernel(accumulate_for(v_dim));
    for (uint32_t v = 0; v < n_variants && error == cudaSuccess; v++)
        error = prepare_kernel(variants[v].kernel);
    for (const void *kernel : plain) {
        cudaFuncAttributes attributes;
        if (error == cudaSuccess)
            error = cudaFuncGetAttributes(&attributes, kernel);
    }
    return error;
}

bool takes(const dkv_cu_device *, const dkv_cu_block *)
{
    return true;
}

size_t unit_bytes(const dkv_cu_block *block)
{
    return layout_of(*block).bytes;
}

/* For each variant that is there, in their order, for each kernel: the first item of every unit,
 * and how many there are. */
size_t extra_bytes(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n)
{
    return sizeof(uint32_t) * (n + 1) * n_kernels *
           static_cast<uint32_t>(__builtin_popcount(variants_in(wave, first, n)));
}

void fill(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n, void *extra)
{
    const uint32_t found = variants_in(wave, first, n);
    uint32_t *at = static_cast<uint32_t *>(extra);
    for (uint32_t v = 0; v < n_variants; v++)
        for (int kernel = 0; kernel < n_kernels && (found >> v & 1); kernel++) {
            uint32_t items = 0;
            for (uint32_t u = 0; u < n; u++) {
                const dkv_cu_block &block = block_of(wave, first + u);
                *at++ = items;
                items += variant_of(block) == v ? items_of(block, kernel) : 0;
            }
            *at++ = items;
        }
}

/* The largest dimensions among a variant's units. */
struct reach {
    uint32_t head_dim;
    uint32_t v_dim;
    bool rounded;
};

reach reach_of(const dkv_cu_wave *wave, uint32_t first, uint32_t n, uint32_t v)
{
    reach most = {};
    for (uint32_t u = 0; u < n; u++) {
        const dkv_cu_block &block = block_of(wave, first + u);
        if (variant_of(block) != v)
            continue;
        most.head_dim = most.head_dim > block.head_dim ? most.head_dim : block.head_dim;
        most.v_dim = most.v_dim > block.v_dim ? most.v_dim : block.v_dim;
        most.rounded = most.rounded || rounds_output(block);
    }
    return most;
}

void launch_variant(const variant &v, const reach &most, const work_list *work,
                    const uint32_t *items, cudaStream_t stream)
{
    const size_t shared = shared_bytes(most.head_dim);
    const accumulate_fn accumulate_all = accumulate_for(most.v_dim);
    accumulate_all<<<items[kernel_accumulate], threads, shared, stream>>>(work[kernel_accumulate],
                                                                          false);
    merge<<<items[kernel_merge], merge_threads, 0, stream>>>(work[kernel_merge]);
    if (most.rounded) {
        accumulate_all<<<items[kernel_accumulate], threads, shared, stream>>>(
            work[kernel_accumulate], true);
        merge_rounded<<<items[kernel_merge], merge_threads, 0, stream>>>(work[kernel_merge]);
    }
    if (items[kernel_average] > 0)
        average<<<items[kernel_average], merge_threads, 0, stream>>>(work[kernel_average]);
    const bool averaged = v.form == DKV_CU_FORM_AVERAGE;
    const score_fn score_all = v.kernel;
    score_all<<<items[kernel_score], threads,
                averaged ? average_shared_bytes(most.head_dim) : shared, stream>>>(
        work[kernel_score]);
    if (v.spread)
        sum_spread<<<work->n_units, tile_keys, 0, stream>>>(work[kernel_score]);
}

cudaError_t launch(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const uint32_t found = variants_in(wave, first, n);
    const uint32_t *counts = static_cast<const uint32_t *>(extra_host);
    const uint32_t *lists = static_cast<const uint32_t *>(extra_device);
    for (uint32_t v = 0; v < n_variants; v++) {
        if (!(found >> v & 1))
            continue;
        work_list work[n_kernels];
        uint32_t items[n_kernels];
        for (int kernel = 0; kernel < n_kernels; kernel++) {
            work[kernel] = {wave->blocks, wave->units + first, lists, n};
            items[kernel] = counts[n];
            counts += n + 1;
            lists += n + 1;
        }
        launch_variant(variants[v], reach_of(wave, first, n, v), work, items, stream);
    }
    return cudaGetLastError();
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_general = {
    "general", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch, true};
