/* A prompt as a SCORE message: numbers of what is registered, and in the bulk a page table if it
 * has one of its own, and what its policy takes. What the daemon can judge is left to it. */
#include "client/ipc_priv.h"

#include <string.h>

/* The number of a cache or stash. */
static enum dkv_status number_of(const struct dkv_ipc_object *object, uint32_t *number_out,
                                 struct dkv_error *err)
{
    if (object->refused)
        return dkv_error_set(err, object->why.status, "%.230s", object->why.text);
    *number_out = object->number;
    return DKV_OK;
}

static enum dkv_status name_objects(const struct dropkv_prompt *prompt, struct dkv_wire_score *wire,
                                    struct dkv_error *err)
{
    const struct dropkv_cache *cache = prompt->cache;
    const struct dropkv_stash *stash = prompt->stash;
    if (cache == NULL || stash == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s: it was removed",
                             cache == NULL ? "cache" : "stash");
    const enum dkv_status status = number_of(&cache->object, &wire->cache, err);
    return status == DKV_OK ? number_of(&stash->object, &wire->stash, err) : status;
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

static void describe_table(const struct dropkv_prompt *prompt, struct dkv_wire_score *wire)
{
    if (prompt->table_entries == 0)
        return;
    wire->table_entries = prompt->table_entries;
    wire->entry_bytes = (uint8_t)prompt->table_entry_bytes;
    wire->table_mask = prompt->table_mask;
    if (prompt->has_null_entry) {
        wire->null_entry = prompt->null_entry;
        wire->flags |= DKV_WIRE_NULL_ENTRY;
    }
    if (prompt->table != NULL)
        wire->table_kind = DKV_WIRE_TABLE_BULK;
}

/* One part of a message's bulk. */
struct part {
    const void *from; /* NULL: none */
    uint64_t bytes;
};

#define N_PARTS 5u

/* Floats of all layers; UINT64_MAX if their bytes overflow. */
static uint64_t floats_bytes(const struct dropkv_prompt *prompt, uint64_t heads, uint64_t of_head)
{
    uint64_t bytes;
    return dkv_mul_u64(of_head, heads, &bytes) && dkv_mul_u64(bytes, prompt->n_layers, &bytes) &&
                   dkv_mul_u64(bytes, sizeof(float), &bytes)
               ? bytes
               : UINT64_MAX;
}

/* The table, and the extras in the order of their bits. False if their bytes overflow. */
static bool list_parts(const struct dropkv_prompt *prompt, struct part parts[N_PARTS],
                       uint64_t *bytes_out)
{
    const struct dkv_wire_cache *cache = &prompt->cache->wire;
    const uint64_t v_dim = cache->v_dim != 0 ? cache->v_dim : cache->head_dim;
    const uint64_t tokens = floats_bytes(prompt, cache->kv_heads, prompt->n_tokens);
    parts[0] = (struct part){prompt->table,
                             (uint64_t)prompt->table_entries * prompt->table_entry_bytes};
    parts[1] = (struct part){prompt->token_weight, tokens};
    parts[2] = (struct part){prompt->carry_in, tokens};
    parts[3] = (struct part){prompt->external_scores, tokens};
    parts[4] = (struct part){prompt->value_metric,
                             floats_bytes(prompt, cache->q_heads, v_dim * v_dim)};
    *bytes_out = 0;
    for (unsigned i = 0; i < N_PARTS; i++)
        if (parts[i].from != NULL && !dkv_add_u64(*bytes_out, parts[i].bytes, bytes_out))
            return false;
    return *bytes_out < UINT64_MAX;
}

static enum dkv_status put_bulk(struct dkv_transport *t, const struct dropkv_prompt *prompt,
                                struct dkv_wire_score *wire, struct dkv_ipc_request *request,
                                struct dkv_error *err)
{
    struct part parts[N_PARTS];
    uint64_t bytes;
    if (!list_parts(prompt, parts, &bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "n_tokens %u: the sizes of what the policy takes "
                             "overflow",
                             prompt->n_tokens);
    request->bulk_bytes = bytes;
    if (bytes == 0)
        return DKV_OK;
    request->bulk = dkv_ipc_bulk_get(t, bytes);
    if (request->bulk == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %llu bytes to send",
                             (unsigned long long)bytes);
    uint8_t *to = request->bulk->bytes;
    for (unsigned i = 0; i < N_PARTS; i++) {
        if (parts[i].from == NULL)
            continue;
        memcpy(to, parts[i].from, parts[i].bytes);
        to += parts[i].bytes;
        wire->extras = (uint8_t)(wire->extras | (i > 0 ? 1u << (i - 1) : 0u));
    }
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
    enum dkv_status status = name_objects(prompt, &wire, err);
    if (status == DKV_OK)
        status = name_table(t, prompt, &wire, err);
    if (status == DKV_OK)
        status = dkv_ipc_name_places(t, call, &wire.fence, &wire.output, err);
    if (status != DKV_OK)
        return status;
    describe_table(prompt, &wire);
    status = put_bulk(t, prompt, &wire, request, err);
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
