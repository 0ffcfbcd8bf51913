/* The general selection: scores of all KV heads of a block in, the tokens to keep out.
 *
 * select.h is the fast form for one head's scores that are never negative; this one takes scores of
 * any sign in double precision and whatever looks at more than one head or at more than scores. The
 * order is the same: class, pooled score, raw score, lower index; across heads then the lower head.
 *
 * A block's arrays are [heads][n], valid tokens only.
 *
 * Thread  any; no shared state. Never blocks or allocates.
 * Errors  none: arguments were checked by dkv_request_validate().
 */
#ifndef DKV_KERNELS_CHOOSE_H
#define DKV_KERNELS_CHOOSE_H

#include "kernels/select.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dkv_choice {
    uint32_t heads;
    struct dkv_select_spec spec; /* of every head; `keep` is its share */
    bool any_sign;               /* padding must not win a maximum over negative scores */
    bool one_set;                /* gqa=layer: `raw` holds the same scores for every head */
    bool two_stages; /* criticalkv: half by pooled score, the rest by (pooled + 1e-4) * weight */
    const float *weight; /* [heads][weight_stride], or NULL: 1 */
    uint64_t weight_stride;
};

/* Memory of a block, dkv_choice_bytes() of it, aligned to 64. */
struct dkv_choice_work {
    double *raw;          /* in: [heads][n], finite */
    uint8_t *flags;       /* in: [heads][n] of enum dkv_token_flag */
    double *pooled;       /* [heads][n] */
    uint8_t *token_class; /* [heads][n] */
    uint8_t *kept;        /* out: [heads][n], 1: kept */
};

size_t dkv_choice_bytes(uint32_t heads, uint64_t n);
void dkv_choice_place(struct dkv_choice_work *work, uint32_t heads, uint64_t n, void *memory);

/* Fills `kept`, and keep_out with the indices, head after head, ascending. With two_stages `raw`
 * becomes the score of the second stage. */
void dkv_choose(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                int32_t *keep_out);

#ifdef __cplusplus
}
#endif
#endif
