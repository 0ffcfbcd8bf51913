/* The best of many: the order of choose.h's candidates, and the cut through it.
 *
 * Thread  any; no shared state. Never blocks or allocates.
 */
#ifndef DKV_KERNELS_RANK_H
#define DKV_KERNELS_RANK_H

#include "proto/types.h"

/* A chunk that sinks or recent tokens are in is kept before everything else: it may be one that is
 * not full, and what is kept is counted in full ones beside them. */
enum dkv_token_class {
    DKV_CLASS_LOWEST = 0,
    DKV_CLASS_CANDIDATE,
    DKV_CLASS_PROTECTED,
    DKV_CLASS_PLACE,
    DKV_TOKEN_CLASSES
};

/* Units (tokens or chunks) that are ranked together: n of each head, `stride` from head to head. */
struct dkv_units {
    const double *pooled, *raw; /* the same: there is no second score to look at */
    const uint8_t *token_class;
    uint32_t heads;
    uint64_t n, stride;
};

/* kept[] of all units: 1 for the k best, 1 <= k <= units. Class, pooled score, raw score, lower
 * index, lower head. */
void dkv_keep_best(const struct dkv_units *units, uint64_t k, uint8_t *kept);

#endif
