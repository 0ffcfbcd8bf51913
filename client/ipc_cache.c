/* Caches and stashes: what the caller says of them, and how the daemon is told. */
#include "client/ipc_priv.h"
#include "client/layout.h"

#include <stdlib.h>
#include <string.h>

/* ---- caches ---- */

static struct dkv_ipc_view take_view(const struct dropkv_view *from)
{
    return (struct dkv_ipc_view){from->buffer,
                                 {.dtype = (uint8_t)from->dtype,
                                  .scale = from->scale,
                                  .offset = from->offset,
                                  .page_stride = from->page_stride,
                                  .token_stride = from->token_stride,
                                  .head_stride = from->head_stride}};
}

/* The first of a message's floats, and where the next ones go. */
static float *copy_floats(float *to, const float *from, uint64_t n)
{
    if (from == NULL)
        return to;
    memcpy(to, from, n * sizeof(float));
    return to + n;
}

static enum dkv_status fill_cache(struct dropkv_cache *cache,
                                  const struct dropkv_cache_layout *layout, struct dkv_error *err)
{
    const uint64_t n = layout->n_layers;
    const uint64_t bulk_bytes = dkv_wire_cache_bulk_bytes(&cache->wire);
    cache->views = calloc(2 * n, sizeof(cache->views[0]));
    cache->floats = malloc(bulk_bytes > 0 ? bulk_bytes : 1);
    if (cache->views == NULL || cache->floats == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache of %llu layers",
                             (unsigned long long)n);
    float *next = copy_floats(cache->floats, layout->head_scales, 2 * n * layout->kv_heads);
    copy_floats(next, layout->sink_logits, n * layout->q_heads);
    for (uint64_t i = 0; i < n; i++) {
        cache->views[2 * i] = take_view(&layout->layers[i].key);
        cache->views[2 * i + 1] = take_view(&layout->layers[i].value);
    }
    return DKV_OK;
}

void dkv_ipc_cache_free(struct dropkv_cache *cache)
{
    free(cache->views);
    free(cache->floats);
    free(cache);
}

static enum dkv_status new_cache(struct dkv_transport *t, const struct dropkv_cache_layout *layout,
                                 struct dropkv_cache **cache_out, struct dkv_error *err)
{
    enum dkv_status status = dkv_check_cache_layout(layout, err);
    if (status != DKV_OK)
        return status;
    struct dropkv_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache");
    cache->wire = (struct dkv_wire_cache){
        .q_heads = layout->q_heads,
        .kv_heads = layout->kv_heads,
        .head_dim = layout->head_dim,
        .v_dim = layout->v_dim,
        .page_tokens = layout->page_tokens,
        .n_layers = (uint16_t)layout->n_layers,
        .scales = layout->head_scales != NULL ? DKV_WIRE_SCALES_HEAD : DKV_WIRE_SCALES_VIEW,
        .has_sinks = layout->sink_logits != NULL,
        .scale = layout->scale,
        .logit_softcap = layout->logit_softcap,
    };
    status = fill_cache(cache, layout, err);
    if (status != DKV_OK) {
        dkv_ipc_cache_free(cache);
        return status;
    }
    dkv_ipc_object_add(t, DKV_IPC_CACHE, &cache->object);
    *cache_out = cache;
    return DKV_OK;
}

/* ---- stashes ---- */

static enum dkv_status new_stash(struct dkv_transport *t, const struct dropkv_stash_layout *layout,
                                 struct dropkv_stash **stash_out, struct dkv_error *err)
{
    const enum dkv_status status = dkv_check_stash_layout(layout, err);
    if (status != DKV_OK)
        return status;
    struct dropkv_stash *stash = calloc(1, sizeof(*stash));
    if (stash == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a stash");
    stash->buffer = layout->buffer;
    stash->wire = (struct dkv_wire_stash){
        .n_slots = layout->n_slots,
        .n_rows = layout->n_rows,
        .n_layers = (uint16_t)layout->n_layers,
        .dtype = (uint8_t)layout->dtype,
        .offset = layout->offset,
        .layer_stride = layout->layer_stride,
        .slot_stride = layout->slot_stride,
        .row_stride = layout->row_stride,
        .head_stride = layout->head_stride,
    };
    dkv_ipc_object_add(t, DKV_IPC_STASH, &stash->object);
    *stash_out = stash;
    return DKV_OK;
}

/* ---- telling the daemon ---- */

void dkv_ipc_cache_send(struct dkv_transport *t, struct dropkv_cache *cache)
{
    const uint32_t n_views = 2u * cache->wire.n_layers;
    const uint64_t bulk_bytes = dkv_wire_cache_bulk_bytes(&cache->wire);
    struct dkv_ipc_bulk *bulk = NULL;
    size_t n = dkv_wire_put_cache(t->payload, &cache->wire);
    for (uint32_t i = 0; i < n_views; i++) {
        struct dkv_ipc_view *view = &cache->views[i];
        if (!dkv_ipc_object_find(t, &cache->object, view->buffer, "cache", &view->wire.region))
            return;
        n += dkv_wire_put_view(t->payload + n, &view->wire);
    }
    if (bulk_bytes > 0) {
        bulk = dkv_ipc_bulk_get(t, bulk_bytes);
        if (bulk == NULL) {
            cache->object.refused = true;
            dkv_error_set(&cache->object.why, DKV_E_NOMEM, "no memory for a cache");
            return;
        }
        memcpy(bulk->bytes, cache->floats, bulk_bytes);
    }
    (void)dkv_ipc_object_send(t, &cache->object, DKV_WIRE_CACHE_ADD, n, bulk, bulk_bytes);
}

void dkv_ipc_stash_send(struct dkv_transport *t, struct dropkv_stash *stash)
{
    if (dkv_ipc_object_find(t, &stash->object, stash->buffer, "stash", &stash->wire.region))
        (void)dkv_ipc_object_send(t, &stash->object, DKV_WIRE_STASH_ADD,
                                  dkv_wire_put_stash(t->payload, &stash->wire), NULL, 0);
}

/* ---- removing ---- */

/* Prompts that name it and are not with the daemon will find nothing. */
static void forget_names(struct dkv_transport *t, const void *object)
{
    for (struct dkv_ipc_carrier *c = t->first; c != NULL; c = c->next) {
        struct dropkv_prompt *prompt = &c->job->call.prompt;
        if (!c->job->call.is_prompt)
            continue;
        prompt->cache = (const void *)prompt->cache == object ? NULL : prompt->cache;
        prompt->stash = (const void *)prompt->stash == object ? NULL : prompt->stash;
    }
}

static bool remove_cache(struct dkv_transport *t, struct dropkv_cache *cache)
{
    if (!dkv_ipc_object_has(t, DKV_IPC_CACHE, cache))
        return false;
    dkv_ipc_object_drop(t, DKV_WIRE_CACHE_DROP, &cache->object);
    dkv_ipc_object_unlink(t, DKV_IPC_CACHE, &cache->object);
    forget_names(t, cache);
    dkv_ipc_cache_free(cache);
    return true;
}

static bool remove_stash(struct dkv_transport *t, struct dropkv_stash *stash)
{
    if (!dkv_ipc_object_has(t, DKV_IPC_STASH, stash))
        return false;
    dkv_ipc_object_drop(t, DKV_WIRE_STASH_DROP, &stash->object);
    dkv_ipc_object_unlink(t, DKV_IPC_STASH, &stash->object);
    forget_names(t, stash);
    free(stash);
    return true;
}

const struct dkv_transport_objects dkv_ipc_objects = {
    .add_cache = new_cache,
    .add_stash = new_stash,
    .remove_cache = remove_cache,
    .remove_stash = remove_stash,
    .detach = dkv_ipc_detach,
    .attach = dkv_ipc_attach,
};
