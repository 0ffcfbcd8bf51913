/* The comparison rule in code. */
#include "tests/support/compare.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The median of a handful of scores is no statistic: one row decides it. */
#define SCORES_FOR_A_MEDIAN 100

struct dkv_tolerance dkv_tolerance_of(const char *engine, enum dkv_dtype dtype)
{
    const struct dkv_tolerance tight = {.median = 1e-6, .max = 1e-4, .cut = 1e-4};
    const struct dkv_tolerance cuda_half = {.median = 5e-4, .max = 5e-3, .cut = 5e-3};
    return strncmp(engine, "cuda", 4) == 0 && dtype != DKV_FP32 ? cuda_half : tight;
}

static int by_size(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double largest(const double *x, uint64_t n)
{
    double max = 0;
    for (uint64_t i = 0; i < n; i++)
        max = x[i] > max ? x[i] : max;
    return max;
}

/* What a difference from `x` is measured against. */
static double measure(double x, double head_max)
{
    const double floor = fmax(1e-12 * head_max, FLT_MIN);
    return fmax(fabs(x), floor);
}

void dkv_compare_scores(const double *want, const double *got, uint64_t heads, uint64_t n,
                        double *median_out, double *max_out)
{
    double *errors = malloc(heads * n * sizeof(*errors));
    if (errors == NULL)
        abort();
    for (uint64_t h = 0; h < heads; h++) {
        const double head_max = largest(want + h * n, n);
        for (uint64_t i = h * n; i < (h + 1) * n; i++) {
            errors[i] = fabs(got[i] - want[i]) / measure(want[i], head_max);
            if (!isfinite(got[i]) || got[i] < 0 || (head_max == 0 && got[i] != 0))
                errors[i] = INFINITY;
        }
    }
    qsort(errors, heads * n, sizeof(*errors), by_size);
    *median_out = errors[heads * n / 2];
    *max_out = errors[heads * n - 1];
    free(errors);
}

static bool well_formed(uint64_t first, uint64_t n, const int32_t *keep, uint64_t k, char *why,
                        size_t why_bytes)
{
    for (uint64_t i = 0; i < k; i++) {
        if (keep[i] >= (int64_t)first && keep[i] < (int64_t)n && (i == 0 || keep[i] > keep[i - 1]))
            continue;
        snprintf(why, why_bytes, "kept[%llu] = %d is out of range or not ascending",
                 (unsigned long long)i, keep[i]);
        return false;
    }
    return true;
}

/* The order's last kept token. */
static int32_t worst_of(const double *raw, const double *pooled, const uint8_t *token_class,
                        const int32_t *keep, uint64_t k)
{
    int32_t worst = keep[0];
    for (uint64_t i = 1; i < k; i++) {
        const int32_t t = keep[i];
        if (token_class[t] != token_class[worst]) {
            worst = token_class[t] < token_class[worst] ? t : worst;
        } else if (pooled[t] != pooled[worst]) {
            worst = pooled[t] < pooled[worst] ? t : worst;
        } else if (raw[t] <= raw[worst]) {
            worst = t; /* ascending, so of equals the later one is the worse */
        }
    }
    return worst;
}

static bool has(const int32_t *keep, uint64_t k, int32_t token)
{
    uint64_t lo = 0, hi = k;
    while (lo < hi) {
        const uint64_t middle = (lo + hi) / 2;
        if (keep[middle] < token)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < k && keep[lo] == token;
}

int dkv_compare_keep(const double *raw, const double *pooled, const uint8_t *token_class,
                     uint64_t first, uint64_t n, const int32_t *want, const int32_t *got,
                     uint64_t k, bool plateaus, double tolerance, char *why, size_t why_bytes)
{
    if (!well_formed(first, n, got, k, why, why_bytes))
        return -1;
    const int32_t cut = worst_of(raw, pooled, token_class, want, k);
    bool equal = true, one_plateau = true, near_in_raw = true;
    int32_t stray = 0;
    for (int32_t t = (int32_t)first; t < (int64_t)n; t++) {
        if (has(want, k, t) == has(got, k, t))
            continue;
        equal = false;
        if (token_class[t] != token_class[cut] ||
            fabs(pooled[t] - pooled[cut]) > tolerance * pooled[cut]) {
            snprintf(why, why_bytes,
                     "token %d (class %d, pooled %.9g, raw %.9g) is on the wrong side of the cut "
                     "at token %d (class %d, pooled %.9g, raw %.9g)",
                     t, token_class[t], pooled[t], raw[t], cut, token_class[cut], pooled[cut],
                     raw[cut]);
            return -1;
        }
        one_plateau = one_plateau && pooled[t] == pooled[cut];
        if (fabs(raw[t] - raw[cut]) > tolerance * raw[cut] || raw[t] == 0) {
            near_in_raw = false;
            stray = t;
        }
    }
    if (!equal && plateaus && one_plateau && !near_in_raw) {
        snprintf(why, why_bytes,
                 "token %d (raw %.9g) is on the wrong side of the cut at token %d (raw %.9g) of "
                 "one plateau of pooled score %.9g",
                 stray, raw[stray], cut, raw[cut], pooled[cut]);
        return -1;
    }
    return equal ? 1 : 0;
}

struct dkv_comparison dkv_compare(const struct dkv_case *c, const struct dkv_ref_answer *want,
                                  const struct dkv_case_answer *got, struct dkv_tolerance tolerance)
{
    struct dkv_comparison result = {.ok = false};
    const uint64_t n = c->block.n_tokens, k = c->plan.keep_tokens;
    if (got->status != DKV_OK) {
        snprintf(result.why, sizeof(result.why), "refused: %.200s", got->error.text);
        return result;
    }
    dkv_compare_scores(want->raw, got->raw, c->block.kv_heads, n, &result.median, &result.max);
    const bool enough = c->block.kv_heads * n >= SCORES_FOR_A_MEDIAN;
    result.ok = (!enough || result.median <= tolerance.median) && result.max <= tolerance.max;
    if (!result.ok)
        snprintf(result.why, sizeof(result.why), "scores: median error %.3g, maximum %.3g",
                 result.median, result.max);
    for (uint32_t h = 0; h < c->block.kv_heads; h++) {
        char why[sizeof(result.why)] = "";
        const int verdict = dkv_compare_keep(
            want->raw + h * n, want->pooled + h * n, want->token_class + h * n, c->block.valid_from,
            n, want->keep + h * k, got->keep + h * k, k, c->params.pool != DKV_POOL_AVG,
            tolerance.cut, why, sizeof(why));
        result.sets_equal += verdict == 1;
        result.sets_in_cut += verdict == 0;
        if (verdict < 0 && result.ok) {
            snprintf(result.why, sizeof(result.why), "head %u: %.200s", h, why);
            result.ok = false;
        }
    }
    return result;
}
