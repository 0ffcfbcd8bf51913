/* The load of dropkv-client bench.
 *
 * Closed loop: each stream always has one request in flight, and a request's latency is what its
 * caller saw. Open loop (--rate): requests are due at fixed times whatever the endpoint does, and
 * latency counts from the time a request was due, so an endpoint that stalls is charged for
 * everybody who had to wait (no coordinated omission). Requests that were due and could not even be
 * sent before the end are counted with the time they had waited by then.
 *
 * With the embedded engine a closed loop times the engine alone, from the start of its batch to the
 * checked answer.
 */
#include "client/cli/bench.h"
#include "client/cli/synth.h"
#include "client/transport.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sysexits.h>
#include <time.h>

#define BLOCK_BYTES_MAX (UINT64_C(1) << 30) /* of all blocks together, if more than one fits */
#define GPU_BYTES_MAX   (UINT64_C(4) << 30)
#define SEED            20261129u

/* ---- blocks ---- */

int64_t dkv_bench_window(const struct dkv_bench_options *o)
{
    struct dkv_params params;
    dkv_params_init(&params);
    for (size_t i = 0; i < o->params.n_params; i++)
        (void)dkv_params_set_text(&params, o->params.params[i].name, o->params.params[i].text,
                                  NULL);
    dkv_params_resolve(&params);
    return params.window > 0 ? params.window : 1;
}

/* Queries are never fp8. */
enum dkv_dtype dkv_bench_query_dtype(const struct dkv_bench_options *o)
{
    return dkv_dtype_bytes(o->dtype) == 1 ? DKV_BF16 : o->dtype;
}

static uint64_t query_elements(const struct dkv_bench_options *o)
{
    return (uint64_t)(o->batch * o->q_heads * o->q_rows * o->head_dim);
}

static uint64_t key_elements(const struct dkv_bench_options *o)
{
    return (uint64_t)(o->batch * o->kv_heads * o->tokens * o->head_dim);
}

static uint64_t value_elements(const struct dkv_bench_options *o)
{
    return (uint64_t)(o->batch * o->kv_heads * o->tokens * o->v_dim);
}

uint64_t dkv_bench_request_bytes(const struct dkv_bench_options *o)
{
    return query_elements(o) * dkv_dtype_bytes(dkv_bench_query_dtype(o)) +
           (key_elements(o) + value_elements(o)) * dkv_dtype_bytes(o->dtype);
}

double dkv_bench_multiply_adds(const struct dkv_bench_options *o)
{
    const int64_t window = dkv_bench_window(o);
    const int64_t rows = window < o->q_rows ? window : o->q_rows;
    return (double)(o->batch * o->q_heads * (rows < o->tokens ? rows : o->tokens)) *
           (double)o->tokens * 2.0 * (double)(o->head_dim + o->v_dim);
}

#define HUGE_PAGE (UINT64_C(2) << 20)

/* Large tensors stand on huge pages where the system has them, as a serving engine's cache arena
 * does: on small ones, scoring would also measure page walks (a tenth of its time in a virtual
 * machine). */
static void *tensor_memory(uint64_t bytes)
{
    if (bytes < HUGE_PAGE)
        return malloc(bytes);
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *memory = aligned_alloc(HUGE_PAGE, bytes);
    if (memory != NULL)
        (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + 63) & ~UINT64_C(63);
}

/* A shared buffer, unless it would make no difference or the command line says otherwise. What is
 * registered always lies in one. */
static bool wants_buffer(const struct dkv_bench *b)
{
    return b->o.memory != NULL ? strcmp(b->o.memory, "memfd") == 0
                               : b->o.layers > 0 || strncmp(b->endpoint, "unix:", 5) == 0;
}

static bool wants_gpu(const struct dkv_bench *b)
{
    return b->o.memory != NULL && strncmp(b->o.memory, "cuda-", 5) == 0;
}

/* Memory of a block's tensors. */
static int make_set(struct dkv_bench *b, struct dkv_block_set *set)
{
    struct dkv_error error;
    struct dropkv_error *err = (struct dropkv_error *)&error;
    const uint64_t query_bytes = aligned(query_elements(&b->o) *
                                         dkv_dtype_bytes(dkv_bench_query_dtype(&b->o)));
    const uint64_t key_bytes = aligned(key_elements(&b->o) * dkv_dtype_bytes(b->o.dtype));
    const uint64_t value_bytes = aligned(value_elements(&b->o) * dkv_dtype_bytes(b->o.dtype));
    if (wants_gpu(b)) {
        if (dkv_bench_cuda_new(strcmp(b->o.memory, "cuda-vmm") == 0,
                               query_bytes + key_bytes + value_bytes, &set->cuda, &set->buffer,
                               &error) != DKV_OK)
            return dkv_fail(NULL, &error);
    } else if (!wants_buffer(b)) {
        set->query = tensor_memory(query_bytes);
        set->key = tensor_memory(key_bytes);
        set->value = tensor_memory(value_bytes);
        if (set->query != NULL && set->key != NULL && set->value != NULL)
            return EX_OK;
        dkv_complain("no memory for %" PRIu64 " bytes of tensors", dkv_bench_request_bytes(&b->o));
        return EX_OSERR;
    }
    if ((set->buffer == NULL && dropkv_buffer_new(query_bytes + key_bytes + value_bytes,
                                                  &set->buffer, err) != DROPKV_OK) ||
        dropkv_client_add_buffer(b->client, set->buffer, err) != DROPKV_OK)
        return dkv_fail(NULL, &error);
    set->query = dropkv_buffer_data(set->buffer);
    set->key = (char *)set->query + query_bytes;
    set->value = (char *)set->key + key_bytes;
    return b->o.layers > 0 ? dkv_bench_register(b, set) : EX_OK;
}

/* The numbers of every set on a GPU are those of one in host memory. */
static int fill_gpu_sets(struct dkv_bench *b, struct dkv_random *random)
{
    struct dkv_error error;
    const struct dkv_block_set *first = &b->sets[0];
    const uint64_t bytes = (uint64_t)((char *)first->value - (char *)first->query) +
                           aligned(value_elements(&b->o) * dkv_dtype_bytes(b->o.dtype));
    char *host = malloc(bytes);
    if (host == NULL)
        return dkv_fail_memory();
    dkv_random_normal(random, dkv_bench_query_dtype(&b->o), host, query_elements(&b->o));
    dkv_random_normal(random, b->o.dtype, host + ((char *)first->key - (char *)first->query),
                      key_elements(&b->o));
    dkv_random_normal(random, b->o.dtype, host + ((char *)first->value - (char *)first->query),
                      value_elements(&b->o));
    int code = EX_OK;
    for (unsigned i = 0; code == EX_OK && i < b->n_sets; i++)
        if (dkv_bench_cuda_write(b->sets[i].cuda, 0, host, bytes, &error) != DKV_OK)
            code = dkv_fail(NULL, &error);
    free(host);
    return code;
}

static int make_blocks(struct dkv_bench *b)
{
    struct dkv_random random;
    const uint64_t bytes = dkv_bench_request_bytes(&b->o);
    const uint64_t room = wants_gpu(b) ? GPU_BYTES_MAX : BLOCK_BYTES_MAX;
    uint64_t n_sets = room / (bytes == 0 ? 1 : bytes);
    const unsigned most = wants_gpu(b) ? DKV_BENCH_GPU_SETS_MAX : DKV_BENCH_SETS_MAX;
    n_sets = n_sets < 1 ? 1 : n_sets > most ? most : n_sets;
    b->n_sets = b->n_streams < n_sets ? b->n_streams : (unsigned)n_sets;
    dkv_random_init(&random, SEED);
    for (unsigned i = 0; i < b->n_sets; i++) {
        struct dkv_block_set *set = &b->sets[i];
        const int code = make_set(b, set);
        if (code != EX_OK)
            return code;
        if (wants_gpu(b))
            continue;
        dkv_random_normal(&random, dkv_bench_query_dtype(&b->o), set->query, query_elements(&b->o));
        dkv_random_normal(&random, b->o.dtype, set->key, key_elements(&b->o));
        dkv_random_normal(&random, b->o.dtype, set->value, value_elements(&b->o));
    }
    return wants_gpu(b) ? fill_gpu_sets(b, &random) : EX_OK;
}

/* ---- sending and receiving ---- */

static struct dropkv_request make_request(struct dkv_bench *b, struct dkv_bench_stream *stream)
{
    const struct dkv_bench_options *o = &b->o;
    const struct dkv_block_set *set = &b->sets[stream->set];
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    request.batch = (uint32_t)o->batch;
    request.q_heads = (uint32_t)o->q_heads;
    request.kv_heads = (uint32_t)o->kv_heads;
    request.head_dim = (uint32_t)o->head_dim;
    request.v_dim = (uint32_t)o->v_dim;
    request.q_rows = (uint64_t)o->q_rows;
    request.n_tokens = (uint64_t)o->tokens;
    request.query.data = set->query;
    request.query.dtype = (enum dropkv_dtype)dkv_bench_query_dtype(o);
    request.key.data = set->key;
    request.key.dtype = (enum dropkv_dtype)o->dtype;
    request.value.data = set->value;
    request.value.dtype = (enum dropkv_dtype)o->dtype;
    request.params = o->params.params;
    request.n_params = o->params.n_params;
    request.user = stream;
    return request;
}

static int send_block(struct dkv_bench *b, struct dkv_bench_stream *stream, int64_t due_ns)
{
    struct dkv_error error;
    struct dropkv_error *err = (struct dropkv_error *)&error;
    const struct dropkv_request request = make_request(b, stream);
    stream->due_ns = due_ns;
    const enum dropkv_status status = b->o.layers > 0
                                          ? dkv_bench_submit_prompt(b, &b->sets[stream->set],
                                                                    stream, err)
                                          : dropkv_submit(b->client, &request, NULL, err);
    if (status != DROPKV_OK)
        return dkv_fail(b->endpoint, &error);
    stream->busy = true;
    b->n_busy++;
    return EX_OK;
}

static int add_sample(struct dkv_bench *b, uint64_t ns)
{
    struct dkv_samples *s = &b->samples;
    if (s->n == s->cap) {
        const size_t cap = s->cap == 0 ? 4096 : 2 * s->cap;
        uint64_t *bigger = reallocarray(s->ns, cap, sizeof(s->ns[0]));
        if (bigger == NULL)
            return dkv_fail_memory();
        s->ns = bigger;
        s->cap = cap;
    }
    s->ns[s->n++] = ns;
    return EX_OK;
}

static void note_error(struct dkv_bench *b, const struct dropkv_result *result)
{
    if (b->n_errors++ > 0)
        return;
    snprintf(b->first_error, sizeof(b->first_error), "%s", result->error_text);
    b->error_code = (int)dkv_status_info((enum dkv_status)result->status)->exit_code;
}

static int take_answer(struct dkv_bench *b, struct dropkv_result *result)
{
    struct dkv_bench_stream *stream = result->user;
    int code = EX_OK;
    stream->busy = false;
    b->n_busy--;
    if (b->measuring && result->status != DROPKV_OK) {
        note_error(b, result);
    } else if (b->measuring) {
        const bool engine_time = b->embedded && b->o.rate == 0;
        const int64_t now_ns = dkv_now_ns();
        code = add_sample(b,
                          engine_time ? result->compute_ns : (uint64_t)(now_ns - stream->due_ns));
        b->n_degraded += result->degraded != 0;
        snprintf(b->backend, sizeof(b->backend), "%s", result->backend);
    }
    /* A server that refuses every request must not be asked a million times a second. */
    if (!b->measuring && result->status != DROPKV_OK && !dropkv_status_retryable(result->status)) {
        dkv_complain("%s: %s", b->endpoint, result->error_text);
        code = (int)dkv_status_info((enum dkv_status)result->status)->exit_code;
    }
    dropkv_result_free(result);
    return code;
}

static int collect(struct dkv_bench *b, int64_t wait_us)
{
    struct dkv_error error;
    struct dropkv_result *result;
    int code = EX_OK;
    if (dropkv_dispatch(b->client, wait_us, (struct dropkv_error *)&error) != DROPKV_OK)
        return dkv_fail(b->endpoint, &error);
    while (code == EX_OK && (result = dropkv_next_result(b->client)) != NULL)
        code = take_answer(b, result);
    return code;
}

static int drain(struct dkv_bench *b)
{
    int code = EX_OK;
    while (code == EX_OK && b->n_busy > 0)
        code = collect(b, -1);
    return code;
}

static struct dkv_bench_stream *idle_stream(struct dkv_bench *b)
{
    if (b->n_busy == b->n_streams)
        return NULL;
    for (unsigned i = 0;; i++)
        if (!b->streams[i].busy)
            return &b->streams[i];
}

/* ---- the two loops ---- */

/* At least one request is sent by every stream, however short the time. */
static int closed_loop(struct dkv_bench *b, double seconds)
{
    const int64_t start_ns = dkv_now_ns();
    const int64_t end_ns = start_ns + (int64_t)(seconds * 1e9);
    uint64_t n_sent = 0;
    int code = EX_OK;
    while (code == EX_OK && (n_sent < b->n_streams || dkv_now_ns() < end_ns)) {
        struct dkv_bench_stream *stream;
        while (code == EX_OK && (stream = idle_stream(b)) != NULL) {
            code = send_block(b, stream, dkv_now_ns());
            n_sent++;
        }
        if (code == EX_OK)
            code = collect(b, -1);
    }
    if (code == EX_OK)
        code = drain(b);
    b->spent_ns = dkv_now_ns() - start_ns;
    return code;
}

static int64_t due_time(const struct dkv_bench *b, int64_t start_ns, uint64_t i)
{
    return start_ns + (int64_t)((double)i * 1e9 / b->o.rate);
}

/* What was due before the end and never left. */
static int count_unsent(struct dkv_bench *b, int64_t start_ns, uint64_t n_sent, int64_t end_ns)
{
    int code = EX_OK;
    const int64_t now_ns = dkv_now_ns();
    for (uint64_t i = n_sent; code == EX_OK && due_time(b, start_ns, i) < end_ns; i++) {
        b->n_unsent++;
        code = add_sample(b, (uint64_t)(now_ns - due_time(b, start_ns, i)));
    }
    return code;
}

/* Waits for an answer, at most until then. */
static int wait_until(struct dkv_bench *b, int64_t until_ns)
{
    const int64_t ns = until_ns - dkv_now_ns();
    if (ns <= 0)
        return collect(b, 0);
    if (b->n_busy > 0)
        return collect(b, ns / 1000 + 1);
    const struct timespec pause = {ns / 1000000000, ns % 1000000000};
    nanosleep(&pause, NULL); /* nothing is in flight, so nothing can be dispatched */
    return EX_OK;
}

static int open_loop(struct dkv_bench *b, double seconds)
{
    const int64_t start_ns = dkv_now_ns();
    const int64_t end_ns = start_ns + (int64_t)(seconds * 1e9);
    uint64_t n_sent = 0;
    int code = EX_OK;
    int64_t now_ns;
    while (code == EX_OK && (now_ns = dkv_now_ns()) < end_ns) {
        int64_t due_ns = due_time(b, start_ns, n_sent);
        struct dkv_bench_stream *stream = NULL;
        while (code == EX_OK && due_ns <= now_ns && (stream = idle_stream(b)) != NULL) {
            code = send_block(b, stream, due_ns);
            due_ns = due_time(b, start_ns, ++n_sent);
        }
        const bool all_busy = b->n_busy == b->n_streams;
        if (code == EX_OK)
            code = wait_until(b, all_busy || due_ns > end_ns ? end_ns : due_ns);
    }
    if (code == EX_OK)
        code = count_unsent(b, start_ns, n_sent, end_ns);
    if (code == EX_OK)
        code = drain(b);
    b->spent_ns = dkv_now_ns() - start_ns;
    return code;
}

int dkv_bench_load(struct dkv_bench *b)
{
    b->streams = calloc(b->n_streams, sizeof(b->streams[0]));
    if (b->streams == NULL)
        return dkv_fail_memory();
    int code = make_blocks(b);
    for (unsigned i = 0; code == EX_OK && i < b->n_streams; i++)
        b->streams[i].set = i % b->n_sets;
    if (code == EX_OK)
        code = closed_loop(b, b->o.warmup_s); /* connections, page faults, clocks */
    if (code != EX_OK)
        return code;
    b->measuring = true;
    return b->o.rate > 0 ? open_loop(b, b->o.duration_s) : closed_loop(b, b->o.duration_s);
}

void dkv_bench_load_fini(struct dkv_bench *b)
{
    for (unsigned i = 0; i < b->n_sets; i++) {
        struct dkv_block_set *set = &b->sets[i];
        if (set->buffer == NULL) {
            free(set->query);
            free(set->key);
            free(set->value);
        }
        if (set->cuda == NULL)
            dropkv_buffer_free(set->buffer);
        dkv_bench_cuda_free(set->cuda);
    }
    free(b->streams);
    free(b->samples.ns);
}
