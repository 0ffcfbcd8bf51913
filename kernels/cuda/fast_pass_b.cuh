/* Pass B: the score of every key of a chunk,
 *
 *   score(j) = 1/g sum over rows of (p / (1 - p))^2 |a - v_j|^2
 *   |a - v|^2 = |a|^2 - 2 a.v + |v|^2
 *
 * with a.v from the tensor cores (a as hi + lo) and |v|^2 summed by the lanes meanwhile. Where that
 * difference cancels, the distance is summed again the plain way. The one key per row that the
 * merge singled out (`top`) takes its exact term p^2 |b - v|^2 from there.
 *
 * A warp has 16 keys of a tile; a thread sees keys g and g + 8 of them, and of a block of 32 rows
 * those 8j + 2t and 8j + 2t + 1: in [j][c], c = 2 * (key is g + 8) + (row is odd). While the terms
 * of one block are computed, the tensor cores are at the next one.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PASS_B_CUH
#define DKV_KERNELS_CUDA_FAST_PASS_B_CUH

#include "kernels/cuda/fast_distance.cuh"

namespace dkv_fast
{

constexpr float RANGE = 1.0f / (1ull << DKV_CU_EXPONENT);

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

/* Adds the terms of the thread's rows to the sums of its keys. */
__device__ __forceinline__ void add_terms(const float (&z)[ROW_TILES][4],
                                          const float (&distance)[ROW_TILES][4],
                                          const row_constants (&rows)[ROW_TILES][2],
                                          float (&sum)[2])
{
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float p = exp2_fast(z[j][c] - rows[j][c & 1].shift); /* with the range factor */
            const float ratio = p * rcp_fast(fmaf(-RANGE, p, 1.0f));
            sum[c >> 1] = fmaf(ratio * ratio, distance[j][c], sum[c >> 1]);
        }
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

    __device__ __forceinline__ explicit score_sink(const job &work)
        : scores(work.unit.scores), flags(&work.unit.report->flags),
          factor(work.unit.v_scale * work.unit.v_scale /
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
};

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
#pragma unroll
            for (int part = 0; part < S::DIM / 32; part++)
                rows[j][e].norm += from.norm[row][part];
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

/* Starts what the tensor cores do with a tile and 32 rows: dot = a.v, by hi and lo parts of a, and,
 * without kept logits, key_dot = q.k. */
template <class S>
__device__ __forceinline__ void start_block(const shared_memory<S> &shared, const b_tile &tile,
                                            int block, float (&dot)[2 * ROW_TILES][4],
                                            float (&key_dot)[ROW_TILES][4])
{
    if (tile.k != 0)
        start_row_product<S>(key_dot, tile.k,
                             shared_address(shared.query) + block * ROW_TILES * S::EIGHT_BYTES);
    start_row_product<S>(dot, tile.v, shared_address(shared.rows.a[block]));
}

/* Pass B of an item: first the tiles whose logits were kept, then the others. */
template <class S>
__device__ __forceinline__ void pass_b(shared_memory<S> &shared, const job &work,
                                       b_reader<S> &reader, ring<S::SLOTS> &slots,
                                       const place<S> &at)
{
    constexpr int BLOCKS = S::ROWS / BLOCK_ROWS;
    const logit_rule rule(work);
    const score_sink sink(work);
    row_constants rows[BLOCKS][ROW_TILES][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        load_rows(shared.rows, block, at.t, rows[block]);
    const int tiles = item_tiles(work);
    const int first_kept = first_kept_tile<S>(tiles);
    const int n_kept = tiles - first_kept;
    int first_key = item_first_key(work.item) + first_kept * TILE;
    float dot[2 * ROW_TILES][4];
    float key_dot[ROW_TILES][4];
    float square[2];
    b_tile tile = wait_tile(shared, reader, true);
    start_block(shared, tile, 0, dot, key_dot);
    sum_squares(tile.v, at, square);
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const bool kept = i < n_kept;
        if (i == n_kept)
            first_key = item_first_key(work.item);
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const int first_row = block * BLOCK_ROWS;
            float z[ROW_TILES][4];
            float distance[ROW_TILES][4];
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
            distances<S>(dot, square, rows[block], shared_address(shared.rows.a[block]), tile.v,
                         work.block.v.dtype, at, distance);
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
                    sum_squares(tile.v, at, square);
                }
            }
            if (!kept)
                make_logits(work, rule, first_row, first_key, at, z);
            const int mine = shared.rows.top[first_row + at.lane] - first_key - 16 * at.warp;
            if (__any_sync(~0u, static_cast<unsigned>(mine) < 16))
                take_top_terms(shared.rows, first_row, mine, at, z, sum);
            add_terms(z, distance, rows[block], sum);
        }
        sink.store(sum, first_key + 16 * at.warp + at.g, at.t);
        first_key += TILE;
    }
}

} // namespace dkv_fast

#endif
