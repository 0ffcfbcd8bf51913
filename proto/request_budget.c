/* From a budget to k.
 *
 * The order is: which tokens are protected (whole chunks of them), what the budget asks for, what
 * this layer's share of it is, and what protection, the cap and whole chunks make of that. In
 * double arithmetic, one form never turned into another, so that floor(100 * 0.29) is 28 and
 * floor(100 * (1 - 0.9)) is 9, as callers will compute it.
 */
#include "proto/request_budget.h"

#include "proto/policy.h"

#include <math.h>

#define LIST_NUMBERS_MAX (DKV_LIST_TEXT_MAX / 2 + 1)

/* A block, as far as its budget is concerned. */
struct share {
    const struct dkv_params *params;
    uint64_t n, cap;
    uint64_t protect; /* sinks + recent */
    uint64_t chunk;
    bool whole; /* nothing lies before the window */
};

/* Which layer of how many a block is. */
static uint64_t layer_of(const struct dkv_params *params, const struct dkv_plan *plan)
{
    const bool some = dkv_params_has(params, DKV_PARAM_N_LAYERS);
    return (some ? (uint64_t)params->layer : 0) + plan->index;
}

static uint64_t layers_of(const struct dkv_params *params, const struct dkv_plan *plan)
{
    return dkv_params_has(params, DKV_PARAM_N_LAYERS) ? (uint64_t)params->n_layers : plan->n_blocks;
}

/* ---- protection ---- */

/* The tokens asked for, before chunks. */
static uint64_t recent_asked(const struct dkv_params *params, const struct dkv_plan *plan,
                             uint64_t budget)
{
    if (params->recent == DKV_RECENT_HALF)
        return budget / 2;
    if (params->window == 0 && params->recent == 0 && !dkv_params_has(params, DKV_PARAM_RECENT) &&
        dkv_policy_info(params->policy)->profiles[params->profile].recent == DKV_RECENT_WINDOW)
        return plan->window;
    return (uint64_t)params->recent;
}

/* Chunks are counted from stored token 0; one that is not full, at either end, is kept, since a
 * page that is being written to cannot be freed. */
static void protect(const struct dkv_block *block, const struct dkv_params *params,
                    struct dkv_plan *plan, uint64_t budget)
{
    const uint64_t n = plan->n_valid, chunk = (uint64_t)params->granularity;
    uint64_t sinks = min_u64((uint64_t)params->sinks, n);
    uint64_t recent = min_u64(recent_asked(params, plan, budget), n - sinks);

    if (chunk > 1) {
        const uint64_t first = block->valid_from, end = first + sinks;
        const uint64_t sinks_end = min_u64((end + chunk - 1) / chunk * chunk, block->n_tokens);
        const uint64_t recent_begin = max_u64((block->n_tokens - recent) / chunk * chunk,
                                              sinks_end);
        sinks = sinks_end - first;
        recent = block->n_tokens - recent_begin;
    }
    plan->sinks = sinks;
    plan->recent = recent;
}

/* ---- what is asked for ---- */

static uint64_t budget_of(const struct dkv_params *params, uint64_t n)
{
    double k;

    if (dkv_params_has(params, DKV_PARAM_KEEP_TOKENS))
        return (uint64_t)params->keep_tokens;
    if (dkv_params_has(params, DKV_PARAM_COMPRESSION_RATIO)) {
        k = floor((double)n * (1 - params->compression_ratio));
    } else {
        const bool based = dkv_params_has(params, DKV_PARAM_TOTAL_TOKENS);
        k = floor(params->keep_ratio * (based ? (double)params->total_tokens : (double)n));
    }
    return k < (double)n ? (uint64_t)k : n;
}

/* PyramidKV: prefix tokens fall from layer to layer by one step, from 2B - B/beta to B/beta. */
static uint64_t pyramid(const struct share *share, uint64_t budget, uint64_t layer, uint64_t layers)
{
    const uint64_t prefix = share->n - share->protect;
    const uint64_t mean = budget > share->protect ? budget - share->protect : 0;
    uint64_t low = (uint64_t)floor((double)mean / share->params->beta);
    uint64_t high = 2 * mean - low;

    if (share->n < 2 * mean || layers < 2)
        return budget;
    if (high >= prefix) {
        high = prefix;
        low = 2 * mean - high;
    }
    const uint64_t step = high > low ? (high - low) / (layers - 1) : 0;
    return high - layer * step + share->protect;
}

static enum dkv_status fixed_number(const struct dkv_block *block, const struct dkv_params *params,
                                    const struct dkv_plan *plan, uint32_t head, uint64_t *out,
                                    struct dkv_error *err)
{
    uint32_t numbers[LIST_NUMBERS_MAX];
    const uint64_t layers = layers_of(params, plan), layer = layer_of(params, plan);
    const bool each = params->per_head[0] != '\0';
    size_t count = 0;

    (void)dkv_params_list(each ? params->per_head : params->per_layer, numbers, LIST_NUMBERS_MAX,
                          &count);
    if (!each && count != layers)
        return dkv_error_set(err, DKV_E_INVALID, "per_layer: %zu numbers for %llu layers", count,
                             (unsigned long long)layers);
    if (each && count != block->kv_heads && count != layers * block->kv_heads)
        return dkv_error_set(err, DKV_E_INVALID,
                             "per_head: %zu numbers, %u (of one layer) or %llu (of all) are needed",
                             count, block->kv_heads,
                             (unsigned long long)(layers * block->kv_heads));
    const uint64_t at = count == block->kv_heads ? head : layer * block->kv_heads + head;
    *out = numbers[each ? at : layer];
    return DKV_OK;
}

/* ---- what comes of it ---- */

static enum dkv_status settle(const struct share *share, uint64_t budget, uint64_t *k_out,
                              struct dkv_error *err)
{
    const enum dkv_on_conflict conflict = share->params->on_conflict;
    uint64_t k = min_u64(budget, share->cap);

    if (conflict == DKV_CONFLICT_ERROR && k < share->protect && !share->whole)
        return dkv_error_set(err, DKV_E_INVALID,
                             "on_conflict: a budget of %llu tokens is below the %llu protected",
                             (unsigned long long)k, (unsigned long long)share->protect);
    if (conflict == DKV_CONFLICT_PROTECT)
        k = max_u64(k, share->protect);
    k = max_u64(k, min_u64((uint64_t)share->params->min_keep, share->n));
    k = min_u64(share->whole ? share->n : max_u64(k, 1), share->cap);
    *k_out = k;
    if (share->chunk == 1 || k == share->n)
        return DKV_OK;
    if (k < share->protect || (share->protect == 0 && share->cap < share->chunk))
        return dkv_error_set(err, DKV_E_INVALID,
                             "granularity: %llu tokens do not hold the %llu protected in whole "
                             "chunks of %llu, or one chunk",
                             (unsigned long long)k, (unsigned long long)share->protect,
                             (unsigned long long)share->chunk);
    *k_out = share->protect + (k - share->protect) / share->chunk * share->chunk;
    if (*k_out == 0)
        *k_out = share->chunk;
    return DKV_OK;
}

static struct share share_of(const struct dkv_block *block, const struct dkv_params *params,
                             const struct dkv_plan *plan)
{
    const bool capped = dkv_params_has(params, DKV_PARAM_MAX_KEEP_TOKENS);
    (void)block;
    return (struct share){
        .params = params,
        .n = plan->n_valid,
        .cap = capped ? min_u64((uint64_t)params->max_keep_tokens, plan->n_valid) : plan->n_valid,
        .protect = plan->sinks + plan->recent,
        .chunk = (uint64_t)params->granularity,
        .whole = plan->n_valid <= (uint64_t)params->window,
    };
}

uint64_t dkv_plan_head_tokens(const struct dkv_block *block, const struct dkv_params *params,
                              const struct dkv_plan *plan, uint32_t head)
{
    const struct share share = share_of(block, params, plan);
    uint64_t k = plan->keep_tokens, budget;

    if (params->per_head[0] != '\0' &&
        fixed_number(block, params, plan, head, &budget, NULL) == DKV_OK)
        (void)settle(&share, min_u64(budget, share.n), &k, NULL);
    return k;
}

/* per_head: every head has its own k. */
static enum dkv_status plan_heads(const struct dkv_block *block, const struct share *share,
                                  struct dkv_plan *plan, struct dkv_error *err)
{
    uint64_t k = 0, budget = 0;
    enum dkv_status status = DKV_OK;

    plan->keep_all = true;
    for (uint32_t h = 0; h < block->kv_heads && status == DKV_OK; h++) {
        status = fixed_number(block, share->params, plan, h, &budget, err);
        if (status == DKV_OK)
            status = settle(share, min_u64(budget, share->n), &k, err);
        if (status == DKV_OK && k < share->protect)
            status = dkv_error_set(
                err, DKV_E_INVALID,
                "per_head: %llu tokens of head %u do not hold the %llu protected",
                (unsigned long long)k, h, (unsigned long long)share->protect);
        plan->keep_capacity += k;
        plan->keep_all = plan->keep_all && k == share->n;
    }
    plan->ragged = true;
    plan->keep_tokens = plan->keep_capacity / block->kv_heads;
    return status;
}

/* Indices of a ragged answer, at most. */
static uint64_t capacity_of(const struct dkv_block *block, const struct share *share,
                            const struct dkv_plan *plan)
{
    uint64_t each = plan->keep_tokens;
    if (share->params->layers == DKV_LAYERS_CAKE) /* one layer may take what all have */
        each = min_u64(plan->most_tokens,
                       share->protect + (each - min_u64(each, share->protect)) * plan->n_blocks);
    /* The mix is rounded for each head, and does not take from one head what min_keep, or protected
     * tokens that are masked, give to another: together that is once more the mean at most. */
    if (share->params->heads == DKV_HEADS_ADAKV_MIX)
        each = min_u64(share->n, 2 * each + share->chunk);
    return block->kv_heads * each;
}

static enum dkv_status check_layers(const struct dkv_params *params, const struct dkv_plan *plan,
                                    struct dkv_error *err)
{
    const bool fixed = params->layers == DKV_LAYERS_FIXED;
    const bool by_layer = params->per_layer[0] != '\0', by_head = params->per_head[0] != '\0';

    if (layer_of(params, plan) >= layers_of(params, plan))
        return dkv_error_set(err, DKV_E_INVALID, "layer: %llu is not below n_layers %llu",
                             (unsigned long long)layer_of(params, plan),
                             (unsigned long long)layers_of(params, plan));
    if (fixed != (by_layer || by_head) || (by_layer && by_head))
        return dkv_error_set(err, DKV_E_INVALID,
                             "layers: fixed needs one of per_layer and per_head, which are for it "
                             "alone");
    if (fixed && (dkv_params_has(params, DKV_PARAM_KEEP_RATIO) ||
                  dkv_params_has(params, DKV_PARAM_COMPRESSION_RATIO) ||
                  dkv_params_has(params, DKV_PARAM_KEEP_TOKENS)))
        return dkv_error_set(err, DKV_E_INVALID,
                             "layers: fixed has its budgets in per_layer or per_head, no other is "
                             "allowed");
    if (params->granularity > 1 && params->policy == DKV_POLICY_CRITICALKV)
        return dkv_error_set(err, DKV_E_INVALID,
                             "granularity: %lld is not possible in two stages "
                             "(criticalkv), 1 is",
                             (long long)params->granularity);
    if (by_head && params->heads != DKV_HEADS_UNIFORM)
        return dkv_error_set(err, DKV_E_INVALID, "heads: per_head has dealt the budget already");
    return DKV_OK;
}

enum dkv_status dkv_plan_budget(const struct dkv_block *block, const struct dkv_params *params,
                                struct dkv_plan *plan, struct dkv_error *err)
{
    uint64_t budget = 0;
    enum dkv_status status = check_layers(params, plan, err);

    if (status == DKV_OK && params->layers == DKV_LAYERS_FIXED && params->per_head[0] == '\0')
        status = fixed_number(block, params, plan, 0, &budget, err);
    else
        budget = budget_of(params, plan->n_valid);
    if (status != DKV_OK)
        return status;
    protect(block, params, plan, min_u64(budget, plan->n_valid));
    const struct share share = share_of(block, params, plan);
    if (params->per_head[0] != '\0')
        return plan_heads(block, &share, plan, err);
    if (!params->counts_protected) {
        if (params->layers != DKV_LAYERS_FIXED)
            budget = budget_of(params, share.n - share.protect);
        budget += share.protect;
    }
    budget = min_u64(budget, share.cap);
    if (params->layers == DKV_LAYERS_PYRAMID)
        budget = pyramid(&share, budget, layer_of(params, plan), layers_of(params, plan));
    status = settle(&share, budget, &plan->keep_tokens, err);
    if (status != DKV_OK)
        return status;
    plan->most_tokens = share.cap > plan->keep_tokens ? share.cap : plan->keep_tokens;
    plan->keep_all = plan->keep_tokens == share.n && params->layers != DKV_LAYERS_CAKE;
    plan->sinks = min_u64(plan->sinks, plan->keep_tokens); /* where k does not cover them: ... */
    plan->recent = min_u64(plan->recent, plan->keep_tokens - plan->sinks); /* ... sinks first */
    plan->ragged = params->heads != DKV_HEADS_UNIFORM || params->layers != DKV_LAYERS_UNIFORM;
    plan->keep_capacity = capacity_of(block, &share, plan);
    return DKV_OK;
}
