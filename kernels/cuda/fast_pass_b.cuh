/* Pass B: the score of every key of a chunk,
 *
 *   score(j) = 1/g sum over rows of (p / (1 - p))^2 |a - v_j|^2
 *   |a - v|^2 = |a|^2 - 2 a.v + |v|^2
 *
 * with a.v from the tensor cores (a as hi + lo) and |v|^2 summed by the lanes meanwhile. Where that
 * difference cancels, the distance is summed again the plain way. The one key per row that the
 * merge singled out (`top`) takes its exact term p^2 |b - v|^2 from there. Other rules have terms
 * of their own: fast_terms.cuh, fast_average.cuh.
 *
 * A warp has 16 keys of a tile; a thread sees keys g and g + 8 of them, and of a block of 32 rows
 * those 8j + 2t and 8j + 2t + 1: in [j][c], c = 2 * (key is g + 8) + (row is odd). While the terms
 * of one block are computed, the tensor cores are at the next one.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PASS_B_CUH
#define DKV_KERNELS_CUDA_FAST_PASS_B_CUH

#include "kernels/cuda/fast_average.cuh"

namespace dkv_fast
{

/* Starts x = tile * rows^T for as many rows as x has columns. */
template <class S, int columns>
__device__ __forceinline__ void start_row_product(float (&x)[columns][4], uint32_t tile,
                                                  uint32_t from)
{
    const uint64_t keys = keys_operand<S>(tile);
    const uint64_t others = keys_operand<S>(from);
    hold(x);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
        warpgroup_mma_shared<typename S::type>(x, keys + keys_step(k), others + keys_step(k),
                                               k > 0);
    warpgroup_commit();
}

template <class S> using b_reader = tile_reader<S, S::B_TILES>;

/* The logits of 32 rows of a tile, as pass A left them. */
template <class S>
__device__ __forceinline__ void load_logits(uint32_t slot, int first_row, const place<S> &at,
                                            float (&z)[ROW_TILES][4])
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int row = 2 * at.t + (c & 1);
        const int key = 16 * at.warp + 8 * (c >> 1) + at.g;
        const uint32_t first = slot + slot_row(first_row + row) + 4 * (key ^ slot_permutation(row));
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
            z[j][c] = load_shared_float(first + slot_row(8 * j));
    }
}

/* The same from dot products with K. */
template <class S>
__device__ __forceinline__ void make_logits(const job &work, const logit_rule &rule, int first_row,
                                            int first_key, const place<S> &at,
                                            float (&z)[ROW_TILES][4])
{
    rule.apply<ROW_TILES, 4>(z);
    if (first_key + TILE <= rule.open_keys)
        return;
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int last_key = last_key_of(work, work.item.row_group * S::ROWS + first_row +
                                                       8 * j + 2 * at.t + (c & 1));
            if (first_key + 16 * at.warp + 8 * (c >> 1) + at.g > last_key)
                z[j][c] = -INFINITY;
        }
}

/* Where the scores of a unit go. */
struct score_sink {
    float *scores;
    unsigned *flags;
    float factor;
    uint32_t n_keys;
    bool adds; /* row groups after the first add to what the same thread wrote a turn before */

    /* `squares`: values have the power of two in scores, else of one. */
    __device__ __forceinline__ explicit score_sink(const job &work, bool squares = true)
        : scores(work.unit.scores), flags(&work.unit.report->flags),
          factor(work.unit.v_scale * (squares ? work.unit.v_scale : 1.0f) /
                 (work.block.gqa == DKV_GQA_MEAN || work.block.gqa == DKV_GQA_LAYER
                      ? static_cast<float>(work.block.group)
                      : 1.0f)),
          n_keys(work.block.n_valid), adds(work.item.row_group > 0)
    {
    }

    /* Sums of the thread's two keys, of which the second is eight after the first. */
    __device__ __forceinline__ void store(float (&sum)[2], uint32_t first_key, int t) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
        }
        const uint32_t key = first_key + 8 * t;
        if (t >= 2 || key >= n_keys)
            return;
        float score = (t == 0 ? sum[0] : sum[1]) * factor;
        if (adds)
            score += scores[key];
        scores[key] = score;
        if (!dkv_cu_finite(score))
            atomicOr(flags, DKV_CU_RETRY);
    }
    /* The same of one key, whose sum is in `sum` of this thread already. */
    __device__ __forceinline__ void put(float sum, uint32_t key) const
    {
        if (key >= n_keys)
            return;
        float score = sum * factor;
        if (adds)
            score += scores[key];
        scores[key] = score;
        if (!dkv_cu_finite(score))
            atomicOr(flags, DKV_CU_RETRY);
    }
};

/* Whether terms have the distance of every row. */
template <class S> __device__ __forceinline__ constexpr bool has_row_distances(void)
{
    return S::FORM == DKV_CU_FORM_DROPKV || S::FORM == DKV_CU_FORM_DIST;
}

/* A thread's row constants, of rows 32 * block and on. */
template <class S>
__device__ __forceinline__ void load_rows(const merged<S> &from, int block, int t,
                                          row_constants (&rows)[ROW_TILES][2])
{
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = block * BLOCK_ROWS + 8 * j + 2 * t + e;
            rows[j][e].norm = 0.0f;
            if (has_row_distances<S>()) {
#pragma unroll
                for (int part = 0; part < S::DIM / 32; part++)
                    rows[j][e].norm += from.norm[row][part];
            }
            rows[j][e].shift = from.lse[row] - DKV_CU_EXPONENT;
        }
}

/* The tiles that pass B is at: their addresses; `k` is 0 if the logits were kept. */
struct b_tile {
    uint32_t k;
    uint32_t v;
};

template <class S>
__device__ __forceinline__ b_tile wait_tile(shared_memory<S> &shared, b_reader<S> &reader,
                                            bool kept)
{
    b_tile tile;
    tile.k = kept ? 0 : reader.wait(shared.b_tiles, shared.b_full);
    tile.v = reader.wait(shared.b_tiles, shared.b_full);
    return tile;
}

/* Columns of products with values, in eights. */
template <class S> __device__ __forceinline__ constexpr int dots_of(void)
{
    return S::FORM == DKV_CU_FORM_AVERAGE ? 1 : 2 * ROW_TILES;
}

/* Starts what the tensor cores do with a tile and 32 rows: dot = a.v, by hi and lo parts of a (of
 * abar where rows are averaged), and, without kept logits, key_dot = q.k. */
template <class S>
__device__ __forceinline__ void start_block(const shared_memory<S> &shared, const b_tile &tile,
                                            int block, float (&dot)[dots_of<S>()][4],
                                            float (&key_dot)[ROW_TILES][4])
{
    if (tile.k != 0)
        start_row_product<S>(key_dot, tile.k,
                             shared_address(shared.query) + block * ROW_TILES * S::EIGHT_BYTES);
    start_row_product<S>(dot, tile.v,
                         S::FORM == DKV_CU_FORM_AVERAGE ? bar_operand(shared, block)
                                                        : shared_address(shared.rows.a[block]));
}

/* What p is multiplied with, for the thread's keys and 32 rows: a . v or |a - v|^2. */
template <class S>
__device__ __forceinline__ void find_against(const shared_memory<S> &shared, const job &work,
                                             int block, const float (&dot)[2 * ROW_TILES][4],
                                             const float (&square)[2],
                                             const row_constants (&rows)[ROW_TILES][2],
                                             uint32_t v_tile, const place<S> &at,
                                             float (&against)[ROW_TILES][4])
{
    if constexpr (has_row_distances<S>()) {
        distances<S>(dot, square, rows, shared_address(shared.rows.a[block]), v_tile,
                     work.block.v.dtype, at, against);
    } else {
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                against[j][c] = dot[j][c] + dot[ROW_TILES + j][c];
    }
}

/* Pass B of an item: first the tiles whose logits were kept, then the others. */
template <class S>
__device__ __forceinline__ void pass_b(shared_memory<S> &shared, const job &work,
                                       b_reader<S> &reader, ring<S::SLOTS> &slots,
                                       const place<S> &at)
{
    constexpr int BLOCKS = S::ROWS / BLOCK_ROWS;
    constexpr bool AVERAGES = S::FORM == DKV_CU_FORM_AVERAGE;
    constexpr bool HAS_SQUARES = S::FORM != DKV_CU_FORM_PROJ;
    const logit_rule rule(work);
    const score_sink sink(work, S::FORM == DKV_CU_FORM_DROPKV || S::FORM == DKV_CU_FORM_PROJ);
    row_constants rows[BLOCKS][ROW_TILES][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        load_rows(shared.rows, block, at.t, rows[block]);
    float least = INFINITY;
#pragma unroll
    for (int block = 0; S::FORM == DKV_CU_FORM_DIST && block < BLOCKS; block++)
        least = fminf(least, least_norm(rows[block]));
    const int tiles = item_tiles(work);
    const int first_kept = first_kept_tile<S>(tiles);
    const int n_kept = tiles - first_kept;
    int first_key = item_first_key(work.item) + first_kept * TILE;
    float dot[dots_of<S>()][4];
    float key_dot[ROW_TILES][4];
    float square[2];
    const bar_heads heads(work);
    float bar_norm[BLOCKS];
    if constexpr (AVERAGES)
        make_bars(shared, heads, at, bar_norm);
    b_tile tile = wait_tile(shared, reader, true);
    start_block(shared, tile, 0, dot, key_dot);
    if (HAS_SQUARES)
        sum_squares(tile.v, at, square);
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const bool kept = i < n_kept;
        if (i == n_kept)
            first_key = item_first_key(work.item);
        float sum[2] = {0.0f, 0.0f};
        if (AVERAGES || S::FORM == DKV_CU_FORM_DIST) {
            sum[0] = refuse_square<S>(square[0], least);
            sum[1] = refuse_square<S>(square[1], least);
        }
        const float own_square[2] = {square[0], square[1]}; /* while the next tile's are summed */
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const int first_row = block * BLOCK_ROWS;
            float z[ROW_TILES][4];
            float against[ROW_TILES][4];
            float bar_dot[2];
            warpgroup_wait<0>();
            hold(dot);
            hold(key_dot);
            if (kept) {
                load_logits<S>(shared_address(shared.slots[slots.index]), first_row, at, z);
            } else {
#pragma unroll
                for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        z[j][c] = key_dot[j][c];
            }
            if constexpr (AVERAGES) {
                bar_dot[0] = dot[0][0] + dot[0][1];
                bar_dot[1] = dot[0][2] + dot[0][3];
            } else {
                find_against(shared, work, block, dot, square, rows[block], tile.v, at, against);
            }
            if (block + 1 < BLOCKS) {
                start_block(shared, tile, block + 1, dot, key_dot);
            } else {
                if (!kept)
                    reader.release(shared.b_tiles, shared.b_empty, tile.k, at.lane);
                reader.release(shared.b_tiles, shared.b_empty, tile.v, at.lane);
                if (kept) {
                    if (at.lane == 0)
                        mbarrier_arrive(shared_address(&shared.slot_empty[slots.index]));
                    slots.advance();
                }
                if (i + 1 < tiles) {
                    tile = wait_tile(shared, reader, i + 1 < n_kept);
                    start_block(shared, tile, 0, dot, key_dot);
                    if (HAS_SQUARES)
                        sum_squares(tile.v, at, square);
                }
            }
            if (!kept)
                make_logits(work, rule, first_row, first_key, at, z);
            if constexpr (AVERAGES) {
                add_bar_terms(work, shared.rows, block, heads, bar_norm[block], own_square, bar_dot,
                              first_key + 16 * at.warp, at, z, rows[block], sum);
            } else {
                const int mine = shared.rows.top[first_row + at.lane] - first_key - 16 * at.warp;
                if (HAS_SQUARES && __any_sync(~0u, static_cast<unsigned>(mine) < 16))
                    take_top_terms(shared.rows, first_row, mine, at, z, sum);
                add_terms(shared.rows, first_row, at.t, z, against, rows[block], sum);
            }
        }
        sink.store(sum, first_key + 16 * at.warp + at.g, at.t);
        first_key += TILE;
    }
}

} // namespace dkv_fast

#endif
