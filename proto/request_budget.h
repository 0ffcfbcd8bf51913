/* The budget's part of the gate. Private to proto/request*.c. */
#ifndef DKV_PROTO_REQUEST_BUDGET_H
#define DKV_PROTO_REQUEST_BUDGET_H

#include "proto/request.h"

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Fills what the plan says about protection and the number of tokens kept. Shape, window, index and
 * n_blocks of the plan are there. */
enum dkv_status dkv_plan_budget(const struct dkv_block *block, const struct dkv_params *params,
                                struct dkv_plan *plan, struct dkv_error *err);

#endif
