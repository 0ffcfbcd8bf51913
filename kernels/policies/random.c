/* Random: the baseline every method has to beat.
 *
 *   u_j = 24 bits of a hash of (seed, layer, KV head, j), over 2^24
 *
 * Higher: luck. `layer` plus the block's number in the request is the layer, so that the layers of
 * one request differ; the same request has the same answer.
 */
#include "kernels/policies/random.h"
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_random = {
    .name = "random",
    .source = DKV_SOURCE_HASH,
};

double dkv_rule_hash(int64_t seed, uint64_t layer, uint64_t head, uint64_t token)
{
    return dkv_random_bits(dkv_random_layer(seed, layer), head, token) * 0x1p-24;
}
