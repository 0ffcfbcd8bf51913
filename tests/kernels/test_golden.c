/* An engine against the golden files: every file, pool, kernel and ratio.
 *
 * usage: test_golden [ENGINE]
 *
 * Scores are held against the files' own float64 scores, and kept sets against the files' own sets;
 * the reference only tells how far from the cut a token that differs is. */
#include "tests/support/engines.h"
#include "tests/support/golden.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *engine_name;
static struct dkv_scorer scorer;

/* Replaces the reference's own scores and sets by those of the file. */
static void check_against_file(const struct dkv_golden *golden, size_t keep, uint64_t batch,
                               const char *name)
{
    struct dkv_case c;
    struct dkv_ref_answer want;
    struct dkv_case_answer got;
    struct dkv_error err;
    dkv_golden_case(golden, batch, &c);
    dkv_golden_budget(&c, &golden->keeps[keep]);
    dkv_case_plan(&c);
    assert_int_equal(dkv_ref_run(&c.block, &c.params, &c.plan, &want, &err), DKV_OK);
    const size_t heads = c.block.kv_heads;
    memcpy(want.raw, dkv_golden_score(golden, batch), heads * c.block.n_tokens * sizeof(*want.raw));
    memcpy(want.keep, dkv_golden_keep(golden, keep, batch),
           heads * c.plan.keep_tokens * sizeof(*want.keep));
    dkv_case_run(&c, &scorer, &got);
    const struct dkv_comparison result = dkv_compare(&c, &want, &got,
                                                     dkv_tolerance_of(engine_name, golden->dtype));
    if (!result.ok)
        fail_msg("%s batch %d %s: %s", name, (int)batch, golden->keeps[keep].name, result.why);
    dkv_ref_answer_fini(&want);
    dkv_case_answer_fini(&got);
    dkv_case_fini(&c);
}

static void scores_and_sets_of_every_file_are_reproduced(void **state)
{
    (void)state;
    size_t checked = 0;
    for (size_t f = 0; dkv_golden_names[f] != NULL; f++) {
        struct dkv_golden *golden = dkv_golden_open(dkv_golden_names[f]);
        for (size_t keep = 0; keep < golden->n_keeps; keep++)
            for (uint64_t batch = 0; batch < golden->batch; batch++, checked++)
                check_against_file(golden, keep, batch, dkv_golden_names[f]);
        dkv_golden_close(golden);
    }
    print_message("%zu sets of 9 files\n", checked);
    assert_true(checked >= 180);
}

/* The two members of a batch scored in one submission. */
static void a_batch_gives_what_its_members_give_alone(void **state)
{
    (void)state;
    struct dkv_golden *golden = dkv_golden_open("batch_bf16");
    struct dkv_case c[2];
    struct dkv_case_answer alone[2];
    struct dkv_item items[2];
    float *scores[2];
    int32_t *keep[2];
    struct dkv_error err;
    for (int b = 0; b < 2; b++) {
        dkv_golden_case(golden, (uint64_t)b, &c[b]);
        dkv_case_plan(&c[b]);
        dkv_case_run(&c[b], &scorer, &alone[b]);
        scores[b] = malloc(c[b].block.kv_heads * c[b].block.n_tokens * sizeof(float));
        keep[b] = malloc(c[b].block.kv_heads * c[b].plan.keep_tokens * sizeof(int32_t));
        items[b] = (struct dkv_item){.block = &c[b].block,
                                     .params = &c[b].params,
                                     .plan = &c[b].plan,
                                     .keep_out = keep[b],
                                     .scores_out = scores[b]};
    }
    assert_int_equal(dkv_engine_run(scorer.ops, scorer.engine, items, 2, &err), DKV_OK);
    for (int b = 0; b < 2; b++) {
        const size_t n_scores = c[b].block.kv_heads * c[b].block.n_tokens;
        assert_int_equal(items[b].status, DKV_OK);
        for (size_t i = 0; i < n_scores; i++)
            assert_true((double)scores[b][i] == alone[b].raw[i]);
        assert_memory_equal(keep[b], alone[b].keep,
                            c[b].block.kv_heads * c[b].plan.keep_tokens * sizeof(int32_t));
        free(scores[b]);
        free(keep[b]);
        dkv_case_answer_fini(&alone[b]);
        dkv_case_fini(&c[b]);
    }
    dkv_golden_close(golden);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_and_sets_of_every_file_are_reproduced),
        cmocka_unit_test(a_batch_gives_what_its_members_give_alone),
    };
    engine_name = dkv_test_engine_name(argc, argv);
    scorer = dkv_test_engine_open(engine_name, 2);
    const int failed = cmocka_run_group_tests_name("golden", tests, NULL, NULL);
    dkv_test_engine_close(&scorer);
    return failed;
}
