/* Every policy of an engine against its float64 oracle: random blocks, the golden files' inputs,
 * and a dump of a trained model.
 *
 * usage: check_policies [ENGINE [COUNT [SEED]]], by default cpu, 300 cases, seed 1.
 *
 * The bounds are those of docs/numerics.md. Errors are measured against the score itself, but where
 * terms of both signs cancel against the sum of their sizes (andpro), and for a cosine against 1.
 * Each case also runs on an engine with another number of threads, which must give the same bits.
 */
#include "kernels/rule.h"
#include "tests/support/engines.h"
#include "tests/support/golden.h"
#include "tests/support/policy_oracle.h"
#include "tests/support/tensors.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const policies[] = {"snapkv",     "tova",   "h2o",     "cake",    "andpro",
                                       "criticalkv", "restkv", "kvzip",   "keydiff", "knorm",
                                       "streaming",  "random", "external"};
#define N_POLICIES (sizeof(policies) / sizeof(policies[0]))

struct totals {
    uint64_t cases, failed, heads, sets_equal, sets_in_cut;
    double worst;
    double *medians;
};

/* ---- judging ---- */

static int by_size(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* As numerics.md has it: below 1e-12 of the head's largest the floor counts. */
static double measure_of(const struct dkv_oracle *want, uint64_t h, uint64_t n, uint64_t t)
{
    double largest = 0;
    for (uint64_t i = h * n; i < (h + 1) * n; i++)
        largest = fmax(largest, want->measure[i]);
    return fmax(want->measure[h * n + t], fmax(1e-12 * largest, FLT_MIN));
}

/* One bound for all where p is rounded: the last bit of a logit may move it by a unit of the type.
 */
static double bound_of(const struct dkv_case *c)
{
    const enum dkv_dtype q = c->block.query.dtype;
    return c->params.p_round == DKV_P_ROUND_INPUT && (q == DKV_BF16 || q == DKV_FP16) ? 0x1p-7
                                                                                      : 1e-4;
}

static bool check_scores(const struct dkv_case *c, const struct dkv_oracle *want,
                         const struct dkv_case_answer *got, struct totals *totals, char *why)
{
    const uint64_t n = c->block.n_tokens, count = c->block.kv_heads * n;
    double *errors = malloc(count * sizeof(*errors)), largest = 0;
    if (errors == NULL)
        abort();
    for (uint64_t h = 0; h < c->block.kv_heads; h++) {
        double most = 0;
        for (uint64_t t = 0; t < n; t++)
            most = fmax(most, want->measure[h * n + t]);
        for (uint64_t t = 0; t < n; t++) {
            const uint64_t i = h * n + t;
            const double measure = fmax(want->measure[i], fmax(1e-12 * most, FLT_MIN));
            errors[i] = fabs(got->raw[i] - want->raw[i]) / measure;
            if (!isfinite(got->raw[i]) || errors[i] > bound_of(c)) {
                snprintf(why, 200, "head %u token %llu scores %.9g, not %.9g (error %.3g)",
                         (unsigned)h, (unsigned long long)t, got->raw[i], want->raw[i], errors[i]);
                free(errors);
                return false;
            }
            largest = fmax(largest, errors[i]);
        }
    }
    qsort(errors, count, sizeof(*errors), by_size);
    totals->medians[totals->cases] = errors[count / 2];
    totals->worst = fmax(totals->worst, largest);
    free(errors);
    return true;
}

/* Heads may exchange tokens, and so differ in their counts, where all that are exchanged score
 * alike: two heads' plateaus, say, that rounding tells apart. */
static bool exchanged_alike(const struct dkv_case *c, const struct dkv_oracle *want,
                            const struct dkv_case_answer *got)
{
    const uint64_t n = c->block.n_tokens;
    double low = INFINITY, high = -INFINITY, measure = 0;
    uint8_t *kept = calloc(c->block.kv_heads * n, 1);
    uint64_t mine = 0, right = 0;
    if (kept == NULL)
        abort();
    for (uint32_t h = 0; h < c->block.kv_heads; h++) {
        for (uint32_t i = 0; i < got->counts[h]; i++)
            kept[h * n + (uint64_t)got->keep[mine++]] |= 1;
        for (uint32_t i = 0; i < want->counts[h]; i++)
            kept[h * n + (uint64_t)want->keep[right++]] |= 2;
    }
    for (uint64_t i = 0; i < c->block.kv_heads * n; i++)
        if (kept[i] == 1 || kept[i] == 2) {
            low = fmin(low, want->pooled[i]);
            high = fmax(high, want->pooled[i]);
            measure = fmax(measure, fmax(want->measure[i], fabs(want->pooled[i])));
        }
    free(kept);
    return mine == right && high - low <= bound_of(c) * measure;
}

/* Tokens may change places with the cut's where their scores are as near as errors may be. */
static bool check_set(const struct dkv_case *c, const struct dkv_oracle *want,
                      const struct dkv_case_answer *got, uint64_t h, struct totals *totals,
                      char *why)
{
    const uint64_t n = c->block.n_tokens;
    uint64_t at = 0, k = c->plan.ragged ? got->counts[h] : c->plan.keep_tokens;
    for (uint64_t before = 0; before < h; before++)
        at += want->counts[before];
    if (k != want->counts[h] && exchanged_alike(c, want, got)) {
        totals->heads++;
        totals->sets_in_cut++;
        return true;
    }
    if (k != want->counts[h]) {
        snprintf(why, 200, "head %u keeps %llu tokens, not %u", (unsigned)h, (unsigned long long)k,
                 want->counts[h]);
        return false;
    }
    const double *pooled = want->pooled + h * n;
    const uint8_t *classes = want->token_class + h * n;
    const int32_t *mine = got->keep + at, *right = want->keep + at;
    uint8_t *kept = calloc(n, 1);
    if (kept == NULL)
        abort();
    for (uint64_t i = 0; i < k; i++) {
        if (mine[i] < (int64_t)c->block.valid_from || mine[i] >= (int64_t)n ||
            (i > 0 && mine[i] <= mine[i - 1])) {
            snprintf(why, 200, "head %u: kept[%llu] is %d", (unsigned)h, (unsigned long long)i,
                     mine[i]);
            free(kept);
            return false;
        }
        kept[mine[i]] |= 1;
        kept[right[i]] |= 2;
    }
    int32_t cut = right[0];
    for (uint64_t i = 1; i < k; i++)
        if (classes[right[i]] < classes[cut] ||
            (classes[right[i]] == classes[cut] && pooled[right[i]] < pooled[cut]))
            cut = right[i];
    bool equal = true, ok = true;
    for (uint64_t t = 0; t < n && ok; t++) {
        if (kept[t] == 0 || kept[t] == 3)
            continue;
        equal = false;
        const double near = bound_of(c) *
                            fmax(measure_of(want, h, n, t), measure_of(want, h, n, (uint64_t)cut));
        ok = classes[t] == classes[cut] && fabs(pooled[t] - pooled[cut]) <= near;
        if (c->params.policy == DKV_POLICY_CRITICALKV && bound_of(c) > 1e-3)
            ok = true; /* a first stage that differs inside its own cut moves the second's */
        if (!ok)
            snprintf(why, 200, "head %u: token %llu (%.9g) against the cut %d (%.9g)", (unsigned)h,
                     (unsigned long long)t, pooled[t], cut, pooled[cut]);
    }
    free(kept);
    totals->heads++;
    totals->sets_equal += equal;
    totals->sets_in_cut += !equal;
    return ok;
}

static bool same_bits(const struct dkv_case *c, const struct dkv_case_answer *a,
                      const struct dkv_case_answer *b)
{
    const size_t heads = c->block.kv_heads;
    return a->status == b->status &&
           memcmp(a->raw, b->raw, heads * c->block.n_tokens * sizeof(*a->raw)) == 0 &&
           memcmp(a->counts, b->counts, heads * sizeof(*a->counts)) == 0 &&
           memcmp(a->keep, b->keep, c->plan.keep_capacity * sizeof(*a->keep)) == 0;
}

static void judge(const struct dkv_case *c, const char *name, const struct dkv_scorer *one,
                  const struct dkv_scorer *other, struct totals *totals)
{
    struct dkv_oracle want;
    struct dkv_case_answer got, again;
    char why[200] = "";
    dkv_oracle_run(c, &want);
    dkv_case_run(c, one, &got);
    dkv_case_run(c, other, &again);
    bool ok = got.status == DKV_OK;
    if (!ok)
        snprintf(why, sizeof(why), "refused: %.180s", got.error.text);
    ok = ok && check_scores(c, &want, &got, totals, why);
    for (uint64_t h = 0; ok && h < c->block.kv_heads; h++)
        ok = check_set(c, &want, &got, h, totals, why);
    if (ok && !same_bits(c, &got, &again)) {
        ok = false;
        snprintf(why, sizeof(why), "the second engine's answer has other bits");
    }
    if (!ok)
        printf("FAILED %s: %s: %s\n  %s/%s heads %u/%u D %u/%u rows %llu window %u n %llu from "
               "%llu reduce %d gqa %d pool %s%lld k %llu sink_logits %d\n",
               name, dkv_policy_name(c->params.policy), why, dkv_dtype_name(c->block.query.dtype),
               dkv_dtype_name(c->block.key.dtype), c->block.q_heads, c->block.kv_heads,
               c->block.head_dim, c->plan.v_dim, (unsigned long long)c->block.q_rows,
               c->plan.window, (unsigned long long)c->block.n_tokens,
               (unsigned long long)c->block.valid_from, (int)c->params.reduce, (int)c->params.gqa,
               dkv_pool_name(c->params.pool), (long long)c->params.kernel,
               (unsigned long long)c->plan.keep_tokens, c->block.sink_logits != NULL);
    totals->failed += !ok;
    totals->cases += ok;
    dkv_oracle_fini(&want);
    dkv_case_answer_fini(&got);
    dkv_case_answer_fini(&again);
}

/* ---- optional tensors ---- */

struct extras {
    float *per_token; /* [kv_heads][n] */
    float *metric;    /* [q_heads][dv][dv] */
};

static float *random_floats(struct dkv_random *random, size_t count, bool any_sign)
{
    float *floats = malloc(count * sizeof(*floats));
    if (floats == NULL)
        abort();
    for (size_t i = 0; i < count; i++)
        floats[i] = (float)(any_sign ? dkv_random_normal(random) : dkv_random_unit(random));
    return floats;
}

static void give_extras(struct dkv_case *c, struct dkv_random *random, struct extras *extras)
{
    const enum dkv_policy policy = c->params.policy;
    const size_t per_token = c->block.kv_heads * c->block.n_tokens;
    const size_t dv = c->block.v_dim != 0 ? c->block.v_dim : c->block.head_dim;
    *extras = (struct extras){0};
    if (policy == DKV_POLICY_EXTERNAL) {
        c->block.external_scores = extras->per_token = random_floats(random, per_token, true);
        return;
    }
    if (dkv_random_once_in(random, 2))
        return;
    if (policy == DKV_POLICY_CRITICALKV)
        c->block.token_weight = extras->per_token = random_floats(random, per_token, false);
    if ((policy == DKV_POLICY_H2O || policy == DKV_POLICY_KVZIP) &&
        (!dkv_params_has(&c->params, DKV_PARAM_REDUCE) ||
         c->params.reduce != DKV_REDUCE_MEAN_SEEN) &&
        c->params.profile != DKV_PROFILE_KVPRESS)
        c->block.carry_in = extras->per_token = random_floats(random, per_token, false);
    if (policy == DKV_POLICY_RESTKV && dkv_random_once_in(random, 2))
        c->block.value_metric = extras->metric = random_floats(random, c->block.q_heads * dv * dv,
                                                               true);
}

static void drop_extras(struct extras *extras)
{
    free(extras->per_token);
    free(extras->metric);
}

/* ---- random cases ---- */

static void set_number(struct dkv_case *c, const char *name, double value)
{
    char text[64];
    snprintf(text, sizeof(text), "%.17g", value);
    dkv_case_param(c, name, text);
}

static bool is_fp8(enum dkv_dtype dtype)
{
    return dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2;
}

static struct dkv_shape pick_shape(struct dkv_random *random, const char *policy)
{
    const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_BF16,    DKV_FP16,
                                     DKV_FP32, DKV_F8_E4M3, DKV_F8_E5M2};
    const bool all_rows = strcmp(policy, "h2o") == 0 || strcmp(policy, "kvzip") == 0;
    const uint32_t group = (uint32_t)dkv_random_range(random, 1, 6);
    struct dkv_shape shape = {0};
    shape.kv_heads = (uint32_t)dkv_random_range(random, 1, 3);
    shape.q_heads = group * shape.kv_heads;
    shape.head_dim = 8 * (uint32_t)dkv_random_range(random, 1, 16);
    shape.v_dim = dkv_random_once_in(random, 4) ? 8 * (uint32_t)dkv_random_range(random, 1, 16) : 0;
    shape.n_tokens = dkv_random_range(random, 2, dkv_random_once_in(random, 4) ? 900 : 200);
    shape.q_rows = dkv_random_range(random, 1,
                                    all_rows && dkv_random_once_in(random, 3) ? 300 : 40);
    if (all_rows && shape.q_rows > 60)
        shape.head_dim = 16;
    shape.q_dtype = dtypes[dkv_random_u64(random) % 6];
    shape.kv_dtype = dkv_random_once_in(random, 3) ? dtypes[dkv_random_u64(random) % 6]
                                                   : shape.q_dtype;
    return shape;
}

/* Heads, chunks. Where p is rounded, scores tie by chance and heads' counts with them. */
static void pick_budget(struct dkv_case *c, struct dkv_random *random, const char *policy)
{
    const char *const heads[] = {"uniform", "adakv_mix", "adakv_floor", "global"};
    if (c->params.gqa == DKV_GQA_LAYER || strcmp(policy, "tova") == 0 ||
        strcmp(policy, "criticalkv") == 0) {
        if (strcmp(policy, "criticalkv") != 0 && dkv_random_once_in(random, 2))
            set_number(c, "granularity", (double)dkv_random_range(random, 1, 9));
        if (!dkv_params_has(&c->params, DKV_PARAM_HEADS))
            dkv_case_param(c, "heads", "uniform");
        return;
    }
    if (dkv_random_once_in(random, 2)) {
        dkv_case_param(c, "heads", heads[dkv_random_u64(random) % 4]);
        if (c->params.heads != DKV_HEADS_UNIFORM && !dkv_params_has(&c->params, DKV_PARAM_P_ROUND))
            dkv_case_param(c, "p_round", "none");
        set_number(c, "alpha", dkv_random_unit(random));
    }
    if (dkv_random_once_in(random, 3))
        set_number(c, "granularity", (double)dkv_random_range(random, 1, 9));
    if (dkv_random_once_in(random, 4))
        set_number(c, "min_keep", (double)dkv_random_range(random, 1, 9));
    if (dkv_random_once_in(random, 4))
        dkv_case_param(c, "counts_protected", "false");
}

static void pick_params(struct dkv_case *c, struct dkv_random *random, const char *policy)
{
    const char *const profiles[] = {"paper", "author", "kvpress"};
    const char *const pools[] = {"max", "avg", "none"};
    const char *const gqas[] = {"mean", "sum", "max", "layer"};
    const bool zip = strcmp(policy, "kvzip") == 0;
    const bool all_rows = zip || strcmp(policy, "h2o") == 0;
    dkv_case_param(c, "policy", policy);
    dkv_case_param(c, "profile", profiles[dkv_random_u64(random) % 3]);
    if (is_fp8(c->block.query.dtype))
        dkv_case_param(c, "p_round", "none");
    if (!all_rows && dkv_random_once_in(random, 2))
        set_number(c, "window", (double)dkv_random_range(random, 1, 40));
    if (dkv_random_once_in(random, 2)) {
        dkv_case_param(c, "pool", pools[dkv_random_u64(random) % 3]);
        set_number(c, "kernel", (double)(2 * dkv_random_range(random, 0, 20) + 1));
    }
    if (!all_rows && dkv_random_once_in(random, 3))
        dkv_case_param(c, "gqa", gqas[dkv_random_u64(random) % 4]);
    if (strcmp(policy, "snapkv") == 0 && dkv_random_once_in(random, 2)) {
        const char *const reduces[] = {"sum", "mean", "max", "ema"};
        dkv_case_param(c, "reduce", reduces[dkv_random_u64(random) % 4]);
    }
    if (strcmp(policy, "restkv") == 0 && dkv_random_once_in(random, 2))
        dkv_case_param(c, "reduce", dkv_random_once_in(random, 2) ? "mean" : "ema");
    if (strcmp(policy, "keydiff") == 0 && dkv_random_once_in(random, 2))
        dkv_case_param(c, "anchor", "plain");
    if (dkv_random_once_in(random, 4))
        set_number(c, "sinks", (double)dkv_random_range(random, 0, 6));
    if (dkv_random_once_in(random, 4))
        set_number(c, "recent", (double)dkv_random_range(random, 0, 40));
    if (dkv_random_once_in(random, 6))
        set_number(c, "logit_softcap", 5 + 45 * dkv_random_unit(random));
    pick_budget(c, random, policy);
    set_number(c, "seed", (double)dkv_random_range(random, 0, 1000));
    set_number(c, "keep_ratio", 0.05 + 0.9 * dkv_random_unit(random));
}

/* Queries share a direction and one key lies on it: a sink that takes nearly all of each row. */
static void add_sink(struct dkv_case *c, struct dkv_random *random)
{
    const uint64_t token = dkv_random_range(random, c->block.valid_from, c->block.n_tokens - 1);
    const double size = (20 * dkv_random_unit(random) + log((double)c->block.n_tokens)) /
                        sqrt(c->block.head_dim);
    for (uint32_t e = 0; e < c->block.head_dim; e++) {
        const double direction = dkv_random_once_in(random, 2) ? 1 : -1;
        for (uint32_t h = 0; h < c->block.q_heads; h++)
            for (uint64_t t = 0; t < c->block.q_rows; t++)
                dkv_case_set(c, DKV_QUERY, h, t, e,
                             direction + 0.1 * dkv_case_get(c, DKV_QUERY, h, t, e));
        for (uint32_t h = 0; h < c->block.kv_heads; h++)
            dkv_case_set(c, DKV_KEY, h, token, e, size * direction);
    }
}

static void run_random(uint64_t seed, const struct dkv_scorer *one, const struct dkv_scorer *other,
                       struct totals *totals)
{
    struct dkv_random random = {seed * 0x9e3779b97f4a7c15u};
    const char *policy = policies[seed % N_POLICIES];
    struct dkv_case c;
    struct extras extras;
    char name[64];
    dkv_case_init(&c, pick_shape(&random, policy));
    if (dkv_random_once_in(&random, 5))
        c.block.valid_from = dkv_random_range(&random, 0, c.block.n_tokens - 2);
    if (dkv_random_once_in(&random, 5)) {
        for (uint32_t h = 0; h < c.block.q_heads; h++)
            c.sink_logits[h] = (float)(3 * dkv_random_normal(&random));
        c.block.sink_logits = c.sink_logits;
    }
    if (is_fp8(c.block.key.dtype))
        c.block.key.scale = c.block.value.scale = (float)exp(0.3 * dkv_random_normal(&random));
    pick_params(&c, &random, policy);
    dkv_case_fill(&c, DKV_QUERY, &random, exp(1.5 * dkv_random_unit(&random) - 0.5));
    dkv_case_fill(&c, DKV_KEY, &random, 1);
    dkv_case_fill(&c, DKV_VALUE, &random, exp(4 * dkv_random_unit(&random) - 2));
    if (dkv_random_once_in(&random, 3))
        add_sink(&c, &random);
    give_extras(&c, &random, &extras);
    dkv_case_plan(&c);
    snprintf(name, sizeof(name), "seed %llu", (unsigned long long)seed);
    judge(&c, name, one, other, totals);
    drop_extras(&extras);
    dkv_case_fini(&c);
}

/* ---- files ---- */

/* Every policy with its published defaults on one block. */
static void run_policies(struct dkv_case *c, const char *name, const struct dkv_scorer *one,
                         const struct dkv_scorer *other, struct totals *totals)
{
    for (size_t i = 0; i < N_POLICIES; i++) {
        struct dkv_random random = {i + 1};
        struct extras extras;
        dkv_params_init(&c->params);
        dkv_case_param(c, "policy", policies[i]);
        dkv_case_param(c, "keep_ratio", "0.1");
        give_extras(c, &random, &extras);
        dkv_case_plan(c);
        judge(c, name, one, other, totals);
        drop_extras(&extras);
        c->block.token_weight = c->block.carry_in = c->block.external_scores = NULL;
        c->block.value_metric = NULL;
    }
}

static void run_golden(const struct dkv_scorer *one, const struct dkv_scorer *other,
                       struct totals *totals)
{
    for (size_t f = 0; dkv_golden_names[f] != NULL; f++) {
        struct dkv_golden *golden = dkv_golden_open(dkv_golden_names[f]);
        struct dkv_case c;
        dkv_golden_case(golden, 0, &c);
        run_policies(&c, dkv_golden_names[f], one, other, totals);
        dkv_case_fini(&c);
        dkv_golden_close(golden);
    }
}

static void copy_tensor(const struct dkv_tensors *file, const char *layer, const char *name,
                        struct dkv_case *c, enum dkv_side side)
{
    char full[64];
    struct dkv_tensor tensor;
    snprintf(full, sizeof(full), "%s%s", layer, name);
    if (!dkv_tensors_find(file, full, &tensor))
        abort();
    memcpy(c->memory[side], tensor.data, tensor.bytes);
}

static void run_dump(const struct dkv_scorer *one, const struct dkv_scorer *other,
                     struct totals *totals)
{
    const char *folder = getenv("DKV_TEST_DATA");
    char path[512];
    snprintf(path, sizeof(path), "%s/dumps/tiny_dump_n1024.safetensors",
             folder != NULL ? folder : "tests/data");
    struct dkv_tensors *file = dkv_tensors_open(path);
    if (file == NULL)
        exit(1);
    for (unsigned l = 1; l < 6; l += 3) {
        char layer[32];
        struct dkv_case c;
        snprintf(layer, sizeof(layer), "layers.%u.", l);
        dkv_case_init(&c, (struct dkv_shape){.q_heads = 8,
                                             .kv_heads = 2,
                                             .head_dim = 64,
                                             .q_rows = 64,
                                             .n_tokens = 1024,
                                             .q_dtype = DKV_BF16});
        copy_tensor(file, layer, "query", &c, DKV_QUERY);
        copy_tensor(file, layer, "key", &c, DKV_KEY);
        copy_tensor(file, layer, "value", &c, DKV_VALUE);
        run_policies(&c, layer, one, other, totals);
        dkv_case_fini(&c);
    }
    dkv_tensors_close(file);
}

int main(int argc, char **argv)
{
    const char *engine = dkv_test_engine_name(argc, argv);
    const uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 300;
    const uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    struct totals totals = {.medians = calloc(count + 1000, sizeof(double))};
    if (totals.medians == NULL)
        return 1;
    struct dkv_scorer one = dkv_test_engine_open(engine, 1);
    struct dkv_scorer other = dkv_test_engine_open(engine, 2);
    for (uint64_t i = 0; i < count; i++)
        run_random(seed + i, &one, &other, &totals);
    if (count != 1) {
        run_golden(&one, &other, &totals);
        run_dump(&one, &other, &totals);
    }
    dkv_test_engine_close(&one);
    dkv_test_engine_close(&other);
    qsort(totals.medians, totals.cases, sizeof(double), by_size);
    const double median = totals.cases > 0 ? totals.medians[totals.cases / 2] : INFINITY;
    if (median > 1e-6)
        totals.failed++;
    printf("%s: %llu cases right, %llu failed; relative error of raw scores: median %.2g, maximum "
           "%.2g; sets of %llu heads: %llu equal, %llu within the cut\n",
           engine, (unsigned long long)totals.cases, (unsigned long long)totals.failed, median,
           totals.worst, (unsigned long long)totals.heads, (unsigned long long)totals.sets_equal,
           (unsigned long long)totals.sets_in_cut);
    free(totals.medians);
    return totals.failed != 0;
}
