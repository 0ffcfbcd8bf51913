/* dropkv-client bench: drives an endpoint with synthetic blocks and times it (bench_load.c). */
#include "client/cli/bench.h"
#include "client/cli/commands.h"
#include "client/cli/terminal.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#define STREAMS_MAX       4096
#define OPEN_LOOP_STREAMS 256

/* ---- the command line ---- */

enum {
    OPT_BATCH = 1,
    OPT_LAYERS,
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
    OPT_BUSY_POLL,
};

static bool take_number(struct dkv_bench_options *o, int val, const char *text)
{
    switch (val) {
    case OPT_BATCH: return dkv_option_int("batch", text, 1, DKV_BLOCKS_MAX, &o->batch);
    case OPT_LAYERS: return dkv_option_int("cache-layers", text, 1, 1024, &o->layers);
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
    case OPT_BUSY_POLL: return dkv_option_int("busy-poll", text, 0, 1000000, &o->busy_poll_us);
    default: return false;
    }
}

static int take_option(struct dkv_bench_options *o, poptContext context, int val)
{
    char *text = poptGetOptArg(context);
    if (val >= DKV_OPTION_PARAM)
        return dkv_option_param(&o->params, val, text) ? EX_OK : EX_USAGE;
    const bool taken = take_number(o, val, text);
    free(text);
    return taken ? EX_OK : EX_USAGE;
}

static int check_options(struct dkv_bench_options *o)
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
    if (o->memory != NULL && strcmp(o->memory, "inline") != 0 && strcmp(o->memory, "memfd") != 0 &&
        strcmp(o->memory, "cuda-vmm") != 0 && strcmp(o->memory, "cuda-ipc") != 0) {
        dkv_complain("--memory: '%s' is not one of inline, memfd, cuda-vmm, cuda-ipc", o->memory);
        return EX_USAGE;
    }
    if (o->layers > 0 &&
        (o->batch != 1 || (o->memory != NULL && strcmp(o->memory, "inline") == 0))) {
        dkv_complain("--cache-layers: not together with %s",
                     o->batch != 1 ? "--batch" : "--memory inline");
        return EX_USAGE;
    }
    if (o->layers > 0)
        o->batch = o->layers; /* as many blocks */
    if (o->v_dim == 0)
        o->v_dim = o->head_dim;
    if (o->q_rows == 0)
        o->q_rows = dkv_bench_window(o);
    return EX_OK;
}

static int read_command_line(struct dkv_bench_options *o, poptContext context)
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

/* ---- reporting ---- */

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Nearest rank, in microseconds. Samples are sorted. */
static double percentile(const struct dkv_samples *s, double p)
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

static struct figures work_out(struct dkv_bench *b)
{
    struct dkv_samples *s = &b->samples;
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
    f.bytes_per_s = requests_per_s * (double)dkv_bench_request_bytes(&b->o);
    f.multiply_adds_per_s = b->embedded ? requests_per_s * dkv_bench_multiply_adds(&b->o) : 0;
    return f;
}

static int print_json(const struct dkv_bench *b, const struct figures *f)
{
    const struct dkv_bench_options *o = &b->o;
    json_t *json = json_pack(
        "{s:s, s:s, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I}, s:I, s:f, s:f,"
        " s:{s:f, s:f, s:f, s:f, s:f}, s:f, s:f, s:f, s:I, s:I, s:I, s:I}",
        "endpoint", b->endpoint, "backend", b->backend, "block", "batch", (json_int_t)o->batch,
        "q_heads", (json_int_t)o->q_heads, "kv_heads", (json_int_t)o->kv_heads, "head_dim",
        (json_int_t)o->head_dim, "v_dim", (json_int_t)o->v_dim, "tokens", (json_int_t)o->tokens,
        "q_rows", (json_int_t)o->q_rows, "dtype", dkv_dtype_name(o->dtype), "bytes",
        (json_int_t)dkv_bench_request_bytes(o), "streams", (json_int_t)b->n_streams, "rate",
        o->rate, "duration_s", (double)b->spent_ns / 1e9, "latency_us", "p50", f->p50, "p90",
        f->p90, "p99", f->p99, "max", f->max, "mean", f->mean, "blocks_per_s", f->blocks_per_s,
        "tokens_per_s", f->tokens_per_s, "bytes_per_s", f->bytes_per_s, "requests",
        (json_int_t)(b->samples.n - b->n_unsent), "errors", (json_int_t)b->n_errors, "unsent",
        (json_int_t)b->n_unsent, "degraded", (json_int_t)b->n_degraded);
    if (json != NULL && b->embedded)
        json_object_set_new(json, "multiply_adds_per_s", json_real(f->multiply_adds_per_s));
    const int failed = json == NULL ||
                       json_dumpf(json, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) != 0;
    json_decref(json);
    return failed || puts("") == EOF ? EX_IOERR : EX_OK;
}

static int print_table(const struct dkv_bench *b, const struct figures *f)
{
    const struct dkv_bench_options *o = &b->o;
    printf("block      %" PRId64 " x %" PRId64 "/%" PRId64 " heads, %s tokens, dim %" PRId64
           ", %s, %.1f MB\n",
           o->batch, o->q_heads, o->kv_heads, dkv_grouped((uint64_t)o->tokens), o->head_dim,
           dkv_dtype_name(o->dtype), (double)dkv_bench_request_bytes(o) / 1e6);
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

static int report(struct dkv_bench *b)
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

static int run(struct dkv_bench *b)
{
    struct dkv_error error;
    const int64_t streams = b->o.streams != 0 ? b->o.streams
                            : b->o.rate > 0   ? OPEN_LOOP_STREAMS
                                              : 1;
    b->n_streams = (unsigned)streams;
    const struct dropkv_client_options options = {
        .struct_size = sizeof(options),
        .max_in_flight = b->n_streams,
        .max_connections = b->n_streams < 1024 ? b->n_streams : 1024,
        .busy_poll_us = (uint32_t)b->o.busy_poll_us,
        .max_retries = -1, /* every failure counts */
    };
    if (dkv_open_endpoint(b->o.endpoint, &options, &b->client, &b->endpoint, &error) != DKV_OK)
        return dkv_fail(b->o.endpoint, &error);
    b->embedded = strncmp(b->endpoint, "embedded:", 9) == 0;
    const int code = dkv_bench_load(b);
    return code == EX_OK ? report(b) : code;
}

static void bench_fini(struct dkv_bench *b)
{
    dropkv_client_close(b->client); /* before the buffers that it borrows */
    dkv_bench_load_fini(b);
    dkv_param_options_fini(&b->o.params);
    free(b->o.endpoint);
    free(b->o.format);
    free(b->o.dtype_name);
    free(b->o.memory);
}

int dkv_cmd_bench(int argc, const char **argv)
{
    struct dkv_bench b = {
        .o = {.batch = 1,
              .q_heads = 32,
              .kv_heads = 8,
              .head_dim = 128,
              .tokens = 8192,
              .duration_s = 5,
              .warmup_s = 0.5},
    };
    struct dkv_bench_options *o = &b.o;
    // clang-format off
    struct poptOption block[] = {
        {"batch", 0, POPT_ARG_STRING, NULL, OPT_BATCH, "Sequences in one request (1)", "N"},
        {"cache-layers", 0, POPT_ARG_STRING, NULL, OPT_LAYERS, "Layers of a registered cache in one request, instead of sequences; not over HTTP", "N"},
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
        {"memory", 0, POPT_ARG_STRING, &o->memory, 0, "Where tensors lie: memfd, cuda-vmm or cuda-ipc, which a daemon at unix:/// reads in place (memfd by default there), or inline", "KIND"},
        {"streams", 0, POPT_ARG_STRING, NULL, OPT_STREAMS, "Requests in flight (1; with --rate at most 256)", "N"},
        {"rate", 0, POPT_ARG_STRING, NULL, OPT_RATE, "Open loop: requests due per second", "X"},
        {"duration", 0, POPT_ARG_STRING, NULL, OPT_DURATION, "Seconds to measure (5)", "X"},
        {"busy-poll", 0, POPT_ARG_STRING, NULL, OPT_BUSY_POLL, "Microseconds to look for an answer before sleeping (0)", "N"},
        {"warmup", 0, POPT_ARG_STRING, NULL, OPT_WARMUP, "Seconds before that (0.5)", "X"},
        POPT_TABLEEND,
    };
    struct poptOption table[] = {
        {"endpoint", 'e', POPT_ARG_STRING, &o->endpoint, 0, "unix:///PATH, http://HOST:PORT, or embedded: for the engine in this program", "URL"},
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
