/* A prompt as a SCORE message: numbers of what is registered, and a page table if it has one of its
 * own. What the daemon can judge is left to it. */
#include "client/ipc_priv.h"

#include <string.h>

/* The number of a cache or stash. */
static enum dkv_status number_of(const struct dkv_transport *t, const struct dkv_ipc_object *object,
                                 const struct dkv_transport *owner, const char *what,
                                 uint32_t *number_out, struct dkv_error *err)
{
    if (owner != t)
        return dkv_error_set(err, DKV_E_INVALID, "%s: it belongs to another client", what);
    if (object->refused)
        return dkv_error_set(err, object->why.status, "%.230s", object->why.text);
    *number_out = object->number;
    return DKV_OK;
}

static enum dkv_status name_objects(const struct dkv_transport *t,
                                    const struct dropkv_prompt *prompt, struct dkv_wire_score *wire,
                                    struct dkv_error *err)
{
    const struct dropkv_cache *cache = prompt->cache;
    const struct dropkv_stash *stash = prompt->stash;
    if (cache == NULL || stash == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s: it was removed",
                             cache == NULL ? "cache" : "stash");
    enum dkv_status status = number_of(t, &cache->object, cache->transport, "cache", &wire->cache,
                                       err);
    if (status == DKV_OK)
        status = number_of(t, &stash->object, stash->transport, "stash", &wire->stash, err);
    return status;
}

static enum dkv_status name_table(const struct dkv_transport *t, const struct dropkv_prompt *prompt,
                                  struct dkv_wire_score *wire, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (prompt->table_buffer != NULL) {
        wire->table_kind = DKV_WIRE_TABLE_REGION;
        wire->table_offset = prompt->table_offset;
        status = dkv_ipc_region_number(t, prompt->table_buffer, "table_buffer", &wire->table_region,
                                       err);
    }
    return status;
}

/* An inline table is the message's bulk. */
static enum dkv_status put_table(struct dkv_transport *t, const struct dropkv_prompt *prompt,
                                 struct dkv_wire_score *wire, struct dkv_ipc_request *request,
                                 struct dkv_error *err)
{
    const uint64_t bytes = (uint64_t)prompt->table_entries * prompt->table_entry_bytes;
    if (prompt->table_entries == 0)
        return DKV_OK;
    wire->table_entries = prompt->table_entries;
    wire->entry_bytes = (uint8_t)prompt->table_entry_bytes;
    wire->table_mask = prompt->table_mask;
    if (prompt->has_null_entry) {
        wire->null_entry = prompt->null_entry;
        wire->flags |= DKV_WIRE_NULL_ENTRY;
    }
    if (prompt->table == NULL)
        return DKV_OK;
    wire->table_kind = DKV_WIRE_TABLE_BULK;
    request->bulk = dkv_ipc_bulk_get(t, bytes);
    if (request->bulk == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a page table");
    memcpy(request->bulk->bytes, prompt->table, bytes);
    request->bulk_bytes = bytes;
    return DKV_OK;
}

enum dkv_status dkv_ipc_put_prompt(struct dkv_transport *t, const struct dkv_call *call,
                                   uint64_t timeout_us, struct dkv_ipc_request *request,
                                   struct dkv_error *err)
{
    const struct dropkv_prompt *prompt = &call->prompt;
    uint8_t params[DKV_WIRE_PARAMS_MAX];
    struct dkv_wire_score wire = {
        .slot = prompt->slot,
        .newest_row = prompt->newest_row,
        .q_rows = prompt->q_rows,
        .first_layer = (uint16_t)prompt->first_layer,
        .n_layers = (uint16_t)prompt->n_layers,
        .n_tokens = prompt->n_tokens,
        .valid_from = prompt->valid_from,
        .flags = call->request.want_scores ? DKV_WIRE_WANT_SCORES : 0,
    };
    enum dkv_status status = name_objects(t, prompt, &wire, err);
    if (status == DKV_OK)
        status = name_table(t, prompt, &wire, err);
    if (status == DKV_OK)
        status = dkv_ipc_name_places(t, call, &wire.fence, &wire.output, err);
    if (status == DKV_OK)
        status = put_table(t, prompt, &wire, request, err);
    if (status != DKV_OK)
        return status;
    const size_t n_params = dkv_ipc_put_params(call, timeout_us, params);
    wire.params_bytes = (uint16_t)n_params;
    const size_t n = dkv_wire_put_score(request->payload, &wire);
    memcpy(request->payload + n, params, n_params);
    request->type = DKV_WIRE_SCORE;
    request->payload_bytes = n + n_params;
    return DKV_OK;
}
