/* A policy's rule: what an engine has to compute for it. One file per policy in kernels/policies/
 * holds its formula, where it was published, and the rule as data; every engine compiles these
 * forms into its passes and none interprets them per element.
 *
 * Rules of source ROWS ask two streaming passes for
 *
 *   u_j = reduce over t of  phi(p_tj) * psi(a_t, v_j)
 *
 * per query head, reduced over the group's query heads afterwards. The other sources need no query.
 * In every rule higher means: keep.
 *
 * Thread  any; constant data.
 */
#ifndef DKV_KERNELS_RULE_H
#define DKV_KERNELS_RULE_H

#include "proto/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

enum dkv_source {
    DKV_SOURCE_ROWS = 0,  /* the window's attention */
    DKV_SOURCE_KEY_NORM,  /* -|k_j| */
    DKV_SOURCE_KEY_ANGLE, /* -cos(k_j, anchor) */
    DKV_SOURCE_POSITION,  /* j */
    DKV_SOURCE_HASH,      /* a hash of seed, layer, head and j */
    DKV_SOURCE_GIVEN,     /* external_scores */
};

enum dkv_phi { DKV_PHI_P = 0, DKV_PHI_ODDS, DKV_PHI_ODDS2 };
enum dkv_psi {
    DKV_PSI_ONE = 0, /* values are not read */
    DKV_PSI_DIST,    /* |a_t - v_j| */
    DKV_PSI_DIST2,   /* its square */
    DKV_PSI_PROJ,    /* a_t . v_j */
};

struct dkv_rule {
    const char *name;
    enum dkv_source source;
    enum dkv_phi phi;
    enum dkv_psi psi;
    bool variance;   /* gamma times the rows' unbiased variance is added to their mean */
    bool two_stages; /* half of the budget by u, the rest by (u + 1e-4) * token_weight */
};

/* The rule of a policy that the gate has accepted. */
const struct dkv_rule *dkv_rule_of(enum dkv_policy policy);

extern const struct dkv_rule dkv_rule_dropkv, dkv_rule_snapkv, dkv_rule_tova, dkv_rule_h2o,
    dkv_rule_cake, dkv_rule_andpro, dkv_rule_criticalkv, dkv_rule_restkv, dkv_rule_kvzip,
    dkv_rule_keydiff, dkv_rule_knorm, dkv_rule_streaming, dkv_rule_random, dkv_rule_external;

/* random: the score of token j (counted from valid_from) of a KV head, in [0, 1), 24 bits. */
double dkv_rule_hash(int64_t seed, uint64_t layer, uint64_t head, uint64_t token);

#ifdef __cplusplus
}
#endif
#endif
