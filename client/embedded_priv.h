/* What the files of the embedded engine's transport share; nobody else includes this.
 *
 *   embedded.c         opened and closed, its descriptor, what it says of itself
 *   embedded_queue.c   requests: waiting, in batches of the engine's, handed back
 *   embedded_prompt.c  prompts as blocks
 *   embedded_cache.c   caches and stashes
 *
 * Owner   the transport has everything. Carriers are used again.
 * Thread  the client's.
 */
#ifndef DKV_CLIENT_EMBEDDED_PRIV_H
#define DKV_CLIENT_EMBEDDED_PRIV_H

#include "client/alarm.h"
#include "client/embedded.h"

#define DKV_EMBEDDED_BATCH_MAX 128u /* blocks of one engine batch */
#define DKV_EMBEDDED_DEPTH_MAX 2u   /* batches in flight */

struct dkv_embedded_cache {
    struct dkv_embedded_cache *next;
    struct dropkv_cache_layout layout; /* over: */
    struct dropkv_layer *layers;
    float *floats;
};

struct dkv_embedded_stash {
    struct dkv_embedded_stash *next;
    struct dropkv_stash_layout layout;
};

/* Query rows of one block that lie around the end of a ring. */
struct dkv_embedded_ring {
    uint64_t first;
    uint64_t n_rows;      /* of the ring; 0: nothing is to be put in order */
    struct dkv_view view; /* of its row 0 */
};

/* A job's place in the queue. It outlasts a job that timed out while its blocks are in a batch. */
struct dkv_embedded_carrier {
    struct dkv_embedded_carrier *next;
    struct dkv_job *job;      /* NULL: it was handed back, and `call` is what its blocks lie in */
    struct dkv_call call;     /* taken over from the job, else empty */
    struct dkv_params params; /* what the items point to */

    /* Where the answer goes: memory of the result's or of the caller's. */
    int32_t *keep;
    float *scores;    /* NULL: not wanted */
    int32_t *offsets; /* NULL: all heads keep as many */

    /* Of prompts; used again. */
    struct dkv_embedded_ring *rings; /* [rings_room] */
    uint32_t rings_room;
    uint8_t *rows; /* copies, [rows_room] */
    uint64_t rows_room;

    uint32_t n_blocks;
    uint32_t n_started;  /* blocks given to the engine so far */
    uint32_t n_in_batch; /* of them, without an answer yet */
    enum dkv_status status;
    char error_text[sizeof(((struct dkv_error *)NULL)->text)];
};

struct dkv_embedded_batch {
    struct dkv_item items[DKV_EMBEDDED_BATCH_MAX];
    struct dkv_embedded_carrier *owners[DKV_EMBEDDED_BATCH_MAX];
    unsigned n;
    int64_t start_ns;
};

struct dkv_transport {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    bool lost; /* the device: no request has an answer any more */

    struct dkv_embedded_cache *caches;
    struct dkv_embedded_stash *stashes;
    struct dkv_embedded_carrier *first; /* all, oldest first */
    struct dkv_embedded_carrier *idle;
    struct dkv_embedded_batch batches[DKV_EMBEDDED_DEPTH_MAX];
    unsigned oldest, n_in_flight, depth;
    int64_t last_done_ns; /* when the latest batch was */

    int epoll_fd; /* watches both */
    int event_fd; /* readable: there is something to do now */
    struct dkv_alarm alarm;
};

/* True if batches go on by themselves once they are submitted. */
static inline bool dkv_embedded_is_async(const struct dkv_transport *t)
{
    return t->ops->ready != NULL;
}

/* ---- embedded_queue.c: parts of dkv_transport_ops ---- */

enum dkv_status dkv_embedded_submit(struct dkv_transport *t, struct dkv_job *job,
                                    struct dkv_error *err);
void dkv_embedded_cancel(struct dkv_transport *t, struct dkv_job *job);
enum dkv_status dkv_embedded_dispatch(struct dkv_transport *t, struct dkv_error *err);
bool dkv_embedded_ready(struct dkv_transport *t);

/* Waits for what is under way: afterwards nobody reads tensors of what was submitted before, but of
 * requests that have not been started. */
void dkv_embedded_let_go(struct dkv_transport *t);

/* Waits for what is in flight and frees what there is. */
void dkv_embedded_queue_fini(struct dkv_transport *t);

/* ---- embedded_prompt.c ---- */

/* Makes the call's blocks and plans. INVALID, UNSUPPORTED, TOO_LARGE, NOMEM, whatever the gate
 * says. */
enum dkv_status dkv_embedded_build_prompt(struct dkv_transport *t, struct dkv_embedded_carrier *c,
                                          struct dkv_error *err);

/* ---- embedded_cache.c ---- */

extern const struct dkv_transport_objects dkv_embedded_objects;
void dkv_embedded_caches_fini(struct dkv_transport *t);

#endif
