/* Binding: once the bytes of a parsed infer request are somewhere, point a dkv_request at them.
 *
 * Tensors are used where they lie, at any alignment. Only two kinds of input are written anew, into
 * the side memory: JSON numbers, which have to become floats, and the small vectors (sink_logits,
 * scales), which blocks hold as float pointers and a client's bytes need not be aligned for.
 */
#include "proto/oip_tensor.h"

#include <stdlib.h>
#include <string.h>

#define SIDE_ALIGN 64u

uint64_t dkv_oip_side_need(const struct dkv_oip_infer *infer, int input)
{
    const struct dkv_oip_tensor *t = &infer->inputs[input];
    const bool vector = !dkv_oip_input_table[input].required;

    if (t->source != DKV_OIP_JSON && (t->source == DKV_OIP_ABSENT || !vector))
        return 0;
    return (t->bytes + SIDE_ALIGN - 1) / SIDE_ALIGN * SIDE_ALIGN; /* bounded by what was parsed */
}

static const json_t *data_of(const struct dkv_oip_infer *infer, int input)
{
    json_t *inputs = json_object_get(infer->document, "inputs"), *element;
    size_t i;

    json_array_foreach (inputs, i, element)
        if (strcmp(json_string_value(json_object_get(element, "name")),
                   dkv_oip_input_table[input].name) == 0)
            return json_object_get(element, "data");
    return NULL;
}

/* The bytes of a shared memory region that a tensor lies in, or NULL if it does not fit. */
static const char *in_region(const struct dkv_oip_tensor *t, const void *base, uint64_t bytes)
{
    if (base == NULL || !dkv_range_fits(t->offset, t->bytes, bytes))
        return NULL;
    return (const char *)base + t->offset;
}

/* Finds the bytes of one input (NULL for an absent one), moving to *side what has to be there. */
static enum dkv_status locate(const struct dkv_oip_infer *infer, int input,
                              const struct dkv_oip_memory *memory, char **side,
                              const void **bytes_out, struct dkv_error *err)
{
    const struct dkv_oip_tensor *t = &infer->inputs[input];
    const uint64_t need = dkv_oip_side_need(infer, input);
    const char *given = NULL;

    if (t->source == DKV_OIP_JSON && infer->numbers != NULL)
        given = (const char *)infer->numbers + (*side - (const char *)memory->side);
    if (t->source == DKV_OIP_BINARY)
        given = (const char *)memory->binary + t->offset;
    if (t->source == DKV_OIP_SHM) {
        given = in_region(t, memory->regions[input].base, memory->regions[input].bytes);
        if (given == NULL)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "input %s: offset and size reach outside the region",
                                 dkv_oip_input_table[input].name);
    }
    *bytes_out = need > 0 ? *side : given;
    if (need > 0 && given != NULL)
        memcpy(*side, given, t->bytes);
    else if (need > 0)
        dkv_oip_tensor_convert(data_of(infer, input), (float *)(void *)*side);
    if (need > 0) /* there may be no side memory at all */
        *side += need;
    return DKV_OK;
}

static void drop_json(struct dkv_oip_infer *infer)
{
    json_decref(infer->document);
    free(infer->numbers);
    infer->document = NULL;
    infer->numbers = NULL;
}

/* The numbers get the places that they will have in the side memory. */
enum dkv_status dkv_oip_infer_settle(struct dkv_oip_infer *infer, struct dkv_error *err)
{
    char *numbers = infer->side_bytes > 0 ? malloc(infer->side_bytes) : NULL;
    uint64_t offset = 0;

    if (infer->side_bytes > 0 && numbers == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %llu bytes of JSON numbers",
                             (unsigned long long)infer->side_bytes);
    for (int i = 0; i < DKV_OIP_INPUTS; i++) {
        if (infer->inputs[i].source == DKV_OIP_JSON)
            dkv_oip_tensor_convert(data_of(infer, i), (float *)(void *)(numbers + offset));
        offset += dkv_oip_side_need(infer, i);
    }
    drop_json(infer);
    infer->numbers = numbers;
    return DKV_OK;
}

/* Block b of a [B][heads][tokens][dim] tensor. */
static struct dkv_view view_of(const struct dkv_oip_tensor *t, const void *bytes,
                               const void *head_scales, uint32_t b)
{
    const uint64_t block_bytes = t->bytes / t->shape[0];
    struct dkv_view view = dkv_view_dense((const char *)bytes + b * block_bytes, block_bytes,
                                          t->dtype, t->shape[2], t->shape[3]);
    view.scale = t->scale;
    view.head_scales = head_scales;
    return view;
}

/* Block b of a [B][heads][tokens] tensor of floats; NULL if there is none. */
static const float *floats_of(const struct dkv_oip_tensor *t, const void *bytes, uint32_t b)
{
    if (t->source == DKV_OIP_ABSENT)
        return NULL;
    return (const float *)bytes + b * t->shape[1] * t->shape[2];
}

enum dkv_status dkv_oip_infer_bind(struct dkv_oip_infer *infer, const struct dkv_oip_memory *memory,
                                   struct dkv_block *blocks_out, struct dkv_request *request_out,
                                   struct dkv_error *err)
{
    const struct dkv_oip_tensor *t = infer->inputs;
    const void *bytes[DKV_OIP_INPUTS];
    char *side = memory->side;

    for (int i = 0; i < DKV_OIP_INPUTS; i++) {
        const enum dkv_status status = locate(infer, i, memory, &side, &bytes[i], err);
        if (status != DKV_OK)
            return status;
    }
    drop_json(infer);

    for (uint32_t b = 0; b < infer->n_blocks; b++)
        blocks_out[b] = (struct dkv_block){
            .q_heads = (uint32_t)t[DKV_OIP_QUERY].shape[1],
            .kv_heads = (uint32_t)t[DKV_OIP_KEY].shape[1],
            .head_dim = (uint32_t)t[DKV_OIP_QUERY].shape[3],
            .v_dim = (uint32_t)t[DKV_OIP_VALUE].shape[3],
            .q_rows = t[DKV_OIP_QUERY].shape[2],
            .n_tokens = t[DKV_OIP_KEY].shape[2],
            .query = view_of(&t[DKV_OIP_QUERY], bytes[DKV_OIP_QUERY], NULL, b),
            .key = view_of(&t[DKV_OIP_KEY], bytes[DKV_OIP_KEY], bytes[DKV_OIP_KEY_SCALE], b),
            .value = view_of(&t[DKV_OIP_VALUE], bytes[DKV_OIP_VALUE], bytes[DKV_OIP_VALUE_SCALE],
                             b),
            .sink_logits = bytes[DKV_OIP_SINK_LOGITS],
            .token_weight = floats_of(&t[DKV_OIP_TOKEN_WEIGHT], bytes[DKV_OIP_TOKEN_WEIGHT], b),
            .carry_in = floats_of(&t[DKV_OIP_CARRY_IN], bytes[DKV_OIP_CARRY_IN], b),
            .external_scores = floats_of(&t[DKV_OIP_EXTERNAL_SCORES],
                                         bytes[DKV_OIP_EXTERNAL_SCORES], b),
            .value_metric = bytes[DKV_OIP_VALUE_METRIC],
        };
    *request_out = (struct dkv_request){
        .params = infer->params,
        .blocks = blocks_out,
        .n_blocks = infer->n_blocks,
        .want_scores = infer->outputs[DKV_OIP_SCORES].wanted,
    };
    return DKV_OK;
}
