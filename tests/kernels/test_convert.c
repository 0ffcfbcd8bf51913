/* Element conversions, all codes of every type, against arithmetic on their fields. */
#include "kernels/convert.h"

#include <setjmp.h>
#include <stdlib.h>

#include <cmocka.h>

/* The value of a code by the definition of a binary floating-point format. */
static double value_of(unsigned code, unsigned exponent_bits, unsigned mantissa_bits, bool has_inf)
{
    const unsigned mantissa = code & ((1u << mantissa_bits) - 1);
    const unsigned exponent = code >> mantissa_bits & ((1u << exponent_bits) - 1);
    const double sign = code >> (mantissa_bits + exponent_bits) ? -1 : 1;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const bool top = exponent == (1u << exponent_bits) - 1;
    if (top && has_inf)
        return mantissa == 0 ? sign * INFINITY : NAN;
    if (top && mantissa == (1u << mantissa_bits) - 1)
        return NAN;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - (int)mantissa_bits);
    return sign *
           ldexp((1u << mantissa_bits) + mantissa, (int)exponent - bias - (int)mantissa_bits);
}

static void assert_same(double want, float got)
{
    if (isnan(want)) {
        assert_true(isnan(got));
        return;
    }
    assert_true((double)got == want);
    assert_int_equal(signbit(got) != 0, signbit(want) != 0);
}

static void every_code_converts_exactly(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 65536; code++) {
        const uint16_t half = (uint16_t)code;
        assert_same(value_of(code, 5, 10, true), dkv_fp16_to_f32(half));
        assert_same(value_of(code, 8, 7, true), dkv_bf16_to_f32(half));
    }
    for (unsigned code = 0; code < 256; code++) {
        assert_same(value_of(code, 4, 3, false), dkv_e4m3_to_f32((uint8_t)code));
        assert_same(value_of(code, 5, 2, true), dkv_e5m2_to_f32((uint8_t)code));
    }
}

static void every_code_survives_a_round_trip(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 65536; code++) {
        const uint16_t half = (uint16_t)code;
        if (!isnan(dkv_fp16_to_f32(half)))
            assert_int_equal(dkv_f32_to_fp16(dkv_fp16_to_f32(half)), half);
        else
            assert_true(isnan(dkv_fp16_to_f32(dkv_f32_to_fp16(dkv_fp16_to_f32(half)))));
        if (!isnan(dkv_bf16_to_f32(half)))
            assert_int_equal(dkv_f32_to_bf16(dkv_bf16_to_f32(half)), half);
        else
            assert_true(isnan(dkv_bf16_to_f32(dkv_f32_to_bf16(dkv_bf16_to_f32(half)))));
    }
}

/* Between each pair of neighbours: below, at and above the middle. */
static void rounding_is_to_nearest_with_ties_to_even(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 0x7c00; code++) {
        const double lo = value_of(code, 5, 10, true);
        /* past the largest value the next one would be 65536 */
        const double hi = code == 0x7bff ? 65536 : value_of(code + 1, 5, 10, true);
        const float middle = (float)((lo + hi) / 2);
        const unsigned even = code % 2 == 0 ? code : code + 1;
        assert_int_equal(dkv_f32_to_fp16(middle), even);
        assert_int_equal(dkv_f32_to_fp16(-middle), 0x8000 | even);
        assert_int_equal(dkv_f32_to_fp16(nextafterf(middle, 0)), code);
        assert_int_equal(dkv_f32_to_fp16(nextafterf(middle, INFINITY)), code + 1);
    }
    for (unsigned code = 0; code < 0x7f80; code++) {
        const float middle = dkv_bits_to_f32(code << 16 | 0x8000u);
        const unsigned even = code % 2 == 0 ? code : code + 1;
        assert_int_equal(dkv_f32_to_bf16(middle), even);
        assert_int_equal(dkv_f32_to_bf16(dkv_bits_to_f32(code << 16 | 0x7fffu)), code);
        assert_int_equal(dkv_f32_to_bf16(dkv_bits_to_f32(code << 16 | 0x8001u)), code + 1);
    }
    assert_int_equal(dkv_f32_to_fp16(INFINITY), 0x7c00);
    assert_int_equal(dkv_f32_to_fp16(-1e10f), 0xfc00);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_converts_exactly),
        cmocka_unit_test(every_code_survives_a_round_trip),
        cmocka_unit_test(rounding_is_to_nearest_with_ties_to_even),
    };
    return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
