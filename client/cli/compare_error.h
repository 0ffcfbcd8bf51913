/* What dropping tokens does to a block's outputs, computed by really dropping them, in float64.
 *
 * For the last `rows` query rows of every query head, a(kept) is the attention over the kept tokens
 * alone. A row that sees none of them has the output 0.
 *
 * Owner   new/free; the block's memory is read by new() alone.
 * Errors  NOMEM; INVALID for an element that is not finite.
 */
#ifndef DKV_CLIENT_CLI_COMPARE_ERROR_H
#define DKV_CLIENT_CLI_COMPARE_ERROR_H

#include "proto/request.h"

struct dkv_outputs {
    uint64_t n, first;    /* stored tokens; the first valid one */
    uint32_t group, rows; /* query heads of a KV head, rows of each */
    uint32_t v_dim;
    double softcap; /* of logits; 0: none */
    double *p;      /* [kv_heads * group * rows][n], 0 where not visible */
    double *all;    /* [kv_heads * group * rows][v_dim] */
    float *value;   /* [kv_heads][n][v_dim] */
};

/* `plan` is the gate's, with window = rows. */
enum dkv_status dkv_outputs_new(const struct dkv_block *block, const struct dkv_plan *plan,
                                double logit_softcap, struct dkv_outputs **out,
                                struct dkv_error *err);
void dkv_outputs_free(struct dkv_outputs *outputs); /* NULL is fine */

/* Sums over query heads and rows; n is how many there were. */
struct dkv_output_error {
    double relative; /* |a(kept) - a(all)| / |a(all)| */
    double squared;  /* |a(kept) - a(all)|^2 */
    uint64_t n;
};

/* Adds what one KV head's kept tokens do. keep [count], ascending. NOMEM. */
enum dkv_status dkv_outputs_error(const struct dkv_outputs *outputs, uint32_t kv_head,
                                  const int32_t *keep, uint64_t count, struct dkv_output_error *sum,
                                  struct dkv_error *err);

#endif
