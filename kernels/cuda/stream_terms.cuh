/* Terms of pass B for up to 64 rows, of a group of four warps with keys as rows: what the merge has
 * made of the rows, and the score of every key from its logits and products with them. A warp has
 * 16 keys of a tile to itself, a thread keys g and g + 8 of them, and of every eight rows 2t and 2t
 * + 1: in [j][c], c = 2 * (key is g + 8) + (row is odd).
 */
#ifndef DKV_KERNELS_CUDA_STREAM_TERMS_CUH
#define DKV_KERNELS_CUDA_STREAM_TERMS_CUH

#include "kernels/cuda/fast_pass_a.cuh"
#include "kernels/cuda/fast_pass_b.cuh"
#include "kernels/cuda/fast_plan.h"

namespace dkv_fast
{

/* `room_type` is what the group has in shared memory: a, norm and shift of the rows. */
template <class S, class room_type> struct group_terms {
    static constexpr int COLUMNS = S::COLUMNS;

    room_type &room;
    place<S> at;
    int barrier;
    int top[S::R]; /* top keys of rows 32 i + lane */
    float largest_norm;

    __device__ __forceinline__ group_terms(room_type &in, int group, int thread)
        : room(in), at(thread), barrier(1 + group)
    {
    }

    __device__ __forceinline__ const merged<S> &merged_rows(const job &work) const
    {
        return reinterpret_cast<const merged<S> *>(work.unit.work)[work.item.row_group];
    }

    /* Brings what the merge has made of the rows. `async`: no copies are under way, so that the
     * operands come as such. */
    template <bool async = false>
    __device__ __forceinline__ void load_rows(const job &work, const place<S> &at)
    {
        constexpr int BLOCK_BYTES = BLOCK_ROWS * S::ROW_BYTES;
        const merged<S> &from = merged_rows(work);
        if constexpr (async)
            copy_operands(from, at);
#pragma unroll
        for (int block = 0; block < (async ? 0 : S::R); block++)
#pragma unroll
            for (int part = 0; part < 2; part++)
#pragma unroll 4
                for (int offset = 16 * at.thread; offset < BLOCK_BYTES;
                     offset += 16 * GROUP_THREADS)
                    *reinterpret_cast<uint4 *>(room.a[part] + block * BLOCK_BYTES + offset) =
                        __ldcg(reinterpret_cast<const uint4 *>(from.a[block] + part * BLOCK_BYTES +
                                                               offset));
        if (at.thread < S::ROWS) {
            float norm = 0.0f;
#pragma unroll
            for (int part = 0; part < S::DIM / 32; part++)
                norm += __ldcg(&from.norm[at.thread][part]);
            reinterpret_cast<float *>(room.norm)[at.thread] = norm;
            reinterpret_cast<float *>(room.shift)[at.thread] = __ldcg(&from.lse[at.thread]) -
                                                               DKV_CU_EXPONENT;
        }
#pragma unroll
        for (int i = 0; i < S::R; i++)
            top[i] = __ldcg(&from.top[32 * i + at.lane]);
        if constexpr (async)
            asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async_proxy();
        group_barrier(barrier);
        largest_norm = 0.0f;
#pragma unroll
        for (int i = 0; i < S::R; i++)
            largest_norm = fmaxf(largest_norm,
                                 reinterpret_cast<const float *>(room.norm)[32 * i + at.lane]);
        for (int lanes = 16; lanes > 0; lanes /= 2)
            largest_norm = fmaxf(largest_norm, __shfl_xor_sync(~0u, largest_norm, lanes));
    }

    /* All loads are under way at once. Of 32 rows. */
    __device__ __forceinline__ void copy_operands(const merged<S> &from, const place<S> &at)
    {
        static_assert(S::R == 1, "hi and lo follow each other");
        /* By a shuffle: see warp_copies in stream_16bit_shape.cuh. */
        const uint32_t to = __shfl_sync(~0u, shared_address(room.a[0]) + 16 * at.thread, at.lane);
        const unsigned char *source = from.a[0] + 16 * at.thread;
        const uint64_t policy = policy_normal();
#pragma unroll
        for (int offset = 0; offset < 2 * S::OPERAND_BYTES; offset += 16 * GROUP_THREADS)
            copy_16(to + offset, source + offset, true, policy);
        copies_commit();
    }

    /* Logits become (p / (1 - p))^2, with the range factor: 1 / (1 / p - 1) is what takes least. */
    __device__ __forceinline__ void make_weights(float (&z)[COLUMNS][4], float factor) const
    {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float2 shift = room.shift[4 * j + at.t];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float ratio = rcp_fast(
                    exp2_fast(fmaf(z[j][c], -factor, c & 1 ? shift.y : shift.x)) - RANGE);
                z[j][c] = ratio * ratio;
            }
        }
    }

    /* Rows whose top key is one of this warp's have exact terms: fast_terms.cuh. Rare. */
    __device__ __forceinline__ void take_tops(const job &work, int first_key,
                                              float (&z)[COLUMNS][4], float (&sum)[2]) const
    {
#pragma unroll
        for (int i = 0; i < S::R; i++) {
            const int mine = top[i] - first_key;
            if (__any_sync(~0u, static_cast<unsigned>(mine) < 16))
                take_top_terms(merged_rows(work), BLOCK_ROWS * i, mine, at,
                               reinterpret_cast<float(&)[ROW_TILES][4]>(z[ROW_TILES * i]), sum);
        }
    }

    /* weights * |a - v|^2, summed over the thread's rows. */
    __device__ __forceinline__ void add_terms(const job &work, uint32_t v_tile,
                                              const float (&square)[2],
                                              const float (&weights)[COLUMNS][4],
                                              float (&dot)[COLUMNS][4], float (&sum)[2]) const
    {
        float least[2] = {INFINITY, INFINITY};
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float2 norm = room.norm[4 * j + at.t];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                dot[j][c] = fmaf(-2.0f, dot[j][c], (c & 1 ? norm.y : norm.x) + square[c >> 1]);
                least[c >> 1] = fminf(least[c >> 1], dot[j][c]);
            }
        }
        const bool may_cancel = least[0] < CANCELS * (largest_norm + square[0]) ||
                                least[1] < CANCELS * (largest_norm + square[1]);
        if (__any_sync(~0u, may_cancel))
            distances_that_cancel(work, v_tile, square, dot);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sum[c >> 1] = fmaf(weights[j][c], dot[j][c], sum[c >> 1]);
    }

    /* Distances that are a small part of what they are the difference of, again. Rare. */
    __device__ __forceinline__ void distances_that_cancel(const job &work, uint32_t v_tile,
                                                          const float (&square)[2],
                                                          float (&distance)[COLUMNS][4]) const
    {
        unsigned cancels[S::R] = {};
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const float2 norm = room.norm[4 * j + at.t];
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (distance[j][c] < CANCELS * ((c & 1 ? norm.y : norm.x) + square[c >> 1]))
                    cancels[j / ROW_TILES] |= 1u << (4 * (j % ROW_TILES) + c);
        }
#pragma unroll
        for (int i = 0; i < S::R; i++)
            distances_again<S>(cancels[i],
                               shared_address(room.a[0]) + i * ROW_TILES * S::EIGHT_BYTES,
                               S::OPERAND_BYTES, v_tile, work.block.v.dtype, at,
                               reinterpret_cast<float(&)[ROW_TILES][4]>(distance[ROW_TILES * i]));
    }
};

} // namespace dkv_fast

#endif
