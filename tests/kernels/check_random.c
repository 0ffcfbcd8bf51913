/* Random blocks, an engine against the float64 reference.
 *
 * usage: check_random [ENGINE [COUNT [SEED]]], by default cpu, 300 cases, seed 1.
 *
 * Every case is made from one number: a failing one prints the command that repeats it alone. Each
 * case also runs on a second engine with another number of threads (or, on a device, once more),
 * and the two answers must agree in every bit. Ends with one line of what was met.
 */
#include "tests/support/compare.h"
#include "tests/support/engines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- making a case ---- */

#define WORK_MAX (30u * 1000 * 1000) /* multiply-adds of the reference, per pass */

static enum dkv_dtype pick_dtype(struct dkv_random *random)
{
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_BF16,    DKV_FP16,   DKV_FP16,
                                     DKV_FP32, DKV_F8_E4M3, DKV_F8_E5M2};
    return dtypes[dkv_random_u64(random) % 7];
}

static uint32_t pick_dim(struct dkv_random *random)
{
    const uint32_t usual[] = {64, 80, 96, 112, 128, 192, 256, 512};
    return dkv_random_once_in(random, 2) ? usual[dkv_random_u64(random) % 8]
                                         : 8 * (uint32_t)dkv_random_range(random, 1, 64);
}

/* Many small, some large; one in twelve long enough for engines to split it. */
static uint64_t pick_length(struct dkv_random *random)
{
    if (dkv_random_once_in(random, 12))
        return dkv_random_range(random, 4000, 40000);
    return (uint64_t)exp(dkv_random_unit(random) * log(3001));
}

static bool is_fp8(enum dkv_dtype dtype)
{
    return dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2;
}

static struct dkv_shape pick_shape(struct dkv_random *random, uint32_t *group, uint64_t *window)
{
    struct dkv_shape shape = {0};
    *group = (uint32_t)dkv_random_range(random, 1, 8);
    *window = dkv_random_range(random, 1, dkv_random_once_in(random, 3) ? 64 : 16);
    shape.kv_heads = (uint32_t)dkv_random_range(random, 1, 3);
    shape.head_dim = pick_dim(random);
    shape.v_dim = dkv_random_once_in(random, 4) ? pick_dim(random) : 0;
    const bool for_models = dkv_random_once_in(random, 3); /* whose kernels are for 16 bits */
    if (for_models) {
        shape.head_dim = 64u << dkv_random_range(random, 0, 2);
        shape.v_dim = 0;
    }
    shape.n_tokens = pick_length(random);
    while (*group * *window * shape.kv_heads * shape.n_tokens * shape.head_dim > WORK_MAX) {
        if (shape.kv_heads > 1)
            shape.kv_heads--;
        else if (*window > 8)
            *window /= 2;
        else if (*group > 1)
            --*group;
        else
            shape.n_tokens /= 2;
    }
    shape.q_heads = *group * shape.kv_heads;
    shape.q_rows = dkv_random_range(random, *window > 3 ? *window - 2 : 1, *window + 9);
    shape.q_dtype = pick_dtype(random);
    shape.kv_dtype = dkv_random_once_in(random, 3) ? pick_dtype(random) : shape.q_dtype;
    if (for_models)
        shape.q_dtype = shape.kv_dtype = dkv_random_once_in(random, 3) ? DKV_FP16 : DKV_BF16;
    return shape;
}

static void set_number(struct dkv_case *c, const char *name, double value)
{
    char text[64];
    snprintf(text, sizeof(text), "%.17g", value);
    dkv_case_param(c, name, text);
}

static void pick_params(struct dkv_case *c, struct dkv_random *random, uint64_t window)
{
    const char *const profiles[] = {"paper", "paper", "paper", "author", "kvpress"};
    const char *const pools[] = {"max", "avg", "none"};
    const char *const gqas[] = {"mean", "sum", "max"};
    const char *profile = profiles[dkv_random_u64(random) % 5];
    dkv_case_param(c, "profile", profile);
    if (is_fp8(c->block.query.dtype) && strcmp(profile, "paper") != 0)
        dkv_case_param(c, "p_round", "none");
    else if (!is_fp8(c->block.query.dtype) && dkv_random_once_in(random, 8))
        dkv_case_param(c, "p_round", "input");
    set_number(c, "window", (double)window);
    if (dkv_random_once_in(random, 2)) {
        dkv_case_param(c, "pool", pools[dkv_random_u64(random) % 3]);
        set_number(c, "kernel", (double)(2 * dkv_random_range(random, 0, 20) + 1));
    }
    if (dkv_random_once_in(random, 4))
        dkv_case_param(c, "pool_scope", "prefix");
    if (dkv_random_once_in(random, 5))
        dkv_case_param(c, "gqa", gqas[dkv_random_u64(random) % 3]);
    if (dkv_random_once_in(random, 4))
        set_number(c, "sinks", (double)dkv_random_range(random, 0, 6));
    if (dkv_random_once_in(random, 4))
        set_number(c, "recent", (double)dkv_random_range(random, 0, 40));
    if (dkv_random_once_in(random, 6))
        set_number(c, "logit_softcap", 5 + 45 * dkv_random_unit(random));
    if (dkv_random_once_in(random, 6))
        set_number(c, "scale", 0.02 + 0.2 * dkv_random_unit(random));
    switch (dkv_random_u64(random) % 4) {
    case 0: set_number(c, "keep_ratio", 0.01 + 0.98 * dkv_random_unit(random)); break;
    case 1: set_number(c, "compression_ratio", 0.01 + 0.98 * dkv_random_unit(random)); break;
    case 2: set_number(c, "keep_tokens", (double)dkv_random_range(random, 1, 600)); break;
    default: break;
    }
}

static void pick_extras(struct dkv_case *c, struct dkv_random *random, float *head_scales)
{
    if (dkv_random_once_in(random, 5) && c->block.n_tokens > 1)
        c->block.valid_from = dkv_random_range(random, 0, c->block.n_tokens - 1);
    if (dkv_random_once_in(random, 5)) {
        for (uint32_t h = 0; h < c->block.q_heads; h++)
            c->sink_logits[h] = (float)(3 * dkv_random_normal(random));
        c->block.sink_logits = c->sink_logits;
    }
    if (is_fp8(c->block.key.dtype)) {
        c->block.key.scale = (float)exp(dkv_random_normal(random));
        for (uint32_t h = 0; h < c->block.kv_heads; h++)
            head_scales[h] = (float)exp(dkv_random_normal(random));
        c->block.value.head_scales = head_scales;
    }
    if (is_fp8(c->block.query.dtype))
        c->block.query.scale = (float)exp(0.3 * dkv_random_normal(random));
}

static double scale_of(const struct dkv_view *view)
{
    return view->scale != 0 ? (double)view->scale : 1;
}

/* Queries share a direction and one key lies on it: a sink that takes all but 10^-u, u to 12, of
 * each row. */
static void add_sink(struct dkv_case *c, struct dkv_random *random, uint64_t token)
{
    const struct dkv_block *block = &c->block;
    const double scale = dkv_params_has(&c->params, DKV_PARAM_SCALE) ? c->params.scale
                                                                     : 1 / sqrt(block->head_dim);
    const double lead = 27.6 * dkv_random_unit(random) + log((double)block->n_tokens);
    const double size = lead / (scale * block->head_dim) / scale_of(&block->key) /
                        scale_of(&block->query);
    for (uint32_t e = 0; e < block->head_dim; e++) {
        const double direction = dkv_random_once_in(random, 2) ? 1 : -1;
        for (uint32_t h = 0; h < block->q_heads; h++)
            for (uint64_t t = 0; t < block->q_rows; t++)
                dkv_case_set(c, DKV_QUERY, h, t, e,
                             direction + 0.1 * dkv_case_get(c, DKV_QUERY, h, t, e));
        for (uint32_t h = 0; h < block->kv_heads; h++)
            dkv_case_set(c, DKV_KEY, h, token, e, size * direction);
    }
}

static void fill(struct dkv_case *c, struct dkv_random *random)
{
    const double sharpness = exp(1.5 * dkv_random_unit(random) - 0.5);
    const double size = exp(4 * dkv_random_unit(random) - 2);
    dkv_case_fill(c, DKV_QUERY, random, sharpness);
    dkv_case_fill(c, DKV_KEY, random, 1);
    dkv_case_fill(c, DKV_VALUE, random, size);
    if (dkv_random_once_in(random, 2))
        add_sink(c, random,
                 dkv_random_once_in(random, 2)
                     ? c->block.valid_from
                     : dkv_random_range(random, c->block.valid_from, c->block.n_tokens - 1));
}

static void make_case(struct dkv_case *c, uint64_t seed, float *head_scales)
{
    struct dkv_random random = {seed * 0x9e3779b97f4a7c15u};
    uint32_t group;
    uint64_t window;
    const struct dkv_shape shape = pick_shape(&random, &group, &window);
    dkv_case_init(c, shape);
    pick_extras(c, &random, head_scales);
    pick_params(c, &random, window);
    fill(c, &random);
    dkv_case_plan(c);
}

/* ---- judging it ---- */

/* The table's row. Where p is rounded to the input type, the last bit of a float32 logit can move p
 * by one unit of that type, which no accuracy of the engine prevents, and p / (1 - p) makes more of
 * it where p is large: then the maximum is wider; the bulk, and so the median, stays as it is. */
static struct dkv_tolerance tolerance_for(const struct dkv_case *c, const char *engine)
{
    const enum dkv_dtype q = c->block.query.dtype, kv = c->block.key.dtype;
    struct dkv_tolerance tolerance = dkv_tolerance_of(
        engine, q == DKV_FP32 && kv == DKV_FP32 ? DKV_FP32 : DKV_BF16);
    if (c->params.p_round == DKV_P_ROUND_INPUT && (q == DKV_BF16 || q == DKV_FP16)) {
        tolerance.max = 0x1p-5;
        tolerance.cut = 0x1p-7;
    }
    /* The table's median is the run's (main() judges it): the scores of one case share the rounding
     * of a few large logits. */
    tolerance.median *= 4;
    return tolerance;
}

static bool same_bits(const struct dkv_case *c, const struct dkv_case_answer *a,
                      const struct dkv_case_answer *b)
{
    const size_t heads = c->block.kv_heads;
    return a->status == b->status &&
           memcmp(a->raw, b->raw, heads * c->block.n_tokens * sizeof(*a->raw)) == 0 &&
           memcmp(a->keep, b->keep, heads * c->plan.keep_tokens * sizeof(*a->keep)) == 0;
}

struct totals {
    uint64_t cases, failed, heads, sets_equal, sets_in_cut;
    double worst_median, worst_max;
    double *medians;
};

static void describe(const struct dkv_case *c, char *text, size_t bytes)
{
    snprintf(text, bytes,
             "%s/%s heads %u/%u D %u/%u rows %llu window %u n %llu from %llu %s eps %g round %d "
             "pool %s%lld k %llu softcap %g sink_logits %d",
             dkv_dtype_name(c->block.query.dtype), dkv_dtype_name(c->block.key.dtype),
             c->block.q_heads, c->block.kv_heads, c->block.head_dim, c->plan.v_dim,
             (unsigned long long)c->block.q_rows, c->plan.window,
             (unsigned long long)c->block.n_tokens, (unsigned long long)c->block.valid_from,
             dkv_profile_name(c->params.profile), c->params.eps, (int)c->params.p_round,
             dkv_pool_name(c->params.pool), (long long)c->params.kernel,
             (unsigned long long)c->plan.keep_tokens, c->params.logit_softcap,
             c->block.sink_logits != NULL);
}

static void run_case(uint64_t seed, const char *engine, const struct dkv_scorer *one,
                     const struct dkv_scorer *other, struct totals *totals)
{
    struct dkv_case c;
    struct dkv_ref_answer want;
    struct dkv_case_answer got, again;
    struct dkv_error err;
    float head_scales[8];
    make_case(&c, seed, head_scales);
    if (dkv_ref_run(&c.block, &c.params, &c.plan, &want, &err) != DKV_OK) {
        printf("seed %llu: reference: %s\n", (unsigned long long)seed, err.text);
        exit(1);
    }
    dkv_case_run(&c, one, &got);
    dkv_case_run(&c, other, &again);
    struct dkv_comparison result = dkv_compare(&c, &want, &got, tolerance_for(&c, engine));
    if (result.ok && !same_bits(&c, &got, &again)) {
        result.ok = false;
        snprintf(result.why, sizeof(result.why), "the second engine's answer has other bits");
    }
    if (!result.ok) {
        char text[400];
        describe(&c, text, sizeof(text));
        printf("FAILED %s\n  %s\n  repeat: check_random %s 1 %llu\n", result.why, text, engine,
               (unsigned long long)seed);
        totals->failed++;
    }
    totals->medians[totals->cases++] = result.median;
    totals->heads += c.block.kv_heads;
    totals->sets_equal += result.sets_equal;
    totals->sets_in_cut += result.sets_in_cut;
    totals->worst_max = fmax(totals->worst_max, result.max);
    totals->worst_median = fmax(totals->worst_median, result.median);
    dkv_ref_answer_fini(&want);
    dkv_case_answer_fini(&got);
    dkv_case_answer_fini(&again);
    dkv_case_fini(&c);
}

static int by_size(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv)
{
    const char *engine = dkv_test_engine_name(argc, argv);
    const uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 300;
    const uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    struct totals totals = {.medians = calloc(count + 1, sizeof(double))};
    if (totals.medians == NULL)
        return 1;
    struct dkv_scorer one = dkv_test_engine_open(engine, 1);
    struct dkv_scorer other = dkv_test_engine_open(engine, 2);
    for (uint64_t i = 0; i < count; i++)
        run_case(seed + i, engine, &one, &other, &totals);
    dkv_test_engine_close(&one);
    dkv_test_engine_close(&other);

    qsort(totals.medians, totals.cases, sizeof(double), by_size);
    const double median = totals.medians[totals.cases / 2];
    if (totals.cases >= 100 && median > dkv_tolerance_of(engine, DKV_FP32).median &&
        median > dkv_tolerance_of(engine, DKV_BF16).median)
        totals.failed++;
    printf("%s: %llu cases from seed %llu, %llu failed; relative error of raw scores: median %.2g "
           "(worst case's %.2g), maximum %.2g; sets of %llu heads: %llu equal, %llu within the "
           "cut\n",
           engine, (unsigned long long)totals.cases, (unsigned long long)seed,
           (unsigned long long)totals.failed, totals.medians[totals.cases / 2], totals.worst_median,
           totals.worst_max, (unsigned long long)totals.heads,
           (unsigned long long)totals.sets_equal, (unsigned long long)totals.sets_in_cut);
    free(totals.medians);
    return totals.failed != 0;
}
