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
#include "kernels/cuda/keys_anchor.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/policies/random.h"

namespace
{

constexpr uint32_t min_item_keys = 256;
constexpr uint32_t max_item_keys = 8192;

uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* Where a unit is in the work list; item i of a kernel belongs to the last place whose first item
 * is <= i. */
struct place {
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

/* Finds an item's place and brings its descriptors; returns the place's number. */
__device__ uint32_t open_job(const keys_args &args, int kernel, uint32_t item, job &work)
{
    uint32_t low = 0;
    uint32_t high = args.n_places;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (args.places[middle].first_item[kernel] <= item)
            low = middle;
        else
            high = middle;
    }
    const place at = args.places[low];
    const uint32_t *unit = reinterpret_cast<const uint32_t *>(args.units + at.unit);
    const uint32_t *block = reinterpret_cast<const uint32_t *>(args.blocks + at.block);
    static_assert(sizeof(job) / 4 <= threads && sizeof(dkv_cu_unit) % 4 == 0, "a word each");
    constexpr uint32_t of_unit = sizeof(dkv_cu_unit) / 4;
    if (threadIdx.x < sizeof(job) / 4)
        reinterpret_cast<uint32_t *>(&work)[threadIdx.x] = threadIdx.x < of_unit
                                                               ? unit[threadIdx.x]
                                                               : block[threadIdx.x - of_unit];
    __syncthreads();
    return low;
}

__global__ void __launch_bounds__(threads, 2) anchor(keys_args args)
{
    __shared__ job work;
    __shared__ anchor_state s;
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    const uint32_t index = open_job(args, 0, blockIdx.x, work);
    const uint32_t n = work.block.n_valid;
    const uint32_t range = blockIdx.x - args.places[index].first_item[0];
    const uint32_t first = range * range_keys(n);
    const uint32_t end = min(n, first + range_keys(n));
    double *to = memory_of(work).ranges + static_cast<size_t>(range) * work.block.head_dim;
    with_way(work, [&](auto way) { add_range<decltype(way)>(work, first, end, s, to); });
    if (is_last(args.counters + index, ranges_of(n), s))
        settle(work, s);
}

/* ---- scores of keys ---- */

/* Of a key's length and, for an angle, its product with the anchor's direction. */
template <class number>
__device__ __forceinline__ number score_of(const job &work, number length, number product)
{
    if (work.block.source == DKV_SOURCE_KEY_NORM)
        return length * -static_cast<number>(work.unit.k_scale);
    return length > 0 ? -product / length : static_cast<number>(0);
}

__device__ inline void store_score(const job &work, uint32_t key, float score)
{
    if (!dkv_cu_finite(score))
        atomicOr(&work.unit.report->flags, DKV_CU_OVERFLOW);
    work.unit.scores[key] = score;
}

/* Scores a batch of keys in double precision. */
template <class way>
__device__ __noinline__ void score_slowly(const job &work, uint32_t first, uint32_t end)
{
    constexpr uint32_t step = 32 / way::lanes;
    const bool angle = work.block.source == DKV_SOURCE_KEY_ANGLE;
#pragma unroll 1
    for (int i = 0; i < way::loads; i++) {
        const uint32_t key = first + i * step + lane_of() / way::lanes;
        const auto part = load_slowly<way::lanes, way::rounds>(work, key, end);
        double product = 0;
#pragma unroll
        for (int r = 0; r < way::rounds; r++)
            for (int e = 0; e < 8; e++) {
                const uint32_t dim = lane_of() % way::lanes * 8 + r * way::lanes * 8 + e;
                if (angle && dim < work.block.head_dim)
                    product = fma(static_cast<double>(part.x[r][e]),
                                  static_cast<double>(memory_of(work).direction[dim]), product);
            }
        const double score = score_of(work, length_of(part), sum_of_key<way::lanes>(product));
        if (lane_of() % way::lanes == 0 && key < end)
            store_score(work, key, static_cast<float>(score));
    }
}

/* Scores a batch of keys; false, and nothing is written, if a square is not for float32. */
template <class way>
__device__ __forceinline__ bool score_fast(const job &work, uint32_t first, uint32_t end,
                                           const float (&direction)[8])
{
    constexpr uint32_t step = 32 / way::lanes;
    const bool angle = work.block.source == DKV_SOURCE_KEY_ANGLE;
    const int of_key = static_cast<int>(lane_of() % way::lanes);
    const unsigned char *rows[way::loads];
    eight_elements<way::dtype> parts[way::loads];
    find_rows(work, first + lane_of() / way::lanes, step, end, of_key * 8, rows);
#pragma unroll
    for (int i = 0; i < way::loads; i++)
        fetch(rows[i], parts[i]);
    float square = 0; /* of the key that this lane answers for */
    float product = 0;
#pragma unroll
    for (int i = 0; i < way::loads; i++) {
        float x[8];
        unpack(parts[i], x);
        const float its_square = sum_of_key<way::lanes>(square_of(x));
        square = of_key == i ? its_square : square;
        if (angle) {
            float sum = x[0] * direction[0];
#pragma unroll
            for (int e = 1; e < 8; e++)
                sum = fmaf(x[e], direction[e], sum);
            sum = sum_of_key<way::lanes>(sum);
            product = of_key == i ? sum : product;
        }
    }
    const uint32_t key = first + of_key * step + lane_of() / way::lanes;
    const bool answers = of_key < way::loads && key < end;
    const bool fine = square > least_square && square < most_square;
    if (!__all_sync(~0u, fine || !answers))
        return false;
    if (answers)
        store_score(work, key, score_of(work, sqrtf(square), product));
    return true;
}

template <class way>
__device__ __forceinline__ void score_keys(const job &work, uint32_t first, uint32_t end)
{
    constexpr uint32_t batch = way::loads * 32 / way::lanes;
    float direction[8] = {};
    if (way::fast && work.block.source == DKV_SOURCE_KEY_ANGLE) {
        const uint32_t dim = lane_of() % way::lanes * 8;
        const float4 *from = reinterpret_cast<const float4 *>(memory_of(work).direction + dim);
        if (dim < work.block.head_dim) {
            const float4 low = __ldcg(from);
            const float4 high = __ldcg(from + 1);
            direction[0] = low.x, direction[1] = low.y, direction[2] = low.z;
            direction[3] = low.w, direction[4] = high.x, direction[5] = high.y;
            direction[6] = high.z, direction[7] = high.w;
        }
    }
#pragma unroll 1
    for (uint32_t key = first + threadIdx.x / 32 * batch; key < end; key += warps * batch) {
        if constexpr (way::fast)
            if (score_fast<way>(work, key, end, direction))
                continue;
        score_slowly<way>(work, key, end);
    }
}

/* ---- scores of tokens ---- */

/* Scores that need no tensor, a token a thread; nonfinite=mask heeds the caller's scores alone. */
__device__ void score_token(const job &work, uint32_t key, uint32_t end)
{
    const dkv_cu_block &block = work.block;
    const bool inside = key < end;
    float score = 0;
    if (block.source == DKV_SOURCE_HASH)
        score = static_cast<float>(dkv_random_bits(block.hash, work.unit.head, key)) * 0x1p-24f;
    else if (block.source == DKV_SOURCE_POSITION)
        score = static_cast<float>(key + 1);
    else if (inside)
        score = work.unit.given[key];
    const bool masked = inside && !dkv_cu_finite(score);
    const unsigned word = __ballot_sync(~0u, masked);
    if (work.unit.mask && lane_of() == 0 && inside)
        work.unit.mask[key / 32] = word;
    if (inside)
        work.unit.scores[key] = masked ? 0.0f : score;
}

__global__ void __launch_bounds__(threads, 2) score(keys_args args)
{
    __shared__ job work;
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    const uint32_t item = gridDim.x - 1 - blockIdx.x; /* what was read last comes first */
    const uint32_t index = open_job(args, 1, item, work);
    const uint32_t first = (item - args.places[index].first_item[1]) * args.item_keys;
    const uint32_t end = min(work.block.n_valid, first + args.item_keys);
    if (first == 0 && threadIdx.x == 0)
        *work.unit.exponent = 0;
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize(); /* for the anchor, if there is one */
#endif
    if (work.block.source == DKV_SOURCE_KEY_NORM || work.block.source == DKV_SOURCE_KEY_ANGLE)
        with_way(work, [&](auto way) { score_keys<decltype(way)>(work, first, end); });
    else
        for (uint32_t key = first; key < end; key += threads)
            score_token(work, key + threadIdx.x, end);
}

/* ---- launching ---- */

/* The extra data of a launch: this, its places, then their counters. */
struct launch_list {
    uint32_t items[2];
    uint32_t item_keys;
    uint32_t padding;
};

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

/* Keys of an item of score: as many as leave two thread blocks for every multiprocessor, twice. */
uint32_t item_keys_for(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first,
                       uint32_t n)
{
    uint64_t keys = 0;
    for (uint32_t u = first; u < first + n; u++)
        keys += block_of(wave, u).n_valid;
    uint32_t each = min_item_keys;
    while (each < max_item_keys && keys / each > 4 * static_cast<uint64_t>(device->multiprocessors))
        each *= 2;
    return each;
}

bool overlaps; /* whether the code that this device loaded has score wait for anchor itself */

cudaError_t prepare(const dkv_cu_device *)
{
    cudaFuncAttributes attributes = {}; /* loads the kernel now, not at its first launch */
    cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(anchor));
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(score));
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

size_t extra_bytes(const dkv_cu_device *, const dkv_cu_wave *, uint32_t, uint32_t n)
{
    return sizeof(launch_list) + n * (sizeof(place) + sizeof(unsigned));
}

void fill(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
          void *extra)
{
    launch_list list = {{0, 0}, item_keys_for(device, wave, first, n), 0};
    place *places = reinterpret_cast<place *>(static_cast<launch_list *>(extra) + 1);
    unsigned *counters = reinterpret_cast<unsigned *>(places + n);
    for (uint32_t u = 0; u < n; u++) {
        const dkv_cu_block &block = block_of(wave, first + u);
        places[u] = {{list.items[0], list.items[1]}, first + u, wave->units_host[first + u].block};
        counters[u] = 0;
        list.items[0] += block.source == DKV_SOURCE_KEY_ANGLE ? ranges_of(block.n_valid) : 0;
        list.items[1] += ceil_div(block.n_valid, list.item_keys);
    }
    *static_cast<launch_list *>(extra) = list;
}

cudaError_t launch(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t, uint32_t n,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const launch_list &list = *static_cast<const launch_list *>(extra_host);
    const place *places = reinterpret_cast<const place *>(
        static_cast<const launch_list *>(extra_device) + 1);
    unsigned *counters = reinterpret_cast<unsigned *>(const_cast<place *>(places + n));
    const keys_args args = {wave->blocks, wave->units, places, counters, n, list.item_keys};
    cudaError_t error = cudaSuccess;
    if (list.items[0] > 0)
        error = dkv_cu_launch(reinterpret_cast<const void *>(anchor), list.items[0], threads, 0,
                              args, false, stream);
    if (error == cudaSuccess)
        error = dkv_cu_launch(reinterpret_cast<const void *>(score), list.items[1], threads, 0,
                              args, overlaps && list.items[0] > 0, stream);
    return error;
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_keys = {
    "keys", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch, true};
