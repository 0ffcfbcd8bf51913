/* Finding what a pass only noticed. Runs once per failed block, so it is plain. */
#include "kernels/cpu/head.h"

#include "kernels/convert.h"
#include "kernels/extras.h"

#include <math.h>

static enum dkv_status bad_entry(const struct dkv_reader *reader, uint64_t token,
                                 const char *tensor, struct dkv_error *err)
{
    const uint64_t index = token / reader->page_tokens;
    int64_t entry;
    if (dkv_reader_entry(reader, index, &entry))
        return DKV_OK;
    if (reader->table != NULL && dkv_reader_is_null(reader->table, entry))
        return dkv_error_set(err, DKV_E_INVALID,
                             "page_table: entry %llu is the null entry %lld, but %s token %llu "
                             "needs a page in 0..%llu",
                             (unsigned long long)index, (long long)entry, tensor,
                             (unsigned long long)token,
                             (unsigned long long)reader->entry_limit - 1);
    return dkv_error_set(
        err, DKV_E_INVALID, "page_table: entry %llu is %lld, not in 0..%llu (%s token %llu)",
        (unsigned long long)index, (long long)entry, (unsigned long long)reader->entry_limit - 1,
        tensor, (unsigned long long)token);
}

static enum dkv_status check_table(const struct dkv_head *head, const struct dkv_reader *reader,
                                   const char *tensor, struct dkv_error *err)
{
    if (reader->page_tokens == 0)
        return DKV_OK;
    const struct dkv_block *block = head->item->block;
    enum dkv_status status = DKV_OK;
    for (uint64_t t = block->valid_from; t < block->n_tokens && status == DKV_OK;
         t = (t / reader->page_tokens + 1) * reader->page_tokens)
        status = bad_entry(reader, t, tensor, err);
    return status;
}

/* The first element of a tensor that is not finite, or with `limit` too large. */
static enum dkv_status check_elements(const struct dkv_head *head, const struct dkv_reader *reader,
                                      uint32_t dim, const char *tensor, double limit,
                                      bool *nonfinite_out, struct dkv_error *err)
{
    const struct dkv_block *block = head->item->block;
    const size_t size = dkv_dtype_bytes(reader->dtype);
    for (uint64_t t = block->valid_from; t < block->n_tokens; t++) {
        const void *row;
        if (!dkv_reader_rows(reader, t, 1, &row))
            return DKV_OK;
        for (uint32_t d = 0; d < dim; d++) {
            const float x = dkv_element_to_f32((const uint8_t *)row + d * size, reader->dtype);
            if (isfinite(x) && !(fabs((double)x * (double)reader->scale) > limit))
                continue;
            if (!isfinite(x) && head->mask)
                continue;
            *nonfinite_out = !isfinite(x);
            return isfinite(x)
                       ? dkv_error_set(err, DKV_E_INVALID,
                                       "%s: %g out of range at KV head %u, token %llu, element %u: "
                                       "absolute values up to %g are allowed",
                                       tensor, (double)x * (double)reader->scale, head->index,
                                       (unsigned long long)t, d, limit)
                       : dkv_error_set(err, DKV_E_INVALID,
                                       "%s: %s at KV head %u, token %llu, element %u", tensor,
                                       isnan(x) ? "NaN" : "infinity", head->index,
                                       (unsigned long long)t, d);
        }
    }
    return DKV_OK;
}

static enum dkv_status check_queries(const struct dkv_head *head, bool *nonfinite_out,
                                     struct dkv_error *err)
{
    const struct dkv_block *block = head->item->block;
    const struct dkv_plan *plan = head->item->plan;
    const struct dkv_view *view = &block->query;
    const size_t size = dkv_dtype_bytes(view->dtype);
    for (uint32_t g = 0; g < plan->group; g++) {
        const uint32_t q_head = head->index * plan->group + g;
        for (uint64_t row = plan->first_row; row < block->q_rows; row++) {
            const uint8_t *at = (const uint8_t *)view->base + view->offset +
                                (int64_t)q_head * view->head_stride +
                                (int64_t)row * view->token_stride;
            for (uint32_t d = 0; d < block->head_dim; d++) {
                const float x = dkv_element_to_f32(at + d * size, view->dtype);
                if (isfinite(x))
                    continue;
                *nonfinite_out = true;
                return dkv_error_set(
                    err, DKV_E_INVALID, "query: %s at query head %u, row %llu, element %u",
                    isnan(x) ? "NaN" : "infinity", q_head, (unsigned long long)row, d);
            }
        }
    }
    return DKV_OK;
}

static enum dkv_status check_extra(const struct dkv_head *head, struct dkv_error *err)
{
    const struct dkv_block *block = head->item->block;
    const struct dkv_plan *plan = head->item->plan;
    if (block->value_metric != NULL)
        return dkv_extras_check_metric(block, plan, head->index * plan->group, plan->group, err);
    return dkv_extras_check_external(block, head->index, err);
}

enum dkv_status dkv_head_explain(const struct dkv_head *head, unsigned faults, bool *nonfinite_out,
                                 struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (faults & DKV_FAULT_TABLE) {
        status = check_table(head, &head->keys, "key", err);
        if (status == DKV_OK && head->v_dim > 0)
            status = check_table(head, &head->values, "value", err);
    }
    if (status == DKV_OK && (faults & (DKV_FAULT_NONFINITE | DKV_FAULT_RANGE))) {
        if (head->rule->source == DKV_SOURCE_ROWS)
            status = check_queries(head, nonfinite_out, err);
        if (status == DKV_OK)
            status = check_elements(head, &head->keys, head->dim, "key", HUGE_VAL, nonfinite_out,
                                    err);
        if (status == DKV_OK && head->v_dim > 0)
            status = check_elements(head, &head->values, head->v_dim, "value", 1e18, nonfinite_out,
                                    err);
    }
    if (status == DKV_OK && (faults & DKV_FAULT_EXTRA))
        status = check_extra(head, err);
    if (status != DKV_OK)
        return status;
    if (faults & DKV_FAULT_LOGITS)
        return dkv_error_set(err, DKV_E_INVALID,
                             "query and key: logits of KV head %u are out of float32's range",
                             head->index);
    /* Every element is in order, so it is a sum of their products that is not. (Or shared memory
     * that has changed since the pass saw it.) */
    return dkv_error_set(err, DKV_E_INVALID,
                         "query, key, value: out of range at KV head %u: logits, outputs or scores "
                         "leave float32 (values up to 1e18 are allowed)",
                         head->index);
}
