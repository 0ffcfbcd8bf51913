/* Random cases for every policy but dropkv, whose own tests are many.
 *
 * Owner   a case's optional tensors are in `extras`: drop them with it.
 */
#ifndef DKV_TESTS_SUPPORT_POLICY_CASE_H
#define DKV_TESTS_SUPPORT_POLICY_CASE_H

#include "tests/support/case.h"

extern const char *const dkv_policy_names[];
extern const size_t dkv_policy_count;

struct dkv_policy_extras {
    float *per_token; /* [kv_heads][n] */
    float *metric;    /* [q_heads][dv][dv] */
};

/* Some of what the case's policy takes, all of what it needs. */
void dkv_policy_give_extras(struct dkv_case *c, struct dkv_random *random,
                            struct dkv_policy_extras *extras);
void dkv_policy_drop_extras(struct dkv_policy_extras *extras);

/* Added to a seed: a block of 16-bit numbers that is so long that the CUDA engine has other kernels
 * for it. */
#define DKV_POLICY_LONG ((uint64_t)1 << 40)

/* A planned case of policy number seed % dkv_policy_count. */
void dkv_policy_case(struct dkv_case *c, uint64_t seed, struct dkv_policy_extras *extras);

#endif
