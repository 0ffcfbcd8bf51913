/* External: the caller's scores, our selection.
 *
 *   u_j = external_scores_j
 *
 * Higher: keep. For methods that need what this service does not see (a trained scorer, hidden
 * states, all layers' projections). Scores may have any sign; they must be finite.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_external = {
    .name = "external",
    .source = DKV_SOURCE_GIVEN,
};
