/* Memory that a client lends: a memfd or another file of tmpfs, or memory of a GPU, which workers
 * read in place.
 *
 * The front never maps it. It reserves as many addresses as the loan has bytes, which nobody can
 * read: a block of a job points into them as if the memory were there, and the link turns such a
 * pointer into (loan, offset). A sealed memfd without holes is mapped by the workers; another one
 * is read by pread() into the worker's own memory, since reading a mapping of it could fault.
 *
 * Memory of a GPU concerns the one worker whose device holds it. What its owner passed, a handle or
 * one descriptor per chunk, is kept as long as the loan, so that the next worker gets it too; it
 * pins the memory no longer than the mapping does. Between chunks nothing is mapped, and reading
 * there would cost the worker its life, so whoever makes views asks dkv_loan_end() first.
 *
 * The loan lasts until the last job that names it has ended, whatever its owner did, and every
 * worker has let go. The front keeps the fd until then, so that a worker that is restarted gets it
 * again.
 *
 * Owner   attach/detach in backend.h. A job holds its loans while the backend has it.
 * Thread  loop.
 * Errors  attach: INVALID if the fd is no such memory or does not have these bytes; NOMEM.
 */
#ifndef DKV_SERVER_LOAN_H
#define DKV_SERVER_LOAN_H

#include "server/link.h"
#include "server/list.h"

struct dkv_wire_region;

#define DKV_LOANS_MAX       65536u
#define DKV_LOANS_BYTES_MAX (UINT64_C(64) << 40) /* of all: half of a process's addresses */
#define DKV_LOAN_EVERYWHERE UINT32_MAX

struct dkv_loan;

/* What it is, for whoever counts. */
enum dkv_loan_kind {
    DKV_LOAN_SEALED = 0, /* mapped and read in place */
    DKV_LOAN_LOOSE,      /* read by pread() */
    DKV_LOAN_DEVICE,     /* memory of a GPU */
    DKV_LOAN_KINDS,
};

/* Every worker has answered: it is mapped, or why it could not be. May come before attach()
 * returns if no worker is up. */
typedef void (*dkv_loan_attached_fn)(struct dkv_loan *loan, void *owner,
                                     const struct dkv_error *error);

/* It is given back: no job and no worker has it any more. The loan is gone. */
typedef void (*dkv_loan_released_fn)(void *owner);

struct dkv_backend;

struct dkv_loan_chunk {
    uint64_t offset, bytes; /* in the reservation, as the loan's own offset */
    int fd;                 /* our own */
};

struct dkv_loan {
    struct dkv_backend *backend;
    uint32_t number; /* DKV_LINK_LOANS and up, reused */
    enum dkv_link_memory memory;
    uint32_t device; /* that holds it; DKV_LOAN_EVERYWHERE: host memory */
    int fd;          /* HOST: our own, else -1 */
    uint64_t offset; /* of the file, the allocation, the reservation */
    uint64_t bytes;
    bool loose;                    /* its owner can resize it, or it has holes: pread() only */
    bool writable;                 /* answers may go there */
    struct dkv_link_key key;       /* CUDA_LEGACY; HOST: its owner */
    struct dkv_loan_chunk *chunks; /* [n_chunks], CUDA_VMM */
    uint32_t n_chunks;
    const void *base; /* addresses that stand for it */
    unsigned n_jobs;
    uint32_t attaching; /* bit d: device d has not answered ATTACH */
    uint32_t holding;   /* bit d: device d was told of it and has not answered DETACH */
    bool detached;
    struct dkv_error error;
    dkv_loan_attached_fn on_attached;
    dkv_loan_released_fn on_released;
    void *owner;
};

/* Makes a loan: looks at the fd, duplicates it and reserves addresses. */
enum dkv_status dkv_loan_new(int fd, uint64_t offset, uint64_t bytes, struct dkv_loan **loan_out,
                             struct dkv_error *err);

/* Makes one of GPU memory, which a REGION_ADD describes and dkv_wire_get_region() has judged.
 * `owner` is the connection's number. The fds, one per chunk, are duplicated. */
enum dkv_status dkv_loan_new_cuda(const struct dkv_wire_region *wire, const int *fds,
                                  uint64_t owner, uint32_t device, struct dkv_loan **loan_out,
                                  struct dkv_error *err);
void dkv_loan_free(struct dkv_loan *loan);

enum dkv_loan_kind dkv_loan_kind_of(const struct dkv_loan *loan);

/* Where the memory that holds byte `offset` of the loan ends; 0: none does. */
uint64_t dkv_loan_end(const struct dkv_loan *loan, uint64_t offset);

/* Descriptors that it holds. */
static inline uint32_t dkv_loan_fds(const struct dkv_loan *loan)
{
    return (loan->fd >= 0) + loan->n_chunks;
}

static inline bool dkv_loan_on_gpu(const struct dkv_loan *loan)
{
    return loan->memory != DKV_LINK_HOST;
}

/* Where a block's pointers may point. */
struct dkv_link_range dkv_loan_range(const struct dkv_loan *loan);

static inline const void *dkv_loan_base(const struct dkv_loan *loan)
{
    return loan->base;
}

#endif
