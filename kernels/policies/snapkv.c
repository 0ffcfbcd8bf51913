/* SnapKV (arXiv 2404.14469): attention that the observation window pays to a token.
 *
 *   u_j = sum over t of p_tj        mean over the group, then pooled over the prefix
 *
 * Higher: the window looks at the token more. The authors keep one cache per query head; here, as
 * in kvpress, the query heads of a group share one and are averaged. PyramidKV and AdaKV are this
 * score under other budgets.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_snapkv = {
    .name = "snapkv",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_ONE,
};
