/* Vectors of floats that a request brings in its bulk: scales per head, sink logits, and what some
 * policies take. Whether a policy takes it is the gate's to judge.
 */
#include "server/ask.h"

#include <inttypes.h>

static const float *floats_at(const struct dkv_ask *ask, uint64_t offset)
{
    return (const float *)(const void *)((const uint8_t *)ask->job->body.data + offset);
}

/* q_heads * v_dim * v_dim, all from clients; UINT64_MAX, which fits nowhere, where that overflows.
 */
static uint64_t metric_floats(uint32_t q_heads, uint32_t v_dim, uint32_t head_dim)
{
    const uint64_t dim = v_dim != 0 ? v_dim : head_dim;
    uint64_t n;
    return dkv_mul_u64(dim * dim, q_heads, &n) ? n : UINT64_MAX;
}

/* ---- score_blocks: each vector has its place ---- */

/* *floats_out stays NULL if there is none. */
static enum dkv_status take_floats(const struct dkv_ask *ask, uint32_t place, uint64_t n,
                                   const char *what, const float **floats_out,
                                   struct dkv_error *err)
{
    const uint64_t room = ask->job->body.received_bytes;
    const uint64_t offset = ((uint64_t)place - 1) * sizeof(float);
    uint64_t n_bytes;
    if (place == 0)
        return DKV_OK;
    if (!dkv_mul_u64(n, sizeof(float), &n_bytes) || !dkv_range_fits(offset, n_bytes, room))
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: %" PRIu64 " floats at byte %" PRIu64
                             " are not within the bulk's %" PRIu64,
                             what, n, offset, room);
    *floats_out = floats_at(ask, offset);
    return DKV_OK;
}

enum dkv_status dkv_ask_take_block_floats(const struct dkv_ask *ask,
                                          const struct dkv_wire_block *wire,
                                          struct dkv_block *block, struct dkv_error *err)
{
    const uint64_t n = (uint64_t)wire->kv_heads * wire->n_tokens;
    const struct {
        const char *name;
        uint32_t place;
        uint64_t n;
        const float **to;
    } vectors[] = {
        {"query: scales", wire->query.floats, wire->q_heads, &block->query.head_scales},
        {"key: scales", wire->key.floats, wire->kv_heads, &block->key.head_scales},
        {"value: scales", wire->value.floats, wire->kv_heads, &block->value.head_scales},
        {"sink_logits", wire->sink_floats, wire->q_heads, &block->sink_logits},
        {"token_weight", wire->token_weight, n, &block->token_weight},
        {"carry_in", wire->carry_in, n, &block->carry_in},
        {"external_scores", wire->external_scores, n, &block->external_scores},
        {"value_metric", wire->value_metric,
         metric_floats(wire->q_heads, wire->v_dim, wire->head_dim), &block->value_metric},
    };
    enum dkv_status status = DKV_OK;
    for (size_t i = 0; status == DKV_OK && i < sizeof(vectors) / sizeof(vectors[0]); i++)
        status = take_floats(ask, vectors[i].place, vectors[i].n, vectors[i].name, vectors[i].to,
                             err);
    return status;
}

/* ---- score: behind the table, tensor by tensor, each of all layers ---- */

enum dkv_status dkv_ask_take_layer_floats(const struct dkv_ask *ask,
                                          const struct dkv_wire_score *wire, struct dkv_error *err)
{
    const struct dkv_wire_cache *cache = &ask->cache->wire;
    const uint64_t room = ask->job->body.received_bytes;
    const uint64_t n = (uint64_t)cache->kv_heads * wire->n_tokens;
    const struct {
        const char *name;
        uint8_t bit;
        uint64_t n;
        size_t to;
    } tensors[] = {
        {"token_weight", DKV_WIRE_TOKEN_WEIGHT, n, offsetof(struct dkv_block, token_weight)},
        {"carry_in", DKV_WIRE_CARRY_IN, n, offsetof(struct dkv_block, carry_in)},
        {"external_scores", DKV_WIRE_EXTERNAL_SCORES, n,
         offsetof(struct dkv_block, external_scores)},
        {"value_metric", DKV_WIRE_VALUE_METRIC,
         metric_floats(cache->q_heads, cache->v_dim, cache->head_dim),
         offsetof(struct dkv_block, value_metric)},
    };
    uint64_t at = dkv_wire_score_bulk_bytes(wire);
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        uint64_t layer_bytes, all_bytes;
        if ((wire->extras & tensors[i].bit) == 0)
            continue;
        if (!dkv_mul_u64(tensors[i].n, sizeof(float), &layer_bytes) ||
            !dkv_mul_u64(layer_bytes, wire->n_layers, &all_bytes) ||
            !dkv_range_fits(at, all_bytes, room))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "%s: %u layers of %" PRIu64 " floats at byte %" PRIu64
                                 " are not within the bulk's %" PRIu64,
                                 tensors[i].name, wire->n_layers, tensors[i].n, at, room);
        for (uint32_t l = 0; l < wire->n_layers; l++) {
            const float **to = (const float **)(void *)((char *)&ask->job->blocks[l] +
                                                        tensors[i].to);
            *to = floats_at(ask, at + l * layer_bytes);
        }
        at += all_bytes;
    }
    if (at != room)
        return dkv_error_set(err, DKV_E_INVALID,
                             "score: %" PRIu64 " bytes of bulk, its parts take %" PRIu64, room, at);
    return DKV_OK;
}
