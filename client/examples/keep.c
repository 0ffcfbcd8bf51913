/* Which tokens to keep, asked of a daemon, in one file that needs nothing but libdropkv:
 *
 *     cc keep.c -o keep $(pkg-config --cflags --libs dropkv)
 *     ./keep http://127.0.0.1:8480
 *
 * The cache is made up: one layer with 8 query heads and 2 KV heads, 2,048 tokens of 64 float32
 * elements, laid out as an engine would, [token][head][element]. Token 1,000 of KV head 0 answers
 * what the last query rows look for, so it is among those kept. */
#include <dropkv.h>
#include <stdio.h>
#include <stdlib.h>

enum { Q_HEADS = 8, KV_HEADS = 2, TOKENS = 2048, DIM = 64, ROWS = 16, NEEDLE = 1000 };

static float query[Q_HEADS][ROWS][DIM];
static float key[TOKENS][KV_HEADS][DIM];
static float value[TOKENS][KV_HEADS][DIM];

static float noise(void)
{
    return (float)rand() / (float)RAND_MAX - 0.5f;
}

static void fill(void)
{
    float *tensors[] = {&query[0][0][0], &key[0][0][0], &value[0][0][0]};
    const size_t sizes[] = {sizeof(query), sizeof(key), sizeof(value)};
    for (int i = 0; i < 3; i++)
        for (size_t j = 0; j < sizes[i] / sizeof(float); j++)
            tensors[i][j] = noise();
    for (int d = 0; d < DIM; d++)
        key[NEEDLE][0][d] = 4.0f * query[0][ROWS - 1][d];
}

static struct dropkv_request describe(const struct dropkv_param *params, size_t n_params)
{
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    request.batch = 1;
    request.q_heads = Q_HEADS;
    request.kv_heads = KV_HEADS;
    request.head_dim = DIM;
    request.q_rows = ROWS;
    request.n_tokens = TOKENS;
    request.query.data = query; /* dense [head][row][element]: no strides to tell */
    request.query.dtype = DROPKV_FP32;
    request.key.data = key;
    request.key.dtype = DROPKV_FP32;
    request.key.token_stride = sizeof(key[0]);
    request.key.head_stride = sizeof(key[0][0]);
    request.value.data = value;
    request.value.dtype = DROPKV_FP32;
    request.value.token_stride = sizeof(value[0]);
    request.value.head_stride = sizeof(value[0][0]);
    request.params = params;
    request.n_params = n_params;
    return request;
}

int main(int argc, char **argv)
{
    const char *endpoint = argc > 1 ? argv[1] : "http://127.0.0.1:8480";
    struct dropkv_client *client;
    struct dropkv_result *result;
    struct dropkv_error error;
    if (dropkv_client_open(endpoint, NULL, &client, &error) != DROPKV_OK) {
        fprintf(stderr, "%s: %s\n", endpoint, error.text);
        return 1;
    }

    fill();
    const struct dropkv_param params[] = {dropkv_int("keep_tokens", 64), dropkv_int("sinks", 4)};
    const struct dropkv_request request = describe(params, 2);
    if (dropkv_score(client, &request, &result, &error) != DROPKV_OK) {
        fprintf(stderr, "%s: %s\n", endpoint, error.text);
        dropkv_client_close(client);
        return 1;
    }

    printf("computed by %s in %.3f ms\n", result->backend, (double)result->elapsed_ns / 1e6);
    for (uint32_t h = 0; h < result->kv_heads; h++) {
        printf("KV head %u keeps %llu of %llu tokens:", h, (unsigned long long)result->keep_tokens,
               (unsigned long long)result->n_tokens);
        for (uint64_t i = 0; i < result->keep_tokens; i++)
            printf(" %d", result->keep_indices[h * result->keep_tokens + i]);
        printf("\n");
    }
    dropkv_result_free(result);
    dropkv_client_close(client);
    return 0;
}
