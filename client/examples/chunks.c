/* Chunked prefill: a long prompt arrives in chunks, and the cache is cut down on the way.
 *
 *     cc chunks.c -o chunks $(pkg-config --cflags --libs dropkv)
 *     ./chunks http://127.0.0.1:8480 every
 *
 * The authors' three strategies are parameters of ordinary requests. The query rows of a request
 * are the tail of the whole prompt so far, its keys and values what the cache still holds;
 * keep_ratio counts the tokens seen (total_tokens), not those stored, and max_keep_tokens caps the
 * result:
 *
 *   last     nothing is dropped before the last chunk
 *   budget   chunks are stored until the cache exceeds a budget, then it is cut
 *   every    the cache is cut after every chunk
 *
 * The prompt is made up: 4,096 tokens in chunks of 512; token 700 answers what the last rows of
 * every chunk look for in KV head 0, so it has to survive all cuts there. */
#include <dropkv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    Q_HEADS = 4,
    KV_HEADS = 2,
    DIM = 32,
    ROWS = 8,
    TOKENS = 4096,
    CHUNK = 512,
    BUDGET =
        1024, /* what strategy "budget" lets the cache hold, and what every cut leaves at most */
    NEEDLE = 700
};

/* What the cache holds of each KV head: slots 0 .. n_stored-1, in the prompt's order. */
static float key[KV_HEADS][TOKENS][DIM];
static float value[KV_HEADS][TOKENS][DIM];
static int position[KV_HEADS][TOKENS];
static size_t n_stored;

static float query[Q_HEADS][ROWS][DIM]; /* of the last tokens of the chunk */

static float noise(void)
{
    return (float)rand() / (float)RAND_MAX - 0.5f;
}

/* The model runs over tokens first .. first + CHUNK - 1: their keys and values join the cache. */
static void prefill(int first)
{
    for (int h = 0; h < KV_HEADS; h++)
        for (int t = first; t < first + CHUNK; t++) {
            const size_t slot = n_stored + (size_t)(t - first);
            position[h][slot] = t;
            for (int d = 0; d < DIM; d++) {
                key[h][slot][d] = h == 0 && t == NEEDLE ? (d % 2 ? 2.0f : -2.0f) : noise();
                value[h][slot][d] = noise();
            }
        }
    for (int q = 0; q < Q_HEADS; q++)
        for (int t = 0; t < ROWS; t++)
            for (int d = 0; d < DIM; d++)
                query[q][t][d] = 0.2f * noise() + (d % 2 ? 1.0f : -1.0f);
    n_stored += CHUNK;
}

/* Cuts the cache; `seen` tokens of the prompt have been there so far. */
static int cut(struct dropkv_client *client, int seen, struct dropkv_error *error)
{
    const struct dropkv_param params[] = {dropkv_real("keep_ratio", 0.1),
                                          dropkv_int("total_tokens", seen),
                                          dropkv_int("max_keep_tokens", BUDGET)};
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dropkv_result *result;
    request.batch = 1;
    request.q_heads = Q_HEADS;
    request.kv_heads = KV_HEADS;
    request.head_dim = DIM;
    request.q_rows = ROWS;
    request.n_tokens = n_stored;
    request.query.data = query;
    request.key.data = key;
    request.value.data = value;
    request.query.dtype = request.key.dtype = request.value.dtype = DROPKV_FP32;
    request.key.head_stride = request.value.head_stride = sizeof(key[0]);
    request.key.token_stride = request.value.token_stride = sizeof(key[0][0]);
    request.params = params;
    request.n_params = sizeof(params) / sizeof(params[0]);
    if (dropkv_score(client, &request, &result, error) != DROPKV_OK)
        return 0;
    for (uint32_t h = 0; h < result->kv_heads; h++) /* indices ascend: slots only move down */
        for (uint64_t i = 0; i < result->keep_tokens; i++) {
            const int32_t slot = result->keep_indices[h * result->keep_tokens + i];
            memmove(key[h][i], key[h][slot], sizeof(key[h][i]));
            memmove(value[h][i], value[h][slot], sizeof(value[h][i]));
            position[h][i] = position[h][slot];
        }
    printf("%4d tokens seen, %4llu stored, %3llu kept of each head\n", seen,
           (unsigned long long)n_stored, (unsigned long long)result->keep_tokens);
    n_stored = (size_t)result->keep_tokens;
    dropkv_result_free(result);
    return 1;
}

int main(int argc, char **argv)
{
    const char *endpoint = argc > 1 ? argv[1] : "http://127.0.0.1:8480";
    const char *strategy = argc > 2 ? argv[2] : "every";
    struct dropkv_client *client;
    struct dropkv_error error;
    int found = 0;
    if (dropkv_client_open(endpoint, NULL, &client, &error) != DROPKV_OK) {
        fprintf(stderr, "%s: %s\n", endpoint, error.text);
        return 1;
    }
    for (int first = 0; first < TOKENS; first += CHUNK) {
        const int seen = first + CHUNK;
        prefill(first);
        if (seen == TOKENS || strcmp(strategy, "every") == 0 ||
            (strcmp(strategy, "budget") == 0 && n_stored > BUDGET)) {
            if (!cut(client, seen, &error)) {
                fprintf(stderr, "%s: %s\n", endpoint, error.text);
                dropkv_client_close(client);
                return 1;
            }
        }
    }
    dropkv_client_close(client);
    for (size_t i = 0; i < n_stored; i++)
        found = found || position[0][i] == NEEDLE;
    printf("%s: the cache holds %zu of %d tokens; token %d is %s\n", strategy, n_stored, TOKENS,
           NEEDLE, found ? "among them" : "lost");
    return found ? 0 : 1;
}
