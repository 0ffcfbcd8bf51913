/* bench --cache-layers: one message for all layers of a prompt, as a serving engine sends it. The
 * memory is that of a batch of as many sequences, which lie one behind the other like layers; the
 * query rows are a ring that is full and begins at its first row. */
#include "client/cli/bench.h"

#include <stdlib.h>
#include <sysexits.h>

/* Layer l of a dense [layers][heads][rows][dim] tensor. */
static struct dropkv_view view_of(const struct dkv_block_set *set, const void *tensor,
                                  int64_t heads, int64_t rows, int64_t dim, enum dkv_dtype dtype,
                                  int64_t layer)
{
    const int64_t row = dim * (int64_t)dkv_dtype_bytes(dtype);
    const char *base = dropkv_buffer_data(set->buffer);
    return (struct dropkv_view){
        .buffer = set->buffer,
        .offset = (size_t)((const char *)tensor - base) + (size_t)(layer * heads * rows * row),
        .dtype = (enum dropkv_dtype)dtype,
        .token_stride = row,
        .head_stride = rows * row,
    };
}

static enum dropkv_status add_cache(struct dkv_bench *b, struct dkv_block_set *set,
                                    struct dropkv_error *error)
{
    const struct dkv_bench_options *o = &b->o;
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_layer *layers = calloc((size_t)o->layers, sizeof(*layers));
    if (layers == NULL)
        return (enum dropkv_status)dkv_error_set((struct dkv_error *)error, DKV_E_NOMEM,
                                                 "no memory for %lld layers", (long long)o->layers);
    for (int64_t l = 0; l < o->layers; l++) {
        layers[l].key = view_of(set, set->key, o->kv_heads, o->tokens, o->head_dim, o->dtype, l);
        layers[l].value = view_of(set, set->value, o->kv_heads, o->tokens, o->v_dim, o->dtype, l);
    }
    layout.q_heads = (uint32_t)o->q_heads;
    layout.kv_heads = (uint32_t)o->kv_heads;
    layout.head_dim = (uint32_t)o->head_dim;
    layout.v_dim = (uint32_t)o->v_dim;
    layout.n_layers = (uint32_t)o->layers;
    layout.layers = layers;
    const enum dropkv_status status = dropkv_cache_add(b->client, &layout, &set->registered, error);
    free(layers);
    return status;
}

static enum dropkv_status add_stash(struct dkv_bench *b, struct dkv_block_set *set,
                                    struct dropkv_error *error)
{
    const struct dkv_bench_options *o = &b->o;
    const struct dropkv_view first = view_of(set, set->query, o->q_heads, o->q_rows, o->head_dim,
                                             dkv_bench_query_dtype(o), 0);
    struct dropkv_stash_layout layout = DROPKV_STASH_LAYOUT_INIT;
    layout.buffer = first.buffer;
    layout.offset = first.offset;
    layout.dtype = first.dtype;
    layout.n_layers = (uint32_t)o->layers;
    layout.n_slots = 1;
    layout.n_rows = (uint32_t)o->q_rows;
    layout.layer_stride = o->q_heads * first.head_stride;
    layout.row_stride = first.token_stride;
    layout.head_stride = first.head_stride;
    return dropkv_stash_add(b->client, &layout, &set->stash, error);
}

int dkv_bench_register(struct dkv_bench *b, struct dkv_block_set *set)
{
    struct dkv_error error;
    struct dropkv_error *err = (struct dropkv_error *)&error;
    if (add_cache(b, set, err) != DROPKV_OK || add_stash(b, set, err) != DROPKV_OK)
        return dkv_fail(b->endpoint, &error);
    return EX_OK;
}

enum dropkv_status dkv_bench_submit_prompt(struct dkv_bench *b, const struct dkv_block_set *set,
                                           void *user, struct dropkv_error *error)
{
    const struct dkv_bench_options *o = &b->o;
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    prompt.cache = set->registered;
    prompt.stash = set->stash;
    prompt.n_tokens = (uint32_t)o->tokens;
    prompt.newest_row = (uint32_t)o->q_rows - 1;
    prompt.q_rows = (uint32_t)o->q_rows;
    prompt.params = o->params.params;
    prompt.n_params = o->params.n_params;
    prompt.user = user;
    return dropkv_submit_prompt(b->client, &prompt, NULL, error);
}
