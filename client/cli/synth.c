/* xoshiro256** for bits, Box and Muller's transform for normals, and one rounding routine for all
 * narrow types, since each is only a width of exponent and mantissa.
 *
 * A long tensor is made of pieces of a pool of a million such elements, each from a random place: a
 * gigabyte of fresh normals would take longer than most benchmarks. Pieces are shorter than a row
 * of most heads and of a prime length, so that no two rows are alike. */
#include "client/cli/synth.h"

#include <math.h>
#include <string.h>

static uint64_t rotate(uint64_t x, unsigned n)
{
    return x << n | x >> (64 - n);
}

void dkv_random_init(struct dkv_random *random, uint64_t seed)
{
    for (unsigned i = 0; i < 4; i++) { /* splitmix64 */
        seed += UINT64_C(0x9e3779b97f4a7c15);
        uint64_t z = seed;
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        random->state[i] = z ^ z >> 31;
    }
}

static uint64_t next_bits(struct dkv_random *random)
{
    uint64_t *s = random->state;
    const uint64_t result = rotate(s[1] * 5, 7) * 9;
    const uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate(s[3], 45);
    return result;
}

static const struct form {
    unsigned exponent_bits;
    unsigned mantissa_bits;
    uint32_t largest; /* finite magnitude, as bits */
} forms[] = {
    [DKV_BF16] = {8, 7, 0x7f7f},
    [DKV_FP16] = {5, 10, 0x7bff},
    [DKV_F8_E4M3] = {4, 3, 0x7e},
    [DKV_F8_E5M2] = {5, 2, 0x7b},
};

/* The value in units of the target's last place, rounded to nearest even, is the target's bits once
 * the exponent is added: a carry out of the mantissa moves into the exponent as it should. */
uint32_t dkv_round_to(enum dkv_dtype dtype, float x)
{
    uint32_t bits;
    if (dtype == DKV_FP32) {
        memcpy(&bits, &x, sizeof(bits));
        return bits;
    }
    const struct form *form = &forms[dtype];
    const int bias = (1 << (form->exponent_bits - 1)) - 1;
    const uint32_t sign = signbit(x) ? 1u << (form->exponent_bits + form->mantissa_bits) : 0;
    int exponent;
    const float magnitude = fabsf(x);
    if (magnitude == 0)
        return sign;
    (void)frexpf(magnitude, &exponent); /* magnitude in [2^(e-1), 2^e) */
    const int lowest = 1 - bias;        /* of a normal number */
    const int unit_exponent = exponent - 1 < lowest ? lowest : exponent - 1;
    const float units = rintf(ldexpf(magnitude, (int)form->mantissa_bits - unit_exponent));
    const uint32_t steps = (uint32_t)(unit_exponent - lowest) << form->mantissa_bits;
    bits = (uint32_t)units + steps;
    return sign | (bits > form->largest ? form->largest : bits);
}

static void put(enum dkv_dtype dtype, void *out, size_t i, float x)
{
    const uint32_t bits = dkv_round_to(dtype, x);
    const size_t bytes = dkv_dtype_bytes(dtype);
    memcpy((uint8_t *)out + i * bytes, &bits, bytes); /* little-endian, like everything here */
}

#define POOL_ELEMENTS  (UINT64_C(1) << 20)
#define PIECE_ELEMENTS UINT64_C(61)

static void make_normals(struct dkv_random *random, enum dkv_dtype dtype, void *out, size_t n)
{
    const float two_pi = 6.2831853f;
    for (size_t i = 0; i < n; i += 2) {
        const uint64_t bits = next_bits(random);
        const float u = ((float)(bits >> 40) + 0.5f) * 0x1p-24f; /* never 0 */
        const float angle = two_pi * (float)(bits & 0xffffff) * 0x1p-24f;
        const float radius = sqrtf(-2.0f * logf(u));
        put(dtype, out, i, radius * cosf(angle));
        if (i + 1 < n)
            put(dtype, out, i + 1, radius * sinf(angle));
    }
}

void dkv_random_normal(struct dkv_random *random, enum dkv_dtype dtype, void *out, size_t n)
{
    const size_t bytes = dkv_dtype_bytes(dtype);
    uint8_t *to = out;
    const uint8_t *pool = out; /* its first part is the pool of the rest */
    const size_t n_fresh = n < POOL_ELEMENTS ? n : POOL_ELEMENTS;
    make_normals(random, dtype, out, n_fresh);
    for (size_t i = n_fresh; i < n; i += PIECE_ELEMENTS) {
        const size_t left = n - i;
        const size_t from = next_bits(random) % (POOL_ELEMENTS - PIECE_ELEMENTS);
        memcpy(to + i * bytes, pool + from * bytes,
               (left < PIECE_ELEMENTS ? left : PIECE_ELEMENTS) * bytes);
    }
}
