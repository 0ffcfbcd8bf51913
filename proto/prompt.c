#include "proto/prompt.h"

enum dkv_status dkv_prompt_check(const struct dkv_prompt_reach *r, struct dkv_error *err)
{
    const uint32_t end = r->first_layer + r->n_layers;
    if (end > r->cache_layers || end > r->stash_layers)
        return dkv_error_set(err, DKV_E_INVALID, "layers %u..%u: the cache has %u, the stash %u",
                             r->first_layer, end - 1, r->cache_layers, r->stash_layers);
    if (r->slot >= r->stash_slots)
        return dkv_error_set(err, DKV_E_INVALID, "slot %u is outside 0..%u", r->slot,
                             r->stash_slots - 1);
    if (r->newest_row >= r->stash_rows || r->q_rows == 0 || r->q_rows > r->stash_rows)
        return dkv_error_set(err, DKV_E_INVALID, "newest_row %u, q_rows %u: the ring has %u rows",
                             r->newest_row, r->q_rows, r->stash_rows);
    return DKV_OK;
}

enum dkv_status dkv_prompt_take_defaults(struct dkv_params *params, double scale,
                                         double logit_softcap, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    struct dkv_value value = {.kind = DKV_VALUE_REAL, .real = scale};
    if (scale != 0 && !dkv_params_has(params, DKV_PARAM_SCALE))
        status = dkv_params_set(params, "scale", value, err);
    value.real = logit_softcap;
    if (status == DKV_OK && logit_softcap != 0 && !dkv_params_has(params, DKV_PARAM_LOGIT_SOFTCAP))
        status = dkv_params_set(params, "logit_softcap", value, err);
    dkv_params_resolve(params);
    return status;
}
