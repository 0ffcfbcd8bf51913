/* How clients of the local socket fare when there is too much to do: bench_queue's two questions,
 * asked through libdropkv, a socket for each client, and a whole daemon.
 *
 *   bench_clients DROPKVD [fair|overload] [SECONDS]
 *
 * fair: 15 polite clients with one request at a time, first alone, then beside a greedy one with 64
 * in flight, in turns, so that the machine's moods hit both. Printed: their p99 in both, and the
 * ratio (at most 1.5).
 *
 * overload: full load, then three times as many requests as were answered, whatever is answered, in
 * turns. Printed: p99 of what was accepted (within its deadline), p99 and longest time of refusals
 * (at most 5 ms), answers in time against full load's (at least 90%), and what was lost.
 *
 * The clients are one program with one thread, which the figures contain: on few processors it
 * competes with the daemon for them.
 */
#include "client/dropkv.h"

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { Q_HEADS = 4, KV_HEADS = 1, ROWS = 16, DIM = 64, TOKENS = 2048 };
enum { POLITE = 15, DEEP = 64, CLIENTS = POLITE + 1 };
#define DEADLINE_US INT64_C(500000)
#define TIMES_MAX   4000000u

struct tensors {
    float query[Q_HEADS][ROWS][DIM];
    float key[KV_HEADS][TOKENS][DIM];
    float value[KV_HEADS][TOKENS][DIM];
};

struct times {
    double *ms;
    size_t n;
};

struct bench {
    struct dropkv_client *clients[CLIENTS];
    struct dropkv_buffer *buffers[CLIENTS];
    bool repeats[CLIENTS]; /* asks again when it is answered */
    bool counts[CLIENTS];  /* its answers' times count */
    struct times answers, refusals;
    uint64_t n_sent, n_ok, n_late, n_refused, n_failed;
    pid_t daemon;
    char folder[32];
};

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "bench_clients: %s: %s\n", what, why);
    exit(1);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void add_time(struct times *times, double ms)
{
    if (times->n < TIMES_MAX)
        times->ms[times->n++] = ms;
}

/* ---- requests ---- */

static void ask(struct bench *b, unsigned i)
{
    struct dropkv_error error;
    struct tensors *tensors = dropkv_buffer_data(b->buffers[i]);
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = 1;
    r.q_heads = Q_HEADS;
    r.kv_heads = KV_HEADS;
    r.head_dim = DIM;
    r.q_rows = ROWS;
    r.n_tokens = TOKENS;
    r.query = (struct dropkv_tensor){.data = tensors->query, .dtype = DROPKV_FP32};
    r.key = (struct dropkv_tensor){.data = tensors->key, .dtype = DROPKV_FP32};
    r.value = (struct dropkv_tensor){.data = tensors->value, .dtype = DROPKV_FP32};
    r.timeout_us = DEADLINE_US;
    b->n_sent++;
    const enum dropkv_status status = dropkv_submit(b->clients[i], &r, NULL, &error);
    if (status == DROPKV_E_BUSY) { /* as many as the library lets be in flight */
        b->n_refused++;
        return;
    }
    if (status != DROPKV_OK)
        fail("request", error.text);
}

static void take(struct bench *b, unsigned i)
{
    struct dropkv_result *result;
    while ((result = dropkv_next_result(b->clients[i])) != NULL) {
        const double ms = (double)result->elapsed_ns * 1e-6;
        switch (result->status) {
        case DROPKV_OK:
            b->n_ok++;
            if (b->counts[i])
                add_time(&b->answers, ms);
            break;
        case DROPKV_E_BUSY:
            b->n_refused++;
            if (b->counts[i])
                add_time(&b->refusals, ms);
            break;
        case DROPKV_E_TIMEOUT: b->n_late++; break;
        default: fprintf(stderr, "%s\n", result->error_text); b->n_failed++;
        }
        dropkv_result_free(result);
        if (b->repeats[i])
            ask(b, i);
    }
}

static void turn(struct bench *b, int wait_ms)
{
    struct pollfd fds[CLIENTS];
    for (unsigned i = 0; i < CLIENTS; i++)
        fds[i] = (struct pollfd){.fd = dropkv_fd(b->clients[i]), .events = POLLIN};
    if (poll(fds, CLIENTS, wait_ms) <= 0)
        return;
    for (unsigned i = 0; i < CLIENTS; i++)
        if (fds[i].revents != 0) {
            dropkv_dispatch(b->clients[i], 0, NULL);
            take(b, i);
        }
}

static uint32_t n_in_flight(const struct bench *b)
{
    uint32_t n = 0;
    for (unsigned i = 0; i < CLIENTS; i++)
        n += dropkv_in_flight(b->clients[i]);
    return n;
}

/* Runs that long, sending `rate` requests a second on top of what repeats, then until everything
 * has ended. Returns the answers within that time. */
static uint64_t run_for(struct bench *b, double seconds, double rate)
{
    const double began = now_s();
    const uint64_t n_ok = b->n_ok;
    uint64_t n_due = 0;
    for (double now = began; now < began + seconds; now = now_s()) {
        for (; (double)n_due < (now - began) * rate; n_due++)
            ask(b, (unsigned)(n_due % POLITE));
        turn(b, 1);
    }
    const uint64_t n_in_time = b->n_ok - n_ok;
    memset(b->repeats, 0, sizeof(b->repeats));
    while (n_in_flight(b) > 0)
        turn(b, 100);
    return n_in_time;
}

/* ---- what is asked ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(struct times *times, double share)
{
    if (times->n == 0)
        return 0;
    qsort(times->ms, times->n, sizeof(double), by_value);
    return times->ms[(size_t)(share * (double)(times->n - 1))];
}

static void run_polite(struct bench *b, double seconds, bool greedy, struct times *answers)
{
    b->answers = *answers;
    for (unsigned i = 0; i < POLITE; i++) {
        b->counts[i] = b->repeats[i] = true;
        ask(b, i);
    }
    b->counts[POLITE] = false;
    b->repeats[POLITE] = greedy;
    for (unsigned i = 0; greedy && i < DEEP; i++)
        ask(b, POLITE);
    run_for(b, seconds, 0);
    *answers = b->answers;
}

static int measure_fairness(struct bench *b, double seconds, struct times times[2])
{
    const char *const names[2] = {"alone:                 ", "beside a greedy client:"};
    double p99[2];
    run_polite(b, seconds / 8, true, &times[0]); /* connections, clocks */
    times[0].n = 0;
    for (int round = 0; round < 8; round++)
        run_polite(b, seconds / 8, round % 2 == 1, &times[round % 2]);
    for (int which = 0; which < 2; which++) {
        p99[which] = percentile(&times[which], 0.99);
        printf("%s %zu polite answers, median %.2f ms, p99 %.2f ms\n", names[which], times[which].n,
               percentile(&times[which], 0.5), p99[which]);
    }
    printf("polite p99 with a greedy client / without: %.2f (at most 1.5)\n", p99[1] / p99[0]);
    return p99[1] <= 1.5 * p99[0] ? 0 : 1;
}

static uint64_t run_full(struct bench *b, double seconds)
{
    for (unsigned i = 0; i < POLITE; i++)
        b->repeats[i] = true;
    for (unsigned i = 0; i < 4 * POLITE; i++)
        ask(b, i % POLITE);
    return run_for(b, seconds, 0);
}

static int measure_overload(struct bench *b, double seconds, struct times times[2])
{
    const int rounds = seconds > 4 ? (int)(seconds / 4) : 1;
    const double one = seconds / rounds;
    uint64_t n_full = 0, n_over = 0;
    run_full(b, 1);
    b->answers = times[0];
    b->refusals = times[1];
    b->n_sent = b->n_ok = b->n_late = b->n_refused = b->n_failed = 0;
    for (int i = 0; i < rounds; i++) {
        memset(b->counts, 0, sizeof(b->counts));
        const uint64_t n_now = run_full(b, one / 4);
        n_full += n_now;
        memset(b->counts, 1, sizeof(b->counts));
        n_over += run_for(b, one * 3 / 4, 3 * (double)n_now / (one / 4));
    }
    const double peak = (double)n_full / (seconds / 4),
                 goodput = (double)n_over / (seconds * 3 / 4);
    const double p99 = percentile(&b->answers, 0.99);
    const double refusal = percentile(&b->refusals, 0.99);
    const uint64_t n_lost = b->n_sent - b->n_ok - b->n_late - b->n_refused - b->n_failed;
    printf("full load %.0f/s; three times as much offered: %llu refused\n", peak,
           (unsigned long long)b->n_refused);
    printf("accepted: p99 %.1f ms (deadline %lld ms), %llu too late, %llu failed, %llu lost\n", p99,
           (long long)DEADLINE_US / 1000, (unsigned long long)b->n_late,
           (unsigned long long)b->n_failed, (unsigned long long)n_lost);
    printf("refusals: p99 %.2f ms, longest %.2f ms (at most 5); answers in time %.0f/s: %.0f%% of "
           "full load's (at least 90)\n",
           refusal, percentile(&b->refusals, 1), goodput, 100 * goodput / peak);
    return p99 <= DEADLINE_US / 1000 && b->n_late * 100 <= b->n_sent && refusal <= 5 &&
                   goodput >= 0.9 * peak && n_lost == 0 && b->n_failed == 0
               ? 0
               : 1;
}

/* ---- open and close ---- */

static void start_daemon(struct bench *b, const char *program, const char *path)
{
    int log[2];
    char line[512];
    if (pipe(log) != 0 || (b->daemon = fork()) < 0)
        fail(program, "cannot be started");
    if (b->daemon == 0) {
        dup2(log[1], STDERR_FILENO);
        close(log[0]);
        close(log[1]);
        execl(program, program, "--http", "off", "--threads", "1", "--socket", path, (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    FILE *lines = fdopen(log[0], "r");
    do
        if (fgets(line, sizeof(line), lines) == NULL)
            fail(program, "did not start");
    while (strstr(line, "listening at") == NULL);
    /* Left open: the daemon may say more. */
}

static void open_clients(struct bench *b, const char *endpoint)
{
    struct dropkv_error error;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    options.max_retries = -1; /* a refusal is an answer here */
    for (unsigned i = 0; i < CLIENTS; i++) {
        if (dropkv_client_open(endpoint, &options, &b->clients[i], &error) != DROPKV_OK ||
            dropkv_buffer_new(sizeof(struct tensors), &b->buffers[i], &error) != DROPKV_OK ||
            dropkv_client_add_buffer(b->clients[i], b->buffers[i], &error) != DROPKV_OK)
            fail(endpoint, error.text);
        float *numbers = dropkv_buffer_data(b->buffers[i]);
        for (size_t n = 0; n < sizeof(struct tensors) / sizeof(float); n++)
            numbers[n] = (float)((n * 2654435761u >> 8) & 0xffff) / 65536.0f - 0.5f;
        if (dropkv_health(b->clients[i], 0, &error) != DROPKV_OK) /* connected */
            fail(endpoint, error.text);
    }
}

static void close_bench(struct bench *b)
{
    char run[48];
    for (unsigned i = 0; i < CLIENTS; i++) {
        dropkv_client_close(b->clients[i]);
        dropkv_buffer_free(b->buffers[i]);
    }
    kill(b->daemon, SIGTERM);
    waitpid(b->daemon, NULL, 0);
    snprintf(run, sizeof(run), "%s/run", b->folder);
    rmdir(run);
    rmdir(b->folder);
}

int main(int argc, char **argv)
{
    static struct bench bench = {.folder = "/tmp/dropkv-bench-XXXXXX"};
    char path[64], endpoint[80];
    struct times times[2];
    const char *what = argc > 2 ? argv[2] : "fair";
    const double seconds = argc > 3 ? atof(argv[3]) : 10;
    const bool fair = strcmp(what, "fair") == 0;
    if (argc < 2 || (!fair && strcmp(what, "overload") != 0) || seconds <= 0) {
        fprintf(stderr, "usage: bench_clients DROPKVD [fair|overload] [SECONDS]\n");
        return 64;
    }
    for (int i = 0; i < 2; i++)
        times[i] = (struct times){malloc(TIMES_MAX * sizeof(double)), 0};
    bench.refusals = times[1];
    if (times[0].ms == NULL || times[1].ms == NULL || mkdtemp(bench.folder) == NULL)
        fail("start", "no memory, or no folder");
    snprintf(path, sizeof(path), "%s/run/s", bench.folder);
    snprintf(endpoint, sizeof(endpoint), "unix://%s", path);
    start_daemon(&bench, argv[1], path);
    open_clients(&bench, endpoint);
    const int result = fair ? measure_fairness(&bench, seconds, times)
                            : measure_overload(&bench, seconds, times);
    close_bench(&bench);
    for (int i = 0; i < 2; i++)
        free(times[i].ms);
    return result;
}
