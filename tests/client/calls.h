/* What tests of the library do: open a client, make a request for dense fp32 tensors, ask, compare
 * answers. Failures end the running cmocka test. */
#ifndef DKV_TESTS_CLIENT_CALLS_H
#define DKV_TESTS_CLIENT_CALLS_H

#include "client/dropkv.h"

#include <stdbool.h>

struct dkv_test_shape {
    uint32_t q_heads, kv_heads, head_dim, q_rows;
    uint64_t n_tokens;
};

/* Fills them with N(0, 1), a function of the seed. */
void dkv_test_fill(void *floats, size_t bytes, uint64_t seed);

/* The tensors are [batch][heads][rows or tokens][head_dim]. The request has no parameters. */
struct dropkv_request dkv_test_request(const struct dkv_test_shape *shape, uint32_t batch,
                                       const void *query, const void *key, const void *value);

/* With default options. */
struct dropkv_client *dkv_test_open(const char *endpoint);

/* A buffer that was added to the client. */
struct dropkv_buffer *dkv_test_buffer(struct dropkv_client *client, size_t bytes, bool writable);

struct dropkv_result *dkv_test_score(struct dropkv_client *client, const struct dropkv_request *r);

/* What the engine in this process says. */
struct dropkv_result *dkv_test_expect(const struct dropkv_request *r);

/* Whether dropkv_dispatch() has something to do. */
bool dkv_test_is_readable(const struct dropkv_client *client);

/* The same tokens, the same scores to the last bit, or none in both. */
void dkv_test_assert_same(const struct dropkv_result *a, const struct dropkv_result *b);

#endif
