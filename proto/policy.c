/* One row per policy. `paper`, `author` and `kvpress` stand for the published text, the authors'
 * code and kvpress; where one of them has no form of its own, its row repeats the nearest one.
 * docs/policies.md says where every number comes from.
 */
#include "proto/policy.h"

#define REDUCE(word) (1u << DKV_REDUCE_##word)

/* The same defaults whatever the profile. */
#define ALL_PROFILES(...)                                                          \
    {                                                                              \
        [DKV_PROFILE_PAPER] = {__VA_ARGS__}, [DKV_PROFILE_AUTHOR] = {__VA_ARGS__}, \
        [DKV_PROFILE_KVPRESS] = {__VA_ARGS__},                                     \
    }

#define ROWS_AND_KEYS (DKV_READS_QUERY | DKV_READS_KEY)
#define EVERYTHING    (ROWS_AND_KEYS | DKV_READS_VALUE)

static const struct dkv_policy_info
    policies[DKV_POLICY_COUNT] =
        {
            [DKV_POLICY_DROPKV] =
                {
                    .name = "dropkv",
                    .reads = EVERYTHING,
                    .reduces = REDUCE(SUM),
                    .profiles =
                        {
                            [DKV_PROFILE_PAPER] = {.window = 8,
                                                   .pool = DKV_POOL_MAX,
                                                   .kernel = 11,
                                                   .recent = DKV_RECENT_WINDOW},
                            [DKV_PROFILE_AUTHOR] = {.window = 8,
                                                    .pool = DKV_POOL_AVG,
                                                    .kernel = 11,
                                                    .eps = 1e-6,
                                                    .p_round = DKV_P_ROUND_INPUT,
                                                    .recent = DKV_RECENT_WINDOW},
                            [DKV_PROFILE_KVPRESS] = {.window = 32,
                                                     .pool = DKV_POOL_AVG,
                                                     .kernel = 7,
                                                     .eps = 1e-6,
                                                     .p_round = DKV_P_ROUND_INPUT,
                                                     .recent = DKV_RECENT_WINDOW},
                        },
                },
            [DKV_POLICY_SNAPKV] =
                {
                    .name = "snapkv",
                    .reads = ROWS_AND_KEYS,
                    .reduces = REDUCE(SUM) | REDUCE(MEAN) | REDUCE(MAX) | REDUCE(EMA),
                    .profiles =
                        {
                            [DKV_PROFILE_PAPER] = {.window = 32,
                                                   .pool = DKV_POOL_MAX,
                                                   .kernel = 7,
                                                   .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                                   .recent = DKV_RECENT_WINDOW},
                            [DKV_PROFILE_AUTHOR] = {.window = 32,
                                                    .pool = DKV_POOL_AVG,
                                                    .kernel = 5,
                                                    .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                                    .p_round = DKV_P_ROUND_INPUT,
                                                    .recent = DKV_RECENT_WINDOW},
                            [DKV_PROFILE_KVPRESS] = {.window = 64,
                                                     .pool = DKV_POOL_AVG,
                                                     .kernel = 5,
                                                     .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                                     .p_round = DKV_P_ROUND_INPUT,
                                                     .reduce = DKV_REDUCE_MEAN,
                                                     .recent = DKV_RECENT_WINDOW},
                        },
                },
            [DKV_POLICY_TOVA] =
                {
                    .name = "tova",
                    .reads = ROWS_AND_KEYS,
                    .reduces = REDUCE(SUM) | REDUCE(MEAN),
                    .profiles =
                        {
                            [DKV_PROFILE_PAPER] = {.window = 1, .kernel = 1, .gqa = DKV_GQA_LAYER},
                            [DKV_PROFILE_AUTHOR] = {.window = 1, .kernel = 1, .gqa = DKV_GQA_LAYER},
                            [DKV_PROFILE_KVPRESS] =
                                {.window = 1, .kernel = 1, .gqa = DKV_GQA_LAYER, .recent = 1},
                        },
                },
            [DKV_POLICY_H2O] =
                {
                    .name = "h2o",
                    .reads = ROWS_AND_KEYS,
                    .extras = DKV_EXTRA_CARRY_IN,
                    .reduces = REDUCE(SUM) | REDUCE(MEAN_SEEN),
                    .profiles =
                        {
                            [DKV_PROFILE_PAPER] = {.kernel = 1, .recent = DKV_RECENT_HALF},
                            [DKV_PROFILE_AUTHOR] = {.kernel = 1,
                                                    .p_round = DKV_P_ROUND_INPUT,
                                                    .recent = DKV_RECENT_HALF},
                            [DKV_PROFILE_KVPRESS] = {.kernel = 1,
                                                     .p_round = DKV_P_ROUND_INPUT,
                                                     .reduce = DKV_REDUCE_MEAN_SEEN},
                        },
                },
            [DKV_POLICY_CAKE] =
                {
                    .name = "cake",
                    .reads = ROWS_AND_KEYS,
                    .reduces = REDUCE(MEAN),
                    .profiles = ALL_PROFILES(.window = 32, .pool = DKV_POOL_AVG, .kernel = 5,
                                             .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                             .reduce = DKV_REDUCE_MEAN,
                                             .recent = DKV_RECENT_WINDOW),
                },
            [DKV_POLICY_ANDPRO] =
                {
                    .name = "andpro",
                    .reads = EVERYTHING,
                    .reduces = REDUCE(SUM) | REDUCE(MEAN),
                    .any_sign = true,
                    .profiles = ALL_PROFILES(.window = 32, .kernel = 1,
                                             .sinks = 1, .recent = DKV_RECENT_WINDOW,
                                             .heads = DKV_HEADS_GLOBAL, .granularity = 4),
                },
            [DKV_POLICY_CRITICALKV] =
                {
                    .name = "criticalkv",
                    .reads = ROWS_AND_KEYS,
                    .extras = DKV_EXTRA_TOKEN_WEIGHT,
                    .reduces = REDUCE(MEAN),
                    .profiles =
                        {
                            [DKV_PROFILE_PAPER] = {.window = 32,
                                                   .pool = DKV_POOL_MAX,
                                                   .kernel = 7,
                                                   .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                                   .reduce = DKV_REDUCE_MEAN,
                                                   .recent = DKV_RECENT_WINDOW},
                            [DKV_PROFILE_AUTHOR] = {.window = 32,
                                                    .pool = DKV_POOL_MAX,
                                                    .kernel = 7,
                                                    .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                                    .p_round = DKV_P_ROUND_INPUT,
                                                    .reduce = DKV_REDUCE_MEAN,
                                                    .recent = DKV_RECENT_WINDOW},
                            [DKV_PROFILE_KVPRESS] = {.window = 64,
                                                     .pool = DKV_POOL_AVG,
                                                     .kernel = 5,
                                                     .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                                     .p_round = DKV_P_ROUND_INPUT,
                                                     .reduce = DKV_REDUCE_MEAN,
                                                     .recent = DKV_RECENT_WINDOW},
                        },
                },
            [DKV_POLICY_RESTKV] =
                {
                    .name = "restkv",
                    .reads = EVERYTHING,
                    .extras = DKV_EXTRA_VALUE_METRIC,
                    .reduces = REDUCE(MEAN) | REDUCE(EMA) | REDUCE(EMA_FIRST),
                    .profiles = ALL_PROFILES(.window = 32, .pool = DKV_POOL_AVG, .kernel = 5,
                                             .pool_scope = DKV_POOL_SCOPE_PREFIX,
                                             .reduce = DKV_REDUCE_EMA_FIRST,
                                             .recent = DKV_RECENT_WINDOW),
                },
            [DKV_POLICY_KVZIP] =
                {
                    .name = "kvzip",
                    .reads = ROWS_AND_KEYS,
                    .extras = DKV_EXTRA_CARRY_IN,
                    .reduces = REDUCE(MAX),
                    .profiles =
                        {
                            [DKV_PROFILE_PAPER] = {.kernel = 1,
                                                   .gqa = DKV_GQA_MAX,
                                                   .reduce = DKV_REDUCE_MAX,
                                                   .recent = DKV_RECENT_WINDOW,
                                                   .on_top = true},
                            [DKV_PROFILE_AUTHOR] = {.kernel = 1,
                                                    .p_round = DKV_P_ROUND_INPUT,
                                                    .gqa = DKV_GQA_MAX,
                                                    .reduce = DKV_REDUCE_MAX,
                                                    .recent = DKV_RECENT_WINDOW,
                                                    .on_top = true},
                            [DKV_PROFILE_KVPRESS] = {.kernel = 1,
                                                     .p_round = DKV_P_ROUND_INPUT,
                                                     .gqa = DKV_GQA_MAX,
                                                     .reduce = DKV_REDUCE_MAX,
                                                     .sinks = 4,
                                                     .recent = DKV_RECENT_WINDOW,
                                                     .on_top = true},
                        },
                },
            [DKV_POLICY_KEYDIFF] =
                {
                    .name = "keydiff",
                    .reads = DKV_READS_KEY,
                    .reduces = REDUCE(SUM),
                    .any_sign = true,
                    .profiles = ALL_PROFILES(.window = 1, .kernel = 1),
                },
            [DKV_POLICY_KNORM] =
                {
                    .name = "knorm",
                    .reads = DKV_READS_KEY,
                    .reduces = REDUCE(SUM),
                    .any_sign = true,
                    .profiles = ALL_PROFILES(.window = 1, .kernel = 1),
                },
            [DKV_POLICY_STREAMING] =
                {
                    .name = "streaming",
                    .reduces = REDUCE(SUM),
                    .profiles = ALL_PROFILES(.window = 1, .kernel = 1, .sinks = 4),
                },
            [DKV_POLICY_RANDOM] =
                {
                    .name = "random",
                    .reduces = REDUCE(SUM),
                    .profiles = ALL_PROFILES(.window = 1, .kernel = 1),
                },
            [DKV_POLICY_EXTERNAL] =
                {
                    .name = "external",
                    .extras = DKV_EXTRA_EXTERNAL,
                    .reduces = REDUCE(SUM),
                    .any_sign = true,
                    .profiles = ALL_PROFILES(.window = 1, .kernel = 1),
                },
};

const struct dkv_policy_info *dkv_policy_info(enum dkv_policy policy)
{
    return (unsigned)policy < DKV_POLICY_COUNT ? &policies[policy] : NULL;
}
