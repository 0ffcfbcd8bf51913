/* Shapes and shared memory of the fast scorer.
 *
 * The idea: a thread block keeps one range of keys of a unit (a chunk) for itself. Pass A streams
 * its K and V once, leaves the logits in shared memory and a partial softmax in a small ring; the
 * partials of all chunks are merged while pass A is already at the next unit; pass B then needs V
 * alone, which L2 still holds.
 *
 *   time     ->   turn s        turn s + 1        turn s + 2
 *   pass A        item s        item s + 1        item s + 2
 *   merge                       item s            item s + 1
 *   pass B                        .. item s         .. item s + 1
 *
 * 16 warps: 4 run pass A, 8 pass B, 2 fetch tiles, 2 merge. In both passes a warp works on one row
 * tile (16 rows) and some strips (16 keys) of a tile of 64 keys:
 *
 *   rows of a unit   row tiles   pass A: strips a warp   pass B   logits kept of a chunk's tiles
 *   up to 32         2           2                       1        8 (all, up to 64K keys)
 *   up to 64         4           4                       2        3
 *
 * More rows are scored in groups of 64, one turn after the other. Tiles whose logits are not kept
 * are computed again from K, in the same order, so that the bits are the same.
 *
 * With g = lane / 4 and t = lane % 4 a thread owns rows g and g + 8 of its row tile and, in a strip,
 * keys 2t, 2t + 1, 2t + 8, 2t + 9: what mma.m16n8k16 leaves in its accumulators.
 */
#ifndef DKV_KERNELS_CUDA_FAST_SHAPE_CUH
#define DKV_KERNELS_CUDA_FAST_SHAPE_CUH

#include <type_traits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/fast_plan.h"
#include "kernels/cuda/fast_ptx.cuh"

namespace dkv_fast
{

constexpr int TILE = 64; /* keys */
constexpr int HALF = 32; /* keys that arrive together */
constexpr int A_WARPS = 4;
constexpr int B_WARPS = 8;
constexpr int A_THREADS = 32 * A_WARPS;
constexpr int B_THREADS = 32 * B_WARPS;
constexpr int MERGE_THREADS = 64;
constexpr int THREADS = A_THREADS + B_THREADS + 64 + MERGE_THREADS;
constexpr int WARPS = THREADS / 32;

/* Registers of a thread, by role: 4 A + 8 B + 4 other warps fill the register file. */
constexpr int A_REGISTERS = 192;
constexpr int B_REGISTERS = 128;
constexpr int OTHER_REGISTERS = 64;

constexpr int BARRIER_A = 1; /* named barriers */
constexpr int BARRIER_B = 2;
constexpr int BARRIER_MERGE = 3;

constexpr int JOBS = 5; /* items whose descriptors are at hand */

/* Reference logit of a row that saw no key yet, see fast_pass_a.cuh. */
constexpr float NO_REFERENCE = -1e30f;

/* A squared distance below this part of |v|^2 is rounding noise: the values are equal. */
constexpr float EQUAL = 1.0f / 4294967296.0f;

template <class element, int head_dim, int row_tiles> struct shape {
    using type = element;
    static constexpr int DIM = head_dim;
    static constexpr int ROW_TILES = row_tiles;
    static constexpr int ROWS = 16 * row_tiles;
    static constexpr int K_STEPS = head_dim / 16;
    static constexpr int D_TILES = head_dim / 8;

    static constexpr int ROW_BYTES = 2 * head_dim;
    static constexpr int HALF_BYTES = HALF * ROW_BYTES;
    static constexpr int SLOT_BYTES = ROWS * TILE * 4;
    static constexpr int KEPT_TILES = row_tiles == 2 ? 8 : 3;
    static constexpr int A_HALVES = (row_tiles == 2 ? 8 : 10) * 128 / head_dim;
    static constexpr int B_HALVES = (row_tiles == 2 ? 3 : 4) * 128 / head_dim;

    /* A chunk's partial result in the ring: partial_head [ROWS], keys [ROWS], then the output in
     * fragment order, [ROW_TILES][D_TILES][32 lanes] float4. */
    static constexpr int FRAGMENTS = ROW_TILES * D_TILES * 32;
    static constexpr int PARTIAL_BYTES = ROWS * 16 + FRAGMENTS * 16;

    /* fp16 weights are scaled by 2^10: the smallest that matter stay normal numbers. */
    static constexpr float WEIGHT_SHIFT = std::is_same<element, fp16_type>::value ? 10.0f : 0.0f;
    static constexpr float WEIGHT_ONE = std::is_same<element, fp16_type>::value ? 1024.0f : 1.0f;
};

/* One row of a partial. Weights are 2^(logit - reference). The reference's own weight, 1, and its
 * value are in the sums only if it `joined`, which the sum's sign bit says: clear. */
struct partial_head {
    float reference; /* in octaves; NO_REFERENCE: no visible key */
    float sum;
};

/* What the merge leaves in unit.work for pass B. */
template <class S> struct merged {
    float4 output[S::FRAGMENTS]; /* a_t, fragment order */
    float lse[S::ROWS];          /* log2 of the softmax's denominator; +inf: no such row */
    int top[S::ROWS];            /* the key that `top_distance` belongs to, -1: none */
    float top_weight[S::ROWS];   /* its p^2, with the range factor */
    float top_distance[S::ROWS][S::D_TILES]; /* |b - v|^2 of that key, by parts of 8 dimensions */
};

/* One item's descriptors, copied whole. */
struct job {
    dkv_fast_item item;
    dkv_cu_unit unit;
    dkv_cu_block block;
};

/* One thread's part of merging the partials of a range of chunks: two rows, two dimensions. */
struct merge_state {
    partial_head head[2];
    int chunk[2]; /* whose reference it is */
    float output[2][2];
};

template <class S> struct shared_memory {
    unsigned char a_halves[S::A_HALVES][S::HALF_BYTES];
    unsigned char b_halves[S::B_HALVES][S::HALF_BYTES];
    unsigned char slots[2][S::KEPT_TILES][S::SLOT_BYTES]; /* logits */
    float squares[2][S::KEPT_TILES][TILE];                /* |v|^2 */
    float row_sums[2][S::ROW_TILES][TILE];
    float reference[A_WARPS][16];
    int reference_key[A_WARPS][16];
    float sum[A_WARPS][16];
    merge_state merge[MERGE_THREADS / 2];
    job jobs[JOBS];
    unsigned long long a_full[S::A_HALVES];
    unsigned long long a_empty[S::A_HALVES];
    unsigned long long b_full[S::B_HALVES];
    unsigned long long b_empty[S::B_HALVES];
    unsigned long long slot_empty[2][S::KEPT_TILES];
    unsigned long long job_full[JOBS];
    unsigned long long job_empty[JOBS];
};

/* A position in a ring of `size` buffers and the parity of its current phase. */
template <int size> struct ring {
    int index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int by)
    {
        index += by;
        if (index >= size) {
            index -= size;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ uint32_t item_first_key(const dkv_fast_item &item)
{
    return item.chunk * item.chunk_keys;
}

__device__ __forceinline__ int item_tiles(const job &job)
{
    const uint32_t first = item_first_key(job.item);
    const uint32_t end = min(first + job.item.chunk_keys, job.block.n_valid);
    return static_cast<int>(end - first + TILE - 1) / TILE;
}

} // namespace dkv_fast

#endif
