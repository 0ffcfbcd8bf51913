/* Vectors of the portable variant: four lanes in the compiler's own vector type, which every
 * architecture has in some form. Defines what the *_tmpl.c files ask for; see simd_avx512.h for the
 * same in one instruction each.
 *
 * v_max(a, b)     b where either is NaN, so that a NaN on the right survives.
 * v_fma(a, b, c)  a * b + c, here with two roundings.
 */
#ifndef DKV_KERNELS_CPU_SIMD_H
#define DKV_KERNELS_CPU_SIMD_H

#include "kernels/convert.h"

#include <string.h>

/* Inlined with constant sizes into loops that then keep their accumulators in registers. */
#define DKV_BLOCK static inline __attribute__((always_inline))

#define LANES    4
#define DOT_KEYS 4 /* keys in one block of dot products: 2 * DOT_KEYS accumulators */
#define ACC_DIMS 4
#define ACC_REST 4

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef vi vm; /* all ones or all zeros per lane */

static inline vf v_set1(float x)
{
    return (vf){x, x, x, x};
}
static inline vf v_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline void v_store(float *p, vf v)
{
    memcpy(p, &v, sizeof(v));
}
static inline vf v_add(vf a, vf b)
{
    return a + b;
}
static inline vf v_sub(vf a, vf b)
{
    return a - b;
}
static inline vf v_mul(vf a, vf b)
{
    return a * b;
}
static inline vf v_div(vf a, vf b)
{
    return a / b;
}
static inline vf v_reciprocal(vf a)
{
    return v_set1(1.0f) / a;
}
static inline vf v_sqrt(vf a)
{
    return (vf){__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]),
                __builtin_sqrtf(a[3])};
}
static inline vf v_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
static inline vm v_gt(vf a, vf b)
{
    return a > b;
}
static inline vm v_eq(vf a, vf b)
{
    return a == b;
}
static inline vm m_and(vm a, vm b)
{
    return a & b;
}
static inline bool m_any(vm m)
{
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
/* a where m, else b */
static inline vf v_select(vm m, vf a, vf b)
{
    return (vf)((m & (vi)a) | (~m & (vi)b));
}
static inline vf v_max(vf a, vf b)
{
    return v_select(a > b, a, b);
}
static inline vf v_abs(vf a)
{
    return (vf)((vi)a & 0x7fffffff);
}
/* The larger of two non-negative floats as bit patterns: NaN beats infinity beats every number. */
static inline vf v_max_bits(vf a, vf b)
{
    return v_select((vi)a > (vi)b, a, b);
}
/* p * 2^n for p in 1/2..2 and integral n up to 127; 0 where n is below -126. */
static inline vf v_scale2(vf p, vf n)
{
    const vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return v_select(n < -126.0f, v_set1(0.0f), p * scale);
}
static inline vf v_rint(vf x) /* |x| < 2^22 */
{
    const vf magic = v_set1(0x1.8p23f);
    return (x + magic) - magic;
}
static inline float v_sum(vf a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}
/* Each lane's neighbour at that distance: lane i has lane i ^ distance. */
static inline vf v_swap1(vf a)
{
    return (vf){a[1], a[0], a[3], a[2]};
}
static inline vf v_swap2(vf a)
{
    return (vf){a[2], a[3], a[0], a[1]};
}
static inline float v_top(vf a)
{
    const vf b = v_max_bits(a, (vf){a[2], a[3], a[0], a[1]});
    return v_max_bits(b, (vf){b[1], b[0], b[3], b[2]})[0];
}
static inline vf v_from(const void *p, enum dkv_dtype dtype)
{
    const size_t step = dkv_dtype_bytes(dtype);
    vf v;
    for (size_t i = 0; i < LANES; i++)
        v[i] = dkv_element_to_f32((const uint8_t *)p + i * step, dtype);
    return v;
}
static inline vf v_round_to(vf v, enum dkv_dtype dtype)
{
    for (size_t i = 0; i < LANES; i++)
        v[i] = dkv_round_to_dtype(v[i], dtype);
    return v;
}
#endif
