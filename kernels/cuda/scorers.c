/* The table of scorers, fastest first: the first that takes a block scores it. */
#include "kernels/cuda/plan.h"

extern const struct dkv_cu_scorer dkv_cu_scorer_stream;
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit;
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_256;
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_fp8;
extern const struct dkv_cu_scorer dkv_cu_scorer_fast;
extern const struct dkv_cu_scorer dkv_cu_scorer_attention;
extern const struct dkv_cu_scorer dkv_cu_scorer_keys;
extern const struct dkv_cu_scorer dkv_cu_scorer_general;

/* clang-format off */
const struct dkv_cu_scorer *const dkv_cu_scorers[] = {
    &dkv_cu_scorer_stream,
    &dkv_cu_scorer_stream_fp8,
    &dkv_cu_scorer_stream_16bit,
    &dkv_cu_scorer_stream_256,
    &dkv_cu_scorer_fast,
    &dkv_cu_scorer_attention,
    &dkv_cu_scorer_keys,
    &dkv_cu_scorer_general,
    NULL,
};
