/* libdropkv over HTTP against a real daemon, and what it refuses before anything is sent.
 *
 * usage: test_client_http DROPKVD
 */
#include "client/dropkv.h"
#include "tests/client/calls.h"
#include "tests/client/http_fixture.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 300, DIM = 16, ROWS = 8, KEEP = 30 };

static const char *daemon_program;
static struct dkv_test_daemon daemon_of_all;

/* [token][head][element], so that the strides are not those of a dense tensor. */
static float query[Q_HEADS][ROWS][DIM];
static float key[TOKENS][KV_HEADS][DIM];
static float value[TOKENS][KV_HEADS][DIM];
static float dense_key[KV_HEADS][TOKENS][DIM];
static float dense_value[KV_HEADS][TOKENS][DIM];

static const struct dropkv_param budget[] = {{"keep_tokens", DROPKV_PARAM_INT, KEEP, 0, NULL}};

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static void fill_tensors(void)
{
    dkv_test_fill(query, sizeof(query), 1);
    dkv_test_fill(key, sizeof(key), 2);
    dkv_test_fill(value, sizeof(value), 3);
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < KV_HEADS; h++) {
            memcpy(dense_key[h][t], key[t][h], sizeof(key[t][h]));
            memcpy(dense_value[h][t], value[t][h], sizeof(value[t][h]));
        }
}

static struct dropkv_request make_request(void)
{
    struct dropkv_request r = dkv_test_request(&shape, 1, query, key, value);
    r.key.token_stride = r.value.token_stride = sizeof(key[0]);
    r.key.head_stride = r.value.head_stride = sizeof(key[0][0]);
    r.params = budget;
    r.n_params = 1;
    return r;
}

/* ---- with a real daemon ---- */

static void a_request_is_scored(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request r = make_request();
    r.want_scores = 1;
    r.user = &r;
    struct dropkv_result *result = dkv_test_score(client, &r);
    assert_int_equal(result->keep_tokens, KEEP);
    assert_int_equal(result->kv_heads, KV_HEADS);
    assert_int_equal(result->n_tokens, TOKENS);
    assert_int_equal(result->keep_indices[KEEP - 1], TOKENS - 1); /* recent tokens are protected */
    assert_non_null(result->scores);
    assert_ptr_equal(result->user, &r);
    assert_int_equal(result->n_attempts, 1);
    assert_true(strlen(result->backend) > 0);
    assert_string_equal(result->error_text, "");
    dropkv_client_close(client);
    assert_int_equal(result->keep_indices[KEEP - 1], TOKENS - 1); /* outlives the client */
    dropkv_result_free(result);
}

static void strides_do_not_change_the_answer(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request strided = make_request();
    struct dropkv_request dense = dkv_test_request(&shape, 1, query, dense_key, dense_value);
    dense.params = budget;
    dense.n_params = 1;
    strided.want_scores = dense.want_scores = 1;

    struct dropkv_result *results[2] = {dkv_test_score(client, &strided),
                                        dkv_test_score(client, &dense)};
    dkv_test_assert_same(results[0], results[1]);
    dropkv_result_free(results[0]);
    dropkv_result_free(results[1]);
    dropkv_client_close(client);
}

static void sixteen_requests_are_in_flight_behind_one_descriptor(void **state)
{
    (void)state;
    enum { N = 16 };
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request r = make_request();
    struct dropkv_result *alone = dkv_test_score(client, &r);
    uint64_t ids[N];
    int seen[N] = {0};
    int n_done = 0;
    for (int i = 0; i < N; i++) {
        r.user = &seen[i];
        assert_int_equal(dropkv_submit(client, &r, &ids[i], NULL), DROPKV_OK);
        assert_true(i == 0 || ids[i] > ids[i - 1]);
    }
    assert_int_equal(dropkv_in_flight(client), N);
    const int fd = dropkv_fd(client);
    while (n_done < N) {
        struct pollfd pollfd = {.fd = fd, .events = POLLIN};
        struct dropkv_result *result;
        assert_int_equal(poll(&pollfd, 1, 60000), 1);
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
        while ((result = dropkv_next_result(client)) != NULL) {
            assert_int_equal(result->status, DROPKV_OK);
            dkv_test_assert_same(result, alone);
            *(int *)result->user += 1;
            n_done++;
            dropkv_result_free(result);
        }
        assert_int_equal(dropkv_fd(client), fd);
    }
    for (int i = 0; i < N; i++)
        assert_int_equal(seen[i], 1);
    assert_int_equal(dropkv_in_flight(client), 0);
    dropkv_result_free(alone);
    dropkv_client_close(client);
}

static void a_blocking_call_leaves_other_results_alone(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request r = make_request();
    uint64_t id;
    assert_int_equal(dropkv_submit(client, &r, &id, NULL), DROPKV_OK);
    struct dropkv_result *mine = dkv_test_score(client, &r);
    assert_true(mine->id != id);
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    struct dropkv_result *other = dropkv_next_result(client);
    assert_non_null(other);
    assert_int_equal(other->id, id);
    assert_null(dropkv_next_result(client));
    dropkv_result_free(mine);
    dropkv_result_free(other);
    dropkv_client_close(client);
}

static void a_cancelled_request_gives_no_result(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request r = make_request();
    uint64_t ids[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(dropkv_submit(client, &r, &ids[i], NULL), DROPKV_OK);
    assert_int_equal(dropkv_cancel(client, ids[1]), DROPKV_OK);
    assert_int_equal(dropkv_cancel(client, ids[1]), DROPKV_E_NOT_FOUND);
    assert_int_equal(dropkv_in_flight(client), 2);
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    assert_int_equal(dropkv_cancel(client, ids[0]),
                     DROPKV_OK); /* finished: its result is dropped */
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    assert_int_equal(result->id, ids[2]);
    assert_null(dropkv_next_result(client));
    dropkv_result_free(result);
    dropkv_client_close(client);
}

static void closing_abandons_what_is_in_flight(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request r = make_request();
    for (int i = 0; i < 8; i++)
        assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    dropkv_client_close(client);
}

static void too_many_in_flight_is_busy(void **state)
{
    (void)state;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    struct dropkv_client *client;
    struct dropkv_request r = make_request();
    options.max_in_flight = 2;
    assert_int_equal(dropkv_client_open(daemon_of_all.url, &options, &client, NULL), DROPKV_OK);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_E_BUSY);
    dropkv_client_close(client);
}

static void the_server_tells_what_it_is(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_info *info = NULL;
    struct dropkv_error error;
    assert_int_equal(dropkv_health(client, 0, &error), DROPKV_OK);
    assert_int_equal(dropkv_client_info(client, 0, &info, &error), DROPKV_OK);
    assert_string_equal(info->server, "dropkvd");
    assert_string_equal(info->version, dropkv_version());
    assert_true(strncmp(info->backend, "cpu/", 4) == 0);
    dropkv_info_free(info);
    dropkv_client_close(client);
}

static void what_the_daemon_refuses_keeps_its_reason(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_request r = make_request();
    struct dropkv_result *result;
    struct dropkv_error error;
    static float spoiled[KV_HEADS][TOKENS][DIM];
    memcpy(spoiled, dense_key, sizeof(spoiled));
    spoiled[1][7][3] = (float)(0.0 / 0.0 * -1.0);
    r.key = (struct dropkv_tensor){.data = spoiled, .dtype = DROPKV_FP32};
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_null(result);
    if (strstr(error.text, "key") == NULL || strstr(error.text, "7") == NULL)
        fail_msg("'%s' does not name the place", error.text);
    dropkv_client_close(client);
}

/* A daemon of one's own is killed while requests are in flight, and comes back. */
static void a_killed_daemon_is_an_error_and_a_new_one_is_found(void **state)
{
    (void)state;
    struct dkv_test_daemon daemon;
    struct dropkv_request r = make_request();
    struct dropkv_result *result;
    dkv_test_daemon_start(&daemon, daemon_program, 0);
    struct dropkv_client *client = dkv_test_http_client(daemon.url, -1);
    dropkv_result_free(dkv_test_score(client, &r)); /* a kept-alive connection */

    kill(daemon.pid, SIGSTOP); /* so that the requests are surely unanswered when it dies */
    for (int i = 0; i < 4; i++)
        assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    for (int i = 0; i < 50; i++)
        assert_int_equal(dropkv_dispatch(client, 1000, NULL), DROPKV_OK);
    assert_int_equal(dropkv_in_flight(client), 4);
    dkv_test_daemon_stop(&daemon, SIGKILL);
    for (int n_failed = 0; n_failed < 4;) {
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
        while ((result = dropkv_next_result(client)) != NULL) {
            assert_int_equal(result->status, DROPKV_E_UNAVAILABLE);
            assert_true(strlen(result->error_text) > 0);
            dropkv_result_free(result);
            n_failed++;
        }
    }
    assert_int_equal(dropkv_health(client, 1000000, NULL), DROPKV_E_UNAVAILABLE);

    dkv_test_daemon_start(&daemon, daemon_program, daemon.port);
    dropkv_result_free(dkv_test_score(client, &r)); /* the same client, without being told */
    dropkv_client_close(client);
    dkv_test_daemon_stop(&daemon, SIGTERM);
}

static void a_restart_is_survived_by_retrying(void **state)
{
    (void)state;
    struct dkv_test_daemon daemon;
    struct dropkv_request r = make_request();
    dkv_test_daemon_start(&daemon, daemon_program, 0);
    struct dropkv_client *client = dkv_test_http_client(daemon.url, 100);
    dropkv_result_free(dkv_test_score(client, &r));
    kill(daemon.pid, SIGSTOP);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    for (int i = 0; i < 20; i++)
        assert_int_equal(dropkv_dispatch(client, 1000, NULL), DROPKV_OK);
    dkv_test_daemon_stop(&daemon, SIGKILL);
    for (int i = 0; i < 20; i++) /* the broken connection is noticed, and nobody listens */
        assert_int_equal(dropkv_dispatch(client, 1000, NULL), DROPKV_OK);
    assert_int_equal(dropkv_in_flight(client), 1);
    dkv_test_daemon_start(&daemon, daemon_program, daemon.port);
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    if (result->status != DROPKV_OK)
        fail_msg("%s", result->error_text);
    assert_true(result->n_attempts > 1);
    dropkv_result_free(result);
    dropkv_client_close(client);
    dkv_test_daemon_stop(&daemon, SIGTERM);
}

/* ---- before anything is sent ---- */

static void wrong_requests_are_refused_on_this_side(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_http_client("http://127.0.0.1:1", 0);
    struct dropkv_error error;
    struct dropkv_request r;
#define REFUSED(change, status, part)                                      \
    do {                                                                   \
        r = make_request();                                                \
        change;                                                            \
        assert_int_equal(dropkv_submit(client, &r, NULL, &error), status); \
        if (strstr(error.text, part) == NULL)                              \
            fail_msg("'%s' does not say '%s'", error.text, part);          \
    } while (0)
    REFUSED(r.struct_size = 0, DROPKV_E_INVALID, "DROPKV_REQUEST_INIT");
    REFUSED(r.struct_size = 5000, DROPKV_E_INVALID, "DROPKV_REQUEST_INIT");
    REFUSED(r.batch = 0, DROPKV_E_INVALID, "batch 0 not in 1..4096");
    REFUSED(r.kv_heads = 0, DROPKV_E_INVALID, "kv_heads 0");
    REFUSED(r.kv_heads = 3, DROPKV_E_INVALID, "3");
    REFUSED(r.head_dim = 12, DROPKV_E_UNSUPPORTED, "12");
    REFUSED(r.n_tokens = 0, DROPKV_E_INVALID, "0");
    REFUSED(r.n_tokens = UINT64_MAX, DROPKV_E_INVALID, "key");
    REFUSED(r.key.data = NULL, DROPKV_E_INVALID, "key: data is null");
    REFUSED(r.value.dtype = (enum dropkv_dtype)9, DROPKV_E_UNSUPPORTED, "value: dtype 9");
    REFUSED(r.key.token_stride = -128, DROPKV_E_INVALID, "key: token_stride -128 is negative");
    REFUSED(r.key.token_stride = INT64_MAX, DROPKV_E_INVALID, "key: its strides overflow");
    REFUSED(r.key.batch_stride = INT64_MIN; r.batch = 3, DROPKV_E_INVALID, "overflow");
    REFUSED(r.params = NULL, DROPKV_E_INVALID, "params: null");
    REFUSED(r.timeout_us = -1, DROPKV_E_INVALID, "timeout_us -1");
    const struct dropkv_param unknown = dropkv_int("colour", 1);
    REFUSED(r.params = &unknown, DROPKV_E_INVALID, "colour");
    const struct dropkv_param wide = dropkv_int("window", 513);
    REFUSED(r.params = &wide, DROPKV_E_INVALID, "513");
    const struct dropkv_param word = dropkv_text("pool", "median");
    REFUSED(r.params = &word, DROPKV_E_INVALID, "median");
    const struct dropkv_param null_text = dropkv_text("pool", NULL);
    REFUSED(r.params = &null_text, DROPKV_E_INVALID, "null");
    assert_int_equal(dropkv_in_flight(client), 0);
    dropkv_client_close(client);
}

static void a_request_of_a_newer_caller_is_refused_only_if_it_uses_more(void **state)
{
    (void)state;
    struct {
        struct dropkv_request known;
        int64_t newer;
    } r = {make_request(), 0};
    struct dropkv_client *client = dkv_test_http_client(daemon_of_all.url, 0);
    struct dropkv_error error;
    r.known.struct_size = sizeof(r);
    assert_int_equal(dropkv_submit(client, &r.known, NULL, &error), DROPKV_OK);
    r.newer = 1;
    assert_int_equal(dropkv_submit(client, &r.known, NULL, &error), DROPKV_E_UNSUPPORTED);
    dropkv_client_close(client);
}

static void endpoints_are_checked_when_opened(void **state)
{
    (void)state;
    static const struct {
        const char *endpoint;
        enum dropkv_status status;
        const char *part;
    } rows[] = {
        {"", DROPKV_E_INVALID, "http://HOST:PORT"},
        {"localhost:8480", DROPKV_E_INVALID, "http://HOST:PORT"},
        {"ftp://localhost", DROPKV_E_INVALID, "http://HOST:PORT"},
        {"http://", DROPKV_E_INVALID, "http://HOST:PORT"},
        {"http://host:99999", DROPKV_E_INVALID, "http://HOST:PORT"},
        {"http://host?x", DROPKV_E_INVALID, "may follow"},
        {"unix:run/dropkvd.sock", DROPKV_E_INVALID, "unix:///PATH"},
        {"embedded:tpu", DROPKV_E_INVALID, "cpu, cuda"},
    };
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(dropkv_client_open(rows[i].endpoint, NULL, &client, &error),
                         rows[i].status);
        if (strstr(error.text, rows[i].part) == NULL)
            fail_msg("%s: '%s' does not say '%s'", rows[i].endpoint, error.text, rows[i].part);
        assert_null(client);
    }
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    options.token = "two words\r\nX-Injected: 1";
    assert_int_equal(dropkv_client_open("http://h", &options, &client, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "token"));
}

static int start_daemon(void **state)
{
    (void)state;
    fill_tensors();
    dkv_test_daemon_start(&daemon_of_all, daemon_program, 0);
    return 0;
}

static int stop_daemon(void **state)
{
    (void)state;
    dkv_test_daemon_stop(&daemon_of_all, SIGTERM);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_is_scored),
        cmocka_unit_test(strides_do_not_change_the_answer),
        cmocka_unit_test(sixteen_requests_are_in_flight_behind_one_descriptor),
        cmocka_unit_test(a_blocking_call_leaves_other_results_alone),
        cmocka_unit_test(a_cancelled_request_gives_no_result),
        cmocka_unit_test(closing_abandons_what_is_in_flight),
        cmocka_unit_test(too_many_in_flight_is_busy),
        cmocka_unit_test(the_server_tells_what_it_is),
        cmocka_unit_test(what_the_daemon_refuses_keeps_its_reason),
        cmocka_unit_test(a_killed_daemon_is_an_error_and_a_new_one_is_found),
        cmocka_unit_test(a_restart_is_survived_by_retrying),
        cmocka_unit_test(wrong_requests_are_refused_on_this_side),
        cmocka_unit_test(a_request_of_a_newer_caller_is_refused_only_if_it_uses_more),
        cmocka_unit_test(endpoints_are_checked_when_opened),
    };
    if (argc < 2) {
        fprintf(stderr, "usage: test_client_http DROPKVD\n");
        return 64;
    }
    daemon_program = argv[1];
    return cmocka_run_group_tests(tests, start_daemon, stop_daemon);
}
