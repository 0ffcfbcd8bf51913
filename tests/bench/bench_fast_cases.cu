/* The cases of bench_fast, and their batches: fresh random keys, values and queries. */
#include <math.h>
#include <string.h>

#include "tests/bench/bench_fast.cuh"

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit_any;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream_256;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream_fp8;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_fast;

namespace bench_fast
{

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
    {"qwen 32K", 32768, 28, 4, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"qwen 4K", 4096, 28, 4, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"64 x qwen 4K", 4096, 28, 4, 8, 128, 64, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"qwen page 16 128K", 131072, 28, 4, 8, 128, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"window 32 64K", 65536, 32, 8, 32, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 4K", 4096, 32, 8, 32, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 32 x 4K", 4096, 32, 8, 32, 128, 32, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"window 32 page 16", 65536, 32, 8, 32, 128, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"page 16 64K", 65536, 32, 8, 8, 128, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"page 1 64K", 65536, 32, 8, 8, 128, 1, DKV_BF16, PAGE1, FLAT, 0, false, true},
    {"fp16 64K", 65536, 32, 8, 8, 128, 1, DKV_FP16, DENSE, FLAT, 0, false, true},
    {"dim 64 128K", 131072, 14, 2, 8, 64, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 gemma 32K", 32768, 16, 8, 8, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 gemma 128K", 131072, 16, 8, 8, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 gemma 4K", 4096, 16, 8, 8, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 16 x gemma 4K", 4096, 16, 8, 8, 256, 16, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 64 x gemma 1K", 1024, 16, 8, 8, 256, 64, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 page 16 32K", 32768, 16, 8, 8, 256, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"256 32 rows 32K", 32768, 32, 8, 8, 256, 1, DKV_FP16, DENSE, FLAT, 0, false, true},
    {"256 32 rows 128K", 131072, 32, 8, 8, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 64 rows 32K", 32768, 64, 8, 8, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 qwen next 128K", 131072, 16, 2, 8, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"256 window 32 32K", 32768, 16, 8, 32, 256, 1, DKV_BF16, PAGE16, FLAT, 0, false, true},
    {"256 128 rows 32K", 32768, 32, 8, 32, 256, 1, DKV_BF16, DENSE, FLAT, 0, false, true},
    {"fp8 128K", 131072, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 64K", 65536, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 32 x 4K", 4096, 32, 8, 8, 128, 32, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 4K", 4096, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 page 16 64K", 65536, 32, 8, 8, 128, 1, DKV_F8_E4M3, PAGE16, FLAT, 0, false, true},
    {"fp8 qwen 128K", 131072, 28, 4, 8, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 128 x 1K", 1024, 32, 8, 8, 128, 128, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 window 32 64K", 65536, 32, 8, 32, 128, 1, DKV_F8_E4M3, DENSE, FLAT, 0, false, true},
    {"fp8 page 1 64K", 65536, 32, 8, 8, 128, 1, DKV_F8_E4M3, PAGE1, FLAT, 0, false, true},
    {"e5m2 128K", 131072, 32, 8, 8, 128, 1, DKV_F8_E5M2, DENSE, FLAT, 0, false, true},
    {"llama 128K restkv", 131072, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV},
    {"llama 32K restkv", 32768, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV},
    {"llama 32K rows", 32768, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV_MEAN},
    {"llama 32K andpro", 32768, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, ANDPRO},
    {"llama 4K restkv", 4096, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV},
    {"llama 4K rows", 4096, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV_MEAN},
    {"llama 4K andpro", 4096, 32, 8, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, ANDPRO},
    {"qwen 128K restkv", 131072, 28, 4, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV},
    {"qwen 128K rows", 131072, 28, 4, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, RESTKV_EMA},
    {"qwen 128K andpro", 131072, 28, 4, 8, 128, 1, DKV_BF16, DENSE, FLAT, 0, false, true, ANDPRO},
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
    {"window 32 4 heads", 20011, 16, 4, 32, 128, 1, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"window 32 8 a head", 20011, 32, 4, 32, 128, 1, DKV_FP16, PAGE16, FLAT, 0, false, false},
    {"window 60 300 rows", 9000, 10, 2, 60, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 peaked", 5000, 16, 8, 8, 256, 2, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 peaked fp16", 5000, 32, 8, 8, 256, 2, DKV_FP16, DENSE, PEAKED, 0, false, false},
    {"256 offset", 4097, 32, 8, 8, 256, 1, DKV_BF16, DENSE, OFFSET, 0, false, false},
    {"256 sink", 4096, 16, 8, 8, 256, 1, DKV_BF16, DENSE, SINK, 0, false, false},
    {"256 sink fp16", 70001, 32, 8, 8, 256, 1, DKV_FP16, DENSE, SINK, 0, false, false},
    {"256 same values", 2000, 32, 8, 8, 256, 1, DKV_BF16, DENSE, SAME_VALUES, 0, false, false},
    {"256 softcap, sinks", 3000, 16, 8, 8, 256, 1, DKV_BF16, DENSE, PEAKED, 5.0f, true, false},
    {"256 page 1", 3333, 16, 8, 8, 256, 2, DKV_FP16, PAGE1, PEAKED, 0, false, false},
    {"256 n 9", 9, 16, 8, 8, 256, 3, DKV_BF16, DENSE, FLAT, 0, false, false},
    {"256 n 8", 8, 32, 8, 8, 256, 3, DKV_BF16, DENSE, FLAT, 0, true, false},
    {"256 n 65", 65, 8, 8, 8, 256, 3, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 n 513", 513, 28, 7, 8, 256, 3, DKV_BF16, PAGE16, PEAKED, 0, false, false},
    {"256 64 peaked", 5000, 64, 8, 8, 256, 2, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 64 peaked fp16", 5000, 16, 2, 8, 256, 2, DKV_FP16, PAGE16, PEAKED, 0, false, false},
    {"256 64 offset", 4097, 16, 8, 32, 256, 1, DKV_BF16, DENSE, OFFSET, 0, false, false},
    {"256 56 sink", 9000, 28, 4, 8, 256, 1, DKV_BF16, DENSE, SINK, 0, false, false},
    {"256 64 sink fp16", 70001, 16, 2, 8, 256, 1, DKV_FP16, DENSE, SINK, 0, false, false},
    {"256 64 same", 2000, 64, 8, 8, 256, 1, DKV_BF16, DENSE, SAME_VALUES, 0, false, false},
    {"256 64 capped", 3000, 16, 8, 32, 256, 1, DKV_BF16, PAGE16, PEAKED, 5.0f, true, false},
    {"256 64 n 9", 9, 64, 8, 8, 256, 3, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 64 n 8", 8, 16, 2, 8, 256, 3, DKV_FP16, DENSE, FLAT, 0, true, false},
    {"256 64 n 65", 65, 16, 2, 8, 256, 3, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 64 n 513", 513, 40, 5, 8, 256, 3, DKV_BF16, PAGE1, PEAKED, 0, false, false},
    {"256 33 rows", 1999, 11, 1, 3, 256, 5, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"256 100 rows", 3333, 10, 2, 20, 256, 2, DKV_FP16, PAGE16, PEAKED, 0, false, false},
    {"256 300 rows", 9000, 10, 2, 60, 256, 2, DKV_BF16, DENSE, PEAKED, 0, false, false},
    {"e5m2 peaked", 5000, 32, 8, 8, 128, 2, DKV_F8_E5M2, DENSE, PEAKED, 0, false, false},
    {"fp8 sink", 3000, 32, 8, 8, 128, 1, DKV_F8_E4M3, PAGE1, SINK, 0, false, false},
    {"fp8 same values", 2000, 28, 4, 8, 128, 1, DKV_F8_E4M3, DENSE, SAME_VALUES, 0, false, false},
    {"fp8 n 9", 9, 32, 8, 8, 128, 3, DKV_F8_E4M3, DENSE, FLAT, 0, false, false},
    {"fp8 n 8", 8, 32, 8, 8, 128, 3, DKV_F8_E4M3, DENSE, FLAT, 0, true, false},
    {"fp8 n 65", 65, 8, 8, 8, 128, 3, DKV_F8_E4M3, DENSE, PEAKED, 0, false, false},
    {"fp8 peaked", 5000, 32, 8, 8, 128, 2, DKV_F8_E4M3, DENSE, PEAKED, 0, false, false},
    {"fp8 offset", 4097, 32, 8, 8, 128, 1, DKV_F8_E4M3, DENSE, OFFSET, 0, false, false},
    {"fp8 sink 56 rows", 9000, 28, 4, 8, 128, 1, DKV_F8_E4M3, DENSE, SINK, 0, false, false},
    {"fp8 513", 513, 28, 4, 8, 128, 3, DKV_F8_E4M3, PAGE16, PEAKED, 0, false, false},
    {"e5m2 dim 64", 1999, 14, 2, 8, 64, 2, DKV_F8_E5M2, PAGE16, PEAKED, 5.0f, true, false},
    {"fp8 dim 64", 9001, 8, 1, 32, 64, 2, DKV_F8_E4M3, DENSE, PEAKED, 0, false, false},
    {"dim 64", 1999, 14, 2, 8, 64, 2, DKV_FP16, PAGE16, PEAKED, 0, false, false},
    {"restkv peaked", 5000, 32, 8, 8, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false, RESTKV},
    {"restkv fp16", 5000, 32, 8, 8, 128, 2, DKV_FP16, DENSE, PEAKED, 0, false, false, RESTKV},
    {"restkv offset", 4097, 32, 8, 8, 128, 1, DKV_BF16, DENSE, OFFSET, 0, false, false, RESTKV},
    {"restkv sink", 4096, 32, 8, 8, 128, 1, DKV_BF16, DENSE, SINK, 0, false, false, RESTKV},
    {"restkv sink fp16", 70001, 28, 4, 8, 128, 1, DKV_FP16, PAGE16, SINK, 0, true, false, RESTKV},
    {"restkv n 9", 9, 32, 8, 8, 128, 3, DKV_BF16, DENSE, PEAKED, 0, false, false, RESTKV},
    {"restkv n 8", 8, 32, 8, 8, 128, 3, DKV_BF16, DENSE, FLAT, 0, false, false, RESTKV},
    {"restkv n 65", 65, 8, 8, 8, 128, 3, DKV_FP16, DENSE, PEAKED, 0, false, false, RESTKV},
    {"restkv n 513", 513, 28, 4, 8, 128, 3, DKV_BF16, PAGE1, PEAKED, 5.0f, true, false, RESTKV},
    {"restkv 16", 3333, 24, 8, 16, 128, 2, DKV_BF16, PAGE16, PEAKED, 0, false, false, RESTKV},
    {"restkv 32", 3333, 32, 8, 32, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false, RESTKV},
    {"restkv 32 sink", 9001, 32, 8, 32, 128, 1, DKV_BF16, DENSE, SINK, 0, false, false, RESTKV},
    {"restkv dim 64", 1999, 14, 2, 8, 64, 2, DKV_FP16, PAGE16, PEAKED, 0, false, false, RESTKV},
    {"restkv dim 64 32", 1999, 2, 2, 32, 64, 2, DKV_BF16, DENSE, SINK, 0, false, false, RESTKV},
    {"rows peaked", 5000, 32, 8, 8, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false, RESTKV_EMA},
    {"rows fp16", 5000, 28, 4, 9, 128, 2, DKV_FP16, DENSE, PEAKED, 0, false, false, RESTKV_EMA},
    {"rows sink", 70001, 32, 8, 8, 128, 1, DKV_BF16, DENSE, SINK, 0, false, false, RESTKV_MEAN},
    {"rows same", 2000, 32, 8, 8, 128, 1, DKV_BF16, DENSE, SAME_VALUES, 0, false, false,
     RESTKV_MEAN},
    {"rows offset", 4097, 32, 8, 8, 128, 1, DKV_BF16, DENSE, OFFSET, 0, false, false, RESTKV_MEAN},
    {"rows n 8", 8, 32, 8, 8, 128, 3, DKV_BF16, DENSE, FLAT, 0, true, false, RESTKV_MEAN},
    {"rows 60", 9000, 10, 2, 60, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false, RESTKV_EMA},
    {"rows dim 64", 1999, 14, 2, 8, 64, 2, DKV_FP16, PAGE16, PEAKED, 5.0f, true, false, RESTKV_EMA},
    {"andpro peaked", 5000, 32, 8, 8, 128, 2, DKV_BF16, DENSE, PEAKED, 0, false, false, ANDPRO},
    {"andpro sink", 70001, 28, 4, 8, 128, 1, DKV_FP16, DENSE, SINK, 0, false, false, ANDPRO_MEAN},
    {"andpro offset", 4097, 32, 8, 8, 128, 1, DKV_BF16, DENSE, OFFSET, 0, false, false, ANDPRO},
    {"andpro n 8", 8, 32, 8, 8, 128, 3, DKV_BF16, DENSE, PEAKED, 0, true, false, ANDPRO},
    {"andpro 513", 513, 28, 4, 32, 128, 3, DKV_BF16, PAGE16, PEAKED, 0, false, false, ANDPRO_MEAN},
    {"andpro dim 64", 1999, 14, 2, 8, 64, 2, DKV_BF16, PAGE1, PEAKED, 5.0f, true, false, ANDPRO},
};

const size_t n_cases = sizeof(cases) / sizeof(cases[0]);

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

const struct dkv_cu_scorer *const scorers[] = {
    &dkv_cu_scorer_stream, &dkv_cu_scorer_fast, &dkv_cu_scorer_stream_16bit_any,
    &dkv_cu_scorer_stream_256, &dkv_cu_scorer_stream_fp8};

cudaError_t prepare_scorers(const struct dkv_cu_device *device)
{
    for (const struct dkv_cu_scorer *scorer : scorers)
        if (const cudaError_t error = scorer->prepare(device); error != cudaSuccess)
            return error;
    return cudaSuccess;
}

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
    block.heads = c.kv_heads;
    block.group = c.q_heads / c.kv_heads;
    block.window = std::min(c.window, c.n);
    block.head_dim = block.v_dim = c.dim;
    block.n_valid = c.n;
    block.scale = 1.0f / sqrtf(static_cast<float>(c.dim));
    block.softcap = c.softcap;
    block.form = c.rule == DROPKV   ? DKV_CU_FORM_DROPKV
                 : c.rule == RESTKV ? DKV_CU_FORM_AVERAGE
                 : c.rule >= ANDPRO ? DKV_CU_FORM_PROJ
                                    : DKV_CU_FORM_DIST;
    block.reduce = c.rule == RESTKV_MEAN || c.rule == ANDPRO_MEAN ? DKV_REDUCE_MEAN
                   : c.rule == RESTKV_EMA                         ? DKV_REDUCE_EMA
                   : c.rule == RESTKV                             ? DKV_REDUCE_EMA_FIRST
                                                                  : DKV_REDUCE_SUM;
    block.ema_alpha = 0.3f;
    return block;
}

const struct dkv_cu_scorer *scorer_of(const shape_case &c, const struct dkv_cu_device *device,
                                      const char *name)
{
    const struct dkv_cu_block block = describe(c, nullptr);
    for (const struct dkv_cu_scorer *scorer : scorers) {
        if ((c.rule == DROPKV || scorer->knows_rules) && scorer->takes(device, &block) &&
            (!name || strcmp(name, scorer->name) == 0))
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
            unit.exponent = exponent + index;
            unit.work = b->alloc<unsigned char>(dkv_cu_work_bytes(scorer, &block));
            unit.scores = dkv_cu_scores_in_work(scorer, &block)
                              ? reinterpret_cast<float *>(unit.work + scorer->scores_at(&block))
                              : b->alloc<float>(n_pad);
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
    /* In float64 1 - p has no digits left where a sink is larger than that. */
    const float sink = (c.dim > 128 ? 7.0f : 10.0f) / c.window;
    if (c.pattern == SINK)
        plant_sink<<<b->wave.n_units, c.dim>>>(b->wave.blocks, b->wave.units, c.n > 1 ? 1 : 0,
                                               sink);
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

} // namespace bench_fast
