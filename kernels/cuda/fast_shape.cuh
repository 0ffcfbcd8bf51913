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
 * Warps, in groups of four: one group runs pass A, one pass B, one merges, one fetches. Keys come
 * in tiles of 64, which are copied as two halves.
 *
 *   rows of a unit   rows a thread   logits kept of a chunk's tiles
 *   up to 32         1               14 (all, up to 112K keys)
 *   up to 64         2               5
 *
 * More rows are scored in groups of 64, one turn after the other. The last tiles' logits are kept,
 * so that pass A does not wait for room at the start of an item; pass B begins with them. The
 * others are computed again from K.
 *
 * Pass A's products are wgmma with the rows in registers as the 64-row operand and a tile in shared
 * memory as the other. With g = lane / 4, t = lane % 4 and warp w of a group, a thread sees 16 w +
 * g and 16 w + g + 8 of those 64 rows, and of every 8 columns (keys or dimensions) 2t and 2t + 1.
 * With 64 rows both are rows of the unit. With 32 the second one carries the low half of the first
 * one's weights, which are split in hi + lo, else nothing.
 *
 * Pass B's have the 64 keys of a tile as that operand and 32 rows as the other, both in shared
 * memory: a warp has 16 keys to itself, and needs no other warp to sum over rows.
 *
 * Caches are 16-bit; those of fp8 are the stream scorer's.
 */
#ifndef DKV_KERNELS_CUDA_FAST_SHAPE_CUH
#define DKV_KERNELS_CUDA_FAST_SHAPE_CUH

#include <type_traits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/fast_plan.h"
#include "kernels/cuda/fast_wgmma.cuh"

namespace dkv_fast
{

constexpr int TILE = 64; /* keys */
constexpr int HALF = 32; /* keys that are copied together */
constexpr int LOG_GROUP_THREADS = 7;
constexpr int GROUP_THREADS = 1 << LOG_GROUP_THREADS;
constexpr int THREADS = 4 * GROUP_THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int LAUNCH_REGISTERS = 65536 / THREADS;

constexpr int BARRIER_MERGE = 1; /* named barriers */
constexpr int BARRIER_B = 3;     /* averages */

constexpr int BLOCK_ROWS = 32; /* rows that pass B takes together */
constexpr int JOBS = 4;        /* items whose descriptors are at hand */

/* Top or base of a row whose sums have no key yet, see fast_pass_a.cuh. */
constexpr float NO_KEY = -1e30f;

/* What p is multiplied with throughout is 1 / RANGE. */
constexpr float RANGE = 1.0f / (1ull << DKV_CU_EXPONENT);

/* The exponent of the scores' factor, which is its square: half if p is not squared. */
template <class S> __device__ __forceinline__ constexpr int exponent_of(void)
{
    return S::FORM == DKV_CU_FORM_DROPKV ? DKV_CU_EXPONENT : DKV_CU_EXPONENT / 2;
}

/* A squared distance below this part of |v|^2 is rounding noise: the values are equal. */
constexpr float EQUAL = 1.0f / 4294967296.0f;

/* `element` is the cache's type. `form` is the rule's, enum dkv_cu_form. */
template <class element, int head_dim, int rows_per_thread, int form = DKV_CU_FORM_DROPKV>
struct shape {
    using type = element;
    static constexpr int FORM = form;
    static constexpr bool FP8 = false;
    static constexpr int DIM = head_dim;
    static constexpr int R = rows_per_thread;
    static constexpr int ROWS = 32 * rows_per_thread;
    static constexpr int K_STEPS = head_dim / 16;
    static constexpr int D_TILES = head_dim / 8;

    static constexpr int STORED_BYTES = 2 * head_dim; /* of a row, in global memory */
    static constexpr int ROW_BYTES = 2 * head_dim;    /* as operand of a product */
    static constexpr int EIGHT_BYTES = 8 * ROW_BYTES; /* eight keys, see fast_place.cuh */
    static constexpr int HALF_BYTES = HALF * STORED_BYTES;
    static constexpr int TILE_BYTES = TILE * STORED_BYTES;
    static constexpr int SLOT_BYTES = ROWS * TILE * 4;
    static constexpr int OPERAND_BYTES = ROWS * ROW_BYTES;
    /* Averaged outputs as operand, of each 32 rows: fast_average.cuh. */
    static constexpr int BAR_BYTES = form == DKV_CU_FORM_AVERAGE ? ROWS / BLOCK_ROWS * EIGHT_BYTES
                                                                 : 0;
    static constexpr int SLOTS = rows_per_thread == 2 ? 5 : 14;
    static constexpr int A_TILES = 3 * 128 / head_dim; /* on their way and being read */
    static constexpr int B_TILES = 2 * 128 / head_dim;

    /* Registers of a thread by role; together what the thread block has at launch. */
    static constexpr int A_REGISTERS = rows_per_thread == 1 ? 184 : 208;
    static constexpr int B_REGISTERS = rows_per_thread == 1 && form == DKV_CU_FORM_DIST ? 144 : 152;
    static constexpr int FETCH_REGISTERS = rows_per_thread == 1 ? 64 : 56;
    static constexpr int MERGE_REGISTERS = 4 * LAUNCH_REGISTERS - A_REGISTERS - B_REGISTERS -
                                           FETCH_REGISTERS;
    static constexpr int MERGE_AHEAD = rows_per_thread == 1 ? 8 : 4; /* partials in flight */

    /* A chunk's partial result in the ring: partial_head [ROWS], then the output, float32
     * [ROWS][DIM]. The ring has as many turns as fit into the size of two partials of 32 rows. */
    static constexpr int PARTIAL_BYTES = ROWS * 16 + ROWS * head_dim * 4;
    static constexpr int TURNS = 2 / rows_per_thread;

    /* fp16 weights are scaled by 2^10: the smallest that matter stay normal numbers. */
    static constexpr float WEIGHT_SHIFT = std::is_same<element, fp16_type>::value ? 10.0f : 0.0f;
    static constexpr float WEIGHT_ONE = std::is_same<element, fp16_type>::value ? 1024.0f : 1.0f;
};

/* One row of a partial. Weights are 2^(logit - base). The top key is in the sums only if it
 * `joined`, which the sum's sign bit says: clear. Then base = top and its weight is 1. */
struct __align__(16) partial_head
{
    float top; /* the top key's logit in octaves; NO_KEY: no visible key */
    float base;
    float sum;
    int key; /* the top key */
};

/* What the merge leaves in unit.work for pass B, whose thread blocks copy it whole. Sums over a row
 * come in parts of 32 dimensions. fast_terms.cuh and fast_average.cuh say what other rules have
 * there. */
template <class S> struct merged_rows {
    /* a_t as the sum of two elements, as operands of wgmma: of each 32 rows hi, then lo. */
    unsigned char a[S::ROWS / BLOCK_ROWS][2 * BLOCK_ROWS * S::ROW_BYTES];
    float norm[S::ROWS][S::DIM / 32];         /* |hi + lo|^2 */
    float lse[S::ROWS];                       /* log2 of the softmax's denominator; +inf: no row */
    int top[S::ROWS];                         /* a key whose term is known, -1: none */
    float top_weight[S::ROWS];                /* its p^2, with the range factor */
    float top_distance[S::ROWS][S::DIM / 32]; /* |b - v|^2 of that key */
};

/* What some rules need besides. */
template <int form, int rows> struct merged_weights {
};
template <int rows> struct merged_weights<DKV_CU_FORM_DIST, rows> {
    float unit[rows]; /* the range factor over what a row counts; 0 if it counts nothing */
};
template <int rows> struct merged_weights<DKV_CU_FORM_AVERAGE, rows> {
    float weight[rows]; /* what a row counts */
};

template <class S> struct merged : merged_rows<S>, merged_weights<S::FORM, S::ROWS> {
};

/* One item's descriptors, copied whole. */
struct job {
    dkv_fast_item item;
    dkv_cu_unit unit;
    dkv_cu_block block;
};

/* One thread's part of merging the partials of a range of chunks: four dimensions of a row. */
struct merge_state {
    partial_head head;
    float4 output;
};

/* Where threads that share a row's chunks meet. */
struct merge_room {
    partial_head heads[GROUP_THREADS];
    float4 outputs[GROUP_THREADS];
    float sums[GROUP_THREADS];
};

template <class S> struct shared_memory {
    unsigned char a_tiles[S::A_TILES][S::TILE_BYTES];
    unsigned char b_tiles[S::B_TILES][S::TILE_BYTES];
    unsigned char slots[S::SLOTS][S::SLOT_BYTES]; /* logits */
    /* For pass B: the query, if there are tiles that are not kept; what it makes of the rows. */
    unsigned char query[S::OPERAND_BYTES + S::BAR_BYTES];
    merged<S> rows;
    unsigned char unused[16]; /* what follows is where it was when the kernels were measured */
    merge_room merge;
    job jobs[JOBS];
    unsigned long long a_full[S::A_TILES];
    unsigned long long a_empty[S::A_TILES];
    unsigned long long b_full[S::B_TILES];
    unsigned long long b_empty[S::B_TILES];
    unsigned long long slot_empty[S::SLOTS];
    unsigned long long job_full[JOBS];
    unsigned long long job_empty[JOBS];
    unsigned long long partial_full[S::TURNS];  /* pass A has stored it */
    unsigned long long partial_empty[S::TURNS]; /* nobody reads it any more */
    unsigned long long rows_full;               /* and the query */
    unsigned long long rows_empty;
};

template <class S>
__device__ __forceinline__ const job &job_wait(shared_memory<S> &shared, uint32_t turn)
{
    const uint32_t slot = turn % JOBS;
    mbarrier_wait(shared_address(&shared.job_full[slot]), turn / JOBS & 1);
    return shared.jobs[slot];
}

/* This warp is done with a turn. */
template <class S>
__device__ __forceinline__ void job_release(shared_memory<S> &shared, uint32_t turn, int lane)
{
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(shared_address(&shared.job_empty[turn % JOBS]));
}

/* A position in a ring of `size` buffers and the parity of its current phase. */
template <int size> struct ring {
    int index = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int by = 1)
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

/* Tiles before this one of an item are not kept. */
template <class S> __device__ __forceinline__ int first_kept_tile(int tiles)
{
    return max(tiles - S::SLOTS, 0);
}

/* A partial of the ring: of a turn's place, and of any thread block. */
template <class S>
__device__ __forceinline__ unsigned char *partial_of(const dkv_fast_args &args, int place,
                                                     uint32_t thread_block)
{
    return args.ring + (place * gridDim.x + thread_block) * static_cast<size_t>(S::PARTIAL_BYTES);
}

} // namespace dkv_fast

#endif
