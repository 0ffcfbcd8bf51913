/* The merge of the stream scorer for up to 64 rows: partials of a unit's chunks become one softmax
 * per row (fast_merge.cuh says how they add up). A group of four warps first finds what each
 * partial weighs, then goes through the rows, four dimensions a thread, with the loads of the next
 * ones under way. Chunks are added in their order.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FEW_MERGE_CUH
#define DKV_KERNELS_CUDA_STREAM_FEW_MERGE_CUH

#include "kernels/cuda/fast_merge.cuh"
#include "kernels/cuda/stream_few_shape.cuh"

namespace dkv_stream
{

template <class S> struct few_merge {
    static constexpr int AHEAD = 4;                       /* loads under way */
    static constexpr int LANES = GROUP_THREADS / S::ROWS; /* threads that share a row's heads */
    static constexpr int PER_ROW = S::DIM / 4;            /* threads that share its output */
    static constexpr int CELLS = S::ROWS * PER_ROW / GROUP_THREADS;

    const job &work;
    few_merge_room<S> &room;
    const unsigned char *partials;
    int chunks;
    int thread;

    __device__ __forceinline__ few_merge(const job &of, int of_chunks, few_merge_room<S> &in,
                                         int of_thread)
        : work(of), room(in), partials(few_partials_of<S>(of)), chunks(of_chunks), thread(of_thread)
    {
    }

    /* Row and dimensions of the thread's part of a cell. */
    __device__ __forceinline__ row_part part_of(int cell) const
    {
        const int index = cell * GROUP_THREADS + thread;
        return {index / PER_ROW, index % PER_ROW * 4};
    }

    __device__ __forceinline__ void load_heads(int first, partial_head (&head)[AHEAD]) const
    {
        const int chunk = first + thread % LANES;
        const unsigned char *from = partials + thread / LANES * sizeof(partial_head) +
                                    chunk * static_cast<size_t>(S::PARTIAL_BYTES);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            head[i] = no_partial();
            if (chunk + LANES * i < chunks)
                head[i] = partial_cell<S>::load_head(
                    from + LANES * i * static_cast<size_t>(S::PARTIAL_BYTES));
        }
    }

    /* What each row's sums are relative to, and what each chunk's weigh. */
    __device__ __forceinline__ void weigh(void)
    {
        const int row = thread / LANES;
        partial_head head[AHEAD];
        partial_head leader = no_partial();
        int first = 0;
#pragma unroll 1
        for (;; first += AHEAD * LANES) {
            load_heads(first, head);
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                lead(leader, head[i]);
            if (first + AHEAD * LANES >= chunks)
                break;
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2)
            lead(leader,
                 {__shfl_xor_sync(~0u, leader.top, step), __shfl_xor_sync(~0u, leader.base, step),
                  __shfl_xor_sync(~0u, leader.sum, step), __shfl_xor_sync(~0u, leader.key, step)});
        float sum = 0.0f;
        unsigned long long outside = 0;
#pragma unroll 1
        for (;; load_heads(first -= AHEAD * LANES, head)) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int chunk = first + thread % LANES + LANES * i;
                if (chunk >= chunks)
                    continue;
                const float weight = exp2_fast(head[i].base - leader.base);
                room.weights[chunk][row] = weight;
                sum = fmaf(weight, fabsf(head[i].sum), sum);
                if (stands_outside(head[i]) && head[i].key != leader.key) {
                    outside |= 1ull << chunk;
                    sum += exp2_fast(head[i].top - leader.base);
                }
            }
            if (first == 0)
                break;
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            outside |= __shfl_xor_sync(~0u, outside, step);
        }
        leader.sum = signbit(leader.sum) ? -sum : sum;
        if (thread % LANES == 0)
            close(row, leader, outside);
    }

    /* A row's softmax from the head of all its chunks; as finish_flat() and finish_peaked(). */
    __device__ __forceinline__ void close(int row, const partial_head &head,
                                          unsigned long long outside)
    {
        const dkv_cu_block &block = work.block;
        const bool exists = row < static_cast<int>(block.group * block.window);
        const float sink = exists ? sink_logit(work, row) : -INFINITY;
        const bool flat = is_flat(head);
        const bool alone = block.n_valid == block.window && row % block.window == 0;
        const float joined = flat || signbit(head.sum) ? 0.0f : 1.0f;
        const float base = fmaxf(head.base, sink);
        const float moved = exp2_fast(head.base - base);
        const float rest = fmaf(fabsf(head.sum) - joined, moved, exp2_fast(sink - base));
        const float reference = flat ? base : fmaxf(head.top, base);
        const float top = flat ? 0.0f : exp2_fast(head.top - reference);
        const float less = exp2_fast(base - reference);
        const float all = fmaf(rest, less, top);
        const float inverse = 1.0f / all;
        const bool singled = !flat && !alone && rest > 0.0f;
        row_factors to = {};
        to.a_s = less * inverse * moved;
        to.a_v = fmaf(-joined, to.a_s, top * inverse);
        to.d_s = singled ? moved / rest : 0.0f;
        to.d_v = singled ? fmaf(-joined, to.d_s, -1.0f) : 0.0f;
        to.base = head.base;
        to.top = flat ? -1 : head.key;
        to.outside = outside;
        float lse = reference + log2f(all);
        const float p = top * inverse * (1.0f / RANGE);
        if (!exists || head.key < 0) {
            to = {};
            to.top = -1;
            lse = INFINITY;
        }
        if (chunks > 0 && exists && !dkv_cu_finite(lse)) /* or all logits below NO_KEY */
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        room.rows[row] = to;
        merged<S> &into = rows_of<S>(work).rows;
        into.lse[row] = lse;
        into.top[row] = to.top;
        into.top_weight[row] = singled ? p * p : 0.0f;
    }

    /* Sums of chunks from `first` on. */
    __device__ __forceinline__ void load_outputs(const row_part &part, int first,
                                                 float4 (&output)[AHEAD]) const
    {
        const unsigned char *from = partials + S::ROWS * sizeof(partial_head) +
                                    (part.row * S::DIM + part.dimension) * sizeof(float) +
                                    first * static_cast<size_t>(S::PARTIAL_BYTES);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            output[i] = no_values();
            if (first + i < chunks)
                output[i] = __ldcg(reinterpret_cast<const float4 *>(
                    from + i * static_cast<size_t>(S::PARTIAL_BYTES)));
        }
    }

    /* The part of the row's top key's value, if it is wanted. */
    __device__ __forceinline__ float4 load_top(const row_part &part) const
    {
        const int key = room.rows[part.row].top;
        return key < 0 ? no_values() : value_of<S>(work, key, part.dimension);
    }

    /* Keys that stand outside their chunks' sums. Rare. */
    __device__ __forceinline__ void add_outside(const row_part &part, float4 &sums) const
    {
        const row_factors &row = room.rows[part.row];
        unsigned long long left = row.outside;
#pragma unroll 1
        while (left != 0) {
            const int chunk = __ffsll(left) - 1;
            left &= left - 1;
            const partial_head head = partial_cell<S>::load_head(
                partials + chunk * static_cast<size_t>(S::PARTIAL_BYTES) +
                part.row * sizeof(partial_head));
            sums = scale_add(exp2_fast(head.top - row.base),
                             value_of<S>(work, head.key, part.dimension), sums);
        }
    }

    /* Writes a row's output as operand of pass B, its norm and the top key's distance. */
    __device__ __forceinline__ void write(const row_part &part, const float4 &sums,
                                          const float4 &v) const
    {
        using type = typename S::type;
        const row_factors &row = room.rows[part.row];
        const float4 a = scale_add(row.a_s, sums, scale_add(row.a_v, v, no_values()));
        const float4 d = scale_add(row.d_s, sums, scale_add(row.d_v, v, no_values()));
        const uint2 hi = make_uint2(pack<type>(a.x, a.y), pack<type>(a.z, a.w));
        const float2 h0 = unpack<type>(hi.x);
        const float2 h1 = unpack<type>(hi.y);
        const uint2 lo = make_uint2(pack<type>(a.x - h0.x, a.y - h0.y),
                                    pack<type>(a.z - h1.x, a.w - h1.y));
        const float2 l0 = unpack<type>(lo.x);
        const float2 l1 = unpack<type>(lo.y);
        const float4 both = make_float4(h0.x + l0.x, h0.y + l0.y, h1.x + l1.x, h1.y + l1.y);
        float norm = (both.x * both.x + both.y * both.y) + (both.z * both.z + both.w * both.w);
        float distance = (d.x * d.x + d.y * d.y) + (d.z * d.z + d.w * d.w);
        if (distance <= EQUAL * ((v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w)))
            distance = 0.0f;
        if (!dkv_cu_finite((a.x + a.y) + (a.z + a.w)))
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) {
            norm += __shfl_xor_sync(~0u, norm, lanes);
            distance += __shfl_xor_sync(~0u, distance, lanes);
        }
        merged<S> &into = rows_of<S>(work).rows;
        unsigned char *to = into.a[part.row / BLOCK_ROWS] +
                            pair_offset<S>(part.row % BLOCK_ROWS, part.dimension / 2);
        *reinterpret_cast<uint2 *>(to) = hi;
        *reinterpret_cast<uint2 *>(to + BLOCK_ROWS / 8 * S::EIGHT_BYTES) = lo;
        if (part.dimension % 32 == 0) {
            into.norm[part.row][part.dimension / 32] = norm;
            into.top_distance[part.row][part.dimension / 32] = distance;
        }
    }

    /* Rows of cells first_cell..last_cell-1. */
    __device__ __forceinline__ void add(int first_cell, int last_cell)
    {
        float4 next[AHEAD];
        row_part part = part_of(first_cell);
        load_outputs(part, 0, next);
        float4 next_top = load_top(part);
        float4 sums = no_values();
        int cell = first_cell;
        int chunk = 0;
#pragma unroll 1
        for (;;) {
            float4 output[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                output[i] = next[i];
            const float4 top = next_top;
            const int first = chunk;
            const bool is_last = chunk + AHEAD >= chunks; /* of the cell */
            chunk = is_last ? 0 : chunk + AHEAD;
            cell += is_last;
            const row_part after = part_of(cell);
            if (cell < last_cell) {
                load_outputs(after, chunk, next);
                next_top = load_top(after);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (first + i < chunks)
                    sums = scale_add(room.weights[first + i][part.row], output[i], sums);
            }
            if (!is_last)
                continue;
            add_outside(part, sums);
            write(part, sums, top);
            if (cell >= last_cell)
                return;
            part = after;
            sums = no_values();
        }
    }

    __device__ __forceinline__ void run(int first_cell, int last_cell)
    {
        if (thread == 0 && first_cell == 0)
            *work.unit.exponent = DKV_CU_EXPONENT;
        weigh();
        __syncthreads();
        add(first_cell, last_cell);
    }
};

/* Merges a part of the rows of a unit: item.row_group is how many parts there are, item.chunk which
 * this is. Eight thread blocks fit on a multiprocessor. */
template <class S>
__global__ void __launch_bounds__(GROUP_THREADS, 8) stream_few_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    __shared__ job work;
    __shared__ few_merge_room<S> room;
    const dkv_fast_item item = args.items[blockIdx.x];
    if (threadIdx.x < 32) {
        copy_words(work.unit, args.units + item.unit, threadIdx.x);
        copy_words(work.block, args.blocks + item.block, threadIdx.x);
        if (threadIdx.x == 0)
            work.item = item;
    }
    const int cells = few_merge<S>::CELLS / item.row_group;
    /* First of nothing, while pass A still runs, to have the code in the instruction caches. */
#pragma unroll 1
    for (int time = 0; time < 2; time++) {
        __syncthreads();
        if (time > 0)
            griddepcontrol_wait();
        few_merge<S>(work, time > 0 ? item.chunks : 0, room, threadIdx.x)
            .run(item.chunk * cells, (item.chunk + 1) * cells);
    }
#endif
}

} // namespace dkv_stream

#endif
