/* A worker's side of memory: the arena and the clients' loans, by number.
 *
 * A sealed loan is mapped, read-only unless answers may go there. A loose one gets a shadow: as
 * many addresses of the worker's own, without memory behind them until read. Before a batch the
 * very bytes that its blocks read are copied there by pread(), each to its own offset, so that
 * every layout works as in a mapping, and whatever the owner does to the file meanwhile is at worst
 * an error of his own request.
 *
 * Owner   the worker's main().
 * Thread  the worker's own; large reads are shared with readers.
 */
#ifndef DKV_SERVER_WORKER_MEMORY_H
#define DKV_SERVER_WORKER_MEMORY_H

#include "server/imports.h"
#include "server/link.h"
#include "server/readers.h"

struct dkv_held {
    unsigned char *base; /* NULL: no loan of this number */
    uint64_t bytes;
    uint64_t offset; /* of the file */
    int fd;          /* loose: kept for reading; else -1 */
    bool writable;
    uint64_t staged_bytes;
    struct dkv_readers *readers;   /* the worker's */
    struct dkv_imported *imported; /* GPU memory, `base` is the device's, or pinned; else NULL */
};

/* GPU memory whose chunks have not all come. */
struct dkv_arriving {
    uint32_t number; /* 0: none */
    struct dkv_link_loan loan;
    uint32_t n_come;
    struct dkv_import_chunk *chunks; /* [loan.n_chunks] */
};

struct dkv_worker_memory {
    unsigned char *arena;
    uint64_t arena_bytes;
    struct dkv_held *held; /* [n_held], by number - DKV_LINK_LOANS */
    uint32_t n_held;
    struct dkv_readers *readers; /* made with the first loose loan */
    struct dkv_arriving arriving;
    struct dkv_imports imports; /* to be initialised when the engine is open */
};

enum dkv_status dkv_worker_memory_open(struct dkv_worker_memory *memory, int arena_fd,
                                       uint64_t arena_bytes, struct dkv_error *err);
void dkv_worker_memory_close(struct dkv_worker_memory *memory);

/* Takes the fd, also on failure. *more_out: chunks follow, and the last one decides. */
enum dkv_status dkv_worker_memory_attach(struct dkv_worker_memory *memory, uint32_t number, int fd,
                                         const struct dkv_link_loan *loan, bool *more_out,
                                         struct dkv_error *err);
enum dkv_status dkv_worker_memory_chunk(struct dkv_worker_memory *memory, uint32_t number, int fd,
                                        const struct dkv_link_chunk *chunk, bool *more_out,
                                        struct dkv_error *err);

/* False: it is GPU memory, or pinned, and let go of later, by dkv_imports_release(). */
bool dkv_worker_memory_detach(struct dkv_worker_memory *memory, uint32_t number);

/* A dkv_link_find_fn; owner is the dkv_worker_memory. */
const void *dkv_worker_memory_find(void *owner, uint32_t number);

/* Where an output goes; NULL if it is nowhere, or in memory that is not there to be written. */
void *dkv_worker_memory_output(const struct dkv_worker_memory *memory,
                               const struct dkv_link_addr *at);

/* The loan of that number; NULL if that is not a loan's. */
struct dkv_held *dkv_worker_memory_held(struct dkv_worker_memory *memory, uint32_t number);

/* worker_stage.c: reads what the block needs from loose loans. INVALID if the file has become too
 * short. */
enum dkv_status dkv_worker_memory_stage(struct dkv_worker_memory *memory,
                                        const struct dkv_link_block *packed,
                                        const struct dkv_block *block, struct dkv_error *err);

/* No batch is in flight: what was staged can go. */
void dkv_worker_memory_idle(struct dkv_worker_memory *memory);

#endif
