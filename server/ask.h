/* One scoring request of the local socket, from its message to its answer.
 *
 *   message -> bulk -> built: blocks, gate, outputs -> fence -> query rows -> backend -> answer
 *           -> sent
 *
 * An ask owns its job and what the job reads that is not the client's own memory: the bulk, and
 * query rows that lie around the end of a ring. It holds a use of every region it names, so it may
 * outlive its session.
 *
 * Owner   whoever has it: the session's lists, the backend.
 * Thread  loop.
 */
#ifndef DKV_SERVER_ASK_H
#define DKV_SERVER_ASK_H

#include "server/fence.h"
#include "server/job.h"
#include "server/session_priv.h"

#include <uv.h>

/* Query rows of one block that lie around the end of a ring, and are copied one after the other. */
struct dkv_ask_ring {
    const struct dkv_region *region; /* NULL: the rows are read where they lie */
    uint64_t start;                  /* of row 0, head 0 */
    uint64_t row_stride, head_stride;
    uint64_t n_rows;
    uint64_t first; /* the oldest row that is needed, counted from row 0 or a turn later */
    uint8_t *copy;
};

enum dkv_ask_phase {
    DKV_ASK_BUILDING,
    DKV_ASK_FENCED,
    DKV_ASK_READING, /* with a thread that copies its query rows */
    DKV_ASK_QUEUED,  /* with the backend */
    DKV_ASK_WRITING, /* with a thread that writes the answer */
    DKV_ASK_ENDED,
};

struct dkv_ask;
typedef void (*dkv_ask_work_fn)(struct dkv_ask *ask);

struct dkv_ask {
    struct dkv_session *session; /* NULL: it is gone, nobody wants the answer */
    struct dkv_server *server;
    struct dkv_list node;
    uint64_t id;
    enum dkv_ask_phase phase;
    struct dkv_job *job;         /* &own_job */
    struct dkv_ask_ring *rings;  /* [n_blocks], from malloc; NULL: none is copied */
    struct dkv_region **regions; /* [n_regions], used: few, or from malloc with room for all */
    struct dkv_region *few[DKV_JOB_FEW];
    uint32_t n_regions;
    struct dkv_cache *cache; /* whose scales and sinks the blocks point to */
    struct dkv_fence fence;
    struct dkv_region *output; /* NULL: the answer is sent */
    uint64_t output_offset, output_bytes;
    uint64_t started_ns, deadline_ns;
    uint64_t retry_us;    /* advice beside an error */
    uint64_t bulk_number; /* in the order of conn's bulks */
    struct dkv_error error;
    bool answered; /* its deadline passed while the work ran: counted, told, and out of all lists */
    bool called_off;        /* while a thread reads: it ends when that is done */
    struct dkv_job own_job; /* init() sees to it, and what follows is written before it is read */

    /* While a thread works for it. */
    uv_work_t work;
    dkv_ask_work_fn work_run, work_back;
};

/* ---- ask.c: building ---- */

struct dkv_ask *dkv_ask_new(struct dkv_session *session, uint64_t id);
void dkv_ask_free(struct dkv_ask *ask); /* with its job, its uses and its memory; NULL is fine */

/* Remembers that the region is used, once. NOMEM. */
enum dkv_status dkv_ask_use(struct dkv_ask *ask, struct dkv_region *region, struct dkv_error *err);

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

/* ---- ask_work.c: what the front copies ---- */

/* Copies the query rows that have to be; ask->error says how that went. False: a thread does it,
 * and `back` follows, on the loop. */
bool dkv_ask_fetch(struct dkv_ask *ask, dkv_ask_work_fn back);

/* The same: writes the answer to its place, if it has one that no worker has written to. */
bool dkv_ask_write(struct dkv_ask *ask, dkv_ask_work_fn back);

/* ---- ask_names.c: what the message names ---- */

/* A view of a region, or of the bulk. NOT_FOUND, INVALID; `what` is for errors. */
enum dkv_status dkv_ask_make_view(struct dkv_ask *ask, const struct dkv_wire_view *wire,
                                  const char *what, struct dkv_view *view_out,
                                  struct dkv_error *err);

/* A page table as both kinds of request describe it. */
struct dkv_ask_table {
    uint32_t region, entries;
    uint64_t offset, mask;
    int64_t null_entry;
    uint8_t kind, entry_bytes;
    bool has_null;
};

/* The block's page table, if there is one. */
enum dkv_status dkv_ask_make_table(struct dkv_ask *ask, const struct dkv_ask_table *wire,
                                   struct dkv_block *block, struct dkv_error *err);

/* Set nothing if the message names none. */
enum dkv_status dkv_ask_take_fence(struct dkv_ask *ask, const struct dkv_wire_fence *wire,
                                   struct dkv_error *err);
enum dkv_status dkv_ask_take_output(struct dkv_ask *ask, const struct dkv_wire_output *wire,
                                    struct dkv_error *err);

/* ---- ask_floats.c: vectors in the bulk ---- */

/* Points the block, or all blocks of the job, at them. INVALID if they are not within the bulk. */
enum dkv_status dkv_ask_take_block_floats(const struct dkv_ask *ask,
                                          const struct dkv_wire_block *wire,
                                          struct dkv_block *block, struct dkv_error *err);
enum dkv_status dkv_ask_take_layer_floats(const struct dkv_ask *ask,
                                          const struct dkv_wire_score *wire, struct dkv_error *err);

/* ---- ask_rows.c: query rings ---- */

/* Makes the block's query that of a copy that is still to come. */
void dkv_ask_shape_rows(const struct dkv_ask_ring *ring, struct dkv_block *block);

/* Reserves memory for the rows that will be copied, once the gate has bounded them, and lets the
 * blocks point there. TOO_LARGE, BUSY, NOMEM. */
enum dkv_status dkv_ask_place_rows(struct dkv_ask *ask, struct dkv_error *err);

/* Copies them, on any thread. INVALID if their file was cut short. */
enum dkv_status dkv_ask_read_rows(struct dkv_ask *ask, struct dkv_error *err);

#endif
