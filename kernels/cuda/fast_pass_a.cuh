/* Pass A: logits, softmax partials and their weighted values for one chunk of keys.
 *
 * A row belongs to the four lanes of one quad. They keep its top key, and the sums of 2^(z - base)
 * and 2^(z - base) v over the chunk's other keys; the top key's value waits in registers. That is
 * the leave-one-out form: a key that outweighs the rest of its row many thousandfold (an attention
 * sink) never enters a sum from which it would have to be subtracted, and the rest keeps all its
 * digits, however little it weighs, because the base is a logit of its own.
 *
 * Both move only when a logit exceeds the base by 4 octaves: the base then goes up to the largest
 * of the sums' keys, but not above the top; if the logit exceeds the top by as much, that key is
 * the new top and the old one joins the sums. So a key that is not the top has at most 16 times its
 * weight, and the plain form p / (1 - p) is safe for it.
 *
 * Weights enter the value product as the sum of two 16-bit numbers, hi + lo, so that rounding
 * them costs 2^-17 (bf16) and not 2^-9.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PASS_A_CUH
#define DKV_KERNELS_CUDA_FAST_PASS_A_CUH

#include <limits.h>

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

constexpr float SLACK = 4.0f; /* octaves */

/* Where the sums of rows that are averaged begin to leave out values: the window's tokens count in
 * a row's softmax, not in its output. Beyond all keys for other rules. */
template <class S> __device__ __forceinline__ int first_left_out(const job &work)
{
    return S::FORM == DKV_CU_FORM_AVERAGE ? static_cast<int>(work.block.n_valid - work.block.window)
                                          : INT_MAX;
}

/* The running softmax of the thread's rows. */
template <class S> struct softmax_state {
    float base[S::R];
    float top[S::R];
    int key[S::R];   /* the top key */
    float sum[S::R]; /* this lane's share */
    /* Per 8 dimensions. R 1: hi and lo products of the row; R 2: of rows 0 and 1. */
    float output[S::D_TILES][4];
    uint32_t held[S::R][S::D_TILES]; /* the top key's value, not in `output` */

    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int i = 0; i < S::R; i++) {
            base[i] = NO_KEY;
            top[i] = NO_KEY;
            key[i] = -1;
            sum[i] = 0.0f;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                held[i][d] = 0;
        }
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                output[d][c] = 0.0f;
    }

    /* Row i: sums *= factor; then the top key joins with weight `weight`. */
    __device__ __forceinline__ void rescale(int i, float factor, float weight, int t)
    {
        sum[i] *= factor;
        if (t == 0 && key[i] >= 0)
            sum[i] += weight;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const float2 v = unpack<typename S::type>(held[i][d]);
            output[d][2 * i] = fmaf(weight, v.x, output[d][2 * i] * factor);
            output[d][2 * i + 1] = fmaf(weight, v.y, output[d][2 * i + 1] * factor);
            if (S::R == 1) {
                output[d][2] *= factor;
                output[d][3] *= factor;
            }
        }
    }
};

/* The largest logit of row i in a tile, and its key within the tile; ties: the lower key. */
__device__ __forceinline__ void largest_logit(const float (&z)[8][4], int i, int t, float &top,
                                              int &key)
{
    top = -INFINITY;
    key = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (z[j][2 * i + e] > top) {
                top = z[j][2 * i + e];
                key = 8 * j + 2 * t + e;
            }
        }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
        const float other = __shfl_xor_sync(~0u, top, lanes);
        const int other_key = __shfl_xor_sync(~0u, key, lanes);
        if (other > top || (other == top && other_key < key)) {
            top = other;
            key = other_key;
        }
    }
}

/* The largest logit of row i in a tile, without its key. */
__device__ __forceinline__ float largest_of_rest(const float (&z)[8][4], int i)
{
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; j++)
        largest = fmaxf(largest, fmaxf(z[j][2 * i], z[j][2 * i + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
}

/* A logit of the tile exceeds a base by more than the slack. Makes room for it, see above; a new
 * top key is taken out of z. Rare after a chunk's first tile. */
template <class S>
__device__ __forceinline__ void raise(softmax_state<S> &state, float (&z)[8][4], const place<S> &at,
                                      uint32_t v_tile, int first_key, int left_out)
{
#pragma unroll
    for (int i = 0; i < S::R; i++) {
        const bool has_sums = __any_sync(~0u, state.key[i] >= 0); /* not in a chunk's first tile */
        float largest;
        int key;
        largest_logit(z, i, at.t, largest, key);
        const bool replaces = largest > state.top[i] + SLACK;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (replaces && 8 * j + 2 * at.t + e == key)
                    z[j][2 * i + e] = -INFINITY;
            }
        const float rest = largest_of_rest(z, i); /* all lanes meet here: not below */
        if (!(largest > state.base[i] + SLACK))
            continue;
        const float base = replaces ? fmaxf(rest, state.top[i]) : fminf(largest, state.top[i]);
        if (has_sums)
            state.rescale(i, exp2_fast(state.base[i] - base),
                          replaces ? S::WEIGHT_ONE * exp2_fast(state.top[i] - base) : 0.0f, at.t);
        state.base[i] = base;
        if (replaces) {
            state.top[i] = largest;
            state.key[i] = first_key + key;
#pragma unroll
            for (int d = 0; d < S::D_TILES; d++)
                state.held[i][d] = load_shared(v_tile + element_offset<S>(key, d) + 4 * at.t);
            if (S::FORM == DKV_CU_FORM_AVERAGE && first_key + key >= left_out) {
#pragma unroll
                for (int d = 0; d < S::D_TILES; d++)
                    state.held[i][d] = 0;
            }
        }
    }
}

/* Keys from `first` of the tile on count in the softmax, and weigh nothing in the output. */
template <class S>
__device__ __forceinline__ void count_left_out(softmax_state<S> &state, float (&z)[8][4], int first,
                                               int t)
{
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int c = 0; c < 2 * S::R; c++) {
            if (8 * j + 2 * t + c % 2 < first)
                continue;
            state.sum[c / 2] += exp2_fast(z[j][c] + (S::WEIGHT_SHIFT - state.base[c / 2]));
            z[j][c] = -INFINITY;
        }
}

/* The weights of a tile as operands of the value product, per 16 keys: hi + lo. */
template <class S> struct weights {
    uint32_t hi[4][4]; /* R 1: hi and lo, as rows g and g + 8; R 2: hi of both rows */
    uint32_t lo[S::R == 1 ? 1 : 4][4];

    __device__ __forceinline__ void set(const float (&z)[8][4], softmax_state<S> &state)
    {
        using type = typename S::type;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < S::R; i++) {
                const float shift = S::WEIGHT_SHIFT - state.base[i];
                const float w0 = exp2_fast(z[j][2 * i] + shift);
                const float w1 = exp2_fast(z[j][2 * i + 1] + shift);
                state.sum[i] += w0 + w1;
                const uint32_t high = pack<type>(w0, w1);
                const float2 h = unpack<type>(high);
                const uint32_t low = pack<type>(w0 - h.x, w1 - h.y);
                hi[j / 2][j % 2 * 2 + i] = high;
                if (S::R == 1)
                    hi[j / 2][j % 2 * 2 + 1] = low;
                else
                    lo[S::R == 1 ? 0 : j / 2][j % 2 * 2 + i] = low;
            }
    }

    /* Starts output += weights * values. */
    __device__ __forceinline__ void start_product(float (&output)[S::D_TILES][4],
                                                  uint32_t v_tile) const
    {
        const uint64_t values = values_operand<S>(v_tile);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            warpgroup_mma<typename S::type, 1>(output, hi[s], values + values_step<S>(s), 1);
            if constexpr (S::R == 2)
                warpgroup_mma<typename S::type, 1>(output, lo[s], values + values_step<S>(s), 1);
        }
    }
};

/* Closes a row of the chunk and stores its partial. The top key joins if the rest weighs at least
 * an eighth of it: then taking it out again is as safe as having left it out. */
template <class S>
__device__ __forceinline__ void store_partial(softmax_state<S> &state, const place<S> &at,
                                              unsigned char *partial)
{
#pragma unroll
    for (int i = 0; i < S::R; i++) {
        float sum = state.sum[i] * (1.0f / S::WEIGHT_ONE);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float below = exp2_fast(state.base[i] - state.top[i]); /* NO_KEY both: 1 */
        const bool joins = sum * below >= 0.125f;
        state.rescale(i, (joins ? below : 1.0f) * (1.0f / S::WEIGHT_ONE), joins ? 1.0f : 0.0f,
                      at.t);
        const int row = at.row(i);
        if (at.t == 0) {
            const partial_head head = {state.top[i], joins ? state.top[i] : state.base[i],
                                       joins ? fmaf(sum, below, 1.0f) : -sum, state.key[i]};
            __stcg(reinterpret_cast<float4 *>(partial) + row,
                   *reinterpret_cast<const float4 *>(&head));
        }
        float2 *output = reinterpret_cast<float2 *>(partial + S::ROWS * 16) + row * S::DIM / 2 +
                         at.t;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const float *o = state.output[d];
            __stcg(output + 4 * d, S::R == 1 ? make_float2(o[0] + o[2], o[1] + o[3])
                                             : make_float2(o[2 * i], o[2 * i + 1]));
        }
    }
}

template <class S> using a_reader = tile_reader<S, S::A_TILES>;

template <class S>
__device__ __forceinline__ void keep_logits(shared_memory<S> &shared, ring<S::SLOTS> &slots,
                                            const float (&z)[8][4], const place<S> &at)
{
    mbarrier_wait(shared_address(&shared.slot_empty[slots.index]), slots.parity ^ 1);
    const uint32_t slot = shared_address(shared.slots[slots.index]);
#pragma unroll
    for (int i = 0; i < S::R; i++) {
        const int row = at.row(i);
#pragma unroll
        for (int low = 0; low < 4; low++) {
            const uint32_t keys = slot + slot_row(row) +
                                  4 * ((8 * low ^ slot_permutation(row)) + 2 * at.t);
#pragma unroll
            for (int j = low; j < 8; j += 4)
                store_shared(keys + 32 * (j - low), z[j][2 * i], z[j][2 * i + 1]);
        }
    }
    slots.advance();
}

/* The query rows of a unit as operand of wgmma; nothing past the last turn. Called while the item
 * before it is still being worked on, so that nobody waits for the loads. */
template <class S>
__device__ __forceinline__ void load_query(shared_memory<S> &shared, uint32_t turn, uint32_t turns,
                                           const place<S> &at, uint32_t (&q)[S::K_STEPS][4])
{
    if (turn >= turns)
        return;
    const job &work = job_wait(shared, turn);
    if (work.item.chunks == 0)
        return;
#pragma unroll
    for (int i = 0; i < S::R; i++) {
        const unsigned char *from = query_row(work, work.item.row_group * S::ROWS + at.row(i));
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                q[k][2 * half + i] = from ? __ldg(reinterpret_cast<const uint32_t *>(
                                                from + 4 * at.t + 32 * k + 16 * half))
                                          : 0;
    }
}

/* Starts the dot products of the rows with a tile's keys. */
template <class S>
__device__ __forceinline__ void start_dots(float (&z)[8][4], const uint32_t (&q)[S::K_STEPS][4],
                                           uint32_t k_tile)
{
    const uint64_t keys = keys_operand<S>(k_tile);
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++)
        warpgroup_mma<typename S::type, 0>(z, q[k], keys + keys_step(k), k > 0);
}

/* -inf where a row of the thread does not see a key of the tile. */
template <class S>
__device__ __forceinline__ void hide_keys(const job &work, const place<S> &at, int first_key,
                                          float (&z)[8][4])
{
#pragma unroll
    for (int i = 0; i < S::R; i++) {
        const int last_key = last_key_of(work, work.item.row_group * S::ROWS + at.row(i));
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (first_key + 8 * j + 2 * at.t + e > last_key)
                    z[j][2 * i + e] = -INFINITY;
            }
    }
}

/* Pass A of the item of a turn; on entry q is its query, at the end that of the next one. */
template <class S>
__device__ __forceinline__ void pass_a(shared_memory<S> &shared, const job &work, uint32_t turn,
                                       uint32_t turns, a_reader<S> &reader, ring<S::SLOTS> &slots,
                                       const place<S> &at, uint32_t (&q)[S::K_STEPS][4],
                                       softmax_state<S> &state)
{
    const logit_rule rule(work);
    state.clear();
    const int tiles = item_tiles(work);
    const int first_kept = first_kept_tile<S>(tiles);
    const int chunk_key = item_first_key(work.item);
    const int left_out = first_left_out<S>(work);
    float lowest = 0.0f;
    float z[8][4];
    weights<S> w;
    uint32_t k_tile = 0;
    uint32_t v_tile = 0;
    for (int tile = 0; tile < tiles; tile++) {
        const int first_key = chunk_key + tile * TILE;
        k_tile = reader.wait(shared.a_tiles, shared.a_full);
        hold(z);
        warpgroup_fence();
        start_dots<S>(z, q, k_tile);
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(z);
        hold(state.output);
        if (tile > 0) /* in the order they were filled, see fast_fetch.cuh */
            reader.release(shared.a_tiles, shared.a_empty, v_tile, at.lane);
        reader.release(shared.a_tiles, shared.a_empty, k_tile, at.lane);
        if (tile == tiles - 1)
            load_query(shared, turn + 1, turns, at, q);
        bool exceeds = false;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 2 * S::R; c++)
                lowest = fminf(lowest, z[j][c]);
        rule.apply<8, 2 * S::R>(z);
        if (first_key + TILE > rule.open_keys)
            hide_keys(work, at, first_key, z);
        if (tile >= first_kept)
            keep_logits(shared, slots, z, at);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 2 * S::R; c++)
                exceeds |= z[j][c] > state.base[c >> 1] + SLACK;
        v_tile = reader.wait(shared.a_tiles, shared.a_full);
        if (__any_sync(~0u, exceeds))
            raise<S>(state, z, at, v_tile, first_key, left_out);
        if (S::FORM == DKV_CU_FORM_AVERAGE && first_key + TILE > left_out)
            count_left_out(state, z, left_out - first_key, at.t);
        w.set(z, state);
        hold(state.output);
        warpgroup_fence();
        w.start_product(state.output, v_tile);
        warpgroup_commit();
    }
    warpgroup_wait<0>();
    hold(state.output);
    reader.release(shared.a_tiles, shared.a_empty, v_tile, at.lane);
    if (lowest == -INFINITY)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
}

} // namespace dkv_fast

#endif
