/* The stream scorer of more than 64 rows: its kernels and which blocks it takes. Work lists and
 * launches are in stream_lists.cuh. */
#include "kernels/cuda/stream_kernel_b.cuh"
#include "kernels/cuda/stream_lists.cuh"
#include "kernels/cuda/stream_merge.cuh"

namespace dkv_stream
{

template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    merge_part<S, SLICES>(args, [](const job &work) { return partials_of<S>(work); });
#endif
}

} // namespace dkv_stream

namespace
{

using dkv_stream_lists::variant;

constexpr uint32_t ROWS_MIN = 65; /* fewer are the fast scorer's */

template <class type, int head_dim> variant make_variant(uint32_t dtype)
{
    using S = dkv_stream::stream_shape<type, head_dim>;
    using B = dkv_stream::shape_b<S>;
    variant v = {};
    v.type = dtype;
    v.head_dim = head_dim;
    v.rows = S::ROWS;
    v.groups = 1; /* of a thread block; its groups of warps share tiles */
    v.threads = dkv_stream::STREAM_THREADS;
    v.chunks_enough = 128;
    v.chunks_max = 32;
    v.step = dkv_stream::STEP_B;
    v.slices = dkv_stream::SLICES;
    v.key_bytes = sizeof(float); /* |v|^2 */
    v.a = reinterpret_cast<const void *>(dkv_stream::stream_a<S>);
    v.merge = reinterpret_cast<const void *>(dkv_stream::stream_merge<S>);
    v.b = reinterpret_cast<const void *>(dkv_stream::stream_b<B>);
    v.a_bytes = sizeof(dkv_stream::shared_a<S>);
    v.b_bytes = sizeof(dkv_stream::shared_b<B>);
    static_assert(sizeof(dkv_stream::shared_a<S>) <= 232448 &&
                      sizeof(dkv_stream::shared_b<B>) <= 232448,
                  "shared memory of one thread block");
    v.partial_bytes = S::PARTIAL_BYTES;
    v.merged_bytes = sizeof(dkv_fast::merged<S>);
    return v;
}

struct stream {
    static const variant variants[4];

    static bool has_body(int registers)
    {
        return registers == dkv_stream::STREAM_LAUNCH_REGISTERS;
    }

    static const variant *find(const struct dkv_cu_block *block)
    {
        for (const variant &v : variants) {
            if (v.type == block->k.dtype && v.head_dim == block->head_dim)
                return &v;
        }
        return nullptr;
    }
};
const variant stream::variants[4] = {
    make_variant<dkv_fast::bf16_type, 128>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 128>(DKV_FP16),
    make_variant<dkv_fast::bf16_type, 64>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 64>(DKV_FP16),
};

using host = dkv_stream_lists::host<stream>;

bool takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return dkv_stream_lists::rows_of(block) >= ROWS_MIN && dkv_fast_takes_types(block) &&
           host::takes(device, block);
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_stream;
const struct dkv_cu_scorer dkv_cu_scorer_stream = {
    "stream",   host::prepare, takes, host::unit_bytes, nullptr, host::extra_bytes,
    host::fill, host::launch,  false, host::scores_at,
};
}
