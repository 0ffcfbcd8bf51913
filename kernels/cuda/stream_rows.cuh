/* Rows of the stream scorer: pass A's running softmax, and what both passes do with a tile's
 * logits. What is computed, and why, is what fast_pass_a.cuh says. It differs in two things: the
 * top key's value is not held in registers but read again when it joins the sums, which is rare;
 * and weights enter the value product rounded to 16 bits. That costs an error of the output which
 * is 2^-9 (bf16) of a mean of differences of values, and half of the product's time less. What
 * weights are divided by, here and in pass B, is not rounded.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_ROWS_CUH
#define DKV_KERNELS_CUDA_STREAM_ROWS_CUH

#include "kernels/cuda/stream_shape.cuh"

namespace dkv_stream
{

/* The running softmax of the thread's two rows. */
template <class S> struct row_sums {
    float base[2];
    float top[2];
    int key[2];   /* the top key, which is not in the sums; -1: none yet */
    float sum[2]; /* this lane's share */
    float output[S::D_TILES][4];
    /* The sums of the rounded weights; all of a row's in [2i] and in [2i + 1]. The output divided
     * by them is a mean of values whatever was rounded away: equal values stay equal. */
    float rounded[1][4];

    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            base[i] = NO_KEY;
            top[i] = NO_KEY;
            key[i] = -1;
            sum[i] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                output[d][c] = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++)
            rounded[0][c] = 0.0f;
    }

    __device__ __forceinline__ void scale(int i, float factor)
    {
        sum[i] *= factor;
        rounded[0][2 * i] *= factor;
        rounded[0][2 * i + 1] *= factor;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            output[d][2 * i] *= factor;
            output[d][2 * i + 1] *= factor;
        }
    }

    /* Row i's top key joins its sums with `weight`. */
    __device__ __forceinline__ void join(int i, float weight, const uint32_t (&value)[S::D_TILES],
                                         int t)
    {
        if (t == 0)
            sum[i] += weight;
        rounded[0][2 * i] += weight;
        rounded[0][2 * i + 1] += weight;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++) {
            const float2 v = unpack<typename S::type>(value[d]);
            output[d][2 * i] = fmaf(weight, v.x, output[d][2 * i]);
            output[d][2 * i + 1] = fmaf(weight, v.y, output[d][2 * i + 1]);
        }
    }

    /* The thread's part of the value of row i's top key, if there is one. */
    __device__ __forceinline__ void load_top(const job &work, int i, int t,
                                             uint32_t (&value)[S::D_TILES]) const
    {
        const unsigned char *row = nullptr;
        if (key[i] >= 0)
            row = dkv_cu_row(work.block.v, work.unit.v, work.block.valid_from + key[i],
                             &work.unit.report->bad_v_entry);
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
            value[d] = row ? __ldg(reinterpret_cast<const uint32_t *>(row + 16 * d + 4 * t)) : 0;
    }
};

/* No number if one of a tile's dot products is none: one row shows it of a key, and a row that is
 * not one shows it by any key. */
__device__ __forceinline__ float look_of(const float (&dots)[8][4])
{
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < 8; j++)
        sum[j % 2] += dots[j][0] + dots[j][3];
    return sum[0] + sum[1];
}

/* The weights of a tile's keys. */
template <class S> struct tile_weights {
    float w[8][4];
    float sum[2]; /* no numbers if `look` is none */

    __device__ __forceinline__ void set(const float (&z)[8][4], float factor,
                                        const float (&base)[2], float look)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float shift = S::WEIGHT_SHIFT - base[i];
            sum[i] = 0.0f * look;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                w[j][2 * i] = exp2_fast(fmaf(z[j][2 * i], factor, shift));
                w[j][2 * i + 1] = exp2_fast(fmaf(z[j][2 * i + 1], factor, shift));
                sum[i] += w[j][2 * i] + w[j][2 * i + 1];
            }
        }
    }
};

/* Weights as operands of the value product, per 16 keys. */
template <class S> struct weight_operand {
    uint32_t w[4][4];

    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                w[s][c] = 0;
    }
    __device__ __forceinline__ void set(const float (&from)[8][4])
    {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                w[j / 2][j % 2 * 2 + i] = pack<typename S::type>(from[j][2 * i],
                                                                 from[j][2 * i + 1]);
    }

    /* Starts output += weights * values, and the same with ones. */
    __device__ __forceinline__ void start_product(row_sums<S> &rows, uint32_t v_tile,
                                                  uint32_t ones) const
    {
        const uint64_t values = values_operand<S>(v_tile);
        const uint64_t one = matrix_descriptor(ones, 16, 1024);
        hold(rows.output);
        hold(rows.rounded);
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; s++) {
            warpgroup_mma<typename S::type, 1>(rows.output, w[s], values + values_step<S>(s), 1);
            warpgroup_mma_8<typename S::type>(rows.rounded, w[s], one);
        }
        warpgroup_commit();
    }
};

/* Rows where a logit exceeds the base by SLACK: the largest key of the tile becomes the top key, if
 * it is above it, and is taken out of z; the old one joins the sums; the base goes up. Rare after a
 * chunk's first tile. */
template <class S>
__device__ __forceinline__ void raise_rows(row_sums<S> &rows, float (&z)[8][4], float factor,
                                           const bool (&much)[2], const job &work, int first_key,
                                           int t)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned any = much[i];
        any |= __shfl_xor_sync(~0u, any, 1);
        any |= __shfl_xor_sync(~0u, any, 2);
        float largest;
        int key;
        largest_logit(z, i, t, largest, key);
        largest *= factor;
        const bool replaces = any && largest > rows.top[i];
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (replaces && 8 * j + 2 * t + e == key)
                    z[j][2 * i + e] = -INFINITY;
            }
        const float rest = largest_of_rest(z, i) * factor; /* all lanes meet here: not below */
        if (!any || !(largest > rows.base[i]))
            continue;
        const float base = replaces ? fmaxf(rest, rows.top[i]) : largest;
        rows.scale(i, exp2_fast(rows.base[i] - base));
        const float joining = replaces ? S::WEIGHT_ONE * exp2_fast(rows.top[i] - base) : 0.0f;
        if (rows.key[i] >= 0 && joining != 0.0f) {
            uint32_t value[S::D_TILES];
            rows.load_top(work, i, t, value);
            rows.join(i, joining, value, t);
        }
        rows.base[i] = base;
        if (replaces) {
            rows.top[i] = largest;
            rows.key[i] = first_key + key;
        }
    }
}

/* Closes the rows of a chunk and stores their partial, as store_partial() in fast_pass_a.cuh.
 * `tops` are the values of the top keys. */
template <class S>
__device__ __forceinline__ void store_rows(row_sums<S> &rows, const uint32_t (&tops)[2][S::D_TILES],
                                           int first_row, const place<S> &at,
                                           unsigned char *partial)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = rows.sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float rounded = rows.rounded[0][2 * i];
        const float scale = (rounded > 0.0f ? sum / rounded : 1.0f) * (1.0f / S::WEIGHT_ONE);
        sum *= 1.0f / S::WEIGHT_ONE;
        const float below = exp2_fast(rows.base[i] - rows.top[i]); /* NO_KEY both: 1 */
        const bool joins = sum * below >= 0.125f;
        rows.scale(i, (joins ? below : 1.0f) * scale);
        rows.join(i, joins ? 1.0f : 0.0f, tops[i], at.t);
        const int row = first_row + at.row(i);
        if (at.t == 0) {
            const partial_head head = {rows.top[i], joins ? rows.top[i] : rows.base[i],
                                       joins ? fmaf(sum, below, 1.0f) : -sum, rows.key[i]};
            __stcg(reinterpret_cast<float4 *>(partial) + row,
                   *reinterpret_cast<const float4 *>(&head));
        }
        float2 *output = reinterpret_cast<float2 *>(partial + S::ROWS * 16) + row * S::DIM / 2 +
                         at.t;
#pragma unroll
        for (int d = 0; d < S::D_TILES; d++)
            __stcg(output + 4 * d, make_float2(rows.output[d][2 * i], rows.output[d][2 * i + 1]));
    }
}

/* The thread's query rows as operand of wgmma. */
template <class S>
__device__ __forceinline__ void load_rows_of_query(const job &work, int first_row,
                                                   const place<S> &at, uint32_t (&q)[S::K_STEPS][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned char *from = query_row(work, work.item.row_group * S::ROWS + first_row +
                                                        at.row(i));
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
__device__ __forceinline__ void start_row_dots(float (&x)[S::COLUMNS][4],
                                               const uint32_t (&a)[S::K_STEPS][4], uint32_t tile)
{
    const uint64_t others = keys_operand<S>(tile);
    warpgroup_fence();
    warpgroup_mma_first<typename S::type>(x, a[0], others);
#pragma unroll
    for (int k = 1; k < S::K_STEPS; k++)
        warpgroup_mma<typename S::type, 0>(x, a[k], others + keys_step(k), 1);
    warpgroup_commit();
}

/* -inf where a row of the thread does not see a key of the tile. */
template <class S>
__device__ __forceinline__ void hide_keys_of(const job &work, int first_row, const place<S> &at,
                                             int first_key, float (&z)[S::COLUMNS][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int last_key = last_key_of(work,
                                         work.item.row_group * S::ROWS + first_row + at.row(i));
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (first_key + 8 * j + 2 * at.t + e > last_key)
                    z[j][2 * i + e] = -INFINITY;
            }
    }
}

/* Logits in octaves / factor of a tile's dot products. Those are left alone: what else is written
 * to where the tensor cores put them costs registers for all of a loop. */
template <class S>
__device__ __forceinline__ void logits_of(const job &work, const logit_rule &rule,
                                          const logit_factor &logits, int first_row,
                                          const place<S> &at, int first_key,
                                          const float (&dots)[S::COLUMNS][4],
                                          float (&x)[S::COLUMNS][4])
{
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            x[j][c] = dots[j][c];
    if (!logits.plain)
        rule.template apply<S::COLUMNS, 4>(x);
    if (first_key + S::STEP > rule.open_keys)
        hide_keys_of(work, first_row, at, first_key, x);
}

} // namespace dkv_stream

#endif
