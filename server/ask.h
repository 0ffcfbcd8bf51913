/* One scoring request of the local socket, from its message to its answer.
 *
 *   message -> bulk -> built: blocks, gate, outputs -> fence -> copies -> backend -> answer -> sent
 *
 * An ask owns its job and whatever the job reads that is not the client's own memory: the bulk,
 * copies of page tables, query rows that lie around the end of a ring, and for memory that is only
 * read by copying, the part that is needed. It holds a use of every region it names, so it may
 * outlive its session.
 *
 * Owner   whoever has it: the session's lists, the backend, the pool that copies.
 * Thread  loop, but for dkv_ask_copy().
 */
#ifndef DKV_SERVER_ASK_H
#define DKV_SERVER_ASK_H

#include "server/fence.h"
#include "server/job.h"
#include "server/session_priv.h"

/* A region that the request reads, and the part of it that is copied where it is not mapped. */
struct dkv_ask_use {
    struct dkv_region *region;
    uint64_t from, to; /* bytes of the region; from >= to: none */
    uint8_t *copy;     /* of [from, to) */
};

/* Where a block's views and page table come from; NULL: the bulk. */
struct dkv_ask_source {
    struct dkv_ask_use *query, *key, *value;
    struct dkv_ask_use *table;
    uint64_t table_offset;
    uint64_t table_bytes; /* those that are needed */
    uint8_t *table_copy;
    uint64_t ring_start; /* of row 0 */
    uint32_t ring_rows;  /* 0: the query's rows are read where they lie */
    uint64_t ring_first; /* the oldest row that is needed, counted from row 0 or a turn later */
    uint64_t ring_row_stride, ring_head_stride;
    uint8_t *ring_copy;
};

enum dkv_ask_phase {
    DKV_ASK_BUILDING,
    DKV_ASK_FENCED,
    DKV_ASK_COPYING, /* in libuv's pool */
    DKV_ASK_QUEUED,  /* with the backend */
    DKV_ASK_ENDED,
};

struct dkv_ask {
    struct dkv_session *session; /* NULL: it is gone, nobody wants the answer */
    struct dkv_server *server;
    struct dkv_list node;
    uint64_t id;
    enum dkv_ask_phase phase;
    bool cancelled;
    struct dkv_job *job;
    struct dkv_ask_source *sources; /* [n_blocks] */
    struct dkv_ask_use *uses;       /* [uses_max], the first n_uses are held */
    uint32_t n_uses, uses_max;
    struct dkv_cache *cache; /* whose scales and sinks the blocks point to */
    struct dkv_body copies;  /* tables and ring rows */
    struct dkv_body staging; /* parts of regions */
    struct dkv_fence fence;
    struct dkv_region *output; /* NULL: the answer is sent */
    uint64_t output_offset, output_bytes;
    uv_work_t work;
    enum dkv_status copy_status;
    uint64_t started_ns, deadline_ns;
    uint64_t retry_us;    /* advice beside an error */
    uint64_t bulk_number; /* in the order of conn's bulks */
    struct dkv_error error;
};

/* ---- ask.c: building ---- */

struct dkv_ask *dkv_ask_new(struct dkv_session *session, uint64_t id);
void dkv_ask_free(struct dkv_ask *ask); /* with its job, its uses and its memory; NULL is fine */

/* Lets go of everything that the work read: regions, copies, bulk. The outputs stay. */
void dkv_ask_let_go(struct dkv_ask *ask);

/* From a message, whose bulk is in job->body, to a job that passed the gate and has its outputs.
 * No byte of a region is read. NOT_FOUND, INVALID, whatever the gate says. */
enum dkv_status dkv_ask_build_score(struct dkv_ask *ask, const struct dkv_wire_score *score,
                                    struct dkv_error *err);
enum dkv_status dkv_ask_build_blocks(struct dkv_ask *ask, const struct dkv_wire_blocks *blocks,
                                     struct dkv_error *err);

/* Bytes of the answer's numbers. */
uint64_t dkv_ask_answer_bytes(const struct dkv_ask *ask);

/* ---- ask_copy.c: what has to be copied ---- */

/* Reads page tables and reserves memory for the rest. INVALID, TOO_LARGE, BUSY, NOMEM. */
enum dkv_status dkv_ask_prepare_copies(struct dkv_ask *ask, struct dkv_error *err);

/* True if some region has to be read by copying, which takes its time. */
bool dkv_ask_must_stage(const struct dkv_ask *ask);

/* Copies, and lets the blocks point to the copies. Any thread. INVALID if a file was cut short. */
enum dkv_status dkv_ask_copy(struct dkv_ask *ask, struct dkv_error *err);

#endif
