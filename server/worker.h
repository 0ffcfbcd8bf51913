/* One device and the process that runs it, as the front sees it.
 *
 * The process is this program again, started by posix_spawn(): the front never touches a device, so
 * nothing that a device does to a process can take the front down. When the process ends, however,
 * everything in flight there is lost and another one is started, at once the first time, then with
 * growing pauses. After config->worker_deaths in a row without one answered batch the device is
 * given up: a worker on the CPU takes its place if config->fallback_cpu says so, else it is tried
 * again every DKV_WORKER_RETRY_MS.
 *
 * Owner   open/close. A launched run is the worker's until done() or lost().
 * Thread  loop, all calls and all calls back; never from within a call of the backend's, but for
 *         up() within open().
 */
#ifndef DKV_SERVER_WORKER_H
#define DKV_SERVER_WORKER_H

#include "server/config.h"
#include "server/job.h"
#include "server/loan.h"

#include <uv.h>

#define DKV_WORKER_RETRY_MS 10000u

struct dkv_worker;

/* A job's blocks in a batch: all of them, or those whose memory the device holds. */
struct dkv_run_part {
    struct dkv_job *job;
    struct dkv_link_job *descriptor;
};

/* One batch on its way. */
struct dkv_run {
    struct dkv_admission_batch *batch; /* NULL: this place is free */
    struct dkv_run_part *parts;        /* [n_parts] */
    unsigned n_parts;
    uint64_t started_ns, finished_ns; /* with done() */
};

struct dkv_worker_calls {
    void *owner;
    void (*up)(void *owner, unsigned index, const struct dkv_engine_info *info);
    void (*done)(void *owner, unsigned index, struct dkv_run *run, uint64_t scratch_bytes);
    void (*lost)(void *owner, unsigned index, bool for_good);
    void (*attached)(void *owner, unsigned index, uint32_t loan, const struct dkv_error *error);
    void (*detached)(void *owner, unsigned index, uint32_t loan);
};

/* Starts the process and waits for its answer. UNSUPPORTED if it cannot run `device`. `runs` are
 * the DKV_ADMISSION_FLIGHT_MAX that launch() will be called with. */
enum dkv_status dkv_worker_open(const struct dkv_config *config, const char *device, unsigned index,
                                uv_loop_t *loop, struct dkv_arena *arena, struct dkv_run *runs,
                                const struct dkv_worker_calls *calls,
                                struct dkv_worker **worker_out, struct dkv_error *err);

/* Ends the process. What was in flight is gone afterwards, without a call back. */
void dkv_worker_close(struct dkv_worker *worker);

/* Only while it is up. */
void dkv_worker_launch(struct dkv_worker *worker, struct dkv_run *run);
void dkv_worker_attach(struct dkv_worker *worker, const struct dkv_loan *loan);
void dkv_worker_detach(struct dkv_worker *worker, const struct dkv_loan *loan);

/* Only while it is up. Has the process been heard since the last call, or a batch that may still
 * take its time? One with nothing to do is asked to answer by the next call. */
bool dkv_worker_pulse(struct dkv_worker *worker);

/* Its log goes on in a new file of the same name. */
void dkv_worker_hangup(const struct dkv_worker *worker);

/* For metrics. */
struct dkv_worker_facts {
    const char *device; /* in use: "cpu" after a fallback */
    bool fallback;
    bool given_up;
    uint64_t restarts;
    pid_t pid; /* 0: none */

    /* The backend's. */
    const char *backend;     /* the engine's name: "cpu/avx512" */
    const char *description; /* "NVIDIA H200" */
    uint64_t busy_ns;        /* time with a batch */
    uint64_t n_blocks;
    uint64_t scratch_bytes;
    uint64_t mapped_bytes; /* of clients' regions */
};
void dkv_worker_facts(const struct dkv_worker *worker, struct dkv_worker_facts *facts_out);

/* What the process does: main() of `dropkvd --worker`. */
int dkv_worker_main(void);

#endif
