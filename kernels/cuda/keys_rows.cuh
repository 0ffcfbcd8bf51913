/* How the scorer of keys reads them: a warp takes several keys with one load, each of 8, 16 or 32
 * lanes, a lane 8 adjacent elements of it, and has several such loads under way.
 *
 * The fast way is for rows that are aligned to what a lane loads, and for numbers whose squares
 * stay inside float32. Whatever is not, a batch of keys at a time, is read once more and computed
 * in double precision; that also finds the place of a number that is none. Elements are taken as
 * stored: the scale of fp8 keys counts at the end. Included by keys.cu.
 */
#ifndef DKV_KERNELS_CUDA_KEYS_ROWS_CUH
#define DKV_KERNELS_CUDA_KEYS_ROWS_CUH

#include "kernels/cuda/device.cuh"

namespace
{

constexpr int threads = 512;
constexpr int resident = 2; /* thread blocks of a multiprocessor */
constexpr uint32_t warps = threads / 32;
constexpr float least_square = 1e-30f; /* of a length in float32 */
constexpr float most_square = 1e30f;

__host__ __device__ inline uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* What a thread block works on, in shared memory, because descriptors in global memory are far. */
struct job {
    dkv_cu_unit unit;
    dkv_cu_block block;
};

__device__ inline uint32_t lane_of(void)
{
    return threadIdx.x % 32;
}

/* Sum over the `lanes` lanes that have a key, in each of them. */
template <int lanes, class number> __device__ __forceinline__ number sum_of_key(number x)
{
#pragma unroll
    for (int step = lanes / 2; step; step >>= 1)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* ---- rows ---- */

/* Where the lane's elements of key `key` start; NULL if the key is behind `end`, masked or behind a
 * bad table entry, or has no such elements. */
__device__ inline const unsigned char *row_of(const job &work, uint32_t key, uint32_t end,
                                              uint32_t dim)
{
    const dkv_cu_block &block = work.block;
    if (key >= end || dim >= block.head_dim || dkv_cu_masked(work.unit, key))
        return nullptr;
    const unsigned char *row = dkv_cu_row(block.k, work.unit.k, block.valid_from + key,
                                          &work.unit.report->bad_k_entry);
    return row ? row + dim * dkv_cu_dtype_bytes(block.k.dtype) : nullptr;
}

/* The lane's rows of keys first, first + step, .. */
template <int loads>
__device__ __forceinline__ void find_rows(const job &work, uint32_t first, uint32_t step,
                                          uint32_t end, uint32_t dim,
                                          const unsigned char *(&rows)[loads])
{
    const dkv_cu_block &block = work.block;
    if (block.k.page_tokens != 0 || work.unit.mask) {
#pragma unroll
        for (int i = 0; i < loads; i++)
            rows[i] = row_of(work, first + i * step, end, dim);
        return;
    }
    const unsigned char *base = work.unit.k + dim * dkv_cu_dtype_bytes(block.k.dtype) +
                                (block.valid_from + first) * block.k.token_stride;
#pragma unroll
    for (int i = 0; i < loads; i++)
        rows[i] = first + i * step < end && dim < block.head_dim
                      ? base + i * step * block.k.token_stride
                      : nullptr;
}

/* ---- elements ---- */

/* A lane's 8 elements, as they come. */
template <uint32_t dtype> struct eight_elements {
    static constexpr int words = dtype == DKV_FP32                        ? 8
                                 : dtype == DKV_BF16 || dtype == DKV_FP16 ? 4
                                                                          : 2;
    unsigned word[words];
};

/* Past the first cache, in which nothing is found again. */
__device__ __forceinline__ uint4 fetch_16(const unsigned char *from)
{
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ __forceinline__ uint2 fetch_8(const unsigned char *from)
{
    uint2 x;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(from));
    return x;
}

template <uint32_t dtype>
__device__ __forceinline__ void fetch(const unsigned char *row, eight_elements<dtype> &out)
{
#pragma unroll
    for (int i = 0; i < out.words; i++)
        out.word[i] = 0;
    if (!row)
        return;
    if constexpr (out.words == 2) {
        const uint2 two = fetch_8(row);
        out.word[0] = two.x, out.word[1] = two.y;
    } else {
#pragma unroll
        for (int i = 0; i < out.words; i += 4) {
            const uint4 four = fetch_16(row + 4 * i);
            out.word[i] = four.x, out.word[i + 1] = four.y;
            out.word[i + 2] = four.z, out.word[i + 3] = four.w;
        }
    }
}

template <uint32_t dtype>
__device__ __forceinline__ void unpack(const eight_elements<dtype> &in, float (&x)[8])
{
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float2 pair;
        if constexpr (dtype == DKV_FP32) {
            pair = {__uint_as_float(in.word[i]), __uint_as_float(in.word[i + 1])};
        } else if constexpr (dtype == DKV_BF16 || dtype == DKV_FP16) {
            pair = dkv_cu_pair(in.word[i / 2], dtype);
        } else {
            const unsigned short bits = in.word[i / 4] >> (8 * (i % 4)) & 0xffff;
            pair = __half22float2(__half2(
                __nv_cvt_fp8x2_to_halfraw2(bits, dtype == DKV_F8_E4M3 ? __NV_E4M3 : __NV_E5M2)));
        }
        x[i] = pair.x, x[i + 1] = pair.y;
    }
}

__device__ __forceinline__ float square_of(const float (&x)[8])
{
    float sum = x[0] * x[0];
#pragma unroll
    for (int e = 1; e < 8; e++)
        sum = fmaf(x[e], x[e], sum);
    return sum;
}

/* ---- the slow way ---- */

/* The lane's elements of a key whatever their alignment, its 8 of every 8 * lanes; zeros if there
 * is no row. What is no number is reported. */
template <int lanes, int rounds> struct slow_key {
    float x[rounds][8];
};

template <int lanes, int rounds>
__device__ inline slow_key<lanes, rounds> load_slowly(const job &work, uint32_t key, uint32_t end)
{
    slow_key<lanes, rounds> part = {};
#pragma unroll
    for (int r = 0; r < rounds; r++) {
        const uint32_t dim = lane_of() % lanes * 8 + r * lanes * 8;
        const unsigned char *row = row_of(work, key, end, dim);
        if (!row)
            continue;
        dkv_cu_load8(row, work.block.k.dtype, work.block.k.align, 1.0f, part.x[r]);
        for (int e = 0; e < 8; e++)
            if (!dkv_cu_finite(part.x[r][e]))
                atomicMin(&work.unit.report->nonfinite,
                          DKV_CU_PLACE(1, work.unit.head, work.block.valid_from + key, dim + e));
    }
    return part;
}

template <int lanes, int rounds>
__device__ inline double length_of(const slow_key<lanes, rounds> &part)
{
    double sum = 0;
#pragma unroll
    for (int r = 0; r < rounds; r++)
        for (int e = 0; e < 8; e++) {
            const double x = part.x[r][e];
            sum = fma(x, x, sum);
        }
    return sqrt(sum_of_key<lanes>(sum));
}

/* ---- which way ---- */

/* Of keys of a type, at most 8 * lanes elements long. */
template <uint32_t dtype_, int lanes_> struct fast_way {
    static constexpr uint32_t dtype = dtype_;
    static constexpr int lanes = lanes_;
    static constexpr int rounds = 1;
    static constexpr int loads = dtype == DKV_FP32 ? 4 : 8; /* under way, of a lane */
    static constexpr bool fast = true;
};

/* Of any other. */
struct slow_way {
    static constexpr uint32_t dtype = DKV_FP32; /* no matter */
    static constexpr int lanes = 32;
    static constexpr int rounds = DKV_HEAD_DIM_MAX / 256;
    static constexpr int loads = 8;
    static constexpr bool fast = false;
};

} // namespace

#endif
