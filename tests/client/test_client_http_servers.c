/* libdropkv over HTTP against servers that misbehave: busy, silent, cut, broken.
 *
 * usage: test_client_http_servers
 */
#include "client/dropkv.h"
#include "tests/client/calls.h"
#include "tests/client/http_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { DIM = 16, ROWS = 8 };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

#define REPLY(text) text, sizeof(text) - 1

/* One KV head of four tokens keeps two: small enough to write by hand. */
static struct dropkv_request tiny_request(void)
{
    static const float zeros[ROWS][DIM];
    static const struct dropkv_param two[] = {{"keep_tokens", DROPKV_PARAM_INT, 2, 0, NULL},
                                              {"recent", DROPKV_PARAM_INT, 1, 0, NULL},
                                              {"window", DROPKV_PARAM_INT, 1, 0, NULL}};
    const struct dkv_test_shape shape = {1, 1, DIM, ROWS, 4};
    struct dropkv_request r = dkv_test_request(&shape, 1, zeros, zeros, zeros);
    r.params = two;
    r.n_params = 3;
    return r;
}

#define GOOD_HEAD                                                                                 \
    "{\"model_name\":\"dropkv\",\"model_version\":\"1\",\"outputs\":[{\"name\":\"keep_indices\"," \
    "\"datatype\":\"INT32\",\"shape\":[1,1,2],\"parameters\":{\"binary_data_size\":8}}]}"

/* A 200 whose head is GOOD_HEAD and whose binary part is `indices`. */
static size_t make_answer(char out[1024], const int32_t indices[2], size_t missing)
{
    const size_t head = sizeof(GOOD_HEAD) - 1;
    const int n = snprintf(out, 1024,
                           "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n"
                           "Inference-Header-Content-Length: %zu\r\n\r\n%s",
                           head + 8, head, GOOD_HEAD);
    memcpy(out + n, indices, 8);
    return (size_t)n + 8 - missing;
}

/* Scores the tiny request against scenes and expects this status. */
static void expect(const struct dkv_test_scene *scenes, size_t n, int32_t max_retries,
                   enum dropkv_status status, const char *part, size_t n_connections)
{
    char url[64];
    struct dropkv_error error = {0};
    struct dropkv_result *result = NULL;
    struct dropkv_request r = tiny_request();
    struct dkv_test_server *server = dkv_test_server_start(scenes, n, url);
    struct dropkv_client *client = dkv_test_http_client(url, max_retries);
    r.timeout_us = 20000000;
    const enum dropkv_status got = dropkv_score(client, &r, &result, &error);
    if (got != status || (status != DROPKV_OK && strstr(error.text, part) == NULL))
        fail_msg("%d '%s', wanted %d '%s'", got, error.text, status, part);
    dropkv_result_free(result);
    dropkv_client_close(client);
    assert_int_equal(dkv_test_server_stop(server), n_connections);
}

#define BUSY_AGAIN_SOON                                            \
    REPLY("HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\n" \
          "Content-Length: 23\r\nConnection: close\r\n\r\n{\"error\":\"queue full\"}\n")
#define BUSY_AGAIN_TOMORROW                                            \
    REPLY("HTTP/1.1 503 Service Unavailable\r\nRetry-After: 80000\r\n" \
          "Content-Length: 23\r\nConnection: close\r\n\r\n{\"error\":\"queue full\"}\n")

static void a_good_answer_is_taken(void **state)
{
    (void)state;
    char answer[1024];
    const struct dkv_test_scene scene = {answer, make_answer(answer, (const int32_t[]){1, 3}, 0), 0,
                                         0};
    expect(&scene, 1, -1, DROPKV_OK, "", 1);
}

static void busy_is_tried_again_after_the_time_it_names(void **state)
{
    (void)state;
    char answer[1024];
    const size_t n = make_answer(answer, (const int32_t[]){1, 3}, 0);
    const struct dkv_test_scene scenes[] = {{BUSY_AGAIN_SOON, 0, 0}, {answer, n, 0, 0}};
    expect(scenes, 2, 0, DROPKV_OK, "", 2);
    expect(scenes, 2, -1, DROPKV_E_BUSY, "queue full", 1);
    const struct dkv_test_scene stubborn[] = {
        {BUSY_AGAIN_SOON, 0, 0}, {BUSY_AGAIN_SOON, 0, 0}, {BUSY_AGAIN_SOON, 0, 0}};
    expect(stubborn, 3, 2, DROPKV_E_BUSY, "queue full", 3);
}

#define PROXY_LOST_ITS_NODE                 \
    REPLY("HTTP/1.0 502 Bad Gateway\r\n"    \
          "Content-Type: text/html\r\n\r\n" \
          "<html><body>502 Bad Gateway</body></html>\n")

static void a_proxy_that_lost_its_node_is_tried_again(void **state)
{
    (void)state;
    char answer[1024];
    const size_t n = make_answer(answer, (const int32_t[]){1, 3}, 0);
    const struct dkv_test_scene scenes[] = {{PROXY_LOST_ITS_NODE, 0, 0}, {answer, n, 0, 0}};
    expect(scenes, 2, 0, DROPKV_OK, "", 2);
    expect(scenes, 2, -1, DROPKV_E_BUSY, "HTTP 502", 1);
}

static void a_retry_beyond_the_deadline_is_not_waited_for(void **state)
{
    (void)state;
    const struct dkv_test_scene scene = {BUSY_AGAIN_TOMORROW, 0, 0};
    const double start_s = now_s();
    expect(&scene, 1, 10, DROPKV_E_BUSY, "queue full", 1);
    assert_true(now_s() - start_s < 10);
}

static void a_silent_server_costs_the_deadline_and_no_more(void **state)
{
    (void)state;
    char url[64];
    struct dropkv_error error;
    struct dropkv_result *result;
    struct dropkv_request r = tiny_request();
    const struct dkv_test_scene scenes[] = {{NULL, 0, 0, true}, {NULL, 0, 0, true}};
    struct dkv_test_server *server = dkv_test_server_start(scenes, 2, url);
    struct dropkv_client *client = dkv_test_http_client(url, 5);
    r.timeout_us = 200000;
    const double start_s = now_s();
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_TIMEOUT);
    const double spent_s = now_s() - start_s;
    assert_true(spent_s >= 0.2 && spent_s < 5);
    assert_int_equal(dropkv_health(client, 100000, &error), DROPKV_E_TIMEOUT);
    dropkv_client_close(client);
    dkv_test_server_stop(server);
}

/* The caller sleeps over the deadline of a request whose answer came before. */
static void an_answer_that_came_in_time_is_taken_late(void **state)
{
    (void)state;
    char url[64], answer[1024];
    struct dropkv_request r = tiny_request();
    static _Atomic enum dkv_test_turn turn = DKV_TEST_ASKING;
    const struct dkv_test_scene scene = {answer, make_answer(answer, (const int32_t[]){1, 3}, 0), 0,
                                         0};
    dkv_test_turn = &turn;
    struct dkv_test_server *server = dkv_test_server_start(&scene, 1, url);
    struct dropkv_client *client = dkv_test_http_client(url, 0);
    r.timeout_us = 2000000;
    const double deadline_s = now_s() + 2.05;
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    while (turn == DKV_TEST_ASKING)
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    turn = DKV_TEST_RELEASED;
    while (turn != DKV_TEST_REPLIED)
        usleep(1000);
    while (now_s() < deadline_s)
        usleep(1000);
    assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    if (result->status != DROPKV_OK)
        fail_msg("%s", result->error_text);
    dropkv_result_free(result);
    dropkv_client_close(client);
    dkv_test_server_stop(server);
    dkv_test_turn = NULL;
}

static void waiting_for_a_connection_counts_toward_the_deadline(void **state)
{
    (void)state;
    char url[64];
    struct dropkv_client *client;
    struct dropkv_request r = tiny_request();
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    const struct dkv_test_scene scene = {NULL, 0, 0, true};
    struct dkv_test_server *server = dkv_test_server_start(&scene, 1, url);
    options.max_connections = 1;
    uint64_t patient;
    uint64_t hasty;
    assert_int_equal(dropkv_client_open(url, &options, &client, NULL), DROPKV_OK);
    r.timeout_us = 60000000;
    assert_int_equal(dropkv_submit(client, &r, &patient, NULL), DROPKV_OK);
    r.timeout_us = 100000;
    assert_int_equal(dropkv_submit(client, &r, &hasty, NULL), DROPKV_OK);
    const double start_s = now_s();
    assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    assert_true(now_s() - start_s < 10);
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    assert_int_equal(result->id, hasty);
    assert_int_equal(result->status, DROPKV_E_TIMEOUT);
    dropkv_result_free(result);
    assert_int_equal(dropkv_cancel(client, patient), DROPKV_OK);
    dropkv_client_close(client);
    dkv_test_server_stop(server);
}

static void broken_answers_are_malformed(void **state)
{
    (void)state;
    static const struct {
        const char *reply;
        size_t n_bytes;
        const char *part;
    } rows[] = {
        {REPLY("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"), ""},
        {REPLY("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), ""},
        {REPLY("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
               "Inference-Header-Content-Length: 9\r\n\r\n{}"),
         "head has 9 bytes"},
        {REPLY("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"), "longer than any"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const struct dkv_test_scene scene = {rows[i].reply, rows[i].n_bytes, 0, 0};
        expect(&scene, 1, 0, DROPKV_E_MALFORMED, rows[i].part, 1);
    }
}

static void indices_outside_the_cache_are_not_handed_on(void **state)
{
    (void)state;
    static const int32_t wrong[][2] = {{1, 4}, {-1, 2}, {2, 2}, {3, 1}, {0, INT32_MAX}};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        char answer[1024];
        const struct dkv_test_scene scene = {answer, make_answer(answer, wrong[i], 0), 0, 0};
        expect(&scene, 1, 0, DROPKV_E_MALFORMED, "not ascending within 0..3", 1);
    }
}

static void a_cut_answer_is_asked_for_again(void **state)
{
    (void)state;
    char cut[1024];
    char whole[1024];
    const int32_t indices[2] = {0, 3};
    const struct dkv_test_scene scenes[] = {{cut, make_answer(cut, indices, 3), 0, 0},
                                            {whole, make_answer(whole, indices, 0), 0, 0}};
    expect(scenes, 2, 0, DROPKV_OK, "", 2);
    expect(scenes, 1, -1, DROPKV_E_UNAVAILABLE, "broke", 1);
}

static void a_refusal_while_the_body_is_being_sent_is_heard(void **state)
{
    (void)state;
    enum { N = 65536 };
    char url[64];
    struct dropkv_error error;
    struct dropkv_result *result;
    const struct dkv_test_scene scene = {
        REPLY("HTTP/1.1 413 Payload Too Large\r\nContent-Length: 21\r\nConnection: close\r\n\r\n"
              "{\"error\":\"too large\"}"),
        true, 0};
    float *big = calloc((size_t)N * DIM, sizeof(float));
    struct dropkv_request r = tiny_request();
    r.n_tokens = N;
    r.key = r.value = (struct dropkv_tensor){.data = big, .dtype = DROPKV_FP32};
    struct dkv_test_server *server = dkv_test_server_start(&scene, 1, url);
    struct dropkv_client *client = dkv_test_http_client(url, 0);
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_TOO_LARGE);
    assert_non_null(strstr(error.text, "too large"));
    dropkv_client_close(client);
    dkv_test_server_stop(server);
    free(big);
}

static void nobody_listening_is_unavailable_after_the_retries(void **state)
{
    (void)state;
    struct dropkv_error error;
    struct dropkv_result *result;
    struct dropkv_request r = tiny_request();
    struct dropkv_client *client = dkv_test_http_client("http://127.0.0.1:1", 2);
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_UNAVAILABLE);
    assert_non_null(strstr(error.text, "nobody listens"));
    assert_int_equal(dropkv_submit(client, &r, NULL, &error), DROPKV_OK);
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    result = dropkv_next_result(client);
    assert_int_equal(result->n_attempts, 3);
    dropkv_result_free(result);
    dropkv_client_close(client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_answer_is_taken),
        cmocka_unit_test(busy_is_tried_again_after_the_time_it_names),
        cmocka_unit_test(a_proxy_that_lost_its_node_is_tried_again),
        cmocka_unit_test(a_retry_beyond_the_deadline_is_not_waited_for),
        cmocka_unit_test(a_silent_server_costs_the_deadline_and_no_more),
        cmocka_unit_test(an_answer_that_came_in_time_is_taken_late),
        cmocka_unit_test(waiting_for_a_connection_counts_toward_the_deadline),
        cmocka_unit_test(broken_answers_are_malformed),
        cmocka_unit_test(indices_outside_the_cache_are_not_handed_on),
        cmocka_unit_test(a_cut_answer_is_asked_for_again),
        cmocka_unit_test(a_refusal_while_the_body_is_being_sent_is_heard),
        cmocka_unit_test(nobody_listening_is_unavailable_after_the_retries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
