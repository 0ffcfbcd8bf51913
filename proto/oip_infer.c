/* The server's side of an infer request: from the JSON part to a dkv_request.
 *
 * Parsing and binding are two steps because the JSON part arrives first. dkv_oip_infer_parse()
 * finds everything that can be wrong with the form of a request, so a bad one is answered before
 * its tensors have been received, and the server learns how much memory the good one needs.
 * dkv_oip_infer_bind() then only has to point at bytes. What the numbers mean (head counts, types,
 * ranges) is judged by the gate; here shapes must merely agree with each other, since one field of
 * a block stands for a dimension of several tensors.
 *
 * Unknown keys are refused: a misspelt parameter that is ignored would give a wrong answer. Keys
 * that existing clients send without meaning anything to us are named below.
 */
#include "proto/oip_tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Request parameters --------------------------------------------------------------------- */

static enum dkv_status read_value(const char *name, const json_t *json, struct dkv_value *value,
                                  struct dkv_error *err)
{
    char shown[DKV_SHOWN_NAME_BYTES];

    switch (json_typeof(json)) {
    case JSON_STRING:
        *value = (struct dkv_value){.kind = DKV_VALUE_STRING, .string = json_string_value(json)};
        return DKV_OK;
    case JSON_INTEGER:
        *value = (struct dkv_value){.kind = DKV_VALUE_INT, .integer = json_integer_value(json)};
        return DKV_OK;
    case JSON_REAL:
        *value = (struct dkv_value){.kind = DKV_VALUE_REAL, .real = json_real_value(json)};
        return DKV_OK;
    case JSON_TRUE:
    case JSON_FALSE:
        *value = (struct dkv_value){.kind = DKV_VALUE_BOOL, .boolean = json_is_true(json)};
        return DKV_OK;
    default:
        return dkv_error_set(err, DKV_E_INVALID,
                             "parameter '%s' must be a string, a number or a boolean",
                             dkv_show_name(shown, name));
    }
}

/* Names that the protocol reserves. Requests here are independent of each other, so what says which
 * sequence one belongs to has nothing to change; Triton treats such models alike. */
static bool has_no_meaning(const char *name)
{
    return strcmp(name, "sequence_id") == 0 || strcmp(name, "sequence_start") == 0 ||
           strcmp(name, "sequence_end") == 0;
}

static enum dkv_status read_parameters(const json_t *parameters, struct dkv_oip_infer *infer,
                                       bool *binary_output, struct dkv_error *err)
{
    const char *name;
    json_t *json;

    json_object_foreach ((json_t *)parameters, name, json) {
        struct dkv_value value = {.kind = DKV_VALUE_INT};
        enum dkv_status status = read_value(name, json, &value, err);

        if (status != DKV_OK)
            return status;
        if (strncmp(name, "triton_", strlen("triton_")) == 0)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "parameter names that start with triton_ are "
                                 "reserved");
        if (strcmp(name, "binary_data_output") == 0)
            status = dkv_json_bool(parameters, "request", name, binary_output, err);
        else if (!has_no_meaning(name))
            status = dkv_params_set(&infer->params, name, value, err);
        if (status != DKV_OK)
            return status;
    }
    dkv_params_resolve(&infer->params);
    return DKV_OK;
}

/* ---- Requested outputs ---------------------------------------------------------------------- */

static enum dkv_status find_output(const json_t *output, enum dkv_oip_output *which,
                                   struct dkv_error *err)
{
    const json_t *name = dkv_json_member(output, "name");
    char shown[DKV_SHOWN_NAME_BYTES];

    if (!json_is_string(name))
        return dkv_error_set(err, DKV_E_INVALID, "output: name must be a string");
    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        if (strcmp(json_string_value(name), dkv_oip_output_names[i]) == 0) {
            *which = (enum dkv_oip_output)i;
            return DKV_OK;
        }
    return dkv_error_set(err, DKV_E_INVALID,
                         "output '%s' is none of keep_indices, scores and keep_offsets",
                         dkv_show_name(shown, json_string_value(name)));
}

static enum dkv_status read_output_parameters(const json_t *parameters, const char *where,
                                              struct dkv_oip_wanted *wanted, struct dkv_error *err)
{
    static const char *const known[] = {"binary_data",          "classification",
                                        "shared_memory_region", "shared_memory_byte_size",
                                        "shared_memory_offset", NULL};
    uint64_t classes = 0;
    enum dkv_status status;

    if ((status = dkv_json_only(parameters, where, known, err)) != DKV_OK ||
        (status = dkv_json_bool(parameters, where, "binary_data", &wanted->binary, err)) !=
            DKV_OK ||
        (status = dkv_json_u64(parameters, where, "classification", &classes, err)) != DKV_OK ||
        (status = dkv_json_string(parameters, where, "shared_memory_region", wanted->region,
                                  sizeof(wanted->region), err)) != DKV_OK ||
        (status = dkv_json_u64(parameters, where, "shared_memory_byte_size", &wanted->region_bytes,
                               err)) != DKV_OK ||
        (status = dkv_json_u64(parameters, where, "shared_memory_offset", &wanted->region_offset,
                               err)) != DKV_OK)
        return status;
    if (classes != 0)
        return dkv_error_set(err, DKV_E_INVALID, "%s: classification is not possible", where);
    if (wanted->region[0] != '\0' && json_is_true(dkv_json_member(parameters, "binary_data")))
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: binary_data and shared_memory_region exclude each other", where);
    return DKV_OK;
}

static enum dkv_status read_output(const json_t *output, struct dkv_oip_infer *infer,
                                   bool binary_output, struct dkv_error *err)
{
    static const char *const known[] = {"name", "parameters", NULL};
    struct dkv_oip_wanted wanted = {.wanted = true, .binary = binary_output};
    char where[DKV_SHOWN_NAME_BYTES];
    json_t *parameters = NULL;
    enum dkv_oip_output which = DKV_OIP_KEEP_INDICES;
    enum dkv_status status;

    if (!json_is_object(output))
        return dkv_error_set(err, DKV_E_INVALID, "request: outputs must be an array of objects");
    if ((status = find_output(output, &which, err)) != DKV_OK)
        return status;
    snprintf(where, sizeof(where), "output %s", dkv_oip_output_names[which]);
    if (infer->outputs[which].wanted)
        return dkv_error_set(err, DKV_E_INVALID, "%s: given twice", where);
    if ((status = dkv_json_only(output, where, known, err)) != DKV_OK ||
        (status = dkv_json_object(output, where, "parameters", &parameters, err)) != DKV_OK ||
        (status = read_output_parameters(parameters, where, &wanted, err)) != DKV_OK)
        return status;
    infer->outputs[which] = wanted;
    return DKV_OK;
}

/* Answers of unequal length, which mean nothing without their offsets. */
static bool has_offsets(const struct dkv_params *params)
{
    return params->heads != DKV_HEADS_UNIFORM || params->layers != DKV_LAYERS_UNIFORM;
}

/* Without a list the client gets everything, as the protocol has it. */
static enum dkv_status read_outputs(const json_t *root, struct dkv_oip_infer *infer,
                                    bool binary_output, struct dkv_error *err)
{
    json_t *outputs = NULL, *output;
    size_t i;
    enum dkv_status status = dkv_json_array(root, "request", "outputs", &outputs, err);

    json_array_foreach (outputs, i, output)
        if (status == DKV_OK)
            status = read_output(output, infer, binary_output, err);
    infer->all_outputs = json_array_size(outputs) == 0;
    if (infer->all_outputs)
        for (int o = 0; o < DKV_OIP_OUTPUTS; o++)
            infer->outputs[o] = (struct dkv_oip_wanted){.wanted = o != DKV_OIP_KEEP_OFFSETS ||
                                                                  has_offsets(&infer->params),
                                                        .binary = binary_output};
    return status;
}

/* ---- Inputs --------------------------------------------------------------------------------- */

/* Dimensions that must be the same number. */
static enum dkv_status check_shapes_agree(const struct dkv_oip_infer *infer, struct dkv_error *err)
{
    static const struct {
        enum dkv_oip_input a, b;
        unsigned a_dim, b_dim;
    } pairs[] = {
        {DKV_OIP_KEY, DKV_OIP_QUERY, 0, 0},           {DKV_OIP_KEY, DKV_OIP_QUERY, 3, 3},
        {DKV_OIP_VALUE, DKV_OIP_KEY, 0, 0},           {DKV_OIP_VALUE, DKV_OIP_KEY, 1, 1},
        {DKV_OIP_VALUE, DKV_OIP_KEY, 2, 2},           {DKV_OIP_SINK_LOGITS, DKV_OIP_QUERY, 0, 1},
        {DKV_OIP_KEY_SCALE, DKV_OIP_KEY, 0, 1},       {DKV_OIP_VALUE_SCALE, DKV_OIP_VALUE, 0, 1},
        {DKV_OIP_TOKEN_WEIGHT, DKV_OIP_KEY, 0, 0},    {DKV_OIP_TOKEN_WEIGHT, DKV_OIP_KEY, 1, 1},
        {DKV_OIP_TOKEN_WEIGHT, DKV_OIP_KEY, 2, 2},    {DKV_OIP_CARRY_IN, DKV_OIP_KEY, 0, 0},
        {DKV_OIP_CARRY_IN, DKV_OIP_KEY, 1, 1},        {DKV_OIP_CARRY_IN, DKV_OIP_KEY, 2, 2},
        {DKV_OIP_EXTERNAL_SCORES, DKV_OIP_KEY, 0, 0}, {DKV_OIP_EXTERNAL_SCORES, DKV_OIP_KEY, 1, 1},
        {DKV_OIP_EXTERNAL_SCORES, DKV_OIP_KEY, 2, 2}, {DKV_OIP_VALUE_METRIC, DKV_OIP_QUERY, 0, 1},
        {DKV_OIP_VALUE_METRIC, DKV_OIP_VALUE, 1, 3},  {DKV_OIP_VALUE_METRIC, DKV_OIP_VALUE, 2, 3},
    };

    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        const struct dkv_oip_tensor *a = &infer->inputs[pairs[i].a];
        const struct dkv_oip_tensor *b = &infer->inputs[pairs[i].b];
        if (a->source != DKV_OIP_ABSENT && a->shape[pairs[i].a_dim] != b->shape[pairs[i].b_dim])
            return dkv_error_set(err, DKV_E_INVALID,
                                 "input %s: shape[%u] is %llu, needs the %llu of shape[%u] of %s",
                                 dkv_oip_input_table[pairs[i].a].name, pairs[i].a_dim,
                                 (unsigned long long)a->shape[pairs[i].a_dim],
                                 (unsigned long long)b->shape[pairs[i].b_dim], pairs[i].b_dim,
                                 dkv_oip_input_table[pairs[i].b].name);
    }
    if (infer->inputs[DKV_OIP_QUERY].shape[0] > DKV_BLOCKS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "input query: shape[0] %llu is outside 1..%u",
                             (unsigned long long)infer->inputs[DKV_OIP_QUERY].shape[0],
                             DKV_BLOCKS_MAX);
    return DKV_OK;
}

static enum dkv_status check_one_scale(const struct dkv_oip_infer *infer, enum dkv_oip_input tensor,
                                       enum dkv_oip_input vector, struct dkv_error *err)
{
    if (infer->inputs[tensor].scale == 0 || infer->inputs[vector].source == DKV_OIP_ABSENT)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "input %s: both parameter scale and input %s given, one is allowed",
                         dkv_oip_input_table[tensor].name, dkv_oip_input_table[vector].name);
}

static enum dkv_status read_inputs(const json_t *root, struct dkv_oip_infer *infer,
                                   struct dkv_error *err)
{
    json_t *inputs = NULL, *input;
    uint64_t binary_end = 0;
    size_t i;
    enum dkv_status status = dkv_json_array(root, "request", "inputs", &inputs, err);

    json_array_foreach (inputs, i, input)
        if (status == DKV_OK)
            status = dkv_oip_tensor_parse(input, infer, &binary_end, err);
    if (status != DKV_OK)
        return status;
    for (int n = 0; n < DKV_OIP_INPUTS; n++) {
        if (dkv_oip_input_table[n].required && infer->inputs[n].source == DKV_OIP_ABSENT)
            return dkv_error_set(err, DKV_E_INVALID, "request: input %s is missing",
                                 dkv_oip_input_table[n].name);
        infer->side_bytes += dkv_oip_side_need(infer, n);
    }
    if (binary_end != infer->binary_bytes)
        return dkv_error_set(
            err, DKV_E_INVALID, "%s: inputs take %llu bytes of binary data, the body has %llu",
            binary_end > infer->binary_bytes ? "unexpected size for input"
                                             : "unexpected additional input data",
            (unsigned long long)binary_end, (unsigned long long)infer->binary_bytes);
    return DKV_OK;
}

/* ---- The whole JSON part -------------------------------------------------------------------- */

static bool names_a_region(const struct dkv_oip_infer *infer)
{
    for (int i = 0; i < DKV_OIP_INPUTS; i++)
        if (infer->inputs[i].source == DKV_OIP_SHM)
            return true;
    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        if (infer->outputs[i].region[0] != '\0')
            return true;
    return false;
}

static enum dkv_status read_root(const json_t *root, struct dkv_oip_infer *infer,
                                 struct dkv_error *err)
{
    /* model_name and model_version: sent by some KServe clients, who have said it in the path. */
    static const char *const known[] = {"id",         "parameters",    "inputs", "outputs",
                                        "model_name", "model_version", NULL};
    json_t *parameters = NULL;
    bool binary_output = false;
    enum dkv_status status;

    if ((status = dkv_json_only(root, "request", known, err)) != DKV_OK ||
        (status = dkv_json_string(root, "request", "id", infer->id, sizeof(infer->id), err)) !=
            DKV_OK ||
        (status = dkv_json_object(root, "request", "parameters", &parameters, err)) != DKV_OK ||
        (status = read_parameters(parameters, infer, &binary_output, err)) != DKV_OK ||
        (status = read_inputs(root, infer, err)) != DKV_OK ||
        (status = check_shapes_agree(infer, err)) != DKV_OK ||
        (status = check_one_scale(infer, DKV_OIP_KEY, DKV_OIP_KEY_SCALE, err)) != DKV_OK ||
        (status = check_one_scale(infer, DKV_OIP_VALUE, DKV_OIP_VALUE_SCALE, err)) != DKV_OK ||
        (status = read_outputs(root, infer, binary_output, err)) != DKV_OK)
        return status;
    infer->n_blocks = (uint32_t)infer->inputs[DKV_OIP_QUERY].shape[0];
    infer->uses_shm = names_a_region(infer);
    return DKV_OK;
}

enum dkv_status dkv_oip_infer_parse(const char *json, size_t json_bytes, uint64_t binary_bytes,
                                    struct dkv_oip_infer *infer_out, struct dkv_error *err)
{
    const uint64_t most = binary_bytes > 0 ? DKV_OIP_HEAD_BYTES_MAX : DKV_OIP_JSON_BYTES_MAX;
    struct dkv_oip_infer infer = {.binary_bytes = binary_bytes};
    json_t *root;
    enum dkv_status status;

    if (json_bytes == 0)
        return dkv_error_set(err, DKV_E_MALFORMED,
                             "a raw binary request needs a model of one input, this one has three: "
                             "a JSON part is needed");
    if (json_bytes > most)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "the JSON part has %zu bytes, allowed are 1..%llu", json_bytes,
                             (unsigned long long)most);
    if ((status = dkv_json_load(json, json_bytes, &root, err)) != DKV_OK)
        return status;
    dkv_params_init(&infer.params);
    if ((status = read_root(root, &infer, err)) != DKV_OK) {
        json_decref(root);
        return status;
    }
    infer.document = root;
    *infer_out = infer;
    return DKV_OK;
}

bool dkv_oip_find_model(const char *name, enum dkv_policy *policy_out)
{
    for (unsigned i = 0; i < DKV_POLICY_COUNT; i++)
        if (strcmp(name, dkv_policy_name((enum dkv_policy)i)) == 0) {
            *policy_out = (enum dkv_policy)i;
            return true;
        }
    return false;
}

enum dkv_status dkv_oip_infer_set_model(struct dkv_oip_infer *infer, const char *model,
                                        struct dkv_error *err)
{
    enum dkv_policy policy;
    char shown[DKV_SHOWN_NAME_BYTES];

    if (!dkv_oip_find_model(model, &policy))
        return dkv_error_set(err, DKV_E_NOT_FOUND, "Request for unknown model: '%s'",
                             dkv_show_name(shown, model));
    dkv_show_name(infer->model, model);
    if (policy == DKV_POLICY_DROPKV) /* the model that takes any policy */
        return DKV_OK;
    if (dkv_params_has(&infer->params, DKV_PARAM_POLICY) && infer->params.policy != policy)
        return dkv_error_set(err, DKV_E_INVALID, "policy: %s is not that of the model %s",
                             dkv_policy_name(infer->params.policy), infer->model);
    infer->params.policy = policy;
    infer->params.set |= UINT64_C(1) << DKV_PARAM_POLICY;
    dkv_params_resolve(&infer->params);
    if (has_offsets(&infer->params) && infer->all_outputs)
        infer->outputs[DKV_OIP_KEEP_OFFSETS] = infer->outputs[DKV_OIP_KEEP_INDICES];
    return DKV_OK;
}

void dkv_oip_infer_fini(struct dkv_oip_infer *infer)
{
    json_decref(infer->document);
    free(infer->numbers);
    memset(infer, 0, sizeof(*infer));
}
