/* Endpoints "embedded:" of libdropkv as its users link it: the same answers and the same errors as
 * a daemon's, from a module that is opened at run time.
 *
 * usage: test_embedded_library DROPKVD
 */
#include "tests/client/ipc_fixture.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 500, DIM = 32, ROWS = 16, BATCH = 3 };

static const char *program;
static float query[BATCH][Q_HEADS][ROWS][DIM];
static float key[BATCH][KV_HEADS][TOKENS][DIM];
static float value[BATCH][KV_HEADS][TOKENS][DIM];

#define MAX_PARAMS 3

/* The parameters of one request; a kind of its own ends them. */
struct wish {
    struct dropkv_param params[MAX_PARAMS];
    int want_scores;
};

#define INT(name, value)                       \
    {                                          \
        name, DROPKV_PARAM_INT, value, 0, NULL \
    }
#define REAL(name, value)                       \
    {                                           \
        name, DROPKV_PARAM_REAL, 0, value, NULL \
    }
#define TEXT(name, value)                    \
    {                                        \
        name, DROPKV_PARAM_TEXT, 0, 0, value \
    }

static struct dropkv_request make_request(const struct wish *wish)
{
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = BATCH;
    r.q_heads = Q_HEADS;
    r.kv_heads = KV_HEADS;
    r.head_dim = DIM;
    r.q_rows = ROWS;
    r.n_tokens = TOKENS;
    r.query = (struct dropkv_tensor){.data = query, .dtype = DROPKV_FP32};
    r.key = (struct dropkv_tensor){.data = key, .dtype = DROPKV_FP32};
    r.value = (struct dropkv_tensor){.data = value, .dtype = DROPKV_FP32};
    r.params = wish->params;
    while (r.n_params < MAX_PARAMS && wish->params[r.n_params].name != NULL)
        r.n_params++;
    r.want_scores = wish->want_scores;
    return r;
}

static void expect_same(const struct dropkv_result *a, const struct dropkv_result *b)
{
    const size_t n_heads = (size_t)a->batch * a->kv_heads;
    assert_int_equal(a->batch, b->batch);
    assert_int_equal(a->kv_heads, b->kv_heads);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->keep_tokens, b->keep_tokens);
    assert_int_equal(a->keep_offsets != NULL, b->keep_offsets != NULL);
    if (a->keep_offsets != NULL)
        assert_memory_equal(a->keep_offsets, b->keep_offsets, (n_heads + 1) * sizeof(int32_t));
    assert_memory_equal(
        a->keep_indices, b->keep_indices,
        (a->keep_offsets != NULL ? (size_t)a->keep_offsets[n_heads] : n_heads * a->keep_tokens) *
            sizeof(int32_t));
    assert_int_equal(a->scores != NULL, b->scores != NULL);
    if (a->scores != NULL)
        assert_memory_equal(a->scores, b->scores, n_heads * a->n_tokens * sizeof(float));
}

static void answers_are_those_of_a_daemon(void **state)
{
    static const struct wish wishes[] = {
        {{REAL("keep_ratio", 0.1), INT("sinks", 4)}, 1},
        {{INT("keep_tokens", 77), TEXT("policy", "snapkv")}, 0},
        {{REAL("keep_ratio", 0.2), TEXT("heads", "adakv_floor")}, 1},
        {{REAL("keep_ratio", 0.2), TEXT("layers", "cake"), TEXT("policy", "cake")}, 0},
        {{REAL("keep_ratio", 1.0)}, 1},
    };
    (void)state;
    struct dropkv_client *daemon = dkv_test_open(dkv_test_endpoint);
    struct dropkv_client *here = dkv_test_open("embedded:");
    for (size_t i = 0; i < sizeof(wishes) / sizeof(wishes[0]); i++) {
        const struct dropkv_request r = make_request(&wishes[i]);
        struct dropkv_result *theirs = dkv_test_score(daemon, &r);
        struct dropkv_result *ours = dkv_test_score(here, &r);
        expect_same(theirs, ours);
        assert_string_equal(theirs->backend, ours->backend);
        dropkv_result_free(theirs);
        dropkv_result_free(ours);
    }
    dropkv_client_close(here);
    dropkv_client_close(daemon);
}

static void errors_are_those_of_a_daemon(void **state)
{
    static const struct wish wishes[] = {
        {{INT("keep_tokens", 0)}, 0},
        {{INT("window", 513)}, 0},
        {{REAL("keep_ratio", 0.1), INT("keep_tokens", 5)}, 0},
        {{TEXT("policy", "none")}, 0},
        {{TEXT("nonfinite", "error")}, 0}, /* which the engine finds */
        {{TEXT("policy", "external")}, 0},
        {{INT("timeout", 1)}, 0},
    };
    (void)state;
    struct dropkv_client *daemon = dkv_test_open(dkv_test_endpoint);
    struct dropkv_client *here = dkv_test_open("embedded:cpu?threads=1");
    const float good = key[1][1][77][5];
    key[1][1][77][5] = NAN;
    for (size_t i = 0; i < sizeof(wishes) / sizeof(wishes[0]); i++) {
        const struct dropkv_request r = make_request(&wishes[i]);
        struct dropkv_error theirs, ours;
        struct dropkv_result *result;
        assert_int_not_equal(dropkv_score(daemon, &r, &result, &theirs), DROPKV_OK);
        assert_int_not_equal(dropkv_score(here, &r, &result, &ours), DROPKV_OK);
        assert_int_equal(ours.status, theirs.status);
        if (ours.status != DROPKV_E_TIMEOUT)
            assert_string_equal(ours.text, theirs.text);
    }
    key[1][1][77][5] = good;
    dropkv_client_close(here);
    dropkv_client_close(daemon);
}

/* ---- clients of their own ---- */

static const struct wish plain = {{REAL("keep_ratio", 0.1)}, 1};

struct worker {
    pthread_t thread;
    const struct dropkv_result *expected;
    int n_right;
};

enum { WORKERS = 2, ROUNDS = 40, PIPELINE = 4 };

/* On a thread of its own, where cmocka's assertions do not work: it counts. */
static void *work(void *arg)
{
    struct worker *worker = arg;
    struct dropkv_client *client;
    const struct dropkv_request r = make_request(&plain);
    const size_t bytes = (size_t)BATCH * KV_HEADS * TOKENS * sizeof(float);
    if (dropkv_client_open("embedded:cpu?threads=2", NULL, &client, NULL) != DROPKV_OK)
        return NULL;
    for (int round = 0; round < ROUNDS; round++) {
        struct dropkv_result *result;
        uint64_t unwanted;
        for (int i = 0; i < PIPELINE; i++)
            (void)dropkv_submit(client, &r, &unwanted, NULL);
        (void)dropkv_cancel(client, unwanted);
        while (dropkv_in_flight(client) > 0) {
            (void)dropkv_dispatch(client, -1, NULL);
            while ((result = dropkv_next_result(client)) != NULL) {
                worker->n_right += result->status == DROPKV_OK &&
                                   memcmp(result->scores, worker->expected->scores, bytes) == 0;
                dropkv_result_free(result);
            }
        }
    }
    (void)dropkv_submit(client, &r, NULL, NULL);
    (void)dropkv_submit(client, &r, NULL, NULL);
    dropkv_client_close(client); /* with requests that nobody has computed */
    return NULL;
}

static void clients_do_not_disturb_each_other(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open("embedded:");
    const struct dropkv_request r = make_request(&plain);
    struct dropkv_result *expected = dkv_test_score(client, &r);
    struct worker workers[WORKERS] = {{0}};
    for (int i = 0; i < WORKERS; i++) {
        workers[i].expected = expected;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        assert_int_equal(workers[i].n_right, ROUNDS * (PIPELINE - 1));
    }
    dropkv_result_free(expected);
    dropkv_client_close(client);
}

static void endpoints_and_options_are_checked(void **state)
{
    static const struct {
        const char *endpoint;
        enum dropkv_status status;
        const char *text;
    } wrong[] = {
        {"embedded:cpu", DROPKV_E_INVALID, "embedded:cuda:N"},
        {"embedded:", DROPKV_E_INVALID, "embedded:cuda:N"},
        {"http://127.0.0.1:1", DROPKV_E_INVALID, "cuda_stream"},
        {"unix:///nowhere", DROPKV_E_INVALID, "cuda_stream"},
        {"embedded:tpu", DROPKV_E_INVALID, "'tpu'"},
        {"embedded:cuda:4711", DROPKV_E_INVALID, "4711"},
    };
    (void)state;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    int something;
    options.cuda_stream = &something;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct dropkv_client *client = NULL;
        struct dropkv_error error;
        assert_int_equal(dropkv_client_open(wrong[i].endpoint, &options, &client, &error),
                         wrong[i].status);
        assert_non_null(strstr(error.text, wrong[i].text));
        assert_null(client);
    }
}

static void it_says_what_it_is(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open("embedded:");
    struct dropkv_info *info;
    assert_int_equal(dropkv_health(client, 0, NULL), DROPKV_OK);
    assert_int_equal(dropkv_client_info(client, 0, &info, NULL), DROPKV_OK);
    assert_string_equal(info->server, "libdropkv (embedded)");
    assert_string_equal(info->version, dropkv_version());
    assert_memory_equal(info->backend, "cpu/", 4);
    dropkv_info_free(info);
    dropkv_client_close(client);
}

static int begin(void **state)
{
    uint32_t x = 1;
    float *const all[] = {&query[0][0][0][0], &key[0][0][0][0], &value[0][0][0][0]};
    const size_t n[] = {sizeof(query), sizeof(key), sizeof(value)};
    (void)state;
    for (int tensor = 0; tensor < 3; tensor++)
        for (size_t i = 0; i < n[tensor] / sizeof(float); i++) {
            x = x * 1664525u + 1013904223u;
            all[tensor][i] = (float)(x >> 8) / (float)(1 << 22) - 2.0f;
        }
    return dkv_test_begin(program);
}

static int end(void **state)
{
    (void)state;
    return dkv_test_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_those_of_a_daemon),
        cmocka_unit_test(errors_are_those_of_a_daemon),
        cmocka_unit_test(clients_do_not_disturb_each_other),
        cmocka_unit_test(endpoints_and_options_are_checked),
        cmocka_unit_test(it_says_what_it_is),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, end);
}
