/* DropKV (arXiv 2610.22130): how much the window's outputs move when a token is removed.
 *
 *   u_j = sum over t of ( p_tj / (1 - p_tj) )^2 * |a_t - v_j|^2        mean over the group
 *
 * Higher: the outputs would move further without the token. docs/numerics.md has the form that is
 * computed, which stays exact where p is close to 1; the profiles `author` and `kvpress` add 1e-6
 * to 1 - p and round p to the queries' type, as the published codes do.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_dropkv = {
    .name = "dropkv",
    .phi = DKV_PHI_ODDS2,
    .psi = DKV_PSI_DIST2,
};
