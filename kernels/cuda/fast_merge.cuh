/* The merge: partials of all chunks of a unit become one softmax per row.
 *
 * Every thread block that holds a chunk merges one slice of the unit's output: a range of quads,
 * where a quad is two rows by eight dimensions, the 64 bytes that four lanes of a fragment hold.
 * Slices depend on the number of chunks alone, and partials are added in the order of a fixed
 * tree, so the bits do not depend on who comes first.
 *
 * Two partials merge by rescaling to the larger reference; the smaller one's key, if it still
 * stands outside its sums, joins now. What is left outside at the end is the row's top key, and
 * the sums are exactly the softmax without it: b.
 */
#ifndef DKV_KERNELS_CUDA_FAST_MERGE_CUH
#define DKV_KERNELS_CUDA_FAST_MERGE_CUH

#include "kernels/cuda/fast_shape.cuh"

namespace dkv_fast
{

/* Two adjacent elements of a key's value. */
template <class S>
__device__ __forceinline__ float2 value_pair(const job &work, int key, int dimension)
{
    const unsigned char *row = dkv_cu_row(work.block.v, work.unit.v, work.block.valid_from + key,
                                          &work.unit.report->bad_v_entry);
    return row ? unpack<typename S::type>(
                     *reinterpret_cast<const uint32_t *>(row + 2 * dimension))
               : make_float2(0.0f, 0.0f);
}

/* The partials of one row group of a unit. */
struct partial_set {
    const unsigned char *first;
    size_t stride; /* from one chunk's to the next */

    __device__ __forceinline__ const partial_head *heads(int chunk) const
    {
        return reinterpret_cast<const partial_head *>(first + chunk * stride);
    }
};

template <class S>
__device__ __forceinline__ int reference_key(const partial_set &partials, int chunk, int row)
{
    return __ldcg(reinterpret_cast<const int *>(partials.heads(chunk) + S::ROWS) + row);
}

/* Row i of `into` += row i of `from`, whose chunks come later. */
template <class S>
__device__ __forceinline__ void merge_row(merge_state &into, const merge_state &from, int i,
                                          const partial_set &partials, const job &work, int row,
                                          int dimension)
{
    const bool from_wins = from.head[i].reference > into.head[i].reference;
    const partial_head winner = from_wins ? from.head[i] : into.head[i];
    const partial_head loser = from_wins ? into.head[i] : from.head[i];
    const int loser_chunk = from_wins ? into.chunk[i] : from.chunk[i];
    const float weight = exp2_fast(loser.reference - winner.reference);
    float x = fmaf(weight, from_wins ? into.output[i][0] : from.output[i][0],
                   from_wins ? from.output[i][0] : into.output[i][0]);
    float y = fmaf(weight, from_wins ? into.output[i][1] : from.output[i][1],
                   from_wins ? from.output[i][1] : into.output[i][1]);
    float sum = fmaf(weight, fabsf(loser.sum), fabsf(winner.sum));
    if (signbit(loser.sum) && loser.reference != NO_REFERENCE) {
        const float2 v =
            value_pair<S>(work, reference_key<S>(partials, loser_chunk, row), dimension);
        x = fmaf(weight, v.x, x);
        y = fmaf(weight, v.y, y);
        sum += weight;
    }
    into.head[i].reference = winner.reference;
    into.head[i].sum = signbit(winner.sum) ? -sum : sum;
    into.chunk[i] = from_wins ? from.chunk[i] : into.chunk[i];
    into.output[i][0] = x;
    into.output[i][1] = y;
}

__device__ __forceinline__ void clear(merge_state &state)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        state.head[i] = {NO_REFERENCE, -0.0f};
        state.chunk[i] = 0;
        state.output[i][0] = state.output[i][1] = 0.0f;
    }
}

/* Merges chunks first..last-1 for one fragment cell; four chunks' loads in flight. */
template <class S>
__device__ __forceinline__ merge_state merge_range(const partial_set &partials, int first, int last,
                                                   int cell, int row, const job &work,
                                                   int dimension)
{
    constexpr int AHEAD = 4;
    merge_state state;
    clear(state);
    for (int p = first; p < last; p += AHEAD) {
        float2 head[AHEAD][2];
        float4 output[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const partial_head *heads = partials.heads(min(p + i, last - 1));
            head[i][0] = __ldcg(reinterpret_cast<const float2 *>(heads + row));
            head[i][1] = __ldcg(reinterpret_cast<const float2 *>(heads + row + 8));
            output[i] = __ldcg(reinterpret_cast<const float4 *>(heads + 2 * S::ROWS) + cell);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (p + i >= last)
                break;
            merge_state next;
            next.head[0] = {head[i][0].x, head[i][0].y};
            next.head[1] = {head[i][1].x, head[i][1].y};
            next.chunk[0] = next.chunk[1] = p + i;
            next.output[0][0] = output[i].x, next.output[0][1] = output[i].y;
            next.output[1][0] = output[i].z, next.output[1][1] = output[i].w;
            merge_row<S>(state, next, 0, partials, work, row, dimension);
            merge_row<S>(state, next, 1, partials, work, row + 8, dimension);
        }
    }
    return state;
}

/* One row's results from its merged state: output[] becomes a; returns |b - v|^2 of the thread's two
 * dimensions. */
template <class S>
__device__ __forceinline__ float finish_row(const partial_head &head, int key, float (&output)[2],
                                            const job &work, int row, int dimension, bool writes,
                                            merged<S> &into)
{
    const dkv_cu_block &block = work.block;
    const uint32_t unit_row = work.item.row_group * S::ROWS + row;
    if (unit_row >= block.group * block.window || key < 0) {
        output[0] = output[1] = 0.0f;
        if (writes) {
            into.lse[row] = INFINITY;
            into.top[row] = -1;
            into.top_weight[row] = 0.0f;
        }
        return 0.0f;
    }
    const float2 v = value_pair<S>(work, key, dimension);
    float rest = fabsf(head.sum); /* everything but the top key */
    if (!signbit(head.sum)) {
        rest -= 1.0f;
        output[0] -= v.x;
        output[1] -= v.y;
    }
    float reference = head.reference;
    float top = 1.0f;
    if (work.unit.sink_logits) {
        const float sink = work.unit.sink_logits[unit_row / block.window] * 1.4426950408889634f;
        const float larger = fmaxf(reference, sink);
        const float factor = exp2_fast(reference - larger);
        rest = fmaf(rest, factor, exp2_fast(sink - larger));
        output[0] *= factor;
        output[1] *= factor;
        top = factor;
        reference = larger;
    }
    const float all = rest + top;
    float distance = 0.0f;
    if (rest > 0.0f) {
        const float inverse = 1.0f / rest;
        const float x = fmaf(output[0], inverse, -v.x);
        const float y = fmaf(output[1], inverse, -v.y);
        distance = fmaf(x, x, y * y);
        if (distance <= EQUAL * fmaf(v.x, v.x, v.y * v.y))
            distance = 0.0f;
    }
    const float inverse = 1.0f / all;
    output[0] = fmaf(top, v.x, output[0]) * inverse;
    output[1] = fmaf(top, v.y, output[1]) * inverse;
    const float lse = reference + log2f(all);
    if (!dkv_cu_finite(lse) || !dkv_cu_finite(output[0]) || !dkv_cu_finite(output[1]))
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    if (writes) {
        const float p = top * inverse * static_cast<float>(1ull << DKV_CU_EXPONENT);
        into.lse[row] = lse;
        into.top[row] = key;
        into.top_weight[row] = rest > 0.0f ? p * p : 0.0f;
    }
    return distance;
}

/* This thread block's slice. */
template <class S>
__device__ __forceinline__ void merge_slice(merge_state (&room)[MERGE_THREADS / 2], const job &work,
                                            const partial_set &partials, int thread)
{
    constexpr int QUADS = S::ROW_TILES * S::D_TILES * 8;
    merged<S> &into = reinterpret_cast<merged<S> *>(work.unit.work)[work.item.row_group];
    const int chunks = work.item.chunks;
    const int first_cell = QUADS * work.item.chunk / chunks * 4;
    const int last_cell = QUADS * (work.item.chunk + 1) / chunks * 4;
    int lanes = 4; /* cells at a time; the threads beyond share the chunks of a cell */
    while (lanes < MERGE_THREADS && lanes < last_cell - first_cell)
        lanes *= 2;
    const int groups = MERGE_THREADS / lanes;
    const int group = thread / lanes;
    for (int base = first_cell; base < last_cell; base += lanes) {
        const int cell = base + thread % lanes;
        const bool live = cell < last_cell;
        const int d_tile = cell / 32 % S::D_TILES;
        const int row = cell / (S::D_TILES * 32) * 16 + cell % 32 / 4;
        const int dimension = d_tile * 8 + cell % 4 * 2;
        merge_state state;
        clear(state);
        if (live)
            state = merge_range<S>(partials, chunks * group / groups, chunks * (group + 1) / groups,
                                   cell, row, work, dimension);
        for (int half = groups / 2; half > 0; half /= 2) {
            if (group >= half && group < 2 * half)
                room[thread - half * lanes] = state;
            barrier<BARRIER_MERGE, MERGE_THREADS>();
            if (group < half && live) {
                const merge_state other = room[thread];
                merge_row<S>(state, other, 0, partials, work, row, dimension);
                merge_row<S>(state, other, 1, partials, work, row + 8, dimension);
            }
            barrier<BARRIER_MERGE, MERGE_THREADS>();
        }
        const bool mine = live && group == 0;
        float distance[2] = {0.0f, 0.0f};
        if (mine) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = reference_key<S>(partials, state.chunk[i], row + 8 * i);
                distance[i] = finish_row<S>(state.head[i], key, state.output[i], work, row + 8 * i,
                                            dimension, d_tile == 0 && cell % 4 == 0, into);
            }
            into.output[cell] = make_float4(state.output[0][0], state.output[0][1],
                                            state.output[1][0], state.output[1][1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            distance[i] += __shfl_xor_sync(~0u, distance[i], 1);
            distance[i] += __shfl_xor_sync(~0u, distance[i], 2);
            if (mine && cell % 4 == 0)
                into.top_distance[row + 8 * i][d_tile] = distance[i];
        }
    }
}

} // namespace dkv_fast

#endif
