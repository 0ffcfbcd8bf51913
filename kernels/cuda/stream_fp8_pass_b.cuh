/* Pass B of fp8 caches in the stream scorer: the score of every key, as fast_pass_b.cuh says, from
 * logits made again. A warp has 16 keys of a tile to itself, a thread keys g and g + 8 of them, and
 * of every eight rows 2t and 2t + 1: in [j][c], c = 2 * (key is g + 8) + (row is odd). hi and lo of
 * a are added up by the tensor cores, while exponentials are made of logits.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FP8_PASS_B_CUH
#define DKV_KERNELS_CUDA_STREAM_FP8_PASS_B_CUH

#include "kernels/cuda/stream_fp8_shape.cuh"
#include "kernels/cuda/stream_terms.cuh"

namespace dkv_stream_fp8
{

/* What a group has in shared memory. */
template <class S> struct __align__(1024) room_b
{
    unsigned char a[2][S::OPERAND_BYTES]; /* hi and lo of the merged rows */
    unsigned char query[S::OPERAND_BYTES];
    tile_pair<S> ring[S::DEPTH];
    float2 norm[S::ROWS / 2];  /* |a|^2 of rows 2i and 2i + 1 */
    float2 shift[S::ROWS / 2]; /* log2 of their denominators, less the range factor */
    job work;
};

template <class S> struct group_b : group_terms<S, room_b<S>> {
    using terms = group_terms<S, room_b<S>>;
    using terms::COLUMNS, terms::at, terms::barrier, terms::room;

    pair_stream<S> stream;

    __device__ __forceinline__ group_b(room_b<S> &in, int group, int thread)
        : terms(in, group, thread)
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
        const uint32_t k_type = work.block.k.dtype;
        const uint32_t v_type = work.block.v.dtype;
        const int tiles = work.item.chunks;
        int first_key = item_first_key(work.item);
        begin(work, tiles, waits);
        float z[COLUMNS][4];
        float dot[COLUMNS][4];
        float square[2];
        fp8_keys<S> keys;
        fp8_keys<S> values;
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, first_key += TILE) {
            stream.template wait<S::DEPTH - 1>();
            const uint32_t pair = shared_address(room.ring) +
                                  stream.slot * static_cast<uint32_t>(sizeof(tile_pair<S>));
            keys.load(pair, at);
            convert<S>(keys, k_type);
            start_row_product<S, 1>(z, keys, shared_address(room.query), 0);
            values.load(pair + S::TILE_BYTES, at);
            convert<S>(values, v_type);
            start_row_product<S, 2>(dot, values, shared_address(room.a), S::OPERAND_BYTES);
            sum_squares(values, square);
            warpgroup_wait<1>();
            hold(z);
            if (!logits.plain)
                rule.apply<COLUMNS, 4>(z);
            if (first_key + TILE > rule.open_keys)
                hide_keys<S>(work, first_key, place<S>(here(at.thread)), z);
            float sum[2] = {0.0f, 0.0f};
            this->take_tops(work, first_key + 16 * at.warp, z, sum);
            this->make_weights(z, logits.factor);
            warpgroup_wait<0>();
            hold(dot);
            this->add_terms(work, pair + S::TILE_BYTES, square, z, dot, sum);
            sink.store(sum, first_key + 16 * at.warp + at.g, at.t);
            stream.copy(work, tiles, at);
            stream.advance();
        }
    }

    /* The query is there, tiles are on their way, and what was made of the rows is there. */
    __device__ __forceinline__ void begin(const job &work, int tiles, bool waits)
    {
        const place<S> once(here(at.thread));
        query_rows<S> query;
        query.load(work, once);
        stream.begin(work, shared_address(room.ring), tiles, once);
        query.store(work, shared_address(room.query), once);
        if (waits)
            griddepcontrol_wait();
        this->load_rows(work, once);
    }
};

/* Empty except for sm_90a. What it reads before griddepcontrol_wait(), no kernel before it writes.
 */
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    stream_fp8_b(const __grid_constant__ stream_args args)
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

} // namespace dkv_stream_fp8

#endif
