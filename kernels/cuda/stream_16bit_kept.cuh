/* head_dim 256 and up to 32 rows, with pass A's logits kept: 32 bytes for each key and eight rows,
 * where a key is 512. Pass B reads them and values, and no keys. It is one side and a fetching
 * group, as stream_16bit_sides.cuh says.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_KEPT_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_KEPT_CUH

#include "kernels/cuda/stream_16bit_sides.cuh"

namespace dkv_stream_16bit
{

constexpr int KEPT_VALUES = 6; /* tiles on their way and being read */

/* ---- tiles ---- */

/* Copies of values alone, the item's last tile first; otherwise as tile_streams. */
template <class S> struct value_stream {
    warp_copies<S> v;
    ring_place<S, KEPT_VALUES> read;
    uint32_t base;
    int next;
    int tiles;
    int dense_tiles;
    uint64_t policy;

    __device__ __forceinline__ void open(uint32_t ring)
    {
        base = ring;
        read.offset = 0;
    }
    __device__ __forceinline__ uint32_t values(void) const
    {
        return base + read.offset;
    }

    __device__ __forceinline__ void begin(const job &work, uint32_t ring, const place<S> &at)
    {
        const dkv_cu_block &block = work.block;
        const int first_key = item_first_key(work.item);
        const bool dense = block.v.token_stride == S::STORED_BYTES && block.v.page_tokens == 0;
        open(ring);
        v.begin(work, work.unit.v, first_key, ring, at);
        next = 0;
        tiles = work.item.chunks;
        dense_tiles = dense ? min(tiles, static_cast<int>(block.n_valid - first_key) / TILE) : 0;
#pragma unroll 1
        for (int i = 1; i < KEPT_VALUES; i++)
            copy(work, at);
    }

    /* Values of the step before are read no more. */
    __device__ __forceinline__ void copy(const job &work, const place<S> &at)
    {
        const int tile = tiles - 1 - next;
        if (next < tiles) {
            if (tile < dense_tiles)
                v.copy_dense(tile, policy);
            else
                v.copy_rows(work, work.block.v, work.unit.v, &work.unit.report->bad_v_entry,
                            item_first_key(work.item) + tile * TILE, policy,
                            place<S>(here(at.thread)));
        }
        next++;
        v.template advance<KEPT_VALUES>();
        copies_commit();
    }

    __device__ __forceinline__ void wait(void) const
    {
        asm volatile("cp.async.wait_group %0;" ::"n"(KEPT_VALUES - 2) : "memory");
        fence_async_proxy();
    }
};

/* ---- pass B ---- */

template <class S> struct __align__(1024) shared_kept
{
    unsigned char a[2][S::OPERAND_BYTES]; /* hi and lo of the merged rows */
    unsigned char values[KEPT_VALUES][S::TILE_BYTES];
    float2 norm[S::ROWS / 2]; /* as in room_b */
    float2 shift[S::ROWS / 2];
    float squares[TILE]; /* |v|^2 of a tile's values */
    job work;
};

/* The thread's logits of every second tile, as pass A left them: a tile's come while the one before
 * it is worked on, and the one before that. */
template <class S> struct kept_logits {
    const unsigned char *from; /* of the tile that is loaded next */
    uint32_t bytes;            /* of a key */
    float2 of[S::COLUMNS][2];

    /* Loads those of the first tile. */
    __device__ __forceinline__ void begin(const job &work, int first_key, const place<S> &at)
    {
        bytes = logit_bytes(work);
        from = logits_of<S>(work) +
               (first_key + 16 * at.warp + at.g) * static_cast<int64_t>(bytes) + 8 * at.t;
        load(first_key >= static_cast<int>(item_first_key(work.item)));
    }
    /* `exists`: there is such a tile. */
    __device__ __forceinline__ void load(bool exists)
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                of[j][i] = make_float2(0.0f, 0.0f);
                if (exists && 32 * j < bytes)
                    of[j][i] = __ldcg(
                        reinterpret_cast<const float2 *>(from + 8 * i * bytes + 32 * j));
            }
        from -= 2 * static_cast<int64_t>(TILE * bytes);
    }
    __device__ __forceinline__ void take(float (&z)[S::COLUMNS][4]) const
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                z[j][2 * i] = of[j][i].x;
                z[j][2 * i + 1] = of[j][i].y;
            }
    }
};

template <class S> struct kept_b : group_terms<S, shared_kept<S>> {
    using terms = group_terms<S, shared_kept<S>>;
    using terms::COLUMNS, terms::at, terms::barrier, terms::room;

    value_stream<S> stream;

    __device__ __forceinline__ kept_b(shared_kept<S> &in, int thread) : terms(in, 0, thread)
    {
    }

    /* The item that is in the room. `waits`: for the merge, before which nothing is known. */
    __device__ __forceinline__ void run(bool waits)
    {
        const job &work = room.work;
        const int tiles = work.item.chunks;
        const int last_key = item_first_key(work.item) + (tiles - 1) * TILE; /* its tile's first */
        const score_sink sink(work);
        const float factor = logit_factor(logit_rule(work)).factor;
        stream.open(shared_address(room.values));
        if (waits)
            griddepcontrol_wait();
        kept_logits<S> logits[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            logits[i].begin(work, last_key - i * TILE, at);
        this->template load_rows<true>(work, place<S>(here(at.thread)));
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile += 2)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (tile + i < tiles)
                    score_tile(sink, factor, last_key - (tile + i) * TILE, tile + i + 2 < tiles,
                               logits[i]);
    }

    /* `more`: there is a tile whose logits are loaded next. */
    __device__ __forceinline__ void score_tile(const score_sink &sink, float factor, int first_key,
                                               bool more, kept_logits<S> &logits)
    {
        const job &work = room.work;
        float z[COLUMNS][4];
        float dot[COLUMNS][4];
        meet<S>(barrier);
        const uint32_t v_tile = stream.values();
        start_row_product<S, 2>(dot, v_tile, shared_address(room.a), S::OPERAND_BYTES);
        logits.take(z);
        logits.load(more);
        float sum[2] = {0.0f, 0.0f};
        this->take_tops(work, first_key + 16 * at.warp, z, sum);
        this->make_weights(z, factor);
        warpgroup_wait<0>();
        hold(dot);
        meet_at<BARRIER_SQUARES, S::THREADS>();
        const float square[2] = {room.squares[16 * at.warp + at.g],
                                 room.squares[16 * at.warp + at.g + 8]};
        this->add_terms(work, v_tile, square, z, dot, sum);
        sink.store(sum, first_key + 16 * at.warp + at.g, at.t);
        stream.read.advance();
    }
};

template <class S>
__device__ __forceinline__ void fetch_kept(shared_kept<S> &shared, value_stream<S> &stream,
                                           const place<S> &at)
{
    const job &work = shared.work;
    stream.begin(work, shared_address(shared.values), at);
#pragma unroll 1
    for (int tile = 0; tile < stream.tiles; tile++) {
        stream.wait();
        meet<S>(0);
        leave_squares<S>(shared.squares, stream.values(), at);
        arrive_at<BARRIER_SQUARES, S::THREADS>();
        stream.copy(work, at);
        stream.read.advance();
    }
}

/* Empty except for sm_90a. What it reads before griddepcontrol_wait(), no kernel before it writes.
 */
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_kept_b(const __grid_constant__ stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const int group = group_in_block();
    /* By way of a number that is the same for all lanes, as is then the address. */
    shared_kept<S> &shared = reinterpret_cast<shared_kept<S> *>(shared_bytes)[group / 2];
    const place<S> at(thread_in_group());
    if (group == S::SIDES) {
        value_stream<S> stream;
        stream.policy = policy_evict_first();
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (take_item_together<S>(shared.work, args, turn, group, at))
                fetch_kept<S>(shared, stream, at);
        }
    } else {
        kept_b<S> work(shared, thread_in_group());
        bool waits = true;
        for (uint32_t turn = 0; turn < args.turns; turn++) {
            if (!take_item_together<S>(shared.work, args, turn, group, at))
                continue;
            work.run(waits);
            waits = false;
        }
    }
#endif
}

} // namespace dkv_stream_16bit

#endif
