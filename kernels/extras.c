/* Elements of optional tensors, one by one. */
#include "kernels/extras.h"

#include <float.h>
#include <math.h>

static const char *kind_of(float x)
{
    return isnan(x) ? "NaN" : "infinity";
}

static enum dkv_status check_factor(const struct dkv_block *block, const char *name,
                                    const float *factor, struct dkv_error *err)
{
    for (uint32_t h = 0; factor != NULL && h < block->kv_heads; h++)
        for (uint64_t t = block->valid_from; t < block->n_tokens; t++) {
            const float x = factor[h * block->n_tokens + t];
            if (!(x >= 0 && x <= FLT_MAX))
                return dkv_error_set(err, DKV_E_INVALID,
                                     "%s: %g at KV head %u, token %llu is not in 0..%g", name,
                                     (double)x, h, (unsigned long long)t, (double)FLT_MAX);
        }
    return DKV_OK;
}

enum dkv_status dkv_extras_check_factors(const struct dkv_block *block, struct dkv_error *err)
{
    const enum dkv_status status = check_factor(block, "token_weight", block->token_weight, err);
    return status == DKV_OK ? check_factor(block, "carry_in", block->carry_in, err) : status;
}

enum dkv_status dkv_extras_check_metric(const struct dkv_block *block, const struct dkv_plan *plan,
                                        uint32_t first, uint32_t count, struct dkv_error *err)
{
    const size_t dim = plan->v_dim;
    for (size_t head = first; head < (size_t)first + count; head++)
        for (size_t i = 0; i < dim * dim; i++) {
            const float x = block->value_metric[head * dim * dim + i];
            if (!isfinite(x))
                return dkv_error_set(err, DKV_E_INVALID,
                                     "value_metric: %s at query head %zu, row %zu, element %zu",
                                     kind_of(x), head, i / dim, i % dim);
        }
    return DKV_OK;
}

enum dkv_status dkv_extras_check_external(const struct dkv_block *block, uint32_t head,
                                          struct dkv_error *err)
{
    const float *scores = block->external_scores + (uint64_t)head * block->n_tokens;
    for (uint64_t t = block->valid_from; t < block->n_tokens; t++)
        if (!isfinite(scores[t]))
            return dkv_error_set(err, DKV_E_INVALID,
                                 "external_scores: %s at KV head %u, token %llu",
                                 kind_of(scores[t]), head, (unsigned long long)t);
    return DKV_OK;
}

enum dkv_status dkv_extras_check(const struct dkv_block *block, const struct dkv_params *params,
                                 const struct dkv_plan *plan, struct dkv_error *err)
{
    enum dkv_status status = dkv_extras_check_factors(block, err);
    if (status == DKV_OK && block->value_metric != NULL)
        status = dkv_extras_check_metric(block, plan, 0, block->q_heads, err);
    const bool scores = block->external_scores != NULL && params->nonfinite != DKV_NONFINITE_MASK;
    for (uint32_t h = 0; scores && h < block->kv_heads && status == DKV_OK; h++)
        status = dkv_extras_check_external(block, h, err);
    return status;
}
