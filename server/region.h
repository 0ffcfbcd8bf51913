/* Memory that a client shares with the daemon: what its fd really is, and who still reads it.
 *
 * A memfd that is sealed against shrink and grow and has all its pages is mapped, and read and
 * written in place. Everything else that is memory (no seals, or holes that reading would fill at
 * our expense) is only read, by copying what a request needs; it costs no more than its readers
 * ask for.
 *
 * A region is counted: its session holds one reference, every request in flight that names it
 * another. detach() takes the memory away from new requests; it is unmapped, and its fd closed,
 * when the last of them has let go, and then `on_idle` is called once.
 *
 * Owner   counted; the last unref() unmaps, closes and frees.
 * Thread  loop. The mapping and dkv_region_read() may be used from any while a use is held.
 * Errors  INVALID says what is wrong with the fd, UNSUPPORTED names the kinds that are possible.
 */
#ifndef DKV_SERVER_REGION_H
#define DKV_SERVER_REGION_H

#include "proto/wire.h"

struct dkv_region;

/* All uses of a detached region have ended. */
typedef void (*dkv_region_idle_fn)(struct dkv_region *region, void *owner);

struct dkv_region {
    uint32_t n_refs;
    uint32_t n_uses; /* requests in flight */
    uint32_t generation;
    bool attached; /* new requests may use it */
    bool writable;
    int fd;          /* -1 once it is idle and detached */
    uint8_t *base;   /* NULL: not mapped, read it by dkv_region_read() */
    uint64_t offset; /* of the region in the file */
    uint64_t bytes;
    dkv_region_idle_fn on_idle; /* set by detach() */
    void *idle_owner;
};

/* A new region over `fd`, taken if this succeeds. */
enum dkv_status dkv_region_new(const struct dkv_wire_region *wire, int fd,
                               struct dkv_region **region_out, struct dkv_error *err);

/* Gives a detached region its memory back. INVALID unless it is idle and the generation grew. */
enum dkv_status dkv_region_attach(struct dkv_region *region, const struct dkv_wire_region *wire,
                                  int fd, struct dkv_error *err);

/* Calls on_idle now if nobody uses it. */
void dkv_region_detach(struct dkv_region *region, dkv_region_idle_fn on_idle, void *owner);

/* Nobody wants to hear of on_idle any more. */
void dkv_region_forget(struct dkv_region *region);

void dkv_region_unref(struct dkv_region *region); /* NULL is fine */

/* A request reads it until unuse(). The region must be attached. */
void dkv_region_use(struct dkv_region *region);
void dkv_region_unuse(struct dkv_region *region);

/* Copies [offset, offset + bytes) of the region, mapped or not. The range must lie inside it.
 * INVALID if its owner has cut the file short. */
enum dkv_status dkv_region_read(const struct dkv_region *region, uint64_t offset, void *to,
                                uint64_t bytes, struct dkv_error *err);

#endif
