/* Scores of rules without query rows: of keys, a warp several at a time, or of tokens, one a
 * thread. Included by keys.cu. */
#ifndef DKV_KERNELS_CUDA_KEYS_SCORE_CUH
#define DKV_KERNELS_CUDA_KEYS_SCORE_CUH

#include "kernels/cuda/keys_anchor.cuh"
#include "kernels/policies/random.h"

namespace
{

/* ---- scores of keys ---- */

/* Of a key's length and, for an angle, its product with the anchor's direction. */
template <class number>
__device__ __forceinline__ number score_of(const job &work, number length, number product)
{
    if (work.block.source == DKV_SOURCE_KEY_NORM)
        return length * -static_cast<number>(work.unit.k_scale);
    return length > 0 ? -product / length : static_cast<number>(0);
}

__device__ inline void store_score(const job &work, uint32_t key, float score)
{
    if (!dkv_cu_finite(score))
        atomicOr(&work.unit.report->flags, DKV_CU_OVERFLOW);
    work.unit.scores[key] = score;
}

/* Scores a batch of keys in double precision. */
template <class way>
__device__ __noinline__ void score_slowly(const job &work, uint32_t first, uint32_t end)
{
    constexpr uint32_t step = 32 / way::lanes;
    const bool angle = work.block.source == DKV_SOURCE_KEY_ANGLE;
#pragma unroll 1
    for (int i = 0; i < way::loads; i++) {
        const uint32_t key = first + i * step + lane_of() / way::lanes;
        const auto part = load_slowly<way::lanes, way::rounds>(work, key, end);
        double product = 0;
#pragma unroll
        for (int r = 0; r < way::rounds; r++)
            for (int e = 0; e < 8; e++) {
                const uint32_t dim = lane_of() % way::lanes * 8 + r * way::lanes * 8 + e;
                if (angle && dim < work.block.head_dim)
                    product = fma(static_cast<double>(part.x[r][e]),
                                  static_cast<double>(memory_of(work).direction[dim]), product);
            }
        const double score = score_of(work, length_of(part), sum_of_key<way::lanes>(product));
        if (lane_of() % way::lanes == 0 && key < end)
            store_score(work, key, static_cast<float>(score));
    }
}

/* Scores a batch of keys; false, and nothing is written, if a square is not for float32. */
template <class way>
__device__ __forceinline__ bool score_fast(const job &work, uint32_t first, uint32_t end,
                                           const float (&direction)[8])
{
    constexpr uint32_t step = 32 / way::lanes;
    const bool angle = work.block.source == DKV_SOURCE_KEY_ANGLE;
    const int of_key = static_cast<int>(lane_of() % way::lanes);
    const unsigned char *rows[way::loads];
    eight_elements<way::dtype> parts[way::loads];
    find_rows(work, first + lane_of() / way::lanes, step, end, of_key * 8, rows);
#pragma unroll
    for (int i = 0; i < way::loads; i++)
        fetch(rows[i], parts[i]);
    float square = 0; /* of the key that this lane answers for */
    float product = 0;
#pragma unroll
    for (int i = 0; i < way::loads; i++) {
        float x[8];
        unpack(parts[i], x);
        const float its_square = sum_of_key<way::lanes>(square_of(x));
        square = of_key == i ? its_square : square;
        if (angle) {
            float sum = x[0] * direction[0];
#pragma unroll
            for (int e = 1; e < 8; e++)
                sum = fmaf(x[e], direction[e], sum);
            sum = sum_of_key<way::lanes>(sum);
            product = of_key == i ? sum : product;
        }
    }
    const uint32_t key = first + of_key * step + lane_of() / way::lanes;
    const bool answers = of_key < way::loads && key < end;
    const bool fine = square > least_square && square < most_square;
    if (!__all_sync(~0u, fine || !answers))
        return false;
    if (answers)
        store_score(work, key, score_of(work, sqrtf(square), product));
    return true;
}

template <class way>
__device__ __forceinline__ void score_keys(const job &work, uint32_t first, uint32_t end)
{
    constexpr uint32_t turn_keys = warps * way::loads * 32 / way::lanes;
    float direction[8] = {};
    if (way::fast && work.block.source == DKV_SOURCE_KEY_ANGLE) {
        const uint32_t dim = lane_of() % way::lanes * 8;
        const float4 *from = reinterpret_cast<const float4 *>(memory_of(work).direction + dim);
        if (dim < work.block.head_dim) {
            const float4 low = __ldcg(from);
            const float4 high = __ldcg(from + 1);
            direction[0] = low.x, direction[1] = low.y, direction[2] = low.z;
            direction[3] = low.w, direction[4] = high.x, direction[5] = high.y;
            direction[6] = high.z, direction[7] = high.w;
        }
    }
    /* From the end, of which anchor has read more recently. */
#pragma unroll 1
    for (uint32_t turn = ceil_div(end - first, turn_keys); turn-- > 0;) {
        const uint32_t key = first + turn * turn_keys + threadIdx.x / 32 * (turn_keys / warps);
        if (key >= end)
            continue;
        if constexpr (way::fast)
            if (score_fast<way>(work, key, end, direction))
                continue;
        score_slowly<way>(work, key, end);
    }
}

/* ---- scores of tokens ---- */

/* Scores that need no tensor, a token a thread; nonfinite=mask heeds the caller's scores alone. */
__device__ void score_token(const job &work, uint32_t key, uint32_t end)
{
    const dkv_cu_block &block = work.block;
    const bool inside = key < end;
    float score = 0;
    if (block.source == DKV_SOURCE_HASH)
        score = static_cast<float>(dkv_random_bits(block.hash, work.unit.head, key)) * 0x1p-24f;
    else if (block.source == DKV_SOURCE_POSITION)
        score = static_cast<float>(key + 1);
    else if (inside)
        score = work.unit.given[key];
    const bool masked = inside && !dkv_cu_finite(score);
    const unsigned word = __ballot_sync(~0u, masked);
    if (work.unit.mask && lane_of() == 0 && inside)
        work.unit.mask[key / 32] = word;
    if (inside)
        work.unit.scores[key] = masked ? 0.0f : score;
}

} // namespace

#endif
