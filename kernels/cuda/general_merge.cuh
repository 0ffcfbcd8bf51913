/* The general scorer between its passes: each row's probabilities, output and the term of its
 * largest key, from what the ranges have left. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_MERGE_CUH
#define DKV_KERNELS_CUDA_GENERAL_MERGE_CUH

#include "kernels/cuda/general_softmax.cuh"

namespace
{

/* The exponent e of the range factor: 0 where nothing is squared, else 40, or less where |v| or
 * 1/eps would let the sum of R terms (p 2^e)^2 |b - v|^2 leave float32. */
__device__ int factor_exponent(const dkv_cu_block &block, const layout &l, float value_max)
{
    if (block.form != DKV_CU_FORM_DROPKV)
        return 0;
    const float octaves = 2 * log2f(fmaxf(value_max, 1e-18f)) +
                          log2f(4.0f * static_cast<float>(block.v_dim * l.rows)) -
                          (block.eps > 0 ? 2 * fminf(log2f(block.eps), 0.0f) : 0.0f);
    return min(DKV_CU_EXPONENT, static_cast<int>(floorf((126.0f - octaves) / 2)));
}

constexpr int merge_threads = 128;

/* Of all threads, to every one of them. */
template <class number> __device__ number block_sum(number x, number *shared)
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

/* The term of the row's largest key: p is known to the last bit of 1 - p only here. `distance` is
 * |b - v|^2, `projection` a . v. */
__device__ float top_term(const dkv_cu_block &block, float p, float rest, float distance,
                          float projection, float factor)
{
    const float front = block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    if (block.form == DKV_CU_FORM_PROJ)
        return front * projection;
    if (block.form == DKV_CU_FORM_DIST)
        return front * sqrtf(distance);
    if (block.eps == 0) {
        const float x = front * factor;
        return x * x * distance;
    }
    const float x = p / (rest + block.eps) * rest * factor;
    return x * x * distance;
}

/* M x for the metric of query head `head`, `x` in shared memory: a warp for each element. Returns
 * the thread's share of its squared length; `out` may be NULL. */
__device__ float multiply_metric(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t head,
                                 const float *x, float *out)
{
    const float *matrix = unit.metric + static_cast<size_t>(head) * block.v_dim * block.v_dim;
    const uint32_t lane = threadIdx.x % 32;
    float squares = 0;
    for (uint32_t i = threadIdx.x / 32; i < block.v_dim; i += blockDim.x / 32) {
        float sum = 0;
        for (uint32_t dim = lane; dim < block.v_dim; dim += 32)
            sum = fmaf(matrix[static_cast<size_t>(i) * block.v_dim + dim], x[dim], sum);
        sum = warp_sum(sum);
        if (lane == 0) {
            squares = fmaf(sum, sum, squares);
            if (out)
                out[i] = sum;
        }
    }
    return squares;
}

/* A row's logit of one key, to more digits than float32 has. */
__device__ double exact_logit(const dkv_cu_block &block, const dkv_cu_unit &unit, uint32_t row,
                              int key, double *shared)
{
    const uint32_t head = row / block.window;
    const unsigned char *k = dkv_cu_row(block.k, unit.k, block.valid_from + key,
                                        &unit.report->bad_k_entry);
    const unsigned char *q = unit.q + head * block.q_head_stride +
                             row % block.window * block.q_row_stride;
    const float q_scale = unit.q_scales ? unit.q_scales[head] : 1.0f;
    const uint32_t q_bytes = dkv_cu_dtype_bytes(block.q_dtype);
    const uint32_t k_bytes = dkv_cu_dtype_bytes(block.k.dtype);
    double sum = 0;
    for (uint32_t dim = threadIdx.x; k && dim < block.head_dim; dim += merge_threads)
        sum = fma(static_cast<double>(dkv_cu_load1(q + dim * q_bytes, block.q_dtype, q_scale)),
                  static_cast<double>(dkv_cu_load1(k + dim * k_bytes, block.k.dtype, unit.k_scale)),
                  sum);
    const double z = block_sum(sum, shared) * static_cast<double>(block.scale);
    const double cap = block.softcap;
    return cap > 0 ? cap * tanh(z / cap) : z;
}

/* Whether a row's largest key has a term of its own in the second pass, so that others' p need not
 * be made as its own is. (Where it has none, equal keys must have equal terms.) */
__device__ bool has_top_term(const dkv_cu_block &block)
{
    return block.form == DKV_CU_FORM_DROPKV || block.form == DKV_CU_FORM_DIST ||
           block.form == DKV_CU_FORM_PROJ;
}

__global__ void __launch_bounds__(merge_threads) merge(work_list work)
{
    __shared__ partial ranges[max_ranges];
    __shared__ float shared[merge_threads / 32];
    __shared__ double shared_double[merge_threads / 32];
    __shared__ float center[DKV_HEAD_DIM_MAX];
    __shared__ float vector[DKV_HEAD_DIM_MAX]; /* with a metric: b - v, then a */
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
    if (block.v_dim > 0)
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
    const float key_second = second;
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
    /* What the others weigh, relative to the top key. An error of its logit is in all their p, and
     * twice in their terms: beside a sink the last bits of its large logit, and of differences to
     * it, would be the largest error there is. */
    double ahead = 0; /* of `second` */
    if (has_top_term(block) && top_key >= 0) {
        const double exact = exact_logit(block, unit, row, top_key, shared_double);
        ahead = (isfinite(exact) ? fmax(exact, static_cast<double>(key_second))
                                 : static_cast<double>(top)) -
                static_cast<double>(second);
    }
    const float others = second == -INFINITY   ? 0.0f
                         : has_top_term(block) ? static_cast<float>(sum * exp(-ahead))
                                               : sum * expf(second - top);
    const float p = 1.0f / (1.0f + others);
    const float rest = others > 1e30f ? 1.0f : others / (1.0f + others);

    const bool averaged = block.form == DKV_CU_FORM_AVERAGE;
    float distance = 0;
    float projection = 0;
    for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads) {
        float b = -weight(sink, second) * center[dim]; /* the sink's value is 0 */
        for (uint32_t i = 0; i < l.n_ranges; i++) {
            const float *sums = partials + i * range_stride + sizeof(partial) / sizeof(float);
            b = fmaf(weight(ranges[i].second, second), sums[dim], b);
            if (i != best && ranges[i].top_key >= 0 && !left_out(block, ranges[i].top_key))
                b = fmaf(weight(ranges[i].top, second),
                         value_at(block, unit, center, ranges[i].top_key, dim), b);
        }
        b = alone ? 0.0f : b / sum;
        const float v = top_key >= 0 ? value_at(block, unit, center, top_key, dim) : 0.0f;
        const float a = fmaf(p, v, rest * b);
        output[dim] = averaged ? rest * b : a; /* average adds the top keys */
        distance = fmaf(b - v, b - v, distance);
        projection = fmaf(a, v, projection);
        if (block.metric)
            vector[dim] = b - v;
    }
    if (block.metric && !averaged) {
        float *projected = reinterpret_cast<float *>(unit.work + l.projected) +
                           static_cast<size_t>(row) * block.v_dim;
        const uint32_t head = row / block.window;
        __syncthreads();
        distance = multiply_metric(block, unit, head, vector, nullptr);
        __syncthreads();
        for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads)
            vector[dim] = output[dim];
        __syncthreads();
        multiply_metric(block, unit, head, vector, projected);
    }
    distance = block_sum(distance, shared);
    if (block.form == DKV_CU_FORM_PROJ)
        projection = block_sum(projection, shared);

    if (threadIdx.x == 0) {
        const int exponent = factor_exponent(block, l, value_max);
        row_result result = {0.0f, 0.0f, -1, 0.0f, 0.0f, 0.0f};
        /* The odds of a row's only key have no limit; p itself is 1. */
        if (top_key >= 0 &&
            (!alone || block.form == DKV_CU_FORM_P || block.form == DKV_CU_FORM_PROJ || averaged))
            result = {top,
                      p,
                      top_key,
                      averaged
                          ? rest
                          : top_term(block, p, rest, distance, projection, ldexpf(1.0f, exponent)),
                      second == -INFINITY ? top : second,
                      static_cast<float>(1.0 / (exp(ahead) + sum))};
        reinterpret_cast<float *>(unit.work + l.weights)[row] = row_weight(block,
                                                                           row % block.window);
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

} // namespace

#endif
