#include "tests/client/calls.h"

#include "tests/support/random.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

void dkv_test_fill(void *floats, size_t bytes, uint64_t seed)
{
    struct dkv_random random = {seed};
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        ((float *)floats)[i] = (float)dkv_random_normal(&random);
}

struct dropkv_request dkv_test_request(const struct dkv_test_shape *shape, uint32_t batch,
                                       const void *query, const void *key, const void *value)
{
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = batch;
    r.q_heads = shape->q_heads;
    r.kv_heads = shape->kv_heads;
    r.head_dim = shape->head_dim;
    r.q_rows = shape->q_rows;
    r.n_tokens = shape->n_tokens;
    r.query = (struct dropkv_tensor){.data = query, .dtype = DROPKV_FP32};
    r.key = (struct dropkv_tensor){.data = key, .dtype = DROPKV_FP32};
    r.value = (struct dropkv_tensor){.data = value, .dtype = DROPKV_FP32};
    return r;
}

struct dropkv_client *dkv_test_open(const char *endpoint)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    if (dropkv_client_open(endpoint, NULL, &client, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return client;
}

struct dropkv_result *dkv_test_score(struct dropkv_client *client, const struct dropkv_request *r)
{
    struct dropkv_result *result;
    struct dropkv_error error = {0};
    if (dropkv_score(client, r, &result, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return result;
}

struct dropkv_result *dkv_test_expect(const struct dropkv_request *r)
{
    struct dropkv_client *client = dkv_test_open("embedded:cpu");
    struct dropkv_result *result = dkv_test_score(client, r);
    dropkv_client_close(client);
    return result;
}

struct dropkv_buffer *dkv_test_buffer(struct dropkv_client *client, size_t bytes, bool writable)
{
    struct dropkv_buffer *buffer = NULL;
    struct dropkv_error error;
    if (dropkv_buffer_new(bytes, &buffer, &error) != DROPKV_OK ||
        (writable ? dropkv_client_add_output : dropkv_client_add_buffer)(client, buffer, &error) !=
            DROPKV_OK)
        fail_msg("%s", error.text);
    return buffer;
}

bool dkv_test_is_readable(const struct dropkv_client *client)
{
    struct pollfd pollfd = {.fd = dropkv_fd(client), .events = POLLIN};
    return poll(&pollfd, 1, 0) == 1;
}

void dkv_test_assert_same(const struct dropkv_result *a, const struct dropkv_result *b)
{
    const size_t n_heads = (size_t)a->batch * a->kv_heads;
    assert_int_equal(a->status, DROPKV_OK);
    assert_int_equal(b->status, DROPKV_OK);
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
