/* Squared distances |a - v|^2 of pass B, from a.v; where the difference cancels, summed the plain
 * way. Who has which rows and keys: fast_pass_b.cuh. */
#ifndef DKV_KERNELS_CUDA_FAST_DISTANCE_CUH
#define DKV_KERNELS_CUDA_FAST_DISTANCE_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

constexpr float CANCELS = 1.0f / 256; /* |a - v|^2 below this part of |a|^2 + |v|^2: sum again */
constexpr int ROW_TILES = BLOCK_ROWS / 8;

/* DKV_CU_FORM_DIST computes with distances (squared) above this alone, see fast_terms.cuh. */
constexpr float DISTANCE_MIN = 1.0f / (1ull << 46);
constexpr float NORMAL_MIN = 1.17549435e-38f;

/* What a thread needs to know of its rows. */
struct row_constants {
    float norm;  /* |a|^2 */
    float shift; /* log2 of the denominator, less the range factor */
};

/* |v|^2 of the thread's two keys: the four lanes of a quad share both. */
template <class S>
__device__ __forceinline__ void sum_squares(uint32_t v_tile, const place<S> &at, float (&square)[2])
{
    /* Odd keys start with the other half of a block: eight lanes then meet eight banks. */
    const uint32_t row = v_tile + 2 * at.warp * S::EIGHT_BYTES + at.g * 128;
    const uint32_t from[2] = {row + (((at.t + (at.g & 1) * 4) ^ at.g) << 4),
                              row + (((at.t + (~at.g & 1) * 4) ^ at.g) << 4)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x = 0.0f;
        float y = 0.0f;
#pragma unroll
        for (int block = 0; block < S::DIM / 64; block++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t words[4];
                load_shared(from[half] + i * S::EIGHT_BYTES + 1024 * block, words);
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const float2 v = unpack<typename S::type>(words[w]);
                    x = fmaf(v.x, v.x, x);
                    y = fmaf(v.y, v.y, y);
                }
            }
        square[i] = x + y;
        square[i] += __shfl_xor_sync(~0u, square[i], 1);
        square[i] += __shfl_xor_sync(~0u, square[i], 2);
    }
}

/* Dimensions 2 * pair and the next of a tile's key, whose type is `dtype`. */
template <class S>
__device__ __forceinline__ float2 value_pair(uint32_t v_tile, int key, int pair, uint32_t dtype)
{
    using type = typename S::type;
    if constexpr (S::FP8) {
        const uint32_t bytes = load_shared_16(v_tile + raw_offset<S>(key, pair / 8) +
                                              2 * (pair % 8));
        return unpack<type>(fp16_of_fp8(bytes, dtype).x);
    } else {
        return unpack<type>(
            load_shared(v_tile + element_offset<S>(key, pair / 4) + 4 * (pair % 4)));
    }
}

/* |a - v|^2 of one of 32 rows and a key, summed plainly by the whole warp. `rows`: the hi parts as
 * operand, with the lo parts `lo_part` bytes after them. `key` counts within the tile. */
template <class S>
__device__ __forceinline__ float exact_distance(uint32_t rows, int lo_part, int row,
                                                uint32_t v_tile, int key, uint32_t dtype, int lane)
{
    float sum = 0.0f;
    float scale = 0.0f;
    for (int pair = lane; pair < S::DIM / 2; pair += 32) {
        const uint32_t a = rows + pair_offset<S>(row, pair);
        const float2 hi = unpack<typename S::type>(load_shared(a));
        const float2 lo = unpack<typename S::type>(load_shared(a + lo_part));
        const float2 v = value_pair<S>(v_tile, key, pair, dtype);
        const float x = hi.x - v.x + lo.x;
        const float y = hi.y - v.y + lo.y;
        sum = fmaf(x, x, fmaf(y, y, sum));
        scale = fmaf(v.x, v.x, fmaf(v.y, v.y, scale));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        scale += __shfl_xor_sync(~0u, scale, lanes);
    }
    if (S::FORM == DKV_CU_FORM_DIST && sum > EQUAL * scale && sum < DISTANCE_MIN)
        return NAN;
    return sum <= EQUAL * scale ? 0.0f : sum;
}

/* Distances that cancel, again. `cancels`: the thread's, a bit 4j + c each. */
template <class S>
__device__ __forceinline__ void distances_again(unsigned cancels, uint32_t a_rows, int lo_part,
                                                uint32_t v_tile, uint32_t dtype, const place<S> &at,
                                                float (&distance)[ROW_TILES][4])
{
    for (;;) {
        const unsigned lanes = __ballot_sync(~0u, cancels != 0);
        if (lanes == 0)
            return;
        const int lane = __ffs(lanes) - 1;
        const int which = __ffs(__shfl_sync(~0u, cancels, lane)) - 1;
        const int row = which / 4 * 8 + lane % 4 * 2 + which % 2;
        const int key = 16 * at.warp + which / 2 % 2 * 8 + lane / 4;
        const float exact = exact_distance<S>(a_rows, lo_part, row, v_tile, key, dtype, at.lane);
        const unsigned mine = at.lane == lane ? 1u << which : 0;
        cancels &= ~mine;
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (mine & 1u << (4 * j + c))
                    distance[j][c] = exact;
            }
    }
}

/* |a - v|^2 of the thread's keys and 32 rows, from a.v. `a_rows`: those rows as operand. */
template <class S, int columns>
__device__ __forceinline__ void distances(const float (&dot)[columns][4], const float (&square)[2],
                                          const row_constants (&rows)[ROW_TILES][2],
                                          uint32_t a_rows, uint32_t v_tile, uint32_t dtype,
                                          const place<S> &at, float (&distance)[ROW_TILES][4])
{
    float room = INFINITY; /* the least by which a distance exceeds what may be noise */
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float whole = rows[j][c & 1].norm + square[c >> 1];
            const float both = columns == ROW_TILES ? dot[j][c]
                                                    : dot[j][c] + dot[(ROW_TILES + j) % columns][c];
            distance[j][c] = fmaf(-2.0f, both, whole);
            room = fminf(room, fmaf(-CANCELS, whole, distance[j][c]));
        }
    if (!__any_sync(~0u, room < 0.0f))
        return;
    unsigned cancels = 0;
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (distance[j][c] < CANCELS * (rows[j][c & 1].norm + square[c >> 1]))
                cancels |= 1u << (4 * j + c);
        }
    distances_again<S>(cancels, a_rows, ROW_TILES * S::EIGHT_BYTES, v_tile, dtype, at, distance);
}

} // namespace dkv_fast

#endif
