/* 16-bit caches of up to 64 rows in the stream scorer: kernels and which blocks it takes. Work
 * lists and launches are in stream_lists.cuh. */
#include "kernels/cuda/stream_16bit_pass_a.cuh"
#include "kernels/cuda/stream_16bit_pass_b.cuh"
#include "kernels/cuda/stream_lists.cuh"
#include "kernels/cuda/stream_merge.cuh"

namespace dkv_stream_16bit
{

template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_16bit_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    merge_part<S, 1>(args, [](const job &work) { return partials_of<S>(work); });
#endif
}

} // namespace dkv_stream_16bit

namespace
{

using dkv_stream_lists::rows_of;
using dkv_stream_lists::variant;

constexpr uint32_t ROWS_MAX = 64; /* more are stream_scorer.cu's */
/* Blocks of few rows and keys are the fast scorer's, which reads K and V of short ones once. */
constexpr uint32_t FAST_ROWS = 32;
constexpr uint32_t FAST_KEYS = 98304;

template <class type, int head_dim, int rows_per_thread> variant make_variant(uint32_t dtype)
{
    using S = dkv_stream_16bit::shape<type, head_dim, rows_per_thread>;
    variant v = {};
    v.type = dtype;
    v.head_dim = head_dim;
    v.rows = S::ROWS;
    v.groups = S::GROUPS;
    v.threads = S::THREADS;
    v.chunks_enough = 128 * S::GROUPS;
    v.chunks_max = 128;
    v.step = dkv_fast::TILE;
    v.slices = 1;
    v.a = reinterpret_cast<const void *>(dkv_stream_16bit::stream_16bit_a<S>);
    v.merge = reinterpret_cast<const void *>(dkv_stream_16bit::stream_16bit_merge<S>);
    v.b = reinterpret_cast<const void *>(dkv_stream_16bit::stream_16bit_b<S>);
    v.a_bytes = S::GROUPS * sizeof(dkv_stream_16bit::room_a<S>);
    v.b_bytes = S::GROUPS * sizeof(dkv_stream_16bit::room_b<S>);
    static_assert(S::GROUPS * sizeof(dkv_stream_16bit::room_a<S>) <= 232448 &&
                      S::GROUPS * sizeof(dkv_stream_16bit::room_b<S>) <= 232448,
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
        for (const variant &v : variants) {
            if (v.head_dim == block->head_dim && v.rows == rows && v.type == block->k.dtype)
                return &v;
        }
        return nullptr;
    }
};
const variant family::variants[8] = {
    make_variant<dkv_fast::bf16_type, 128, 1>(DKV_BF16),
    make_variant<dkv_fast::bf16_type, 128, 2>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 128, 1>(DKV_FP16),
    make_variant<dkv_fast::fp16_type, 128, 2>(DKV_FP16),
    make_variant<dkv_fast::bf16_type, 64, 1>(DKV_BF16),
    make_variant<dkv_fast::bf16_type, 64, 2>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 64, 1>(DKV_FP16),
    make_variant<dkv_fast::fp16_type, 64, 2>(DKV_FP16),
};

using host = dkv_stream_lists::host<family>;

bool takes_any_length(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return rows_of(block) <= ROWS_MAX && dkv_fast_takes_types(block) && host::takes(device, block);
}

bool takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return (rows_of(block) > FAST_ROWS || block->n_valid > FAST_KEYS) &&
           takes_any_length(device, block);
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit;
const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit = {
    "stream-16bit", host::prepare, takes, host::unit_bytes, nullptr, host::extra_bytes,
    host::fill,     host::launch,  false, host::scores_at,
};
/* The same for every length: what tests name to have blocks scored that are the fast scorer's. */
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit_any;
const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit_any = {
    "stream-16bit", host::prepare,     takes_any_length, host::unit_bytes,
    nullptr,        host::extra_bytes, host::fill,       host::launch,
    false,          host::scores_at,
};
}
