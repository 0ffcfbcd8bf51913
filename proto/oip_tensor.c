/* Inputs: name, datatype, shape, and where the bytes are.
 *
 * A tensor's size is worked out from its shape and datatype by checked arithmetic, once; whatever
 * says where the bytes are (binary_data_size, a region's byte size, a count of JSON numbers) has to
 * agree with it, so that later code has one number to trust. Dimensions are taken only up to
 * 2^31-1, which keeps them inside every field of dkv_block; whether they make sense is for the
 * gate.
 */
#include "proto/oip_tensor.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

const struct dkv_oip_tensor_info dkv_oip_input_table[DKV_OIP_INPUTS] = {
    [DKV_OIP_QUERY] = {"query", 4, true},
    [DKV_OIP_KEY] = {"key", 4, true},
    [DKV_OIP_VALUE] = {"value", 4, true},
    [DKV_OIP_SINK_LOGITS] = {"sink_logits", 1, false},
    [DKV_OIP_KEY_SCALE] = {"key_scale", 1, false},
    [DKV_OIP_VALUE_SCALE] = {"value_scale", 1, false},
    [DKV_OIP_TOKEN_WEIGHT] = {"token_weight", 3, false},
    [DKV_OIP_CARRY_IN] = {"carry_in", 3, false},
    [DKV_OIP_EXTERNAL_SCORES] = {"external_scores", 3, false},
    [DKV_OIP_VALUE_METRIC] = {"value_metric", 3, false},
};

const char *const dkv_oip_output_names[DKV_OIP_OUTPUTS] = {
    [DKV_OIP_KEEP_INDICES] = "keep_indices",
    [DKV_OIP_SCORES] = "scores",
    [DKV_OIP_KEEP_OFFSETS] = "keep_offsets",
};

const char *dkv_oip_input_name(enum dkv_oip_input input)
{
    return dkv_oip_input_table[input].name;
}

const char *dkv_oip_output_name(enum dkv_oip_output output)
{
    return dkv_oip_output_names[output];
}

/* What all steps of reading one input need. */
struct reader {
    const json_t *json;
    const struct dkv_oip_tensor_info *info;
    struct dkv_oip_tensor tensor;
    char where[DKV_SHOWN_NAME_BYTES];
    struct dkv_error *err;
};

/* ---- Name, datatype, shape ------------------------------------------------------------------ */

static enum dkv_status find_input(const json_t *json, enum dkv_oip_input *which,
                                  struct dkv_error *err)
{
    const json_t *name = dkv_json_member(json, "name");
    char shown[DKV_SHOWN_NAME_BYTES];

    if (!json_is_string(name))
        return dkv_error_set(err, DKV_E_INVALID, "input: name must be a string");
    for (int i = 0; i < DKV_OIP_INPUTS; i++)
        if (strcmp(json_string_value(name), dkv_oip_input_table[i].name) == 0) {
            *which = (enum dkv_oip_input)i;
            return DKV_OK;
        }
    return dkv_error_set(err, DKV_E_INVALID,
                         "input '%s' is none of query, key, value, sink_logits, key_scale, "
                         "value_scale, token_weight, carry_in, external_scores, value_metric",
                         dkv_show_name(shown, json_string_value(name)));
}

static enum dkv_status read_datatype(struct reader *r)
{
    const json_t *name = dkv_json_member(r->json, "datatype");
    char shown[DKV_SHOWN_NAME_BYTES];

    if (!json_is_string(name))
        return dkv_error_set(r->err, DKV_E_INVALID, "%s: datatype must be a string", r->where);
    r->tensor.dtype = dkv_dtype_parse(json_string_value(name));
    if (r->tensor.dtype != DKV_DTYPE_NONE &&
        strcmp(json_string_value(name), dkv_dtype_name(r->tensor.dtype)) == 0 &&
        (r->info->required || r->tensor.dtype == DKV_FP32))
        return DKV_OK;
    return dkv_error_set(r->err, DKV_E_UNSUPPORTED, "%s: datatype '%s' is not %s", r->where,
                         dkv_show_name(shown, json_string_value(name)),
                         r->info->required ? "one of BF16, FP16, FP32, F8_E4M3, F8_E5M2" : "FP32");
}

static enum dkv_status read_shape(struct reader *r)
{
    const json_t *shape = dkv_json_member(r->json, "shape");
    const json_int_t most = r->info->n_dims > 1 ? INT32_MAX : DKV_HEADS_MAX;
    struct dkv_oip_tensor *t = &r->tensor;

    if (!json_is_array(shape) || json_array_size(shape) != r->info->n_dims)
        return dkv_error_set(r->err, DKV_E_INVALID,
                             "%s: shape must be an array of %u whole numbers", r->where,
                             r->info->n_dims);
    t->n_dims = r->info->n_dims;
    t->bytes = dkv_dtype_bytes(t->dtype);
    for (unsigned i = 0; i < t->n_dims; i++) {
        const json_t *dim = json_array_get(shape, i);
        if (!json_is_integer(dim))
            return dkv_error_set(r->err, DKV_E_INVALID, "%s: shape[%u] must be a whole number",
                                 r->where, i);
        if (json_integer_value(dim) < 1 || json_integer_value(dim) > most)
            return dkv_error_set(r->err, DKV_E_INVALID, "%s: shape[%u] %lld is outside 1..%lld",
                                 r->where, i, (long long)json_integer_value(dim), (long long)most);
        t->shape[i] = (uint64_t)json_integer_value(dim);
        if (!dkv_mul_u64(t->bytes, t->shape[i], &t->bytes))
            return dkv_error_set(r->err, DKV_E_INVALID, "%s: shape makes more than 2^64 bytes",
                                 r->where);
    }
    return DKV_OK;
}

/* ---- JSON numbers --------------------------------------------------------------------------- */

/* Counts the numbers of a nested or flat array; false at the first thing that is none FP32 holds.
 */
static bool count_numbers(const json_t *json, uint64_t *count)
{
    size_t i;
    json_t *element;

    if (json_is_number(json)) {
        (*count)++;
        return fabs(json_number_value(json)) <= (double)FLT_MAX;
    }
    if (!json_is_array(json))
        return false;
    json_array_foreach ((json_t *)json, i, element)
        if (!count_numbers(element, count))
            return false;
    return true;
}

static enum dkv_status read_data(struct reader *r, const json_t *data)
{
    uint64_t count = 0;

    if (r->tensor.dtype != DKV_FP32)
        return dkv_error_set(r->err, DKV_E_INVALID,
                             "%s: receiving %s data via JSON is not supported. Please use the "
                             "binary data format",
                             r->where, dkv_dtype_name(r->tensor.dtype));
    if (!json_is_array(data) || !count_numbers(data, &count))
        return dkv_error_set(r->err, DKV_E_INVALID,
                             "%s: data must be an array of numbers in the range of FP32", r->where);
    if (count != r->tensor.bytes / sizeof(float))
        return dkv_error_set(r->err, DKV_E_INVALID, "%s: data has %llu numbers, shape needs %llu",
                             r->where, (unsigned long long)count,
                             (unsigned long long)(r->tensor.bytes / sizeof(float)));
    r->tensor.source = DKV_OIP_JSON;
    return DKV_OK;
}

static float *convert(const json_t *json, float *to)
{
    size_t i;
    json_t *element;

    if (json_is_number(json)) {
        *to = (float)json_number_value(json);
        return to + 1;
    }
    json_array_foreach ((json_t *)json, i, element)
        to = convert(element, to);
    return to;
}

void dkv_oip_tensor_convert(const json_t *data, float *to)
{
    (void)convert(data, to);
}

/* ---- Where the bytes are -------------------------------------------------------------------- */

static enum dkv_status check_bytes(struct reader *r, uint64_t given)
{
    if (given == r->tensor.bytes)
        return DKV_OK;
    return dkv_error_set(r->err, DKV_E_INVALID,
                         "%s: input byte size mismatch, expected %llu, got %llu", r->where,
                         (unsigned long long)r->tensor.bytes, (unsigned long long)given);
}

static enum dkv_status read_binary(struct reader *r, const json_t *parameters, uint64_t *binary_end)
{
    uint64_t bytes = 0;
    enum dkv_status status = dkv_json_u64(parameters, r->where, "binary_data_size", &bytes, r->err);

    if (status == DKV_OK)
        status = check_bytes(r, bytes);
    if (status != DKV_OK)
        return status;
    r->tensor.source = DKV_OIP_BINARY;
    r->tensor.offset = *binary_end;
    if (!dkv_add_u64(*binary_end, bytes, binary_end))
        return dkv_error_set(r->err, DKV_E_INVALID, "%s: binary data passes 2^64 bytes", r->where);
    return DKV_OK;
}

static enum dkv_status read_region(struct reader *r, const json_t *parameters)
{
    uint64_t bytes = 0;
    enum dkv_status status;

    r->tensor.source = DKV_OIP_SHM;
    if ((status = dkv_json_string(parameters, r->where, "shared_memory_region", r->tensor.region,
                                  sizeof(r->tensor.region), r->err)) != DKV_OK ||
        (status = dkv_json_u64(parameters, r->where, "shared_memory_byte_size", &bytes, r->err)) !=
            DKV_OK ||
        (status = dkv_json_u64(parameters, r->where, "shared_memory_offset", &r->tensor.offset,
                               r->err)) != DKV_OK)
        return status;
    return check_bytes(r, bytes);
}

static enum dkv_status read_scale(struct reader *r, const json_t *parameters)
{
    const json_t *scale = dkv_json_member(parameters, "scale");

    if (scale == NULL)
        return DKV_OK;
    /* Below FLT_MIN it would become 0, which means "none given". */
    if (!json_is_number(scale) || !(json_number_value(scale) >= (double)FLT_MIN) ||
        json_number_value(scale) > (double)FLT_MAX)
        return dkv_error_set(r->err, DKV_E_INVALID, "%s: scale must be a number in %g..%g",
                             r->where, (double)FLT_MIN, (double)FLT_MAX);
    r->tensor.scale = (float)json_number_value(scale);
    return DKV_OK;
}

static enum dkv_status read_content(struct reader *r, uint64_t *binary_end)
{
    static const char *const known[] = {"binary_data_size",
                                        "shared_memory_region",
                                        "shared_memory_byte_size",
                                        "shared_memory_offset",
                                        "scale",
                                        "content_type", /* MLServer's; no meaning */
                                        NULL};
    const json_t *data = dkv_json_member(r->json, "data");
    json_t *parameters = NULL;
    enum dkv_status status;

    if ((status = dkv_json_object(r->json, r->where, "parameters", &parameters, r->err)) !=
            DKV_OK ||
        (status = dkv_json_only(parameters, r->where, known, r->err)) != DKV_OK ||
        (status = read_scale(r, parameters)) != DKV_OK)
        return status;

    const bool binary = dkv_json_member(parameters, "binary_data_size") != NULL;
    const bool region = dkv_json_member(parameters, "shared_memory_region") != NULL;
    if ((data != NULL) + binary + region != 1)
        return dkv_error_set(r->err, DKV_E_INVALID,
                             "%s: exactly one of data, binary_data_size and shared_memory_region "
                             "is needed",
                             r->where);
    if (data != NULL)
        return read_data(r, data);
    return binary ? read_binary(r, parameters, binary_end) : read_region(r, parameters);
}

enum dkv_status dkv_oip_tensor_parse(const json_t *input, struct dkv_oip_infer *infer,
                                     uint64_t *binary_end, struct dkv_error *err)
{
    static const char *const known[] = {"name", "shape", "datatype", "parameters", "data", NULL};
    struct reader r = {.json = input, .err = err};
    enum dkv_oip_input which = DKV_OIP_QUERY;
    enum dkv_status status;

    if (!json_is_object(input))
        return dkv_error_set(err, DKV_E_INVALID, "request: inputs must be an array of objects");
    if ((status = find_input(input, &which, err)) != DKV_OK)
        return status;
    r.info = &dkv_oip_input_table[which];
    snprintf(r.where, sizeof(r.where), "input %s", r.info->name);
    if (infer->inputs[which].source != DKV_OIP_ABSENT)
        return dkv_error_set(err, DKV_E_INVALID, "%s: given twice", r.where);
    if ((status = dkv_json_only(input, r.where, known, err)) != DKV_OK ||
        (status = read_datatype(&r)) != DKV_OK || (status = read_shape(&r)) != DKV_OK ||
        (status = read_content(&r, binary_end)) != DKV_OK)
        return status;
    infer->inputs[which] = r.tensor;
    return DKV_OK;
}
