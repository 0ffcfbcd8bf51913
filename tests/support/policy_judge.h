/* Whether an answer is what the oracle says, by the bounds of docs/numerics.md. Errors are measured
 * against the score itself, but where terms of both signs cancel against the sum of their sizes
 * (andpro), and for a cosine against 1. */
#ifndef DKV_TESTS_SUPPORT_POLICY_JUDGE_H
#define DKV_TESTS_SUPPORT_POLICY_JUDGE_H

#include "tests/support/policy_oracle.h"

struct dkv_policy_totals {
    uint64_t cases, failed, heads, sets_equal, sets_in_cut;
    double worst;
    double *medians; /* [cases] and more; a case's is written before it is counted */
};

/* False with the reason in `why`, [200]. */
bool dkv_policy_judge(const struct dkv_case *c, const struct dkv_oracle *want,
                      const struct dkv_case_answer *got, struct dkv_policy_totals *totals,
                      char *why);

/* One line about a case that failed. */
void dkv_policy_tell(const struct dkv_case *c, const char *name, const char *why);

/* The median of the cases' medians. */
double dkv_policy_median(struct dkv_policy_totals *totals);

#endif
