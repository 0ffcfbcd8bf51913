/* The table of scorers, fastest first. That of attention alone has not run on a device yet: it is
 * there where -Dattention_scorer=true asks for it. */
#include "kernels/cuda/plan.h"

extern const struct dkv_cu_scorer dkv_cu_scorer_fast;
extern const struct dkv_cu_scorer dkv_cu_scorer_attention;
extern const struct dkv_cu_scorer dkv_cu_scorer_keys;
extern const struct dkv_cu_scorer dkv_cu_scorer_general;

const struct dkv_cu_scorer *const dkv_cu_scorers[] = {
    &dkv_cu_scorer_fast,
#if DKV_CUDA_ATTENTION
    &dkv_cu_scorer_attention,
#endif
    &dkv_cu_scorer_keys,      &dkv_cu_scorer_general, NULL,
};
