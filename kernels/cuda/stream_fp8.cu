/* fp8 caches in the stream scorer: kernels and which blocks it takes. Work lists and launches are
 * in stream_lists.cuh. */
#include "kernels/cuda/stream_fp8_pass_a.cuh"
#include "kernels/cuda/stream_fp8_pass_b.cuh"
#include "kernels/cuda/stream_lists.cuh"
#include "kernels/cuda/stream_merge.cuh"

namespace dkv_stream_fp8
{

template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_fp8_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    merge_part<S, 1>(args, [](const job &work) { return partials_of<S>(work); });
#endif
}

} // namespace dkv_stream_fp8

namespace
{

using dkv_stream_lists::rows_of;
using dkv_stream_lists::variant;

/* Variants by type: whether both caches are e4m3. */
template <int head_dim, int rows_per_thread, bool e4m3> variant make_variant(void)
{
    using S = dkv_stream_fp8::shape<head_dim, rows_per_thread, e4m3>;
    variant v = {};
    v.type = e4m3;
    v.head_dim = head_dim;
    v.rows = S::ROWS;
    v.groups = S::GROUPS;
    v.threads = S::THREADS;
    v.chunks_enough = 128 * S::GROUPS;
    v.chunks_max = 128;
    v.step = dkv_fast::TILE;
    v.slices = 1;
    v.a = reinterpret_cast<const void *>(dkv_stream_fp8::stream_fp8_a<S>);
    v.merge = reinterpret_cast<const void *>(dkv_stream_fp8::stream_fp8_merge<S>);
    v.b = reinterpret_cast<const void *>(dkv_stream_fp8::stream_fp8_b<S>);
    v.a_bytes = S::GROUPS * sizeof(dkv_stream_fp8::room_a<S>);
    v.b_bytes = S::GROUPS * sizeof(dkv_stream_fp8::room_b<S>);
    static_assert(S::GROUPS * sizeof(dkv_stream_fp8::room_a<S>) <= 232448 &&
                      S::GROUPS * sizeof(dkv_stream_fp8::room_b<S>) <= 232448,
                  "shared memory of one thread block");
    v.partial_bytes = S::PARTIAL_BYTES;
    v.merged_bytes = sizeof(dkv_fast::merged<S>);
    return v;
}

struct family {
    static const variant variants[8];

    static bool has_body(int registers)
    {
        return registers >= 64;
    }

    static const variant *find(const struct dkv_cu_block *block)
    {
        const uint32_t rows = rows_of(block) <= 32 ? 32 : 64;
        const bool e4m3 = block->k.dtype == DKV_F8_E4M3 && block->v.dtype == DKV_F8_E4M3;
        for (const variant &v : variants) {
            if (v.head_dim == block->head_dim && v.rows == rows && v.type == e4m3)
                return &v;
        }
        return nullptr;
    }
};
const variant family::variants[8] = {
    make_variant<128, 1, true>(), make_variant<128, 2, true>(),  make_variant<64, 1, true>(),
    make_variant<64, 2, true>(),  make_variant<128, 1, false>(), make_variant<128, 2, false>(),
    make_variant<64, 1, false>(), make_variant<64, 2, false>(),
};

using host = dkv_stream_lists::host<family>;

bool takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return dkv_cu_is_fp8(block->k.dtype) && dkv_fast_takes_types(block) &&
           host::takes(device, block);
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_fp8;
const struct dkv_cu_scorer dkv_cu_scorer_stream_fp8 = {
    "stream-fp8", host::prepare, takes, host::unit_bytes, nullptr, host::extra_bytes,
    host::fill,   host::launch,  false, host::scores_at,
};
}
