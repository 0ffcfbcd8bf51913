/* The seam behind which the work is done: jobs go in, ended jobs come out.
 *
 * Today an engine on one thread of the daemon stands behind it; a worker process per device can
 * take its place without a change to anything above. So it is narrow: no engine type shows, and a
 * job is all that crosses.
 *
 * A first-in-first-out queue bounded by count. The thread takes a batch of jobs whenever it is idle
 * (work-conserving: no job waits for company), runs it, and hands the jobs to the loop, where each
 * job's done() is called. A job ends in exactly one done().
 *
 * Owner   open/close. A submitted job is the backend's until its done().
 * Thread  loop, all calls and every done().
 */
#ifndef DKV_SERVER_BACKEND_H
#define DKV_SERVER_BACKEND_H

#include "server/config.h"
#include "server/job.h"

#include <uv.h>

struct dkv_backend;

struct dkv_backend_info {
    struct dkv_engine_info engine;
    unsigned n_queued;
    unsigned n_running;
};

/* Starts the thread and opens the engine of config->device there. UNSUPPORTED if this machine
 * cannot run it. */
enum dkv_status dkv_backend_open(const struct dkv_config *config, uv_loop_t *loop,
                                 struct dkv_backend **backend_out, struct dkv_error *err);

/* Stops after the batch that is running; jobs still queued end as DRAINING. The loop must be run
 * until its handles are closed. */
void dkv_backend_close(struct dkv_backend *backend);

/* Takes the job, whose deadline_ns, done and owner are set. On an error the job is still the
 * caller's: BUSY if the queue is full, TIMEOUT if its deadline has passed. */
enum dkv_status dkv_backend_submit(struct dkv_backend *backend, struct dkv_job *job,
                                   struct dkv_error *err);

/* The caller no longer wants the answer. A queued job never starts and ends at once, within this
 * call; one that runs ends when its batch does. Both as CANCELLED. */
void dkv_backend_cancel(struct dkv_backend *backend, struct dkv_job *job);

/* Ends queued jobs whose deadline has passed, as TIMEOUT, or all queued jobs as DRAINING. */
void dkv_backend_expire(struct dkv_backend *backend, uint64_t now_ns, bool all);

void dkv_backend_info(struct dkv_backend *backend, struct dkv_backend_info *info_out);

#endif
