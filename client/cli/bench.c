/* dropkv-client bench: drives an endpoint with synthetic blocks and times it.
 *
 * Closed loop: each of --streams always has one request in flight, and a request's latency is what
 * its caller saw. Open loop (--rate): requests are due at fixed times whatever the endpoint does,
 * and latency counts from the time a request was due, so an endpoint that stalls is charged for
 * everybody who had to wait (no coordinated omission). Requests that were due and could not even be
 * sent before the end are counted with the time they had waited by then.
 *
 * With the embedded engine a closed loop times the engine alone, from the start of its batch to the
 * checked answer.
 */
#include "client/cli/commands.h"
#include "client/cli/options.h"
#include "client/cli/synth.h"
#include "client/cli/terminal.h"
#include "client/tensor_file.h"
#include "client/transport.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <time.h>

/* Memory for tensors; streams share blocks where one each would take more. */
#define BLOCK_SETS_MAX  4u
#define BLOCK_BYTES_MAX (UINT64_C(1) << 30)

#define STREAMS_MAX       4096
#define OPEN_LOOP_STREAMS 256
#define SEED              20261129u

struct options {
    char *endpoint;
    char *format;
    char *dtype_name;
    struct dkv_param_options params;
    enum dkv_dtype dtype;
    int64_t batch;
    int64_t q_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t v_dim;
    int64_t tokens;
    int64_t q_rows;
    int64_t streams; /* 0: not given */
    double rate;     /* blocks a second; 0: closed loop */
    double duration_s;
    double warmup_s;
};

struct samples {
    uint64_t *ns;
    size_t n;
    size_t cap;
};

struct block_set {
    void *query;
    void *key;
    void *value;
};

/* One request in flight. */
struct stream {
    int64_t due_ns; /* when it was meant to be sent */
    unsigned set;
    bool busy;
};

struct bench {
    struct options o;
    struct dropkv_client *client;
    const char *endpoint;
    bool embedded;
    struct block_set sets[BLOCK_SETS_MAX];
    unsigned n_sets;
    struct stream *streams;
    unsigned n_streams;
    unsigned n_busy;
    bool measuring;
    struct samples samples;
    uint64_t n_errors;
    uint64_t n_unsent;
    uint64_t n_degraded;
    char first_error[256];
    int error_code;
    char backend[64];
    int64_t spent_ns; /* the measured time */
};

/* ---- the command line ---- */

enum {
    OPT_BATCH = 1,
    OPT_Q_HEADS,
    OPT_KV_HEADS,
    OPT_HEAD_DIM,
    OPT_V_DIM,
    OPT_TOKENS,
    OPT_Q_ROWS,
    OPT_STREAMS,
    OPT_RATE,
    OPT_DURATION,
    OPT_WARMUP,
};

static bool take_number(struct options *o, int val, const char *text)
{
    switch (val) {
    case OPT_BATCH: return dkv_option_int("batch", text, 1, DKV_BLOCKS_MAX, &o->batch);
    case OPT_Q_HEADS: return dkv_option_int("q-heads", text, 1, DKV_HEADS_MAX, &o->q_heads);
    case OPT_KV_HEADS: return dkv_option_int("kv-heads", text, 1, DKV_HEADS_MAX, &o->kv_heads);
    case OPT_HEAD_DIM: return dkv_option_int("head-dim", text, 8, DKV_HEAD_DIM_MAX, &o->head_dim);
    case OPT_V_DIM: return dkv_option_int("v-dim", text, 8, DKV_HEAD_DIM_MAX, &o->v_dim);
    case OPT_TOKENS: return dkv_option_int("tokens", text, 1, DKV_TOKENS_MAX, &o->tokens);
    case OPT_Q_ROWS: return dkv_option_int("q-rows", text, 1, 65536, &o->q_rows);
    case OPT_STREAMS: return dkv_option_int("streams", text, 1, STREAMS_MAX, &o->streams);
    case OPT_RATE: return dkv_option_real("rate", text, 1e-3, 1e7, &o->rate);
    case OPT_DURATION: return dkv_option_real("duration", text, 1e-3, 86400, &o->duration_s);
    case OPT_WARMUP: return dkv_option_real("warmup", text, 0, 86400, &o->warmup_s);
    default: return false;
    }
}

static int take_option(struct options *o, poptContext context, int val)
{
    char *text = poptGetOptArg(context);
    if (val >= DKV_OPTION_PARAM)
        return dkv_option_param(&o->params, val, text) ? EX_OK : EX_USAGE;
    const bool taken = take_number(o, val, text);
    free(text);
    return taken ? EX_OK : EX_USAGE;
}

/* As many query rows as the window looks at, unless told otherwise. */
static int64_t default_q_rows(const struct options *o)
{
    struct dkv_params params;
    dkv_params_init(&params);
    for (size_t i = 0; i < o->params.n_params; i++)
        (void)dkv_params_set_text(&params, o->params.params[i].name, o->params.params[i].text,
                                  NULL);
    dkv_params_resolve(&params);
    return params.window > 0 ? params.window : 1;
}

static int check_options(struct options *o)
{
    o->dtype = dkv_dtype_parse(o->dtype_name != NULL ? o->dtype_name : "bf16");
    if (o->dtype == DKV_DTYPE_NONE) {
        dkv_complain("--dtype: '%s' is not one of bf16, fp16, fp32, f8_e4m3, f8_e5m2",
                     o->dtype_name);
        return EX_USAGE;
    }
    if (o->format != NULL && strcmp(o->format, "table") != 0 && strcmp(o->format, "json") != 0) {
        dkv_complain("--format: '%s' is not one of table, json", o->format);
        return EX_USAGE;
    }
    if (o->v_dim == 0)
        o->v_dim = o->head_dim;
    if (o->q_rows == 0)
        o->q_rows = default_q_rows(o);
    return EX_OK;
}

static int read_command_line(struct options *o, poptContext context)
{
    int val;
    int code = EX_OK;
    while (code == EX_OK && (val = poptGetNextOpt(context)) >= 0)
        if (val > 0)
            code = take_option(o, context, val);
    if (code == EX_OK && val < -1)
        return dkv_fail_usage(context, val);
    if (code == EX_OK && poptPeekArg(context) != NULL) {
        dkv_complain("'%s': no argument was expected", poptPeekArg(context));
        return EX_USAGE;
    }
    return code == EX_OK ? check_options(o) : code;
}

/* ---- blocks ---- */

/* Queries are never fp8. */
static enum dkv_dtype query_dtype(const struct options *o)
{
    return dkv_dtype_bytes(o->dtype) == 1 ? DKV_BF16 : o->dtype;
}

static uint64_t query_elements(const struct options *o)
{
    return (uint64_t)(o->batch * o->q_heads * o->q_rows * o->head_dim);
}

static uint64_t key_elements(const struct options *o)
{
    return (uint64_t)(o->batch * o->kv_heads * o->tokens * o->head_dim);
}

static uint64_t value_elements(const struct options *o)
{
    return (uint64_t)(o->batch * o->kv_heads * o->tokens * o->v_dim);
}

static uint64_t request_bytes(const struct options *o)
{
    return query_elements(o) * dkv_dtype_bytes(query_dtype(o)) +
           (key_elements(o) + value_elements(o)) * dkv_dtype_bytes(o->dtype);
}

/* What one request costs the engine: two passes over keys and values for every query row used. */
static double multiply_adds(const struct options *o)
{
    const int64_t window = default_q_rows(o);
    const int64_t rows = window < o->q_rows ? window : o->q_rows;
    return (double)(o->batch * o->q_heads * (rows < o->tokens ? rows : o->tokens)) *
           (double)o->tokens * 2.0 * (double)(o->head_dim + o->v_dim);
}

static void *random_tensor(struct dkv_random *random, enum dkv_dtype dtype, uint64_t elements)
{
    void *tensor = malloc(elements * dkv_dtype_bytes(dtype));
    if (tensor != NULL)
        dkv_random_normal(random, dtype, tensor, elements);
    return tensor;
}

static int make_blocks(struct bench *b)
{
    struct dkv_random random;
    const uint64_t bytes = request_bytes(&b->o);
    uint64_t n_sets = BLOCK_BYTES_MAX / (bytes == 0 ? 1 : bytes);
    n_sets = n_sets < 1 ? 1 : n_sets > BLOCK_SETS_MAX ? BLOCK_SETS_MAX : n_sets;
    b->n_sets = b->n_streams < n_sets ? b->n_streams : (unsigned)n_sets;
    dkv_random_init(&random, SEED);
    for (unsigned i = 0; i < b->n_sets; i++) {
        struct block_set *set = &b->sets[i];
        set->query = random_tensor(&random, query_dtype(&b->o), query_elements(&b->o));
        set->key = random_tensor(&random, b->o.dtype, key_elements(&b->o));
        set->value = random_tensor(&random, b->o.dtype, value_elements(&b->o));
        if (set->query == NULL || set->key == NULL || set->value == NULL) {
            dkv_complain("no memory for %" PRIu64 " bytes of tensors", bytes);
            return EX_OSERR;
        }
    }
    return EX_OK;
}

/* ---- sending and receiving ---- */

static struct dropkv_request make_request(struct bench *b, struct stream *stream)
{
    const struct options *o = &b->o;
    const struct block_set *set = &b->sets[stream->set];
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    request.batch = (uint32_t)o->batch;
    request.q_heads = (uint32_t)o->q_heads;
    request.kv_heads = (uint32_t)o->kv_heads;
    request.head_dim = (uint32_t)o->head_dim;
    request.v_dim = (uint32_t)o->v_dim;
    request.q_rows = (uint64_t)o->q_rows;
    request.n_tokens = (uint64_t)o->tokens;
    request.query.data = set->query;
    request.query.dtype = (enum dropkv_dtype)query_dtype(o);
    request.key.data = set->key;
    request.key.dtype = (enum dropkv_dtype)o->dtype;
    request.value.data = set->value;
    request.value.dtype = (enum dropkv_dtype)o->dtype;
    request.params = o->params.params;
    request.n_params = o->params.n_params;
    request.user = stream;
    return request;
}

static int send_block(struct bench *b, struct stream *stream, int64_t due_ns)
{
    struct dkv_error error;
    const struct dropkv_request request = make_request(b, stream);
    stream->due_ns = due_ns;
    if (dropkv_submit(b->client, &request, NULL, (struct dropkv_error *)&error) != DROPKV_OK)
        return dkv_fail(b->endpoint, &error);
    stream->busy = true;
    b->n_busy++;
    return EX_OK;
}

static int add_sample(struct bench *b, uint64_t ns)
{
    struct samples *s = &b->samples;
    if (s->n == s->cap) {
        const size_t cap = s->cap == 0 ? 4096 : 2 * s->cap;
        uint64_t *bigger = reallocarray(s->ns, cap, sizeof(s->ns[0]));
        if (bigger == NULL)
            return EX_OSERR;
        s->ns = bigger;
        s->cap = cap;
    }
    s->ns[s->n++] = ns;
    return EX_OK;
}

static void note_error(struct bench *b, const struct dropkv_result *result)
{
    if (b->n_errors++ > 0)
        return;
    snprintf(b->first_error, sizeof(b->first_error), "%s", result->error_text);
    b->error_code = (int)dkv_status_info((enum dkv_status)result->status)->exit_code;
}

static int take_answer(struct bench *b, struct dropkv_result *result)
{
    struct stream *stream = result->user;
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

static int collect(struct bench *b, int64_t wait_us)
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

static int drain(struct bench *b)
{
    int code = EX_OK;
    while (code == EX_OK && b->n_busy > 0)
        code = collect(b, -1);
    return code;
}

static struct stream *idle_stream(struct bench *b)
{
    if (b->n_busy == b->n_streams)
        return NULL;
    for (unsigned i = 0;; i++)
        if (!b->streams[i].busy)
            return &b->streams[i];
}

/* ---- the two loops ---- */

/* At least one request is sent by every stream, however short the time. */
static int closed_loop(struct bench *b, double seconds)
{
    const int64_t start_ns = dkv_now_ns();
    const int64_t end_ns = start_ns + (int64_t)(seconds * 1e9);
    uint64_t n_sent = 0;
    int code = EX_OK;
    while (code == EX_OK && (n_sent < b->n_streams || dkv_now_ns() < end_ns)) {
        struct stream *stream;
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

static int64_t due_time(const struct bench *b, int64_t start_ns, uint64_t i)
{
    return start_ns + (int64_t)((double)i * 1e9 / b->o.rate);
}

/* What was due before the end and never left. */
static int count_unsent(struct bench *b, int64_t start_ns, uint64_t n_sent, int64_t end_ns)
{
    int code = EX_OK;
    const int64_t now_ns = dkv_now_ns();
    for (uint64_t i = n_sent; code == EX_OK && due_time(b, start_ns, i) < end_ns; i++) {
        b->n_unsent++;
        code = add_sample(b, (uint64_t)(now_ns - due_time(b, start_ns, i)));
    }
    return code;
}

static int open_loop(struct bench *b, double seconds)
{
    const int64_t start_ns = dkv_now_ns();
    const int64_t end_ns = start_ns + (int64_t)(seconds * 1e9);
    uint64_t n_sent = 0;
    int code = EX_OK;
    int64_t now_ns;
    while (code == EX_OK && (now_ns = dkv_now_ns()) < end_ns) {
        struct stream *stream;
        while (code == EX_OK && due_time(b, start_ns, n_sent) <= now_ns &&
               (stream = idle_stream(b)) != NULL) {
            code = send_block(b, stream, due_time(b, start_ns, n_sent));
            n_sent++;
        }
        const int64_t due_ns = due_time(b, start_ns, n_sent);
        const int64_t until_ns = due_ns < end_ns ? due_ns : end_ns;
        int64_t wait_us = b->n_busy == b->n_streams ? -1 : (until_ns - dkv_now_ns()) / 1000;
        if (code == EX_OK && b->n_busy == 0) { /* dispatch does not wait when nothing is out */
            const int64_t ns = until_ns - dkv_now_ns();
            const struct timespec pause = {ns / 1000000000, ns % 1000000000};
            if (ns > 0)
                nanosleep(&pause, NULL);
        } else if (code == EX_OK) {
            code = collect(b, wait_us < 0 && b->n_busy < b->n_streams ? 0 : wait_us);
        }
    }
    if (code == EX_OK && b->measuring)
        code = count_unsent(b, start_ns, n_sent, end_ns);
    if (code == EX_OK)
        code = drain(b);
    b->spent_ns = dkv_now_ns() - start_ns;
    return code;
}

static int run_load(struct bench *b)
{
    int code = closed_loop(b, b->o.warmup_s); /* connections, page faults, clocks */
    if (code != EX_OK)
        return code;
    b->measuring = true;
    return b->o.rate > 0 ? open_loop(b, b->o.duration_s) : closed_loop(b, b->o.duration_s);
}

/* ---- reporting ---- */

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Nearest rank, in microseconds. Samples are sorted. */
static double percentile(const struct samples *s, double p)
{
    if (s->n == 0)
        return 0;
    const size_t rank = (size_t)(p * (double)s->n + 0.999999);
    return (double)s->ns[rank < 1 ? 0 : rank > s->n ? s->n - 1 : rank - 1] / 1e3;
}

struct figures {
    double p50, p90, p99, max, mean;
    double blocks_per_s;
    double tokens_per_s;
    double bytes_per_s;
    double multiply_adds_per_s; /* embedded only */
};

static struct figures work_out(struct bench *b)
{
    struct samples *s = &b->samples;
    struct figures f = {0};
    double sum_ns = 0;
    if (s->n > 0)
        qsort(s->ns, s->n, sizeof(s->ns[0]), by_value);
    for (size_t i = 0; i < s->n; i++)
        sum_ns += (double)s->ns[i];
    f.p50 = percentile(s, 0.50);
    f.p90 = percentile(s, 0.90);
    f.p99 = percentile(s, 0.99);
    f.max = percentile(s, 1.0);
    f.mean = s->n == 0 ? 0 : sum_ns / (double)s->n / 1e3;
    const double requests_per_s = (double)(s->n - b->n_unsent) / ((double)b->spent_ns / 1e9);
    f.blocks_per_s = requests_per_s * (double)b->o.batch;
    f.tokens_per_s = f.blocks_per_s * (double)b->o.tokens;
    f.bytes_per_s = requests_per_s * (double)request_bytes(&b->o);
    f.multiply_adds_per_s = b->embedded ? requests_per_s * multiply_adds(&b->o) : 0;
    return f;
}

static int print_json(const struct bench *b, const struct figures *f)
{
    const struct options *o = &b->o;
    json_t *json = json_pack(
        "{s:s, s:s, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I}, s:I, s:f, s:f,"
        " s:{s:f, s:f, s:f, s:f, s:f}, s:f, s:f, s:f, s:I, s:I, s:I, s:I}",
        "endpoint", b->endpoint, "backend", b->backend, "block", "batch", (json_int_t)o->batch,
        "q_heads", (json_int_t)o->q_heads, "kv_heads", (json_int_t)o->kv_heads, "head_dim",
        (json_int_t)o->head_dim, "v_dim", (json_int_t)o->v_dim, "tokens", (json_int_t)o->tokens,
        "q_rows", (json_int_t)o->q_rows, "dtype", dkv_dtype_name(o->dtype), "bytes",
        (json_int_t)request_bytes(o), "streams", (json_int_t)b->n_streams, "rate", o->rate,
        "duration_s", (double)b->spent_ns / 1e9, "latency_us", "p50", f->p50, "p90", f->p90, "p99",
        f->p99, "max", f->max, "mean", f->mean, "blocks_per_s", f->blocks_per_s, "tokens_per_s",
        f->tokens_per_s, "bytes_per_s", f->bytes_per_s, "requests",
        (json_int_t)(b->samples.n - b->n_unsent), "errors", (json_int_t)b->n_errors, "unsent",
        (json_int_t)b->n_unsent, "degraded", (json_int_t)b->n_degraded);
    if (json != NULL && b->embedded)
        json_object_set_new(json, "multiply_adds_per_s", json_real(f->multiply_adds_per_s));
    const int failed = json == NULL ||
                       json_dumpf(json, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0;
    json_decref(json);
    return failed || puts("") == EOF ? EX_IOERR : EX_OK;
}

static int print_table(const struct bench *b, const struct figures *f)
{
    const struct options *o = &b->o;
    printf("block      %" PRId64 " x %" PRId64 "/%" PRId64 " heads, %s tokens, dim %" PRId64
           ", %s, %.1f MB\n",
           o->batch, o->q_heads, o->kv_heads, dkv_grouped((uint64_t)o->tokens), o->head_dim,
           dkv_dtype_name(o->dtype), (double)request_bytes(o) / 1e6);
    printf("endpoint   %s (%s)\n", b->endpoint, b->backend);
    if (o->rate > 0)
        printf("load       %g blocks/s asked for, latency from the time each was due\n", o->rate);
    else
        printf("load       %u stream%s, each always waiting for one answer\n", b->n_streams,
               b->n_streams == 1 ? "" : "s");
    printf("latency    p50 %.1f us, p90 %.1f us, p99 %.1f us, max %.1f us\n", f->p50, f->p90,
           f->p99, f->max);
    printf("rate       %.1f blocks/s, %s tokens/s, %.2f GB/s\n", f->blocks_per_s,
           dkv_grouped((uint64_t)f->tokens_per_s), f->bytes_per_s / 1e9);
    if (b->embedded)
        printf("work       %.1f G multiply-adds/s\n", f->multiply_adds_per_s / 1e9);
    printf("requests   %s answered, %s errors", dkv_grouped(b->samples.n - b->n_unsent),
           dkv_grouped(b->n_errors));
    if (b->n_unsent > 0)
        printf(", %s due but never sent", dkv_grouped(b->n_unsent));
    if (b->n_degraded > 0)
        printf(", %s degraded", dkv_grouped(b->n_degraded));
    puts("");
    return fflush(stdout) == 0 ? EX_OK : EX_IOERR;
}

static int report(struct bench *b)
{
    const struct figures f = work_out(b);
    const bool json = b->o.format != NULL && strcmp(b->o.format, "json") == 0;
    int code = json ? print_json(b, &f) : print_table(b, &f);
    if (b->n_errors > 0)
        dkv_complain("%s errors, the first: %s", dkv_grouped(b->n_errors), b->first_error);
    if (code == EX_OK && b->samples.n == b->n_unsent)
        code = b->error_code; /* nothing at all was answered */
    return code;
}

/* ---- the command ---- */

static int run(struct bench *b)
{
    struct dkv_error error;
    const int64_t streams = b->o.streams != 0 ? b->o.streams
                            : b->o.rate > 0   ? OPEN_LOOP_STREAMS
                                              : 1;
    b->n_streams = (unsigned)streams;
    b->streams = calloc(b->n_streams, sizeof(b->streams[0]));
    if (b->streams == NULL)
        return EX_OSERR;
    const struct dropkv_client_options options = {
        .struct_size = sizeof(options),
        .max_in_flight = b->n_streams,
        .max_connections = b->n_streams < 1024 ? b->n_streams : 1024,
        .max_retries = -1, /* every failure counts */
    };
    if (dkv_open_endpoint(b->o.endpoint, &options, &b->client, &b->endpoint, &error) != DKV_OK)
        return dkv_fail(b->o.endpoint, &error);
    b->embedded = strncmp(b->endpoint, "embedded:", 9) == 0;
    int code = make_blocks(b);
    for (unsigned i = 0; code == EX_OK && i < b->n_streams; i++)
        b->streams[i].set = i % b->n_sets;
    if (code == EX_OK)
        code = run_load(b);
    return code == EX_OK ? report(b) : code;
}

static void bench_fini(struct bench *b)
{
    dropkv_client_close(b->client);
    for (unsigned i = 0; i < b->n_sets; i++) {
        free(b->sets[i].query);
        free(b->sets[i].key);
        free(b->sets[i].value);
    }
    free(b->streams);
    free(b->samples.ns);
    dkv_param_options_fini(&b->o.params);
    free(b->o.endpoint);
    free(b->o.format);
    free(b->o.dtype_name);
}

int dkv_cmd_bench(int argc, const char **argv)
{
    struct bench b = {
        .o = {.batch = 1,
              .q_heads = 32,
              .kv_heads = 8,
              .head_dim = 128,
              .tokens = 8192,
              .duration_s = 5,
              .warmup_s = 0.5},
    };
    struct options *o = &b.o;
    // clang-format off
    struct poptOption block[] = {
        {"batch", 0, POPT_ARG_STRING, NULL, OPT_BATCH, "Sequences in one request (1)", "N"},
        {"q-heads", 0, POPT_ARG_STRING, NULL, OPT_Q_HEADS, "Query heads (32)", "N"},
        {"kv-heads", 0, POPT_ARG_STRING, NULL, OPT_KV_HEADS, "KV heads (8)", "N"},
        {"head-dim", 0, POPT_ARG_STRING, NULL, OPT_HEAD_DIM, "Dimension of a head (128)", "N"},
        {"v-dim", 0, POPT_ARG_STRING, NULL, OPT_V_DIM, "Dimension of values (that of a head)", "N"},
        {"tokens", 0, POPT_ARG_STRING, NULL, OPT_TOKENS, "Cached tokens (8192)", "N"},
        {"q-rows", 0, POPT_ARG_STRING, NULL, OPT_Q_ROWS, "Query rows (the window)", "N"},
        {"dtype", 0, POPT_ARG_STRING, &o->dtype_name, 0, "bf16 (default), fp16, fp32, f8_e4m3 or f8_e5m2", "TYPE"},
        POPT_TABLEEND,
    };
    struct poptOption load[] = {
        {"streams", 0, POPT_ARG_STRING, NULL, OPT_STREAMS, "Requests in flight (1; with --rate at most 256)", "N"},
        {"rate", 0, POPT_ARG_STRING, NULL, OPT_RATE, "Open loop: requests due per second", "X"},
        {"duration", 0, POPT_ARG_STRING, NULL, OPT_DURATION, "Seconds to measure (5)", "X"},
        {"warmup", 0, POPT_ARG_STRING, NULL, OPT_WARMUP, "Seconds before that (0.5)", "X"},
        POPT_TABLEEND,
    };
    struct poptOption table[] = {
        {"endpoint", 'e', POPT_ARG_STRING, &o->endpoint, 0, "http://HOST:PORT, or embedded: for the engine in this program", "URL"},
        {"format", 'f', POPT_ARG_STRING, &o->format, 0, "table or json", "FORMAT"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, block, 0, "Block:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, load, 0, "Load:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, dkv_param_option_table(), 0, "Scoring parameters:", NULL},
        POPT_AUTOHELP
        POPT_TABLEEND,
    };
    // clang-format on
    poptContext context = poptGetContext("dropkv-client bench", argc, argv, table, 0);
    int code = read_command_line(o, context);
    if (code == EX_OK)
        code = run(&b);
    bench_fini(&b);
    poptFreeContext(context);
    return code;
}
