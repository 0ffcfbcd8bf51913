/* KeyDiff (arXiv 2504.15364): keys unlike the others.
 *
 *   anchor=normalised   u_j = -cos(k_j, mean of k_i / |k_i|)      the paper and kvpress
 *   anchor=plain        u_j = -cos(k_j, mean of k_i)              DropKV's Table 14
 *
 * Higher: the key points further away from the rest. Queries and values are not read. A key or an
 * anchor of length 0 has cosine 0.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_keydiff = {
    .name = "keydiff",
    .source = DKV_SOURCE_KEY_ANGLE,
};
