/* One accepted inference request on its way: session -> queue -> engine -> completion -> session.
 *
 * A job owns everything that its work reads and writes, or holds the loans that it lies in, so that
 * it can outlive the connection that brought it. All of it is in memory that workers see: the arena
 * and loans. It moves: exactly one of session, queue, worker and completion list holds it.
 *
 * Owner   new/free. free() gives the body's memory back.
 * Thread  loop; between submit and done only the backend touches it.
 */
#ifndef DKV_SERVER_JOB_H
#define DKV_SERVER_JOB_H

#include "kernels/engine.h"
#include "proto/oip.h"
#include "server/admission.h"
#include "server/body.h"
#include "server/link.h"

/* Which way bytes and requests come in. */
enum dkv_transport {
    DKV_TRANSPORT_HTTP = 0, /* in a body */
    DKV_TRANSPORT_SOCKET,   /* behind a message of the local socket */
    DKV_TRANSPORT_SHARED,   /* in host memory that the client lends */
    DKV_TRANSPORT_DEVICE,   /* in a GPU's memory that the client lends */
    DKV_TRANSPORTS,
};

#define DKV_JOB_FEW 4u /* loans: tensors and an output, of a client that lends few */

struct dkv_job;
struct dkv_by_recency;
struct dkv_backend_client;
struct dkv_loan;
struct dkv_region;

/* Runs on the loop thread when the job has ended, whatever way; the job is the callee's again. */
typedef void (*dkv_job_done_fn)(struct dkv_job *job, void *owner);

/* Its deadline has passed while it runs: the caller can be told `why` now. The job is still the
 * backend's, whose workers read its memory, and comes back by done(). */
typedef void (*dkv_job_overdue_fn)(struct dkv_job *job, void *owner, const struct dkv_error *why);

/* What a worker reads of one part; in the arena. */
struct dkv_job_descriptor {
    struct dkv_link_job *job;
    uint64_t bytes;
};

struct dkv_job {
    /* Where there is one part only, one block only. */
    struct dkv_admission_part only_part;
    struct dkv_job_descriptor only_written;
    struct dkv_block only_block;
    struct dkv_plan only_plan;

    dkv_job_done_fn done;
    dkv_job_overdue_fn overdue; /* at most once, before done(); NULL: nobody waits */
    void *owner;

    /* The admission queue's view of it: one entry, of one part for each device that holds memory of
     * its blocks, and one for the blocks that any device can read. */
    struct dkv_backend_client *client; /* while the backend has the job */
    struct dkv_admission_entry entry;
    struct dkv_admission_part *parts;   /* [entry.n_parts] */
    struct dkv_job_descriptor *written; /* [entry.n_parts] */
    struct dkv_list ended_node;         /* answered without a device */
    struct dkv_by_recency *by_recency;  /* whose answer a thread is to write, or writes; or NULL */

    struct dkv_arena *arena;
    struct dkv_charge charge; /* of what it takes beside body and rows */
    struct dkv_body body;
    struct dkv_body rows;        /* copies of query rows */
    struct dkv_oip_infer *infer; /* from malloc; NULL: it did not come over HTTP */
    void *side;                  /* [side_bytes], in the arena: small vectors and JSON numbers */
    uint64_t side_bytes;
    struct dkv_region *shm[DKV_OIP_INPUTS + DKV_OIP_OUTPUTS]; /* used, by input, then by output */
    struct dkv_loan **loans; /* [n_loans]: clients' memory that blocks point into */
    unsigned n_loans;
    struct dkv_loan *few_loans[DKV_JOB_FEW]; /* where they lie if they are few; else from malloc */
    struct dkv_request request;              /* over `blocks` */
    struct dkv_block *blocks;                /* [request.n_blocks] */
    struct dkv_plan *plans;
    struct dkv_ring *rings; /* [request.n_blocks], from malloc; NULL: no query lies around the end
                               of a ring on a GPU */

    /* Outputs of all blocks, one after the other, in the order of the blocks. One range of the
     * arena, indices first, scores behind them. */
    int32_t *keep;
    float *scores;   /* NULL unless asked for */
    uint64_t n_keep; /* indices; until a ragged answer is there, room for them */
    uint64_t n_scores;
    uint64_t n_heads; /* KV heads of all blocks */
    int32_t *offsets; /* [n_heads+1] behind the scores, where heads' indices begin; NULL unless the
                         answer is ragged or that is asked for */
    bool ragged;      /* blocks and heads may keep different numbers of tokens */

    /* Memory of the client's that the workers write the answer to, in the same order; NULL: the
     * arena. `keep` and `scores` are not written then, unless the answer is one of recency. */
    struct dkv_loan *target;
    uint64_t target_offset;

    uint64_t output_bytes;    /* of all of it */
    uint64_t n_stored_tokens; /* of all blocks: what a batch is limited by */
    uint64_t n_scored_tokens; /* valid tokens times KV heads, of all blocks */
    uint64_t n_read_bytes;    /* queries, keys and values: what fairness counts */

    /* Of the first block; over HTTP all blocks of a request are alike. Kept for the reply. */
    uint32_t kv_heads;
    uint32_t window;
    uint64_t keep_tokens;
    uint64_t n_tokens;

    uint64_t queued_ns, started_ns, finished_ns;
    unsigned batch_items;         /* blocks of the engine batch it ran in */
    uint64_t batch_tokens;        /* and their stored tokens */
    uint64_t batch_bytes;         /* and what it read */
    bool batch_first;             /* counts the batch: the last one, if there were several */
    unsigned n_refused_nonfinite; /* blocks that held NaN or infinity and were refused for it */
    unsigned n_masked_nonfinite;  /* or answered without the tokens that did */
    const char *backend;          /* name of the engine that ran it; the backend's */
    bool degraded;                /* answered by recency: see dkv_job_answer_by_recency() */
    enum dkv_status status;       /* of the job: its first failed item's, or why it never ran */
    struct dkv_error error;
};

/* Which way its tensors came, through a front of that name. */
enum dkv_transport dkv_job_transport(const struct dkv_job *job, enum dkv_transport front);

/* The answer is there: turns the heads' counts into offsets and closes the gaps between blocks, so
 * that indices, scores and offsets lie one behind the other. INTERNAL if the counts, which are a
 * worker's, are more than there was room for. */
enum dkv_status dkv_job_close_ranks(struct dkv_job *job, struct dkv_error *err);

struct dkv_job *dkv_job_new(struct dkv_arena *arena);

/* The same in the caller's storage. */
void dkv_job_init(struct dkv_job *job, struct dkv_arena *arena);
void dkv_job_fini(struct dkv_job *job);

/* From now on what it takes of the arena beside body and rows is charged, until it is freed. */
void dkv_job_charge_to(struct dkv_job *job, struct dkv_quota *quota,
                       struct dkv_quota_holder *holder);

/* Charges for what somebody else allocates on its behalf. BUSY, TOO_LARGE. */
enum dkv_status dkv_job_charge(struct dkv_job *job, uint64_t bytes, struct dkv_error *err);

/* Reserves `rows`, once the job is charged to somebody. BUSY, TOO_LARGE, NOMEM. */
enum dkv_status dkv_job_add_rows(struct dkv_job *job, struct dkv_body_pool *pool, uint64_t bytes,
                                 struct dkv_error *err);

/* Memory for JSON numbers, which the blocks will point into. BUSY, TOO_LARGE, NOMEM. */
enum dkv_status dkv_job_add_side(struct dkv_job *job, uint64_t bytes, struct dkv_error *err);

/* Makes room for `n` loans, which the caller then adds. NOMEM. */
enum dkv_status dkv_job_add_loans(struct dkv_job *job, unsigned n, struct dkv_error *err);

/* Allocates blocks and plans for a request of `n_blocks`; several are charged. BUSY, TOO_LARGE,
 * NOMEM. */
enum dkv_status dkv_job_add_blocks(struct dkv_job *job, uint32_t n_blocks, struct dkv_error *err);

/* After the gate: allocates the outputs, divides the blocks into parts and describes those for
 * workers. Sizes come from plans that the gate bounded; `max_bytes` bounds what a reply may need.
 * TOO_LARGE, BUSY, NOMEM; INVALID if one block lies on two devices. */
enum dkv_status dkv_job_prepare(struct dkv_job *job, uint64_t max_bytes, struct dkv_error *err);

/* Do its blocks read memory that has to be copied, since workers cannot map it? */
bool dkv_job_reads_loose(const struct dkv_job *job);

/* Bytes of the rows that scoring a block reads once. The gate has bounded every factor. */
uint64_t dkv_job_read_bytes(const struct dkv_block *block, const struct dkv_plan *plan);

/* job_parts.c: the second half of prepare(), and what undoes it. */
enum dkv_status dkv_job_divide(struct dkv_job *job, struct dkv_error *err);
void dkv_job_drop_parts(struct dkv_job *job);

/* The answer of a device that cannot be had: the protected sinks and the most recent tokens, as
 * many as the budget says. It reads no tensor. Not for a job that wants scores. The second call
 * writes it, on any thread. */
void dkv_job_answer_by_recency(struct dkv_job *job);
void dkv_job_write_recency(struct dkv_job *job);

/* Drops body, blocks and plans: after the work only the outputs are needed. */
void dkv_job_release_inputs(struct dkv_job *job);

void dkv_job_free(struct dkv_job *job); /* NULL is fine */

#endif
