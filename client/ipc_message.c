/* A tensor that lies in a registered buffer is named; any other is copied into the message's bulk,
 * its rows one after the other, since a message has one stretch of bulk and a caller's strides may
 * have anything between their rows. Scales per head and sink logits, which all blocks of a call
 * share, stand at the bulk's beginning.
 */
#include "client/ipc_message.h"

#include <stdlib.h>
#include <string.h>

/* One of a block's tensors. */
struct tensor {
    const struct dkv_view *view;
    uint64_t heads, rows, row_bytes;
};

static void list_tensors(const struct dkv_block *block, const struct dkv_plan *plan,
                         struct tensor tensors[3])
{
    tensors[0] = (struct tensor){&block->query, block->q_heads, block->q_rows,
                                 block->head_dim * dkv_dtype_bytes(block->query.dtype)};
    tensors[1] = (struct tensor){&block->key, block->kv_heads, block->n_tokens,
                                 block->head_dim * dkv_dtype_bytes(block->key.dtype)};
    tensors[2] = (struct tensor){&block->value, block->kv_heads, block->n_tokens,
                                 plan->v_dim * dkv_dtype_bytes(block->value.dtype)};
}

static const struct dkv_ipc_region *find_region(const struct dkv_view *view,
                                                const struct dkv_ipc_region *regions, size_t n,
                                                uint64_t *offset_out)
{
    for (size_t i = 0; i < n; i++)
        if (regions[i].number != 0 &&
            dkv_buffer_holds(regions[i].buffer, view->base, view->bytes, offset_out))
            return &regions[i];
    return NULL;
}

/* GPU memory can be named or refused, but not copied. */
static enum dkv_status check_copying(const struct dkv_view *view,
                                     const struct dkv_ipc_region *regions, size_t n,
                                     struct dkv_error *err)
{
    for (size_t i = 0; i < n; i++) {
        const struct dropkv_buffer *buffer = regions[i].buffer;
        if (!dkv_buffer_is_gpu_at(buffer, view->base))
            continue;
        uint64_t offset;
        if (dkv_buffer_holds(buffer, view->base, view->bytes, &offset))
            return dkv_error_set(err, regions[i].why.status, "%s", regions[i].why.text);
        return dkv_error_set(
            err, DKV_E_INVALID,
            "tensor: %llu bytes from its pointer on, its buffer of GPU memory ends before",
            (unsigned long long)view->bytes);
    }
    return DKV_OK;
}

static void copy_rows(const struct tensor *t, uint8_t *to)
{
    const uint8_t *base = t->view->base;
    for (uint64_t h = 0; h < t->heads; h++) {
        const uint8_t *head = base + h * (uint64_t)t->view->head_stride;
        if ((uint64_t)t->view->token_stride == t->row_bytes) {
            memcpy(to, head, t->rows * t->row_bytes);
            to += t->rows * t->row_bytes;
            continue;
        }
        for (uint64_t r = 0; r < t->rows; r++, to += t->row_bytes)
            memcpy(to, head + r * (uint64_t)t->view->token_stride, t->row_bytes);
    }
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + 63) & ~UINT64_C(63);
}

static uint64_t tensor_bytes(const struct tensor *t)
{
    return aligned(t->heads * t->rows * t->row_bytes);
}

/* A call's small vectors. */
struct floats {
    const float *from;
    uint32_t n;
};

#define N_FLOATS 4u

static void list_floats(const struct dkv_call *call, struct floats vectors[N_FLOATS])
{
    const struct dkv_block *block = &call->blocks[0];
    vectors[0] = (struct floats){block->query.head_scales, block->q_heads};
    vectors[1] = (struct floats){block->key.head_scales, block->kv_heads};
    vectors[2] = (struct floats){block->value.head_scales, block->kv_heads};
    vectors[3] = (struct floats){block->sink_logits, block->q_heads};
}

static uint64_t floats_bytes(const struct dkv_call *call)
{
    struct floats vectors[N_FLOATS];
    uint64_t n = 0;
    list_floats(call, vectors);
    for (unsigned i = 0; i < N_FLOATS; i++)
        n += vectors[i].from != NULL ? vectors[i].n : 0;
    return aligned(n * sizeof(float));
}

/* Copies them; places_out: as messages say where each is. */
static void put_floats(const struct dkv_call *call, uint8_t *bulk, uint32_t places_out[N_FLOATS])
{
    struct floats vectors[N_FLOATS];
    uint32_t at = 0;
    list_floats(call, vectors);
    for (unsigned i = 0; i < N_FLOATS; i++) {
        places_out[i] = vectors[i].from != NULL ? at + 1 : 0;
        if (vectors[i].from == NULL)
            continue;
        memcpy(bulk + at * sizeof(float), vectors[i].from, vectors[i].n * sizeof(float));
        at += vectors[i].n;
    }
}

static enum dkv_status make_bulk(const struct dkv_call *call, const struct dkv_ipc_region *regions,
                                 size_t n_regions, struct dkv_ipc_request *request,
                                 struct dkv_error *err)
{
    uint64_t offset;
    request->bulk_bytes = floats_bytes(call);
    request->bulk = NULL;
    for (uint32_t i = 0; i < call->request.n_blocks; i++) {
        struct tensor tensors[3];
        list_tensors(&call->blocks[i], &call->plans[i], tensors);
        for (int k = 0; k < 3; k++) {
            if (find_region(tensors[k].view, regions, n_regions, &offset) != NULL)
                continue;
            const enum dkv_status status = check_copying(tensors[k].view, regions, n_regions, err);
            if (status != DKV_OK)
                return status;
            request->bulk_bytes += tensor_bytes(&tensors[k]);
        }
    }
    if (request->bulk_bytes == 0)
        return DKV_OK;
    request->bulk = malloc(request->bulk_bytes);
    return request->bulk != NULL
               ? DKV_OK
               : dkv_error_set(err, DKV_E_NOMEM, "no memory for %llu bytes of tensors",
                               (unsigned long long)request->bulk_bytes);
}

static struct dkv_wire_view put_tensor(const struct tensor *t, const struct dkv_ipc_region *regions,
                                       size_t n_regions, uint8_t *bulk, uint64_t *bulk_at)
{
    uint64_t offset;
    const struct dkv_ipc_region *region = find_region(t->view, regions, n_regions, &offset);
    struct dkv_wire_view wire = {.dtype = (uint8_t)t->view->dtype, .scale = t->view->scale};
    if (region != NULL) {
        wire.region = region->number;
        wire.offset = offset;
        wire.token_stride = t->view->token_stride;
        wire.head_stride = t->view->head_stride;
        return wire;
    }
    copy_rows(t, bulk + *bulk_at);
    wire.offset = *bulk_at;
    wire.token_stride = (int64_t)t->row_bytes;
    wire.head_stride = (int64_t)(t->row_bytes * t->rows);
    *bulk_at += tensor_bytes(t);
    return wire;
}

static size_t put_block(const struct dkv_block *block, const struct dkv_plan *plan,
                        const struct dkv_ipc_region *regions, size_t n_regions,
                        const uint32_t places[N_FLOATS], struct dkv_ipc_request *request,
                        uint64_t *bulk_at, uint8_t *out)
{
    struct tensor tensors[3];
    list_tensors(block, plan, tensors);
    struct dkv_wire_block wire = {
        .q_heads = block->q_heads,
        .kv_heads = block->kv_heads,
        .head_dim = block->head_dim,
        .v_dim = plan->v_dim,
        .q_rows = (uint32_t)block->q_rows,
        .n_tokens = (uint32_t)block->n_tokens,
        .query = put_tensor(&tensors[0], regions, n_regions, request->bulk, bulk_at),
        .key = put_tensor(&tensors[1], regions, n_regions, request->bulk, bulk_at),
        .value = put_tensor(&tensors[2], regions, n_regions, request->bulk, bulk_at),
        .sink_floats = places[3],
    };
    wire.query.floats = places[0];
    wire.key.floats = places[1];
    wire.value.floats = places[2];
    return dkv_wire_put_block(out, &wire);
}

enum dkv_status dkv_ipc_put_request(const struct dkv_call *call,
                                    const struct dkv_ipc_region *regions, size_t n_regions,
                                    uint64_t timeout_us, struct dkv_ipc_request *request,
                                    struct dkv_error *err)
{
    uint8_t params_bytes[DKV_WIRE_PARAMS_MAX];
    struct dkv_params params = call->request.params;
    uint64_t bulk_at = floats_bytes(call);
    uint32_t places[N_FLOATS];
    params.timeout = (int64_t)timeout_us;
    params.set |= UINT64_C(1) << DKV_PARAM_TIMEOUT;
    const size_t n_params = dkv_wire_put_params(params_bytes, &params);
    const struct dkv_wire_blocks wire = {
        .n_blocks = call->request.n_blocks,
        .params_bytes = (uint16_t)n_params,
        .flags = call->request.want_scores ? DKV_WIRE_WANT_SCORES : 0,
    };
    enum dkv_status status = make_bulk(call, regions, n_regions, request, err);
    if (status != DKV_OK)
        return status;
    put_floats(call, request->bulk, places);
    size_t n = dkv_wire_put_blocks(request->payload, &wire);
    memcpy(request->payload + n, params_bytes, n_params);
    n += n_params;
    for (uint32_t i = 0; i < call->request.n_blocks; i++)
        n += put_block(&call->blocks[i], &call->plans[i], regions, n_regions, places, request,
                       &bulk_at, request->payload + n);
    request->payload_bytes = n;
    return DKV_OK;
}

static bool is_expected(const struct dkv_call *call, const struct dkv_wire_result *wire,
                        uint64_t bulk_bytes)
{
    uint64_t keep_at = 0;
    uint64_t keep_bytes = 0;
    if (wire->n_blocks != call->request.n_blocks || wire->in_region != 0)
        return false;
    for (uint32_t i = 0; i < wire->n_blocks; i++)
        keep_bytes += call->plans[i].keep_tokens * call->blocks[i].kv_heads * sizeof(int32_t);
    uint64_t scores_at = keep_bytes;
    for (uint32_t i = 0; i < wire->n_blocks; i++) {
        struct dkv_wire_result_block block;
        dkv_wire_get_result_block(wire->blocks, i, &block);
        if (block.kv_heads != call->blocks[i].kv_heads ||
            block.keep_tokens != call->plans[i].keep_tokens ||
            block.n_tokens != call->blocks[i].n_tokens || block.keep_offset != keep_at ||
            block.scores_offset != (call->request.want_scores ? scores_at : DKV_WIRE_NO_SCORES))
            return false;
        keep_at += (uint64_t)block.kv_heads * block.keep_tokens * sizeof(int32_t);
        scores_at += call->request.want_scores
                         ? (uint64_t)block.kv_heads * block.n_tokens * sizeof(float)
                         : 0;
    }
    return bulk_bytes == scores_at;
}

enum dkv_status dkv_ipc_take_result(struct dkv_job *job,
                                    const struct dkv_wire_conn_message *message,
                                    struct dkv_error *err)
{
    const struct dkv_call *call = &job->call;
    struct dkv_wire_result wire;
    enum dkv_status status = dkv_wire_get_result(message->payload, message->header.payload_bytes,
                                                 &wire, err);
    if (status == DKV_OK && !is_expected(call, &wire, message->header.bulk_bytes))
        status = dkv_error_set(err, DKV_E_MALFORMED, "the answer does not fit the request");
    if (status == DKV_OK)
        status = dkv_result_reserve(job->result, call->request.n_blocks, call->blocks[0].kv_heads,
                                    call->blocks[0].n_tokens, call->plans[0].keep_tokens,
                                    call->request.want_scores, err);
    if (status != DKV_OK)
        return status;
    job->result->degraded = wire.degraded;
    job->result->queue_ns = wire.queue_us * 1000;
    job->result->compute_ns = wire.run_us * 1000;
    return DKV_OK;
}
