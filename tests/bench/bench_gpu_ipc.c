/* What a daemon costs on a GPU: requests over GPU memory that this process lends, beside the engine
 * in this process over the same memory.
 *
 *   one request   latency over device time (events around the engine's upload, kernels, download)
 *   64 streams    blocks a second, beside the engine's own batches of 32, and beside the same
 * daemon limited to one block a batch beside a hog  the same single requests while another process
 * keeps the GPU full of matrix products, beside the engine in a process of its own there
 *
 * usage: bench_gpu_ipc DROPKVD [SECONDS]     (of each measurement; 1)
 *
 * Exit 77 without a device. The bars are docs/performance's; whether they are met is printed.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/cli/bench_cuda.h"
#include "kernels/cuda/host.h"
#include "tests/bench/bench_kernels.h"

#define OVERHEAD_BAR_US 40
#define STREAMS         64
#define THREADS         8
#define SHARE_BAR       0.7
#define TIMES_BAR       4.0

enum { Q_HEADS = 32, KV_HEADS = 8, DIM = 128, WINDOW = 8, SETS = 6, LAYERS = 32, SAMPLES = 200000 };

static double seconds = 1;
static unsigned busy_poll_us; /* of clients */
static const char *program;
static char folder[] = "/tmp/dropkv-bench-XXXXXX";

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_gpu_ipc: %s: %s\n", what, why);
    exit(1);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct times {
    double us[SAMPLES];
    size_t n;
};

static double quantile(struct times *times, double q)
{
    if (times->n == 0)
        return 0;
    qsort(times->us, times->n, sizeof(double), ascending);
    return times->us[(size_t)(q * (double)(times->n - 1))];
}

/* ---- daemons ---- */

struct server {
    pid_t pid;
    char path[64], endpoint[80];
};

static void start(struct server *server, const char *name, const char *option, const char *value)
{
    int log[2];
    char line[512];
    snprintf(server->path, sizeof(server->path), "%s/%s", folder, name);
    snprintf(server->endpoint, sizeof(server->endpoint), "unix://%s", server->path);
    if (pipe(log) != 0)
        die("pipe", "no descriptors");
    server->pid = fork(); /* before this process has a context */
    if (server->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        dup2(log[1], STDERR_FILENO);
        close(log[0]);
        close(log[1]);
        execl(program, program, "--http", "off", "--device", "cuda:0", "--socket", server->path,
              option, value, (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    FILE *text = fdopen(log[0], "r");
    do
        if (text == NULL || fgets(line, sizeof(line), text) == NULL) {
            printf("skipped: the daemon did not start: %s\n", line);
            exit(77);
        }
    while (strstr(line, "listening at") == NULL);
    fclose(text); /* later lines are of no interest; a daemon ignores SIGPIPE */
}

static void stop(const struct server *server)
{
    kill(server->pid, SIGTERM);
    waitpid(server->pid, NULL, 0);
}

/* Processor time of a process and its children, in us. */
static double cpu_us(pid_t pid)
{
    char path[64], text[1024];
    unsigned long user = 0, kernel = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return 0;
    const size_t n = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[n] = '\0';
    const char *rest = strrchr(text, ')');
    if (rest == NULL || sscanf(rest + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
                               &user, &kernel) != 2)
        return 0;
    return (double)(user + kernel) * 1e6 / (double)sysconf(_SC_CLK_TCK);
}

static pid_t worker_of(const struct server *server)
{
    char path[96];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)server->pid, (int)server->pid);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fscanf(file, "%d", &pid) != 1)
            pid = 0;
        fclose(file);
    }
    return pid;
}

/* ---- blocks in memory that is lent ---- */

struct block_memory {
    struct dkv_bench_cuda *memory;
    struct dropkv_buffer *buffer;
    char *query, *key, *value; /* device addresses */
    uint64_t q_bytes, kv_bytes;
};

static void make_block(struct block_memory *b, bool vmm, uint64_t tokens, uint32_t seed)
{
    struct dkv_error err;
    b->q_bytes = (uint64_t)Q_HEADS * WINDOW * DIM * 2;
    b->kv_bytes = (uint64_t)KV_HEADS * tokens * DIM * 2;
    if (dkv_bench_cuda_new(vmm, b->q_bytes + 2 * b->kv_bytes, &b->memory, &b->buffer, &err) !=
        DKV_OK)
        die("memory", err.text);
    b->query = dropkv_buffer_data(b->buffer);
    b->key = b->query + b->q_bytes;
    b->value = b->key + b->kv_bytes;
    if (bench_fill(b->query, (b->q_bytes + 2 * b->kv_bytes) / 2, DKV_BF16, seed) != cudaSuccess ||
        cudaDeviceSynchronize() != cudaSuccess)
        die("memory", "it cannot be filled");
}

static const struct dropkv_param params[] = {
    {"keep_ratio", DROPKV_PARAM_REAL, 0, 0.05, NULL},
    {"window", DROPKV_PARAM_INT, WINDOW, 0, NULL},
};

static struct dropkv_request request_of(const struct block_memory *b, uint64_t tokens)
{
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = 1;
    r.q_heads = Q_HEADS;
    r.kv_heads = KV_HEADS;
    r.head_dim = DIM;
    r.q_rows = WINDOW;
    r.n_tokens = tokens;
    r.query = (struct dropkv_tensor){.data = b->query, .dtype = DROPKV_BF16};
    r.key = (struct dropkv_tensor){.data = b->key, .dtype = DROPKV_BF16};
    r.value = (struct dropkv_tensor){.data = b->value, .dtype = DROPKV_BF16};
    r.params = params;
    r.n_params = 2;
    return r;
}

static struct dropkv_client *connect_to(const struct server *server)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    const struct dropkv_client_options options = {
        .struct_size = sizeof(options), .max_retries = -1, .busy_poll_us = busy_poll_us};
    if (dropkv_client_open(server->endpoint, &options, &client, &error) != DROPKV_OK)
        die("client", error.text);
    return client;
}

/* ---- the engine in this process ---- */

struct engine {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    struct dkv_params params;
    enum dkv_status (*time_stages)(struct dkv_engine *, enum dkv_cuda_timing, struct dkv_error *);
    enum dkv_status (*stage_times)(struct dkv_engine *, float *, struct dkv_error *);
};

struct item {
    struct dkv_block block;
    struct dkv_plan plan;
    struct dkv_item item;
};

static void open_engine(struct engine *e)
{
    struct dkv_engine_config config = {0};
    struct dkv_error err;
    if (dkv_engine_find("cuda:0", &e->ops, &config.device, &err) != DKV_OK ||
        e->ops->open(&config, &e->engine, &err) != DKV_OK) {
        printf("skipped: %s\n", err.text);
        exit(77);
    }
    Dl_info where;
    void *module = dladdr(e->ops, &where) != 0 ? dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                                               : NULL;
    if (module != NULL) {
        *(void **)&e->time_stages = dlsym(module, "dkv_cuda_time_stages");
        *(void **)&e->stage_times = dlsym(module, "dkv_cuda_stage_times");
    }
    if (e->time_stages == NULL || e->stage_times == NULL)
        die("engine", "it has no clock");
    dkv_params_init(&e->params);
    dkv_params_set_text(&e->params, "window", "8", &err);
    dkv_params_set_text(&e->params, "keep_ratio", "0.05", &err);
    dkv_params_resolve(&e->params);
}

static void make_item(struct engine *e, struct item *to, const struct block_memory *b,
                      uint64_t tokens)
{
    struct dkv_error err;
    to->block = (struct dkv_block){
        .q_heads = Q_HEADS,
        .kv_heads = KV_HEADS,
        .head_dim = DIM,
        .q_rows = WINDOW,
        .n_tokens = tokens,
        .query = dkv_view_dense(b->query, b->q_bytes, DKV_BF16, WINDOW, DIM),
        .key = dkv_view_dense(b->key, b->kv_bytes, DKV_BF16, tokens, DIM),
        .value = dkv_view_dense(b->value, b->kv_bytes, DKV_BF16, tokens, DIM),
    };
    to->block.query.place = to->block.key.place = to->block.value.place = DKV_PLACE_DEVICE;
    const struct dkv_request request = {.params = e->params, .blocks = &to->block, .n_blocks = 1};
    if (dkv_request_validate(&request, &to->plan, &err) != DKV_OK)
        die("block", err.text);
    to->item = (struct dkv_item){
        .block = &to->block,
        .params = &e->params,
        .plan = &to->plan,
        .keep_out = malloc(sizeof(int32_t) * KV_HEADS * to->plan.keep_tokens),
    };
}

static void run_one(struct engine *e, struct item *item)
{
    struct dkv_error err;
    if (dkv_engine_run(e->ops, e->engine, &item->item, 1, &err) != DKV_OK)
        die("engine", err.text);
    if (item->item.status != DKV_OK)
        die("block", item->item.error.text);
}

/* Wall time of one block, and its device time. */
static void time_engine(struct engine *e, struct item *items, unsigned n, double *wall_out,
                        double *device_out)
{
    static struct times wall, device;
    struct dkv_error err;
    float us[4];
    wall.n = device.n = 0;
    for (unsigned i = 0; i < 400; i++) {
        const double began = now_us();
        run_one(e, &items[i % n]);
        if (i >= 50)
            wall.us[wall.n++] = now_us() - began;
    }
    if (e->time_stages(e->engine, DKV_CUDA_TIMED, &err) != DKV_OK)
        die("engine", err.text);
    for (unsigned i = 0; i < 400; i++) {
        run_one(e, &items[i % n]);
        if (i >= 50 && e->stage_times(e->engine, us, &err) == DKV_OK)
            device.us[device.n++] = us[0] + us[1] + us[2] + us[3];
    }
    (void)e->time_stages(e->engine, DKV_CUDA_UNTIMED, &err);
    *wall_out = quantile(&wall, 0.5);
    *device_out = quantile(&device, 0.5);
}

/* ---- one request at a time ---- */

/* Of the daemon's own account: until the batch started, and in the worker. */
static struct times queued, computed;

static void time_requests(struct dropkv_client *client, const struct dropkv_request *requests,
                          unsigned n, struct times *times)
{
    struct dropkv_error error;
    struct dropkv_result *result;
    const double began = now_us();
    double now = began;
    times->n = queued.n = computed.n = 0;
    for (unsigned i = 0; times->n < SAMPLES && now < began + seconds * 1e6; i++) {
        const double sent = now_us();
        if (dropkv_score(client, &requests[i % n], &result, &error) != DROPKV_OK)
            die("request", error.text);
        now = now_us();
        if (now > began + seconds * 2e5) { /* the first fifth warms up */
            times->us[times->n++] = now - sent;
            queued.us[queued.n++] = (double)result->queue_ns / 1e3;
            computed.us[computed.n++] = (double)result->compute_ns / 1e3;
        }
        dropkv_result_free(result);
    }
}

static void one_request(struct engine *e, const struct server *server, uint64_t tokens)
{
    static struct times times;
    struct block_memory blocks[2][SETS];
    struct item items[SETS];
    double wall, device;
    for (unsigned i = 0; i < SETS; i++) {
        make_block(&blocks[0][i], true, tokens, i);
        make_block(&blocks[1][i], false, tokens, i);
        make_item(e, &items[i], &blocks[0][i], tokens);
    }
    time_engine(e, items, SETS, &wall, &device);
    printf("%7llu tokens: device %.1f us, engine in this process %.1f us\n",
           (unsigned long long)tokens, device, wall);
    static const char *const names[] = {"cuda-vmm", "cuda-ipc", "cuda-vmm, into a buffer"};
    for (int kind = 0; kind < 3; kind++) {
        struct dropkv_client *client = connect_to(server);
        struct dropkv_request requests[SETS];
        struct dropkv_buffer *output;
        struct dropkv_error error;
        if (dropkv_buffer_new(KV_HEADS * tokens * sizeof(int32_t), &output, &error) != DROPKV_OK ||
            dropkv_client_add_output(client, output, &error) != DROPKV_OK)
            die("buffer", error.text);
        for (unsigned i = 0; i < SETS; i++) {
            const struct block_memory *block = &blocks[kind % 2][i];
            requests[i] = request_of(block, tokens);
            requests[i].output = kind == 2 ? output : NULL;
            requests[i].output_bytes = kind == 2 ? dropkv_buffer_bytes(output) : 0;
            if (dropkv_client_add_buffer(client, block->buffer, &error) != DROPKV_OK)
                die("buffer", error.text);
        }
        time_requests(client, requests, SETS, &times);
        const double p50 = quantile(&times, 0.5), p99 = quantile(&times, 0.99);
        printf("    %s p50 %.1f us, p99 %.1f us: over device time %.1f us, %s %d us; over the "
               "engine here %.1f us (until the worker had it %.0f us, in the worker %.0f us)\n",
               names[kind], p50, p99, p50 - device,
               p50 - device <= OVERHEAD_BAR_US ? "within" : "ABOVE", OVERHEAD_BAR_US, p50 - wall,
               quantile(&queued, 0.5), quantile(&computed, 0.5));
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
static void prompt(const struct server *server, unsigned n_layers, uint64_t tokens,
                   const char *where)
{
    static struct times times;
    struct block_memory all;
    struct dropkv_error error;
    struct dropkv_layer layers[LAYERS];
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout rows = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_cache *cache;
    struct dropkv_stash *stash;
    struct dropkv_buffer *output;
    struct dropkv_client *client = connect_to(server);
    const uint64_t kv_bytes = (uint64_t)KV_HEADS * tokens * DIM * 2;
    const size_t answer_bytes = (size_t)n_layers * KV_HEADS * tokens * sizeof(int32_t);
    make_block(&all, true, tokens * n_layers, 1);
    memset(layers, 0, sizeof(layers));
    for (unsigned l = 0; l < n_layers; l++) {
        layers[l].key = (struct dropkv_view){.buffer = all.buffer,
                                             .offset = all.q_bytes + l * kv_bytes,
                                             .dtype = DROPKV_BF16,
                                             .token_stride = DIM * 2,
                                             .head_stride = (int64_t)tokens * DIM * 2};
        layers[l].value = layers[l].key;
        layers[l].value.offset += n_layers * kv_bytes;
    }
    layout.q_heads = Q_HEADS, layout.kv_heads = KV_HEADS, layout.head_dim = DIM;
    layout.n_layers = n_layers, layout.layers = layers;
    rows.buffer = all.buffer, rows.dtype = DROPKV_BF16, rows.n_layers = n_layers;
    rows.n_slots = 1, rows.n_rows = WINDOW;
    rows.head_stride = DIM * 2, rows.row_stride = Q_HEADS * DIM * 2;
    if (dropkv_buffer_new(answer_bytes, &output, &error) != DROPKV_OK ||
        dropkv_client_add_output(client, output, &error) != DROPKV_OK ||
        dropkv_client_add_buffer(client, all.buffer, &error) != DROPKV_OK ||
        dropkv_cache_add(client, &layout, &cache, &error) != DROPKV_OK ||
        dropkv_stash_add(client, &rows, &stash, &error) != DROPKV_OK)
        die("cache", error.text);
    struct dropkv_prompt ask = DROPKV_PROMPT_INIT;
    ask.cache = cache, ask.stash = stash, ask.n_tokens = (uint32_t)tokens;
    ask.newest_row = WINDOW - 1, ask.q_rows = WINDOW;
    ask.params = params, ask.n_params = 2;
    ask.output = output, ask.output_bytes = answer_bytes;
    const double began = now_us();
    double now = began;
    times.n = queued.n = computed.n = 0;
    while (times.n < SAMPLES && now < began + seconds * 1e6) {
        struct dropkv_result *result;
        const double sent = now_us();
        if (dropkv_score_prompt(client, &ask, &result, &error) != DROPKV_OK)
            die("prompt", error.text);
        now = now_us();
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
           quantile(&times, 0.5), quantile(&times, 0.99), quantile(&queued, 0.5),
           quantile(&computed, 0.5));
    dropkv_client_close(client);
    dropkv_buffer_free(output);
    dkv_bench_cuda_free(all.memory);
}

/* ---- many streams ---- */

struct stream_thread {
    pthread_t thread;
    const struct server *server;
    const struct block_memory *blocks; /* of its streams */
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
        die("request", error.text);
}

static void *drive(void *opaque)
{
    struct stream_thread *t = opaque;
    struct dropkv_client *clients[STREAMS];
    struct dropkv_request requests[STREAMS];
    struct pollfd polls[STREAMS];
    struct dropkv_error error;
    for (unsigned i = 0; i < t->n; i++) {
        clients[i] = connect_to(t->server);
        requests[i] = request_of(&t->blocks[i], t->tokens);
        if (dropkv_client_add_buffer(clients[i], t->blocks[i].buffer, &error) != DROPKV_OK)
            die("buffer", error.text);
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
                die("dispatch", error.text);
            while ((result = dropkv_next_result(clients[i])) != NULL) {
                if (result->status != DROPKV_OK)
                    die("request", result->error_text);
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
static double streams(const struct server *server, const struct block_memory *blocks,
                      uint64_t tokens, const char *what)
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
    const pid_t worker = worker_of(server);
    const double front_us = cpu_us(server->pid), worker_us = cpu_us(worker), began = now_us();
    atomic_store(&measure, true);
    nanosleep(&run, NULL);
    atomic_store(&measure, false);
    const double took = now_us() - began;
    const double front = cpu_us(server->pid) - front_us, work = cpu_us(worker) - worker_us;
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
static double engine_rate(struct engine *e, const struct block_memory *blocks, uint64_t tokens)
{
    struct item items[STREAMS];
    struct dkv_item batch[2][32];
    struct dkv_error err;
    uint64_t n = 0;
    for (unsigned i = 0; i < STREAMS; i++)
        make_item(e, &items[i], &blocks[i], tokens);
    for (unsigned i = 0; i < STREAMS; i++)
        batch[i / 32][i % 32] = items[i].item;
    for (unsigned i = 0; i < 20; i++)
        if (dkv_engine_run(e->ops, e->engine, batch[i % 2], 32, &err) != DKV_OK)
            die("engine", err.text);
    const double began = now_us();
    double now = began;
    if (e->ops->submit(e->engine, batch[1], 32, &err) != DKV_OK)
        die("engine", err.text);
    for (unsigned i = 0; now < began + seconds * 1e6; i++) {
        if (e->ops->submit(e->engine, batch[i % 2], 32, &err) != DKV_OK ||
            e->ops->wait(e->engine, &err) != DKV_OK)
            die("engine", err.text);
        n += 32;
        now = now_us();
    }
    const double rate = (double)n / (now - began) * 1e6;
    (void)e->ops->wait(e->engine, &err);
    for (unsigned i = 0; i < STREAMS; i++)
        free(items[i].item.keep_out);
    printf("    the engine in this process, batches of 32, two in flight: %.0f blocks/s\n", rate);
    return rate;
}

static void many_streams(struct engine *e, const struct server *server, const struct server *single,
                         bool vmm)
{
    const uint64_t tokens = 4096;
    static struct block_memory blocks[STREAMS];
    printf("%u streams of %llu tokens, each a client of its own, %s\n", STREAMS,
           (unsigned long long)tokens, vmm ? "cuda-vmm" : "cuda-ipc");
    for (unsigned i = 0; i < STREAMS; i++)
        make_block(&blocks[i], vmm, tokens, i);
    const double own = engine_rate(e, blocks, tokens);
    const double batched = streams(server, blocks, tokens, "the daemon");
    const double alone = streams(single, blocks, tokens, "limited to one block a batch");
    printf("    %.2f of the engine's, %s %.1f; %.1f times one block a batch, %s %.0f\n",
           batched / own, batched / own >= SHARE_BAR ? "at least" : "BELOW", SHARE_BAR,
           batched / alone, batched / alone >= TIMES_BAR ? "at least" : "BELOW", TIMES_BAR);
    for (unsigned i = 0; i < STREAMS; i++)
        dkv_bench_cuda_free(blocks[i].memory);
}

/* ---- beside a process that keeps the GPU full ---- */

static pid_t start_hog(int *go_out)
{
    int ready[2];
    char byte;
    if (pipe(ready) != 0)
        die("pipe", "no descriptors");
    const pid_t pid = fork(); /* before this process has a context */
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (read(ready[0], &byte, 1) != 1)
            _exit(0);
        bench_hog();
        _exit(1);
    }
    close(ready[0]);
    *go_out = ready[1];
    return pid;
}

static void beside_hog(struct engine *e, const struct server *server, uint64_t tokens)
{
    static struct times here, there;
    struct block_memory blocks[SETS];
    struct item items[SETS];
    struct dropkv_request requests[SETS];
    struct dropkv_client *client = connect_to(server);
    for (unsigned i = 0; i < SETS; i++) {
        struct dropkv_error error;
        make_block(&blocks[i], true, tokens, i);
        make_item(e, &items[i], &blocks[i], tokens);
        requests[i] = request_of(&blocks[i], tokens);
        if (dropkv_client_add_buffer(client, blocks[i].buffer, &error) != DROPKV_OK)
            die("buffer", error.text);
    }
    const double began = now_us();
    here.n = 0;
    for (unsigned i = 0; now_us() < began + seconds * 1e6; i++) {
        const double sent = now_us();
        run_one(e, &items[i % SETS]);
        here.us[here.n++] = now_us() - sent;
    }
    time_requests(client, requests, SETS, &there);
    const double p50 = quantile(&here, 0.5), daemon_p50 = quantile(&there, 0.5);
    printf("    %7llu tokens: engine in this process p50 %.0f us, p99 %.0f; daemon p50 %.0f, p99 "
           "%.0f: %.0f us more, %s %d\n",
           (unsigned long long)tokens, p50, quantile(&here, 0.99), daemon_p50,
           quantile(&there, 0.99), daemon_p50 - p50,
           daemon_p50 - p50 <= OVERHEAD_BAR_US ? "within" : "ABOVE", OVERHEAD_BAR_US);
    dropkv_client_close(client);
    for (unsigned i = 0; i < SETS; i++) {
        dkv_bench_cuda_free(blocks[i].memory);
        free(items[i].item.keep_out);
    }
}

int main(int argc, char **argv)
{
    struct server server, single;
    struct engine engine = {0};
    int go;
    if (argc < 2) {
        fprintf(stderr, "usage: %s DROPKVD [SECONDS]\n", argv[0]);
        return 64;
    }
    program = argv[1];
    seconds = argc > 2 ? atof(argv[2]) : 1;
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (mkdtemp(folder) == NULL)
        die("folder", folder);
    const pid_t hog = start_hog(&go);
    start(&server, "all", "--log-level", "info");
    start(&single, "one", "--max-batch-items", "1");
    open_engine(&engine);
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
    many_streams(&engine, &server, &single, true);
    many_streams(&engine, &server, &single, false);
    printf("beside a process that keeps the GPU full of matrix products\n");
    if (write(go, "", 1) != 1)
        die("hog", "it has gone");
    nanosleep(&(struct timespec){1, 500000000}, NULL); /* until its context is there */
    beside_hog(&engine, &server, 4096);
    beside_hog(&engine, &server, 131072);
    prompt(&server, LAYERS, 4096, ", there");
    kill(hog, SIGKILL);
    waitpid(hog, NULL, 0);
    engine.ops->close(engine.engine);
    stop(&server);
    stop(&single);
    rmdir(folder);
    return 0;
}
