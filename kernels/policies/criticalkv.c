/* CriticalKV (arXiv 2502.03805): attention times what the token would add behind the output
 * projection, in two stages, over SnapKV's score.
 *
 *   u_j = mean over t of p_tj, mean over the group, pooled
 *   stage 1   the best floor(k / 2) by u are kept
 *   stage 2   the rest by (u_j + 1e-4) * token_weight_j
 *
 * token_weight_j is the mean over the group of |v_j W_O|_1, which the caller computes; without it
 * all weigh the same. The score reported is that of stage 2. Higher: a token that is looked at and
 * changes the layer's output.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_criticalkv = {
    .name = "criticalkv",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_ONE,
    .two_stages = true,
};
