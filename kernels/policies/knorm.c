/* KNorm (arXiv 2406.11430): keys of small norm draw attention.
 *
 *   u_j = -|k_j|
 *
 * Higher: shorter. The norm is taken in float32 at least: in bfloat16 most would tie.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_knorm = {
    .name = "knorm",
    .source = DKV_SOURCE_KEY_NORM,
};
