/* What the two files of the oracle share: scores (policy_oracle.c), and what is kept by them
 * (policy_oracle_select.c). Nobody else includes this. */
#ifndef DKV_TESTS_SUPPORT_POLICY_ORACLE_PRIV_H
#define DKV_TESTS_SUPPORT_POLICY_ORACLE_PRIV_H

#include "tests/support/policy_oracle.h"

#include <stdlib.h>

static inline void *must_calloc(size_t count, size_t size)
{
    void *memory = calloc(count > 0 ? count : 1, size);
    if (memory == NULL)
        abort();
    return memory;
}

/* Does it look at queries? */
static inline bool dkv_oracle_has_rows(enum dkv_policy policy)
{
    return policy != DKV_POLICY_KEYDIFF && policy != DKV_POLICY_KNORM &&
           policy != DKV_POLICY_STREAMING && policy != DKV_POLICY_RANDOM &&
           policy != DKV_POLICY_EXTERNAL;
}

/* From raw scores of all heads to what each keeps: pooling, classes, budgets. Raw scores may
 * change: CriticalKV's second stage. */
void dkv_oracle_select(const struct dkv_case *c, struct dkv_oracle *o);

#endif
