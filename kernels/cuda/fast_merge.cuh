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
        const float4 words = __ldcg(reinterpret_cast<const float4 *>(
            first + static_cast<size_t>(chunk) * S::PARTIAL_BYTES + row * sizeof(partial_head)));
        return {words.x, words.y, words.z, __float_as_int(words.w)};
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
    const float base = fmaxf(winner.head.base, loser.head.top);
    const float more = exp2_fast(winner.head.base - base);
    const float less = exp2_fast(loser.head.base - base);
    into.head = winner.head;
    into.head.base = base;
    into.output = make_float4(winner.output.x * more, winner.output.y * more,
                              winner.output.z * more, winner.output.w * more);
    into.output = scale_add(less, loser.output, into.output);
    float sum = fmaf(less, fabsf(loser.head.sum), fabsf(winner.head.sum) * more);
    if (signbit(loser.head.sum) && loser.head.top != NO_KEY) {
        const float weight = exp2_fast(loser.head.top - base);
        into.output = scale_add(weight, value_of<S>(work, loser.head.key, cell.dimension),
                                into.output);
        sum += weight;
    }
    into.head.sum = signbit(winner.head.sum) ? -sum : sum;
}

__device__ __forceinline__ merge_state no_partial(void)
{
    return {{NO_KEY, NO_KEY, -0.0f, -1}, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
}

/* Merges `ahead` chunks from `chunk` on into each of the states, all loads in flight together. */
template <class S, int states, int ahead>
__device__ __forceinline__ void merge_chunks(merge_state (&state)[states],
                                             const partial_cell<S> (&cell)[states], int chunk,
                                             const job &work)
{
    merge_state from[states][ahead];
#pragma unroll
    for (int i = 0; i < states; i++)
#pragma unroll
        for (int c = 0; c < ahead; c++)
            from[i][c] = {cell[i].head(chunk + c), cell[i].output(chunk + c)};
#pragma unroll
    for (int i = 0; i < states; i++)
#pragma unroll
        for (int c = 0; c < ahead; c++)
            merge_two<S>(state[i], from[i][c], cell[i], work);
}

/* Merges chunks first..last-1. */
template <class S, int states>
__device__ __forceinline__ void merge_range(merge_state (&state)[states],
                                            const partial_cell<S> (&cell)[states], int first,
                                            int last, const job &work)
{
    constexpr int AHEAD = S::MERGE_AHEAD / states;
#pragma unroll 1
    for (; first + AHEAD <= last; first += AHEAD)
        merge_chunks<S, states, AHEAD>(state, cell, first, work);
#pragma unroll 1
    for (; first + 2 <= last; first += 2)
        merge_chunks<S, states, 2>(state, cell, first, work);
    if (first < last)
        merge_chunks<S, states, 1>(state, cell, first, work);
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
};

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
            base + log2f(all), -1, 0.0f, 0.0f};
}

/* With the top key taken out, whose value is v. `alone`: the row sees no other key; it adds nothing
 * to any score, sink logit or not. */
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
    row.top = state.head.key;
    row.top_distance = 0.0f;
    if (!alone && rest > 0.0f) {
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
    row.top_weight = alone || rest <= 0.0f ? 0.0f : p * p;
    return row;
}

/* Writes a segment's results; its eight lanes share the row. */
template <class S>
__device__ __forceinline__ void write_row(const finished_row &row, const partial_cell<S> &cell,
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
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
        norm += __shfl_xor_sync(~0u, norm, lanes);
        distance += __shfl_xor_sync(~0u, distance, lanes);
    }
    if (cell.row < 0)
        return;
    unsigned char *to = into.a[cell.row / BLOCK_ROWS] +
                        element_offset<S>(cell.row % BLOCK_ROWS, cell.dimension / 8) +
                        cell.dimension % 8 * 2;
    __stcg(reinterpret_cast<uint2 *>(to), hi);
    __stcg(reinterpret_cast<uint2 *>(to + BLOCK_ROWS / 8 * S::EIGHT_BYTES), lo);
    if (cell.dimension % 32 == 0) {
        __stcg(&into.norm[cell.row][cell.dimension / 32], norm);
        __stcg(&into.top_distance[cell.row][cell.dimension / 32], distance);
    }
    if (cell.dimension == 0) {
        __stcg(&into.lse[cell.row], row.lse);
        __stcg(&into.top[cell.row], row.top);
        __stcg(&into.top_weight[cell.row], row.top_weight);
    }
}

/* A row's results from its merged state. */
template <class S>
__device__ __forceinline__ finished_row finish_row(const merge_state &state,
                                                   const partial_cell<S> &cell, const job &work)
{
    const dkv_cu_block &block = work.block;
    const uint32_t unit_row = work.item.row_group * S::ROWS + cell.row;
    const bool exists = unit_row < block.group * block.window;
    if (!exists || state.head.key < 0) {
        if (exists) /* logits below NO_KEY */
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        return {make_float4(0.0f, 0.0f, 0.0f, 0.0f), INFINITY, -1, 0.0f, 0.0f};
    }
    const float sink = sink_logit(work, unit_row);
    const bool alone = block.n_valid == block.window && unit_row % block.window == 0;
    const finished_row row =
        is_flat(state.head)
            ? finish_flat(state, sink)
            : finish_peaked(state, sink, value_of<S>(work, state.head.key, cell.dimension), alone);
    const float4 &a = row.output;
    if (!dkv_cu_finite(row.lse) || !dkv_cu_finite((a.x + a.y) + (a.z + a.w)))
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    return row;
}

/* Segments base + i * step of a slice that ends at `last`, by eight threads each; of their chunks
 * those of `group` out of `groups`, whose states meet in `room`. */
template <class S, int states>
__device__ __forceinline__ void merge_segments(merge_state (&room)[GROUP_THREADS / 2],
                                               const job &work, const unsigned char *partials,
                                               int base, int step, int last, int group, int groups,
                                               int thread)
{
    constexpr int PER_ROW = S::DIM / 32;
    merged<S> &into = reinterpret_cast<merged<S> *>(work.unit.work)[work.item.row_group];
    const int chunks = work.item.chunks;
    partial_cell<S> cell[states];
    merge_state state[states];
    bool live[states];
#pragma unroll
    for (int i = 0; i < states; i++) {
        const int segment = min(base + i * step, last - 1);
        live[i] = base + i * step < last;
        cell[i] = {partials, segment / PER_ROW, segment % PER_ROW * 32 + thread % 8 * 4};
        state[i] = no_partial();
    }
    merge_range<S, states>(state, cell, chunks * group / groups, chunks * (group + 1) / groups,
                           work);
    for (int half = groups / 2; half > 0; half /= 2) { /* then there is one segment a thread */
        const int lanes = GROUP_THREADS / groups;
        if (group >= half && group < 2 * half)
            room[thread - half * lanes] = state[0];
        group_barrier(BARRIER_MERGE);
        if (group < half)
            merge_two<S>(state[0], room[thread], cell[0], work);
        group_barrier(BARRIER_MERGE);
    }
#pragma unroll
    for (int i = 0; i < states; i++) {
        finished_row row = {};
        if (live[i] && group == 0)
            row = finish_row<S>(state[i], cell[i], work);
        else
            cell[i].row = -1;
        write_row<S>(row, cell[i], into);
    }
}

/* This thread block's slice. Eight lanes hold a segment's 32 dimensions. A slice of few segments
 * has threads to spare, which share the chunks; one of many takes two segments a thread, whose
 * loads overlap. */
template <class S>
__device__ __forceinline__ void merge_slice(merge_state (&room)[GROUP_THREADS / 2], const job &work,
                                            const unsigned char *partials, int thread)
{
    constexpr int SEGMENTS = S::ROWS * S::DIM / 32;
    constexpr int AT_ONCE = GROUP_THREADS / 8;
    const int chunks = work.item.chunks;
    const int first = SEGMENTS * work.item.chunk / chunks;
    const int last = SEGMENTS * (work.item.chunk + 1) / chunks;
    if (last - first > AT_ONCE) {
        for (int base = first; base < last; base += 2 * AT_ONCE)
            merge_segments<S, 2>(room, work, partials, base + thread / 8, AT_ONCE, last, 0, 1,
                                 thread);
    } else if (last > first) {
        int at_once = 1;
        while (at_once < last - first)
            at_once *= 2;
        const int lanes = 8 * at_once;
        merge_segments<S, 1>(room, work, partials, first + thread % lanes / 8, AT_ONCE, last,
                             thread / lanes, GROUP_THREADS / lanes, thread);
    }
}

} // namespace dkv_fast

#endif
