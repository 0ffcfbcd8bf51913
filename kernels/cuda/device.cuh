/* Device functions that every kernel of this folder shares: the address rule, elements as floats,
 * and how a kernel reports what it found. */
#ifndef DKV_KERNELS_CUDA_DEVICE_CUH
#define DKV_KERNELS_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/plan.h"

/* Entry `index` of a page table, or -1 if it is out of range or null; the lowest bad index is kept
 * in *bad. Anything that is read through an entry was checked by the same load. */
__device__ __forceinline__ long long dkv_cu_entry(const dkv_cu_rows &rows, uint32_t index,
                                                  unsigned long long *bad)
{
    long long entry = rows.entry_bytes == 8 ? static_cast<const long long *>(rows.table)[index]
                                            : static_cast<const int *>(rows.table)[index];
    bool null_page = entry == rows.null_entry;
    entry &= rows.mask;
    null_page = rows.has_null_entry && (null_page || entry == rows.null_entry);
    if (null_page || static_cast<unsigned long long>(entry) >= rows.entry_limit) {
        atomicMin(bad, static_cast<unsigned long long>(index));
        return -1;
    }
    return entry;
}

/* Where the row of stored token `token` starts, or NULL behind a bad table entry. `base` is the
 * unit's k or v. */
__device__ __forceinline__ const unsigned char *dkv_cu_row(const dkv_cu_rows &rows,
                                                           const unsigned char *base,
                                                           uint32_t token, unsigned long long *bad)
{
    if (rows.page_tokens == 0)
        return base + token * rows.token_stride;
    uint32_t page;
    uint32_t slot;
    if (rows.page_shift != 0 || rows.page_tokens == 1) {
        page = token >> rows.page_shift;
        slot = token & (rows.page_tokens - 1);
    } else {
        page = token / rows.page_tokens;
        slot = token - page * rows.page_tokens;
    }
    const long long entry = rows.table ? dkv_cu_entry(rows, page, bad) : page;
    return entry < 0 ? nullptr : base + entry * rows.page_stride + slot * rows.token_stride;
}

__device__ __forceinline__ float dkv_cu_f8(unsigned char bits, uint32_t dtype)
{
    const __nv_fp8_interpretation_t kind = dtype == DKV_F8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, kind)));
}

__device__ __forceinline__ float2 dkv_cu_pair(unsigned bits, uint32_t dtype)
{
    if (dtype == DKV_BF16)
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    __half2 pair;
    memcpy(&pair, &bits, sizeof(pair));
    return __half22float2(pair);
}

/* `words` 32-bit words at `from`, whose alignment is at least `align` bytes. */
template <int words>
__device__ __forceinline__ void dkv_cu_load_words(const unsigned char *from, uint32_t align,
                                                  unsigned (&out)[words])
{
    if (align >= 4 * words || (align >= 16 && words % 4 == 0)) {
        if constexpr (words % 4 == 0) {
#pragma unroll
            for (int i = 0; i < words; i += 4) {
                const uint4 v = *reinterpret_cast<const uint4 *>(from + 4 * i);
                out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
            }
        } else {
            const uint2 v = *reinterpret_cast<const uint2 *>(from);
            out[0] = v.x, out[1] = v.y;
        }
    } else if (align >= 4) {
#pragma unroll
        for (int i = 0; i < words; i++)
            out[i] = *reinterpret_cast<const unsigned *>(from + 4 * i);
    } else {
#pragma unroll
        for (int i = 0; i < words; i++)
            out[i] = from[4 * i] | from[4 * i + 1] << 8 | from[4 * i + 2] << 16 |
                     static_cast<unsigned>(from[4 * i + 3]) << 24;
    }
}

/* Eight adjacent elements as float32, exactly; `scale` is applied to fp8 alone. Element 0 is at
 * `from`, which is a multiple of eight elements into a row of the given alignment. */
__device__ __forceinline__ void dkv_cu_load8(const unsigned char *from, uint32_t dtype,
                                             uint32_t align, float scale, float (&out)[8])
{
    if (dtype == DKV_FP32) {
        unsigned words[8];
        dkv_cu_load_words(from, align, words);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[i] = __uint_as_float(words[i]);
    } else if (dtype == DKV_BF16 || dtype == DKV_FP16) {
        unsigned words[4];
        dkv_cu_load_words(from, align, words);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = dkv_cu_pair(words[i], dtype);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    } else {
        unsigned words[2];
        dkv_cu_load_words(from, align, words);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[i] = dkv_cu_f8(words[i / 4] >> (8 * (i % 4)) & 0xff, dtype) * scale;
    }
}

__device__ __forceinline__ uint32_t dkv_cu_dtype_bytes(uint32_t dtype)
{
    return dtype == DKV_FP32 ? 4 : dtype == DKV_BF16 || dtype == DKV_FP16 ? 2 : 1;
}

/* One element; any alignment. */
__device__ __forceinline__ float dkv_cu_load1(const unsigned char *from, uint32_t dtype,
                                              float scale)
{
    if (dtype == DKV_FP32)
        return __uint_as_float(from[0] | from[1] << 8 | from[2] << 16 |
                               static_cast<unsigned>(from[3]) << 24);
    if (dtype == DKV_BF16 || dtype == DKV_FP16)
        return dkv_cu_pair(from[0] | from[1] << 8, dtype).x;
    return dkv_cu_f8(from[0], dtype) * scale;
}

/* `value` rounded to the type results are stored in; fp8 and fp32 do not round. */
__device__ __forceinline__ float dkv_cu_round(float value, uint32_t dtype)
{
    if (dtype == DKV_BF16)
        return __bfloat162float(__float2bfloat16_rn(value));
    if (dtype == DKV_FP16)
        return __half2float(__float2half_rn(value));
    return value;
}

__device__ __forceinline__ bool dkv_cu_finite(float value)
{
    return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

__device__ __forceinline__ bool dkv_cu_masked(const dkv_cu_unit &unit, uint32_t key)
{
    return unit.mask && (unit.mask[key >> 5] >> (key & 31) & 1);
}

/* The key that is the only one some row sees, or ~0. */
__device__ inline uint32_t dkv_cu_lone_key(const unsigned *mask, uint32_t n, uint32_t window)
{
    uint32_t first = ~0u;
    for (uint32_t i = 0; i < n; i++) {
        if (i % 32 == 0 && mask[i / 32] == ~0u) {
            i += 31;
            continue;
        }
        if (mask[i / 32] >> (i % 32) & 1)
            continue;
        if (first != ~0u)
            return i > n - window ? first : ~0u;
        first = i;
    }
    return first;
}

#endif
