/* Shapes and shared memory of the stream scorer, which reads K and V twice, in three kernels:
 *
 *   pass A   every chunk of keys of a unit: logits, softmax partials, their weighted values
 *   merge    the partials of a unit become one softmax per row
 *   pass B   the score of every key, from logits made again
 *
 * It serves 128 rows at a time. With that many the tensor cores take as long for a pass as memory
 * does for its bytes, so the second reading costs next to nothing, while the fast scorer, which
 * holds 64 rows at most, streams everything for each 64 of them. And no thread block waits for
 * another one: kernels follow each other on the stream.
 *
 * A thread block is two groups of four warps that compute and one that fetches. A computing group
 * has 64 rows, in its registers as the 64-row operand, and sees every tile: of 64 keys in pass A,
 * of 128 in pass B. While it works on a tile's numbers, the tensor cores are at its next product
 * and at those of the other group. Pairs of tiles, keys and values, pass through one ring.
 *
 * Layouts of tiles and merged rows are those of fast_place.cuh. With g = lane / 4 and t = lane % 4
 * a thread sees rows g and g + 8 of its warp's 16, and of every eight columns (keys or dimensions)
 * 2t and 2t + 1.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_SHAPE_CUH
#define DKV_KERNELS_CUDA_STREAM_SHAPE_CUH

#include "kernels/cuda/fast_kernel.cuh"
#include "kernels/cuda/stream_ptx.cuh"

namespace dkv_stream
{

constexpr int GROUPS = 2; /* that compute */
constexpr int STREAM_THREADS = (GROUPS + 1) * GROUP_THREADS;
constexpr int STREAM_LAUNCH_REGISTERS = 65536 / STREAM_THREADS / 8 * 8;
constexpr int COMPUTE_REGISTERS = 224;
constexpr int LOAD_REGISTERS = 56;
constexpr int BARRIER_GROUP = 2; /* named barriers, one a group */
constexpr int STREAM_JOBS = 2;   /* items whose descriptors are at hand */
constexpr int SLICES = 2;        /* that are merged at once, for each chunk */
constexpr int STEP_B = 128;      /* keys that a group takes at once in pass B */

template <class element, int head_dim> struct stream_shape {
    using type = element;
    static constexpr int FORM = DKV_CU_FORM_DROPKV;
    static constexpr bool FP8 = false;
    static constexpr int DIM = head_dim;
    static constexpr int R = 2;       /* rows of a thread */
    static constexpr int STEP = TILE; /* keys of a tile, which a group takes at once */
    static constexpr int COLUMNS = STEP / 8;
    static constexpr int ROWS = 64 * GROUPS;
    static constexpr int K_STEPS = head_dim / 16;
    static constexpr int D_TILES = head_dim / 8;
    static constexpr int STORED_BYTES = 2 * head_dim;
    static constexpr int ROW_BYTES = 2 * head_dim;
    static constexpr int EIGHT_BYTES = 8 * ROW_BYTES;
    static constexpr int HALF_BYTES = HALF * ROW_BYTES;
    static constexpr int TILE_BYTES = STEP * ROW_BYTES;
    static constexpr int TILES = 12 * 128 / head_dim; /* of the ring: K V K V .. */
    static constexpr int MERGE_AHEAD = 16;
    static constexpr int PARTIAL_BYTES = ROWS * 16 + ROWS * head_dim * 4;
    static constexpr float WEIGHT_SHIFT = std::is_same<element, fp16_type>::value ? 10.0f : 0.0f;
    static constexpr float WEIGHT_ONE = std::is_same<element, fp16_type>::value ? 1024.0f : 1.0f;
};

/* The same for pass B, whose tiles are twice as long, and which has rows in shared memory, too. */
template <class S> struct shape_b : S {
    static constexpr int STEP = STEP_B;
    static constexpr int COLUMNS = STEP / 8;
    static constexpr int TILE_BYTES = STEP * S::ROW_BYTES;
    static constexpr int TILES = 4 * 128 / S::DIM;
};

/* Descriptors of the items that a thread block is at. */
struct job_ring {
    job jobs[STREAM_JOBS];
    unsigned long long full[STREAM_JOBS];
    unsigned long long empty[STREAM_JOBS];
};

/* Barriers of the ring. A place's tiles all come from the same fetching warp. */
template <class S> struct tile_ring {
    unsigned long long full[S::TILES];
    unsigned long long empty[S::TILES];
};

template <class S> struct shared_a {
    unsigned char places[S::TILES][S::TILE_BYTES];
    uint32_t ones[256]; /* a matrix of ones, whatever its layout */
    tile_ring<S> tiles;
    job_ring items;
};

/* Partial scores of a tile for the warp that adds them up: from a warp four times those of four
 * rows. Keys are permuted by the row, to keep rows out of each other's banks. */
constexpr int PARTS = 2;
constexpr int PART_ROWS = 4;
__device__ __forceinline__ int part_place(int row, int key)
{
    return key ^ row % PART_ROWS * 8;
}

template <class S> struct shared_b {
    unsigned char places[S::TILES][S::TILE_BYTES];
    unsigned char rows[GROUPS][2][64 * S::ROW_BYTES]; /* hi and lo of -a, see merged */
    float squares[S::TILES / 2][S::STEP]; /* |v|^2 of the keys of each tile of the ring */
    float parts[PARTS][4 * GROUPS * PART_ROWS][S::STEP];
    tile_ring<S> tiles;
    unsigned long long parts_full[PARTS];
    unsigned long long parts_empty[PARTS];
    job_ring items;
};

using stream_args = dkv_stream_args; /* items: [turns][gridDim.x] */

/* In pass B an item is a range of tiles: chunk_keys = STEP_B, chunk the first one, chunks how
 * many. */
__device__ __forceinline__ int range_tiles(const dkv_fast_item &item)
{
    return item.chunks;
}

/* Row groups of a unit. */
template <class S> __host__ __device__ __forceinline__ uint32_t row_groups_of(uint32_t rows)
{
    return (rows + S::ROWS - 1) / S::ROWS;
}

/* Tiles of pass B. */
__host__ __device__ __forceinline__ uint32_t tiles_of(uint32_t keys)
{
    return (keys + STEP_B - 1) / STEP_B;
}

/* |v|^2 of a unit's keys, behind the merged rows of all row groups. Pass A leaves them for pass B.
 */
template <class S> __device__ __forceinline__ float *squares_of(const job &work)
{
    return reinterpret_cast<float *>(work.unit.work +
                                     row_groups_of<S>(work.block.group * work.block.window) *
                                         sizeof(merged<S>));
}

/* Partials of one row group of a unit, behind those. */
template <class S> __device__ __forceinline__ unsigned char *partials_of(const job &work)
{
    return reinterpret_cast<unsigned char *>(squares_of<S>(work) +
                                             tiles_of(work.block.n_valid) * STEP_B) +
           static_cast<size_t>(work.item.row_group) * work.item.chunks * S::PARTIAL_BYTES;
}

/* ---- what the kernels share ---- */

__device__ __forceinline__ const job &item_wait(job_ring &items, uint32_t turn)
{
    mbarrier_wait(shared_address(&items.full[turn % STREAM_JOBS]), turn / STREAM_JOBS & 1);
    return items.jobs[turn % STREAM_JOBS];
}

__device__ __forceinline__ void item_release(job_ring &items, uint32_t turn, int lane)
{
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(shared_address(&items.empty[turn % STREAM_JOBS]));
}

/* Brings the descriptors of a turn. */
__device__ __forceinline__ void load_item(job_ring &items, const stream_args &args, uint32_t turn,
                                          int lane)
{
    if (turn >= args.turns)
        return;
    const uint32_t slot = turn % STREAM_JOBS;
    const dkv_fast_item item = args.items[turn * gridDim.x + blockIdx.x];
    mbarrier_wait(shared_address(&items.empty[slot]), (turn / STREAM_JOBS & 1) ^ 1);
    job &to = items.jobs[slot];
    if (item.chunks != 0) {
        copy_words(to.unit, args.units + item.unit, lane);
        copy_words(to.block, args.blocks + item.block, lane);
    }
    if (lane == 0)
        to.item = item;
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(shared_address(&items.full[slot]));
}

/* `users`: warps that look at an item. */
__device__ __forceinline__ void init_items(job_ring &items, int users)
{
    for (int i = 0; i < STREAM_JOBS; i++) {
        mbarrier_init(shared_address(&items.full[i]), 1);
        mbarrier_init(shared_address(&items.empty[i]), users);
    }
}

/* Values arrive by `copies` copies of a warp. `readers` warps read a tile, `more` values alone. */
template <class S>
__device__ __forceinline__ void init_tiles(tile_ring<S> &tiles, int copies, int readers, int more)
{
    for (int i = 0; i < S::TILES; i++) {
        mbarrier_init(shared_address(&tiles.full[i]), i % 2 ? 32 * copies : 32);
        mbarrier_init(shared_address(&tiles.empty[i]), i % 2 ? readers + more : readers);
    }
}

/* A pair of tiles in the ring. */
template <class S> struct tile_pair {
    ring<S::TILES> at;

    __device__ __forceinline__ void advance(void)
    {
        at.advance(2);
    }
    /* Shared memory is that of either pass. */
    template <class T> __device__ __forceinline__ uint32_t keys(const T &shared) const
    {
        return shared_address(shared.places) + at.index * S::TILE_BYTES;
    }
    template <class T> __device__ __forceinline__ uint32_t values(const T &shared) const
    {
        return keys(shared) + S::TILE_BYTES;
    }
    template <class T> __device__ __forceinline__ uint32_t keys_full(const T &shared) const
    {
        return shared_address(shared.tiles.full) + 8 * at.index;
    }
    template <class T> __device__ __forceinline__ uint32_t values_full(const T &shared) const
    {
        return keys_full(shared) + 8;
    }
    /* This warp has read the keys; the values. What is released must not be waited for again: its
     * place may be filled anew, and then full of something else or not full at all. */
    template <class T> __device__ __forceinline__ void release_keys(const T &shared, int lane) const
    {
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(shared.tiles.empty) + 8 * at.index);
    }
    template <class T>
    __device__ __forceinline__ void release_values(const T &shared, int lane) const
    {
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(shared.tiles.empty) + 8 * (at.index + 1));
    }
};

/* Copies keys or values of an item's tiles, every other tile of the ring. */
template <class S>
__device__ __forceinline__ void fetch_tiles(tile_stream<S, S::TILES> &stream, const job &work,
                                            bool keys, int tiles, uint64_t policy, int lane)
{
    tile_source<S> from(work, keys, lane);
    for (int tile = 0; tile < tiles; tile++) {
        stream.fetch(from, work, tile, policy);
        stream.next.advance();
    }
}

/* How dot products become octaves: `factor` times them, after rule.apply() unless it is `plain`. */
struct logit_factor {
    float factor;
    bool plain;

    __device__ __forceinline__ explicit logit_factor(const logit_rule &rule)
        : plain(rule.cap == 0.0f && rule.to_octaves > 0.0f)
    {
        factor = plain ? rule.to_octaves : 1.0f;
    }
};

} // namespace dkv_stream

#endif
