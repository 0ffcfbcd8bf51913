/* From a prompt to blocks: what the daemon makes of a SCORE message (server/ask.c), over memory of
 * this process. The gate judges the blocks; only what it never sees is judged here. */
#include "client/buffer.h"
#include "client/embedded_priv.h"
#include "client/layout.h"
#include "proto/prompt.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ROWS_BYTES_MAX (UINT64_C(64) << 20) /* copied for one prompt */

/* Stands for copies until they have a place; the gate wants an address. */
static const uint8_t nowhere = 0;

struct build {
    struct dkv_embedded_carrier *carrier;
    struct dkv_call *call;
    const struct dropkv_prompt *prompt;
    const struct dropkv_cache_layout *cache;
    const struct dropkv_stash_layout *stash;
    float *next_float;
};

static enum dkv_status check(const struct build *b, struct dkv_error *err)
{
    const struct dropkv_prompt *p = b->prompt;
    const struct dkv_prompt_reach reach = {
        .first_layer = p->first_layer,
        .n_layers = p->n_layers,
        .slot = p->slot,
        .newest_row = p->newest_row,
        .q_rows = p->q_rows,
        .cache_layers = b->cache->n_layers,
        .stash_layers = b->stash->n_layers,
        .stash_slots = b->stash->n_slots,
        .stash_rows = b->stash->n_rows,
    };
    return dkv_prompt_check(&reach, err);
}

static struct dkv_view view_of(const struct dropkv_buffer *buffer, uint64_t offset,
                               enum dropkv_dtype dtype)
{
    return (struct dkv_view){
        .base = buffer->base,
        .bytes = buffer->bytes,
        .offset = offset,
        .dtype = (enum dkv_dtype)dtype,
        .place = buffer->on_gpu ? DKV_PLACE_DEVICE : DKV_PLACE_HOST,
    };
}

static struct dkv_view layer_view(const struct dropkv_view *from)
{
    struct dkv_view view = view_of(from->buffer, from->offset, from->dtype);
    view.scale = from->scale;
    view.page_stride = from->page_stride;
    view.token_stride = from->token_stride;
    view.head_stride = from->head_stride;
    return view;
}

/* ---- query rows ---- */

static uint64_t row_bytes(const struct dkv_block *block)
{
    return block->head_dim * dkv_dtype_bytes(block->query.dtype);
}

/* The rows that are used, oldest first. Around the end of a ring on the device they are put in
 * order there, by the engine. */
static enum dkv_status make_query(struct build *b, uint32_t i, struct dkv_block *block,
                                  struct dkv_error *err)
{
    const struct dropkv_stash_layout *stash = b->stash;
    const struct dkv_prompt_stash rings = {.offset = stash->offset,
                                           .layer_stride = stash->layer_stride,
                                           .slot_stride = stash->slot_stride,
                                           .row_stride = stash->row_stride,
                                           .head_stride = stash->head_stride,
                                           .n_rows = stash->n_rows};
    const uint32_t layer = b->prompt->first_layer + i, n_rows = (uint32_t)block->q_rows;
    struct dkv_prompt_rows rows;
    enum dkv_status status = dkv_prompt_find_rows(&rings, layer, b->prompt->slot,
                                                  b->prompt->newest_row, n_rows, &rows, err);
    if (status != DKV_OK)
        return status;
    block->query = view_of(stash->buffer, rows.offset, stash->dtype);
    block->query.token_stride = stash->row_stride;
    block->query.head_stride = stash->head_stride;
    b->carrier->rings[i] = (struct dkv_embedded_ring){.n_rows = 0};
    if (!rows.wraps)
        return DKV_OK;
    status = dkv_prompt_check_ring(&rings, &rows, block->q_heads, row_bytes(block),
                                   stash->buffer->bytes, err);
    if (status != DKV_OK)
        return status;
    b->carrier->rings[i] = (struct dkv_embedded_ring){
        .first = rows.first, .n_rows = stash->n_rows, .view = block->query};
    if (stash->buffer->on_gpu)
        return dkv_prompt_check_ring_on_gpu(&rings, block->q_heads, row_bytes(block), err);
    block->query = dkv_view_dense(&nowhere, row_bytes(block) * block->q_heads * n_rows,
                                  block->query.dtype, n_rows, block->head_dim);
    return DKV_OK;
}

static void copy_ring(const struct dkv_embedded_ring *ring, const struct dkv_block *block,
                      uint8_t *to)
{
    const uint64_t row = row_bytes(block);
    const uint8_t *from = (const uint8_t *)ring->view.base + ring->view.offset;
    for (uint64_t h = 0; h < block->q_heads; h++)
        for (uint64_t r = 0; r < block->q_rows; r++, to += row)
            memcpy(to,
                   from + (ring->first + r) % ring->n_rows * (uint64_t)ring->view.token_stride +
                       h * (uint64_t)ring->view.head_stride,
                   row);
}

/* Behind the gate, which has bounded heads, rows and dimensions. */
static enum dkv_status copy_rings(struct build *b, struct dkv_error *err)
{
    struct dkv_embedded_carrier *c = b->carrier;
    uint64_t total = 0;
    for (uint32_t i = 0; i < b->prompt->n_layers && total <= ROWS_BYTES_MAX; i++)
        total += b->call->blocks[i].query.base == &nowhere ? b->call->blocks[i].query.bytes : 0;
    if (total > ROWS_BYTES_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "query rows around the end of their rings are above %" PRIu64 " bytes",
                             ROWS_BYTES_MAX);
    if (total > c->rows_room) {
        free(c->rows);
        c->rows = malloc(total);
        c->rows_room = c->rows != NULL ? total : 0;
        if (c->rows == NULL)
            return dkv_error_set(err, DKV_E_NOMEM, "no memory for query rows");
    }
    uint8_t *next = c->rows;
    for (uint32_t i = 0; i < b->prompt->n_layers; i++) {
        struct dkv_block *block = &b->call->blocks[i];
        if (block->query.base != &nowhere)
            continue;
        copy_ring(&c->rings[i], block, next);
        c->rings[i].n_rows = 0; /* nothing is left to do */
        block->query.base = next;
        next += block->query.bytes;
    }
    return DKV_OK;
}

/* ---- layers ---- */

static enum dkv_status make_table(const struct build *b, struct dkv_block *block,
                                  struct dkv_error *err)
{
    const struct dropkv_prompt *p = b->prompt;
    const uint64_t bytes = (uint64_t)p->table_entries * p->table_entry_bytes;
    const struct dropkv_buffer *buffer = p->table_buffer;
    if (p->table_entries == 0)
        return DKV_OK;
    if (block->page_tokens == 0)
        return dkv_error_set(err, DKV_E_INVALID, "page table: page_tokens is 0");
    if (buffer != NULL && !dkv_range_fits(p->table_offset, bytes, buffer->bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "page table: %u entries of %u bytes at %" PRIu64
                             " are not within %" PRIu64,
                             p->table_entries, p->table_entry_bytes, (uint64_t)p->table_offset,
                             (uint64_t)buffer->bytes);
    block->table = (struct dkv_page_table){
        .entries = buffer != NULL ? (const uint8_t *)buffer->base + p->table_offset : p->table,
        .n_entries = p->table_entries,
        .entry_bytes = p->table_entry_bytes,
        .place = buffer != NULL && buffer->on_gpu ? DKV_PLACE_DEVICE : DKV_PLACE_HOST,
        .mask = (int64_t)p->table_mask,
        .null_entry = p->null_entry,
        .has_null_entry = p->has_null_entry != 0,
    };
    return DKV_OK;
}

static const float *take_floats(struct build *b, const float *all, size_t at, size_t n)
{
    if (all == NULL)
        return NULL;
    float *copy = memcpy(b->next_float, all + at, n * sizeof(float));
    b->next_float += n;
    return copy;
}

static const float *of_layer(const float *all, uint32_t i, size_t n)
{
    return all != NULL ? all + i * n : NULL;
}

static enum dkv_status make_layer(struct build *b, uint32_t i, struct dkv_error *err)
{
    const struct dropkv_prompt *p = b->prompt;
    const struct dropkv_cache_layout *cache = b->cache;
    const size_t layer = p->first_layer + i;
    const size_t v_dim = cache->v_dim != 0 ? cache->v_dim : cache->head_dim;
    const size_t tokens = (size_t)cache->kv_heads * p->n_tokens;
    struct dkv_block *block = &b->call->blocks[i];
    *block = (struct dkv_block){
        .q_heads = cache->q_heads,
        .kv_heads = cache->kv_heads,
        .head_dim = cache->head_dim,
        .v_dim = cache->v_dim,
        .q_rows = dkv_prompt_rows_used(b->call->request.params.window, p->q_rows),
        .n_tokens = p->n_tokens,
        .valid_from = p->valid_from,
        .page_tokens = cache->page_tokens,
        .key = layer_view(&cache->layers[layer].key),
        .value = layer_view(&cache->layers[layer].value),
        .token_weight = of_layer(p->token_weight, i, tokens),
        .carry_in = of_layer(p->carry_in, i, tokens),
        .external_scores = of_layer(p->external_scores, i, tokens),
        .value_metric = of_layer(p->value_metric, i, (size_t)cache->q_heads * v_dim * v_dim),
    };
    block->key.head_scales = take_floats(b, cache->head_scales, 2 * layer * cache->kv_heads,
                                         cache->kv_heads);
    block->value.head_scales = take_floats(b, cache->head_scales, (2 * layer + 1) * cache->kv_heads,
                                           cache->kv_heads);
    block->sink_logits = take_floats(b, cache->sink_logits, layer * cache->q_heads, cache->q_heads);
    const enum dkv_status status = make_query(b, i, block, err);
    return status == DKV_OK ? make_table(b, block, err) : status;
}

static enum dkv_status reserve(struct build *b, struct dkv_error *err)
{
    struct dkv_embedded_carrier *c = b->carrier;
    const uint32_t n = b->prompt->n_layers;
    if (n > c->rings_room) {
        free(c->rings);
        c->rings = malloc(n * sizeof(*c->rings));
        c->rings_room = c->rings != NULL ? n : 0;
    }
    if (n > c->rings_room ||
        !dkv_call_reserve(b->call, n, n * (2 * b->cache->kv_heads + b->cache->q_heads)))
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %u blocks", n);
    b->next_float = b->call->floats;
    return DKV_OK;
}

/* The prompt's cache and stash, if they are ours: what another kind of client made is not looked
 * into. */
static enum dkv_status find_objects(const struct dkv_transport *t, struct build *b,
                                    struct dkv_error *err)
{
    const struct dkv_embedded_cache *cache = t->caches;
    const struct dkv_embedded_stash *stash = t->stashes;
    while (cache != NULL && (const void *)cache != b->prompt->cache)
        cache = cache->next;
    while (stash != NULL && (const void *)stash != b->prompt->stash)
        stash = stash->next;
    if (cache == NULL || stash == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "%s: it belongs to another client",
                             cache == NULL ? "cache" : "stash");
    b->cache = &cache->layout;
    b->stash = &stash->layout;
    return DKV_OK;
}

enum dkv_status dkv_embedded_build_prompt(struct dkv_transport *t, struct dkv_embedded_carrier *c,
                                          struct dkv_error *err)
{
    struct dkv_call *call = &c->job->call;
    struct build b = {.carrier = c, .call = call, .prompt = &call->prompt};
    enum dkv_status status = find_objects(t, &b, err);
    if (status == DKV_OK)
        status = dkv_count_layers(&call->prompt, b.cache->n_layers, err);
    if (status == DKV_OK)
        status = check(&b, err);
    if (status == DKV_OK)
        status = reserve(&b, err);
    if (status == DKV_OK)
        status = dkv_prompt_take_defaults(&call->request.params, b.cache->scale,
                                          b.cache->logit_softcap, err);
    for (uint32_t i = 0; status == DKV_OK && i < call->prompt.n_layers; i++)
        status = make_layer(&b, i, err);
    if (status != DKV_OK)
        return status;
    call->request.blocks = call->blocks;
    call->request.n_blocks = call->prompt.n_layers;
    memset(call->plans, 0, call->request.n_blocks * sizeof(call->plans[0]));
    status = dkv_request_validate(&call->request, call->plans, err);
    return status == DKV_OK ? copy_rings(&b, err) : status;
}
