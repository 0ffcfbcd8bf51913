/* The fast scorer's kernels for odds |a - v|, of rows one by one and of rows that become one:
 * restkv. */
#include "kernels/cuda/fast_variant.cuh"

static const struct dkv_fast_variant variants[] = {DKV_FAST_VARIANTS_OF(DKV_CU_FORM_DIST),
                                                   DKV_FAST_VARIANTS_OF(DKV_CU_FORM_AVERAGE)};

const struct dkv_fast_variant *const dkv_fast_restkv_variants = variants;
const uint32_t dkv_fast_restkv_count = sizeof(variants) / sizeof(variants[0]);
