/* Host side that the stream scorers share: work lists and launches of three kernels each.
 *
 * Pass A's chunks depend on their block alone, so that an answer never depends on what else is in
 * the batch: as many as give a large device something to do, with CHUNK_KEYS_MIN keys each at
 * least, for each begins and ends with what a tile or two take. Pass B scores every key by itself,
 * so its ranges are whatever shares the tiles out evenly among those who take items: thread blocks,
 * or groups of four warps, several of which are in a thread block.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_LISTS_CUH
#define DKV_KERNELS_CUDA_STREAM_LISTS_CUH

#include <string.h>

#include "kernels/cuda/fast_plan.h"
#include "kernels/cuda/fast_shape.cuh"
#include "kernels/cuda/launch.cuh"

namespace dkv_stream_lists
{

constexpr uint32_t CHUNK_KEYS_MIN = 512;
constexpr uint32_t CHUNKS_LEAST = 8; /* of a unit and row group, if it is long enough */

/* One compiled set of kernels. */
struct variant {
    uint32_t type; /* what a scorer tells its variants apart by, besides the next two */
    uint32_t head_dim;
    uint32_t rows;          /* of a row group */
    uint32_t groups;        /* that take items, of a thread block */
    uint32_t threads;       /* of a thread block */
    uint32_t chunks_enough; /* of a block */
    uint32_t chunks_max;    /* of a unit and row group */
    uint32_t step;          /* keys of a tile of pass B */
    uint32_t slices;        /* that are merged for each chunk */
    uint32_t key_bytes;     /* of scratch for each key */
    uint32_t logit_bytes;   /* of scratch for each key and eight rows */
    const void *a;
    const void *merge;
    const void *b;
    size_t a_bytes; /* of shared memory */
    size_t b_bytes;
    size_t partial_bytes;
    size_t merged_bytes;
};

inline uint32_t rows_of(const struct dkv_cu_block *block)
{
    return block->group * block->window;
}

inline uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

inline uint32_t row_groups(const struct dkv_cu_block *block, const variant &v)
{
    return ceil_div(rows_of(block), v.rows);
}

/* Keys of a chunk: a multiple of pass A's tile. */
inline uint32_t chunk_keys(const struct dkv_cu_block *block, const variant &v)
{
    uint32_t chunks = v.chunks_enough / (block->heads * row_groups(block, v));
    chunks = chunks > v.chunks_max ? v.chunks_max : chunks < CHUNKS_LEAST ? CHUNKS_LEAST : chunks;
    const uint32_t keys = ceil_div(block->n_valid, chunks);
    return dkv_fast::TILE * ceil_div(keys < CHUNK_KEYS_MIN ? CHUNK_KEYS_MIN : keys, dkv_fast::TILE);
}

/* The work lists of one launch, as they lie in the extra data. */
struct launch_list {
    uint32_t items; /* pass A's, a row after the other; 0: the variant is not launched */
    uint32_t a_turns;
    uint32_t b_turns;
    uint32_t a_at; /* bytes from the start of the plan */
    uint32_t b_at;
};

/* The functions of a scorer's table. `family` has variants[]; find(block), which is null for what
 * none of them is made for; and has_body(registers of the first pass A), false of an empty kernel.
 */
template <class family> struct host {
    static constexpr uint32_t N = sizeof(family::variants) / sizeof(family::variants[0]);

    struct launch_plan {
        launch_list of[N];
    };

    /* Whether the kernels that this device loaded have a body, see fast_scorer.cu. */
    static inline bool kernels_are_real;

    static cudaError_t prepare(const struct dkv_cu_device *device)
    {
        if (device->major != 9)
            return cudaSuccess;
        struct cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, family::variants[0].a);
        if (error != cudaSuccess)
            return error;
        kernels_are_real = family::has_body(attributes.numRegs);
        for (uint32_t i = 0; kernels_are_real && i < N; i++) {
            const variant &v = family::variants[i];
            error = cudaFuncSetAttribute(v.a, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(v.a_bytes));
            if (error == cudaSuccess)
                error = cudaFuncSetAttribute(v.b, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(v.b_bytes));
            if (error == cudaSuccess) /* loads it now, not at its first launch */
                error = cudaFuncGetAttributes(&attributes, v.merge);
            if (error != cudaSuccess)
                return error;
        }
        return cudaSuccess;
    }

    static bool takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
    {
        return kernels_are_real && dkv_fast_takes_layout(device, block) && family::find(block);
    }

    /* What both pass B and the passes before it use, at the start of unit.work. */
    static size_t kept_bytes(const struct dkv_cu_block *block, const variant &v)
    {
        return row_groups(block, v) * v.merged_bytes +
               static_cast<size_t>(ceil_div(block->n_valid, v.step)) * v.step *
                   (v.key_bytes + ceil_div(rows_of(block), 8) * v.logit_bytes);
    }

    /* Partials follow it. */
    static size_t unit_bytes(const struct dkv_cu_block *block)
    {
        const variant &v = *family::find(block);
        const uint32_t chunks = ceil_div(block->n_valid, chunk_keys(block, v));
        return kept_bytes(block, v) + row_groups(block, v) * chunks * v.partial_bytes;
    }

    /* Where partials are: pass B, which alone writes scores, writes none before the whole of the
     * merge has ended, which alone reads partials (griddepcontrol_wait()). Whole lines, none of
     * which has merged rows as well. */
    static size_t scores_at(const struct dkv_cu_block *block)
    {
        return (kept_bytes(block, *family::find(block)) + 255) & ~static_cast<size_t>(255);
    }

    static uint32_t grid_of(const struct dkv_cu_device *device)
    {
        return static_cast<uint32_t>(device->multiprocessors);
    }

    /* Calls use(unit, index of its block, block) for the variant's units in order. */
    template <class function>
    static void for_each_unit(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                              const variant &v, function use)
    {
        for (uint32_t u = first; u < first + n; u++) {
            const uint32_t b = wave->units_host[u].block;
            if (family::find(&wave->blocks_host[b]) == &v)
                use(u, b, &wave->blocks_host[b]);
        }
    }

    /* Pass A's items of one variant in order; how many. Writes them if there is a place for them.
     */
    static uint32_t list_chunks(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                                const variant &v, struct dkv_fast_item *items)
    {
        uint32_t count = 0;
        for_each_unit(wave, first, n, v, [&](uint32_t u, uint32_t b, const dkv_cu_block *block) {
            const uint32_t keys = chunk_keys(block, v);
            const uint32_t chunks = ceil_div(block->n_valid, keys);
            for (uint32_t g = 0; g < row_groups(block, v); g++) {
                for (uint32_t c = 0; items && c < chunks; c++)
                    items[count + c] = {
                        u, b, 0, keys, static_cast<uint16_t>(c), static_cast<uint16_t>(chunks), g};
                count += chunks;
            }
        });
        return count;
    }

    /* Pass B's items: of all tiles in order, as often as their units have row groups, each of
     * `width` gets an equal share. A unit's row groups follow each other there, since they add up
     * scores. The number of turns; writes items if there is a place for them. */
    static uint32_t list_ranges(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                                const variant &v, uint32_t width, struct dkv_fast_item *items)
    {
        uint64_t all = 0;
        for_each_unit(wave, first, n, v, [&](uint32_t, uint32_t, const dkv_cu_block *block) {
            all += static_cast<uint64_t>(ceil_div(block->n_valid, v.step)) * row_groups(block, v);
        });
        uint32_t turns = 0;
        uint64_t before = 0; /* tiles of units before this one */
        uint32_t share = 0;
        uint32_t turn = 0; /* of this share */
        for_each_unit(wave, first, n, v, [&](uint32_t u, uint32_t b, const dkv_cu_block *block) {
            const uint32_t tiles = ceil_div(block->n_valid, v.step);
            const uint32_t groups = row_groups(block, v);
            for (uint32_t tile = 0; tile < tiles;) {
                const uint64_t limit = all * (share + 1) / width; /* where it ends */
                const uint64_t end = (limit - before) / groups;
                const uint32_t last = end < tiles ? static_cast<uint32_t>(end) : tiles;
                for (uint32_t g = 0; last > tile && g < groups; g++, turn++) {
                    if (items)
                        items[turn * width + share] = {u,
                                                       b,
                                                       0,
                                                       v.step,
                                                       static_cast<uint16_t>(tile),
                                                       static_cast<uint16_t>(last - tile),
                                                       g};
                }
                turns = turn > turns ? turn : turns;
                tile = last > tile ? last : tile;
                if (tile < tiles) {
                    share++;
                    turn = 0;
                }
            }
            before += static_cast<uint64_t>(tiles) * groups;
        });
        return turns;
    }

    /* Fills a plan but for the items; its size in all. */
    static size_t make_plan(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                            uint32_t first, uint32_t n, launch_plan *plan)
    {
        size_t at = sizeof(*plan);
        for (uint32_t i = 0; i < N; i++) {
            const variant &v = family::variants[i];
            const uint32_t width = grid_of(device) * v.groups;
            launch_list &list = plan->of[i];
            list.items = list_chunks(wave, first, n, v, nullptr);
            list.a_turns = ceil_div(list.items, width);
            list.b_turns = list.items ? list_ranges(wave, first, n, v, width, nullptr) : 0;
            list.a_at = static_cast<uint32_t>(at);
            at += list.a_turns * width * sizeof(struct dkv_fast_item);
            list.b_at = static_cast<uint32_t>(at);
            at += list.b_turns * width * sizeof(struct dkv_fast_item);
        }
        return at;
    }

    static size_t extra_bytes(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                              uint32_t first, uint32_t n)
    {
        launch_plan plan;
        return make_plan(device, wave, first, n, &plan);
    }

    static void fill(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                     uint32_t first, uint32_t n, void *extra)
    {
        launch_plan *plan = static_cast<launch_plan *>(extra);
        unsigned char *bytes = static_cast<unsigned char *>(extra);
        const size_t size = make_plan(device, wave, first, n, plan);
        memset(bytes + sizeof(*plan), 0, size - sizeof(*plan));
        for (uint32_t i = 0; i < N; i++) {
            const launch_list &list = plan->of[i];
            const variant &v = family::variants[i];
            if (list.items == 0)
                continue;
            list_chunks(wave, first, n, v,
                        reinterpret_cast<struct dkv_fast_item *>(bytes + list.a_at));
            list_ranges(wave, first, n, v, grid_of(device) * v.groups,
                        reinterpret_cast<struct dkv_fast_item *>(bytes + list.b_at));
        }
    }

    static cudaError_t launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                              uint32_t, uint32_t, const void *extra_host, const void *extra_device,
                              cudaStream_t stream)
    {
        const launch_plan *plan = static_cast<const launch_plan *>(extra_host);
        const unsigned char *bytes = static_cast<const unsigned char *>(extra_device);
        const uint32_t grid = grid_of(device);
        cudaError_t error = cudaSuccess;
        for (uint32_t i = 0; error == cudaSuccess && i < N; i++) {
            const launch_list &list = plan->of[i];
            const variant &v = family::variants[i];
            if (list.items == 0)
                continue;
            dkv_stream_args args = {wave->blocks, wave->units,
                                    reinterpret_cast<const dkv_fast_item *>(bytes + list.a_at),
                                    list.a_turns};
            error = dkv_cu_launch(v.a, grid, v.threads, v.a_bytes, args, false, stream);
            if (error == cudaSuccess)
                error = dkv_cu_launch(v.merge, list.items * v.slices, dkv_fast::GROUP_THREADS, 0,
                                      args, true, stream);
            args.items = reinterpret_cast<const dkv_fast_item *>(bytes + list.b_at);
            args.turns = list.b_turns;
            if (error == cudaSuccess)
                error = dkv_cu_launch(v.b, grid, v.threads, v.b_bytes, args, true, stream);
        }
        return error;
    }
};

} // namespace dkv_stream_lists

#endif
