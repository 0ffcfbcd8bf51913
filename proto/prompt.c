#include "proto/prompt.h"

#include <inttypes.h>

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

/* base + count * stride; false: overflow. */
static bool step(uint64_t *base, uint64_t count, int64_t stride)
{
    uint64_t way;
    return stride >= 0 && dkv_mul_u64(count, (uint64_t)stride, &way) &&
           dkv_add_u64(*base, way, base);
}

uint32_t dkv_prompt_rows_used(int64_t window, uint32_t q_rows)
{
    return window >= 1 && window < (int64_t)q_rows ? (uint32_t)window : q_rows;
}

enum dkv_status dkv_prompt_find_rows(const struct dkv_prompt_stash *stash, uint32_t layer,
                                     uint32_t slot, uint32_t newest_row, uint32_t n_used,
                                     struct dkv_prompt_rows *rows_out, struct dkv_error *err)
{
    uint64_t offset = stash->offset;
    const bool wraps = newest_row + UINT64_C(1) < n_used;
    const uint64_t before = wraps ? 0 : newest_row + UINT64_C(1) - n_used;
    if (!step(&offset, layer, stash->layer_stride) || !step(&offset, slot, stash->slot_stride) ||
        !step(&offset, before, stash->row_stride))
        return dkv_error_set(err, DKV_E_INVALID, "stash: its strides overflow");
    *rows_out = (struct dkv_prompt_rows){
        .offset = offset,
        .first = (newest_row + UINT64_C(1) + stash->n_rows - n_used) % stash->n_rows,
        .wraps = wraps,
    };
    return DKV_OK;
}

enum dkv_status dkv_prompt_check_ring(const struct dkv_prompt_stash *stash,
                                      const struct dkv_prompt_rows *rows, uint32_t q_heads,
                                      uint64_t row_bytes, uint64_t bytes, struct dkv_error *err)
{
    uint64_t end = rows->offset;
    if (!step(&end, stash->n_rows - 1, stash->row_stride) ||
        !step(&end, q_heads - 1, stash->head_stride) || !dkv_add_u64(end, row_bytes, &end) ||
        end > bytes)
        return dkv_error_set(err, DKV_E_INVALID,
                             "stash: a ring at %" PRIu64 " ends outside its memory of %" PRIu64
                             " bytes",
                             rows->offset, bytes);
    return DKV_OK;
}

enum dkv_status dkv_prompt_check_ring_on_gpu(const struct dkv_prompt_stash *stash, uint32_t q_heads,
                                             uint64_t row_bytes, struct dkv_error *err)
{
    const uint64_t row_stride = (uint64_t)stash->row_stride;
    const uint64_t head_stride = (uint64_t)stash->head_stride;
    const bool heads_adjacent = head_stride == row_bytes && row_stride >= row_bytes * q_heads;
    const bool rows_adjacent = row_stride == row_bytes && head_stride >= row_bytes * stash->n_rows;
    if ((!heads_adjacent && !rows_adjacent) || row_stride > INT32_MAX || head_stride > INT32_MAX)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "stash: in GPU memory a ring that is read around its end has its "
                             "heads or its rows side by side, and strides below 2 GiB");
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
