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

static unsigned char choose_scorer(const struct dkv_cu_engine *engine,
                                   const struct dkv_cu_block *block)
{
    unsigned char i = 0;
    while (dkv_cu_scorers[i + 1] != NULL &&
           (engine->general_only || !dkv_cu_scorers[i]->takes(&engine->device, block)))
        i++;
    return i;
}

static bool fits(const struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                 const struct dkv_cu_need *need)
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
        .blocks = dkv_cu_twin(slot, blocks),
        .units = dkv_cu_twin(slot, units),
        .blocks_host = blocks,
        .units_host = units,
        .n_blocks = b->n_blocks,
        .n_units = b->n_units,
        .shared = engine->shared,
    };
}

static void place_results(struct dkv_cu_slot *slot, struct dkv_cu_unit *unit,
                          struct dkv_cu_pending *pending, const struct dkv_cu_block *block)
{
    void *keep = dkv_cu_take(&slot->io, block->keep * sizeof(int32_t));
    unit->keep_out = dkv_cu_twin(slot, keep);
    pending->keep = (size_t)((unsigned char *)keep - slot->io.base);
    pending->scores = 0;
    if (slot->items[pending->item].scores_out != NULL) {
        void *scores = dkv_cu_take(&slot->io, block->n_valid * sizeof(float));
        unit->scores_out = dkv_cu_twin(slot, scores);
        pending->scores = (size_t)((unsigned char *)scores - slot->io.base);
    }
}

/* Reports start out clean and travel both ways; results follow them, and come down with them up to
 * *down_end_out. Those behind it are sent to their callers. */
static void lay_out_results(struct dkv_cu_slot *slot, const struct dkv_cu_wave *wave,
                            size_t *down_end_out)
{
    struct dkv_cu_report *reports = dkv_cu_take(&slot->io, wave->n_units * sizeof(*reports));
    struct dkv_cu_unit *units = (struct dkv_cu_unit *)(uintptr_t)wave->units_host;
    struct dkv_cu_pending *pending = &slot->pending[slot->n_pending];
    for (uint32_t i = 0; i < wave->n_units; i++) {
        reports[i] = (struct dkv_cu_report){~0ull, ~0ull, ~0ull, 0, 0};
        units[i].report = dkv_cu_twin(slot, &reports[i]);
        units[i].exponent = &units[i].report->exponent;
        pending[i].report = (size_t)((unsigned char *)&reports[i] - slot->io.base);
        pending[i].direct = i > 0 && pending[i].item == pending[i - 1].item
                                ? pending[i - 1].direct
                                : dkv_cu_goes_direct(&slot->items[pending[i].item]);
        if (!pending[i].direct)
            place_results(slot, &units[i], &pending[i], &wave->blocks_host[units[i].block]);
    }
    *down_end_out = slot->io.used;
    for (uint32_t i = 0; i < wave->n_units; i++)
        if (pending[i].direct)
            place_results(slot, &units[i], &pending[i], &wave->blocks_host[units[i].block]);
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
    const size_t bytes = dkv_cu_select_extra_bytes(&engine->device, wave);
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
                                          dkv_cu_twin(slot, lists->of_scorer[s]), engine->stream),
                dkv_cu_scorers[s]->name, err);
    if (status == DKV_OK)
        status = mark(engine, DKV_CU_MARK_SCORED, err);
    if (status != DKV_OK)
        return status;
    return dkv_cu_check(engine,
                        dkv_cu_select_launch(&engine->device, wave, lists->of_selection,
                                             dkv_cu_twin(slot, lists->of_selection),
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
    size_t down_end;
    lay_out_results(slot, &wave, &down_end);
    fill_lists(engine, &wave, first, &lists);
    const size_t up_end = reports + dkv_cu_align(wave.n_units * sizeof(struct dkv_cu_report));

    if ((status = mark(engine, DKV_CU_MARK_START, err)) != DKV_OK ||
        (status = copy_io(engine, slot, b->io_begin, up_end, true, err)) != DKV_OK ||
        (status = await_staged(engine, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_UPLOADED, err)) != DKV_OK ||
        (status = launch_kernels(engine, slot, &wave, first, &lists, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_SELECTED, err)) != DKV_OK ||
        (status = copy_io(engine, slot, reports, down_end, false, err)) != DKV_OK ||
        (status = dkv_cu_send_direct(engine, slot, wave.n_units, err)) != DKV_OK ||
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
                                 const struct dkv_cu_need *need, bool *fits_out,
                                 struct dkv_error *err)
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
    dkv_cu_describe(item, &desc);
    const unsigned char scorer = choose_scorer(engine, &desc);
    uint32_t my_block = UINT32_MAX; /* in the wave being built */

    for (uint32_t head = 0; head < item->block->kv_heads; head++) {
        bool room = false;
        struct dkv_cu_need need = dkv_cu_need_of(engine, item, &desc, dkv_cu_scorers[scorer]);
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
            status = dkv_cu_add_block(engine, slot, item, &desc, scorer, err);
            my_block = b->n_blocks - 1;
        }
        if (status == DKV_OK)
            status = dkv_cu_add_unit(engine, slot, index, head, &need, err);
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
    for (uint64_t h = 0; h < item->block->kv_heads && item->plan->ragged; h++)
        item->counts_out[h] = (uint32_t)item->plan->n_valid;
    for (uint64_t h = 0; h < item->block->kv_heads; h++)
        for (uint64_t i = 0; i < item->plan->n_valid; i++)
            item->keep_out[h * item->plan->n_valid + i] = (int32_t)(item->block->valid_from + i);
    return true;
}

/* Policies and selections that only the CPU engine has are refused by name. */
static bool refuse(struct dkv_item *item)
{
    const struct dkv_params *params = item->params;
    if (params->policy == DKV_POLICY_DROPKV && !item->plan->general)
        return false;
    item->status = dkv_error_set(
        &item->error, DKV_E_UNSUPPORTED,
        params->policy == DKV_POLICY_DROPKV
            ? "cuda engine: policy %s with this gqa, budget or input is answered by "
              "the cpu engine alone"
            : "cuda engine: policy %s is answered by the cpu engine alone",
        dkv_policy_name(params->policy));
    return true;
}

enum dkv_status dkv_cu_run_items(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const unsigned char *only, struct dkv_error *err)
{
    begin_wave(engine, slot);
    for (size_t i = 0; i < slot->n_items; i++) {
        if ((only != NULL && !only[i]) || (only == NULL && answer_at_once(&slot->items[i])))
            continue;
        if (refuse(&slot->items[i]))
            continue;
        const enum dkv_status status = run_item(engine, slot, (uint32_t)i, err);
        if (status != DKV_OK)
            return status;
    }
    return launch_wave(engine, slot, err);
}
