/* Work list of the fast scorer: which thread block does what in which turn. Made by the host
 * (fast_scorer.cu), read by the kernel. */
#ifndef DKV_KERNELS_CUDA_FAST_PLAN_H
#define DKV_KERNELS_CUDA_FAST_PLAN_H

#include "kernels/cuda/plan.h"

/* One thread block's work in one turn: keys chunk * chunk_keys .. of one unit, for one group of its
 * rows. The groups of a chunk follow each other on the same thread block, which adds up scores. */
struct dkv_fast_item {
    uint32_t unit;    /* index in the wave */
    uint32_t block;   /* the unit's */
    uint32_t counter; /* index of this unit's and row group's counters */
    uint32_t chunk_keys;
    uint16_t chunk;
    uint16_t chunks; /* of the unit; 0: nothing to do in this turn */
    uint32_t row_group;
};

/* Progress of one row group of a unit, 0 at the start. */
struct dkv_fast_counters {
    unsigned partials; /* chunks whose pass A is in the ring */
    unsigned merged;   /* slices of the merge that are in unit.work */
};

struct dkv_fast_args {
    const struct dkv_cu_block *blocks;
    const struct dkv_cu_unit *units;
    const struct dkv_fast_item *items; /* [turns][gridDim.x] */
    struct dkv_fast_counters *counters;
    unsigned char *ring; /* [TURNS][gridDim.x] partials */
    uint32_t turns;
};

#endif
