/* What a request costs the front's processor, which bounds how many streams a fast device can
 * serve: processor time of the front, of the worker and of the clients for each answer.
 *
 * Every token is kept, which reads no tensor, so a daemon of one CPU thread answers at once.
 *
 *   64 streams      a connection each, one request at a time, as in bench_gpu_ipc
 *   one stream      with 64 requests in flight on one connection
 *
 * with answers of 256 bytes, and of 6,560, as 4,096 tokens of which one in twenty is kept have.
 *
 * usage: bench_front DROPKVD [SECONDS]     (of each measurement; 1)
 */
#include "client/dropkv.h"
#include "tests/bench/socket_daemon.h"

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

enum { HEADS = 8, TOKENS_MAX = 256, DIM = 8, ROWS = 8, STREAMS = 64 };

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_front: %s: %s\n", what, why);
    exit(1);
}

/* ---- the daemon's processes ---- */

static pid_t worker_of(pid_t front)
{
    char name[96];
    int pid = 0;
    snprintf(name, sizeof(name), "/proc/%d/task/%d/children", (int)front, (int)front);
    FILE *file = fopen(name, "r");
    if (file == NULL || fscanf(file, "%d", &pid) != 1)
        die("worker", "it has none");
    fclose(file);
    return pid;
}

/* Time on a processor, of the main thread. */
static double cpu_us(pid_t pid)
{
    char name[64];
    unsigned long long ns = 0;
    snprintf(name, sizeof(name), "/proc/%d/schedstat", (int)pid);
    FILE *file = fopen(name, "r");
    if (file == NULL || fscanf(file, "%llu", &ns) != 1)
        die("schedstat", "the kernel keeps none");
    fclose(file);
    return (double)ns / 1e3;
}

static double own_cpu_us(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* ---- streams ---- */

struct streams {
    struct dropkv_client *clients[STREAMS];
    unsigned n, depth;
    struct dropkv_request request;
    struct dropkv_buffer *input;
};

static const struct dropkv_param params[] = {{"keep_ratio", DROPKV_PARAM_REAL, 0, 1, NULL}};

static void submit(const struct streams *s, unsigned i)
{
    struct dropkv_error error;
    if (dropkv_submit(s->clients[i], &s->request, NULL, &error) != DROPKV_OK)
        die("request", error.text);
}

static void open_streams(struct streams *s, const char *endpoint, unsigned n, unsigned depth,
                         uint64_t tokens)
{
    struct dropkv_error error;
    struct dropkv_request *r = &s->request;
    if (dropkv_buffer_new((size_t)HEADS * TOKENS_MAX * DIM * 2, &s->input, &error) != DROPKV_OK)
        die("buffer", error.text);
    s->n = n, s->depth = depth;
    *r = (struct dropkv_request)DROPKV_REQUEST_INIT;
    r->batch = 1, r->q_heads = HEADS, r->kv_heads = HEADS, r->head_dim = DIM, r->q_rows = ROWS;
    r->n_tokens = tokens;
    r->query.data = r->key.data = r->value.data = dropkv_buffer_data(s->input);
    r->query.dtype = r->key.dtype = r->value.dtype = DROPKV_BF16;
    r->params = params, r->n_params = 1;
    for (unsigned i = 0; i < n; i++) {
        if (dropkv_client_open(endpoint, NULL, &s->clients[i], &error) != DROPKV_OK ||
            dropkv_client_add_buffer(s->clients[i], s->input, &error) != DROPKV_OK)
            die("client", error.text);
        for (unsigned k = 0; k < depth; k++)
            submit(s, i);
    }
}

static void close_streams(struct streams *s)
{
    for (unsigned i = 0; i < s->n; i++)
        dropkv_client_close(s->clients[i]);
    dropkv_buffer_free(s->input);
}

/* Takes what is there and asks again. The number of answers. */
static uint64_t turn(struct streams *s)
{
    struct pollfd polls[STREAMS];
    uint64_t n = 0;
    for (unsigned i = 0; i < s->n; i++)
        polls[i] = (struct pollfd){.fd = dropkv_fd(s->clients[i]), .events = POLLIN};
    poll(polls, s->n, 100);
    for (unsigned i = 0; i < s->n; i++) {
        struct dropkv_result *result;
        if (polls[i].revents == 0)
            continue;
        dropkv_dispatch(s->clients[i], 0, NULL);
        while ((result = dropkv_next_result(s->clients[i])) != NULL) {
            if (result->status != DROPKV_OK)
                die("request", result->error_text);
            dropkv_result_free(result);
            submit(s, i);
            n++;
        }
    }
    return n;
}

static void measure(const struct socket_daemon *daemon, unsigned n_streams, unsigned depth,
                    uint64_t tokens, double seconds)
{
    struct streams s;
    const pid_t front = daemon->pid, worker = worker_of(front);
    uint64_t n = 0;
    open_streams(&s, daemon->endpoint, n_streams, depth, tokens);
    for (double end = bench_clock_us() + 2e5; bench_clock_us() < end;)
        turn(&s); /* warm */
    const double front_us = cpu_us(front), worker_us = cpu_us(worker), own_us = own_cpu_us();
    const double began = bench_clock_us();
    while (bench_clock_us() < began + seconds * 1e6)
        n += turn(&s);
    const double took = bench_clock_us() - began;
    printf("%7u %9u %13llu %11.0f %9.2f %9.2f %9.2f\n", n_streams, depth,
           (unsigned long long)(HEADS * tokens * sizeof(int32_t)), (double)n / took * 1e6,
           (cpu_us(front) - front_us) / (double)n, (cpu_us(worker) - worker_us) / (double)n,
           (own_cpu_us() - own_us) / (double)n);
    close_streams(&s);
}

int main(int argc, char **argv)
{
    const double seconds = argc > 2 ? atof(argv[2]) : 1;
    if (argc < 2)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct socket_daemon daemon;
    socket_daemon_start(&daemon, argv[1]);
    printf("streams in flight answer bytes   answers/s  front us worker us client us\n");
    measure(&daemon, STREAMS, 1, 8, seconds);
    measure(&daemon, STREAMS, 1, 205, seconds);
    measure(&daemon, 1, STREAMS, 8, seconds);
    measure(&daemon, 1, STREAMS, 205, seconds);
    socket_daemon_stop(&daemon);
    return 0;
}
