/* The merge: partials of all chunks of a unit become one softmax per row.
 *
 * Every thread block that holds a chunk merges one slice of the unit's output: some segments of 32
 * dimensions of a row. Slices depend on the number of chunks alone, and partials are added in a
 * fixed order, so the bits do not depend on who comes first.
 *
 * First the row's leading head is found: of all chunks' top keys the largest, and the largest of
 * what the sums will be made of, which they are relative to, so that they neither overflow nor
 * vanish. Then the chunks' sums are added, and the top keys that still stand outside theirs. What
 * is left outside at the end is the row's top key, if it did not join before, and the sums are
 * exactly the softmax without it: b.
 */
#ifndef DKV_KERNELS_CUDA_FAST_MERGE_CUH
#define DKV_KERNELS_CUDA_FAST_MERGE_CUH

#include "kernels/cuda/fast_rows.cuh"

namespace dkv_fast
{

/* The partials of one row group of a unit, and the part of them that one thread merges. */
template <class S> struct partial_cell {
    row_part part;
    const unsigned char *heads; /* chunk 0's */
    const unsigned char *outputs;

    __device__ __forceinline__ partial_cell(const unsigned char *partials, const row_part &of)
        : part(of), heads(partials + of.row * sizeof(partial_head)),
          outputs(partials + S::ROWS * sizeof(partial_head) +
                  (of.row * S::DIM + of.dimension) * sizeof(float))
    {
    }
    static __device__ __forceinline__ size_t offset(int chunk)
    {
        return chunk * static_cast<size_t>(S::PARTIAL_BYTES);
    }
    __device__ __forceinline__ partial_head head(int chunk) const
    {
        return load_head(heads + offset(chunk));
    }
    static __device__ __forceinline__ partial_head load_head(const unsigned char *from)
    {
        const float4 words = __ldcg(reinterpret_cast<const float4 *>(from));
        return {words.x, words.y, words.z, __float_as_int(words.w)};
    }
};

__device__ __forceinline__ partial_head no_partial(void)
{
    return {NO_KEY, NO_KEY, -0.0f, -1};
}

/* Whether a partial's top key stands outside its sums. */
__device__ __forceinline__ bool stands_outside(const partial_head &head)
{
    return signbit(head.sum) && head.top != NO_KEY;
}

/* What the sums of two partials together are relative to: the larger top key leads, the lower of
 * equals; the other one will be in the sums. Of `sum` the sign alone means something afterwards. */
__device__ __forceinline__ void lead(partial_head &into, const partial_head &from)
{
    const bool from_leads = from.top > into.top || (from.top == into.top && from.key < into.key);
    const float base = from_leads ? fmaxf(from.base, into.top) : fmaxf(into.base, from.top);
    into = from_leads ? from : into;
    into.base = base;
}

/* How a slice's threads share it: `lanes` threads hold all segments that are merged at once, and
 * the group has several such sets, which share the chunks. All are powers of two. */
struct merge_crew {
    int log_lanes;
    int thread;

    __device__ __forceinline__ int lanes(void) const
    {
        return 1 << log_lanes;
    }
    __device__ __forceinline__ int set(void) const
    {
        return thread >> log_lanes;
    }
    __device__ __forceinline__ bool shares(void) const
    {
        return lanes() < GROUP_THREADS;
    }
    /* The first of this set's share of n, or with set() + 1 the first of the next one's. */
    __device__ __forceinline__ int share(int n, int of_set) const
    {
        return n * of_set << log_lanes >> LOG_GROUP_THREADS;
    }
    /* Within a warp sets meet by shuffles, beyond by shared memory, `stride` places apart. */
    __device__ __forceinline__ int stride(void) const
    {
        return max(lanes(), 32);
    }
};

/* The leading head of all sets' chunks. */
__device__ __forceinline__ void share_head(partial_head &head, merge_room &room,
                                           const merge_crew &crew)
{
#pragma unroll 1
    for (int step = crew.lanes(); step < 32; step *= 2) {
        const partial_head other = {
            __shfl_xor_sync(~0u, head.top, step), __shfl_xor_sync(~0u, head.base, step),
            __shfl_xor_sync(~0u, head.sum, step), __shfl_xor_sync(~0u, head.key, step)};
        lead(head, other);
    }
    room.heads[crew.thread] = head;
    group_barrier(BARRIER_MERGE);
    int at = crew.thread & (crew.stride() - 1);
    head = room.heads[at];
#pragma unroll 1
    while ((at += crew.stride()) < GROUP_THREADS)
        lead(head, room.heads[at]);
}

/* The sums of all sets' chunks, for set 0. */
__device__ __forceinline__ void add_sets(merge_state &state, merge_room &room,
                                         const merge_crew &crew)
{
#pragma unroll 1
    for (int step = crew.lanes(); step < 32; step *= 2) {
        state.head.sum += __shfl_xor_sync(~0u, state.head.sum, step);
        state.output.x += __shfl_xor_sync(~0u, state.output.x, step);
        state.output.y += __shfl_xor_sync(~0u, state.output.y, step);
        state.output.z += __shfl_xor_sync(~0u, state.output.z, step);
        state.output.w += __shfl_xor_sync(~0u, state.output.w, step);
    }
    room.outputs[crew.thread] = state.output;
    room.sums[crew.thread] = state.head.sum;
    group_barrier(BARRIER_MERGE);
    if (crew.set() > 0)
        return;
#pragma unroll 1
    for (int at = crew.stride() + crew.thread; at < GROUP_THREADS; at += crew.stride()) {
        state.head.sum += room.sums[at];
        state.output = scale_add(1.0f, room.outputs[at], state.output);
    }
}

/* Partials of `size` chunks from `chunk` on, all loads in flight together; none from `last` on. */
template <class S, int size> struct partial_batch {
    partial_head head[size];
    float4 output[size];

    __device__ __forceinline__ void load_heads(const partial_cell<S> &cell, int chunk, int last)
    {
        const unsigned char *from = cell.heads + cell.offset(chunk);
#pragma unroll
        for (int c = 0; c < size; c++) {
            head[c] = no_partial();
            if (chunk + c < last)
                head[c] = cell.load_head(from + c * S::PARTIAL_BYTES);
        }
    }
    __device__ __forceinline__ void load_outputs(const partial_cell<S> &cell, int chunk, int last)
    {
        const unsigned char *from = cell.outputs + cell.offset(chunk);
#pragma unroll
        for (int c = 0; c < size; c++) {
            output[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (chunk + c < last)
                output[c] = __ldcg(reinterpret_cast<const float4 *>(from + c * S::PARTIAL_BYTES));
        }
    }
    __device__ __forceinline__ void find_leader(partial_head &leader) const
    {
#pragma unroll
        for (int c = 0; c < size; c++)
            lead(leader, head[c]);
    }
    /* Adds to sums whose leader is known; its sign is left alone. Keys that stand outside and do
     * not lead are left to add_outside(): bit `first` + c each. */
    __device__ __forceinline__ void add_to(merge_state &state, float &sum, unsigned &outside,
                                           int first) const
    {
#pragma unroll
        for (int c = 0; c < size; c++) {
            const float weight = exp2_fast(head[c].base - state.head.base);
            sum = fmaf(weight, fabsf(head[c].sum), sum);
            state.output = scale_add(weight, output[c], state.output);
            if (stands_outside(head[c]) && head[c].key != state.head.key)
                outside |= 1u << (first + c);
        }
    }
};

/* One thread's part of a row's sums, and which chunks' keys are still to join: at most 32. */
struct chunk_sums {
    merge_state state = {no_partial(), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    float sum = 0.0f; /* without the sign */
    unsigned outside = 0;

    __device__ __forceinline__ void close(void)
    {
        state.head.sum = signbit(state.head.sum) ? -sum : sum;
    }
};

/* Adds up chunks first..last-1, relative to the leading head of all chunks of the row. */
template <class S>
__device__ __forceinline__ chunk_sums add_chunks(const partial_cell<S> &cell, int first, int last,
                                                 merge_room &room, const merge_crew &crew)
{
    constexpr int AHEAD = S::MERGE_AHEAD;
    partial_batch<S, AHEAD> batch;
    chunk_sums sums;
    int chunk = first;
#pragma unroll 1
    for (;; chunk += AHEAD) {
        batch.load_heads(cell, chunk, last);
        const bool is_last = chunk + AHEAD >= last;
        if (is_last)
            batch.load_outputs(cell, chunk, last);
        batch.find_leader(sums.state.head);
        if (is_last)
            break;
    }
    if (crew.shares())
        share_head(sums.state.head, room, crew);
#pragma unroll 1
    for (;;) {
        batch.add_to(sums.state, sums.sum, sums.outside, chunk - first);
        if (chunk == first)
            break;
        chunk -= AHEAD;
        batch.load_heads(cell, chunk, last);
        batch.load_outputs(cell, chunk, last);
    }
    sums.close();
    return sums;
}

/* Keys that stood outside their chunk's sums join the row's. `outside`: see add_chunks(). Rare. */
template <class S>
__device__ __forceinline__ void add_outside(merge_state &state, unsigned outside, int first,
                                            const partial_cell<S> &cell, const job &work)
{
#pragma unroll 1
    while (outside != 0) {
        const partial_head head = cell.head(first + __ffs(outside) - 1);
        outside &= outside - 1;
        const float weight = exp2_fast(head.top - state.head.base);
        state.output = scale_add(weight, value_in_output<S>(work, head.key, cell.part.dimension),
                                 state.output);
        state.head.sum += signbit(state.head.sum) ? -weight : weight;
    }
}

/* The part that a thread merges of the segment at `segment`, eight lanes a segment. */
template <class S> __device__ __forceinline__ row_part part_of(int segment, int thread)
{
    constexpr int PER_ROW = S::DIM / 32;
    return {segment / PER_ROW, segment % PER_ROW * 32 + thread % 8 * 4};
}

/* Segments first..last-1 of a row group of many chunks. A slice of few segments has threads to
 * spare, which share the chunks. */
template <class S>
__device__ __forceinline__ void merge_many(merge_room &room, merged<S> &into, const job &work,
                                           const unsigned char *partials, int first, int last,
                                           int thread)
{
    const int chunks = work.item.chunks;
    merge_crew crew = {3, thread};
    while (crew.shares() && crew.lanes() < 8 * (last - first))
        crew.log_lanes++;
    const int first_chunk = crew.share(chunks, crew.set());
    const int last_chunk = crew.share(chunks, crew.set() + 1);
#pragma unroll 1
    for (int base = first; base < last; base += GROUP_THREADS / 8) {
        const int segment = base + ((thread & (crew.lanes() - 1)) >> 3);
        row_part part = part_of<S>(min(segment, last - 1), thread);
        const partial_cell<S> cell(partials, part);
        chunk_sums sums = add_chunks<S>(cell, first_chunk, last_chunk, room, crew);
        add_outside<S>(sums.state, sums.outside, first_chunk, cell, work);
        if (crew.shares())
            add_sets(sums.state, room, crew);
        finished_row row = {};
        if (segment < last && crew.set() == 0)
            row = finish_row<S>(sums.state, part, work);
        else
            part.row = -1;
        write_row<S>(row, part, into);
    }
}

/* The same of a row group of few chunks, whose slices are large: a thread takes two segments at
 * once, whose loads overlap. */
template <class S>
__device__ __forceinline__ void merge_few(merged<S> &into, const job &work,
                                          const unsigned char *partials, int first, int last,
                                          int thread)
{
    constexpr int STEP = GROUP_THREADS / 8;
    const int chunks = work.item.chunks;
#pragma unroll 1
    for (int base = first + (thread >> 3); base - (thread >> 3) < last; base += 2 * STEP) {
        partial_batch<S, S::MERGE_AHEAD / 2> batch[2];
        chunk_sums sums[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int segment = min(base + i * STEP, last - 1);
            const partial_cell<S> cell(partials, part_of<S>(segment, thread));
            batch[i].load_heads(cell, 0, chunks);
            batch[i].load_outputs(cell, 0, chunks);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            batch[i].find_leader(sums[i].state.head);
            batch[i].add_to(sums[i].state, sums[i].sum, sums[i].outside, 0);
            sums[i].close();
        }
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int segment = base + i * STEP;
            row_part part = part_of<S>(min(segment, last - 1), thread);
            merge_state state = i == 0 ? sums[0].state : sums[1].state;
            add_outside<S>(state, i == 0 ? sums[0].outside : sums[1].outside, 0,
                           partial_cell<S>(partials, part), work);
            finished_row row = {};
            if (segment < last)
                row = finish_row<S>(state, part, work);
            else
                part.row = -1;
            write_row<S>(row, part, into);
        }
    }
}

/* A slice, by one thread block. What it needs is there once: it runs once an item, and who
 * executes code that left the instruction caches waits for it. */
template <class S>
__device__ __forceinline__ void merge_slice(merge_room &room, const job &work,
                                            const unsigned char *partials, int slice, int slices,
                                            int thread)
{
    constexpr int SEGMENTS = S::ROWS * S::DIM / 32;
    const int chunks = work.item.chunks;
    const int first = SEGMENTS * slice / slices;
    const int last = SEGMENTS * (slice + 1) / slices;
    merged<S> &into = reinterpret_cast<merged<S> *>(work.unit.work)[work.item.row_group];
    if (chunks <= S::MERGE_AHEAD / 2)
        merge_few<S>(into, work, partials, first, last, here(thread));
    else
        merge_many<S>(room, into, work, partials, first, last, here(thread));
}

} // namespace dkv_fast

#endif
