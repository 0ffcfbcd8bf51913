/* Replies: their exact form, what a client makes of them, and replies no server should send. */
#include "proto/oip.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const int32_t keep[2 * 2 * 3] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2147483647};
static const float scores[2 * 2 * 2] = {0,     0.1f, 1e-30f,   3.4e38f,
                                        -0.0f, 1,    16777216, 1.17549435e-38f};
static const struct dkv_oip_result result = {
    .n_blocks = 2,
    .kv_heads = 2,
    .keep_tokens = 3,
    .n_tokens = 2,
    .keep = keep,
    .scores = scores,
    .backend = "cpu/avx512",
    .window = 8,
};
static struct dkv_error err;

#define PARAMETERS                       \
    "\"parameters\":{\"backend\":\"cpu/" \
    "avx512\",\"window\":8,\"keep_tokens\":3,\"degraded\":false}"

static struct dkv_oip_infer wants(bool indices, bool scores_too, bool binary)
{
    struct dkv_oip_infer infer = {0};
    infer.outputs[DKV_OIP_KEEP_INDICES] = (struct dkv_oip_wanted){.wanted = indices,
                                                                  .binary = binary};
    infer.outputs[DKV_OIP_SCORES] = (struct dkv_oip_wanted){.wanted = scores_too, .binary = binary};
    return infer;
}

static void a_binary_reply_has_the_form_clients_need(void **state)
{
    struct dkv_oip_infer infer = wants(true, true, true);
    struct dkv_oip_reply reply;
    (void)state;
    assert_int_equal(dkv_oip_reply_encode(&infer, &result, &reply, &err), DKV_OK);
    assert_string_equal(reply.head.bytes,
                        "{\"model_name\":\"dropkv\",\"model_version\":\"1\"," PARAMETERS
                        ",\"outputs\":["
                        "{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":[2,2,3],"
                        "\"parameters\":{\"binary_data_size\":48}},"
                        "{\"name\":\"scores\",\"datatype\":\"FP32\",\"shape\":[2,2,2],"
                        "\"parameters\":{\"binary_data_size\":32}}]}");
    assert_int_equal(reply.head.n_bytes, strlen(reply.head.bytes));
    assert_int_equal(reply.n_segments, 2);
    assert_ptr_equal(reply.segments[0].bytes, keep);
    assert_int_equal(reply.segments[0].n_bytes, 48);
    assert_ptr_equal(reply.segments[1].bytes, scores);
    assert_int_equal(reply.binary_bytes, 80);
    dkv_oip_reply_fini(&reply);
}

static void a_json_reply_has_numbers_and_no_parameters(void **state)
{
    struct dkv_oip_infer infer = wants(true, true, false);
    struct dkv_oip_reply reply;
    (void)state;
    strcpy(infer.id, "a\"\\\x01é");
    assert_int_equal(dkv_oip_reply_encode(&infer, &result, &reply, &err), DKV_OK);
    assert_string_equal(
        reply.head.bytes,
        "{\"id\":\"a\\\"\\\\\\u0001é\",\"model_name\":\"dropkv\",\"model_version\":"
        "\"1\"," PARAMETERS
        ",\"outputs\":[{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":[2,2,3],"
        "\"data\":[0,1,2,3,4,5,6,7,8,9,10,2147483647]},"
        "{\"name\":\"scores\",\"datatype\":\"FP32\",\"shape\":[2,2,2],"
        "\"data\":[0,0.100000001,1e-30,3.39999995e+38,-0,1,16777216,1.17549435e-38]}]}");
    assert_int_equal(reply.n_segments, 0);
    assert_int_equal(reply.binary_bytes, 0);
    dkv_oip_reply_fini(&reply);
}

static void an_output_in_a_region_has_neither(void **state)
{
    struct dkv_oip_infer infer = wants(true, false, false);
    struct dkv_oip_reply reply;
    (void)state;
    strcpy(infer.outputs[DKV_OIP_KEEP_INDICES].region, "out");
    assert_int_equal(dkv_oip_reply_encode(&infer, &result, &reply, &err), DKV_OK);
    assert_non_null(strstr(reply.head.bytes, "\"shape\":[2,2,3]}]}"));
    assert_int_equal(reply.n_segments, 0);
    dkv_oip_reply_fini(&reply);
}

static void a_long_json_reply_is_whole(void **state)
{
    struct dkv_oip_infer infer = wants(true, false, false);
    struct dkv_oip_result large = result;
    struct dkv_oip_reply reply;
    int32_t *indices = malloc(300000 * sizeof(*indices));
    (void)state;
    for (int i = 0; i < 300000; i++)
        indices[i] = i;
    large.n_blocks = large.kv_heads = 1;
    large.keep_tokens = 300000;
    large.keep = indices;
    assert_int_equal(dkv_oip_reply_encode(&infer, &large, &reply, &err), DKV_OK);
    assert_string_equal(reply.head.bytes + reply.head.n_bytes - 24, "299997,299998,299999]}]}");
    dkv_oip_reply_fini(&reply);
    free(indices);
}

static void a_reply_past_two_gigabytes_is_refused(void **state)
{
    struct dkv_oip_infer infer = wants(true, false, true);
    struct dkv_oip_result large = result;
    struct dkv_oip_reply reply;
    (void)state;
    large.n_blocks = 4096;
    large.kv_heads = 1024;
    large.keep_tokens = 200;
    assert_int_equal(dkv_oip_reply_encode(&infer, &large, &reply, &err), DKV_E_TOO_LARGE);
}

static void the_client_reads_what_the_server_wrote(void **state)
{
    struct dkv_oip_infer infer = wants(true, true, true);
    struct dkv_oip_answer answer;
    struct dkv_oip_reply reply;
    (void)state;
    strcpy(infer.id, "x");
    assert_int_equal(dkv_oip_reply_encode(&infer, &result, &reply, &err), DKV_OK);
    assert_int_equal(dkv_oip_answer_parse(reply.head.bytes, reply.head.n_bytes, 80, &answer, &err),
                     DKV_OK);
    assert_string_equal(answer.id, "x");
    assert_string_equal(answer.backend, "cpu/avx512");
    assert_int_equal(answer.n_blocks, 2);
    assert_int_equal(answer.kv_heads, 2);
    assert_int_equal(answer.keep_tokens, 3);
    assert_int_equal(answer.keep_offset, 0);
    assert_true(answer.has_scores);
    assert_int_equal(answer.n_tokens, 2);
    assert_int_equal(answer.scores_offset, 48);
    assert_false(answer.degraded);
    dkv_oip_reply_fini(&reply);
}

#define KEEP(size)                                                                        \
    "{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":[1,1,3],\"parameters\":" \
    "{\"binary_data_size\":" size "}}"
#define REPLY(outputs) "{\"outputs\":[" outputs "]}"

static void replies_that_do_not_add_up_are_malformed(void **state)
{
    static const char *const bad[] = {
        "",
        "[]",
        "<html>",
        "{}",
        "{\"outputs\":{}}",
        REPLY(""),
        REPLY("7"),
        REPLY("{}"),
        REPLY(KEEP("11")),
        REPLY(KEEP("12.0")),
        REPLY(KEEP("-12")),
        REPLY(KEEP("12") "," KEEP("12")),
        REPLY("{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":[1,1,3],\"data\":[1,2,3]"
              "}"),
        REPLY("{\"name\":\"keep_indices\",\"datatype\":\"INT64\",\"shape\":[1,1,3],"
              "\"parameters\":{\"binary_data_size\":12}}"),
        REPLY("{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":[1,1,0],"
              "\"parameters\":{\"binary_data_size\":0}}"),
        REPLY("{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":[3],"
              "\"parameters\":{\"binary_data_size\":12}}"),
        REPLY("{\"name\":\"keep_indices\",\"datatype\":\"INT32\",\"shape\":"
              "[2147483647,2147483647,2147483647],\"parameters\":{\"binary_data_size\":12}}"),
        REPLY("{\"name\":\"other\"}"),
    };
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct dkv_oip_answer answer;
        const enum dkv_status status = dkv_oip_answer_parse(bad[i], strlen(bad[i]), 12, &answer,
                                                            &err);
        if (status != DKV_E_MALFORMED || err.status != DKV_E_MALFORMED)
            fail_msg("status %d for %s", status, bad[i]);
    }
    struct dkv_oip_answer answer;
    const char *good = REPLY(KEEP("12"));
    assert_int_equal(dkv_oip_answer_parse(good, strlen(good), 12, &answer, &err), DKV_OK);
    assert_int_equal(dkv_oip_answer_parse(good, strlen(good), 13, &answer, &err), DKV_E_MALFORMED);
    assert_int_equal(dkv_oip_answer_parse(good, strlen(good), 11, &answer, NULL), DKV_E_MALFORMED);
}

static void error_bodies_are_json_under_a_kibibyte(void **state)
{
    char body[DKV_OIP_ERROR_BYTES], long_text[4096];
    (void)state;
    const size_t n = dkv_oip_error_encode("window: \"9\" is\noutside \\ é", body);
    assert_string_equal(body, "{\"error\":\"window: \\\"9\\\" is\\u000aoutside \\\\ ??\"}");
    assert_int_equal(n, strlen(body));
    for (int fill = 1; fill < 256; fill++) {
        memset(long_text, fill, sizeof(long_text) - 1);
        long_text[sizeof(long_text) - 1] = '\0';
        assert_true(dkv_oip_error_encode(long_text, body) < DKV_OIP_ERROR_BYTES);
        assert_int_equal(strlen(body), dkv_oip_error_encode(long_text, body));
        assert_int_equal(dkv_oip_error_parse(400, body, strlen(body), &err), DKV_E_INVALID);
        assert_null(strstr(err.text, "HTTP 400"));
    }
}

static void the_client_reads_errors_of_any_server(void **state)
{
    const char *body = "{\"error\":\"queue is full\\u001b[2J\"}";
    (void)state;
    assert_int_equal(dkv_oip_error_parse(503, body, strlen(body), &err), DKV_E_BUSY);
    assert_string_equal(err.text, "queue is full?[2J");
    assert_int_equal(dkv_oip_error_parse(502, "<html>", 6, &err), DKV_E_BUSY);
    assert_non_null(strstr(err.text, "HTTP 502"));
    assert_int_equal(dkv_oip_error_parse(404, "", 0, &err), DKV_E_NOT_FOUND);
    assert_int_equal(dkv_oip_error_parse(404, "{\"error\":7}", 11, &err), DKV_E_NOT_FOUND);
    assert_non_null(strstr(err.text, "HTTP 404"));
    assert_int_equal(dkv_oip_error_parse(299, "", 0, NULL), DKV_E_INTERNAL);
    assert_int_equal(dkv_oip_error_parse(413, "", 0, &err), DKV_E_TOO_LARGE);
    assert_int_equal(dkv_oip_error_parse(501, "", 0, &err), DKV_E_UNSUPPORTED);
    assert_int_equal(dkv_oip_error_parse(401, "", 0, &err), DKV_E_DENIED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_binary_reply_has_the_form_clients_need),
        cmocka_unit_test(a_json_reply_has_numbers_and_no_parameters),
        cmocka_unit_test(an_output_in_a_region_has_neither),
        cmocka_unit_test(a_long_json_reply_is_whole),
        cmocka_unit_test(a_reply_past_two_gigabytes_is_refused),
        cmocka_unit_test(the_client_reads_what_the_server_wrote),
        cmocka_unit_test(replies_that_do_not_add_up_are_malformed),
        cmocka_unit_test(error_bodies_are_json_under_a_kibibyte),
        cmocka_unit_test(the_client_reads_errors_of_any_server),
    };
    dkv_oip_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
