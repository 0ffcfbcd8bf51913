/* The scorer of attention alone: rules that sum p over rows, take its maximum, or its mean and
 * variance, of bf16 or fp16 queries and keys on tensor cores. Keys [n][D], D up to 128.
 *
 * Up to 128 slots on compute capability 9.0 are attention_crew.cuh's: one kernel that reads most
 * keys once. Elsewhere two reads of the keys are all it costs:
 *
 *   weigh    item = (unit, key range, row group). Each row's largest logit, and the sum of 2^ the
 *            differences to it. The range of a group that is through last joins all of them, in
 *            their order, sink logits with them.
 *   score    item = (unit, up to 512 keys). Logits again, p, reduced over all rows.
 *
 * There a warp takes 16 keys at a time: keys are the columns of its products (16 x 8 x 16), query
 * rows the rows. The order in which dimensions are added up is free, so a lane's four words of a
 * product are one load of 16 bytes, straight from where the keys lie; queries wait in shared memory
 * in the same order. The next tile's load begins as soon as the last product has taken this one's
 * words. 128 threads, so that a multiprocessor has five of them.
 *
 * Logits are in units of log2. Nothing is left out of sums, since p itself needs no 1 - p. Ranges
 * depend on the block alone, so neither neighbours nor the split of score show in the bits.
 *
 * A product that is no number sets DKV_CU_RETRY: the general scorer then finds the place.
 */
#include <string.h>

#include "kernels/cuda/attention_crew.cuh"
#include "kernels/cuda/launch.cuh"

namespace
{

constexpr uint32_t crew_keys = 1024; /* of each of a crew, until it is full */
constexpr uint32_t max_ranges = 64;
constexpr uint32_t min_range_keys = 256;
constexpr size_t unit_partial_bytes = 4u << 20;

typedef void (*kernel_fn)(attention_args);

/* One compiled pair of passes, or what does without a second one. */
struct variant {
    uint32_t slots; /* at most; 0: any number, in two passes */
    int threads;
    size_t shared_bytes;
    kernel_fn weigh;
    kernel_fn score; /* none for crews */
};

template <bool bf16, int blocks, int fold> constexpr variant passes_of()
{
    return {0, threads, 0, weigh<bf16, blocks>, score<bf16, blocks, fold>};
}

template <bool bf16, int blocks, int fold, int columns> constexpr variant crew_of()
{
    typedef crew_shape<bf16, blocks, columns> shape;
    return {shape::slots, shape::threads, shape::shared_bytes, attend<shape, fold>, nullptr};
}

/* By number: dtype, dimensions, fold, and what holds the slots. */
constexpr uint32_t n_folds = 3;
constexpr uint32_t n_kinds = 4;
#define KINDS_OF(bf16, blocks, fold)                                    \
    crew_of<bf16, blocks, fold, 4>(), crew_of<bf16, blocks, fold, 8>(), \
        crew_of<bf16, blocks, fold, 16>(), passes_of<bf16, blocks, fold>()
#define FOLDS_OF(bf16, blocks)                                          \
    KINDS_OF(bf16, blocks, fold_sum), KINDS_OF(bf16, blocks, fold_max), \
        KINDS_OF(bf16, blocks, fold_variance)
const variant variants[] = {FOLDS_OF(true, 2), FOLDS_OF(true, 4), FOLDS_OF(false, 2),
                            FOLDS_OF(false, 4)};
constexpr uint32_t n_variants = sizeof(variants) / sizeof(variants[0]);

/* Slots of a query head. */
uint32_t head_slots(const dkv_cu_block &block)
{
    return block.variance ? (block.window + 7) / 8 * 8 : block.window;
}

/* Whether this device has the code of crews: only what was made for sm_90a is, not what the driver
 * makes of another architecture's PTX. */
bool crews_are_real;

bool has_crews(const dkv_cu_device *device)
{
    return device->major == 9 && crews_are_real;
}

/* n_variants: none. `crews`: of has_crews(). */
uint32_t variant_of(bool crews, const dkv_cu_block &block)
{
    if ((block.k.dtype != DKV_BF16 && block.k.dtype != DKV_FP16) || block.head_dim > 128)
        return n_variants;
    const uint32_t fold = block.variance                   ? fold_variance
                          : block.reduce == DKV_REDUCE_MAX ? fold_max
                                                           : fold_sum;
    const uint32_t type = (block.k.dtype == DKV_BF16 ? 0 : 2) + (block.head_dim > 64);
    const uint32_t slots = block.group * head_slots(block);
    uint32_t v = (type * n_folds + fold) * n_kinds;
    while (variants[v].slots != 0 && (!crews || slots > variants[v].slots))
        v++;
    return v;
}

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

/* How a unit of this block is cut up; what concerns the launch is 0. */
place place_of(bool crews, const dkv_cu_block &block)
{
    place p = {};
    p.per_head = head_slots(block);
    p.n_slots = block.group * p.per_head;
    p.group_slots = block.variance ? group_slots_max / p.per_head * p.per_head : group_slots_max;
    p.n_groups = ceil_div(p.n_slots, p.group_slots);
    const variant &kernels = variants[variant_of(crews, block)];
    if (kernels.slots != 0) {
        p.n_ranges = ceil_div(block.n_valid, crew_keys);
        /* The device is for all heads of a block, which are 8 more often than not. */
        const uint32_t most = block.heads <= 4 ? crew_max : crew_max / 2;
        p.n_ranges = p.n_ranges < most ? p.n_ranges : most;
        const uint32_t groups = p.n_ranges * (kernels.threads / group_threads);
        const uint32_t tiles = ceil_div(block.n_valid, crew_tile_keys);
        p.head_inverse = (65535 + p.per_head) / p.per_head;
        p.tiles_each = tiles / groups;
        p.tiles_over = tiles % groups;
        return p;
    }
    size_t ranges = unit_partial_bytes / (p.n_slots * sizeof(partial));
    ranges = ranges > max_ranges ? max_ranges : ranges < 4 ? 4 : ranges;
    size_t keys = (block.n_valid + ranges - 1) / ranges;
    keys = keys < min_range_keys ? min_range_keys : keys;
    p.range_keys = static_cast<uint32_t>((keys + tile_keys * warps - 1) / (tile_keys * warps) *
                                         (tile_keys * warps));
    p.n_ranges = ceil_div(block.n_valid, p.range_keys);
    return p;
}

/* The part of one variant in a launch. */
struct launch_list {
    uint32_t n_places; /* 0: it is not launched */
    uint32_t items[2];
    uint32_t score_keys;
    uint32_t n_counters;
    uint32_t places_at; /* bytes from the start of the plan */
    uint32_t counters_at;
    uint32_t padding;
};

/* The extra data of a launch: this, then each variant's places and counters. */
struct launch_plan {
    launch_list of[n_variants];
};

/* Keys of an item of score: as many as leave something to do for every multiprocessor. */
uint32_t score_keys_for(const dkv_cu_device *device, uint64_t keys)
{
    uint32_t each = score_keys_max;
    while (each > tile_keys * warps &&
           keys / each < 3 * static_cast<uint64_t>(device->multiprocessors))
        each /= 2;
    return each;
}

/* A variant's places, written if there is room for them, and its list but for where they are. */
launch_list list_places(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first,
                        uint32_t n, uint32_t v, place *places)
{
    const bool crews = has_crews(device);
    launch_list list = {};
    uint64_t keys = 0;
    for (uint32_t u = first; u < first + n; u++)
        keys += variant_of(crews, block_of(wave, u)) == v ? block_of(wave, u).n_valid : 0;
    list.score_keys = score_keys_for(device, keys);
    list.n_counters = variants[v].slots != 0 ? 1 : 0; /* of tickets */
    for (uint32_t u = first; u < first + n; u++) {
        const dkv_cu_block &block = block_of(wave, u);
        if (variant_of(crews, block) != v)
            continue;
        place p = place_of(crews, block);
        p.first_item[0] = list.items[0];
        p.first_item[1] = list.items[1];
        p.unit = u;
        p.block = wave->units_host[u].block;
        p.counter = list.n_counters;
        if (places)
            places[list.n_places] = p;
        list.n_places++;
        list.n_counters += p.n_groups;
        list.items[0] += p.n_ranges * p.n_groups;
        list.items[1] += ceil_div(block.n_valid, list.score_keys);
    }
    return list;
}

/* Bit v: some of these units have variant v. */
uint64_t variants_in(bool crews, const dkv_cu_wave *wave, uint32_t first, uint32_t n)
{
    static_assert(n_variants <= 64, "a bit each");
    uint64_t found = 0;
    for (uint32_t u = first; u < first + n; u++)
        found |= 1ull << variant_of(crews, block_of(wave, u));
    return found;
}

/* Fills a plan but for what follows it; its size in all. */
size_t make_plan(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
                 launch_plan *plan)
{
    const uint64_t found = variants_in(has_crews(device), wave, first, n);
    size_t at = sizeof(*plan);
    for (uint32_t v = 0; v < n_variants; v++) {
        launch_list &list = plan->of[v];
        list = {};
        if (!(found >> v & 1))
            continue;
        list = list_places(device, wave, first, n, v, nullptr);
        list.places_at = static_cast<uint32_t>(at);
        at += list.n_places * sizeof(place);
        list.counters_at = static_cast<uint32_t>(at);
        at += (list.n_counters * sizeof(unsigned) + 15) / 16 * 16;
    }
    return at;
}

/* Whether the code that this device loaded has weigh and score overlap. */
bool overlaps;

/* Raises a kernel's limit, and loads it now, not at its first launch. */
cudaError_t prepare_kernel(kernel_fn kernel, size_t shared_bytes, cudaFuncAttributes *attributes)
{
    const void *function = reinterpret_cast<const void *>(kernel);
    cudaError_t error = cudaFuncGetAttributes(attributes, function);
    if (error != cudaSuccess || shared_bytes == 0)
        return error;
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
    return error;
}

cudaError_t prepare(const dkv_cu_device *device)
{
    constexpr int empty_registers = 32; /* more than an empty kernel needs */
    cudaFuncAttributes attributes = {};
    cudaError_t error = cudaSuccess;
    for (const variant &v : variants) {
        const bool crewed = v.slots != 0;
        if (crewed && device->major != 9)
            continue;
        if (error == cudaSuccess)
            error = prepare_kernel(v.weigh, v.shared_bytes, &attributes);
        if (crewed)
            crews_are_real = attributes.numRegs > empty_registers; /* the same for all of 9.0 */
        else if (error == cudaSuccess)
            error = prepare_kernel(v.score, v.shared_bytes, &attributes);
    }
    overlaps = error == cudaSuccess && attributes.ptxVersion >= 90;
    return error;
}

/* A maximum over rows is one over query heads too, and a sum is one; what is made by query head
 * first goes to the general scorer, unless it is mean and variance. */
bool takes(const dkv_cu_device *device, const dkv_cu_block *block)
{
    const bool flat = (block->reduce == DKV_REDUCE_MAX) == (block->gqa == DKV_GQA_MAX);
    return block->form == DKV_CU_FORM_P && !block->spread &&
           (block->variance ? block->window <= group_slots_max : flat) &&
           block->q_dtype == block->k.dtype && block->q_align >= 16 && block->k.align >= 16 &&
           variant_of(has_crews(device), *block) < n_variants;
}

/* For either way, since the device is not known here. */
size_t unit_bytes(const dkv_cu_block *block)
{
    const place passes = place_of(false, *block);
    const place crew = place_of(crews_are_real, *block);
    const uint32_t slots = variants[variant_of(crews_are_real, *block)].slots;
    const size_t one = results_offset(passes.n_ranges, passes.n_slots) +
                       passes.n_slots * sizeof(row_result);
    const size_t other = crew.n_ranges * slots * sizeof(partial);
    return one > other ? one : other;
}

size_t extra_bytes(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first, uint32_t n)
{
    launch_plan plan;
    return make_plan(device, wave, first, n, &plan);
}

void fill(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
          void *extra)
{
    launch_plan *plan = static_cast<launch_plan *>(extra);
    unsigned char *bytes = static_cast<unsigned char *>(extra);
    const size_t size = make_plan(device, wave, first, n, plan);
    memset(bytes + sizeof(*plan), 0, size - sizeof(*plan));
    for (uint32_t v = 0; v < n_variants; v++)
        if (plan->of[v].n_places > 0)
            list_places(device, wave, first, n, v,
                        reinterpret_cast<place *>(bytes + plan->of[v].places_at));
}

cudaError_t launch(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t, uint32_t,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const launch_plan *plan = static_cast<const launch_plan *>(extra_host);
    const unsigned char *bytes = static_cast<const unsigned char *>(extra_device);
    cudaError_t error = cudaSuccess;
    for (uint32_t v = 0; v < n_variants && error == cudaSuccess; v++) {
        const launch_list &list = plan->of[v];
        if (list.n_places == 0)
            continue;
        const attention_args args = {
            wave->blocks,
            wave->units,
            reinterpret_cast<const place *>(bytes + list.places_at),
            reinterpret_cast<unsigned *>(const_cast<unsigned char *>(bytes) + list.counters_at),
            list.n_places,
            list.score_keys,
            static_cast<uint32_t>(device->multiprocessors)};
        const variant &kernels = variants[v];
        error = dkv_cu_launch(reinterpret_cast<const void *>(kernels.weigh), list.items[0],
                              kernels.threads, kernels.shared_bytes, args, false, stream);
        if (error == cudaSuccess && kernels.score)
            error = dkv_cu_launch(reinterpret_cast<const void *>(kernels.score), list.items[1],
                                  kernels.threads, 0, args, overlaps, stream);
    }
    return error;
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_attention = {
    "attention", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch, true};
