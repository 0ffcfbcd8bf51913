/* An answer back into a result. The daemon is believed in what it computed, not in sizes: every
 * record must be what the call makes it, and lie where its neighbours leave room for it. */
#include "client/ipc_priv.h"

/* What an answer has to look like. */
struct shape {
    uint32_t n_blocks;
    uint32_t kv_heads;
    uint64_t n_tokens;
    uint64_t keep_tokens;
    bool ragged;
    uint64_t n_keep; /* indices of all blocks, if ragged */
};

/* The same for every block of a batch, and for every layer of a prompt. How many tokens of a prompt
 * are kept only the daemon knows; so are its heads, once its cache was removed. */
static struct shape shape_of(const struct dkv_call *call, const struct dkv_wire_result_block *first)
{
    const struct dropkv_prompt *prompt = &call->prompt;
    if (!call->is_prompt)
        return (struct shape){call->request.n_blocks,   call->blocks[0].kv_heads,
                              call->blocks[0].n_tokens, call->plans[0].keep_tokens,
                              call->plans[0].ragged,    0};
    return (struct shape){prompt->n_layers,
                          prompt->cache != NULL ? prompt->cache->wire.kv_heads : first->kv_heads,
                          prompt->n_tokens,
                          first->keep_tokens,
                          first->n_ragged != 0,
                          0};
}

/* Heads of unequal lengths: the blocks' records add up, and the offsets of all heads come last. */
static bool is_expected_ragged(const struct dkv_wire_result *wire, struct shape *shape,
                               bool with_scores, uint64_t *all_bytes_out)
{
    const uint64_t scores_bytes = with_scores ? shape->n_tokens * shape->kv_heads * sizeof(float)
                                              : 0;
    struct dkv_wire_result_block block;
    for (uint32_t i = 0; i < wire->n_blocks; i++) {
        dkv_wire_get_result_block(wire->blocks, i, &block);
        if (block.kv_heads != shape->kv_heads || block.n_tokens != shape->n_tokens ||
            block.keep_offset != shape->n_keep * sizeof(int32_t) ||
            block.n_ragged < shape->kv_heads || block.n_ragged > shape->kv_heads * shape->n_tokens)
            return false;
        shape->n_keep += block.n_ragged;
    }
    for (uint32_t i = 0; i < wire->n_blocks; i++) {
        dkv_wire_get_result_block(wire->blocks, i, &block);
        if (block.scores_offset !=
            (with_scores ? shape->n_keep * sizeof(int32_t) + i * scores_bytes : DKV_WIRE_NO_SCORES))
            return false;
    }
    *all_bytes_out = shape->n_keep * sizeof(int32_t) + shape->n_blocks * scores_bytes +
                     ((uint64_t)shape->n_blocks * shape->kv_heads + 1) * sizeof(int32_t);
    return true;
}

static bool is_expected(const struct dkv_call *call, const struct dkv_wire_result *wire,
                        struct shape *shape, uint64_t bulk_bytes)
{
    const bool with_scores = call->request.want_scores;
    const bool in_region = call->output.buffer != NULL;
    if (wire->n_blocks != shape->n_blocks || wire->in_region != in_region ||
        shape->kv_heads > DKV_HEADS_MAX || shape->keep_tokens > shape->n_tokens)
        return false;
    uint64_t ragged_bytes;
    if (shape->ragged)
        return is_expected_ragged(wire, shape, with_scores, &ragged_bytes) &&
               (in_region ? bulk_bytes == 0 && ragged_bytes <= call->output.bytes
                          : bulk_bytes == ragged_bytes);
    const uint64_t keep_bytes = shape->keep_tokens * shape->kv_heads * sizeof(int32_t);
    const uint64_t scores_bytes = with_scores ? shape->n_tokens * shape->kv_heads * sizeof(float)
                                              : 0;
    for (uint32_t i = 0; i < wire->n_blocks; i++) {
        struct dkv_wire_result_block block;
        dkv_wire_get_result_block(wire->blocks, i, &block);
        if (block.kv_heads != shape->kv_heads || block.keep_tokens != shape->keep_tokens ||
            block.n_ragged != 0 || block.n_tokens != shape->n_tokens ||
            block.keep_offset != i * keep_bytes ||
            block.scores_offset != (with_scores ? shape->n_blocks * keep_bytes + i * scores_bytes
                                                : DKV_WIRE_NO_SCORES))
            return false;
    }
    const uint64_t all_bytes = shape->n_blocks * (keep_bytes + scores_bytes);
    return in_region ? bulk_bytes == 0 && all_bytes <= call->output.bytes : bulk_bytes == all_bytes;
}

static enum dkv_status make_room(struct dkv_job *job, const struct shape *shape,
                                 struct dkv_error *err)
{
    const struct dkv_call *call = &job->call;
    if (shape->ragged && call->output.buffer == NULL)
        return dkv_result_reserve_ragged(job->result, shape->n_blocks, shape->kv_heads,
                                         shape->n_tokens, shape->n_keep, call->request.want_scores,
                                         err);
    if (call->output.buffer == NULL)
        return dkv_result_reserve(job->result, shape->n_blocks, shape->kv_heads, shape->n_tokens,
                                  shape->keep_tokens, call->request.want_scores, err);
    const uint8_t *base = (const uint8_t *)call->output.buffer->base + call->output.offset;
    const uint64_t n_heads = (uint64_t)shape->n_blocks * shape->kv_heads;
    const uint64_t n_keep = shape->ragged ? shape->n_keep : n_heads * shape->keep_tokens;
    const uint64_t keep_bytes = n_keep * sizeof(int32_t);
    const uint64_t scores_bytes = call->request.want_scores
                                      ? n_heads * shape->n_tokens * sizeof(float)
                                      : 0;
    dkv_result_borrow(job->result, shape->n_blocks, shape->kv_heads, shape->n_tokens,
                      shape->keep_tokens, (const int32_t *)(const void *)base,
                      call->request.want_scores ? (const float *)(const void *)(base + keep_bytes)
                                                : NULL);
    if (!shape->ragged)
        return DKV_OK;
    job->result->keep_offsets = (const int32_t *)(const void *)(base + keep_bytes + scores_bytes);
    job->result->keep_tokens = n_keep / n_heads;
    return dkv_result_judge(job->result, n_keep, err);
}

enum dkv_status dkv_ipc_take_result(struct dkv_job *job,
                                    const struct dkv_wire_conn_message *message,
                                    struct dkv_error *err)
{
    struct dkv_wire_result wire;
    struct dkv_wire_result_block first = {0};
    enum dkv_status status = dkv_wire_get_result(message->payload, message->header.payload_bytes,
                                                 &wire, err);
    if (status != DKV_OK)
        return status;
    if (wire.n_blocks > 0)
        dkv_wire_get_result_block(wire.blocks, 0, &first);
    struct shape shape = shape_of(&job->call, &first);
    if (!is_expected(&job->call, &wire, &shape, message->header.bulk_bytes))
        return dkv_error_set(err, DKV_E_MALFORMED, "the answer does not fit the request");
    status = make_room(job, &shape, err);
    if (status != DKV_OK)
        return status;
    job->result->degraded = wire.degraded;
    job->result->queue_ns = wire.queue_us * 1000;
    job->result->compute_ns = wire.run_us * 1000;
    return DKV_OK;
}
