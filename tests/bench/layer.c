#include "tests/bench/layer.h"

#include "kernels/convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

double dkv_bench_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double dkv_bench_cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + 1e-6 * (double)usage.ru_utime.tv_usec;
}

/* Sums of four uniform numbers are normal enough. */
static float noise(uint64_t *state)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(*state >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

#define HUGE_PAGE ((size_t)2 << 20)

/* On huge pages, as a serving engine's cache arena should be, unless told not to. */
static void *noise_tensor(uint64_t elements, enum dkv_dtype dtype, uint64_t seed, bool small_pages)
{
    const size_t bytes = (elements * dkv_dtype_bytes(dtype) + HUGE_PAGE - 1) / HUGE_PAGE *
                         HUGE_PAGE;
    void *tensor = aligned_alloc(HUGE_PAGE, bytes);
    if (tensor == NULL)
        exit(1);
    madvise(tensor, bytes, small_pages ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    for (uint64_t i = 0; i < elements; i++) {
        const float x = noise(&seed);
        if (dtype == DKV_FP32)
            ((float *)tensor)[i] = x;
        else
            ((uint16_t *)tensor)[i] = dtype == DKV_BF16 ? dkv_f32_to_bf16(x) : dkv_f32_to_fp16(x);
    }
    return tensor;
}

struct dkv_block dkv_bench_block(const struct dkv_bench_layer *s)
{
    struct dkv_block block = {.q_heads = s->q_heads,
                              .kv_heads = s->kv_heads,
                              .head_dim = s->head_dim,
                              .q_rows = s->window,
                              .n_tokens = s->tokens};
    const uint64_t q = (uint64_t)s->q_heads * s->window * s->head_dim;
    const uint64_t kv = s->kv_heads * s->tokens * s->head_dim;
    const size_t size = dkv_dtype_bytes(s->dtype);
    block.query = dkv_view_dense(noise_tensor(q, s->dtype, 1, s->small_pages), q * size, s->dtype,
                                 s->window, s->head_dim);
    block.key = dkv_view_dense(noise_tensor(kv, s->dtype, 2, s->small_pages), kv * size, s->dtype,
                               s->tokens, s->head_dim);
    block.value = dkv_view_dense(noise_tensor(kv, s->dtype, 3, s->small_pages), kv * size, s->dtype,
                                 s->tokens, s->head_dim);
    return block;
}

void dkv_bench_block_free(const struct dkv_block *block)
{
    free((void *)(uintptr_t)block->query.base);
    free((void *)(uintptr_t)block->key.base);
    free((void *)(uintptr_t)block->value.base);
}

void dkv_bench_must(enum dkv_status status, const struct dkv_error *err)
{
    if (status == DKV_OK)
        return;
    fprintf(stderr, "%s: %s\n", dkv_status_info(status)->name, err->text);
    exit(1);
}
