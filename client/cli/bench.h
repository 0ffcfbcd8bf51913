/* A benchmark's load: what is sent, how, and what came of it. bench.c reads the command line and
 * reports; bench_load.c drives the endpoint.
 *
 * Owner   dkv_bench_load() makes what `sets`, `streams` and `samples` point to,
 *         dkv_bench_load_fini() frees it.
 * Thread  the main thread.
 */
#ifndef DKV_CLIENT_CLI_BENCH_H
#define DKV_CLIENT_CLI_BENCH_H

#include "client/cli/bench_cuda.h"
#include "client/cli/options.h"

/* Different blocks; streams share them where there are more. */
#define DKV_BENCH_SETS_MAX     4u
#define DKV_BENCH_GPU_SETS_MAX 64u /* GPU memory: they hold the same numbers */

struct dkv_bench_options {
    char *endpoint;
    char *format;
    char *dtype_name;
    char *memory; /* NULL, "inline", "memfd", "cuda-vmm" or "cuda-ipc" */
    struct dkv_param_options params;
    enum dkv_dtype dtype;
    int64_t batch;
    int64_t layers; /* of a registered cache, as many as batch says then; 0: plain requests */
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
    int64_t busy_poll_us;
};

/* Latencies. */
struct dkv_samples {
    uint64_t *ns;
    size_t n;
    size_t cap;
};

struct dkv_block_set {
    struct dropkv_buffer *buffer; /* that holds all three; NULL: each is from malloc */
    struct dkv_bench_cuda *cuda;  /* whose buffer that is, and they are device addresses; or NULL */
    void *query;
    void *key;
    void *value;
    struct dropkv_cache *registered; /* with --cache-layers: the client's */
    struct dropkv_stash *stash;
};

/* A place for one request in flight. */
struct dkv_bench_stream {
    int64_t due_ns; /* when it was meant to be sent */
    unsigned set;
    bool busy;
};

struct dkv_bench {
    struct dkv_bench_options o; /* read by bench.c */
    struct dropkv_client *client;
    const char *endpoint;
    bool embedded;
    struct dkv_block_set sets[DKV_BENCH_GPU_SETS_MAX];
    unsigned n_sets;
    struct dkv_bench_stream *streams;
    unsigned n_streams;
    unsigned n_busy;
    bool measuring;

    /* What came of it. */
    struct dkv_samples samples;
    uint64_t n_errors;
    uint64_t n_unsent;
    uint64_t n_degraded;
    char first_error[256];
    int error_code;
    char backend[64];
    int64_t spent_ns; /* the measured time */
};

/* Makes the blocks, warms up and measures. Needs o, client, endpoint, embedded and n_streams. An
 * exit code; what went wrong was said. */
int dkv_bench_load(struct dkv_bench *bench);
void dkv_bench_load_fini(struct dkv_bench *bench);

/* Query rows that the parameters look at. */
int64_t dkv_bench_window(const struct dkv_bench_options *options);

/* Tensor bytes of one request. */
uint64_t dkv_bench_request_bytes(const struct dkv_bench_options *options);

/* What one request costs the engine: two passes over keys and values for every query row used. */
double dkv_bench_multiply_adds(const struct dkv_bench_options *options);

/* bench_prompt.c: with --cache-layers a set is an engine's cache, its layers one behind the other.
 */
int dkv_bench_register(struct dkv_bench *b, struct dkv_block_set *set);
enum dropkv_status dkv_bench_submit_prompt(struct dkv_bench *b, const struct dkv_block_set *set,
                                           void *user, struct dropkv_error *error);

/* Query elements' type: queries are never fp8. */
enum dkv_dtype dkv_bench_query_dtype(const struct dkv_bench_options *o);

#endif
