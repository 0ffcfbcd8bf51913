/* What an answer's size costs over the local socket: the same request for more and more indices,
 * without and with an output buffer of the caller's, in turns.
 *
 * Every token is kept, which reads no tensor, so nearly all of the time is the way there and back.
 * A daemon of one CPU thread answers.
 *
 * usage: bench_answers DROPKVD [SECONDS]
 */
#include "client/dropkv.h"
#include "tests/bench/socket_daemon.h"

#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, TOKENS_MAX = 32768, DIM = 8, SAMPLES = 20000, ROUNDS = 5 };

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_answers: %s: %s\n", what, why);
    exit(1);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static volatile int64_t read_sum; /* so that answers are really read */

/* Median time of one request at a time. Every answer is read once, as its owner would. */
static double time_requests(struct dropkv_client *client, const struct dropkv_request *request,
                            double seconds)
{
    static double times[SAMPLES];
    size_t n = 0;
    const double end = bench_clock_us() + seconds * 1e6;
    for (int i = 0; n < SAMPLES && bench_clock_us() < end; i++) {
        struct dropkv_result *result;
        struct dropkv_error error;
        const double began = bench_clock_us();
        if (dropkv_score(client, request, &result, &error) != DROPKV_OK)
            die("request", error.text);
        if (i >= 20)
            times[n++] = bench_clock_us() - began;
        for (size_t k = 0; k < HEADS * result->keep_tokens; k++)
            read_sum += result->keep_indices[k];
        dropkv_result_free(result);
    }
    qsort(times, n, sizeof(double), by_value);
    return n > 0 ? times[n / 2] : 0;
}

int main(int argc, char **argv)
{
    static const int64_t kept[] = {8, 512, 2048, 6553, 26214};
    const double seconds = argc > 2 ? atof(argv[2]) : 0.3;
    struct dropkv_client *client;
    struct dropkv_buffer *input, *output;
    struct dropkv_error error;
    if (argc < 2)
        return 2;
    struct socket_daemon daemon;
    socket_daemon_start(&daemon, argv[1]);
    const size_t bytes = (size_t)HEADS * TOKENS_MAX * DIM * 2;
    if (dropkv_client_open(daemon.endpoint, NULL, &client, &error) != DROPKV_OK ||
        dropkv_buffer_new(bytes, &input, &error) != DROPKV_OK ||
        dropkv_buffer_new((size_t)HEADS * TOKENS_MAX * 4, &output, &error) != DROPKV_OK ||
        dropkv_client_add_buffer(client, input, &error) != DROPKV_OK ||
        dropkv_client_add_output(client, output, &error) != DROPKV_OK)
        die("client", error.text);

    printf("answer bytes   as it comes us   into a buffer us\n");
    for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++) {
        const struct dropkv_param params[] = {dropkv_real("keep_ratio", 1)};
        struct dropkv_request request = DROPKV_REQUEST_INIT;
        double medians[2][ROUNDS];
        request.batch = 1, request.q_heads = HEADS, request.kv_heads = HEADS;
        request.head_dim = DIM, request.q_rows = 8, request.n_tokens = (uint64_t)kept[i];
        request.query.data = request.key.data = request.value.data = dropkv_buffer_data(input);
        request.query.dtype = request.key.dtype = request.value.dtype = DROPKV_BF16;
        request.params = params, request.n_params = 1;
        for (int round = 0; round < ROUNDS; round++)
            for (int into = 0; into < 2; into++) {
                request.output = into ? output : NULL;
                request.output_bytes = into ? dropkv_buffer_bytes(output) : 0;
                medians[into][round] = time_requests(client, &request, seconds);
            }
        for (int into = 0; into < 2; into++)
            qsort(medians[into], ROUNDS, sizeof(double), by_value);
        printf("%12lld %16.1f %18.1f\n", (long long)(HEADS * kept[i] * 4), medians[0][ROUNDS / 2],
               medians[1][ROUNDS / 2]);
    }
    dropkv_client_close(client);
    dropkv_buffer_free(input);
    dropkv_buffer_free(output);
    socket_daemon_stop(&daemon);
    return 0;
}
