/* Bad input, row by row of the table in docs/numerics.md: NaN and infinity, shapes, page tables.
 * Extreme input is in test_extremes.c.
 *
 * usage: test_nasty [ENGINE] */
#include "proto/policy.h"
#include "tests/kernels/nasty.h"

/* ---- not finite ---- */

static void check_not_finite(enum dkv_dtype dtype, enum dkv_side side, double value, uint64_t row)
{
    const char *const names[] = {"query", "key", "value"};
    const unsigned head = side == DKV_QUERY ? 3 : 1;
    char head_text[32], row_text[32];
    struct dkv_case c;
    make(&c, plain(dtype), 1);
    dkv_case_set(&c, side, head, row, 37, value);
    snprintf(head_text, sizeof(head_text), "head %u", head);
    snprintf(row_text, sizeof(row_text), "%s %llu", side == DKV_QUERY ? "row" : "token",
             (unsigned long long)row);
    check_refused(&c, (const char *const[]){names[side], head_text, row_text, "element 37", NULL});
    dkv_case_fini(&c);
}

static void a_nan_is_refused_naming_its_place(void **state)
{
    (void)state;
    for (int i = 0; i < N_DTYPES; i++)
        for (int side = DKV_QUERY; side <= DKV_VALUE; side++) {
            check_not_finite(all_dtypes[i], (enum dkv_side)side, NAN, 0);
            check_not_finite(all_dtypes[i], (enum dkv_side)side, NAN, 7);
        }
}

static void an_infinity_is_refused_naming_its_place(void **state)
{
    (void)state;
    for (int i = 0; i < N_WITH_INFINITY; i++)
        for (int side = DKV_QUERY; side <= DKV_VALUE; side++) {
            check_not_finite(all_dtypes[i], (enum dkv_side)side, INFINITY, 5);
            check_not_finite(all_dtypes[i], (enum dkv_side)side, -INFINITY, 6);
        }
}

static void a_nan_in_the_last_token_is_refused(void **state)
{
    (void)state;
    for (int i = 0; i < N_DTYPES; i++) {
        check_not_finite(all_dtypes[i], DKV_KEY, NAN, 129);
        check_not_finite(all_dtypes[i], DKV_VALUE, NAN, 129);
    }
}

/* What a policy does not read may be anything. */
static void a_policy_minds_what_it_reads_and_nothing_else(void **state)
{
    static const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP32};
    (void)state;
    for (int policy = 0; policy < DKV_POLICY_COUNT; policy++)
        for (int i = 0; i < 2 * 3 && policy != DKV_POLICY_EXTERNAL; i++) {
            const enum dkv_side side = (enum dkv_side)(i % 3);
            const bool reads = dkv_policy_info((enum dkv_policy)policy)->reads & 1u << side;
            struct dkv_case c;
            struct dkv_case_answer got;
            make(&c, plain(dtypes[i / 3]), 1);
            dkv_case_param(&c, "policy", dkv_policy_name((enum dkv_policy)policy));
            dkv_case_set(&c, side, 1, 7, 37, NAN);
            if (reads) {
                const char *const place = side == DKV_QUERY ? "row 7" : "token 7";
                check_refused(&c, (const char *const[]){"head 1", place, "element 37", NULL});
            } else {
                dkv_case_plan(&c);
                dkv_case_run(&c, &scorer, &got);
                assert_int_equal(got.status, DKV_OK);
                dkv_case_answer_fini(&got);
            }
            dkv_case_fini(&c);
        }
}

static void a_nan_outside_the_window_or_before_valid_from_is_never_seen(void **state)
{
    (void)state;
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_shape shape = plain(all_dtypes[i]);
        struct dkv_case c;
        shape.q_rows = 11;
        make(&c, shape, 2);
        c.block.valid_from = 9;
        for (uint64_t e = 0; e < 64; e++) {
            dkv_case_set(&c, DKV_QUERY, 1, 2, e, NAN);
            dkv_case_set(&c, DKV_KEY, 1, 8, e, NAN);
            dkv_case_set(&c, DKV_VALUE, 0, 0, e, NAN);
        }
        check(&c, NULL);
        dkv_case_fini(&c);
    }
}

static void a_masked_token_is_invisible_and_goes_first(void **state)
{
    (void)state;
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case c;
        struct dkv_case_answer got;
        make(&c, plain(all_dtypes[i]), 3);
        dkv_case_param(&c, "nonfinite", "mask");
        dkv_case_param(&c, "keep_tokens", "127");
        dkv_case_set(&c, DKV_KEY, 0, 20, 1, NAN);
        dkv_case_set(&c, DKV_VALUE, 0, 21, 63, NAN);
        dkv_case_set(&c, DKV_VALUE, 0, 129, 0, NAN); /* the newest: protected, yet lowest */
        check(&c, &got);
        assert_false(kept(&c, &got, 0, 20));
        assert_false(kept(&c, &got, 0, 21));
        assert_false(kept(&c, &got, 0, 129));
        assert_true(kept(&c, &got, 1, 129));
        assert_true(got.raw[20] == 0 && got.raw[21] == 0 && got.raw[129] == 0);
        dkv_case_answer_fini(&got);
        dkv_case_fini(&c);
    }
}

static void masking_all_but_one_token_protects_that_one(void **state)
{
    (void)state;
    struct dkv_case c;
    struct dkv_case_answer got;
    make(&c, plain(DKV_FP32), 4);
    dkv_case_param(&c, "nonfinite", "mask");
    dkv_case_param(&c, "recent", "0");
    dkv_case_param(&c, "keep_tokens", "1");
    for (uint64_t t = 0; t < 130; t++)
        if (t != 57)
            dkv_case_set(&c, DKV_KEY, 0, t, 0, NAN);
    check(&c, &got);
    assert_true(kept(&c, &got, 0, 57));
    for (uint64_t t = 0; t < 130; t++)
        assert_true(got.raw[t] == 0);
    dkv_case_answer_fini(&got);
    dkv_case_fini(&c);
}

static void masking_every_token_still_answers(void **state)
{
    (void)state;
    struct dkv_case c;
    make(&c, plain(DKV_BF16), 5);
    dkv_case_param(&c, "nonfinite", "mask");
    for (uint64_t t = 0; t < 130; t++)
        dkv_case_set(&c, DKV_VALUE, 1, t, 3, NAN);
    check(&c, NULL);
    dkv_case_fini(&c);
}

static void a_nan_in_one_item_leaves_its_neighbours_alone(void **state)
{
    (void)state;
    struct dkv_case good, bad;
    struct dkv_case_answer alone;
    struct dkv_error err;
    make(&good, plain(DKV_BF16), 6);
    make(&bad, plain(DKV_BF16), 7);
    dkv_case_set(&bad, DKV_VALUE, 0, 3, 3, NAN);
    dkv_case_plan(&good);
    dkv_case_plan(&bad);
    dkv_case_run(&good, &scorer, &alone);
    float scores[3][260];
    int32_t keep[3][260];
    struct dkv_item items[3];
    for (int i = 0; i < 3; i++) {
        const struct dkv_case *c = i == 1 ? &bad : &good;
        items[i] = (struct dkv_item){.block = &c->block,
                                     .params = &c->params,
                                     .plan = &c->plan,
                                     .keep_out = keep[i],
                                     .scores_out = scores[i]};
    }
    assert_int_equal(dkv_engine_run(scorer.ops, scorer.engine, items, 3, &err), DKV_OK);
    assert_int_equal(items[1].status, DKV_E_INVALID);
    for (int i = 0; i < 3; i += 2) {
        assert_int_equal(items[i].status, DKV_OK);
        assert_memory_equal(keep[i], alone.keep, 2 * good.plan.keep_tokens * sizeof(int32_t));
        for (int t = 0; t < 260; t++)
            assert_true((double)scores[i][t] == alone.raw[t]);
    }
    dkv_case_answer_fini(&alone);
    dkv_case_fini(&good);
    dkv_case_fini(&bad);
}

/* ---- shapes ---- */

static void check_gate(struct dkv_shape shape, enum dkv_status want, const char *word)
{
    struct dkv_case c;
    struct dkv_error err = {0};
    dkv_case_init(&c, shape);
    assert_int_equal(dkv_case_try_plan(&c, &err), want);
    if (strstr(err.text, word) == NULL)
        fail_msg("\"%s\" does not name %s", err.text, word);
    dkv_case_fini(&c);
}

static void impossible_shapes_are_refused_naming_the_field(void **state)
{
    (void)state;
    struct dkv_shape shape = plain(DKV_FP32);
    shape.kv_heads = 3;
    check_gate(shape, DKV_E_INVALID, "q_heads");
    shape.kv_heads = 8;
    check_gate(shape, DKV_E_INVALID, "kv_heads");
    shape = plain(DKV_FP32);
    shape.n_tokens = 0;
    check_gate(shape, DKV_E_INVALID, "n_tokens");
    shape = plain(DKV_FP32);
    shape.q_rows = 0;
    check_gate(shape, DKV_E_INVALID, "q_rows");
    shape = plain(DKV_FP32);
    shape.head_dim = 60;
    check_gate(shape, DKV_E_UNSUPPORTED, "head_dim");
    shape.head_dim = 520;
    check_gate(shape, DKV_E_UNSUPPORTED, "head_dim");
}

static void odd_head_dims_equal_zero_padding_with_the_true_scale(void **state)
{
    (void)state;
    const uint32_t dims[] = {8, 80, 96, 112, 192, 504};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
        for (int dtype = 0; dtype < N_DTYPES; dtype++) {
            struct dkv_shape shape = plain(all_dtypes[dtype]);
            struct dkv_case c, padded;
            struct dkv_case_answer got, got_padded;
            char scale[32];
            shape.head_dim = dims[i];
            shape.v_dim = dims[i] == 80 ? 64 : 0;
            make(&c, shape, 8 + i);
            shape.head_dim = 512;
            shape.v_dim = 512;
            dkv_case_init(&padded, shape);
            dkv_case_param(&padded, "window", "8");
            snprintf(scale, sizeof(scale), "%.17g", 1 / sqrt(dims[i]));
            dkv_case_param(&padded, "scale", scale);
            for (int side = DKV_QUERY; side <= DKV_VALUE; side++) {
                const uint64_t heads = side == DKV_QUERY ? 4 : 2,
                               rows = side == DKV_QUERY ? 8 : 130;
                const uint64_t dim = side == DKV_VALUE && c.block.v_dim ? 64 : dims[i];
                for (uint64_t h = 0; h < heads; h++)
                    for (uint64_t t = 0; t < rows; t++)
                        memcpy(dkv_case_at(&padded, (enum dkv_side)side, h, t, 0),
                               dkv_case_at(&c, (enum dkv_side)side, h, t, 0),
                               dim * dkv_dtype_bytes(all_dtypes[dtype]));
            }
            check(&c, &got);
            check(&padded, &got_padded);
            double median, max;
            dkv_compare_scores(got.raw, got_padded.raw, 2, 130, &median, &max);
            assert_true(max <= 2 * dkv_tolerance_of(engine_name, all_dtypes[dtype]).max);
            dkv_case_answer_fini(&got);
            dkv_case_answer_fini(&got_padded);
            dkv_case_fini(&c);
            dkv_case_fini(&padded);
        }
}

static void values_of_another_dim_than_keys_are_right(void **state)
{
    (void)state;
    const uint32_t dims[][2] = {{192, 128}, {64, 256}, {512, 8}, {8, 512}, {576 - 64, 512}};
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++)
        for (int dtype = 0; dtype < N_DTYPES; dtype++) {
            struct dkv_shape shape = plain(all_dtypes[dtype]);
            struct dkv_case c;
            shape.head_dim = dims[i][0];
            shape.v_dim = dims[i][1];
            make(&c, shape, 20 + i);
            check(&c, NULL);
            dkv_case_fini(&c);
        }
}

static void a_row_that_sees_one_key_adds_nothing_and_protects_it(void **state)
{
    (void)state;
    for (int sinks = 0; sinks < 2; sinks++)
        for (int i = 0; i < N_DTYPES; i++) {
            struct dkv_shape shape = plain(all_dtypes[i]);
            struct dkv_case c;
            struct dkv_case_answer got;
            shape.n_tokens = 8;
            make(&c, shape, 30);
            for (int h = 0; h < 4; h++)
                c.sink_logits[h] = 0.5f;
            c.block.sink_logits = sinks ? c.sink_logits : NULL;
            check(&c, &got); /* n = window: row 0 sees key 0 alone */
            for (int t = 0; t < 16; t++)
                assert_true(isfinite(got.raw[t]));
            assert_int_equal(c.plan.keep_tokens, 8);
            dkv_case_answer_fini(&got);
            dkv_case_fini(&c);
        }
}

static void one_token_is_kept_with_score_zero(void **state)
{
    (void)state;
    struct dkv_shape shape = plain(DKV_BF16);
    struct dkv_case c;
    struct dkv_case_answer got;
    shape.n_tokens = 1;
    make(&c, shape, 31);
    check(&c, &got);
    assert_int_equal(got.keep[0], 0);
    assert_true(got.raw[0] == 0 && got.raw[1] == 0);
    dkv_case_answer_fini(&got);
    dkv_case_fini(&c);
}

static void fewer_tokens_or_rows_than_the_window_shrink_it(void **state)
{
    (void)state;
    const uint64_t sizes[][2] = {{2, 8}, {5, 8}, {7, 3}, {130, 1}, {130, 3}, {9, 9}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct dkv_shape shape = plain(DKV_FP32);
        struct dkv_case c;
        shape.n_tokens = sizes[i][0];
        shape.q_rows = sizes[i][1];
        make(&c, shape, 40 + i);
        check(&c, NULL);
        if (sizes[i][0] <= 8)
            assert_int_equal(c.plan.keep_tokens, sizes[i][0]);
        dkv_case_fini(&c);
    }
}

/* ---- page tables ---- */

static void check_masked_entry(int32_t entry, int64_t mask, bool has_null, int64_t null_entry,
                               enum dkv_status want)
{
    struct dkv_case c;
    struct dkv_case_answer got;
    struct dkv_shape shape = plain(DKV_BF16);
    int32_t table[8];
    shape.n_tokens = 128;
    make(&c, shape, 130);
    /* Pages of 16 tokens of a dense tensor: page_stride is 16 token strides. */
    for (int i = 0; i < 8; i++)
        table[i] = 7 - i;
    table[5] = entry;
    c.block.page_tokens = 16;
    c.block.key.page_stride = 16 * c.block.key.token_stride;
    c.block.value.page_stride = 16 * c.block.value.token_stride;
    c.block.table = (struct dkv_page_table){.entries = table,
                                            .n_entries = 8,
                                            .entry_bytes = 4,
                                            .mask = mask,
                                            .null_entry = null_entry,
                                            .has_null_entry = has_null};
    dkv_case_plan(&c);
    dkv_case_run(&c, &scorer, &got);
    assert_int_equal(got.status, want);
    if (want == DKV_E_INVALID) {
        char number[32];
        snprintf(number, sizeof(number), "%d", entry);
        if (strstr(got.error.text, number) == NULL || strstr(got.error.text, "entry 5") == NULL ||
            strstr(got.error.text, "0..") == NULL)
            fail_msg("\"%s\" does not name entry 5, %d and the range", got.error.text, entry);
    }
    dkv_case_answer_fini(&got);
    dkv_case_fini(&c);
}

static void check_entry(int32_t entry, bool has_null, int64_t null_entry, enum dkv_status want)
{
    check_masked_entry(entry, 0, has_null, null_entry, want);
}

static void a_table_entry_out_of_range_is_refused_naming_it(void **state)
{
    (void)state;
    check_entry(2, false, 0, DKV_OK);
    check_entry(8, false, 0, DKV_E_INVALID);
    check_entry(INT32_MAX, false, 0, DKV_E_INVALID);
    check_entry(-1, false, 0, DKV_E_INVALID);
    check_entry(INT32_MIN, false, 0, DKV_E_INVALID);
    check_entry((int32_t)0x80000002, false, 0, DKV_E_INVALID); /* a flag bit, and no mask */
}

static void a_null_entry_inside_the_valid_range_is_refused(void **state)
{
    (void)state;
    check_entry(2, true, 2, DKV_E_INVALID);
    check_entry(-1, true, -1, DKV_E_INVALID);
    check_entry(2, true, 99, DKV_OK);
}

/* Null as stored and null after the mask are the same thing: nothing is read through either. */
static void a_null_entry_is_refused_before_and_behind_the_mask(void **state)
{
    (void)state;
    check_masked_entry(INT32_MIN | 2, INT32_MAX, true, 2, DKV_E_INVALID);
    check_masked_entry(INT32_MIN | 2, INT32_MAX, true, INT32_MIN | 2, DKV_E_INVALID);
    check_masked_entry(INT32_MIN | 2, INT32_MAX, true, 99, DKV_OK);
    check_masked_entry(INT32_MIN | 2, INT32_MAX, false, 2, DKV_OK);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_nan_is_refused_naming_its_place),
        cmocka_unit_test(an_infinity_is_refused_naming_its_place),
        cmocka_unit_test(a_nan_in_the_last_token_is_refused),
        cmocka_unit_test(a_policy_minds_what_it_reads_and_nothing_else),
        cmocka_unit_test(a_nan_outside_the_window_or_before_valid_from_is_never_seen),
        cmocka_unit_test(a_masked_token_is_invisible_and_goes_first),
        cmocka_unit_test(masking_all_but_one_token_protects_that_one),
        cmocka_unit_test(masking_every_token_still_answers),
        cmocka_unit_test(a_nan_in_one_item_leaves_its_neighbours_alone),
        cmocka_unit_test(impossible_shapes_are_refused_naming_the_field),
        cmocka_unit_test(odd_head_dims_equal_zero_padding_with_the_true_scale),
        cmocka_unit_test(values_of_another_dim_than_keys_are_right),
        cmocka_unit_test(a_row_that_sees_one_key_adds_nothing_and_protects_it),
        cmocka_unit_test(one_token_is_kept_with_score_zero),
        cmocka_unit_test(fewer_tokens_or_rows_than_the_window_shrink_it),
        cmocka_unit_test(a_table_entry_out_of_range_is_refused_naming_it),
        cmocka_unit_test(a_null_entry_inside_the_valid_range_is_refused),
        cmocka_unit_test(a_null_entry_is_refused_before_and_behind_the_mask),
    };
    engine_name = dkv_test_engine_name(argc, argv);
    scorer = dkv_test_engine_open(engine_name, 2);
    int failed = cmocka_run_group_tests_name("nasty", tests, NULL, NULL);
    plain_dim = 256;
    failed += cmocka_run_group_tests_name("nasty, head_dim 256", tests, NULL, NULL);
    dkv_test_engine_close(&scorer);
    return failed;
}
