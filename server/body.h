/* A request body, received straight into the place where a worker reads it: the arena.
 *
 *   mapping   page-aligned, a range reserved once: from Content-Length, or for chunked uploads
 *             the whole allowed size (address space only; pages come as bytes arrive)
 *   pad       0..63 bytes, so that the tensor section starts on a 64-byte boundary
 *   head      JSON, head_bytes
 *   tensors   the rest
 *
 * Nothing grows by copying. A released mapping stays warm for DKV_BODY_WARM_MS, for a next body of
 * about that size, and then goes back to the system; at most one is kept, and one that does not
 * suit the next body goes before that body gets its own, so what is resident is never more than the
 * bodies in flight, one released, and what waits in the arena to be given back. Small bodies (up to
 * DKV_BODY_SMALL_BYTES) are the arena's to keep.
 *
 * Owner   dkv_body is embedded in its owner; reserve/release. Moving it: copy the struct and zero
 *         the source.
 * Thread  one pool belongs to the loop thread; release() too. Reading the bytes: any.
 * Errors  NOMEM if the system refuses, BUSY if the quota says so: nothing was changed.
 */
#ifndef DKV_SERVER_BODY_H
#define DKV_SERVER_BODY_H

#include "server/arena.h"
#include "server/quota.h"

#define DKV_BODY_ALIGN       64u
#define DKV_BODY_SMALL_BYTES (256u << 10)
#define DKV_BODY_WARM_MS     1000u

struct dkv_body_pool {
    struct dkv_arena *arena;
    struct dkv_quota quota; /* bodies with a length: all of it; chunked ones: what has arrived */
    void *warm;             /* NULL, or a mapping released at warm_ms */
    uint64_t warm_bytes;
    uint64_t warm_ms;
};

struct dkv_body {
    struct dkv_body_pool *pool; /* NULL: nothing reserved */
    void *mapping;
    uint64_t mapping_bytes;
    unsigned char *data;     /* the first byte received */
    uint64_t capacity_bytes; /* at most this many may arrive */
    uint64_t received_bytes;
    struct dkv_charge charge;
    uint64_t populated_bytes; /* of the mapping: pages that exist */
};

/* `limit_bytes` of all bodies and answers together, `client_bytes` of one client's. */
void dkv_body_pool_init(struct dkv_body_pool *pool, struct dkv_arena *arena, uint64_t limit_bytes,
                        uint64_t client_bytes);

/* Gives the warm mapping back if it has had its time. */
void dkv_body_pool_trim(struct dkv_body_pool *pool, uint64_t now_ms);

/* Gives everything back. Every body must have been released. */
void dkv_body_pool_fini(struct dkv_body_pool *pool);

/* Reserves room for `capacity_bytes`, whose first `head_bytes` are the JSON head. `length_known`:
 * that many will arrive, so they are charged at once, to `holder` too, which may be NULL. */
enum dkv_status dkv_body_reserve(struct dkv_body *body, struct dkv_body_pool *pool,
                                 struct dkv_quota_holder *holder, uint64_t capacity_bytes,
                                 uint64_t head_bytes, bool length_known, struct dkv_error *err);

/* Adds received bytes. TOO_LARGE past the capacity, BUSY if the pool cannot be charged; nothing is
 * stored then. */
enum dkv_status dkv_body_append(struct dkv_body *body, const void *bytes, size_t n_bytes,
                                struct dkv_error *err);

/* Gives the memory back. A zero body is fine. */
void dkv_body_release(struct dkv_body *body);

#endif
