/* Vectors of the NEON variant (AArch64, baseline ASIMD): four lanes, thirty-two registers. See
 * simd_scalar.h for what each name promises.
 *
 * Twelve keys by two vectors are 24 accumulators: with two vectors of queries and a broadcast they
 * fill the registers, and cover the four FMA pipes of a Neoverse V core at four cycles each.
 */
#ifndef DKV_KERNELS_CPU_SIMD_H
#define DKV_KERNELS_CPU_SIMD_H

#include "kernels/convert.h"

#include <arm_neon.h>

/* Inlined with constant sizes into loops that then keep their accumulators in registers. */
#define DKV_BLOCK static inline __attribute__((always_inline))

#define LANES    4
#define DOT_KEYS 12
#define ACC_DIMS 12
#define ACC_REST 8

typedef float32x4_t vf;
typedef uint32x4_t vm;

static inline vf v_set1(float x)
{
    return vdupq_n_f32(x);
}
static inline vf v_load(const float *p)
{
    return vld1q_f32(p);
}
static inline void v_store(float *p, vf v)
{
    vst1q_f32(p, v);
}
static inline vf v_add(vf a, vf b)
{
    return vaddq_f32(a, b);
}
static inline vf v_sub(vf a, vf b)
{
    return vsubq_f32(a, b);
}
static inline vf v_mul(vf a, vf b)
{
    return vmulq_f32(a, b);
}
static inline vf v_div(vf a, vf b)
{
    return vdivq_f32(a, b);
}
static inline vf v_reciprocal(vf a)
{
    return vdivq_f32(vdupq_n_f32(1.0f), a);
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return vfmaq_f32(c, a, b);
}
static inline vm v_gt(vf a, vf b)
{
    return vcgtq_f32(a, b);
}
static inline vm v_eq(vf a, vf b)
{
    return vceqq_f32(a, b);
}
static inline vm m_and(vm a, vm b)
{
    return vandq_u32(a, b);
}
static inline bool m_any(vm m)
{
    return vmaxvq_u32(m) != 0;
}
static inline vf v_select(vm m, vf a, vf b)
{
    return vbslq_f32(m, a, b);
}
static inline vf v_max(vf a, vf b) /* FMAX would give NaN where either is one */
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
static inline vf v_abs(vf a)
{
    return vabsq_f32(a);
}
static inline vf v_max_bits(vf a, vf b)
{
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)));
}
static inline vf v_scale2(vf p, vf n)
{
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    const vf scale = vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
    return vbslq_f32(vcltq_f32(n, vdupq_n_f32(-126.0f)), vdupq_n_f32(0.0f), vmulq_f32(p, scale));
}
static inline vf v_rint(vf x)
{
    return vrndnq_f32(x);
}
static inline float v_sum(vf a)
{
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(vpadd_f32(b, b), 0);
}
static inline vf v_swap1(vf a)
{
    return vrev64q_f32(a);
}
static inline vf v_swap2(vf a)
{
    return vextq_f32(a, a, 2);
}
static inline float v_top(vf a)
{
    return dkv_bits_to_f32(vmaxvq_u32(vreinterpretq_u32_f32(a)));
}
/* Four fp8 elements, each in the low half of a 16-bit lane. */
static inline uint16x4_t load4(const void *p)
{
    uint32_t bytes;
    memcpy(&bytes, p, sizeof(bytes));
    return vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
}
static inline vf from_half(uint16x4_t bits)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}
static inline uint16x4_t load_half(const void *p)
{
    uint16x4_t bits; /* rows are aligned to bytes */
    memcpy(&bits, p, sizeof(bits));
    return bits;
}
static inline vf v_from(const void *p, enum dkv_dtype dtype)
{
    switch (dtype) {
    case DKV_BF16: return vreinterpretq_f32_u32(vshll_n_u16(load_half(p), 16));
    case DKV_FP16: return from_half(load_half(p));
    case DKV_F8_E5M2: return from_half(vshl_n_u16(load4(p), 8));
    case DKV_F8_E4M3: { /* as a half with the exponent 8 too small; S.1111.111 is NaN */
        const uint16x4_t b = load4(p);
        const uint16x4_t magnitude = vand_u16(b, vdup_n_u16(0x7f));
        const uint16x4_t sign = vshl_n_u16(vand_u16(b, vdup_n_u16(0x80)), 8);
        const uint16x4_t half = vorr_u16(vshl_n_u16(magnitude, 7), sign);
        const int16x4_t nan = vreinterpret_s16_u16(vceq_u16(magnitude, vdup_n_u16(0x7f)));
        return vbslq_f32(vreinterpretq_u32_s32(vmovl_s16(nan)), vdupq_n_f32(NAN),
                         vmulq_f32(from_half(half), vdupq_n_f32(256.0f)));
    }
    default: {
        vf v;
        memcpy(&v, p, sizeof(v));
        return v;
    }
    }
}
static inline vf v_round_to(vf v, enum dkv_dtype dtype)
{
    if (dtype == DKV_FP16)
        return vcvt_f32_f16(vcvt_f16_f32(v));
    if (dtype == DKV_BF16) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        return vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(0xffff0000u)));
    }
    return v;
}
#endif
