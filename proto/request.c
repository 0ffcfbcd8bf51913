/* The single gate. Budgets are worked out in request_budget.c.
 *
 * It reads a request top down (parameters, then each block's shape, types, views and budget) and
 * stops at the first thing it cannot accept. What it learns on the way goes into the plan, so that
 * nobody behind it divides, clamps or multiplies client numbers again. Two rules keep it honest:
 * sizes are only ever combined by checked arithmetic, and nothing is written to the caller's plans
 * until the last block has passed.
 */
#include "proto/request.h"

#include "proto/policy.h"
#include "proto/request_budget.h"

#include <math.h>
#include <string.h>

/* ---- Views ---------------------------------------------------------------------------------- */

/* What a view is asked to hold. */
struct extent {
    const char *name; /* "query", "key", "value" */
    uint64_t heads;
    uint64_t tokens;
    uint64_t dim;
    uint64_t page_tokens;               /* 0: not paged */
    const struct dkv_page_table *table; /* NULL: not paged */
};

static enum dkv_status check_scale(const struct dkv_view *view, const struct extent *want,
                                   struct dkv_error *err)
{
    const bool fp8 = view->dtype == DKV_F8_E4M3 || view->dtype == DKV_F8_E5M2;

    if (!fp8) {
        if (view->head_scales != NULL || !(view->scale == 0 || view->scale == 1))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "%s: a scale is for F8_E4M3 and F8_E5M2, not %s", want->name,
                                 dkv_dtype_name(view->dtype));
        return DKV_OK;
    }
    if (view->head_scales == NULL) {
        if (view->scale == 0 || (isfinite(view->scale) && view->scale > 0))
            return DKV_OK;
        return dkv_error_set(err, DKV_E_INVALID, "%s: scale %g is not finite and above 0",
                             want->name, (double)view->scale);
    }
    for (uint64_t h = 0; h < want->heads; h++) {
        const float scale = view->head_scales[h];
        if (!isfinite(scale) || !(scale > 0))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "%s: scale %g of head %llu is not finite and above 0", want->name,
                                 (double)scale, (unsigned long long)h);
    }
    return DKV_OK;
}

static enum dkv_status check_place(const char *name, enum dkv_place place, struct dkv_error *err)
{
    if (place == DKV_PLACE_HOST || place == DKV_PLACE_DEVICE)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID, "%s: place %d is neither 0 (host) nor 1 (device)",
                         name, (int)place);
}

static enum dkv_status check_strides(const struct dkv_view *view, const struct extent *want,
                                     struct dkv_error *err)
{
    const struct {
        const char *name;
        int64_t value;
    } strides[] = {
        {"head_stride", view->head_stride},
        {"token_stride", view->token_stride},
        {"page_stride", want->page_tokens != 0 ? view->page_stride : 0},
    };

    for (size_t i = 0; i < sizeof(strides) / sizeof(strides[0]); i++)
        if (strides[i].value < 0)
            return dkv_error_set(err, DKV_E_INVALID, "%s: %s %lld is negative", want->name,
                                 strides[i].name, (long long)strides[i].value);
    return DKV_OK;
}

/* *end += count * stride */
static bool advance(uint64_t *end, uint64_t count, int64_t stride)
{
    uint64_t step;
    return dkv_mul_u64(count, (uint64_t)stride, &step) && dkv_add_u64(*end, step, end);
}

/* Bytes from the start of the memory to the end of the last row that `tokens` tokens of page
 * `entry` reach; false on overflow. */
static bool end_of_tokens(const struct dkv_view *view, const struct extent *want, uint64_t entry,
                          uint64_t tokens, uint64_t *end_out)
{
    *end_out = view->offset;
    return advance(end_out, entry, want->page_tokens != 0 ? view->page_stride : 0) &&
           advance(end_out, tokens - 1, view->token_stride) &&
           advance(end_out, want->heads - 1, view->head_stride) &&
           advance(end_out, want->dim, (int64_t)dkv_dtype_bytes(view->dtype));
}

static enum dkv_status does_not_fit(const struct dkv_view *view, const struct extent *want,
                                    const char *what, bool counted, uint64_t end,
                                    struct dkv_error *err)
{
    if (!counted)
        return dkv_error_set(err, DKV_E_INVALID, "%s: offset and strides of %s overflow 64 bits",
                             want->name, what);
    return dkv_error_set(err, DKV_E_INVALID, "%s: %s ends at byte %llu, outside its 0..%llu bytes",
                         want->name, what, (unsigned long long)end,
                         (unsigned long long)view->bytes);
}

static uint64_t entries_needed(const struct extent *want)
{
    return (want->tokens - 1) / want->page_tokens + 1;
}

/* Without a table the pages are known here: all but the last are full, the last holds the rest. */
static enum dkv_status check_dense_fit(const struct dkv_view *view, const struct extent *want,
                                       uint64_t *entry_limit_out, struct dkv_error *err)
{
    const uint64_t page = want->page_tokens != 0 ? want->page_tokens : want->tokens;
    const uint64_t last = (want->tokens - 1) / page;
    uint64_t end = 0;
    bool counted = end_of_tokens(view, want, last, want->tokens - last * page, &end);

    if (counted && end <= view->bytes && last > 0)
        counted = end_of_tokens(view, want, last - 1, page, &end);
    if (!counted || end > view->bytes)
        return does_not_fit(view, want, "the last token", counted, end, err);
    *entry_limit_out = last + 1;
    return DKV_OK;
}

/* With a table any entry may be any page, so a whole page must fit wherever an entry points: how
 * far that is becomes the limit that the engine holds each entry against. */
static enum dkv_status check_table_fit(const struct dkv_view *view, const struct extent *want,
                                       uint64_t *entry_limit_out, struct dkv_error *err)
{
    uint64_t end = 0;
    const bool counted = end_of_tokens(view, want, 0, min_u64(want->page_tokens, want->tokens),
                                       &end);

    if (!counted || end > view->bytes)
        return does_not_fit(view, want, "page 0", counted, end, err);
    *entry_limit_out = view->page_stride == 0
                           ? UINT64_MAX
                           : (view->bytes - end) / (uint64_t)view->page_stride + 1;
    return DKV_OK;
}

static enum dkv_status check_table(const struct extent *want, struct dkv_error *err)
{
    const struct dkv_page_table *table = want->table;
    const uint64_t needed = entries_needed(want);
    uint64_t bytes;

    if (table->entry_bytes != 4 && table->entry_bytes != 8)
        return dkv_error_set(err, DKV_E_INVALID, "%s: page table entry_bytes %u is neither 4 nor 8",
                             want->name, table->entry_bytes);
    if (table->n_entries < needed)
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: page table n_entries %llu is below the %llu of %llu tokens",
                             want->name, (unsigned long long)table->n_entries,
                             (unsigned long long)needed, (unsigned long long)want->tokens);
    if (!dkv_mul_u64(table->n_entries, table->entry_bytes, &bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: page table n_entries %llu overflows 64 bits of bytes", want->name,
                             (unsigned long long)table->n_entries);
    return check_place("page table", table->place, err);
}

static enum dkv_status check_view(const struct dkv_view *view, const struct extent *want,
                                  uint64_t *entry_limit_out, struct dkv_error *err)
{
    enum dkv_status status;

    if (view->base == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "%s: no memory given", want->name);
    if ((status = check_place(want->name, view->place, err)) != DKV_OK ||
        (status = check_scale(view, want, err)) != DKV_OK ||
        (status = check_strides(view, want, err)) != DKV_OK)
        return status;
    if (want->page_tokens == 0 || want->table->entries == NULL)
        return check_dense_fit(view, want, entry_limit_out, err);
    status = check_table(want, err);
    return status == DKV_OK ? check_table_fit(view, want, entry_limit_out, err) : status;
}

static enum dkv_status check_views(const struct dkv_block *block, struct dkv_plan *plan,
                                   struct dkv_error *err)
{
    const struct extent query = {
        .name = "query", .heads = block->q_heads, .tokens = block->q_rows, .dim = block->head_dim};
    const struct extent key = {.name = "key",
                               .heads = block->kv_heads,
                               .tokens = block->n_tokens,
                               .dim = block->head_dim,
                               .page_tokens = block->page_tokens,
                               .table = &block->table};
    const struct extent value = {.name = "value",
                                 .heads = block->kv_heads,
                                 .tokens = block->n_tokens,
                                 .dim = plan->v_dim,
                                 .page_tokens = block->page_tokens,
                                 .table = block->v_table.entries != NULL ? &block->v_table
                                                                         : &block->table};
    uint64_t unused;
    enum dkv_status status;

    if (block->page_tokens > DKV_PAGE_TOKENS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "page_tokens: %u is outside 0..%u",
                             block->page_tokens, DKV_PAGE_TOKENS_MAX);
    if ((status = check_view(&block->query, &query, &unused, err)) != DKV_OK ||
        (status = check_view(&block->key, &key, &plan->k_entry_limit, err)) != DKV_OK)
        return status;
    return check_view(&block->value, &value, &plan->v_entry_limit, err);
}

/* ---- Shape and types ------------------------------------------------------------------------ */

static enum dkv_status check_count(const char *name, uint64_t value, uint64_t lo, uint64_t hi,
                                   struct dkv_error *err)
{
    if (value >= lo && value <= hi)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID, "%s: %llu is outside %llu..%llu", name,
                         (unsigned long long)value, (unsigned long long)lo, (unsigned long long)hi);
}

static enum dkv_status check_dim(const char *name, uint32_t dim, struct dkv_error *err)
{
    if (dim == 0)
        return dkv_error_set(err, DKV_E_INVALID, "%s: 0 is outside 8..%u", name, DKV_HEAD_DIM_MAX);
    if (dim % 8 == 0 && dim <= DKV_HEAD_DIM_MAX)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_UNSUPPORTED, "%s: %u is not a multiple of 8 in 8..%u", name,
                         dim, DKV_HEAD_DIM_MAX);
}

static enum dkv_status check_shape(const struct dkv_block *block, struct dkv_plan *plan,
                                   struct dkv_error *err)
{
    enum dkv_status status;

    if ((status = check_count("q_heads", block->q_heads, 1, DKV_HEADS_MAX, err)) != DKV_OK ||
        (status = check_count("kv_heads", block->kv_heads, 1, block->q_heads, err)) != DKV_OK)
        return status;
    if (block->q_heads % block->kv_heads != 0)
        return dkv_error_set(err, DKV_E_INVALID, "q_heads: %u is not a multiple of kv_heads %u",
                             block->q_heads, block->kv_heads);
    plan->group = block->q_heads / block->kv_heads;
    plan->v_dim = block->v_dim != 0 ? block->v_dim : block->head_dim;
    if ((status = check_dim("head_dim", block->head_dim, err)) != DKV_OK ||
        (status = check_dim("v_dim", plan->v_dim, err)) != DKV_OK ||
        (status = check_count("n_tokens", block->n_tokens, 1, DKV_TOKENS_MAX, err)) != DKV_OK ||
        (status = check_count("q_rows", block->q_rows, 1, DKV_TOKENS_MAX, err)) != DKV_OK)
        return status;
    plan->n_valid = block->n_tokens - min_u64(block->valid_from, block->n_tokens);
    return check_count("valid_from", block->valid_from, 0, block->n_tokens - 1, err);
}

static enum dkv_status check_dtype(const char *name, enum dkv_dtype dtype, struct dkv_error *err)
{
    if (dkv_dtype_bytes(dtype) != 0)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_UNSUPPORTED,
                         "%s: dtype %d is none of BF16, FP16, FP32, F8_E4M3, F8_E5M2", name,
                         (int)dtype);
}

static enum dkv_status check_dtypes(const struct dkv_block *block, const struct dkv_params *params,
                                    struct dkv_error *err)
{
    const enum dkv_dtype query = block->query.dtype;
    enum dkv_status status;

    if ((status = check_dtype("query", query, err)) != DKV_OK ||
        (status = check_dtype("key", block->key.dtype, err)) != DKV_OK ||
        (status = check_dtype("value", block->value.dtype, err)) != DKV_OK)
        return status;
    if (block->key.dtype != block->value.dtype)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "value: dtype %s differs from the keys' %s",
                             dkv_dtype_name(block->value.dtype), dkv_dtype_name(block->key.dtype));
    if (params->p_round == DKV_P_ROUND_INPUT && (query == DKV_F8_E4M3 || query == DKV_F8_E5M2))
        return dkv_error_set(
            err, DKV_E_UNSUPPORTED,
            "p_round: input is not possible with %s queries, only BF16, FP16, FP32",
            dkv_dtype_name(query));
    return DKV_OK;
}

static enum dkv_status check_sink_logits(const struct dkv_block *block, struct dkv_error *err)
{
    if (block->sink_logits == NULL)
        return DKV_OK;
    for (uint32_t h = 0; h < block->q_heads; h++)
        if (!isfinite(block->sink_logits[h]))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "sink_logits: %g of query head %u is not finite",
                                 (double)block->sink_logits[h], h);
    return DKV_OK;
}

/* ---- The policy's optional tensors ----------------------------------------------------------- */

static enum dkv_status check_extras(const struct dkv_block *block, const struct dkv_params *params,
                                    struct dkv_error *err)
{
    const struct dkv_policy_info *policy = dkv_policy_info(params->policy);
    const struct {
        const char *name;
        const float *given;
        unsigned bit;
    } extras[] = {
        {"token_weight", block->token_weight, DKV_EXTRA_TOKEN_WEIGHT},
        {"carry_in", block->carry_in, DKV_EXTRA_CARRY_IN},
        {"external_scores", block->external_scores, DKV_EXTRA_EXTERNAL},
        {"value_metric", block->value_metric, DKV_EXTRA_VALUE_METRIC},
    };

    for (size_t i = 0; i < sizeof(extras) / sizeof(extras[0]); i++)
        if (extras[i].given != NULL && !(policy->extras & extras[i].bit))
            return dkv_error_set(err, DKV_E_INVALID, "%s: policy %s does not take it",
                                 extras[i].name, policy->name);
    if ((policy->extras & DKV_EXTRA_EXTERNAL) && block->external_scores == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "external_scores: policy %s needs them",
                             policy->name);
    if (block->carry_in != NULL && params->reduce == DKV_REDUCE_MEAN_SEEN)
        return dkv_error_set(err, DKV_E_INVALID,
                             "carry_in: a sum goes on, reduce=mean_seen does not");
    return DKV_OK;
}

/* ---- Window ---------------------------------------------------------------------- */

static enum dkv_status plan_window(const struct dkv_block *block, const struct dkv_params *params,
                                   struct dkv_plan *plan, struct dkv_error *err)
{
    const bool all = params->window == 0;
    const uint64_t rows = all ? block->q_rows : min_u64((uint64_t)params->window, block->q_rows);
    const uint64_t most = all ? DKV_ALL_ROWS_MAX : DKV_ROWS_MAX;

    if (plan->group * rows > most)
        return dkv_error_set(err, DKV_E_INVALID,
                             "window: %llu rows of %u query heads per KV head are outside 1..%llu",
                             (unsigned long long)rows, plan->group, (unsigned long long)most);
    plan->window = (uint32_t)min_u64(rows, plan->n_valid);
    plan->first_row = block->q_rows - plan->window;
    plan->scale = dkv_params_has(params, DKV_PARAM_SCALE) ? params->scale
                                                          : 1 / sqrt((double)block->head_dim);
    return DKV_OK;
}

/* A KV head's scores, none below 0, are all that dkv_select() looks at. */
static bool needs_general(const struct dkv_block *block, const struct dkv_params *params)
{
    return dkv_policy_info(params->policy)->any_sign || params->gqa == DKV_GQA_LAYER ||
           params->policy == DKV_POLICY_CRITICALKV || params->policy == DKV_POLICY_STREAMING ||
           params->policy == DKV_POLICY_RANDOM || block->carry_in != NULL ||
           block->value_metric != NULL || params->heads != DKV_HEADS_UNIFORM ||
           params->granularity > 1 || params->layers == DKV_LAYERS_CAKE ||
           params->per_head[0] != '\0';
}

/* ---- The gate ------------------------------------------------------------------------------- */

static enum dkv_status judge_block(const struct dkv_request *request, uint32_t index,
                                   struct dkv_plan *plan, struct dkv_error *err)
{
    const struct dkv_block *block = &request->blocks[index];
    const struct dkv_params *params = &request->params;
    enum dkv_status status;

    memset(plan, 0, sizeof(*plan));
    plan->index = index;
    plan->n_blocks = request->n_blocks;
    if ((status = check_shape(block, plan, err)) != DKV_OK ||
        (status = check_dtypes(block, params, err)) != DKV_OK ||
        (status = check_sink_logits(block, err)) != DKV_OK ||
        (status = check_extras(block, params, err)) != DKV_OK ||
        (status = check_views(block, plan, err)) != DKV_OK ||
        (status = plan_window(block, params, plan, err)) != DKV_OK)
        return status;
    plan->general = needs_general(block, params);
    return dkv_plan_budget(block, params, plan, err);
}

/* layers=cake deals one total to all blocks, so what is dealt of and what is protected is the same
 * in each. */
static enum dkv_status check_alike(const struct dkv_params *params, const struct dkv_plan *plan,
                                   const struct dkv_plan *first, struct dkv_error *err)
{
    if (params->layers != DKV_LAYERS_CAKE ||
        (plan->n_valid == first->n_valid && plan->keep_tokens == first->keep_tokens &&
         plan->sinks == first->sinks && plan->recent == first->recent))
        return DKV_OK;
    return dkv_error_set(
        err, DKV_E_INVALID,
        "layers: cake needs blocks alike: %llu tokens, %llu protected, %llu to "
        "keep, block 0 has %llu, %llu, %llu",
        (unsigned long long)plan->n_valid, (unsigned long long)(plan->sinks + plan->recent),
        (unsigned long long)plan->keep_tokens, (unsigned long long)first->n_valid,
        (unsigned long long)(first->sinks + first->recent), (unsigned long long)first->keep_tokens);
}

enum dkv_status dkv_request_validate(const struct dkv_request *request, struct dkv_plan *plans_out,
                                     struct dkv_error *err)
{
    struct dkv_error why;
    struct dkv_plan plan, first;
    enum dkv_status status = dkv_params_check(&request->params, err);

    if (status == DKV_OK)
        status = check_count("n_blocks", request->n_blocks, 1, DKV_BLOCKS_MAX, err);
    if (status != DKV_OK)
        return status;
    for (uint32_t i = 0; i < request->n_blocks; i++) {
        status = judge_block(request, i, &plan, &why);
        if (i == 0)
            first = plan;
        if (status == DKV_OK)
            status = check_alike(&request->params, &plan, &first, &why);
        if (status != DKV_OK && request->n_blocks > 1)
            return dkv_error_set(err, status, "block %u: %s", i, why.text);
        if (status != DKV_OK)
            return dkv_error_set(err, status, "%s", why.text);
    }
    for (uint32_t i = 0; i < request->n_blocks; i++)
        (void)judge_block(request, i, &plans_out[i], NULL);
    return DKV_OK;
}
