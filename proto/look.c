/* Means of whole trials are compared, since single waits are noisy: one that was interrupted counts
 * as somewhat longer than the others, and no more. */
#include "proto/look.h"

#define HOLD_LOOKING 1024u  /* waits, while looking wins */
#define HOLD_MAX     16384u /* while it loses */
#define OUTLIER_NS   (2 * DKV_LOOK_NS)
#define NAP_MAX_NS   UINT64_C(10000000)
#define NAP_EARLY_NS UINT64_C(100000) /* a timer's slack, and the time to wake up */
#define NAP_AWAY_NS  UINT64_C(40000)  /* as far waits may be from their mean, on average */

static void turn(struct dkv_look *look, bool looks, unsigned n_hold)
{
    look->looks = looks;
    look->n = 0;
    look->n_hold = n_hold;
}

/* Waits like these can be looked through, after a nap if they are long. */
static bool is_worth_a_trial(const struct dkv_look *look, uint64_t mean_ns, uint64_t away_ns)
{
    if (mean_ns <= DKV_LOOK_NS)
        return true;
    return look->naps && look->asleep_ns != 0 && mean_ns <= NAP_MAX_NS && away_ns <= NAP_AWAY_NS;
}

static void judge_sleeping(struct dkv_look *look, uint64_t mean_ns, uint64_t away_ns)
{
    if (look->n >= look->n_hold && is_worth_a_trial(look, mean_ns, away_ns)) {
        look->nap_ns = mean_ns <= DKV_LOOK_NS ? 0 : mean_ns - NAP_EARLY_NS;
        turn(look, true, HOLD_LOOKING);
    }
    look->asleep_ns = mean_ns;
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

static uint64_t distance(uint64_t a, uint64_t b)
{
    return a > b ? a - b : b - a;
}

void dkv_look_learn(struct dkv_look *look, uint64_t waited_ns)
{
    const uint64_t usual_ns = look->naps ? look->asleep_ns : 0;
    const uint64_t most_ns = look->naps && usual_ns == 0 ? NAP_MAX_NS : usual_ns + OUTLIER_NS;
    const uint64_t ns = waited_ns < most_ns ? waited_ns : most_ns;
    look->sum_ns += ns;
    look->away_ns += distance(ns, usual_ns);
    if (++look->n % DKV_LOOK_TRIAL != 0)
        return;
    const uint64_t mean_ns = look->sum_ns / DKV_LOOK_TRIAL;
    const uint64_t away_ns = look->away_ns / DKV_LOOK_TRIAL;
    look->sum_ns = look->away_ns = 0;
    if (look->looks)
        judge_looking(look, mean_ns);
    else
        judge_sleeping(look, mean_ns, away_ns);
}
