/* Softmax of pass A for 16-bit caches of up to 64 rows: as stream_fp8_softmax.cuh says. Values of
 * top keys are read again when they join.
 *
 * Of 32 rows weights are split in hi + lo; of 64 they are rounded to one element.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_16BIT_SOFTMAX_CUH
#define DKV_KERNELS_CUDA_STREAM_16BIT_SOFTMAX_CUH

#include "kernels/cuda/stream_16bit_shape.cuh"

namespace dkv_stream_16bit
{

template <class S> using streams_a = tile_streams<S, S::A_KEYS, S::A_VALUES, KEYS_AHEAD, false>;

/* What a group has in shared memory. */
template <class S> struct __align__(1024) room_a
{
    /* Two tiles' weights, [64 keys] of 128 bytes: hi and, of 32 rows, lo. Between two products
     * other things that threads exchange. */
    unsigned char weights[2 * TILE * 128];
    unsigned char query[S::OPERAND_BYTES];
    typename streams_a<S>::rings rings;
    float shift[S::ROWS]; /* WEIGHT_SHIFT - base */
    float base[S::ROWS];
    float top[S::ROWS];
    int key[S::ROWS]; /* the top key, whose value is not in the sums */
    /* What becomes of the sums: they are scaled, then the top key joins with a weight. */
    float factor[S::ROWS];
    float joins[S::ROWS];
    int hidden[S::ROWS]; /* the tile's key that is the new top key, -1: none */
    job work;
};

/* A thread's elements of a value: dimensions 64 m + 16 warp + g, and eight after, in [m][i]. */
template <class S> struct value_part {
    float of[S::DIM / 64][2];

    static __device__ __forceinline__ int first(const place<S> &at)
    {
        return 16 * at.warp + at.g;
    }
    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
            of[m][0] = of[m][1] = 0.0f;
    }
    /* Of a key of the unit. */
    __device__ __forceinline__ void load(const job &work, int key, const place<S> &at)
    {
        const unsigned char *row = dkv_cu_row(
            work.block.v, work.unit.v, work.block.valid_from + key, &work.unit.report->bad_v_entry);
        clear();
        if (!row)
            return;
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                of[m][i] = unpack<typename S::type>(__ldg(reinterpret_cast<const uint16_t *>(row) +
                                                          64 * m + first(at) + 8 * i))
                               .x;
    }
    /* Of a row in shared memory. */
    __device__ __forceinline__ void load(uint32_t row, const place<S> &at)
    {
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                of[m][i] = unpack<typename S::type>(
                               load_shared_16(row + 2 * (64 * m + first(at) + 8 * i)))
                               .x;
    }
};

template <class S> struct sums : group_sums<S> {
    /* Output of row 8j + 2t + e: *= factor, then the top key's value joins with weight `joins`. */
    __device__ __forceinline__ void rescale_output(int j, int e, float factor, float joins,
                                                   const value_part<S> &value)
    {
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                this->output[m][j][2 * i + e] = fmaf(joins, value.of[m][i],
                                                     this->output[m][j][2 * i + e] * factor);
    }
};

/* ---- weights ---- */

/* Makes a tile's weights as operand of the value product, in the place of odd tiles or in the other
 * one; whether some are too large. */
template <class S, class room_type>
__device__ __forceinline__ bool make_weights(const float (&z)[S::COLUMNS][4], float factor,
                                             const row_shifts<S> &shifts, const room_type &room,
                                             int odd, const place<S> &at, tile_sums<S> &sum)
{
    using type = typename S::type;
    const uint32_t to = shared_address(room.weights) + weights_offset(at) + odd * (TILE * 128);
    float total[2] = {0.0f, 0.0f};
    uint32_t hi[4];
    uint32_t lo[4];
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
        float2 rounded[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int k = j % 2 * 2 + i;
            hi[k] = pack<type>(w[2 * i], w[2 * i + 1]);
            rounded[i] = unpack<type>(hi[k]);
            if constexpr (S::PARTS == 2) {
                lo[k] = pack<type>(w[2 * i] - rounded[i].x, w[2 * i + 1] - rounded[i].y);
                const float2 rest = unpack<type>(lo[k]);
                rounded[i].x += rest.x;
                rounded[i].y += rest.y;
            }
        }
        sum.rounded[j][0] = rounded[0].x + rounded[1].x;
        sum.rounded[j][1] = rounded[0].y + rounded[1].y;
        if (j % 2 == 1) {
            store_matrices(to ^ (j - 1) << 4, hi[0], hi[1], hi[2], hi[3]);
            if constexpr (S::PARTS == 2)
                store_matrices(to ^ (j - 1 + 4) << 4, lo[0], lo[1], lo[2], lo[3]);
        }
    }
    return total[0] + total[1] > LARGE * S::WEIGHT_ONE;
}

/* ---- raising bases ---- */

/* As in stream_fp8_softmax.cuh. */
template <class S, class room_type>
__device__ __forceinline__ void raise_bases(room_type &room, sums<S> &state,
                                            float (&z)[S::COLUMNS][4], float factor,
                                            const place<S> &at, int barrier, int tile_key)
{
    const int my_key = 16 * at.warp + at.g;
    share_logits(room, z, factor, at);
    const int before = at.thread < S::ROWS ? room.key[at.thread] : -1;
    group_barrier(barrier);
    raise_row(room, row_share<S>(at.thread), tile_key);
    group_barrier(barrier);
    /* Once rows' weights are read: the key that joins, if there is one, where the logits were. */
    if (at.thread < S::ROWS)
        store_shared(shared_address(room.weights) + 4 * at.thread, before);
    group_barrier(barrier);
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++) {
        const int row = 8 * j + 2 * at.t;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float scale = room.factor[row + e];
            const float joins = room.joins[row + e];
            const int hidden = room.hidden[row + e];
            if (__any_sync(~0u, scale != 1.0f || joins != 0.0f)) {
                value_part<S> value;
                value.clear();
                if (joins != 0.0f)
                    value.load(
                        room.work,
                        static_cast<int>(load_shared(shared_address(room.weights) + 4 * (row + e))),
                        at);
                const float joining = my_key != 0 ? 0.0f : joins;
                state.exact[j][e] = fmaf(state.exact[j][e], scale, joining);
                state.rounded[j][e] = fmaf(state.rounded[j][e], scale, joining);
                state.rescale_output(j, e, scale, joins, value);
            }
            z[j][e] = hidden == my_key ? -INFINITY : z[j][e];
            z[j][2 + e] = hidden == my_key + 8 ? -INFINITY : z[j][2 + e];
        }
    }
    group_barrier(barrier); /* before weights are written there */
}

/* ---- a chunk's end ---- */

/* Starts copying the top keys' values to [ROWS] in the rings, which nobody reads any more. */
template <class S, class room_type>
__device__ __forceinline__ void copy_tops(const room_type &room, uint32_t to, const place<S> &at)
{
    using copies = warp_copies<S>;
    const job &work = room.work;
#pragma unroll
    for (int i = 0; i < S::ROWS / 4; i += copies::AT_ONCE) {
        const int row = S::ROWS / 4 * at.warp + i + copies::row(at);
        const int key = room.key[row];
        const unsigned char *from = key < 0 ? nullptr
                                            : dkv_cu_row(work.block.v, work.unit.v,
                                                         work.block.valid_from + key,
                                                         &work.unit.report->bad_v_entry);
        copy_16(to + row * S::ROW_BYTES + 16 * copies::column(at),
                (from ? from : work.unit.v) + 16 * copies::column(at), from != nullptr,
                policy_normal());
    }
    copies_commit();
}

/* Stores the chunk's partial, by the group. */
template <class S, class room_type>
__device__ __forceinline__ void store_partial(sums<S> &state, room_type &room, const place<S> &at,
                                              int side, int barrier, unsigned char *partial)
{
    meet<S>(barrier); /* nobody reads weights and tiles any more */
    const uint32_t tops = shared_address(room.rings.keys) +
                          (S::SIDES > 1 ? side * S::OPERAND_BYTES : 0);
    copy_tops(room, tops, at);
    share_sums(room, state, at);
    group_barrier(barrier);
    close_row(room, row_share<S>(at.thread), partial);
    asm volatile("cp.async.wait_all;" ::: "memory");
    group_barrier(barrier);
    float *output = reinterpret_cast<float *>(partial + S::ROWS * sizeof(partial_head)) +
                    value_part<S>::first(at);
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * j + 2 * at.t + e;
            value_part<S> value;
            value.load(tops + row * S::ROW_BYTES, at);
            state.rescale_output(j, e, room.factor[row], room.joins[row], value);
#pragma unroll
            for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    __stcg(output + row * S::DIM + 64 * m + 8 * i, state.output[m][j][2 * i + e]);
        }
}

} // namespace dkv_stream_16bit

#endif
