/* One block for tests: dense tensors that the case owns, its parameters, its plan, and answers.
 *
 * The three tensors are separate heap blocks of exactly their size, so that the address sanitizer
 * sees the first byte read outside. Views may be changed afterwards (strides, tables): the case
 * only frees what it allocated.
 *
 * Errors  a test's own mistake (an unknown parameter, a plan refused where the test expects one)
 *         aborts the program with a line.
 */
#ifndef DKV_TESTS_SUPPORT_CASE_H
#define DKV_TESTS_SUPPORT_CASE_H

#include "kernels/engine.h"
#include "kernels/ref.h"
#include "tests/support/random.h"

enum dkv_side { DKV_QUERY = 0, DKV_KEY = 1, DKV_VALUE = 2 };

struct dkv_shape {
    uint32_t q_heads, kv_heads, head_dim, v_dim; /* v_dim 0: head_dim */
    uint64_t q_rows, n_tokens;
    enum dkv_dtype q_dtype, kv_dtype; /* kv_dtype 0: q_dtype */
};

struct dkv_case {
    struct dkv_block block;
    struct dkv_params params; /* resolved by dkv_case_plan() */
    struct dkv_plan plan;
    void *memory[3];
    float sink_logits[DKV_HEADS_MAX];
};

/* All elements 0, nothing set. */
void dkv_case_init(struct dkv_case *c, struct dkv_shape shape);
void dkv_case_fini(struct dkv_case *c);

/* A copy with its own memory; only of a case whose views are as dkv_case_init() made them. */
void dkv_case_copy(struct dkv_case *copy_out, const struct dkv_case *c);

/* Every element of a side: normal numbers times `size`, rounded to the dtype. */
void dkv_case_fill(struct dkv_case *c, enum dkv_side side, struct dkv_random *random, double size);

/* One element, through the dense view; fp8 rounds to the nearest code; the scale is not applied. */
void dkv_case_set(struct dkv_case *c, enum dkv_side side, uint64_t head, uint64_t row,
                  uint64_t element, double value);
double dkv_case_get(const struct dkv_case *c, enum dkv_side side, uint64_t head, uint64_t row,
                    uint64_t element);

/* Where an element lies. */
void *dkv_case_at(const struct dkv_case *c, enum dkv_side side, uint64_t head, uint64_t row,
                  uint64_t element);

/* Sets a parameter from text. */
void dkv_case_param(struct dkv_case *c, const char *name, const char *text);

/* Resolves and validates; dkv_case_try_plan() returns what the gate says. */
void dkv_case_plan(struct dkv_case *c);
enum dkv_status dkv_case_try_plan(struct dkv_case *c, struct dkv_error *err);

/* What a scorer answers for one block. */
struct dkv_case_answer {
    enum dkv_status status;
    struct dkv_error error;
    double *raw;      /* [kv_heads][n_tokens] */
    int32_t *keep;    /* [kv_heads][keep_tokens], or head after head if ragged */
    uint32_t *counts; /* [kv_heads], if ragged */
};

/* Something that scores: the reference if ops is NULL, else an open engine. */
struct dkv_scorer {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
};

void dkv_case_run(const struct dkv_case *c, const struct dkv_scorer *scorer,
                  struct dkv_case_answer *answer_out);
void dkv_case_answer_fini(struct dkv_case_answer *answer);

#endif
