/* The golden files: tests/data/golden/NAME.safetensors. index.json lists the same keep sets, but
 * holds Infinity, which is not JSON, so the names of the tensors are the list used here.
 *
 * The folder comes from DKV_TEST_DATA (set by meson), else tests/data. */
#ifndef DKV_TESTS_SUPPORT_GOLDEN_H
#define DKV_TESTS_SUPPORT_GOLDEN_H

#include "tests/support/case.h"
#include "tests/support/compare.h"

/* Ends with NULL. */
extern const char *const dkv_golden_names[];

struct dkv_golden_keep {
    char name[32];  /* "max11.r0.05" */
    char pool[8];   /* "max" */
    char kernel[8]; /* "11" */
    char ratio[16]; /* "0.05" */
    uint64_t k;
};

struct dkv_golden {
    struct dkv_tensors *tensors;
    uint64_t batch, q_heads, kv_heads, q_rows, n_tokens, head_dim;
    enum dkv_dtype dtype;
    size_t n_keeps;
    struct dkv_golden_keep keeps[32];
};

/* Aborts with a line if anything is missing. */
struct dkv_golden *dkv_golden_open(const char *name);
void dkv_golden_close(struct dkv_golden *golden);

/* One batch member, with window set; the case owns a copy of the tensors. */
void dkv_golden_case(const struct dkv_golden *golden, uint64_t batch, struct dkv_case *c);

/* Sets pool, kernel and keep_ratio. */
void dkv_golden_budget(struct dkv_case *c, const struct dkv_golden_keep *keep);

const double *dkv_golden_score(const struct dkv_golden *golden, uint64_t batch);
const float *dkv_golden_peer_score(const struct dkv_golden *golden, uint64_t batch);
const int32_t *dkv_golden_keep(const struct dkv_golden *golden, size_t keep, uint64_t batch);

#endif
