/* How the admission queue and a real worker treat clients when there is too much to do.
 *
 *   bench_queue [fair|overload] [SECONDS] [DEVICE]
 *
 * fair: 15 polite clients with one request at a time, first alone, then beside a greedy one with 64
 * in flight. Printed: their p99 in both, and the ratio (at most 1.5).
 *
 * overload: a second of full load, then three in which requests come, whatever is answered, at
 * three times the rate of the answers before; and again. Printed: p99 of what was accepted (within
 * its deadline), the longest refusal (at most 5 ms), answers in time against full load's (at least
 * 90%), and what was lost or answered twice (nothing).
 *
 * The clients are at the backend's seam: queue, link and worker are the daemon's, without HTTP. The
 * program is its own worker.
 */
#include "server/backend.h"

#include "server/clock.h"
#include "server/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { Q_HEADS = 4, KV_HEADS = 1, ROWS = 16, DIM = 64, TOKENS = 2048 };
#define Q_BYTES     (sizeof(float) * Q_HEADS * ROWS * DIM)
#define KV_BYTES    (sizeof(float) * KV_HEADS * TOKENS * DIM)
#define ALL_BYTES   (Q_BYTES + 2 * KV_BYTES)
#define DEADLINE_US 500000
#define POLITE      15u
#define DEEP        64u
#define TIMES_MAX   4000000u

struct bench;

struct client {
    struct bench *bench;
    struct dkv_backend_client *share;
    bool repeats; /* asks again when it is answered */
    bool counted; /* its times count */
};

struct request {
    struct client *client;
    uint64_t began_ns;
    bool ended;
};

struct bench {
    struct dkv_config_state config;
    uv_loop_t loop;
    struct dkv_arena arena;
    struct dkv_backend *backend;
    const char *data;
    struct client clients[POLITE + 1];
    double *times_ms; /* of answers that count */
    size_t n_times;
    bool stop;
    uint64_t n_accepted, n_ok, n_late, n_failed, n_refused, n_twice;
    double worst_refusal_ms;
};

static void fail(const char *what, const struct dkv_error *err)
{
    fprintf(stderr, "bench_queue: %s: %s\n", what, err->text);
    exit(1);
}

/* ---- requests ---- */

static struct dkv_job *make_job(struct bench *bench)
{
    struct dkv_error err = {0};
    struct dkv_job *job = dkv_job_new(&bench->arena);
    if (job == NULL || dkv_job_add_blocks(job, 1, &err) != DKV_OK)
        fail("job", &err);
    job->blocks[0] = (struct dkv_block){
        .q_heads = Q_HEADS,
        .kv_heads = KV_HEADS,
        .head_dim = DIM,
        .q_rows = ROWS,
        .n_tokens = TOKENS,
        .query = dkv_view_dense(bench->data, Q_BYTES, DKV_FP32, ROWS, DIM),
        .key = dkv_view_dense(bench->data + Q_BYTES, KV_BYTES, DKV_FP32, TOKENS, DIM),
        .value = dkv_view_dense(bench->data + Q_BYTES + KV_BYTES, KV_BYTES, DKV_FP32, TOKENS, DIM),
    };
    dkv_params_init(&job->request.params);
    job->request.params.timeout = DEADLINE_US;
    job->request.params.set = UINT64_C(1) << DKV_PARAM_TIMEOUT;
    dkv_params_resolve(&job->request.params);
    if (dkv_request_validate(&job->request, job->plans, &err) != DKV_OK ||
        dkv_job_prepare(job, 1u << 30, &err) != DKV_OK)
        fail("job", &err);
    return job;
}

static void ask(struct client *client);

static void on_done(struct dkv_job *job, void *owner)
{
    struct request *request = owner;
    struct client *client = request->client;
    struct bench *bench = client->bench;
    if (request->ended) {
        bench->n_twice++;
        return;
    }
    request->ended = true;
    bench->n_ok += job->status == DKV_OK;
    bench->n_late += job->status == DKV_E_TIMEOUT;
    bench->n_failed += job->status != DKV_OK && job->status != DKV_E_TIMEOUT;
    if (client->counted && job->status == DKV_OK && bench->n_times < TIMES_MAX)
        bench->times_ms[bench->n_times++] = (double)(dkv_clock_ns() - request->began_ns) * 1e-6;
    dkv_job_free(job);
    free(request);
    if (client->repeats && !bench->stop)
        ask(client);
}

static void ask(struct client *client)
{
    struct bench *bench = client->bench;
    struct dkv_error err = {0};
    struct dkv_backend_refusal refusal;
    struct request *request = calloc(1, sizeof(*request));
    struct dkv_job *job = make_job(bench);
    *request = (struct request){.client = client, .began_ns = dkv_clock_ns()};
    job->done = on_done;
    job->owner = request;
    if (dkv_backend_submit(bench->backend, client->share, job, &refusal, &err) == DKV_OK) {
        bench->n_accepted++;
        return;
    }
    const double took_ms = (double)(dkv_clock_ns() - request->began_ns) * 1e-6;
    bench->n_refused++;
    bench->worst_refusal_ms = took_ms > bench->worst_refusal_ms ? took_ms : bench->worst_refusal_ms;
    dkv_job_free(job);
    free(request);
}

/* ---- runs ---- */

static void on_tick(uv_timer_t *timer)
{
    (void)timer;
}

static uint64_t n_ended(const struct bench *bench)
{
    return bench->n_ok + bench->n_late + bench->n_failed;
}

/* Runs the loop for that long, sending `rate` requests a second on top of what repeats, then until
 * everything has ended. Returns the answers within that time. */
static uint64_t run_for(struct bench *bench, double seconds, double rate)
{
    const uint64_t began_ns = dkv_clock_ns(), end_ns = began_ns + (uint64_t)(seconds * 1e9);
    const uint64_t n_ok_before = bench->n_ok;
    uint64_t n_sent = 0;
    uv_timer_t tick; /* wakes the loop for arrivals and for the end */
    uv_timer_init(&bench->loop, &tick);
    uv_timer_start(&tick, on_tick, 1, 1);
    bench->stop = false;
    for (uint64_t now = began_ns; now < end_ns; now = dkv_clock_ns()) {
        const uint64_t due = (uint64_t)((double)(now - began_ns) * 1e-9 * rate);
        for (; n_sent < due; n_sent++)
            ask(&bench->clients[n_sent % POLITE]);
        uv_run(&bench->loop, UV_RUN_ONCE);
    }
    bench->stop = true;
    const uint64_t n_in_time = bench->n_ok - n_ok_before;
    const uint64_t patience_ns = dkv_clock_ns() + UINT64_C(10000000000);
    while (n_ended(bench) < bench->n_accepted && dkv_clock_ns() < patience_ns)
        uv_run(&bench->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&tick, NULL);
    uv_run(&bench->loop, UV_RUN_NOWAIT);
    return n_in_time;
}

static void forget_counts(struct bench *bench)
{
    bench->n_accepted = bench->n_ok = bench->n_late = bench->n_failed = bench->n_refused = 0;
    bench->n_times = 0;
    bench->worst_refusal_ms = 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of the answers so far. */
static double percentile_ms(struct bench *bench, double share)
{
    if (bench->n_times == 0)
        return 0;
    qsort(bench->times_ms, bench->n_times, sizeof(double), by_value);
    return bench->times_ms[(size_t)(share * (double)(bench->n_times - 1))];
}

static double polite_p99_ms(struct bench *bench, double seconds, bool greedy)
{
    forget_counts(bench);
    for (unsigned i = 0; i < POLITE; i++)
        ask(&bench->clients[i]);
    for (unsigned i = 0; greedy && i < DEEP; i++)
        ask(&bench->clients[POLITE]);
    run_for(bench, seconds, 0);
    const double p50 = percentile_ms(bench, 0.5), p99 = percentile_ms(bench, 0.99);
    printf("%s %zu polite answers, median %.2f ms, p99 %.2f ms\n",
           greedy ? "beside a greedy client:" : "alone:                 ", bench->n_times, p50,
           p99);
    return p99;
}

static int measure_fairness(struct bench *bench, double seconds)
{
    for (unsigned i = 0; i <= POLITE; i++)
        bench->clients[i].repeats = true;
    bench->clients[POLITE].counted = false;
    polite_p99_ms(bench, seconds / 4, false); /* warm */
    const double alone_ms = polite_p99_ms(bench, seconds, false);
    const double beside_ms = polite_p99_ms(bench, seconds, true);
    printf("polite p99 with a greedy client / without: %.2f (at most 1.5)\n", beside_ms / alone_ms);
    return beside_ms <= 1.5 * alone_ms ? 0 : 1;
}

static void set_clients(struct bench *bench, bool repeat, bool count)
{
    for (unsigned i = 0; i < POLITE; i++) {
        bench->clients[i].repeats = repeat;
        bench->clients[i].counted = count;
    }
}

/* Answers under a full load. */
static uint64_t run_full(struct bench *bench, double seconds)
{
    set_clients(bench, true, false);
    for (unsigned i = 0; i < 4 * POLITE; i++)
        ask(&bench->clients[i % POLITE]);
    const uint64_t n_ok = run_for(bench, seconds, 0);
    set_clients(bench, false, true);
    return n_ok;
}

static int print_overload(struct bench *bench, double peak, double goodput)
{
    const double p99_ms = percentile_ms(bench, 0.99);
    const uint64_t n_lost = bench->n_accepted - n_ended(bench);
    printf("accepted: p99 %.1f ms (deadline %d ms), %llu too late, %llu failed, %llu lost, "
           "%llu answered twice\n",
           p99_ms, DEADLINE_US / 1000, (unsigned long long)bench->n_late,
           (unsigned long long)bench->n_failed, (unsigned long long)n_lost,
           (unsigned long long)bench->n_twice);
    printf("longest refusal %.2f ms (at most 5); answers in time %.0f/s: %.0f%% of full load's (at "
           "least 90)\n",
           bench->worst_refusal_ms, goodput, 100 * goodput / peak);
    const bool in_time = p99_ms <= DEADLINE_US / 1000 && bench->n_late * 100 <= bench->n_accepted;
    return in_time && bench->worst_refusal_ms <= 5 && goodput >= 0.9 * peak && n_lost == 0 &&
                   bench->n_twice == 0 && bench->n_failed == 0
               ? 0
               : 1;
}

/* Full load and overload take turns, so that the machine's moods hit both. */
static int measure_overload(struct bench *bench, double seconds)
{
    const unsigned rounds = seconds > 3 ? (unsigned)(seconds / 3) : 1;
    const double one = seconds / rounds;
    uint64_t n_full = 0, n_over = 0;
    run_full(bench, 1); /* warm */
    forget_counts(bench);
    for (unsigned i = 0; i < rounds; i++) {
        const uint64_t n_now = run_full(bench, one / 3);
        n_full += n_now;
        n_over += run_for(bench, one, 3 * (double)n_now / (one / 3));
    }
    const double peak = (double)n_full / (seconds / 3);
    printf("full load %.0f/s; three times as much offered for %.0f s in all: %llu refused\n", peak,
           seconds, (unsigned long long)bench->n_refused);
    return print_overload(bench, peak, (double)n_over / seconds);
}

/* ---- open and close ---- */

static void open_bench(struct bench *bench, const char *device)
{
    struct dkv_error err = {0};
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_ERROR, STDERR_FILENO);
    dkv_config_init(&bench->config);
    dkv_config_set(&bench->config, dkv_config_find("device"), device, DKV_SOURCE_FILE, "", &err);
    dkv_config_set(&bench->config, dkv_config_find("threads"), "1", DKV_SOURCE_FILE, "", &err);
    dkv_config_set(&bench->config, dkv_config_find("log_level"), "error", DKV_SOURCE_FILE, "",
                   &err);
    uv_loop_init(&bench->loop);
    if (dkv_arena_open(&bench->arena, UINT64_C(1) << 32, 1u << 24, &err) != DKV_OK)
        fail("memory", &err);
    float *data = dkv_arena_alloc(&bench->arena, ALL_BYTES);
    for (size_t i = 0; i < ALL_BYTES / sizeof(float); i++)
        data[i] = (float)((i * 2654435761u >> 8) & 0xffff) / 65536.0f - 0.5f;
    bench->data = (const char *)data;
    bench->times_ms = malloc(TIMES_MAX * sizeof(double));
    if (bench->times_ms == NULL)
        exit(1);
    if (dkv_backend_open(&bench->config.config, &bench->loop, &bench->arena, &bench->backend,
                         &err) != DKV_OK)
        fail("device", &err);
    for (unsigned i = 0; i <= POLITE; i++)
        bench->clients[i] = (struct client){
            .bench = bench, .share = dkv_backend_client_get(bench->backend, NULL), .counted = true};
}

static void close_bench(struct bench *bench)
{
    for (unsigned i = 0; i <= POLITE; i++)
        dkv_backend_client_put(bench->clients[i].share);
    dkv_backend_close(bench->backend);
    uv_run(&bench->loop, UV_RUN_DEFAULT);
    uv_loop_close(&bench->loop);
    dkv_arena_free(&bench->arena, (void *)(uintptr_t)bench->data, ALL_BYTES, ALL_BYTES);
    dkv_arena_close(&bench->arena);
    dkv_config_fini(&bench->config);
    free(bench->times_ms);
}

int main(int argc, char **argv)
{
    static struct bench bench;
    if (argc > 1 && strcmp(argv[1], "--worker") == 0)
        return dkv_worker_main();
    const char *what = argc > 1 ? argv[1] : "fair";
    const double seconds = argc > 2 ? atof(argv[2]) : 10;
    const bool fair = strcmp(what, "fair") == 0;
    if ((!fair && strcmp(what, "overload") != 0) || seconds <= 0) {
        fprintf(stderr, "usage: bench_queue [fair|overload] [SECONDS] [DEVICE]\n");
        return 64;
    }
    open_bench(&bench, argc > 3 ? argv[3] : "cpu");
    const int result = fair ? measure_fairness(&bench, seconds) : measure_overload(&bench, seconds);
    close_bench(&bench);
    return result;
}
