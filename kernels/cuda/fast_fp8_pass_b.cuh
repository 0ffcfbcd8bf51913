/* Pass B of fp8 caches: what fast_pass_b.cuh does, with the tile's keys as the operand in
 * registers, where they become fp16. hi and lo of a are added up by the tensor cores.
 *
 * Registers of a product must be left alone until it is waited for. So there is one place where
 * values are loaded: a step of the loop ends the step before, starts its own product, and then
 * computes the terms of the step before.
 */
#ifndef DKV_KERNELS_CUDA_FAST_FP8_PASS_B_CUH
#define DKV_KERNELS_CUDA_FAST_FP8_PASS_B_CUH

#include "kernels/cuda/fast_pass_b.cuh"

namespace dkv_fast
{

/* Starts x = keys * the sum of `parts` operands of 32 rows^T, which follow each other. */
template <class S, int parts>
__device__ __forceinline__ void start_row_product(float (&x)[ROW_TILES][4], const fp8_keys<S> &keys,
                                                  uint32_t from)
{
    constexpr int NEXT = ROW_TILES * S::EIGHT_BYTES;
    const uint64_t rows = keys_operand<S>(from);
    hold(x);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
        for (int part = 0; part < parts; part++)
            warpgroup_mma<fp16_type, 0>(x, keys.words[k], rows + keys_step(k) + (part * NEXT >> 4),
                                        k > 0 || part > 0);
    warpgroup_commit();
}

/* The logits of 32 rows of a tile, as pass A had them in registers. */
template <class S>
__device__ __forceinline__ void load_fp8_logits(uint32_t slot, int block, const place<S> &at,
                                                float (&z)[ROW_TILES][4])
{
    const uint32_t first = slot + (block * ROW_TILES * GROUP_THREADS + at.thread) * 16;
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
        load_shared(first + j * GROUP_THREADS * 16, z[j]);
}

/* q.k of a tile whose logits were not kept, while no product is under way. */
template <class S>
__device__ __forceinline__ void fp8_key_dots(const shared_memory<S> &shared, uint32_t k_tile,
                                             int block, const place<S> &at, bool e5m2,
                                             float (&z)[ROW_TILES][4])
{
    fp8_keys<S> keys;
    keys.load(k_tile, at);
    keys.convert(e5m2);
    start_row_product<S, 1>(z, keys,
                            shared_address(shared.query) + block * ROW_TILES * S::EIGHT_BYTES);
    warpgroup_wait<0>();
    hold(z);
}

template <class S>
__device__ __forceinline__ void fp8_pass_b(shared_memory<S> &shared, const job &work,
                                           b_reader<S> &reader, ring<S::SLOTS> &slots,
                                           const place<S> &at)
{
    constexpr int BLOCKS = S::ROWS / BLOCK_ROWS;
    const logit_rule rule(work);
    const score_sink sink(work);
    const bool k_e5m2 = work.block.k.dtype == DKV_F8_E5M2;
    const bool v_e5m2 = work.block.v.dtype == DKV_F8_E5M2;
    row_constants rows[BLOCKS][ROW_TILES][2];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
        load_rows(shared.rows, block, at.t, rows[block]);
    const int tiles = item_tiles(work);
    const int first_kept = first_kept_tile<S>(tiles);
    const int n_kept = tiles - first_kept;
    int first_key = item_first_key(work.item) + first_kept * TILE; /* of the tile to be ended */
    b_tile tile = {0, 0};
    fp8_keys<S> values;
    float dot[ROW_TILES][4];
    float square[2];
    float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int i = 0; i <= tiles; i++) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            /* The block to be ended: of this tile or, before its first, the last of the tile
             * before; there is none before the first tile, and one after the last. */
            const int block = (b + BLOCKS - 1) % BLOCKS;
            const bool ends = b == 0 ? i > 0 : i < tiles;
            const bool kept = b == 0 ? i <= n_kept : i < n_kept;
            float z[ROW_TILES][4];
            float distance[ROW_TILES][4];
            if (ends) {
                if (kept)
                    load_fp8_logits<S>(shared_address(shared.slots[slots.index]), block, at, z);
                warpgroup_wait<0>();
                hold(dot);
                if (!kept)
                    fp8_key_dots(shared, tile.k, block, at, k_e5m2, z);
                distances<S>(dot, square, rows[block], shared_address(shared.rows.a[block]), tile.v,
                             work.block.v.dtype, at, distance);
                if (b == 0) {
                    if (!kept)
                        reader.release(shared.b_tiles, shared.b_empty, tile.k, at.lane);
                    reader.release(shared.b_tiles, shared.b_empty, tile.v, at.lane);
                    if (kept) {
                        if (at.lane == 0)
                            mbarrier_arrive(shared_address(&shared.slot_empty[slots.index]));
                        slots.advance();
                    }
                }
            }
            if (i < tiles) {
                if (b == 0) {
                    tile = wait_tile(shared, reader, i < n_kept);
                    values.load(tile.v, at);
                    values.convert(v_e5m2);
                    sum_squares(values, square);
                }
                start_row_product<S, 2>(dot, values, shared_address(shared.rows.a[b]));
            }
            if (!ends)
                continue;
            if (!kept)
                make_logits(work, rule, block * BLOCK_ROWS, first_key, at, z);
            const int mine = shared.rows.top[block * BLOCK_ROWS + at.lane] - first_key -
                             16 * at.warp;
            if (__any_sync(~0u, static_cast<unsigned>(mine) < 16))
                take_top_terms(shared.rows, block * BLOCK_ROWS, mine, at, z, sum);
            add_terms(shared.rows, block * BLOCK_ROWS, at.t, z, distance, rows[block], sum);
            if (b != 0)
                continue;
            sink.store(sum, first_key + 16 * at.warp + at.g, at.t);
            sum[0] = sum[1] = 0.0f;
            first_key += TILE;
            if (i == n_kept)
                first_key = item_first_key(work.item);
        }
    }
}

} // namespace dkv_fast

#endif
