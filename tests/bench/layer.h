/* What the benchmarks of the CPU engine share: a layer of noise, clocks, and an end at an error. */
#ifndef DKV_TESTS_BENCH_LAYER_H
#define DKV_TESTS_BENCH_LAYER_H

#include "proto/block.h"

struct dkv_bench_layer {
    uint32_t q_heads, kv_heads, head_dim, window;
    uint64_t tokens;
    enum dkv_dtype dtype; /* BF16, FP16 or FP32 */
    bool small_pages;
};

#define DKV_BENCH_LLAMA                                                              \
    {                                                                                \
        .q_heads = 32, .kv_heads = 8, .head_dim = 128, .window = 8, .tokens = 32768, \
        .dtype = DKV_BF16                                                            \
    }

/* As many query rows as the window; exits if there is no memory. */
struct dkv_block dkv_bench_block(const struct dkv_bench_layer *layer);
void dkv_bench_block_free(const struct dkv_block *block);

double dkv_bench_now_s(void); /* by the wall's clock */
double dkv_bench_cpu_s(void); /* that this process has computed */

/* Says what went wrong and exits. */
void dkv_bench_must(enum dkv_status status, const struct dkv_error *err);

#endif
