/* Memory that requests hold in the arena, charged before it is taken: bodies, copies, answers.
 *
 * Two bounds: one on everything, which keeps the daemon within the memory it may use, and one on
 * what a single client holds, so that none of them can make all others wait. A client is whoever
 * shares the device fairly with others (backend.h): the holder of a token over all its connections,
 * else a connection.
 *
 *   quota    one, the daemon's
 *   holder   one per client; counted, since a charge may outlive the client's last connection
 *   charge   what one body or one answer has taken; embedded in it
 *
 * Thread  loop.
 * Errors  BUSY, with the figures: nothing was charged.
 */
#ifndef DKV_SERVER_QUOTA_H
#define DKV_SERVER_QUOTA_H

#include "proto/types.h"

struct dkv_quota {
    uint64_t limit_bytes;
    uint64_t client_bytes; /* of it one client may hold, at most limit_bytes */
    uint64_t charged_bytes;
};

struct dkv_quota_holder {
    unsigned n_refs;
    uint64_t charged_bytes;
    bool over_share; /* why the last charge was refused: its own share, not the common bound */
};

struct dkv_charge {
    struct dkv_quota *quota;         /* NULL: nothing is charged */
    struct dkv_quota_holder *holder; /* referenced; NULL: only the common bound counts */
    uint64_t bytes;
};

/* With one reference, the caller's. NULL if out of memory. */
struct dkv_quota_holder *dkv_quota_holder_new(void);
void dkv_quota_holder_unref(struct dkv_quota_holder *holder); /* NULL is fine */

/* Charges of 0 bytes so far. A NULL quota is fine: add() always succeeds then. */
struct dkv_charge dkv_charge_begin(struct dkv_quota *quota, struct dkv_quota_holder *holder);

/* Takes `bytes` more. BUSY. */
enum dkv_status dkv_charge_add(struct dkv_charge *charge, uint64_t bytes, struct dkv_error *err);

/* Gives everything back. A zero charge is fine. */
void dkv_charge_end(struct dkv_charge *charge);

#endif
