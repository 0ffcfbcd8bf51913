/* What the files of the backend share; nobody else includes this.
 *
 *   backend.c         jobs on their way through the queue, and what workers say
 *   backend_recency.c answers without a device
 *   backend_client.c  clients of the fair share
 *   backend_loan.c    memory that clients lend
 *   backend_limits.c  what the configuration says about the queue
 *   backend_info.c    what it tells about itself
 *   backend_pulse.c   whether everything moves
 *
 * Thread  loop.
 */
#ifndef DKV_SERVER_BACKEND_PRIV_H
#define DKV_SERVER_BACKEND_PRIV_H

#include "server/backend.h"
#include "server/spin.h"

#include <string.h>

struct dkv_backend_device {
    struct dkv_worker *worker;
    struct dkv_engine_info engine;
    uint64_t scratch_bytes;
    uint64_t busy_ns, busy_until_ns; /* time with a batch, and until when it is counted */
    uint64_t n_blocks;               /* scored */
    bool up;
    struct dkv_run runs[DKV_ADMISSION_FLIGHT_MAX];
};

/* As its worker said when it came up last. */
static inline bool dkv_backend_is_gpu(const struct dkv_backend_device *device)
{
    static const uint8_t none[DKV_UUID_BYTES];
    return memcmp(device->engine.uuid, none, sizeof(none)) != 0;
}

struct dkv_backend {
    const struct dkv_config *config;
    uv_loop_t *loop;
    uv_timer_t timer;
    struct dkv_spin spin;
    unsigned n_open_handles; /* timer and spin */
    struct dkv_arena *arena;
    struct dkv_admission *queue;
    struct dkv_admission_config limits;
    struct dkv_list clients;
    struct dkv_list ended; /* jobs answered without a device, until the loop's next turn */
    struct dkv_backend_device devices[DKV_ADMISSION_DEVICES_MAX];
    unsigned n_devices;
    unsigned n_by_recency;   /* jobs whose answers threads write */
    unsigned n_running;      /* jobs */
    uint64_t n_launched;     /* batches, ever */
    uint64_t pulse_launched; /* n_launched at the last pulse */
    struct dkv_loan **loans; /* [n_loans], by number - DKV_LINK_LOANS; NULL where there is none */
    unsigned n_loans;
    uint64_t loan_bytes;            /* of all loans */
    dkv_backend_settled_fn settled; /* or NULL */
    void *settled_owner;
    bool pumping;
    bool again;
    bool soon; /* the timer is set to pump at the loop's next turn */
};

struct dkv_backend_client {
    struct dkv_admission_client share;
    struct dkv_backend *backend;
    struct dkv_quota_holder *holder; /* what it holds of memory */
    struct dkv_list node;
    unsigned n_refs;
    unsigned n_jobs; /* taken and not handed out: the queue counts them only until they end */
    char name[64];   /* "": nobody else may find it */
};

/* What has ended is handed out at the loop's next turn. */
void dkv_backend_pump_soon(struct dkv_backend *backend);

/* ---- answers by recency ---- */

/* Takes a job that the queue would not have. */
void dkv_backend_answer_by_recency(struct dkv_backend *backend, struct dkv_job *job);

/* Nobody wants the answer: it ends as CANCELLED unless it is being written, or was. */
void dkv_backend_call_off_recency(struct dkv_job *job);

/* ---- clients ---- */

/* Frees a client that nobody holds and whose last job has ended. */
void dkv_backend_client_free_if_unused(struct dkv_backend_client *client);
void dkv_backend_free_clients(struct dkv_backend *backend);

/* ---- loans ---- */

/* A job that names loans is taken, and ends. */
void dkv_backend_hold_loans(struct dkv_job *job);
void dkv_backend_drop_loans(struct dkv_job *job);

/* For each loan: tell a new worker of it; forget that a worker had it, which is gone. */
void dkv_backend_show_loans(struct dkv_backend *backend, unsigned d);   /* its worker is up */
void dkv_backend_forget_loans(struct dkv_backend *backend, unsigned d); /* it has gone */

/* What workers answer: members of dkv_worker_calls. */
void dkv_backend_on_attached(void *owner, unsigned index, uint32_t number,
                             const struct dkv_error *error);
void dkv_backend_on_detached(void *owner, unsigned index, uint32_t number);

void dkv_backend_count_loans(const struct dkv_backend *backend, struct dkv_backend_info *info_out);
void dkv_backend_free_loans(struct dkv_backend *backend);

#endif
