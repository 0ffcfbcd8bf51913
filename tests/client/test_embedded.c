/* The engine inside the process, through the library's calls: the same promises as over HTTP. */
#include "client/cli/synth.h"
#include "client/transport.h"
#include "tests/client/calls.h"

#include <float.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define ENDPOINT "embedded:cpu?threads=2"

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 200, DIM = 32, ROWS = 8, BATCH_MAX = 40 };

static float query[BATCH_MAX][Q_HEADS][ROWS][DIM];
static float key[BATCH_MAX][KV_HEADS][TOKENS][DIM];
static float value[BATCH_MAX][KV_HEADS][TOKENS][DIM];

static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, 20, 0, NULL}};

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static struct dropkv_request make_request(uint32_t batch)
{
    struct dropkv_request r = dkv_test_request(&shape, batch, query, key, value);
    r.params = params;
    r.n_params = 1;
    return r;
}

/* More sequences than one engine batch takes, each scored as if it were alone. */
static void a_batch_is_its_sequences(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    struct dropkv_request all = make_request(BATCH_MAX);
    all.want_scores = 1;
    struct dropkv_result *together = dkv_test_score(client, &all);
    assert_int_equal(together->batch, BATCH_MAX);
    assert_true(together->compute_ns > 0 && together->compute_ns <= together->elapsed_ns);
    for (int b = 0; b < BATCH_MAX; b++) {
        struct dropkv_request one = make_request(1);
        one.query.data = query[b];
        one.key.data = key[b];
        one.value.data = value[b];
        one.want_scores = 1;
        struct dropkv_result *alone = dkv_test_score(client, &one);
        assert_memory_equal(alone->keep_indices,
                            together->keep_indices + b * KV_HEADS * alone->keep_tokens,
                            KV_HEADS * alone->keep_tokens * sizeof(int32_t));
        assert_memory_equal(alone->scores, together->scores + b * KV_HEADS * TOKENS,
                            KV_HEADS * TOKENS * sizeof(float));
        dropkv_result_free(alone);
    }
    dropkv_result_free(together);
    dropkv_client_close(client);
}

static void the_descriptor_is_readable_while_work_waits(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    struct dropkv_request r = make_request(1);
    uint64_t id;
    assert_false(dkv_test_is_readable(client));
    for (int i = 0; i < 3; i++)
        assert_int_equal(dropkv_submit(client, &r, &id, NULL), DROPKV_OK);
    assert_true(dkv_test_is_readable(client));
    assert_int_equal(dropkv_cancel(client, id), DROPKV_OK);
    int n = 0;
    while (dkv_test_is_readable(client)) {
        struct dropkv_result *result;
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
        while ((result = dropkv_next_result(client)) != NULL) {
            assert_int_equal(result->status, DROPKV_OK);
            assert_true(result->id < id);
            dropkv_result_free(result);
            n++;
        }
    }
    assert_int_equal(n, 2);
    assert_int_equal(dropkv_in_flight(client), 0);
    assert_int_equal(dropkv_submit(client, &r, &id, NULL), DROPKV_OK);
    assert_int_equal(dropkv_cancel(client, id), DROPKV_OK);
    assert_false(dkv_test_is_readable(client));
    dropkv_client_close(client);
}

/* A cache, a stash and a prompt of both. */
static struct dropkv_prompt make_prompt(struct dropkv_client *client,
                                        const struct dropkv_buffer *buffer)
{
    struct dropkv_cache_layout cache = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout stash = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    struct dropkv_layer layer = {{.buffer = buffer, .dtype = DROPKV_FP32, .token_stride = 64}, {0}};
    struct dropkv_cache *cache_handle;
    struct dropkv_stash *stash_handle;
    layer.value = layer.key;
    cache.q_heads = cache.kv_heads = cache.n_layers = stash.n_layers = stash.n_slots = 1;
    cache.head_dim = 16;
    cache.layers = &layer;
    stash.buffer = buffer;
    stash.dtype = DROPKV_FP32;
    stash.n_rows = ROWS;
    stash.row_stride = 64;
    assert_int_equal(dropkv_cache_add(client, &cache, &cache_handle, NULL), DROPKV_OK);
    assert_int_equal(dropkv_stash_add(client, &stash, &stash_handle, NULL), DROPKV_OK);
    prompt.cache = cache_handle;
    prompt.stash = stash_handle;
    prompt.newest_row = ROWS - 1;
    prompt.q_rows = ROWS;
    prompt.n_tokens = 20;
    return prompt;
}

/* Also where they are of another kind, whose caches are other structures. */
static void caches_of_other_clients_are_refused(void **state)
{
    (void)state;
    static const char *const endpoints[] = {"embedded:cpu?threads=1", "embedded:cpu?threads=1",
                                            "unix:///nobody/answers", "unix:///nobody/answers"};
    enum { N = sizeof(endpoints) / sizeof(endpoints[0]) };
    struct dropkv_client *clients[N];
    struct dropkv_prompt prompts[N];
    struct dropkv_buffer *buffer;
    assert_int_equal(dropkv_buffer_new(4096, &buffer, NULL), DROPKV_OK);
    for (int i = 0; i < N; i++) {
        assert_int_equal(dropkv_client_open(endpoints[i], NULL, &clients[i], NULL), DROPKV_OK);
        prompts[i] = make_prompt(clients[i], buffer);
        assert_int_equal(dropkv_submit_prompt(clients[i], &prompts[i], NULL, NULL), DROPKV_OK);
    }
    for (int i = 0; i < N * N; i++) {
        struct dropkv_error error = {0};
        struct dropkv_prompt mixed = prompts[i / N];
        mixed.stash = prompts[i % N].stash;
        for (int k = 0; k < N; k++)
            if (k != i / N || k != i % N) {
                assert_int_equal(dropkv_submit_prompt(clients[k], &mixed, NULL, &error),
                                 DROPKV_E_INVALID);
                assert_non_null(strstr(error.text, ": it belongs to another client"));
            }
    }
    for (int i = 0; i < N; i++)
        dropkv_client_close(clients[i]);
    dropkv_buffer_free(buffer);
}

/* Which has none of the engine's threads, and shares the descriptor. */
static void a_child_may_close_its_parents_client(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    struct dropkv_request r = make_request(1);
    struct dropkv_result *result;
    int status;
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dropkv_client_close(client);
        _exit(0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_true(dkv_test_is_readable(client));
    assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    result = dropkv_next_result(client);
    assert_non_null(result);
    assert_int_equal(result->status, DROPKV_OK);
    dropkv_result_free(result);
    dropkv_client_close(client);
}

static void a_deadline_that_passed_is_not_computed(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    struct dropkv_request r = make_request(1);
    r.timeout_us = 1;
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    const int64_t submitted_ns = dkv_now_ns();
    while (dkv_now_ns() - submitted_ns < 2000)
        ;
    assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    assert_int_equal(result->status, DROPKV_E_TIMEOUT);
    assert_int_equal(result->compute_ns, 0);
    dropkv_result_free(result);
    dropkv_client_close(client);
}

static void one_bad_sequence_fails_its_request_alone(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    struct dropkv_request r = make_request(3);
    const float kept = key[1][1][77][5];
    key[1][1][77][5] = NAN;
    struct dropkv_request other = make_request(1);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    assert_int_equal(dropkv_submit(client, &other, NULL, NULL), DROPKV_OK);
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    struct dropkv_result *bad = dropkv_next_result(client);
    struct dropkv_result *good = dropkv_next_result(client);
    assert_int_equal(bad->status, DROPKV_E_INVALID);
    assert_non_null(strstr(bad->error_text, "77"));
    assert_int_equal(good->status, DROPKV_OK);
    key[1][1][77][5] = kept;
    dropkv_result_free(bad);
    dropkv_result_free(good);
    dropkv_client_close(client);
}

/* Scales and sink logits are copied at submission: the caller's may go at once. */
static void small_vectors_are_copied(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    static uint8_t key8[KV_HEADS * TOKENS * DIM];
    static uint8_t value8[KV_HEADS * TOKENS * DIM];
    struct dkv_random random;
    dkv_random_init(&random, 3);
    dkv_random_normal(&random, DKV_F8_E4M3, key8, sizeof(key8));
    dkv_random_normal(&random, DKV_F8_E4M3, value8, sizeof(value8));
    float *scales = malloc(2 * sizeof(float));
    float *logits = malloc(Q_HEADS * sizeof(float));
    scales[0] = 0.5f;
    scales[1] = 2.0f;
    for (int i = 0; i < Q_HEADS; i++)
        logits[i] = (float)i;
    struct dropkv_request r = make_request(1);
    r.key = (struct dropkv_tensor){.data = key8, .dtype = DROPKV_F8_E4M3, .head_scales = scales};
    r.value = (struct dropkv_tensor){.data = value8, .dtype = DROPKV_F8_E4M3};
    r.sink_logits = logits;
    r.want_scores = 1;
    struct dropkv_result *first = dkv_test_score(client, &r);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    scales[0] = scales[1] = 77.0f;
    memset(logits, 0, Q_HEADS * sizeof(float));
    free(scales);
    free(logits);
    assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    struct dropkv_result *second = dropkv_next_result(client);
    assert_memory_equal(first->scores, second->scores, KV_HEADS * TOKENS * sizeof(float));
    r.key.head_scales = NULL;
    r.sink_logits = NULL;
    struct dropkv_result *without = dkv_test_score(client, &r);
    assert_memory_not_equal(first->scores, without->scores, KV_HEADS * TOKENS * sizeof(float));
    dropkv_result_free(first);
    dropkv_result_free(second);
    dropkv_result_free(without);
    dropkv_client_close(client);
}

/* Powers of two make the same floats either way: one scale, or one for each query head. */
static void each_query_head_has_its_scale(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    static uint8_t query8[Q_HEADS * ROWS * DIM];
    const float halves[Q_HEADS] = {0.5f, 0.5f, 0.5f, 0.5f};
    const float mixed[Q_HEADS] = {0.5f, 0.5f, 2.0f, 2.0f};
    const size_t head_bytes = TOKENS * sizeof(float);
    struct dkv_random random;
    dkv_random_init(&random, 4);
    dkv_random_normal(&random, DKV_F8_E4M3, query8, sizeof(query8));
    struct dropkv_request r = make_request(1);
    r.query = (struct dropkv_tensor){.data = query8, .dtype = DROPKV_F8_E4M3, .scale = 0.5f};
    r.want_scores = 1;
    struct dropkv_result *one = dkv_test_score(client, &r);
    r.query.scale = 0;
    r.query.head_scales = halves;
    struct dropkv_result *each = dkv_test_score(client, &r);
    r.query.head_scales = mixed;
    struct dropkv_result *other = dkv_test_score(client, &r);
    assert_memory_equal(one->scores, each->scores, KV_HEADS * head_bytes);
    assert_memory_equal(one->scores, other->scores, head_bytes);
    assert_memory_not_equal(one->scores + TOKENS, other->scores + TOKENS, head_bytes);
    dropkv_result_free(one);
    dropkv_result_free(each);
    dropkv_result_free(other);
    dropkv_client_close(client);
}

/* layers=cake moves budget from layer to layer, but to none more than was promised. */
static void a_layer_gets_no_more_than_max_keep_tokens(void **state)
{
    enum { KEEP = 40, MOST = 46, LAYERS = 6 };
    (void)state;
    struct dropkv_client *client = dkv_test_open(ENDPOINT);
    for (int capped = 0; capped < 2; capped++) {
        const struct dropkv_param cake[] = {
            dropkv_text("policy", "cake"), dropkv_text("layers", "cake"), dropkv_real("tau2", 0.05),
            dropkv_int("keep_tokens", KEEP), dropkv_int("max_keep_tokens", capped ? MOST : TOKENS)};
        struct dropkv_request r = make_request(LAYERS);
        r.params = cake;
        r.n_params = sizeof(cake) / sizeof(cake[0]);
        struct dropkv_result *result = dkv_test_score(client, &r);
        int32_t largest = 0;
        for (int h = 0; h < LAYERS * KV_HEADS; h++) {
            const int32_t n = result->keep_offsets[h + 1] - result->keep_offsets[h];
            largest = n > largest ? n : largest;
        }
        assert_int_equal(result->keep_offsets[LAYERS * KV_HEADS], LAYERS * KV_HEADS * KEEP);
        if (capped)
            assert_int_equal(largest, MOST);
        else
            assert_true(largest > MOST); /* or the cap has nothing to do */
        dropkv_result_free(result);
    }
    dropkv_client_close(client);
}

static void addresses_are_checked(void **state)
{
    (void)state;
    static const char *const wrong[] = {
        "embedded:tpu",
        "embedded:cpu?threads=0",
        "embedded:cpu?threads=1025",
        "embedded:cpu?threads=2x",
        "embedded:cpu?threads=",
        "embedded:cpu?cores=2",
        "embedded:a-device-with-a-name-that-is-far-too-long",
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct dropkv_client *client = NULL;
        struct dropkv_error error = {0};
        assert_int_not_equal(dropkv_client_open(wrong[i], NULL, &client, &error), DROPKV_OK);
        assert_null(client);
        assert_true(strlen(error.text) > 0);
    }
}

/* ---- what bench feeds it ---- */

static double decode(enum dkv_dtype dtype, uint32_t bits)
{
    static const int forms[][2] = {
        [DKV_BF16] = {8, 7}, [DKV_FP16] = {5, 10}, [DKV_F8_E4M3] = {4, 3}, [DKV_F8_E5M2] = {5, 2}};
    const int e_bits = forms[dtype][0];
    const int m_bits = forms[dtype][1];
    const int bias = (1 << (e_bits - 1)) - 1;
    const int mantissa = (int)(bits & ((1u << m_bits) - 1));
    const int exponent = (int)(bits >> m_bits & ((1u << e_bits) - 1));
    const double sign = bits >> (e_bits + m_bits) & 1 ? -1 : 1;
    return exponent == 0 ? sign * ldexp(mantissa, 1 - bias - m_bits)
                         : sign * ldexp((1 << m_bits) + mantissa, exponent - bias - m_bits);
}

/* Every finite value of every narrow type is its own rounding, and what lies between two goes to
 * the nearer. */
static void synthetic_elements_are_rounded_to_nearest(void **state)
{
    (void)state;
    static const struct {
        enum dkv_dtype dtype;
        uint32_t largest;
    } rows[] = {{DKV_BF16, 0x7f7f}, {DKV_FP16, 0x7bff}, {DKV_F8_E4M3, 0x7e}, {DKV_F8_E5M2, 0x7b}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (uint32_t bits = 0; bits < rows[i].largest; bits++) {
            const double low = decode(rows[i].dtype, bits);
            const double high = decode(rows[i].dtype, bits + 1);
            assert_int_equal(dkv_round_to(rows[i].dtype, (float)low), bits);
            const double step = high - low;
            if ((float)(low + 0.5 * step) != low + 0.5 * step)
                continue; /* float32 itself cannot hold what lies between */
            assert_int_equal(dkv_round_to(rows[i].dtype, (float)(low + 0.5 * step)),
                             bits + (bits & 1));
            assert_int_equal(dkv_round_to(rows[i].dtype, (float)(low + 0.75 * step)), bits + 1);
        }
        assert_int_equal(dkv_round_to(rows[i].dtype, FLT_MAX), rows[i].largest);
    }
}

static void synthetic_elements_are_normal(void **state)
{
    (void)state;
    enum { N = 100001 };
    static float x[N];
    struct dkv_random random;
    double sum = 0;
    double squares = 0;
    int n_beyond_two = 0;
    dkv_random_init(&random, 1);
    dkv_random_normal(&random, DKV_FP32, x, N);
    for (int i = 0; i < N; i++) {
        sum += x[i];
        squares += (double)x[i] * x[i];
        n_beyond_two += fabsf(x[i]) > 2;
    }
    assert_true(fabs(sum / N) < 0.015);
    assert_true(fabs(squares / N - 1) < 0.02);
    assert_true(abs(n_beyond_two - (int)(0.0455 * N)) < 300);
}

static int fill(void **state)
{
    (void)state;
    dkv_test_fill(query, sizeof(query), 21);
    dkv_test_fill(key, sizeof(key), 22);
    dkv_test_fill(value, sizeof(value), 23);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_batch_is_its_sequences),
        cmocka_unit_test(the_descriptor_is_readable_while_work_waits),
        cmocka_unit_test(caches_of_other_clients_are_refused),
        cmocka_unit_test(a_child_may_close_its_parents_client),
        cmocka_unit_test(a_deadline_that_passed_is_not_computed),
        cmocka_unit_test(one_bad_sequence_fails_its_request_alone),
        cmocka_unit_test(small_vectors_are_copied),
        cmocka_unit_test(each_query_head_has_its_scale),
        cmocka_unit_test(a_layer_gets_no_more_than_max_keep_tokens),
        cmocka_unit_test(addresses_are_checked),
        cmocka_unit_test(synthetic_elements_are_rounded_to_nearest),
        cmocka_unit_test(synthetic_elements_are_normal),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
