/* What must not show in an answer, in any bit: the number of threads, neighbours in a batch, the
 * order of a batch, earlier batches, whether scores were asked for.
 *
 * usage: test_same_bits [ENGINE]
 *
 * The blocks are ragged (n, heads, dims, windows, types), one long enough for several splits. */
#include "tests/support/engines.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_CASES = 9 };
static const char *engine_name;
static struct dkv_case cases[N_CASES];
static struct dkv_case_answer alone[N_CASES];

static const struct dkv_shape shapes[N_CASES] = {
    {4, 2, 64, 0, 8, 300, DKV_BF16, 0},           {1, 1, 128, 64, 3, 1, DKV_FP32, 0},
    {2, 1, 64, 0, 8, 13001, DKV_FP16, 0},         {12, 3, 80, 0, 32, 777, DKV_FP32, 0},
    {8, 1, 256, 0, 5, 64, DKV_BF16, DKV_F8_E4M3}, {3, 3, 8, 512, 64, 500, DKV_F8_E5M2, 0},
    {16, 2, 128, 0, 16, 4097, DKV_BF16, 0},       {4, 2, 256, 0, 32, 3001, DKV_FP16, 0},
    {4, 2, 256, 0, 8, 2100, DKV_BF16, 0},
};

static int make_cases(void **state)
{
    (void)state;
    struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 1);
    for (int i = 0; i < N_CASES; i++) {
        struct dkv_random random = {(uint64_t)i + 1};
        dkv_case_init(&cases[i], shapes[i]);
        for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
            dkv_case_fill(&cases[i], (enum dkv_side)side, &random, 1);
        dkv_case_param(&cases[i], "window", i % 2 ? "32" : "8");
        dkv_case_plan(&cases[i]);
        dkv_case_run(&cases[i], &scorer, &alone[i]);
        if (alone[i].status != DKV_OK)
            return -1;
    }
    dkv_test_engine_close(&scorer);
    return 0;
}

static int free_cases(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        dkv_case_answer_fini(&alone[i]);
        dkv_case_fini(&cases[i]);
    }
    return 0;
}

static void check_same(int i, const struct dkv_case_answer *got, const char *what)
{
    const struct dkv_case *c = &cases[i];
    const size_t heads = c->block.kv_heads;
    if (got->status != DKV_OK ||
        memcmp(got->raw, alone[i].raw, heads * c->block.n_tokens * sizeof(double)) != 0 ||
        memcmp(got->keep, alone[i].keep, heads * c->plan.keep_tokens * sizeof(int32_t)) != 0)
        fail_msg("%s: block %d differs", what, i);
}

static void the_number_of_threads_does_not_show(void **state)
{
    (void)state;
    const unsigned threads[] = {1, 2, 3, 5};
    for (size_t n = 0; n < 4; n++) {
        struct dkv_scorer scorer = dkv_test_engine_open(engine_name, threads[n]);
        for (int i = 0; i < N_CASES; i++) {
            struct dkv_case_answer got;
            char what[32];
            dkv_case_run(&cases[i], &scorer, &got);
            snprintf(what, sizeof(what), "%u threads", threads[n]);
            check_same(i, &got, what);
            dkv_case_answer_fini(&got);
        }
        dkv_test_engine_close(&scorer);
    }
}

/* Submits the blocks named, in that order, and compares each; scores only where wanted. */
static void check_batch(struct dkv_scorer *scorer, const int *order, size_t count, bool want_scores)
{
    struct dkv_item items[32] = {0};
    struct dkv_error err;
    assert_true(count <= 32);
    for (size_t k = 0; k < count; k++) {
        const struct dkv_case *c = &cases[order[k]];
        const size_t heads = c->block.kv_heads;
        items[k] = (struct dkv_item){.block = &c->block, .params = &c->params, .plan = &c->plan};
        items[k].keep_out = malloc(heads * c->plan.keep_tokens * sizeof(int32_t));
        assert_non_null(items[k].keep_out);
        if (want_scores)
            items[k].scores_out = malloc(heads * c->block.n_tokens * sizeof(float));
    }
    assert_int_equal(dkv_engine_run(scorer->ops, scorer->engine, items, count, &err), DKV_OK);
    for (size_t k = 0; k < count; k++) {
        const struct dkv_case *c = &cases[order[k]];
        const size_t heads = c->block.kv_heads;
        assert_int_equal(items[k].status, DKV_OK);
        assert_memory_equal(items[k].keep_out, alone[order[k]].keep,
                            heads * c->plan.keep_tokens * sizeof(int32_t));
        for (size_t t = 0; want_scores && t < heads * c->block.n_tokens; t++)
            assert_true((double)items[k].scores_out[t] == alone[order[k]].raw[t]);
        free(items[k].keep_out);
        free(items[k].scores_out);
    }
}

static void neighbours_in_a_batch_do_not_show(void **state)
{
    (void)state;
    const int forward[] = {0, 1, 2, 3, 4, 5, 6, 7, 8}, backward[] = {8, 7, 6, 5, 4, 3, 2, 1, 0};
    const int repeated[] = {0, 0, 6, 0, 3, 8, 8, 3, 3, 1, 1, 7, 0, 6, 5, 5, 7, 4, 0, 2, 2, 8};
    for (unsigned threads = 1; threads <= 3; threads++) {
        struct dkv_scorer scorer = dkv_test_engine_open(engine_name, threads);
        check_batch(&scorer, forward, 9, true);
        check_batch(&scorer, backward, 9, true);
        check_batch(&scorer, repeated, 22, true);
        dkv_test_engine_close(&scorer);
    }
}

static void whether_scores_are_asked_for_does_not_show(void **state)
{
    (void)state;
    const int order[] = {3, 2, 1, 0, 8, 7, 6, 5, 4};
    struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 2);
    check_batch(&scorer, order, 9, false);
    check_batch(&scorer, order, 9, true);
    dkv_test_engine_close(&scorer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_number_of_threads_does_not_show),
        cmocka_unit_test(neighbours_in_a_batch_do_not_show),
        cmocka_unit_test(whether_scores_are_asked_for_does_not_show),
    };
    engine_name = dkv_test_engine_name(argc, argv);
    return cmocka_run_group_tests_name("same bits", tests, make_cases, free_cases);
}
