/* Checks of layouts, before anybody is told of them. */
#include "client/layout.h"

#include "proto/request.h"
#include "proto/wire.h"

static enum dkv_status check_view(const struct dropkv_view *view, const char *what,
                                  struct dkv_error *err)
{
    if (view->buffer == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "%s: buffer is null", what);
    if (dkv_dtype_bytes((enum dkv_dtype)view->dtype) == 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "%s: dtype %d is not one of BF16, FP16, FP32, F8_E4M3, F8_E5M2", what,
                             (int)view->dtype);
    return DKV_OK;
}

enum dkv_status dkv_check_cache_layout(const struct dropkv_cache_layout *layout,
                                       struct dkv_error *err)
{
    if (layout->n_layers == 0 || layout->n_layers > DKV_WIRE_LAYERS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "n_layers %u not in 1..%u", layout->n_layers,
                             DKV_WIRE_LAYERS_MAX);
    if (layout->layers == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "layers is null");
    if (layout->kv_heads == 0 || layout->kv_heads > DKV_HEADS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "kv_heads %u not in 1..%u", layout->kv_heads,
                             DKV_HEADS_MAX);
    if (layout->q_heads == 0 || layout->q_heads > DKV_HEADS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "q_heads %u not in 1..%u", layout->q_heads,
                             DKV_HEADS_MAX);
    enum dkv_status status = DKV_OK;
    for (uint32_t i = 0; status == DKV_OK && i < layout->n_layers; i++) {
        status = check_view(&layout->layers[i].key, "key", err);
        if (status == DKV_OK)
            status = check_view(&layout->layers[i].value, "value", err);
    }
    return status;
}

enum dkv_status dkv_check_stash_layout(const struct dropkv_stash_layout *layout,
                                       struct dkv_error *err)
{
    if (layout->buffer == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "buffer is null");
    if (layout->n_layers == 0 || layout->n_layers > DKV_WIRE_LAYERS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "n_layers %u not in 1..%u", layout->n_layers,
                             DKV_WIRE_LAYERS_MAX);
    if (layout->n_slots == 0 || layout->n_rows == 0)
        return dkv_error_set(err, DKV_E_INVALID, "%s is 0",
                             layout->n_slots == 0 ? "n_slots" : "n_rows");
    if (dkv_dtype_bytes((enum dkv_dtype)layout->dtype) < 2)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "dtype %d is not one of BF16, FP16, FP32",
                             (int)layout->dtype);
    return DKV_OK;
}

enum dkv_status dkv_count_layers(struct dropkv_prompt *prompt, uint32_t n_layers,
                                 struct dkv_error *err)
{
    if (prompt->first_layer >= n_layers || prompt->n_layers > n_layers - prompt->first_layer)
        return dkv_error_set(err, DKV_E_INVALID,
                             "first_layer %u, n_layers %u: the cache has %u layers",
                             prompt->first_layer, prompt->n_layers, n_layers);
    if (prompt->n_layers == 0)
        prompt->n_layers = n_layers - prompt->first_layer;
    return DKV_OK;
}
