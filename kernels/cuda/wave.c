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
#include "kernels/extras.h"

static bool may_take(const struct dkv_cu_engine *engine, const struct dkv_cu_scorer *scorer,
                     const struct dkv_cu_block *block)
{
    return (scorer->knows_rules || block->form == DKV_CU_FORM_DROPKV) &&
           scorer->takes(&engine->device, block);
}

unsigned char dkv_cu_choose_scorer(const struct dkv_cu_engine *engine,
                                   const struct dkv_cu_block *block)
{
    unsigned char i = 0;
    while (dkv_cu_scorers[i + 1] != NULL &&
           (engine->general_only || !may_take(engine, dkv_cu_scorers[i], block)))
        i++;
    return i;
}

bool dkv_cu_fits(const struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                 const struct dkv_cu_need *need, uint32_t n_units)
{
    const struct dkv_cu_builder *b = engine->builder;
    const struct dkv_cu_arena *stage = &engine->halves[engine->half].arena;
    const size_t fixed = b->n_units * (sizeof(struct dkv_cu_unit) + sizeof(struct dkv_cu_report)) +
                         (b->n_blocks + 1) * sizeof(struct dkv_cu_block) +
                         (b->n_choices + 1) * sizeof(struct dkv_cu_choice);
    return need->scratch <= engine->scratch.bytes - engine->scratch.used &&
           need->staged <= stage->bytes - stage->used &&
           slot->io.used + fixed + b->result_bytes + need->io_up + need->io_down +
                   DKV_CU_EXTRA_BYTES <=
               slot->io.bytes &&
           slot->n_pending + b->n_units + n_units <= DKV_CU_UNITS_MAX;
}

/* ---- launching a wave ---- */

void dkv_cu_begin_wave(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot)
{
    struct dkv_cu_builder *b = engine->builder;
    b->n_choices = 0;
    b->n_blocks = 0;
    b->n_units = 0;
    b->result_bytes = 0;
    b->staged_bytes = 0;
    b->io_begin = slot->io.used;
    engine->scratch.used = engine->held;
    engine->halves[engine->half].arena.used = 0;
}

/* Copies blocks, units and choices into io, units grouped by scorer; first_out[s] is where scorer s
 * begins. */
static void lay_out(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                    struct dkv_cu_wave *wave, uint32_t *first_out)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_cu_block *blocks = dkv_cu_take(&slot->io, b->n_blocks * sizeof(*blocks));
    struct dkv_cu_unit *units = dkv_cu_take(&slot->io, b->n_units * sizeof(*units));
    struct dkv_cu_choice *choices = dkv_cu_take(&slot->io, b->n_choices * sizeof(*choices));
    memcpy(blocks, b->blocks, b->n_blocks * sizeof(*blocks));
    memcpy(choices, b->choices, b->n_choices * sizeof(*choices));
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
        .choices = dkv_cu_twin(slot, choices),
        .choices_host = choices,
        .n_blocks = b->n_blocks,
        .n_units = b->n_units,
        .n_choices = b->n_choices,
        .shared = engine->shared,
    };
}

/* Takes room for results; *device_out is where kernels write them, the offset is returned. */
static size_t take_result(struct dkv_cu_slot *slot, size_t bytes, void **device_out)
{
    unsigned char *host = dkv_cu_take(&slot->io, bytes);
    *device_out = dkv_cu_twin(slot, host);
    return (size_t)(host - slot->io.base);
}

static void lay_out_choices(const struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                            const struct dkv_cu_wave *wave)
{
    struct dkv_cu_choice *choices = (struct dkv_cu_choice *)(uintptr_t)wave->choices_host;
    for (uint32_t i = 0; i < wave->n_choices; i++) {
        struct dkv_cu_choice *choice = &choices[i];
        struct dkv_cu_pending_choice *pending = &slot->pending_choices[slot->n_pending_choices + i];
        void *counts, *keep, *scores = NULL;
        pending->item = engine->builder->choice_items[i];
        pending->counts = take_result(slot, choice->heads * sizeof(uint32_t), &counts);
        pending->keep = take_result(slot, choice->capacity * sizeof(int32_t), &keep);
        pending->scores = 0;
        pending->ends = choice->simple == DKV_CU_SIMPLE_ANY && choice->mode == DKV_HEADS_GLOBAL;
        if (slot->items[pending->item].scores_out != NULL)
            pending->scores = take_result(slot, (size_t)choice->heads * choice->n * sizeof(float),
                                          &scores);
        choice->counts_out = counts;
        choice->keep_out = keep;
        choice->scores_out = scores;
    }
}

static void place_results(struct dkv_cu_slot *slot, struct dkv_cu_unit *unit,
                          struct dkv_cu_pending *pending, const struct dkv_cu_block *block)
{
    void *keep, *scores;
    pending->keep = take_result(slot, block->keep * sizeof(int32_t), &keep);
    unit->keep_out = keep;
    if (slot->items[pending->item].scores_out == NULL)
        return;
    pending->scores = take_result(slot, block->n_valid * sizeof(float), &scores);
    unit->scores_out = scores;
}

/* Reports start out clean and travel both ways; results follow them, and come down with them up to
 * *down_end_out. Those behind it are sent to their callers. */
static void lay_out_results(const struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                            const struct dkv_cu_wave *wave, size_t *down_end_out)
{
    struct dkv_cu_report *reports = dkv_cu_take(&slot->io, wave->n_units * sizeof(*reports));
    struct dkv_cu_unit *units = (struct dkv_cu_unit *)(uintptr_t)wave->units_host;
    struct dkv_cu_pending *pending = &slot->pending[slot->n_pending];
    for (uint32_t i = 0; i < wave->n_units; i++) {
        const struct dkv_cu_block *block = &wave->blocks_host[units[i].block];
        reports[i] = (struct dkv_cu_report){~0ull, ~0ull, ~0ull, 0, 0, 0, 0};
        units[i].report = dkv_cu_twin(slot, &reports[i]);
        if (units[i].exponent == NULL)
            units[i].exponent = &units[i].report->exponent;
        pending[i].report = (size_t)((unsigned char *)&reports[i] - slot->io.base);
        pending[i].keep = pending[i].scores = 0;
        pending[i].direct = false;
        if (block->chosen)
            continue;
        pending[i].direct = i > 0 && pending[i].item == pending[i - 1].item
                                ? pending[i - 1].direct
                                : dkv_cu_goes_direct(&slot->items[pending[i].item]);
        if (!pending[i].direct)
            place_results(slot, &units[i], &pending[i], block);
    }
    lay_out_choices(engine, slot, wave);
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

/* Device memory that the wave works on, and the most that one has. What scorers share counts where
 * one of them that uses it is in the wave. */
static void note_scratch(struct dkv_cu_engine *engine, const struct work_lists *lists)
{
    size_t shared = 0;
    for (uint32_t s = 0; dkv_cu_scorers[s] != NULL; s++) {
        const size_t bytes = lists->of_scorer[s] != NULL && dkv_cu_scorers[s]->shared_bytes != NULL
                                 ? dkv_cu_scorers[s]->shared_bytes(&engine->device)
                                 : 0;
        shared = bytes > shared ? bytes : shared;
    }
    engine->wave_scratch = engine->scratch.used + shared;
    if (engine->wave_scratch > engine->wave_scratch_peak)
        engine->wave_scratch_peak = engine->wave_scratch;
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
    if (status == DKV_OK)
        status = dkv_cu_check(engine,
                              dkv_cu_select_launch(&engine->device, wave, lists->of_selection,
                                                   dkv_cu_twin(slot, lists->of_selection),
                                                   engine->stream),
                              "launching selection", err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine, dkv_cu_choose_launch(&engine->device, wave, engine->stream),
                              "launching choices", err);
    return status;
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

/* The wave's part of io up to the device, or results down. */
static enum dkv_status upload_io(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 size_t begin, size_t end, struct dkv_error *err)
{
    const void *host = slot->io.base + begin;
    void *device = slot->io_device + begin;
    return dkv_cu_check(
        engine,
        end - begin <= DKV_CU_UPLOAD_MAX
            ? dkv_cu_upload_launch(device, host, end - begin, engine->stream)
            : cudaMemcpyAsync(device, host, end - begin, cudaMemcpyHostToDevice, engine->stream),
        "uploading a batch", err);
}

static enum dkv_status download_io(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                   size_t begin, size_t end, struct dkv_error *err)
{
    return dkv_cu_check(engine,
                        cudaMemcpyAsync(slot->io.base + begin, slot->io_device + begin, end - begin,
                                        cudaMemcpyDeviceToHost, engine->stream),
                        "downloading results", err);
}

enum dkv_status dkv_cu_launch_wave(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                   struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_cu_wave wave;
    struct work_lists lists = {0};
    uint32_t first[DKV_CU_SCORERS_MAX + 1];
    if (b->n_units == 0 && b->n_choices == 0)
        return DKV_OK;

    lay_out(engine, slot, &wave, first);
    enum dkv_status status = lay_out_lists(engine, slot, &wave, first, &lists, err);
    if (status != DKV_OK)
        return status;
    const size_t reports = slot->io.used;
    size_t down_end;
    lay_out_results(engine, slot, &wave, &down_end);
    fill_lists(engine, &wave, first, &lists);
    const size_t up_end = reports + dkv_cu_align(wave.n_units * sizeof(struct dkv_cu_report));

    if ((status = mark(engine, DKV_CU_MARK_START, err)) != DKV_OK ||
        (status = upload_io(engine, slot, b->io_begin, up_end, err)) != DKV_OK ||
        (status = await_staged(engine, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_UPLOADED, err)) != DKV_OK ||
        (status = launch_kernels(engine, slot, &wave, first, &lists, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_SELECTED, err)) != DKV_OK ||
        (status = download_io(engine, slot, reports, down_end, err)) != DKV_OK ||
        (status = dkv_cu_send_direct(engine, slot, wave.n_units, err)) != DKV_OK ||
        (status = mark(engine, DKV_CU_MARK_DOWNLOADED, err)) != DKV_OK ||
        (status = turn_halves(engine, err)) != DKV_OK)
        return status;
    slot->n_pending += b->n_units;
    slot->n_pending_choices += b->n_choices;
    note_scratch(engine, &lists);
    status = dkv_cu_check(engine, cudaEventRecord(slot->done, engine->stream), "recording an event",
                          err);
    dkv_cu_begin_wave(engine, slot);
    return status;
}

/* ---- a batch ---- */

enum dkv_status dkv_cu_make_room(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const struct dkv_cu_need *need, bool *fits_out,
                                 struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    *fits_out = dkv_cu_fits(engine, slot, need, 1) &&
                (engine->builder->staged_bytes < DKV_CU_STAGE_WAVE || need->staged == 0);
    if (*fits_out)
        return DKV_OK;
    if ((status = dkv_cu_launch_wave(engine, slot, err)) != DKV_OK)
        return status;
    *fits_out = dkv_cu_fits(engine, slot, need, 1);
    if (*fits_out || (slot->n_pending == 0 && slot->n_pending_choices == 0))
        return DKV_OK;
    if ((status = dkv_cu_drain(engine, slot, err)) != DKV_OK)
        return status;
    dkv_cu_begin_wave(engine, slot);
    *fits_out = dkv_cu_fits(engine, slot, need, 1);
    return DKV_OK;
}

enum dkv_status dkv_cu_run_heads(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 uint32_t index, const struct dkv_cu_block *desc,
                                 const struct dkv_cu_choice *choice, struct dkv_error *err)
{
    struct dkv_cu_builder *b = engine->builder;
    struct dkv_item *item = &slot->items[index];
    struct dkv_error why = {.status = DKV_OK};
    const unsigned char scorer = dkv_cu_choose_scorer(engine, desc);
    uint32_t my_block = UINT32_MAX; /* in the wave being built */

    for (uint32_t head = 0; head < item->block->kv_heads; head++) {
        bool room = false;
        struct dkv_cu_need need = dkv_cu_need_of(engine, item, desc, dkv_cu_scorers[scorer]);
        enum dkv_status status = dkv_cu_make_room(engine, slot, &need, &room, err);
        if (status != DKV_OK)
            return status;
        if (!room) {
            (void)dkv_error_set(&why, DKV_E_NOMEM,
                                "cuda: one KV head needs %zu bytes of scratch and %zu of staging, "
                                "above the %zu and %zu there are",
                                need.scratch, need.staged, engine->scratch.bytes - engine->held,
                                engine->halves[0].arena.bytes);
            break;
        }
        if (my_block == UINT32_MAX || b->n_blocks == 0 || my_block != b->n_blocks - 1) {
            status = dkv_cu_add_block(engine, slot, item, desc, scorer, err);
            my_block = b->n_blocks - 1;
        }
        if (status == DKV_OK)
            status = dkv_cu_add_unit(engine, slot, index, head, &need, choice, err);
        if (status != DKV_OK)
            return status;
        if (item->status != DKV_OK) /* a bad table entry: the other heads have it too */
            return DKV_OK;
    }
    if (why.status != DKV_OK)
        dkv_cu_fail_item(item, &why);
    return DKV_OK;
}

static enum dkv_status run_item(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                uint32_t index, struct dkv_error *err)
{
    struct dkv_item *item = &slot->items[index];
    struct dkv_cu_block desc;
    struct dkv_error why;
    if (dkv_extras_check(item->block, item->params, item->plan, &why) != DKV_OK) {
        dkv_cu_fail_item(item, &why);
        return DKV_OK;
    }
    if (item->plan->general)
        return dkv_cu_run_chosen(engine, slot, index, item->plan->keep_tokens, err);
    dkv_cu_describe(item, &desc);
    return dkv_cu_run_heads(engine, slot, index, &desc, NULL, err);
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

enum dkv_status dkv_cu_run_items(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const unsigned char *only, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    dkv_cu_begin_wave(engine, slot);
    for (uint32_t i = 0, n; i < slot->n_items && status == DKV_OK; i += n) {
        n = 1;
        if ((only != NULL && !only[i]) || (only == NULL && answer_at_once(&slot->items[i])))
            continue;
        if (slot->items[i].params->layers == DKV_LAYERS_CAKE)
            status = dkv_cu_run_layers(engine, slot, i, &n, err);
        else
            status = run_item(engine, slot, i, err);
    }
    return status == DKV_OK ? dkv_cu_launch_wave(engine, slot, err) : status;
}
