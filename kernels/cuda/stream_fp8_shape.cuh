/* fp8 caches in the stream scorer: pass A, merge and pass B as stream_shape.cuh says, up to 64 rows
 * at a time, with other roles inside a thread block.
 *
 * Tiles become fp16 in registers, as the 64-row operand (stream_fp8_tiles.cuh): keys as rows of the
 * logits and, in pass B, of the products with a; dimensions as rows of pass A's output. That takes
 * instructions and time in which the tensor cores do nothing, and each step waits for the one
 * before. So a thread block has two or three groups of four warps that know nothing of each other:
 * each is at an item of its own, and while one waits the others go on.
 *
 * A warp copies sixteen keys of a tile, and where keys are rows nobody else reads them; values that
 * are read across are handed over at the barrier that a step of pass A has anyway. So nobody
 * fetches for others.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FP8_SHAPE_CUH
#define DKV_KERNELS_CUDA_STREAM_FP8_SHAPE_CUH

#include "kernels/cuda/stream_fp8_tiles.cuh"
#include "kernels/cuda/stream_softmax.cuh"

namespace dkv_stream_fp8
{

using namespace dkv_fast;

/* `e4m3`: keys and values are; else they are what their block says. */
template <int head_dim, int rows_per_thread, bool e4m3> struct shape {
    using type = fp16_type;
    static constexpr int FORM = DKV_CU_FORM_DROPKV;
    static constexpr bool FP8 = true;
    static constexpr bool E4M3 = e4m3;
    static constexpr int DIM = head_dim;
    static constexpr int R = rows_per_thread;
    static constexpr int ROWS = 32 * R;
    static constexpr int COLUMNS = ROWS / 8; /* of a product, in eights */
    static constexpr int K_STEPS = head_dim / 16;
    static constexpr int D_TILES = head_dim / 8;
    static constexpr int STORED_BYTES = head_dim;
    static constexpr int ROW_BYTES = 2 * head_dim;
    static constexpr int EIGHT_BYTES = 8 * ROW_BYTES;
    static constexpr int TILE_BYTES = TILE * STORED_BYTES;
    static constexpr int OPERAND_BYTES = ROWS * ROW_BYTES;
    static constexpr int MERGE_AHEAD = 8;
    static constexpr int PARTIAL_BYTES = ROWS * 16 + ROWS * head_dim * 4;
    static constexpr float WEIGHT_SHIFT = 10.0f;
    static constexpr float WEIGHT_ONE = 1024.0f;

    static constexpr int GROUPS = R == 1 ? 3 : 2;
    static constexpr int THREADS = GROUPS * GROUP_THREADS;
    static constexpr int DEPTH = 3; /* pairs of tiles of a group, on their way and being read */
};

/* Scales beyond these are left to the general scorer: what is computed without them would leave
 * float32 with them. */
constexpr float SCALE_MIN = 1e-15f;
constexpr float SCALE_MAX = 1e13f;

using stream_args = dkv_stream_args; /* items: [turns][groups of all thread blocks] */

__host__ __device__ __forceinline__ uint32_t tiles_of(uint32_t keys)
{
    return (keys + TILE - 1) / TILE;
}

/* A tile's keys and values. */
template <class S> struct tile_pair {
    unsigned char keys[S::TILE_BYTES];
    unsigned char values[S::TILE_BYTES];
};

/* Partials of one row group of a unit, behind the merged rows of all. */
template <class S> __device__ __forceinline__ unsigned char *partials_of(const job &work)
{
    const uint32_t rows = work.block.group * work.block.window;
    const uint32_t groups = (rows + S::ROWS - 1) / S::ROWS;
    return work.unit.work + groups * sizeof(merged<S>) +
           static_cast<size_t>(work.item.row_group) * work.item.chunks * S::PARTIAL_BYTES;
}

/* ---- tiles ---- */

/* One warp's copies of keys or values: sixteen rows of a tile. */
template <class S> struct warp_copies {
    static constexpr int COLUMNS = S::DIM / 16;  /* of 16 bytes */
    static constexpr int ROWS = 16;              /* of the warp */
    static constexpr int AT_ONCE = 32 / COLUMNS; /* rows */
    static constexpr int STEPS = ROWS / AT_ONCE;
    /* Odd steps' columns are permuted otherwise, see raw_offset(). */
    static constexpr uint32_t FLIPS = AT_ONCE == 4 ? 64 : 0;

    const unsigned char *from; /* the lane's place in the tile that is next, if rows are adjacent */
    uint32_t to; /* and in the ring's: a number of its own, or ptxas 13.0 adds it up in an
                  * instruction that the device calls illegal */

    __device__ __forceinline__ static int row(const place<S> &at)
    {
        return ROWS * at.warp + at.lane / COLUMNS;
    }
    __device__ __forceinline__ static int column(const place<S> &at)
    {
        return at.lane % COLUMNS;
    }

    __device__ __forceinline__ void begin(const job &work, const unsigned char *base, int first_key,
                                          uint32_t tile, const place<S> &at)
    {
        from = base + (work.block.valid_from + first_key + row(at)) * static_cast<size_t>(S::DIM) +
               16 * column(at);
        to = tile + raw_offset<S>(row(at), column(at));
    }

    /* Starts the copies of a whole tile of adjacent rows. */
    __device__ __forceinline__ void copy_dense(uint64_t policy)
    {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            copy_16((to ^ (i % 2 ? FLIPS : 0)) + i * AT_ONCE * S::DIM, from + i * AT_ONCE * S::DIM,
                    true, policy);
        from += TILE * S::DIM;
    }

    /* And of any, from `first_key` on. Rows past the unit's end repeat its last key; a row behind a
     * bad page table entry is zeros, and the entry is reported. */
    __device__ __forceinline__ void copy_rows(const job &work, const dkv_cu_rows &rows,
                                              const unsigned char *base, unsigned long long *bad,
                                              uint32_t first_key, uint64_t policy,
                                              const place<S> &at) const
    {
        const uint32_t key = min(first_key + ROWS * at.warp + at.lane % ROWS,
                                 work.block.n_valid - 1);
        const unsigned long long mine = reinterpret_cast<unsigned long long>(
            dkv_cu_row(rows, base, work.block.valid_from + key, bad));
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const unsigned char *row = reinterpret_cast<const unsigned char *>(
                __shfl_sync(~0u, mine, i * AT_ONCE + at.lane / COLUMNS));
            copy_16((to ^ (i % 2 ? FLIPS : 0)) + i * AT_ONCE * S::DIM,
                    (row ? row : base) + 16 * column(at), row != nullptr, policy);
        }
    }
};

/* A warp's share of the tiles of an item: a ring of pairs in shared memory. Every step of a pass
 * copies one, or nothing after the last, so that the number of copies under way says which are
 * there. */
template <class S> struct pair_stream {
    static constexpr uint32_t PAIR_BYTES = sizeof(tile_pair<S>);

    warp_copies<S> keys;
    warp_copies<S> values;
    int next;        /* to be copied, of the item's tiles */
    int slot;        /* of the ring, that is read and filled next */
    int dense_tiles; /* that have adjacent rows and no end */
    uint64_t policy;

    __device__ __forceinline__ void begin(const job &work, uint32_t places, int tiles,
                                          const place<S> &at)
    {
        const dkv_cu_block &block = work.block;
        const int first_key = item_first_key(work.item);
        const bool dense = block.k.token_stride == S::DIM && block.k.page_tokens == 0 &&
                           block.v.token_stride == S::DIM && block.v.page_tokens == 0;
        keys.begin(work, work.unit.k, first_key, places, at);
        values.begin(work, work.unit.v, first_key, places + S::TILE_BYTES, at);
        next = slot = 0;
        dense_tiles = dense ? min(tiles, static_cast<int>(block.n_valid - first_key) / TILE) : 0;
#pragma unroll 1
        for (int i = 0; i < S::DEPTH; i++) {
            copy(work, tiles, at);
            advance();
        }
    }

    __device__ __forceinline__ void copy(const job &work, int tiles, const place<S> &at)
    {
        if (next < dense_tiles) {
            keys.copy_dense(policy);
            values.copy_dense(policy);
        } else if (next < tiles) {
            const place<S> again(here(at.thread));
            const uint32_t key = item_first_key(work.item) + next * TILE;
            keys.copy_rows(work, work.block.k, work.unit.k, &work.unit.report->bad_k_entry, key,
                           policy, again);
            values.copy_rows(work, work.block.v, work.unit.v, &work.unit.report->bad_v_entry, key,
                             policy, again);
        }
        copies_commit();
        next++;
    }

    /* To the next place, which is both where the next tile is read and where the one after the
     * copied ones goes. */
    __device__ __forceinline__ void advance(void)
    {
        const bool wraps = ++slot == S::DEPTH;
        slot = wraps ? 0 : slot;
        const uint32_t by = PAIR_BYTES - (wraps ? S::DEPTH * PAIR_BYTES : 0);
        keys.to += by;
        values.to += by;
    }

    /* Until all but the last `pending` steps' copies of this warp are there. */
    template <int pending> __device__ __forceinline__ void wait(void) const
    {
        asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
        __syncwarp();
    }
};

/* ---- items and queries ---- */

/* By a way that the compiler does not repeat, or it would read the register for every use. */
__device__ __forceinline__ int thread_in_group(void)
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % GROUP_THREADS;
}

/* Brings the descriptors of a group's item, when all of the group are done with the one before;
 * false: there is nothing in this turn. */
template <class S>
__device__ __forceinline__ bool take_item(job &work, const stream_args &args, uint32_t turn,
                                          int group, int barrier, const place<S> &at)
{
    const dkv_fast_item item = args.items[(turn * S::GROUPS + group) * gridDim.x + blockIdx.x];
    group_barrier(barrier);
    if (item.chunks != 0) {
        if (at.warp == 0)
            copy_words(work.unit, args.units + item.unit, at.lane);
        if (at.warp == 1)
            copy_words(work.block, args.blocks + item.block, at.lane);
        if (at.thread == 0)
            work.item = item;
    }
    group_barrier(barrier);
    return item.chunks != 0;
}

/* Every turn's range of a group, in pass B. take(turn): whether there is one, and brings it. The
 * first range waits for the merge. */
template <class group_type, class function>
__device__ __forceinline__ void score_ranges(group_type &work, const stream_args &args,
                                             function take)
{
    bool waits = true;
    for (uint32_t turn = 0; turn < args.turns; turn++) {
        if (!take(turn))
            continue;
        work.run(waits);
        waits = false;
    }
}

/* Four elements of a bf16 query as fp16; `largest` becomes their largest magnitude's bits. */
__device__ __forceinline__ uint2 fp16_of_bf16(const uint2 &words, uint32_t &largest)
{
    const float2 low = unpack<bf16_type>(words.x);
    const float2 high = unpack<bf16_type>(words.y);
    largest = max(max(__float_as_uint(fabsf(low.x)), __float_as_uint(fabsf(low.y))),
                  max(__float_as_uint(fabsf(high.x)), __float_as_uint(fabsf(high.y))));
    return make_uint2(pack<fp16_type>(low.x, low.y), pack<fp16_type>(high.x, high.y));
}

/* A thread's part of an item's query rows, on their way to become the fp16 operand of products:
 * exactly from fp8 and fp16; from bf16 with an error of at most 2^-25, far below what float32 sums
 * lose unless all of a row is tiny, in which case (or if a number is above fp16's) the general
 * scorer answers. */
template <class S> struct query_rows {
    static constexpr int PARTS = S::DIM / 8; /* of a row */
    static constexpr int AT_ONCE = GROUP_THREADS / PARTS;
    static constexpr int STEPS = S::ROWS / AT_ONCE;
    uint4 words[STEPS];

    __device__ __forceinline__ void load(const job &work, const place<S> &at)
    {
        const dkv_cu_block &block = work.block;
        const bool is_fp8 = block.q_dtype != DKV_BF16 && block.q_dtype != DKV_FP16;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int row = i * AT_ONCE + at.thread / PARTS;
            const unsigned char *from = query_row(work, work.item.row_group * S::ROWS + row);
            words[i] = make_uint4(0, 0, 0, 0);
            if (from && is_fp8) {
                const uint32_t *bytes = reinterpret_cast<const uint32_t *>(from) +
                                        2 * (at.thread % PARTS);
                words[i].x = __ldg(bytes);
                words[i].y = __ldg(bytes + 1);
            } else if (from) {
                const uint2 *pairs = reinterpret_cast<const uint2 *>(from) +
                                     2 * (at.thread % PARTS);
                const uint2 low = __ldg(pairs);
                const uint2 high = __ldg(pairs + 1);
                words[i] = make_uint4(low.x, low.y, high.x, high.y);
            }
        }
    }

    /* Whether fp16 is good enough for these rows. The group must meet before they are read. */
    __device__ __forceinline__ bool store(const job &work, uint32_t to, const place<S> &at) const
    {
        const uint32_t dtype = work.block.q_dtype;
        bool fits = true;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const uint4 &from = words[i];
            uint2 pairs[2] = {{from.x, from.y}, {from.z, from.w}};
            if (dtype == DKV_BF16) {
                uint32_t most[2];
                pairs[0] = fp16_of_bf16(pairs[0], most[0]);
                pairs[1] = fp16_of_bf16(pairs[1], most[1]);
                uint32_t largest = max(most[0], most[1]);
#pragma unroll
                for (int lanes = 1; lanes < PARTS; lanes *= 2)
                    largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
                const float top = __uint_as_float(largest);
                fits &= top <= 65504.0f && (top >= 1.0f / 1024 || top == 0.0f);
            } else if (dtype != DKV_FP16) {
                pairs[0] = fp16_of_fp8(from.x, dtype);
                pairs[1] = fp16_of_fp8(from.y, dtype);
            }
            const int row = i * AT_ONCE + at.thread / PARTS;
            const int pair = at.thread % PARTS * 4;
            store_shared(to + pair_offset<S>(row, pair), pairs[0].x);
            store_shared(to + pair_offset<S>(row, pair + 1), pairs[0].y);
            store_shared(to + pair_offset<S>(row, pair + 2), pairs[1].x);
            store_shared(to + pair_offset<S>(row, pair + 3), pairs[1].y);
        }
        return fits;
    }
};

/* fp8_keys or fp8_values become fp16. */
template <class S, class T> __device__ __forceinline__ void convert(T &tile, uint32_t dtype)
{
    if constexpr (S::E4M3)
        tile.template convert<false>();
    else
        tile.convert(dtype == DKV_F8_E5M2);
}

/* Starts x = keys * the sum of `parts` operands of rows^T, `next` bytes apart. */
template <class S, int parts>
__device__ __forceinline__ void start_row_product(float (&x)[S::COLUMNS][4],
                                                  const fp8_keys<S> &keys, uint32_t from, int next)
{
    const uint64_t rows = keys_operand<S>(from);
    hold(x);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
        for (int part = 0; part < parts; part++)
            warpgroup_mma<fp16_type, 0>(x, keys.words[k], rows + keys_step(k) + (part * next >> 4),
                                        k > 0 || part > 0);
    warpgroup_commit();
}

} // namespace dkv_stream_fp8

#endif
