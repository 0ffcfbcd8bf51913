/* The reference against the golden files (two independent float64 implementations agree on their
 * scores to 1e-8), and against the definition of the term: delete a token for real and recompute.
 */
#include "tests/support/golden.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void run(const struct dkv_case *c, struct dkv_ref_answer *answer)
{
    struct dkv_error err;
    if (dkv_ref_run(&c->block, &c->params, &c->plan, answer, &err) != DKV_OK)
        fail_msg("reference: %s", err.text);
}

static void scores_equal_the_golden_ones_to_1e_8(void **state)
{
    (void)state;
    for (size_t f = 0; dkv_golden_names[f] != NULL; f++) {
        struct dkv_golden *golden = dkv_golden_open(dkv_golden_names[f]);
        for (uint64_t b = 0; b < golden->batch; b++) {
            struct dkv_case c;
            struct dkv_ref_answer answer;
            dkv_golden_case(golden, b, &c);
            dkv_case_plan(&c);
            run(&c, &answer);
            double median, max;
            dkv_compare_scores(dkv_golden_score(golden, b), answer.raw, c.block.kv_heads,
                               c.block.n_tokens, &median, &max);
            if (!(max <= 1e-8))
                fail_msg("%s: maximum error %g", dkv_golden_names[f], max);
            dkv_ref_answer_fini(&answer);
            dkv_case_fini(&c);
        }
        dkv_golden_close(golden);
    }
}

static void kept_sets_equal_the_golden_ones(void **state)
{
    (void)state;
    size_t checked = 0;
    for (size_t f = 0; dkv_golden_names[f] != NULL; f++) {
        struct dkv_golden *golden = dkv_golden_open(dkv_golden_names[f]);
        for (size_t i = 0; i < golden->n_keeps; i++)
            for (uint64_t b = 0; b < golden->batch; b++) {
                struct dkv_case c;
                struct dkv_ref_answer answer;
                dkv_golden_case(golden, b, &c);
                dkv_golden_budget(&c, &golden->keeps[i]);
                dkv_case_plan(&c);
                assert_int_equal(c.plan.keep_tokens, golden->keeps[i].k);
                run(&c, &answer);
                if (memcmp(answer.keep, dkv_golden_keep(golden, i, b),
                           c.block.kv_heads * golden->keeps[i].k * sizeof(int32_t)) != 0)
                    fail_msg("%s batch %d: %s differs", dkv_golden_names[f], (int)b,
                             golden->keeps[i].name);
                checked++;
                dkv_ref_answer_fini(&answer);
                dkv_case_fini(&c);
            }
        dkv_golden_close(golden);
    }
    assert_true(checked >= 180);
}

/* The authors' PyTorch scores are float32 and singular at sinks, so the bulk is compared. */
static void the_author_profile_reproduces_the_authors_scores(void **state)
{
    (void)state;
    for (size_t f = 0; dkv_golden_names[f] != NULL; f++) {
        struct dkv_golden *golden = dkv_golden_open(dkv_golden_names[f]);
        for (uint64_t b = 0; b < golden->batch; b++) {
            struct dkv_case c;
            struct dkv_ref_answer answer;
            dkv_golden_case(golden, b, &c);
            dkv_case_param(&c, "profile", "author");
            dkv_case_plan(&c);
            run(&c, &answer);
            const size_t n_scores = c.block.kv_heads * c.block.n_tokens;
            const float *peer = dkv_golden_peer_score(golden, b);
            size_t close = 0;
            for (size_t i = 0; i < n_scores; i++)
                close += fabs(answer.raw[i] - (double)peer[i]) <= 1e-5 * fabs((double)peer[i]);
            if (close < n_scores * 98 / 100)
                fail_msg("%s: only %zu of %zu scores agree", dkv_golden_names[f], close, n_scores);
            dkv_ref_answer_fini(&answer);
            dkv_case_fini(&c);
        }
        dkv_golden_close(golden);
    }
}

/* ---- the definition, on a small block: one query head, one row per test ---- */

enum { N = 12, D = 8, W = 3 };

static void attention_output(const struct dkv_case *c, uint32_t q_head, uint64_t row, int without,
                             double *output)
{
    const uint64_t last = c->block.n_tokens - c->plan.window + row;
    double z[N], sum = 0, max = -INFINITY;
    if (c->block.sink_logits != NULL)
        max = (double)c->block.sink_logits[q_head];
    for (uint64_t j = 0; j <= last; j++) {
        z[j] = 0;
        for (uint64_t e = 0; e < D; e++)
            z[j] += dkv_case_get(c, DKV_QUERY, q_head, c->plan.first_row + row, e) *
                    dkv_case_get(c, DKV_KEY, 0, j, e);
        z[j] *= c->plan.scale;
        if (c->params.logit_softcap > 0)
            z[j] = c->params.logit_softcap * tanh(z[j] / c->params.logit_softcap);
        if ((int)j != without)
            max = fmax(max, z[j]);
    }
    if (c->block.sink_logits != NULL)
        sum = exp((double)c->block.sink_logits[q_head] - max);
    memset(output, 0, D * sizeof(*output));
    for (uint64_t j = 0; j <= last; j++) {
        if ((int)j == without)
            continue;
        sum += exp(z[j] - max);
        for (uint64_t e = 0; e < D; e++)
            output[e] += exp(z[j] - max) * dkv_case_get(c, DKV_VALUE, 0, j, e);
    }
    for (uint64_t e = 0; e < D; e++)
        output[e] /= sum;
}

/* What removing a token does to the outputs, summed over rows and averaged over query heads, is
 * the score: no formula of the paper is used here. */
static void check_by_deletion(struct dkv_case *c)
{
    struct dkv_ref_answer answer;
    run(c, &answer);
    for (int j = 0; j < N; j++) {
        double score = 0;
        for (uint32_t h = 0; h < c->block.q_heads; h++)
            for (uint64_t t = 0; t < W; t++) {
                double with[D], without[D];
                if ((uint64_t)j > N - W + t)
                    continue;
                attention_output(c, h, t, -1, with);
                attention_output(c, h, t, j, without);
                for (int e = 0; e < D; e++)
                    score += (with[e] - without[e]) * (with[e] - without[e]) / c->block.q_heads;
            }
        assert_true(fabs(answer.raw[j] - score) <= 1e-9 * score + 1e-18);
    }
    dkv_ref_answer_fini(&answer);
}

static void make(struct dkv_case *c, uint64_t seed, double sharpness)
{
    struct dkv_random random = {seed};
    dkv_case_init(c, (struct dkv_shape){.q_heads = 2,
                                        .kv_heads = 1,
                                        .head_dim = D,
                                        .q_rows = W + 2,
                                        .n_tokens = N,
                                        .q_dtype = DKV_FP32});
    dkv_case_fill(c, DKV_QUERY, &random, sharpness);
    dkv_case_fill(c, DKV_KEY, &random, 1);
    dkv_case_fill(c, DKV_VALUE, &random, 1);
    dkv_case_param(c, "window", "3");
}

static void a_score_is_what_deleting_the_token_does(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct dkv_case c;
        make(&c, seed, seed % 2 ? 1 : 4); /* the sharper half has tokens with p above 1/2 */
        dkv_case_plan(&c);
        check_by_deletion(&c);
        dkv_case_fini(&c);
    }
}

static void deletion_agrees_with_sink_logits_and_softcap(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct dkv_case c;
        make(&c, seed, 3);
        c.sink_logits[0] = 1.5f;
        c.sink_logits[1] = -2;
        c.block.sink_logits = c.sink_logits;
        dkv_case_param(&c, "logit_softcap", "2.5");
        dkv_case_param(&c, "scale", "0.7");
        dkv_case_plan(&c);
        check_by_deletion(&c);
        dkv_case_fini(&c);
    }
}

static void gqa_max_sum_and_mean_reduce_the_same_head_scores(void **state)
{
    (void)state;
    struct dkv_case c[3];
    struct dkv_ref_answer answer[3];
    const char *names[] = {"mean", "sum", "max"};
    for (int i = 0; i < 3; i++) {
        make(&c[i], 5, 1);
        dkv_case_param(&c[i], "gqa", names[i]);
        dkv_case_plan(&c[i]);
        run(&c[i], &answer[i]);
    }
    for (int j = 0; j < N; j++) {
        assert_true(fabs(2 * answer[0].raw[j] - answer[1].raw[j]) <= 1e-12 * answer[1].raw[j]);
        assert_true(answer[2].raw[j] <= answer[1].raw[j]);
        assert_true(answer[2].raw[j] * 2 >= answer[1].raw[j] * (1 - 1e-12));
    }
    for (int i = 0; i < 3; i++) {
        dkv_ref_answer_fini(&answer[i]);
        dkv_case_fini(&c[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_equal_the_golden_ones_to_1e_8),
        cmocka_unit_test(kept_sets_equal_the_golden_ones),
        cmocka_unit_test(the_author_profile_reproduces_the_authors_scores),
        cmocka_unit_test(a_score_is_what_deleting_the_token_does),
        cmocka_unit_test(deletion_agrees_with_sink_logits_and_softcap),
        cmocka_unit_test(gqa_max_sum_and_mean_reduce_the_same_head_scores),
    };
    return cmocka_run_group_tests_name("ref", tests, NULL, NULL);
}
