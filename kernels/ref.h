/* The reference: one block scored and selected in double precision, the long way.
 *
 * It judges every engine and shares nothing with them but the element conversions of convert.h:
 * no tiles, no online softmax, no range factor, a full sort instead of a selection. Read ref.c for
 * the definition of every term where docs/numerics.md is short:
 *
 * Inputs      element = stored value * scale. "Input type" for rounding is the query's dtype; fp8
 *             and fp32 do not round.
 * eps == 0    the exact form: term = p^2 |b_j - v_j|^2, b_j the output over all other visible keys
 *             (and the sink logit). With p_round=input, p in front is the rounded one and b_j stays
 *             exact.
 * eps > 0     the published form: term = (p / (1 - p + eps))^2 |a - v_j|^2. With p_round=input, p
 *             is rounded to the input type first and a is made of the rounded p, but is not itself
 *             rounded: that reproduces the authors' PyTorch scores in the golden files.
 * One key     a row that sees a single key (whatever its sink logit) adds nothing to any score;
 *             that key is protected.
 * nonfinite   error: INVALID for any NaN or Inf in a value that would be used: the query's window
 *             rows, and keys and values of valid tokens. mask: a token of a KV head with a
 *             non-finite key or value is invisible there, scores 0 and is in the lowest class,
 *             protected or not; a non-finite query stays an error, since no token can be blamed.
 * gqa         mean, sum or max over the group's query heads of each head's sum over rows.
 *
 * Owner   dkv_ref_run() allocates the answer, dkv_ref_answer_fini() frees it; a zeroed answer is
 *         empty.
 * Thread  any; no shared state. Slow: rows * n * D, all in double.
 */
#ifndef DKV_KERNELS_REF_H
#define DKV_KERNELS_REF_H

#include "proto/request.h"

#ifdef __cplusplus
extern "C" {
#endif

enum dkv_ref_class { DKV_REF_LOWEST = 0, DKV_REF_CANDIDATE = 1, DKV_REF_PROTECTED = 2 };

/* All arrays are per KV head and token, [kv_heads][n_tokens], stored ordinals; before valid_from
 * scores are 0 and the class means nothing. */
struct dkv_ref_answer {
    double *raw;          /* before pooling, not scaled by anything */
    double *pooled;       /* the average divided by the kernel size */
    uint8_t *token_class; /* enum dkv_ref_class */
    int32_t *keep;        /* [kv_heads][keep_tokens], ascending */
};

/* Scores and selects. `block` is on the host and was accepted with `plan`. On an error the answer
 * is left empty.
 *
 * Errors  INVALID naming tensor, KV or query head, token or row, and element of a non-finite value;
 *         naming entry, position and range of a bad page table entry. NOMEM. */
enum dkv_status dkv_ref_run(const struct dkv_block *block, const struct dkv_params *params,
                            const struct dkv_plan *plan, struct dkv_ref_answer *answer_out,
                            struct dkv_error *err);

void dkv_ref_answer_fini(struct dkv_ref_answer *answer);

/* The selection half alone, for tests: pools raw scores of n tokens of one KV head, in the order
 * and with the classes given, and keeps the k best. pooled_out [n]; keep_out [k], ascending,
 * counted from 0. */
enum dkv_status dkv_ref_select(const double *raw, const uint8_t *token_class, uint64_t n,
                               const struct dkv_params *params, const struct dkv_plan *plan,
                               double *pooled_out, int32_t *keep_out);

#ifdef __cplusplus
}
#endif
#endif
