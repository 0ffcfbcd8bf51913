/* Selection: raw scores of one KV head in, the indices of the tokens to keep out.
 *
 * Total order of tokens, best first: class, pooled score (high first), raw score (high first),
 * lower index. -0 equals +0. The k best are kept and reported in ascending order, so the answer is
 * a set that depends on nothing but the scores.
 *
 * Classes, best first
 *   protected   the first `sinks` and the last `recent` tokens, and those flagged
 *               DKV_TOKEN_PROTECTED (the only visible key of some row)
 *   candidate   everything else
 *   lowest      flagged DKV_TOKEN_LOWEST (nonfinite=mask); wins over protection
 *
 * Pooling runs over the n positions given, stride 1, and outside them the padding is 0, which never
 * wins a max because scores are never negative. With DKV_POOL_SCOPE_PREFIX only the unprotected
 * stretch [sinks, n - recent) is pooled, as if it were alone: a sink's large score does not leak
 * into its neighbours; protected tokens then keep their raw score as the pooled one.
 *
 * The average is kept as a sum in double precision, since the divisor (always the kernel size) is
 * the same for all; a raw score that stands for an average is multiplied by it instead. The order
 * of summation is part of the contract, so that every engine gets the same bits: the window of
 * token i, [i - kernel/2, i + kernel/2], is cut from the left into blocks of ascending powers of
 * two, one per set bit of the kernel size; a block of 2p is the sum of its two halves (first +
 * second); the blocks are added from left to right. For kernel 11:
 * (x[0] + (x[1] + x[2])) + (((x[3]+x[4]) + (x[5]+x[6])) + ((x[7]+x[8]) + (x[9]+x[10]))).
 *
 * Thread  any; no shared state. Never blocks or allocates.
 * Errors  none: arguments were checked by dkv_request_validate().
 */
#ifndef DKV_KERNELS_SELECT_H
#define DKV_KERNELS_SELECT_H

#include "proto/request.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits of the optional per-token flags. */
enum dkv_token_flag {
    DKV_TOKEN_PROTECTED = 1, /* in the protected class wherever it stands */
    DKV_TOKEN_LOWEST = 2,    /* in the lowest class, whatever else is said of it */
};

struct dkv_select_spec {
    enum dkv_pool pool;
    enum dkv_pool_scope scope;
    uint32_t kernel;     /* odd, 1..DKV_KERNEL_MAX; ignored without pooling */
    uint64_t n;          /* valid tokens, 1..DKV_TOKENS_MAX */
    uint64_t sinks;      /* sinks + recent <= n */
    uint64_t recent;     /* protected last tokens */
    uint64_t keep;       /* k, 1..n */
    int32_t first_index; /* ordinal of the first valid token: added to every index reported */
};

/* What a validated request asks of each of a block's KV heads. */
struct dkv_select_spec dkv_select_spec_of(const struct dkv_block *block,
                                          const struct dkv_params *params,
                                          const struct dkv_plan *plan);

/* Bytes of scratch that dkv_select() needs, whatever n is; under 128 KiB. */
size_t dkv_select_scratch_bytes(void);

/* Selects for one KV head.
 *
 * raw        float32, [n], each finite and >= 0 (-0 allowed): scores times any one positive factor.
 * flags      [n] of enum dkv_token_flag, or NULL: no token has any.
 * scratch    dkv_select_scratch_bytes(), aligned to 64 bytes; contents mean nothing.
 * keep_out   int32, [k], ascending.
 *
 * Time is linear in n: a few passes over `raw`, more only where scores agree in many digits.
 */
void dkv_select(const struct dkv_select_spec *spec, const float *raw, const uint8_t *flags,
                void *scratch, int32_t *keep_out);

#ifdef __cplusplus
}
#endif
#endif
