/* What both passes of the attention scorer share: a unit's descriptors, queries in shared memory,
 * tiles of keys in registers, and logits. Included by attention.cu.
 *
 * A slot is the place of a query row: rows of a unit lie in slots one after the other, or, where
 * each query head is reduced by itself, a head begins at a multiple of 8 slots. Slots are taken 32
 * at a time (a chunk, which a warp multiplies with a tile of 16 keys) and at most 128 at a time (a
 * row group, whose queries are in shared memory).
 */
#ifndef DKV_KERNELS_CUDA_ATTENTION_TILES_CUH
#define DKV_KERNELS_CUDA_ATTENTION_TILES_CUH

#include <float.h>

#include "kernels/cuda/fast_ptx.cuh"
#include "kernels/cuda/rows.cuh"

namespace
{

using dkv_fast::exp2_fast;
using dkv_fast::rcp_fast;

constexpr int threads = 128;
constexpr int warps = threads / 32;
constexpr uint32_t tile_keys = 16;
constexpr uint32_t chunk_slots = 32;
constexpr int n_columns = chunk_slots / 8; /* products of 8 slots */
constexpr uint32_t group_slots_max = 128;
constexpr uint32_t score_keys_max = 512;
constexpr int resident = 5; /* thread blocks of a multiprocessor, at least */
constexpr float log2e = 1.4426950408889634f;

/* Where a unit is in the work list. */
struct place {
    uint32_t first_item[2]; /* of weigh and of score */
    uint32_t unit;
    uint32_t block;
    uint32_t counter; /* of the unit's first row group */
    uint32_t n_ranges;
    uint32_t range_keys;
    uint32_t n_slots;
    uint32_t per_head; /* slots */
    uint32_t group_slots;
    uint32_t n_groups;
    uint32_t padding;
};

struct attention_args {
    const dkv_cu_block *blocks;
    const dkv_cu_unit *units;
    const place *places;
    unsigned *counters; /* of ranges that are through, for each row group; 0 at first */
    uint32_t n_places;
    uint32_t score_keys; /* of an item of score */
};

/* What weigh leaves per (range, slot). */
struct partial {
    float top; /* largest logit */
    float sum; /* of 2^(logit - top); 0: no key of this range is seen */
};

/* What weigh's last range leaves per slot: p = 2^(logit - top) * inverse. */
struct __align__(16) row_result
{
    float top;
    float inverse;
    float weight; /* in the reduction over rows; 0: no row */
    int last;     /* key that it sees; -1: no row */
};

constexpr row_result no_row = {FLT_MAX, 0.0f, 0.0f, -1}; /* its p is 0 */

/* Where results are in unit.work, behind the partials of [n_ranges][n_slots]. */
__host__ __device__ inline size_t results_offset(uint32_t n_ranges, uint32_t n_slots)
{
    const size_t bytes = sizeof(partial) * n_ranges * n_slots;
    return (bytes + 15) / 16 * 16;
}

/* In shared memory, because descriptors in global memory are far. */
struct job {
    dkv_cu_unit unit;
    dkv_cu_block block;
    place at;
};

/* The row group an item works on. */
struct row_group {
    uint32_t first_slot;
    uint32_t n_slots;
    uint32_t n_chunks;
};

__device__ inline row_group group_of(const place &at, uint32_t index)
{
    row_group group;
    group.first_slot = index * at.group_slots;
    group.n_slots = min(at.group_slots, at.n_slots - group.first_slot);
    group.n_chunks = ceil_div(group.n_slots, chunk_slots);
    return group;
}

/* Brings the descriptors of a place, a word each thread, so that it takes one trip. */
__device__ inline void copy_job(const dkv_cu_unit *unit, const dkv_cu_block *block, const place *at,
                                job &work)
{
    constexpr uint32_t unit_words = sizeof(*unit) / 4;
    constexpr uint32_t block_words = sizeof(*block) / 4;
    static_assert(sizeof(job) == sizeof(*unit) + sizeof(*block) + sizeof(*at) &&
                      sizeof(job) / 4 <= threads,
                  "a word each thread");
    const uint32_t i = threadIdx.x;
    const uint32_t *from = i < unit_words ? reinterpret_cast<const uint32_t *>(unit) + i
                           : i < unit_words + block_words
                               ? reinterpret_cast<const uint32_t *>(block) + (i - unit_words)
                               : reinterpret_cast<const uint32_t *>(at) +
                                     (i - unit_words - block_words);
    if (i < sizeof(job) / 4)
        reinterpret_cast<uint32_t *>(&work)[i] = *from;
    __syncthreads();
}

/* Finds the unit of an item, 32 places at a look; returns the item's number within the unit. */
__device__ inline uint32_t open_job(const attention_args &args, int pass, uint32_t item, job &work)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t low = 0;
    uint32_t count = args.n_places;
    for (;;) {
        const uint32_t step = ceil_div(count, 32);
        const uint32_t at = lane * step;
        uint4 head = {0, 0, 0, 0};
        if (at < count)
            head = *reinterpret_cast<const uint4 *>(args.places + low + at);
        const uint32_t first = pass == 0 ? head.x : head.y;
        const int last = 31 - __clz(__ballot_sync(~0u, at < count && first <= item));
        if (step == 1) {
            copy_job(args.units + __shfl_sync(~0u, head.z, last),
                     args.blocks + __shfl_sync(~0u, head.w, last), args.places + low + last, work);
            return item - __shfl_sync(~0u, first, last);
        }
        low += last * step;
        count = min(step, count - last * step);
    }
}

/* Score is launched while weigh still runs, and waits for it before it reads what that left. */
__device__ inline void start_dependents()
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void wait_for_weigh()
{
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

/* ---- queries ---- */

template <int blocks>
__device__ inline uint4 query_words(const job &work, const row_group &group, uint32_t slot,
                                    uint32_t dim)
{
    const dkv_cu_block &block = work.block;
    const uint32_t head = (group.first_slot + slot) / work.at.per_head;
    const uint32_t t = (group.first_slot + slot) % work.at.per_head;
    if (slot >= group.n_slots || t >= block.window || dim >= block.head_dim)
        return {0, 0, 0, 0};
    return *reinterpret_cast<const uint4 *>(work.unit.q + head * block.q_head_stride +
                                            t * block.q_row_stride + dim * 2);
}

/* A row group's queries in the order of products: [16 slots][32 dimensions][half][lane], a lane's
 * words of slots lane / 4 and 8 behind. */
template <int blocks>
__device__ void load_queries(const job &work, const row_group &group, uint4 *queries)
{
    for (uint32_t i = threadIdx.x; i < group.n_chunks * 2 * blocks * 32; i += threads) {
        const uint32_t lane = i % 32;
        const uint32_t slot = i / (32 * blocks) * 16 + lane / 4;
        const uint32_t dim = i / 32 % blocks * 32 + lane % 4 * 8;
        const uint4 low = query_words<blocks>(work, group, slot, dim);
        const uint4 high = query_words<blocks>(work, group, slot + 8, dim);
        uint4 *to = queries + i / 32 * 64 + lane;
        to[0] = {low.x, high.x, low.y, high.y};
        to[32] = {low.z, high.z, low.w, high.w};
    }
}

/* ---- keys ---- */

/* A lane's part of 16 keys: keys lane / 4 and 8 behind, of every 32 dimensions the 8 from
 * lane % 4 * 8 on. */
template <int blocks> struct key_tile {
    uint4 words[2][blocks];
    unsigned there[2]; /* bits 4 k to 4 k + 3: key k of eight is not masked, not behind the end, not
                          behind a bad table entry */
};

/* 16 bytes. Volatile: this is when the load has to start. */
__device__ inline uint4 load_words(const unsigned char *from)
{
    uint4 words;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    return words;
}

/* The same, or zeros if there are none. */
__device__ inline uint4 load_words_if(const unsigned char *from, bool exists)
{
    uint4 words;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.u32 p, %5, 0;\n"
                 "mov.u32 %0, 0;\n"
                 "mov.u32 %1, 0;\n"
                 "mov.u32 %2, 0;\n"
                 "mov.u32 %3, 0;\n"
                 "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 "}"
                 : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
                 : "l"(from), "r"(static_cast<unsigned>(exists)));
    return words;
}

/* Keys as a warp reads them. */
struct key_source {
    const unsigned char *lane_words; /* of the lane, in the row of its key 0 */
    int64_t stride;
    bool simple; /* rows follow each other, all of them are there, and full */
};

template <int blocks> __device__ inline key_source source_of(const job &work)
{
    const dkv_cu_rows &rows = work.block.k;
    const uint32_t lane = threadIdx.x % 32;
    return {work.unit.k + (work.block.valid_from + lane / 4) * rows.token_stride + lane % 4 * 16,
            rows.token_stride,
            rows.page_tokens == 0 && !work.unit.mask && work.block.head_dim == 32 * blocks};
}

/* Any keys: masked, paged, with fewer dimensions. */
template <int blocks>
__device__ inline void load_any_keys(const job &work, uint32_t first_key, uint32_t end_key,
                                     key_tile<blocks> &tile)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t key = first_key + lane / 4 + 8 * i;
        const unsigned char *row = nullptr;
        if (key < end_key && !dkv_cu_masked(work.unit, key))
            row = dkv_cu_row(work.block.k, work.unit.k, work.block.valid_from + key,
                             &work.unit.report->bad_k_entry);
        tile.there[i] = __ballot_sync(~0u, row != nullptr);
#pragma unroll
        for (int b = 0; b < blocks; b++) {
            const uint32_t dim = b * 32 + lane % 4 * 8;
            tile.words[i][b] = load_words_if(row + dim * 2, row && dim < work.block.head_dim);
        }
    }
}

/* The tile of a warp's keys first_key.. below end_key. */
template <int blocks>
__device__ inline void load_keys(const job &work, const key_source &source, uint32_t first_key,
                                 uint32_t end_key, key_tile<blocks> &tile)
{
    if (!source.simple || first_key + tile_keys > end_key) {
        load_any_keys(work, first_key, end_key, tile);
        return;
    }
    const unsigned char *row = source.lane_words + first_key * source.stride;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        tile.there[i] = ~0u;
#pragma unroll
        for (int b = 0; b < blocks; b++)
            tile.words[i][b] = load_words(row + 8 * i * source.stride + b * 64);
    }
}

/* True if every row sees every key of a tile. */
__device__ inline bool is_plain(const job &work, const unsigned (&there)[2], uint32_t first_key)
{
    return (there[0] & there[1]) == ~0u &&
           first_key + tile_keys <= work.block.n_valid - work.block.window + 1;
}

/* ---- logits ---- */

/* A lane has logits of 4 slots and 4 keys: z[r][i] is of slot 8 r + lane / 4 of the chunk, and of
 * the tile's key key_of(i). */
typedef float logits[n_columns][4];

__device__ inline uint32_t key_of(uint32_t i)
{
    return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

/* c += a b for 16 slots, 8 keys and 16 dimensions; z's rows r and r + 1, from column i on. */
template <bool bf16>
__device__ inline void multiply(float &c0, float &c1, float &c2, float &c3, const uint4 &a,
                                unsigned b0, unsigned b1)
{
    if (bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* Products of a chunk's queries and a tile. Both passes call this, so that they see the same
 * logits. */
template <bool bf16, int blocks>
__device__ inline void products(const key_tile<blocks> &tile, const uint4 *queries, logits &z)
{
#pragma unroll
    for (int k = 0; k < n_columns * 4; k++)
        z[k / 4][k % 4] = 0.0f;
#pragma unroll
    for (int b = 0; b < blocks; b++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < n_columns; r += 2) {
                const uint4 q = queries[((r / 2 * blocks + b) * 2 + half) * 32 + threadIdx.x % 32];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint4 &k = tile.words[i][b];
                    multiply<bf16>(z[r][2 * i], z[r][2 * i + 1], z[r + 1][2 * i],
                                   z[r + 1][2 * i + 1], q, half ? k.z : k.x, half ? k.w : k.y);
                }
            }
}

/* To about 2^-22, without a branch. */
__device__ inline float tanh_fast(float x)
{
    const float square = x * x;
    float near = fmaf(square, 0.021869489f, -0.053968254f);
    near = fmaf(near, square, 0.133333333f);
    near = fmaf(near, square, -0.333333333f);
    near = fmaf(near * square, x, x);
    const float e = exp2_fast(-2.0f * log2e * fabsf(x));
    const float far = copysignf((1.0f - e) * rcp_fast(1.0f + e), x);
    return fabsf(x) < 0.25f ? near : far;
}

/* From products to logits in units of log2. */
struct scaling {
    float plain;
    float inner; /* of a cap: logit = outer * tanh(inner * product) */
    float outer; /* 0: no cap */
};

__device__ inline scaling scaling_of(const dkv_cu_block &block)
{
    const bool capped = block.softcap > 0;
    return {block.scale * log2e, capped ? block.scale / block.softcap : 0.0f,
            capped ? block.softcap * log2e : 0.0f};
}

/* `odd` becomes NaN with the first that is no number. */
__device__ inline void to_logits(const scaling &scale, logits &z, float &odd)
{
    if (scale.outer > 0) {
#pragma unroll
        for (int k = 0; k < n_columns * 4; k++) {
            float &x = z[k / 4][k % 4];
            odd = fmaf(x, 0.0f, odd); /* the cap makes a number of infinity */
            x = scale.outer * tanh_fast(x * scale.inner);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < n_columns * 4; k++) {
        float &x = z[k / 4][k % 4];
        x = __fmul_rn(x, scale.plain);
        odd = fmaf(x, 0.0f, odd);
    }
}

/* Logits of keys that a row does not see become -inf; slot s of the chunk sees keys up to
 * last[s * stride]. */
__device__ inline void hide(const unsigned (&there)[2], uint32_t first_key, const int *last,
                            int stride, logits &z)
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < n_columns; r++) {
        const int end = last[(r * 8 + lane / 4) * stride];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t key = key_of(i);
            if (static_cast<int>(first_key + key) > end || !(there[i / 2] >> key % 8 * 4 & 1))
                z[r][i] = -INFINITY;
        }
    }
}

} // namespace

#endif
