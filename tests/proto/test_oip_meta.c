/* Metadata, configuration and statistics have every field that clients read, with its type. They
 * are read back with jansson itself: what matters is what others see.
 */
#include "proto/oip.h"

#include <setjmp.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

static const struct dkv_oip_facts facts = {.version = "0.1.0",
                                           .backend = "cpu/avx512",
                                           .device = "Xeon, 2 threads",
                                           .dtype = DKV_FP32,
                                           .max_blocks = 64};

static json_t *load(struct dkv_oip_text *text)
{
    json_t *root = json_loads(text->bytes, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(root);
    assert_int_equal(text->n_bytes, strlen(text->bytes));
    dkv_oip_text_fini(text);
    return root;
}

static const char *string_at(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    assert_true(json_is_string(value));
    return json_string_value(value);
}

static long long count_at(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    assert_true(json_is_integer(value));
    assert_true(json_integer_value(value) >= 0);
    return json_integer_value(value);
}

static bool lists(const json_t *array, const char *text)
{
    size_t i;
    json_t *element;
    json_array_foreach ((json_t *)array, i, element)
        if (strcmp(json_string_value(element), text) == 0)
            return true;
    return false;
}

static void server_metadata_lists_what_is_there(void **state)
{
    struct dkv_oip_facts with_shm = facts;
    struct dkv_oip_text text;
    (void)state;
    assert_int_equal(dkv_oip_server_metadata(&facts, &text), DKV_OK);
    json_t *root = load(&text);
    assert_string_equal(string_at(root, "name"), "dropkvd");
    assert_string_equal(string_at(root, "version"), "0.1.0");
    assert_true(lists(json_object_get(root, "extensions"), "statistics"));
    assert_true(lists(json_object_get(root, "extensions"), "binary_tensor_data"));
    assert_false(lists(json_object_get(root, "extensions"), "cuda_shared_memory"));
    json_decref(root);

    with_shm.shm = true;
    assert_int_equal(dkv_oip_server_metadata(&with_shm, &text), DKV_OK);
    root = load(&text);
    assert_true(lists(json_object_get(root, "extensions"), "cuda_shared_memory"));
    assert_true(lists(json_object_get(root, "extensions"), "system_shared_memory"));
    json_decref(root);
}

static void assert_tensor(const json_t *list, size_t i, const char *name, const char *type_key,
                          const char *type, const char *shape_key, size_t n_dims)
{
    const json_t *tensor = json_array_get(list, i);
    const json_t *shape = json_object_get(tensor, shape_key);
    assert_string_equal(string_at(tensor, "name"), name);
    assert_string_equal(string_at(tensor, type_key), type);
    assert_int_equal(json_array_size(shape), n_dims);
    for (size_t d = 0; d < n_dims; d++)
        assert_int_equal(json_integer_value(json_array_get(shape, d)), -1);
}

static void model_metadata_describes_every_tensor(void **state)
{
    struct dkv_oip_text text;
    (void)state;
    assert_int_equal(dkv_oip_model_metadata(&facts, &text), DKV_OK);
    json_t *root = load(&text);
    const json_t *inputs = json_object_get(root, "inputs"),
                 *outputs = json_object_get(root, "outputs");
    assert_string_equal(string_at(root, "name"), "dropkv");
    assert_true(lists(json_object_get(root, "versions"), "1"));
    assert_string_equal(string_at(root, "platform"), "dropkvd");
    assert_int_equal(json_array_size(inputs), 3);
    assert_tensor(inputs, 0, "query", "datatype", "FP32", "shape", 4);
    assert_tensor(inputs, 1, "key", "datatype", "FP32", "shape", 4);
    assert_tensor(inputs, 2, "value", "datatype", "FP32", "shape", 4);
    assert_int_equal(json_array_size(outputs), 2);
    assert_tensor(outputs, 0, "keep_indices", "datatype", "INT32", "shape", 3);
    assert_tensor(outputs, 1, "scores", "datatype", "FP32", "shape", 3);
    assert_string_equal(string_at(json_object_get(root, "parameters"), "backend"), "cpu/avx512");
    json_decref(root);
}

static void model_config_names_the_same_tensors_and_every_parameter(void **state)
{
    struct dkv_oip_text text;
    (void)state;
    assert_int_equal(dkv_oip_model_config(&facts, &text), DKV_OK);
    json_t *root = load(&text);
    const json_t *inputs = json_object_get(root, "input"),
                 *outputs = json_object_get(root, "output");
    assert_string_equal(string_at(root, "name"), "dropkv");
    assert_int_equal(count_at(root, "max_batch_size"), 64);
    assert_true(json_is_object(json_object_get(root, "dynamic_batching")));
    assert_null(json_object_get(root, "response_cache"));
    assert_null(json_object_get(root, "model_transaction_policy"));
    assert_tensor(inputs, 0, "query", "data_type", "TYPE_FP32", "dims", 3);
    assert_tensor(outputs, 0, "keep_indices", "data_type", "TYPE_INT32", "dims", 2);
    assert_tensor(outputs, 1, "scores", "data_type", "TYPE_FP32", "dims", 2);
    assert_true(json_is_false(json_object_get(json_array_get(inputs, 0), "is_shape_tensor")));
    const json_t *parameters = json_object_get(root, "parameters");
    assert_int_equal(json_object_size(parameters), DKV_PARAM_COUNT);
    assert_string_equal(string_at(json_object_get(parameters, "window"), "string_value"), "1..512");
    json_decref(root);
}

static void statistics_have_every_count_perf_analyzer_reads(void **state)
{
    static const char *const durations[] = {"success",       "fail",          "queue",
                                            "compute_input", "compute_infer", "compute_output",
                                            "cache_hit",     "cache_miss"};
    const struct dkv_oip_batch_stats batches[] = {{.batch_size = 3, .compute_infer = {2, 900}}};
    struct dkv_oip_stats stats = {.last_inference_ms = 1700000000000,
                                  .inference_count = UINT64_MAX,
                                  .execution_count = 2,
                                  .queue = {5, 777},
                                  .batches = batches,
                                  .n_batches = 1};
    struct dkv_oip_text text;
    (void)state;
    assert_int_equal(dkv_oip_model_stats(&stats, &text), DKV_OK);
    json_t *root = load(&text);
    const json_t *model = json_array_get(json_object_get(root, "model_stats"), 0);
    const json_t *inference = json_object_get(model, "inference_stats");
    assert_string_equal(string_at(model, "version"), "1");
    assert_int_equal(count_at(model, "last_inference"), 1700000000000);
    assert_true(count_at(model, "inference_count") == INT64_MAX);
    assert_int_equal(count_at(model, "execution_count"), 2);
    for (size_t i = 0; i < sizeof(durations) / sizeof(durations[0]); i++) {
        (void)count_at(json_object_get(inference, durations[i]), "count");
        (void)count_at(json_object_get(inference, durations[i]), "ns");
    }
    assert_int_equal(count_at(json_object_get(inference, "queue"), "ns"), 777);
    const json_t *batch = json_array_get(json_object_get(model, "batch_stats"), 0);
    assert_int_equal(count_at(batch, "batch_size"), 3);
    assert_int_equal(count_at(json_object_get(batch, "compute_infer"), "ns"), 900);
    assert_true(json_is_array(json_object_get(model, "memory_usage")));
    json_decref(root);

    memset(&stats, 0, sizeof(stats));
    assert_int_equal(dkv_oip_model_stats(&stats, &text), DKV_OK);
    dkv_oip_text_fini(&text);
}

static void the_client_reads_metadata(void **state)
{
    struct dkv_oip_info info;
    struct dkv_oip_text text;
    struct dkv_error err;
    (void)state;
    assert_int_equal(dkv_oip_server_metadata(&facts, &text), DKV_OK);
    assert_int_equal(dkv_oip_server_metadata_parse(text.bytes, text.n_bytes, &info, &err), DKV_OK);
    dkv_oip_text_fini(&text);
    assert_int_equal(dkv_oip_model_metadata(&facts, &text), DKV_OK);
    assert_int_equal(dkv_oip_model_metadata_parse(text.bytes, text.n_bytes, &info, &err), DKV_OK);
    dkv_oip_text_fini(&text);
    assert_string_equal(info.server, "dropkvd");
    assert_string_equal(info.version, "0.1.0");
    assert_string_equal(info.platform, "dropkvd");
    assert_string_equal(info.backend, "cpu/avx512");
    assert_string_equal(info.device, "Xeon, 2 threads");

    const char *odd = "{\"name\":7,\"version\":\"\\u001b]0;\"}";
    assert_int_equal(dkv_oip_server_metadata_parse(odd, strlen(odd), &info, &err), DKV_OK);
    assert_string_equal(info.server, "");
    assert_string_equal(info.version, "?]0;");
    assert_int_equal(dkv_oip_model_metadata_parse("{", 1, &info, &err), DKV_E_MALFORMED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(server_metadata_lists_what_is_there),
        cmocka_unit_test(model_metadata_describes_every_tensor),
        cmocka_unit_test(model_config_names_the_same_tensors_and_every_parameter),
        cmocka_unit_test(statistics_have_every_count_perf_analyzer_reads),
        cmocka_unit_test(the_client_reads_metadata),
    };
    dkv_oip_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
