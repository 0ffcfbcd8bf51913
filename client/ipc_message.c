/* A tensor that lies in a registered buffer is named; any other is copied into the message's bulk,
 * its rows one after the other, since a message has one stretch of bulk and a caller's strides may
 * have anything between their rows. Floats stand at the bulk's beginning: those that all blocks of
 * a call share, and then each block's, which some policies take.
 */
#include "client/ipc_priv.h"

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

/* One of a call's vectors. */
struct floats {
    const float *from;
    uint64_t n;
};

#define N_SHARED 5u /* of all blocks */
#define N_OWN    3u /* of each */

static void list_shared(const struct dkv_call *call, struct floats vectors[N_SHARED])
{
    const struct dkv_block *block = &call->blocks[0];
    const uint64_t v_dim = call->plans[0].v_dim;
    vectors[0] = (struct floats){block->query.head_scales, block->q_heads};
    vectors[1] = (struct floats){block->key.head_scales, block->kv_heads};
    vectors[2] = (struct floats){block->value.head_scales, block->kv_heads};
    vectors[3] = (struct floats){block->sink_logits, block->q_heads};
    vectors[4] = (struct floats){block->value_metric, block->q_heads * v_dim * v_dim};
}

static void list_own(const struct dkv_block *block, struct floats vectors[N_OWN])
{
    const uint64_t n = block->kv_heads * block->n_tokens;
    vectors[0] = (struct floats){block->token_weight, n};
    vectors[1] = (struct floats){block->carry_in, n};
    vectors[2] = (struct floats){block->external_scores, n};
}

static uint64_t count(const struct floats *vectors, unsigned n_vectors)
{
    uint64_t n = 0;
    for (unsigned i = 0; i < n_vectors; i++)
        n += vectors[i].from != NULL ? vectors[i].n : 0;
    return n;
}

/* All floats of a call. */
static uint64_t count_floats(const struct dkv_call *call)
{
    struct floats shared[N_SHARED], own[N_OWN];
    list_shared(call, shared);
    list_own(&call->blocks[0], own); /* those of a batch are alike */
    return count(shared, N_SHARED) + count(own, N_OWN) * call->request.n_blocks;
}

static uint64_t floats_bytes(const struct dkv_call *call)
{
    return aligned(count_floats(call) * sizeof(float));
}

/* Copies them to float *at of the bulk; places_out: as messages say where each is. */
static void put_floats(const struct floats *vectors, unsigned n_vectors, uint8_t *bulk,
                       uint64_t *at, uint32_t *places_out)
{
    for (unsigned i = 0; i < n_vectors; i++) {
        places_out[i] = vectors[i].from != NULL ? (uint32_t)*at + 1 : 0;
        if (vectors[i].from == NULL)
            continue;
        memcpy(bulk + *at * sizeof(float), vectors[i].from, vectors[i].n * sizeof(float));
        *at += vectors[i].n;
    }
}

static enum dkv_status make_bulk(struct dkv_transport *t, const struct dkv_call *call,
                                 struct dkv_ipc_request *request, struct dkv_error *err)
{
    uint64_t offset;
    uint64_t bytes = floats_bytes(call);
    if (count_floats(call) >= UINT32_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "%llu floats beside the tensors, at most %u go",
                             (unsigned long long)count_floats(call), UINT32_MAX - 1);
    for (uint32_t i = 0; i < call->request.n_blocks; i++) {
        struct tensor tensors[3];
        list_tensors(&call->blocks[i], &call->plans[i], tensors);
        for (int k = 0; k < 3; k++) {
            const struct dkv_view *view = tensors[k].view;
            if (dkv_ipc_region_find(t, view->base, view->bytes, &offset) != NULL)
                continue;
            const enum dkv_status status = dkv_ipc_check_copying(t, view->base, view->bytes, err);
            if (status != DKV_OK)
                return status;
            if (call->fence.buffer != NULL)
                return dkv_error_set(err, DKV_E_INVALID,
                                     "fence: a tensor lies in no buffer that the daemon has, and "
                                     "would be sent before the fence");
            bytes += tensor_bytes(&tensors[k]);
        }
    }
    request->bulk_bytes = bytes;
    request->bulk = bytes > 0 ? dkv_ipc_bulk_get(t, bytes) : NULL;
    if (bytes > 0 && request->bulk == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %llu bytes of tensors",
                             (unsigned long long)bytes);
    return DKV_OK;
}

/* A message's bulk as it fills. */
struct bulk {
    uint8_t *bytes;
    uint64_t floats; /* so many are there */
    uint64_t at;     /* of the next tensor, behind all floats */
};

static struct dkv_wire_view put_tensor(const struct dkv_transport *t, const struct tensor *tensor,
                                       uint32_t floats, struct bulk *bulk)
{
    uint64_t offset;
    const struct dkv_view *view = tensor->view;
    const struct dkv_ipc_region *region = dkv_ipc_region_find(t, view->base, view->bytes, &offset);
    struct dkv_wire_view wire = {
        .dtype = (uint8_t)view->dtype, .scale = view->scale, .floats = floats};
    if (region != NULL) {
        wire.region = region->object.number;
        wire.offset = offset;
        wire.token_stride = view->token_stride;
        wire.head_stride = view->head_stride;
        return wire;
    }
    copy_rows(tensor, bulk->bytes + bulk->at);
    wire.offset = bulk->at;
    wire.token_stride = (int64_t)tensor->row_bytes;
    wire.head_stride = (int64_t)(tensor->row_bytes * tensor->rows);
    bulk->at += tensor_bytes(tensor);
    return wire;
}

static size_t put_block(const struct dkv_transport *t, const struct dkv_block *block,
                        const struct dkv_plan *plan, const uint32_t places[N_SHARED],
                        struct bulk *bulk, uint8_t *out)
{
    struct tensor tensors[3];
    struct floats own[N_OWN];
    uint32_t own_places[N_OWN];
    list_tensors(block, plan, tensors);
    list_own(block, own);
    put_floats(own, N_OWN, bulk->bytes, &bulk->floats, own_places);
    const struct dkv_wire_block wire = {
        .q_heads = block->q_heads,
        .kv_heads = block->kv_heads,
        .head_dim = block->head_dim,
        .v_dim = plan->v_dim,
        .q_rows = (uint32_t)block->q_rows,
        .n_tokens = (uint32_t)block->n_tokens,
        .query = put_tensor(t, &tensors[0], places[0], bulk),
        .key = put_tensor(t, &tensors[1], places[1], bulk),
        .value = put_tensor(t, &tensors[2], places[2], bulk),
        .sink_floats = places[3],
        .token_weight = own_places[0],
        .carry_in = own_places[1],
        .external_scores = own_places[2],
        .value_metric = places[4],
    };
    return dkv_wire_put_block(out, &wire);
}

enum dkv_status dkv_ipc_name_places(const struct dkv_transport *t, const struct dkv_call *call,
                                    struct dkv_wire_fence *fence, struct dkv_wire_output *output,
                                    struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (call->fence.buffer != NULL) {
        fence->offset = call->fence.offset;
        fence->value = call->fence.value;
        status = dkv_ipc_region_number(t, call->fence.buffer, "fence", &fence->region, err);
    }
    if (status == DKV_OK && call->output.buffer != NULL) {
        output->offset = call->output.offset;
        output->bytes = call->output.bytes;
        status = dkv_ipc_region_number(t, call->output.buffer, "output", &output->region, err);
    }
    return status;
}

size_t dkv_ipc_put_params(const struct dkv_call *call, uint64_t timeout_us,
                          uint8_t out[DKV_WIRE_PARAMS_MAX])
{
    struct dkv_params params = call->request.params;
    params.timeout = (int64_t)timeout_us;
    params.set |= UINT64_C(1) << DKV_PARAM_TIMEOUT;
    return dkv_wire_put_params(out, &params);
}

enum dkv_status dkv_ipc_put_blocks(struct dkv_transport *t, const struct dkv_call *call,
                                   uint64_t timeout_us, struct dkv_ipc_request *request,
                                   struct dkv_error *err)
{
    uint8_t params[DKV_WIRE_PARAMS_MAX];
    uint32_t places[N_SHARED];
    struct floats shared[N_SHARED];
    enum dkv_status status = make_bulk(t, call, request, err);
    if (status != DKV_OK)
        return status;
    struct bulk bulk = {request->bulk != NULL ? request->bulk->bytes : NULL, 0, floats_bytes(call)};
    const size_t n_params = dkv_ipc_put_params(call, timeout_us, params);
    struct dkv_wire_blocks wire = {
        .n_blocks = call->request.n_blocks,
        .params_bytes = (uint16_t)n_params,
        .flags = call->request.want_scores ? DKV_WIRE_WANT_SCORES : 0,
    };
    status = dkv_ipc_name_places(t, call, &wire.fence, &wire.output, err);
    if (status != DKV_OK)
        return status;
    list_shared(call, shared);
    put_floats(shared, N_SHARED, bulk.bytes, &bulk.floats, places);
    size_t n = dkv_wire_put_blocks(request->payload, &wire);
    memcpy(request->payload + n, params, n_params);
    n += n_params;
    for (uint32_t i = 0; i < call->request.n_blocks; i++)
        n += put_block(t, &call->blocks[i], &call->plans[i], places, &bulk, request->payload + n);
    request->type = DKV_WIRE_SCORE_BLOCKS;
    request->payload_bytes = n;
    return DKV_OK;
}
