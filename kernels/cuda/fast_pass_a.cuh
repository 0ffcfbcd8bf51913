/* Pass A: logits, softmax partials and their weighted values for one chunk of keys.
 *
 * A warp keeps, per row, a reference logit m and the sums of 2^(z - m) and 2^(z - m) v over its
 * keys. The key that set the reference is left out of both sums; its value waits in registers.
 * That is the leave-one-out form: a key that outweighs the rest of its row many thousandfold (an
 * attention sink) never enters a sum from which it would have to be subtracted. The reference
 * moves only when a logit exceeds it by 4 octaves; then the old one joins the sums. So a key that
 * is not the reference has at most 16 times its weight, and the plain form p / (1 - p) is safe.
 *
 * Weights enter the value product as the sum of two 16-bit numbers, hi + lo, so that rounding
 * them costs 2^-17 (bf16) and not 2^-9.
 */
#ifndef DKV_KERNELS_CUDA_FAST_PASS_A_CUH
#define DKV_KERNELS_CUDA_FAST_PASS_A_CUH

#include "kernels/cuda/fast_place.cuh"

namespace dkv_fast
{

constexpr float REFERENCE_SLACK = 4.0f; /* octaves */

template <class S> using place_a = place<S, A_WARPS>;

/* The running softmax of the thread's two rows over its warp's keys. */
template <class S> struct softmax_state {
    float reference[2];
    int key[2];
    float sum[2]; /* this lane's share */
    float output[S::D_TILES][4];
    uint32_t held[2][S::D_TILES]; /* the reference's value, not in `output` */

    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            reference[i] = NO_REFERENCE;
            key[i] = -1;
            sum[i] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            held[0][d] = held[1][d] = 0;
#pragma unroll
            for (int c = 0; c < 4; c++)
                output[d][c] = 0.0f;
        }
    }

    /* Row i: sums *= factor; then the held reference joins with weight `weight`. */
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
        }
    }
};

/* The largest logit of row i among the warp's keys of a tile, and its key; ties: the lower key. */
template <class S>
__device__ __forceinline__ void largest_logit(const float (&z)[place_a<S>::STRIPS][2][4], int i,
                                              const place_a<S> &at, float &top, int &key)
{
    top = -INFINITY;
    key = 0;
#pragma unroll
    for (int s = 0; s < place_a<S>::STRIPS; s++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                if (z[s][n][2 * i + c] > top) {
                    top = z[s][n][2 * i + c];
                    key = 16 * at.strip(s) + 8 * n + 2 * at.t + c;
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

/* A logit of the tile exceeds a reference by more than the slack: the largest of its row becomes
 * the reference, and is taken out of z. Rare after a chunk's first tile. `v` is the shared address
 * of the tile's first half as this warp counts keys. */
template <class S>
__device__ __forceinline__ void move_reference(softmax_state<S> &state,
                                               float (&z)[place_a<S>::STRIPS][2][4],
                                               const place_a<S> &at, const uint32_t (&v)[2],
                                               int first_key)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top;
        int key;
        largest_logit<S>(z, i, at, top, key);
        if (!(top > state.reference[i] + REFERENCE_SLACK))
            continue;
        const float factor = exp2_fast(state.reference[i] - top);
        state.rescale(i, factor, factor * S::WEIGHT_ONE, at.t);
        state.reference[i] = top;
        state.key[i] = first_key + key;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
            state.held[i][d] =
                load_shared(v[key / HALF] + element_offset<S>(key % HALF, d) + 4 * at.t);
#pragma unroll
        for (int s = 0; s < place_a<S>::STRIPS; s++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    if (16 * at.strip(s) + 8 * n + 2 * at.t + c == key)
                        z[s][n][2 * i + c] = -INFINITY;
                }
    }
}

/* Adds one strip: weights of z against the reference, and their product with the values. */
template <class S>
__device__ __forceinline__ void accumulate(softmax_state<S> &state, const float (&z)[2][4],
                                           const place_a<S> &at, uint32_t v_strip)
{
    using type = typename S::type;
    uint32_t hi[4];
    uint32_t lo[4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float base = S::WEIGHT_SHIFT - state.reference[i];
            const float w0 = exp2_fast(z[n][2 * i] + base);
            const float w1 = exp2_fast(z[n][2 * i + 1] + base);
            state.sum[i] += w0 + w1;
            hi[2 * n + i] = pack<type>(w0, w1);
            const float2 h = unpack<type>(hi[2 * n + i]);
            lo[2 * n + i] = pack<type>(w0 - h.x, w1 - h.y);
        }
#pragma unroll
    for (int d = 0; d < S::D_TILES; d += 2) {
        uint32_t m[4];
        load_matrices_transposed(m, v_strip + (at.transposed ^ 16 * d));
        mma<type>(state.output[d], hi, m[0], m[1]);
        mma<type>(state.output[d + 1], hi, m[2], m[3]);
        mma<type>(state.output[d], lo, m[0], m[1]);
        mma<type>(state.output[d + 1], lo, m[2], m[3]);
    }
}

/* Brings the warps of one row tile to a common reference: the largest of them stays out of the
 * sums, unless the rest of the chunk weighs at least an eighth of it, when taking it out later is
 * as safe; the others join. */
template <class S>
__device__ __forceinline__ void agree_on_reference(softmax_state<S> &state,
                                                   shared_memory<S> &shared, const place_a<S> &at,
                                                   partial_head (&head)[2], int (&key)[2])
{
    const float unshift = 1.0f / S::WEIGHT_ONE;
    bool winner[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (at.t == 0) {
            shared.reference[at.warp][8 * i + at.g] = state.reference[i];
            shared.reference_key[at.warp][8 * i + at.g] = state.key[i];
        }
    }
    barrier<BARRIER_A, A_THREADS>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        head[i].reference = NO_REFERENCE;
        key[i] = -1;
#pragma unroll
        for (int w = 0; w < place_a<S>::STRIP_WARPS; w++) {
            const int warp = w * S::ROW_TILES + at.row_tile;
            const float reference = shared.reference[warp][8 * i + at.g];
            const int other = shared.reference_key[warp][8 * i + at.g];
            if (reference > head[i].reference ||
                (reference == head[i].reference && other >= 0 && other < key[i])) {
                head[i].reference = reference;
                key[i] = other;
            }
        }
        winner[i] = key[i] == state.key[i];
        const float factor = exp2_fast(state.reference[i] - head[i].reference);
        state.rescale(i, factor * unshift, winner[i] ? 0.0f : factor, at.t);
        state.sum[i] += __shfl_xor_sync(~0u, state.sum[i], 1);
        state.sum[i] += __shfl_xor_sync(~0u, state.sum[i], 2);
        if (at.t == 0)
            shared.sum[at.warp][8 * i + at.g] = state.sum[i];
    }
    barrier<BARRIER_A, A_THREADS>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < place_a<S>::STRIP_WARPS; w++)
            sum += shared.sum[w * S::ROW_TILES + at.row_tile][8 * i + at.g];
        const bool joins = key[i] >= 0 && sum >= 0.125f;
        head[i].sum = joins ? sum + 1.0f : -sum;
        if (joins && winner[i])
            state.rescale(i, 1.0f, 1.0f, at.t);
    }
}

/* Sums the outputs of the warps of one row tile, in a fixed order, and stores the partial. The sum
 * goes round: in step s warp w adds its share (w + s) of the dimensions to what the others left.
 * `room` is the shared address of this row tile's [D_TILES][32] float4. */
template <class S>
__device__ __forceinline__ void store_partial(const softmax_state<S> &state, uint32_t room,
                                              const place_a<S> &at,
                                              const partial_head (&head)[2], const int (&key)[2],
                                              unsigned char *partial)
{
    constexpr int STEPS = place_a<S>::STRIP_WARPS;
    constexpr int SHARE = S::D_TILES / STEPS;
    float4 *out =
        reinterpret_cast<float4 *>(partial + S::ROWS * 16) + at.row_tile * S::D_TILES * 32;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            if ((at.strip_warp + step) % STEPS == d / SHARE) {
                const uint32_t cell = room + (d * 32 + at.lane) * 16;
                float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (step > 0)
                    sum = load_shared4(cell);
                sum.x += state.output[d][0], sum.y += state.output[d][1];
                sum.z += state.output[d][2], sum.w += state.output[d][3];
                if (step < STEPS - 1)
                    store_shared(cell, sum.x, sum.y, sum.z, sum.w);
                else
                    __stcg(out + d * 32 + at.lane, sum);
            }
        }
        if (step < STEPS - 1)
            barrier<BARRIER_A, A_THREADS>();
    }
    if (at.strip_warp == 0 && at.t == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            __stcg(reinterpret_cast<float2 *>(partial) + at.row(i),
                   make_float2(head[i].reference, head[i].sum));
            __stcg(reinterpret_cast<int *>(partial + S::ROWS * 8) + at.row(i), key[i]);
        }
    }
}

/* The halves of K and V tiles as they come: K half 0, K half 1, V half 0, V half 1. A warp reads
 * both halves, or the one its strips are in. */
template <class S> struct a_reader {
    static constexpr bool BOTH = place_a<S>::STRIP_WARPS == 1;
    ring<S::A_HALVES> next;

    /* Waits for the next tile; its halves' shared addresses. */
    __device__ __forceinline__ void wait(shared_memory<S> &shared, const place_a<S> &at,
                                         uint32_t (&half)[2])
    {
        ring<S::A_HALVES> position = next;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (BOTH || at.strip_warp == h)
                mbarrier_wait(shared_address(&shared.a_full[position.index]), position.parity);
            half[h] = shared_address(shared.a_halves[position.index]);
            position.advance(1);
        }
    }
    /* This warp has read the tile; on to the next. */
    __device__ __forceinline__ void release(shared_memory<S> &shared, const place_a<S> &at)
    {
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (at.lane == 0 && (BOTH || at.strip_warp == h))
                mbarrier_arrive(shared_address(&shared.a_empty[next.index]));
            next.advance(1);
        }
    }
};

/* Leaves |v|^2 of one of the warp's strips for pass B: the row tiles share the strips. */
template <class S>
__device__ __forceinline__ void keep_squares(float (&squares)[TILE], const uint32_t (&v)[2],
                                             const place_a<S> &at)
{
    static_assert(place_a<S>::STRIPS == S::ROW_TILES, "one strip for each row tile");
    const int strip = at.strip(at.row_tile);
    float square[2][2];
    strip_squares<S>((strip < 2 ? v[0] : v[1]) + strip % 2 * 16 * S::ROW_BYTES, at, square);
    if (at.g == 0) {
#pragma unroll
        for (int n = 0; n < 2; n++)
            *reinterpret_cast<float2 *>(&squares[16 * strip + 8 * n + 2 * at.t]) =
                make_float2(square[n][0], square[n][1]);
    }
}

template <class S>
__device__ __forceinline__ void pass_a(shared_memory<S> &shared, const job &work, uint32_t turn,
                                       a_reader<S> &reader, const place_a<S> &at,
                                       unsigned char *partial, dkv_fast_counters *counters)
{
    constexpr int STRIPS = place_a<S>::STRIPS;
    uint32_t q[S::K_STEPS][4];
    load_query<S>(work, at, q);
    logit_rule rule;
    rule.set(work, at, work.item.row_group * S::ROWS);
    softmax_state<S> state;
    state.clear();
    float lowest = 0.0f;
    const int tiles = item_tiles(work);
    const int chunk_key = item_first_key(work.item);
    const int bank = turn & 1;
    uint32_t v[2];
    for (int tile = 0; tile < tiles; tile++) {
        const int first_key = chunk_key + tile * TILE;
        float z[STRIPS][2][4];
        uint32_t k[2];
        reader.wait(shared, at, k);
        if (a_reader<S>::BOTH) {
            /* The ring's size is a multiple of 4 and tiles start at even places: the halves are
             * adjacent. */
            strip_dots<S>(k[0], q, at, z);
        } else {
            strip_dots<S>(at.strip_warp == 0 ? k[0] : k[1], q, at, z);
        }
        reader.release(shared, at);
        const bool kept = tile < S::KEPT_TILES;
        if (kept)
            mbarrier_wait(shared_address(&shared.slot_empty[bank][tile]), (turn >> 1 & 1) ^ 1);
        bool exceeds = false;
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                lowest = fminf(lowest, z[s][i / 4][i % 4]);
            strip_logits(rule, first_key + 16 * at.strip(s), at.t, z[s]);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (kept)
                    store_shared(shared_address(shared.slots[bank][tile]) + at.slot_cell(s, n),
                                 z[s][n][0], z[s][n][1], z[s][n][2], z[s][n][3]);
#pragma unroll
                for (int c = 0; c < 4; c++)
                    exceeds |= z[s][n][c] > state.reference[c >> 1] + REFERENCE_SLACK;
            }
        }
        reader.wait(shared, at, v);
        if (__any_sync(~0u, exceeds))
            move_reference<S>(state, z, at, v, first_key);
        if (kept)
            keep_squares<S>(shared.squares[bank][tile], v, at);
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const int strip = at.strip(s);
            accumulate<S>(state, z[s], at,
                          (strip < 2 ? v[0] : v[1]) + strip % 2 * 16 * S::ROW_BYTES);
        }
        if (tile < tiles - 1)
            reader.release(shared, at);
    }

    if (lowest == -INFINITY)
        atomicOr(&work.unit.report->flags, DKV_CU_RETRY);
    partial_head head[2];
    int key[2];
    agree_on_reference<S>(state, shared, at, head, key);
    /* Every warp is done with the last V tile: its halves make room for the row tiles' sums. */
    store_partial<S>(state, at.row_tile == 0 ? v[0] : v[1], at, head, key, partial);
    barrier<BARRIER_A, A_THREADS>();
    reader.release(shared, at);
    if (at.warp == 0 && at.lane == 0)
        counter_add(&counters->partials);
}

} // namespace dkv_fast

#endif
