/* Every policy of an engine against its float64 oracle: random blocks, the golden files' inputs,
 * and a dump of a trained model.
 *
 * usage: check_policies [ENGINE [COUNT [SEED]]], by default cpu, 300 cases, seed 1.
 *
 * The bounds are those of docs/numerics.md (tests/support/policy_judge.h). Each case also runs on
 * an engine with another number of threads, which must give the same bits.
 */
#include "tests/support/engines.h"
#include "tests/support/golden.h"
#include "tests/support/policy_case.h"
#include "tests/support/policy_judge.h"
#include "tests/support/tensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
                  const struct dkv_scorer *other, struct dkv_policy_totals *totals)
{
    struct dkv_oracle want;
    struct dkv_case_answer got, again;
    char why[200] = "";
    dkv_oracle_run(c, &want);
    dkv_case_run(c, one, &got);
    dkv_case_run(c, other, &again);
    bool ok = dkv_policy_judge(c, &want, &got, totals, why);
    if (ok && !same_bits(c, &got, &again)) {
        ok = false;
        snprintf(why, sizeof(why), "the second engine's answer has other bits");
    }
    if (!ok)
        dkv_policy_tell(c, name, why);
    totals->failed += !ok;
    totals->cases += ok;
    dkv_oracle_fini(&want);
    dkv_case_answer_fini(&got);
    dkv_case_answer_fini(&again);
}

static void run_random(uint64_t seed, const struct dkv_scorer *one, const struct dkv_scorer *other,
                       struct dkv_policy_totals *totals)
{
    struct dkv_case c;
    struct dkv_policy_extras extras;
    char name[64];
    dkv_policy_case(&c, seed, &extras);
    snprintf(name, sizeof(name), "seed %llu", (unsigned long long)seed);
    judge(&c, name, one, other, totals);
    dkv_policy_drop_extras(&extras);
    dkv_case_fini(&c);
}

/* ---- files ---- */

/* Every policy with its published defaults on one block. */
static void run_policies(struct dkv_case *c, const char *name, const struct dkv_scorer *one,
                         const struct dkv_scorer *other, struct dkv_policy_totals *totals)
{
    for (size_t i = 0; i < dkv_policy_count; i++) {
        struct dkv_random random = {i + 1};
        struct dkv_policy_extras extras;
        dkv_params_init(&c->params);
        dkv_case_param(c, "policy", dkv_policy_names[i]);
        dkv_case_param(c, "keep_ratio", "0.1");
        dkv_policy_give_extras(c, &random, &extras);
        dkv_case_plan(c);
        judge(c, name, one, other, totals);
        dkv_policy_drop_extras(&extras);
        c->block.token_weight = c->block.carry_in = c->block.external_scores = NULL;
        c->block.value_metric = NULL;
    }
}

static void run_golden(const struct dkv_scorer *one, const struct dkv_scorer *other,
                       struct dkv_policy_totals *totals)
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
                     struct dkv_policy_totals *totals)
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
    struct dkv_policy_totals totals = {.medians = calloc(count + 1000, sizeof(double))};
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
    const double median = dkv_policy_median(&totals);
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
