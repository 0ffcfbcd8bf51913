/* The client's side of replies. A server is not trusted more than a client is: sizes are checked
 * before they become offsets, and texts are made fit for a terminal.
 */
#include "proto/oip_tensor.h"

#include <string.h>

/* ---- Outputs -------------------------------------------------------------------------------- */

static enum dkv_status malformed(const char *output, const char *what, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_MALFORMED, "reply: output %s %s", output, what);
}

/* [B, Hkv, last], each at least 1 and small enough for what it is stored in. */
static bool read_shape(const json_t *output, uint64_t shape[3])
{
    const json_t *list = json_object_get(output, "shape");

    if (!json_is_array(list) || json_array_size(list) != 3)
        return false;
    for (size_t i = 0; i < 3; i++) {
        const json_t *dim = json_array_get(list, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 1 ||
            json_integer_value(dim) > INT32_MAX)
            return false;
        shape[i] = (uint64_t)json_integer_value(dim);
    }
    return true;
}

/* Checks one output of four-byte elements and moves *binary_end behind it. */
static enum dkv_status read_output(const json_t *output, const char *name, const char *datatype,
                                   uint64_t shape[3], uint64_t *binary_end, struct dkv_error *err)
{
    const json_t *type = json_object_get(output, "datatype");
    const json_t *parameters = json_object_get(output, "parameters");
    uint64_t given = 0, needed = 4;
    const enum dkv_status status = dkv_json_u64(parameters, name, "binary_data_size", &given, err);

    if (status != DKV_OK)
        return status;
    if (!json_is_string(type) || strcmp(json_string_value(type), datatype) != 0)
        return malformed(name, "has another datatype than it should", err);
    if (!read_shape(output, shape))
        return malformed(name, "has a shape that is not three sizes", err);
    for (int i = 0; i < 3; i++)
        if (!dkv_mul_u64(needed, shape[i], &needed))
            return malformed(name, "has a shape of more than 2^64 bytes", err);
    if (given != needed)
        return malformed(name, "has a binary_data_size that differs from its shape", err);
    if (!dkv_add_u64(*binary_end, given, binary_end))
        return malformed(name, "passes 2^64 bytes", err);
    return DKV_OK;
}

static enum dkv_status read_keep(const json_t *output, struct dkv_oip_answer *answer, uint64_t *end,
                                 struct dkv_error *err)
{
    uint64_t shape[3] = {0};

    if (answer->keep_tokens != 0)
        return malformed("keep_indices", "is there twice", err);
    answer->keep_offset = *end;
    const enum dkv_status status = read_output(output, "keep_indices", "INT32", shape, end, err);
    answer->n_blocks = (uint32_t)shape[0];
    answer->kv_heads = (uint32_t)shape[1];
    answer->keep_tokens = shape[2];
    return status;
}

/* Checks a list of one dimension, int32. */
static enum dkv_status read_list(const json_t *output, const char *name, uint64_t *count_out,
                                 uint64_t *end, struct dkv_error *err)
{
    const json_t *type = json_object_get(output, "datatype");
    const json_t *shape = json_object_get(output, "shape");
    const json_t *dim = json_array_get(shape, 0);
    uint64_t given = 0;
    const enum dkv_status status = dkv_json_u64(json_object_get(output, "parameters"), name,
                                                "binary_data_size", &given, err);

    if (status != DKV_OK)
        return status;
    if (!json_is_string(type) || strcmp(json_string_value(type), "INT32") != 0)
        return malformed(name, "has another datatype than it should", err);
    if (json_array_size(shape) != 1 || !json_is_integer(dim) || json_integer_value(dim) < 1 ||
        json_integer_value(dim) > INT32_MAX)
        return malformed(name, "has a shape that is not one size", err);
    *count_out = (uint64_t)json_integer_value(dim);
    if (given != *count_out * sizeof(int32_t) || !dkv_add_u64(*end, given, end))
        return malformed(name, "has a binary_data_size that differs from its shape", err);
    return DKV_OK;
}

static enum dkv_status read_ragged(const json_t *output, struct dkv_oip_answer *answer,
                                   uint64_t *end, struct dkv_error *err)
{
    if (answer->keep_tokens != 0 || answer->n_keep != 0)
        return malformed("keep_indices", "is there twice", err);
    answer->ragged = true;
    answer->keep_offset = *end;
    return read_list(output, "keep_indices", &answer->n_keep, end, err);
}

static enum dkv_status read_offsets(const json_t *output, struct dkv_oip_answer *answer,
                                    uint64_t *end, struct dkv_error *err)
{
    if (answer->n_offsets != 0)
        return malformed("keep_offsets", "is there twice", err);
    answer->offsets_offset = *end;
    return read_list(output, "keep_offsets", &answer->n_offsets, end, err);
}

static bool is_list(const json_t *output)
{
    return json_array_size(json_object_get(output, "shape")) == 1;
}

static enum dkv_status read_scores(const json_t *output, uint64_t shape[3],
                                   struct dkv_oip_answer *answer, uint64_t *end,
                                   struct dkv_error *err)
{
    if (answer->has_scores)
        return malformed("scores", "is there twice", err);
    answer->scores_offset = *end;
    answer->has_scores = true;
    const enum dkv_status status = read_output(output, "scores", "FP32", shape, end, err);
    answer->n_tokens = shape[2];
    return status;
}

static enum dkv_status read_outputs(const json_t *root, uint64_t binary_bytes,
                                    struct dkv_oip_answer *answer, struct dkv_error *err)
{
    const json_t *outputs = json_object_get(root, "outputs");
    uint64_t end = 0, scores_shape[3] = {0};
    size_t i;
    json_t *output;

    json_array_foreach ((json_t *)outputs, i, output) {
        const json_t *name = json_object_get(output, "name");
        enum dkv_status status;
        if (!json_is_string(name))
            return malformed("without a name", "in the list", err);
        if (strcmp(json_string_value(name), "keep_offsets") == 0)
            status = read_offsets(output, answer, &end, err);
        else if (strcmp(json_string_value(name), "keep_indices") == 0 && is_list(output))
            status = read_ragged(output, answer, &end, err);
        else if (strcmp(json_string_value(name), "keep_indices") == 0)
            status = read_keep(output, answer, &end, err);
        else if (strcmp(json_string_value(name), "scores") == 0)
            status = read_scores(output, scores_shape, answer, &end, err);
        else
            return malformed("of an unknown name", "in the list", err);
        if (status != DKV_OK)
            return status;
    }
    if (answer->keep_tokens == 0 && !answer->ragged)
        return malformed("keep_indices", "is missing", err);
    if (answer->ragged && answer->n_offsets == 0)
        return malformed("keep_offsets", "is missing", err);
    if (answer->has_scores && !answer->ragged &&
        (scores_shape[0] != answer->n_blocks || scores_shape[1] != answer->kv_heads))
        return malformed("scores", "differs from keep_indices in shape", err);
    if (end != binary_bytes)
        return dkv_error_set(err, DKV_E_MALFORMED,
                             "reply: outputs take %llu bytes of binary data, the body has %llu",
                             (unsigned long long)end, (unsigned long long)binary_bytes);
    return DKV_OK;
}

/* ---- The head ------------------------------------------------------------------------------- */

static enum dkv_status read_root(const json_t *root, uint64_t binary_bytes,
                                 struct dkv_oip_answer *answer, struct dkv_error *err)
{
    json_t *parameters = NULL;
    enum dkv_status status;

    if ((status = dkv_json_string(root, "reply", "id", answer->id, sizeof(answer->id), err)) !=
            DKV_OK ||
        (status = dkv_json_object(root, "reply", "parameters", &parameters, err)) != DKV_OK ||
        (status = dkv_json_string(parameters, "reply", "backend", answer->backend,
                                  sizeof(answer->backend), err)) != DKV_OK ||
        (status = dkv_json_bool(parameters, "reply", "degraded", &answer->degraded, err)) != DKV_OK)
        return status;
    return read_outputs(root, binary_bytes, answer, err);
}

enum dkv_status dkv_oip_answer_parse(const char *json, size_t json_bytes, uint64_t binary_bytes,
                                     struct dkv_oip_answer *answer_out, struct dkv_error *err)
{
    struct dkv_oip_answer answer = {0};
    json_t *root;
    enum dkv_status status = dkv_json_load(json, json_bytes, &root, err);

    if (status != DKV_OK)
        return status;
    status = read_root(root, binary_bytes, &answer, err);
    json_decref(root);
    if (status != DKV_OK) {
        if (err != NULL)
            err->status = DKV_E_MALFORMED; /* it is the server's fault, whatever it is */
        return DKV_E_MALFORMED;
    }
    *answer_out = answer;
    return DKV_OK;
}

/* ---- Errors --------------------------------------------------------------------------------- */

static enum dkv_status status_of_http(unsigned http_status)
{
    switch (http_status) {
    case 400: return DKV_E_INVALID;
    case 401:
    case 403: return DKV_E_DENIED;
    case 404: return DKV_E_NOT_FOUND;
    case 408:
    case 504: return DKV_E_TIMEOUT;
    case 413: return DKV_E_TOO_LARGE;
    case 405:
    case 415:
    case 501: return DKV_E_UNSUPPORTED;
    case 429:
    case 502:
    case 503: return DKV_E_BUSY;
    default: return DKV_E_INTERNAL;
    }
}

enum dkv_status dkv_oip_error_parse(unsigned http_status, const char *body, size_t body_bytes,
                                    struct dkv_error *err)
{
    const enum dkv_status status = status_of_http(http_status);
    char text[sizeof(err->text)];
    json_t *root;

    dkv_error_set(err, status, "the server answered HTTP %u: %s", http_status,
                  dkv_status_info(status)->text);
    if (err == NULL || dkv_json_load(body, body_bytes, &root, NULL) != DKV_OK)
        return status;
    dkv_json_show(root, "error", text, sizeof(text));
    if (text[0] != '\0')
        dkv_error_set(err, status, "%s", text);
    json_decref(root);
    return status;
}
