/* What rules make of a row and a key in pass B, by their form, where a row's term stands for
 * itself (fast_average.cuh has the other kind):
 *
 *   DKV_CU_FORM_DROPKV   (p / (1 - p))^2 |a - v|^2
 *   DKV_CU_FORM_DIST     c p / (1 - p) |a - v|     = d / sqrt(d y^2), d = |a - v|^2,
 *                                                    y = 1 / (c p) - 1 / c
 *   DKV_CU_FORM_PROJ     c p (a . v)
 *
 * c is what a row counts. The denominator that the merge leaves is over c already, and for
 * DKV_CU_FORM_DIST `unit` is 1 / c. All have the range factor on p.
 *
 * One reciprocal square root for the odds and the length, since such instructions are what this
 * form has most of. So d y^2 must stay a normal number: distances below DISTANCE_MIN that are not 0
 * are for the general scorer, and p below 2^-103 / |a - v| counts nothing.
 *
 * Who has which rows and keys: fast_pass_b.cuh.
 */
#ifndef DKV_KERNELS_CUDA_FAST_TERMS_CUH
#define DKV_KERNELS_CUDA_FAST_TERMS_CUH

#include "kernels/cuda/fast_distance.cuh"

namespace dkv_fast
{

/* Beyond these, |v|^2 is for the general scorer: float32 ends above, a square root below. */
constexpr float SQUARE_MIN = 1e-28f;
constexpr float SQUARE_MAX = 1e36f;

/* A number that is not one, which the scores pass on, for such a |v|^2. `others`: the least |a|^2
 * that the key meets. */
template <class S> __device__ __forceinline__ float refuse_square(float square, float others)
{
    if (S::FORM == DKV_CU_FORM_DIST)
        return square <= SQUARE_MAX && square + others >= 256 * DISTANCE_MIN ? 0.0f : NAN;
    return square == 0.0f || (square >= SQUARE_MIN && square <= SQUARE_MAX) ? 0.0f : NAN;
}

/* The least |a|^2 of the thread's rows that are there. */
__device__ __forceinline__ float least_norm(const row_constants (&rows)[ROW_TILES][2])
{
    float least = INFINITY;
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            least = rows[j][e].shift < INFINITY ? fminf(least, rows[j][e].norm) : least;
    return least;
}

/* Rows whose top key is one of this warp's, `mine` keys after the warp's first for the lane's row:
 * their exact terms are added to the sums, and the key weighs nothing in the plain ones. Rare. */
template <class S>
__device__ __forceinline__ void take_top_terms(const merged<S> &from, int first_row, int mine,
                                               const place<S> &at, float (&z)[ROW_TILES][4],
                                               float (&sum)[2])
{
    unsigned rows = __ballot_sync(~0u, static_cast<unsigned>(mine) < 16);
    unsigned hidden = 0; /* a bit 4j + c each */
    while (rows != 0) {
        const int row = __ffs(rows) - 1;
        rows &= rows - 1;
        const int key = __shfl_sync(~0u, mine, row);
        const bool owner = at.lane == key % 8 * 4 + row / 2 % 4;
        float distance = 0.0f;
#pragma unroll
        for (int part = 0; part < S::DIM / 32; part++)
            distance += from.top_distance[first_row + row][part];
        if (S::FORM == DKV_CU_FORM_DIST)
            distance = sqrtf(distance);
        const float term = owner ? from.top_weight[first_row + row] * distance : 0.0f;
        sum[0] += key < 8 ? term : 0.0f;
        sum[1] += key < 8 ? 0.0f : term;
        hidden |= owner ? 1u << (row / 8 * 4 + key / 8 * 2 + row % 2) : 0;
    }
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (hidden & 1u << (4 * j + c))
                z[j][c] = -INFINITY;
        }
}

/* Adds the terms of the thread's rows to the sums of its keys. `against`: |a - v|^2 or a . v. */
template <class S>
__device__ __forceinline__ void add_terms(const merged<S> &from, int first_row, int t,
                                          const float (&z)[ROW_TILES][4],
                                          const float (&against)[ROW_TILES][4],
                                          const row_constants (&rows)[ROW_TILES][2],
                                          float (&sum)[2])
{
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
        float unit[2] = {};
        if constexpr (S::FORM == DKV_CU_FORM_DIST)
            for (int e = 0; e < 2; e++)
                unit[e] = from.unit[first_row + 8 * j + 2 * t + e];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (S::FORM == DKV_CU_FORM_DIST) {
                const float inverse = exp2_fast(rows[j][c & 1].shift - z[j][c]);
                const float y = inverse - unit[c & 1];
                const float square = fmaxf(against[j][c] * y * y, NORMAL_MIN);
                sum[c >> 1] = fmaf(against[j][c], rsqrt_fast(square), sum[c >> 1]);
                continue;
            }
            const float p = exp2_fast(z[j][c] - rows[j][c & 1].shift); /* with the range factor */
            if (S::FORM == DKV_CU_FORM_PROJ) {
                sum[c >> 1] = fmaf(p, against[j][c], sum[c >> 1]);
                continue;
            }
            const float ratio = p * rcp_fast(fmaf(-RANGE, p, 1.0f));
            sum[c >> 1] = fmaf(ratio * ratio, against[j][c], sum[c >> 1]);
        }
    }
}

} // namespace dkv_fast

#endif
