/* Softmax of fp8 caches in pass A of the stream scorer: weights, sums, and the rare steps in which
 * a row's base goes up. A row's keys are spread over the whole group.
 *
 * Weights are rounded to fp16 for the product with values; the sums of the rounded ones and of
 * those before rounding are both kept (stream_rows.cuh says why).
 *
 * Weights are made on the assumption that no logit exceeds its base by much; at the barrier that
 * hands them over all threads learn whether one does. Then bases are raised and the weights made
 * again.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_FP8_SOFTMAX_CUH
#define DKV_KERNELS_CUDA_STREAM_FP8_SOFTMAX_CUH

#include "kernels/cuda/stream_fp8_shape.cuh"

namespace dkv_stream_fp8
{

/* What a group has in shared memory. */
template <class S> struct __align__(1024) room_a
{
    /* Two tiles' weights: 64 keys, of 128 bytes. Of 32 rows they lie side by side. Between two
     * products other things that threads exchange. */
    unsigned char weights[S::R * TILE * 128];
    unsigned char query[S::OPERAND_BYTES];
    tile_pair<S> ring[S::DEPTH];
    unsigned char held[S::ROWS][S::DIM]; /* the top key's value, which is not in the sums */
    float shift[S::ROWS];                /* WEIGHT_SHIFT - base */
    float base[S::ROWS];
    float top[S::ROWS];
    int key[S::ROWS]; /* the top key */
    /* What becomes of the sums: they are scaled, then the top key joins with a weight. */
    float factor[S::ROWS];
    float joins[S::ROWS];
    int hidden[S::ROWS]; /* the tile's key that is the new top key, -1: none */
    job work;
};

template <class S> struct sums : group_sums<S> {
    /* Output of rows 8j + 2t and the next: *= factor, then the top key joins with weight `joins`.
     * held: its value's bytes in the thread's dimensions. */
    __device__ __forceinline__ void rescale_output(int j, const float2 &factor, const float2 &joins,
                                                   const uint32_t (&held)[2], uint32_t dtype)
    {
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float f = e == 0 ? factor.x : factor.y;
                const float w = e == 0 ? joins.x : joins.y;
                const uint32_t bytes = held[e] >> 16 * m;
                const float2 v = unpack<fp16_type>(fp16_of_fp8(bytes, dtype).x);
                float *o = this->output[m][j];
                o[e] = fmaf(w, v.x, o[e] * f);
                o[2 + e] = fmaf(w, v.y, o[2 + e] * f);
            }
    }
};

/* The values of no top keys. */
template <class S> __device__ __forceinline__ void clear_held(room_a<S> &room, const place<S> &at)
{
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            fp8_values<S>::store_bytes(
                shared_address(room.held[8 * j + 2 * at.t + e]) + fp8_values<S>::first(at), 0);
}

/* ---- weights ---- */

/* Makes a tile's weights as operand of the value product, in the place of odd tiles or in the other
 * one; whether some are too large. */
template <class S>
__device__ __forceinline__ bool make_weights(const float (&z)[S::COLUMNS][4], float factor,
                                             const row_shifts<S> &shifts, const room_a<S> &room,
                                             int odd, const place<S> &at, tile_sums<S> &sum)
{
    const uint32_t first = shared_address(room.weights) + weights_offset(at);
    const uint32_t to = S::R == 1 ? first ^ odd * 64 : first + odd * (TILE * 128);
    float total[2] = {0.0f, 0.0f};
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++) {
        float w[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            w[c] = exp2_fast(fmaf(z[j][c], factor, c & 1 ? shifts.of[j].y : shifts.of[j].x));
        sum.exact[j][0] = w[0] + w[2];
        sum.exact[j][1] = w[1] + w[3];
        total[0] += sum.exact[j][0];
        total[1] += sum.exact[j][1];
        uint32_t *pair = pairs + j % 2 * 2;
        pair[0] = pack<fp16_type>(w[0], w[1]);
        pair[1] = pack<fp16_type>(w[2], w[3]);
        const float2 first = unpack<fp16_type>(pair[0]);
        const float2 second = unpack<fp16_type>(pair[1]);
        sum.rounded[j][0] = first.x + second.x;
        sum.rounded[j][1] = first.y + second.y;
        if (j % 2 == 1)
            store_matrices(to ^ (j - 1) << 4, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    return total[0] + total[1] > LARGE * S::WEIGHT_ONE;
}

/* ---- raising bases ---- */

/* Some weights are too large, or it is a chunk's first tile, before which there are no sums. By the
 * whole group, after it has met: nobody reads weights any more. */
template <class S>
__device__ __forceinline__ void raise_bases(room_a<S> &room, sums<S> &state,
                                            float (&z)[S::COLUMNS][4], float factor,
                                            const place<S> &at, int barrier, uint32_t v_tile,
                                            int tile_key, bool first, uint32_t dtype)
{
    const int my_key = 16 * at.warp + at.g;
    share_logits(room, z, factor, at);
    group_barrier(barrier);
    raise_row(room, row_share<S>(at.thread), tile_key);
    group_barrier(barrier);
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++) {
        const int row = 8 * j + 2 * at.t;
        const float2 scale = *reinterpret_cast<const float2 *>(&room.factor[row]);
        const int2 hidden = *reinterpret_cast<const int2 *>(&room.hidden[row]);
        if (!__any_sync(~0u, scale.x != 1.0f || scale.y != 1.0f || max(hidden.x, hidden.y) >= 0))
            continue;
        const uint32_t held = shared_address(room.held[row]) + fp8_values<S>::first(at);
        if (!first) {
            const float2 joins = *reinterpret_cast<const float2 *>(&room.joins[row]);
            const uint32_t bytes[2] = {fp8_values<S>::bytes_of(held),
                                       fp8_values<S>::bytes_of(held + S::DIM)};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float joining = my_key != 0 ? 0.0f : e == 0 ? joins.x : joins.y;
                const float f = e == 0 ? scale.x : scale.y;
                state.exact[j][e] = fmaf(state.exact[j][e], f, joining);
                state.rounded[j][e] = fmaf(state.rounded[j][e], f, joining);
            }
            state.rescale_output(j, scale, joins, bytes, dtype);
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

} // namespace dkv_stream_fp8

#endif
