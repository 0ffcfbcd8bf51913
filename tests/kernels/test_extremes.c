/* Extreme input, row by row of the table in docs/numerics.md: values that are all alike, logits,
 * norms and values at the ends of their ranges, sinks that take all but 1e-12 of a row.
 *
 * usage: test_extremes [ENGINE] */
#include "tests/kernels/nasty.h"

/* ---- values and logits ---- */

static void identical_values_score_exactly_zero(void **state)
{
    (void)state;
    const double values[] = {0, 1, 3.1415926, -250, 0.001};
    for (size_t v = 0; v < sizeof(values) / sizeof(values[0]); v++)
        for (int i = 0; i < N_DTYPES; i++) {
            struct dkv_case c;
            struct dkv_case_answer got;
            make(&c, plain(all_dtypes[i]), 50 + v);
            for (uint64_t h = 0; h < 2; h++)
                for (uint64_t t = 0; t < 130; t++)
                    for (uint64_t e = 0; e < 64; e++)
                        dkv_case_set(&c, DKV_VALUE, h, t, e, values[v] * (1 + (double)(e % 5)));
            dkv_case_plan(&c);
            dkv_case_run(&c, &scorer, &got);
            assert_int_equal(got.status, DKV_OK);
            for (int t = 0; t < 260; t++)
                if (got.raw[t] != 0)
                    fail_msg("%s values %g: score %g of token %d", dkv_dtype_name(all_dtypes[i]),
                             values[v], got.raw[t], t % 130);
            for (int32_t k = 0; k < 13; k++) /* 8 protected, then the lowest indices */
                assert_int_equal(got.keep[k], k < 5 ? k : 122 + k - 5);
            dkv_case_answer_fini(&got);
            dkv_case_fini(&c);
        }
}

static void identical_keys_leave_the_distance_to_decide(void **state)
{
    (void)state;
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case c;
        make(&c, plain(all_dtypes[i]), 60);
        for (uint64_t h = 0; h < 2; h++)
            for (uint64_t t = 0; t < 130; t++)
                for (uint64_t e = 0; e < 64; e++)
                    dkv_case_set(&c, DKV_KEY, h, t, e, 0.5 + (double)(e % 3));
        check(&c, NULL);
        dkv_case_fini(&c);
    }
}

/* Logits of +-1e4: one key wins each row outright; all else is 0 in any format. */
static void logits_of_ten_thousand_are_right(void **state)
{
    (void)state;
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32};
    for (int i = 0; i < 3; i++)
        for (int sign = -1; sign <= 1; sign += 2) {
            struct dkv_case c;
            make(&c, plain(dtypes[i]), 70);
            for (uint64_t e = 0; e < 64; e++) {
                for (uint64_t h = 0; h < 4; h++)
                    for (uint64_t t = 0; t < 8; t++)
                        dkv_case_set(&c, DKV_QUERY, h, t, e, 35.5);
                for (uint64_t h = 0; h < 2; h++)
                    for (uint64_t t = 0; t < 130; t++)
                        dkv_case_set(&c, DKV_KEY, h, t, e, t == 17 ? 35.5 * sign : -35.5);
            }
            check(&c, NULL);
            dkv_case_fini(&c);
        }
}

static void norms_beyond_float16_are_right(void **state)
{
    (void)state;
    const struct {
        enum dkv_dtype dtype;
        double size;
    } sizes[] = {{DKV_FP16, 1e4}, {DKV_BF16, 1e4},  {DKV_BF16, 1e12},
                 {DKV_FP32, 1e9}, {DKV_FP32, 1e15}, {DKV_FP32, 1e-15}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct dkv_case c;
        struct dkv_random random = {80 + i};
        make(&c, plain(sizes[i].dtype), 80 + i);
        dkv_case_fill(&c, DKV_VALUE, &random, sizes[i].size);
        check(&c, NULL);
        dkv_case_fini(&c);
    }
}

static void values_above_1e18_are_out_of_range_not_nan(void **state)
{
    (void)state;
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP32};
    for (int i = 0; i < 2; i++) {
        struct dkv_case c;
        make(&c, plain(dtypes[i]), 90);
        dkv_case_set(&c, DKV_VALUE, 1, 77, 5, 3e30);
        check_refused(&c, (const char *const[]){"value", "out of range", NULL});
        dkv_case_fini(&c);
    }
}

/* A sink of 1 - p = 10^-u: the published code gives it 0, NaN or 1e12; it ranks first. */
static void sinks_down_to_1e_12_keep_their_score_and_rank(void **state)
{
    (void)state;
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32};
    for (int i = 0; i < 3; i++)
        for (int u = 1; u <= 12; u++) {
            struct dkv_shape shape = plain(dtypes[i]);
            struct dkv_case c;
            struct dkv_case_answer got;
            shape.n_tokens = 700;
            make(&c, shape, 100 + (uint64_t)u);
            dkv_case_param(&c, "keep_tokens", "9");
            for (uint64_t e = 0; e < 64; e++) {
                const double direction = e * 7 % 3 == 0 ? 1 : -1;
                for (uint64_t h = 0; h < 4; h++)
                    for (uint64_t t = 0; t < 8; t++)
                        dkv_case_set(&c, DKV_QUERY, h, t, e,
                                     direction + 0.1 * dkv_case_get(&c, DKV_QUERY, h, t, e));
                for (uint64_t h = 0; h < 2; h++)
                    dkv_case_set(&c, DKV_KEY, h, 0, e,
                                 direction * (2.303 * u + log(700) + 0.5) / 8);
            }
            check(&c, &got);
            for (uint32_t h = 0; h < 2; h++) {
                assert_true(kept(&c, &got, h, 0));
                assert_true(got.raw[h * 700] > 1 && got.raw[h * 700] < 1000);
            }
            dkv_case_answer_fini(&got);
            dkv_case_fini(&c);
        }
}

/* What a sink leaves to the others may be far below any number of the input type, and the sink and
 * the others far apart: its term is still |b - v|^2. More rows and tokens than above, so that they
 * are spread over an engine's lanes and ranges. */
static void a_sink_that_leaves_next_to_nothing_keeps_its_score(void **state)
{
    (void)state;
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32};
    const double octaves[] = {30, 60, 130, 300};
    for (int i = 0; i < 3; i++)
        for (int u = 0; u < 4; u++)
            for (uint32_t group = 1; group <= 8; group *= 8) {
                struct dkv_shape shape = plain(dtypes[i]);
                struct dkv_case c;
                struct dkv_case_answer got;
                shape.q_heads = 2 * group;
                shape.n_tokens = 1100;
                make(&c, shape, 160 + (uint64_t)u);
                dkv_case_param(&c, "keep_tokens", "9"); /* other scores may underflow */
                for (uint64_t e = 0; e < 64; e++) {
                    const double direction = e * 5 % 3 == 0 ? 1 : -1;
                    for (uint64_t h = 0; h < 2 * group; h++)
                        for (uint64_t t = 0; t < 8; t++)
                            dkv_case_set(&c, DKV_QUERY, h, t, e, direction);
                    for (uint64_t h = 0; h < 2; h++) /* the sink is in another place per head */
                        dkv_case_set(&c, DKV_KEY, h, h * 700 + 3, e,
                                     direction * (0.6931 * octaves[u] + 7) / 8);
                }
                check(&c, &got);
                for (uint32_t h = 0; h < 2; h++)
                    assert_true(got.raw[h * 1100 + h * 700 + 3] > 8);
                dkv_case_answer_fini(&got);
                dkv_case_fini(&c);
            }
}

/* A sink's logit is large, and so are its last bits in float32: an error of it is in the p of all
 * other keys, and twice in their scores. One row, so that no others make up for it. */
static void a_sink_takes_no_digits_from_the_others(void **state)
{
    (void)state;
    for (int logit = 9; logit <= 13; logit++) /* beyond, others' scores are below the floor */
        for (uint64_t seed = 1; seed <= 4; seed++) {
            struct dkv_shape shape = plain(DKV_FP32);
            struct dkv_case c;
            shape.q_heads = 2;
            shape.q_rows = 1;
            shape.n_tokens = 600;
            make(&c, shape, 200 + seed);
            dkv_case_param(&c, "keep_tokens", "2");
            for (uint64_t h = 0; h < 2; h++)
                for (uint64_t e = 0; e < 64; e++) {
                    const double direction = e * 7 % 3 == 0 ? 1 : -1;
                    dkv_case_set(&c, DKV_QUERY, h, 0, e,
                                 direction + 0.3 * dkv_case_get(&c, DKV_QUERY, h, 0, e));
                    dkv_case_set(&c, DKV_KEY, h, 5, e, direction * logit / 8);
                }
            check(&c, NULL);
            dkv_case_fini(&c);
        }
}

/* fp8 caches come with queries of other types, of any size, and with scales of any size. */
static void fp8_caches_beside_any_query_and_scale_are_right(void **state)
{
    (void)state;
    const struct {
        enum dkv_dtype query;
        double query_size;
        float q_scale, k_scale, v_scale;
    } forms[] = {{DKV_BF16, 1, 0, 0.75f, 1.5f},    {DKV_FP16, 1, 0, 0.75f, 1.5f},
                 {DKV_FP32, 1, 0, 0.75f, 1.5f},    {DKV_F8_E4M3, 1, 0.7f, 0.75f, 1.5f},
                 {DKV_F8_E5M2, 1, 3, 0.25f, 2},    {DKV_BF16, 1e-7, 0, 1e7f, 1},
                 {DKV_BF16, 1e6, 0, 1e-6f, 1},     {DKV_BF16, 1, 0, 0.75f, 1e-16f},
                 {DKV_FP16, 1, 0, 0.75f, 1.2e13f}, {DKV_F8_E4M3, 1, 1e-3f, 1e3f, 1},
                 {DKV_F8_E4M3, 1, 1, 1e-17f, 1}};
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++)
        for (enum dkv_dtype cache = DKV_F8_E4M3; cache <= DKV_F8_E5M2; cache++)
            for (uint32_t head_dim = 64; head_dim <= 128; head_dim *= 2) {
                struct dkv_random random = {180 + i};
                struct dkv_shape shape = plain(forms[i].query);
                struct dkv_case c;
                const float head_scales[] = {1, 1.25f, 0.5f, 1};
                shape.kv_dtype = cache;
                shape.head_dim = head_dim;
                shape.n_tokens = 600;
                make(&c, shape, 180 + i);
                dkv_case_fill(&c, DKV_QUERY, &random, forms[i].query_size);
                dkv_case_set(&c, DKV_VALUE, 0, 599, 5, 57344); /* above E4M3's largest: 448 there */
                c.block.query.scale = forms[i].q_scale;
                c.block.key.scale = forms[i].k_scale;
                c.block.value.scale = forms[i].v_scale;
                check(&c, NULL);
                if (forms[i].q_scale == 0.7f) {
                    c.block.query.head_scales = head_scales;
                    check(&c, NULL);
                }
                dkv_case_fini(&c);
            }
}

/* One row and few tokens, so that no p is near the middle between two numbers of the input type:
 * the whole accuracy is asked, of a key with p near 0.9 too. */
static void rounded_probabilities_are_used_in_every_form(void **state)
{
    (void)state;
    const char *const profiles[] = {"paper", "author", "kvpress"};
    for (int form = 0; form < 3; form++)
        for (int i = 0; i < 2; i++)
            for (uint64_t seed = 1; seed <= 5; seed++) {
                struct dkv_shape shape = plain(i == 0 ? DKV_BF16 : DKV_FP16);
                struct dkv_case c;
                shape.q_heads = shape.kv_heads = 1;
                shape.q_rows = 1;
                shape.n_tokens = 41;
                make(&c, shape, 140 + seed);
                dkv_case_param(&c, "profile", profiles[form]);
                dkv_case_param(&c, "p_round", "input");
                for (uint64_t e = 0; e < 64; e++) /* logit 6: |q|^2 is about 64 */
                    dkv_case_set(&c, DKV_KEY, 0, 11, e,
                                 0.75 * dkv_case_get(&c, DKV_QUERY, 0, 0, e));
                check(&c, NULL);
                dkv_case_fini(&c);
            }
}

/* p_j^2 of a concentrated head underflows float32, and with it the reported score; the order must
 * survive. Here it rises with the position, so that a tie at 0 would keep the wrong tokens. */
static void probabilities_whose_squares_underflow_still_rank(void **state)
{
    (void)state;
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32};
    for (int i = 0; i < 3; i++) {
        struct dkv_case c;
        struct dkv_case_answer got;
        make(&c, plain(dtypes[i]), 120);
        dkv_case_param(&c, "pool", "none");
        dkv_case_param(&c, "keep_tokens", "60");
        for (uint64_t e = 0; e < 64; e++) {
            for (uint64_t h = 0; h < 4; h++)
                for (uint64_t t = 0; t < 8; t++)
                    dkv_case_set(&c, DKV_QUERY, h, t, e, 1);
            for (uint64_t h = 0; h < 2; h++)
                for (uint64_t t = 0; t < 130; t++) /* logits 0, then -60 up to -48 */
                    dkv_case_set(&c, DKV_KEY, h, t, e, t == 0 ? 0 : -7.5 + (double)t / 86);
        }
        check(&c, &got);
        dkv_case_answer_fini(&got);
        dkv_case_fini(&c);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(identical_values_score_exactly_zero),
        cmocka_unit_test(identical_keys_leave_the_distance_to_decide),
        cmocka_unit_test(logits_of_ten_thousand_are_right),
        cmocka_unit_test(norms_beyond_float16_are_right),
        cmocka_unit_test(values_above_1e18_are_out_of_range_not_nan),
        cmocka_unit_test(sinks_down_to_1e_12_keep_their_score_and_rank),
        cmocka_unit_test(a_sink_that_leaves_next_to_nothing_keeps_its_score),
        cmocka_unit_test(a_sink_takes_no_digits_from_the_others),
        cmocka_unit_test(fp8_caches_beside_any_query_and_scale_are_right),
        cmocka_unit_test(rounded_probabilities_are_used_in_every_form),
        cmocka_unit_test(probabilities_whose_squares_underflow_still_rank),
    };
    engine_name = dkv_test_engine_name(argc, argv);
    scorer = dkv_test_engine_open(engine_name, 2);
    int failed = cmocka_run_group_tests_name("extremes", tests, NULL, NULL);
    plain_dim = 256;
    failed += cmocka_run_group_tests_name("extremes, head_dim 256", tests, NULL, NULL);
    dkv_test_engine_close(&scorer);
    return failed;
}
