/* AnDPro (OpenReview Tdl89SZItB): how far a token's share of the output points along the output.
 *
 *   u_j = sum over t of p_tj * (a_t . v_j)        mean over the group
 *
 * All u_j of a query head add up to the sum of |a_t|^2, and a token may have a negative one.
 * Higher: the token carries more of the output. Known from a secondary summary alone: the
 * combination of rows and of query heads is ours.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_andpro = {
    .name = "andpro",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_PROJ,
};
