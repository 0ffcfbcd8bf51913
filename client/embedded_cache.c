/* Caches and stashes of the embedded engine: copies of what the caller said. A prompt takes what it
 * needs of them at submission, so they may go at any time. */
#include "client/embedded_priv.h"
#include "client/layout.h"

#include <stdlib.h>
#include <string.h>

/* n floats, behind those that are there; NULL stays NULL. */
static const float *copy_floats(float **next, const float *from, size_t n)
{
    if (from == NULL)
        return NULL;
    float *copy = memcpy(*next, from, n * sizeof(float));
    *next += n;
    return copy;
}

static void free_cache(struct dkv_embedded_cache *cache)
{
    free(cache->layers);
    free(cache->floats);
    free(cache);
}

static enum dkv_status add_cache(struct dkv_transport *t, const struct dropkv_cache_layout *layout,
                                 struct dropkv_cache **cache_out, struct dkv_error *err)
{
    const enum dkv_status status = dkv_check_cache_layout(layout, err);
    if (status != DKV_OK)
        return status;
    const size_t n = layout->n_layers;
    const size_t n_scales = 2 * n * layout->kv_heads, n_sinks = n * layout->q_heads;
    struct dkv_embedded_cache *cache = calloc(1, sizeof(*cache));
    if (cache != NULL) {
        cache->layers = malloc(n * sizeof(*cache->layers));
        cache->floats = malloc((n_scales + n_sinks) * sizeof(float));
    }
    if (cache == NULL || cache->layers == NULL || cache->floats == NULL) {
        if (cache != NULL)
            free_cache(cache);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache of %u layers",
                             layout->n_layers);
    }
    float *next = cache->floats;
    memcpy(cache->layers, layout->layers, n * sizeof(*cache->layers));
    cache->layout = *layout;
    cache->layout.layers = cache->layers;
    cache->layout.head_scales = copy_floats(&next, layout->head_scales, n_scales);
    cache->layout.sink_logits = copy_floats(&next, layout->sink_logits, n_sinks);
    cache->next = t->caches;
    t->caches = cache;
    *cache_out = (struct dropkv_cache *)(void *)cache;
    return DKV_OK;
}

static enum dkv_status add_stash(struct dkv_transport *t, const struct dropkv_stash_layout *layout,
                                 struct dropkv_stash **stash_out, struct dkv_error *err)
{
    const enum dkv_status status = dkv_check_stash_layout(layout, err);
    if (status != DKV_OK)
        return status;
    struct dkv_embedded_stash *stash = calloc(1, sizeof(*stash));
    if (stash == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a stash");
    *stash = (struct dkv_embedded_stash){t->stashes, *layout};
    t->stashes = stash;
    *stash_out = (struct dropkv_stash *)(void *)stash;
    return DKV_OK;
}

static bool remove_cache(struct dkv_transport *t, struct dropkv_cache *public)
{
    struct dkv_embedded_cache *cache = (void *)public, **at = &t->caches;
    while (*at != cache && *at != NULL)
        at = &(*at)->next;
    if (*at == NULL)
        return false;
    *at = cache->next;
    free_cache(cache);
    return true;
}

static bool remove_stash(struct dkv_transport *t, struct dropkv_stash *public)
{
    struct dkv_embedded_stash *stash = (void *)public, **at = &t->stashes;
    while (*at != stash && *at != NULL)
        at = &(*at)->next;
    if (*at == NULL)
        return false;
    *at = stash->next;
    free(stash);
    return true;
}

/* Work that is under way may read it; what waits is the caller's to cancel. */
static enum dkv_status detach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                              int64_t deadline_ns, struct dkv_error *err)
{
    (void)buffer;
    (void)deadline_ns;
    (void)err;
    dkv_embedded_let_go(t);
    return DKV_OK;
}

static enum dkv_status attach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                              struct dkv_error *err)
{
    (void)t;
    (void)buffer;
    (void)err;
    return DKV_OK;
}

void dkv_embedded_caches_fini(struct dkv_transport *t)
{
    while (t->caches != NULL)
        remove_cache(t, (struct dropkv_cache *)(void *)t->caches);
    while (t->stashes != NULL)
        remove_stash(t, (struct dropkv_stash *)(void *)t->stashes);
}

const struct dkv_transport_objects dkv_embedded_objects = {
    .add_cache = add_cache,
    .add_stash = add_stash,
    .remove_cache = remove_cache,
    .remove_stash = remove_stash,
    .detach = detach,
    .attach = attach,
};
