/* The fast scorer's kernels for p (a . v): andpro. */
#include "kernels/cuda/fast_variant.cuh"

static const struct dkv_fast_variant variants[] = {DKV_FAST_VARIANTS_OF(DKV_CU_FORM_PROJ)};

const struct dkv_fast_variant *const dkv_fast_andpro_variants = variants;
const uint32_t dkv_fast_andpro_count = sizeof(variants) / sizeof(variants[0]);
