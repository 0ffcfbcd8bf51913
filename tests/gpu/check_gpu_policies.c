/* Every policy and budget on the CUDA engine, in batches of mixed policies over every layout.
 *
 * Each answer is held against the float64 oracle and counted against the CPU engine's; then it is
 * asked for again alone, and every bit must be the same; and without scores, which another kernel
 * may select from: the set must be the same. One more batch has long blocks. At last
 * some blocks whose heads are selected together and do not fit into one wave: those are held
 * against the CPU engine.
 *
 * usage: check_gpu_policies [CASES [SEED]]; prints a line per failure with the seed that makes it.
 * Exit 77 without a device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/device.h"
#include "tests/gpu/layout.h"
#include "tests/support/policy_case.h"
#include "tests/support/policy_judge.h"

enum { BATCH = 16 };

struct trial {
    uint64_t seed;
    struct dkv_case dense;
    struct dkv_policy_extras extras;
    struct dkv_laid laid;
    float *scores;
    struct dkv_case_answer answer;
    struct dkv_item item;
};

struct tally {
    struct dkv_policy_totals totals;
    uint64_t cpu_equal, cpu_differ, bit_checks;
};

static void *must_alloc(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (memory == NULL)
        abort();
    return memory;
}

static void make_trial(struct trial *trial, uint64_t seed)
{
    struct dkv_random random = {seed ^ 0x6a09e667f3bcc909u};
    struct dkv_layout_choice choice;
    *trial = (struct trial){.seed = seed};
    dkv_policy_case(&trial->dense, seed, &trial->extras);
    dkv_layout_choose(&choice, &trial->dense, &random);
    dkv_layout_make(&trial->laid, &trial->dense, &choice, &random);
    const size_t heads = trial->dense.block.kv_heads, n = trial->dense.block.n_tokens;
    trial->scores = must_alloc(heads * n, sizeof(float));
    trial->answer = (struct dkv_case_answer){
        .raw = must_alloc(heads * n, sizeof(double)),
        .keep = must_alloc(trial->dense.plan.keep_capacity, sizeof(int32_t)),
        .counts = must_alloc(heads, sizeof(uint32_t)),
    };
    trial->item = (struct dkv_item){
        .block = &trial->laid.block,
        .params = &trial->dense.params,
        .plan = &trial->laid.plan,
        .keep_out = trial->answer.keep,
        .counts_out = trial->answer.counts,
        .scores_out = trial->scores,
    };
}

static void fini_trial(struct trial *trial)
{
    dkv_layout_fini(&trial->laid);
    dkv_case_answer_fini(&trial->answer);
    free(trial->scores);
    dkv_policy_drop_extras(&trial->extras);
    dkv_case_fini(&trial->dense);
}

static void fail(struct tally *tally, const struct trial *trial, const char *why)
{
    char name[32];
    snprintf(name, sizeof(name), "seed %llu", (unsigned long long)trial->seed);
    dkv_policy_tell(&trial->dense, name, why);
    tally->totals.failed++;
}

static uint64_t kept_of(const struct dkv_case *c, const uint32_t *counts)
{
    uint64_t kept = 0;
    for (uint32_t h = 0; h < c->block.kv_heads; h++)
        kept += c->plan.ragged ? counts[h] : c->plan.keep_tokens;
    return kept;
}

static bool same_sets(const struct dkv_case *c, const struct dkv_case_answer *a,
                      const struct dkv_case_answer *b)
{
    const uint64_t kept = kept_of(c, a->counts);
    return kept == kept_of(c, b->counts) &&
           (!c->plan.ragged ||
            memcmp(a->counts, b->counts, c->block.kv_heads * sizeof(*a->counts)) == 0) &&
           memcmp(a->keep, b->keep, kept * sizeof(*a->keep)) == 0;
}

static void check_trial(struct tally *tally, struct trial *trial, const struct dkv_scorer *cpu)
{
    const struct dkv_case *c = &trial->dense;
    struct dkv_oracle want;
    struct dkv_case_answer other;
    char why[200] = "";
    trial->answer.status = trial->item.status;
    trial->answer.error = trial->item.error;
    for (size_t i = 0; i < c->block.kv_heads * c->block.n_tokens; i++)
        trial->answer.raw[i] = (double)trial->scores[i];
    dkv_oracle_run(c, &want);
    if (dkv_policy_judge(c, &want, &trial->answer, &tally->totals, why))
        tally->totals.cases++;
    else
        fail(tally, trial, why);
    dkv_case_run(c, cpu, &other);
    const bool equal = other.status == DKV_OK && same_sets(c, &trial->answer, &other);
    tally->cpu_equal += equal;
    tally->cpu_differ += !equal;
    dkv_case_answer_fini(&other);
    dkv_oracle_fini(&want);
}

/* Alone, the answer has the same bits, and without its scores the same set. */
static void check_alone(struct tally *tally, struct trial *trial, bool wants_scores,
                        const struct dkv_scorer *cuda)
{
    const struct dkv_case *c = &trial->dense;
    const size_t n_scores = (size_t)c->block.kv_heads * c->block.n_tokens;
    float *scores = wants_scores ? must_alloc(n_scores, sizeof(*scores)) : NULL;
    struct dkv_case_answer again = {
        .keep = must_alloc(c->plan.keep_capacity, sizeof(int32_t)),
        .counts = must_alloc(c->block.kv_heads, sizeof(uint32_t)),
    };
    struct dkv_item item = trial->item;
    struct dkv_error err;
    item.keep_out = again.keep;
    item.counts_out = again.counts;
    item.scores_out = scores;
    if (dkv_engine_run(cuda->ops, cuda->engine, &item, 1, &err) != DKV_OK ||
        item.status != trial->item.status)
        fail(tally, trial, "alone it has another status");
    else if (item.status == DKV_OK &&
             (!same_sets(c, &trial->answer, &again) ||
              (wants_scores && memcmp(scores, trial->scores, n_scores * sizeof(*scores)) != 0)))
        fail(tally, trial,
             wants_scores ? "alone it has other bits" : "without scores it has another set");
    tally->bit_checks++;
    dkv_case_answer_fini(&again);
    free(scores);
}

static void run_batch(struct tally *tally, uint64_t seed, unsigned n, const struct dkv_scorer *cuda,
                      const struct dkv_scorer *cpu)
{
    struct trial *trials = must_alloc(n, sizeof(*trials));
    struct dkv_item items[BATCH];
    struct dkv_error err;
    for (unsigned i = 0; i < n; i++) {
        make_trial(&trials[i], seed + i);
        items[i] = trials[i].item;
    }
    if (dkv_engine_run(cuda->ops, cuda->engine, items, n, &err) != DKV_OK) {
        printf("batch of seed %llu: %s\n", (unsigned long long)seed, err.text);
        exit(1);
    }
    for (unsigned i = 0; i < n; i++) {
        trials[i].item = items[i];
        check_trial(tally, &trials[i], cpu);
        check_alone(tally, &trials[i], true, cuda);
        check_alone(tally, &trials[i], false, cuda);
        fini_trial(&trials[i]);
    }
    free(trials);
}

/* ---- long blocks ---- */

struct large {
    const char *what;
    struct dkv_shape shape;
    const char *params[4][2];
};

/* Tokens that only one of two answers keeps. */
static uint64_t exchanged(const struct dkv_case *c, const struct dkv_case_answer *a,
                          const struct dkv_case_answer *b)
{
    const struct dkv_case_answer *answers[] = {a, b};
    const uint64_t n = c->block.n_tokens;
    uint8_t *kept = must_alloc(c->block.kv_heads, n);
    uint64_t differ = 0;
    for (int which = 0; which < 2; which++) {
        const int32_t *keep = answers[which]->keep;
        for (uint32_t h = 0; h < c->block.kv_heads; h++) {
            const uint64_t k = c->plan.ragged ? answers[which]->counts[h] : c->plan.keep_tokens;
            for (uint64_t i = 0; i < k; i++)
                kept[h * n + (uint64_t)*keep++] ^= 1;
        }
    }
    for (uint64_t i = 0; i < c->block.kv_heads * n; i++)
        differ += kept[i];
    free(kept);
    return differ;
}

/* Blocks that the reference would take minutes for. */
static void run_large(struct tally *tally, const struct large *large, const struct dkv_scorer *cuda,
                      const struct dkv_scorer *cpu)
{
    struct dkv_random random = {11};
    struct dkv_case c;
    struct dkv_case_answer mine, other;
    dkv_case_init(&c, large->shape);
    for (int i = 0; i < 4 && large->params[i][0] != NULL; i++)
        dkv_case_param(&c, large->params[i][0], large->params[i][1]);
    dkv_case_fill(&c, DKV_QUERY, &random, 2);
    dkv_case_fill(&c, DKV_KEY, &random, 1);
    dkv_case_fill(&c, DKV_VALUE, &random, 1);
    dkv_case_plan(&c);
    dkv_case_run(&c, cuda, &mine);
    dkv_case_run(&c, cpu, &other);
    const bool done = mine.status == DKV_OK && other.status == DKV_OK;
    const uint64_t differ = done ? exchanged(&c, &mine, &other) : 0;
    if (!done || differ > kept_of(&c, other.counts) / 1000) { /* next to the cut, all may */
        printf("%s: %s, %llu tokens are not the CPU engine's\n", large->what,
               mine.status != DKV_OK ? mine.error.text : "done", (unsigned long long)differ);
        tally->totals.failed++;
    }
    dkv_case_answer_fini(&mine);
    dkv_case_answer_fini(&other);
    dkv_case_fini(&c);
}

int main(int argc, char **argv)
{
    /* On the host, so that they take several waves, and of heads that are selected together. */
    const struct dkv_shape waves = {8, 4, 64, 0, 8, 50000, DKV_FP32, DKV_FP32};
    /* More than is kept on a multiprocessor between two looks at it: 32, 56 and 128 rows. */
    const struct dkv_shape rows_32 = {4, 1, 128, 16, 8, 100000, DKV_BF16, DKV_BF16};
    const struct dkv_shape rows_56 = {7, 1, 128, 16, 8, 60000, DKV_BF16, DKV_BF16};
    const struct dkv_shape rows_128 = {4, 1, 64, 16, 32, 60000, DKV_FP16, DKV_FP16};
    const struct large larges[] = {
        {"dropkv by the best of all heads", waves, {{"heads", "global"}, {"keep_ratio", "0.05"}}},
        {"one set of tova", waves, {{"policy", "tova"}, {"keep_ratio", "0.05"}}},
        {"chunks of andpro", waves, {{"policy", "andpro"}, {"keep_ratio", "0.05"}}},
        {"two stages", waves, {{"policy", "criticalkv"}, {"window", "8"}, {"keep_ratio", "0.05"}}},
        {"snapkv of 32 rows",
         rows_32,
         {{"policy", "snapkv"}, {"window", "8"}, {"keep_ratio", "0.05"}}},
        {"kvzip of 32 rows", rows_32, {{"policy", "kvzip"}, {"keep_ratio", "0.05"}}},
        {"cake of 32 rows", rows_32, {{"policy", "cake"}, {"window", "8"}, {"keep_ratio", "0.05"}}},
        {"snapkv of 56 rows",
         rows_56,
         {{"policy", "snapkv"}, {"window", "8"}, {"keep_ratio", "0.05"}}},
        {"cake of 56 rows", rows_56, {{"policy", "cake"}, {"window", "8"}, {"keep_ratio", "0.05"}}},
        {"snapkv of 128 rows",
         rows_128,
         {{"policy", "snapkv"}, {"window", "32"}, {"keep_ratio", "0.05"}}},
        {"cake of 128 rows",
         rows_128,
         {{"policy", "cake"}, {"window", "32"}, {"keep_ratio", "0.05"}}},
    };
    const unsigned long cases = argc > 1 ? strtoul(argv[1], NULL, 10) : 256;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    struct tally tally = {.totals = {.medians = must_alloc(cases + 2 * BATCH, sizeof(double))}};
    struct dkv_scorer cuda, cpu = {.ops = &dkv_engine_cpu};
    struct dkv_error err;
    dkv_gpu_open(&cuda);
    if (cpu.ops->open(NULL, &cpu.engine, &err) != DKV_OK)
        return 1;
    for (unsigned long done = 0; done < cases; done += BATCH)
        run_batch(&tally, seed + done, cases - done < BATCH ? (unsigned)(cases - done) : BATCH,
                  &cuda, &cpu);
    run_batch(&tally, seed + DKV_POLICY_LONG, BATCH, &cuda, &cpu);
    for (size_t i = 0; i < sizeof(larges) / sizeof(larges[0]); i++)
        run_large(&tally, &larges[i], &cuda, &cpu);
    printf("%lu cases: %llu right, %llu failed; median error %.2g, maximum %.2g; %llu with the CPU "
           "engine's sets, %llu within the cut's tolerance; %llu compared bit by bit with a run "
           "alone\n",
           cases, (unsigned long long)tally.totals.cases, (unsigned long long)tally.totals.failed,
           dkv_policy_median(&tally.totals), tally.totals.worst,
           (unsigned long long)tally.cpu_equal, (unsigned long long)tally.cpu_differ,
           (unsigned long long)tally.bit_checks);
    free(tally.totals.medians);
    cuda.ops->close(cuda.engine);
    cpu.ops->close(cpu.engine);
    return tally.totals.failed != 0;
}
