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

/* [heads][n_valid] scores to the caller's [heads][n_tokens], from KV head `head` on; NULL: they are
 * there. */
static void copy_scores(const struct dkv_item *item, uint32_t head, uint32_t heads,
                        const float *scores)
{
    const uint64_t first = item->block->valid_from, n = item->plan->n_valid;
    for (uint32_t h = 0; h < heads; h++) {
        float *to = item->scores_out + (head + h) * item->block->n_tokens;
        memset(to, 0, first * sizeof(float));
        if (scores != NULL)
            memcpy(to + first, scores + h * n, n * sizeof(float));
    }
}

static void copy_results(const struct dkv_cu_slot *slot, const struct dkv_cu_pending *pending)
{
    const struct dkv_item *item = &slot->items[pending->item];
    const uint64_t k = item->plan->keep_tokens;
    if (pending->keep == 0) /* a choice answers for all heads */
        return;
    if (!pending->direct)
        memcpy(item->keep_out + pending->head * k, slot->io.base + pending->keep,
               k * sizeof(int32_t));
    if (item->plan->ragged) /* by layer alone: the rest is refused */
        item->counts_out[pending->head] = (uint32_t)k;
    if (pending->scores != 0)
        copy_scores(item, pending->head, 1,
                    pending->direct
                        ? NULL
                        : (const float *)(const void *)(slot->io.base + pending->scores));
}

static void copy_choice(const struct dkv_cu_slot *slot, const struct dkv_cu_pending_choice *pending)
{
    const struct dkv_item *item = &slot->items[pending->item];
    const uint32_t heads = item->block->kv_heads;
    const uint32_t *counts = (const uint32_t *)(const void *)(slot->io.base + pending->counts);
    uint64_t total = 0;
    for (uint32_t h = 0; h < heads; h++) {
        const uint32_t count = pending->ends ? counts[h] - (uint32_t)total : counts[h];
        total += count;
        if (item->plan->ragged)
            item->counts_out[h] = count;
    }
    if (total > item->plan->keep_capacity)
        total = item->plan->keep_capacity;
    memcpy(item->keep_out, slot->io.base + pending->keep, total * sizeof(int32_t));
    if (pending->scores != 0)
        copy_scores(item, 0, heads, (const float *)(const void *)(slot->io.base + pending->scores));
}

/* layers=cake: what a head adds to its layer. */
static void take_spread(struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                        const struct dkv_cu_pending *pending)
{
    const struct dkv_cu_report *report = (const struct dkv_cu_report *)(slot->io.base +
                                                                        pending->report);
    engine->layers[pending->item].entropy += report->entropy;
    engine->layers[pending->item].variance += report->variance;
}

enum dkv_status dkv_cu_drain(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                             struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (slot->n_pending > 0 || slot->n_pending_choices > 0)
        status = dkv_cu_check(engine, cudaEventSynchronize(slot->done), "scoring a batch", err);
    for (uint32_t i = 0; i < slot->n_pending && status == DKV_OK; i++)
        if (judge(slot, &slot->pending[i])) {
            copy_results(slot, &slot->pending[i]);
            take_spread(engine, slot, &slot->pending[i]);
        }
    for (uint32_t i = 0; i < slot->n_pending_choices && status == DKV_OK; i++) {
        const struct dkv_cu_pending_choice *pending = &slot->pending_choices[i];
        if (slot->items[pending->item].status == DKV_OK && !slot->retry[pending->item])
            copy_choice(slot, pending);
    }
    slot->n_pending = 0;
    slot->n_pending_choices = 0;
    slot->io.used = 0;
    return status;
}
