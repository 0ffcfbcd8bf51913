/* Vectors of the AVX-512 variant: sixteen lanes. See simd_scalar.h for what each name promises. */
#ifndef DKV_KERNELS_CPU_SIMD_H
#define DKV_KERNELS_CPU_SIMD_H

#include "kernels/convert.h"

#include <immintrin.h>

/* Inlined with constant sizes into loops that then keep their accumulators in registers. */
#define DKV_BLOCK static inline __attribute__((always_inline))

#define LANES    16
#define DOT_KEYS 12
#define ACC_DIMS 12
#define ACC_REST 8

typedef __m512 vf;
typedef __mmask16 vm;

static inline vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}
static inline vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
static inline void v_store(float *p, vf v)
{
    _mm512_storeu_ps(p, v);
}
static inline vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
static inline vf v_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
static inline vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
static inline vf v_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
/* The 14-bit estimate and one Newton step: an ulp, and unlike the divider it does not block the
 * multiply-add ports. */
static inline vf v_reciprocal(vf a)
{
    const vf r = _mm512_rcp14_ps(a);
    return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r);
}
static inline vf v_sqrt(vf a)
{
    return _mm512_sqrt_ps(a);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
static inline vm v_gt(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
static inline vm v_eq(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
static inline vm m_and(vm a, vm b)
{
    return (vm)(a & b);
}
static inline bool m_any(vm m)
{
    return m != 0;
}
static inline vf v_select(vm m, vf a, vf b)
{
    return _mm512_mask_blend_ps(m, b, a);
}
static inline vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
static inline vf v_abs(vf a)
{
    return _mm512_abs_ps(a);
}
static inline vf v_max_bits(vf a, vf b)
{
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
static inline vf v_scale2(vf p, vf n)
{
    return _mm512_scalef_ps(p, n); /* below the normal range it is flushed to 0 (cpu.h) */
}
static inline vf v_rint(vf x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline float v_sum(vf a)
{
    return _mm512_reduce_add_ps(a);
}
static inline vf v_swap1(vf a)
{
    return _mm512_permute_ps(a, 0xb1);
}
static inline vf v_swap2(vf a)
{
    return _mm512_permute_ps(a, 0x4e);
}
static inline vf v_swap4(vf a)
{
    return _mm512_shuffle_f32x4(a, a, 0xb1);
}
static inline vf v_swap8(vf a)
{
    return _mm512_shuffle_f32x4(a, a, 0x4e);
}
static inline float v_top(vf a)
{
    return dkv_bits_to_f32(_mm512_reduce_max_epu32(_mm512_castps_si512(a)));
}
static inline vf from_half(__m256i h)
{
    return _mm512_cvtph_ps(h);
}
static inline vf v_from(const void *p, enum dkv_dtype dtype)
{
    switch (dtype) {
    case DKV_BF16:
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
    case DKV_FP16: return from_half(_mm256_loadu_si256((const __m256i *)p));
    case DKV_F8_E5M2:
        return from_half(
            _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8));
    case DKV_F8_E4M3: { /* as a half with the exponent 8 too small; S.1111.111 is NaN */
        const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
        const __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8);
        const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
        const vm nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
        return _mm512_mask_mov_ps(_mm512_mul_ps(from_half(half), _mm512_set1_ps(256.0f)), nan,
                                  _mm512_set1_ps(NAN));
    }
    default: return _mm512_loadu_ps(p);
    }
}
static inline vf v_round_to(vf v, enum dkv_dtype dtype)
{
    if (dtype == DKV_FP16)
        return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    if (dtype == DKV_BF16) {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000)));
    }
    return v;
}
#endif
