/* From a message to blocks. Everything here is arithmetic on what the message and the registered
 * objects say; the gate judges the result, and only what the gate never sees is judged here: that
 * numbers name objects, that a table or a ring lies inside its region, that an output has room.
 *
 * Blocks point into the addresses that stand for a region (server/loan.h); nothing is read here.
 */
#include "server/ask.h"

#include "proto/prompt.h"
#include "server/clock.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define REPLY_BYTES_MAX (UINT64_C(1) << 31)
#ifdef __SANITIZE_ADDRESS__
#define IDLE_ASKS_MAX 0u /* so that a use after the end is seen */
#else
#define IDLE_ASKS_MAX 512u /* kept for requests to come: 2.5 MiB */
#endif

/* ---- life ---- */

/* Requests come and go by the hundred thousand a second: their memory is used again. */
static struct dkv_ask *take_idle(struct dkv_server *server)
{
    struct dkv_list *node = server->n_idle_asks > 0 ? dkv_list_first(&server->idle_asks) : NULL;
    if (node == NULL)
        return malloc(sizeof(struct dkv_ask));
    dkv_list_remove(node);
    server->n_idle_asks--;
    return DKV_LIST_OF(node, struct dkv_ask, node);
}

static void give_idle(struct dkv_server *server, struct dkv_ask *ask)
{
    if (server->n_idle_asks == IDLE_ASKS_MAX) {
        free(ask);
        return;
    }
    dkv_list_push_front(&server->idle_asks, &ask->node);
    server->n_idle_asks++;
}

void dkv_sessions_free_asks(struct dkv_server *server)
{
    while (server->n_idle_asks > 0)
        free(take_idle(server));
}

struct dkv_ask *dkv_ask_new(struct dkv_session *session, uint64_t id)
{
    struct dkv_ask *ask = take_idle(session->all->server);
    if (ask == NULL)
        return NULL;
    memset(ask, 0, offsetof(struct dkv_ask, own_job));
    ask->session = session;
    ask->server = session->all->server;
    ask->id = id;
    ask->started_ns = dkv_clock_ns();
    ask->regions = ask->few;
    dkv_list_init(&ask->node);
    dkv_list_init(&ask->fence.node);
    ask->job = &ask->own_job;
    dkv_job_init(ask->job, &ask->server->arena);
    dkv_job_charge_to(ask->job, &ask->server->bodies.quota,
                      dkv_backend_client_holder(session->client));
    return ask;
}

void dkv_ask_let_go(struct dkv_ask *ask)
{
    const uint32_t n = ask->n_regions;
    ask->n_regions = 0;
    for (uint32_t i = 0; i < n; i++)
        dkv_region_unuse(ask->regions[i]);
    dkv_body_release(&ask->job->rows);
    dkv_body_release(&ask->job->body);
    dkv_cache_unref(ask->cache);
    ask->cache = NULL;
}

void dkv_ask_free(struct dkv_ask *ask)
{
    if (ask == NULL)
        return;
    dkv_fence_drop(&ask->fence);
    dkv_list_remove(&ask->node);
    dkv_ask_let_go(ask);
    dkv_job_fini(ask->job);
    free(ask->rings);
    if (ask->regions != ask->few)
        free(ask->regions);
    give_idle(ask->server, ask);
}

enum dkv_status dkv_ask_use(struct dkv_ask *ask, struct dkv_region *region, struct dkv_error *err)
{
    for (uint32_t i = 0; i < ask->n_regions; i++)
        if (ask->regions[i] == region)
            return DKV_OK;
    if (ask->n_regions == DKV_JOB_FEW && ask->regions == ask->few) {
        struct dkv_region **all = malloc(DKV_SESSION_REGIONS * sizeof(*all));
        if (all == NULL)
            return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request of many regions");
        memcpy(all, ask->few, sizeof(ask->few));
        ask->regions = all;
    }
    ask->regions[ask->n_regions++] = region; /* there are places for as many as can exist */
    dkv_region_use(region);
    return DKV_OK;
}

/* ---- what both kinds have in common ---- */

static enum dkv_status begin(struct dkv_ask *ask, uint32_t n_blocks, uint8_t flags,
                             struct dkv_error *err)
{
    ask->job->request.want_scores = (flags & DKV_WIRE_WANT_SCORES) != 0;
    return dkv_job_add_blocks(ask->job, n_blocks, err);
}

static enum dkv_status take_params(struct dkv_ask *ask, const uint8_t *from, size_t n_bytes,
                                   uint8_t flags, struct dkv_error *err)
{
    struct dkv_params *params = &ask->job->request.params;
    dkv_params_init(params);
    enum dkv_status status = dkv_wire_get_params(from, n_bytes, params, err);
    if (status == DKV_OK && (flags & DKV_WIRE_RECENCY_IF_BUSY) != 0 &&
        !dkv_params_has(params, DKV_PARAM_ON_OVERLOAD))
        status = dkv_params_set_text(params, "on_overload", "recency", err);
    return status;
}

uint64_t dkv_ask_answer_bytes(const struct dkv_ask *ask)
{
    const struct dkv_job *job = ask->job;
    return job->n_keep * sizeof(int32_t) + job->n_scores * sizeof(float) +
           (job->offsets != NULL ? (job->n_heads + 1) * sizeof(int32_t) : 0);
}

/* The job holds the loans of all regions, also of those that only we read and write. */
static enum dkv_status add_loans(struct dkv_ask *ask, struct dkv_error *err)
{
    struct dkv_job *job = ask->job;
    if (ask->n_regions == 0)
        return DKV_OK;
    const enum dkv_status status = dkv_job_add_loans(job, ask->n_regions, err);
    if (status != DKV_OK)
        return status;
    for (uint32_t i = 0; i < ask->n_regions; i++)
        job->loans[job->n_loans++] = ask->regions[i]->loan;
    return DKV_OK;
}

/* What is not mapped becomes memory of a worker's as it is read, at most as much as a body. */
static enum dkv_status check_copying(const struct dkv_ask *ask, struct dkv_error *err)
{
    if (ask->job->n_read_bytes <= ask->server->max_body_bytes || !dkv_job_reads_loose(ask->job))
        return DKV_OK;
    return dkv_error_set(err, DKV_E_TOO_LARGE,
                         "%" PRIu64 " bytes would have to be copied, at most %" PRIu64
                         " are: a memfd sealed against shrink and grow and without holes is read "
                         "without copying",
                         ask->job->n_read_bytes, ask->server->max_body_bytes);
}

/* The gate has bounded the rows' number and length. */
static enum dkv_status check_rings(const struct dkv_job *job, struct dkv_error *err)
{
    uint64_t total = 0;
    for (uint32_t i = 0; job->rings != NULL && i < job->request.n_blocks; i++) {
        const struct dkv_block *block = &job->blocks[i];
        if (job->rings[i].n_rows != 0)
            total += block->head_dim * dkv_dtype_bytes(block->query.dtype) * block->q_heads *
                     block->q_rows;
    }
    if (total <= DKV_RING_BYTES_MAX / 2)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_TOO_LARGE,
                         "stash: %" PRIu64 " bytes of rows lie around the ends of rings, at most "
                         "%" PRIu64,
                         total, DKV_RING_BYTES_MAX / 2);
}

/* Workers write an answer to where the client wants it, if they have that mapped. Not one whose
 * blocks are moved together when their lengths are known, nor one that the status page looks at. */
static void aim(struct dkv_ask *ask)
{
    const struct dkv_job *job = ask->job;
    bool ragged = false;
    if (ask->output == NULL || ask->output->loan->loose || ask->server->streams.strips ||
        ask->output_offset % sizeof(int32_t) != 0 ||
        ask->output->loan->offset % sizeof(int32_t) != 0)
        return;
    for (uint32_t i = 0; i < job->request.n_blocks; i++)
        ragged = ragged || job->plans[i].ragged;
    if (ragged)
        return;
    ask->job->target = ask->output->loan;
    ask->job->target_offset = ask->output_offset;
}

static enum dkv_status finish(struct dkv_ask *ask, struct dkv_error *err)
{
    struct dkv_job *job = ask->job;
    enum dkv_status status = dkv_request_validate(&job->request, job->plans, err);
    if (status == DKV_OK)
        aim(ask);
    if (status == DKV_OK)
        status = check_rings(ask->job, err);
    if (status == DKV_OK)
        status = dkv_ask_place_rows(ask, err);
    if (status == DKV_OK)
        status = add_loans(ask, err);
    if (status == DKV_OK)
        status = dkv_job_prepare(job, REPLY_BYTES_MAX, err);
    if (status == DKV_OK)
        status = check_copying(ask, err);
    if (status == DKV_OK && ask->output != NULL && ask->output_bytes < dkv_ask_answer_bytes(ask))
        status = dkv_error_set(err, DKV_E_INVALID,
                               "output: %" PRIu64 " bytes of room, the answer needs %" PRIu64,
                               ask->output_bytes, dkv_ask_answer_bytes(ask));
    return status;
}

/* ---- score_blocks ---- */

static enum dkv_status make_block(struct dkv_ask *ask, const uint8_t *records, uint32_t i,
                                  struct dkv_error *err)
{
    struct dkv_wire_block wire;
    struct dkv_block *block = &ask->job->blocks[i];
    dkv_wire_get_block(records, i, &wire);
    block->q_heads = wire.q_heads;
    block->kv_heads = wire.kv_heads;
    block->head_dim = wire.head_dim;
    block->v_dim = wire.v_dim;
    block->q_rows = wire.q_rows;
    block->n_tokens = wire.n_tokens;
    block->valid_from = wire.valid_from;
    block->page_tokens = wire.page_tokens;
    const struct dkv_ask_table table = {wire.table_region, wire.table_entries,
                                        wire.table_offset, wire.table_mask,
                                        wire.null_entry,   wire.table_kind,
                                        wire.entry_bytes,  (wire.flags & DKV_WIRE_NULL_ENTRY) != 0};
    enum dkv_status status = dkv_ask_make_view(ask, &wire.query, "query", &block->query, err);
    if (status == DKV_OK)
        status = dkv_ask_make_view(ask, &wire.key, "key", &block->key, err);
    if (status == DKV_OK)
        status = dkv_ask_make_view(ask, &wire.value, "value", &block->value, err);
    if (status == DKV_OK)
        status = dkv_ask_make_table(ask, &table, block, err);
    return status == DKV_OK ? dkv_ask_take_block_floats(ask, &wire, block, err) : status;
}

enum dkv_status dkv_ask_build_blocks(struct dkv_ask *ask, const struct dkv_wire_blocks *wire,
                                     struct dkv_error *err)
{
    enum dkv_status status = begin(ask, wire->n_blocks, wire->flags, err);
    if (status == DKV_OK)
        status = take_params(ask, wire->params, wire->params_bytes, wire->flags, err);
    if (status == DKV_OK)
        status = dkv_ask_take_fence(ask, &wire->fence, err);
    if (status == DKV_OK)
        status = dkv_ask_take_output(ask, &wire->output, err);
    for (uint32_t i = 0; status == DKV_OK && i < wire->n_blocks; i++)
        status = make_block(ask, wire->blocks, i, err);
    if (status != DKV_OK)
        return status;
    dkv_params_resolve(&ask->job->request.params);
    return finish(ask, err);
}

/* ---- score ---- */

static uint64_t row_bytes(const struct dkv_block *block)
{
    return block->head_dim * dkv_dtype_bytes(block->query.dtype);
}

/* Rows around the end of a ring in GPU memory: its worker copies them, by two copies of the
 * driver's, which take a pitch of up to 2 GiB. The view stays that of the ring. */
static enum dkv_status unroll_there(struct dkv_ask *ask, const struct dkv_prompt_stash *stash,
                                    const struct dkv_block *block, uint64_t first,
                                    struct dkv_error *err)
{
    struct dkv_job *job = ask->job;
    const enum dkv_status status = dkv_prompt_check_ring_on_gpu(stash, block->q_heads,
                                                                row_bytes(block), err);
    if (status != DKV_OK)
        return status;
    if (job->rings == NULL)
        job->rings = calloc(job->request.n_blocks, sizeof(*job->rings));
    if (job->rings == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a job");
    job->rings[block - job->blocks] = (struct dkv_ring){first, stash->n_rows};
    return DKV_OK;
}

/* The rows that are used, oldest first. Where they lie around the end of the ring, they will be
 * copied; the view is that of the copy then, dense. */
static enum dkv_status make_query(struct dkv_ask *ask, const struct dkv_wire_stash *stash,
                                  const struct dkv_wire_score *score, uint32_t layer,
                                  struct dkv_block *block, struct dkv_error *err)
{
    struct dkv_wire_view wire = {.region = stash->region,
                                 .dtype = stash->dtype,
                                 .scale = stash->scale,
                                 .token_stride = stash->row_stride,
                                 .head_stride = stash->head_stride};
    const struct dkv_prompt_stash rings = {.offset = stash->offset,
                                           .layer_stride = stash->layer_stride,
                                           .slot_stride = stash->slot_stride,
                                           .row_stride = stash->row_stride,
                                           .head_stride = stash->head_stride,
                                           .n_rows = stash->n_rows};
    struct dkv_prompt_rows rows;
    enum dkv_status status = dkv_prompt_find_rows(&rings, layer, score->slot, score->newest_row,
                                                  (uint32_t)block->q_rows, &rows, err);
    if (status != DKV_OK)
        return status;
    wire.offset = rows.offset;
    status = dkv_ask_make_view(ask, &wire, "stash", &block->query, err);
    if (status == DKV_OK && rows.wraps)
        status = dkv_prompt_check_ring(&rings, &rows, block->q_heads, row_bytes(block),
                                       block->query.bytes, err);
    if (status != DKV_OK || !rows.wraps)
        return status;
    const struct dkv_region *region = dkv_slots_find(&ask->session->regions, stash->region);
    if (dkv_region_on_gpu(region))
        return unroll_there(ask, &rings, block, rows.first, err);
    if (ask->rings == NULL)
        ask->rings = calloc(ask->job->request.n_blocks, sizeof(*ask->rings));
    if (ask->rings == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    struct dkv_ask_ring *ring = &ask->rings[block - ask->job->blocks];
    *ring = (struct dkv_ask_ring){
        .region = region,
        .start = rows.offset,
        .row_stride = (uint64_t)stash->row_stride,
        .head_stride = (uint64_t)stash->head_stride,
        .n_rows = stash->n_rows,
        .first = rows.first,
    };
    dkv_ask_shape_rows(ring, block);
    return DKV_OK;
}

static void take_scales(const struct dkv_cache *cache, uint32_t layer, struct dkv_block *block)
{
    const struct dkv_wire_cache *wire = &cache->wire;
    const float *next = cache->floats;
    if (wire->scales == DKV_WIRE_SCALES_HEAD) {
        block->key.head_scales = next + (size_t)2 * layer * wire->kv_heads;
        block->value.head_scales = next + ((size_t)2 * layer + 1) * wire->kv_heads;
        next += (size_t)2 * wire->n_layers * wire->kv_heads;
    }
    if (wire->has_sinks)
        block->sink_logits = next + (size_t)layer * wire->q_heads;
}

static enum dkv_status make_layer(struct dkv_ask *ask, const struct dkv_wire_stash *stash,
                                  const struct dkv_wire_score *score, uint32_t i,
                                  struct dkv_error *err)
{
    const struct dkv_cache *cache = ask->cache;
    const uint32_t layer = score->first_layer + i;
    struct dkv_block *block = &ask->job->blocks[i];
    block->q_heads = cache->wire.q_heads;
    block->kv_heads = cache->wire.kv_heads;
    block->head_dim = cache->wire.head_dim;
    block->v_dim = cache->wire.v_dim;
    block->q_rows = dkv_prompt_rows_used(ask->job->request.params.window, score->q_rows);
    block->n_tokens = score->n_tokens;
    block->valid_from = score->valid_from;
    block->page_tokens = cache->wire.page_tokens;
    const struct dkv_ask_table table = {
        score->table_region, score->table_entries,
        score->table_offset, score->table_mask,
        score->null_entry,   score->table_kind,
        score->entry_bytes,  (score->flags & DKV_WIRE_NULL_ENTRY) != 0};
    enum dkv_status status = make_query(ask, stash, score, layer, block, err);
    if (status == DKV_OK)
        status = dkv_ask_make_view(ask, &cache->views[2 * layer], "key", &block->key, err);
    if (status == DKV_OK)
        status = dkv_ask_make_view(ask, &cache->views[2 * layer + 1], "value", &block->value, err);
    if (status == DKV_OK)
        status = dkv_ask_make_table(ask, &table, block, err);
    if (status == DKV_OK)
        take_scales(cache, layer, block);
    return status;
}

static enum dkv_status check_score(const struct dkv_wire_score *score,
                                   const struct dkv_cache *cache,
                                   const struct dkv_wire_stash *stash, struct dkv_error *err)
{
    if (cache == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "cache %u does not exist", score->cache);
    if (stash == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "stash %u does not exist", score->stash);
    const struct dkv_prompt_reach reach = {
        .first_layer = score->first_layer,
        .n_layers = score->n_layers,
        .slot = score->slot,
        .newest_row = score->newest_row,
        .q_rows = score->q_rows,
        .cache_layers = cache->wire.n_layers,
        .stash_layers = stash->n_layers,
        .stash_slots = stash->n_slots,
        .stash_rows = stash->n_rows,
    };
    return dkv_prompt_check(&reach, err);
}

/* Scales and sinks of its layers are copied for the worker; score_blocks has them in its bulk. */
static enum dkv_status charge_vectors(struct dkv_ask *ask, uint32_t n_layers, struct dkv_error *err)
{
    const struct dkv_wire_cache *cache = &ask->cache->wire;
    const uint64_t n_bytes = dkv_wire_cache_bulk_bytes(cache) / cache->n_layers * n_layers;
    return n_bytes > 0 ? dkv_job_charge(ask->job, n_bytes, err) : DKV_OK;
}

enum dkv_status dkv_ask_build_score(struct dkv_ask *ask, const struct dkv_wire_score *score,
                                    struct dkv_error *err)
{
    struct dkv_cache *cache = dkv_slots_find(&ask->session->caches, score->cache);
    const struct dkv_wire_stash *stash = dkv_slots_find(&ask->session->stashes, score->stash);
    enum dkv_status status = check_score(score, cache, stash, err);
    if (status == DKV_OK)
        status = begin(ask, score->n_layers, score->flags, err);
    if (status != DKV_OK)
        return status;
    ask->cache = cache;
    cache->n_refs++;
    status = charge_vectors(ask, score->n_layers, err);
    if (status == DKV_OK)
        status = take_params(ask, score->params, score->params_bytes, score->flags, err);
    if (status == DKV_OK)
        status = dkv_prompt_take_defaults(&ask->job->request.params, cache->wire.scale,
                                          cache->wire.logit_softcap, err);
    if (status == DKV_OK)
        status = dkv_ask_take_fence(ask, &score->fence, err);
    if (status == DKV_OK)
        status = dkv_ask_take_output(ask, &score->output, err);
    for (uint32_t i = 0; status == DKV_OK && i < score->n_layers; i++)
        status = make_layer(ask, stash, score, i, err);
    if (status == DKV_OK)
        status = dkv_ask_take_layer_floats(ask, score, err);
    return status == DKV_OK ? finish(ask, err) : status;
}
