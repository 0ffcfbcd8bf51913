/* A request of one block for tests of the gate, and what they ask of it. */
#ifndef DKV_TESTS_PROTO_REQUEST_FIXTURE_H
#define DKV_TESTS_PROTO_REQUEST_FIXTURE_H

#include "proto/request.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#define ROOMY (UINT64_C(1) << 40) /* bytes: more than any block here needs */

static char memory[1]; /* the gate never reads tensor bytes, so one is enough for every view */

/* A request of one block, 8 query heads over 2 KV heads, D 64, n 1000, bf16, dense. */
struct fixture {
    struct dkv_request request;
    struct dkv_block block;
    struct dkv_plan plan;
    struct dkv_error err;
};

static inline void lay_out(struct dkv_block *b)
{
    const uint64_t v_dim = b->v_dim != 0 ? b->v_dim : b->head_dim;
    b->query = dkv_view_dense(memory, ROOMY, DKV_BF16, b->q_rows, b->head_dim);
    b->key = dkv_view_dense(memory, ROOMY, DKV_BF16, b->n_tokens, b->head_dim);
    b->value = dkv_view_dense(memory, ROOMY, DKV_BF16, b->n_tokens, v_dim);
}

static inline void setup(struct fixture *f)
{
    memset(f, 0, sizeof(*f));
    f->block.q_heads = 8;
    f->block.kv_heads = 2;
    f->block.head_dim = 64;
    f->block.q_rows = 64;
    f->block.n_tokens = 1000;
    lay_out(&f->block);
    dkv_params_init(&f->request.params);
    f->request.blocks = &f->block;
    f->request.n_blocks = 1;
}

static inline void set(struct fixture *f, const char *name, const char *text)
{
    assert_int_equal(dkv_params_set_text(&f->request.params, name, text, &f->err), DKV_OK);
}

static inline enum dkv_status judge(struct fixture *f)
{
    dkv_params_resolve(&f->request.params);
    return dkv_request_validate(&f->request, &f->plan, &f->err);
}

static inline void assert_accepted(struct fixture *f)
{
    if (judge(f) != DKV_OK)
        fail_msg("refused: %s", f->err.text);
}

/* Refused, and the text names the field, the value and the range (as far as `parts` lists them). */
static inline void assert_refused(struct fixture *f, enum dkv_status status,
                                  const char *const parts[])
{
    struct dkv_plan untouched;
    memset(&f->plan, 0x5a, sizeof(f->plan));
    untouched = f->plan;
    assert_int_equal(judge(f), status);
    assert_int_equal(f->err.status, status);
    assert_memory_equal(&f->plan, &untouched, sizeof(untouched));
    for (; *parts != NULL; parts++)
        if (strstr(f->err.text, *parts) == NULL)
            fail_msg("'%s' does not say '%s'", f->err.text, *parts);
}

#define ASSERT_REFUSED(f, status, ...) \
    assert_refused(f, status, (const char *const[]){__VA_ARGS__, NULL})

#endif
