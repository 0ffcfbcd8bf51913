/* Vectors of the AVX2 variant (with FMA and F16C): eight lanes. See simd_scalar.h for what each
 * name promises. */
#ifndef DKV_KERNELS_CPU_SIMD_H
#define DKV_KERNELS_CPU_SIMD_H

#include "kernels/convert.h"

#include <immintrin.h>

/* Inlined with constant sizes into loops that then keep their accumulators in registers. */
#define DKV_BLOCK static inline __attribute__((always_inline))

#define LANES    8
#define DOT_KEYS 6
#define ACC_DIMS 6
#define ACC_REST 4

typedef __m256 vf;
typedef __m256 vm;

static inline vf v_set1(float x)
{
    return _mm256_set1_ps(x);
}
static inline vf v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
static inline void v_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v);
}
static inline vf v_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
static inline vf v_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}
static inline vf v_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
static inline vf v_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}
static inline vf v_reciprocal(vf a)
{
    return _mm256_div_ps(_mm256_set1_ps(1.0f), a);
}
static inline vf v_sqrt(vf a)
{
    return _mm256_sqrt_ps(a);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
static inline vm v_gt(vf a, vf b)
{
    return _mm256_cmp_ps(a, b, _CMP_GT_OQ);
}
static inline vm v_eq(vf a, vf b)
{
    return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
}
static inline vm m_and(vm a, vm b)
{
    return _mm256_and_ps(a, b);
}
static inline bool m_any(vm m)
{
    return _mm256_movemask_ps(m) != 0;
}
static inline vf v_select(vm m, vf a, vf b)
{
    return _mm256_blendv_ps(b, a, m);
}
static inline vf v_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
static inline vf v_abs(vf a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
static inline vf v_max_bits(vf a, vf b)
{
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
static inline vf v_scale2(vf p, vf n)
{
    const vf scale = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ),
                            _mm256_mul_ps(p, scale));
}
static inline vf v_rint(vf x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline float v_sum(vf a)
{
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
static inline vf v_swap1(vf a)
{
    return _mm256_permute_ps(a, 0xb1);
}
static inline vf v_swap2(vf a)
{
    return _mm256_permute_ps(a, 0x4e);
}
static inline vf v_swap4(vf a)
{
    return _mm256_permute2f128_ps(a, a, 1);
}
static inline float v_top(vf a)
{
    float lane[LANES];
    _mm256_storeu_ps(lane, a);
    uint32_t top = 0;
    for (int i = 0; i < LANES; i++)
        top = dkv_f32_to_bits(lane[i]) > top ? dkv_f32_to_bits(lane[i]) : top;
    return dkv_bits_to_f32(top);
}
static inline __m128i load8(const void *p)
{
    return _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
}
static inline vf v_from(const void *p, enum dkv_dtype dtype)
{
    switch (dtype) {
    case DKV_BF16:
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
    case DKV_FP16: return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    case DKV_F8_E5M2: return _mm256_cvtph_ps(_mm_slli_epi16(load8(p), 8));
    case DKV_F8_E4M3: { /* as a half with the exponent 8 too small; S.1111.111 is NaN */
        const __m128i b = load8(p);
        const __m128i magnitude = _mm_and_si128(b, _mm_set1_epi16(0x7f));
        const __m128i sign = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8);
        const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
        const __m256i nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)));
        return _mm256_blendv_ps(_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f)),
                                _mm256_set1_ps(NAN), _mm256_castsi256_ps(nan));
    }
    default: return _mm256_loadu_ps(p);
    }
}
static inline vf v_round_to(vf v, enum dkv_dtype dtype)
{
    if (dtype == DKV_FP16)
        return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    if (dtype == DKV_BF16) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000)));
    }
    return v;
}
#endif
