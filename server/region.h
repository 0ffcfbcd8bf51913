/* Memory that a client shares: the session's side of a loan.
 *
 * Workers read the loan in place (loan.h). The front itself touches no mapping of a client's: the
 * few bytes that it needs (a fence's slot, query rows around the end of a ring) it reads by
 * pread(), and answers it writes by pwrite(), neither of which can fault. Memory of a GPU it cannot
 * touch at all: a fence or an output must be host memory.
 *
 * A page that an answer makes in a file is charged to this process, for as long as somebody has the
 * file, so answers go to files that have all of theirs, whose owner paid for them. That is looked
 * at when the region is registered, when a request names it and before the front writes; an owner
 * who takes pages away between a look and the write gets them back at our cost, once for each
 * answer.
 *
 * A region is counted: its session holds one reference, every request in flight that names it
 * another and a use. detach() takes the memory away from new requests; when the last use has ended
 * and every worker has let go, `on_settled` is called. attach() and detach() settle once each.
 *
 * Owner   counted.
 * Thread  loop.
 * Errors  INVALID says what is wrong with the fd, UNSUPPORTED names the kinds that are possible.
 */
#ifndef DKV_SERVER_REGION_H
#define DKV_SERVER_REGION_H

#include "proto/wire.h"
#include "server/backend.h"

struct dkv_region;

/* What was asked for is done, or, for an attach that workers could not do, why not. */
typedef void (*dkv_region_settled_fn)(void *owner, const struct dkv_error *error);

struct dkv_region {
    uint32_t n_refs;
    uint32_t n_uses; /* requests in flight */
    uint32_t generation;
    bool attached; /* new requests may use it */
    bool writable;
    bool fills;
    struct dkv_backend *backend;
    struct dkv_loan *loan; /* NULL: detached, and let go of */
    uint64_t bytes;
    dkv_region_settled_fn on_settled; /* NULL: nothing is under way that somebody waits for */
    void *owner;
};

/* What a client passed. */
struct dkv_region_source {
    const struct dkv_wire_region *wire;
    const int *fds;         /* as many as belong to it; they stay the caller's */
    uint64_t connection;    /* a number of its own for each */
    bool trusted;           /* of the daemon's own user */
    const char *shm_prefix; /* of its names; NULL or "": it may not name memory */
    uid_t uid;              /* the lender's, whose named memory must be */
    bool fills;             /* answers may go where its file has no page yet */
};

/* A new region. on_settled may be called within. */
enum dkv_status dkv_region_new(struct dkv_backend *backend, const struct dkv_region_source *source,
                               dkv_region_settled_fn on_settled, void *owner,
                               struct dkv_region **region_out, struct dkv_error *err);

/* Gives a detached region its memory back. INVALID unless it was let go of and the generation
 * grew. */
enum dkv_status dkv_region_attach(struct dkv_region *region, const struct dkv_region_source *source,
                                  dkv_region_settled_fn on_settled, void *owner,
                                  struct dkv_error *err);

/* on_settled (or NULL) may be called within. It must be attached and settled. */
void dkv_region_detach(struct dkv_region *region, dkv_region_settled_fn on_settled, void *owner);

/* Its session is gone: detaches if need be, forgets on_settled and drops the session's reference.
 * Returns the owner given beside a forgotten on_settled, else NULL. */
void *dkv_region_abandon(struct dkv_region *region);

void dkv_region_unref(struct dkv_region *region); /* NULL is fine */

/* A request needs it until unuse(). It must be attached. */
void dkv_region_use(struct dkv_region *region);
void dkv_region_unuse(struct dkv_region *region);

/* Where blocks of jobs point. */
static inline const void *dkv_region_base(const struct dkv_region *region)
{
    return dkv_loan_base(region->loan);
}

static inline bool dkv_region_on_gpu(const struct dkv_region *region)
{
    return dkv_loan_on_gpu(region->loan);
}

/* May answers go there? INVALID if the file has lost pages. */
enum dkv_status dkv_region_check_pages(const struct dkv_region *region, struct dkv_error *err);

/* Copies [offset, offset + bytes) from or to a region of host memory. The range must lie inside it,
 * and a use be held. INVALID if its owner has cut the file short, or taken pages of one that is
 * written. */
enum dkv_status dkv_region_read(const struct dkv_region *region, uint64_t offset, void *to,
                                uint64_t bytes, struct dkv_error *err);
enum dkv_status dkv_region_write(const struct dkv_region *region, uint64_t offset, const void *from,
                                 uint64_t bytes, struct dkv_error *err);

#endif
