/* The table of rules, in the order of enum dkv_policy. */
#include "kernels/rule.h"

#include <assert.h>

static const struct dkv_rule *const rules[DKV_POLICY_COUNT] = {
    [DKV_POLICY_DROPKV] = &dkv_rule_dropkv,
    [DKV_POLICY_SNAPKV] = &dkv_rule_snapkv,
    [DKV_POLICY_TOVA] = &dkv_rule_tova,
    [DKV_POLICY_H2O] = &dkv_rule_h2o,
    [DKV_POLICY_CAKE] = &dkv_rule_cake,
    [DKV_POLICY_ANDPRO] = &dkv_rule_andpro,
    [DKV_POLICY_CRITICALKV] = &dkv_rule_criticalkv,
    [DKV_POLICY_RESTKV] = &dkv_rule_restkv,
    [DKV_POLICY_KVZIP] = &dkv_rule_kvzip,
    [DKV_POLICY_KEYDIFF] = &dkv_rule_keydiff,
    [DKV_POLICY_KNORM] = &dkv_rule_knorm,
    [DKV_POLICY_STREAMING] = &dkv_rule_streaming,
    [DKV_POLICY_RANDOM] = &dkv_rule_random,
    [DKV_POLICY_EXTERNAL] = &dkv_rule_external,
};

const struct dkv_rule *dkv_rule_of(enum dkv_policy policy)
{
    assert((unsigned)policy < DKV_POLICY_COUNT);
    return rules[policy];
}
