/* Pass B: the score of every key of a chunk,
 *
 *   score(j) = 1/g sum over rows of (p / (1 - p))^2 |a - v_j|^2,   |a - v|^2 = |a|^2 - 2 a.v + |v|^2
 *
 * with a.v from the tensor cores (a as hi + lo) and |v|^2 from the diagonal of v v^T. Where that
 * difference cancels, the distance is summed again the plain way. The one key per row that the
 * merge singled out (`top`) takes its exact term p^2 |b - v|^2 from there.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PASS_B_CUH
#define DKV_KERNELS_CUDA_FAST_PASS_B_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

constexpr float CANCELS = 1.0f / 256; /* |a - v|^2 below this part of |a|^2 + |v|^2: sum again */
constexpr float RANGE = 1.0f / (1ull << DKV_CU_EXPONENT);

template <class S> using place_b = place<S, B_WARPS>;

/* A row's constants in pass B, for the thread's two rows. */
template <class S> struct row_state {
    uint32_t hi[S::K_STEPS][4]; /* a as A operand of mma: hi + lo */
    uint32_t lo[S::K_STEPS][4];
    float norm[2];  /* |hi + lo|^2 */
    float shift[2]; /* log2 of the denominator, less the range factor */
    int top[2];
    float top_term[2];
    int warp_top; /* lane l: top of row l of the row tile */

    __device__ __forceinline__ void load(const merged<S> &from, const place_b<S> &at)
    {
        using type = typename S::type;
        const float4 *output = from.output + at.row_tile * S::D_TILES * 32 + at.lane;
        norm[0] = norm[1] = 0.0f;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const float4 a = __ldcg(output + d * 32);
            const float pairs[2][2] = {{a.x, a.y}, {a.z, a.w}};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t h = pack<type>(pairs[i][0], pairs[i][1]);
                const float2 head = unpack<type>(h);
                const uint32_t l = pack<type>(pairs[i][0] - head.x, pairs[i][1] - head.y);
                const float2 tail = unpack<type>(l);
                hi[d / 2][2 * (d % 2) + i] = h;
                lo[d / 2][2 * (d % 2) + i] = l;
                const float x = head.x + tail.x;
                const float y = head.y + tail.y;
                norm[i] = fmaf(x, x, fmaf(y, y, norm[i]));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.row(i);
            norm[i] += __shfl_xor_sync(~0u, norm[i], 1);
            norm[i] += __shfl_xor_sync(~0u, norm[i], 2);
            shift[i] = __ldcg(&from.lse[row]) - DKV_CU_EXPONENT;
            top[i] = __ldcg(&from.top[row]);
            float distance = 0.0f;
#pragma unroll
            for (int d = 0; d < S::D_TILES / 4; d++)
                distance += __ldcg(&from.top_distance[row][at.t * (S::D_TILES / 4) + d]);
            distance += __shfl_xor_sync(~0u, distance, 1);
            distance += __shfl_xor_sync(~0u, distance, 2);
            top_term[i] = __ldcg(&from.top_weight[row]) * distance;
        }
        warp_top = __ldcg(&from.top[at.row_tile * 16 + (at.lane & 15)]);
    }
};

/* a.v for the thread's rows and the keys of a strip. */
template <class S>
__device__ __forceinline__ void strip_products(uint32_t strip, const row_state<S> &rows,
                                               const place_b<S> &at, float (&dot)[2][4])
{
    using type = typename S::type;
    float low[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        dot[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++) {
        uint32_t m[4];
        load_matrices(m, strip + (at.matrix ^ 32 * k));
        mma<type>(dot[0], rows.hi[k], m[0], m[1]);
        mma<type>(dot[1], rows.hi[k], m[2], m[3]);
        mma<type>(low[0], rows.lo[k], m[0], m[1]);
        mma<type>(low[1], rows.lo[k], m[2], m[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        dot[i / 4][i % 4] += low[i / 4][i % 4];
}

/* |a - v|^2 of one row and key, summed plainly by the whole warp. `key` counts within the half tile. */
template <class S>
__device__ float exact_distance(const merged<S> &from, int row, uint32_t v_half, int key, int lane)
{
    float sum = 0.0f;
    float scale = 0.0f;
    for (int pair = lane; pair < S::DIM / 2; pair += 32) {
        const int d = pair / 4;
        const int t = pair % 4;
        const float *cell = reinterpret_cast<const float *>(
            from.output + ((row / 16) * S::D_TILES + d) * 32 + (row % 8) * 4 + t);
        const float2 a = __ldcg(reinterpret_cast<const float2 *>(cell + (row % 16 >= 8 ? 2 : 0)));
        const float2 v =
            unpack<typename S::type>(load_shared(v_half + element_offset<S>(key, d) + 4 * t));
        sum = fmaf(a.x - v.x, a.x - v.x, fmaf(a.y - v.y, a.y - v.y, sum));
        scale = fmaf(v.x, v.x, fmaf(v.y, v.y, scale));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        scale += __shfl_xor_sync(~0u, scale, lanes);
    }
    return sum <= EQUAL * scale ? 0.0f : sum;
}

/* dot[n][c] becomes |a - v|^2. */
template <class S>
__device__ __forceinline__ void strip_distances(float (&dot)[2][4], const float (&square)[2][2],
                                                const row_state<S> &rows, const merged<S> &from,
                                                uint32_t v_half, int strip_key,
                                                const place_b<S> &at)
{
    unsigned cancels = 0;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float whole = rows.norm[c >> 1] + square[n][c & 1];
            dot[n][c] = fmaf(-2.0f, dot[n][c], whole);
            if (dot[n][c] < CANCELS * whole)
                cancels |= 1u << (4 * n + c);
        }
    if (!__any_sync(~0u, cancels != 0))
        return;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            unsigned lanes = __ballot_sync(~0u, cancels >> (4 * n + c) & 1);
            while (lanes != 0) {
                const int lane = __ffs(lanes) - 1;
                lanes &= lanes - 1;
                const int row = at.row_tile * 16 + (c >> 1) * 8 + lane / 4;
                const int key = strip_key + 8 * n + 2 * (lane % 4) + (c & 1);
                const float distance = exact_distance<S>(from, row, v_half, key, at.lane);
                if (at.lane == lane)
                    dot[n][c] = distance;
            }
        }
}

/* Sums of the thread's two rows' terms per key: sum[n][e] belongs to key 8n + 2t + e. */
template <class S, bool has_top>
__device__ __forceinline__ void strip_terms(const float (&z)[2][4], const float (&distance)[2][4],
                                            const row_state<S> &rows, int first_key, int t,
                                            float (&sum)[2][2])
{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            sum[n][e] = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = 2 * i + e;
                const float p = exp2_fast(z[n][c] - rows.shift[i]); /* with the range factor */
                const float ratio = p * rcp_fast(fmaf(-RANGE, p, 1.0f));
                float term = ratio * ratio * distance[n][c];
                if (has_top && first_key + 8 * n + 2 * t + e == rows.top[i])
                    term = rows.top_term[i];
                sum[n][e] += term;
            }
        }
}

/* Adds over the eight lanes that share t: the lane gets the sum of one of its four keys, whose
 * place in the strip it returns; lanes with bit 2 set hold copies. */
__device__ __forceinline__ int fold_keys(const float (&sum)[2][2], int lane, float &total)
{
    const bool upper = lane & 16;
    const bool odd = lane & 8;
    float keep0 = upper ? sum[1][0] : sum[0][0];
    float keep1 = upper ? sum[1][1] : sum[0][1];
    keep0 += __shfl_xor_sync(~0u, upper ? sum[0][0] : sum[1][0], 16);
    keep1 += __shfl_xor_sync(~0u, upper ? sum[0][1] : sum[1][1], 16);
    total = odd ? keep1 : keep0;
    total += __shfl_xor_sync(~0u, odd ? keep0 : keep1, 8);
    total += __shfl_xor_sync(~0u, total, 4);
    return (upper ? 8 : 0) + 2 * (lane & 3) + (odd ? 1 : 0);
}

/* Writes the scores of a tile whose rows were summed into row_sums. Row groups after the first add
 * to what the same thread wrote a turn before. */
template <class S>
__device__ __forceinline__ void store_scores(const float (&row_sums)[S::ROW_TILES][TILE],
                                             const job &work, float factor, int first_key,
                                             const place_b<S> &at)
{
    const int key = at.warp * (TILE / B_WARPS) + at.lane;
    if (at.lane >= TILE / B_WARPS || first_key + key >= static_cast<int>(work.block.n_valid))
        return;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < S::ROW_TILES; r++)
        sum += row_sums[r][key];
    sum *= factor;
    float *score = work.unit.scores + first_key + key;
    if (work.item.row_group > 0)
        sum += *score;
    *score = sum;
    if (!dkv_cu_finite(sum))
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
}

/* Half tiles as they come: the V halves of a tile, after its K halves where logits were not kept.
 * A warp reads the half that its strips are in, every other one. */
template <class S> struct b_reader {
    ring<S::B_HALVES> next;
    int half;

    __device__ __forceinline__ explicit b_reader(const place_b<S> &at)
    {
        half = at.strip(0) / 2;
        next.advance(half);
    }
    __device__ __forceinline__ uint32_t wait(shared_memory<S> &shared)
    {
        mbarrier_wait(shared_address(&shared.b_full[next.index]), next.parity);
        return shared_address(shared.b_halves[next.index]);
    }
    __device__ __forceinline__ void release(shared_memory<S> &shared, int lane)
    {
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(&shared.b_empty[next.index]));
        next.advance(2);
    }
};

/* The logits and |v|^2 that pass A left of one strip. */
template <class S>
__device__ __forceinline__ void load_kept(shared_memory<S> &shared, int bank, int tile, int s,
                                          const place_b<S> &at, float (&z)[2][4],
                                          float (&square)[2][2])
{
    const uint32_t slot = shared_address(shared.slots[bank][tile]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float4 kept = load_shared4(slot + at.slot_cell(s, n));
        z[n][0] = kept.x, z[n][1] = kept.y, z[n][2] = kept.z, z[n][3] = kept.w;
        const float2 pair = *reinterpret_cast<const float2 *>(
            &shared.squares[bank][tile][16 * at.strip(s) + 8 * n + 2 * at.t]);
        square[n][0] = pair.x, square[n][1] = pair.y;
    }
}

/* Pass A may use this warp's part of slots first..last-1 of a bank again. */
template <class S>
__device__ __forceinline__ void release_slots(shared_memory<S> &shared, int bank, int first,
                                              int last, int lane)
{
    __syncwarp();
    for (int tile = first; lane == 0 && tile < last; tile++)
        mbarrier_arrive(shared_address(&shared.slot_empty[bank][tile]));
}

template <class S>
__device__ __forceinline__ void pass_b(shared_memory<S> &shared, const job &work, int bank,
                                       b_reader<S> &reader, const place_b<S> &at,
                                       const dkv_fast_counters *counters)
{
    constexpr int STRIPS = place_b<S>::STRIPS;
    if (at.warp == 0 && at.lane == 0)
        counter_wait(&counters->merged, work.item.chunks);
    barrier<BARRIER_B, B_THREADS>();
    const merged<S> &from =
        reinterpret_cast<const merged<S> *>(work.unit.work)[work.item.row_group];
    row_state<S> rows;
    rows.load(from, at);
    const float factor =
        work.block.gqa == DKV_GQA_MEAN ? 1.0f / static_cast<float>(work.block.group) : 1.0f;
    const int chunk_key = item_first_key(work.item);
    const int tiles = item_tiles(work);
    for (int tile = 0; tile < tiles; tile++) {
        const int first_key = chunk_key + tile * TILE;
        const bool kept = tile < S::KEPT_TILES;
        float z[STRIPS][2][4];
        if (!kept) {
            uint32_t q[S::K_STEPS][4];
            load_query<S>(work, at, q);
            logit_rule rule;
            rule.set(work, at, work.item.row_group * S::ROWS);
            const uint32_t k_half = reader.wait(shared);
            strip_dots<S>(k_half + at.strip(0) % 2 * 16 * S::ROW_BYTES, q, at, z);
            reader.release(shared, at.lane);
#pragma unroll
            for (int s = 0; s < STRIPS; s++)
                strip_logits(rule, first_key + 16 * at.strip(s), at.t, z[s]);
        }
        const uint32_t v_half = reader.wait(shared);
        const bool has_top =
            __any_sync(~0u, static_cast<unsigned>(rows.warp_top - first_key) < TILE);
        float(&row_sums)[S::ROW_TILES][TILE] = shared.row_sums[tile & 1];
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const int half_key = at.strip(s) % 2 * 16;
            const int strip_key = at.strip(s) * 16;
            float dot[2][4];
            float square[2][2];
            strip_products<S>(v_half + half_key * S::ROW_BYTES, rows, at, dot);
            if (kept)
                load_kept<S>(shared, bank, tile, s, at, z[s], square);
            else
                strip_squares<S>(v_half + half_key * S::ROW_BYTES, at, square);
            strip_distances<S>(dot, square, rows, from, v_half, half_key, at);
            float sum[2][2];
            if (has_top)
                strip_terms<S, true>(z[s], dot, rows, first_key + strip_key, at.t, sum);
            else
                strip_terms<S, false>(z[s], dot, rows, first_key + strip_key, at.t, sum);
            float total;
            const int key = fold_keys(sum, at.lane, total);
            if (!(at.lane & 4))
                row_sums[at.row_tile][strip_key + key] = total;
        }
        reader.release(shared, at.lane);
        if (kept)
            release_slots(shared, bank, tile, tile + 1, at.lane);
        barrier<BARRIER_B, B_THREADS>();
        store_scores<S>(row_sums, work, factor, first_key, at);
    }
    release_slots(shared, bank, tiles, S::KEPT_TILES, at.lane);
}

} // namespace dkv_fast

#endif
