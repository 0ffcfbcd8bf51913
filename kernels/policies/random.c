/* Random: the baseline every method has to beat.
 *
 *   u_j = 24 bits of a hash of (seed, layer, KV head, j), over 2^24
 *
 * Higher: luck. `layer` plus the block's number in the request is the layer, so that the layers of
 * one request differ; the same request has the same answer.
 */
#include "kernels/rule.h"

const struct dkv_rule dkv_rule_random = {
    .name = "random",
    .source = DKV_SOURCE_HASH,
};

/* One step of splitmix64. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

double dkv_rule_hash(int64_t seed, uint64_t layer, uint64_t head, uint64_t token)
{
    const uint64_t hash = mix(mix(mix(mix((uint64_t)seed) + layer) + head) + token);
    return (double)(hash >> 40) * 0x1p-24;
}
