/* Pass B: the score of every key of a chunk,
 *
 *   score(j) = 1/g sum over rows of (p / (1 - p))^2 |a - v_j|^2
 *   |a - v|^2 = |a|^2 - 2 a.v + |v|^2
 *
 * with a.v from the tensor cores (a as hi + lo) and |v|^2 from the diagonal of v v^T. Where that
 * difference cancels, the distance is summed again the plain way. The one key per row that the
 * merge singled out (`top`) takes its exact term p^2 |b - v|^2 from there.
 *
 * Each warp has its own rows. While the terms of one tile are computed, the tensor cores are at the
 * next one.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PASS_B_CUH
#define DKV_KERNELS_CUDA_FAST_PASS_B_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

constexpr float CANCELS = 1.0f / 256; /* |a - v|^2 below this part of |a|^2 + |v|^2: sum again */
constexpr float RANGE = 1.0f / (1ull << DKV_CU_EXPONENT);

/* The constants of a thread's rows in pass B. */
template <class S> struct row_state {
    /* a as operand of wgmma. R 1: hi and lo as rows g and g + 8; R 2: hi of both rows. */
    uint32_t hi[S::K_STEPS][4];
    uint32_t lo[S::R == 1 ? 1 : S::K_STEPS][4];
    float norm[S::R];  /* |hi + lo|^2 */
    float shift[S::R]; /* log2 of the denominator, less the range factor */
    int top[S::R];
    float top_term[S::R];

    __device__ __forceinline__ row_state(const merged<S> &from, const place<S> &at)
    {
        using type = typename S::type;
#pragma unroll
        for (int i = 0; i < S::R; i++) {
            const int row = at.row(i);
            const float2 *output = reinterpret_cast<const float2 *>(from.output[row]) + at.t;
            norm[i] = 0.0f;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++) {
                const float2 a = __ldcg(output + 4 * d);
                const uint32_t high = pack<type>(a.x, a.y);
                const float2 h = unpack<type>(high);
                const uint32_t low = pack<type>(a.x - h.x, a.y - h.y);
                const float2 l = unpack<type>(low);
                hi[d / 2][d % 2 * 2 + i] = high;
                if (S::R == 1)
                    hi[d / 2][d % 2 * 2 + 1] = low;
                else
                    lo[S::R == 1 ? 0 : d / 2][d % 2 * 2 + i] = low;
                const float x = h.x + l.x;
                const float y = h.y + l.y;
                norm[i] = fmaf(x, x, fmaf(y, y, norm[i]));
            }
            norm[i] += __shfl_xor_sync(~0u, norm[i], 1);
            norm[i] += __shfl_xor_sync(~0u, norm[i], 2);
            shift[i] = __ldcg(&from.lse[row]) - DKV_CU_EXPONENT;
            top[i] = __ldcg(&from.top[row]);
            float distance = at.t < S::DIM / 32 ? __ldcg(&from.top_distance[row][at.t]) : 0.0f;
            distance += __shfl_xor_sync(~0u, distance, 1);
            distance += __shfl_xor_sync(~0u, distance, 2);
            top_term[i] = __ldcg(&from.top_weight[row]) * distance;
        }
    }

    /* Starts dot = a.v for a tile's keys. */
    __device__ __forceinline__ void start_product(float (&dot)[8][4], uint32_t v_tile) const
    {
        const uint64_t values = keys_operand<S>(v_tile);
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++) {
            warpgroup_mma<typename S::type, 0>(dot, hi[k], values + keys_step(k), k > 0);
            if constexpr (S::R == 2)
                warpgroup_mma<typename S::type, 0>(dot, lo[k], values + keys_step(k), 1);
        }
    }
};

/* |v|^2 of a tile's keys, each warp for 16 of them: the diagonal of v v^T. */
template <class S>
__device__ __forceinline__ void sum_squares(float (&squares)[TILE], uint32_t v_tile,
                                            const place<S> &at)
{
    using type = typename S::type;
    const int m = at.lane >> 3;
    const int r = at.lane & 7;
    float diagonal[2][4] = {};
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++) {
        /* The 16 keys twice, as rows and as columns: copying registers would cost more. */
        uint32_t rows[4];
        uint32_t columns[4];
        load_matrices(rows,
                      v_tile + element_offset<S>(16 * at.warp + (m & 1) * 8 + r, 2 * k + (m >> 1)));
        load_matrices(columns,
                      v_tile + element_offset<S>(16 * at.warp + (m >> 1) * 8 + r, 2 * k + (m & 1)));
        mma<type>(diagonal[0], rows, columns[0], columns[1]);
        mma<type>(diagonal[1], rows, columns[2], columns[3]);
    }
    /* (g, 2t + e) is on the diagonal where g = 2t + e. */
    if (at.g >> 1 == at.t) {
        squares[16 * at.warp + at.g] = at.g & 1 ? diagonal[0][1] : diagonal[0][0];
        squares[16 * at.warp + 8 + at.g] = at.g & 1 ? diagonal[1][3] : diagonal[1][2];
    }
}

/* |a - v|^2 of one row and key, summed plainly by the whole warp. `key` counts within the tile. */
template <class S>
__device__ float exact_distance(const merged<S> &from, int row, uint32_t v_tile, int key, int lane)
{
    float sum = 0.0f;
    float scale = 0.0f;
    for (int pair = lane; pair < S::DIM / 2; pair += 32) {
        const float2 a = __ldcg(reinterpret_cast<const float2 *>(from.output[row]) + pair);
        const float2 v = unpack<typename S::type>(
            load_shared(v_tile + element_offset<S>(key, pair / 4) + 4 * (pair % 4)));
        sum = fmaf(a.x - v.x, a.x - v.x, fmaf(a.y - v.y, a.y - v.y, sum));
        scale = fmaf(v.x, v.x, fmaf(v.y, v.y, scale));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        scale += __shfl_xor_sync(~0u, scale, lanes);
    }
    return sum <= EQUAL * scale ? 0.0f : sum;
}

/* |a - v|^2 for the thread's rows and keys, from dot = a.v. */
template <class S>
__device__ __forceinline__ void distances(const float (&dot)[8][4], const float (&squares)[TILE],
                                          const row_state<S> &rows, const merged<S> &from,
                                          uint32_t v_tile, const place<S> &at,
                                          float (&distance)[8][2 * S::R])
{
    float room = INFINITY; /* the least by which a distance exceeds what may be noise */
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 square = *reinterpret_cast<const float2 *>(&squares[8 * j + 2 * at.t]);
#pragma unroll
        for (int c = 0; c < 2 * S::R; c++) {
            const float whole = rows.norm[c >> 1] + (c & 1 ? square.y : square.x);
            const float product = S::R == 1 ? dot[j][c] + dot[j][2 + c] : dot[j][c];
            distance[j][c] = fmaf(-2.0f, product, whole);
            room = fminf(room, fmaf(-CANCELS, whole, distance[j][c]));
        }
    }
    if (!__any_sync(~0u, room < 0.0f))
        return;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int c = 0; c < 2 * S::R; c++) {
            const float whole = rows.norm[c >> 1] + squares[8 * j + 2 * at.t + (c & 1)];
            unsigned lanes = __ballot_sync(~0u, distance[j][c] < CANCELS * whole);
            while (lanes != 0) {
                const int lane = __ffs(lanes) - 1;
                lanes &= lanes - 1;
                const int row = at.warp * 8 * S::R + (c >> 1) * 8 + lane / 4;
                const int key = 8 * j + 2 * (lane % 4) + (c & 1);
                const float exact = exact_distance<S>(from, row, v_tile, key, at.lane);
                if (at.lane == lane)
                    distance[j][c] = exact;
            }
        }
}

/* Sums of the thread's rows' terms per key: sum[j][e] belongs to key 8j + 2t + e. */
template <class S, bool has_top>
__device__ __forceinline__ void add_terms(const float (&z)[8][4],
                                          const float (&distance)[8][2 * S::R],
                                          const row_state<S> &rows, int first_key, int t,
                                          float (&sum)[8][2])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            sum[j][e] = 0.0f;
#pragma unroll
            for (int i = 0; i < S::R; i++) {
                const int c = 2 * i + e;
                const float p = exp2_fast(z[j][c] - rows.shift[i]); /* with the range factor */
                const float ratio = p * rcp_fast(fmaf(-RANGE, p, 1.0f));
                float term = ratio * ratio * distance[j][c];
                if (has_top && first_key + 8 * j + 2 * t + e == rows.top[i])
                    term = rows.top_term[i];
                sum[j][e] += term;
            }
        }
}

/* Adds over the eight lanes that share t. The lane is left with two sums, of the keys whose first
 * it returns and the next. */
__device__ __forceinline__ int fold_keys(const float (&sum)[8][2], int lane, float2 &total)
{
    const bool b4 = lane & 16;
    const bool b3 = lane & 8;
    const bool b2 = lane & 4;
    float x[4][2];
    float y[2][2];
    float z[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j][e] = (b4 ? sum[4 + j][e] : sum[j][e]) +
                      __shfl_xor_sync(~0u, b4 ? sum[j][e] : sum[4 + j][e], 16);
#pragma unroll
        for (int j = 0; j < 2; j++)
            y[j][e] = (b3 ? x[2 + j][e] : x[j][e]) +
                      __shfl_xor_sync(~0u, b3 ? x[j][e] : x[2 + j][e], 8);
        z[e] = (b2 ? y[1][e] : y[0][e]) + __shfl_xor_sync(~0u, b2 ? y[0][e] : y[1][e], 4);
    }
    total = make_float2(z[0], z[1]);
    return (b4 ? 32 : 0) + (b3 ? 16 : 0) + (b2 ? 8 : 0) + 2 * (lane & 3);
}

/* The terms of a tile, summed over this warp's rows. */
template <class S>
__device__ __forceinline__ void sum_terms(const float (&z)[8][4],
                                          const float (&distance)[8][2 * S::R],
                                          const row_state<S> &rows, int first_key,
                                          const place<S> &at, float (&row_sums)[4][TILE])
{
    bool has_top = false;
#pragma unroll
    for (int i = 0; i < S::R; i++)
        has_top |= static_cast<unsigned>(rows.top[i] - first_key) < TILE;
    float sum[8][2];
    if (__any_sync(~0u, has_top))
        add_terms<S, true>(z, distance, rows, first_key, at.t, sum);
    else
        add_terms<S, false>(z, distance, rows, first_key, at.t, sum);
    float2 total;
    const int key = fold_keys(sum, at.lane, total);
    *reinterpret_cast<float2 *>(&row_sums[at.warp][key]) = total;
}

template <class S> using b_reader = tile_reader<S, S::B_HALVES>;

/* The logits of a tile, as pass A left them; their slot is free then. */
template <class S>
__device__ __forceinline__ void take_kept(shared_memory<S> &shared, ring<S::SLOTS> &slots,
                                          const place<S> &at, float (&z)[8][4])
{
    const uint32_t slot = shared_address(shared.slots[slots.index]);
#pragma unroll
    for (int i = 0; i < S::R; i++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float4 kept = load_shared4(slot + at.slot_cell(i, q));
            z[2 * q][2 * i] = kept.x, z[2 * q][2 * i + 1] = kept.y;
            z[2 * q + 1][2 * i] = kept.z, z[2 * q + 1][2 * i + 1] = kept.w;
        }
    __syncwarp();
    if (at.lane == 0)
        mbarrier_arrive(shared_address(&shared.slot_empty[slots.index]));
    slots.advance();
}

/* The same from K again; the query in two parts, to save registers. */
template <class S>
__device__ __forceinline__ void compute_logits(shared_memory<S> &shared, const job &work,
                                               b_reader<S> &reader, int first_key,
                                               const place<S> &at, float (&z)[8][4])
{
    const logit_rule<S> rule(work, at);
    const uint32_t k_tile = reader.wait(shared.b_halves, shared.b_full);
    constexpr int STEPS = S::K_STEPS / 2;
#pragma unroll 1
    for (int first = 0; first < S::K_STEPS; first += STEPS) {
        uint32_t q[STEPS][4];
        load_query<S>(work, at, first, q);
        hold(z);
        warpgroup_fence();
        start_dots<S>(z, q, k_tile, first);
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(z);
    }
    reader.release(shared.b_halves, shared.b_empty, k_tile, at.lane);
    rule.apply(z, first_key, at.t);
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
                 (work.block.gqa == DKV_GQA_MEAN ? static_cast<float>(work.block.group) : 1.0f)),
          n_keys(work.block.n_valid), adds(work.item.row_group > 0)
    {
    }

    /* One key of a tile whose rows the four warps have summed. */
    __device__ __forceinline__ void store(const float (&row_sums)[4][TILE], uint32_t first_key,
                                          int key) const
    {
        if (first_key + key >= n_keys)
            return;
        float sum = (row_sums[0][key] + row_sums[1][key]) + (row_sums[2][key] + row_sums[3][key]);
        sum *= factor;
        if (adds)
            sum += scores[first_key + key];
        scores[first_key + key] = sum;
        if (!dkv_cu_finite(sum))
            atomicOr(flags, DKV_CU_RETRY);
    }
};

/* Waits for the next V tile and starts what the tensor cores do with it. */
template <class S>
__device__ __forceinline__ uint32_t start_tile(shared_memory<S> &shared, b_reader<S> &reader,
                                               const row_state<S> &rows, float (&dot)[8][4],
                                               float (&squares)[TILE], const place<S> &at)
{
    const uint32_t v_tile = reader.wait(shared.b_halves, shared.b_full);
    hold(dot);
    warpgroup_fence();
    rows.start_product(dot, v_tile);
    warpgroup_commit();
    sum_squares<S>(squares, v_tile, at);
    return v_tile;
}

template <class S>
__device__ __forceinline__ void pass_b(shared_memory<S> &shared, const job &work,
                                       b_reader<S> &reader, ring<S::SLOTS> &slots,
                                       const place<S> &at, const dkv_fast_counters *counters)
{
    if (at.thread == 0)
        counter_wait(&counters->merged, work.item.chunks);
    group_barrier(BARRIER_B);
    const merged<S> &from = reinterpret_cast<const merged<S> *>(
        work.unit.work)[work.item.row_group];
    const row_state<S> rows(from, at);
    const score_sink sink(work);
    const int chunk_key = item_first_key(work.item);
    const int tiles = item_tiles(work);
    float dot[8][4];
    float distance[8][2 * S::R];
    float z[8][4] = {};
    uint32_t v_tile = 0;
    /* In step i the distances and terms of tile i - 1, and between them the start of tile i. */
#pragma unroll 1
    for (int step = 0; step <= tiles; step++) {
        const int tile = step - 1;
        const int first_key = chunk_key + tile * TILE;
        if (step > 0) {
            warpgroup_wait<0>();
            hold(dot);
            group_barrier(BARRIER_B); /* squares of this tile, row sums of the last one */
            if (tile > 0 && at.thread < TILE)
                sink.store(shared.row_sums[~tile & 1], first_key - TILE, at.thread);
            distances<S>(dot, shared.squares[tile & 1], rows, from, v_tile, at, distance);
            reader.release(shared.b_halves, shared.b_empty, v_tile, at.lane);
            if (tile < S::KEPT_TILES)
                take_kept<S>(shared, slots, at, z);
            else
                compute_logits<S>(shared, work, reader, first_key, at, z);
        }
        if (step < tiles)
            v_tile = start_tile<S>(shared, reader, rows, dot, shared.squares[step & 1], at);
        if (step > 0)
            sum_terms<S>(z, distance, rows, first_key, at, shared.row_sums[tile & 1]);
    }
    group_barrier(BARRIER_B);
    if (at.thread < TILE)
        sink.store(shared.row_sums[(tiles - 1) & 1], chunk_key + (tiles - 1) * TILE, at.thread);
}

} // namespace dkv_fast

#endif
