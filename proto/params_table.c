/* One row per parameter, and the words of the enumerations.
 *
 * Enumerations are stored as the index of their word. Every enum of params.h counts from 0 without
 * gaps, which makes the word list the whole definition of such a type.
 */
#include "proto/params_table.h"

#include <assert.h>

static const char *const profile_words[] = {"paper", "author", "kvpress", NULL};
static const char *const policy_words[] = {"dropkv", "snapkv",     "tova",   "h2o",      "cake",
                                           "andpro", "criticalkv", "restkv", "kvzip",    "keydiff",
                                           "knorm",  "streaming",  "random", "external", NULL};
static const char *const pool_words[] = {"none", "max", "avg", NULL};
static const char *const pool_scope_words[] = {"all", "prefix", NULL};
static const char *const p_round_words[] = {"none", "input", NULL};
static const char *const gqa_words[] = {"mean", "max", "sum", "layer", NULL};
static const char *const on_conflict_words[] = {"protect", "budget", "error", NULL};
static const char *const on_overload_words[] = {"refuse", "recency", NULL};
static const char *const nonfinite_words[] = {"error", "mask", NULL};
static const char *const reduce_words[] = {"sum", "mean",      "mean_seen", "max",
                                           "ema", "ema_first", NULL};
static const char *const anchor_words[] = {"normalised", "plain", NULL};
static const char *const heads_words[] = {"uniform", "adakv_mix", "adakv_floor", "global", NULL};
static const char *const layers_words[] = {"uniform", "pyramid", "cake", "fixed", NULL};
static const char *const counts_protected_words[] = {"false", "true", NULL};

/* Counts of tokens may exceed what a block can hold (a budget larger than the prompt keeps it all),
 * but not what an index can name. */
#define COUNT_MAX   2147483647.0
#define COUNT_RANGE "2147483647"

/* 2^53, the last integer that every JSON reader keeps exact. */
#define TIMEOUT_MAX   9007199254740992.0
#define TIMEOUT_RANGE "9007199254740992"

#define WORD(ID, member, range, help)                                                 \
    [DKV_PARAM_##ID] = {{DKV_PARAM_##ID, #member, DKV_VALUE_STRING, range, "", help}, \
                        DKV_FIELD_WORD,                                               \
                        offsetof(struct dkv_params, member),                          \
                        member##_words,                                               \
                        0,                                                            \
                        0,                                                            \
                        false}
#define NUMBER(ID, member, value_kind, field_kind, lo, hi, or_zero, range, unit, help) \
    [DKV_PARAM_##ID] = {{DKV_PARAM_##ID, #member, value_kind, range, unit, help},      \
                        field_kind,                                                    \
                        offsetof(struct dkv_params, member),                           \
                        NULL,                                                          \
                        lo,                                                            \
                        hi,                                                            \
                        or_zero}
#define LIST(ID, member, help)                                                           \
    [DKV_PARAM_##ID] = {{DKV_PARAM_##ID, #member, DKV_VALUE_STRING,                      \
                         "numbers of 0.." COUNT_RANGE " with commas between", "", help}, \
                        DKV_FIELD_LIST,                                                  \
                        offsetof(struct dkv_params, member),                             \
                        NULL,                                                            \
                        0,                                                               \
                        0,                                                               \
                        false}
#define INT(ID, member, lo, hi, range, unit, help) \
    NUMBER(ID, member, DKV_VALUE_INT, DKV_FIELD_INT, lo, hi, false, range, unit, help)
#define REAL(ID, member, lo, hi, or_zero, range, help) \
    NUMBER(ID, member, DKV_VALUE_REAL, DKV_FIELD_REAL, lo, hi, or_zero, range, "", help)

/* clang-format off */
const struct dkv_param_row dkv_param_rows[DKV_PARAM_COUNT] = {
    WORD(PROFILE, profile, "paper | author | kvpress",
         "Set of defaults: the paper's method, or a published code's with its singular behaviour."),
    WORD(POLICY, policy,
         "dropkv | snapkv | tova | h2o | cake | andpro | criticalkv | restkv | kvzip | keydiff | "
         "knorm | streaming | random | external",
         "Rule that scores the tokens."),
    INT(WINDOW, window, 1, DKV_WINDOW_MAX, "1..512", "query rows",
        "Last query rows that observe the cache."),
    WORD(POOL, pool, "none | max | avg",
         "Pooling of the scores along the sequence."),
    INT(KERNEL, kernel, 1, DKV_KERNEL_MAX, "odd, 1..511", "tokens",
        "Width of the pooling."),
    WORD(POOL_SCOPE, pool_scope, "all | prefix",
         "Pool over all tokens, or over the unprotected prefix only."),
    REAL(EPS, eps, 1e-12, 1, true, "0 or 1e-12..1",
         "Added to 1-p in the denominator; 0 takes the exact leave-one-out form."),
    WORD(P_ROUND, p_round, "none | input",
         "Round probabilities to the type of the queries before use, as the published code does."),
    WORD(GQA, gqa, "mean | max | sum | layer",
         "How the query heads of a GQA group are combined; layer: the mean over all heads, one "
         "kept set for the layer."),
    INT(SINKS, sinks, 0, COUNT_MAX, "0.." COUNT_RANGE, "tokens",
        "First tokens that are protected."),
    INT(RECENT, recent, 0, COUNT_MAX, "0.." COUNT_RANGE, "tokens",
        "Last tokens that are protected; by default as many as `window`."),
    REAL(KEEP_RATIO, keep_ratio, 0, 1, false, "0..1",
         "Budget: share of the tokens to keep."),
    REAL(COMPRESSION_RATIO, compression_ratio, 0, 1, false, "0..1",
         "Budget: share of the tokens to drop."),
    INT(KEEP_TOKENS, keep_tokens, 0, COUNT_MAX, "0.." COUNT_RANGE, "tokens",
        "Budget: tokens to keep per KV head."),
    INT(TOTAL_TOKENS, total_tokens, 1, COUNT_MAX, "1.." COUNT_RANGE, "tokens",
        "What keep_ratio is a share of, when tokens were dropped before; by default those stored."),
    INT(MAX_KEEP_TOKENS, max_keep_tokens, 1, COUNT_MAX, "1.." COUNT_RANGE, "tokens",
        "Upper bound of what is kept, stronger than protection."),
    WORD(ON_CONFLICT, on_conflict, "protect | budget | error",
         "What wins when the budget is smaller than the protected tokens."),
    REAL(SCALE, scale, 1e-6, 1e6, false, "1e-6..1e6",
         "Factor of the logits; by default 1/sqrt(head_dim)."),
    REAL(LOGIT_SOFTCAP, logit_softcap, 1e-3, 1e6, true, "0 or 1e-3..1e6",
         "Logits become c*tanh(z/c); 0 leaves them alone."),
    WORD(NONFINITE, nonfinite, "error | mask",
         "NaN or Inf in the input: refuse the request, or hide the token."),
    INT(LAYER, layer, 0, COUNT_MAX, "0.." COUNT_RANGE, "",
        "Layer of the model the block comes from; named in errors and logs."),
    [DKV_PARAM_STREAM] = {{DKV_PARAM_STREAM, "stream", DKV_VALUE_STRING,
                           "1..64 letters, digits or ._:-", "",
                           "Name of the caller's stream; named in logs."},
                          DKV_FIELD_TEXT, offsetof(struct dkv_params, stream), NULL, 0, 0, false},
    INT(PRIORITY, priority, 0, COUNT_MAX, "0.." COUNT_RANGE, "",
        "1 is served first; 0 and levels the server does not have mean its default."),
    INT(TIMEOUT, timeout, 0, TIMEOUT_MAX, "0.." TIMEOUT_RANGE, "us",
        "Longest wait for an answer; 0 leaves it to the server."),
    WORD(ON_OVERLOAD, on_overload, "refuse | recency",
         "When the server cannot take the request: refuse it, or keep sinks and the latest tokens."),
    WORD(REDUCE, reduce, "sum | mean | mean_seen | max | ema | ema_first",
         "How the rows of the window are combined; each policy takes some of these."),
    REAL(EMA_ALPHA, ema_alpha, 0.001, 1, false, "0.001..1",
         "Weight of the newest row in a moving average over the rows."),
    REAL(GAMMA, gamma, 0, 1e9, false, "0..1e9",
         "Weight of the variance beside the mean (cake)."),
    WORD(ANCHOR, anchor, "normalised | plain",
         "What keys are compared with: the mean of normalised keys, or the plain mean (keydiff)."),
    INT(SEED, seed, 0, TIMEOUT_MAX, "0.." TIMEOUT_RANGE, "",
        "Which of the random orders (random)."),
    WORD(HEADS, heads, "uniform | adakv_mix | adakv_floor | global",
         "How a layer's budget is dealt to its KV heads; all but uniform give ragged answers."),
    REAL(ALPHA, alpha, 0, 1, false, "0..1",
         "Share of the budget that every head has in any case (adakv_mix, adakv_floor)."),
    WORD(LAYERS, layers, "uniform | pyramid | cake | fixed",
         "How the budget is dealt to the blocks of a request, which are layers."),
    REAL(BETA, beta, 1, 1e6, false, "1..1e6",
         "layers=pyramid: the last layer has 1/beta of the mean."),
    REAL(TAU1, tau1, 0.01, 100, false, "0.01..100",
         "layers=cake: the entropy's exponent is 1/tau1."),
    REAL(TAU2, tau2, 0.01, 100, false, "0.01..100",
         "layers=cake: the variance's exponent is 1/tau2."),
    INT(N_LAYERS, n_layers, 1, DKV_BLOCKS_MAX, "1..4096", "",
        "Layers of the model where a request has some of them: its first is `layer`."),
    LIST(PER_LAYER, per_layer, "layers=fixed: the budget of each layer."),
    LIST(PER_HEAD, per_head,
         "layers=fixed: the budget of each KV head, of one layer for all or of every layer."),
    INT(MIN_KEEP, min_keep, 1, COUNT_MAX, "1.." COUNT_RANGE, "tokens",
        "What every KV head keeps at least, protected tokens counted."),
    WORD(COUNTS_PROTECTED, counts_protected, "false | true",
         "Whether the budget holds the protected tokens; else they come on top."),
    INT(GRANULARITY, granularity, 1, DKV_PAGE_TOKENS_MAX, "1..65536", "tokens",
        "Keep whole chunks of so many tokens, for paged caches."),
    [DKV_PARAM_TRACEPARENT] = {{DKV_PARAM_TRACEPARENT, "traceparent", DKV_VALUE_STRING,
                                "1..64 letters, digits or ._:-", "",
                                "W3C traceparent of the caller's span, for the daemon's log and "
                                "spans; a header of that name wins."},
                               DKV_FIELD_TEXT, offsetof(struct dkv_params, traceparent), NULL, 0, 0,
                               false},
};
/* clang-format on */

static_assert(sizeof(enum dkv_pool) == sizeof(unsigned), "DKV_FIELD_WORD stores an unsigned");
static_assert(DKV_PARAM_COUNT <= 64, "dkv_params.set has 64 bits");
