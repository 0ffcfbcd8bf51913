/* Every policy in float64, one token after the other, from the formulas of docs/policies.md alone:
 * it shares no code with the engines but the conversion of elements and, for k, the gate's plan.
 *
 * Owner   the answer owns its arrays; dkv_oracle_fini() frees them.
 */
#ifndef DKV_TESTS_SUPPORT_POLICY_ORACLE_H
#define DKV_TESTS_SUPPORT_POLICY_ORACLE_H

#include "tests/support/case.h"

/* All [kv_heads][n_tokens], stored ordinals. */
struct dkv_oracle {
    double *raw;          /* as reported */
    double *measure;      /* what an error of it is measured against */
    double *pooled;       /* what is ranked */
    uint8_t *token_class; /* 2 protected, 1 candidate */
    int32_t *keep;        /* head after head, ascending */
    uint32_t *counts;     /* [kv_heads] of them */
};

/* Views must be dense and every element finite. */
void dkv_oracle_run(const struct dkv_case *c, struct dkv_oracle *oracle_out);
void dkv_oracle_fini(struct dkv_oracle *oracle);

#endif
