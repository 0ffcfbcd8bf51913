/* What both passes of the attention scorer multiply: queries in shared memory, tiles of keys in
 * registers, and the logits of them. Included by attention.cu. */
#ifndef DKV_KERNELS_CUDA_ATTENTION_TILES_CUH
#define DKV_KERNELS_CUDA_ATTENTION_TILES_CUH

#include "kernels/cuda/attention_work.cuh"

namespace
{

/* ---- queries ---- */

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
        const uint4 low = query_words(work, group, slot, dim);
        const uint4 high = query_words(work, group, slot + 8, dim);
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
template <int columns>
__device__ inline void to_logits(const scaling &scale, float (&z)[columns][4], float &odd)
{
    if (scale.outer > 0) {
#pragma unroll
        for (int k = 0; k < columns * 4; k++) {
            float &x = z[k / 4][k % 4];
            odd = fmaf(x, 0.0f, odd); /* the cap makes a number of infinity */
            x = scale.outer * tanh_fast(x * scale.inner);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < columns * 4; k++) {
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
