/* The scores' definitions, in the order in which docs/policies.md gives them. Plain arrays and long
 * loops. What is kept of them is in policy_oracle_select.c. */
#include "tests/support/policy_oracle_priv.h"

#include "kernels/convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One KV head, tokens counted from valid_from. */
struct world {
    const struct dkv_case *c;
    size_t n, d, dv, w, group;
    double *key, *value; /* [n][d], [n][dv] */
    double *p;           /* [w][n] of one query head */
    double *a;           /* [w][dv] */
    double *left;        /* [w][n] 1 - p, without cancellation */
    uint32_t query_head;
    double *u;       /* [n] of one query head */
    double *measure; /* [n] */
};

static double scale_of(const struct dkv_view *view, uint64_t head)
{
    if (view->dtype != DKV_F8_E4M3 && view->dtype != DKV_F8_E5M2)
        return 1;
    if (view->head_scales != NULL)
        return (double)view->head_scales[head];
    return view->scale != 0 ? (double)view->scale : 1;
}

static double rounded(const struct world *x, double p)
{
    const enum dkv_dtype dtype = x->c->block.query.dtype;
    if (x->c->params.p_round != DKV_P_ROUND_INPUT || (dtype != DKV_BF16 && dtype != DKV_FP16))
        return p;
    return (double)dkv_round_to_dtype((float)p, dtype);
}

/* p[t][..], left[t][..] and a[t] of one query head. */
static void attend(struct world *x, uint32_t query_head)
{
    const struct dkv_case *c = x->c;
    const double q_scale = scale_of(&c->block.query, query_head), cap = c->params.logit_softcap;
    double *z = must_calloc(x->n, sizeof(*z));
    x->query_head = query_head;
    for (size_t t = 0; t < x->w; t++) {
        const size_t last = x->n - x->w + t;
        double max = c->block.sink_logits != NULL ? (double)c->block.sink_logits[query_head]
                                                  : -INFINITY;
        for (size_t j = 0; j <= last; j++) {
            z[j] = 0;
            for (size_t e = 0; e < x->d; e++)
                z[j] += dkv_case_get(c, DKV_QUERY, query_head, c->plan.first_row + t, e) * q_scale *
                        x->key[j * x->d + e];
            z[j] *= c->plan.scale;
            if (cap > 0)
                z[j] = cap * tanh(z[j] / cap);
            max = z[j] > max ? z[j] : max;
        }
        double sum = c->block.sink_logits != NULL
                         ? exp((double)c->block.sink_logits[query_head] - max)
                         : 0;
        for (size_t j = 0; j <= last; j++)
            sum += exp(z[j] - max);
        for (size_t j = 0; j < x->n; j++) {
            x->p[t * x->n + j] = j <= last ? exp(z[j] - max) / sum : 0;
            x->left[t * x->n + j] = 1 - x->p[t * x->n + j];
        }
        for (size_t j = 0; j <= last; j++) { /* 1 - p of a large p: what all others weigh */
            if (x->p[t * x->n + j] <= 0.5)
                continue;
            double others = c->block.sink_logits != NULL
                                ? exp((double)c->block.sink_logits[query_head] - max)
                                : 0;
            for (size_t i = 0; i <= last; i++)
                others += i != j ? exp(z[i] - max) : 0;
            x->left[t * x->n + j] = others / sum;
        }
        for (size_t e = 0; e < x->dv; e++) {
            x->a[t * x->dv + e] = 0;
            for (size_t j = 0; j <= last; j++)
                x->a[t * x->dv + e] += x->p[t * x->n + j] * x->value[j * x->dv + e];
        }
        for (size_t j = 0; j <= last; j++)
            x->p[t * x->n + j] = rounded(x, x->p[t * x->n + j]);
    }
    free(z);
}

/* The weight of row t in a moving average whose seed is the first row. */
static double ema(const struct world *x, size_t t)
{
    const double alpha = x->c->params.ema_alpha;
    double weight = t == 0 ? 1 : alpha;
    for (size_t later = t + 1; later < x->w; later++)
        weight *= 1 - alpha;
    return weight;
}

/* ---- u of one query head ---- */

static void attention(struct world *x)
{
    for (size_t j = 0; j < x->n; j++) {
        double sum = 0, max = 0, average = 0, seen = 0;
        for (size_t t = 0; t < x->w; t++) {
            const double p = x->p[t * x->n + j];
            sum += p;
            max = p > max ? p : max;
            average += ema(x, t) * p;
            seen += j <= x->n - x->w + t;
        }
        switch (x->c->params.reduce) {
        case DKV_REDUCE_SUM: x->u[j] = sum; break;
        case DKV_REDUCE_MEAN: x->u[j] = sum / (double)x->w; break;
        case DKV_REDUCE_MEAN_SEEN: x->u[j] = sum / seen; break;
        case DKV_REDUCE_MAX: x->u[j] = max; break;
        default: x->u[j] = average; break;
        }
    }
}

static void mean_and_variance(struct world *x)
{
    for (size_t j = 0; j < x->n; j++) {
        double mean = 0, squares = 0;
        for (size_t t = 0; t < x->w; t++)
            mean += x->p[t * x->n + j] / (double)x->w;
        for (size_t t = 0; t < x->w; t++)
            squares += (x->p[t * x->n + j] - mean) * (x->p[t * x->n + j] - mean);
        x->u[j] = mean + (x->w > 1 ? x->c->params.gamma * squares / (double)(x->w - 1) : 0);
    }
}

/* Terms have both signs, so an error is one of the sum of their sizes, and those of products a . v
 * likewise. */
static void projection(struct world *x)
{
    const double share = x->c->params.reduce == DKV_REDUCE_MEAN ? 1 / (double)x->w : 1;
    for (size_t j = 0; j < x->n; j++) {
        x->u[j] = 0;
        for (size_t t = 0; t < x->w; t++)
            for (size_t e = 0; e < x->dv; e++) {
                const double part = share * x->p[t * x->n + j] * x->a[t * x->dv + e] *
                                    x->value[j * x->dv + e];
                x->u[j] += part;
                x->measure[j] += fabs(part);
            }
    }
}

/* |M x|, or |x| without a metric. */
static double metric_length(const struct world *x, const double *vector)
{
    const float *metric = x->c->block.value_metric;
    double sum = 0;
    for (size_t e = 0; e < x->dv; e++) {
        double element = 0;
        for (size_t i = 0; i < x->dv && metric != NULL; i++)
            element += (double)metric[(x->query_head * x->dv + e) * x->dv + i] * vector[i];
        if (metric == NULL)
            element = vector[e];
        sum += element * element;
    }
    return sqrt(sum);
}

/* before: p / (1 - p) |a - v| = p |b - v| where b is the output without the token. */
static void error_by_row(struct world *x)
{
    double *gap = must_calloc(x->dv, sizeof(*gap));
    for (size_t j = 0; j < x->n; j++) {
        x->u[j] = 0;
        for (size_t t = 0; t < x->w; t++) {
            const double p = x->p[t * x->n + j], left = x->left[t * x->n + j];
            size_t seen = x->n - x->w + t + 1;
            if (p == 0 || seen < 2)
                continue;
            for (size_t e = 0; e < x->dv; e++) {
                gap[e] = -left * x->value[j * x->dv + e];
                for (size_t i = 0; i < x->n; i++)
                    gap[e] += i != j ? x->p[t * x->n + i] * x->value[i * x->dv + e] : 0;
            }
            x->u[j] += (x->c->params.reduce == DKV_REDUCE_MEAN ? 1 / (double)x->w : ema(x, t)) * p /
                       left * metric_length(x, gap);
        }
    }
    free(gap);
}

/* after: the average first, over the prefix. */
static void error_of_average(struct world *x)
{
    double *bar = must_calloc(x->n, sizeof(*bar)), *left = must_calloc(x->n, sizeof(*left));
    double *gap = must_calloc(x->dv, sizeof(*gap)), *sum = must_calloc(x->dv, sizeof(*sum));
    const size_t prefix = x->n - x->w;
    for (size_t j = 0; j < x->n; j++)
        for (size_t t = 0; t < x->w; t++) {
            bar[j] += ema(x, t) * x->p[t * x->n + j];
            left[j] += ema(x, t) * x->left[t * x->n + j];
        }
    for (size_t e = 0; e < x->dv; e++)
        for (size_t j = 0; j < prefix; j++)
            sum[e] += bar[j] * x->value[j * x->dv + e];
    for (size_t j = 0; j < x->n; j++) {
        for (size_t e = 0; e < x->dv; e++) {
            gap[e] = sum[e] - x->value[j * x->dv + e];
            if (bar[j] > 0.5 && j < prefix) { /* from the others, for their digits' sake */
                gap[e] = -left[j] * x->value[j * x->dv + e];
                for (size_t i = 0; i < prefix; i++)
                    gap[e] += i != j ? bar[i] * x->value[i * x->dv + e] : 0;
            }
        }
        x->u[j] = left[j] > 0 ? bar[j] / left[j] * metric_length(x, gap) : 0;
    }
    free(bar);
    free(left);
    free(gap);
    free(sum);
}

static void score_query_head(struct world *x, uint32_t query_head)
{
    const enum dkv_policy policy = x->c->params.policy;
    attend(x, query_head);
    memset(x->measure, 0, x->n * sizeof(*x->measure));
    if (policy == DKV_POLICY_ANDPRO)
        projection(x);
    else if (policy == DKV_POLICY_CAKE)
        mean_and_variance(x);
    else if (policy == DKV_POLICY_RESTKV && x->c->params.reduce == DKV_REDUCE_EMA_FIRST)
        error_of_average(x);
    else if (policy == DKV_POLICY_RESTKV)
        error_by_row(x);
    else
        attention(x);
    for (size_t j = 0; j < x->n && policy != DKV_POLICY_ANDPRO; j++)
        x->measure[j] = fabs(x->u[j]);
}

/* ---- without queries ---- */

static double norm(const double *a, size_t d)
{
    double sum = 0;
    for (size_t e = 0; e < d; e++)
        sum += a[e] * a[e];
    return sqrt(sum);
}

static uint64_t scramble(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void key_angles(struct world *x, double *raw, double *measure)
{
    double *anchor = must_calloc(x->d, sizeof(*anchor));
    for (size_t j = 0; j < x->n; j++) {
        const double length = norm(x->key + j * x->d, x->d);
        for (size_t e = 0; e < x->d; e++)
            if (x->c->params.anchor == DKV_ANCHOR_PLAIN)
                anchor[e] += x->key[j * x->d + e] / (double)x->n;
            else if (length > 0)
                anchor[e] += x->key[j * x->d + e] / length / (double)x->n;
    }
    for (size_t j = 0; j < x->n; j++) {
        const double lengths = norm(x->key + j * x->d, x->d) * norm(anchor, x->d);
        raw[j] = 0;
        for (size_t e = 0; e < x->d && lengths > 0; e++)
            raw[j] -= x->key[j * x->d + e] * anchor[e] / lengths;
        measure[j] = 1; /* a cosine */
    }
    free(anchor);
}

static void score_unseen(struct world *x, uint32_t head, double *raw, double *measure)
{
    const struct dkv_case *c = x->c;
    if (c->params.policy == DKV_POLICY_KEYDIFF) {
        key_angles(x, raw, measure);
        return;
    }
    for (size_t j = 0; j < x->n; j++) {
        switch (c->params.policy) {
        case DKV_POLICY_KNORM: raw[j] = -norm(x->key + j * x->d, x->d); break;
        case DKV_POLICY_STREAMING: raw[j] = (double)j + 1; break;
        case DKV_POLICY_RANDOM:
            raw[j] =
                (double)(scramble(scramble(scramble(scramble((uint64_t)c->params.seed) +
                                                    (uint64_t)c->params.layer + c->plan.index) +
                                           head) +
                                  j) >>
                         40) /
                16777216.0;
            break;
        default:
            raw[j] = (double)c->block
                         .external_scores[head * c->block.n_tokens + c->block.valid_from + j];
            break;
        }
        measure[j] = fabs(raw[j]);
    }
}

/* ---- one KV head ---- */

static void load(struct world *x, uint32_t head)
{
    const struct dkv_case *c = x->c;
    const double k_scale = scale_of(&c->block.key, head), v_scale = scale_of(&c->block.value, head);
    for (size_t j = 0; j < x->n; j++) {
        for (size_t e = 0; e < x->d; e++)
            x->key[j * x->d + e] = dkv_case_get(c, DKV_KEY, head, c->block.valid_from + j, e) *
                                   k_scale;
        for (size_t e = 0; e < x->dv; e++)
            x->value[j * x->dv + e] = dkv_case_get(c, DKV_VALUE, head, c->block.valid_from + j, e) *
                                      v_scale;
    }
}

static void score_head(struct world *x, uint32_t head, double *raw, double *measure)
{
    const enum dkv_gqa gqa = x->c->params.gqa;
    load(x, head);
    if (!dkv_oracle_has_rows(x->c->params.policy)) {
        score_unseen(x, head, raw, measure);
        return;
    }
    const double share = gqa == DKV_GQA_MEAN || gqa == DKV_GQA_LAYER ? 1 / (double)x->group : 1;
    for (uint32_t g = 0; g < x->group; g++) {
        score_query_head(x, head * (uint32_t)x->group + g);
        for (size_t j = 0; j < x->n; j++) {
            if (gqa != DKV_GQA_MAX)
                raw[j] += share * x->u[j];
            else if (g == 0 || x->u[j] > raw[j])
                raw[j] = x->u[j];
            measure[j] += share * x->measure[j];
        }
    }
    for (size_t j = 0; j < x->n && gqa == DKV_GQA_MAX && x->c->params.policy != DKV_POLICY_ANDPRO;
         j++)
        measure[j] = fabs(raw[j]);
}

/* ---- after the heads ---- */

static void add_carry(const struct dkv_case *c, struct dkv_oracle *o)
{
    const uint64_t n = c->block.n_tokens;
    for (uint64_t i = 0; c->block.carry_in != NULL && i < c->block.kv_heads * n; i++) {
        const double carry = i % n >= c->block.valid_from ? (double)c->block.carry_in[i] : 0;
        if (c->params.reduce != DKV_REDUCE_MAX)
            o->raw[i] += carry;
        else if (carry > o->raw[i])
            o->raw[i] = carry;
        o->measure[i] = fabs(o->raw[i]);
    }
}

static void average_layer(const struct dkv_case *c, struct dkv_oracle *o)
{
    const uint64_t n = c->block.n_tokens;
    for (uint64_t j = 0; c->params.gqa == DKV_GQA_LAYER && j < n; j++) {
        double mean = 0, measure = 0;
        for (uint32_t h = 0; h < c->block.kv_heads; h++) {
            mean += o->raw[h * n + j] / c->block.kv_heads;
            measure += o->measure[h * n + j] / c->block.kv_heads;
        }
        for (uint32_t h = 0; h < c->block.kv_heads; h++) {
            o->raw[h * n + j] = mean;
            o->measure[h * n + j] = measure;
        }
    }
}

/* ---- all of it ---- */

void dkv_oracle_run(const struct dkv_case *c, struct dkv_oracle *oracle_out)
{
    const size_t n = c->block.n_tokens, heads = c->block.kv_heads, first = c->block.valid_from;
    struct world x = {.c = c,
                      .n = c->plan.n_valid,
                      .d = c->block.head_dim,
                      .dv = c->plan.v_dim,
                      .w = c->plan.window,
                      .group = c->plan.group};
    struct dkv_oracle o = {.raw = must_calloc(heads * n, sizeof(double)),
                           .measure = must_calloc(heads * n, sizeof(double)),
                           .pooled = must_calloc(heads * n, sizeof(double)),
                           .token_class = must_calloc(heads * n, 1),
                           .keep = must_calloc(heads * n, sizeof(int32_t)),
                           .counts = must_calloc(heads, sizeof(uint32_t))};
    x.key = must_calloc(x.n * x.d, sizeof(double));
    x.value = must_calloc(x.n * x.dv, sizeof(double));
    x.p = must_calloc(x.w * x.n, sizeof(double));
    x.left = must_calloc(x.w * x.n, sizeof(double));
    x.a = must_calloc(x.w * x.dv, sizeof(double));
    x.u = must_calloc(x.n, sizeof(double));
    x.measure = must_calloc(x.n, sizeof(double));
    for (uint32_t h = 0; h < heads; h++)
        score_head(&x, h, o.raw + h * n + first, o.measure + h * n + first);
    add_carry(c, &o);
    average_layer(c, &o);
    dkv_oracle_select(c, &o);
    free(x.key);
    free(x.value);
    free(x.p);
    free(x.left);
    free(x.a);
    free(x.u);
    free(x.measure);
    *oracle_out = o;
}

void dkv_oracle_fini(struct dkv_oracle *oracle)
{
    free(oracle->raw);
    free(oracle->measure);
    free(oracle->pooled);
    free(oracle->token_class);
    free(oracle->keep);
    free(oracle->counts);
    *oracle = (struct dkv_oracle){0};
}
