/* The CPU engine against the machine: one Llama-like layer, in shares of the float32 FMA peak that
 * the same number of threads reaches in the same minute. Rounds of probe and engine alternate.
 * By wall clock the best of each counts, since a shared machine only ever makes things slower; by
 * CPU time the median of the rounds' ratios, which holds on a busy machine too.
 *
 * usage: bench_cpu [--tokens N] [--q-heads N] [--kv-heads N] [--head-dim N] [--window N]
 *                  [--dtype bf16|fp16|fp32] [--threads N] [--rounds N] [--small-pages]
 */
#include "kernels/convert.h"
#include "kernels/engine.h"
#include "tests/bench/peak.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#define ROUNDS_MAX 1000u
#define RUNS       5 /* of the engine between two probes */

struct shape {
    uint32_t q_heads, kv_heads, head_dim, window, threads, rounds;
    uint64_t tokens;
    enum dkv_dtype dtype;
    bool small_pages;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu_seconds(void)
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

static struct dkv_block make_block(const struct shape *s)
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

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void must(enum dkv_status status, const struct dkv_error *err)
{
    if (status == DKV_OK)
        return;
    fprintf(stderr, "%s: %s\n", dkv_status_info(status)->name, err->text);
    exit(1);
}

static bool parse(int argc, char **argv, struct shape *s)
{
    static const struct option options[] = {
        {"tokens", 1, NULL, 'n'},      {"q-heads", 1, NULL, 'q'},
        {"kv-heads", 1, NULL, 'k'},    {"head-dim", 1, NULL, 'd'},
        {"window", 1, NULL, 'w'},      {"dtype", 1, NULL, 't'},
        {"threads", 1, NULL, 'j'},     {"rounds", 1, NULL, 'r'},
        {"small-pages", 0, NULL, 's'}, {0},
    };
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        const uint32_t number = optarg != NULL ? (uint32_t)strtoul(optarg, NULL, 0) : 0;
        switch (o) {
        case 'n': s->tokens = number; break;
        case 'q': s->q_heads = number; break;
        case 'k': s->kv_heads = number; break;
        case 'd': s->head_dim = number; break;
        case 'w': s->window = number; break;
        case 't': s->dtype = dkv_dtype_parse(optarg); break;
        case 'j': s->threads = number; break;
        case 'r': s->rounds = number; break;
        case 's': s->small_pages = true; break;
        default: return false;
        }
    }
    return optind == argc && s->rounds >= 1 && s->rounds <= ROUNDS_MAX;
}

int main(int argc, char **argv)
{
    struct shape s = {.q_heads = 32,
                      .kv_heads = 8,
                      .head_dim = 128,
                      .window = 8,
                      .rounds = 5,
                      .tokens = 32768,
                      .dtype = DKV_BF16};
    if (!parse(argc, argv, &s))
        return 64;
    struct dkv_error err = {0};
    const struct dkv_block block = make_block(&s);
    struct dkv_request request = {.blocks = &block, .n_blocks = 1};
    dkv_params_init(&request.params);
    must(dkv_params_set(&request.params, "window",
                        (struct dkv_value){.kind = DKV_VALUE_INT, .integer = s.window}, &err),
         &err);
    dkv_params_resolve(&request.params);
    struct dkv_plan plan;
    must(dkv_request_validate(&request, &plan, &err), &err);

    struct dkv_engine *engine;
    struct dkv_engine_info info;
    must(dkv_engine_cpu.open(&(struct dkv_engine_config){.threads = s.threads}, &engine, &err),
         &err);
    dkv_engine_cpu.info(engine, &info);
    int32_t *keep = malloc(sizeof(*keep) * s.kv_heads * plan.keep_tokens);
    struct dkv_item item = {
        .block = &block, .params = &request.params, .plan = &plan, .keep_out = keep};

    const double flops = 8.0 * s.q_heads * s.window * (double)s.tokens * s.head_dim;
    double fma = 0, dot = 0, best = 1e9, cpu_share[ROUNDS_MAX], cpu_ms[ROUNDS_MAX];
    for (uint32_t round = 0; round < s.rounds; round++) {
        const struct dkv_peak before = dkv_peak_fma_f32(info.threads, 0.05);
        const struct dkv_peak d = dkv_peak_dot_bf16(info.threads, 0.02);
        const double start_cpu = cpu_seconds();
        for (int i = 0; i < RUNS; i++) {
            const double start = now();
            must(dkv_engine_run(&dkv_engine_cpu, engine, &item, 1, &err), &err);
            must(item.status, &item.error);
            const double wall = now() - start;
            best = wall < best ? wall : best;
        }
        const double cpu = (cpu_seconds() - start_cpu) / RUNS;
        const struct dkv_peak after = dkv_peak_fma_f32(info.threads, 0.05);
        fma = before.wall > fma ? before.wall : fma;
        fma = after.wall > fma ? after.wall : fma;
        dot = d.wall > dot ? d.wall : dot;
        cpu_ms[round] = cpu * 1e3;
        cpu_share[round] = flops / cpu * 1e-9 / (0.5 * (before.cpu + after.cpu));
    }
    qsort(cpu_share, s.rounds, sizeof(double), by_value);
    qsort(cpu_ms, s.rounds, sizeof(double), by_value);
    dkv_engine_cpu.info(engine, &info);
    printf("engine            %s, %s\n", info.backend, info.device);
    printf("block             %u query heads, %u KV heads, %llu tokens of %u %s, window %u\n",
           s.q_heads, s.kv_heads, (unsigned long long)s.tokens, s.head_dim, dkv_dtype_name(s.dtype),
           s.window);
    printf("peak float32 FMA  %8.1f GFLOP/s\n", fma);
    printf("peak bf16 dot     %8.1f GFLOP/s\n", dot);
    printf("engine, best      %8.2f ms, %.1f GFLOP/s\n", best * 1e3, flops / best * 1e-9);
    printf("user CPU time     %8.2f ms, median of rounds\n", cpu_ms[s.rounds / 2]);
    printf("share of peak     %8.3f by wall clock, %.3f by CPU time (median of rounds)\n",
           fma > 0 ? flops / best * 1e-9 / fma : 0.0, cpu_share[s.rounds / 2]);
    printf("working memory    %8.2f MiB\n", (double)info.scratch_peak_bytes / 1048576.0);
    free(keep);
    free((void *)block.query.base);
    free((void *)block.key.base);
    free((void *)block.value.base);
    dkv_engine_cpu.close(engine);
    return 0;
}
