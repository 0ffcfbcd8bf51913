/* Many streams, each a client of its own: blocks a second through a daemon, beside the engine's
 * own. */
#include "tests/bench/gpu_ipc.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "client/cli/bench_cuda.h"

#define STREAMS   64
#define THREADS   8
#define SHARE_BAR 0.7
#define TIMES_BAR 4.0

struct stream_thread {
    pthread_t thread;
    const struct bench_daemon *server;
    const struct bench_block *blocks; /* of its streams */
    unsigned n;
    uint64_t tokens;
    atomic_bool *stop;
    uint64_t n_answers; /* in the measured time */
    atomic_bool *measure;
};

static void submit(struct dropkv_client *client, const struct dropkv_request *request)
{
    struct dropkv_error error;
    if (dropkv_submit(client, request, NULL, &error) != DROPKV_OK)
        bench_die("request", error.text);
}

static void *drive(void *opaque)
{
    struct stream_thread *t = opaque;
    struct dropkv_client *clients[STREAMS / THREADS];
    struct dropkv_request requests[STREAMS / THREADS];
    struct pollfd polls[STREAMS / THREADS];
    struct dropkv_error error;
    for (unsigned i = 0; i < t->n; i++) {
        clients[i] = bench_connect(t->server, 0);
        requests[i] = bench_request_of(&t->blocks[i], t->tokens);
        if (dropkv_client_add_buffer(clients[i], t->blocks[i].buffer, &error) != DROPKV_OK)
            bench_die("buffer", error.text);
        submit(clients[i], &requests[i]);
        polls[i] = (struct pollfd){.fd = dropkv_fd(clients[i]), .events = POLLIN};
    }
    while (!atomic_load(t->stop)) {
        poll(polls, t->n, 100);
        for (unsigned i = 0; i < t->n; i++) {
            struct dropkv_result *result;
            if (polls[i].revents == 0)
                continue;
            if (dropkv_dispatch(clients[i], 0, &error) != DROPKV_OK)
                bench_die("dispatch", error.text);
            while ((result = dropkv_next_result(clients[i])) != NULL) {
                if (result->status != DROPKV_OK)
                    bench_die("request", result->error_text);
                dropkv_result_free(result);
                t->n_answers += atomic_load(t->measure);
                submit(clients[i], &requests[i]);
            }
        }
    }
    for (unsigned i = 0; i < t->n; i++)
        dropkv_client_close(clients[i]);
    return NULL;
}

/* Blocks a second. */
static double streams(const struct bench_daemon *server, const struct bench_block *blocks,
                      uint64_t tokens, double seconds, const char *what)
{
    struct stream_thread threads[THREADS];
    atomic_bool stop_them = false, measure = false;
    for (unsigned i = 0; i < THREADS; i++) {
        threads[i] = (struct stream_thread){
            .server = server,
            .blocks = &blocks[i * (STREAMS / THREADS)],
            .n = STREAMS / THREADS,
            .tokens = tokens,
            .stop = &stop_them,
            .measure = &measure,
        };
        pthread_create(&threads[i].thread, NULL, drive, &threads[i]);
    }
    struct timespec warm = {0, 300000000}, run = {(time_t)seconds, 0};
    run.tv_nsec = (long)((seconds - (double)run.tv_sec) * 1e9);
    nanosleep(&warm, NULL); /* the time of a measurement, not a wait for something */
    const pid_t worker = bench_worker_of(server);
    const double front_us = bench_cpu_us(server->pid), worker_us = bench_cpu_us(worker),
                 began = bench_now_us();
    atomic_store(&measure, true);
    nanosleep(&run, NULL);
    atomic_store(&measure, false);
    const double took = bench_now_us() - began;
    const double front = bench_cpu_us(server->pid) - front_us,
                 work = bench_cpu_us(worker) - worker_us;
    uint64_t n = 0;
    atomic_store(&stop_them, true);
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i].thread, NULL);
        n += threads[i].n_answers;
    }
    const double rate = (double)n / took * 1e6;
    printf("    %s: %.0f blocks/s; the front's processor %.0f%% busy, the worker's %.0f%%\n", what,
           rate, 100 * front / took, 100 * work / took);
    return rate;
}

/* The engine's own batches of 32, two in flight. */
static double engine_rate(struct bench_engine *e, const struct bench_block *blocks, uint64_t tokens,
                          double seconds)
{
    struct bench_item items[STREAMS];
    struct dkv_item batch[2][32];
    struct dkv_error err;
    uint64_t n = 0;
    for (unsigned i = 0; i < STREAMS; i++)
        bench_item_make(e, &items[i], &blocks[i], tokens);
    for (unsigned i = 0; i < STREAMS; i++)
        batch[i / 32][i % 32] = items[i].item;
    for (unsigned i = 0; i < 20; i++)
        if (dkv_engine_run(e->ops, e->engine, batch[i % 2], 32, &err) != DKV_OK)
            bench_die("engine", err.text);
    const double began = bench_now_us();
    double now = began;
    if (e->ops->submit(e->engine, batch[1], 32, &err) != DKV_OK)
        bench_die("engine", err.text);
    for (unsigned i = 0; now < began + seconds * 1e6; i++) {
        if (e->ops->submit(e->engine, batch[i % 2], 32, &err) != DKV_OK ||
            e->ops->wait(e->engine, &err) != DKV_OK)
            bench_die("engine", err.text);
        n += 32;
        now = bench_now_us();
    }
    const double rate = (double)n / (now - began) * 1e6;
    (void)e->ops->wait(e->engine, &err);
    for (unsigned i = 0; i < STREAMS; i++)
        free(items[i].item.keep_out);
    printf("    the engine in this process, batches of 32, two in flight: %.0f blocks/s\n", rate);
    return rate;
}

void bench_streams(struct bench_engine *e, const struct bench_daemon *server,
                   const struct bench_daemon *single, bool vmm, double seconds)
{
    const uint64_t tokens = 4096;
    static struct bench_block blocks[STREAMS];
    printf("%u streams of %llu tokens, each a client of its own, %s\n", STREAMS,
           (unsigned long long)tokens, vmm ? "cuda-vmm" : "cuda-ipc");
    for (unsigned i = 0; i < STREAMS; i++)
        bench_block_make(&blocks[i], vmm, tokens, i);
    const double own = engine_rate(e, blocks, tokens, seconds);
    const double batched = streams(server, blocks, tokens, seconds, "the daemon");
    const double alone = streams(single, blocks, tokens, seconds, "limited to one block a batch");
    printf("    %.2f of the engine's, %s %.1f; %.1f times one block a batch, %s %.0f\n",
           batched / own, batched / own >= SHARE_BAR ? "at least" : "BELOW", SHARE_BAR,
           batched / alone, batched / alone >= TIMES_BAR ? "at least" : "BELOW", TIMES_BAR);
    for (unsigned i = 0; i < STREAMS; i++)
        dkv_bench_cuda_free(blocks[i].memory);
}
