/* What came back: results to the callers' memory, reports into sentences.
 *
 * Nothing is copied out before the event behind the last wave was synchronised without an error.
 * A report can name a bad page table entry, the place of a number that is none, or values that
 * leave float32; a fast scorer only says that it gave up, and the general one then finds out why.
 */
#include <string.h>

#include "kernels/cuda/host.h"

void dkv_cu_fail_item(struct dkv_item *item, const struct dkv_error *err)
{
    if (item->status != DKV_OK)
        return;
    item->status = err->status;
    item->error = *err;
}

enum dkv_status dkv_cu_bad_entry(const struct dkv_page_table *table, const char *tensor,
                                 uint64_t index, int64_t stored, uint64_t limit,
                                 struct dkv_error *err)
{
    const int64_t entry = table->mask != 0 ? stored & table->mask : stored;
    if (table->has_null_entry && (stored == table->null_entry || entry == table->null_entry))
        return dkv_error_set(err, DKV_E_INVALID,
                             "page_table: entry %llu is the null entry %lld, but %ss of its tokens "
                             "are needed from a page in 0..%llu",
                             (unsigned long long)index, (long long)stored, tensor,
                             (unsigned long long)limit - 1);
    return dkv_error_set(err, DKV_E_INVALID, "page_table: entry %llu is %lld, not in 0..%llu (%ss)",
                         (unsigned long long)index, (long long)entry, (unsigned long long)limit - 1,
                         tensor);
}

/* The entry as stored; 0 if the device cannot be asked any more. */
static int64_t stored_entry(const struct dkv_page_table *table, uint64_t index)
{
    const unsigned char *at = (const unsigned char *)table->entries + index * table->entry_bytes;
    int64_t wide = 0;
    int32_t narrow = 0;
    void *to = table->entry_bytes == sizeof(wide) ? (void *)&wide : (void *)&narrow;
    if (table->place == DKV_PLACE_HOST)
        memcpy(to, at, table->entry_bytes);
    else if (cudaMemcpy(to, at, table->entry_bytes, cudaMemcpyDeviceToHost) != cudaSuccess)
        (void)cudaGetLastError();
    return table->entry_bytes == sizeof(wide) ? wide : narrow;
}

static void explain_entry(const struct dkv_item *item, bool of_values, uint64_t index,
                          struct dkv_error *err)
{
    const struct dkv_block *block = item->block;
    const struct dkv_page_table *table = of_values && block->v_table.entries != NULL
                                             ? &block->v_table
                                             : &block->table;
    (void)dkv_cu_bad_entry(table, of_values ? "value" : "key", index, stored_entry(table, index),
                           of_values ? item->plan->v_entry_limit : item->plan->k_entry_limit, err);
}

static void explain_nonfinite(const struct dkv_item *item, unsigned long long place,
                              struct dkv_error *err)
{
    const unsigned tensor = (unsigned)(place >> 44);
    const unsigned head = (unsigned)(place >> 33) & 0x7ffu;
    const unsigned long long token = (place >> 10) & 0x7fffffu;
    const unsigned element = (unsigned)place & 0x3ffu;
    if (tensor == 0)
        (void)dkv_error_set(err, DKV_E_INVALID,
                            "query: not a finite number at query head %u, row %llu, element %u",
                            head, (unsigned long long)item->plan->first_row + token, element);
    else
        (void)dkv_error_set(err, DKV_E_INVALID,
                            "%s: not a finite number at KV head %u, token %llu, element %u",
                            tensor == 1 ? "key" : "value", head, token, element);
}

/* True if the unit's results may be used. */
static bool judge(struct dkv_cu_slot *slot, const struct dkv_cu_pending *pending)
{
    const struct dkv_cu_report *report = (const struct dkv_cu_report *)(slot->io.base +
                                                                        pending->report);
    struct dkv_item *item = &slot->items[pending->item];
    struct dkv_error why;
    if (item->status != DKV_OK)
        return false; /* failed while it was staged, or by another head */
    if (report->bad_k_entry != ~0ull || report->bad_v_entry != ~0ull) {
        const bool of_values = report->bad_k_entry == ~0ull;
        explain_entry(item, of_values, of_values ? report->bad_v_entry : report->bad_k_entry, &why);
    } else if (report->flags & DKV_CU_RETRY) {
        slot->retry[pending->item] = 1;
        return false;
    } else if (report->nonfinite != ~0ull) {
        item->nonfinite = true;
        explain_nonfinite(item, report->nonfinite, &why);
    } else if (report->flags & DKV_CU_OVERFLOW) {
        (void)dkv_error_set(&why, DKV_E_INVALID,
                            "query, key, value: out of range at KV head %u: logits, outputs or "
                            "scores leave float32 (values up to 1e18 are allowed)",
                            pending->head);
    } else {
        return true;
    }
    dkv_cu_fail_item(item, &why);
    return false;
}

static void copy_results(const struct dkv_cu_slot *slot, const struct dkv_cu_pending *pending)
{
    const struct dkv_item *item = &slot->items[pending->item];
    const uint64_t k = item->plan->keep_tokens;
    if (!pending->direct)
        memcpy(item->keep_out + pending->head * k, slot->io.base + pending->keep,
               k * sizeof(int32_t));
    if (item->plan->ragged) /* by layer alone: the rest is refused */
        item->counts_out[pending->head] = (uint32_t)k;
    if (pending->scores == 0)
        return;
    const uint64_t first = item->block->valid_from;
    float *to = item->scores_out + pending->head * item->block->n_tokens;
    memset(to, 0, first * sizeof(float));
    if (!pending->direct)
        memcpy(to + first, slot->io.base + pending->scores, item->plan->n_valid * sizeof(float));
}

enum dkv_status dkv_cu_drain(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                             struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (slot->n_pending > 0)
        status = dkv_cu_check(engine, cudaEventSynchronize(slot->done), "scoring a batch", err);
    for (uint32_t i = 0; i < slot->n_pending && status == DKV_OK; i++)
        if (judge(slot, &slot->pending[i]))
            copy_results(slot, &slot->pending[i]);
    slot->n_pending = 0;
    slot->io.used = 0;
    return status;
}
