/* Host side of the fast scorer: which blocks it takes, the work list, the launch.
 *
 * A unit's keys are cut into chunks by its length alone, so that an answer never depends on what
 * else is in the batch: at most WIDTH chunks, 512 keys each while that is enough, and a number of
 * chunks that divides WIDTH well, since units are packed side by side into turns of one chunk per
 * thread block. One launch serves all units of one shape; shapes follow each other on the stream.
 */
#include <string.h>

#include "kernels/cuda/fast_variant.cuh"

namespace
{

constexpr uint32_t CHUNK_KEYS_MIN = 512;
constexpr uint32_t WIDTH = 128;

/* What compiles with this file: the kernels of dropkv. */
const dkv_fast_variant variants[] = {
    dkv_fast::make_variant<dkv_fast::bf16_type, 128, 1>(DKV_BF16),
    dkv_fast::make_variant<dkv_fast::bf16_type, 128, 2>(DKV_BF16),
#ifndef DKV_FAST_SHAKEN /* a build for tests, see may_be_late() */
    dkv_fast::make_variant<dkv_fast::fp16_type, 128, 1>(DKV_FP16),
    dkv_fast::make_variant<dkv_fast::fp16_type, 128, 2>(DKV_FP16),
    dkv_fast::make_variant<dkv_fast::bf16_type, 64, 1>(DKV_BF16),
    dkv_fast::make_variant<dkv_fast::bf16_type, 64, 2>(DKV_BF16),
    dkv_fast::make_variant<dkv_fast::fp16_type, 64, 1>(DKV_FP16),
    dkv_fast::make_variant<dkv_fast::fp16_type, 64, 2>(DKV_FP16),
#endif
};
const dkv_fast_variant *const own_variants = variants;
const uint32_t n_own_variants = sizeof(variants) / sizeof(variants[0]);

/* The kernels of all files; a variant's number counts through them. At most 64. */
const struct {
    const dkv_fast_variant *const *rows;
    const uint32_t *count;
} tables[] = {
    {&own_variants, &n_own_variants},
    {&dkv_fast_restkv_variants, &dkv_fast_restkv_count},
    {&dkv_fast_andpro_variants, &dkv_fast_andpro_count},
};

const dkv_fast_variant *variant_at(uint32_t number)
{
    for (const auto &table : tables) {
        if (number < *table.count)
            return *table.rows + number;
        number -= *table.count;
    }
    return nullptr;
}

constexpr uint32_t NONE = 64;

/* The number of the kernel for a block, or NONE. */
uint32_t variant_of(const struct dkv_cu_block *block)
{
    const uint32_t rows = block->group * block->window;
    const uint32_t rows_per_thread = rows <= 32 ? 1 : 2;
    uint32_t number = 0;
    for (const dkv_fast_variant *v; (v = variant_at(number)) != nullptr; number++) {
        if (v->form == block->form && v->dtype == block->k.dtype &&
            v->head_dim == block->head_dim && v->rows_per_thread == rows_per_thread)
            return number;
    }
    return NONE;
}

/* Bit v: some of these units have variant v. */
uint64_t variants_in(const struct dkv_cu_wave *wave, uint32_t first, uint32_t n)
{
    uint64_t found = 0;
    for (uint32_t u = first; u < first + n; u++)
        found |= 1ull << variant_of(&wave->blocks_host[wave->units_host[u].block]);
    return found;
}

/* Turns that a unit takes: one for each group of as many rows as the kernel holds. */
uint32_t row_groups(const struct dkv_cu_block *block)
{
    const uint32_t rows = block->group * block->window;
    const uint32_t held = rows <= 32 ? 32 : 64;
    return (rows + held - 1) / held;
}

uint32_t grid_of(const struct dkv_cu_device *device)
{
    return static_cast<uint32_t>(device->multiprocessors) < WIDTH
               ? static_cast<uint32_t>(device->multiprocessors)
               : WIDTH;
}

/* Keys per chunk: a multiple of the tile. */
uint32_t chunk_keys(uint32_t n, uint32_t width)
{
    const uint32_t wanted = (n + CHUNK_KEYS_MIN - 1) / CHUNK_KEYS_MIN;
    const uint32_t side_by_side = wanted < width ? width / wanted : 1;
    const uint32_t chunks = width / side_by_side;
    const uint32_t keys = (n + chunks - 1) / chunks;
    return (keys + dkv_fast::TILE - 1) / dkv_fast::TILE * dkv_fast::TILE;
}

/* The work list of one launch, as it lies in the extra data: one list for each variant, in the
 * order of their numbers. */
struct launch_plan {
    uint32_t variant;
    uint32_t left; /* plans from this one on */
    uint32_t turns;
    uint32_t items_at; /* bytes from the start of the extra data */
    uint32_t counters_at;
};

/* Lays the units of one variant out into turns, side by side; a unit's row groups take the same
 * columns of turns that follow each other. Writes items if there is a place for them. */
uint32_t make_turns(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                    uint32_t first, uint32_t n, uint32_t which, struct dkv_fast_item *items,
                    uint32_t *counter)
{
    const uint32_t grid = grid_of(device);
    uint32_t turn = 0;
    uint32_t groups = 0; /* turns from `turn` on that are being filled */
    uint32_t column = 0;
    for (uint32_t u = first; u < first + n; u++) {
        const struct dkv_cu_block *block = &wave->blocks_host[wave->units_host[u].block];
        if (variant_of(block) != which)
            continue;
        const uint32_t keys = chunk_keys(block->n_valid, grid);
        const uint32_t chunks = (block->n_valid + keys - 1) / keys;
        if (groups != row_groups(block) || column + chunks > grid) {
            turn += groups;
            groups = row_groups(block);
            column = 0;
        }
        for (uint32_t g = 0; g < groups; g++, (*counter)++) {
            for (uint32_t c = 0; items && c < chunks; c++)
                items[(turn + g) * grid + column + c] = {
                    u,    wave->units_host[u].block, *counter,
                    keys, static_cast<uint16_t>(c),  static_cast<uint16_t>(chunks),
                    g};
        }
        column += chunks;
    }
    return turn + groups;
}

/* Whether the kernels that this device loaded have a body: only code made for sm_90a has, not what
 * the driver makes of another architecture's PTX. An empty kernel needs next to no registers. */
bool kernels_are_real;

cudaError_t fast_prepare(const struct dkv_cu_device *device)
{
    if (device->major != 9)
        return cudaSuccess;
    struct cudaFuncAttributes attributes;
    const cudaError_t known = cudaFuncGetAttributes(&attributes, variant_at(0)->kernel);
    if (known != cudaSuccess)
        return known;
    kernels_are_real = attributes.numRegs == dkv_fast::LAUNCH_REGISTERS;
    if (!kernels_are_real)
        return cudaSuccess;
    for (uint32_t number = 0; const dkv_fast_variant *v = variant_at(number); number++) {
        const cudaError_t error = cudaFuncSetAttribute(v->kernel,
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(v->shared_bytes));
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

/* Whether the rule is one that a kernel was made for: distances are the plain ones, and heads whose
 * rows become one do not straddle the 32 rows that pass B takes together. */
bool takes_rule(const struct dkv_cu_block *block)
{
    if (block->form == DKV_CU_FORM_AVERAGE &&
        !(block->window == 8 || block->window == 16 || block->window == 32))
        return false;
    return !block->metric && !block->spread && !block->variance && variant_of(block) != NONE;
}

bool fast_takes(const struct dkv_cu_device *device, const struct dkv_cu_block *block)
{
    return kernels_are_real && dkv_fast_takes_layout(device, block) && takes_rule(block) &&
           dkv_fast_takes_types(block);
}

size_t fast_unit_bytes(const struct dkv_cu_block *block)
{
    return variant_at(variant_of(block))->unit_bytes * row_groups(block);
}

size_t fast_shared_bytes(const struct dkv_cu_device *device)
{
    size_t largest = 0;
    for (uint32_t number = 0; const dkv_fast_variant *v = variant_at(number); number++)
        largest = v->ring_bytes > largest ? v->ring_bytes : largest;
    return device->major != 9 ? 0 : grid_of(device) * largest;
}

size_t fast_extra_bytes(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                        uint32_t first, uint32_t n)
{
    uint32_t lists = 0;
    uint32_t turns = 0;
    uint32_t counters = 0;
    for (uint64_t left = variants_in(wave, first, n); left != 0; left &= left - 1, lists++)
        turns += make_turns(device, wave, first, n, __builtin_ctzll(left), nullptr, &counters);
    return lists * sizeof(launch_plan) + turns * grid_of(device) * sizeof(struct dkv_fast_item) +
           counters * sizeof(struct dkv_fast_counters);
}

void fast_fill(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
               uint32_t n, void *extra)
{
    memset(extra, 0, fast_extra_bytes(device, wave, first, n));
    const uint64_t found = variants_in(wave, first, n);
    launch_plan *plans = static_cast<launch_plan *>(extra);
    uint32_t lists = __builtin_popcountll(found);
    unsigned char *bytes = static_cast<unsigned char *>(extra);
    size_t at = lists * sizeof(launch_plan);
    uint32_t counters = 0;
    launch_plan *plan = plans;
    for (uint64_t left = found; left != 0; left &= left - 1, plan++) {
        plan->variant = __builtin_ctzll(left);
        plan->left = lists--;
        plan->items_at = static_cast<uint32_t>(at);
        plan->turns = make_turns(device, wave, first, n, plan->variant,
                                 reinterpret_cast<struct dkv_fast_item *>(bytes + at), &counters);
        at += plan->turns * grid_of(device) * sizeof(struct dkv_fast_item);
    }
    while (plan-- > plans)
        plan->counters_at = static_cast<uint32_t>(at);
}

cudaError_t fast_launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                        uint32_t first, uint32_t n, const void *extra_host,
                        const void *extra_device, cudaStream_t stream)
{
    (void)first, (void)n;
    const launch_plan *plan = static_cast<const launch_plan *>(extra_host);
    const launch_plan *const end = plan + plan->left;
    unsigned char *bytes = static_cast<unsigned char *>(const_cast<void *>(extra_device));
    for (; plan < end; plan++) {
        const dkv_fast_variant *v = variant_at(plan->variant);
        struct dkv_fast_args args;
        args.blocks = wave->blocks;
        args.units = wave->units;
        args.items = reinterpret_cast<const struct dkv_fast_item *>(bytes + plan->items_at);
        args.counters = reinterpret_cast<struct dkv_fast_counters *>(bytes + plan->counters_at);
        args.ring = wave->shared;
        args.turns = plan->turns;
        /* Cooperative: all thread blocks run at once or none, whatever else is on the device. */
        cudaLaunchAttribute cooperative;
        cooperative.id = cudaLaunchAttributeCooperative;
        cooperative.val.cooperative = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(grid_of(device));
        config.blockDim = dim3(dkv_fast::THREADS);
        config.dynamicSmemBytes = v->shared_bytes;
        config.stream = stream;
        config.attrs = &cooperative;
        config.numAttrs = 1;
        void *arguments[] = {&args};
        const cudaError_t error = cudaLaunchKernelExC(&config, v->kernel, arguments);
        if (error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

} // namespace

extern "C" {
extern const struct dkv_cu_scorer dkv_cu_scorer_fast;
const struct dkv_cu_scorer dkv_cu_scorer_fast = {
    "fast",    fast_prepare, fast_takes, fast_unit_bytes, fast_shared_bytes, fast_extra_bytes,
    fast_fill, fast_launch,  true,
};
}
