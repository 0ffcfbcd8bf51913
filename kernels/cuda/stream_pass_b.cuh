/* Pass B of the stream scorer: the score of every key, as fast_pass_b.cuh says, from logits made
 * again. A thread sees rows g and g + 8 of its warp's 16, of every eight keys 2t and 2t + 1. The
 * tensor cores begin with |a|^2 + |v|^2 where the others begin with 0, so that what they leave are
 * distances. Each warp adds up some of its rows; another one adds up what the warps have.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_PASS_B_CUH
#define DKV_KERNELS_CUDA_STREAM_PASS_B_CUH

#include "kernels/cuda/stream_pass_a.cuh"

namespace dkv_stream
{

/* Two elements of a merged row's hi: those at 8 * column + 2 * pair. lo is LO_WORDS behind. */
template <class S>
__device__ __forceinline__ const uint32_t *word_of(const merged<S> &rows, int row, int column,
                                                   int pair)
{
    return reinterpret_cast<const uint32_t *>(rows.a[row / BLOCK_ROWS] +
                                              element_offset<S>(row % BLOCK_ROWS, column)) +
           pair;
}
template <class S> constexpr int LO_WORDS = BLOCK_ROWS *S::ROW_BYTES / 4;

/* |a - v|^2 of a row and a key of a tile, summed plainly by the whole warp; as exact_distance() in
 * fast_pass_b.cuh, with the row from global memory. */
template <class S>
__device__ __forceinline__ float plain_distance(const merged<S> *rows, int row, uint32_t v_tile,
                                                int key, int lane)
{
    float sum = 0.0f;
    float scale = 0.0f;
    for (int pair = lane; pair < S::DIM / 2; pair += 32) {
        const uint32_t *a = word_of(*rows, row, pair / 4, pair % 4);
        const float2 hi = unpack<typename S::type>(__ldcg(a));
        const float2 lo = unpack<typename S::type>(__ldcg(a + LO_WORDS<S>));
        const float2 v = unpack<typename S::type>(
            load_shared(v_tile + element_offset<S>(key, pair / 4) + 4 * (pair % 4)));
        const float x = hi.x - v.x + lo.x;
        const float y = hi.y - v.y + lo.y;
        sum = fmaf(x, x, fmaf(y, y, sum));
        scale = fmaf(v.x, v.x, fmaf(v.y, v.y, scale));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        scale += __shfl_xor_sync(~0u, scale, lanes);
    }
    return sum <= EQUAL * scale ? 0.0f : sum;
}

/* A group's part of pass B. */
template <class S> struct group_b {
    shared_b<S> &shared;
    place<S> at;
    int first_row; /* of the group */
    tile_pair<S> now;
    ring<PARTS> parts;
    float norm[2];  /* |a|^2 / 2 */
    float shift[2]; /* log2 of the denominator, less the range factor */
    int top[2];     /* see merged */
    uint32_t q[S::K_STEPS][4];
    float half[S::COLUMNS][4]; /* half of the squared distances */

    __device__ __forceinline__ group_b(shared_b<S> &in, int group, int thread)
        /* The same for all lanes, and the compiler knows, or it would compute each operand's
         * address in vector registers. */
        : shared(in), at(thread), first_row(64 * __shfl_sync(~0u, group, 0))
    {
    }

    __device__ __forceinline__ const merged<S> &merged_rows(const job &work) const
    {
        return reinterpret_cast<const merged<S> *>(work.unit.work)[work.item.row_group];
    }

    /* hi or lo of -a */
    __device__ __forceinline__ uint32_t operand(int part) const
    {
        return shared_address(shared.rows[0][0]) + (2 * first_row + 64 * part) * S::ROW_BYTES;
    }

    /* Copies hi and lo of the group's rows, with the other sign. */
    __device__ __forceinline__ void copy_operands(const merged<S> &from)
    {
        constexpr int HALF_OPERAND = BLOCK_ROWS * S::ROW_BYTES; /* of 32 rows */
        const unsigned char *a = from.a[first_row / BLOCK_ROWS];
#pragma unroll
        for (int block = 0; block < 4; block++) /* of 32 rows hi, lo, of the others hi, lo */
#pragma unroll 4
            for (int offset = 16 * at.thread; offset < HALF_OPERAND; offset += 16 * GROUP_THREADS) {
                uint4 words = __ldcg(
                    reinterpret_cast<const uint4 *>(a + block * HALF_OPERAND + offset));
                words.x ^= 0x80008000u;
                words.y ^= 0x80008000u;
                words.z ^= 0x80008000u;
                words.w ^= 0x80008000u;
                store_shared_words(operand(block % 2) + block / 2 * HALF_OPERAND + offset, words);
            }
        fence_async_proxy();
        group_barrier(BARRIER_GROUP + first_row / 64);
    }

    __device__ __forceinline__ void load_rows(const job &work)
    {
        const merged<S> &from = merged_rows(work);
        load_rows_of_query(work, first_row, at, q);
        group_barrier(BARRIER_GROUP + first_row / 64); /* the item before is through everywhere */
        copy_operands(from);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + at.row(i);
            norm[i] = 0.0f;
#pragma unroll
            for (int part = 0; part < S::DIM / 32; part++)
                norm[i] += __ldcg(&from.norm[row][part]);
            norm[i] *= 0.5f;
            shift[i] = __ldcg(&from.lse[row]) - DKV_CU_EXPONENT;
            top[i] = __ldcg(&from.top[row]);
        }
    }

    /* half = |a|^2 / 2 + |v|^2 / 2, less a.v then. */
    __device__ __forceinline__ void begin_distances(void)
    {
        const float *squares = shared.squares[now.at.index / 2] + 2 * at.t;
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++) {
            const float2 square = *reinterpret_cast<const float2 *>(squares + 8 * j);
#pragma unroll
            for (int c = 0; c < 4; c++)
                half[j][c] = fmaf(0.5f, c & 1 ? square.y : square.x, norm[c >> 1]);
        }
    }
    __device__ __forceinline__ void start_distances(uint32_t v_tile)
    {
        const uint64_t values = keys_operand<S>(v_tile);
        const uint64_t hi = keys_operand<S>(operand(0));
        const uint64_t lo = keys_operand<S>(operand(1));
        hold(half);
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
            warpgroup_mma_shared<typename S::type>(half, hi + keys_step(k), values + keys_step(k));
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
            warpgroup_mma_shared<typename S::type>(half, lo + keys_step(k), values + keys_step(k));
        warpgroup_commit();
    }

    /* w = (p / (1 - p))^2, with the range factor: 1 / (1 / p - 1) is what takes least. */
    __device__ __forceinline__ void make_weights(const float (&x)[S::COLUMNS][4], float factor,
                                                 float (&w)[S::COLUMNS][4]) const
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float ratio = rcp_fast(exp2_fast(fmaf(x[j][c], -factor, shift[c >> 1])) -
                                             RANGE);
                w[j][c] = ratio * ratio;
            }
    }

    /* The term of a row whose top key is in this tile takes the place of the plain one: as weight,
     * with a distance of 1. Rare. */
    __device__ __forceinline__ void put_terms(const job &work, int first_key,
                                              float (&x)[S::COLUMNS][4]) const
    {
        const merged<S> &from = merged_rows(work);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + at.row(i);
            float distance = 0.0f;
            for (int part = 0; part < S::DIM / 32; part++)
                distance += __ldcg(&from.top_distance[row][part]);
            const float term = __ldcg(&from.top_weight[row]) * distance;
            put_at_top(x, i, first_key, term);
        }
    }
    __device__ __forceinline__ void put_at_top(float (&x)[S::COLUMNS][4], int i, int first_key,
                                               float value) const
    {
        const int mine = top[i] - first_key - 2 * at.t;
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (mine == 8 * j + e)
                    x[j][2 * i + e] = value;
            }
    }

    /* Distances that cancel, again. Rare. */
    __device__ __forceinline__ void distances_that_cancel(const job &work, uint32_t v_tile)
    {
        const float *squares = shared.squares[now.at.index / 2] + 2 * at.t;
        uint64_t cancels = 0; /* a bit 4j + c each */
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float whole = fmaf(0.5f, squares[8 * j + (c & 1)], norm[c >> 1]);
                if (half[j][c] < CANCELS * whole)
                    cancels |= 1ull << (4 * j + c);
            }
        for (;;) {
            const unsigned lanes = __ballot_sync(~0u, cancels != 0);
            if (lanes == 0)
                return;
            const int lane = __ffs(lanes) - 1;
            const int which = __ffsll(__shfl_sync(~0u, cancels, lane)) - 1;
            const int row = first_row + 16 * at.warp + which % 4 / 2 * 8 + lane / 4;
            const int key = which / 4 * 8 + lane % 4 * 2 + which % 2;
            const float exact = plain_distance<S>(&merged_rows(work), row, v_tile, key, at.lane);
            const uint64_t mine = at.lane == lane ? 1ull << which : 0;
            cancels &= ~mine;
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (mine & 1ull << (4 * j + c))
                        half[j][c] = 0.5f * exact;
                }
        }
    }

    /* Whether a distance may be so small a part of what it is the difference of that it is noise:
     * |a - v|^2 below CANCELS (|a|^2 + |v|^2), hence below 2.2 CANCELS |a|^2. */
    __device__ __forceinline__ bool may_cancel(void) const
    {
        bool may = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float least[4];
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j += 2)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const float x = half[j + c / 2][2 * i + c % 2];
                    least[c] = j == 0 ? x : fminf(least[c], x);
                }
            may |= fminf(fminf(least[0], least[1]), fminf(least[2], least[3])) <
                   2.25f * CANCELS * norm[i];
        }
        return may;
    }

    /* The terms of a tile's keys go to the warp that adds them up: those of half of the keys, four
     * rows together. */
    __device__ __forceinline__ void store_parts(const float (&w)[S::COLUMNS][4])
    {
        const bool upper = at.lane & 16;
        float2 sum[S::COLUMNS];
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
            sum[j] = make_float2(fmaf(w[j][0], half[j][0], w[j][2] * half[j][2]),
                                 fmaf(w[j][1], half[j][1], w[j][3] * half[j][3]));
        mbarrier_wait(shared_address(&shared.parts_empty[parts.index]), parts.parity ^ 1);
        float *row = shared.parts[parts.index][(first_row / 16 + at.warp) * PART_ROWS + at.g % 4] +
                     (upper ? S::STEP / 2 : 0);
        float *to[4]; /* of keys 2t, 8 + 2t, 16 + 2t, 24 + 2t of 32 */
#pragma unroll
        for (int j = 0; j < 4; j++)
            to[j] = row + part_place(at.g, 8 * j + 2 * at.t);
#pragma unroll
        for (int j = 0; j < S::COLUMNS / 2; j++) {
            const float2 mine = upper ? sum[j + S::COLUMNS / 2] : sum[j];
            const float2 other = upper ? sum[j] : sum[j + S::COLUMNS / 2];
            *reinterpret_cast<float2 *>(to[j % 4] + j / 4 * 32) = make_float2(
                mine.x + __shfl_xor_sync(~0u, other.x, 16),
                mine.y + __shfl_xor_sync(~0u, other.y, 16));
        }
        __syncwarp();
        if (at.lane == 0)
            mbarrier_arrive(shared_address(&shared.parts_full[parts.index]));
        parts.advance();
    }

    /* One tile: weights while the tensor cores multiply its values. */
    __device__ __forceinline__ void step(const job &work, const logit_rule &rule,
                                         const logit_factor &logits, int first_key)
    {
        mbarrier_wait_both(now.keys_full(shared), now.at.parity, now.values_full(shared),
                           now.at.parity);
        fence_async_proxy();
        begin_distances();
        float z[S::COLUMNS][4];
        start_row_dots<S>(z, q, now.keys(shared));
        start_distances(now.values(shared));
        warpgroup_wait<1>();
        hold(z);
        now.release_keys(shared, at.lane);
        const bool has_tops = __any_sync(~0u,
                                         static_cast<unsigned>(top[0] - first_key) < S::STEP ||
                                             static_cast<unsigned>(top[1] - first_key) < S::STEP);
        float w[S::COLUMNS][4];
        if (logits.plain && first_key + S::STEP <= rule.open_keys && !has_tops) {
            make_weights(z, logits.factor, w);
        } else {
            float x[S::COLUMNS][4];
            logits_of<S>(work, rule, logits, first_row, at, first_key, z, x);
            make_weights(x, logits.factor, w);
            if (has_tops)
                put_terms(work, first_key, w);
        }
        /* Behind a branch that needs the weights, or the compiler would compute them behind this.
         */
        warpgroup_wait<0>();
        hold(half);
        if (__any_sync(~0u, may_cancel()))
            distances_that_cancel(work, now.values(shared));
        if (has_tops) {
            put_at_top(half, 0, first_key, 0.5f);
            put_at_top(half, 1, first_key, 0.5f);
        }
        now.release_values(shared, at.lane);
        store_parts(w);
    }

    __device__ __forceinline__ void run(const job &work)
    {
        const logit_rule rule(work);
        const logit_factor logits(rule);
        const int tiles = range_tiles(work.item);
        int first_key = item_first_key(work.item);
        load_rows(work);
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++, first_key += S::STEP) {
            step(work, rule, logits, first_key);
            now.advance();
        }
    }
};

} // namespace dkv_stream

#endif
