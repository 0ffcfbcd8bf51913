/* Looking before sleeping: for a moment after work has moved, the loop asks for events instead of
 * waiting for them.
 *
 * A processor that sleeps takes 10 to 20 us to wake up, in a virtual machine more, and a request
 * crosses three processes; beside a kernel of 60 us that is most of what the daemon adds. Nothing
 * spins while nobody asks.
 *
 * Owner   open/close; closed when on_closed was called.
 * Thread  loop.
 */
#ifndef DKV_SERVER_SPIN_H
#define DKV_SERVER_SPIN_H

#include "server/config.h"

#include <uv.h>

struct dkv_spin {
    uv_idle_t idle; /* first; while it runs, the loop does not wait. `data` is the caller's */
    uint64_t patience_ns;
    uint64_t until_ns;
};

/* What the configuration comes to on this machine: 0 is never. */
uint64_t dkv_spin_patience_ns(const struct dkv_config *config);

void dkv_spin_open(struct dkv_spin *spin, uv_loop_t *loop, uint64_t patience_ns);
void dkv_spin_close(struct dkv_spin *spin, uv_close_cb on_closed);

/* Something moved: more is likely to follow at once, or, if `times` is above 1, in a multiple of
 * that time, as the end of a batch that was launched. */
void dkv_spin_poke(struct dkv_spin *spin, unsigned times);

#define DKV_SPIN_BATCH 5u

#endif
