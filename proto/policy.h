/* What both ends have to know about a scoring policy: its defaults under each profile, the inputs
 * that it takes beside queries, keys and values, and which words of a parameter mean something to
 * it. What it computes is in kernels/policies/, one file each; docs/policies.md is the reference.
 *
 * Thread  any; constant data.
 */
#ifndef DKV_PROTO_POLICY_H
#define DKV_PROTO_POLICY_H

#include "proto/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a policy reads of a block. */
enum dkv_reads {
    DKV_READS_NOTHING = 0,
    DKV_READS_QUERY = 1 << 0,
    DKV_READS_KEY = 1 << 1,
    DKV_READS_VALUE = 1 << 2,
};

/* Optional tensors of a block; one that the policy does not take is refused. */
enum dkv_extra {
    DKV_EXTRA_TOKEN_WEIGHT = 1 << 0,
    DKV_EXTRA_VALUE_METRIC = 1 << 1,
    DKV_EXTRA_CARRY_IN = 1 << 2,
    DKV_EXTRA_EXTERNAL = 1 << 3, /* needed */
};

/* Tokens protected at the end, where the caller does not say. */
#define DKV_RECENT_WINDOW (-1) /* as many as `window` */
#define DKV_RECENT_HALF   (-2) /* half of what is kept */

struct dkv_policy_defaults {
    int64_t window; /* 0: every row given */
    enum dkv_pool pool;
    int64_t kernel;
    enum dkv_pool_scope pool_scope;
    double eps;
    enum dkv_p_round p_round;
    enum dkv_gqa gqa;
    enum dkv_reduce reduce;
    int64_t sinks;
    int64_t recent; /* or DKV_RECENT_* */
    enum dkv_heads heads;
    bool on_top;         /* counts_protected=false */
    int64_t granularity; /* 0: 1 */
};

struct dkv_policy_info {
    const char *name;
    unsigned reads;                         /* set of enum dkv_reads */
    unsigned extras;                        /* set of enum dkv_extra */
    unsigned reduces;                       /* bit i: enum dkv_reduce i means something here */
    bool any_sign;                          /* scores may be negative */
    struct dkv_policy_defaults profiles[3]; /* enum dkv_profile */
};

/* NULL for a number that is no policy. */
const struct dkv_policy_info *dkv_policy_info(enum dkv_policy policy);

#ifdef __cplusplus
}
#endif
#endif
