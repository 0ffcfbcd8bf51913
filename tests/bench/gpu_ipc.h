/* What the parts of bench_gpu_ipc share: one Llama layer in GPU memory of this process, a daemon
 * that it is lent to, and the engine in this process that reads the same memory.
 *
 * Errors  end the program with a line; 77 where there is no GPU, or no daemon on it.
 * Thread  the main thread; several run bench_connect(), bench_request_of() and bench_die().
 */
#ifndef DKV_TESTS_BENCH_GPU_IPC_H
#define DKV_TESTS_BENCH_GPU_IPC_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/dropkv.h"
#include "kernels/cuda/host.h"

enum {
    BENCH_Q_HEADS = 32,
    BENCH_KV_HEADS = 8,
    BENCH_DIM = 128,
    BENCH_WINDOW = 8,
    BENCH_SAMPLES = 200000,
    BENCH_N_PARAMS = 2,
};

/* ---- times ---- */

struct bench_times {
    double us[BENCH_SAMPLES];
    size_t n;
};

double bench_now_us(void);
double bench_quantile(struct bench_times *times, double q); /* sorts them; 0 of none */

__attribute__((noreturn)) void bench_die(const char *what, const char *why);

/* ---- other processes, started before this one has a CUDA context ---- */

struct bench_daemon {
    pid_t pid;
    char endpoint[80];
};

/* Returns when it listens at `path`. */
void bench_daemon_start(struct bench_daemon *server, const char *program, const char *path,
                        const char *option, const char *value);
void bench_daemon_stop(const struct bench_daemon *server);
pid_t bench_worker_of(const struct bench_daemon *server); /* 0: none is up */

/* Processor time that a process has taken. */
double bench_cpu_us(pid_t pid);

/* Keeps the GPU full of matrix products from the first byte written to *go_out until it is killed.
 */
pid_t bench_hog_start(int *go_out);

/* ---- a block in memory that is lent ---- */

struct bench_block {
    struct dkv_bench_cuda *memory;
    struct dropkv_buffer *buffer;
    char *query, *key, *value; /* device addresses */
    uint64_t q_bytes, kv_bytes;
};

/* Freed by dkv_bench_cuda_free(b->memory). */
void bench_block_make(struct bench_block *b, bool vmm, uint64_t tokens, uint32_t seed);

extern const struct dropkv_param bench_params[BENCH_N_PARAMS];
struct dropkv_request bench_request_of(const struct bench_block *b, uint64_t tokens);
struct dropkv_client *bench_connect(const struct bench_daemon *server, uint32_t busy_poll_us);

/* ---- the engine in this process ---- */

struct bench_engine {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    struct dkv_params params;
    enum dkv_status (*time_stages)(struct dkv_engine *, enum dkv_cuda_timing, struct dkv_error *);
    enum dkv_status (*stage_times)(struct dkv_engine *, float *, struct dkv_error *);
};

struct bench_item {
    struct dkv_block block;
    struct dkv_plan plan;
    struct dkv_item item;
};

void bench_engine_open(struct bench_engine *e);

/* The block as the engine sees it; item.keep_out is freed by the caller. */
void bench_item_make(struct bench_engine *e, struct bench_item *to, const struct bench_block *b,
                     uint64_t tokens);
void bench_engine_run(struct bench_engine *e, struct bench_item *item);

/* Wall time of one block, and its device time, as medians over the items in turn. */
void bench_engine_time(struct bench_engine *e, struct bench_item *items, unsigned n,
                       double *wall_out, double *device_out);

/* ---- many streams ---- */

/* Prints the blocks a second that 64 streams get from `server`, beside the engine's own batches and
 * beside `single`, a daemon limited to one block a batch. Each is measured for `seconds`. */
void bench_streams(struct bench_engine *e, const struct bench_daemon *server,
                   const struct bench_daemon *single, bool vmm, double seconds);

#endif
