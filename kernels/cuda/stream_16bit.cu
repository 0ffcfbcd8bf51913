/* Host side of 16-bit caches of up to 64 rows in the stream scorer: which blocks it takes, the work
 * lists, the launches. What stream_scorer.cu says of chunks and ranges holds here, too; but they
 * are those of groups of four warps, several of which share a multiprocessor.
 */
#include <string.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/stream_16bit_pass_a.cuh"
#include "kernels/cuda/stream_16bit_pass_b.cuh"

namespace dkv_stream_16bit
{

/* Merges a slice of a row group: one for each of its chunks. */
template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_16bit_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    __shared__ job work;
    __shared__ merge_room room;
    const dkv_fast_item item = args.items[blockIdx.x];
    if (threadIdx.x < 32) {
        copy_words_of(work.unit, args.units + item.unit, threadIdx.x);
        copy_words_of(work.block, args.blocks + item.block, threadIdx.x);
        if (threadIdx.x == 0)
            work.item = item;
    }
    __syncthreads();
    if (threadIdx.x == 0 && item.chunk == 0)
        *work.unit.exponent = DKV_CU_EXPONENT;
    griddepcontrol_wait();
    merge_slice<S>(room, work, partials_of<S>(work), item.chunk, item.chunks, threadIdx.x);
#endif
}

} // namespace dkv_stream_16bit

namespace
{

using dkv_stream_16bit::stream_args;
using dkv_stream_16bit::tiles_of;

constexpr uint32_t ROWS_MAX = 64; /* more are stream_scorer.cu's */
/* Blocks of few rows and keys are the fast scorer's, which reads K and V of short ones once. */
constexpr uint32_t FAST_ROWS = 32;
constexpr uint32_t FAST_KEYS = 98304;
constexpr uint32_t CHUNK_KEYS_MIN = 512;
constexpr uint32_t CHUNKS_MAX = 128; /* of a unit and row group */
constexpr uint32_t CHUNKS_LEAST = 8; /* the same, if it is long enough */

/* One compiled set of kernels. */
struct variant {
    uint32_t head_dim;
    uint32_t rows;
    uint32_t dtype;
    uint32_t groups;        /* of a thread block */
    uint32_t chunks_enough; /* of a block */
    uint32_t threads;
    const void *a;
    const void *merge;
    const void *b;
    size_t a_bytes;
    size_t b_bytes;
    size_t partial_bytes;
    size_t merged_bytes;
};

template <class type, int head_dim, int rows_per_thread> variant make_variant(uint32_t dtype)
{
    using S = dkv_stream_16bit::shape<type, head_dim, rows_per_thread>;
    constexpr size_t a_bytes = S::GROUPS * sizeof(dkv_stream_16bit::room_a<S>);
    constexpr size_t b_bytes = S::GROUPS * sizeof(dkv_stream_16bit::room_b<S>);
    static_assert(a_bytes <= 232448 && b_bytes <= 232448, "shared memory of one thread block");
    return {head_dim,
            S::ROWS,
            dtype,
            S::GROUPS,
            128 * S::GROUPS,
            S::THREADS,
            reinterpret_cast<const void *>(dkv_stream_16bit::stream_16bit_a<S>),
            reinterpret_cast<const void *>(dkv_stream_16bit::stream_16bit_merge<S>),
            reinterpret_cast<const void *>(dkv_stream_16bit::stream_16bit_b<S>),
            a_bytes,
            b_bytes,
            S::PARTIAL_BYTES,
            sizeof(dkv_fast::merged<S>)};
}

const variant variants[] = {
    make_variant<dkv_fast::bf16_type, 128, 1>(DKV_BF16),
    make_variant<dkv_fast::bf16_type, 128, 2>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 128, 1>(DKV_FP16),
    make_variant<dkv_fast::fp16_type, 128, 2>(DKV_FP16),
    make_variant<dkv_fast::bf16_type, 64, 1>(DKV_BF16),
    make_variant<dkv_fast::bf16_type, 64, 2>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 64, 1>(DKV_FP16),
    make_variant<dkv_fast::fp16_type, 64, 2>(DKV_FP16),
};
constexpr uint32_t N_VARIANTS = sizeof(variants) / sizeof(variants[0]);

uint32_t rows_of(const struct dkv_cu_block *block)
{
    return block->group * block->window;
}

const variant *find_variant(const struct dkv_cu_block *block)
{
    const uint32_t rows = rows_of(block) <= 32 ? 32 : 64;
    for (const variant &v : variants) {
        if (v.head_dim == block->head_dim && v.rows == rows && v.dtype == block->k.dtype)
            return &v;
    }
    return nullptr;
}

uint32_t row_groups(const struct dkv_cu_block *block)
{
    const uint32_t held = find_variant(block)->rows;
    return (rows_of(block) + held - 1) / held;
}

/* Keys of a chunk: a multiple of the tile. */
uint32_t chunk_keys(const struct dkv_cu_block *block)
{
    const uint32_t n = block->n_valid;
    uint32_t chunks = find_variant(block)->chunks_enough / (block->heads * row_groups(block));
    chunks = chunks > CHUNKS_MAX ? CHUNKS_MAX : chunks < CHUNKS_LEAST ? CHUNKS_LEAST : chunks;
    const uint32_t keys = (n + chunks - 1) / chunks;
    return dkv_fast::TILE * tiles_of(keys < CHUNK_KEYS_MIN ? CHUNK_KEYS_MIN : keys);
}

uint32_t chunks_of(const struct dkv_cu_block *block)
{
    const uint32_t keys = chunk_keys(block);
    return (block->n_valid + keys - 1) / keys;
}

/* The work lists of one launch, as they lie in the extra data. */
struct launch_list {
    uint32_t items; /* pass A's, row after row of the grid; 0: the variant is not launched */
    uint32_t a_turns;
    uint32_t b_turns;
    uint32_t a_at; /* bytes from the start of the plan */
    uint32_t b_at;
};

struct launch_plan {
    launch_list of[N_VARIANTS];
};

uint32_t grid_of(const struct dkv_cu_device *device)
{
    return static_cast<uint32_t>(device->multiprocessors);
}

/* Groups of the device, which take items in turn. */
uint32_t width_of(const struct dkv_cu_device *device, const variant &v)
{
    return grid_of(device) * v.groups;
}

/* Pass A's items of one variant in order; how many. Writes them if there is a place for them. */
uint32_t list_chunks(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
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

/* Pass B's items: of all tiles in order, as often as their units have row groups, every group gets
 * an equal share. A unit's row groups follow each other there, since they add up scores. The number
 * of turns; writes items if there is a place for them. */
uint32_t list_ranges(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                     const variant *which, uint32_t width, struct dkv_fast_item *items)
{
    uint64_t all = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const struct dkv_cu_block *block = &wave->blocks_host[wave->units_host[u].block];
        if (find_variant(block) == which)
            all += static_cast<uint64_t>(tiles_of(block->n_valid)) * row_groups(block);
    }
    uint32_t turns = 0;
    uint64_t before = 0; /* tiles of units before this one */
    uint32_t share = 0;
    uint32_t turn = 0; /* of this share */
    for (uint32_t u = first; u < first + n; u++) {
        const uint32_t b = wave->units_host[u].block;
        const struct dkv_cu_block *block = &wave->blocks_host[b];
        if (find_variant(block) != which)
            continue;
        const uint32_t tiles = tiles_of(block->n_valid);
        const uint32_t groups = row_groups(block);
        for (uint32_t tile = 0; tile < tiles;) {
            const uint64_t limit = all * (share + 1) / width; /* where it ends */
            const uint64_t end = (limit - before) / groups;
            const uint32_t last = end < tiles ? static_cast<uint32_t>(end) : tiles;
            for (uint32_t g = 0; last > tile && g < groups; g++, turn++) {
                if (items)
                    items[turn * width + share] = {u,
                                                   b,
                                                   0,
                                                   dkv_fast::TILE,
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
    }
    return turns;
}

/* Fills a plan but for the items; its size in all. */
size_t make_plan(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
                 uint32_t n, launch_plan *plan)
{
    size_t at = sizeof(*plan);
    for (uint32_t v = 0; v < N_VARIANTS; v++) {
        const uint32_t width = width_of(device, variants[v]);
        launch_list &list = plan->of[v];
        list.items = list_chunks(wave, first, n, &variants[v], nullptr);
        list.a_turns = (list.items + width - 1) / width;
        list.b_turns = list.items ? list_ranges(wave, first, n, &variants[v], width, nullptr) : 0;
        list.a_at = static_cast<uint32_t>(at);
        at += list.a_turns * width * sizeof(struct dkv_fast_item);
        list.b_at = static_cast<uint32_t>(at);
        at += list.b_turns * width * sizeof(struct dkv_fast_item);
    }
    return at;
}

/* Whether the kernels that this device loaded have a body, see fast_scorer.cu. */
bool kernels_are_real;

cudaError_t prepare(const struct dkv_cu_device *device)
{
    if (device->major != 9)
        return cudaSuccess;
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, variants[0].a);
    if (error != cudaSuccess)
        return error;
    kernels_are_real = attributes.numRegs >= 64;
    for (uint32_t v = 0; kernels_are_real && v < N_VARIANTS; v++) {
        error = cudaFuncSetAttribute(variants[v].a, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(variants[v].a_bytes));
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(variants[v].b, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(variants[v].b_bytes));
        if (error == cudaSuccess) /* loads it now, not at its first launch */
            error = cudaFuncGetAttributes(&attributes, variants[v].merge);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

bool takes_any_length(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return kernels_are_real && device->major == 9 && device->shared_bytes_max >= 232448 &&
           rows_of(block) <= ROWS_MAX && find_variant(block) && block->v.dtype == block->k.dtype &&
           block->q_dtype == block->k.dtype && block->q_align >= 4 &&
           block->v_dim == block->head_dim && block->k.align >= 16 && block->v.align >= 16 &&
           block->eps == 0.0f && block->p_round == 0 && block->gqa != DKV_GQA_MAX &&
           block->nonfinite == DKV_NONFINITE_ERROR;
}

bool takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return (rows_of(block) > FAST_ROWS || block->n_valid > FAST_KEYS) &&
           takes_any_length(device, block);
}

size_t unit_bytes(const struct dkv_cu_block *block)
{
    const variant *v = find_variant(block);
    return row_groups(block) * (v->merged_bytes + chunks_of(block) * v->partial_bytes);
}

size_t extra_bytes(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                   uint32_t first, uint32_t n)
{
    launch_plan plan;
    return make_plan(device, wave, first, n, &plan);
}

void fill(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
          uint32_t n, void *extra)
{
    launch_plan *plan = static_cast<launch_plan *>(extra);
    unsigned char *bytes = static_cast<unsigned char *>(extra);
    const size_t size = make_plan(device, wave, first, n, plan);
    memset(bytes + sizeof(*plan), 0, size - sizeof(*plan));
    for (uint32_t v = 0; v < N_VARIANTS; v++) {
        const launch_list &list = plan->of[v];
        if (list.items == 0)
            continue;
        list_chunks(wave, first, n, &variants[v],
                    reinterpret_cast<struct dkv_fast_item *>(bytes + list.a_at));
        list_ranges(wave, first, n, &variants[v], width_of(device, variants[v]),
                    reinterpret_cast<struct dkv_fast_item *>(bytes + list.b_at));
    }
}

cudaError_t launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                   uint32_t first, uint32_t n, const void *extra_host, const void *extra_device,
                   cudaStream_t stream)
{
    (void)first, (void)n;
    const launch_plan *plan = static_cast<const launch_plan *>(extra_host);
    const unsigned char *bytes = static_cast<const unsigned char *>(extra_device);
    const uint32_t grid = grid_of(device);
    cudaError_t error = cudaSuccess;
    for (uint32_t i = 0; error == cudaSuccess && i < N_VARIANTS; i++) {
        const launch_list &list = plan->of[i];
        const variant &v = variants[i];
        if (list.items == 0)
            continue;
        stream_args args = {wave->blocks, wave->units,
                            reinterpret_cast<const struct dkv_fast_item *>(bytes + list.a_at),
                            list.a_turns};
        error = dkv_cu_launch(v.a, grid, v.threads, v.a_bytes, args, false, stream);
        if (error == cudaSuccess)
            error = dkv_cu_launch(v.merge, list.items, dkv_fast::GROUP_THREADS, 0, args, true,
                                  stream);
        args.items = reinterpret_cast<const struct dkv_fast_item *>(bytes + list.b_at);
        args.turns = list.b_turns;
        if (error == cudaSuccess)
            error = dkv_cu_launch(v.b, grid, v.threads, v.b_bytes, args, true, stream);
    }
    return error;
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit;
const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit = {
    "stream-16bit", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch,
};
/* The same for every length: what tests name to have blocks scored that are the fast scorer's. */
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit_any;
const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit_any = {
    "stream-16bit", prepare, takes_any_length, unit_bytes, nullptr, extra_bytes, fill, launch,
};
}
