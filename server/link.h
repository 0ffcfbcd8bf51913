/* What the front and a worker say to each other.
 *
 * A SOCK_SEQPACKET pair carries messages of a fixed size each, some with a file descriptor. What is
 * large lies in the arena: the descriptor of a job, which names every byte its work reads and
 * writes by (memory, offset), since each side has mapped everything at addresses of its own.
 *
 *   front -> worker   START (the arena's fd), ATTACH (a client's fd), CHUNK (one more),
 *                     DETACH, RUN, PING
 *   worker -> front   UP or FAILED, ATTACHED, DETACHED, DONE, PONG
 *
 * A worker answers RUNs in order. Both ends are the same program, so structs travel as they are.
 *
 * Owner   messages are copied; a descriptor belongs to its job.
 * Thread  any; no state.
 */
#ifndef DKV_SERVER_LINK_H
#define DKV_SERVER_LINK_H

#include "kernels/engine.h"
#include "server/arena.h"
#include "server/log.h"

#include <sys/types.h>

#define DKV_LINK_FD 3 /* a worker's end */

enum dkv_link_type {
    DKV_LINK_START = 1,
    DKV_LINK_ATTACH,
    DKV_LINK_DETACH,
    DKV_LINK_RUN,
    DKV_LINK_PING, /* are you there? */
    DKV_LINK_UP,
    DKV_LINK_FAILED,
    DKV_LINK_ATTACHED,
    DKV_LINK_DETACHED,
    DKV_LINK_DONE,
    DKV_LINK_PONG,
    DKV_LINK_CHUNK, /* after the ATTACH of memory that has chunks, one each */
};

struct dkv_link_start {
    uint64_t arena_bytes;
    pid_t front_pid;
    uint32_t threads;
    uint32_t max_items; /* blocks of one batch */
    uint64_t max_batch_bytes;
    uint64_t patience_ns; /* looking for messages before sleeping */
    bool learns;          /* whether that pays, if no patience says so */
    char device[64];
    char log_level[16];
    char log_format[16];
    char log_file[DKV_LOG_PATH_BYTES];
    bool test_hooks;
};

enum dkv_link_memory {
    DKV_LINK_HOST = 0,    /* a file: ATTACH brings it */
    DKV_LINK_CUDA_LEGACY, /* a handle */
    DKV_LINK_CUDA_VMM,    /* chunks: as many CHUNK messages follow */
};

/* What tells one allocation of one client from all others: memory that was opened is shared by
 * loans of the same key alone. */
struct dkv_link_key {
    uint64_t owner; /* the connection */
    uint32_t user;  /* whose it is; not part of what is compared */
    uint32_t generation;
    uint8_t handle[DKV_IMPORT_HANDLE_BYTES];
};

struct dkv_link_loan {
    uint64_t offset; /* of the file, the allocation, the reservation: where the loan starts */
    uint64_t bytes;
    enum dkv_link_memory memory;
    bool loose;    /* HOST: to be read by pread() */
    bool writable; /* HOST, not loose: answers may be written there */
    uint32_t n_chunks;
    struct dkv_link_key key; /* CUDA_LEGACY; HOST: its owner */
};

struct dkv_link_chunk {
    uint64_t offset, bytes;
};

struct dkv_link_run {
    uint32_t slot; /* the front's number for it */
    uint32_t n_jobs;
    uint64_t jobs; /* offset of uint64_t [n_jobs]: offsets of the descriptors */
    bool more;     /* another batch follows at once: take it before waiting for this one */
};

struct dkv_link_done {
    uint32_t slot;
    uint64_t started_ns, finished_ns; /* CLOCK_MONOTONIC, the same in all processes */
    uint64_t scratch_bytes;
};

struct dkv_link_msg {
    uint32_t type;
    uint32_t number;        /* of a loan: ATTACH, DETACH and their answers */
    enum dkv_status status; /* FAILED, ATTACHED */
    union {
        struct dkv_link_run run;
        struct dkv_link_done done;
        struct dkv_link_chunk chunk;
        struct dkv_link_loan loan;
        struct dkv_link_start start;
        struct dkv_engine_info up;
    };
    struct dkv_error error;
};

/* Sends one message, with `fd` if it is not negative. False if the peer is gone or, on a socket
 * that does not block, if there is no room now (errno EAGAIN). */
bool dkv_link_send(int socket, const struct dkv_link_msg *msg, int fd);

/* Receives one; without `wait` only one that is there, also on a socket that blocks. 1, or 0 at the
 * end of the link, or -1 with errno (EAGAIN: nothing now). *fd_out is -1 or the caller's to close.
 */
int dkv_link_receive(int socket, bool wait, struct dkv_link_msg *msg_out, int *fd_out);

/* ---- descriptors ---- */

#define DKV_LINK_NOWHERE  0u /* NULL */
#define DKV_LINK_IN_ARENA 1u
#define DKV_LINK_LOANS    2u /* and up: the loan of that number */

struct dkv_link_addr {
    uint32_t memory;
    uint64_t offset;
};

#define DKV_LINK_POINTERS 13u /* of a dkv_block */

struct dkv_link_block {
    struct dkv_block block; /* its pointers say nothing: */
    struct dkv_link_addr pointers[DKV_LINK_POINTERS];
    struct dkv_plan plan;
    struct dkv_link_addr keep;
    struct dkv_link_addr scores;
    struct dkv_link_addr counts; /* of a ragged answer */
    struct dkv_ring ring;        /* of the query, if it lies around a ring's end on a GPU */
    enum dkv_status status;      /* written by the worker before DONE, like what follows */
    bool nonfinite;              /* it met NaN or infinity */
    struct dkv_error error;      /* of a status that is not OK */
};

struct dkv_link_job {
    struct dkv_params params;
    uint32_t n_blocks;
    struct dkv_link_block blocks[];
};

/* Memory that a pointer of the front's may lie in, beside the arena. */
struct dkv_link_range {
    uint32_t number; /* DKV_LINK_LOANS and up */
    const void *base;
    uint64_t bytes;
};

/* The size of a descriptor: small vectors that lie elsewhere (scales, page tables, sink logits) are
 * copied into it. */
uint64_t dkv_link_job_bytes(const struct dkv_arena *arena, const struct dkv_block *blocks,
                            uint32_t n_blocks, const struct dkv_link_range *ranges,
                            unsigned n_ranges);

/* Writes one to `to`, in the arena. Tensors must lie in the arena or in a range. keep and scores
 * are left NOWHERE. */
void dkv_link_pack(const struct dkv_arena *arena, const struct dkv_request *request,
                   const struct dkv_plan *plans, const struct dkv_link_range *ranges,
                   unsigned n_ranges, struct dkv_link_job *to);

/* Where a worker has mapped the memory of that number; NULL if it has not. */
typedef const void *(*dkv_link_find_fn)(void *owner, uint32_t memory);

/* A block with pointers of this process. False if some memory cannot be found. */
bool dkv_link_unpack(const struct dkv_link_block *from, dkv_link_find_fn find, void *owner,
                     struct dkv_block *block_out);

/* The pointers of a block, in the order of dkv_link_block.pointers. */
enum { DKV_LINK_QUERY, DKV_LINK_KEY, DKV_LINK_VALUE, DKV_LINK_TABLE, DKV_LINK_V_TABLE };

#endif
