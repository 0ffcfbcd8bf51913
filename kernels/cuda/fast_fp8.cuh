/* fp8 caches in the fast scorer. Both formats are exact in fp16, so tiles of such caches are fp16:
 * the fetching warps copy the bytes into the upper half of a half tile's place and, when they are
 * there, spread them over the whole of it. Scales stay outside: of keys and queries in the logits'
 * factor, of values in the scores'.
 *
 * Queries are made fp16 before the item is handed to the other warps: exactly from fp8 and fp16;
 * from bf16 with an error of at most 2^-25, far below what float32 sums lose unless all of a row is
 * tiny, in which case (or if a number is above fp16's) the general scorer answers.
 */
#ifndef DKV_KERNELS_CUDA_FAST_FP8_CUH
#define DKV_KERNELS_CUDA_FAST_FP8_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

/* Scales beyond these are left to the general scorer: what is computed without them would leave
 * float32 with them. */
constexpr float SCALE_MIN = 1e-15f;
constexpr float SCALE_MAX = 1e13f;

/* Two fp8 numbers (the low 16 bits of `bytes`) as a pair of fp16. */
template <bool e5m2> __device__ __forceinline__ uint32_t fp16_of_fp8(uint32_t bytes)
{
    uint32_t pair;
    if constexpr (e5m2)
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    return pair;
}

/* Four of them. */
__device__ __forceinline__ uint2 fp16_of_fp8(uint32_t bytes, uint32_t dtype)
{
    return dtype == DKV_F8_E5M2
               ? make_uint2(fp16_of_fp8<true>(bytes), fp16_of_fp8<true>(bytes >> 16))
               : make_uint2(fp16_of_fp8<false>(bytes), fp16_of_fp8<false>(bytes >> 16));
}

/* ---- tiles ---- */

/* Eight keys by 64 dimensions: 512 bytes of fp8, of which a lane has 16, become one block of 1024
 * bytes (fast_place.cuh). Pieces lie in the order of the blocks. */
constexpr int PIECE_BYTES = 512;

constexpr int PENDING_MAX = 4; /* halves of one warp whose copies are under way */

/* Where 16 bytes of a key belong in a half tile's place before they are converted. */
template <class S> __device__ __forceinline__ uint32_t raw_offset(int key, int column)
{
    constexpr int BLOCKS = S::DIM / 64;
    return S::HALF_BYTES / 2 + (key / 8 * BLOCKS + column / 4) * PIECE_BYTES +
           (key % 8 * 4 + column % 4) * 16;
}

/* Pieces `piece` and the next. Their blocks end before the bytes of later pieces begin. */
template <bool e5m2>
__device__ __forceinline__ void convert_pieces(uint32_t raw, uint32_t to, int piece)
{
    uint32_t from[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
        load_shared(raw + (piece + i) * PIECE_BYTES, from[i]);
    __syncwarp(); /* every lane has its bytes: their place may be written */
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t *words = from[i] + 2 * half;
            store_shared((to ^ half << 4) + (piece + i) * 2 * PIECE_BYTES,
                         __uint_as_float(fp16_of_fp8<e5m2>(words[0])),
                         __uint_as_float(fp16_of_fp8<e5m2>(words[0] >> 16)),
                         __uint_as_float(fp16_of_fp8<e5m2>(words[1])),
                         __uint_as_float(fp16_of_fp8<e5m2>(words[1] >> 16)));
        }
}

/* Converts the half tile at `half` in its place, by a whole warp. */
template <class S>
__device__ __forceinline__ void convert_half(uint32_t half, bool e5m2, int lane_of_warp)
{
    const int lane = here(lane_of_warp);
    constexpr int PIECES = S::HALF_BYTES / 2 / PIECE_BYTES;
    const uint32_t raw = half + S::HALF_BYTES / 2 + lane * 16;
    const uint32_t to = half + element_offset<S>(lane / 4, lane % 4 * 2);
#pragma unroll 1
    for (int piece = 0; piece < PIECES; piece += 2) {
        if (e5m2)
            convert_pieces<true>(raw, to, piece);
        else
            convert_pieces<false>(raw, to, piece);
    }
}

/* ---- queries ---- */

/* Four elements of a query as fp16; *largest becomes their largest magnitude's bits, bf16 alone. */
__device__ __forceinline__ uint2 query_elements(uint2 words, uint32_t dtype, uint32_t *largest)
{
    *largest = 0;
    if (dtype == DKV_FP16)
        return words;
    if (dtype != DKV_BF16)
        return fp16_of_fp8(words.x, dtype);
    const float2 low = unpack<bf16_type>(words.x);
    const float2 high = unpack<bf16_type>(words.y);
    *largest = max(max(__float_as_uint(fabsf(low.x)), __float_as_uint(fabsf(low.y))),
                   max(__float_as_uint(fabsf(high.x)), __float_as_uint(fabsf(high.y))));
    return make_uint2(pack<fp16_type>(low.x, low.y), pack<fp16_type>(high.x, high.y));
}

/* Converts an item's query rows into the unit's scratch and points the job there. Thread blocks of
 * one unit write the same bytes. By a whole warp. */
template <class S> __device__ __forceinline__ void convert_query(job &work, int lane)
{
    constexpr int AHEAD = 8;              /* loads in flight */
    constexpr int AT_ONCE = 128 / S::DIM; /* rows */
    const dkv_cu_block &block = work.block;
    const uint32_t rows = block.group * block.window;
    const uint32_t first = work.item.row_group * S::ROWS;
    const uint32_t last = min(rows, first + S::ROWS);
    const uint32_t element = lane % (S::DIM / 4) * 4;
    const unsigned of_row = S::DIM == 128 ? ~0u : lane < 16 ? 0x0000ffffu : 0xffff0000u;
    const bool bytes = block.q_dtype != DKV_BF16 && block.q_dtype != DKV_FP16;
    const unsigned char *from = work.unit.q + (bytes ? 1 : 2) * element;
    unsigned char *to = work.unit.work + sizeof(merged<S>) * ((rows + S::ROWS - 1) / S::ROWS);
    const uint32_t inverse = (1 << 20) / block.window + 1; /* rows and window are below 2^10 */
    bool fits = true;
#pragma unroll 1
    for (uint32_t base = first; base < last; base += AHEAD * AT_ONCE) {
        uint2 words[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t row = min(base + i * AT_ONCE + lane / (S::DIM / 4), last - 1);
            const uint32_t head = row * inverse >> 20; /* row / window */
            const unsigned char *at = from + head * block.q_head_stride +
                                      (row - head * block.window) * block.q_row_stride;
            if (bytes)
                words[i] = make_uint2(__ldg(reinterpret_cast<const uint32_t *>(at)), 0);
            else
                words[i] = __ldg(reinterpret_cast<const uint2 *>(at));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t row = min(base + i * AT_ONCE + lane / (S::DIM / 4), last - 1);
            uint32_t largest;
            const uint2 pairs = query_elements(words[i], block.q_dtype, &largest);
            *reinterpret_cast<uint2 *>(to + row * static_cast<size_t>(S::ROW_BYTES) +
                                       2 * element) = pairs;
            if (block.q_dtype == DKV_BF16) {
                const float top = __uint_as_float(__reduce_max_sync(of_row, largest));
                fits &= top <= 65504.0f && (top >= 1.0f / 1024 || top == 0.0f);
            }
        }
    }
    fits = __all_sync(~0u, fits);
    if (lane == 0) {
        const float k = work.unit.k_scale;
        const float v = work.unit.v_scale;
        fits &= k >= SCALE_MIN && k <= SCALE_MAX && v >= SCALE_MIN && v <= SCALE_MAX;
        if (!fits)
            atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
        work.unit.q = to;
        work.block.q_row_stride = S::ROW_BYTES;
        work.block.q_head_stride = static_cast<int64_t>(S::ROW_BYTES) * block.window;
    }
}

} // namespace dkv_fast

#endif
