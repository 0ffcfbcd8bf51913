/* Host side of the stream scorer: which blocks it takes, the work lists, the launches.
 *
 * Pass A's chunks depend on their block alone, so that an answer never depends on what else is in
 * the batch: as many as give a large device something to do, with CHUNK_KEYS_MIN keys each at
 * least, for each begins and ends with what a tile or two take. Pass B
 * scores every key by itself, so its ranges are whatever shares the tiles out evenly.
 */
#include <string.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/stream_kernel_b.cuh"

namespace dkv_stream
{

/* Merges a slice of a row group: SLICES for each of its chunks. */
template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    __shared__ job work;
    __shared__ merge_room room;
    const dkv_fast_item item = args.items[blockIdx.x / SLICES];
    const int slice = item.chunk * SLICES + blockIdx.x % SLICES;
    if (threadIdx.x < 32) {
        copy_words(work.unit, args.units + item.unit, threadIdx.x);
        copy_words(work.block, args.blocks + item.block, threadIdx.x);
        if (threadIdx.x == 0)
            work.item = item;
    }
    __syncthreads();
    if (threadIdx.x == 0 && slice == 0)
        *work.unit.exponent = DKV_CU_EXPONENT;
    griddepcontrol_wait();
    merge_slice<S>(room, work, partials_of<S>(work), slice, item.chunks * SLICES, threadIdx.x);
#endif
}

} // namespace dkv_stream

namespace
{

using dkv_stream::stream_args;
using dkv_stream::tiles_of;

constexpr uint32_t CHUNK_KEYS_MIN = 512;
constexpr uint32_t CHUNKS_MAX = 32;     /* of a unit and row group */
constexpr uint32_t CHUNKS_LEAST = 8;    /* the same, if it is long enough */
constexpr uint32_t CHUNKS_ENOUGH = 128; /* of a block */
constexpr uint32_t ROWS_MIN = 65;       /* fewer are the fast scorer's */

/* One compiled set of kernels. */
struct variant {
    uint32_t dtype;
    uint32_t head_dim;
    const void *a;
    const void *merge;
    const void *b;
    size_t a_bytes;
    size_t b_bytes;
    size_t partial_bytes;
    size_t merged_bytes;
};

template <class type, int head_dim> variant make_variant(uint32_t dtype)
{
    using S = dkv_stream::stream_shape<type, head_dim>;
    using B = dkv_stream::shape_b<S>;
    static_assert(sizeof(dkv_stream::shared_a<S>) <= 232448 &&
                      sizeof(dkv_stream::shared_b<B>) <= 232448,
                  "shared memory of one thread block");
    return {dtype,
            head_dim,
            reinterpret_cast<const void *>(dkv_stream::stream_a<S>),
            reinterpret_cast<const void *>(dkv_stream::stream_merge<S>),
            reinterpret_cast<const void *>(dkv_stream::stream_b<B>),
            sizeof(dkv_stream::shared_a<S>),
            sizeof(dkv_stream::shared_b<B>),
            S::PARTIAL_BYTES,
            sizeof(dkv_fast::merged<S>)};
}

const variant variants[] = {
    make_variant<dkv_fast::bf16_type, 128>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 128>(DKV_FP16),
    make_variant<dkv_fast::bf16_type, 64>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 64>(DKV_FP16),
};
constexpr uint32_t N_VARIANTS = sizeof(variants) / sizeof(variants[0]);

uint32_t rows_of(const struct dkv_cu_block *block)
{
    return block->group * block->window;
}

const variant *find_variant(const struct dkv_cu_block *block)
{
    for (const variant &v : variants) {
        if (v.dtype == block->k.dtype && v.head_dim == block->head_dim)
            return &v;
    }
    return nullptr;
}

uint32_t row_groups(const struct dkv_cu_block *block)
{
    constexpr uint32_t held = 64 * dkv_stream::GROUPS;
    return (rows_of(block) + held - 1) / held;
}

/* Keys of a chunk: a multiple of the tile. */
uint32_t chunk_keys(const struct dkv_cu_block *block)
{
    const uint32_t n = block->n_valid;
    uint32_t chunks = CHUNKS_ENOUGH / (block->heads * row_groups(block));
    chunks = chunks > CHUNKS_MAX ? CHUNKS_MAX : chunks < CHUNKS_LEAST ? CHUNKS_LEAST : chunks;
    const uint32_t keys = (n + chunks - 1) / chunks;
    return dkv_fast::TILE *
           (((keys < CHUNK_KEYS_MIN ? CHUNK_KEYS_MIN : keys) + dkv_fast::TILE - 1) /
            dkv_fast::TILE);
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

/* Pass B's items: of all tiles in order, as often as their units have row groups, every thread
 * block gets an equal share. A unit's row groups follow each other on the same thread block, which
 * adds up scores. The number of turns; writes items if there is a place for them. */
uint32_t list_ranges(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n,
                     const variant *which, uint32_t grid, struct dkv_fast_item *items)
{
    uint64_t all = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const struct dkv_cu_block *block = &wave->blocks_host[wave->units_host[u].block];
        if (find_variant(block) == which)
            all += static_cast<uint64_t>(tiles_of(block->n_valid)) * row_groups(block);
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
        const uint32_t tiles = tiles_of(block->n_valid);
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
                                                         dkv_stream::STEP_B,
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

/* Fills a plan but for the items; its size in all. */
size_t make_plan(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
                 uint32_t n, launch_plan *plan)
{
    const uint32_t grid = grid_of(device);
    size_t at = sizeof(*plan);
    for (uint32_t v = 0; v < N_VARIANTS; v++) {
        launch_list &list = plan->of[v];
        list.items = list_chunks(wave, first, n, &variants[v], nullptr);
        list.a_turns = (list.items + grid - 1) / grid;
        list.b_turns = list.items ? list_ranges(wave, first, n, &variants[v], grid, nullptr) : 0;
        list.a_at = static_cast<uint32_t>(at);
        at += list.a_turns * grid * sizeof(struct dkv_fast_item);
        list.b_at = static_cast<uint32_t>(at);
        at += list.b_turns * grid * sizeof(struct dkv_fast_item);
    }
    return at;
}

/* Whether the kernels that this device loaded have a body, see fast_scorer.cu. */
bool kernels_are_real;

cudaError_t stream_prepare(const struct dkv_cu_device *device)
{
    if (device->major != 9)
        return cudaSuccess;
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, variants[0].a);
    if (error != cudaSuccess)
        return error;
    kernels_are_real = attributes.numRegs == dkv_stream::STREAM_LAUNCH_REGISTERS;
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

bool stream_takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return kernels_are_real && rows_of(block) >= ROWS_MIN && device->major == 9 &&
           device->shared_bytes_max >= 232448 && find_variant(block) &&
           block->v.dtype == block->k.dtype && block->q_dtype == block->k.dtype &&
           block->q_align >= 4 && block->v_dim == block->head_dim && block->k.align >= 16 &&
           block->v.align >= 16 && block->eps == 0.0f && block->p_round == 0 &&
           block->gqa != DKV_GQA_MAX && block->nonfinite == DKV_NONFINITE_ERROR;
}

size_t stream_unit_bytes(const struct dkv_cu_block *block)
{
    const variant *v = find_variant(block);
    return row_groups(block) * (v->merged_bytes + chunks_of(block) * v->partial_bytes) +
           tiles_of(block->n_valid) * dkv_stream::STEP_B * sizeof(float);
}

size_t stream_extra_bytes(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                          uint32_t first, uint32_t n)
{
    launch_plan plan;
    return make_plan(device, wave, first, n, &plan);
}

void stream_fill(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
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
        list_ranges(wave, first, n, &variants[v], grid_of(device),
                    reinterpret_cast<struct dkv_fast_item *>(bytes + list.b_at));
    }
}

cudaError_t stream_launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                          uint32_t first, uint32_t n, const void *extra_host,
                          const void *extra_device, cudaStream_t stream)
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
        error = dkv_cu_launch(v.a, grid, dkv_stream::STREAM_THREADS, v.a_bytes, args, false,
                              stream);
        if (error == cudaSuccess)
            error = dkv_cu_launch(v.merge, list.items * dkv_stream::SLICES, dkv_fast::GROUP_THREADS,
                                  0, args, true, stream);
        args.items = reinterpret_cast<const struct dkv_fast_item *>(bytes + list.b_at);
        args.turns = list.b_turns;
        if (error == cudaSuccess)
            error = dkv_cu_launch(v.b, grid, dkv_stream::STREAM_THREADS, v.b_bytes, args, true,
                                  stream);
    }
    return error;
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_stream;
const struct dkv_cu_scorer dkv_cu_scorer_stream = {
    "stream", stream_prepare,     stream_takes, stream_unit_bytes,
    nullptr,  stream_extra_bytes, stream_fill,  stream_launch,
};
}
