/* All layers of a prompt at once, driven by an event loop of the program's own: submit everything,
 * watch one descriptor, take answers as they come, in whatever order.
 *
 *     cc layers.c -o layers $(pkg-config --cflags --libs dropkv)
 *     ./layers http://127.0.0.1:8480
 *
 * An inference worker would submit a layer when its prefill is done and go on computing; here the
 * loop is poll() and has nothing else to watch. */
#include <dropkv.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 12, Q_HEADS = 8, KV_HEADS = 2, TOKENS = 1024, DIM = 64, ROWS = 8 };

struct layer {
    int number;
    float query[Q_HEADS][ROWS][DIM];
    float key[KV_HEADS][TOKENS][DIM];
    float value[KV_HEADS][TOKENS][DIM];
};

static void fill(float *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

static enum dropkv_status submit(struct dropkv_client *client, struct layer *layer,
                                 struct dropkv_error *error)
{
    const struct dropkv_param params[] = {dropkv_real("keep_ratio", 0.05),
                                          dropkv_int("layer", layer->number)};
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    request.batch = 1;
    request.q_heads = Q_HEADS;
    request.kv_heads = KV_HEADS;
    request.head_dim = DIM;
    request.q_rows = ROWS;
    request.n_tokens = TOKENS;
    request.query.data = layer->query;
    request.query.dtype = DROPKV_FP32;
    request.key.data = layer->key;
    request.key.dtype = DROPKV_FP32;
    request.value.data = layer->value;
    request.value.dtype = DROPKV_FP32;
    request.params = params; /* copied: only tensors are borrowed until the answer */
    request.n_params = sizeof(params) / sizeof(params[0]);
    request.timeout_us = 10 * 1000000;
    request.user = layer;
    return dropkv_submit(client, &request, NULL, error);
}

static int take(struct dropkv_result *result)
{
    const struct layer *layer = result->user;
    const int failed = result->status != DROPKV_OK;
    if (failed)
        fprintf(stderr, "layer %d: %s\n", layer->number, result->error_text);
    else
        printf("layer %d keeps %llu of %llu tokens per head, answered in %.3f ms\n", layer->number,
               (unsigned long long)result->keep_tokens, (unsigned long long)result->n_tokens,
               (double)result->elapsed_ns / 1e6);
    dropkv_result_free(result);
    return failed;
}

static int run_loop(struct dropkv_client *client, struct dropkv_error *error)
{
    int n_failed = 0;
    while (dropkv_in_flight(client) > 0) {
        struct pollfd fd = {.fd = dropkv_fd(client), .events = POLLIN};
        struct dropkv_result *result;
        (void)poll(&fd, 1, -1);
        if (dropkv_dispatch(client, 0, error) != DROPKV_OK)
            return -1;
        while ((result = dropkv_next_result(client)) != NULL)
            n_failed += take(result);
    }
    return n_failed;
}

int main(int argc, char **argv)
{
    const char *endpoint = argc > 1 ? argv[1] : "http://127.0.0.1:8480";
    struct layer *layers = calloc(LAYERS, sizeof(layers[0]));
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    int failed = layers == NULL || dropkv_client_open(endpoint, NULL, &client, &error) != DROPKV_OK;
    for (int i = 0; !failed && i < LAYERS; i++) {
        layers[i].number = i;
        fill(&layers[i].query[0][0][0], sizeof(layers[i].query) / sizeof(float));
        fill(&layers[i].key[0][0][0], sizeof(layers[i].key) / sizeof(float));
        fill(&layers[i].value[0][0][0], sizeof(layers[i].value) / sizeof(float));
        failed = submit(client, &layers[i], &error) != DROPKV_OK;
    }
    if (failed)
        fprintf(stderr, "%s: %s\n", endpoint, layers == NULL ? "no memory" : error.text);
    else
        failed = run_loop(client, &error) != 0;
    dropkv_client_close(client);
    free(layers);
    return failed;
}
