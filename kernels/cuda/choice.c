/* Blocks whose heads are selected together, and requests whose layers share a budget.
 *
 * A block's choice needs the scores of all its heads. Where these fit into a wave, with what
 * scoring needs, the block is like any other and the wave has a choice more. Otherwise the choice's
 * memory is held at the front of scratch while its heads go out in waves of their own, and the
 * choice itself goes out with the last of them.
 *
 * With layers=cake what a layer keeps depends on the attention of all: its heads are scored a first
 * time for their entropy and variance alone, the host deals out the budget, and every layer is run
 * as a chosen block that keeps its share.
 */
#include <math.h>
#include <string.h>

#include "kernels/choose.h"
#include "kernels/cuda/host.h"
#include "kernels/extras.h"

/* ---- a choice ---- */

static enum dkv_cu_range range_of(enum dkv_source source, bool any_sign)
{
    switch (source) {
    case DKV_SOURCE_KEY_NORM: return DKV_CU_RANGE_NORM;
    case DKV_SOURCE_KEY_ANGLE: return DKV_CU_RANGE_ANGLE;
    default: return any_sign ? DKV_CU_RANGE_SIGNED : DKV_CU_RANGE_POSITIVE;
    }
}

/* What select.h's spec says, and choose.h's: everything but memory. */
static struct dkv_cu_choice describe_choice(const struct dkv_item *item, uint64_t keep)
{
    const struct dkv_params *params = item->params;
    const struct dkv_plan *plan = item->plan;
    const struct dkv_rule *rule = dkv_rule_of(params->policy);
    const bool prefix = params->pool_scope == DKV_POOL_SCOPE_PREFIX;
    const uint32_t n = (uint32_t)plan->n_valid;
    const uint64_t least = (uint64_t)params->min_keep;
    return (struct dkv_cu_choice){
        .capacity = (uint32_t)plan->keep_capacity,
        .heads = item->block->kv_heads,
        .n = n,
        .stride = (n + 3) & ~3u,
        .mask_words = (n + 31) / 32,
        .window = rule->source == DKV_SOURCE_ROWS ? plan->window : 0,
        .first_index = (uint32_t)item->block->valid_from,
        .sinks = (uint32_t)plan->sinks,
        .recent = (uint32_t)plan->recent,
        .keep = (uint32_t)keep,
        .min_keep = (uint32_t)(least < n ? least : n),
        .chunk = (uint32_t)params->granularity,
        .pool = params->pool,
        .kernel = (uint32_t)params->kernel,
        .scope_begin = prefix ? (uint32_t)plan->sinks : 0,
        .scope_end = prefix ? n - (uint32_t)plan->recent : n,
        .mode = params->heads,
        .one_set = params->gqa == DKV_GQA_LAYER,
        .two_stages = rule->two_stages,
        .carry_largest = params->reduce == DKV_REDUCE_MAX,
        .range = range_of(rule->source, dkv_policy_info(params->policy)->any_sign),
        .no_factor = rule->source != DKV_SOURCE_ROWS,
        .alpha = params->alpha,
    };
}

/* Takes what dkv_cu_choice_need_of() has counted of scratch. */
static void take_memory(struct dkv_cu_engine *engine, const struct dkv_item *item,
                        struct dkv_cu_choice *choice)
{
    struct dkv_cu_arena *scratch = &engine->scratch;
    const size_t all = (size_t)choice->heads * choice->stride;
    const bool chunks = choice->chunk > 1;
    choice->raw = dkv_cu_take(scratch, all * sizeof(float));
    choice->token_class = dkv_cu_take(scratch, all);
    choice->exponents = dkv_cu_take(scratch, choice->heads * sizeof(int));
    choice->bins = dkv_cu_take(scratch, DKV_CU_CHOICE_BINS * sizeof(unsigned));
    if (chunks || choice->pool != DKV_POOL_NONE)
        choice->pooled = dkv_cu_take(scratch, all * sizeof(float));
    if (chunks) {
        choice->chunk_raw = dkv_cu_take(scratch, all * sizeof(float));
        choice->chunk_class = dkv_cu_take(scratch, all);
    }
    if (item->params->nonfinite == DKV_NONFINITE_MASK)
        choice->mask = dkv_cu_take(scratch,
                                   (size_t)choice->heads * choice->mask_words * sizeof(unsigned));
}

/* The valid tokens of [kv_heads][n_tokens] numbers, staged as [heads][n]. */
static enum dkv_status stage_numbers(struct dkv_cu_engine *engine, struct dkv_item *item,
                                     const float *from, const float **out, struct dkv_error *err)
{
    const uint64_t n = item->plan->n_valid;
    const uint32_t heads = item->block->kv_heads;
    enum dkv_status status = DKV_OK;
    if (from == NULL)
        return DKV_OK;
    float *to = dkv_cu_stage_take(engine, heads * n * sizeof(*to));
    *out = to;
    for (uint32_t h = 0; h < heads && status == DKV_OK; h++)
        status = dkv_cu_stage_bytes(engine, item,
                                    from + h * item->block->n_tokens + item->block->valid_from,
                                    n * sizeof(*to), to + h * n, err);
    return status;
}

/* Which kernel of selection does this choice, where nothing is wanted but indices: as a unit, if
 * heads keep the same number, of tokens whose scores are not negative; the mean of all heads is not
 * averaged over tokens there, and the second stage needs pooled scores that are no sums. Or with
 * any scores, if they are no averages, and no head's own best are safe beside what is protected. */
static enum dkv_cu_simple simple_form(const struct dkv_cu_engine *engine,
                                      const struct dkv_item *item,
                                      const struct dkv_cu_choice *choice)
{
    const bool sums = choice->pool == DKV_POOL_AVG, joint = choice->mode == DKV_HEADS_GLOBAL;
    const uint32_t protect = choice->sinks + choice->recent;
    if (choice->each != NULL || choice->carry != NULL || choice->mask != NULL ||
        item->scores_out != NULL || choice->window == choice->n ||
        !(joint || choice->mode == DKV_HEADS_UNIFORM))
        return DKV_CU_SIMPLE_NOT;
    if (!joint && choice->chunk == 1 && !dkv_policy_info(item->params->policy)->any_sign)
        return (sums && (choice->one_set || choice->two_stages)) ||
                       (choice->one_set && choice->two_stages) ||
                       dkv_cu_select_needs_keys(&engine->device, choice->n)
                   ? DKV_CU_SIMPLE_NOT
                   : DKV_CU_SIMPLE_PLAIN;
    const uint64_t all = (uint64_t)choice->stride * (joint ? choice->heads : 1);
    if (sums || choice->one_set || choice->two_stages || all > DKV_CU_SELECT_ANY_MAX ||
        (joint && (protect == 0 || choice->min_keep > protect)) ||
        (choice->pooled == NULL && dkv_cu_select_needs_keys(&engine->device, (uint32_t)all)))
        return DKV_CU_SIMPLE_NOT;
    return DKV_CU_SIMPLE_ANY;
}

/* Adds the choice to the wave, in which there is room for what it needs but scratch. */
static enum dkv_status add_choice(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                  uint32_t index, struct dkv_cu_choice *choice,
                                  struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_item *item = &slot->items[index];
    if (item->status != DKV_OK) /* not all heads are there */
        return DKV_OK;
    if (item->params->per_head[0] != '\0') {
        uint32_t *each = dkv_cu_take(&slot->io, choice->heads * sizeof(*each));
        for (uint32_t h = 0; h < choice->heads; h++)
            each[h] = (uint32_t)dkv_plan_head_tokens(item->block, item->params, item->plan, h);
        choice->each = dkv_cu_twin(slot, each);
    }
    b->choices[b->n_choices] = *choice;
    b->choice_items[b->n_choices] = index;
    struct dkv_cu_choice *added = &b->choices[b->n_choices++];
    b->result_bytes += dkv_cu_choice_need_of(item).io_down;
    enum dkv_status status = stage_numbers(engine, item, item->block->token_weight, &added->weight,
                                           err);
    if (status == DKV_OK)
        status = stage_numbers(engine, item, item->block->carry_in, &added->carry, err);
    added->simple = simple_form(engine, item, added);
    return status;
}

static struct dkv_cu_need sum_of(const struct dkv_cu_need *choice, const struct dkv_cu_need *head,
                                 uint32_t heads)
{
    return (struct dkv_cu_need){
        .scratch = choice->scratch + heads * head->scratch,
        .io_up = choice->io_up + heads * head->io_up,
        .io_down = choice->io_down + heads * head->io_down,
        .staged = choice->staged + heads * head->staged,
    };
}

static void fail_for_room(const struct dkv_cu_engine *engine, struct dkv_item *item,
                          const struct dkv_cu_need *need)
{
    struct dkv_error why;
    (void)dkv_error_set(&why, DKV_E_NOMEM,
                        "cuda: %u KV heads of %llu tokens that are selected together need %zu "
                        "bytes of scratch, %zu of staging and %zu of results, above the %zu, %zu "
                        "and %zu there are",
                        item->block->kv_heads, (unsigned long long)item->plan->n_valid,
                        need->scratch, need->staged, need->io_down, engine->scratch.bytes,
                        engine->halves[0].arena.bytes, DKV_CU_IO_BYTES - DKV_CU_EXTRA_BYTES);
    dkv_cu_fail_item(item, &why);
}

/* The choice and its heads in waves of their own. */
static enum dkv_status run_apart(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 uint32_t index, const struct dkv_cu_block *desc,
                                 struct dkv_cu_choice *choice, struct dkv_error *err)
{
    struct dkv_item *item = &slot->items[index];
    struct dkv_cu_need need = dkv_cu_choice_need_of(item);
    bool room = false;
    enum dkv_status status = dkv_cu_make_room(engine, slot, &need, &room, err);
    if (status != DKV_OK)
        return status;
    if (!room) {
        fail_for_room(engine, item, &need);
        return DKV_OK;
    }
    take_memory(engine, item, choice);
    engine->held = engine->scratch.used;
    status = dkv_cu_run_heads(engine, slot, index, desc, choice, err);
    need.scratch = 0; /* taken */
    if (status == DKV_OK)
        status = dkv_cu_make_room(engine, slot, &need, &room, err);
    if (status == DKV_OK && !room)
        fail_for_room(engine, item, &need);
    if (status == DKV_OK)
        status = add_choice(engine, slot, index, choice, err);
    if (status == DKV_OK)
        status = dkv_cu_launch_wave(engine, slot, err);
    engine->held = 0;
    if (status == DKV_OK)
        dkv_cu_begin_wave(engine, slot);
    return status;
}

enum dkv_status dkv_cu_run_chosen(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                  uint32_t index, uint64_t keep, struct dkv_error *err)
{
    struct dkv_item *item = &slot->items[index];
    struct dkv_cu_choice choice = describe_choice(item, keep);
    struct dkv_cu_block desc;
    dkv_cu_describe(item, &desc);
    const struct dkv_cu_scorer *scorer = dkv_cu_scorers[dkv_cu_choose_scorer(engine, &desc)];
    const struct dkv_cu_need head = dkv_cu_need_of(engine, item, &desc, scorer);
    const struct dkv_cu_need own = dkv_cu_choice_need_of(item);
    const struct dkv_cu_need all = sum_of(&own, &head, choice.heads);
    enum dkv_status status = DKV_OK;
    if (!dkv_cu_fits(engine, slot, &all, choice.heads) ||
        (engine->builder->staged_bytes >= DKV_CU_STAGE_WAVE && all.staged > 0))
        status = dkv_cu_launch_wave(engine, slot, err);
    if (status != DKV_OK)
        return status;
    if (!dkv_cu_fits(engine, slot, &all, choice.heads) || all.staged > DKV_CU_STAGE_WAVE)
        return run_apart(engine, slot, index, &desc, &choice, err);
    take_memory(engine, item, &choice);
    status = dkv_cu_run_heads(engine, slot, index, &desc, &choice, err);
    return status == DKV_OK ? add_choice(engine, slot, index, &choice, err) : status;
}

/* ---- layers=cake ---- */

static double preference_of(const struct dkv_params *params, const struct dkv_cu_layer *layer)
{
    const double p = pow(fmax(layer->entropy, 0.0), 1.0 / params->tau1) *
                     pow(fmax(layer->variance, 0.0), 1.0 / params->tau2);
    return isfinite(p) ? p : 0.0;
}

static bool layers_are_here(const struct dkv_item *items, size_t n_items)
{
    const uint32_t n_layers = items->plan->n_blocks;
    if (items->plan->index != 0 || n_layers > n_items)
        return false;
    for (uint32_t l = 0; l < n_layers; l++)
        if (items[l].plan->index != l || items[l].plan->n_blocks != n_layers ||
            items[l].params->layers != DKV_LAYERS_CAKE)
            return false;
    return true;
}

/* Scores all layers for what they are judged by, and waits for it. */
static enum dkv_status measure(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                               uint32_t first, uint32_t n_layers, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    for (uint32_t l = first; l < first + n_layers && status == DKV_OK; l++) {
        struct dkv_cu_block desc;
        dkv_cu_describe(&slot->items[l], &desc);
        desc.spread = true;
        engine->layers[l] = (struct dkv_cu_layer){0};
        status = dkv_cu_run_heads(engine, slot, l, &desc, NULL, err);
    }
    if (status == DKV_OK)
        status = dkv_cu_launch_wave(engine, slot, err);
    if (status == DKV_OK)
        status = dkv_cu_drain(engine, slot, err);
    dkv_cu_begin_wave(engine, slot);
    return status;
}

/* A layer that failed fails the others: nobody knows their shares. */
static bool all_are_well(struct dkv_item *items, uint32_t n_layers)
{
    const struct dkv_item *bad = NULL;
    for (uint32_t l = 0; l < n_layers && bad == NULL; l++)
        if (items[l].status != DKV_OK)
            bad = &items[l];
    for (uint32_t l = 0; l < n_layers && bad != NULL; l++)
        dkv_cu_fail_item(&items[l], &bad->error);
    return bad == NULL;
}

/* Deals what the layers' shares add up to, beyond what is protected, by their preferences. */
static void deal_layers(const struct dkv_item *items, uint32_t n_layers,
                        struct dkv_cu_layer *layers)
{
    double preferences[DKV_BLOCKS_MAX] = {0};
    uint64_t shares[DKV_BLOCKS_MAX];
    const uint64_t protect = items->plan->sinks + items->plan->recent;
    uint64_t total = 0, most = UINT64_MAX;
    for (uint32_t l = 0; l < n_layers; l++) {
        total += items[l].plan->keep_tokens - protect;
        if (items[l].plan->most_tokens - protect < most)
            most = items[l].plan->most_tokens - protect;
        preferences[l] = preference_of(items[l].params, &layers[l]);
    }
    dkv_cake_shares(preferences, n_layers, total, most, shares);
    for (uint32_t l = 0; l < n_layers; l++)
        layers[l].share = protect + shares[l] > 0 ? protect + shares[l] : 1;
}

enum dkv_status dkv_cu_run_layers(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                  uint32_t index, uint32_t *n_out, struct dkv_error *err)
{
    struct dkv_item *items = &slot->items[index];
    const uint32_t n_layers = items->plan->n_blocks;
    *n_out = 1;
    if (!layers_are_here(items, slot->n_items - index)) {
        items->status = dkv_error_set(&items->error, DKV_E_INTERNAL,
                                      "cuda engine: layers=cake needs all blocks of a request in "
                                      "one batch");
        return DKV_OK;
    }
    *n_out = n_layers;
    enum dkv_status status = measure(engine, slot, index, n_layers, err);
    if (status != DKV_OK || !all_are_well(items, n_layers))
        return status;
    deal_layers(items, n_layers, &engine->layers[index]);
    for (uint32_t l = 0; l < n_layers && status == DKV_OK; l++)
        status = dkv_cu_run_chosen(engine, slot, index + l, engine->layers[index + l].share, err);
    return status;
}
