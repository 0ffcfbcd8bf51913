/* What is kept, by definition, in the order in which docs/policies.md gives it: pooling, classes, a
 * total order, budgets by head in units of a token or a chunk. */
#include "tests/support/policy_oracle_priv.h"

#include <math.h>
#include <string.h>

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
    if (c->plan.n_valid == c->plan.window && dkv_oracle_has_rows(c->params.policy))
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

/* authors' AdaKV: round((1-a) B_h* + int(a B)) and the protected; with k >= n everything, which the
 * rounded shares may miss by one. */
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
        taken[h] = taken[h] > counts[h] || c->plan.keep_all ? counts[h] : taken[h];
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

void dkv_oracle_select(const struct dkv_case *c, struct dkv_oracle *o)
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
