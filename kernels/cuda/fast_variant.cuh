/* One compiled kernel of the fast scorer, as its host side knows it. Each .cu file that compiles
 * some has a table of them; which is found by a block's form, types, head_dim and rows. */
#ifndef DKV_KERNELS_CUDA_FAST_VARIANT_CUH
#define DKV_KERNELS_CUDA_FAST_VARIANT_CUH

#include "kernels/cuda/fast_kernel.cuh"

struct dkv_fast_variant {
    uint32_t form;  /* enum dkv_cu_form */
    uint32_t dtype; /* of the cache */
    uint32_t head_dim;
    uint32_t rows_per_thread;
    const void *kernel;
    size_t shared_bytes;
    size_t ring_bytes; /* of one thread block */
    size_t unit_bytes; /* of each row group */
};

/* Kernels of the other rules: fast_andpro.cu, fast_restkv.cu. */
extern const struct dkv_fast_variant *const dkv_fast_andpro_variants;
extern const struct dkv_fast_variant *const dkv_fast_restkv_variants;
extern const uint32_t dkv_fast_andpro_count, dkv_fast_restkv_count;

namespace dkv_fast
{

template <class type, int head_dim, int rows_per_thread, int form = DKV_CU_FORM_DROPKV>
dkv_fast_variant make_variant(uint32_t dtype)
{
    using S = shape<type, head_dim, rows_per_thread, form>;
    static_assert(sizeof(shared_memory<S>) <= 232448, "shared memory of one thread block");
    const size_t gaps = form == DKV_CU_FORM_AVERAGE ? S::ROWS * S::DIM * sizeof(float) : 0;
    return {form,
            dtype,
            head_dim,
            rows_per_thread,
            reinterpret_cast<const void *>(score<S>),
            sizeof(shared_memory<S>),
            S::TURNS * S::PARTIAL_BYTES,
            sizeof(merged<S>) + gaps};
}

} // namespace dkv_fast

/* A rule's kernels. */
#ifdef DKV_FAST_SHAKEN /* a build for tests, see may_be_late() */
#define DKV_FAST_VARIANTS_OF(form) \
    dkv_fast::make_variant<dkv_fast::bf16_type, 128, 1, form>(DKV_BF16)
#else
#define DKV_FAST_VARIANTS_OF(form)                                           \
    dkv_fast::make_variant<dkv_fast::bf16_type, 128, 1, form>(DKV_BF16),     \
        dkv_fast::make_variant<dkv_fast::bf16_type, 128, 2, form>(DKV_BF16), \
        dkv_fast::make_variant<dkv_fast::fp16_type, 128, 1, form>(DKV_FP16), \
        dkv_fast::make_variant<dkv_fast::fp16_type, 128, 2, form>(DKV_FP16), \
        dkv_fast::make_variant<dkv_fast::bf16_type, 64, 1, form>(DKV_BF16),  \
        dkv_fast::make_variant<dkv_fast::bf16_type, 64, 2, form>(DKV_BF16),  \
        dkv_fast::make_variant<dkv_fast::fp16_type, 64, 1, form>(DKV_FP16),  \
        dkv_fast::make_variant<dkv_fast::fp16_type, 64, 2, form>(DKV_FP16)
#endif

#endif
