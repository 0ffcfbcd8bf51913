/* What the parts of bench_cuda share: the tensors of a case, and the engine that they are timed
 * with.
 *
 * Errors  end the program with a line.
 * Thread  the main thread.
 */
#ifndef DKV_TESTS_BENCH_CUDA_CASE_H
#define DKV_TESTS_BENCH_CUDA_CASE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/engine.h"

enum { BENCH_MAX_BLOCKS = 128, BENCH_MAX_GIVEN = 16 };

enum bench_layout { CONTIGUOUS, PAGE16_PACKED, PAGE1_SLOTS, ON_HOST };

struct bench_shape {
    const char *name;
    uint32_t q_heads, kv_heads, head_dim, window;
    enum dkv_dtype dtype;
    enum bench_layout layout;
    unsigned n_blocks;
    uint32_t n_tokens; /* 0: mixed, 1K to 64K */
};

/* One copy of a case's tensors. */
struct bench_set {
    unsigned char *cache;      /* K and V of all blocks */
    unsigned char *host_cache; /* the same on the host, if that is where the case has them */
    unsigned char *query;
    int32_t *table; /* one for all blocks: they have the same pages */
    struct dkv_block blocks[BENCH_MAX_BLOCKS];
    struct dkv_plan plans[BENCH_MAX_BLOCKS];
    struct dkv_item items[BENCH_MAX_BLOCKS];
};

struct bench {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    cudaStream_t stream;
    int multiprocessors;
    size_t l2_bytes;
    enum dkv_status (*time_stages)(struct dkv_engine *, int, struct dkv_error *);
    enum dkv_status (*stage_times)(struct dkv_engine *, float *, struct dkv_error *);
    struct dkv_params params;
    size_t cache_bytes;
    size_t query_bytes;
    unsigned n_sets;
    struct bench_set *sets;
    int32_t *keep;    /* host, of all blocks */
    uint32_t *counts; /* of a ragged answer */
    const char *given[BENCH_MAX_GIVEN];
    unsigned n_given;
    unsigned runs;
    bool check;
};

__attribute__((noreturn)) void bench_die(const char *what, const char *why);
void bench_must(cudaError_t error);
void *bench_alloc(size_t bytes);

/* Makes the parameters, then sets of fresh random tensors, which together exceed the L2 cache. */
void bench_sets_make(struct bench *bench, const struct bench_shape *shape);
void bench_sets_free(struct bench *bench);

/* One batch, from submission to answer. */
void bench_run(struct bench *bench, struct dkv_item *items, unsigned n);

/* Kept tokens that the CPU engine does not keep, of the last block of a set; of how many. */
unsigned long bench_differing(struct bench *bench, const struct bench_shape *shape,
                              unsigned long *of_out);

#endif
