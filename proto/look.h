/* Whether it pays to look for something instead of sleeping until it comes, found out by trying.
 *
 * A processor that sleeps takes 10 to 20 us to wake up, in a virtual machine or after a long sleep
 * more. Looking spares that where a processor is free for it, and where none is, it keeps somebody
 * else from doing what is waited for. Which of the two it is depends on the machine, on what else
 * runs there and on how long the work takes. So DKV_LOOK_TRIAL waits are slept through and, if they
 * were short, as many looked through; who was sooner on average is right for a while, and after
 * each defeat of looking for twice as long.
 *
 * Who can wait for a time as well may nap: long waits that are alike are slept through but for
 * their end.
 *
 * Thread  any; no clock, no I/O.
 */
#ifndef DKV_PROTO_LOOK_H
#define DKV_PROTO_LOOK_H

#include <stdbool.h>
#include <stdint.h>

#define DKV_LOOK_NS    UINT64_C(150000) /* looking lasts no longer; longer waits are not short */
#define DKV_LOOK_TRIAL 32u              /* waits */
#define DKV_LOOK_GAIN  UINT64_C(4000)   /* by so much looking has to be sooner */

struct dkv_look {
    bool looks;
    uint64_t nap_ns; /* to be slept before */
    bool naps;       /* it may be above 0; the owner's to set */

    unsigned n, n_hold; /* waits in this state, and until the other one is tried */
    unsigned n_defeated_hold;
    uint64_t sum_ns, away_ns; /* of the trial under way, and of their distances from asleep_ns */
    uint64_t asleep_ns;       /* mean of the last trial of sleeping; 0: there was none */
};

#define DKV_LOOK_INIT                                                   \
    (struct dkv_look)                                                   \
    {                                                                   \
        .n_hold = DKV_LOOK_TRIAL, .n_defeated_hold = 2 * DKV_LOOK_TRIAL \
    }

/* A wait is over that took so long. How the next one is to be done is in `looks` and `nap_ns`. */
void dkv_look_learn(struct dkv_look *look, uint64_t waited_ns);

#endif
