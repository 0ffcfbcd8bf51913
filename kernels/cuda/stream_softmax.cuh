/* Softmax of pass A in the stream scorers of up to 64 rows: what those of fp8 and of 16-bit caches
 * have in common. A row's keys are spread over the whole group: a thread has keys g and g + 8 of
 * its warp's sixteen and of every eight rows 2t and 2t + 1, z[j][c] with c = 2 * (key is g + 8) +
 * (row is odd).
 *
 * Rows' bases and top keys lie in shared memory. `room_type` is what the group has there: weights,
 * and of each row base, shift, top, key, factor, joins and hidden.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_SOFTMAX_CUH
#define DKV_KERNELS_CUDA_STREAM_SOFTMAX_CUH

#include "kernels/cuda/fast_merge.cuh"

namespace dkv_fast
{

/* ---- logits ---- */

/* How dot products become octaves: `factor` times them, after rule.apply() unless it is `plain`. */
struct logit_factor {
    float factor;
    bool plain;

    __device__ __forceinline__ explicit logit_factor(const logit_rule &rule)
        : plain(rule.cap == 0.0f)
    {
        factor = plain ? rule.to_octaves : 1.0f;
    }
};

/* -inf where a row of the thread does not see a key of the tile at `first_key`. The last tiles of a
 * unit alone. */
template <class S>
__device__ __forceinline__ void hide_keys(const job &work, int first_key, const place<S> &at,
                                          float (&z)[S::COLUMNS][4])
{
    const int key = first_key + 16 * at.warp + at.g;
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int last = last_key_of(work,
                                         work.item.row_group * S::ROWS + 8 * j + 2 * at.t + e);
            z[j][e] = key > last ? -INFINITY : z[j][e];
            z[j][2 + e] = key + 8 > last ? -INFINITY : z[j][2 + e];
        }
}

/* Tiles before this one of an item have logits that are dot products times a factor, all of which
 * count. */
__device__ __forceinline__ int plain_tiles(const job &work)
{
    const logit_rule rule(work);
    const int open = rule.open_keys - static_cast<int>(item_first_key(work.item));
    return logit_factor(rule).plain ? open / TILE : 0;
}

/* Logits / factor of a tile that is not plain. */
template <class S>
__device__ __forceinline__ void make_logits(const job &work, int tile, const place<S> &at,
                                            float (&z)[S::COLUMNS][4])
{
    const logit_rule rule(work);
    const int first_key = item_first_key(work.item) + tile * TILE;
    if (!logit_factor(rule).plain)
        rule.template apply<S::COLUMNS, 4>(z);
    if (first_key + TILE > rule.open_keys)
        hide_keys<S>(work, first_key, place<S>(here(at.thread)), z);
}

/* ---- sums and weights ---- */

/* The sum of a thread's weights of a tile from which on bases are raised: one that is larger would
 * not be an fp16 number. Those of a tile after that are 1 at most, so that it is rare. So a key
 * that is not its row's top key has at most 48 times its weight, and the plain form p / (1 - p) is
 * safe for it. */
constexpr float LARGE = 48.0f;

/* A thread's weights of a tile, by row. */
template <class S> struct tile_sums {
    float exact[S::COLUMNS][2];
    float rounded[S::COLUMNS][2];
};

/* What a thread has of the sums. */
template <class S> struct group_sums {
    float exact[S::COLUMNS][2]; /* of its keys */
    float rounded[S::COLUMNS][2];
    float output[S::DIM / 64][S::COLUMNS][4];

    __device__ __forceinline__ void clear(void)
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                exact[j][e] = rounded[j][e] = 0.0f;
#pragma unroll
        for (int m = 0; m < S::DIM / 64; m++)
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++)
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

    __device__ __forceinline__ void add(const tile_sums<S> &tile)
    {
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                exact[j][e] += tile.exact[j][e];
                rounded[j][e] += tile.rounded[j][e];
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

/* Rows have no key yet. */
template <class S, class room_type>
__device__ __forceinline__ void clear_rows(room_type &room, const place<S> &at)
{
    if (at.thread >= S::ROWS)
        return;
    room.base[at.thread] = NO_KEY;
    room.shift[at.thread] = S::WEIGHT_SHIFT - NO_KEY;
    room.top[at.thread] = NO_KEY;
    room.key[at.thread] = -1;
}

/* WEIGHT_SHIFT - base of the thread's rows. */
template <class S> struct row_shifts {
    float2 of[S::COLUMNS];

    template <class room_type>
    __device__ __forceinline__ void load(const room_type &room, const place<S> &at)
    {
        const uint32_t from = shared_address(room.shift) + 8 * at.t;
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
            of[j] = load_shared_pair(from + 32 * j);
    }
};

/* Where the lane's rows of the four matrices go that the warp stores at once: keys g and g + 8 of
 * columns j and j + 1. */
template <class S> __device__ __forceinline__ uint32_t weights_offset(const place<S> &at)
{
    const int matrix = at.lane / 8;
    const int key = at.lane % 8;
    return (2 * at.warp + matrix % 2) * 1024 + key * 128 + ((matrix / 2 ^ key) << 4);
}

/* ---- raising bases ---- */

/* Logits of a tile across threads, in the place of the weights, which are void. */
template <class S, class room_type>
__device__ __forceinline__ void share_logits(room_type &room, const float (&z)[S::COLUMNS][4],
                                             float factor, const place<S> &at)
{
    const int my_key = 16 * at.warp + at.g;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int row = 2 * at.t + (c & 1);
        const uint32_t to = shared_address(room.weights) + slot_row(row) +
                            4 * ((my_key + 8 * (c >> 1)) ^ slot_permutation(row));
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++)
            store_shared(to + slot_row(8 * j), __float_as_uint(z[j][c] * factor));
    }
}

/* Decides for one row, of which the thread has KEYS logits: the largest becomes the top key, if it
 * is above it; the base goes up to the largest of the others, and the old top key joins them. */
template <class S, class room_type>
__device__ __forceinline__ void raise_row(room_type &room, const row_share<S> &mine, int tile_key)
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
    const bool raises = largest > base + 0.5f;
    const bool replaces = raises && largest > top;
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
    /* An octave more than must be, if the top key allows it, so that it is less often done again.
     */
    const float raised = !raises    ? base
                         : replaces ? fminf(fmaxf(rest, top) + 1.0f, largest)
                                    : fminf(largest + 1.0f, top);
    room.base[mine.row] = raised;
    room.shift[mine.row] = S::WEIGHT_SHIFT - raised;
    room.factor[mine.row] = exp2_fast(base - raised);
    room.joins[mine.row] = replaces && had_key ? S::WEIGHT_ONE * exp2_fast(top - raised) : 0.0f;
    room.hidden[mine.row] = replaces ? key : -1;
    if (replaces) {
        room.top[mine.row] = largest;
        room.key[mine.row] = tile_key + key;
    }
}

/* ---- a chunk's end ---- */

/* A chunk's sums across threads, in the same place; the group must meet before and after. */
template <class S, class room_type>
__device__ __forceinline__ void share_sums(room_type &room, const group_sums<S> &state,
                                           const place<S> &at)
{
    const uint32_t to_sums = shared_address(room.weights) + 4 * (8 * at.warp + at.g);
#pragma unroll
    for (int j = 0; j < S::COLUMNS; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t to = to_sums + (8 * j + 2 * at.t + e) * 128;
            store_shared(to, __float_as_uint(state.exact[j][e]));
            store_shared(to + S::ROWS * 128, __float_as_uint(state.rounded[j][e]));
        }
}

/* Closes one row of the chunk, of whose sums the thread has a part: as store_rows(). */
template <class S, class room_type>
__device__ __forceinline__ void close_row(room_type &room, const row_share<S> &mine,
                                          unsigned char *partial)
{
    constexpr int SHARERS = row_share<S>::SHARERS;
    const uint32_t from = shared_address(room.weights) + mine.row * 128;
    float sum = 0.0f;
    float rounded = 0.0f;
#pragma unroll
    for (int i = 0; i < 32 / SHARERS; i++) {
        const uint32_t part = from + 4 * (mine.part * (32 / SHARERS) + i);
        sum += load_shared_float(part);
        rounded += load_shared_float(part + S::ROWS * 128);
    }
#pragma unroll
    for (int lanes = 1; lanes < SHARERS; lanes *= 2) {
        sum += __shfl_xor_sync(~0u, sum, lanes);
        rounded += __shfl_xor_sync(~0u, rounded, lanes);
    }
    const float scale = (rounded > 0.0f ? sum / rounded : 1.0f) * (1.0f / S::WEIGHT_ONE);
    sum *= 1.0f / S::WEIGHT_ONE;
    const float top = room.top[mine.row];
    const float base = room.base[mine.row];
    const float below = exp2_fast(base - top); /* NO_KEY both: 1 */
    const bool joins = sum * below >= 0.125f;
    if (mine.part != 0)
        return;
    room.factor[mine.row] = (joins ? below : 1.0f) * scale;
    room.joins[mine.row] = joins ? 1.0f : 0.0f;
    const partial_head head = {top, joins ? top : base, joins ? fmaf(sum, below, 1.0f) : -sum,
                               room.key[mine.row]};
    __stcg(reinterpret_cast<float4 *>(partial) + mine.row,
           *reinterpret_cast<const float4 *>(&head));
}

} // namespace dkv_fast

#endif
