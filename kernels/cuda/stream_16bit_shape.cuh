/* 16-bit caches of up to 64 rows in the stream scorer: as stream_fp8_shape.cuh says, but tiles are
 * operands of the tensor cores as they lie in shared memory. So a group's warps need each other's
 * copies, which they hand over at a barrier a tile. Keys and values have rings of their own: those
 * of pass A's keys are a step ahead.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_SHAPE_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_SHAPE_CUH

#include "kernels/cuda/stream_16bit_meeting.cuh"
#include "kernels/cuda/stream_fp8_shape.cuh"

namespace dkv_stream_16bit
{

using namespace dkv_fast;
using dkv_stream_fp8::score_ranges;
using dkv_stream_fp8::stream_args;
using dkv_stream_fp8::take_item;
using dkv_stream_fp8::thread_in_group;
using dkv_stream_fp8::tiles_of;

/* Which keys a step waits for, beside its values, and whose place it fills: */
enum keys_order {
    KEYS_LATE,  /* its own; of the step before, as it does with values */
    KEYS_EARLY, /* its own; its own, which then nobody may read any more */
    KEYS_AHEAD, /* the next step's; its own */
};

template <class element, int head_dim, int rows_per_thread> struct shape {
    using type = element;
    static constexpr int FORM = DKV_CU_FORM_DROPKV;
    static constexpr bool FP8 = false;
    static constexpr int DIM = head_dim;
    static constexpr int R = rows_per_thread;
    static constexpr int ROWS = 32 * R;
    static constexpr int COLUMNS = ROWS / 8; /* of a product, in eights */
    static constexpr int K_STEPS = head_dim / 16;
    static constexpr int D_TILES = head_dim / 8;
    static constexpr int STORED_BYTES = 2 * head_dim;
    static constexpr int ROW_BYTES = 2 * head_dim;
    static constexpr int EIGHT_BYTES = 8 * ROW_BYTES;
    static constexpr int TILE_BYTES = TILE * ROW_BYTES;
    static constexpr int OPERAND_BYTES = ROWS * ROW_BYTES;
    static constexpr int MERGE_AHEAD = 8;
    static constexpr int PARTIAL_BYTES = ROWS * 16 + ROWS * head_dim * 4;
    static constexpr float WEIGHT_SHIFT = std::is_same<element, fp16_type>::value ? 10.0f : 0.0f;
    static constexpr float WEIGHT_ONE = std::is_same<element, fp16_type>::value ? 1024.0f : 1.0f;
    /* A weight is the sum of so many elements: with 64 rows there are no registers for two. */
    static constexpr int PARTS = R == 1 ? 2 : 1;

    static constexpr int GROUPS = 2;       /* that have an item each */
    static constexpr int SIDES = 1;        /* groups that share an item's tiles */
    static constexpr bool FETCHED = false; /* tiles, by a group of its own */
    static constexpr bool KEEPS = false;   /* logits, for pass B: see stream_16bit_kept.cuh */
    static constexpr int THREADS = GROUPS * GROUP_THREADS;
    /* Tiles of a group, on their way and being read. */
    static constexpr int A_KEYS = (R == 1 ? 3 : 2) * 128 / head_dim;
    static constexpr int A_VALUES = 2 * 128 / head_dim;
    static constexpr int B_KEYS = (R == 1 ? 3 : 2) * 128 / head_dim;
    static constexpr int B_VALUES = 2 * 128 / head_dim;
    static constexpr keys_order B_ORDER = KEYS_LATE;
};

/* Bytes of a key's logits, where they are kept: float32 of all rows, in eights. */
__device__ __forceinline__ uint32_t logit_bytes(const job &work)
{
    return (work.block.group * work.block.window + 7) / 8 * 32;
}

/* A unit's scratch: the merged rows of all row groups; logits of all tiles, if they are kept, for
 * which a unit has one row group; partials. */
template <class S> __device__ __forceinline__ unsigned char *logits_of(const job &work)
{
    constexpr uint32_t ROWS = S::SIDES * S::ROWS;
    const uint32_t rows = work.block.group * work.block.window;
    const uint32_t groups = (rows + ROWS - 1) / ROWS * S::SIDES;
    return work.unit.work + groups * sizeof(merged<S>);
}

/* Those of one row group. */
template <class S> __device__ __forceinline__ unsigned char *partials_of(const job &work)
{
    const size_t keys = S::KEEPS ? tiles_of(work.block.n_valid) * TILE : 0;
    return logits_of<S>(work) + keys * logit_bytes(work) +
           static_cast<size_t>(work.item.row_group) * work.item.chunks * S::PARTIAL_BYTES;
}

/* ---- tiles ---- */

/* One warp's copies of keys or values: sixteen rows of a tile. */
template <class S> struct warp_copies {
    static constexpr int COLUMNS = S::DIM / 8;   /* of 16 bytes */
    static constexpr int ROWS = 16;              /* of the warp */
    static constexpr int AT_ONCE = 32 / COLUMNS; /* rows */
    static constexpr int STEPS = ROWS / AT_ONCE;
    static constexpr int PERIOD = 8 / AT_ONCE; /* steps after which rows are permuted alike again */

    const unsigned char *from; /* the lane's place in the item's first tile, if rows are adjacent */
    uint32_t to;               /* and in the ring's that is filled next */
    int slot;                  /* of the ring */

    __device__ __forceinline__ static int row(const place<S> &at)
    {
        return at.lane / COLUMNS;
    }
    __device__ __forceinline__ static int column(const place<S> &at)
    {
        return at.lane % COLUMNS;
    }
    __device__ __forceinline__ void begin(const job &work, const unsigned char *base, int first_key,
                                          uint32_t ring, const place<S> &at)
    {
        const int mine = ROWS * at.warp + row(at);
        from = base +
               (work.block.valid_from + first_key + mine) * static_cast<size_t>(S::STORED_BYTES) +
               16 * column(at);
        /* Through an instruction that the compiler leaves alone, so that it is one register: ptxas
         * 13.0 makes copies that add two, which the device calls illegal. */
        to = __shfl_sync(~0u, ring + element_offset<S>(mine, column(at)), at.lane);
        slot = 0;
    }

    template <int size> __device__ __forceinline__ void advance(void)
    {
        const bool wraps = ++slot == size;
        slot = wraps ? 0 : slot;
        to += S::TILE_BYTES - (wraps ? size * S::TILE_BYTES : 0);
    }

    __device__ __forceinline__ uint32_t step_place(int i) const
    {
        return (to ^ (i % PERIOD * AT_ONCE << 4)) + i % PERIOD * AT_ONCE * 128 +
               i / PERIOD * S::EIGHT_BYTES;
    }

    /* Starts the copies of a whole tile of adjacent rows. */
    __device__ __forceinline__ void copy_dense(int tile, uint64_t policy) const
    {
        const unsigned char *row = from + tile * static_cast<int64_t>(TILE * S::STORED_BYTES);
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            copy_16(step_place(i), row + i * AT_ONCE * S::STORED_BYTES, true, policy);
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
            copy_16(step_place(i), (row ? row : base) + 16 * column(at), row != nullptr, policy);
        }
    }
};

/* A place in a ring of `size` tiles, as bytes from the first one. */
template <class S, int size> struct ring_place {
    uint32_t offset = 0;

    __device__ __forceinline__ void advance(void)
    {
        offset = offset == (size - 1) * S::TILE_BYTES ? 0 : offset + S::TILE_BYTES;
    }
};

template <class S, int k_size, int v_size> struct tile_rings {
    unsigned char keys[k_size][S::TILE_BYTES];
    unsigned char values[v_size][S::TILE_BYTES];
};

/* A group's copies into its rings. A step waits for its tiles, and begins to copy one of each, or
 * nothing after the last, so that the number of copies under way says which are there. `backwards`:
 * the item's last tile comes first.
 */
template <class S, int k_size, int v_size, keys_order order, bool backwards> struct tile_streams {
    static constexpr int ahead = order == KEYS_LATE ? 0 : 1;
    /* Copies begun later than those that a step needs, if it has begun none itself: keys', with the
     * values' after them; or those after the values'. */
    static constexpr int KEYS_PENDING = 2 * (k_size - (order == KEYS_EARLY ? 1 : 2));
    static constexpr int VALUES_PENDING = 2 * (v_size - 2) + 1;
    static constexpr int PENDING = KEYS_PENDING < VALUES_PENDING ? KEYS_PENDING : VALUES_PENDING;

    using rings = tile_rings<S, k_size, v_size>;

    warp_copies<S> k;
    warp_copies<S> v;
    uint32_t base;                /* of the rings */
    ring_place<S, k_size> k_read; /* of this step */
    ring_place<S, v_size> v_read;
    int k_next; /* to be copied, of the item's tiles */
    int v_next;
    int tiles;
    int dense_tiles; /* that have adjacent rows and no end */
    uint64_t policy;

    __device__ __forceinline__ uint32_t keys(void) const
    {
        return base + k_read.offset;
    }
    __device__ __forceinline__ uint32_t values(void) const
    {
        return base + k_size * S::TILE_BYTES + v_read.offset;
    }

    /* Of who reads what others fetch. */
    __device__ __forceinline__ void open(rings &in)
    {
        base = shared_address(in.keys);
        k_read.offset = v_read.offset = 0;
    }

    __device__ __forceinline__ void begin(const job &work, rings &in, int count, const place<S> &at)
    {
        const dkv_cu_block &block = work.block;
        const int first_key = item_first_key(work.item);
        const bool dense = block.k.token_stride == S::STORED_BYTES && block.k.page_tokens == 0 &&
                           block.v.token_stride == S::STORED_BYTES && block.v.page_tokens == 0;
        base = shared_address(in.keys);
        k.begin(work, work.unit.k, first_key, base, at);
        v.begin(work, work.unit.v, first_key, base + k_size * S::TILE_BYTES, at);
        k_read.offset = v_read.offset = 0;
        k_next = v_next = 0;
        tiles = count;
        dense_tiles = dense ? min(count, static_cast<int>(block.n_valid - first_key) / TILE) : 0;
        static_assert(k_size + ahead >= v_size, "what comes first");
#pragma unroll 1
        for (int i = 1 - k_size - ahead; i < 0; i++) {
            if (i >= 1 - v_size)
                copy_values(work, at);
            copies_commit();
            copy_keys(work, at);
            copies_commit();
        }
    }

    __device__ __forceinline__ void copy_keys(const job &work, const place<S> &at)
    {
        const int tile = backwards ? tiles - 1 - k_next : k_next;
        if (k_next < tiles) {
            if (tile < dense_tiles)
                k.copy_dense(tile, policy);
            else
                k.copy_rows(work, work.block.k, work.unit.k, &work.unit.report->bad_k_entry,
                            item_first_key(work.item) + tile * TILE, policy,
                            place<S>(here(at.thread)));
        }
        k_next++;
        k.template advance<k_size>();
    }
    __device__ __forceinline__ void copy_values(const job &work, const place<S> &at)
    {
        const int tile = backwards ? tiles - 1 - v_next : v_next;
        if (v_next < tiles) {
            if (tile < dense_tiles)
                v.copy_dense(tile, policy);
            else
                v.copy_rows(work, work.block.v, work.unit.v, &work.unit.report->bad_v_entry,
                            item_first_key(work.item) + tile * TILE, policy,
                            place<S>(here(at.thread)));
        }
        v_next++;
        v.template advance<v_size>();
    }

    /* Values of the step before are read no more. */
    __device__ __forceinline__ void next_values(const job &work, const place<S> &at)
    {
        copy_values(work, at);
        copies_commit();
    }
    /* Nor are keys of this one (KEYS_LATE: of the one before). After the values'. */
    __device__ __forceinline__ void next_keys(const job &work, const place<S> &at)
    {
        copy_keys(work, at);
        copies_commit();
    }
    __device__ __forceinline__ void copy(const job &work, const place<S> &at)
    {
        next_values(work, at);
        next_keys(work, at);
    }

    __device__ __forceinline__ void advance(void)
    {
        k_read.advance();
        v_read.advance();
    }

    /* Until this warp's copies are there of this step's values, and of this step's or, if they are
     * ahead, the next one's keys; then the tensor cores may see them. */
    template <int pending = PENDING> __device__ __forceinline__ void wait(void) const
    {
        asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
        fence_async_proxy();
    }
};

/* ---- queries ---- */

/* A thread's part of an item's query rows. */
template <class S> struct query_rows {
    static constexpr int PARTS = S::DIM / 8; /* of a row */
    static constexpr int AT_ONCE = GROUP_THREADS / PARTS;
    static constexpr int STEPS = S::ROWS / AT_ONCE;
    uint4 words[STEPS];

    __device__ __forceinline__ void load(const job &work, const place<S> &at)
    {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int row = i * AT_ONCE + at.thread / PARTS;
            const unsigned char *from = query_row(work, work.item.row_group * S::ROWS + row);
            words[i] = make_uint4(0, 0, 0, 0);
            if (!from)
                continue;
            from += 16 * (at.thread % PARTS);
            if (work.block.q_align >= 16) {
                words[i] = __ldg(reinterpret_cast<const uint4 *>(from));
            } else {
                const uint32_t *each = reinterpret_cast<const uint32_t *>(from);
                words[i] = make_uint4(__ldg(each), __ldg(each + 1), __ldg(each + 2),
                                      __ldg(each + 3));
            }
        }
    }

    /* The group must meet before they are read. */
    __device__ __forceinline__ void store(uint32_t to, const place<S> &at) const
    {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            store_shared(to + element_offset<S>(i * AT_ONCE + at.thread / PARTS, at.thread % PARTS),
                         __uint_as_float(words[i].x), __uint_as_float(words[i].y),
                         __uint_as_float(words[i].z), __uint_as_float(words[i].w));
    }
};

/* Starts x = tile * the sum of `parts` operands of rows^T, `next` bytes apart. */
template <class S, int parts>
__device__ __forceinline__ void start_row_product(float (&x)[S::COLUMNS][4], uint32_t tile,
                                                  uint32_t from, int next)
{
    const uint64_t keys = keys_operand<S>(tile);
    const uint64_t rows = keys_operand<S>(from);
    hold(x);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
        for (int part = 0; part < parts; part++)
            warpgroup_mma_shared<typename S::type>(x, keys + keys_step(k),
                                                   rows + keys_step(k) + (part * next >> 4),
                                                   k > 0 || part > 0);
    warpgroup_commit();
}

} // namespace dkv_stream_16bit

#endif
