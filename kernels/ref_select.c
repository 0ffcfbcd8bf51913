/* How the reference selects: pooling by its definition, then a full sort by class, pooled score,
 * raw score and index, so that no tie is left. */
#include "kernels/ref.h"

#include <math.h>
#include <stdlib.h>

static void pool(const double *raw, uint64_t n, const struct dkv_params *params,
                 const struct dkv_plan *plan, double *pooled)
{
    const bool prefix = params->pool_scope == DKV_POOL_SCOPE_PREFIX;
    const int64_t begin = prefix ? (int64_t)plan->sinks : 0;
    const int64_t end = (int64_t)(prefix ? n - plan->recent : n);
    const int64_t half = params->kernel / 2;
    for (int64_t i = 0; i < (int64_t)n; i++) {
        pooled[i] = raw[i];
        if (params->pool == DKV_POOL_NONE || i < begin || i >= end)
            continue;
        double max = 0, sum = 0;
        for (int64_t j = i - half; j <= i + half; j++) {
            if (j < begin || j >= end)
                continue;
            max = fmax(max, raw[j]);
            sum += raw[j];
        }
        pooled[i] = params->pool == DKV_POOL_MAX ? max : sum / (double)params->kernel;
    }
}

struct candidate {
    uint8_t token_class;
    double pooled;
    double raw;
    int32_t index;
};

static int better_first(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;
    if (a->token_class != b->token_class)
        return a->token_class > b->token_class ? -1 : 1;
    if (a->pooled != b->pooled)
        return a->pooled > b->pooled ? -1 : 1;
    if (a->raw != b->raw)
        return a->raw > b->raw ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static int ascending(const void *left, const void *right)
{
    const int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
    return (a > b) - (a < b);
}

enum dkv_status dkv_ref_select(const double *raw, const uint8_t *token_class, uint64_t n,
                               const struct dkv_params *params, const struct dkv_plan *plan,
                               double *pooled_out, int32_t *keep_out)
{
    struct candidate *order = calloc(n, sizeof(*order));
    if (order == NULL)
        return DKV_E_NOMEM;
    pool(raw, n, params, plan, pooled_out);
    for (uint64_t i = 0; i < n; i++)
        order[i] = (struct candidate){token_class[i], pooled_out[i], raw[i], (int32_t)i};
    qsort(order, n, sizeof(*order), better_first);
    for (uint64_t i = 0; i < plan->keep_tokens; i++)
        keep_out[i] = order[i].index;
    qsort(keep_out, plan->keep_tokens, sizeof(*keep_out), ascending);
    free(order);
    return DKV_OK;
}
