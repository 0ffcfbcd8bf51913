/* Every policy's time on the CPU engine as a share of DropKV's: one Llama-like layer, as many query
 * rows for all, the policy's own pooling and protection. Rounds in which each policy runs once,
 * after DropKV, and of a policy's shares in all rounds the median: by the processor's time, which
 * holds on a busy machine, and by the wall's.
 *
 * usage: bench_policies [--policy NAME] [--threads N] [--rounds N] [--tokens N] [--window N]
 * [--dtype bf16|fp16|fp32]
 */
#include "kernels/engine.h"
#include "kernels/rule.h"
#include "tests/bench/layer.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS_MAX 1000u

struct time {
    double wall, cpu;
};

/* One policy, ready to run. */
struct run {
    struct dkv_request request;
    struct dkv_plan plan;
    struct dkv_item item;
};

static void prepare(struct run *run, const struct dkv_block *block, unsigned policy,
                    uint32_t window)
{
    struct dkv_error err = {0};
    struct dkv_params *params = &run->request.params;
    dkv_params_init(params);
    dkv_bench_must(
        dkv_params_set_text(params, "policy", dkv_policy_info((enum dkv_policy)policy)->name, &err),
        &err);
    const struct dkv_value rows = {.kind = DKV_VALUE_INT, .integer = window};
    dkv_bench_must(dkv_params_set(params, "window", rows, &err), &err);
    dkv_params_resolve(params);
    run->request.blocks = block;
    run->request.n_blocks = 1;
    dkv_bench_must(dkv_request_validate(&run->request, &run->plan, &err), &err);
    uint32_t *counts = calloc(block->kv_heads, sizeof(*counts));
    int32_t *keep = calloc(block->kv_heads * block->n_tokens, sizeof(*keep));
    if (counts == NULL || keep == NULL)
        exit(1);
    run->item = (struct dkv_item){.block = block,
                                  .params = params,
                                  .plan = &run->plan,
                                  .keep_out = keep,
                                  .counts_out = counts};
}

static struct time time_of(struct dkv_engine *engine, struct run *run)
{
    struct dkv_error err = {0};
    const struct time start = {dkv_bench_now_s(), dkv_bench_cpu_s()};
    dkv_bench_must(dkv_engine_run(&dkv_engine_cpu, engine, &run->item, 1, &err), &err);
    dkv_bench_must(run->item.status, &run->item.error);
    return (struct time){dkv_bench_now_s() - start.wall, dkv_bench_cpu_s() - start.cpu};
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t n)
{
    qsort(values, n, sizeof(*values), by_value);
    return values[n / 2];
}

static bool left_out(const char *only, unsigned policy)
{
    return only != NULL && strcmp(only, dkv_policy_info((enum dkv_policy)policy)->name) != 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"threads", 1, NULL, 'j'},
                                            {"rounds", 1, NULL, 'r'},
                                            {"tokens", 1, NULL, 'n'},
                                            {"window", 1, NULL, 'w'},
                                            {"dtype", 1, NULL, 't'},
                                            {"policy", 1, NULL, 'p'},
                                            {0}};
    struct dkv_bench_layer layer = DKV_BENCH_LLAMA;
    uint32_t threads = 0, rounds = 31;
    const char *only = NULL;
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        const uint32_t number = optarg != NULL ? (uint32_t)strtoul(optarg, NULL, 0) : 0;
        switch (o) {
        case 'j': threads = number; break;
        case 'r': rounds = number; break;
        case 'n': layer.tokens = number; break;
        case 'w': layer.window = number; break;
        case 'p': only = optarg; break;
        case 't': layer.dtype = dkv_dtype_parse(optarg); break;
        default: return 64;
        }
    }
    if (rounds < 1 || rounds > ROUNDS_MAX)
        return 64;

    struct dkv_error err = {0};
    struct dkv_engine *engine;
    dkv_bench_must(
        dkv_engine_cpu.open(&(struct dkv_engine_config){.threads = threads}, &engine, &err), &err);
    struct dkv_block block = dkv_bench_block(&layer);
    float *scores = calloc(block.kv_heads * block.n_tokens, sizeof(*scores));
    static struct run runs[DKV_POLICY_COUNT];
    static double wall[DKV_POLICY_COUNT][ROUNDS_MAX], cpu[DKV_POLICY_COUNT][ROUNDS_MAX];
    static double base_ms[ROUNDS_MAX];
    struct dkv_block given = block;
    given.external_scores = scores;
    if (scores == NULL)
        exit(1);
    for (unsigned p = 0; p < DKV_POLICY_COUNT; p++)
        prepare(&runs[p], p == DKV_POLICY_EXTERNAL ? &given : &block, p, layer.window);
    for (uint32_t r = 0; r < rounds; r++)
        for (unsigned p = 0; p < DKV_POLICY_COUNT; p++) {
            if (left_out(only, p))
                continue;
            const struct time base = time_of(engine, &runs[DKV_POLICY_DROPKV]);
            const struct time own = time_of(engine, &runs[p]);
            wall[p][r] = own.wall / base.wall;
            cpu[p][r] = own.cpu / base.cpu;
            base_ms[r] = base.cpu * 1e3;
        }
    printf(
        "%u query heads, %u KV heads, %llu tokens of %u %s, %u rows; dropkv %.1f ms of CPU time\n",
        layer.q_heads, layer.kv_heads, (unsigned long long)layer.tokens, layer.head_dim,
        dkv_dtype_name(layer.dtype), layer.window, median(base_ms, rounds));
    printf("%-12s %8s %8s %8s\n", "policy", "values", "cpu", "wall");
    for (unsigned p = 0; p < DKV_POLICY_COUNT; p++) {
        const struct dkv_policy_info *info = dkv_policy_info((enum dkv_policy)p);
        if (left_out(only, p))
            continue;
        printf("%-12s %8s %8.3f %8.3f\n", info->name, info->reads & DKV_READS_VALUE ? "read" : "",
               median(cpu[p], rounds), median(wall[p], rounds));
    }
    return 0;
}
