/* Pass B of 16-bit caches of up to 64 rows in the stream scorer: the score of every key, as
 * fast_pass_b.cuh says, from logits made again. A warp has 16 keys of a tile to itself, a thread
 * keys g and g + 8 of them, and of every eight rows 2t and 2t + 1: in [j][c], c = 2 * (key is g +
 * 8) + (row is odd). hi and lo of a are added up by the tensor cores.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_PASS_B_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_PASS_B_CUH

#include "kernels/cuda/stream_16bit_shape.cuh"
#include "kernels/cuda/stream_terms.cuh"

namespace dkv_stream_16bit
{

/* The unit's last tiles first, which L2 still has of pass A. */
template <class S> using streams_b = tile_streams<S, S::B_KEYS, S::B_VALUES, S::B_ORDER, true>;

/* What a group has in shared memory. */
template <class S> struct __align__(1024) room_b
{
    unsigned char a[2][S::OPERAND_BYTES]; /* hi and lo of the merged rows */
    unsigned char query[S::OPERAND_BYTES];
    typename streams_b<S>::rings rings;
    float2 norm[S::ROWS / 2];  /* |a|^2 of rows 2i and 2i + 1 */
    float2 shift[S::ROWS / 2]; /* log2 of their denominators, less the range factor */
    job work;
};

template <class S, class room_type = room_b<S>> struct group_b : group_terms<S, room_type> {
    using terms = group_terms<S, room_type>;
    using terms::COLUMNS, terms::at, terms::barrier, terms::room;

    int side; /* the group's number, where several have the same tiles */
    streams_b<S> stream;

    __device__ __forceinline__ group_b(room_type &in, int group, int thread)
        : terms(in, group, thread), side(group)
    {
        stream.policy = policy_evict_first();
    }

    /* The item that is in the room. `waits`: for the merge, before which it is not known. */
    __device__ __forceinline__ void run(bool waits)
    {
        const job &work = room.work;
        const logit_rule rule(work);
        const logit_factor logits(rule);
        const score_sink sink(work);
        const int tiles = work.item.chunks;
        int first_key = item_first_key(work.item) + (tiles - 1) * TILE;
        begin(work, tiles, waits);
        float z[COLUMNS][4];
        float dot[COLUMNS][4];
        float square[2];
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, first_key -= TILE) {
            if constexpr (!S::FETCHED)
                stream.wait();
            meet<S>(barrier);
            const uint32_t v_tile = stream.values();
            start_row_product<S, 1>(z, stream.keys(), shared_address(room.query), 0);
            start_row_product<S, 2>(dot, v_tile, shared_address(room.a), S::OPERAND_BYTES);
            if constexpr (!S::FETCHED) {
                stream.copy(work, at);
                sum_squares<S>(v_tile, at, square);
            }
            warpgroup_wait<1>();
            hold(z);
            if constexpr (S::FETCHED)
                arrive_at<BARRIER_LOGITS, S::THREADS>();
            if (!logits.plain)
                rule.apply<COLUMNS, 4>(z);
            if (first_key + TILE > rule.open_keys)
                hide_keys<S>(work, first_key, place<S>(here(at.thread)), z);
            float sum[2] = {0.0f, 0.0f};
            this->take_tops(work, first_key + 16 * at.warp, z, sum);
            this->make_weights(z, logits.factor);
            warpgroup_wait<0>();
            hold(dot);
            if constexpr (S::FETCHED) {
                meet_at<BARRIER_SQUARES, S::THREADS>();
                square[0] = room.squares[16 * at.warp + at.g];
                square[1] = room.squares[16 * at.warp + at.g + 8];
            }
            this->add_terms(work, v_tile, square, z, dot, sum);
            if constexpr (S::SIDES > 1)
                store_together(sink, sum, first_key);
            else
                sink.store(sum, first_key + 16 * at.warp + at.g, at.t);
            stream.advance();
        }
    }

    /* Two sides' sums of a tile: the second leaves its own, the first adds them to its. The next
     * step's meeting is before the second's next ones. */
    __device__ __forceinline__ void store_together(const score_sink &sink, float (&sum)[2],
                                                   int first_key) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        }
        const float mine = at.t == 0 ? sum[0] : sum[1]; /* of two lanes of four */
        const int key = 16 * at.warp + at.g + 8 * at.t;
        constexpr int OF_SIDES = S::SIDES * GROUP_THREADS;
        if (side != 0) {
            if (at.t < 2)
                room.others[key] = mine;
            arrive_at<BARRIER_SUMS, OF_SIDES>();
        } else {
            meet_at<BARRIER_SUMS, OF_SIDES>();
            if (at.t < 2)
                sink.put(mine + room.others[key], first_key + key);
        }
    }

    /* The query is there, tiles are on their way, and what was made of the rows is there. */
    __device__ __forceinline__ void begin(const job &work, int tiles, bool waits)
    {
        const place<S> once(here(at.thread));
        query_rows<S> query;
        query.load(work, once);
        if constexpr (S::FETCHED)
            stream.open(room.rings);
        else
            stream.begin(work, room.rings, tiles, once);
        query.store(shared_address(room.query), once);
        if (waits)
            griddepcontrol_wait();
        this->template load_rows<S::FETCHED>(work, once);
    }
};

/* Empty except for sm_90a. What it reads before griddepcontrol_wait(), no kernel before it writes.
 */
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_16bit_b(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    room_b<S> *rooms = reinterpret_cast<room_b<S> *>(shared_bytes);
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
    group_b<S> work(rooms[group], group, thread_in_group());
    score_ranges(work, args, [&](uint32_t turn) {
        return take_item<S>(work.room.work, args, turn, group, work.barrier, work.at);
    });
#endif
}

} // namespace dkv_stream_16bit

#endif
