/* Host side of the stream scorer: which blocks it takes, the plan of a launch, the launches. Its
 * work lists are made by stream_lists.cuh.
 */
#include <string.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/stream_kernel_b.cuh"
#include "kernels/cuda/stream_lists.cuh"

namespace dkv_stream
{

/* Merges a slice of a row group: one for each of its chunks. */
template <class S>
__global__ void __launch_bounds__(GROUP_THREADS) stream_merge(const stream_args args)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    griddepcontrol_launch();
    __shared__ job work;
    __shared__ merge_room room;
    const dkv_fast_item item = args.items[blockIdx.x];
    if (threadIdx.x < 32) {
        copy_words(work.unit, args.units + item.unit, threadIdx.x);
        copy_words(work.block, args.blocks + item.block, threadIdx.x);
        if (threadIdx.x == 0)
            work.item = item;
    }
    __syncthreads();
    if (threadIdx.x == 0 && item.chunk == 0)
        *work.unit.exponent = DKV_CU_EXPONENT;
    griddepcontrol_wait();
    merge_slice<S>(room, work, partials_of<S>(work), threadIdx.x);
#endif
}

} // namespace dkv_stream

namespace
{

using dkv_stream::stream_args;
using dkv_stream::tiles_of;
using namespace dkv_stream_lists;

constexpr uint32_t ROWS_MIN = 65; /* fewer are the fast scorer's */

template <class type, int head_dim> variant make_variant(uint32_t dtype)
{
    using S = dkv_stream::stream_shape<type, head_dim>;
    using B = dkv_stream::shape_b<S>;
    static_assert(sizeof(dkv_stream::shared_a<S>) <= 232448 &&
                      sizeof(dkv_stream::shared_b<B>) <= 232448,
                  "shared memory of one thread block");
    return {dtype,
            head_dim,
            S::ROWS,
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
#ifndef DKV_FAST_SHAKEN /* a build for tests, see may_be_late() */
    make_variant<dkv_fast::fp16_type, 128>(DKV_FP16),
    make_variant<dkv_fast::bf16_type, 64>(DKV_BF16),
    make_variant<dkv_fast::fp16_type, 64>(DKV_FP16),
#endif
};
constexpr uint32_t N_OWN = sizeof(variants) / sizeof(variants[0]);
constexpr uint32_t VARIANTS_MAX = 8;

} // namespace

const variant *dkv_stream_lists::variant_at(uint32_t number)
{
    if (number < dkv_stream_few_count)
        return dkv_stream_few_variants + number;
    number -= dkv_stream_few_count;
    return number < N_OWN ? variants + number : nullptr;
}

namespace
{

/* The work lists of one launch, as they lie in the extra data. */
struct launch_list {
    uint32_t items; /* pass A's; 0: the variant is not launched */
    uint32_t a_turns;
    uint32_t b_turns;
    uint32_t merges; /* thread blocks */
    uint32_t a_at;   /* bytes from the start of the plan */
    uint32_t b_at;
    uint32_t merges_at;
};

struct launch_plan {
    launch_list of[VARIANTS_MAX];
};

/* Fills a variant's list but for the items; where the next one begins. */
size_t plan_list(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
                 uint32_t n, const variant *v, size_t at, launch_list *list)
{
    const uint32_t grid = grid_of(device, v);
    list->items = list_chunks(wave, first, n, v, nullptr);
    if (list->items == 0)
        return at;
    list->a_turns = is_few(v) ? list_few(wave, first, n, v, grid, nullptr)
                              : (list->items + grid - 1) / grid;
    list->b_turns = list_ranges(wave, first, n, v, grid, nullptr);
    list->a_at = static_cast<uint32_t>(at);
    list->b_at = list->a_at + list->a_turns * grid * sizeof(struct dkv_fast_item);
    list->merges_at = list->b_at + list->b_turns * grid * sizeof(struct dkv_fast_item);
    if (!is_few(v)) { /* a merge for each chunk */
        list->merges = list->items;
        at = list->merges_at;
        list->merges_at = list->a_at;
        return at;
    }
    list->merges = list_merges(wave, first, n, v, nullptr);
    return list->merges_at + list->merges * sizeof(struct dkv_fast_item);
}

/* Fills a plan but for the items; its size in all. */
size_t make_plan(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
                 uint32_t n, launch_plan *plan)
{
    size_t at = sizeof(*plan);
    memset(plan, 0, sizeof(*plan));
    const variant *v;
    for (uint32_t number = 0; (v = variant_at(number)) != nullptr; number++)
        at = plan_list(device, wave, first, n, v, at, &plan->of[number]);
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
    const variant *v;
    for (uint32_t number = 0; kernels_are_real && (v = variant_at(number)) != nullptr; number++) {
        error = cudaFuncSetAttribute(v->a, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(v->a_bytes));
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(v->b, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(v->b_bytes));
        if (error == cudaSuccess) /* loads it now, not at its first launch */
            error = cudaFuncGetAttributes(&attributes, v->merge);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

bool takes_any_rows(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return kernels_are_real && device->major == 9 && device->shared_bytes_max >= 232448 &&
           find_variant(block) && block->v.dtype == block->k.dtype &&
           block->q_dtype == block->k.dtype && block->q_align >= 4 &&
           block->v_dim == block->head_dim && block->k.align >= 16 && block->v.align >= 16 &&
           block->eps == 0.0f && block->p_round == 0 && block->gqa != DKV_GQA_MAX &&
           block->nonfinite == DKV_NONFINITE_ERROR;
}

bool stream_takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return rows_of(block) >= ROWS_MIN && takes_any_rows(device, block);
}

size_t stream_unit_bytes(const struct dkv_cu_block *block)
{
    const variant *v = find_variant(block);
    const uint32_t keys = is_few(v) ? dkv_stream::padded_keys(block->n_valid)
                                    : dkv_fast::TILE * tiles_of(block->n_valid);
    return row_groups(block) * (v->merged_bytes + chunks_of(block) * v->partial_bytes) +
           keys * sizeof(float);
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
    auto items_at = [bytes](uint32_t at) {
        return reinterpret_cast<struct dkv_fast_item *>(bytes + at);
    };
    const variant *v;
    for (uint32_t number = 0; (v = variant_at(number)) != nullptr; number++) {
        const launch_list &list = plan->of[number];
        const uint32_t grid = grid_of(device, v);
        if (list.items == 0)
            continue;
        list_ranges(wave, first, n, v, grid, items_at(list.b_at));
        if (is_few(v)) {
            list_few(wave, first, n, v, grid, items_at(list.a_at));
            list_merges(wave, first, n, v, items_at(list.merges_at));
        } else {
            list_chunks(wave, first, n, v, items_at(list.a_at));
        }
    }
}

cudaError_t stream_launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                          uint32_t first, uint32_t n, const void *extra_host,
                          const void *extra_device, cudaStream_t stream)
{
    (void)first, (void)n;
    const launch_plan *plan = static_cast<const launch_plan *>(extra_host);
    const unsigned char *bytes = static_cast<const unsigned char *>(extra_device);
    auto items_at = [bytes](uint32_t at) {
        return reinterpret_cast<const struct dkv_fast_item *>(bytes + at);
    };
    cudaError_t error = cudaSuccess;
    const variant *v;
    for (uint32_t i = 0; error == cudaSuccess && (v = variant_at(i)) != nullptr; i++) {
        const launch_list &list = plan->of[i];
        if (list.items == 0)
            continue;
        const uint32_t grid = grid_of(device, v);
        stream_args args = {wave->blocks, wave->units, items_at(list.a_at), list.a_turns};
        error = dkv_cu_launch(v->a, grid, dkv_stream::STREAM_THREADS, v->a_bytes, args, false,
                              stream);
        args.items = items_at(list.merges_at);
        if (error == cudaSuccess)
            error = dkv_cu_launch(v->merge, list.merges, dkv_fast::GROUP_THREADS, 0, args, true,
                                  stream);
        args.items = items_at(list.b_at);
        args.turns = list.b_turns;
        if (error == cudaSuccess)
            error = dkv_cu_launch(v->b, grid, dkv_stream::STREAM_THREADS, v->b_bytes, args, true,
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
/* The same for every number of rows: what tests name to have blocks scored that are another one's.
 */
extern const struct dkv_cu_scorer dkv_cu_scorer_stream_any;
const struct dkv_cu_scorer dkv_cu_scorer_stream_any = {
    "stream-any", stream_prepare,     takes_any_rows, stream_unit_bytes,
    nullptr,      stream_extra_bytes, stream_fill,    stream_launch,
};
}
