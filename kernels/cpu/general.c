/* From scored heads to an answer: carry, layer mean, selection, reported scores. */
#include "kernels/cpu/general.h"

#include "kernels/extras.h"

#include <string.h>

size_t dkv_general_bytes(const struct dkv_item *item)
{
    return dkv_choice_bytes(item->block->kv_heads, item->plan->n_valid,
                            item->params->granularity > 1);
}

void dkv_general_place(struct dkv_choice_work *work, const struct dkv_item *item, void *memory)
{
    dkv_choice_place(work, item->block->kv_heads, item->plan->n_valid,
                     item->params->granularity > 1, memory);
}

void dkv_general_take(const struct dkv_choice_work *work, const struct dkv_head *head)
{
    dkv_head_scores(head, work->raw + head->index * head->n);
    if (head->flags != NULL)
        memcpy(work->flags + head->index * head->n, head->flags, head->n);
    else
        memset(work->flags + head->index * head->n, 0, head->n);
}

unsigned dkv_general_score(const struct dkv_choice_work *work, const struct dkv_head *head,
                           const struct dkv_tile *tile)
{
    memset(head->flags, 0, head->n);
    return dkv_head_score_unseen(head, tile, work->raw + head->index * head->n, head->flags);
}

/* Earlier calls' scores: sums go on, maxima too. */
static void add_carry(const struct dkv_choice_work *work, const struct dkv_item *item)
{
    const struct dkv_block *block = item->block;
    const uint64_t n = item->plan->n_valid;
    const bool largest = item->params->reduce == DKV_REDUCE_MAX;
    for (uint32_t h = 0; block->carry_in != NULL && h < block->kv_heads; h++)
        for (uint64_t j = 0; j < n; j++) {
            double *raw = &work->raw[h * n + j];
            const double carry =
                (double)block->carry_in[h * block->n_tokens + block->valid_from + j];
            if (!largest)
                *raw += carry;
            else if (carry > *raw)
                *raw = carry;
        }
}

/* gqa=layer: the mean over heads in the place of each, and a token is lowest if it is in any. */
static void average_heads(const struct dkv_choice_work *work, const struct dkv_item *item)
{
    const uint64_t n = item->plan->n_valid;
    const uint32_t heads = item->block->kv_heads;
    for (uint64_t j = 0; j < n; j++) {
        double sum = 0.0;
        uint8_t flags = 0;
        for (uint32_t h = 0; h < heads; h++) {
            sum += work->raw[h * n + j];
            flags |= work->flags[h * n + j];
        }
        for (uint32_t h = 0; h < heads; h++) {
            work->raw[h * n + j] = sum / heads;
            work->flags[h * n + j] = flags;
        }
    }
}

static void report(const struct dkv_choice_work *work, const struct dkv_item *item)
{
    const struct dkv_block *block = item->block;
    const uint64_t n = item->plan->n_valid;
    for (uint32_t h = 0; item->scores_out != NULL && h < block->kv_heads; h++) {
        float *scores = item->scores_out + h * block->n_tokens;
        memset(scores, 0, sizeof(*scores) * block->valid_from);
        for (uint64_t j = 0; j < n; j++)
            scores[block->valid_from + j] = (float)work->raw[h * n + j];
    }
}

enum dkv_status dkv_general_settle(const struct dkv_choice_work *work, struct dkv_item *item,
                                   struct dkv_error *err)
{
    const enum dkv_status status = dkv_extras_check_factors(item->block, err);
    if (status != DKV_OK)
        return status;
    add_carry(work, item);
    if (item->params->gqa == DKV_GQA_LAYER)
        average_heads(work, item);
    return DKV_OK;
}

#define EACH_MAX (DKV_LIST_TEXT_MAX / 2 + 1) /* numbers of a list */

static void on_crew(void *crew, dkv_choice_task_fn task, void *context, size_t n)
{
    dkv_threads_run(crew, task, context, n);
}

void dkv_general_choose(const struct dkv_choice_work *work, struct dkv_item *item,
                        uint64_t keep_tokens, struct dkv_threads *crew)
{
    const struct dkv_block *block = item->block;
    const struct dkv_params *params = item->params;
    uint64_t each[EACH_MAX];
    struct dkv_choice choice = {
        .heads = block->kv_heads,
        .spec = dkv_select_spec_of(block, params, item->plan),
        .mode = params->heads,
        .alpha = params->alpha,
        .min_keep = (uint64_t)params->min_keep,
        .chunk = (uint64_t)params->granularity,
        .any_sign = dkv_policy_info(params->policy)->any_sign,
        .one_set = params->gqa == DKV_GQA_LAYER,
        .two_stages = dkv_rule_of(params->policy)->two_stages,
        .weight = block->token_weight != NULL ? block->token_weight + block->valid_from : NULL,
        .weight_stride = block->n_tokens,
        .run = on_crew,
        .crew = crew,
    };
    choice.spec.keep = keep_tokens;
    if (params->per_head[0] != '\0') {
        for (uint32_t h = 0; h < block->kv_heads; h++)
            each[h] = dkv_plan_head_tokens(block, params, item->plan, h);
        choice.each = each;
    }
    dkv_choose(&choice, work, item->keep_out, item->counts_out);
    report(work, item);
}
