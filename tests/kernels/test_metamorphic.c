/* Properties that need no oracle, of the reference and of an engine alike.
 *
 * usage: test_metamorphic [ENGINE]
 *
 * Elements are multiples of 1/8, small enough that every sum made here is exact in each dtype: a
 * changed input is then exactly the change that the property speaks of. */
#include "tests/support/compare.h"
#include "tests/support/engines.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct subject {
    struct dkv_scorer scorer;
    const char *name;
    double tolerance[4]; /* by dtype number */
};

static const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32};
enum { N_DTYPES = 3, N = 300, HEADS = 2, Q_HEADS = 6, D = 64, ROWS = 8 };

static void fill_grid(struct dkv_case *c, enum dkv_side side, uint64_t heads, uint64_t rows,
                      struct dkv_random *random, double size)
{
    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t t = 0; t < rows; t++)
            for (uint64_t e = 0; e < D; e++)
                dkv_case_set(c, side, h, t, e, round(8 * size * dkv_random_normal(random)) / 8);
}

static void make(struct dkv_case *c, enum dkv_dtype dtype, uint64_t seed)
{
    struct dkv_random random = {seed};
    dkv_case_init(c, (struct dkv_shape){.q_heads = Q_HEADS,
                                        .kv_heads = HEADS,
                                        .head_dim = D,
                                        .q_rows = ROWS,
                                        .n_tokens = N,
                                        .q_dtype = dtype});
    fill_grid(c, DKV_QUERY, Q_HEADS, ROWS, &random, 1);
    fill_grid(c, DKV_KEY, HEADS, N, &random, 1);
    fill_grid(c, DKV_VALUE, HEADS, N, &random, 1);
    dkv_case_param(c, "window", "8");
    dkv_case_param(c, "pool", "none");
}

static void run(struct dkv_case *c, const struct subject *subject, struct dkv_case_answer *answer)
{
    dkv_case_plan(c);
    dkv_case_run(c, &subject->scorer, answer);
    if (answer->status != DKV_OK)
        fail_msg("%s: %s", subject->name, answer->error.text);
}

/* Runs both; `b` must score `factor` times what `a` does, at position map[t] for token t (NULL: the
 * same). Frees both. */
static void check_related(struct dkv_case *a, struct dkv_case *b, const struct subject *subject,
                          double factor, const uint64_t *map)
{
    struct dkv_case_answer got_a, got_b;
    double want[HEADS * N], median, max;
    run(a, subject, &got_a);
    run(b, subject, &got_b);
    for (uint64_t h = 0; h < HEADS; h++)
        for (uint64_t t = 0; t < N; t++)
            want[h * N + (map != NULL ? map[t] : t)] = factor * got_a.raw[h * N + t];
    dkv_compare_scores(want, got_b.raw, HEADS, N, &median, &max);
    const double tolerance = subject->tolerance[a->block.query.dtype];
    if (!(max <= tolerance))
        fail_msg("%s %s: scores differ by %g, %g is allowed", subject->name,
                 dkv_dtype_name(a->block.query.dtype), max, tolerance);
    dkv_case_answer_fini(&got_a);
    dkv_case_answer_fini(&got_b);
    dkv_case_fini(a);
    dkv_case_fini(b);
}

static void add_vector(struct dkv_case *c, enum dkv_side side)
{
    for (uint64_t h = 0; h < HEADS; h++)
        for (uint64_t t = 0; t < N; t++)
            for (uint64_t e = 0; e < D; e++)
                dkv_case_set(c, side, h, t, e,
                             dkv_case_get(c, side, h, t, e) + (double)(e % 9) - 3.5);
}

static void one_vector_added_to_every_value_changes_nothing(void **state)
{
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case a, b;
        make(&a, dtypes[i], 1);
        dkv_case_copy(&b, &a);
        add_vector(&b, DKV_VALUE);
        check_related(&a, &b, *state, 1, NULL);
    }
}

static void one_vector_added_to_every_key_changes_nothing(void **state)
{
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case a, b;
        make(&a, dtypes[i], 2);
        dkv_case_copy(&b, &a);
        add_vector(&b, DKV_KEY);
        check_related(&a, &b, *state, 1, NULL);
    }
}

static void values_scaled_by_c_scale_scores_by_c_squared(void **state)
{
    const double factors[] = {4, 0.125, -2};
    for (int i = 0; i < N_DTYPES; i++)
        for (int f = 0; f < 3; f++) {
            struct dkv_case a, b;
            make(&a, dtypes[i], 3);
            dkv_case_copy(&b, &a);
            for (uint64_t h = 0; h < HEADS; h++)
                for (uint64_t t = 0; t < N; t++)
                    for (uint64_t e = 0; e < D; e++)
                        dkv_case_set(&b, DKV_VALUE, h, t, e,
                                     factors[f] * dkv_case_get(&a, DKV_VALUE, h, t, e));
            check_related(&a, &b, *state, factors[f] * factors[f], NULL);
        }
}

static void a_permuted_prefix_permutes_the_scores(void **state)
{
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case a, b;
        struct dkv_random random = {4};
        uint64_t map[N];
        make(&a, dtypes[i], 4);
        dkv_case_copy(&b, &a);
        for (uint64_t t = 0; t < N; t++)
            map[t] = t;
        for (uint64_t t = N - ROWS; t-- > 1;) { /* what every row sees, shuffled */
            const uint64_t other = dkv_random_range(&random, 0, t), kept = map[t];
            map[t] = map[other];
            map[other] = kept;
        }
        for (int side = DKV_KEY; side <= DKV_VALUE; side++)
            for (uint64_t h = 0; h < HEADS; h++)
                for (uint64_t t = 0; t < N; t++)
                    memcpy(dkv_case_at(&b, (enum dkv_side)side, h, map[t], 0),
                           dkv_case_at(&a, (enum dkv_side)side, h, t, 0),
                           D * dkv_dtype_bytes(dtypes[i]));
        check_related(&a, &b, *state, 1, map);
    }
}

static void query_heads_may_change_places_inside_a_group(void **state)
{
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case a, b;
        make(&a, dtypes[i], 5);
        dkv_case_copy(&b, &a);
        for (uint64_t h = 0; h < Q_HEADS; h++) /* 0 1 2 | 3 4 5  ->  2 0 1 | 5 3 4 */
            memcpy(dkv_case_at(&b, DKV_QUERY, h / 3 * 3 + (h + 1) % 3, 0, 0),
                   dkv_case_at(&a, DKV_QUERY, h, 0, 0), ROWS * D * dkv_dtype_bytes(dtypes[i]));
        check_related(&a, &b, *state, 1, NULL);
    }
}

/* The reference knows no layers. */
static void a_layers_scores_are_the_mean_of_its_heads_ones(void **state)
{
    const struct subject *subject = *state;
    for (int d = 0; d < N_DTYPES; d++) {
        struct dkv_case c;
        struct dkv_case_answer heads, layer;
        double want[HEADS * N], median, max;
        make(&c, dtypes[d], 31);
        run(&c, subject, &heads);
        dkv_case_param(&c, "gqa", "layer");
        run(&c, subject, &layer);
        for (uint64_t i = 0; i < HEADS * N; i++)
            want[i] = (heads.raw[i % N] + heads.raw[N + i % N]) / 2;
        dkv_compare_scores(want, layer.raw, HEADS, N, &median, &max);
        if (!(max <= subject->tolerance[dtypes[d]]))
            fail_msg("%s %s: scores differ by %g", subject->name, dkv_dtype_name(dtypes[d]), max);
        dkv_case_answer_fini(&heads);
        dkv_case_answer_fini(&layer);
        dkv_case_fini(&c);
    }
}

static void doubling_the_keys_and_halving_the_scale_changes_nothing(void **state)
{
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case a, b;
        make(&a, dtypes[i], 6);
        dkv_case_copy(&b, &a);
        for (uint64_t h = 0; h < HEADS; h++)
            for (uint64_t t = 0; t < N; t++)
                for (uint64_t e = 0; e < D; e++)
                    dkv_case_set(&b, DKV_KEY, h, t, e, 2 * dkv_case_get(&a, DKV_KEY, h, t, e));
        dkv_case_param(&a, "scale", "0.125");
        dkv_case_param(&b, "scale", "0.0625");
        check_related(&a, &b, *state, 1, NULL);
    }
}

/* A sink logit is a key that leads to the zero vector: adding such a key for real, first, and no
 * logit gives the other tokens the same scores. */
static void a_sink_logit_equals_a_real_key_with_value_zero(void **state)
{
    const struct subject *subject = *state;
    struct dkv_case with_logit, with_key;
    struct dkv_case_answer a, b;
    make(&with_logit, DKV_FP32, 7);
    dkv_case_init(&with_key, (struct dkv_shape){.q_heads = Q_HEADS,
                                                .kv_heads = HEADS,
                                                .head_dim = D,
                                                .q_rows = ROWS,
                                                .n_tokens = N + 1,
                                                .q_dtype = DKV_FP32});
    dkv_case_param(&with_key, "window", "8");
    dkv_case_param(&with_key, "pool", "none");
    for (uint64_t h = 0; h < Q_HEADS; h++) { /* component 0 carries the logit, and nothing else */
        for (uint64_t t = 0; t < ROWS; t++)
            dkv_case_set(&with_logit, DKV_QUERY, h, t, 0, 1);
        with_logit.sink_logits[h] = 1.5f;
    }
    for (uint64_t h = 0; h < HEADS; h++) {
        dkv_case_set(&with_key, DKV_KEY, h, 0, 0, 1.5 * 8);
        for (uint64_t t = 0; t < N; t++)
            dkv_case_set(&with_logit, DKV_KEY, h, t, 0, 0);
    }
    with_logit.block.sink_logits = with_logit.sink_logits;
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
        for (uint64_t h = 0; h < (side == DKV_QUERY ? Q_HEADS : HEADS); h++)
            for (uint64_t t = 0; t < (side == DKV_QUERY ? ROWS : N); t++)
                memcpy(dkv_case_at(&with_key, (enum dkv_side)side, h, t + (side != DKV_QUERY), 0),
                       dkv_case_at(&with_logit, (enum dkv_side)side, h, t, 0), D * sizeof(float));
    run(&with_logit, subject, &a);
    run(&with_key, subject, &b);
    for (uint64_t h = 0; h < HEADS; h++) {
        double median, max;
        dkv_compare_scores(a.raw + h * N, b.raw + h * (N + 1) + 1, 1, N, &median, &max);
        assert_true(max <= subject->tolerance[DKV_FP32]);
    }
    dkv_case_answer_fini(&a);
    dkv_case_answer_fini(&b);
    dkv_case_fini(&with_logit);
    dkv_case_fini(&with_key);
}

/* With every value zero but token j's, the left-out output is 0 and j's score is p_j^2: one run
 * per token tells all probabilities of a row. */
static void probabilities_of_a_row_add_up_to_one(void **state)
{
    const struct subject *subject = *state;
    enum { FEW = 20 };
    double sum = 0;
    for (uint64_t j = 0; j < FEW; j++) {
        struct dkv_case c;
        struct dkv_case_answer answer;
        struct dkv_random random = {8};
        dkv_case_init(&c, (struct dkv_shape){.q_heads = 1,
                                             .kv_heads = 1,
                                             .head_dim = D,
                                             .q_rows = 1,
                                             .n_tokens = FEW,
                                             .q_dtype = DKV_FP32});
        dkv_case_param(&c, "window", "1");
        fill_grid(&c, DKV_QUERY, 1, 1, &random, 2);
        fill_grid(&c, DKV_KEY, 1, FEW, &random, 1);
        dkv_case_set(&c, DKV_VALUE, 0, j, 0, 1);
        run(&c, subject, &answer);
        sum += sqrt(answer.raw[j]);
        dkv_case_answer_fini(&answer);
        dkv_case_fini(&c);
    }
    assert_true(fabs(sum - 1) <= subject->tolerance[DKV_FP32]);
}

static void tokens_before_valid_from_are_as_if_they_were_not_there(void **state)
{
    const struct subject *subject = *state;
    for (int i = 0; i < N_DTYPES; i++) {
        struct dkv_case whole, cut;
        struct dkv_case_answer a, b;
        enum { GONE = 100 };
        make(&whole, dtypes[i], 9);
        whole.block.valid_from = GONE;
        dkv_case_init(&cut, (struct dkv_shape){.q_heads = Q_HEADS,
                                               .kv_heads = HEADS,
                                               .head_dim = D,
                                               .q_rows = ROWS,
                                               .n_tokens = N - GONE,
                                               .q_dtype = dtypes[i]});
        dkv_case_param(&cut, "window", "8");
        dkv_case_param(&cut, "pool", "none");
        for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
            for (uint64_t h = 0; h < (side == DKV_QUERY ? Q_HEADS : HEADS); h++) {
                const uint64_t rows = side == DKV_QUERY ? ROWS : N - GONE;
                memcpy(dkv_case_at(&cut, (enum dkv_side)side, h, 0, 0),
                       dkv_case_at(&whole, (enum dkv_side)side, h, side == DKV_QUERY ? 0 : GONE, 0),
                       rows * D * dkv_dtype_bytes(dtypes[i]));
            }
        run(&whole, subject, &a);
        run(&cut, subject, &b);
        assert_int_equal(whole.plan.keep_tokens, cut.plan.keep_tokens);
        for (uint64_t h = 0; h < HEADS; h++) {
            for (uint64_t t = 0; t < GONE; t++)
                assert_true(a.raw[h * N + t] == 0);
            for (uint64_t t = GONE; t < N; t++)
                assert_true(a.raw[h * N + t] == b.raw[h * (N - GONE) + t - GONE]);
        }
        for (uint64_t k = 0; k < HEADS * cut.plan.keep_tokens; k++)
            assert_int_equal(a.keep[k], b.keep[k] + GONE);
        dkv_case_answer_fini(&a);
        dkv_case_answer_fini(&b);
        dkv_case_fini(&whole);
        dkv_case_fini(&cut);
    }
}

#define PROPERTIES(setup)                                                                          \
    cmocka_unit_test_prestate(one_vector_added_to_every_value_changes_nothing, setup),             \
        cmocka_unit_test_prestate(one_vector_added_to_every_key_changes_nothing, setup),           \
        cmocka_unit_test_prestate(values_scaled_by_c_scale_scores_by_c_squared, setup),            \
        cmocka_unit_test_prestate(a_permuted_prefix_permutes_the_scores, setup),                   \
        cmocka_unit_test_prestate(query_heads_may_change_places_inside_a_group, setup),            \
        cmocka_unit_test_prestate(doubling_the_keys_and_halving_the_scale_changes_nothing, setup), \
        cmocka_unit_test_prestate(a_sink_logit_equals_a_real_key_with_value_zero, setup),          \
        cmocka_unit_test_prestate(probabilities_of_a_row_add_up_to_one, setup),                    \
        cmocka_unit_test_prestate(tokens_before_valid_from_are_as_if_they_were_not_there, setup)

int main(int argc, char **argv)
{
    struct subject reference = {.name = "reference", .tolerance = {0, 1e-10, 1e-10, 1e-10}};
    struct subject engine = {.name = dkv_test_engine_name(argc, argv)};
    const struct CMUnitTest of_reference[] = {PROPERTIES(&reference)};
    const struct CMUnitTest of_engine[] = {
        PROPERTIES(&engine),
        cmocka_unit_test_prestate(a_layers_scores_are_the_mean_of_its_heads_ones, &engine)};
    engine.scorer = dkv_test_engine_open(engine.name, 2);
    for (int dtype = DKV_BF16; dtype <= DKV_FP32; dtype++)
        engine.tolerance[dtype] = dkv_tolerance_of(engine.name, (enum dkv_dtype)dtype).max;
    int failed = cmocka_run_group_tests_name("properties of the reference", of_reference, NULL,
                                             NULL);
    failed += cmocka_run_group_tests_name("properties of the engine", of_engine, NULL, NULL);
    dkv_test_engine_close(&engine.scorer);
    return failed;
}
