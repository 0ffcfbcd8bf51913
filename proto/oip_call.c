/* The client's side of an infer request: head and binary section.
 *
 * The binary section is never put together in memory. dkv_oip_call_read() maps any position in it
 * back to (tensor, block, head, token, byte) and copies from the caller's views, as long runs as
 * the strides allow; so a transport can pull a gigabyte through a small buffer.
 */
#include "proto/oip_tensor.h"

#include <string.h>

/* ---- What a call sends ---------------------------------------------------------------------- */

/* One input over all blocks; vectors are one row. */
struct part {
    enum dkv_oip_input input;
    enum dkv_dtype dtype;
    uint64_t heads, tokens, dim; /* of each block; vectors: 1, 1, length */
    uint32_t n_blocks;           /* vectors: 1 */
};

static bool part_of(const struct dkv_request *request, enum dkv_oip_input input, struct part *part)
{
    const struct dkv_block *b = &request->blocks[0];
    const uint32_t n = request->n_blocks;
    const uint64_t v_dim = b->v_dim != 0 ? b->v_dim : b->head_dim;

    switch (input) {
    case DKV_OIP_QUERY:
        *part = (struct part){input, b->query.dtype, b->q_heads, b->q_rows, b->head_dim, n};
        return true;
    case DKV_OIP_KEY:
        *part = (struct part){input, b->key.dtype, b->kv_heads, b->n_tokens, b->head_dim, n};
        return true;
    case DKV_OIP_VALUE:
        *part = (struct part){input, b->value.dtype, b->kv_heads, b->n_tokens, v_dim, n};
        return true;
    case DKV_OIP_SINK_LOGITS:
        *part = (struct part){input, DKV_FP32, 1, 1, b->q_heads, 1};
        return b->sink_logits != NULL;
    case DKV_OIP_KEY_SCALE:
        *part = (struct part){input, DKV_FP32, 1, 1, b->kv_heads, 1};
        return b->key.head_scales != NULL;
    case DKV_OIP_VALUE_SCALE:
        *part = (struct part){input, DKV_FP32, 1, 1, b->kv_heads, 1};
        return b->value.head_scales != NULL;
    case DKV_OIP_TOKEN_WEIGHT:
        *part = (struct part){input, DKV_FP32, 1, b->kv_heads, b->n_tokens, n};
        return b->token_weight != NULL;
    case DKV_OIP_CARRY_IN:
        *part = (struct part){input, DKV_FP32, 1, b->kv_heads, b->n_tokens, n};
        return b->carry_in != NULL;
    case DKV_OIP_EXTERNAL_SCORES:
        *part = (struct part){input, DKV_FP32, 1, b->kv_heads, b->n_tokens, n};
        return b->external_scores != NULL;
    case DKV_OIP_VALUE_METRIC:
        *part = (struct part){input, DKV_FP32, b->q_heads, v_dim, v_dim, 1};
        return b->value_metric != NULL;
    case DKV_OIP_INPUTS: break;
    }
    return false;
}

static uint64_t row_bytes(const struct part *part)
{
    return part->dim * dkv_dtype_bytes(part->dtype);
}

static uint64_t block_bytes(const struct part *part)
{
    return row_bytes(part) * part->tokens * part->heads; /* the gate has bounded each factor */
}

static struct dkv_view vector_view(const float *values, const struct part *part)
{
    return dkv_view_dense(values, row_bytes(part), DKV_FP32, 1, part->dim);
}

static struct dkv_view floats_view(const float *values, const struct part *part)
{
    return dkv_view_dense(values, block_bytes(part), DKV_FP32, part->tokens, part->dim);
}

static struct dkv_view view_of(const struct dkv_request *request, const struct part *part,
                               uint64_t block)
{
    const struct dkv_block *b = &request->blocks[block];

    switch (part->input) {
    case DKV_OIP_QUERY: return b->query;
    case DKV_OIP_KEY: return b->key;
    case DKV_OIP_VALUE: return b->value;
    case DKV_OIP_SINK_LOGITS: return vector_view(b->sink_logits, part);
    case DKV_OIP_KEY_SCALE: return vector_view(b->key.head_scales, part);
    case DKV_OIP_TOKEN_WEIGHT: return floats_view(b->token_weight, part);
    case DKV_OIP_CARRY_IN: return floats_view(b->carry_in, part);
    case DKV_OIP_EXTERNAL_SCORES: return floats_view(b->external_scores, part);
    case DKV_OIP_VALUE_METRIC: return floats_view(b->value_metric, part);
    default: return vector_view(b->value.head_scales, part);
    }
}

/* ---- What has a form in the protocol -------------------------------------------------------- */

static enum dkv_status unsupported(const char *what, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_UNSUPPORTED, "over HTTP %s", what);
}

static bool same_floats(const float *a, const float *b, uint64_t n)
{
    return a == b || (a != NULL && b != NULL && memcmp(a, b, n * sizeof(float)) == 0);
}

static bool same_scale(const struct dkv_view *a, const struct dkv_view *b, uint64_t heads)
{
    return a->scale == b->scale && same_floats(a->head_scales, b->head_scales, heads);
}

/* In one tensor of B blocks, all have one shape, one type and one scale. */
static bool alike(const struct dkv_block *a, const struct dkv_block *b)
{
    return a->q_heads == b->q_heads && a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->v_dim == b->v_dim && a->q_rows == b->q_rows && a->n_tokens == b->n_tokens &&
           a->query.dtype == b->query.dtype && a->key.dtype == b->key.dtype &&
           same_scale(&a->query, &b->query, a->q_heads) &&
           same_scale(&a->key, &b->key, a->kv_heads) &&
           same_scale(&a->value, &b->value, a->kv_heads) &&
           same_floats(a->sink_logits, b->sink_logits, a->q_heads) &&
           a->value_metric == b->value_metric &&
           (a->token_weight == NULL) == (b->token_weight == NULL) &&
           (a->carry_in == NULL) == (b->carry_in == NULL) &&
           (a->external_scores == NULL) == (b->external_scores == NULL);
}

static enum dkv_status check_form(const struct dkv_request *request, struct dkv_error *err)
{
    for (uint32_t i = 0; i < request->n_blocks; i++) {
        const struct dkv_block *b = &request->blocks[i];
        if (b->page_tokens != 0)
            return unsupported("paged caches cannot be sent", err);
        if (b->valid_from != 0)
            return unsupported("blocks start at their first token, valid_from must be 0", err);
        if (b->query.place != DKV_PLACE_HOST || b->key.place != DKV_PLACE_HOST ||
            b->value.place != DKV_PLACE_HOST)
            return unsupported("tensors must be in host memory", err);
        if (b->query.head_scales != NULL)
            return unsupported("queries have one scale, not one per head", err);
        if (!alike(&request->blocks[0], b))
            return unsupported("all blocks of a request have one shape, type and scale", err);
    }
    return DKV_OK;
}

static enum dkv_status check_id(const char *id, struct dkv_error *err)
{
    size_t n = 0;

    if (id == NULL)
        return DKV_OK;
    while (n < DKV_OIP_ID_BYTES_MAX && id[n] >= 0x20 && id[n] < 0x7f)
        n++;
    if (id[n] == '\0')
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID, "id: not 0..%u printable ASCII characters",
                         DKV_OIP_ID_BYTES_MAX);
}

/* ---- The head ------------------------------------------------------------------------------- */

static json_t *parameters_json(const struct dkv_params *params)
{
    json_t *object = json_object();

    for (int i = 0; i < DKV_PARAM_COUNT; i++) {
        const enum dkv_param_id id = (enum dkv_param_id)i;
        const struct dkv_value value = dkv_params_get(params, id);
        if (!dkv_params_has(params, id))
            continue;
        dkv_json_set(&object, dkv_param_info(id)->name,
                     value.kind == DKV_VALUE_INT    ? json_integer(value.integer)
                     : value.kind == DKV_VALUE_REAL ? json_real(value.real)
                                                    : json_string(value.string));
    }
    return object;
}

static json_t *input_json(const struct dkv_request *request, const struct part *part)
{
    const bool tensor = dkv_oip_input_table[part->input].required;
    const struct dkv_view view = view_of(request, part, 0);
    const json_int_t n_bytes = (json_int_t)block_bytes(part) * part->n_blocks;
    json_t *shape = part->input == DKV_OIP_VALUE_METRIC
                        ? json_pack("[I, I, I]", (json_int_t)part->heads, (json_int_t)part->tokens,
                                    (json_int_t)part->dim)
                    : part->input >= DKV_OIP_TOKEN_WEIGHT
                        ? json_pack("[I, I, I]", (json_int_t)part->n_blocks,
                                    (json_int_t)part->tokens, (json_int_t)part->dim)
                    : tensor ? json_pack("[I, I, I, I]", (json_int_t)part->n_blocks,
                                         (json_int_t)part->heads, (json_int_t)part->tokens,
                                         (json_int_t)part->dim)
                             : json_pack("[I]", (json_int_t)part->dim);
    json_t *parameters = json_pack("{s:I}", "binary_data_size", n_bytes);

    if (view.scale != 0 && view.scale != 1 && view.head_scales == NULL)
        dkv_json_set(&parameters, "scale", json_real((double)view.scale));
    return json_pack("{s:s, s:s, s:o, s:o}", "name", dkv_oip_input_table[part->input].name,
                     "datatype", dkv_dtype_name(part->dtype), "shape", shape, "parameters",
                     parameters);
}

static json_t *outputs_json(bool want_scores, bool ragged)
{
    json_t *list = json_array();

    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        if (i == DKV_OIP_KEEP_INDICES || (i == DKV_OIP_SCORES ? want_scores : ragged))
            dkv_json_append(&list, json_pack("{s:s, s:{s:b}}", "name", dkv_oip_output_names[i],
                                             "parameters", "binary_data", true));
    return list;
}

enum dkv_status dkv_oip_call_encode(const struct dkv_request *request, const char *id,
                                    struct dkv_oip_call *call_out, struct dkv_error *err)
{
    struct dkv_oip_call call = {.request = request};
    const bool ragged = request->params.heads != DKV_HEADS_UNIFORM ||
                        request->params.layers != DKV_LAYERS_UNIFORM;
    enum dkv_status status;
    struct part part;

    if ((status = check_form(request, err)) != DKV_OK || (status = check_id(id, err)) != DKV_OK)
        return status;
    json_t *inputs = json_array();
    for (int i = 0; i < DKV_OIP_INPUTS; i++)
        if (part_of(request, (enum dkv_oip_input)i, &part)) {
            call.binary_bytes += block_bytes(&part) * part.n_blocks;
            dkv_json_append(&inputs, input_json(request, &part));
        }
    json_t *root = json_pack("{s:o, s:o, s:o}", "parameters", parameters_json(&request->params),
                             "inputs", inputs, "outputs",
                             outputs_json(request->want_scores, ragged));
    if (id != NULL)
        dkv_json_set(&root, "id", json_string(id));
    status = dkv_json_print(root, &call.head);
    if (status != DKV_OK)
        return dkv_error_set(err, status, "no memory for the request");
    *call_out = call;
    return DKV_OK;
}

void dkv_oip_call_fini(struct dkv_oip_call *call)
{
    dkv_oip_text_fini(&call->head);
    memset(call, 0, sizeof(*call));
}

/* ---- The binary section --------------------------------------------------------------------- */

/* The address of byte `at` of a part, and how many bytes from there on lie together. */
static const char *run_at(const struct dkv_request *request, const struct part *part, uint64_t at,
                          uint64_t *run_out)
{
    const uint64_t row = row_bytes(part), head = row * part->tokens, block = head * part->heads;
    const struct dkv_view view = view_of(request, part, at / block);
    const uint64_t h = at % block / head, t = at % head / row, byte = at % row;
    const bool rows_together = (uint64_t)view.token_stride == row;
    const bool heads_together = rows_together && (uint64_t)view.head_stride == head;

    *run_out = heads_together ? block - at % block : rows_together ? head - at % head : row - byte;
    return (const char *)view.base + view.offset + h * (uint64_t)view.head_stride +
           t * (uint64_t)view.token_stride + byte;
}

/* Copies from one part until it or the room ends. */
static size_t read_part(const struct dkv_request *request, const struct part *part, uint64_t at,
                        char *to, size_t room)
{
    const uint64_t end = block_bytes(part) * part->n_blocks;
    size_t done = 0;

    while (done < room && at < end) {
        uint64_t run;
        const char *from = run_at(request, part, at, &run);
        if (run > room - done)
            run = room - done;
        memcpy(to + done, from, run);
        done += run;
        at += run;
    }
    return done;
}

size_t dkv_oip_call_read(const struct dkv_oip_call *call, uint64_t offset, void *to, size_t n_bytes)
{
    uint64_t start = 0;
    size_t done = 0;
    struct part part;

    for (int i = 0; i < DKV_OIP_INPUTS && done < n_bytes; i++) {
        if (!part_of(call->request, (enum dkv_oip_input)i, &part))
            continue;
        const uint64_t end = start + block_bytes(&part) * part.n_blocks;
        if (offset + done < end)
            done += read_part(call->request, &part, offset + done - start, (char *)to + done,
                              n_bytes - done);
        start = end;
    }
    return done;
}
