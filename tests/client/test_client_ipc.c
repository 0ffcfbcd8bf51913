/* The local socket through the library's calls, against a real daemon: the answers are those of the
 * engine in this process.
 *
 * usage: test_client_ipc DROPKVD
 */
#include "client/buffer.h"
#include "client/cli/synth.h"
#include "tests/client/calls.h"
#include "tests/client/ipc_fixture.h"

#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 300, DIM = 32, ROWS = 8, BATCH = 3 };

/* One request's tensors, in a buffer or not. */
struct tensors {
    float query[BATCH][Q_HEADS][ROWS][DIM];
    float key[BATCH][KV_HEADS][TOKENS][DIM];
    float value[BATCH][KV_HEADS][TOKENS][DIM];
};

static const char *program;
static struct tensors tensors;
static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, 30, 0, NULL}};

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static struct dropkv_request make_request(const struct tensors *from, uint32_t batch)
{
    struct dropkv_request r = dkv_test_request(&shape, batch, from->query, from->key, from->value);
    r.params = params;
    r.n_params = 1;
    return r;
}

/* The tensors in a buffer that was added to the client. */
static struct dropkv_buffer *share(struct dropkv_client *client)
{
    struct dropkv_buffer *buffer = dkv_test_buffer(client, sizeof(tensors), false);
    memcpy(dropkv_buffer_data(buffer), &tensors, sizeof(tensors));
    return buffer;
}

static void sent_and_shared_tensors_have_the_engines_answers(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_buffer *buffer = share(client);
    (void)unused;
    for (int scores = 0; scores < 2; scores++)
        for (uint32_t batch = 1; batch <= BATCH; batch++) {
            struct dropkv_request sent = make_request(&tensors, batch);
            struct dropkv_request shared = make_request(dropkv_buffer_data(buffer), batch);
            sent.want_scores = shared.want_scores = scores;
            struct dropkv_result *wanted = dkv_test_expect(&sent);
            struct dropkv_result *a = dkv_test_score(client, &sent);
            struct dropkv_result *b = dkv_test_score(client, &shared);
            dkv_test_assert_same(a, wanted);
            dkv_test_assert_same(b, wanted);
            assert_int_equal(b->n_attempts, 1);
            assert_string_equal(b->backend, wanted->backend);
            dropkv_result_free(wanted);
            dropkv_result_free(a);
            dropkv_result_free(b);
        }
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
}

static void what_lies_in_a_buffer_is_read_there(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_buffer *buffer = share(client);
    struct tensors *shared = dropkv_buffer_data(buffer);
    struct dropkv_request mixed = make_request(shared, 1);
    (void)unused;
    mixed.query.data = tensors.query; /* this one is sent */
    struct dropkv_result *before = dkv_test_score(client, &mixed);
    memcpy(shared->key, tensors.key[1], sizeof(tensors.key[1]));
    struct dropkv_result *after = dkv_test_score(client, &mixed);
    struct dropkv_request changed = make_request(&tensors, 1);
    changed.key.data = tensors.key[1];
    struct dropkv_result *wanted = dkv_test_expect(&changed);
    dkv_test_assert_same(after, wanted);
    assert_memory_not_equal(before->keep_indices, after->keep_indices,
                            KV_HEADS * 30 * sizeof(int32_t));
    dropkv_result_free(before);
    dropkv_result_free(after);
    dropkv_result_free(wanted);
    dropkv_client_remove_buffer(client, buffer);
    dropkv_buffer_free(buffer);
    struct dropkv_request plain = make_request(&tensors, 1);
    struct dropkv_result *still = dkv_test_score(client, &plain);
    dropkv_result_free(still);
    dropkv_client_close(client);
}

static void strides_and_the_order_of_dimensions_are_numbers(void **unused)
{
    static float cache[TOKENS][2][KV_HEADS][DIM]; /* keys and values of a token side by side */
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    (void)unused;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < KV_HEADS; h++) {
            memcpy(cache[t][0][h], tensors.key[0][h][t], sizeof(cache[t][0][h]));
            memcpy(cache[t][1][h], tensors.value[0][h][t], sizeof(cache[t][1][h]));
        }
    struct dropkv_request dense = make_request(&tensors, 1);
    struct dropkv_request packed = dense;
    packed.key.data = cache[0][0];
    packed.value.data = cache[0][1];
    packed.key.token_stride = packed.value.token_stride = sizeof(cache[0]);
    packed.key.head_stride = packed.value.head_stride = sizeof(cache[0][0][0]);
    struct dropkv_result *wanted = dkv_test_expect(&dense);
    struct dropkv_result *got = dkv_test_score(client, &packed);
    dkv_test_assert_same(got, wanted);
    dropkv_result_free(wanted);
    dropkv_result_free(got);
    dropkv_client_close(client);
}

static void many_in_flight_are_answered_once_each_and_a_bad_one_fails_alone(void **unused)
{
    enum { N = 64, BAD = 17 };
    static struct tensors bad;
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_request request = make_request(&tensors, 1);
    struct dropkv_result *wanted = dkv_test_expect(&request);
    struct dropkv_result *result;
    bool seen[N] = {false};
    int n = 0;
    (void)unused;
    bad = tensors;
    bad.key[0][0][0][0] = NAN;
    for (int i = 0; i < N; i++) {
        struct dropkv_request r = make_request(i == BAD ? &bad : &tensors, 1);
        r.user = &seen[i];
        assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    }
    while (dropkv_in_flight(client) > 0) {
        struct pollfd pollfd = {.fd = dropkv_fd(client), .events = POLLIN};
        assert_int_equal(poll(&pollfd, 1, 60000), 1);
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
        while ((result = dropkv_next_result(client)) != NULL) {
            bool *mine = result->user;
            assert_false(*mine);
            *mine = true;
            n++;
            if (mine == &seen[BAD])
                assert_int_equal(result->status, DROPKV_E_INVALID);
            else
                dkv_test_assert_same(result, wanted);
            dropkv_result_free(result);
        }
    }
    assert_int_equal(n, N);
    dropkv_result_free(wanted);
    dropkv_client_close(client);
}

static void cancelled_and_late_requests_do_not_disturb_others(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_request request = make_request(&tensors, 1);
    struct dropkv_result *first = dkv_test_score(client, &request);
    struct dropkv_error error;
    struct dropkv_result *result;
    uint64_t id;
    (void)unused;
    assert_int_equal(dropkv_submit(client, &request, &id, NULL), DROPKV_OK);
    assert_int_equal(dropkv_cancel(client, id), DROPKV_OK);
    kill(dkv_test_daemon_pid, SIGSTOP);
    request.timeout_us = 20000;
    assert_int_equal(dropkv_score(client, &request, &result, &error), DROPKV_E_TIMEOUT);
    kill(dkv_test_daemon_pid, SIGCONT);
    request.timeout_us = 0;
    result = dkv_test_score(client, &request);
    dkv_test_assert_same(result, first);
    dropkv_result_free(first);
    dropkv_result_free(result);
    dropkv_client_close(client);
}

static void a_daemon_that_was_killed_is_found_again_with_all_buffers(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_buffer *buffer = share(client);
    struct dropkv_request request = make_request(dropkv_buffer_data(buffer), 1);
    struct dropkv_result *before = dkv_test_score(client, &request);
    struct dropkv_result *result;
    struct dropkv_error error;
    (void)unused;
    dkv_test_stop_daemon(SIGKILL);
    assert_int_equal(dropkv_score(client, &request, &result, &error), DROPKV_E_UNAVAILABLE);
    dkv_test_start_daemon();
    result = dkv_test_score(client, &request);
    dkv_test_assert_same(result, before);
    dropkv_result_free(result);
    dkv_test_stop_daemon(SIGTERM); /* the connection ends while nothing is in flight */
    dkv_test_start_daemon();
    result = dkv_test_score(client, &request);
    dkv_test_assert_same(result, before);
    dropkv_result_free(result);
    dropkv_result_free(before);
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
}

/* With scores, which show every scale. */
static void scales_per_head_and_sink_logits_cross_the_socket(void **unused)
{
    static const float k_scales[KV_HEADS] = {0.5f, 2.0f}, v_scales[KV_HEADS] = {3.0f, 0.25f};
    static const float sinks[Q_HEADS] = {1.0f, -2.0f, 0.5f, 4.0f};
    static uint8_t quantised[2][BATCH][KV_HEADS][TOKENS][DIM];
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_buffer *buffer = share(client);
    struct dkv_random random;
    (void)unused;
    dkv_random_init(&random, 11);
    dkv_random_normal(&random, DKV_F8_E4M3, quantised, sizeof(quantised));
    for (unsigned which = 0; which < 8; which++) {
        struct dropkv_request r = make_request(which & 1 ? dropkv_buffer_data(buffer) : &tensors,
                                               BATCH);
        r.want_scores = 1;
        r.sink_logits = which & 2 ? sinks : NULL;
        if (which & 4) {
            r.key = (struct dropkv_tensor){
                .data = quantised[0], .dtype = DROPKV_F8_E4M3, .head_scales = k_scales};
            r.value = (struct dropkv_tensor){
                .data = quantised[1], .dtype = DROPKV_F8_E4M3, .head_scales = v_scales};
        }
        struct dropkv_result *wanted = dkv_test_expect(&r);
        struct dropkv_result *got = dkv_test_score(client, &r);
        dkv_test_assert_same(got, wanted);
        dropkv_result_free(wanted);
        dropkv_result_free(got);
    }
    struct dropkv_request bad = make_request(&tensors, 1);
    static const float not_finite[Q_HEADS] = {NAN};
    struct dropkv_error error;
    struct dropkv_result *result;
    bad.sink_logits = not_finite;
    assert_int_equal(dropkv_score(client, &bad, &result, &error), DROPKV_E_INVALID);
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
}

/* Each is seen in the scores, or in what is kept. */
static void what_policies_take_crosses_the_socket(void **unused)
{
    static float tokens[BATCH][KV_HEADS][TOKENS], metric[Q_HEADS][DIM][DIM];
    static const char *const policies[] = {"criticalkv", "h2o", "external", "restkv"};
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_buffer *buffer = share(client);
    (void)unused;
    dkv_test_fill(tokens, sizeof(tokens), 12);
    dkv_test_fill(metric, sizeof(metric), 112);
    for (float *x = &tokens[0][0][0]; x < &tokens[0][0][0] + sizeof(tokens) / sizeof(float); x++)
        *x = fabsf(*x);
    for (unsigned which = 0; which < 8; which++) {
        struct dropkv_param with_policy[] = {params[0], dropkv_text("policy", policies[which / 2])};
        struct dropkv_request r = make_request(which & 1 ? dropkv_buffer_data(buffer) : &tensors,
                                               BATCH);
        const float **extras[] = {&r.token_weight, &r.carry_in, &r.external_scores,
                                  &r.value_metric};
        r.params = with_policy;
        r.n_params = 2;
        r.want_scores = 1;
        *extras[which / 2] = which / 2 == 3 ? &metric[0][0][0] : &tokens[0][0][0];
        struct dropkv_result *wanted = dkv_test_expect(&r);
        struct dropkv_result *got = dkv_test_score(client, &r);
        dkv_test_assert_same(got, wanted);
        dropkv_result_free(wanted);
        dropkv_result_free(got);
    }
    struct dropkv_request bad = make_request(&tensors, 1);
    struct dropkv_error error;
    struct dropkv_result *result;
    bad.token_weight = &tokens[0][0][0];
    assert_int_equal(dropkv_score(client, &bad, &result, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "token_weight: policy dropkv does not take it"));
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
}

/* That the daemon has looked at the fence is known from its answer to a later message. */
static void plain_requests_wait_for_fences_and_answer_into_buffers(void **unused)
{
    enum { AT = 8, BYTES = BATCH * KV_HEADS * (30 + TOKENS) * 4 };
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_client *http = dkv_test_open("http://127.0.0.1:1");
    struct dropkv_buffer *buffer = share(client);
    struct dropkv_buffer *out = dkv_test_buffer(client, AT + BYTES, true);
    struct dropkv_result *result;
    struct dropkv_error error;
    (void)unused;
    struct dropkv_request r = make_request(&tensors, BATCH);
    r.want_scores = 1;
    struct dropkv_result *wanted = dkv_test_expect(&r);
    uint64_t *slot = dropkv_buffer_data(out);
    r.fence = r.output = out;
    r.fence_value = 3;
    r.output_offset = AT;
    r.output_bytes = BYTES;
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "before the fence"));
    struct tensors *shared = dropkv_buffer_data(buffer);
    r.query.data = shared->query;
    r.key.data = shared->key;
    r.value.data = shared->value;
    memset(shared, 0xff, sizeof(*shared)); /* not a number: reading it early would be an error */
    assert_int_equal(dropkv_submit(client, &r, NULL, &error), DROPKV_OK);
    assert_int_equal(dropkv_health(client, 0, &error), DROPKV_OK);
    assert_int_equal(dropkv_in_flight(client), 1);
    memcpy(shared, &tensors, sizeof(tensors));
    __atomic_store_n(slot, 3, __ATOMIC_RELEASE);
    assert_int_equal(dropkv_dispatch(client, -1, &error), DROPKV_OK);
    result = dropkv_next_result(client);
    assert_non_null(result);
    dkv_test_assert_same(result, wanted);
    assert_ptr_equal(result->keep_indices, (char *)slot + AT);
    dropkv_result_free(result);
    dropkv_result_free(wanted);
    r.fence_offset = 4;
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    r.fence = NULL;
    r.output_bytes = BYTES - 1;
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_int_equal(dropkv_score(http, &r, &result, &error), DROPKV_E_UNSUPPORTED);
    assert_non_null(strstr(error.text, "output"));
    dropkv_client_close(http);
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
    dropkv_buffer_free(out);
}

/* A buffer as dropkv_buffer_from_cuda() makes it, of a GPU that nobody has. */
static struct dropkv_buffer gpu_buffer(const void *at, size_t bytes)
{
    return (struct dropkv_buffer){
        .fd = -1,
        .base = (void *)(uintptr_t)at,
        .bytes = bytes,
        .on_gpu = true,
        .cuda = {.kind = DKV_WIRE_REGION_CUDA_LEGACY, .uuid = {1}, .handle = {2}},
    };
}

static void gpu_memory_that_a_daemon_refuses_is_never_read_here(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_request r = make_request(&tensors, 1);
    struct dropkv_result *result = NULL;
    struct dropkv_error error = {0};
    struct dropkv_result *expected = dkv_test_expect(&r);
    /* Addresses of the device: reading there would end this program. */
    const char *device = (const char *)(uintptr_t)0x700000000000;
    const struct dropkv_buffer buffer = gpu_buffer(device, sizeof(tensors.key));
    (void)unused;
    assert_int_equal(dropkv_client_add_buffer(client, &buffer, NULL), DROPKV_OK);
    r.key.data = device;
    for (int i = 0; i < 2; i++) { /* the second time it is known */
        assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_UNSUPPORTED);
        assert_non_null(strstr(error.text, "no CUDA worker"));
    }
    r.key.data = device + sizeof(tensors.key) - 4;
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "ends before"));
    r.key.data = tensors.key; /* others are not concerned */
    result = dkv_test_score(client, &r);
    dkv_test_assert_same(result, expected);
    dropkv_result_free(result);
    dropkv_result_free(expected);
    dropkv_client_remove_buffer(client, &buffer);
    dropkv_client_close(client);
}

static void gpu_memory_is_for_the_local_socket(void **unused)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error = {0};
    const struct dropkv_buffer buffer = gpu_buffer(&tensors, 64);
    (void)unused;
    assert_int_equal(dropkv_client_open("http://127.0.0.1:1", NULL, &client, &error), DROPKV_OK);
    assert_int_equal(dropkv_client_add_buffer(client, &buffer, &error), DROPKV_E_UNSUPPORTED);
    assert_non_null(strstr(error.text, "unix:///"));
    dropkv_client_close(client);
}

static void what_is_no_gpu_memory_makes_no_buffer(void **unused)
{
    struct dropkv_buffer *buffer = NULL;
    struct dropkv_error error = {0};
    (void)unused;
    assert_int_equal(dropkv_buffer_from_cuda(NULL, 64, DROPKV_CUDA_ANY, &buffer, &error),
                     DROPKV_E_INVALID);
    assert_int_equal(dropkv_buffer_from_cuda(&tensors, 0, DROPKV_CUDA_ANY, &buffer, &error),
                     DROPKV_E_INVALID);
    assert_int_equal(
        dropkv_buffer_from_cuda(&tensors, 64, (enum dropkv_cuda_export)7, &buffer, &error),
        DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "7"));
    /* Without a driver that is the reason, with one the pointer is. */
    const enum dropkv_status status = dropkv_buffer_from_cuda(&tensors, 64, DROPKV_CUDA_ANY,
                                                              &buffer, &error);
    assert_true(status == DROPKV_E_UNSUPPORTED || status == DROPKV_E_INVALID);
    assert_null(buffer);
    assert_int_equal(dropkv_buffer_new(64, &buffer, &error), DROPKV_OK);
    dropkv_buffer_unexport(buffer);
    assert_int_equal(dropkv_buffer_export_again(buffer, &error), DROPKV_E_INVALID);
    dropkv_buffer_free(buffer);
}

static void a_batch_of_thousands_is_one_request(void **unused)
{
    enum { N = 4096, SMALL = 16 };
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    float *numbers = malloc(N * 3 * SMALL * 8 * sizeof(float));
    struct dkv_random random;
    (void)unused;
    assert_non_null(numbers);
    dkv_random_init(&random, 12);
    dkv_random_normal(&random, DKV_FP32, numbers, N * 3 * SMALL * 8);
    r.batch = N;
    r.q_heads = r.kv_heads = 1;
    r.head_dim = 8;
    r.q_rows = r.n_tokens = SMALL;
    r.query = (struct dropkv_tensor){.data = numbers, .dtype = DROPKV_FP32};
    r.key = (struct dropkv_tensor){.data = numbers + N * SMALL * 8, .dtype = DROPKV_FP32};
    r.value = (struct dropkv_tensor){.data = numbers + 2 * N * SMALL * 8, .dtype = DROPKV_FP32};
    static const struct dropkv_param five[] = {{"keep_tokens", DROPKV_PARAM_INT, 5, 0, NULL}};
    r.params = five;
    r.n_params = 1;
    struct dropkv_result *wanted = dkv_test_expect(&r);
    struct dropkv_result *got = dkv_test_score(client, &r);
    dkv_test_assert_same(got, wanted);
    dropkv_result_free(wanted);
    dropkv_result_free(got);
    dropkv_client_close(client);
    free(numbers);
}

static void addresses_that_are_none_are_refused(void **unused)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    char long_path[200];
    (void)unused;
    memset(long_path, 'x', sizeof(long_path));
    memcpy(long_path, "unix:///", 8);
    long_path[sizeof(long_path) - 1] = '\0';
    assert_int_equal(dropkv_client_open(long_path, NULL, &client, &error), DROPKV_E_INVALID);
    assert_int_equal(dropkv_client_open("unix:relative", NULL, &client, &error), DROPKV_E_INVALID);
    assert_int_equal(dropkv_buffer_new(0, NULL, &error), DROPKV_E_INVALID);
}

static void health_and_info_tell_of_the_daemon(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_info *info;
    struct dropkv_error error;
    (void)unused;
    assert_int_equal(dropkv_health(client, 0, &error), DROPKV_OK);
    assert_int_equal(dropkv_client_info(client, 0, &info, &error), DROPKV_OK);
    assert_string_equal(info->server, "dropkvd");
    assert_string_equal(info->version, dropkv_version());
    assert_string_equal(info->platform, "dropkvd");
    assert_int_equal(strncmp(info->backend, "cpu/", 4), 0);
    assert_true(strlen(info->device) > 0);
    dropkv_info_free(info);
    kill(dkv_test_daemon_pid, SIGSTOP);
    assert_int_equal(dropkv_health(client, 20000, &error), DROPKV_E_TIMEOUT);
    kill(dkv_test_daemon_pid, SIGCONT);
    dropkv_client_close(client);
    assert_int_equal(dropkv_client_open("unix:///nonexistent/s", NULL, &client, &error), DROPKV_OK);
    assert_int_equal(dropkv_health(client, 0, &error), DROPKV_E_UNAVAILABLE);
    dropkv_client_close(client);
}

static int begin(void **unused)
{
    (void)unused;
    dkv_test_fill(&tensors, sizeof(tensors), 7);
    return dkv_test_begin(program);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sent_and_shared_tensors_have_the_engines_answers),
        cmocka_unit_test(what_lies_in_a_buffer_is_read_there),
        cmocka_unit_test(strides_and_the_order_of_dimensions_are_numbers),
        cmocka_unit_test(scales_per_head_and_sink_logits_cross_the_socket),
        cmocka_unit_test(what_policies_take_crosses_the_socket),
        cmocka_unit_test(plain_requests_wait_for_fences_and_answer_into_buffers),
        cmocka_unit_test(gpu_memory_that_a_daemon_refuses_is_never_read_here),
        cmocka_unit_test(gpu_memory_is_for_the_local_socket),
        cmocka_unit_test(what_is_no_gpu_memory_makes_no_buffer),
        cmocka_unit_test(a_batch_of_thousands_is_one_request),
        cmocka_unit_test(many_in_flight_are_answered_once_each_and_a_bad_one_fails_alone),
        cmocka_unit_test(cancelled_and_late_requests_do_not_disturb_others),
        cmocka_unit_test(a_daemon_that_was_killed_is_found_again_with_all_buffers),
        cmocka_unit_test(addresses_that_are_none_are_refused),
        cmocka_unit_test(health_and_info_tell_of_the_daemon),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, dkv_test_end);
}
