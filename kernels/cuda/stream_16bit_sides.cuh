/* head_dim 256 in the stream scorer: tiles of 64 keys are 32 KB, so a thread block has one item
 * and one set of rings, and groups of four warps with roles:
 *
 *   sides     32 rows each, one side or two, which have the same tiles and know nothing of each
 *             other's rows: each has a row group of its own, an item has two then
 *   fetching  copies tiles, and sums up |v|^2 in pass B. Starting the copies of a step takes over a
 *             thousand cycles, which sides do not have
 *
 * In a step of pass A all meet when keys of the next step and values of this one are there, and the
 * weights; then the fetching group fills the places of this step's keys and of the values of the
 * one before. It must not start those copies before, or the others wait for it. In pass B all meet
 * at a step's beginning; it fills the place of values then, and that of keys when there are logits.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_SIDES_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_SIDES_CUH

#include "kernels/cuda/stream_16bit_pass_a.cuh"
#include "kernels/cuda/stream_16bit_pass_b.cuh"
#include "kernels/cuda/stream_merge.cuh"

namespace dkv_stream_16bit
{

/* ROWS and what follows from it are those of a side. */
template <class element, int sides, bool keeps = false>
struct sides_shape : shape<element, 256, 1> {
    static constexpr int GROUPS = 1;
    static constexpr int SIDES = sides;
    static constexpr bool FETCHED = true;
    static constexpr bool KEEPS = keeps;
    static constexpr int THREADS = (sides + 1) * GROUP_THREADS;
    static constexpr int A_KEYS = 3;
    static constexpr int A_VALUES = sides == 1 ? 3 : 2;
    static constexpr int B_KEYS = 2;
    static constexpr int B_VALUES = sides == 1 ? 3 : 2;
    static constexpr keys_order B_ORDER = KEYS_EARLY;

    /* Registers of a thread in pass A of two sides, whose three groups have as many at launch. */
    static constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
    static constexpr int FETCH_REGISTERS = sides == 1 ? LAUNCH_REGISTERS : 72;
    static constexpr int SIDE_REGISTERS = sides == 1 ? LAUNCH_REGISTERS : 216;
};

/* ---- shared memory: what must lie at multiples of 1024 bytes first ---- */

template <class S> struct __align__(1024) shared_a
{
    struct {
        unsigned char weights[2 * TILE * 128];
        unsigned char query[S::OPERAND_BYTES];
    } operands[S::SIDES];
    typename streams_a<S>::rings rings;
    struct {
        float shift[S::ROWS];
        float base[S::ROWS];
        float top[S::ROWS];
        int key[S::ROWS];
        float factor[S::ROWS];
        float joins[S::ROWS];
        int hidden[S::ROWS];
        job work;
    } rows[S::SIDES];
};

/* What a side sees of it: see room_a. */
template <class S> struct side_a {
    unsigned char (&weights)[2 * TILE * 128];
    unsigned char (&query)[S::OPERAND_BYTES];
    typename streams_a<S>::rings &rings;
    float (&shift)[S::ROWS];
    float (&base)[S::ROWS];
    float (&top)[S::ROWS];
    int (&key)[S::ROWS];
    float (&factor)[S::ROWS];
    float (&joins)[S::ROWS];
    int (&hidden)[S::ROWS];
    job &work;

    __device__ __forceinline__ side_a(shared_a<S> &shared, int side)
        : weights(shared.operands[side].weights), query(shared.operands[side].query),
          rings(shared.rings), shift(shared.rows[side].shift), base(shared.rows[side].base),
          top(shared.rows[side].top), key(shared.rows[side].key), factor(shared.rows[side].factor),
          joins(shared.rows[side].joins), hidden(shared.rows[side].hidden),
          work(shared.rows[side].work)
    {
    }
};

template <class S> struct __align__(1024) shared_b
{
    struct {
        unsigned char a[2][S::OPERAND_BYTES];
        unsigned char query[S::OPERAND_BYTES];
    } operands[S::SIDES];
    typename streams_b<S>::rings rings;
    struct {
        float2 norm[S::ROWS / 2];
        float2 shift[S::ROWS / 2];
        job work;
    } rows[S::SIDES];
    float squares[TILE]; /* |v|^2 of a tile's values */
    float others[TILE];  /* the second side's sums of a tile's keys */
};

/* See room_b. */
template <class S> struct side_b {
    unsigned char (&a)[2][S::OPERAND_BYTES];
    unsigned char (&query)[S::OPERAND_BYTES];
    typename streams_b<S>::rings &rings;
    float2 (&norm)[S::ROWS / 2];
    float2 (&shift)[S::ROWS / 2];
    job &work;
    float (&squares)[TILE];
    float (&others)[TILE];

    __device__ __forceinline__ side_b(shared_b<S> &shared, int side)
        : a(shared.operands[side].a), query(shared.operands[side].query), rings(shared.rings),
          norm(shared.rows[side].norm), shift(shared.rows[side].shift),
          work(shared.rows[side].work), squares(shared.squares), others(shared.others)
    {
    }
};

/* ---- items ---- */

/* By a shuffle, so that the compiler knows that it is the same for all lanes. */
__device__ __forceinline__ int group_in_block(void)
{
    return __shfl_sync(~0u, here(threadIdx.x / GROUP_THREADS), 0);
}

/* As take_item(), by all groups; `work` is the side's, whose descriptors say its own row group. */
template <class S>
__device__ __forceinline__ bool take_item_together(job &work, const stream_args &args,
                                                   uint32_t turn, int group, const place<S> &at)
{
    meet<S>(0); /* nobody is at the item before any more */
    bool there;
    if (group < S::SIDES) {
        there = take_item<S>(work, args, turn, 0, 1 + group, at);
        if (S::SIDES > 1 && at.thread == 0)
            work.item.row_group = S::SIDES * work.item.row_group + group;
    } else {
        there = args.items[turn * gridDim.x + blockIdx.x].chunks != 0;
    }
    if (there)
        meet<S>(0);
    return there;
}

/* ---- the fetching group ---- */

template <class S>
__device__ __forceinline__ void fetch_a(shared_a<S> &shared, streams_a<S> &stream,
                                        const place<S> &at)
{
    const job &work = shared.rows[0].work;
    const int tiles = item_tiles(work);
    stream.begin(work, shared.rings, tiles, at);
    stream.template wait<2 * (S::A_KEYS - 1)>();
    meet<S>(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        stream.wait();
        meet_any<S>(0, false);
        stream.copy(work, at);
    }
    meet<S>(0); /* the sides use the rings for something else now */
}

/* |v|^2 of the tile's values, for the sides. */
template <class S>
__device__ __forceinline__ void leave_squares(float (&squares)[TILE], uint32_t v_tile,
                                              const place<S> &at)
{
    float square[2];
    sum_squares<S>(v_tile, at, square);
    if (at.t < 2)
        squares[16 * at.warp + at.g + 8 * at.t] = at.t == 0 ? square[0] : square[1];
}

template <class S>
__device__ __forceinline__ void fetch_b(shared_b<S> &shared, streams_b<S> &stream,
                                        const place<S> &at)
{
    const job &work = shared.rows[0].work;
    const int tiles = work.item.chunks;
    stream.begin(work, shared.rings, tiles, at);
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        stream.wait();
        meet<S>(0);
        stream.next_values(work, at);
        leave_squares<S>(shared.squares, stream.values(), at);
        arrive_at<BARRIER_SQUARES, S::THREADS>();
        meet_at<BARRIER_LOGITS, S::THREADS>();
        stream.next_keys(work, at);
        stream.advance();
    }
}

/* ---- kernels, empty except for sm_90a ---- */

template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_sides_a(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_a<S> &shared = *reinterpret_cast<shared_a<S> *>(shared_bytes);
    const int group = group_in_block();
    if (group == S::SIDES) {
        registers_set<S::FETCH_REGISTERS, S::LAUNCH_REGISTERS>();
        const place<S> at(thread_in_group());
        streams_a<S> stream;
        stream.policy = policy_normal();
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (take_item_together<S>(shared.rows[0].work, args, turn, group, at))
                fetch_a<S>(shared, stream, at);
        }
    } else {
        registers_set<S::SIDE_REGISTERS, S::LAUNCH_REGISTERS>();
        side_a<S> room(shared, group);
        group_a<S, side_a<S>> work(room, group, thread_in_group());
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (take_item_together<S>(room.work, args, turn, group, work.at))
                work.run();
        }
    }
#endif
}

template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_sides_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    merge_part<S, 1, S::SIDES>(args, [](const job &work) { return partials_of<S>(work); });
#endif
}

/* What it reads before griddepcontrol_wait(), no kernel before it writes. */
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_sides_b(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    shared_b<S> &shared = *reinterpret_cast<shared_b<S> *>(shared_bytes);
    const int group = group_in_block();
    if (group == S::SIDES) {
        const place<S> at(thread_in_group());
        streams_b<S> stream;
        stream.policy = policy_evict_first();
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (take_item_together<S>(shared.rows[0].work, args, turn, group, at))
                fetch_b<S>(shared, stream, at);
        }
    } else {
        side_b<S> room(shared, group);
        group_b<S, side_b<S>> work(room, group, thread_in_group());
        bool waits = true;
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (!take_item_together<S>(room.work, args, turn, group, work.at))
                continue;
            work.run(waits);
            waits = false;
        }
    }
#endif
}

} // namespace dkv_stream_16bit

#endif
