/* Puts a unit's inputs where the device reads them: in place, in the uploaded part of io (queries,
 * short page tables, numbers per head), or staged. Room was checked before (dkv_cu_need_of). */
#include <string.h>

#include "kernels/cuda/host.h"

void *dkv_cu_stage_take(struct dkv_cu_engine *engine, size_t bytes)
{
    struct dkv_cu_half *half = &engine->halves[engine->half];
    void *at = dkv_cu_take(&half->arena, bytes);
    half->dirty = true;
    engine->builder->staged_bytes += bytes;
    return at;
}

static enum dkv_status place_table(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                   struct dkv_item *item, bool of_values, struct dkv_cu_rows *rows,
                                   struct dkv_error *err)
{
    const struct dkv_block *block = item->block;
    const struct dkv_page_table *table = dkv_cu_table_of(block, of_values);
    const struct dkv_view *view = of_values ? &block->value : &block->key;
    if (table == NULL || dkv_cu_on_host(view))
        return DKV_OK;
    const size_t bytes = dkv_cu_table_bytes(block, table);
    if (dkv_cu_is_uploaded(view, table) && bytes <= DKV_CU_SMALL_TABLE) {
        void *copy = dkv_cu_take(&slot->io, bytes);
        memcpy(copy, table->entries, bytes);
        rows->table = dkv_cu_twin(slot, copy);
        return DKV_OK;
    }
    if (dkv_cu_is_uploaded(view, table)) {
        void *copy = dkv_cu_stage_take(engine, bytes);
        rows->table = copy;
        return dkv_cu_stage_bytes(engine, item, table->entries, bytes, copy, err);
    }
    rows->table = table->entries;
    if ((uintptr_t)table->entries % table->entry_bytes == 0)
        return DKV_OK;
    void *copy = dkv_cu_take(&engine->scratch, bytes);
    rows->table = copy;
    return dkv_cu_check(
        engine,
        cudaMemcpyAsync(copy, table->entries, bytes, cudaMemcpyDeviceToDevice, engine->stream),
        "copying a page table", err);
}

enum dkv_status dkv_cu_add_block(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 struct dkv_item *item, const struct dkv_cu_block *desc,
                                 unsigned char scorer, struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_cu_block *block = &b->blocks[b->n_blocks];
    *block = *desc;
    b->scorer[b->n_blocks] = scorer;
    b->n_blocks++;
    enum dkv_status status = place_table(engine, slot, item, false, &block->k, err);
    if (status == DKV_OK)
        status = place_table(engine, slot, item, true, &block->v, err);
    return status;
}

/* The rows of one head of keys or values: in place, or staged. */
static enum dkv_status place_rows(struct dkv_cu_engine *engine, struct dkv_item *item,
                                  bool of_values, const struct dkv_cu_rows *rows, uint32_t head,
                                  const unsigned char **out, struct dkv_error *err)
{
    const struct dkv_block *block = item->block;
    const struct dkv_view *view = of_values ? &block->value : &block->key;
    if (!dkv_cu_on_host(view)) {
        *out = (const unsigned char *)view->base + view->offset +
               (uint64_t)head * (uint64_t)view->head_stride;
        return DKV_OK;
    }
    const struct dkv_cu_source source = {
        .view = view,
        .table = dkv_cu_table_of(block, of_values),
        .name = of_values ? "value" : "key",
        .page_tokens = block->page_tokens,
        .dims = of_values ? item->plan->v_dim : block->head_dim,
        .entry_limit = of_values ? item->plan->v_entry_limit : item->plan->k_entry_limit,
        .first_token = block->valid_from,
        .n_tokens = block->n_tokens,
    };
    unsigned char *to = dkv_cu_stage_take(engine, (size_t)rows->token_stride * item->plan->n_valid);
    *out = to - block->valid_from * (uint64_t)rows->token_stride;
    return dkv_cu_stage_head(engine, item, &source, head, to, err);
}

/* A unit's many query rows, staged like tensors. */
static enum dkv_status stage_query(struct dkv_cu_engine *engine, struct dkv_item *item,
                                   const struct dkv_cu_block *desc, uint32_t head,
                                   const unsigned char **out, struct dkv_error *err)
{
    const struct dkv_cu_source source = {
        .view = &item->block->query,
        .name = "query",
        .dims = item->block->head_dim,
        .first_token = item->plan->first_row,
        .n_tokens = item->plan->first_row + desc->window,
    };
    unsigned char *to = dkv_cu_stage_take(engine, (size_t)desc->q_head_stride * desc->group);
    enum dkv_status status = DKV_OK;
    *out = to;
    for (uint32_t g = 0; g < desc->group && status == DKV_OK; g++, to += desc->q_head_stride)
        status = dkv_cu_stage_head(engine, item, &source, head * desc->group + g, to, err);
    return status;
}

static enum dkv_status place_query(struct dkv_cu_engine *engine, struct dkv_item *item,
                                   const struct dkv_cu_block *desc, struct dkv_cu_slot *slot,
                                   uint32_t head, struct dkv_cu_unit *unit, struct dkv_error *err)
{
    const struct dkv_view *view = &item->block->query;
    const size_t bytes = (size_t)desc->q_head_stride * desc->group;
    const unsigned char *from = (const unsigned char *)view->base + view->offset +
                                (uint64_t)head * desc->group * (uint64_t)view->head_stride +
                                item->plan->first_row * (uint64_t)view->token_stride;
    unit->q = from;
    if (desc->source != DKV_SOURCE_ROWS || !dkv_cu_on_host(view))
        return DKV_OK;
    if (dkv_cu_align(bytes) > DKV_CU_SMALL_QUERY)
        return stage_query(engine, item, desc, head, &unit->q, err);
    const size_t row_bytes = (size_t)desc->q_row_stride;
    unsigned char *to = dkv_cu_take(&slot->io, bytes);
    unit->q = dkv_cu_twin(slot, to);
    for (uint32_t g = 0; g < desc->group; g++)
        for (uint32_t t = 0; t < desc->window; t++, to += row_bytes)
            memcpy(to, from + g * (uint64_t)view->head_stride + t * (uint64_t)view->token_stride,
                   row_bytes);
    return DKV_OK;
}

/* What the policy takes beside the tensors, of one head. */
static enum dkv_status place_extras(struct dkv_cu_engine *engine, struct dkv_item *item,
                                    const struct dkv_cu_block *desc, uint32_t head,
                                    struct dkv_cu_unit *unit, struct dkv_error *err)
{
    const struct dkv_block *block = item->block;
    enum dkv_status status = DKV_OK;
    if (block->value_metric != NULL) {
        const size_t floats = (size_t)desc->group * desc->v_dim * desc->v_dim;
        float *to = dkv_cu_stage_take(engine, floats * sizeof(*to));
        unit->metric = to;
        status = dkv_cu_stage_bytes(engine, item, block->value_metric + head * floats,
                                    floats * sizeof(*to), to, err);
    }
    if (block->external_scores != NULL && status == DKV_OK) {
        float *to = dkv_cu_stage_take(engine, desc->n_valid * sizeof(*to));
        unit->given = to;
        status = dkv_cu_stage_bytes(
            engine, item, block->external_scores + head * block->n_tokens + block->valid_from,
            desc->n_valid * sizeof(*to), to, err);
    }
    return status;
}

/* Per query head numbers of the unit's group: scales of fp8 queries, sink logits. */
static void place_head_numbers(const struct dkv_item *item, const struct dkv_cu_block *desc,
                               struct dkv_cu_slot *slot, uint32_t head, struct dkv_cu_unit *unit)
{
    const struct dkv_view *query = &item->block->query;
    const uint32_t first = head * desc->group;
    const bool scaled = dkv_cu_is_fp8(query->dtype);
    if (!scaled && item->block->sink_logits == NULL)
        return;
    float *to = dkv_cu_take(&slot->io, 2 * desc->group * sizeof(float));
    for (uint32_t g = 0; g < desc->group && scaled; g++)
        to[g] = query->head_scales != NULL ? query->head_scales[first + g]
                : query->scale != 0        ? query->scale
                                           : 1.0f;
    unit->q_scales = scaled ? dkv_cu_twin(slot, to) : NULL;
    to += desc->group;
    if (item->block->sink_logits != NULL) {
        memcpy(to, item->block->sink_logits + first, desc->group * sizeof(float));
        unit->sink_logits = dkv_cu_twin(slot, to);
    }
}

static float scale_of(const struct dkv_view *view, uint32_t head)
{
    if (!dkv_cu_is_fp8(view->dtype))
        return 1.0f;
    return view->head_scales != NULL ? view->head_scales[head]
           : view->scale != 0        ? view->scale
                                     : 1.0f;
}

/* Scores and what selection needs: the unit's own. A chosen block that is only measured has no
 * choice, and no selection either. */
static void take_outputs(struct dkv_cu_engine *engine, const struct dkv_cu_scorer *scorer,
                         const struct dkv_cu_block *desc, struct dkv_cu_unit *unit)
{
    const size_t n = desc->n_valid;
    unit->scores = dkv_cu_scores_in_work(scorer, desc)
                       ? (float *)(unit->work + scorer->scores_at(desc))
                       : dkv_cu_take(&engine->scratch, n * sizeof(float));
    if (!desc->chosen && dkv_cu_select_needs_keys(&engine->device, desc->n_valid))
        unit->keys = dkv_cu_take(&engine->scratch, (n + 4) * sizeof(uint32_t));
    if (desc->nonfinite == DKV_NONFINITE_MASK)
        unit->mask = dkv_cu_take(&engine->scratch, (n + 31) / 32 * sizeof(unsigned));
}

/* The same, of the choice's. */
static void take_from_choice(const struct dkv_cu_choice *choice, uint32_t head,
                             struct dkv_cu_unit *unit)
{
    unit->scores = choice->raw + (size_t)head * choice->stride;
    unit->exponent = (int *)(uintptr_t)choice->exponents + head;
    if (choice->mask != NULL)
        unit->mask = choice->mask + (size_t)head * choice->mask_words;
}

enum dkv_status dkv_cu_add_unit(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                uint32_t item_index, uint32_t head, const struct dkv_cu_need *need,
                                const struct dkv_cu_choice *choice, struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_item *item = &slot->items[item_index];
    const struct dkv_cu_block *desc = &b->blocks[b->n_blocks - 1];
    struct dkv_cu_unit *unit = &b->units[b->n_units];
    const struct dkv_cu_scorer *scorer = dkv_cu_scorers[b->scorer[b->n_blocks - 1]];
    *unit = (struct dkv_cu_unit){
        .k_scale = scale_of(&item->block->key, head),
        .v_scale = scale_of(&item->block->value, head),
        .block = b->n_blocks - 1,
        .head = head,
    };
    unit->work = dkv_cu_take(&engine->scratch, dkv_cu_work_bytes(scorer, desc));
    if (choice != NULL)
        take_from_choice(choice, head, unit);
    else
        take_outputs(engine, scorer, desc, unit);
    place_head_numbers(item, desc, slot, head, unit);
    b->pending[b->n_units] = (struct dkv_cu_pending){.item = item_index, .head = head};
    b->n_units++;
    b->result_bytes += need->io_down;
    enum dkv_status status = place_query(engine, item, desc, slot, head, unit, err);
    if (status == DKV_OK && dkv_cu_reads_keys(desc))
        status = place_rows(engine, item, false, &desc->k, head, &unit->k, err);
    if (status == DKV_OK && desc->v_dim > 0)
        status = place_rows(engine, item, true, &desc->v, head, &unit->v, err);
    return status == DKV_OK ? place_extras(engine, item, desc, head, unit, err) : status;
}
