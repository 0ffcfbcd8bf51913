/* Memory that the daemon and its workers share: bodies, descriptors of jobs, answers.
 *
 * One sealed memfd, mapped whole by each of them at whatever address, so that a place in it is an
 * offset. It is sparse: it has the size of everything that could be wanted at once, and only pages
 * that were touched exist. A freed range goes back to the system at once, except that small ones
 * are kept, up to DKV_ARENA_KEPT_BYTES, and that the pages of large ones, which take a millisecond
 * for each MiB, go when scrub() is called, in the pauses of whoever has others to serve.
 *
 * What is in a kept range is another request's data. Nobody reads a range that it has not written.
 *
 * Owner   open/close. Ranges belong to whoever allocated them; a worker only borrows them.
 * Thread  loop. Bytes: any.
 * Errors  NOMEM if the system refuses.
 */
#ifndef DKV_SERVER_ARENA_H
#define DKV_SERVER_ARENA_H

#include "proto/types.h"

#define DKV_ARENA_PAGE        4096u
#define DKV_ARENA_KEPT_BYTES  (8u << 20)
#define DKV_ARENA_DIRTY_BYTES (UINT64_C(256) << 20) /* that wait for scrub() at most */
#define DKV_ARENA_CLASSES     8u /* kept ranges: 4 KiB .. 512 KiB by powers of two */

struct dkv_arena_extent;
struct dkv_arena_kept;

struct dkv_arena {
    int fd;
    unsigned char *base;
    uint64_t bytes;
    uint64_t used_bytes;                   /* allocated ranges, whether touched or not */
    uint64_t kept_bytes;                   /* of ranges that are free and not given back */
    struct dkv_arena_extent *free_extents; /* ascending */
    struct dkv_arena_extent *dirty;        /* free, with pages that wait for scrub() */
    uint64_t dirty_bytes;                  /* of those pages */
    struct dkv_arena_kept *kept[DKV_ARENA_CLASSES];
};

/* An arena of `bytes`, or of less if the system does not have so much address space, but never less
 * than `least_bytes`. Nothing is touched. */
enum dkv_status dkv_arena_open(struct dkv_arena *arena, uint64_t bytes, uint64_t least_bytes,
                               struct dkv_error *err);

/* Every range must have been freed. A zero arena is fine. */
void dkv_arena_close(struct dkv_arena *arena);

/* A range of `bytes`, aligned to a page. NULL if there is no room. Its content is undefined. */
void *dkv_arena_alloc(struct dkv_arena *arena, uint64_t bytes);

/* `bytes` as allocated, of which at most the first `touched_bytes` were ever written. NULL is fine.
 */
void dkv_arena_free(struct dkv_arena *arena, void *range, uint64_t bytes, uint64_t touched_bytes);

/* Gives back up to `bytes` of the pages that wait; true if more do. */
bool dkv_arena_scrub(struct dkv_arena *arena, uint64_t bytes);

/* Backs the pages of [range, range + bytes) now, many at a time, which is cheaper than one by one
 * as they are touched. A hint. */
void dkv_arena_populate(void *range, uint64_t bytes);

static inline bool dkv_arena_has(const struct dkv_arena *arena, const void *at)
{
    const unsigned char *byte = at;
    return byte >= arena->base && byte < arena->base + arena->bytes;
}

static inline uint64_t dkv_arena_offset(const struct dkv_arena *arena, const void *at)
{
    return (uint64_t)((const unsigned char *)at - arena->base);
}

#endif
