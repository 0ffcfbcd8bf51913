/* The CPU engine for tests: opened, and run over made-up cases, with cmocka's assertions. */
#ifndef DKV_TESTS_KERNELS_ENGINE_CPU_FIXTURE_H
#define DKV_TESTS_KERNELS_ENGINE_CPU_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kernels/engine.h"
#include "tests/support/case.h"

static inline struct dkv_engine *open_engine(unsigned threads)
{
    struct dkv_engine *engine = NULL;
    struct dkv_error err = {0};
    const struct dkv_engine_config config = {.threads = threads};
    assert_int_equal(dkv_engine_cpu.open(&config, &engine, &err), DKV_OK);
    return engine;
}

static inline void make_case(struct dkv_case *c, struct dkv_shape shape, uint64_t seed)
{
    struct dkv_random random = {.state = seed};
    dkv_case_init(c, shape);
    dkv_case_fill(c, DKV_QUERY, &random, 1.5);
    dkv_case_fill(c, DKV_KEY, &random, 1.0);
    dkv_case_fill(c, DKV_VALUE, &random, 1.0);
}

struct answer {
    struct dkv_item item;
    float *scores;
    int32_t *keep;
};

static inline void make_answer(struct answer *a, struct dkv_case *c)
{
    a->scores = calloc(c->block.kv_heads * c->block.n_tokens, sizeof(float));
    a->keep = calloc(c->block.kv_heads * c->plan.keep_tokens, sizeof(int32_t));
    a->item = (struct dkv_item){.block = &c->block,
                                .params = &c->params,
                                .plan = &c->plan,
                                .keep_out = a->keep,
                                .scores_out = a->scores};
}

static inline void free_answer(struct answer *a)
{
    free(a->scores);
    free(a->keep);
}

static inline void run(struct dkv_engine *engine, struct dkv_item *items, size_t n)
{
    struct dkv_error err = {0};
    assert_int_equal(dkv_engine_run(&dkv_engine_cpu, engine, items, n, &err), DKV_OK);
}

static inline void assert_same(const struct answer *a, const struct answer *b,
                               const struct dkv_case *c)
{
    assert_int_equal(a->item.status, DKV_OK);
    assert_int_equal(b->item.status, DKV_OK);
    assert_memory_equal(a->scores, b->scores,
                        sizeof(float) * c->block.kv_heads * c->block.n_tokens);
    assert_memory_equal(a->keep, b->keep,
                        sizeof(int32_t) * c->block.kv_heads * c->plan.keep_tokens);
}

#endif
