/* Bad and extreme input, row by row of the table in docs/numerics.md, and sinks that take all but
 * 1e-12 of a row.
 *
 * usage: test_nasty [ENGINE] */
#include "tests/support/compare.h"
#include "tests/support/engines.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *engine_name;
static struct dkv_scorer scorer;

static const enum dkv_dtype all_dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32, DKV_F8_E4M3, DKV_F8_E5M2};
enum { N_DTYPES = 5, N_WITH_INFINITY = 3 };

/* ---- helpers ---- */

static void make(struct dkv_case *c, struct dkv_shape shape, uint64_t seed)
{
    struct dkv_random random = {seed};
    dkv_case_init(c, shape);
    dkv_case_fill(c, DKV_QUERY, &random, 1);
    dkv_case_fill(c, DKV_KEY, &random, 1);
    dkv_case_fill(c, DKV_VALUE, &random, 1);
    dkv_case_param(c, "window", "8");
}

static struct dkv_shape plain(enum dkv_dtype dtype)
{
    return (struct dkv_shape){.q_heads = 4,
                              .kv_heads = 2,
                              .head_dim = 64,
                              .q_rows = 8,
                              .n_tokens = 130,
                              .q_dtype = dtype};
}

/* Plans, runs both, compares; the engine's answer is handed out if the caller wants it. */
static void check(struct dkv_case *c, struct dkv_case_answer *answer_out)
{
    struct dkv_ref_answer want;
    struct dkv_case_answer got;
    struct dkv_error err;
    dkv_case_plan(c);
    if (dkv_ref_run(&c->block, &c->params, &c->plan, &want, &err) != DKV_OK)
        fail_msg("reference: %s", err.text);
    dkv_case_run(c, &scorer, &got);
    const struct dkv_comparison result = dkv_compare(
        c, &want, &got, dkv_tolerance_of(engine_name, c->block.query.dtype));
    if (!result.ok)
        fail_msg("%s: %s", dkv_dtype_name(c->block.query.dtype), result.why);
    dkv_ref_answer_fini(&want);
    if (answer_out != NULL)
        *answer_out = got;
    else
        dkv_case_answer_fini(&got);
}

/* The block is refused as INVALID with a text that has all the words. */
static void check_refused(struct dkv_case *c, const char *const *words)
{
    struct dkv_case_answer got;
    dkv_case_plan(c);
    dkv_case_run(c, &scorer, &got);
    assert_int_equal(got.status, DKV_E_INVALID);
    for (; *words != NULL; words++)
        if (strstr(got.error.text, *words) == NULL)
            fail_msg("\"%s\" does not name \"%s\"", got.error.text, *words);
    dkv_case_answer_fini(&got);
}

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

static bool kept(const struct dkv_case *c, const struct dkv_case_answer *answer, uint32_t head,
                 int32_t token)
{
    for (uint64_t i = 0; i < c->plan.keep_tokens; i++)
        if (answer->keep[head * c->plan.keep_tokens + i] == token)
            return true;
    return false;
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
        cmocka_unit_test(identical_values_score_exactly_zero),
        cmocka_unit_test(identical_keys_leave_the_distance_to_decide),
        cmocka_unit_test(logits_of_ten_thousand_are_right),
        cmocka_unit_test(norms_beyond_float16_are_right),
        cmocka_unit_test(values_above_1e18_are_out_of_range_not_nan),
        cmocka_unit_test(sinks_down_to_1e_12_keep_their_score_and_rank),
        cmocka_unit_test(a_sink_that_leaves_next_to_nothing_keeps_its_score),
        cmocka_unit_test(fp8_caches_beside_any_query_and_scale_are_right),
        cmocka_unit_test(rounded_probabilities_are_used_in_every_form),
        cmocka_unit_test(probabilities_whose_squares_underflow_still_rank),
        cmocka_unit_test(a_table_entry_out_of_range_is_refused_naming_it),
        cmocka_unit_test(a_null_entry_inside_the_valid_range_is_refused),
        cmocka_unit_test(a_null_entry_is_refused_before_and_behind_the_mask),
    };
    engine_name = dkv_test_engine_name(argc, argv);
    scorer = dkv_test_engine_open(engine_name, 2);
    const int failed = cmocka_run_group_tests_name("nasty", tests, NULL, NULL);
    dkv_test_engine_close(&scorer);
    return failed;
}
