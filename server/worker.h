/* One device and what runs on it, as the loop sees it.
 *
 * The backend launches batches and hears how they ended, or that the device is lost with everything
 * that was in flight there.
 *
 * Owner   open/close. A launched run is the worker's until done() or lost().
 * Thread  loop, all calls and all calls back; never from within a call of the backend's.
 */
#ifndef DKV_SERVER_WORKER_H
#define DKV_SERVER_WORKER_H

#include "server/config.h"
#include "server/job.h"

#include <uv.h>

struct dkv_worker;

/* One batch on its way. */
struct dkv_run {
    struct dkv_admission_batch *batch; /* NULL: this place is free */
    struct dkv_job **jobs;             /* [n_jobs] */
    unsigned n_jobs;
    unsigned n_blocks;

    /* How it went; done() */
    enum dkv_status status; /* OK: look at each item */
    struct dkv_error error;
    uint64_t started_ns, finished_ns;
};

struct dkv_worker_calls {
    void *owner;
    void (*up)(void *owner, unsigned index, const struct dkv_engine_info *info);
    void (*done)(void *owner, unsigned index, struct dkv_run *run);
    void (*lost)(void *owner, unsigned index, const char *why);
};

/* Opens the engine of `device`; up() has been called when this returns OK. */
enum dkv_status dkv_worker_open(const struct dkv_config *config, const char *device, unsigned index,
                                uv_loop_t *loop, const struct dkv_worker_calls *calls,
                                struct dkv_worker **worker_out, struct dkv_error *err);

/* What was in flight is gone afterwards, without a call back. */
void dkv_worker_close(struct dkv_worker *worker);

/* Starts a run whose jobs' items are ready. */
void dkv_worker_launch(struct dkv_worker *worker, struct dkv_run *run);

#endif
