/* StreamingLLM (arXiv 2309.17453): attention sinks and the most recent tokens.
 *
 *   u_j = j + 1
 *
 * Higher: more recent. The first four tokens are protected (`sinks`). No tensor is read.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_streaming = {
    .name = "streaming",
    .source = DKV_SOURCE_POSITION,
};
