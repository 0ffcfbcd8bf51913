/* H2O (arXiv 2306.14048): accumulated attention, the heavy hitters.
 *
 *   u_j = carry_in_j + sum over all rows given of p_tj        mean over the group
 *
 * Higher: more attention so far. The scores that a call reports are the carry of the next one, less
 * the rows of tokens that were dropped. The authors keep as many heavy hitters as recent tokens;
 * kvpress (ObservedAttention) divides by the number of rows that see the token and protects nothing
 * (reduce=mean_seen).
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_h2o = {
    .name = "h2o",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_ONE,
};
