/* ReST-KV: the output's reconstruction error without a token, in the space behind the projection.
 *
 *   reduce=ema_first (published configuration, "after")
 *     pbar_j = moving average over rows of p_tj;  abar = sum over the prefix of pbar_j v_j
 *     u_j = pbar_j / (1 - pbar_j) * |M (abar - v_j)|
 *   reduce=mean, ema ("before")
 *     u_j = mean or moving average over rows of p_tj / (1 - p_tj) * |M (a_t - v_j)|
 *
 * mean over the group. M is value_metric (any M with M^T M = W_O W_O^T gives |(a - v) W_O|), or
 * one. The average takes the first row as its seed and gives each new row the weight ema_alpha.
 * Higher: the output would be further off. Not expressible: the code's adaptive shift of the
 * pooling.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_restkv = {
    .name = "restkv",
    .phi = DKV_PHI_ODDS,
    .psi = DKV_PSI_DIST,
};
