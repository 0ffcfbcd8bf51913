/* TOVA (arXiv 2401.06104): attention of the last query alone, averaged over all heads of the layer.
 *
 *   u_j = p_tj of the last row t        mean over all query heads: one kept set for the layer
 *
 * Higher: the last token looks at it more. The authors protect nothing; kvpress forces the last
 * token in (profile kvpress).
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_tova = {
    .name = "tova",
    .phi = DKV_PHI_P,
    .psi = DKV_PSI_ONE,
};
