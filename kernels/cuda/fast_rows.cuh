/* What the merge makes of a row's sums: the output a as pass B's operand, its norm, the softmax's
 * denominator, and the exact term of the one key that the plain form would not get right.
 *
 * Where a rule weighs rows, the weight c_t is in there already: in the denominator always, and
 *
 *   DKV_CU_FORM_DIST      in top_weight, p of the top key, and in `unit`
 *   DKV_CU_FORM_PROJ      no key is singled out: p (a . v) is safe for every p
 *   DKV_CU_FORM_AVERAGE   in a, which has no values of the window, and in top_weight, which is the
 *                         log2 of what the row's other keys weigh, 1 - p; instead of a distance
 *                         gaps_of() has a vector
 */
#ifndef DKV_KERNELS_CUDA_FAST_ROWS_CUH
#define DKV_KERNELS_CUDA_FAST_ROWS_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

/* Four adjacent dimensions of a row of the row group; eight lanes have 32 of them. */
struct row_part {
    int row; /* -1: none */
    int dimension;
};

/* Four adjacent elements of a key's value. */
template <class S>
__device__ __forceinline__ float4 value_of(const job &work, int key, int dimension)
{
    const unsigned char *row = dkv_cu_row(work.block.v, work.unit.v, work.block.valid_from + key,
                                          &work.unit.report->bad_v_entry);
    if (!row)
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const uint2 bits = S::FP8 ? fp16_of_fp8(*reinterpret_cast<const uint32_t *>(row + dimension),
                                            work.block.v.dtype)
                              : *reinterpret_cast<const uint2 *>(row + 2 * dimension);
    const float2 low = unpack<typename S::type>(bits.x);
    const float2 high = unpack<typename S::type>(bits.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

/* The same as far as the row's output has it. */
template <class S> __device__ __forceinline__ bool is_left_out(const job &work, int key)
{
    return S::FORM == DKV_CU_FORM_AVERAGE &&
           key >= static_cast<int>(work.block.n_valid - work.block.window);
}

__device__ __forceinline__ float4 no_values(void)
{
    return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <class S>
__device__ __forceinline__ float4 value_in_output(const job &work, int key, int dimension)
{
    if (is_left_out<S>(work, key))
        return no_values();
    return value_of<S>(work, key, dimension);
}

/* x * weight + y */
__device__ __forceinline__ float4 scale_add(float weight, const float4 &x, const float4 &y)
{
    return make_float4(fmaf(weight, x.x, y.x), fmaf(weight, x.y, y.y), fmaf(weight, x.z, y.z),
                       fmaf(weight, x.w, y.w));
}

/* Whether the row's largest key may stay in the sums: it has less than half of the weight, so that
 * the plain form is safe for it too. */
__device__ __forceinline__ bool is_flat(const partial_head &head)
{
    return !signbit(head.sum) && head.sum > 2.0f;
}

/* A row's softmax, as far as one thread has it. */
struct finished_row {
    float4 output; /* a */
    float lse;
    int top;
    float top_weight;
    float top_distance; /* the part of four dimensions */
    float weight;       /* the row's, by rules that have one */
};

/* log2 of what a row counts in the reduction over a head's rows; see row_weight() in rows.cuh. */
template <class S>
__device__ __forceinline__ float octaves_of_row(const dkv_cu_block &block, uint32_t unit_row)
{
    if (S::FORM != DKV_CU_FORM_AVERAGE && block.reduce == DKV_REDUCE_SUM)
        return 0.0f;
    if (S::FORM != DKV_CU_FORM_AVERAGE && block.reduce == DKV_REDUCE_MEAN)
        return -log2_fast(static_cast<float>(block.window));
    const uint32_t t = unit_row % block.window;
    const float newer = static_cast<float>(block.window - 1 - t); /* rows */
    const float faded = newer > 0.0f ? newer * log2_fast(1.0f - block.ema_alpha) : 0.0f;
    return t > 0 ? faded + log2_fast(block.ema_alpha) : faded;
}

/* DKV_CU_FORM_AVERAGE: float [rows of the row group][DIM], of those whose top key is known: b - v,
 * b being the output without that key; if it is the window's, the output less v. */
template <class S> __device__ __forceinline__ float *gaps_of(const job &work)
{
    const uint32_t groups = (work.block.group * work.block.window + S::ROWS - 1) / S::ROWS;
    return reinterpret_cast<float *>(work.unit.work + groups * sizeof(merged<S>)) +
           work.item.row_group * static_cast<size_t>(S::ROWS * S::DIM);
}

/* The learned sink logit of a row in octaves, -inf without. */
__device__ __forceinline__ float sink_logit(const job &work, uint32_t unit_row)
{
    return work.unit.sink_logits
               ? work.unit.sink_logits[unit_row / work.block.window] * 1.4426950408889634f
               : -INFINITY;
}

__device__ __forceinline__ finished_row finish_flat(const merge_state &state, float sink)
{
    const float base = fmaxf(state.head.base, sink);
    const float less = exp2_fast(state.head.base - base);
    const float all = fmaf(state.head.sum, less, exp2_fast(sink - base));
    const float factor = less / all;
    return {make_float4(state.output.x * factor, state.output.y * factor, state.output.z * factor,
                        state.output.w * factor),
            base + log2f(all),
            -1,
            0.0f,
            0.0f,
            1.0f};
}

/* With the top key taken out, whose value is v. `alone`: the row sees no other key; it adds nothing
 * to any score that has odds, sink logit or not. */
template <int form>
__device__ __forceinline__ finished_row finish_peaked(const merge_state &state, float sink,
                                                      const float4 &v, bool alone)
{
    float base = state.head.base;
    float rest = fabsf(state.head.sum); /* everything but the top key */
    float4 sums = state.output;
    if (!signbit(state.head.sum)) {
        rest -= 1.0f;
        sums = scale_add(-1.0f, v, sums);
    }
    if (sink > -INFINITY) {
        const float larger = fmaxf(base, sink);
        const float less = exp2_fast(base - larger);
        rest = fmaf(rest, less, exp2_fast(sink - larger));
        sums = make_float4(sums.x * less, sums.y * less, sums.z * less, sums.w * less);
        base = larger;
    }
    finished_row row;
    row.top = form == DKV_CU_FORM_PROJ ? -1 : state.head.key;
    row.top_distance = 0.0f;
    row.weight = 1.0f;
    if (form != DKV_CU_FORM_PROJ && !alone && rest > 0.0f) {
        const float4 minus_v = make_float4(-v.x, -v.y, -v.z, -v.w);
        const float4 d = scale_add(1.0f / rest, sums, minus_v);
        row.top_distance = (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w);
        if (row.top_distance <= EQUAL * ((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w)))
            row.top_distance = 0.0f;
    }
    const float reference = fmaxf(state.head.top, base);
    const float top = exp2_fast(state.head.top - reference); /* the top key's weight */
    const float less = exp2_fast(base - reference);
    const float all = fmaf(rest, less, top);
    const float inverse = 1.0f / all;
    const float4 a = scale_add(
        top, v, make_float4(sums.x * less, sums.y * less, sums.z * less, sums.w * less));
    row.output = make_float4(a.x * inverse, a.y * inverse, a.z * inverse, a.w * inverse);
    row.lse = reference + log2f(all);
    const float p = top * inverse * static_cast<float>(1ull << DKV_CU_EXPONENT);
    row.top_weight = alone || rest <= 0.0f ? 0.0f : form == DKV_CU_FORM_DROPKV ? p * p : p;
    return row;
}

/* The row of an average: its output lacks the window's values, v among them if `left_out`. `gap`:
 * see gaps_of(). */
__device__ __forceinline__ finished_row finish_averaged(const merge_state &state, float sink,
                                                        const float4 &v, bool left_out, float4 &gap)
{
    const bool joined = !signbit(state.head.sum);
    const float base = fmaxf(state.head.base, sink);
    const float moved = exp2_fast(state.head.base - base);
    const float rest = fmaf(fabsf(state.head.sum) - (joined ? 1.0f : 0.0f), moved,
                            exp2_fast(sink - base));
    const float4 outer = scale_add(left_out ? 0.0f : 1.0f, v, no_values());
    const float4 sums = scale_add(moved, scale_add(joined ? -1.0f : 0.0f, outer, state.output),
                                  no_values());
    const float reference = fmaxf(state.head.top, base);
    const float top = exp2_fast(state.head.top - reference);
    const float less = exp2_fast(base - reference);
    const float all = fmaf(rest, less, top);
    const float inverse = 1.0f / all;
    finished_row row;
    row.output = scale_add(less * inverse, sums, scale_add(top * inverse, outer, no_values()));
    row.lse = reference + log2f(all);
    row.top = state.head.key;
    row.top_weight = log2f(rest) + (base - row.lse);
    row.top_distance = 0.0f;
    const float factor = left_out ? less * inverse : rest > 0.0f ? 1.0f / rest : 0.0f;
    gap = scale_add(factor, sums, scale_add(-1.0f, v, no_values()));
    return row;
}

/* Writes a row's results, a part by each lane. */
template <class S>
__device__ __forceinline__ void write_row(const finished_row &row, const row_part &part,
                                          merged<S> &into)
{
    using type = typename S::type;
    const float4 &a = row.output;
    const uint2 hi = make_uint2(pack<type>(a.x, a.y), pack<type>(a.z, a.w));
    const float2 h0 = unpack<type>(hi.x);
    const float2 h1 = unpack<type>(hi.y);
    const uint2 lo = make_uint2(pack<type>(a.x - h0.x, a.y - h0.y),
                                pack<type>(a.z - h1.x, a.w - h1.y));
    const float2 l0 = unpack<type>(lo.x);
    const float2 l1 = unpack<type>(lo.y);
    const float4 both = make_float4(h0.x + l0.x, h0.y + l0.y, h1.x + l1.x, h1.y + l1.y);
    float norm = (both.x * both.x + both.y * both.y) + (both.z * both.z + both.w * both.w);
    float distance = row.top_distance;
    constexpr bool HAS_DISTANCES = S::FORM == DKV_CU_FORM_DROPKV || S::FORM == DKV_CU_FORM_DIST;
#pragma unroll
    for (int lanes = 1; HAS_DISTANCES && lanes < 8; lanes *= 2) {
        norm += __shfl_xor_sync(~0u, norm, lanes);
        distance += __shfl_xor_sync(~0u, distance, lanes);
    }
    if (part.row < 0)
        return;
    unsigned char *first = into.a[part.row / BLOCK_ROWS] +
                           pair_offset<S>(part.row % BLOCK_ROWS, part.dimension / 2);
    unsigned char *second = into.a[part.row / BLOCK_ROWS] +
                            pair_offset<S>(part.row % BLOCK_ROWS, part.dimension / 2 + 1);
    constexpr int LO = BLOCK_ROWS / 8 * S::EIGHT_BYTES;
    if constexpr (S::FP8) {
        __stcg(reinterpret_cast<uint32_t *>(first), hi.x);
        __stcg(reinterpret_cast<uint32_t *>(second), hi.y);
        __stcg(reinterpret_cast<uint32_t *>(first + LO), lo.x);
        __stcg(reinterpret_cast<uint32_t *>(second + LO), lo.y);
    } else {
        __stcg(reinterpret_cast<uint2 *>(first), hi);
        __stcg(reinterpret_cast<uint2 *>(first + LO), lo);
    }
    if (HAS_DISTANCES && part.dimension % 32 == 0) {
        __stcg(&into.norm[part.row][part.dimension / 32], norm);
        __stcg(&into.top_distance[part.row][part.dimension / 32], distance);
    }
    if (part.dimension == 0) {
        __stcg(&into.lse[part.row], row.lse);
        __stcg(&into.top[part.row], row.top);
        __stcg(&into.top_weight[part.row], row.top_weight);
        if constexpr (S::FORM == DKV_CU_FORM_DIST)
            __stcg(&into.unit[part.row], row.weight > 0.0f ? RANGE / row.weight : 0.0f);
        if constexpr (S::FORM == DKV_CU_FORM_AVERAGE)
            __stcg(&into.weight[part.row], row.weight);
    }
}

/* Puts the row's weight where this rule wants it, see above. */
template <class S> __device__ __forceinline__ void weigh_row(finished_row &row, float octaves)
{
    const float weight = exp2_fast(octaves);
    row.weight = weight;
    row.lse -= octaves;
    if (S::FORM == DKV_CU_FORM_AVERAGE) {
        row.top_weight += octaves;
        row.output = scale_add(weight, row.output, no_values());
    } else {
        row.top_weight *= weight;
    }
}

/* As finish_peaked() or finish_averaged(), with the top key's value read. */
template <class S>
__device__ __forceinline__ finished_row finish_top(const merge_state &state, const row_part &part,
                                                   const job &work, float sink, bool alone)
{
    const float4 v = value_of<S>(work, state.head.key, part.dimension);
    if constexpr (S::FORM == DKV_CU_FORM_AVERAGE) {
        float4 gap;
        const finished_row row = finish_averaged(state, sink, v,
                                                 is_left_out<S>(work, state.head.key), gap);
        __stcg(reinterpret_cast<float4 *>(gaps_of<S>(work) + part.row * S::DIM + part.dimension),
               gap);
        return row;
    } else {
        return finish_peaked<S::FORM>(state, sink, v, alone);
    }
}

/* A row's results from its merged state, as far as one thread has it. */
template <class S>
__device__ __forceinline__ finished_row finish_row(const merge_state &state, const row_part &part,
                                                   const job &work)
{
    const dkv_cu_block &block = work.block;
    const uint32_t unit_row = work.item.row_group * S::ROWS + part.row;
    const bool exists = unit_row < block.group * block.window;
    if (!exists || state.head.key < 0) {
        if (exists) /* logits below NO_KEY */
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), INFINITY, -1, 0.0f, 0.0f, 0.0f};
    }
    const float sink = sink_logit(work, unit_row);
    const bool alone = block.n_valid == block.window && unit_row % block.window == 0;
    finished_row row = is_flat(state.head) ? finish_flat(state, sink)
                                           : finish_top<S>(state, part, work, sink, alone);
    const float4 &a = row.output;
    if (!dkv_cu_finite(row.lse) || !dkv_cu_finite((a.x + a.y) + (a.z + a.w)))
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    if (S::FORM != DKV_CU_FORM_DROPKV)
        weigh_row<S>(row, octaves_of_row<S>(block, unit_row));
    return row;
}

} // namespace dkv_fast

#endif
