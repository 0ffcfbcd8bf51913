/* A request's batch is its layers. Answers without offsets divide by counting; with them each layer
 * gets offsets that begin at 0. */
#include "client/cli/layers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- asking ---- */

static const struct dkv_tensor *tensor_of(const struct dkv_named_block *block, int which)
{
    return which == 0 ? block->query : which == 1 ? block->key : block->value;
}

static bool alike(const struct dkv_tensor *a, const struct dkv_tensor *b)
{
    return a->dtype == b->dtype && a->n_dims == b->n_dims &&
           memcmp(a->shape, b->shape, sizeof(a->shape)) == 0;
}

static enum dkv_status check_alike(const struct dkv_block_list *blocks, struct dkv_error *err)
{
    static const char *const names[] = {"query", "key", "value"};
    const struct dkv_named_block *first = &blocks->blocks[0];
    for (size_t i = 1; i < blocks->n_blocks; i++)
        for (int which = 0; which < 3; which++)
            if (!alike(tensor_of(first, which), tensor_of(&blocks->blocks[i], which)))
                return dkv_error_set(err, DKV_E_INVALID,
                                     "%.80s: its %s has another shape or type than that of %.80s; "
                                     "the layers of one request are alike",
                                     blocks->blocks[i].name, names[which], first->name);
    return DKV_OK;
}

/* Whether one stride leads through all; if so *stride_out is it. */
static bool equidistant(const struct dkv_block_list *blocks, int which, int64_t *stride_out)
{
    const uint8_t *first = tensor_of(&blocks->blocks[0], which)->data;
    int64_t stride = 0;
    for (size_t i = 1; i < blocks->n_blocks; i++) {
        const int64_t way = (int64_t)((intptr_t)tensor_of(&blocks->blocks[i], which)->data -
                                      (intptr_t)first);
        if (i == 1)
            stride = way;
        if (way != stride * (int64_t)i)
            return false;
    }
    *stride_out = stride;
    return stride > 0;
}

/* The tensors of all layers, one after the other. */
static uint8_t *copy_all(const struct dkv_block_list *blocks, int which)
{
    const uint64_t bytes = tensor_of(&blocks->blocks[0], which)->bytes;
    uint8_t *copy = calloc(blocks->n_blocks, bytes);
    for (size_t i = 0; copy != NULL && i < blocks->n_blocks; i++)
        memcpy(copy + i * bytes, tensor_of(&blocks->blocks[i], which)->data, bytes);
    return copy;
}

enum dkv_status dkv_layers_request(const struct dkv_block_list *blocks,
                                   struct dropkv_request *request_out,
                                   struct dkv_layer_set *layers_out, struct dkv_error *err)
{
    struct dropkv_tensor *tensors[] = {&request_out->query, &request_out->key, &request_out->value};
    struct dkv_layer_set layers = {0};
    enum dkv_status status = dkv_block_request(&blocks->blocks[0], request_out, err);
    if (status == DKV_OK && request_out->batch != 1)
        status = dkv_error_set(err, DKV_E_INVALID,
                               "%.80s: batch is %u, the layers of one request are of 1 sequence",
                               blocks->blocks[0].name, request_out->batch);
    if (status == DKV_OK)
        status = check_alike(blocks, err);
    for (int which = 0; status == DKV_OK && which < 3; which++) {
        if (equidistant(blocks, which, &tensors[which]->batch_stride))
            continue;
        tensors[which]->batch_stride = 0; /* dense */
        tensors[which]->data = layers.copies[which] = copy_all(blocks, which);
        if (layers.copies[which] == NULL)
            status = dkv_error_set(err, DKV_E_NOMEM, "no memory for %zu layers", blocks->n_blocks);
    }
    if (status != DKV_OK) {
        dkv_layers_fini(&layers);
        return status;
    }
    request_out->batch = (uint32_t)blocks->n_blocks;
    *layers_out = layers;
    return DKV_OK;
}

/* ---- dividing ---- */

/* The offsets of a layer's heads, which begin where the layer's indices do. */
static void divide_ragged(const struct dropkv_result *all, uint32_t layer,
                          struct dropkv_result *part, int32_t *offsets)
{
    const int32_t *from = all->keep_offsets + (size_t)layer * all->kv_heads;
    for (uint32_t h = 0; h <= all->kv_heads; h++)
        offsets[h] = from[h] - from[0];
    part->keep_indices = all->keep_indices + from[0];
    part->keep_tokens = (uint64_t)offsets[all->kv_heads] / all->kv_heads;
    part->keep_offsets = offsets;
}

enum dkv_status dkv_layers_divide(struct dkv_layer_set *layers, struct dropkv_result *take_result,
                                  struct dkv_error *err)
{
    const struct dropkv_result *all = layers->result = take_result;
    const size_t heads = all->kv_heads;
    layers->parts = calloc(all->batch, sizeof(*layers->parts));
    layers->offsets = calloc(all->batch * (heads + 1), sizeof(*layers->offsets));
    if (layers->parts == NULL || layers->offsets == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %u layers", all->batch);
    for (uint32_t l = 0; l < all->batch; l++) {
        struct dropkv_result *part = &layers->parts[l];
        *part = *all;
        part->batch = 1;
        if (all->scores != NULL)
            part->scores = all->scores + l * heads * all->n_tokens;
        if (all->keep_offsets != NULL)
            divide_ragged(all, l, part, layers->offsets + l * (heads + 1));
        else
            part->keep_indices = all->keep_indices + l * heads * all->keep_tokens;
    }
    return DKV_OK;
}

void dkv_layers_fini(struct dkv_layer_set *layers)
{
    for (int which = 0; which < 3; which++)
        free(layers->copies[which]);
    dropkv_result_free(layers->result);
    free(layers->parts);
    free(layers->offsets);
    *layers = (struct dkv_layer_set){0};
}
