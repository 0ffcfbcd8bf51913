/* The CPU engine: batches of blocks onto the pool's threads.
 *
 * A batch is cut into heads, one per (block, KV head), and there are two ways to run a head:
 *
 *   whole    one thread does all steps. Heads need nothing from each other, so a batch of them
 *            fills all threads without a barrier.
 *   shared   all threads work on the splits of one head, step by step. For long blocks, whose
 *            per-token memory is wanted only once, and for batches that would leave threads idle.
 *
 * Both run the same steps over the same splits, so the choice does not show in the result.
 *
 * Memory: one head's working set for `shared` and one per thread for `whole`, plus a tile per
 * thread. It grows to what batches need before any work starts and is kept. Heads run whole only
 * while all threads' sets together stay under WHOLE_BYTES (or half a MiB per thread, if that is
 * more). So besides the tiles (about 0.1 MiB per thread at 32 rows of 128) the engine holds that at
 * most, and 4 bytes per token of the longest block plus about 1 MiB.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/engine_priv.h"
#include "kernels/select.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define WHOLE_BYTES      ((size_t)3 << 20)   /* of all threads together, but at least */
#define WHOLE_BYTES_EACH ((size_t)512 << 10) /* for each, which counts from 7 threads on */
#define SHARE_TOKENS_MIN 8192u               /* shorter heads are not worth barriers */
#define THREADS_MAX      256u

static bool buffer_grow(struct dkv_engine *engine, struct dkv_cpu_buffer *buffer, size_t size)
{
    if (size <= buffer->size)
        return true;
    free(buffer->bytes);
    engine->scratch_bytes -= buffer->size;
    size = (size + 63) & ~(size_t)63;
    buffer->bytes = aligned_alloc(64, size);
    buffer->size = buffer->bytes != NULL ? size : 0;
    engine->scratch_bytes += buffer->size;
    if (engine->scratch_bytes > engine->scratch_peak_bytes)
        engine->scratch_peak_bytes = engine->scratch_bytes;
    return buffer->bytes != NULL;
}

static void buffer_release(struct dkv_cpu_buffer *buffer)
{
    free(buffer->bytes);
    *buffer = (struct dkv_cpu_buffer){0};
}

static void cpu_close(struct dkv_engine *engine)
{
    if (engine == NULL)
        return;
    dkv_threads_close(engine->crew);
    for (unsigned t = 0; t < engine->threads; t++) {
        if (engine->wholes != NULL)
            buffer_release(&engine->wholes[t]);
        if (engine->tiles != NULL)
            buffer_release(&engine->tiles[t]);
    }
    buffer_release(&engine->shared);
    buffer_release(&engine->general);
    free(engine->wholes);
    free(engine->tiles);
    free(engine);
}

static enum dkv_status cpu_open(const struct dkv_engine_config *config,
                                struct dkv_engine **engine_out, struct dkv_error *err)
{
    unsigned threads = config != NULL ? config->threads : 0;
    if (threads == 0)
        threads = dkv_cpu_count();
    if (threads > THREADS_MAX)
        threads = THREADS_MAX;
    struct dkv_engine *engine = calloc(1, sizeof(*engine));
    if (engine == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cpu engine: no memory");
    engine->ops = dkv_cpu_ops_choose(dkv_cpu_flags());
    engine->threads = threads;
    dkv_cpu_model(engine->model, sizeof(engine->model));
    engine->scratch_bytes = engine->scratch_peak_bytes = sizeof(*engine);
    engine->wholes = calloc(threads, sizeof(*engine->wholes));
    engine->tiles = calloc(threads, sizeof(*engine->tiles));
    enum dkv_status status = DKV_E_NOMEM;
    if (engine->wholes == NULL || engine->tiles == NULL)
        dkv_error_set(err, status, "cpu engine: no memory for %u threads", threads);
    else
        status = dkv_threads_open(threads, &engine->crew, err);
    if (status != DKV_OK) {
        cpu_close(engine);
        return status;
    }
    *engine_out = engine;
    return DKV_OK;
}

static void cpu_info(const struct dkv_engine *engine, struct dkv_engine_info *info_out)
{
    *info_out = (struct dkv_engine_info){
        .threads = engine->threads,
        .scratch_bytes = engine->scratch_bytes,
        .scratch_peak_bytes = engine->scratch_peak_bytes,
    };
    snprintf(info_out->backend, sizeof(info_out->backend), "cpu/%s", engine->ops->name);
    snprintf(info_out->device, sizeof(info_out->device), "%s, %u thread%s", engine->model,
             engine->threads, engine->threads == 1 ? "" : "s");
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* How a batch is laid out, found before it starts. */
struct layout {
    uint64_t n_heads; /* that have to be scored */
    size_t shared_bytes, whole_bytes, tile_bytes, general_bytes;
};

/* Heads of one size on all threads at once: is a third of the machine idle in the last round? */
static bool leaves_threads_idle(const struct dkv_engine *engine, uint64_t n_heads)
{
    const uint64_t rounds = (n_heads + engine->threads - 1) / engine->threads;
    return 3 * n_heads < 2 * rounds * engine->threads;
}

static bool runs_shared(const struct dkv_engine *engine, const struct dkv_head *head,
                        uint64_t n_heads)
{
    if (engine->threads == 1 || head->rule->source != DKV_SOURCE_ROWS)
        return false;
    if (dkv_head_bytes(head) > larger(WHOLE_BYTES / engine->threads, WHOLE_BYTES_EACH))
        return true;
    return head->n >= SHARE_TOKENS_MIN && leaves_threads_idle(engine, n_heads);
}

static bool needs_scoring(const struct dkv_item *item)
{
    return item->status == DKV_OK && (!item->plan->keep_all || item->scores_out != NULL);
}

/* The items of a request with layers=cake, all of which must be here. */
static bool layers_are_here(const struct dkv_item *items, size_t n_items)
{
    const uint32_t n_layers = items->plan->n_blocks;
    if (items->plan->index != 0 || n_layers > n_items)
        return false;
    for (uint32_t l = 0; l < n_layers; l++)
        if (items[l].plan->index != l || items[l].plan->n_blocks != n_layers ||
            items[l].params->layers != DKV_LAYERS_CAKE || items[l].status != DKV_OK)
            return false;
    return true;
}

/* layers=cake: the scores of all layers are kept, since what the last one says decides what the
 * first may keep. The layers are the items of one request. */
static size_t layers_bytes(const struct dkv_item *items)
{
    size_t bytes = 0;
    for (uint32_t l = 0; l < items->plan->n_blocks; l++)
        bytes += dkv_general_bytes(&items[l]);
    return bytes;
}

static bool reserve(struct dkv_engine *engine, const struct dkv_item *items, size_t n_items,
                    struct layout *layout)
{
    *layout = (struct layout){0};
    for (size_t i = 0; i < n_items; i++)
        layout->n_heads += needs_scoring(&items[i]) ? items[i].block->kv_heads : 0;
    for (size_t i = 0; i < n_items; i++) {
        if (!needs_scoring(&items[i]))
            continue;
        struct dkv_head head;
        dkv_head_init(&head, engine->ops, &items[i], 0);
        if (items[i].plan->general) {
            const bool layers = items[i].params->layers == DKV_LAYERS_CAKE &&
                                layers_are_here(&items[i], n_items - i);
            layout->general_bytes = larger(layout->general_bytes,
                                           layers ? layers_bytes(&items[i])
                                                  : dkv_general_bytes(&items[i]));
        }
        size_t *bytes = runs_shared(engine, &head, layout->n_heads) ? &layout->shared_bytes
                                                                    : &layout->whole_bytes;
        *bytes = larger(*bytes, dkv_head_bytes(&head));
        layout->tile_bytes = larger(layout->tile_bytes, dkv_tile_bytes(&head));
    }
    bool ok = buffer_grow(engine, &engine->shared, layout->shared_bytes) &&
              buffer_grow(engine, &engine->general, layout->general_bytes);
    for (unsigned t = 0; t < engine->threads && ok; t++) {
        ok = buffer_grow(engine, &engine->wholes[t], layout->whole_bytes) &&
             (layout->tile_bytes == 0 ||
              buffer_grow(engine, &engine->tiles[t],
                          layout->tile_bytes + dkv_select_scratch_bytes()));
    }
    return ok;
}

/* Scores an item's heads: those that need all threads now, the others with their slice. */
static void run_item(struct dkv_cpu_slice *slice, struct dkv_item *item,
                     const struct layout *layout)
{
    const struct dkv_engine *engine = slice->engine;
    for (uint32_t h = 0; h < item->block->kv_heads; h++) {
        struct dkv_head head;
        dkv_head_init(&head, engine->ops, item, h);
        if (!runs_shared(engine, &head, layout->n_heads)) {
            slice->tasks[slice->n_tasks++] = (struct dkv_cpu_task){.item = item, .head = h};
            if (slice->n_tasks == DKV_CPU_TASKS_MAX)
                dkv_cpu_run_slice(slice);
            continue;
        }
        const unsigned faults = dkv_cpu_run_head(engine, &head, engine->shared.bytes, 0, true);
        if (faults != DKV_FAULT_NONE) {
            item->status = dkv_head_explain(&head, faults, &item->nonfinite, &item->error);
            return;
        }
        item->nonfinite |= dkv_head_has_masked(&head);
    }
}

/* The engine has memory for the scores of one such block, so it is finished before the next. */
static void run_general(struct dkv_engine *engine, struct dkv_cpu_slice *slice,
                        struct dkv_item *item, const struct layout *layout)
{
    dkv_cpu_run_slice(slice);
    dkv_general_place(&engine->general_work, item, engine->general.bytes);
    engine->entropy = engine->variance = NULL;
    run_item(slice, item, layout);
    dkv_cpu_run_slice(slice);
    if (item->status == DKV_OK)
        item->status = dkv_general_settle(&engine->general_work, item, &item->error);
    if (item->status == DKV_OK)
        dkv_general_choose(&engine->general_work, item, item->plan->keep_tokens, engine->crew);
}

static double preference(const struct dkv_params *params, double entropy, double variance)
{
    const double p = pow(fmax(entropy, 0.0), 1.0 / params->tau1) *
                     pow(fmax(variance, 0.0), 1.0 / params->tau2);
    return isfinite(p) ? p : 0.0;
}

static void fail_layers(struct dkv_item *items, uint32_t n_layers, const struct dkv_item *bad)
{
    for (uint32_t l = 0; l < n_layers; l++)
        if (items[l].status == DKV_OK) {
            items[l].status = bad->status;
            items[l].error = bad->error;
        }
}

/* Deals what the layers' shares add up to, beyond what is protected, by their preferences. */
static void choose_layers(struct dkv_engine *engine, struct dkv_item *items, uint32_t n_layers,
                          const double *preferences, uint64_t *shares)
{
    const struct dkv_plan *plan = items->plan;
    const uint64_t protect = plan->sinks + plan->recent;
    uint64_t total = 0, most = UINT64_MAX;
    uint8_t *memory = engine->general.bytes;
    for (uint32_t l = 0; l < n_layers; l++) {
        total += items[l].plan->keep_tokens - protect;
        if (items[l].plan->most_tokens - protect < most)
            most = items[l].plan->most_tokens - protect;
    }
    dkv_cake_shares(preferences, n_layers, total, most, shares);
    for (uint32_t l = 0; l < n_layers; l++) {
        dkv_general_place(&engine->general_work, &items[l], memory);
        memory += dkv_general_bytes(&items[l]);
        const uint64_t k = protect + shares[l];
        dkv_general_choose(&engine->general_work, &items[l], k > 0 ? k : 1, engine->crew);
    }
}

static void run_layers(struct dkv_engine *engine, struct dkv_cpu_slice *slice,
                       struct dkv_item *items, const struct layout *layout)
{
    const uint32_t n_layers = items->plan->n_blocks;
    uint8_t *memory = engine->general.bytes;
    double entropies[DKV_HEADS_MAX], variances[DKV_HEADS_MAX];
    dkv_cpu_run_slice(slice);
    for (uint32_t l = 0; l < n_layers; l++) {
        struct dkv_item *item = &items[l];
        dkv_general_place(&engine->general_work, item, memory);
        memory += dkv_general_bytes(item);
        engine->entropy = entropies;
        engine->variance = variances;
        run_item(slice, item, layout);
        dkv_cpu_run_slice(slice);
        if (item->status == DKV_OK)
            item->status = dkv_general_settle(&engine->general_work, item, &item->error);
        if (item->status != DKV_OK) {
            fail_layers(items, n_layers, item);
            return;
        }
        double entropy = 0.0, variance = 0.0;
        for (uint32_t h = 0; h < item->block->kv_heads; h++) {
            entropy += entropies[h];
            variance += variances[h];
        }
        engine->preferences[l] = preference(item->params, entropy, variance);
    }
    choose_layers(engine, items, n_layers, engine->preferences, engine->shares);
}

/* Everything is kept: no tensor needs to be looked at. */
static void keep_all(struct dkv_item *item)
{
    const uint64_t k = item->plan->keep_tokens;
    for (uint32_t h = 0; h < item->block->kv_heads; h++) {
        for (uint64_t i = 0; i < k; i++)
            item->keep_out[h * k + i] = (int32_t)(item->block->valid_from + i);
        if (item->plan->ragged)
            item->counts_out[h] = (uint32_t)k;
    }
}

static bool on_host(const struct dkv_block *block)
{
    return block->query.place == DKV_PLACE_HOST && block->key.place == DKV_PLACE_HOST &&
           block->value.place == DKV_PLACE_HOST &&
           (block->table.entries == NULL || block->table.place == DKV_PLACE_HOST) &&
           (block->v_table.entries == NULL || block->v_table.place == DKV_PLACE_HOST);
}

static enum dkv_status cpu_submit(struct dkv_engine *engine, struct dkv_item *items, size_t n_items,
                                  struct dkv_error *err)
{
    for (size_t i = 0; i < n_items; i++) {
        items[i].status = DKV_OK;
        if (!on_host(items[i].block))
            items[i].status = dkv_error_set(&items[i].error, DKV_E_UNSUPPORTED,
                                            "cpu engine: tensors in device memory");
    }
    struct layout layout;
    if (!reserve(engine, items, n_items, &layout))
        return dkv_error_set(err, DKV_E_NOMEM, "cpu engine: no memory for a batch of %llu heads",
                             (unsigned long long)layout.n_heads);

    const unsigned fpu = dkv_cpu_fpu_enter();
    struct dkv_cpu_slice slice = {.engine = engine, .tasks = engine->tasks};
    for (size_t i = 0; i < n_items; i++) {
        if (needs_scoring(&items[i]) && items[i].params->layers == DKV_LAYERS_CAKE) {
            if (layers_are_here(&items[i], n_items - i)) {
                run_layers(engine, &slice, &items[i], &layout);
                i += items[i].plan->n_blocks - 1;
            } else {
                items[i].status = dkv_error_set(&items[i].error, DKV_E_INTERNAL,
                                                "cpu engine: layers=cake needs all blocks of a "
                                                "request in one batch");
            }
        } else if (needs_scoring(&items[i]) && items[i].plan->general)
            run_general(engine, &slice, &items[i], &layout);
        else if (needs_scoring(&items[i]))
            run_item(&slice, &items[i], &layout);
        else if (items[i].status == DKV_OK)
            keep_all(&items[i]);
    }
    dkv_cpu_run_slice(&slice);
    dkv_cpu_fpu_leave(fpu);
    return DKV_OK;
}

/* submit() has done it all. */
static enum dkv_status cpu_wait(struct dkv_engine *engine, struct dkv_error *err)
{
    (void)engine;
    (void)err;
    return DKV_OK;
}

void dkv_engine_cpu_mask(uint32_t mask)
{
    dkv_cpu_mask_set(mask);
}

const struct dkv_engine_ops dkv_engine_cpu = {
    .abi = DKV_ENGINE_ABI,
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .info = cpu_info,
    .submit = cpu_submit,
    .wait = cpu_wait,
    .max_in_flight = 1,
};
