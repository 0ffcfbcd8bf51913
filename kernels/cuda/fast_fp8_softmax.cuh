/* Softmax of fp8 caches in pass A: what fast_pass_a.cuh says of sums, top keys and bases, with a
 * row's keys spread over the whole group. Rows' bases and top keys lie in shared memory.
 *
 * After the first tile weights are made on the assumption that no logit exceeds its base by more
 * than the slack; at the barrier that hands them over all threads learn whether one does. Then
 * bases are raised and the weights made again.
 */
#ifndef DKV_KERNELS_CUDA_FAST_FP8_SOFTMAX_CUH
#define DKV_KERNELS_CUDA_FAST_FP8_SOFTMAX_CUH

#include "kernels/cuda/fast_pass_a.cuh"

namespace dkv_fast
{

/* What a thread has of the sums. */
template <class S> struct fp8_softmax {
    static constexpr int TILES = S::ROWS / 8;

    float sum[TILES][2];             /* of its keys */
    float output[S::DIM / 64][8][4]; /* columns: 32 rows: hi products, then lo; 64: rows */

    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int j = 0; j < TILES; j++)
            sum[j][0] = sum[j][1] = 0.0f;
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    output[m][j][c] = 0.0f;
    }

    __device__ __forceinline__ void hold_output(void)
    {
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
            hold(output[m]);
    }

    /* Output of rows 8j + 2t and the next: *= factor, then the top key joins with weight `joins`.
     * held: its value's bytes in the thread's dimensions. */
    __device__ __forceinline__ void rescale_output(int j, const float2 &factor, const float2 &joins,
                                                   const uint32_t (&held)[2], bool e5m2)
    {
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float f = e == 0 ? factor.x : factor.y;
                const float w = e == 0 ? joins.x : joins.y;
                const uint32_t bytes = held[e] >> 16 * m;
                const float2 v = unpack<fp16_type>(e5m2 ? fp16_of_fp8<true>(bytes)
                                                        : fp16_of_fp8<false>(bytes));
                float *o = output[m][j];
                o[e] = fmaf(w, v.x, o[e] * f);
                o[2 + e] = fmaf(w, v.y, o[2 + e] * f);
                if (S::R == 1) {
                    output[m][4 + j % 4][e] *= f;
                    output[m][4 + j % 4][2 + e] *= f;
                }
            }
    }
};

/* How many threads look at one row together, and at how many keys of a tile each. */
template <class S> struct row_share {
    static constexpr int SHARERS = GROUP_THREADS / S::ROWS;
    static constexpr int KEYS = TILE / SHARERS;
    int row;
    int part;

    __device__ __forceinline__ explicit row_share(int thread)
        : row(thread / SHARERS), part(thread % SHARERS)
    {
    }
};

/* Nothing is in the sums. Before the group meets, so of `held` a thread clears what nobody else
 * reads: another warp may still be storing the partial of the item before. */
template <class S> __device__ __forceinline__ void clear_rows(fp8_room<S> &room, const place<S> &at)
{
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            fp8_values<S>::store_bytes(
                shared_address(room.held[8 * j + 2 * at.t + e]) + fp8_values<S>::first(at), 0);
    if (at.thread >= S::ROWS)
        return;
    room.base[at.thread] = NO_KEY;
    room.top[at.thread] = NO_KEY;
    room.key[at.thread] = -1;
}

/* ---- weights ---- */

/* Makes a tile's weights as operand of the value product, hi + lo, and sums them up. */
template <class S>
__device__ __forceinline__ void make_weights(const float (&z)[S::ROWS / 8][4],
                                             const fp8_room<S> &room, const place<S> &at,
                                             float (&sum)[S::ROWS / 8][2])
{
    const uint32_t base = shared_address(room.base) + 8 * at.t;
    /* Keys g and g + 8, hi and lo: the lane's row of one of four matrices. */
    const int matrix = at.lane / 8;
    const int key = at.lane % 8;
    const uint32_t lo = matrix / 2;
    const uint32_t row = shared_address(room.weights) + (2 * at.warp + matrix % 2) * 1024 +
                         key * 128 + (S::R == 2 ? lo * (TILE * 128) : 0);
    const int column = S::R == 2 ? key : key ^ lo << 2;
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++) {
        const float2 bases = load_shared_pair(base + 32 * j);
        const float shift[2] = {S::WEIGHT_SHIFT - bases.x, S::WEIGHT_SHIFT - bases.y};
        float w[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            w[c] = exp2_fast(z[j][c] + shift[c & 1]);
        sum[j][0] = w[0] + w[2];
        sum[j][1] = w[1] + w[3];
        uint32_t high[2];
        uint32_t low[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            high[i] = pack<fp16_type>(w[2 * i], w[2 * i + 1]);
            const float2 h = unpack<fp16_type>(high[i]);
            low[i] = pack<fp16_type>(w[2 * i] - h.x, w[2 * i + 1] - h.y);
        }
        store_matrices(row + ((column ^ j) << 4), high[0], high[1], low[0], low[1]);
    }
}

template <class S>
__device__ __forceinline__ bool exceeds_base(const float (&z)[S::ROWS / 8][4],
                                             const fp8_room<S> &room, const place<S> &at)
{
    const uint32_t base = shared_address(room.base) + 8 * at.t;
    bool exceeds = false;
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++) {
        const float2 bases = load_shared_pair(base + 32 * j);
#pragma unroll
        for (int c = 0; c < 4; c++)
            exceeds |= z[j][c] > (c & 1 ? bases.y : bases.x) + SLACK;
    }
    return exceeds;
}

/* Starts output += values * weights. */
template <class S>
__device__ __forceinline__ void start_value_product(float (&output)[S::DIM / 64][8][4],
                                                    const fp8_values<S> &values, uint32_t weights)
{
    const uint64_t operand = matrix_descriptor(weights, 1024, 1024);
#pragma unroll
    for (int m = 0; m < S::DIM / 64; m++)
        hold(output[m]);
    warpgroup_fence();
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int part = 0; part < S::R; part++)
                warpgroup_mma<fp16_type, 1>(output[m], values.words[s][m],
                                            operand + ((2 * s * 1024 + part * TILE * 128) >> 4), 1);
    warpgroup_commit();
}

/* ---- raising bases ---- */

/* Decides for one row, of which the thread has KEYS logits, what raise() in fast_pass_a.cuh says.
 */
template <class S>
__device__ __forceinline__ void raise_row(fp8_room<S> &room, const row_share<S> &mine, int tile_key)
{
    constexpr int KEYS = row_share<S>::KEYS;
    const float base = room.base[mine.row];
    const float top = room.top[mine.row];
    const bool had_key = room.key[mine.row] >= 0;
    const uint32_t from = shared_address(room.weights) + slot_row(mine.row);
    float z[KEYS];
    float largest = -INFINITY;
    int key = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) { /* whose permutation keeps eight keys together */
        float four[4];
        load_shared(from + 4 * ((mine.part * KEYS + i) ^ slot_permutation(mine.row)), four);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            z[i + c] = four[c];
            if (four[c] > largest) {
                largest = four[c];
                key = mine.part * KEYS + i + c;
            }
        }
    }
#pragma unroll
    for (int lanes = 1; lanes < row_share<S>::SHARERS; lanes *= 2) {
        const float other = __shfl_xor_sync(~0u, largest, lanes);
        const int other_key = __shfl_xor_sync(~0u, key, lanes);
        if (other > largest || (other == largest && other_key < key)) {
            largest = other;
            key = other_key;
        }
    }
    const bool replaces = largest > top + SLACK;
    float rest = -INFINITY;
#pragma unroll
    for (int i = 0; i < KEYS; i++)
        rest = replaces && mine.part * KEYS + i == key ? rest : fmaxf(rest, z[i]);
#pragma unroll
    for (int lanes = 1; lanes < row_share<S>::SHARERS; lanes *= 2)
        rest = fmaxf(rest, __shfl_xor_sync(~0u, rest, lanes));
    __syncwarp();
    if (mine.part != 0)
        return;
    const bool raises = largest > base + SLACK;
    /* An octave more than must be, if the top key allows it, so that it is less often done again:
     * each time the whole group stops, and all thread blocks wait for the slowest. */
    const float raised = !raises    ? base
                         : replaces ? fminf(fmaxf(rest, top) + 1.0f, largest)
                                    : fminf(largest + 1.0f, top);
    room.base[mine.row] = raised;
    room.factor[mine.row] = exp2_fast(base - raised);
    room.joins[mine.row] = replaces && had_key ? S::WEIGHT_ONE * exp2_fast(top - raised) : 0.0f;
    room.hidden[mine.row] = replaces ? key : -1;
    if (replaces) {
        room.top[mine.row] = largest;
        room.key[mine.row] = tile_key + key;
    }
}

/* A logit of the tile exceeds a base by more than the slack: as raise() in fast_pass_a.cuh, by the
 * whole group. Rare after a chunk's first tile, before which there are no sums. */
template <class S>
__device__ __forceinline__ void raise_bases(fp8_room<S> &room, fp8_softmax<S> &state,
                                            float (&z)[S::ROWS / 8][4], const place<S> &at,
                                            uint32_t v_tile, int tile_key, bool first, bool e5m2)
{
    /* Rows across threads: through the place of the weights, which are void. */
    const int my_key = 16 * at.warp + at.g;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int row = 2 * at.t + (c & 1);
        const uint32_t to = shared_address(room.weights) + slot_row(row) +
                            4 * ((my_key + 8 * (c >> 1)) ^ slot_permutation(row));
#pragma unroll
        for (int j = 0; j < S::ROWS / 8; j++)
            store_shared(to + slot_row(8 * j), __float_as_uint(z[j][c]));
    }
    group_barrier(BARRIER_A);
    raise_row(room, row_share<S>(at.thread), tile_key);
    group_barrier(BARRIER_A);
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++) {
        const int row = 8 * j + 2 * at.t;
        const float2 factor = *reinterpret_cast<const float2 *>(&room.factor[row]);
        const int2 hidden = *reinterpret_cast<const int2 *>(&room.hidden[row]);
        if (!__any_sync(~0u, factor.x != 1.0f || factor.y != 1.0f || max(hidden.x, hidden.y) >= 0))
            continue;
        const uint32_t held = shared_address(room.held[row]) + fp8_values<S>::first(at);
        if (!first) {
            const float2 joins = *reinterpret_cast<const float2 *>(&room.joins[row]);
            const uint32_t bytes[2] = {fp8_values<S>::bytes_of(held),
                                       fp8_values<S>::bytes_of(held + S::DIM)};
            state.sum[j][0] = fmaf(state.sum[j][0], factor.x, my_key == 0 ? joins.x : 0.0f);
            state.sum[j][1] = fmaf(state.sum[j][1], factor.y, my_key == 0 ? joins.y : 0.0f);
            state.rescale_output(j, factor, joins, bytes, e5m2);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = e == 0 ? hidden.x : hidden.y;
            z[j][e] = key == my_key ? -INFINITY : z[j][e];
            z[j][2 + e] = key == my_key + 8 ? -INFINITY : z[j][2 + e];
            if (key >= 0)
                fp8_values<S>::store_bytes(
                    held + e * S::DIM,
                    fp8_values<S>::bytes_of(v_tile + fp8_values<S>::offset(key, at)));
        }
    }
}

} // namespace dkv_fast

#endif
