/* 16-bit caches with head_dim 256 in the stream scorer: kernels and which blocks it takes, which is
 * any number of rows and keys. Work lists and launches are in stream_lists.cuh. */
#include "kernels/cuda/stream_16bit_kept.cuh"
#include "kernels/cuda/stream_lists.cuh"

namespace
{

using dkv_stream_lists::rows_of;
using dkv_stream_lists::variant;

/* Logits that are kept take so much of scratch at most, of all heads of a block. */
constexpr size_t KEPT_MAX = static_cast<size_t>(64) << 20;

template <class type, int sides, bool keeps> variant make_variant(uint32_t dtype)
{
    using S = dkv_stream_16bit::sides_shape<type, sides, keeps>;
    using shared_b =
        std::conditional_t<keeps, dkv_stream_16bit::shared_kept<S>, dkv_stream_16bit::shared_b<S>>;
    variant v = {};
    v.type = dtype;
    v.head_dim = S::DIM;
    v.rows = sides * S::ROWS;
    v.groups = S::GROUPS;
    v.threads = S::THREADS;
    v.chunks_enough = 128 * S::GROUPS;
    v.chunks_max = 128;
    v.step = dkv_fast::TILE;
    v.slices = sides;
    v.a = reinterpret_cast<const void *>(dkv_stream_16bit::stream_sides_a<S>);
    v.merge = reinterpret_cast<const void *>(dkv_stream_16bit::stream_sides_merge<S>);
    if constexpr (keeps)
        v.b = reinterpret_cast<const void *>(dkv_stream_16bit::stream_kept_b<S>);
    else
        v.b = reinterpret_cast<const void *>(dkv_stream_16bit::stream_sides_b<S>);
    v.a_bytes = sizeof(dkv_stream_16bit::shared_a<S>);
    v.b_bytes = sizeof(shared_b);
    static_assert(sizeof(dkv_stream_16bit::shared_a<S>) <= 232448 && sizeof(shared_b) <= 232448,
                  "shared memory of one thread block");
    static_assert(sizeof(dkv_fast::merged<S>) % 16 == 0, "what follows is read by 16 bytes");
    v.logit_bytes = keeps ? 32 : 0;
    v.partial_bytes = sides * S::PARTIAL_BYTES;
    v.merged_bytes = sides * sizeof(dkv_fast::merged<S>);
    return v;
}

struct family {
    static const variant variants[6];

    static bool has_body(int registers)
    {
        return registers >= 64;
    }

    static const variant *find(const struct dkv_cu_block *block)
    {
        const uint32_t rows = rows_of(block) <= 32 ? 32 : 64;
        const size_t logits = static_cast<size_t>(block->heads) * block->n_valid *
                              dkv_stream_lists::ceil_div(rows_of(block), 8) * 32;
        const bool keeps = rows == 32 && logits <= KEPT_MAX;
        for (const variant &v : variants) {
            if (v.head_dim == block->head_dim && v.rows == rows && v.type == block->k.dtype &&
                (v.logit_bytes != 0) == keeps)
                return &v;
        }
        return nullptr;
    }
};
const variant family::variants[6] = {
    make_variant<dkv_fast::bf16_type, 1, true>(DKV_BF16),
    make_variant<dkv_fast::bf16_type, 1, false>(DKV_BF16),
    make_variant<dkv_fast::bf16_type, 2, false>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 1, true>(DKV_FP16),
    make_variant<dkv_fast::fp16_type, 1, false>(DKV_FP16),
    make_variant<dkv_fast::fp16_type, 2, false>(DKV_FP16),
};

using host = dkv_stream_lists::host<family>;

bool takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return dkv_fast_takes_types(block) && host::takes(device, block);
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_256;
const struct dkv_cu_scorer dkv_cu_scorer_stream_256 = {
    "stream-256", host::prepare, takes, host::unit_bytes, nullptr, host::extra_bytes,
    host::fill,   host::launch,  false, host::scores_at,
};
}
