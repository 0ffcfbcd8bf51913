/* CAKE (arXiv 2503.12491): attention that is strong or that moves.
 *
 *   u_j = mean over t of p_tj + gamma * var over t of p_tj        mean over the group, avg pooled
 *
 * The variance is the unbiased one, over w - 1 (0 for a single row), and is computed from the
 * differences to the mean. Higher: more attention, or attention that comes and goes.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_cake = {
    .name = "cake",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_ONE,
    .variance = true,
};
