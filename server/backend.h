/* The seam behind which the work is done: jobs go in, ended jobs come out.
 *
 * Behind it stand the admission queue, which decides what is accepted, when it runs and beside
 * whom, and one worker per device, which runs it. No engine shows here, and a job is all that
 * crosses. A job ends in exactly one done(), before which one overdue() may come.
 *
 * A client is whoever shares the device fairly with others: a connection, or the holder of a token.
 * It is counted: whoever has it from client_get() gives it back, and it lasts until its last job
 * has ended.
 *
 * Memory that a client lends is attached once and named by jobs: their blocks point into the
 * addresses that stand for it (dkv_loan_base), and job->loans lists it. It is let go when it has
 * been detached and the last job that names it has ended.
 *
 * Owner   open/close. A submitted job is the backend's until its done().
 * Thread  loop, all calls and every done() and overdue().
 */
#ifndef DKV_SERVER_BACKEND_H
#define DKV_SERVER_BACKEND_H

#include "server/config.h"
#include "server/job.h"
#include "server/loan.h"
#include "server/worker.h"

#include <uv.h>

struct dkv_backend;
struct dkv_wire_region;

/* How the caller can say "not now" to its client, over HTTP and on the socket. */
struct dkv_backend_refusal {
    unsigned http_status; /* 429: this client's own quota; 503: everybody's bounds */
    uint64_t retry_us;    /* when another try is likely to be accepted; 0: no advice */
};

struct dkv_backend_info {
    struct dkv_engine_info engine; /* of the first device */
    unsigned n_queued;
    unsigned n_running;
    unsigned max_queue_requests;
    unsigned n_levels; /* priorities in use: level[] of `queue` */
    bool ready;        /* some device answers */
    struct dkv_admission_stats queue;
    unsigned n_devices;
    struct dkv_worker_facts workers[DKV_ADMISSION_DEVICES_MAX];
    uint64_t n_loans[DKV_LOAN_KINDS];
    uint64_t loan_bytes[DKV_LOAN_KINDS];
};

/* What the configuration says about the queue. INVALID names what does not fit together. */
enum dkv_status dkv_backend_limits(const struct dkv_config *config,
                                   struct dkv_admission_config *limits_out, struct dkv_error *err);

/* Takes the limits of the configuration, which has changed, for what comes from now on. INVALID:
 * nothing was changed. */
enum dkv_status dkv_backend_relimit(struct dkv_backend *backend, const struct dkv_config *config,
                                    struct dkv_error *err);

/* Starts a worker for every device of the configuration and waits until each has opened it.
 * UNSUPPORTED if this machine cannot run one. Jobs live in `arena`. */
enum dkv_status dkv_backend_open(const struct dkv_config *config, uv_loop_t *loop,
                                 struct dkv_arena *arena, struct dkv_backend **backend_out,
                                 struct dkv_error *err);

/* Called when the jobs that ended at one time, as those of a batch, have all been handed out by
 * done(): what was put off until then can be done once for all of them. */
typedef void (*dkv_backend_settled_fn)(void *owner);
void dkv_backend_on_settled(struct dkv_backend *backend, dkv_backend_settled_fn settled,
                            void *owner);

/* Threads write answers by recency: the loop must be run until they have, before close(). NULL is
 * fine. */
bool dkv_backend_is_writing(const struct dkv_backend *backend);

/* Every job still there ends, as DRAINING. The loop must be run until its handles are closed, which
 * frees what clients are left. */
void dkv_backend_close(struct dkv_backend *backend);

/* The client of that name, made if nobody has it; NULL makes one without a name. NULL if out of
 * memory. */
struct dkv_backend_client *dkv_backend_client_get(struct dkv_backend *backend, const char *name);
struct dkv_quota_holder *dkv_backend_client_holder(const struct dkv_backend_client *client);
bool dkv_backend_client_is(const struct dkv_backend_client *client, const char *name);
void dkv_backend_client_put(struct dkv_backend_client *client); /* NULL is fine */

/* Takes a prepared job, whose done and owner are set. On an error the job is still the caller's:
 * BUSY with `refusal_out` filled, TIMEOUT, DRAINING, TOO_LARGE. done() is never called within this
 * call. A job that asked for it (entry.degrade) may be answered by recency instead of refused. */
enum dkv_status dkv_backend_submit(struct dkv_backend *backend, struct dkv_backend_client *client,
                                   struct dkv_job *job, struct dkv_backend_refusal *refusal_out,
                                   struct dkv_error *err);

/* The caller no longer wants the answer. A queued job never starts and ends at once, within this
 * call; one that runs ends when its batch does. Both as CANCELLED. An answer by recency that a
 * thread is to write is not written if none has begun. */
void dkv_backend_cancel(struct dkv_backend *backend, struct dkv_job *job);

/* The same for all jobs of a client. */
void dkv_backend_client_cancel(struct dkv_backend_client *client);

/* Lends [offset, offset + bytes) of a file to all workers, `writable` if answers may go there. The
 * fd stays the caller's: it may be closed afterwards. `connection` is the caller's number for
 * whoever lends it, `user` whose process that is: bounds on what each of them has pinned.
 * `on_attached` is called once, with an error if some worker could not map it; jobs may name it
 * before. INVALID, NOMEM, TOO_LARGE (too many). */
enum dkv_status dkv_backend_attach(struct dkv_backend *backend, int fd, uint64_t offset,
                                   uint64_t bytes, bool writable, uint64_t connection,
                                   uint32_t user, dkv_loan_attached_fn on_attached, void *owner,
                                   struct dkv_loan **loan_out, struct dkv_error *err);

/* Lends memory of a GPU to the worker of that GPU, as `wire` describes it (kinds CUDA_LEGACY and
 * CUDA_VMM); `fds`, one per chunk, stay the caller's. `connection` is the caller's number for
 * whoever lends it: memory is never shared between two of them. Blocks that point there must say
 * DKV_PLACE_DEVICE. UNSUPPORTED if no worker uses that GPU; otherwise as attach. */
enum dkv_status dkv_backend_attach_cuda(struct dkv_backend *backend,
                                        const struct dkv_wire_region *wire, const int *fds,
                                        uint64_t connection, dkv_loan_attached_fn on_attached,
                                        void *owner, struct dkv_loan **loan_out,
                                        struct dkv_error *err);

/* No new job may name it; on_attached is not called any more. `on_released` (or NULL) is called
 * when nobody has it, possibly within this call. */
void dkv_backend_detach(struct dkv_loan *loan, dkv_loan_released_fn on_released, void *owner);

/* Workers go on in new log files. */
void dkv_backend_hangup(const struct dkv_backend *backend);

/* True if a request that comes now may be accepted: some device answers. */
bool dkv_backend_ready(const struct dkv_backend *backend);

/* Has everything moved since the last call? False, with a sentence, if no device answers, a worker
 * is silent with nothing to do, or requests wait beside an idle device. Sets the workers a question
 * that they have until the next call to answer. */
bool dkv_backend_pulse(struct dkv_backend *backend, const char **why_out);

/* The UUIDs of the devices, in the order of the configuration: zero for the CPU. Their number. */
unsigned dkv_backend_uuids(const struct dkv_backend *backend,
                           uint8_t uuids_out[DKV_ADMISSION_DEVICES_MAX][DKV_UUID_BYTES]);

void dkv_backend_info(struct dkv_backend *backend, struct dkv_backend_info *info_out);

#endif
