/* Random blocks on the CUDA engine: every layout, type, shape and profile.
 *
 * Each answer is held against the CPU engine's, and where the block is small against the float64
 * reference, by the accuracy rule of docs/numerics.md. Blocks run in batches of up to 16; some
 * batches are run again block by block, and every bit must be the same.
 *
 * usage: check_gpu_random [CASES [SEED [THREADS]]]; prints one line per failure with the seed that
 * makes it. Exit 77 without a device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/select.h"
#include "tests/gpu/device.h"
#include "tests/gpu/layout.h"
#include "tests/support/compare.h"

enum { BATCH = 16 };

struct trial {
    uint64_t seed;
    double query_size;
    struct dkv_case dense;
    struct dkv_layout_choice choice;
    struct dkv_laid laid;
    float *scores;
    int32_t *keep;
    struct dkv_item item;
};

struct tally {
    unsigned long failures, sets_equal, sets_in_cut, against_reference, against_cpu, bit_checks;
    double worst_median[6], worst_max[6]; /* by dtype of the cache */
};

static const char *pick(struct dkv_random *random, const char *const *words, uint64_t n)
{
    return words[dkv_random_range(random, 0, n - 1)];
}

static struct dkv_shape random_shape(struct dkv_random *random)
{
    static const uint32_t dims[] = {64, 128, 128, 128, 256, 80, 96, 112, 192, 8, 256, 512};
    static const enum dkv_dtype types[] = {DKV_BF16, DKV_BF16,    DKV_FP16,
                                           DKV_FP32, DKV_F8_E4M3, DKV_F8_E5M2};
    const enum dkv_dtype kv = types[dkv_random_range(random, 0, 5)];
    const uint32_t heads = (uint32_t)dkv_random_range(random, 1, 3);
    const uint32_t group = (uint32_t)dkv_random_range(random, 1, 8);
    uint64_t n = dkv_random_range(random, 1, 1500);
    if (dkv_random_once_in(random, 8))
        n = dkv_random_range(random, 1, 40);
    if (dkv_random_once_in(random, 16))
        n = dkv_random_range(random, 4000, 9000);
    struct dkv_shape shape = {
        .q_heads = heads * group,
        .kv_heads = heads,
        .head_dim = dims[dkv_random_range(random, 0, 11)],
        .q_rows = dkv_random_range(random, 1, 40),
        .n_tokens = n,
        .q_dtype = kv,
        .kv_dtype = kv,
    };
    if (kv >= DKV_F8_E4M3 && !dkv_random_once_in(random, 3))
        shape.q_dtype = DKV_BF16;
    if (dkv_random_once_in(random, 5))
        shape.v_dim = dims[dkv_random_range(random, 0, 11)];
    return shape;
}

static void random_params(struct dkv_case *c, double size, struct dkv_random *random)
{
    static const char *const pools[] = {"max", "max", "avg", "none"};
    static const char *const kernels[] = {"11", "11", "7", "1", "3", "33", "127"};
    static const char *const windows[] = {"8", "8", "1", "4", "16", "32"};
    static const char *const ratios[] = {"0.05", "0.1", "0.5", "0.9"};
    static const char *const gqas[] = {"mean", "mean", "max", "sum"};
    /* Averages of windows that hold all tokens are equal but for rounding; no order to compare. */
    const uint64_t n = c->block.n_tokens - c->block.valid_from;
    dkv_case_param(c, "pool", pick(random, pools, 4));
    dkv_case_param(c, "kernel", pick(random, kernels, n > 260 ? 7 : n > 20 ? 5 : 4));
    dkv_case_param(c, "window", pick(random, windows, 6));
    dkv_case_param(c, "keep_ratio", pick(random, ratios, 4));
    dkv_case_param(c, "gqa", pick(random, gqas, 4));
    if (dkv_random_once_in(random, 3))
        dkv_case_param(c, "sinks", "4");
    if (dkv_random_once_in(random, 4))
        dkv_case_param(c, "pool_scope", "prefix");
    if (dkv_random_once_in(random, 5))
        dkv_case_param(c, "logit_softcap", "20");
    if (size == 1 && dkv_random_once_in(random, 6))
        dkv_case_param(c, "eps", "1e-3");
    if (dkv_random_once_in(random, 4))
        dkv_case_param(c, "recent", "2");
    if (dkv_random_once_in(random, 8))
        dkv_case_param(c, "nonfinite", "mask");
}

static double size_for(enum dkv_dtype dtype)
{
    return dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2 ? 2.0 : 1.0;
}

/* An attention sink: one early key near all queries, so that p is close to 1. */
static void add_sink(struct dkv_case *c, struct dkv_random *random)
{
    const double size = dkv_random_unit(random) * 60 / sqrt(c->block.head_dim);
    for (uint32_t e = 0; e < c->block.head_dim; e++) {
        for (uint64_t h = 0; h < c->block.kv_heads; h++)
            dkv_case_set(c, DKV_KEY, h, c->block.valid_from, e, size);
        for (uint64_t h = 0; h < c->block.q_heads; h++)
            for (uint64_t t = 0; t < c->block.q_rows; t++)
                dkv_case_set(c, DKV_QUERY, h, t, e, 1 + dkv_case_get(c, DKV_QUERY, h, t, e) / 4);
    }
}

static void make_trial(struct trial *trial, uint64_t seed)
{
    struct dkv_random random = {seed};
    struct dkv_case *c = &trial->dense;
    *trial = (struct trial){.seed = seed};
    dkv_case_init(c, random_shape(&random));
    trial->query_size = dkv_random_once_in(&random, 4) ? 4 : 1;
    dkv_case_fill(c, DKV_QUERY, &random, trial->query_size);
    dkv_case_fill(c, DKV_KEY, &random, size_for(c->block.key.dtype));
    dkv_case_fill(c, DKV_VALUE, &random, size_for(c->block.value.dtype));
    if (c->block.key.dtype == DKV_F8_E4M3 || c->block.key.dtype == DKV_F8_E5M2) {
        c->block.key.scale = 0.5f;
        c->block.value.scale = 0.25f;
    }
    if (c->block.n_tokens > 4 && dkv_random_once_in(&random, 4))
        c->block.valid_from = dkv_random_range(&random, 1, c->block.n_tokens / 2);
    random_params(c, trial->query_size, &random);
    /* With eps > 0 the published form is all cancellation where p is near 1: nothing to compare. */
    if (!dkv_params_has(&c->params, DKV_PARAM_EPS) && dkv_random_once_in(&random, 3))
        add_sink(c, &random);
    if (dkv_random_once_in(&random, 6)) {
        c->block.sink_logits = c->sink_logits;
        for (uint32_t h = 0; h < c->block.q_heads; h++)
            c->sink_logits[h] = (float)(2 * dkv_random_normal(&random));
    }
    if (c->params.nonfinite == DKV_NONFINITE_MASK)
        for (uint64_t i = 0; i < 1 + c->block.n_tokens / 50; i++)
            dkv_case_set(c, dkv_random_once_in(&random, 2) ? DKV_KEY : DKV_VALUE,
                         dkv_random_range(&random, 0, c->block.kv_heads - 1),
                         dkv_random_range(&random, 0, c->block.n_tokens - 1), 0, NAN);
    dkv_case_plan(c);
    dkv_layout_choose(&trial->choice, c, &random);
    dkv_layout_make(&trial->laid, c, &trial->choice, &random);

    const size_t n_scores = (size_t)c->block.kv_heads * c->block.n_tokens;
    trial->scores = malloc(n_scores * sizeof(float));
    trial->keep = malloc(c->block.kv_heads * c->plan.keep_tokens * sizeof(int32_t));
    trial->item = (struct dkv_item){
        .block = &trial->laid.block,
        .params = &c->params,
        .plan = &trial->laid.plan,
        .keep_out = trial->keep,
        .scores_out = trial->scores,
    };
}

static void fini_trial(struct trial *trial)
{
    dkv_layout_fini(&trial->laid);
    dkv_case_fini(&trial->dense);
    free(trial->scores);
    free(trial->keep);
}

static void fail(struct tally *tally, const struct trial *trial, const char *what, const char *why)
{
    const struct dkv_block *b = &trial->dense.block;
    tally->failures++;
    printf("seed %llu: %s: %s (n %llu from %llu, heads %u/%u, dims %u/%u, dtype %s, window %u, "
           "layout %d, k %llu)\n",
           (unsigned long long)trial->seed, what, why, (unsigned long long)b->n_tokens,
           (unsigned long long)b->valid_from, b->q_heads, b->kv_heads, b->head_dim,
           trial->dense.plan.v_dim, dkv_dtype_name(b->key.dtype), trial->dense.plan.window,
           (int)trial->choice.layout, (unsigned long long)trial->dense.plan.keep_tokens);
}

/* The kept tokens must be what kernels/select.c makes of the engine's own scores. Scores that
 * underflowed when they were descaled cannot tell. */
static void check_selection(struct tally *tally, const struct trial *trial, void *scratch)
{
    const struct dkv_case *c = &trial->dense;
    const uint64_t n = c->block.n_tokens, first = c->block.valid_from, k = c->plan.keep_tokens;
    const struct dkv_select_spec spec = dkv_select_spec_of(&c->block, &c->params, &c->plan);
    int32_t *want = malloc(k * sizeof(*want));
    uint8_t *flags = calloc(n, 1);
    if (c->params.nonfinite == DKV_NONFINITE_ERROR && c->plan.window < c->plan.n_valid)
        for (uint64_t h = 0; h < c->block.kv_heads; h++) {
            const float *scores = trial->scores + h * n + first;
            bool tiny = false;
            for (uint64_t i = 0; i < n - first; i++)
                tiny = tiny || (scores[i] < 1e-36f && scores[i] > 0) ||
                       (scores[i] == 0 && c->params.eps == 0);
            dkv_select(&spec, scores, flags, scratch, want);
            if (!tiny && memcmp(want, trial->keep + h * k, k * sizeof(*want)) != 0)
                fail(tally, trial, "selection", "not what its own scores say");
        }
    free(want);
    free(flags);
}

/* An error of a logit is twice that of its score, and grows with the logits themselves. */
static struct dkv_tolerance tolerance_of(const struct trial *trial)
{
    struct dkv_tolerance t = dkv_tolerance_of("cuda", trial->dense.block.key.dtype);
    t.median *= trial->query_size;
    return t;
}

/* A quick look at the scores alone. */
static struct dkv_comparison against_cpu(const struct trial *trial,
                                         const struct dkv_case_answer *got,
                                         const struct dkv_scorer *cpu)
{
    const struct dkv_block *b = &trial->dense.block;
    const struct dkv_tolerance allowed = tolerance_of(trial);
    struct dkv_comparison result = {.ok = false};
    struct dkv_case_answer other;
    dkv_case_run(&trial->dense, cpu, &other);
    if (other.status == DKV_OK) {
        dkv_compare_scores(other.raw, got->raw, b->kv_heads, b->n_tokens, &result.median,
                           &result.max);
        result.ok = result.median <= allowed.median && result.max <= allowed.max;
    }
    dkv_case_answer_fini(&other);
    return result;
}

static void check_answer(struct tally *tally, const struct trial *trial,
                         const struct dkv_scorer *cpu)
{
    const struct dkv_case *c = &trial->dense;
    const struct dkv_block *b = &c->block;
    if (trial->item.status != DKV_OK) {
        fail(tally, trial, "status", trial->item.error.text);
        return;
    }
    const double work = (double)b->n_tokens * b->head_dim * b->q_heads * trial->dense.plan.window;
    const bool small = work < 3e6;
    struct dkv_ref_answer want = {0};
    struct dkv_error err;
    const size_t n_scores = (size_t)b->kv_heads * b->n_tokens;
    struct dkv_case_answer got = {.raw = malloc(n_scores * sizeof(double)), .keep = trial->keep};
    for (size_t i = 0; i < n_scores; i++)
        got.raw[i] = (double)trial->scores[i];

    struct dkv_comparison result = {.ok = false};
    if (!small) {
        result = against_cpu(trial, &got, cpu);
        tally->against_cpu++;
    }
    if (!result.ok) { /* small, or the two engines differ: the reference decides */
        if (dkv_ref_run(b, &c->params, &c->plan, &want, &err) != DKV_OK) {
            fail(tally, trial, "reference", err.text);
        } else {
            result = dkv_compare(c, &want, &got, tolerance_of(trial));
            tally->against_reference++;
        }
        dkv_ref_answer_fini(&want);
    }
    tally->sets_equal += result.sets_equal;
    tally->sets_in_cut += result.sets_in_cut;
    tally->worst_median[b->key.dtype] = fmax(tally->worst_median[b->key.dtype], result.median);
    tally->worst_max[b->key.dtype] = fmax(tally->worst_max[b->key.dtype], result.max);
    if (!result.ok)
        fail(tally, trial, "reference", result.why);
    free(got.raw);
}

/* Alone, the block must give the same bits as in its batch. */
static void check_alone(struct tally *tally, struct trial *trial, const struct dkv_scorer *cuda)
{
    struct trial alone = *trial;
    struct dkv_error err;
    const size_t n_scores = (size_t)trial->dense.block.kv_heads * trial->dense.block.n_tokens *
                            sizeof(float);
    const size_t n_keep = trial->dense.block.kv_heads * trial->dense.plan.keep_tokens;
    alone.item.scores_out = malloc(n_scores);
    alone.item.keep_out = malloc(n_keep * sizeof(int32_t));
    if (dkv_engine_run(cuda->ops, cuda->engine, &alone.item, 1, &err) != DKV_OK)
        fail(tally, trial, "alone", err.text);
    else if (trial->item.status == DKV_OK &&
             (memcmp(alone.item.scores_out, trial->scores, n_scores) != 0 ||
              memcmp(alone.item.keep_out, trial->keep, n_keep * sizeof(int32_t)) != 0))
        fail(tally, trial, "alone", "other bits than in its batch");
    tally->bit_checks++;
    free(alone.item.scores_out);
    free(alone.item.keep_out);
}

static bool run_batch(struct tally *tally, uint64_t seed, unsigned n, bool check_bits,
                      const struct dkv_scorer *cuda, const struct dkv_scorer *cpu, void *scratch)
{
    struct trial trials[BATCH];
    struct dkv_item items[BATCH];
    struct dkv_error err;
    for (unsigned i = 0; i < n; i++) {
        make_trial(&trials[i], seed + i);
        items[i] = trials[i].item;
    }
    const enum dkv_status status = dkv_engine_run(cuda->ops, cuda->engine, items, n, &err);
    if (status != DKV_OK)
        printf("batch of seed %llu: %s\n", (unsigned long long)seed, err.text);
    for (unsigned i = 0; i < n && status == DKV_OK; i++) {
        trials[i].item = items[i];
        check_answer(tally, &trials[i], cpu);
        if (items[i].status == DKV_OK)
            check_selection(tally, &trials[i], scratch);
        if (check_bits)
            check_alone(tally, &trials[i], cuda);
    }
    tally->failures += status != DKV_OK;
    for (unsigned i = 0; i < n; i++)
        fini_trial(&trials[i]);
    return status == DKV_OK;
}

int main(int argc, char **argv)
{
    const unsigned long cases = argc > 1 ? strtoul(argv[1], NULL, 10) : 512;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    struct dkv_scorer cuda, cpu = {.ops = &dkv_engine_cpu};
    struct dkv_engine_config config = {.threads = argc > 3 ? (unsigned)atoi(argv[3]) : 0};
    struct dkv_error err;
    struct tally tally = {0};
    dkv_gpu_open(&cuda);
    if (cpu.ops->open(&config, &cpu.engine, &err) != DKV_OK) {
        fprintf(stderr, "cpu engine: %s\n", err.text);
        return 1;
    }
    void *scratch = aligned_alloc(64, (dkv_select_scratch_bytes() + 63) & ~(size_t)63);
    bool alive = true;
    for (unsigned long at = 0; at < cases && alive && tally.failures < 50; at += BATCH)
        alive = run_batch(&tally, seed + at, (unsigned)(cases - at < BATCH ? cases - at : BATCH),
                          at / BATCH % 4 == 0, &cuda, &cpu, scratch);
    for (int dtype = DKV_BF16; dtype <= DKV_F8_E5M2; dtype++)
        printf("%-8s worst median %.2g, worst maximum %.2g\n",
               dkv_dtype_name((enum dkv_dtype)dtype), tally.worst_median[dtype],
               tally.worst_max[dtype]);
    printf("%lu cases: %lu against the reference, %lu against the CPU engine; sets: %lu equal, %lu "
           "within the cut's tolerance; %lu compared bit by bit with a run alone; %lu failures\n",
           cases, tally.against_reference, tally.against_cpu, tally.sets_equal, tally.sets_in_cut,
           tally.bit_checks, tally.failures);
    free(scratch);
    cuda.ops->close(cuda.engine);
    cpu.ops->close(cpu.engine);
    return tally.failures != 0;
}
