/* What the server tells about itself: metadata, configuration, statistics; and how a client reads
 * it.
 *
 * The fields are those that existing clients read, some of them without checking that they are
 * there (perf_analyzer: every count and ns of the statistics, a numeric version). The optional
 * inputs are not listed: perf_analyzer refuses to use shared memory with a model that has any.
 */
#include "proto/oip_tensor.h"

#include "proto/policy.h"

#include <stdio.h>
#include <string.h>

#define DYNAMIC (-1)

/* ---- Server metadata ------------------------------------------------------------------------ */

enum dkv_status dkv_oip_server_metadata(const struct dkv_oip_facts *facts, struct dkv_oip_text *out)
{
    static const char *const extensions[] = {"binary_tensor_data", "model_configuration",
                                             "parameters", "schedule_policy", "statistics"};
    json_t *list = json_array();

    for (size_t i = 0; i < sizeof(extensions) / sizeof(extensions[0]); i++)
        dkv_json_append(&list, json_string(extensions[i]));
    if (facts->shm) {
        dkv_json_append(&list, json_string("system_shared_memory"));
        dkv_json_append(&list, json_string("cuda_shared_memory"));
    }
    return dkv_json_print(json_pack("{s:s, s:s, s:o}", "name", "dropkvd", "version", facts->version,
                                    "extensions", list),
                          out);
}

/* ---- Model metadata ------------------------------------------------------------------------- */

static json_t *metadata_tensor(const char *name, const char *datatype, unsigned n_dims)
{
    json_t *shape = json_array();

    for (unsigned i = 0; i < n_dims; i++)
        dkv_json_append(&shape, json_integer(DYNAMIC));
    return json_pack("{s:s, s:s, s:o}", "name", name, "datatype", datatype, "shape", shape);
}

/* "sink_logits FP32 [Hq], ...": as text, because a list of them would have generic clients send
 * all. */
static void optional_inputs(enum dkv_policy policy, char *text, size_t bytes)
{
    static const struct {
        const char *text;
        unsigned extra; /* 0: every policy that reads queries */
    } all[] = {
        {"sink_logits FP32 [Hq], key_scale FP32 [Hkv], value_scale FP32 [Hkv]", 0},
        {"token_weight FP32 [B,Hkv,n]", DKV_EXTRA_TOKEN_WEIGHT},
        {"carry_in FP32 [B,Hkv,n]", DKV_EXTRA_CARRY_IN},
        {"value_metric FP32 [Hq,Dv,Dv]", DKV_EXTRA_VALUE_METRIC},
    };
    /* Through the model dropkv a request may name any policy. */
    const unsigned extras = policy == DKV_POLICY_DROPKV ? ~0u : dkv_policy_info(policy)->extras;
    size_t n = 0;

    text[0] = '\0';
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (all[i].extra == 0 || (extras & all[i].extra))
            n += (size_t)snprintf(text + n, bytes - n, "%s%s", n > 0 ? ", " : "", all[i].text);
}

enum dkv_status dkv_oip_model_metadata(const struct dkv_oip_facts *facts, struct dkv_oip_text *out)
{
    char optional[256];
    json_t *inputs = json_array(), *outputs = json_array();

    for (int i = 0; i < DKV_OIP_INPUTS; i++)
        if (dkv_oip_input_table[i].required)
            dkv_json_append(&inputs, metadata_tensor(dkv_oip_input_table[i].name,
                                                     dkv_dtype_name(facts->dtype),
                                                     dkv_oip_input_table[i].n_dims));
    if (facts->policy == DKV_POLICY_EXTERNAL) /* the one that has no use without it */
        dkv_json_append(&inputs, metadata_tensor("external_scores", "FP32", 3));
    optional_inputs(facts->policy, optional, sizeof(optional));
    for (int i = 0; i <= DKV_OIP_SCORES; i++)
        dkv_json_append(&outputs, metadata_tensor(dkv_oip_output_names[i],
                                                  i == DKV_OIP_KEEP_INDICES ? "INT32" : "FP32", 3));
    return dkv_json_print(
        json_pack("{s:s, s:[s], s:s, s:o, s:o, s:{s:s, s:s, s:s, s:s, s:s}}", "name",
                  dkv_policy_name(facts->policy), "versions", DKV_OIP_MODEL_VERSION, "platform",
                  DKV_OIP_PLATFORM, "inputs", inputs, "outputs", outputs, "parameters", "backend",
                  facts->backend, "device", facts->device, "policy", dkv_policy_name(facts->policy),
                  "optional_inputs", optional, "optional_outputs", "keep_offsets INT32 [B*Hkv+1]"),
        out);
}

/* ---- Model configuration -------------------------------------------------------------------- */

/* With a max_batch_size the first dimension is implied. */
static json_t *config_tensor(const char *name, const char *datatype, unsigned n_dims)
{
    json_t *dims = json_array();

    for (unsigned i = 1; i < n_dims; i++)
        dkv_json_append(&dims, json_integer(DYNAMIC));
    return json_pack("{s:s, s:s+, s:o, s:b}", "name", name, "data_type", "TYPE_", datatype, "dims",
                     dims, "is_shape_tensor", false);
}

/* {"window": {"string_value": "1..512"}, ...}: the form Triton gives configuration parameters. */
static json_t *config_parameters(void)
{
    json_t *parameters = json_object();

    for (int i = 0; i < DKV_PARAM_COUNT; i++) {
        const struct dkv_param_info *info = dkv_param_info((enum dkv_param_id)i);
        dkv_json_set(&parameters, info->name, json_pack("{s:s}", "string_value", info->range));
    }
    return parameters;
}

enum dkv_status dkv_oip_model_config(const struct dkv_oip_facts *facts, struct dkv_oip_text *out)
{
    json_t *inputs = json_array(), *outputs = json_array();

    for (int i = 0; i < DKV_OIP_INPUTS; i++)
        if (dkv_oip_input_table[i].required)
            dkv_json_append(&inputs,
                            config_tensor(dkv_oip_input_table[i].name, dkv_dtype_name(facts->dtype),
                                          dkv_oip_input_table[i].n_dims));
    for (int i = 0; i <= DKV_OIP_SCORES; i++)
        dkv_json_append(&outputs, config_tensor(dkv_oip_output_names[i],
                                                i == DKV_OIP_KEEP_INDICES ? "INT32" : "FP32", 3));
    return dkv_json_print(json_pack("{s:s, s:s, s:s, s:{s:{s:i}}, s:I, s:o, s:o, s:{s:i}, s:o}",
                                    "name", dkv_policy_name(facts->policy), "platform",
                                    DKV_OIP_PLATFORM, "backend", facts->backend, "version_policy",
                                    "latest", "num_versions", 1, "max_batch_size",
                                    (json_int_t)facts->max_blocks, "input", inputs, "output",
                                    outputs, "dynamic_batching", "max_queue_delay_microseconds", 0,
                                    "parameters", config_parameters()),
                          out);
}

/* ---- Statistics ----------------------------------------------------------------------------- */

static json_t *count(uint64_t value)
{
    return json_integer(value <= INT64_MAX ? (json_int_t)value : (json_int_t)INT64_MAX);
}

static json_t *duration(const struct dkv_oip_duration *d)
{
    return json_pack("{s:o, s:o}", "count", count(d->count), "ns", count(d->ns));
}

static json_t *batch_stats(const struct dkv_oip_stats *stats)
{
    json_t *list = json_array();

    for (size_t i = 0; i < stats->n_batches; i++) {
        const struct dkv_oip_batch_stats *b = &stats->batches[i];
        dkv_json_append(&list, json_pack("{s:o, s:o, s:o, s:o}", "batch_size", count(b->batch_size),
                                         "compute_input", duration(&b->compute_input),
                                         "compute_infer", duration(&b->compute_infer),
                                         "compute_output", duration(&b->compute_output)));
    }
    return list;
}

static json_t *inference_stats(const struct dkv_oip_stats *stats)
{
    static const struct dkv_oip_duration none; /* we have no response cache */

    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "success",
                     duration(&stats->success), "fail", duration(&stats->fail), "queue",
                     duration(&stats->queue), "compute_input", duration(&stats->compute_input),
                     "compute_infer", duration(&stats->compute_infer), "compute_output",
                     duration(&stats->compute_output), "cache_hit", duration(&none), "cache_miss",
                     duration(&none));
}

static json_t *memory_usage(const struct dkv_oip_stats *stats)
{
    json_t *list = json_array();

    for (size_t i = 0; i < stats->n_memory; i++)
        dkv_json_append(&list, json_pack("{s:s, s:o, s:o}", "type", stats->memory[i].type, "id",
                                         count(stats->memory[i].id), "byte_size",
                                         count(stats->memory[i].bytes)));
    return list;
}

enum dkv_status dkv_oip_model_stats(const struct dkv_oip_stats *stats, struct dkv_oip_text *out)
{
    return dkv_json_print(
        json_pack("{s:[{s:s, s:s, s:o, s:o, s:o, s:o, s:{}, s:o, s:o}]}", "model_stats", "name",
                  DKV_OIP_MODEL, "version", DKV_OIP_MODEL_VERSION, "last_inference",
                  count(stats->last_inference_ms), "inference_count", count(stats->inference_count),
                  "execution_count", count(stats->execution_count), "inference_stats",
                  inference_stats(stats), "response_stats", "batch_stats", batch_stats(stats),
                  "memory_usage", memory_usage(stats)),
        out);
}

/* ---- Reading it ----------------------------------------------------------------------------- */

enum dkv_status dkv_oip_server_metadata_parse(const char *json, size_t json_bytes,
                                              struct dkv_oip_info *info, struct dkv_error *err)
{
    json_t *root;
    const enum dkv_status status = dkv_json_load(json, json_bytes, &root, err);

    if (status != DKV_OK)
        return status;
    dkv_json_show(root, "name", info->server, sizeof(info->server));
    dkv_json_show(root, "version", info->version, sizeof(info->version));
    json_decref(root);
    return DKV_OK;
}

enum dkv_status dkv_oip_model_metadata_parse(const char *json, size_t json_bytes,
                                             struct dkv_oip_info *info, struct dkv_error *err)
{
    json_t *root;
    const enum dkv_status status = dkv_json_load(json, json_bytes, &root, err);

    if (status != DKV_OK)
        return status;
    const json_t *parameters = json_object_get(root, "parameters");
    dkv_json_show(root, "platform", info->platform, sizeof(info->platform));
    dkv_json_show(parameters, "backend", info->backend, sizeof(info->backend));
    dkv_json_show(parameters, "device", info->device, sizeof(info->device));
    json_decref(root);
    return DKV_OK;
}
