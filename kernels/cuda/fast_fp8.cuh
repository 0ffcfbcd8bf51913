/* fp8 caches in the fast scorer. Both formats are exact in fp16, which products are made of. Tiles
 * stay as they are stored: who multiplies loads them into registers, as the operand that may lie
 * there, and converts them on the way. Scales stay outside: of keys and queries in the logits'
 * factor, of values in the scores'.
 *
 * Queries are made fp16 by the warp that brings descriptors: exactly from fp8 and fp16; from bf16
 * with an error of at most 2^-25, far below what float32 sums lose unless all of a row is tiny, in
 * which case (or if a number is above fp16's) the general scorer answers.
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

/* Where 16 bytes of a key lie in a tile. Columns are permuted so that neither of the loads below
 * meets a bank twice. */
template <class S> __device__ __forceinline__ uint32_t raw_offset(int key, int column)
{
    const int permutation = S::DIM == 128 ? (key >> 1 & 3) << 1 ^ (key & 1) << 2 : key >> 1 & 3;
    return key * S::DIM + ((column ^ permutation) << 4);
}

/* The tile's keys as the 64-row operand, dimensions as depth: of keys g and g + 8 of the warp's
 * sixteen a thread has quarter t of every 64 dimensions. A step's depth is four dimensions of each
 * quarter; the other operand has them in that order (pair_offset()). */
template <class S> struct fp8_keys {
    uint32_t bytes[S::DIM / 64][2][4];
    uint32_t words[S::K_STEPS][4];

    __device__ __forceinline__ void load(uint32_t tile, const place<S> &at)
    {
        const uint32_t key = tile + 16 * at.warp * S::DIM;
#pragma unroll
        for (int part = 0; part < S::DIM / 64; part++) {
            const uint32_t from = key + raw_offset<S>(at.g, 4 * part + at.t);
            load_shared(from, bytes[part][0]);
            load_shared(from + 8 * S::DIM, bytes[part][1]);
        }
    }
    template <bool e5m2> __device__ __forceinline__ void convert(void)
    {
#pragma unroll
        for (int part = 0; part < S::DIM / 64; part++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    words[4 * part + i][r] = fp16_of_fp8<e5m2>(bytes[part][r % 2][i] >> r / 2 * 16);
    }
    __device__ __forceinline__ void convert(bool e5m2)
    {
        if (__any_sync(~0u, e5m2))
            convert<true>();
        else
            convert<false>();
    }
};

/* The tile's dimensions as the 64-row operand, 64 at a time, keys as depth: a thread has the
 * DIM / 32 adjacent dimensions `first`() and on, two of each 64, and of every sixteen keys 2t, 2t +
 * 1, 2t + 8 and 2t + 9. */
template <class S> struct fp8_values {
    static constexpr int DIMENSIONS = S::DIM / 32;
    uint32_t bytes[8][2]; /* of keys 8i + 2t and the next */
    uint32_t words[4][S::DIM / 64][4];

    static __device__ __forceinline__ int first(const place<S> &at)
    {
        return DIMENSIONS * (8 * at.warp + at.g);
    }
    /* Bytes of the thread's dimensions of one key. */
    static __device__ __forceinline__ uint32_t bytes_of(uint32_t address)
    {
        return DIMENSIONS == 4 ? load_shared(address) : load_shared_16(address);
    }
    static __device__ __forceinline__ void store_bytes(uint32_t address, uint32_t bytes)
    {
        if (DIMENSIONS == 4)
            store_shared(address, bytes);
        else
            store_shared_16(address, bytes);
    }
    static __device__ __forceinline__ uint32_t offset(int key, const place<S> &at)
    {
        return raw_offset<S>(key, first(at) / 16) + first(at) % 16;
    }

    __device__ __forceinline__ void load(uint32_t tile, const place<S> &at)
    {
        const uint32_t even = tile + offset(2 * at.t, at);
        const uint32_t odd = tile + offset(2 * at.t + 1, at);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            bytes[i][0] = bytes_of(even + 8 * i * S::DIM);
            bytes[i][1] = bytes_of(odd + 8 * i * S::DIM);
        }
    }
    template <bool e5m2> __device__ __forceinline__ void convert(void)
    {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++) {
                const uint32_t pairs = __byte_perm(bytes[i][0], bytes[i][1],
                                                   m == 0 ? 0x5140 : 0x7362);
                words[i / 2][m][i % 2 * 2] = fp16_of_fp8<e5m2>(pairs);
                words[i / 2][m][i % 2 * 2 + 1] = fp16_of_fp8<e5m2>(pairs >> 16);
            }
    }
    __device__ __forceinline__ void convert(bool e5m2)
    {
        if (__any_sync(~0u, e5m2))
            convert<true>();
        else
            convert<false>();
    }
};

/* ---- queries ---- */

/* Four elements of a query as fp16; bf16: `largest` becomes their largest magnitude's bits. */
template <int dtype> __device__ __forceinline__ uint2 query_elements(uint2 words, uint32_t &largest)
{
    if constexpr (dtype == DKV_FP16)
        return words;
    const float2 low = unpack<bf16_type>(words.x);
    const float2 high = unpack<bf16_type>(words.y);
    largest = max(max(__float_as_uint(fabsf(low.x)), __float_as_uint(fabsf(low.y))),
                  max(__float_as_uint(fabsf(high.x)), __float_as_uint(fabsf(high.y))));
    return make_uint2(pack<fp16_type>(low.x, low.y), pack<fp16_type>(high.x, high.y));
}
template <int dtype>
__device__ __forceinline__ uint2 query_elements(uint32_t bytes, uint32_t &largest)
{
    (void)largest;
    return fp16_of_fp8(bytes, dtype);
}

/* Where an item's query rows are as fp16, [ROWS][DIM]: in the unit's scratch. */
template <class S> __device__ __forceinline__ unsigned char *fp8_query(const job &work)
{
    const uint32_t rows = work.block.group * work.block.window;
    return work.unit.work + sizeof(merged<S>) * ((rows + S::ROWS - 1) / S::ROWS) +
           static_cast<size_t>(work.item.row_group) * S::ROWS * S::ROW_BYTES;
}

/* Converts query rows of one type, four dimensions a lane; whether fp16 is good enough for them. */
template <class S, int dtype>
__device__ __forceinline__ bool convert_rows(const job &work, int lane)
{
    constexpr int AHEAD = 8;              /* loads in flight */
    constexpr int AT_ONCE = 128 / S::DIM; /* rows */
    using stored = std::conditional_t<dtype == DKV_BF16 || dtype == DKV_FP16, uint2, uint32_t>;
    const dkv_cu_block &block = work.block;
    const int part = lane % (S::DIM / 4);
    const unsigned of_row = S::DIM == 128 ? ~0u : lane < 16 ? 0x0000ffffu : 0xffff0000u;
    const uint32_t first = work.item.row_group * S::ROWS;
    const int rows = static_cast<int>(
        min(block.group * block.window - first, static_cast<uint32_t>(S::ROWS)));
    const uint32_t window = block.window;
    const uint32_t inverse = (1 << 20) / window + 1; /* rows and window are below 2^10 */
    const unsigned char *q = work.unit.q + part * sizeof(stored);
    const int64_t head_stride = block.q_head_stride;
    const int64_t row_stride = block.q_row_stride;
    unsigned char *to = fp8_query<S>(work) + 8 * part;
    bool fits = true;
#pragma unroll 1
    for (int base = lane / (S::DIM / 4); base < rows; base += AHEAD * AT_ONCE) {
        stored words[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t row = first + min(base + i * AT_ONCE, rows - 1);
            const uint32_t head = row * inverse >> 20; /* row / window */
            words[i] = __ldg(reinterpret_cast<const stored *>(q + head * head_stride +
                                                              (row - head * window) * row_stride));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint32_t largest = 0;
            const uint2 pairs = query_elements<dtype>(words[i], largest);
            *reinterpret_cast<uint2 *>(to +
                                       min(base + i * AT_ONCE, rows - 1) * S::ROW_BYTES) = pairs;
            if (dtype == DKV_BF16) {
                const float top = __uint_as_float(__reduce_max_sync(of_row, largest));
                fits &= top <= 65504.0f && (top >= 1.0f / 1024 || top == 0.0f);
            }
        }
    }
    return fits;
}

/* Converts an item's query rows. Thread blocks of one unit write the same bytes. By a whole warp.
 */
template <class S> __device__ __forceinline__ void convert_query(const job &work, int lane)
{
    bool fits = true;
    switch (work.block.q_dtype) {
    case DKV_BF16: fits = convert_rows<S, DKV_BF16>(work, lane); break;
    case DKV_FP16: convert_rows<S, DKV_FP16>(work, lane); break;
    case DKV_F8_E4M3: convert_rows<S, DKV_F8_E4M3>(work, lane); break;
    default: convert_rows<S, DKV_F8_E5M2>(work, lane);
    }
    const float k = work.unit.k_scale;
    const float v = work.unit.v_scale;
    fits &= k >= SCALE_MIN && k <= SCALE_MAX && v >= SCALE_MIN && v <= SCALE_MAX;
    if (!fits)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    __syncwarp();
}

} // namespace dkv_fast

#endif
