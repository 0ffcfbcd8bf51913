/* The general scorer's work: how a unit is cut into key ranges, what its kernels leave for each
 * other in unit.work, and which unit an item of a launch belongs to. Included by general.cu alone.
 */
#ifndef DKV_KERNELS_CUDA_GENERAL_WORK_CUH
#define DKV_KERNELS_CUDA_GENERAL_WORK_CUH

#include "kernels/cuda/rows.cuh"

namespace
{

constexpr int threads = 256;
constexpr int tile_keys = 64;
constexpr int chunk_rows = 32;
constexpr int chunk_dims = 64;
constexpr int tile_stride = chunk_dims + 4; /* rows four banks apart: no conflicts of 16 bytes */
constexpr int max_ranges = 32;
constexpr int min_range_keys = 512;
constexpr size_t unit_partial_bytes = 4u << 20;

/* What accumulate leaves per (range, row); the sums follow it: [v_dim] float32. */
struct partial {
    float top;    /* largest logit, -inf if the row sees no key of this range */
    int top_key;  /* its key, or -1 */
    float second; /* largest of the others: what the sums are relative to */
    float sum;    /* of exp(z - second) over the others */
};

/* What merge leaves per row; p of a key is exp(z - top) * p_top, or for those but the largest,
 * where that one has a term of its own, exp(z - second) * p_second. */
struct row_result {
    float top;
    float p_top;    /* 0: this row adds nothing */
    int top_key;    /* its term is top_term; -1: this row adds nothing */
    float top_term; /* already times the range factor; DKV_CU_FORM_AVERAGE: 1 - p_top */
    float second;
    float p_second;
};

/* What average leaves per query head. */
struct bar_result {
    int key;    /* the one that may have more than half of the average; -1: none */
    float term; /* its term */
};

/* Where things are in unit.work. */
struct layout {
    uint32_t rows;
    uint32_t n_ranges;
    uint32_t range_keys;
    uint32_t partial_floats;
    size_t value_max;  /* float [n_ranges]: largest |v| */
    size_t results;    /* row_result [rows] */
    size_t output;     /* float [rows][v_dim] */
    size_t weights;    /* float [rows]: in the reduction over rows */
    size_t projected;  /* float [rows][v_dim]: M times the output, if there is a metric */
    size_t bars;       /* bar_result [group] */
    size_t bar_output; /* float [group][v_dim] */
    size_t spread;     /* double [tiles][2] */
    size_t bytes;
};

__host__ __device__ inline layout layout_of(const dkv_cu_block &block)
{
    layout l;
    l.rows = block.group * block.window;
    l.partial_floats = sizeof(partial) / sizeof(float) + block.v_dim;
    const size_t range_bytes = static_cast<size_t>(l.rows) * l.partial_floats * sizeof(float);
    size_t ranges = unit_partial_bytes / range_bytes;
    ranges = ranges > max_ranges ? max_ranges : ranges < 4 ? 4 : ranges;
    size_t keys = (block.n_valid + ranges - 1) / ranges;
    keys = keys < min_range_keys ? min_range_keys : keys;
    l.range_keys = static_cast<uint32_t>((keys + tile_keys - 1) / tile_keys * tile_keys);
    l.n_ranges = (block.n_valid + l.range_keys - 1) / l.range_keys;
    l.value_max = range_bytes * l.n_ranges;
    l.results = l.value_max + max_ranges * sizeof(float);
    l.output = l.results + l.rows * sizeof(row_result);
    const size_t output_bytes = static_cast<size_t>(l.rows) * block.v_dim * sizeof(float);
    const bool averaged = block.form == DKV_CU_FORM_AVERAGE;
    l.weights = l.output + output_bytes;
    l.projected = l.weights + l.rows * sizeof(float);
    l.bars = l.projected + (block.metric ? output_bytes : 0);
    l.bar_output = l.bars + (averaged ? block.group * sizeof(bar_result) : 0);
    l.spread = l.bar_output + (averaged ? block.group * block.v_dim * sizeof(float) : 0);
    l.spread = (l.spread + 15) & ~static_cast<size_t>(15);
    l.bytes = l.spread +
              (block.spread ? ceil_div(block.n_valid, tile_keys) * 2 * sizeof(double) : 0);
    return l;
}

/* True if this block's output is made of rounded probabilities. */
__device__ __host__ inline bool rounds_output(const dkv_cu_block &block)
{
    return block.p_round && block.eps > 0 &&
           (block.q_dtype == DKV_BF16 || block.q_dtype == DKV_FP16);
}

/* True if the values' origin does not matter to the terms, so that another may be taken. */
__device__ inline bool moves_origin(const dkv_cu_block &block)
{
    return (block.form == DKV_CU_FORM_DROPKV || block.form == DKV_CU_FORM_DIST) &&
           !rounds_output(block);
}

/* The window's values stay out of averaged outputs. */
__device__ inline bool left_out(const dkv_cu_block &block, uint32_t key)
{
    return block.form == DKV_CU_FORM_AVERAGE && key >= block.n_valid - block.window;
}

} // namespace

#endif
