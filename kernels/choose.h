/* The general selection: scores of all KV heads of a block in, the tokens to keep out.
 *
 * select.h is the fast form for one head's scores that are never negative; this one takes scores of
 * any sign in double precision and whatever looks at more than one head or at more than scores. The
 * order is the same: class, pooled score, raw score, lower index; across heads then the lower head.
 *
 * How heads * keep tokens are dealt out (docs/policies.md):
 *
 *   uniform      keep each
 *   global       the best of all heads together, min_keep of each head's own best safe; exact total
 *   adakv_floor  the same with floor(alpha * keep) safe (kvpress)
 *   adakv_mix    the heads' counts among the best of all, mixed with the mean: per head
 *                round((1 - alpha) * count + floor(alpha * mean)) unprotected (authors; rounding
 * per head moves the total by up to half a token each)
 *
 * With chunks everything is counted in chunks, whose scores are sums; protected chunks are kept.
 *
 * A block's arrays are [heads][n], valid tokens only.
 *
 * Thread  any, and those of `run`; no shared state. Never allocates.
 * Errors  none: arguments were checked by dkv_request_validate().
 */
#ifndef DKV_KERNELS_CHOOSE_H
#define DKV_KERNELS_CHOOSE_H

#include "kernels/select.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Calls task(context, i, thread) for every i below n, in any order, on any threads; returns when
 * all are done. */
typedef void (*dkv_choice_task_fn)(void *context, size_t i, unsigned thread);
typedef void (*dkv_choice_run_fn)(void *crew, dkv_choice_task_fn task, void *context, size_t n);

struct dkv_choice {
    uint32_t heads;
    struct dkv_select_spec spec; /* of every head; `keep` is the mean, or each head's share */
    enum dkv_heads mode;         /* how heads * keep is dealt out */
    double alpha;                /* adakv */
    uint64_t min_keep;           /* tokens of each head, protected ones counted */
    uint64_t chunk;       /* whole chunks, counted from ordinal 0; sinks and recent are such */
    const uint64_t *each; /* [heads] tokens of each head, or NULL */
    bool any_sign;        /* padding must not win a maximum over negative scores */
    bool one_set;         /* gqa=layer: `raw` holds the same scores for every head */
    bool two_stages; /* criticalkv: half by pooled score, the rest by (pooled + 1e-4) * weight */
    const float *weight; /* [heads][weight_stride], or NULL: 1 */
    uint64_t weight_stride;
    dkv_choice_run_fn run; /* what each head can be done on its own; NULL: one after the other */
    void *crew;
};

/* Memory of a block, dkv_choice_bytes() of it, aligned to 64. */
struct dkv_choice_work {
    double *raw;          /* in: [heads][n], finite */
    uint8_t *flags;       /* in: [heads][n] of enum dkv_token_flag */
    double *pooled;       /* [heads][n] */
    uint8_t *token_class; /* [heads][n] */
    uint8_t *kept;        /* out: [heads][n], 1: kept */
    double *unit_raw;     /* [heads][n] of chunks */
    uint64_t *counts;     /* [heads] units kept of each head */
};

size_t dkv_choice_bytes(uint32_t heads, uint64_t n, bool chunks);
void dkv_choice_place(struct dkv_choice_work *work, uint32_t heads, uint64_t n, bool chunks,
                      void *memory);

/* Fills `kept`, keep_out with the indices, head after head, ascending, and counts_out [heads] (may
 * be NULL) with their numbers. With two_stages `raw` becomes the score of the second stage;
 * `pooled` and `token_class` mean nothing afterwards. */
void dkv_choose(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                int32_t *keep_out, uint32_t *counts_out);

/* CAKE's shares: deals `total` to n layers in proportion to their preferences (finite, >= 0; all 0:
 * evenly), none above `most`, exactly. n * most >= total. shares_out [n]. */
void dkv_cake_shares(const double *preferences, size_t n, uint64_t total, uint64_t most,
                     uint64_t *shares_out);

#ifdef __cplusplus
}
#endif
#endif
