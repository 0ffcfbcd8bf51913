/* Scores one by one, sets against the cut. */
#include "tests/support/policy_judge.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
                         const struct dkv_case_answer *got, struct dkv_policy_totals *totals,
                         char *why)
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
                      const struct dkv_case_answer *got, uint64_t h,
                      struct dkv_policy_totals *totals, char *why)
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
                            fmax(fabs(pooled[cut]), fmax(measure_of(want, h, n, t),
                                                         measure_of(want, h, n, (uint64_t)cut)));
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

bool dkv_policy_judge(const struct dkv_case *c, const struct dkv_oracle *want,
                      const struct dkv_case_answer *got, struct dkv_policy_totals *totals,
                      char *why)
{
    bool ok = got->status == DKV_OK;
    if (!ok)
        snprintf(why, 200, "refused: %.180s", got->error.text);
    ok = ok && check_scores(c, want, got, totals, why);
    for (uint64_t h = 0; ok && h < c->block.kv_heads; h++)
        ok = check_set(c, want, got, h, totals, why);
    return ok;
}

void dkv_policy_tell(const struct dkv_case *c, const char *name, const char *why)
{
    printf("FAILED %s: %s: %s\n  %s/%s heads %u/%u D %u/%u rows %llu window %u n %llu from "
           "%llu reduce %d gqa %d pool %s%lld k %llu sink_logits %d\n",
           name, dkv_policy_name(c->params.policy), why, dkv_dtype_name(c->block.query.dtype),
           dkv_dtype_name(c->block.key.dtype), c->block.q_heads, c->block.kv_heads,
           c->block.head_dim, c->plan.v_dim, (unsigned long long)c->block.q_rows, c->plan.window,
           (unsigned long long)c->block.n_tokens, (unsigned long long)c->block.valid_from,
           (int)c->params.reduce, (int)c->params.gqa, dkv_pool_name(c->params.pool),
           (long long)c->params.kernel, (unsigned long long)c->plan.keep_tokens,
           c->block.sink_logits != NULL);
}

double dkv_policy_median(struct dkv_policy_totals *totals)
{
    qsort(totals->medians, totals->cases, sizeof(double), by_size);
    return totals->cases > 0 ? totals->medians[totals->cases / 2] : INFINITY;
}
