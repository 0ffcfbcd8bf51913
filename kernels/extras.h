/* The optional tensors of a block, whose elements the gate has not looked at.
 *
 * Each function says INVALID and names the first offending element, or OK.
 *
 * Thread  any.
 */
#ifndef DKV_KERNELS_EXTRAS_H
#define DKV_KERNELS_EXTRAS_H

#include "proto/request.h"

#ifdef __cplusplus
extern "C" {
#endif

/* token_weight and carry_in: finite numbers of 0 or more at every valid token. */
enum dkv_status dkv_extras_check_factors(const struct dkv_block *block, struct dkv_error *err);

/* value_metric of `count` query heads from `first` on: finite. */
enum dkv_status dkv_extras_check_metric(const struct dkv_block *block, const struct dkv_plan *plan,
                                        uint32_t first, uint32_t count, struct dkv_error *err);

/* external_scores of one KV head: finite. */
enum dkv_status dkv_extras_check_external(const struct dkv_block *block, uint32_t head,
                                          struct dkv_error *err);

/* All that the block has, for engines that look before they compute; nonfinite=mask forgives the
 * caller's scores. */
enum dkv_status dkv_extras_check(const struct dkv_block *block, const struct dkv_params *params,
                                 const struct dkv_plan *plan, struct dkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
