/* Element types to and from float, exactly.
 *
 * To float     every value of every type is exact, subnormals, infinities and NaNs included.
 * From float   round to nearest, ties to even; overflow gives infinity; a NaN stays a NaN.
 *
 * These are the definitions, one element at a time; vector variants elsewhere must give the same
 * bits.
 *
 * Thread  any; no state, and no dependence on the rounding or flush modes of the FPU, except that
 *         dkv_fp16_to_f32() of a subnormal multiplies by a power of two.
 */
#ifndef DKV_KERNELS_CONVERT_H
#define DKV_KERNELS_CONVERT_H

#include "proto/types.h"

#include <math.h>
#include <string.h>

static inline float dkv_bits_to_f32(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint32_t dkv_f32_to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static inline float dkv_bf16_to_f32(uint16_t h)
{
    return dkv_bits_to_f32((uint32_t)h << 16);
}

/* fp16: 1 sign, 5 exponent (bias 15), 10 mantissa bits. */
static inline float dkv_fp16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu;
    const uint32_t mantissa = h & 0x3ffu;
    if (exponent == 0x1f) /* infinity or NaN */
        return dkv_bits_to_f32(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24 */
        const float magnitude = (float)mantissa * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return dkv_bits_to_f32(sign | (exponent + 112u) << 23 | mantissa << 13);
}

/* E4M3 "fn": bias 7, no infinities, S.1111.111 is NaN, largest finite value 448. */
static inline float dkv_e4m3_to_f32(uint8_t b)
{
    const uint32_t sign = (uint32_t)(b & 0x80u) << 24;
    const uint32_t exponent = (b >> 3) & 0xfu;
    const uint32_t mantissa = b & 0x7u;
    if (exponent == 0xf && mantissa == 0x7)
        return dkv_bits_to_f32(sign | 0x7fc00000u);
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-9 */
        const float magnitude = (float)mantissa * 0x1p-9f;
        return sign ? -magnitude : magnitude;
    }
    return dkv_bits_to_f32(sign | (exponent + 120u) << 23 | mantissa << 20);
}

/* E5M2: the upper byte of an fp16. */
static inline float dkv_e5m2_to_f32(uint8_t b)
{
    return dkv_fp16_to_f32((uint16_t)((uint16_t)b << 8));
}

static inline uint16_t dkv_f32_to_bf16(float f)
{
    const uint32_t bits = dkv_f32_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) /* NaN: keep it one, quiet */
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline uint16_t dkv_f32_to_fp16(float f)
{
    const uint32_t bits = dkv_f32_to_bits(f);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* 65520, half way past the largest: rounds to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x33000001u) /* up to 2^-25, half the smallest: rounds to zero */
        return sign;
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal, in units of 2^-24 */
        const uint32_t shift = 126u - (magnitude >> 23);
        const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t half = 1u << (shift - 1u);
        const uint32_t units = (mantissa + half - 1u + (mantissa >> shift & 1u)) >> shift;
        return (uint16_t)(sign | units);
    }
    return (uint16_t)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

/* The value at `element` of a type with `dtype`, before any scale; NaN for an unknown dtype. */
static inline float dkv_element_to_f32(const void *element, enum dkv_dtype dtype)
{
    uint16_t half;
    float single;
    switch (dtype) {
    case DKV_BF16: memcpy(&half, element, sizeof(half)); return dkv_bf16_to_f32(half);
    case DKV_FP16: memcpy(&half, element, sizeof(half)); return dkv_fp16_to_f32(half);
    case DKV_FP32: memcpy(&single, element, sizeof(single)); return single;
    case DKV_F8_E4M3: return dkv_e4m3_to_f32(*(const uint8_t *)element);
    case DKV_F8_E5M2: return dkv_e5m2_to_f32(*(const uint8_t *)element);
    default: return NAN;
    }
}

/* `value` rounded to `dtype` and back: what storing it in a tensor of that type does. fp8 is not
 * a type that results are stored in, so it rounds like fp32 (not at all). */
static inline float dkv_round_to_dtype(float value, enum dkv_dtype dtype)
{
    switch (dtype) {
    case DKV_BF16: return dkv_bf16_to_f32(dkv_f32_to_bf16(value));
    case DKV_FP16: return dkv_fp16_to_f32(dkv_f32_to_fp16(value));
    default: return value;
    }
}
#endif
