/* The scorer of rules that have no query rows: of keys, of positions, of the caller.
 *
 *   anchor   item = (unit, key range). Sums of keys; the unit's last item finds their direction.
 *   score    item = (unit, some tokens). -|k_j|, -cos(k_j, anchor), or what needs no tensor.
 *
 * Keys [n][D] are read once for a norm, twice for an angle: score begins with what anchor has read
 * last, which is still in the L2 cache. 512 threads, of which a warp has 4 or 8 loads of 512 bytes
 * under way (keys_rows.cuh): memory is what bounds this. Sums over a key's elements are in float32,
 * sums over keys in double precision (keys_anchor.cuh).
 */
#include <string.h>

#include "kernels/cuda/keys_score.cuh"
#include "kernels/cuda/launch.cuh"

namespace
{

constexpr uint32_t min_item_keys = 256;
constexpr uint32_t max_item_keys = 8192;

/* Where a unit is in the work list; item i of a kernel belongs to the last place whose first item
 * is <= i. */
struct alignas(16) place {
    uint32_t first_item[2]; /* of anchor, score */
    uint32_t unit;
    uint32_t block;
};

struct keys_args {
    const dkv_cu_block *blocks;
    const dkv_cu_unit *units;
    const place *places;
    unsigned *counters; /* of each place's ranges that are through; 0 at first */
    uint32_t n_places;
    uint32_t item_keys; /* of an item of score */
};

/* An item of its place. */
struct item_at {
    uint32_t place;
    uint32_t item; /* of this place's */
};

/* Finds an item's place, 32 at a look, and brings its descriptors. */
__device__ inline item_at open_job(const keys_args &args, int kernel, uint32_t item, job &work)
{
    uint32_t low = 0;
    uint32_t count = args.n_places;
    uint4 head;
    uint32_t first;
    int last;
    for (;;) {
        const uint32_t step = ceil_div(count, 32);
        const uint32_t at = lane_of() * step;
        head = {0, 0, 0, 0};
        if (at < count)
            head = *reinterpret_cast<const uint4 *>(args.places + low + at);
        first = kernel == 0 ? head.x : head.y;
        last = 31 - __clz(__ballot_sync(~0u, at < count && first <= item));
        low += last * step;
        if (step == 1)
            break;
        count = min(step, count - last * step);
    }
    const uint32_t *unit = reinterpret_cast<const uint32_t *>(args.units +
                                                              __shfl_sync(~0u, head.z, last));
    const uint32_t *block = reinterpret_cast<const uint32_t *>(args.blocks +
                                                               __shfl_sync(~0u, head.w, last));
    static_assert(sizeof(job) / 4 <= threads && sizeof(dkv_cu_unit) % 4 == 0, "a word each");
    constexpr uint32_t of_unit = sizeof(dkv_cu_unit) / 4;
    if (threadIdx.x < sizeof(job) / 4)
        reinterpret_cast<uint32_t *>(&work)[threadIdx.x] = threadIdx.x < of_unit
                                                               ? unit[threadIdx.x]
                                                               : block[threadIdx.x - of_unit];
    __syncthreads();
    return {low, item - __shfl_sync(~0u, first, last)};
}

__device__ inline void start_dependents()
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <class way> __global__ void __launch_bounds__(threads, resident) anchor(keys_args args)
{
    __shared__ job work;
    __shared__ anchor_state s;
    start_dependents();
    const item_at at = open_job(args, 0, blockIdx.x, work);
    const uint32_t n = work.block.n_valid;
    const uint32_t first = at.item * range_keys(n);
    add_range<way>(work, first, min(n, first + range_keys(n)), s,
                   memory_of(work).ranges + static_cast<size_t>(at.item) * work.block.head_dim);
    if (is_last(args.counters + at.place, ranges_of(n), s))
        settle(work, s);
}

/* ---- score ---- */

/* An item of score: opens it, and says which keys are its. */
__device__ inline uint32_t open_score(const keys_args &args, job &work)
{
    start_dependents();
    const uint32_t item = gridDim.x - 1 - blockIdx.x; /* what was read last comes first */
    const uint32_t first = open_job(args, 1, item, work).item * args.item_keys;
    if (first == 0 && threadIdx.x == 0)
        *work.unit.exponent = 0;
    return first;
}

template <class way> __global__ void __launch_bounds__(threads, resident) score(keys_args args)
{
    __shared__ job work;
    const uint32_t first = open_score(args, work);
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize(); /* for the anchor, if there is one */
#endif
    score_keys<way>(work, first, min(work.block.n_valid, first + args.item_keys));
}

__global__ void __launch_bounds__(threads, resident) score_tokens(keys_args args)
{
    __shared__ job work;
    const uint32_t first = open_score(args, work);
    const uint32_t end = min(work.block.n_valid, first + args.item_keys);
    for (uint32_t key = first; key < end; key += threads)
        score_token(work, key + threadIdx.x, end);
}

/* ---- launching ---- */

/* Kernels of one way each: behind a switch in one kernel they take 3 us more. */
struct variant {
    void (*anchor)(keys_args);
    void (*score)(keys_args);
};

template <class way> constexpr variant of_way = {anchor<way>, score<way>};

template <uint32_t dtype>
constexpr variant of_lanes[3] = {of_way<fast_way<dtype, 8>>, of_way<fast_way<dtype, 16>>,
                                 of_way<fast_way<dtype, 32>>};

constexpr uint32_t dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32, DKV_F8_E4M3, DKV_F8_E5M2};
constexpr uint32_t n_fast = 3 * sizeof(dtypes) / sizeof(dtypes[0]);
enum { variant_slow = n_fast, variant_tokens, n_variants };

variant variant_at(uint32_t v)
{
    switch (v / 3) {
    case 0: return of_lanes<DKV_BF16>[v % 3];
    case 1: return of_lanes<DKV_FP16>[v % 3];
    case 2: return of_lanes<DKV_FP32>[v % 3];
    case 3: return of_lanes<DKV_F8_E4M3>[v % 3];
    case 4: return of_lanes<DKV_F8_E5M2>[v % 3];
    default: return v == variant_slow ? of_way<slow_way> : variant{nullptr, score_tokens};
    }
}

uint32_t variant_of(const dkv_cu_block &block)
{
    if (block.source != DKV_SOURCE_KEY_NORM && block.source != DKV_SOURCE_KEY_ANGLE)
        return variant_tokens;
    const bool is_fp8 = block.k.dtype == DKV_F8_E4M3 || block.k.dtype == DKV_F8_E5M2;
    uint32_t v = block.head_dim <= 64 ? 0 : block.head_dim <= 128 ? 1 : 2;
    if (block.head_dim > 256 || block.k.align < (is_fp8 ? 8 : 16))
        return variant_slow;
    for (uint32_t dtype : dtypes) {
        if (block.k.dtype == dtype)
            return v;
        v += 3;
    }
    return variant_slow;
}

/* The part of one variant in a launch. */
struct launch_list {
    uint32_t items[2];
    uint32_t item_keys;
    uint32_t n_places;  /* 0: it is not launched */
    uint32_t places_at; /* bytes from the start of the plan; counters are behind them */
    uint32_t padding;
};

/* The extra data of a launch: this, then each variant's places and counters. */
struct alignas(16) launch_plan {
    launch_list of[n_variants];
};

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

/* Keys of an item of score: as many as leave work for all thread blocks that run at once. */
uint32_t item_keys_for(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first,
                       uint32_t n)
{
    uint64_t keys = 0;
    for (uint32_t u = first; u < first + n; u++)
        keys += block_of(wave, u).n_valid;
    uint32_t each = min_item_keys;
    while (each < max_item_keys &&
           keys / each > resident * static_cast<uint64_t>(device->multiprocessors))
        each *= 2;
    return each;
}

bool overlaps; /* whether the code that this device loaded has score wait for anchor itself */

cudaError_t prepare(const dkv_cu_device *)
{
    cudaFuncAttributes attributes = {}; /* loads the kernels now, not at their first launch */
    cudaError_t error = cudaSuccess;
    for (uint32_t v = 0; v < n_variants; v++) {
        const variant kernels = variant_at(v);
        for (const auto kernel : {kernels.anchor, kernels.score})
            if (kernel && error == cudaSuccess)
                error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(kernel));
    }
    overlaps = error == cudaSuccess && attributes.ptxVersion >= 90;
    return error;
}

bool takes(const dkv_cu_device *, const dkv_cu_block *block)
{
    return block->form == DKV_CU_FORM_UNSEEN;
}

size_t unit_bytes(const dkv_cu_block *block)
{
    return block->source == DKV_SOURCE_KEY_ANGLE ? anchor_bytes(block->n_valid, block->head_dim)
                                                 : 0;
}

/* Bytes of a variant's places and counters, whole sixteens. */
size_t list_bytes(const launch_list &list)
{
    const size_t bytes = list.n_places * (sizeof(place) + sizeof(unsigned));
    return (bytes + 15) & ~size_t{15};
}

/* Fills a plan but for what follows it; its size in all. */
size_t make_plan(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
                 launch_plan *plan)
{
    const uint32_t item_keys = item_keys_for(device, wave, first, n);
    size_t at = sizeof(*plan);
    *plan = {};
    for (uint32_t u = first; u < first + n; u++) {
        const dkv_cu_block &block = block_of(wave, u);
        launch_list &list = plan->of[variant_of(block)];
        list.n_places++;
        list.items[0] += block.source == DKV_SOURCE_KEY_ANGLE ? ranges_of(block.n_valid) : 0;
        list.items[1] += ceil_div(block.n_valid, item_keys);
    }
    for (launch_list &list : plan->of) {
        list.item_keys = item_keys;
        list.places_at = static_cast<uint32_t>(at);
        at += list_bytes(list);
    }
    return at;
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
    const size_t size = make_plan(device, wave, first, n, plan);
    memset(plan + 1, 0, size - sizeof(*plan)); /* counters, too */
    launch_list so_far[n_variants] = {};
    for (uint32_t u = first; u < first + n; u++) {
        const dkv_cu_block &block = block_of(wave, u);
        const uint32_t v = variant_of(block);
        launch_list &done = so_far[v];
        place *places = reinterpret_cast<place *>(static_cast<unsigned char *>(extra) +
                                                  plan->of[v].places_at);
        places[done.n_places++] = {{done.items[0], done.items[1]}, u, wave->units_host[u].block};
        done.items[0] += block.source == DKV_SOURCE_KEY_ANGLE ? ranges_of(block.n_valid) : 0;
        done.items[1] += ceil_div(block.n_valid, plan->of[v].item_keys);
    }
}

cudaError_t launch(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t, uint32_t,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const launch_plan *plan = static_cast<const launch_plan *>(extra_host);
    const unsigned char *bytes = static_cast<const unsigned char *>(extra_device);
    cudaError_t error = cudaSuccess;
    for (uint32_t v = 0; v < n_variants && error == cudaSuccess; v++) {
        const launch_list &list = plan->of[v];
        const variant kernels = variant_at(v);
        const place *places = reinterpret_cast<const place *>(bytes + list.places_at);
        unsigned *counters = reinterpret_cast<unsigned *>(
            const_cast<place *>(places + list.n_places));
        const keys_args args = {wave->blocks, wave->units,   places,
                                counters,     list.n_places, list.item_keys};
        if (list.items[0] > 0)
            error = dkv_cu_launch(reinterpret_cast<const void *>(kernels.anchor), list.items[0],
                                  threads, 0, args, false, stream);
        if (list.items[1] > 0 && error == cudaSuccess)
            error = dkv_cu_launch(reinterpret_cast<const void *>(kernels.score), list.items[1],
                                  threads, 0, args, overlaps && list.items[0] > 0, stream);
    }
    return error;
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_keys = {
    "keys", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch, true};
