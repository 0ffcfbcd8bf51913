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

/* Of the stream scorers' kernels. */
struct dkv_stream_args {
    const struct dkv_cu_block *blocks;
    const struct dkv_cu_unit *units;
    const struct dkv_fast_item *items; /* [turns][who takes them]; chunks 0: nothing in this turn */
    uint32_t turns;
};

/* What all scorers of the tensor cores ask of device and block, types apart. */
static inline bool dkv_fast_takes_layout(const struct dkv_cu_device *device,
                                         const struct dkv_cu_block *block)
{
    return device->major == 9 && device->shared_bytes_max >= 232448 &&
           block->v_dim == block->head_dim && block->k.align >= 16 && block->v.align >= 16 &&
           block->eps == 0.0f && block->p_round == 0 && block->gqa != DKV_GQA_MAX &&
           block->nonfinite == DKV_NONFINITE_ERROR;
}

/* The types: all of one, or an fp8 cache with queries that become fp16 as good as exactly. */
static inline bool dkv_fast_takes_types(const struct dkv_cu_block *block)
{
    if (!dkv_cu_is_fp8(block->k.dtype))
        return block->v.dtype == block->k.dtype && block->q_dtype == block->k.dtype &&
               block->q_align >= 4;
    if (!dkv_cu_is_fp8(block->v.dtype))
        return false;
    if (dkv_cu_is_fp8(block->q_dtype))
        return block->q_align >= 4 && block->q_scale != 0.0f;
    return (block->q_dtype == DKV_BF16 || block->q_dtype == DKV_FP16) && block->q_align >= 8;
}

#endif
