/* The CPU engine against the machine: one Llama-like layer, in shares of the float32 FMA peak that
 * the same number of threads reaches in the same minute. Rounds of probe and engine alternate.
 * By wall clock the best of each counts, since a shared machine only ever makes things slower; by
 * CPU time the median of the rounds' ratios, which holds on a busy machine too.
 *
 * usage: bench_cpu [--tokens N] [--q-heads N] [--kv-heads N] [--head-dim N] [--window N]
 *                  [--dtype bf16|fp16|fp32] [--threads N] [--rounds N] [--small-pages]
 */
#include "kernels/engine.h"
#include "tests/bench/layer.h"
#include "tests/bench/peak.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#define ROUNDS_MAX 1000u
#define RUNS       5 /* of the engine between two probes */

struct shape {
    struct dkv_bench_layer layer;
    uint32_t threads, rounds;
};

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
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
        case 'n': s->layer.tokens = number; break;
        case 'q': s->layer.q_heads = number; break;
        case 'k': s->layer.kv_heads = number; break;
        case 'd': s->layer.head_dim = number; break;
        case 'w': s->layer.window = number; break;
        case 't': s->layer.dtype = dkv_dtype_parse(optarg); break;
        case 'j': s->threads = number; break;
        case 'r': s->rounds = number; break;
        case 's': s->layer.small_pages = true; break;
        default: return false;
        }
    }
    return optind == argc && s->rounds >= 1 && s->rounds <= ROUNDS_MAX;
}

int main(int argc, char **argv)
{
    struct shape s = {.layer = DKV_BENCH_LLAMA, .rounds = 5};
    if (!parse(argc, argv, &s))
        return 64;
    struct dkv_error err = {0};
    const struct dkv_block block = dkv_bench_block(&s.layer);
    struct dkv_request request = {.blocks = &block, .n_blocks = 1};
    dkv_params_init(&request.params);
    dkv_bench_must(
        dkv_params_set(&request.params, "window",
                       (struct dkv_value){.kind = DKV_VALUE_INT, .integer = s.layer.window}, &err),
        &err);
    dkv_params_resolve(&request.params);
    struct dkv_plan plan;
    dkv_bench_must(dkv_request_validate(&request, &plan, &err), &err);

    struct dkv_engine *engine;
    struct dkv_engine_info info;
    dkv_bench_must(
        dkv_engine_cpu.open(&(struct dkv_engine_config){.threads = s.threads}, &engine, &err),
        &err);
    dkv_engine_cpu.info(engine, &info);
    int32_t *keep = malloc(sizeof(*keep) * s.layer.kv_heads * plan.keep_tokens);
    struct dkv_item item = {
        .block = &block, .params = &request.params, .plan = &plan, .keep_out = keep};

    const double flops = 8.0 * s.layer.q_heads * s.layer.window * (double)s.layer.tokens *
                         s.layer.head_dim;
    double fma = 0, dot = 0, best = 1e9, cpu_share[ROUNDS_MAX], cpu_ms[ROUNDS_MAX];
    for (uint32_t round = 0; round < s.rounds; round++) {
        const struct dkv_peak before = dkv_peak_fma_f32(info.threads, 0.05);
        const struct dkv_peak d = dkv_peak_dot_bf16(info.threads, 0.02);
        const double start_cpu = dkv_bench_cpu_s();
        for (int i = 0; i < RUNS; i++) {
            const double start = dkv_bench_now_s();
            dkv_bench_must(dkv_engine_run(&dkv_engine_cpu, engine, &item, 1, &err), &err);
            dkv_bench_must(item.status, &item.error);
            const double wall = dkv_bench_now_s() - start;
            best = wall < best ? wall : best;
        }
        const double cpu = (dkv_bench_cpu_s() - start_cpu) / RUNS;
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
           s.layer.q_heads, s.layer.kv_heads, (unsigned long long)s.layer.tokens, s.layer.head_dim,
           dkv_dtype_name(s.layer.dtype), s.layer.window);
    printf("peak float32 FMA  %8.1f GFLOP/s\n", fma);
    printf("peak bf16 dot     %8.1f GFLOP/s\n", dot);
    printf("engine, best      %8.2f ms, %.1f GFLOP/s\n", best * 1e3, flops / best * 1e-9);
    printf("user CPU time     %8.2f ms, median of rounds\n", cpu_ms[s.rounds / 2]);
    printf("share of peak     %8.3f by wall clock, %.3f by CPU time (median of rounds)\n",
           fma > 0 ? flops / best * 1e-9 / fma : 0.0, cpu_share[s.rounds / 2]);
    printf("working memory    %8.2f MiB\n", (double)info.scratch_peak_bytes / 1048576.0);
    free(keep);
    dkv_bench_block_free(&block);
    dkv_engine_cpu.close(engine);
    return 0;
}
