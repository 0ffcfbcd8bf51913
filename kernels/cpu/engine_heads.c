/* How the CPU engine runs a head: its steps over its splits, on all threads or on one, for each
 * chunk of its rows; and how it runs many, a thread each. */
#include "kernels/cpu/engine_priv.h"

#include "kernels/select.h"

/* The part of a thread's tile buffer that selection uses, behind the tile. */
static void *select_scratch(const struct dkv_engine *engine, const struct dkv_head *head,
                            unsigned thread)
{
    return (uint8_t *)engine->tiles[thread].bytes + dkv_tile_bytes(head);
}

/* A head is scored: select here, or leave that to the block's end. */
static void select_and_finish(const struct dkv_engine *engine, const struct dkv_head *head,
                              unsigned thread)
{
    const struct dkv_item *item = head->item;
    if (item->plan->general) {
        dkv_general_take(&engine->general_work, head);
        if (engine->entropy != NULL)
            dkv_head_spread(head, &engine->entropy[head->index], &engine->variance[head->index]);
        return;
    }
    const struct dkv_select_spec spec = dkv_select_spec_of(item->block, item->params, item->plan);
    dkv_select(&spec, head->raw, head->flags, select_scratch(engine, head, thread),
               item->keep_out + (uint64_t)head->index * item->plan->keep_tokens);
    if (item->plan->ragged) /* by layer alone */
        item->counts_out[head->index] = (uint32_t)item->plan->keep_tokens;
    dkv_head_finish(head);
}

/* One step: `step` over all splits, on this thread or on all. */
struct splits {
    const struct dkv_engine *engine;
    struct dkv_head *head;
    void (*step)(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile);
    const struct dkv_tile *tile; /* NULL: on all threads, each with its own */
};

static void split_task(void *context, size_t task, unsigned thread)
{
    const struct splits *splits = context;
    struct dkv_tile tile;
    dkv_tile_place(&tile, splits->head, splits->engine->tiles[thread].bytes);
    splits->step(splits->head, (uint32_t)task, &tile);
}

static void run_splits(struct splits *splits, void (*step)(struct dkv_head *head, uint32_t split,
                                                           const struct dkv_tile *tile))
{
    splits->step = step;
    if (splits->tile == NULL) {
        dkv_threads_run(splits->engine->crew, split_task, splits, splits->head->n_splits);
        return;
    }
    for (uint32_t s = 0; s < splits->head->n_splits; s++)
        step(splits->head, s, splits->tile);
}

/* All steps of a head for one chunk of its rows. */
static unsigned run_rows(struct splits *splits, const struct dkv_tile *tile)
{
    struct dkv_head *head = splits->head;
    unsigned faults = dkv_head_begin(head, tile);
    if (faults != DKV_FAULT_NONE)
        return faults;
    run_splits(splits, dkv_head_pass_a);
    faults = dkv_head_merge(head, tile);
    if (faults != DKV_FAULT_NONE)
        return faults;
    if (head->author_form) {
        run_splits(splits, dkv_head_pass_a2);
        dkv_head_merge_a2(head, tile);
    }
    run_splits(splits, dkv_head_pass_b);
    return dkv_head_faults(head);
}

unsigned dkv_cpu_run_head(const struct dkv_engine *engine, struct dkv_head *head, void *memory,
                          unsigned thread, bool all_threads)
{
    struct dkv_tile tile;
    struct splits splits = {.engine = engine, .head = head, .tile = all_threads ? NULL : &tile};
    unsigned faults = DKV_FAULT_NONE;
    dkv_tile_place(&tile, head, engine->tiles[thread].bytes);
    if (head->rule->source != DKV_SOURCE_ROWS) {
        head->flags = engine->general_work.flags + head->index * head->n;
        return dkv_general_score(&engine->general_work, head, &tile);
    }
    dkv_head_place(head, memory);
    for (uint32_t c = 0; c < head->n_chunks && faults == DKV_FAULT_NONE; c++) {
        dkv_head_take_rows(head, c);
        faults = run_rows(&splits, &tile);
    }
    if (faults == DKV_FAULT_NONE)
        select_and_finish(engine, head, thread);
    return faults;
}

static void whole_task(void *context, size_t task, unsigned thread)
{
    const struct dkv_cpu_slice *slice = context;
    struct dkv_cpu_task *at = &slice->tasks[task];
    struct dkv_head head;
    dkv_head_init(&head, slice->engine->ops, at->item, at->head);
    at->faults = dkv_cpu_run_head(slice->engine, &head, slice->engine->wholes[thread].bytes, thread,
                                  false);
    at->masked = at->faults == DKV_FAULT_NONE && dkv_head_has_masked(&head);
}

static void explain_failures(const struct dkv_cpu_slice *slice)
{
    for (size_t i = 0; i < slice->n_tasks; i++) {
        const struct dkv_cpu_task *task = &slice->tasks[i];
        task->item->nonfinite |= task->masked;
        if (task->faults == DKV_FAULT_NONE || task->item->status != DKV_OK)
            continue; /* heads come in order: the lowest one that failed is explained */
        struct dkv_head head;
        dkv_head_init(&head, slice->engine->ops, task->item, task->head);
        task->item->status = dkv_head_explain(&head, task->faults, &task->item->nonfinite,
                                              &task->item->error);
    }
}

void dkv_cpu_run_slice(struct dkv_cpu_slice *slice)
{
    if (slice->n_tasks == 0)
        return;
    dkv_threads_run(slice->engine->crew, whole_task, slice, slice->n_tasks);
    explain_failures(slice);
    slice->n_tasks = 0;
}
