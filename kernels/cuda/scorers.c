/* The table of scorers, fastest first. That of attention alone and that of many rows have not run
 * on a device as they are: they are there where -Dattention_scorer=true and -Dstream_scorer=true
 * ask for them. */
#include "kernels/cuda/plan.h"

extern const struct dkv_cu_scorer dkv_cu_scorer_stream;
extern const struct dkv_cu_scorer dkv_cu_scorer_fast;
extern const struct dkv_cu_scorer dkv_cu_scorer_attention;
extern const struct dkv_cu_scorer dkv_cu_scorer_keys;
extern const struct dkv_cu_scorer dkv_cu_scorer_general;

/* clang-format off */
const struct dkv_cu_scorer *const dkv_cu_scorers[] = {
#if DKV_CUDA_STREAM
    &dkv_cu_scorer_stream,
#endif
    &dkv_cu_scorer_fast,
#if DKV_CUDA_ATTENTION
    &dkv_cu_scorer_attention,
#endif
    &dkv_cu_scorer_keys,
    &dkv_cu_scorer_general,
    NULL,
};
