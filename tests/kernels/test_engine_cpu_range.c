/* Finite values that the CPU engine cannot compute with, each an error of its own block: squares,
 * logits and scores beyond float32. */
#include "tests/kernels/engine_cpu_fixture.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The planned case is invalid, and the error says `text`. */
static void expect_refused(struct dkv_case *c, const char *text)
{
    struct dkv_engine *engine = open_engine(1);
    struct answer a;
    make_answer(&a, c);
    run(engine, &a.item, 1);
    assert_int_equal(a.item.status, DKV_E_INVALID);
    assert_non_null(strstr(a.item.error.text, text));
    free_answer(&a);
    dkv_engine_cpu.close(engine);
}

static void values_too_large_to_square_are_out_of_range(void **state)
{
    (void)state;
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 16,
                                 .q_rows = 8,
                                 .n_tokens = 100,
                                 .q_dtype = DKV_FP32},
              4);
    dkv_case_set(&c, DKV_VALUE, 0, 3, 2, 2e18);
    dkv_case_plan(&c);
    struct dkv_engine *engine = open_engine(1);
    struct answer a;
    make_answer(&a, &c);
    run(engine, &a.item, 1);
    assert_int_equal(a.item.status, DKV_E_INVALID);
    assert_non_null(strstr(a.item.error.text, "out of range at KV head 0, token 3, element 2"));
    dkv_case_set(&c, DKV_VALUE, 0, 3, 2, 9e17);
    run(engine, &a.item, 1);
    assert_int_equal(a.item.status, DKV_OK);
    for (int j = 0; j < 100; j++)
        assert_true(isfinite(a.scores[j]) && a.scores[j] >= 0);
    free_answer(&a);
    dkv_engine_cpu.close(engine);
    dkv_case_fini(&c);
}

static void scores_beyond_float32_are_out_of_range(void **state)
{
    (void)state;
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 8,
                                 .kv_heads = 1,
                                 .head_dim = 512,
                                 .q_rows = 8,
                                 .n_tokens = 64,
                                 .q_dtype = DKV_FP32},
              5);
    dkv_case_param(&c, "gqa", "sum");
    dkv_case_param(&c, "scale", "1");
    for (uint64_t t = 0; t < 64; t++)
        for (uint64_t e = 0; e < 512; e++)
            dkv_case_set(&c, DKV_VALUE, 0, t, e, (t * 7 + e * 5) % 3 == 0 ? 9.9e17 : -9.9e17);
    dkv_case_plan(&c);
    expect_refused(&c, "out of range at KV head 0");
    dkv_case_fini(&c);
}

/* Sums that overflow to both sides on their way, which makes logits that are not numbers. */
static void finite_keys_whose_logits_are_no_numbers_are_an_error(void **state)
{
    (void)state;
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 512,
                                 .q_rows = 8,
                                 .n_tokens = 60,
                                 .q_dtype = DKV_FP32},
              7);
    dkv_case_param(&c, "logit_softcap", "1e6");
    for (uint64_t t = 0; t < 60; t++)
        for (uint64_t e = 0; e < 512; e++)
            dkv_case_set(&c, DKV_KEY, 0, t, e, (t * 7 + e * e) % 3 == 0 ? 3.3e38 : -3.3e38);
    dkv_case_plan(&c);
    expect_refused(&c, "float32");
    dkv_case_fini(&c);
}

static void finite_keys_whose_logits_overflow_are_an_error(void **state)
{
    (void)state;
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 2,
                                 .kv_heads = 1,
                                 .head_dim = 8,
                                 .q_rows = 8,
                                 .n_tokens = 60,
                                 .q_dtype = DKV_FP32},
              7);
    for (int sign = -1; sign <= 1; sign += 2) {
        for (uint64_t t = 0; t < 60; t++) {
            for (uint64_t e = 0; e < 8; e++) {
                dkv_case_set(&c, DKV_KEY, 0, t, e, (double)(1 + t % 3) * 1e30 * sign);
                for (uint64_t row = 0; row < 8; row++)
                    dkv_case_set(&c, DKV_QUERY, t % 2, row, e, 1e30);
            }
        }
        dkv_case_plan(&c);
        expect_refused(&c, "float32");
    }
    dkv_case_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_too_large_to_square_are_out_of_range),
        cmocka_unit_test(scores_beyond_float32_are_out_of_range),
        cmocka_unit_test(finite_keys_whose_logits_are_no_numbers_are_an_error),
        cmocka_unit_test(finite_keys_whose_logits_overflow_are_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
