/* Checks the scorers that use the tensor cores against float64 on the device, then times them
 * beside a plain read of the same bytes.
 *
 *   bench_fast [check|time|all] [substring of a case's name] [launches that a check compares, 2]
 *              [scorer]
 *
 * check_fast_shaken is the same with a scorer whose threads are now and then late on purpose
 * (may_be_late() in kernels/cuda/fast_ptx.cuh): it finds hand-overs that rely on being quick.
 *
 * It drives a scorer through the table the engine uses (kernels/cuda/plan.h): the first that takes
 * the case, or the one that is named, which skips what it does not take. Each case has fresh random
 * data, outputs poisoned before each check, and buffers that rotate through more than the L2 cache.
 * Times are medians of event-timed launches, microseconds. Exit: 0 good, 1 wrong, 77 no device.
 */
#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "kernels/cuda/device.cuh"

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_fast;

#define CHECK(call)                                                                \
    do {                                                                           \
        const cudaError_t error_ = (call);                                         \
        if (error_ != cudaSuccess) {                                               \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
            fflush(stdout);                                                        \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

namespace
{

const struct dkv_cu_scorer *const scorers[] = {&dkv_cu_scorer_stream, &dkv_cu_scorer_fast};

enum layout { DENSE, PAGE16, PAGE1 };
enum pattern { FLAT, PEAKED, OFFSET, SINK, SAME_VALUES };

struct shape_case {
    const char *name;
    uint32_t n, q_heads, kv_heads, window, dim, blocks, dtype;
    enum layout layout;
    enum pattern pattern;
    float softcap;
    bool sink_logits;
    bool timed;
};

const shape_case cases[] = {
    {"llama 128K", 131072, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"llama 64K", 65536, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"llama 32K", 32768, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"llama 16K", 16384, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"llama 4K", 4096, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"32 x 4K", 4096, 32, 8, 8, 128, 32, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"128 x 1K", 1024, 32, 8, 8, 128, 128, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"8 x 16K", 16384, 32, 8, 8, 128, 8, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"qwen 128K", 131072, 28, 4, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 64K", 65536, 32, 8, 32, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 4K", 4096, 32, 8, 32, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 32 x 4K", 4096, 32, 8, 32, 128, 32, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 page 16", 65536, 32, 8, 32, 128, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"page 16 64K", 65536, 32, 8, 8, 128, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"page 1 64K", 65536, 32, 8, 8, 128, 1, DKV_BF16, PAGE1, FLAT, 0, false, true},
    {"fp16 64K", 65536, 32, 8, 8, 128, 1, DKV_FP16, DENSE, FLAT, 0, false, true},
    {"dim 64 128K", 131072, 14, 2, 8, 64, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"fp8 128K", 131072, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 64K", 65536, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 32 x 4K", 4096, 32, 8, 8, 128, 32, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 4K", 4096, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 page 16 64K", 65536, 32, 8, 8, 128, 1, DKV_F8_E4M3, PAGE16, FLAT, 0, false, true},
    {"fp8 qwen 128K", 131072, 28, 4, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"peaked", 5000, 32, 8, 8, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"peaked fp16", 5000, 32, 8, 8, 128, 2, DKV_FP16, DENSE, PEAKED, 0, false, false},
    {"offset", 4097, 32, 8, 8, 128, 1, DKV_BF16, DENSE, OFFSET, 0, false, false},
    {"sink", 4096, 32, 8, 8, 128, 1, DKV_BF16, DENSE, SINK, 0, false, false},
    {"sink fp16", 70001, 32, 8, 8, 128, 1, DKV_FP16, DENSE, SINK, 0, false, false},
    {"sink 56 rows", 9000, 28, 4, 8, 128, 1, DKV_BF16, DENSE, SINK, 0, false, false},
    {"same values", 2000, 32, 8, 8, 128, 1, DKV_BF16, DENSE, SAME_VALUES, 0, false, false},
    {"softcap, sinks", 3000, 32, 8, 8, 128, 1, DKV_BF16, DENSE, PEAKED, 5.0f, true, false},
    {"n 9", 9, 32, 8, 8, 128, 3, DKV_BF16, DENSE, FLAT, 0, false, false},
    {"n 8", 8, 32, 8, 8, 128, 3, DKV_BF16, DENSE, FLAT, 0, false, false},
    {"n 65", 65, 8, 8, 8, 128, 3, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"n 513", 513, 28, 4, 8, 128, 3, DKV_BF16, PAGE16, PEAKED, 0, false, false},
    {"window 32", 3333, 32, 8, 32, 128, 2, DKV_BF16, PAGE1, PEAKED, 0, false, false},
    {"window 32 fp16", 5000, 32, 8, 32, 128, 2, DKV_FP16, DENSE, PEAKED, 0, false, false},
    {"window 32 sink", 70001, 32, 8, 32, 128, 1, DKV_BF16, DENSE, SINK, 0, false, false},
    {"window 32 same", 2000, 32, 8, 32, 128, 1, DKV_BF16, DENSE, SAME_VALUES, 0, false, false},
    {"window 32 capped", 3000, 32, 8, 32, 128, 1, DKV_BF16, PAGE16, PEAKED, 5.0f, true, false},
    {"window 32 offset", 4097, 24, 8, 32, 128, 1, DKV_FP16, DENSE, OFFSET, 0, false, false},
    {"window 32 n 33", 33, 32, 8, 32, 128, 3, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"window 32 dim 64", 1999, 24, 8, 32, 64, 2, DKV_BF16, PAGE16, PEAKED, 0, false, false},
    {"window 60 300 rows", 9000, 10, 2, 60, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"e5m2 peaked", 5000, 32, 8, 8, 128, 2, DKV_F8_E5M2, DENSE, PEAKED, 0, false, false},
    {"fp8 sink", 3000, 32, 8, 8, 128, 1, DKV_F8_E4M3, PAGE1, SINK, 0, false, false},
    {"fp8 same values", 2000, 28, 4, 8, 128, 1, DKV_F8_E4M3, DENSE, SAME_VALUES, 0, false, false},
    {"fp8 513", 513, 28, 4, 8, 128, 3, DKV_F8_E4M3, PAGE16, PEAKED, 0, false, false},
    {"e5m2 dim 64", 1999, 14, 2, 8, 64, 2, DKV_F8_E5M2, PAGE16, PEAKED, 5.0f, true, false},
    {"fp8 dim 64", 9001, 8, 1, 32, 64, 2, DKV_F8_E4M3, DENSE, PEAKED, 0, false, false},
    {"dim 64", 1999, 14, 2, 8, 64, 2, DKV_FP16, PAGE16, PEAKED, 0, false, false},
};

uint32_t align_up(uint32_t x, uint32_t to)
{
    return (x + to - 1) / to * to;
}

__device__ float gaussian(uint64_t i, uint32_t seed)
{
    uint32_t a = static_cast<uint32_t>(i * 2654435761u) ^ seed ^
                 static_cast<uint32_t>(i >> 32) * 0x9E3779B9u;
    a ^= a >> 16, a *= 0x85ebca6bu, a ^= a >> 13, a *= 0xc2b2ae35u, a ^= a >> 16;
    uint32_t b = a * 1664525u + 1013904223u;
    b ^= b >> 15, b *= 0x2c1b3c6du, b ^= b >> 12, b *= 0x297a2d39u, b ^= b >> 15;
    const float u = ((a >> 8) + 0.5f) / 16777216.0f;
    const float v = (b >> 8) / 16777216.0f;
    return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

__device__ void store_element(unsigned char *row, size_t i, float x, uint32_t dtype)
{
    if (dtype == DKV_FP16)
        reinterpret_cast<uint16_t *>(row)[i] = __half_as_ushort(__float2half(x));
    else if (dtype == DKV_BF16)
        reinterpret_cast<uint16_t *>(row)[i] = __bfloat16_as_ushort(__float2bfloat16(x));
    else
        row[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE,
                                       dtype == DKV_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
}

__global__ void fill_gaussian(unsigned char *to, size_t n, uint32_t seed, float scale, float offset,
                              uint32_t period, uint32_t dtype)
{
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += static_cast<size_t>(gridDim.x) * blockDim.x)
        store_element(to, i, gaussian(period ? i % period : i, seed) * scale + offset, dtype);
}

/* One key of a head points along the sum of the head's queries: an attention sink. */
__global__ void plant_sink(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t key,
                           float strength)
{
    const dkv_cu_unit &unit = units[blockIdx.x];
    const dkv_cu_block &block = blocks[unit.block];

    const unsigned char *row = dkv_cu_row(block.k, unit.k, key + block.valid_from,
                                          &unit.report->bad_k_entry);
    float sum = 0.0f;
    for (uint32_t r = 0; r < block.group * block.window; r++)
        sum += dkv_cu_load1(unit.q + (r / block.window) * block.q_head_stride +
                                (r % block.window) * block.q_row_stride + 2 * threadIdx.x,
                            block.q_dtype, 1.0f);
    store_element(const_cast<unsigned char *>(row), threadIdx.x, sum * strength / unit.k_scale,
                  block.k.dtype);
}

/* The float64 reference, one unit at a time. */
struct reference_buffers {
    double *logits; /* [rows][n] */
    double *top;    /* [rows] */
    double *sum;    /* [rows] */
    double *output; /* [rows][dim] */
    double *scores; /* [n] */
};

__device__ const unsigned char *query_row(const dkv_cu_block &block, const dkv_cu_unit &unit, int r)
{
    return unit.q + (r / block.window) * block.q_head_stride +
           (r % block.window) * block.q_row_stride;
}

__device__ double element(const unsigned char *row, uint32_t d, uint32_t dtype, float scale)
{
    return static_cast<double>(dkv_cu_load1(row + d * dkv_cu_dtype_bytes(dtype), dtype, 1.0f)) *
           static_cast<double>(scale);
}

__global__ void reference_logits(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                 reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const uint32_t key = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y;
    if (key >= block.n_valid)
        return;

    const unsigned char *k = dkv_cu_row(block.k, unit.k, key + block.valid_from,
                                        &unit.report->bad_k_entry);
    const unsigned char *q = query_row(block, unit, row);
    double z = 0.0;
    for (uint32_t d = 0; d < block.head_dim; d++)
        z += static_cast<double>(dkv_cu_load1(q + 2 * d, block.q_dtype, 1.0f)) *
             element(k, d, block.k.dtype, unit.k_scale);
    z *= static_cast<double>(block.scale);
    if (block.softcap != 0.0f)
        z = block.softcap * tanh(z / block.softcap);
    const bool visible = key <= block.n_valid - block.window + row % block.window;
    to.logits[static_cast<size_t>(row) * block.n_valid + key] = visible ? z : -1e300;
}

__device__ double block_reduce(double x, bool maximum)
{
    __shared__ double room[1024];
    room[threadIdx.x] = x;
    __syncthreads();
    for (int half = 512; half > 0; half /= 2) {
        if (threadIdx.x < half)
            room[threadIdx.x] = maximum ? fmax(room[threadIdx.x], room[threadIdx.x + half])
                                        : room[threadIdx.x] + room[threadIdx.x + half];
        __syncthreads();
    }
    const double result = room[0];
    __syncthreads();
    return result;
}

__global__ void reference_softmax(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                  reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const int row = blockIdx.x;
    const double *z = to.logits + static_cast<size_t>(row) * block.n_valid;
    const double sink = unit.sink_logits ? static_cast<double>(unit.sink_logits[row / block.window])
                                         : -1e300;
    double top = sink;
    for (uint32_t j = threadIdx.x; j < block.n_valid; j += blockDim.x)
        top = fmax(top, z[j]);
    top = block_reduce(top, true);
    double sum = 0.0;
    for (uint32_t j = threadIdx.x; j < block.n_valid; j += blockDim.x)
        sum += exp(z[j] - top);
    sum = block_reduce(sum, false);
    if (threadIdx.x == 0) {
        to.top[row] = top;
        to.sum[row] = sum + exp(sink - top);
    }
}

__global__ void reference_output(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                 reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const int row = blockIdx.y;
    const double *z = to.logits + static_cast<size_t>(row) * block.n_valid;
    double sum = 0.0;

    for (uint32_t j = blockIdx.x; j < block.n_valid; j += gridDim.x) {
        const unsigned char *v = dkv_cu_row(block.v, unit.v, j + block.valid_from,
                                            &unit.report->bad_k_entry);
        sum += exp(z[j] - to.top[row]) / to.sum[row] *
               element(v, threadIdx.x, block.v.dtype, unit.v_scale);
    }
    atomicAdd(&to.output[row * block.v_dim + threadIdx.x], sum);
}

__global__ void reference_scores(const dkv_cu_block *blocks, const dkv_cu_unit *units, uint32_t u,
                                 reference_buffers to)
{
    const dkv_cu_unit &unit = units[u];
    const dkv_cu_block &block = blocks[unit.block];
    const uint32_t key = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (key >= block.n_valid)
        return;

    const unsigned char *v = dkv_cu_row(block.v, unit.v, key + block.valid_from,
                                        &unit.report->bad_k_entry);
    double score = 0.0;
    for (uint32_t row = 0; row < block.group * block.window; row++) {
        const double weight = exp(to.logits[static_cast<size_t>(row) * block.n_valid + key] -
                                  to.top[row]);
        const double others = to.sum[row] - weight;
        double distance = 0.0;
        for (uint32_t d = lane; d < block.v_dim; d += 32) {
            const double x = to.output[row * block.v_dim + d] -
                             element(v, d, block.v.dtype, unit.v_scale);
            distance += x * x;
        }
        for (int lanes = 16; lanes > 0; lanes /= 2)
            distance += __shfl_xor_sync(~0u, distance, lanes);
        if (others > 0.0)
            score += weight / others * (weight / others) * distance;
    }
    if (lane == 0)
        to.scores[key] = score / block.group;
}

/* Reads every byte once, nothing else. */
__global__ void read_once(const uint4 *from, size_t n, unsigned *out)
{
    unsigned sum = 0;
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; u++)
            v[u] = i + u * stride < n ? __ldcs(from + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < 8; u++)
            sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (sum == 0x12345678u)
        *out = sum;
}

/* One set of inputs and everything a launch of it needs. */
struct batch {
    const struct dkv_cu_scorer *scorer;
    struct dkv_cu_wave wave;
    std::vector<dkv_cu_block> blocks;
    std::vector<dkv_cu_unit> units;
    unsigned char *kv;
    size_t kv_bytes;
    uint16_t *q;
    float *scores;
    unsigned char *extra;
    std::vector<unsigned char> extra_host;
    std::vector<void *> allocations;

    template <class T> T *alloc(size_t n)
    {
        void *p;
        CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
        allocations.push_back(p);
        return static_cast<T *>(p);
    }
    template <class T> T *upload(const std::vector<T> &from)
    {
        T *p = alloc<T>(from.size());
        CHECK(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
        return p;
    }
    ~batch()
    {
        for (void *p : allocations)
            cudaFree(p);
    }
};

bool is_fp8(const shape_case &c)
{
    return c.dtype == DKV_F8_E4M3 || c.dtype == DKV_F8_E5M2;
}

uint32_t cache_bytes(const shape_case &c) /* of an element */
{
    return is_fp8(c) ? 1 : 2;
}

void make_rows(const shape_case &c, dkv_cu_rows *rows, const int *table)
{
    memset(rows, 0, sizeof(*rows));
    const int64_t row = cache_bytes(c) * c.dim;
    rows->dtype = c.dtype;
    rows->align = 16;
    rows->mask = -1;
    rows->token_stride = row;
    if (c.layout == PAGE16) {
        rows->page_tokens = 16;
        rows->page_shift = 4;
        rows->token_stride = 2 * row * c.kv_heads;
        rows->page_stride = 16 * rows->token_stride;
    } else if (c.layout == PAGE1) {
        rows->page_tokens = 1;
        rows->token_stride = rows->page_stride = row * c.kv_heads;
    }
    if (table) {
        rows->table = table;
        rows->entry_bytes = 4;
        rows->entry_limit = 1ull << 30;
    }
}

/* The description of one block of a case. */
struct dkv_cu_block describe(const shape_case &c, const int *table)
{
    struct dkv_cu_block block;
    memset(&block, 0, sizeof(block));
    make_rows(c, &block.k, table);
    make_rows(c, &block.v, table);
    block.q_row_stride = 2 * c.dim;
    block.q_head_stride = 2 * c.dim * c.window;
    block.q_dtype = is_fp8(c) ? static_cast<uint32_t>(DKV_BF16) : c.dtype;
    block.q_scale = 1.0f;
    block.q_align = 16;
    block.group = c.q_heads / c.kv_heads;
    block.window = std::min(c.window, c.n);
    block.head_dim = block.v_dim = c.dim;
    block.n_valid = c.n;
    block.scale = 1.0f / sqrtf(static_cast<float>(c.dim));
    block.softcap = c.softcap;
    return block;
}

const struct dkv_cu_scorer *scorer_of(const shape_case &c, const struct dkv_cu_device *device,
                                      const char *name)
{
    const struct dkv_cu_block block = describe(c, nullptr);
    for (const struct dkv_cu_scorer *scorer : scorers) {
        if (scorer->takes(device, &block) && (!name || strcmp(name, scorer->name) == 0))
            return scorer;
    }
    return nullptr;
}

void make_batch(const shape_case &c, const struct dkv_cu_device *device,
                const struct dkv_cu_scorer *scorer, uint32_t seed, batch *b)
{
    b->scorer = scorer;
    const uint32_t n_pad = align_up(c.n, 16);
    const size_t side = static_cast<size_t>(n_pad) * c.kv_heads * c.dim; /* elements of K */
    const size_t side_bytes = side * cache_bytes(c);
    const uint32_t q_dtype = is_fp8(c) ? static_cast<uint32_t>(DKV_BF16) : c.dtype;
    b->kv_bytes = c.blocks * 2 * side_bytes;
    b->kv = b->alloc<unsigned char>(b->kv_bytes);
    const uint32_t group = c.q_heads / c.kv_heads;
    const size_t q_elements = static_cast<size_t>(c.q_heads) * c.window * c.dim;
    b->q = b->alloc<uint16_t>(q_elements * c.blocks);
    unsigned char *kv = b->kv;
    fill_gaussian<<<1024, 256>>>(reinterpret_cast<unsigned char *>(b->q), q_elements * c.blocks,
                                 seed + 1, c.pattern == PEAKED ? 4.0f : 1.0f, 0.0f, 0, q_dtype);
    for (uint32_t i = 0; i < c.blocks; i++) {
        fill_gaussian<<<2048, 256>>>(kv + i * 2 * side_bytes, 2 * side, seed + 2 + i, 1.0f, 0.0f, 0,
                                     c.dtype);
        if (c.layout == DENSE && c.pattern == OFFSET)
            fill_gaussian<<<2048, 256>>>(kv + (2 * i + 1) * side_bytes, side, seed + 77, 1.0f, 4.0f,
                                         0, c.dtype);
        if (c.layout == DENSE && c.pattern == SAME_VALUES)
            fill_gaussian<<<2048, 256>>>(kv + (2 * i + 1) * side_bytes, side, seed + 77, 1.0f, 0.0f,
                                         c.dim, c.dtype);
    }
    const uint32_t page = c.layout == PAGE16 ? 16 : 1;
    int *table = nullptr;
    if (c.layout != DENSE) {
        std::vector<int> entries(n_pad / page);
        for (size_t i = 0; i < entries.size(); i++)
            entries[i] = static_cast<int>(i);
        srand(seed);
        for (size_t i = entries.size(); i > 1; i--)
            std::swap(entries[i - 1], entries[(rand() * 32768u + rand()) % i]);
        table = b->upload(entries);
    }
    float *sink_logits = nullptr;
    if (c.sink_logits)
        sink_logits = b->upload(std::vector<float>(c.q_heads, 3.0f));
    b->scores = b->alloc<float>(static_cast<size_t>(n_pad) * c.kv_heads * c.blocks);
    int *exponent = b->alloc<int>(c.blocks * c.kv_heads);
    std::vector<dkv_cu_report> reports(c.blocks * c.kv_heads, {~0ull, ~0ull, ~0ull, 0, 0});
    dkv_cu_report *report = b->upload(reports);
    for (uint32_t i = 0; i < c.blocks; i++) {
        const struct dkv_cu_block block = describe(c, table);
        b->blocks.push_back(block);
        for (uint32_t h = 0; h < c.kv_heads; h++) {
            dkv_cu_unit unit;
            memset(&unit, 0, sizeof(unit));
            const uint32_t index = i * c.kv_heads + h;
            const size_t row_bytes = cache_bytes(c) * c.dim;
            unsigned char *base = b->kv + i * 2 * side_bytes;
            unit.q = reinterpret_cast<unsigned char *>(b->q + i * q_elements +
                                                       h * group * c.window * c.dim);
            unit.k = base + (c.layout == DENSE    ? c.n * row_bytes * h
                             : c.layout == PAGE16 ? 2 * row_bytes * h
                                                  : row_bytes * h);
            unit.v = c.layout == PAGE16 ? unit.k + row_bytes : unit.k + side_bytes;
            unit.sink_logits = sink_logits ? sink_logits + h * group : nullptr;
            unit.scores = b->scores + static_cast<size_t>(index) * n_pad;
            unit.exponent = exponent + index;
            unit.work = b->alloc<unsigned char>(scorer->unit_bytes(&block));
            unit.report = report + index;
            unit.k_scale = is_fp8(c) ? 0.75f : 1.0f;
            unit.v_scale = is_fp8(c) ? 1.7f : 1.0f;
            unit.block = i;
            unit.head = h;
            b->units.push_back(unit);
        }
    }
    memset(&b->wave, 0, sizeof(b->wave));
    b->wave.blocks_host = b->blocks.data();
    b->wave.units_host = b->units.data();
    b->wave.n_blocks = static_cast<uint32_t>(b->blocks.size());
    b->wave.n_units = static_cast<uint32_t>(b->units.size());
    b->wave.blocks = b->upload(b->blocks);
    b->wave.units = b->upload(b->units);
    b->wave.shared = b->alloc<unsigned char>(scorer->shared_bytes ? scorer->shared_bytes(device)
                                                                  : 0);
    b->extra_host.resize(scorer->extra_bytes(device, &b->wave, 0, b->wave.n_units));
    b->extra = b->alloc<unsigned char>(b->extra_host.size());
    scorer->fill(device, &b->wave, 0, b->wave.n_units, b->extra_host.data());
    if (c.pattern == SINK)
        plant_sink<<<b->wave.n_units, c.dim>>>(b->wave.blocks, b->wave.units, c.n > 1 ? 1 : 0,
                                               10.0f / c.window);
    CHECK(cudaDeviceSynchronize());
}

void upload_extra(batch *b)
{
    CHECK(cudaMemcpyAsync(b->extra, b->extra_host.data(), b->extra_host.size(),
                          cudaMemcpyHostToDevice, 0));
}

void launch(const struct dkv_cu_device *device, batch *b)
{
    CHECK(
        b->scorer->launch(device, &b->wave, 0, b->wave.n_units, b->extra_host.data(), b->extra, 0));
}

/* Relative errors of one unit's scores; false if they are beyond what docs/numerics.md allows. */
bool compare_unit(const shape_case &c, batch *b, uint32_t u)
{
    const dkv_cu_block &block = b->blocks[b->units[u].block];
    const uint32_t rows = block.group * block.window;
    const uint32_t n = block.n_valid;
    reference_buffers to;
    CHECK(cudaMalloc(&to.logits, sizeof(double) * rows * n));
    CHECK(cudaMalloc(&to.top, sizeof(double) * rows));
    CHECK(cudaMalloc(&to.sum, sizeof(double) * rows));
    CHECK(cudaMalloc(&to.output, sizeof(double) * rows * c.dim));
    CHECK(cudaMalloc(&to.scores, sizeof(double) * n));
    CHECK(cudaMemset(to.output, 0, sizeof(double) * rows * c.dim));
    reference_logits<<<dim3((n + 255) / 256, rows), 256>>>(b->wave.blocks, b->wave.units, u, to);
    reference_softmax<<<rows, 1024>>>(b->wave.blocks, b->wave.units, u, to);
    reference_output<<<dim3(64, rows), c.dim>>>(b->wave.blocks, b->wave.units, u, to);
    reference_scores<<<(n + 7) / 8, 256>>>(b->wave.blocks, b->wave.units, u, to);
    std::vector<double> want(n);
    std::vector<float> got(n);
    CHECK(cudaMemcpy(want.data(), to.scores, sizeof(double) * n, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), b->units[u].scores, sizeof(float) * n, cudaMemcpyDeviceToHost));
    cudaFree(to.logits), cudaFree(to.top), cudaFree(to.sum), cudaFree(to.output);
    cudaFree(to.scores);
    double largest = 0.0;
    for (double s : want)
        largest = std::max(largest, s);
    std::vector<double> error(n);
    uint32_t worst = 0;
    for (uint32_t j = 0; j < n; j++) {
        const double score = ldexp(static_cast<double>(got[j]), -2 * DKV_CU_EXPONENT);
        const double floor = std::max(want[j], std::max(1e-12 * largest, 1e-300));
        error[j] = c.pattern == SAME_VALUES ? fabs(score) : fabs(score - want[j]) / floor;
        if (!(error[j] < 1e30))
            error[j] = 1e30;
        if (error[j] > error[worst])
            worst = j;
    }
    const double worst_error = error[worst];
    std::sort(error.begin(), error.end());
    const bool good = error[n / 2] <= 5e-4 && worst_error <= 5e-3;
    printf("%-16s unit %-4u median %.1e p99 %.1e max %.1e at %u (want %.3e)%s\n", c.name, u,
           error[n / 2], error[static_cast<size_t>(n) * 99 / 100], worst_error, worst, want[worst],
           good ? "" : "  WRONG");
    return good;
}

bool check(const shape_case &c, const struct dkv_cu_device *device,
           const struct dkv_cu_scorer *scorer, int launches)
{
    batch b;
    make_batch(c, device, scorer, 4242, &b);
    const size_t n_scores = static_cast<size_t>(align_up(c.n, 16)) * c.kv_heads * c.blocks;
    std::vector<float> first(n_scores);
    std::vector<float> next(n_scores);
    bool good = true;
    int differ = 0;
    for (int run = 0; run < launches; run++) {
        CHECK(cudaMemset(b.scores, 0xff, n_scores * sizeof(float)));
        upload_extra(&b);
        launch(device, &b);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy((run ? next : first).data(), b.scores, n_scores * sizeof(float),
                         cudaMemcpyDeviceToHost));
        differ += run > 0 && memcmp(first.data(), next.data(), n_scores * sizeof(float)) != 0;
    }
    good &= compare_unit(c, &b, 0);
    if (b.wave.n_units > 1)
        good &= compare_unit(c, &b, b.wave.n_units - 1);
    if (differ > 0) {
        printf("%-16s %d of %d launches differ from the first\n", c.name, differ, launches);
        good = false;
    }
    std::vector<dkv_cu_report> reports(b.wave.n_units);
    CHECK(cudaMemcpy(reports.data(), b.units[0].report, reports.size() * sizeof(reports[0]),
                     cudaMemcpyDeviceToHost));
    for (const dkv_cu_report &report : reports) {
        if (report.flags != 0 || ~report.bad_k_entry || ~report.bad_v_entry) {
            printf("%-16s a unit reports flags %u\n", c.name, report.flags);
            good = false;
            break;
        }
    }
    return good;
}

template <class F> float median_us(F work)
{
    cudaEvent_t start;
    cudaEvent_t stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < 25; i++) {
        const float us = work(i, start, stop);
        if (i >= 4)
            times.push_back(us);
    }
    std::sort(times.begin(), times.end());
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    return times[times.size() / 2];
}

float elapsed_us(cudaEvent_t start, cudaEvent_t stop)
{
    float ms;
    CHECK(cudaEventSynchronize(stop));
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    return 1000.0f * ms;
}

void time_case(const shape_case &c, const struct dkv_cu_device *device,
               const struct dkv_cu_scorer *scorer)
{
    const size_t bytes = static_cast<size_t>(c.n) * c.kv_heads * c.dim * 2 * cache_bytes(c) *
                         c.blocks;
    const int sets = static_cast<int>(std::min<size_t>(16, std::max<size_t>(3, 400000000 / bytes)));
    std::vector<batch> batches(sets);
    for (int i = 0; i < sets; i++)
        make_batch(c, device, scorer, 1000 * i, &batches[i]);
    unsigned *out = batches[0].alloc<unsigned>(1);
    const float once = median_us([&](int i, cudaEvent_t start, cudaEvent_t stop) {
        const batch &b = batches[i % sets];
        CHECK(cudaEventRecord(start));
        read_once<<<132 * 8, 256>>>(reinterpret_cast<const uint4 *>(b.kv), b.kv_bytes / 16, out);
        CHECK(cudaEventRecord(stop));
        return elapsed_us(start, stop);
    });
    const float ours = median_us([&](int i, cudaEvent_t start, cudaEvent_t stop) {
        batch &b = batches[i % sets];
        upload_extra(&b);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(start));
        launch(device, &b);
        CHECK(cudaEventRecord(stop));
        return elapsed_us(start, stop);
    });
    printf("%-16s %-6s scores %7.1f us   read once %7.1f us   ratio %.2f\n", c.name, scorer->name,
           ours, once, ours / once);
    fflush(stdout);
}

} // namespace

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    const char *filter = argc > 2 ? argv[2] : "";
    const int launches = argc > 3 ? atoi(argv[3]) : 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
        printf("no CUDA device\n");
        return 77;
    }
    struct dkv_cu_device device;
    memset(&device, 0, sizeof(device));
    device.major = properties.major;
    device.minor = properties.minor;
    device.multiprocessors = properties.multiProcessorCount;
    device.shared_bytes_max = static_cast<int>(properties.sharedMemPerBlockOptin);
    for (const struct dkv_cu_scorer *scorer : scorers)
        CHECK(scorer->prepare(&device));
    const char *name = argc > 4 ? argv[4] : nullptr;
    bool good = true;
    for (const shape_case &c : cases) {
        const struct dkv_cu_scorer *scorer = scorer_of(c, &device, name);
        if (scorer && strstr(c.name, filter) && strcmp(what, "time") != 0)
            good &= check(c, &device, scorer, launches);
    }
    for (const shape_case &c : cases) {
        const struct dkv_cu_scorer *scorer = scorer_of(c, &device, name);
        if (scorer && strstr(c.name, filter) && c.timed && strcmp(what, "check") != 0)
            time_case(c, &device, scorer);
    }
    printf(good ? "all good\n" : "WRONG\n");
    return good ? 0 : 1;
}
