/* From a batch to launches.
 *
 * Each block's KV heads become units; units are added to the wave until something is full (scratch,
 * staging, io), then the wave goes out and the next one begins. A batch of device-resident blocks
 * is normally one wave: one upload, one launch per kernel, one download. Blocks of host tensors go
 * out in smaller waves, so that the copies of one overlap the kernels of the one before.
 *
 * What a block is scored by, and in which partial sums, depends on the block alone, so neither the
 * neighbours in a wave nor where the waves are cut can change a bit of its answer.
 */
#include <string.h>

#include "kernels/cuda/host.h"

enum { SMALL_TABLE_BYTES = 256 << 10 }; /* larger page tables are staged like tensors */

/* Bytes that one unit takes of each memory. */
struct need {
    size_t scratch;
    size_t io_up;
    size_t io_down;
    size_t staged;
};

static bool is_fp8(enum dkv_dtype dtype)
{
    return dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2;
}

static bool on_host(const struct dkv_view *view)
{
    return view->place == DKV_PLACE_HOST;
}

static const struct dkv_page_table *table_of(const struct dkv_block *block, bool of_values)
{
    if (block->page_tokens == 0)
        return NULL;
    const struct dkv_page_table *table = of_values && block->v_table.entries != NULL
                                             ? &block->v_table
                                             : &block->table;
    return table->entries != NULL ? table : NULL;
}

static size_t table_bytes(const struct dkv_block *block, const struct dkv_page_table *table)
{
    return ((block->n_tokens - 1) / block->page_tokens + 1) * table->entry_bytes;
}

/* A table is read on the device, if its tensor is; this is where one from the host goes. */
static bool is_uploaded(const struct dkv_view *view, const struct dkv_page_table *table)
{
    return !on_host(view) && table != NULL && table->place == DKV_PLACE_HOST;
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

/* ---- describing a block ---- */

static struct dkv_cu_rows describe_rows(const struct dkv_block *block, const struct dkv_view *view,
                                        const struct dkv_page_table *table, uint32_t dims,
                                        uint64_t entry_limit)
{
    struct dkv_cu_rows rows = {.dtype = view->dtype, .mask = -1};
    if (on_host(view)) {
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

static void describe_query(const struct dkv_block *block, const struct dkv_plan *plan,
                           struct dkv_cu_block *out)
{
    const struct dkv_view *view = &block->query;
    out->q_dtype = view->dtype;
    if (on_host(view)) {
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

/* Everything but the table pointers. */
static void describe_block(const struct dkv_item *item, struct dkv_cu_block *out)
{
    const struct dkv_block *block = item->block;
    const struct dkv_params *params = item->params;
    const struct dkv_plan *plan = item->plan;
    *out = (struct dkv_cu_block){
        .k = describe_rows(block, &block->key, table_of(block, false), block->head_dim,
                           plan->k_entry_limit),
        .v = describe_rows(block, &block->value, table_of(block, true), plan->v_dim,
                           plan->v_entry_limit),
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
}

static unsigned char choose_scorer(const struct dkv_cu_engine *engine,
                                   const struct dkv_cu_block *block)
{
    unsigned char i = 0;
    while (dkv_cu_scorers[i + 1] != NULL &&
           (engine->general_only || !dkv_cu_scorers[i]->takes(&engine->device, block)))
        i++;
    return i;
}

/* ---- adding units ---- */

static struct need need_of(const struct dkv_cu_engine *engine, const struct dkv_item *item,
                           const struct dkv_cu_block *desc, const struct dkv_cu_scorer *scorer,
                           bool first_of_block)
{
    const struct dkv_block *block = item->block;
    const size_t n = desc->n_valid;
    struct need need = {
        .scratch = dkv_cu_align(n * sizeof(float)) + dkv_cu_align(scorer->unit_bytes(desc)),
        .io_up = sizeof(struct dkv_cu_unit) + sizeof(struct dkv_cu_report) +
                 dkv_cu_align(2 * desc->group * sizeof(float)) + 1024,
        .io_down = dkv_cu_align(desc->keep * sizeof(int32_t)),
    };
    if (dkv_cu_select_needs_keys(&engine->device, desc->n_valid))
        need.scratch += dkv_cu_align((n + 4) * sizeof(unsigned long long));
    if (desc->nonfinite == DKV_NONFINITE_MASK)
        need.scratch += dkv_cu_align((n + 31) / 32 * sizeof(unsigned));
    if (item->scores_out != NULL)
        need.io_down += dkv_cu_align(n * sizeof(float));
    if (on_host(&block->query))
        need.io_up += dkv_cu_align((size_t)desc->q_head_stride * desc->group);
    if (on_host(&block->key))
        need.staged += dkv_cu_align((size_t)desc->k.token_stride * n);
    if (on_host(&block->value))
        need.staged += dkv_cu_align((size_t)desc->v.token_stride * n);
    if (first_of_block)
        for (int side = 0; side < 2; side++) {
            const struct dkv_page_table *table = table_of(block, side == 1);
            const struct dkv_view *view = side == 1 ? &block->value : &block->key;
            if (table == NULL || on_host(view))
                continue;
            const size_t bytes = dkv_cu_align(table_bytes(block, table));
            if (!is_uploaded(view, table))
                need.scratch += bytes; /* if it is not aligned */
            else if (bytes <= SMALL_TABLE_BYTES)
                need.io_up += bytes;
            else
                need.staged += bytes;
        }
    return need;
}

static bool fits(const struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                 const struct need *need)
{
    const struct dkv_cu_builder *b = engine->builder;
    const struct dkv_cu_arena *stage = &engine->halves[engine->half].arena;
    const size_t fixed = b->n_units * (sizeof(struct dkv_cu_unit) + sizeof(struct dkv_cu_report)) +
                         (b->n_blocks + 1) * sizeof(struct dkv_cu_block);
    return need->scratch <= engine->scratch.bytes - engine->scratch.used &&
           need->staged <= stage->bytes - stage->used &&
           slot->io.used + fixed + b->result_bytes + need->io_up + need->io_down +
                   DKV_CU_EXTRA_BYTES <=
               slot->io.bytes &&
           slot->n_pending + b->n_units < DKV_CU_UNITS_MAX;
}

/* Device address of what is at `at` in the slot's pinned io. */
static void *device_twin(const struct dkv_cu_slot *slot, const void *at)
{
    return slot->io_device + ((const unsigned char *)at - slot->io.base);
}

static void *stage_take(struct dkv_cu_engine *engine, size_t bytes)
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
    const struct dkv_page_table *table = table_of(block, of_values);
    const struct dkv_view *view = of_values ? &block->value : &block->key;
    if (table == NULL || on_host(view))
        return DKV_OK;
    const size_t bytes = table_bytes(block, table);
    if (is_uploaded(view, table) && bytes <= SMALL_TABLE_BYTES) {
        void *copy = dkv_cu_take(&slot->io, bytes);
        memcpy(copy, table->entries, bytes);
        rows->table = device_twin(slot, copy);
        return DKV_OK;
    }
    if (is_uploaded(view, table)) {
        void *copy = stage_take(engine, bytes);
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

static enum dkv_status add_block(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
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
    if (!on_host(view)) {
        *out = (const unsigned char *)view->base + view->offset +
               (uint64_t)head * (uint64_t)view->head_stride;
        return DKV_OK;
    }
    const struct dkv_cu_source source = {
        .view = view,
        .table = table_of(block, of_values),
        .name = of_values ? "value" : "key",
        .page_tokens = block->page_tokens,
        .dims = of_values ? item->plan->v_dim : block->head_dim,
        .entry_limit = of_values ? item->plan->v_entry_limit : item->plan->k_entry_limit,
        .first_token = block->valid_from,
        .n_tokens = block->n_tokens,
    };
    unsigned char *to = stage_take(engine, (size_t)rows->token_stride * item->plan->n_valid);
    *out = to - block->valid_from * (uint64_t)rows->token_stride;
    return dkv_cu_stage_head(engine, item, &source, head, to, err);
}

static void place_query(const struct dkv_item *item, const struct dkv_cu_block *desc,
                        struct dkv_cu_slot *slot, uint32_t head, struct dkv_cu_unit *unit)
{
    const struct dkv_view *view = &item->block->query;
    const unsigned char *from = (const unsigned char *)view->base + view->offset +
                                (uint64_t)head * desc->group * (uint64_t)view->head_stride +
                                item->plan->first_row * (uint64_t)view->token_stride;
    unit->q = from;
    if (on_host(view)) {
        const size_t row_bytes = (size_t)desc->q_row_stride;
        unsigned char *to = dkv_cu_take(&slot->io, (size_t)desc->q_head_stride * desc->group);
        unit->q = device_twin(slot, to);
        for (uint32_t g = 0; g < desc->group; g++)
            for (uint32_t t = 0; t < desc->window; t++, to += row_bytes)
                memcpy(to,
                       from + g * (uint64_t)view->head_stride + t * (uint64_t)view->token_stride,
                       row_bytes);
    }
}

/* Per query head numbers of the unit's group: scales of fp8 queries, sink logits. */
static void place_head_numbers(const struct dkv_item *item, const struct dkv_cu_block *desc,
                               struct dkv_cu_slot *slot, uint32_t head, struct dkv_cu_unit *unit)
{
    const struct dkv_view *query = &item->block->query;
    const uint32_t first = head * desc->group;
    const bool scaled = is_fp8(query->dtype);
    if (!scaled && item->block->sink_logits == NULL)
        return;
    float *to = dkv_cu_take(&slot->io, 2 * desc->group * sizeof(float));
    for (uint32_t g = 0; g < desc->group && scaled; g++)
        to[g] = query->head_scales != NULL ? query->head_scales[first + g]
                : query->scale != 0        ? query->scale
                                           : 1.0f;
    unit->q_scales = scaled ? device_twin(slot, to) : NULL;
    to += desc->group;
    if (item->block->sink_logits != NULL) {
        memcpy(to, item->block->sink_logits + first, desc->group * sizeof(float));
        unit->sink_logits = device_twin(slot, to);
    }
}

static float scale_of(const struct dkv_view *view, uint32_t head)
{
    if (!is_fp8(view->dtype))
        return 1.0f;
    return view->head_scales != NULL ? view->head_scales[head]
           : view->scale != 0        ? view->scale
                                     : 1.0f;
}

static enum dkv_status add_unit(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                uint32_t item_index, uint32_t head, const struct need *need,
                                struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_item *item = &slot->items[item_index];
    const struct dkv_cu_block *desc = &b->blocks[b->n_blocks - 1];
    const size_t n = desc->n_valid;
    struct dkv_cu_unit *unit = &b->units[b->n_units];
    *unit = (struct dkv_cu_unit){
        .k_scale = scale_of(&item->block->key, head),
        .v_scale = scale_of(&item->block->value, head),
        .block = b->n_blocks - 1,
        .head = head,
    };
    unit->scores = dkv_cu_take(&engine->scratch, n * sizeof(float));
    unit->work = dkv_cu_take(&engine->scratch,
                             dkv_cu_scorers[b->scorer[unit->block]]->unit_bytes(desc));
    if (dkv_cu_select_needs_keys(&engine->device, desc->n_valid))
        unit->keys = dkv_cu_take(&engine->scratch, (n + 4) * sizeof(unsigned long long));
    if (desc->nonfinite == DKV_NONFINITE_MASK)
        unit->mask = dkv_cu_take(&engine->scratch, (n + 31) / 32 * sizeof(unsigned));
    place_query(item, desc, slot, head, unit);
    place_head_numbers(item, desc, slot, head, unit);
    b->pending[b->n_units] = (struct dkv_cu_pending){.item = item_index, .head = head};
    b->n_units++;
    b->result_bytes += need->io_down;
    enum dkv_status status = place_rows(engine, item, false, &desc->k, head, &unit->k, err);
    if (status == DKV_OK)
        status = place_rows(engine, item, true, &desc->v, head, &unit->v, err);
    return status;
}

/* ---- launching a wave ---- */

static void begin_wave(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot)
{
    struct dkv_cu_builder *b = engine->builder;
    b->n_blocks = 0;
    b->n_units = 0;
    b->result_bytes = 0;
    b->staged_bytes = 0;
    b->io_begin = slot->io.used;
    engine->scratch.used = 0;
    engine->halves[engine->half].arena.used = 0;
}

/* Copies blocks and units into io, units grouped by scorer; first_out[s] is where scorer s
 * begins. */
static void lay_out(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                    struct dkv_cu_wave *wave, uint32_t *first_out)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_cu_block *blocks = dkv_cu_take(&slot->io, b->n_blocks * sizeof(*blocks));
    struct dkv_cu_unit *units = dkv_cu_take(&slot->io, b->n_units * sizeof(*units));
    memcpy(blocks, b->blocks, b->n_blocks * sizeof(*blocks));
    uint32_t at = 0;
    for (uint32_t s = 0; s < DKV_CU_SCORERS_MAX; s++) {
        first_out[s] = at;
        for (uint32_t u = 0; u < b->n_units; u++)
            if (b->scorer[b->units[u].block] == s) {
                slot->pending[slot->n_pending + at] = b->pending[u];
                units[at++] = b->units[u];
            }
    }
    first_out[DKV_CU_SCORERS_MAX] = at;
    *wave = (struct dkv_cu_wave){
        .blocks = device_twin(slot, blocks),
        .units = device_twin(slot, units),
        .blocks_host = blocks,
        .units_host = units,
        .n_blocks = b->n_blocks,
        .n_units = b->n_units,
        .shared = engine->shared,
    };
}

/* Reports start out clean and travel both ways; results follow them. */
static void lay_out_results(struct dkv_cu_slot *slot, const struct dkv_cu_wave *wave)
{
    struct dkv_cu_report *reports = dkv_cu_take(&slot->io, wave->n_units * sizeof(*reports));
    struct dkv_cu_unit *units = (struct dkv_cu_unit *)(uintptr_t)wave->units_host;
    for (uint32_t i = 0; i < wave->n_units; i++) {
        struct dkv_cu_pending *pending = &slot->pending[slot->n_pending + i];
        const struct dkv_cu_block *block = &wave->blocks_host[units[i].block];
        reports[i] = (struct dkv_cu_report){~0ull, ~0ull, ~0ull, 0, 0};
        units[i].report = device_twin(slot, &reports[i]);
        units[i].exponent = &units[i].report->exponent;
        pending->report = (size_t)((unsigned char *)&reports[i] - slot->io.base);
        void *keep = dkv_cu_take(&slot->io, block->keep * sizeof(int32_t));
        units[i].keep_out = device_twin(slot, keep);
        pending->keep = (size_t)((unsigned char *)keep - slot->io.base);
        pending->scores = 0;
        if (slot->items[pending->item].scores_out != NULL) {
            void *scores = dkv_cu_take(&slot->io, block->n_valid * sizeof(float));
            units[i].scores_out = device_twin(slot, scores);
            pending->scores = (size_t)((unsigned char *)scores - slot->io.base);
        }
    }
}

struct work_lists {
    void *of_scorer[DKV_CU_SCORERS_MAX]; /* host; NULL: no units */
    void *of_selection;
};

static enum dkv_status lay_out_lists(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                     const struct dkv_cu_wave *wave, const uint32_t *first,
                                     struct work_lists *lists, struct dkv_error *err)
{
    const size_t limit = slot->io.used + DKV_CU_EXTRA_BYTES;
    for (uint32_t s = 0; dkv_cu_scorers[s] != NULL; s++) {
        const struct dkv_cu_scorer *scorer = dkv_cu_scorers[s];
        const uint32_t n = first[s + 1] - first[s];
        lists->of_scorer[s] = NULL;
        if (n == 0)
            continue;
        const size_t bytes = scorer->extra_bytes(&engine->device, wave, first[s], n);
        lists->of_scorer[s] = dkv_cu_take(&slot->io, bytes);
        if (lists->of_scorer[s] == NULL || slot->io.used > limit)
            return dkv_error_set(err, DKV_E_INTERNAL, "cuda: work list of %zu bytes", bytes);
    }
    const size_t bytes = dkv_cu_select_extra_bytes(wave);
    lists->of_selection = dkv_cu_take(&slot->io, bytes);
    if (lists->of_selection == NULL || slot->io.used > limit)
        return dkv_error_set(err, DKV_E_INTERNAL, "cuda: work list of %zu bytes", bytes);
    return DKV_OK;
}

static void fill_lists(struct dkv_cu_engine *engine, const struct dkv_cu_wave *wave,
                       const uint32_t *first, const struct work_lists *lists)
{
    for (uint32_t s = 0; dkv_cu_scorers[s] != NULL; s++)
        if (lists->of_scorer[s] != NULL)
            dkv_cu_scorers[s]->fill(&engine->device, wave, first[s], first[s + 1] - first[s],
                                    lists->of_scorer[s]);
    dkv_cu_select_fill(&engine->device, wave, lists->of_selection);
}

static enum dkv_status mark(struct dkv_cu_engine *engine, enum dkv_cu_mark moment,
                            struct dkv_error *err)
{
    if (!engine->timed || (moment == DKV_CU_MARK_SCORED && !engine->split))
        return DKV_OK;
    return dkv_cu_check(engine, cudaEventRecord(engine->marks[moment], engine->stream),
                        "recording an event", err);
}

static enum dkv_status launch_kernels(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                      const struct dkv_cu_wave *wave, const uint32_t *first,
                                      const struct work_lists *lists, struct dkv_error *err)
{
    enum dkv_status status = dkv_cu_check(engine, dkv_cu_mask_launch(wave, engine->stream),
                                          "launching mask", err);
    for (uint32_t s = 0; dkv_cu_scorers[s] != NULL && status == DKV_OK; s++)
        if (lists->of_scorer[s] != NULL)
            status = dkv_cu_check(
                engine,
                dkv_cu_scorers[s]->launch(&engine->device, wave, first[s], first[s + 1] - first[s],
                                          lists->of_scorer[s],
                                          device_twin(slot, lists->of_scorer[s]), engine->stream),
                dkv_cu_scorers[s]->name, err);
    if (status == DKV_OK)
        status = mark(engine, DKV_CU_MARK_SCORED, err);
    if (status != DKV_OK)
        return status;
    return dkv_cu_check(engine,
                        dkv_cu_select_launch(&engine->device, wave, lists->of_selection,
                                             device_twin(slot, lists->of_selection),
                                             engine->stream),
                        "launching selection", err);
}

/* The stream waits for the wave's host tensors, if it has any. */
static enum dkv_status await_staged(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    struct dkv_cu_half *half = &engine->halves[engine->half];
    if (!half->dirty)
        return DKV_OK;
    enum dkv_status status = dkv_cu_stage_flush(engine, err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine, cudaEventRecord(half->filled, engine->copies),
                              "recording an event", err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine, cudaStreamWaitEvent(engine->stream, half->filled, 0),
                              "waiting for an event", err);
    return status;
}

/* The next wave stages into the other half, once the wave that used it is through. */
static enum dkv_status turn_halves(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    struct dkv_cu_half *half = &engine->halves[engine->half];
    if (!half->dirty)
        return DKV_OK;
    enum dkv_status status = dkv_cu_check(engine, cudaEventRecord(half->consumed, engine->stream),
                                          "recording an event", err);
    half->busy = true;
    half->dirty = false;
    engine->half ^= 1u;
    half = &engine->halves[engine->half];
    if (status == DKV_OK && half->busy)
        status = dkv_cu_check(engine, cudaStreamWaitEvent(engine->copies, half->consumed, 0),
                              "waiting for an event", err);
    half->busy = false;
    return status;
}

static enum dkv_status copy_io(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot, size_t begin,
                               size_t end, bool up, struct dkv_error *err)
{
    unsigned char *host = slot->io.base + begin;
    unsigned char *device = slot->io_device + begin;
    return dkv_cu_check(
        engine,
        up ? cudaMemcpyAsync(device, host, end - begin, cudaMemcpyHostToDevice, engine->stream)
           : cudaMemcpyAsync(host, device, end - begin, cudaMemcpyDeviceToHost, engine->stream),
        up ? "uploading a batch" : "downloading results", err);
}

static enum dkv_status launch_wave(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                   struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_cu_wave wave;
    struct work_lists lists = {0};
    uint32_t first[DKV_CU_SCORERS_MAX + 1];
    if (b->n_units == 0)
        return DKV_OK;

    lay_out(engine, slot, &wave, first);
    enum dkv_status status = lay_out_lists(engine, slot, &wave, first, &lists, err);
    if (status != DKV_OK)
        return status;
    const size_t reports = slot->io.used;
    lay_out_results(slot, &wave);
    fill_lists(engine, &wave, first, &lists);
    const size_t up_end = reports + dkv_cu_align(wave.n_units * sizeof(struct dkv_cu_report));

    if ((status = mark(engine, DKV_CU_MARK_START, err)) != DKV_OK ||
        (status = copy_io(engine, slot, b->io_begin, up_end, true, err)) != DKV_OK ||
        (status = await_staged(engine, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_UPLOADED, err)) != DKV_OK ||
        (status = launch_kernels(engine, slot, &wave, first, &lists, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_SELECTED, err)) != DKV_OK ||
        (status = copy_io(engine, slot, reports, slot->io.used, false, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_DOWNLOADED, err)) != DKV_OK ||
        (status = turn_halves(engine, err)) != DKV_OK)
        return status;
    slot->n_pending += b->n_units;
    engine->wave_scratch = engine->scratch.used;
    status = dkv_cu_check(engine, cudaEventRecord(slot->done, engine->stream), "recording an event",
                          err);
    begin_wave(engine, slot);
    return status;
}

/* ---- a batch ---- */

/* Makes room for one unit: launches what there is, then waits for it if io is the shortage. */
static enum dkv_status make_room(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const struct need *need, bool *fits_out, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    *fits_out = fits(engine, slot, need) &&
                (engine->builder->staged_bytes < DKV_CU_STAGE_WAVE || need->staged == 0);
    if (*fits_out)
        return DKV_OK;
    if ((status = launch_wave(engine, slot, err)) != DKV_OK)
        return status;
    *fits_out = fits(engine, slot, need);
    if (*fits_out || slot->n_pending == 0)
        return DKV_OK;
    if ((status = dkv_cu_drain(engine, slot, err)) != DKV_OK)
        return status;
    begin_wave(engine, slot);
    *fits_out = fits(engine, slot, need);
    return DKV_OK;
}

static enum dkv_status run_item(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                uint32_t index, struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_item *item = &slot->items[index];
    struct dkv_cu_block desc;
    struct dkv_error why = {.status = DKV_OK};
    describe_block(item, &desc);
    const unsigned char scorer = choose_scorer(engine, &desc);
    uint32_t my_block = UINT32_MAX; /* in the wave being built */

    for (uint32_t head = 0; head < item->block->kv_heads; head++) {
        bool room = false;
        struct need need = need_of(engine, item, &desc, dkv_cu_scorers[scorer], true);
        enum dkv_status status = make_room(engine, slot, &need, &room, err);
        if (status != DKV_OK)
            return status;
        if (!room) {
            (void)dkv_error_set(&why, DKV_E_NOMEM,
                                "cuda: one KV head needs %zu bytes of scratch and %zu of staging, "
                                "above the %zu and %zu there are",
                                need.scratch, need.staged, engine->scratch.bytes,
                                engine->halves[0].arena.bytes);
            break;
        }
        if (my_block == UINT32_MAX || b->n_blocks == 0 || my_block != b->n_blocks - 1) {
            status = add_block(engine, slot, item, &desc, scorer, err);
            my_block = b->n_blocks - 1;
        }
        if (status == DKV_OK)
            status = add_unit(engine, slot, index, head, &need, err);
        if (status != DKV_OK)
            return status;
        if (item->status != DKV_OK) /* a bad table entry: the other heads have it too */
            return DKV_OK;
    }
    if (why.status != DKV_OK)
        dkv_cu_fail_item(item, &why);
    return DKV_OK;
}

/* Every valid token is kept and nobody asked for scores. */
static bool answer_at_once(const struct dkv_item *item)
{
    if (!item->plan->keep_all || item->scores_out != NULL)
        return false;
    for (uint64_t h = 0; h < item->block->kv_heads; h++)
        for (uint64_t i = 0; i < item->plan->n_valid; i++)
            item->keep_out[h * item->plan->n_valid + i] = (int32_t)(item->block->valid_from + i);
    return true;
}

enum dkv_status dkv_cu_run_items(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const unsigned char *only, struct dkv_error *err)
{
    begin_wave(engine, slot);
    for (size_t i = 0; i < slot->n_items; i++) {
        if ((only != NULL && !only[i]) || (only == NULL && answer_at_once(&slot->items[i])))
            continue;
        const enum dkv_status status = run_item(engine, slot, (uint32_t)i, err);
        if (status != DKV_OK)
            return status;
    }
    return launch_wave(engine, slot, err);
}
