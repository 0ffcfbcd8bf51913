/* What the files of the front's side of a worker share; nobody else includes this.
 *
 *   worker.c          its life: up, lost, started again, given up
 *   worker_process.c  one process: started, watched while it owes an answer, ended and reaped
 *   worker_send.c     what it is told
 *
 * What runs in the process itself is in worker_main.c, worker_memory.c and worker_stage.c.
 *
 * Thread  loop.
 */
#ifndef DKV_SERVER_WORKER_PRIV_H
#define DKV_SERVER_WORKER_PRIV_H

#include "server/worker.h"

#define DKV_WORKER_START_MS    60000
#define DKV_WORKER_ZOMBIES_MAX 8u

/* The socket of one process; it is closed with its handle. */
struct dkv_worker_link {
    uv_poll_t poll;
    struct dkv_worker *worker;
    int fd;
};

struct dkv_worker_outgoing {
    struct dkv_worker_outgoing *next;
    struct dkv_link_msg msg;
    int fd; /* our own, or -1 */
};

struct dkv_worker {
    const struct dkv_config *config;
    struct dkv_worker_calls calls;
    uv_loop_t *loop;
    struct dkv_arena *arena;
    struct dkv_run *runs;
    char device[64];
    unsigned index;
    bool fallback;
    bool given_up;

    struct dkv_worker_link *link; /* NULL: no process */
    pid_t pid;
    bool up;
    struct dkv_worker_outgoing *first, **last; /* messages that wait for room */
    pid_t zombies[DKV_WORKER_ZOMBIES_MAX];
    uv_timer_t timer;  /* until the next start */
    uv_timer_t watch;  /* while an answer is awaited */
    uint64_t since_ms; /* when the oldest batch, or the start, began */
    bool heard;        /* since the last pulse */
    uv_signal_t child_signal;
    unsigned n_open_handles;
    unsigned n_deaths; /* since the last answered batch */
    uint64_t n_restarts;

    uint64_t *tables[DKV_ADMISSION_FLIGHT_MAX]; /* in the arena: what RUN points at */
    uint64_t table_bytes;
};

/* ---- worker_process.c ---- */

unsigned dkv_worker_n_in_flight(const struct dkv_worker *worker);
uint64_t dkv_worker_patience_ms(const struct dkv_worker *worker);

/* Looks again when the patience with what is awaited now is over, and kills it then. */
void dkv_worker_watch(struct dkv_worker *worker);

/* Starts the process and sends START; its answer comes to dkv_worker_on_link(). NOMEM. */
enum dkv_status dkv_worker_start(struct dkv_worker *worker, struct dkv_error *err);

/* Ends it, with its link and what it was to be sent. Harmless if there is none. */
void dkv_worker_drop(struct dkv_worker *worker);

/* Those that have ended; `wait`: all that were dropped. */
void dkv_worker_reap(struct dkv_worker *worker, bool wait);

/* ---- worker_send.c ---- */

/* Sends what had to wait, as far as there is room. */
void dkv_worker_flush(struct dkv_worker *worker);
void dkv_worker_drop_outgoing(struct dkv_worker *worker);

/* ---- worker.c ---- */

void dkv_worker_on_link(uv_poll_t *poll, int status, int events);

#endif
