/* Definitions, in the order in which docs/policies.md gives them. Plain arrays and long loops. */
#include "tests/support/policy_oracle.h"

#include "kernels/convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *must_calloc(size_t count, size_t size)
{
    void *memory = calloc(count > 0 ? count : 1, size);
    if (memory == NULL)
        abort();
    return memory;
}

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

static bool has_rows(enum dkv_policy policy)
{
    return policy != DKV_POLICY_KEYDIFF && policy != DKV_POLICY_KNORM &&
           policy != DKV_POLICY_STREAMING && policy != DKV_POLICY_RANDOM &&
           policy != DKV_POLICY_EXTERNAL;
}

static void score_head(struct world *x, uint32_t head, double *raw, double *measure)
{
    const enum dkv_gqa gqa = x->c->params.gqa;
    load(x, head);
    if (!has_rows(x->c->params.policy)) {
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

static void pool(const struct dkv_case *c, const double *raw, double *pooled)
{
    const bool prefix = c->params.pool_scope == DKV_POOL_SCOPE_PREFIX;
    const int64_t first = (int64_t)c->block.valid_from, n = (int64_t)c->block.n_tokens;
    const int64_t begin = prefix ? first + (int64_t)c->plan.sinks : first;
    const int64_t end = prefix ? n - (int64_t)c->plan.recent : n;
    const int64_t half = c->params.kernel / 2;
    for (int64_t j = first; j < n; j++) {
        double max = -INFINITY, sum = 0;
        pooled[j] = raw[j];
        if (c->params.pool == DKV_POOL_NONE || j < begin || j >= end)
            continue;
        for (int64_t i = j - half; i <= j + half; i++) {
            if (i < begin || i >= end)
                continue;
            max = raw[i] > max ? raw[i] : max;
            sum += raw[i];
        }
        pooled[j] = c->params.pool == DKV_POOL_MAX ? max : sum / (double)c->params.kernel;
    }
}

struct ranked {
    uint8_t token_class;
    double pooled, raw;
    int32_t token;
};

static int best_first(const void *left, const void *right)
{
    const struct ranked *a = left, *b = right;
    if (a->token_class != b->token_class)
        return a->token_class > b->token_class ? -1 : 1;
    if (a->pooled != b->pooled)
        return a->pooled > b->pooled ? -1 : 1;
    if (a->raw != b->raw)
        return a->raw > b->raw ? -1 : 1;
    return a->token - b->token;
}

static int ascending(const void *left, const void *right)
{
    return *(const int32_t *)left - *(const int32_t *)right;
}

static struct ranked *rank(const struct dkv_case *c, const double *raw, const double *pooled,
                           const uint8_t *token_class)
{
    const uint64_t n = c->block.n_tokens, first = c->block.valid_from;
    struct ranked *order = must_calloc(n, sizeof(*order));
    for (uint64_t t = first; t < n; t++)
        order[t - first] = (struct ranked){token_class[t], pooled[t], raw[t], (int32_t)t};
    qsort(order, n - first, sizeof(*order), best_first);
    return order;
}

static void second_stage(const struct dkv_case *c, uint32_t h, double *raw, double *pooled,
                         double *measure, uint8_t *token_class)
{
    const uint64_t n = c->block.n_tokens;
    struct ranked *order = rank(c, raw, pooled, token_class);
    for (uint64_t i = 0; i < c->plan.keep_tokens / 2; i++)
        token_class[order[i].token] = 2;
    free(order);
    for (uint64_t t = c->block.valid_from; t < n; t++) {
        const double weight = c->block.token_weight != NULL
                                  ? (double)c->block.token_weight[h * n + t]
                                  : 1;
        raw[t] = pooled[t] = measure[t] = (pooled[t] + 1e-4) * weight;
    }
}

static void classify(const struct dkv_case *c, uint8_t *token_class)
{
    const uint64_t n = c->block.n_tokens, first = c->block.valid_from;
    for (uint64_t t = first; t < n; t++)
        token_class[t] = t < first + c->plan.sinks || t >= n - c->plan.recent ? 2 : 1;
    if (c->plan.n_valid == c->plan.window && has_rows(c->params.policy))
        token_class[first] = 2; /* the only key of the first row */
}

/* ---- budgets ---- */

/* A chunk of a head: of one token without granularity. */
struct unit {
    uint8_t token_class;
    bool safe, placed;
    double pooled, raw;
    uint32_t head;
    uint64_t first, tokens; /* stored ordinal; how many */
};

/* Class, score, index, and of equals the lower head. */
static int best_unit_first(const void *left, const void *right)
{
    const struct unit *a = left, *b = right;
    const int a_class = a->safe && a->token_class < 2 ? 2 : a->token_class;
    const int b_class = b->safe && b->token_class < 2 ? 2 : b->token_class;
    if (a_class != b_class)
        return a_class > b_class ? -1 : 1;
    if (a->pooled != b->pooled)
        return a->pooled > b->pooled ? -1 : 1;
    if (a->raw != b->raw)
        return a->raw > b->raw ? -1 : 1;
    if (a->first != b->first)
        return a->first < b->first ? -1 : 1;
    return (a->head > b->head) - (a->head < b->head);
}

/* One head's units, best first. */
static size_t make_units(const struct dkv_case *c, const struct dkv_oracle *o, uint32_t h,
                         struct unit *units)
{
    const uint64_t n = c->block.n_tokens, chunk = (uint64_t)c->params.granularity;
    size_t count = 0;
    for (uint64_t t = c->block.valid_from; t < n; t++) {
        const uint64_t i = h * n + t;
        if (t == c->block.valid_from || t % chunk == 0)
            units[count++] = (struct unit){.head = h, .first = t};
        struct unit *unit = &units[count - 1];
        unit->pooled += o->pooled[i];
        unit->raw += o->raw[i];
        unit->tokens++;
        if (o->token_class[i] > unit->token_class)
            unit->token_class = o->token_class[i];
        const uint64_t at = t - c->block.valid_from;
        unit->placed = unit->placed || at < c->plan.sinks || t >= n - c->plan.recent;
        if (chunk > 1 && unit->placed) /* chunks that are protected by their place come first */
            unit->token_class = 3;
    }
    qsort(units, count, sizeof(*units), best_unit_first);
    return count;
}

/* How many of the best units have `tokens` tokens together, or just fewer. */
static size_t units_within(const struct unit *units, size_t count, uint64_t tokens)
{
    uint64_t sum = 0;
    size_t i = 0;
    while (i < count && sum + units[i].tokens <= tokens)
        sum += units[i++].tokens;
    return i;
}

/* Units of each head in `taken`, by its best `total` tokens over all heads; safe ones are marked.
 */
static void take_best(const struct dkv_case *c, struct unit *const *units, const size_t *counts,
                      uint64_t total, size_t *taken)
{
    struct unit *all = must_calloc(c->block.kv_heads * c->block.n_tokens, sizeof(*all));
    size_t count = 0;
    for (uint32_t h = 0; h < c->block.kv_heads; h++) {
        memcpy(all + count, units[h], counts[h] * sizeof(*all));
        count += counts[h];
        taken[h] = 0;
    }
    qsort(all, count, sizeof(*all), best_unit_first);
    const size_t within = units_within(all, count, total);
    for (size_t i = 0; i < within; i++)
        taken[all[i].head]++;
    free(all);
}

static uint64_t protected_units(const struct unit *units, size_t count)
{
    uint64_t found = 0;
    for (size_t i = 0; i < count; i++)
        found += units[i].placed;
    return found;
}

/* Marks the units of a head that it keeps whatever the others have. */
static void mark_safe(const struct dkv_case *c, struct unit *units, size_t count)
{
    const uint64_t k = c->plan.keep_tokens, chunk = (uint64_t)c->params.granularity;
    uint64_t safe = (uint64_t)c->params.min_keep + chunk - 1; /* whole chunks that hold it */
    if (c->params.heads == DKV_HEADS_ADAKV_FLOOR && (uint64_t)(c->params.alpha * (double)k) > safe)
        safe = (uint64_t)(c->params.alpha * (double)k);
    for (size_t i = 0; i < units_within(units, count, safe < k ? safe : k); i++)
        units[i].safe = true;
}

/* authors' AdaKV: round((1-a) B_h* + int(a B)) and the protected. */
static void mix(const struct dkv_case *c, struct unit *const *units, const size_t *counts,
                size_t *taken)
{
    take_best(c, units, counts, c->block.kv_heads * c->plan.keep_tokens, taken);
    for (uint32_t h = 0; h < c->block.kv_heads; h++) {
        const uint64_t fixed = protected_units(units[h], counts[h]);
        const uint64_t mean = units_within(units[h], counts[h], c->plan.keep_tokens) - fixed;
        const double mixed = (1 - c->params.alpha) * (double)(taken[h] - fixed) +
                             floor(c->params.alpha * (double)mean);
        size_t least = units_within(units[h], counts[h],
                                    (uint64_t)(c->params.min_keep + c->params.granularity - 1));
        least = least > fixed + mean ? fixed + mean : least;
        taken[h] = fixed + (size_t)nearbyint(mixed);
        taken[h] = taken[h] < least ? least : taken[h];
        taken[h] = taken[h] < 1 ? 1 : taken[h];
        taken[h] = taken[h] > counts[h] ? counts[h] : taken[h];
    }
}

static void keep_units(const struct unit *units, size_t taken, int32_t *keep, uint32_t *count_out)
{
    uint32_t count = 0;
    for (size_t i = 0; i < taken; i++)
        for (uint64_t t = 0; t < units[i].tokens; t++)
            keep[count++] = (int32_t)(units[i].first + t);
    qsort(keep, count, sizeof(*keep), ascending);
    *count_out = count;
}

static void select_block(const struct dkv_case *c, struct dkv_oracle *o)
{
    const uint64_t n = c->block.n_tokens;
    struct unit *units[DKV_HEADS_MAX];
    size_t counts[DKV_HEADS_MAX], taken[DKV_HEADS_MAX], at = 0;
    for (uint32_t h = 0; h < c->block.kv_heads; h++) {
        pool(c, o->raw + h * n, o->pooled + h * n);
        classify(c, o->token_class + h * n);
        if (c->params.policy == DKV_POLICY_CRITICALKV && c->params.heads == DKV_HEADS_UNIFORM)
            second_stage(c, h, o->raw + h * n, o->pooled + h * n, o->measure + h * n,
                         o->token_class + h * n);
        units[h] = must_calloc(n, sizeof(**units));
        counts[h] = make_units(c, o, h, units[h]);
        if (c->params.heads == DKV_HEADS_GLOBAL || c->params.heads == DKV_HEADS_ADAKV_FLOOR)
            mark_safe(c, units[h], counts[h]);
        taken[h] = units_within(units[h], counts[h], c->plan.keep_tokens);
    }
    if (c->params.heads == DKV_HEADS_ADAKV_MIX)
        mix(c, units, counts, taken);
    else if (c->params.heads != DKV_HEADS_UNIFORM)
        take_best(c, units, counts, c->block.kv_heads * c->plan.keep_tokens, taken);
    for (uint32_t h = 0; h < c->block.kv_heads; h++) {
        qsort(units[h], counts[h], sizeof(**units), best_unit_first);
        keep_units(units[h], taken[h], o->keep + at, &o->counts[h]);
        at += o->counts[h];
        free(units[h]);
    }
}

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
    select_block(c, &o);
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
