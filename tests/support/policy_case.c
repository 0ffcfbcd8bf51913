/* Shapes, budgets and optional tensors, drawn from a seed. */
#include "tests/support/policy_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const dkv_policy_names[] = {"snapkv",     "tova",   "h2o",     "cake",    "andpro",
                                        "criticalkv", "restkv", "kvzip",   "keydiff", "knorm",
                                        "streaming",  "random", "external"};
const size_t dkv_policy_count = sizeof(dkv_policy_names) / sizeof(dkv_policy_names[0]);

static float *random_floats(struct dkv_random *random, size_t count, bool any_sign)
{
    float *floats = malloc(count * sizeof(*floats));
    if (floats == NULL)
        abort();
    for (size_t i = 0; i < count; i++)
        floats[i] = (float)(any_sign ? dkv_random_normal(random) : dkv_random_unit(random));
    return floats;
}

void dkv_policy_give_extras(struct dkv_case *c, struct dkv_random *random,
                            struct dkv_policy_extras *extras)
{
    const enum dkv_policy policy = c->params.policy;
    const size_t per_token = c->block.kv_heads * c->block.n_tokens;
    const size_t dv = c->block.v_dim != 0 ? c->block.v_dim : c->block.head_dim;
    *extras = (struct dkv_policy_extras){0};
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

void dkv_policy_drop_extras(struct dkv_policy_extras *extras)
{
    free(extras->per_token);
    free(extras->metric);
}

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
    if (!all_rows && dkv_random_once_in(random, 3)) { /* what kernels for models are made for */
        shape.head_dim = dkv_random_once_in(random, 3) ? 64 : 128;
        shape.v_dim = 0;
        shape.q_dtype = shape.kv_dtype = dkv_random_once_in(random, 3) ? DKV_FP16 : DKV_BF16;
    }
    return shape;
}

static void make_long(struct dkv_shape *shape)
{
    shape->n_tokens += 16400;
    shape->kv_heads = 1;
    shape->v_dim = 16; /* the reference takes seconds with more */
    shape->q_heads = shape->q_heads > 4 ? 4 : shape->q_heads;
    shape->q_rows = shape->q_rows > 8 ? 8 : shape->q_rows;
    shape->q_dtype = shape->q_dtype == DKV_FP16 ? DKV_FP16 : DKV_BF16;
    shape->kv_dtype = shape->q_dtype;
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

void dkv_policy_case(struct dkv_case *c, uint64_t seed, struct dkv_policy_extras *extras)
{
    struct dkv_random random = {seed * 0x9e3779b97f4a7c15u};
    const char *policy = dkv_policy_names[seed % dkv_policy_count];
    struct dkv_shape shape = pick_shape(&random, policy);
    if (seed & DKV_POLICY_LONG)
        make_long(&shape);
    dkv_case_init(c, shape);
    if (dkv_random_once_in(&random, 5))
        c->block.valid_from = dkv_random_range(&random, 0, c->block.n_tokens - 2);
    if (dkv_random_once_in(&random, 5)) {
        for (uint32_t h = 0; h < c->block.q_heads; h++)
            c->sink_logits[h] = (float)(3 * dkv_random_normal(&random));
        c->block.sink_logits = c->sink_logits;
    }
    if (is_fp8(c->block.key.dtype))
        c->block.key.scale = c->block.value.scale = (float)exp(0.3 * dkv_random_normal(&random));
    pick_params(c, &random, policy);
    dkv_case_fill(c, DKV_QUERY, &random, exp(1.5 * dkv_random_unit(&random) - 0.5));
    dkv_case_fill(c, DKV_KEY, &random, 1);
    dkv_case_fill(c, DKV_VALUE, &random, exp(4 * dkv_random_unit(&random) - 2));
    if (dkv_random_once_in(&random, 3))
        add_sink(c, &random);
    dkv_policy_give_extras(c, &random, extras);
    dkv_case_plan(c);
}
