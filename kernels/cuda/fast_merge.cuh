/* The merge: partials of all chunks of a unit become one softmax per row.
 *
 * Every thread block that holds a chunk merges one slice of the unit's output: some segments of 32
 * dimensions of a row. Slices depend on the number of chunks alone, and partials are added in the
 * order of a fixed tree, so the bits do not depend on who comes first.
 *
 * Of two partials the larger top key stays; the other one, if it still stands outside its sums,
 * joins now. The merged base is the larger of what the sums are made of, so that they neither
 * overflow nor vanish. What is left outside at the end is the row's top key, and the sums are
 * exactly the softmax without it: b.
 */
#ifndef DKV_KERNELS_CUDA_FAST_MERGE_CUH
#define DKV_KERNELS_CUDA_FAST_MERGE_CUH

#include "kernels/cuda/fast_fp8.cuh"

namespace dkv_fast
{

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

/* x * weight + y */
__device__ __forceinline__ float4 scale_add(float weight, const float4 &x, const float4 &y)
{
    return make_float4(fmaf(weight, x.x, y.x), fmaf(weight, x.y, y.y), fmaf(weight, x.z, y.z),
                       fmaf(weight, x.w, y.w));
}

/* The partials of one row group of a unit, and the part of them that one thread merges. */
template <class S> struct partial_cell {
    const unsigned char *first; /* chunk 0's */
    int row;
    int dimension; /* the first of four */

    __device__ __forceinline__ partial_head head(int chunk) const
    {
        const float2 head = __ldcg(reinterpret_cast<const float2 *>(
            first + static_cast<size_t>(chunk) * S::PARTIAL_BYTES + row * 8));
        return {head.x, head.y};
    }
    __device__ __forceinline__ int key(int chunk) const
    {
        return __ldcg(reinterpret_cast<const int *>(
            first + static_cast<size_t>(chunk) * S::PARTIAL_BYTES + S::ROWS * 8 + row * 4));
    }
    /* Of a partial whose top key stands outside. */
    __device__ __forceinline__ float base(int chunk) const
    {
        return __ldcg(reinterpret_cast<const float *>(
            first + static_cast<size_t>(chunk) * S::PARTIAL_BYTES + S::ROWS * 12 + row * 4));
    }
    __device__ __forceinline__ float4 output(int chunk) const
    {
        return __ldcg(
            reinterpret_cast<const float4 *>(first + static_cast<size_t>(chunk) * S::PARTIAL_BYTES +
                                             S::ROWS * 16 + (row * S::DIM + dimension) * 4));
    }
};

/* `into` += `from`, whose chunks come later. */
template <class S>
__device__ __forceinline__ void merge_two(merge_state &into, const merge_state &from,
                                          const partial_cell<S> &cell, const job &work)
{
    const bool from_wins = from.head.top > into.head.top;
    const merge_state winner = from_wins ? from : into;
    const merge_state loser = from_wins ? into : from;
    const float base = fmaxf(winner.base, loser.head.top);
    const float more = exp2_fast(winner.base - base);
    const float less = exp2_fast(loser.base - base);
    into.head.top = winner.head.top;
    into.base = base;
    into.chunk = winner.chunk;
    into.output = make_float4(winner.output.x * more, winner.output.y * more,
                              winner.output.z * more, winner.output.w * more);
    into.output = scale_add(less, loser.output, into.output);
    float sum = fmaf(less, fabsf(loser.head.sum), fabsf(winner.head.sum) * more);
    if (signbit(loser.head.sum) && loser.head.top != NO_KEY) {
        const float weight = exp2_fast(loser.head.top - base);
        into.output = scale_add(weight, value_of<S>(work, cell.key(loser.chunk), cell.dimension),
                                into.output);
        sum += weight;
    }
    into.head.sum = signbit(winner.head.sum) ? -sum : sum;
}

__device__ __forceinline__ merge_state no_partial(void)
{
    return {{NO_KEY, -0.0f}, NO_KEY, 0, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
}

/* Merges chunks first..last-1; the loads of some of them are in flight together. */
template <class S>
__device__ __forceinline__ merge_state merge_range(const partial_cell<S> &cell, int first, int last,
                                                   const job &work)
{
    constexpr int AHEAD = S::R == 1 ? 8 : 4;
    merge_state state = no_partial();
    for (int p = first; p < last; p += AHEAD) {
        partial_head head[AHEAD];
        float4 output[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            head[i] = cell.head(min(p + i, last - 1));
            output[i] = cell.output(min(p + i, last - 1));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (p + i < last) {
                const float base = signbit(head[i].sum) ? cell.base(p + i) : head[i].top;
                merge_two<S>(state, {head[i], base, p + i, output[i]}, cell, work);
            }
        }
    }
    return state;
}

/* A row's results from its merged state: the thread's four dimensions of a; returns their part of
 * |b - v|^2, where v is the top key's value. `writes`: also what the row has once. */
template <class S>
__device__ __forceinline__ float finish_row(merge_state state, int key, const float4 &v,
                                            const partial_cell<S> &cell, const job &work,
                                            bool writes, merged<S> &into)
{
    const dkv_cu_block &block = work.block;
    const uint32_t unit_row = work.item.row_group * S::ROWS + cell.row;
    float4 &output = *reinterpret_cast<float4 *>(&into.output[cell.row][cell.dimension]);
    const bool exists = unit_row < block.group * block.window;
    if (!exists || key < 0) {
        if (exists) /* logits below NO_KEY */
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        output = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (writes) {
            into.lse[cell.row] = INFINITY;
            into.top[cell.row] = -1;
            into.top_weight[cell.row] = 0.0f;
        }
        return 0.0f;
    }
    /* A row that sees one key adds nothing to any score, sink logit or not. */
    const bool alone = block.n_valid == block.window && unit_row % block.window == 0;
    float base = state.base;
    float rest = fabsf(state.head.sum); /* everything but the top key */
    float4 sums = state.output;
    if (!signbit(state.head.sum)) {
        rest -= 1.0f;
        sums = scale_add(-1.0f, v, sums);
    }
    if (work.unit.sink_logits) {
        const float sink = work.unit.sink_logits[unit_row / block.window] * 1.4426950408889634f;
        const float larger = fmaxf(base, sink);
        const float less = exp2_fast(base - larger);
        rest = fmaf(rest, less, exp2_fast(sink - larger));
        sums = make_float4(sums.x * less, sums.y * less, sums.z * less, sums.w * less);
        base = larger;
    }
    float distance = 0.0f;
    if (!alone && rest > 0.0f) {
        const float4 minus_v = make_float4(-v.x, -v.y, -v.z, -v.w);
        const float4 d = scale_add(1.0f / rest, sums, minus_v);
        distance = (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w);
        if (distance <= EQUAL * ((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w)))
            distance = 0.0f;
    }
    const float reference = fmaxf(state.head.top, base);
    const float top = exp2_fast(state.head.top - reference); /* the top key's weight */
    const float less = exp2_fast(base - reference);
    const float all = fmaf(rest, less, top);
    const float inverse = 1.0f / all;
    const float4 a = scale_add(
        top, v, make_float4(sums.x * less, sums.y * less, sums.z * less, sums.w * less));
    output = make_float4(a.x * inverse, a.y * inverse, a.z * inverse, a.w * inverse);
    const float lse = reference + log2f(all);
    if (!dkv_cu_finite(lse) || !dkv_cu_finite((a.x + a.y) + (a.z + a.w)))
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    if (writes) {
        const float p = top * inverse * static_cast<float>(1ull << DKV_CU_EXPONENT);
        into.lse[cell.row] = lse;
        into.top[cell.row] = key;
        into.top_weight[cell.row] = alone || rest <= 0.0f ? 0.0f : p * p;
    }
    return distance;
}

/* This thread block's slice. Eight lanes hold a segment's 32 dimensions. A slice of few segments
 * has threads to spare, which share the chunks; one of many takes several segments a thread, whose
 * loads overlap. */
template <class S>
__device__ __forceinline__ void merge_slice(merge_state (&room)[GROUP_THREADS / 2], const job &work,
                                            const unsigned char *partials, int thread)
{
    constexpr int SEGMENTS = S::ROWS * S::DIM / 32;
    constexpr int PER_ROW = S::DIM / 32;
    constexpr int SIDE_BY_SIDE = 2;
    merged<S> &into = reinterpret_cast<merged<S> *>(work.unit.work)[work.item.row_group];
    const int chunks = work.item.chunks;
    const int first = SEGMENTS * work.item.chunk / chunks;
    const int last = SEGMENTS * (work.item.chunk + 1) / chunks;
    int at_once = 1; /* segments */
    while (8 * at_once < GROUP_THREADS && at_once < last - first)
        at_once *= 2;
    const int lanes = 8 * at_once;
    const int groups = GROUP_THREADS / lanes;
    const int group = thread / lanes;
    for (int base = first; base < last; base += SIDE_BY_SIDE * at_once) {
        partial_cell<S> cell[SIDE_BY_SIDE];
        merge_state state[SIDE_BY_SIDE];
        bool live[SIDE_BY_SIDE];
        int key[SIDE_BY_SIDE];
        float4 v[SIDE_BY_SIDE];
#pragma unroll
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
            const int segment = base + i * at_once + thread % lanes / 8;
            live[i] = segment < last;
            cell[i] = {partials, min(segment, last - 1) / PER_ROW,
                       min(segment, last - 1) % PER_ROW * 32 + thread % 8 * 4};
            state[i] = no_partial();
            if (live[i])
                state[i] = merge_range<S>(cell[i], chunks * group / groups,
                                          chunks * (group + 1) / groups, work);
        }
        for (int half = groups / 2; half > 0; half /= 2) { /* then there is one segment a thread */
            if (group >= half && group < 2 * half)
                room[thread - half * lanes] = state[0];
            group_barrier(BARRIER_MERGE);
            if (group < half && live[0])
                merge_two<S>(state[0], room[thread], cell[0], work);
            group_barrier(BARRIER_MERGE);
        }
#pragma unroll
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
            live[i] &= group == 0;
            key[i] = live[i] ? cell[i].key(state[i].chunk) : -1;
        }
#pragma unroll
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (key[i] >= 0)
                v[i] = value_of<S>(work, key[i], cell[i].dimension);
        }
#pragma unroll
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
            float distance = 0.0f;
            if (live[i])
                distance = finish_row<S>(state[i], key[i], v[i], cell[i], work,
                                         cell[i].dimension == 0, into);
            for (int other = 1; other < 8; other *= 2)
                distance += __shfl_xor_sync(~0u, distance, other);
            if (live[i] && thread % 8 == 0)
                into.top_distance[cell[i].row][cell[i].dimension / 32] = distance;
        }
    }
}

} // namespace dkv_fast

#endif
