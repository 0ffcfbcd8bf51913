/* Means of whole trials are compared, since single waits are noisy: one that was interrupted counts
 * as twice the longest that is looked through, and no more. */
#include "proto/look.h"

#define HOLD_LOOKING 1024u  /* waits, while looking wins */
#define HOLD_MAX     16384u /* while it loses */

static void turn(struct dkv_look *look, bool looks, unsigned n_hold)
{
    look->looks = looks;
    look->n = 0;
    look->sum_ns = 0;
    look->n_hold = n_hold;
}

static void judge_sleeping(struct dkv_look *look, uint64_t mean_ns)
{
    look->asleep_ns = mean_ns;
    if (look->n >= look->n_hold && mean_ns <= DKV_LOOK_NS)
        turn(look, true, HOLD_LOOKING);
}

static void judge_looking(struct dkv_look *look, uint64_t mean_ns)
{
    if (mean_ns + DKV_LOOK_GAIN > look->asleep_ns) {
        turn(look, false, look->n_defeated_hold);
        if (look->n_defeated_hold < HOLD_MAX)
            look->n_defeated_hold *= 2;
        return;
    }
    look->n_defeated_hold = 2 * DKV_LOOK_TRIAL;
    if (look->n >= look->n_hold)
        turn(look, false, DKV_LOOK_TRIAL);
}

void dkv_look_learn(struct dkv_look *look, uint64_t waited_ns)
{
    look->sum_ns += waited_ns < 2 * DKV_LOOK_NS ? waited_ns : 2 * DKV_LOOK_NS;
    if (++look->n % DKV_LOOK_TRIAL != 0)
        return;
    const uint64_t mean_ns = look->sum_ns / DKV_LOOK_TRIAL;
    look->sum_ns = 0;
    if (look->looks)
        judge_looking(look, mean_ns);
    else
        judge_sleeping(look, mean_ns);
}
