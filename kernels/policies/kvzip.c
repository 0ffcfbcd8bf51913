/* KVzip (arXiv 2505.23416): the most attention that a replay of the context pays to a token.
 *
 *   u_j = max over all rows given and the group of p_tj, and of carry_in_j
 *
 * The caller runs the model on "repeat the context" and hands over the replay's queries, with keys
 * of the context first and the replay's last. Higher: needed at least once to say the context
 * again. The authors drop every tie at their threshold; here ties follow the order and totals are
 * exact.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_kvzip = {
    .name = "kvzip",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_ONE,
};
