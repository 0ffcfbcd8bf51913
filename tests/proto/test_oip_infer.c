/* Infer requests as clients send them, and every trap on the way from their JSON to a request. */
#include "proto/oip.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* B 2, Hq 4, Hkv 2, Lq 8, n 32, D 16, Dv 8, bf16, binary. */
#define QUERY_BYTES 2048
#define KEY_BYTES   4096
#define VALUE_BYTES 2048
#define ALL_BYTES   (QUERY_BYTES + KEY_BYTES + VALUE_BYTES)

#define QUERY                                                         \
    "{\"name\":\"query\",\"shape\":[2,4,8,16],\"datatype\":\"BF16\"," \
    "\"parameters\":{\"binary_data_size\":2048}}"
#define KEY                                                          \
    "{\"name\":\"key\",\"shape\":[2,2,32,16],\"datatype\":\"BF16\"," \
    "\"parameters\":{\"binary_data_size\":4096}}"
#define VALUE                                                         \
    "{\"name\":\"value\",\"shape\":[2,2,32,8],\"datatype\":\"BF16\"," \
    "\"parameters\":{\"binary_data_size\":2048}}"
#define INPUTS          "\"inputs\":[" QUERY "," KEY "," VALUE "]"
#define WITH(members)   "{" members "," INPUTS "}"
#define PARAM(member)   WITH("\"parameters\":{" member "}")
#define PLAIN           "{" INPUTS "}"
#define OUTPUT(members) WITH("\"outputs\":[{\"name\":\"keep_indices\"" members "}]")

/* One BF16 query, shape [1,1,1,8], with what is given instead of its content. */
#define SMALL(first)                                                                             \
    "{\"inputs\":[" first ",{\"name\":\"key\",\"shape\":[1,1,1,8],\"datatype\":\"FP32\","        \
    "\"data\":[1,2,3,4,5,6,7,8]},{\"name\":\"value\",\"shape\":[1,1,1,8],\"datatype\":\"FP32\"," \
    "\"data\":[[[[1,2,3,4],[5,6,7,8e0]]]]}]}"
#define SMALL_QUERY(shape, dtype, content) \
    SMALL("{\"name\":\"query\",\"shape\":" shape ",\"datatype\":\"" dtype "\"," content "}")

static struct dkv_oip_infer infer;
static struct dkv_error err;

static int teardown(void **state)
{
    (void)state;
    dkv_oip_infer_fini(&infer);
    return 0;
}

static enum dkv_status parse(const char *json, uint64_t binary_bytes)
{
    dkv_oip_infer_fini(&infer);
    return dkv_oip_infer_parse(json, strlen(json), binary_bytes, &infer, &err);
}

static void assert_parses(const char *json, uint64_t binary_bytes)
{
    if (parse(json, binary_bytes) != DKV_OK)
        fail_msg("refused: %s\n%s", err.text, json);
}

static void assert_refused(const char *json, uint64_t binary_bytes, enum dkv_status status,
                           const char *says)
{
    const enum dkv_status got = parse(json, binary_bytes);
    if (got != status)
        fail_msg("status %d instead of %d for %.200s", got, status, json);
    if (strstr(err.text, says) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, says);
    assert_null(infer.document); /* nothing was written */
}

/* ---- Good requests -------------------------------------------------------------------------- */

static void a_binary_request_is_bound_to_its_bytes(void **state)
{
    static char body[ALL_BYTES];
    struct dkv_block blocks[2];
    struct dkv_request request;
    struct dkv_plan plans[2];
    (void)state;

    assert_parses(
        "{\"id\":\"a-1\",\"parameters\":{\"window\":4,\"keep_ratio\":0.5,\"pool\":\"avg\"}," INPUTS
        ",\"outputs\":[{\"name\":\"scores\",\"parameters\":{\"binary_data\":true}},"
        "{\"name\":\"keep_indices\",\"parameters\":{\"binary_data\":false}}]}",
        ALL_BYTES);
    assert_string_equal(infer.id, "a-1");
    assert_int_equal(infer.n_blocks, 2);
    assert_int_equal(infer.side_bytes, 0);
    assert_false(infer.uses_shm);
    assert_true(infer.outputs[DKV_OIP_SCORES].wanted && infer.outputs[DKV_OIP_SCORES].binary);
    assert_true(infer.outputs[DKV_OIP_KEEP_INDICES].wanted);
    assert_false(infer.outputs[DKV_OIP_KEEP_INDICES].binary);

    const struct dkv_oip_memory memory = {.binary = body};
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, blocks, &request, &err), DKV_OK);
    assert_int_equal(dkv_request_validate(&request, plans, &err), DKV_OK);
    assert_int_equal(request.n_blocks, 2);
    assert_true(request.want_scores);
    assert_int_equal(request.params.window, 4);
    assert_int_equal(request.params.kernel, 11);
    assert_ptr_equal(blocks[0].query.base, body);
    assert_ptr_equal(blocks[1].query.base, body + 1024);
    assert_ptr_equal(blocks[0].key.base, body + 2048);
    assert_ptr_equal(blocks[1].value.base, body + 2048 + 4096 + 1024);
    assert_int_equal(blocks[1].value.bytes, 1024);
    assert_int_equal(blocks[0].v_dim, 8);
    assert_int_equal(plans[1].keep_tokens, 16);
    assert_int_equal(plans[1].group, 2);
}

static void inputs_may_come_in_any_order(void **state)
{
    (void)state;
    assert_parses("{\"inputs\":[" VALUE "," QUERY "," KEY "]}", ALL_BYTES);
    assert_int_equal(infer.inputs[DKV_OIP_VALUE].offset, 0);
    assert_int_equal(infer.inputs[DKV_OIP_QUERY].offset, 2048);
    assert_int_equal(infer.inputs[DKV_OIP_KEY].offset, 4096);
}

static void json_numbers_become_floats(void **state)
{
    struct dkv_block block;
    struct dkv_request request;
    (void)state;
    assert_parses(SMALL_QUERY("[1,1,1,8]", "FP32", "\"data\":[1.5,-2,3e2,0,1e-999,16777217,0.1,9]"),
                  0);
    assert_int_equal(infer.inputs[DKV_OIP_QUERY].source, DKV_OIP_JSON);
    assert_int_equal(infer.side_bytes, 3 * 64);
    struct dkv_oip_memory memory = {.side = aligned_alloc(64, 3 * 64)};
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, &block, &request, &err), DKV_OK);
    const float query[8] = {1.5f, -2, 300, 0, 0, 16777216, 0.1f, 9};
    const float other[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    assert_memory_equal(block.query.base, query, sizeof(query));
    assert_memory_equal(block.key.base, other, sizeof(other));
    assert_memory_equal(block.value.base, other, sizeof(other));
    assert_int_equal(block.value.bytes, 32);
    free(memory.side);
}

static void settled_numbers_are_bound_like_parsed_ones(void **state)
{
    static const char scales[] =
        "{\"inputs\":["
        "{\"name\":\"query\",\"shape\":[1,2,1,8],\"datatype\":\"FP32\",\"data\":"
        "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]},"
        "{\"name\":\"sink_logits\",\"shape\":[2],\"datatype\":\"FP32\",\"data\":[0.5,-0.5]},"
        "{\"name\":\"value\",\"shape\":[1,1,1,8],\"datatype\":\"BF16\",\"parameters\":{"
        "\"binary_data_size\":16}},"
        "{\"name\":\"key\",\"shape\":[1,1,1,8],\"datatype\":\"FP32\",\"data\":[8,7,6,5,4,3,2,1]}]}";
    _Alignas(64) float sides[2][64] = {{0}};
    struct dkv_block block;
    struct dkv_request request;
    (void)state;
    for (int settled = 0; settled < 2; settled++) {
        assert_parses(scales, 16);
        assert_int_equal(infer.side_bytes, 3 * 64);
        struct dkv_oip_memory memory = {.binary = scales, .side = sides[settled]};
        if (settled) {
            assert_int_equal(dkv_oip_infer_settle(&infer, &err), DKV_OK);
            assert_null(infer.document);
        }
        assert_int_equal(dkv_oip_infer_bind(&infer, &memory, &block, &request, &err), DKV_OK);
        assert_null(infer.document);
        assert_null(infer.numbers);
        assert_ptr_equal(block.value.base, scales);
        assert_true(((const float *)block.key.base)[0] == 8 && block.sink_logits[1] == -0.5f);
    }
    assert_memory_equal(sides[0], sides[1], sizeof(sides[0]));
}

static void optional_inputs_are_taken(void **state)
{
    float sinks_and_scales[4 + 2] = {1, 2, 3, 4, 0.5f, 0.25f};
    static char body[4 * 1 * 16 + 2 * 8 * 16 + 2 * 8 * 16 + sizeof(sinks_and_scales) + 1];
    struct dkv_block block;
    struct dkv_request request;
    struct dkv_plan plan;
    (void)state;
    assert_parses("{\"inputs\":["
                  "{\"name\":\"query\",\"shape\":[1,4,1,8],\"datatype\":\"FP16\",\"parameters\":{"
                  "\"binary_data_size\":64}},"
                  "{\"name\":\"key\",\"shape\":[1,2,8,8],\"datatype\":\"F8_E4M3\",\"parameters\":{"
                  "\"binary_data_size\":128}},"
                  "{\"name\":\"value\",\"shape\":[1,2,8,8],\"datatype\":\"F8_E4M3\",\"parameters\":"
                  "{\"binary_data_size\":128,\"scale\":0.5}},"
                  "{\"name\":\"sink_logits\",\"shape\":[4],\"datatype\":\"FP32\",\"parameters\":{"
                  "\"binary_data_size\":16}},"
                  "{\"name\":\"key_scale\",\"shape\":[2],\"datatype\":\"FP32\",\"parameters\":{"
                  "\"binary_data_size\":8}}]}",
                  64 + 256 + 24);
    assert_int_equal(infer.side_bytes, 128);
    /* An odd address: vectors must still come out aligned. */
    memcpy(body + 1 + 64 + 256, sinks_and_scales, sizeof(sinks_and_scales));
    struct dkv_oip_memory memory = {.binary = body + 1, .side = aligned_alloc(64, 128)};
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, &block, &request, &err), DKV_OK);
    assert_int_equal(dkv_request_validate(&request, &plan, &err), DKV_OK);
    assert_int_equal((uintptr_t)block.sink_logits % 64, 0);
    assert_true(block.sink_logits[3] == 4);
    assert_true(block.key.head_scales[1] == 0.25f);
    assert_true(block.value.scale == 0.5f);
    assert_null(block.value.head_scales);
    free(memory.side);
}

static void an_empty_id_counts_as_none(void **state)
{
    (void)state;
    assert_parses(WITH("\"id\":\"\""), ALL_BYTES);
    assert_string_equal(infer.id, "");
    assert_parses(WITH("\"id\":null"), ALL_BYTES);
    assert_string_equal(infer.id, "");
}

static void without_outputs_all_are_wanted(void **state)
{
    (void)state;
    assert_parses(PLAIN, ALL_BYTES);
    assert_true(infer.outputs[DKV_OIP_KEEP_INDICES].wanted);
    assert_false(infer.outputs[DKV_OIP_KEEP_INDICES].binary);
    assert_true(infer.outputs[DKV_OIP_SCORES].wanted);
    assert_parses(PARAM("\"binary_data_output\":true"), ALL_BYTES);
    assert_true(infer.outputs[DKV_OIP_KEEP_INDICES].binary);
    assert_parses("{\"outputs\":[],\"parameters\":{\"binary_data_output\":true}," INPUTS "}",
                  ALL_BYTES);
    assert_true(infer.outputs[DKV_OIP_KEEP_INDICES].binary);
}

static void what_existing_clients_send_is_tolerated(void **state)
{
    (void)state;
    assert_parses(WITH("\"model_name\":\"dropkv\",\"model_version\":\"1\""), ALL_BYTES);
    assert_parses(PARAM("\"sequence_id\":0,\"sequence_start\":false,\"sequence_end\":false,"
                        "\"priority\":0,\"timeout\":1000000"),
                  ALL_BYTES);
    assert_int_equal(infer.params.timeout, 1000000);
    assert_parses(OUTPUT(",\"parameters\":{\"binary_data\":false,\"classification\":0}"),
                  ALL_BYTES);
    assert_parses(
        SMALL_QUERY("[1,1,1,8]", "FP32",
                    "\"parameters\":{\"content_type\":\"np\"},\"data\":[1,2,3,4,5,6,7,8]"),
        0);
}

static void shared_memory_is_recognised(void **state)
{
    struct dkv_block block;
    struct dkv_request request;
    char region[256] = {0}, side[128] __attribute__((aligned(64)));
    (void)state;
    assert_parses(SMALL_QUERY("[1,1,1,8]", "BF16",
                              "\"parameters\":{\"shared_memory_region\":\"in\","
                              "\"shared_memory_offset\":32,\"shared_memory_byte_size\":16}"),
                  0);
    assert_true(infer.uses_shm);
    assert_int_equal(infer.inputs[DKV_OIP_QUERY].source, DKV_OIP_SHM);
    assert_string_equal(infer.inputs[DKV_OIP_QUERY].region, "in");
    struct dkv_oip_memory memory = {.side = side};
    memory.regions[DKV_OIP_QUERY].base = region;
    memory.regions[DKV_OIP_QUERY].bytes = 47;
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, &block, &request, &err), DKV_E_INVALID);
    memory.regions[DKV_OIP_QUERY].bytes = 48;
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, &block, &request, &err), DKV_OK);
    assert_ptr_equal(block.query.base, region + 32);

    assert_parses(OUTPUT(",\"parameters\":{\"shared_memory_region\":\"out\",\"binary_data\":false,"
                         "\"shared_memory_byte_size\":64}"),
                  ALL_BYTES);
    assert_true(infer.uses_shm);
    assert_string_equal(infer.outputs[DKV_OIP_KEEP_INDICES].region, "out");
}

/* ---- Documents that are none ---------------------------------------------------------------- */

static void text_that_is_not_json_is_malformed(void **state)
{
    static const char *const bad[] = {
        "{",
        "[]",
        "null",
        "1",
        "\"\"",
        "{}x",
        "{\"inputs\":[1,]}",
        "{\"a\":NaN}",
        "\xef\xbb\xbf{}",
        "{\"id\":\"\\u0000\"}",
        "{\"id\":\"\xff\"}",
        "{\"id\":1e999}",
        "{\"id\":9223372036854775808}",
        "{'id':1}",
        "{\"id\":\"",
        "{\"\\u0000\":1}",
    };
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_refused(bad[i], 0, DKV_E_MALFORMED, "JSON");
}

static void a_raw_binary_request_is_refused_with_the_reason(void **state)
{
    (void)state;
    assert_refused("", 4096, DKV_E_MALFORMED, "raw binary request");
}

static void a_key_given_twice_is_malformed(void **state)
{
    (void)state;
    assert_refused(WITH("\"id\":\"a\",\"id\":\"b\""), ALL_BYTES, DKV_E_MALFORMED, "twice");
}

static void nesting_is_bounded_at_sixteen(void **state)
{
    static char deep[1 << 21];
    (void)state;
    for (size_t depth = 14; depth <= 17; depth++) { /* inside the object's own bracket */
        size_t n = (size_t)sprintf(deep, "{\"id\":");
        for (size_t i = 0; i < depth; i++)
            deep[n++] = '[';
        for (size_t i = 0; i < depth; i++)
            deep[n++] = ']';
        sprintf(deep + n, "}");
        if (depth + 1 <= DKV_OIP_JSON_DEPTH_MAX)
            assert_refused(deep, 0, DKV_E_INVALID, "id must be a string");
        else
            assert_refused(deep, 0, DKV_E_MALFORMED, "nested deeper than 16");
    }
    memset(deep, '[', 1000000);
    deep[1000000] = '\0';
    assert_refused(deep, 0, DKV_E_MALFORMED, "nested deeper than 16");
    assert_refused("{\"id\":\"\\\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\"}", 0, DKV_E_INVALID, "missing");
}

static void sizes_of_documents_are_bounded(void **state)
{
    const size_t n = (size_t)DKV_OIP_JSON_BYTES_MAX + 2;
    char *json = malloc(n);
    (void)state;
    memset(json, ' ', n);
    json[n - 1] = '\0';
    assert_refused(json, 0, DKV_E_TOO_LARGE, "16777217");
    json[DKV_OIP_HEAD_BYTES_MAX + 1] = '\0';
    assert_refused(json, 1, DKV_E_TOO_LARGE, "65537");

    size_t used = (size_t)sprintf(json, "{\"a\":[0");
    for (uint32_t i = 0; i < DKV_OIP_JSON_VALUES_MAX; i++)
        used += (size_t)sprintf(json + used, ",0");
    sprintf(json + used, "]}");
    assert_refused(json, 0, DKV_E_TOO_LARGE, "2097152 values");

    used = (size_t)sprintf(json, "{\"k\":0");
    for (uint32_t i = 0; i < DKV_OIP_JSON_MEMBERS_MAX; i++)
        used += (size_t)sprintf(json + used, ",\"k%u\":0", i);
    sprintf(json + used, "}");
    assert_refused(json, 0, DKV_E_TOO_LARGE, "4096 members");
    free(json);
}

/* ---- Fields --------------------------------------------------------------------------------- */

static void integers_must_be_integers(void **state)
{
    static const char *const dims[] = {"[1.0,1,1,8]",  "[1e0,1,1,8]",  "[\"1\",1,1,8]",
                                       "[true,1,1,8]", "[null,1,1,8]", "[[1],1,1,8]"};
    static const char *const sizes[] = {"16.0", "1.6e1", "\"16\"", "true", "-16", "[16]"};
    char json[1024];
    (void)state;
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        snprintf(json, sizeof(json),
                 SMALL("{\"name\":\"query\",\"shape\":%s,\"datatype\":\"FP32\","
                       "\"data\":[1,2,3,4,5,6,7,8]}"),
                 dims[i]);
        assert_refused(json, 0, DKV_E_INVALID, "shape[0]");
    }
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        snprintf(json, sizeof(json),
                 SMALL("{\"name\":\"query\",\"shape\":[1,1,1,8],\"datatype\":\"BF16\","
                       "\"parameters\":{\"binary_data_size\":%s}}"),
                 sizes[i]);
        assert_refused(json, 16, DKV_E_INVALID, "binary_data_size");
    }
}

static void dimensions_out_of_range_are_refused(void **state)
{
    static const char *const dims[] = {"[0,1,1,8]", "[-1,1,1,8]", "[2147483648,1,1,8]",
                                       "[4294967297,1,1,8]", "[9223372036854775807,1,1,8]"};
    char json[1024];
    (void)state;
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) {
        snprintf(json, sizeof(json),
                 SMALL("{\"name\":\"query\",\"shape\":%s,\"datatype\":\"FP32\","
                       "\"data\":[1,2,3,4,5,6,7,8]}"),
                 dims[i]);
        assert_refused(json, 0, DKV_E_INVALID, "outside 1..2147483647");
    }
    assert_refused(SMALL_QUERY("[2147483647,2147483647,2147483647,8]", "FP32", "\"data\":[1]"), 0,
                   DKV_E_INVALID, "2^64");
    assert_refused(SMALL_QUERY("[1,8]", "FP32", "\"data\":[1]"), 0, DKV_E_INVALID, "array of 4");
    assert_refused(SMALL_QUERY("8", "FP32", "\"data\":[1]"), 0, DKV_E_INVALID, "array of 4");
}

static void shapes_must_agree(void **state)
{
    (void)state;
    assert_refused(SMALL_QUERY("[2,1,1,8]", "FP32", "\"data\":[1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8]"),
                   0, DKV_E_INVALID, "input key: shape[0] is 1, needs the 2 of shape[0] of query");
    assert_refused(SMALL_QUERY("[1,1,2,4]", "FP32", "\"data\":[1,2,3,4,5,6,7,8]"), 0, DKV_E_INVALID,
                   "shape[3]");
}

static void datatypes_are_judged(void **state)
{
    (void)state;
    assert_refused(SMALL_QUERY("[1,1,1,8]", "INT8", "\"data\":[1]"), 0, DKV_E_UNSUPPORTED, "INT8");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "bf16", "\"data\":[1]"), 0, DKV_E_UNSUPPORTED, "bf16");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "F16", "\"data\":[1]"), 0, DKV_E_UNSUPPORTED, "F16");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP16", "\"data\":[1,2,3,4,5,6,7,8]"), 0, DKV_E_INVALID,
                   "receiving FP16 data via JSON is not supported");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "BF16", "\"data\":[1,2,3,4,5,6,7,8]"), 0, DKV_E_INVALID,
                   "receiving BF16 data via JSON is not supported");
}

static void json_data_must_be_the_shapes_count_of_numbers(void **state)
{
    (void)state;
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"data\":[1,2,3,4,5,6,7]"), 0, DKV_E_INVALID,
                   "data has 7 numbers, shape needs 8");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"data\":[1,2,3,4,5,6,7,\"8\"]"), 0,
                   DKV_E_INVALID, "array of numbers");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"data\":[1,2,3,4,5,6,7,1e39]"), 0,
                   DKV_E_INVALID, "range of FP32");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"data\":{}"), 0, DKV_E_INVALID, "array");
}

static void content_is_given_exactly_once(void **state)
{
    (void)state;
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"parameters\":{}"), 0, DKV_E_INVALID,
                   "exactly one of");
    assert_refused(
        SMALL_QUERY("[1,1,1,8]", "FP32",
                    "\"data\":[1,2,3,4,5,6,7,8],\"parameters\":{\"binary_data_size\":32}"),
        32, DKV_E_INVALID, "exactly one of");
    assert_refused(
        SMALL_QUERY("[1,1,1,8]", "FP32",
                    "\"parameters\":{\"binary_data_size\":32,\"shared_memory_region\":\"r\"}"),
        32, DKV_E_INVALID, "exactly one of");
}

static void binary_sizes_must_add_up(void **state)
{
    (void)state;
    assert_refused(PLAIN, ALL_BYTES - 1, DKV_E_INVALID, "unexpected size for input");
    assert_refused(PLAIN, ALL_BYTES + 1, DKV_E_INVALID, "unexpected additional input data");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"parameters\":{\"binary_data_size\":31}"), 31,
                   DKV_E_INVALID, "input byte size mismatch, expected 32, got 31");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"parameters\":{\"binary_data_size\":0}"), 0,
                   DKV_E_INVALID, "input byte size mismatch");
}

static void inputs_are_named_complete_and_unique(void **state)
{
    (void)state;
    assert_refused("{}", 0, DKV_E_INVALID, "input query is missing");
    assert_refused("{\"inputs\":[" QUERY "," KEY "]}", QUERY_BYTES + KEY_BYTES, DKV_E_INVALID,
                   "input value is missing");
    assert_refused("{\"inputs\":[" QUERY "," QUERY "," KEY "," VALUE "]}", ALL_BYTES + QUERY_BYTES,
                   DKV_E_INVALID, "input query: given twice");
    assert_refused("{\"inputs\":[{\"name\":\"que\\nry\"}]}", 0, DKV_E_INVALID, "'que?ry'");
    assert_refused("{\"inputs\":[{\"name\":7}]}", 0, DKV_E_INVALID, "name must be a string");
    assert_refused("{\"inputs\":[7]}", 0, DKV_E_INVALID, "array of objects");
    assert_refused("{\"inputs\":{}}", 0, DKV_E_INVALID, "inputs must be an array");
}

static void unknown_keys_are_refused(void **state)
{
    (void)state;
    assert_refused(WITH("\"parameter\":{\"window\":4}"), ALL_BYTES, DKV_E_INVALID, "'parameter'");
    assert_refused(PARAM("\"windw\":4"), ALL_BYTES, DKV_E_INVALID, "nearest one is window");
    assert_refused(PARAM("\"triton_enable_empty_final_response\":true"), ALL_BYTES, DKV_E_INVALID,
                   "reserved");
    assert_refused(SMALL_QUERY("[1,1,1,8]", "FP32", "\"strides\":[1],\"data\":[1,2,3,4,5,6,7,8]"),
                   0, DKV_E_INVALID, "'strides'");
    assert_refused(OUTPUT(",\"dtype\":1"), ALL_BYTES, DKV_E_INVALID, "'dtype'");
}

static void parameters_are_typed(void **state)
{
    (void)state;
    assert_refused(PARAM("\"window\":8.0"), ALL_BYTES, DKV_E_INVALID, "window: wrong type");
    assert_refused(PARAM("\"window\":\"8\""), ALL_BYTES, DKV_E_INVALID, "window: wrong type");
    assert_refused(PARAM("\"window\":[8]"), ALL_BYTES, DKV_E_INVALID, "'window' must be");
    assert_refused(PARAM("\"window\":null"), ALL_BYTES, DKV_E_INVALID, "'window' must be");
    assert_refused(PARAM("\"binary_data_output\":1"), ALL_BYTES, DKV_E_INVALID, "true or false");
    assert_refused(WITH("\"parameters\":[]"), ALL_BYTES, DKV_E_INVALID, "must be an object");
    assert_parses(PARAM("\"keep_ratio\":1"), ALL_BYTES);
    assert_true(infer.params.keep_ratio == 1);
}

static void outputs_are_judged(void **state)
{
    (void)state;
    assert_refused(WITH("\"outputs\":[{\"name\":\"attention\"}]"), ALL_BYTES, DKV_E_INVALID,
                   "'attention' is none of");
    assert_refused(WITH("\"outputs\":[{\"name\":\"scores\"},{\"name\":\"scores\"}]"), ALL_BYTES,
                   DKV_E_INVALID, "given twice");
    assert_refused(OUTPUT(",\"parameters\":{\"classification\":3}"), ALL_BYTES, DKV_E_INVALID,
                   "classification");
    assert_refused(OUTPUT(",\"parameters\":{\"binary_data\":1}"), ALL_BYTES, DKV_E_INVALID,
                   "true or false");
    assert_refused(OUTPUT(",\"parameters\":{\"binary_data\":true,\"shared_memory_region\":\"r\"}"),
                   ALL_BYTES, DKV_E_INVALID, "exclude each other");
}

static void ids_are_bounded_strings(void **state)
{
    char json[1024] = "{\"id\":\"";
    (void)state;
    memset(json + strlen(json), 'i', DKV_OIP_ID_BYTES_MAX + 1);
    strcat(json, "\","
                 "\"inputs\":[]}");
    assert_refused(json, 0, DKV_E_INVALID, "id has 257 bytes, allowed are 0..256");
    assert_refused(WITH("\"id\":7"), ALL_BYTES, DKV_E_INVALID, "id must be a string");
}

static void scales_are_judged(void **state)
{
    (void)state;
#define SCALED(scale)                   \
    SMALL_QUERY("[1,1,1,8]", "F8_E5M2", \
                "\"parameters\":{\"binary_data_size\":8,\"scale\":" scale "}")
    assert_parses(SCALED("2"), 8);
    assert_true(infer.inputs[DKV_OIP_QUERY].scale == 2);
    assert_refused(SCALED("0"), 8, DKV_E_INVALID, "scale");
    assert_refused(SCALED("-1"), 8, DKV_E_INVALID, "scale");
    assert_refused(SCALED("1e-60"), 8, DKV_E_INVALID, "scale");
    assert_refused(SCALED("1e60"), 8, DKV_E_INVALID, "scale");
    assert_refused(SCALED("\"1\""), 8, DKV_E_INVALID, "scale");
}

#define TEST(name) cmocka_unit_test_teardown(name, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_binary_request_is_bound_to_its_bytes),
        TEST(inputs_may_come_in_any_order),
        TEST(json_numbers_become_floats),
        TEST(settled_numbers_are_bound_like_parsed_ones),
        TEST(optional_inputs_are_taken),
        TEST(an_empty_id_counts_as_none),
        TEST(without_outputs_all_are_wanted),
        TEST(what_existing_clients_send_is_tolerated),
        TEST(shared_memory_is_recognised),
        TEST(text_that_is_not_json_is_malformed),
        TEST(a_raw_binary_request_is_refused_with_the_reason),
        TEST(a_key_given_twice_is_malformed),
        TEST(nesting_is_bounded_at_sixteen),
        TEST(sizes_of_documents_are_bounded),
        TEST(integers_must_be_integers),
        TEST(dimensions_out_of_range_are_refused),
        TEST(shapes_must_agree),
        TEST(datatypes_are_judged),
        TEST(json_data_must_be_the_shapes_count_of_numbers),
        TEST(content_is_given_exactly_once),
        TEST(binary_sizes_must_add_up),
        TEST(inputs_are_named_complete_and_unique),
        TEST(unknown_keys_are_refused),
        TEST(parameters_are_typed),
        TEST(outputs_are_judged),
        TEST(ids_are_bounded_strings),
        TEST(scales_are_judged),
    };
    dkv_oip_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
