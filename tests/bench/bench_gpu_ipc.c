/* What a daemon costs on a GPU: requests over GPU memory that this process lends, beside the engine
 * in this process over the same memory.
 *
 *   one request   latency over device time (events around the engine's upload, kernels, download)
 *   64 streams    blocks a second, beside the engine's own batches of 32, and beside a
 *                 daemon limited to one block a batch
 *   beside a hog  the same single requests while another process keeps the GPU full of matrix
 *                 products, beside the engine in this process there
 *
 * usage: bench_gpu_ipc DROPKVD [SECONDS]     (of each measurement; 1)
 *
 * Exit 77 without a device. Whether a bar is met is printed; docs/gpu-memory.md has what was
 * measured.
 */
#include "tests/bench/gpu_ipc.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/cli/bench_cuda.h"

#define OVERHEAD_BAR_US 40

enum { SETS = 6, LAYERS = 32 };

static double seconds;        /* of each measurement */
static uint32_t busy_poll_us; /* of clients */
static char folder[] = "/tmp/dropkv-bench-XXXXXX";

/* Of the daemon's own account: until the batch started, and in the worker. */
static struct bench_times queued, computed;

static void time_requests(struct dropkv_client *client, const struct dropkv_request *requests,
                          unsigned n, struct bench_times *times)
{
    struct dropkv_error error;
    struct dropkv_result *result;
    const double began = bench_now_us();
    double now = began;
    times->n = queued.n = computed.n = 0;
    for (unsigned i = 0; times->n < BENCH_SAMPLES && now < began + seconds * 1e6; i++) {
        const double sent = bench_now_us();
        if (dropkv_score(client, &requests[i % n], &result, &error) != DROPKV_OK)
            bench_die("request", error.text);
        now = bench_now_us();
        if (now > began + seconds * 2e5) { /* the first fifth warms up */
            times->us[times->n++] = now - sent;
            queued.us[queued.n++] = (double)result->queue_ns / 1e3;
            computed.us[computed.n++] = (double)result->compute_ns / 1e3;
        }
        dropkv_result_free(result);
    }
}

static void one_request(struct bench_engine *e, const struct bench_daemon *server, uint64_t tokens)
{
    static struct bench_times times;
    struct bench_block blocks[2][SETS];
    struct bench_item items[SETS];
    double wall, device;
    for (unsigned i = 0; i < SETS; i++) {
        bench_block_make(&blocks[0][i], true, tokens, i);
        bench_block_make(&blocks[1][i], false, tokens, i);
        bench_item_make(e, &items[i], &blocks[0][i], tokens);
    }
    bench_engine_time(e, items, SETS, &wall, &device);
    printf("%7llu tokens: device %.1f us, engine in this process %.1f us\n",
           (unsigned long long)tokens, device, wall);
    static const char *const names[] = {"cuda-vmm", "cuda-ipc", "cuda-vmm, into a buffer"};
    for (int kind = 0; kind < 3; kind++) {
        struct dropkv_client *client = bench_connect(server, busy_poll_us);
        struct dropkv_request requests[SETS];
        struct dropkv_buffer *output;
        struct dropkv_error error;
        if (dropkv_buffer_new(BENCH_KV_HEADS * tokens * sizeof(int32_t), &output, &error) !=
                DROPKV_OK ||
            dropkv_client_add_output(client, output, &error) != DROPKV_OK)
            bench_die("buffer", error.text);
        for (unsigned i = 0; i < SETS; i++) {
            const struct bench_block *block = &blocks[kind % 2][i];
            requests[i] = bench_request_of(block, tokens);
            requests[i].output = kind == 2 ? output : NULL;
            requests[i].output_bytes = kind == 2 ? dropkv_buffer_bytes(output) : 0;
            if (dropkv_client_add_buffer(client, block->buffer, &error) != DROPKV_OK)
                bench_die("buffer", error.text);
        }
        time_requests(client, requests, SETS, &times);
        const double p50 = bench_quantile(&times, 0.5), p99 = bench_quantile(&times, 0.99);
        printf("    %s p50 %.1f us, p99 %.1f us: over device time %.1f us, %s %d us; over the "
               "engine here %.1f us (until the worker had it %.0f us, in the worker %.0f us)\n",
               names[kind], p50, p99, p50 - device,
               p50 - device <= OVERHEAD_BAR_US ? "within" : "ABOVE", OVERHEAD_BAR_US, p50 - wall,
               bench_quantile(&queued, 0.5), bench_quantile(&computed, 0.5));
        dropkv_client_close(client);
        dropkv_buffer_free(output);
    }
    for (unsigned i = 0; i < SETS; i++) {
        dkv_bench_cuda_free(blocks[0][i].memory);
        dkv_bench_cuda_free(blocks[1][i].memory);
        free(items[i].item.keep_out);
    }
}

/* ---- a prompt: all layers in one message ---- */

/* Its answer is written to memory of the caller's. */
static void prompt(const struct bench_daemon *server, unsigned n_layers, uint64_t tokens,
                   const char *where)
{
    static struct bench_times times;
    struct bench_block all;
    struct dropkv_error error;
    struct dropkv_layer layers[LAYERS];
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout rows = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_cache *cache;
    struct dropkv_stash *stash;
    struct dropkv_buffer *output;
    struct dropkv_client *client = bench_connect(server, busy_poll_us);
    const uint64_t kv_bytes = (uint64_t)BENCH_KV_HEADS * tokens * BENCH_DIM * 2;
    const size_t answer_bytes = (size_t)n_layers * BENCH_KV_HEADS * tokens * sizeof(int32_t);
    bench_block_make(&all, true, tokens * n_layers, 1);
    memset(layers, 0, sizeof(layers));
    for (unsigned l = 0; l < n_layers; l++) {
        layers[l].key = (struct dropkv_view){.buffer = all.buffer,
                                             .offset = all.q_bytes + l * kv_bytes,
                                             .dtype = DROPKV_BF16,
                                             .token_stride = BENCH_DIM * 2,
                                             .head_stride = (int64_t)tokens * BENCH_DIM * 2};
        layers[l].value = layers[l].key;
        layers[l].value.offset += n_layers * kv_bytes;
    }
    layout.q_heads = BENCH_Q_HEADS, layout.kv_heads = BENCH_KV_HEADS, layout.head_dim = BENCH_DIM;
    layout.n_layers = n_layers, layout.layers = layers;
    rows.buffer = all.buffer, rows.dtype = DROPKV_BF16, rows.n_layers = n_layers;
    rows.n_slots = 1, rows.n_rows = BENCH_WINDOW;
    rows.head_stride = BENCH_DIM * 2, rows.row_stride = BENCH_Q_HEADS * BENCH_DIM * 2;
    if (dropkv_buffer_new(answer_bytes, &output, &error) != DROPKV_OK ||
        dropkv_client_add_output(client, output, &error) != DROPKV_OK ||
        dropkv_client_add_buffer(client, all.buffer, &error) != DROPKV_OK ||
        dropkv_cache_add(client, &layout, &cache, &error) != DROPKV_OK ||
        dropkv_stash_add(client, &rows, &stash, &error) != DROPKV_OK)
        bench_die("cache", error.text);
    struct dropkv_prompt ask = DROPKV_PROMPT_INIT;
    ask.cache = cache, ask.stash = stash, ask.n_tokens = (uint32_t)tokens;
    ask.newest_row = BENCH_WINDOW - 1, ask.q_rows = BENCH_WINDOW;
    ask.params = bench_params, ask.n_params = BENCH_N_PARAMS;
    ask.output = output, ask.output_bytes = answer_bytes;
    const double began = bench_now_us();
    double now = began;
    times.n = queued.n = computed.n = 0;
    while (times.n < BENCH_SAMPLES && now < began + seconds * 1e6) {
        struct dropkv_result *result;
        const double sent = bench_now_us();
        if (dropkv_score_prompt(client, &ask, &result, &error) != DROPKV_OK)
            bench_die("prompt", error.text);
        now = bench_now_us();
        if (now > began + seconds * 2e5) {
            times.us[times.n++] = now - sent;
            queued.us[queued.n++] = (double)result->queue_ns / 1e3;
            computed.us[computed.n++] = (double)result->compute_ns / 1e3;
        }
        dropkv_result_free(result);
    }
    printf("    %u layer%s of %llu tokens in one message%s: p50 %.1f us, p99 %.1f us (until the "
           "worker had it %.0f us, in the worker %.0f us)\n",
           n_layers, n_layers == 1 ? "" : "s", (unsigned long long)tokens, where,
           bench_quantile(&times, 0.5), bench_quantile(&times, 0.99), bench_quantile(&queued, 0.5),
           bench_quantile(&computed, 0.5));
    dropkv_client_close(client);
    dropkv_buffer_free(output);
    dkv_bench_cuda_free(all.memory);
}

static void beside_hog(struct bench_engine *e, const struct bench_daemon *server, uint64_t tokens)
{
    static struct bench_times here, there;
    struct bench_block blocks[SETS];
    struct bench_item items[SETS];
    struct dropkv_request requests[SETS];
    struct dropkv_client *client = bench_connect(server, busy_poll_us);
    for (unsigned i = 0; i < SETS; i++) {
        struct dropkv_error error;
        bench_block_make(&blocks[i], true, tokens, i);
        bench_item_make(e, &items[i], &blocks[i], tokens);
        requests[i] = bench_request_of(&blocks[i], tokens);
        if (dropkv_client_add_buffer(client, blocks[i].buffer, &error) != DROPKV_OK)
            bench_die("buffer", error.text);
    }
    const double began = bench_now_us();
    here.n = 0;
    for (unsigned i = 0; bench_now_us() < began + seconds * 1e6; i++) {
        const double sent = bench_now_us();
        bench_engine_run(e, &items[i % SETS]);
        here.us[here.n++] = bench_now_us() - sent;
    }
    time_requests(client, requests, SETS, &there);
    const double p50 = bench_quantile(&here, 0.5), daemon_p50 = bench_quantile(&there, 0.5);
    printf("    %7llu tokens: engine in this process p50 %.0f us, p99 %.0f; daemon p50 %.0f, p99 "
           "%.0f: %.0f us more, %s %d\n",
           (unsigned long long)tokens, p50, bench_quantile(&here, 0.99), daemon_p50,
           bench_quantile(&there, 0.99), daemon_p50 - p50,
           daemon_p50 - p50 <= OVERHEAD_BAR_US ? "within" : "ABOVE", OVERHEAD_BAR_US);
    dropkv_client_close(client);
    for (unsigned i = 0; i < SETS; i++) {
        dkv_bench_cuda_free(blocks[i].memory);
        free(items[i].item.keep_out);
    }
}

static void remove_folder(void)
{
    rmdir(folder);
}

int main(int argc, char **argv)
{
    struct bench_daemon server, single;
    struct bench_engine engine = {0};
    char path[64];
    int go;
    if (argc < 2) {
        fprintf(stderr, "usage: %s DROPKVD [SECONDS]\n", argv[0]);
        return 64;
    }
    seconds = argc > 2 ? atof(argv[2]) : 1;
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (mkdtemp(folder) == NULL)
        bench_die("folder", folder);
    atexit(remove_folder);
    const pid_t hog = bench_hog_start(&go);
    snprintf(path, sizeof(path), "%s/all", folder);
    bench_daemon_start(&server, argv[1], path, "--log-level", "info");
    snprintf(path, sizeof(path), "%s/one", folder);
    bench_daemon_start(&single, argv[1], path, "--max-batch-items", "1");
    bench_engine_open(&engine);
    for (busy_poll_us = 0; busy_poll_us <= 1000; busy_poll_us += 1000) {
        printf("one request at a time, by a caller that %s\n",
               busy_poll_us == 0 ? "sleeps until the answer comes"
                                 : "looks for the answer for 1 ms before it sleeps");
        one_request(&engine, &server, 4096);
        one_request(&engine, &server, 32768);
        one_request(&engine, &server, 131072);
        prompt(&server, 1, 4096, "");
        prompt(&server, 1, 131072, "");
        prompt(&server, LAYERS, 4096, "");
    }
    busy_poll_us = 0;
    bench_streams(&engine, &server, &single, true, seconds);
    bench_streams(&engine, &server, &single, false, seconds);
    printf("beside a process that keeps the GPU full of matrix products\n");
    if (write(go, "", 1) != 1)
        bench_die("hog", "it has gone");
    nanosleep(&(struct timespec){1, 500000000}, NULL); /* until its context is there */
    beside_hog(&engine, &server, 4096);
    beside_hog(&engine, &server, 131072);
    prompt(&server, LAYERS, 4096, ", there");
    kill(hog, SIGKILL);
    waitpid(hog, NULL, 0);
    engine.ops->close(engine.engine);
    bench_daemon_stop(&server);
    bench_daemon_stop(&single);
    return 0;
}
