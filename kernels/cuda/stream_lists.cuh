/* The work lists of the stream scorer, and what they depend on: which kernels are a block's, and
 * how its keys are cut into chunks.
 *
 * Pass A's chunks depend on their block alone, so that an answer never depends on what else is in
 * the batch: as many as give a large device something to do, with CHUNK_KEYS_MIN keys each at
 * least, for each begins and ends with what a tile or two take. Pass B scores every key by itself,
 * so its ranges are whatever shares the tiles out evenly.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_LISTS_CUH
#define DKV_KERNELS_CUDA_STREAM_LISTS_CUH

#include "kernels/cuda/stream_few_shape.cuh"
#include "kernels/cuda/stream_variant.cuh"

namespace dkv_stream_lists
{

using dkv_stream::tiles_of;
using variant = dkv_stream_variant;

constexpr uint32_t CHUNK_KEYS_MIN = 512;
constexpr uint32_t CHUNKS_MAX = 32;                     /* of a unit and row group */
constexpr uint32_t CHUNKS_LEAST = 8;                    /* the same, if it is long enough */
constexpr uint32_t FEW_CHUNKS_LEAST = 4;                /* the same of few rows */
constexpr uint32_t CHUNKS_ENOUGH = 128;                 /* of a block */
constexpr uint32_t FOR_MERGES = 4;                      /* multiprocessors, of few rows */
constexpr uint32_t ROWS_HELD = 64 * dkv_stream::GROUPS; /* by kernels that are not for few rows */

/* All kernels, those for few rows first; NULL behind the last one. */
const variant *variant_at(uint32_t number);

inline bool is_few(const variant *v)
{
    return v->rows < ROWS_HELD;
}

inline uint32_t rows_of(const struct dkv_cu_block *block)
{
    return block->group * block->window;
}

/* The kernels for a block: of its types, those for the fewest rows that are enough; or NULL. */
inline const variant *find_variant(const struct dkv_cu_block *block)
{
    const uint32_t rows = rows_of(block) < ROWS_HELD ? rows_of(block) : ROWS_HELD;
    const variant *v;
    for (uint32_t number = 0; (v = variant_at(number)) != nullptr; number++) {
        if (v->dtype == block->k.dtype && v->head_dim == block->head_dim && rows <= v->rows)
            break;
    }
    return v;
}

inline uint32_t row_groups(const struct dkv_cu_block *block)
{
    return (rows_of(block) + ROWS_HELD - 1) / ROWS_HELD;
}

/* Keys of a chunk: a multiple of the tile, for few rows of two. */
inline uint32_t chunk_keys(const struct dkv_cu_block *block)
{
    const bool few = is_few(find_variant(block));
    const uint32_t most = few ? static_cast<uint32_t>(dkv_stream::FEW_CHUNKS_MAX) : CHUNKS_MAX;
    const uint32_t least = few ? FEW_CHUNKS_LEAST : CHUNKS_LEAST;
    uint32_t chunks = CHUNKS_ENOUGH / (block->heads * row_groups(block));
    chunks = chunks > most ? most : chunks < least ? least : chunks;
    uint32_t keys = (block->n_valid + chunks - 1) / chunks;
    keys = keys < CHUNK_KEYS_MIN ? CHUNK_KEYS_MIN : keys;
    return few ? dkv_stream::padded_keys(keys) : dkv_fast::TILE * tiles_of(keys);
}

inline uint32_t chunks_of(const struct dkv_cu_block *block)
{
    const uint32_t keys = chunk_keys(block);
    return (block->n_valid + keys - 1) / keys;
}

/* Thread blocks of a pass. For few rows some multiprocessors are left to the merge, so that pass B
 * finds its own as soon as pass A leaves them. */
inline uint32_t grid_of(const struct dkv_cu_device *device, const variant *v)
{
    const uint32_t all = static_cast<uint32_t>(device->multiprocessors);
    return is_few(v) && all > FOR_MERGES ? all - FOR_MERGES : all;
}

/* Pass A's items of one variant in order; how many. Writes them if there is a place for them. */
inline uint32_t list_chunks(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                            const variant *which, struct dkv_fast_item *items)
{
    uint32_t count = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const uint32_t b = wave->units_host[u].block;
        const struct dkv_cu_block *block = &wave->blocks_host[b];
        if (find_variant(block) != which)
            continue;
        const uint32_t keys = chunk_keys(block);
        const uint32_t chunks = chunks_of(block);
        for (uint32_t g = 0; g < row_groups(block); g++) {
            for (uint32_t c = 0; items && c < chunks; c++)
                items[count + c] = {
                    u, b, 0, keys, static_cast<uint16_t>(c), static_cast<uint16_t>(chunks), g};
            count += chunks;
        }
    }
    return count;
}

/* Tiles of a chunk. */
inline uint32_t chunk_tiles(const struct dkv_cu_block *block, uint32_t chunk)
{
    const uint32_t first = chunk * chunk_keys(block);
    const uint32_t left = block->n_valid - first;
    return tiles_of(left < chunk_keys(block) ? left : chunk_keys(block));
}

/* The same for few rows: every thread block gets a part of all of them in order, of about as many
 * tiles as another, so that chunks of a unit follow each other, and pass B's last items are pass
 * A's first. The number of turns. */
inline uint32_t list_few(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                         const variant *which, uint32_t grid, struct dkv_fast_item *items)
{
    uint64_t all = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const struct dkv_cu_block *block = &wave->blocks_host[wave->units_host[u].block];
        if (find_variant(block) == which)
            all += tiles_of(block->n_valid);
    }
    uint32_t turns = 0;
    uint64_t before = 0; /* tiles */
    uint32_t thread_block = 0;
    uint32_t turn = 0; /* of this thread block */
    for (uint32_t u = first; u < first + n; u++) {
        const uint32_t b = wave->units_host[u].block;
        const struct dkv_cu_block *block = &wave->blocks_host[b];
        if (find_variant(block) != which)
            continue;
        const uint32_t chunks = chunks_of(block);
        for (uint32_t c = 0; c < chunks; c++, turn++) {
            const uint32_t tiles = chunk_tiles(block, c);
            const uint32_t at = static_cast<uint32_t>((2 * before + tiles) * grid / (2 * all));
            if (at != thread_block)
                turn = 0;
            thread_block = at;
            before += tiles;
            turns = turn + 1 > turns ? turn + 1 : turns;
            if (items)
                items[turn * grid + at] = {u,
                                           b,
                                           0,
                                           chunk_keys(block),
                                           static_cast<uint16_t>(c),
                                           static_cast<uint16_t>(chunks),
                                           0};
        }
    }
    return turns;
}

/* For few rows, the parts of merges, a thread block each; how many. item.row_group is how many
 * parts a unit has. */
inline uint32_t list_merges(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                            const variant *which, struct dkv_fast_item *items)
{
    const uint32_t most = which->rows * which->head_dim / (8 * dkv_fast::GROUP_THREADS);
    uint32_t count = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const uint32_t b = wave->units_host[u].block;
        const struct dkv_cu_block *block = &wave->blocks_host[b];
        if (find_variant(block) != which)
            continue;
        uint32_t slices = most;
        while (slices > chunks_of(block))
            slices /= 2;
        for (uint32_t s = 0; items && s < slices; s++)
            items[count + s] = {
                u,     b, 0, 0, static_cast<uint16_t>(s), static_cast<uint16_t>(chunks_of(block)),
                slices};
        count += slices;
    }
    return count;
}

/* Pass B's items: of all tiles (for few rows, pairs) in order, as often as their units have row
 * groups, every thread block gets an equal share. A unit's row groups follow each other on the same
 * thread block, which adds up scores. The number of turns; writes items if there is a place for
 * them. */
inline uint32_t list_ranges(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                            const variant *which, uint32_t grid, struct dkv_fast_item *items)
{
    const uint32_t keys = (is_few(which) ? dkv_stream::GROUPS : 1) * dkv_fast::TILE;
    uint64_t all = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const struct dkv_cu_block *block = &wave->blocks_host[wave->units_host[u].block];
        if (find_variant(block) == which)
            all += static_cast<uint64_t>((block->n_valid + keys - 1) / keys) * row_groups(block);
    }
    uint32_t turns = 0;
    uint64_t before = 0; /* tiles of units before this one */
    uint32_t thread_block = 0;
    uint32_t turn = 0; /* of this thread block */
    for (uint32_t u = first; u < first + n; u++) {
        const uint32_t b = wave->units_host[u].block;
        const struct dkv_cu_block *block = &wave->blocks_host[b];
        if (find_variant(block) != which)
            continue;
        const uint32_t tiles = (block->n_valid + keys - 1) / keys;
        const uint32_t groups = row_groups(block);
        for (uint32_t tile = 0; tile < tiles;) {
            const uint64_t limit = all * (thread_block + 1) / grid; /* where its share ends */
            const uint64_t end = (limit - before) / groups;
            const uint32_t last = end < tiles ? static_cast<uint32_t>(end) : tiles;
            for (uint32_t g = 0; last > tile && g < groups; g++, turn++) {
                if (items)
                    items[turn * grid + thread_block] = {u,
                                                         b,
                                                         0,
                                                         keys,
                                                         static_cast<uint16_t>(tile),
                                                         static_cast<uint16_t>(last - tile),
                                                         g};
            }
            turns = turn > turns ? turn : turns;
            tile = last > tile ? last : tile;
            if (tile < tiles) {
                thread_block++;
                turn = 0;
            }
        }
        before += static_cast<uint64_t>(tiles) * groups;
    }
    return turns;
}

} // namespace dkv_stream_lists

#endif
