/* What tests of bad and of extreme input share: a plain block, and the comparison of an engine's
 * answer with the reference's. main() sets the engine. Assertions of cmocka's. */
#ifndef DKV_TESTS_KERNELS_NASTY_H
#define DKV_TESTS_KERNELS_NASTY_H

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

/* The head_dim of plain(): a suite runs at some of them. Beyond 64 elements are zero (what a test
 * writes, it writes before), and logits have the scale of 64. */
static uint32_t plain_dim = 64;

static inline void pad_with_zeros(struct dkv_case *c)
{
    const uint64_t rows[] = {c->block.q_rows, c->block.n_tokens, c->block.n_tokens};
    const uint64_t heads[] = {c->block.q_heads, c->block.kv_heads, c->block.kv_heads};
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
        for (uint64_t h = 0; h < heads[side]; h++)
            for (uint64_t row = 0; row < rows[side]; row++)
                for (uint64_t e = 64; e < plain_dim; e++)
                    dkv_case_set(c, (enum dkv_side)side, h, row, e, 0);
    dkv_case_param(c, "scale", "0.125");
}

static inline void make(struct dkv_case *c, struct dkv_shape shape, uint64_t seed)
{
    struct dkv_random random = {seed};
    dkv_case_init(c, shape);
    dkv_case_fill(c, DKV_QUERY, &random, 1);
    dkv_case_fill(c, DKV_KEY, &random, 1);
    dkv_case_fill(c, DKV_VALUE, &random, 1);
    dkv_case_param(c, "window", "8");
    if (plain_dim > 64 && shape.head_dim == plain_dim && shape.v_dim == 0)
        pad_with_zeros(c);
}

static inline struct dkv_shape plain(enum dkv_dtype dtype)
{
    return (struct dkv_shape){.q_heads = 4,
                              .kv_heads = 2,
                              .head_dim = plain_dim,
                              .q_rows = 8,
                              .n_tokens = 130,
                              .q_dtype = dtype};
}

/* Plans, runs both, compares; the engine's answer is handed out if the caller wants it. */
static inline void check(struct dkv_case *c, struct dkv_case_answer *answer_out)
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
static inline void check_refused(struct dkv_case *c, const char *const *words)
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

static inline bool kept(const struct dkv_case *c, const struct dkv_case_answer *answer,
                        uint32_t head, int32_t token)
{
    for (uint64_t i = 0; i < c->plan.keep_tokens; i++)
        if (answer->keep[head * c->plan.keep_tokens + i] == token)
            return true;
    return false;
}

#endif
