/* The stream scorer's kernels for up to 64 rows of a KV head. */
#include "kernels/cuda/stream_few_merge.cuh"
#include "kernels/cuda/stream_few_pass_a.cuh"
#include "kernels/cuda/stream_few_pass_b.cuh"
#include "kernels/cuda/stream_variant.cuh"

namespace
{

template <class type, int head_dim> dkv_stream_variant make_variant(uint32_t dtype)
{
    using S = dkv_stream::few_shape<type, head_dim>;
    using B = dkv_stream::few_shape_b<S>;
    using A_room = dkv_stream::few_shared_a<S>;
    using B_room = dkv_stream::few_shared_b<B>;
    static_assert(sizeof(A_room) <= 232448 && sizeof(B_room) <= 232448,
                  "shared memory of one thread block");
    return {dtype,
            head_dim,
            S::ROWS,
            reinterpret_cast<const void *>(dkv_stream::stream_few_a<S>),
            reinterpret_cast<const void *>(dkv_stream::stream_few_merge<S>),
            reinterpret_cast<const void *>(dkv_stream::stream_few_b<B>),
            sizeof(A_room),
            sizeof(B_room),
            S::PARTIAL_BYTES,
            sizeof(dkv_stream::few_rows<S>)};
}

const dkv_stream_variant variants[] = {
    make_variant<dkv_fast::bf16_type, 128>(DKV_BF16),
#ifndef DKV_FAST_SHAKEN /* a build for tests, see may_be_late() */
    make_variant<dkv_fast::fp16_type, 128>(DKV_FP16),
    make_variant<dkv_fast::bf16_type, 64>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 64>(DKV_FP16),
#endif
};

} // namespace

const struct dkv_stream_variant *const dkv_stream_few_variants = variants;
const uint32_t dkv_stream_few_count = sizeof(variants) / sizeof(variants[0]);
