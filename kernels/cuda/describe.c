/* What a block looks like to the device, and what each of its units takes of each memory. Pure. */
#include "kernels/cuda/host.h"

#include "kernels/policies/random.h"

const struct dkv_page_table *dkv_cu_table_of(const struct dkv_block *block, bool of_values)
{
    if (block->page_tokens == 0)
        return NULL;
    const struct dkv_page_table *table = of_values && block->v_table.entries != NULL
                                             ? &block->v_table
                                             : &block->table;
    return table->entries != NULL ? table : NULL;
}

size_t dkv_cu_table_bytes(const struct dkv_block *block, const struct dkv_page_table *table)
{
    return ((block->n_tokens - 1) / block->page_tokens + 1) * table->entry_bytes;
}

bool dkv_cu_is_uploaded(const struct dkv_view *view, const struct dkv_page_table *table)
{
    return !dkv_cu_on_host(view) && table != NULL && table->place == DKV_PLACE_HOST;
}

/* The largest power of two up to 16 that divides all of them. */
static uint32_t common_align(uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
    const uint64_t bits = a | b | c | d | 16;
    return (uint32_t)(bits & (~bits + 1));
}

static uint32_t log2_exact(uint32_t x)
{
    return x != 0 && (x & (x - 1)) == 0 ? (uint32_t)__builtin_ctz(x) : 0;
}

static struct dkv_cu_rows describe_rows(const struct dkv_block *block, const struct dkv_view *view,
                                        const struct dkv_page_table *table, uint32_t dims,
                                        uint64_t entry_limit)
{
    struct dkv_cu_rows rows = {.dtype = view->dtype, .mask = -1};
    if (dkv_cu_on_host(view)) {
        rows.token_stride = (int64_t)(dims * dkv_dtype_bytes(view->dtype));
        rows.align = common_align((uint64_t)rows.token_stride, 0, 0, 0);
        return rows;
    }
    rows.token_stride = view->token_stride;
    rows.page_stride = block->page_tokens != 0 ? view->page_stride : 0;
    rows.page_tokens = block->page_tokens;
    rows.page_shift = log2_exact(block->page_tokens);
    rows.align = common_align((uint64_t)(uintptr_t)view->base + view->offset,
                              (uint64_t)rows.token_stride, (uint64_t)rows.page_stride,
                              (uint64_t)view->head_stride);
    if (table != NULL) {
        rows.entry_limit = entry_limit;
        rows.mask = table->mask != 0 ? table->mask : -1;
        rows.null_entry = table->null_entry;
        rows.entry_bytes = table->entry_bytes;
        rows.has_null_entry = table->has_null_entry;
    }
    return rows;
}

/* The scale of a view, 0 if its heads have different ones. */
static float one_scale(const struct dkv_view *view, uint32_t heads)
{
    if (!dkv_cu_is_fp8(view->dtype))
        return 1.0f;
    if (view->head_scales == NULL)
        return view->scale != 0 ? view->scale : 1.0f;
    for (uint32_t h = 1; h < heads; h++)
        if (view->head_scales[h] != view->head_scales[0])
            return 0.0f;
    return view->head_scales[0];
}

static void describe_query(const struct dkv_block *block, const struct dkv_plan *plan,
                           struct dkv_cu_block *out)
{
    const struct dkv_view *view = &block->query;
    out->q_dtype = view->dtype;
    out->q_scale = one_scale(view, block->q_heads);
    if (dkv_cu_on_host(view)) {
        out->q_row_stride = (int64_t)(block->head_dim * dkv_dtype_bytes(view->dtype));
        out->q_head_stride = out->q_row_stride * plan->window;
        out->q_align = common_align((uint64_t)out->q_row_stride, 0, 0, 0);
        return;
    }
    out->q_row_stride = view->token_stride;
    out->q_head_stride = view->head_stride;
    out->q_align = common_align((uint64_t)(uintptr_t)view->base + view->offset,
                                (uint64_t)view->token_stride, (uint64_t)view->head_stride, 0);
}

/* The form of a rule in kernels. */
static enum dkv_cu_form form_of(const struct dkv_rule *rule, const struct dkv_params *params)
{
    if (rule->source != DKV_SOURCE_ROWS)
        return DKV_CU_FORM_UNSEEN;
    switch (rule->psi) {
    case DKV_PSI_ONE: return DKV_CU_FORM_P;
    case DKV_PSI_PROJ: return DKV_CU_FORM_PROJ;
    case DKV_PSI_DIST:
        return params->reduce == DKV_REDUCE_EMA_FIRST ? DKV_CU_FORM_AVERAGE : DKV_CU_FORM_DIST;
    default: return DKV_CU_FORM_DROPKV;
    }
}

/* What the block's policy asks for. */
static void describe_rule(const struct dkv_item *item, struct dkv_cu_block *out)
{
    const struct dkv_params *params = item->params;
    const struct dkv_rule *rule = dkv_rule_of(params->policy);
    out->form = form_of(rule, params);
    out->source = rule->source;
    if (rule->source != DKV_SOURCE_ROWS || rule->psi == DKV_PSI_ONE)
        out->v_dim = 0;
    out->reduce = params->reduce;
    out->variance = rule->variance;
    out->metric = item->block->value_metric != NULL;
    out->plain_anchor = params->anchor == DKV_ANCHOR_PLAIN;
    out->gamma = (float)params->gamma;
    out->ema_alpha = (float)params->ema_alpha;
    out->hash = dkv_random_layer(params->seed, (uint64_t)params->layer + item->plan->index);
    out->chosen = item->plan->general;
}

/* Everything but the table pointers. */
void dkv_cu_describe(const struct dkv_item *item, struct dkv_cu_block *out)
{
    const struct dkv_block *block = item->block;
    const struct dkv_params *params = item->params;
    const struct dkv_plan *plan = item->plan;
    *out = (struct dkv_cu_block){
        .k = describe_rows(block, &block->key, dkv_cu_table_of(block, false), block->head_dim,
                           plan->k_entry_limit),
        .v = describe_rows(block, &block->value, dkv_cu_table_of(block, true), plan->v_dim,
                           plan->v_entry_limit),
        .heads = block->kv_heads,
        .group = plan->group,
        .window = plan->window,
        .head_dim = block->head_dim,
        .v_dim = plan->v_dim,
        .n_valid = (uint32_t)plan->n_valid,
        .valid_from = (uint32_t)block->valid_from,
        .scale = (float)plan->scale,
        .softcap = (float)params->logit_softcap,
        .eps = (float)params->eps,
        .p_round = params->p_round == DKV_P_ROUND_INPUT,
        .gqa = params->gqa,
        .nonfinite = params->nonfinite,
        .pool = params->pool,
        .pool_prefix = params->pool_scope == DKV_POOL_SCOPE_PREFIX,
        .kernel = (uint32_t)params->kernel,
        .sinks = (uint32_t)plan->sinks,
        .recent = (uint32_t)plan->recent,
        .keep = (uint32_t)plan->keep_tokens,
    };
    describe_query(block, plan, out);
    describe_rule(item, out);
}

/* Bytes of tensors that the policy reads and that are on the host. */
static void need_tensors(const struct dkv_item *item, const struct dkv_cu_block *desc,
                         struct dkv_cu_need *need)
{
    const struct dkv_block *block = item->block;
    const size_t n = desc->n_valid;
    const size_t query = dkv_cu_align((size_t)desc->q_head_stride * desc->group);
    if (desc->source == DKV_SOURCE_ROWS && dkv_cu_on_host(&block->query))
        *(query > DKV_CU_SMALL_QUERY ? &need->staged : &need->io_up) += query;
    if (dkv_cu_reads_keys(desc) && dkv_cu_on_host(&block->key))
        need->staged += dkv_cu_align((size_t)desc->k.token_stride * n);
    if (desc->v_dim > 0 && dkv_cu_on_host(&block->value))
        need->staged += dkv_cu_align((size_t)desc->v.token_stride * n);
    if (block->value_metric != NULL)
        need->staged += dkv_cu_align((size_t)desc->group * desc->v_dim * desc->v_dim *
                                     sizeof(float));
    if (block->external_scores != NULL)
        need->staged += dkv_cu_align(n * sizeof(float));
}

struct dkv_cu_need dkv_cu_need_of(const struct dkv_cu_engine *engine, const struct dkv_item *item,
                                  const struct dkv_cu_block *desc,
                                  const struct dkv_cu_scorer *scorer)
{
    const struct dkv_block *block = item->block;
    const size_t n = desc->n_valid;
    struct dkv_cu_need need = {
        .scratch = dkv_cu_align(dkv_cu_work_bytes(scorer, desc)),
        .io_up = sizeof(struct dkv_cu_unit) + sizeof(struct dkv_cu_report) +
                 dkv_cu_align(2 * desc->group * sizeof(float)) + 1024,
    };
    if (!desc->chosen || desc->spread) { /* the others' are their choice's */
        if (!dkv_cu_scores_in_work(scorer, desc))
            need.scratch += dkv_cu_align(n * sizeof(float));
        if (desc->nonfinite == DKV_NONFINITE_MASK)
            need.scratch += dkv_cu_align((n + 31) / 32 * sizeof(unsigned));
    }
    if (!desc->chosen) {
        need.io_down = dkv_cu_align(desc->keep * sizeof(int32_t));
        if (dkv_cu_select_needs_keys(&engine->device, desc->n_valid))
            need.scratch += dkv_cu_align((n + 4) * sizeof(uint32_t));
        if (item->scores_out != NULL)
            need.io_down += dkv_cu_align(n * sizeof(float));
    }
    need_tensors(item, desc, &need);
    for (int side = 0; side < 2; side++) {
        const struct dkv_page_table *table = dkv_cu_table_of(block, side == 1);
        const struct dkv_view *view = side == 1 ? &block->value : &block->key;
        if (table == NULL || dkv_cu_on_host(view))
            continue;
        const size_t bytes = dkv_cu_align(dkv_cu_table_bytes(block, table));
        if (!dkv_cu_is_uploaded(view, table))
            need.scratch += bytes; /* if it is not aligned */
        else if (bytes <= DKV_CU_SMALL_TABLE)
            need.io_up += bytes;
        else
            need.staged += bytes;
    }
    return need;
}

struct dkv_cu_need dkv_cu_choice_need_of(const struct dkv_item *item)
{
    const struct dkv_block *block = item->block;
    const size_t heads = block->kv_heads, n = item->plan->n_valid, stride = (n + 3) & ~(size_t)3;
    const bool chunks = item->params->granularity > 1;
    struct dkv_cu_need need = {
        .scratch = dkv_cu_align(heads * stride * sizeof(float)) + dkv_cu_align(heads * stride) +
                   dkv_cu_align(heads * sizeof(int)) +
                   dkv_cu_align(DKV_CU_CHOICE_BINS * sizeof(unsigned)),
        .io_up = sizeof(struct dkv_cu_choice) + dkv_cu_align(heads * sizeof(uint32_t)),
        .io_down = dkv_cu_align(heads * sizeof(uint32_t)) +
                   dkv_cu_align(item->plan->keep_capacity * sizeof(int32_t)),
    };
    if (chunks || item->params->pool != DKV_POOL_NONE)
        need.scratch += dkv_cu_align(heads * stride * sizeof(float));
    if (chunks)
        need.scratch += dkv_cu_align(heads * stride * sizeof(float)) + dkv_cu_align(heads * stride);
    if (item->params->nonfinite == DKV_NONFINITE_MASK)
        need.scratch += dkv_cu_align(heads * ((n + 31) / 32) * sizeof(unsigned));
    if (item->scores_out != NULL)
        need.io_down += dkv_cu_align(heads * n * sizeof(float));
    if (block->token_weight != NULL)
        need.staged += dkv_cu_align(heads * n * sizeof(float));
    if (block->carry_in != NULL)
        need.staged += dkv_cu_align(heads * n * sizeof(float));
    return need;
}
