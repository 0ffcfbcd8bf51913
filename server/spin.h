/* Looking before sleeping: for a moment after work has moved, the loop asks for events instead of
 * waiting for them.
 *
 * A processor that sleeps takes 10 to 20 us to wake up, in a virtual machine more, and a request
 * crosses three processes; beside a kernel of 60 us that is most of what the daemon adds. Nothing
 * spins while nobody asks.
 *
 * With a patience, the loop looks that long whatever comes. Without one it may learn whether
 * looking pays (proto/look.h), for the next request and for the end of a batch apart.
 *
 * Owner   open/close; closed when on_closed was called.
 * Thread  loop.
 */
#ifndef DKV_SERVER_SPIN_H
#define DKV_SERVER_SPIN_H

#include "proto/look.h"
#include "server/config.h"

#include <uv.h>

enum dkv_spin_for { DKV_SPIN_FOR_REQUEST, DKV_SPIN_FOR_BATCH };

struct dkv_spin {
    uv_idle_t idle; /* first; while it runs, the loop does not wait. `data` is the caller's */
    uint64_t patience_ns;
    bool learns;
    uint64_t until_ns;

    enum dkv_spin_for what; /* is awaited */
    uint64_t since_ns;
    struct dkv_look looks[2]; /* by what */
};

/* What the configuration comes to on this machine: 0 is not by patience. */
uint64_t dkv_spin_patience_ns(const struct dkv_config *config);

/* Without a patience: who may learn. The client looks before the front does, which is as good for
 * both of them, and the front before the worker; one processor is everybody else's. */
bool dkv_spin_front_learns(const struct dkv_config *config);
bool dkv_spin_worker_learns(const struct dkv_config *config);

void dkv_spin_open(struct dkv_spin *spin, uv_loop_t *loop, uint64_t patience_ns, bool learns);
void dkv_spin_close(struct dkv_spin *spin, uv_close_cb on_closed);

/* Something moved at `now_ns`, and the next to come is `what`. */
void dkv_spin_poke(struct dkv_spin *spin, enum dkv_spin_for what, uint64_t now_ns);

#endif
