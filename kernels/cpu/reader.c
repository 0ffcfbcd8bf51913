/* Walks pages, not tokens: the table is read once per page and tile. */
#include "kernels/cpu/reader.h"

#include <string.h>

void dkv_reader_init(struct dkv_reader *reader, const struct dkv_view *view,
                     const struct dkv_page_table *table, uint32_t page_tokens, uint64_t entry_limit,
                     uint32_t head)
{
    const bool fp8 = view->dtype == DKV_F8_E4M3 || view->dtype == DKV_F8_E5M2;
    float scale = 1.0f;
    if (fp8 && view->head_scales != NULL)
        scale = view->head_scales[head];
    else if (fp8 && view->scale != 0.0f)
        scale = view->scale;
    *reader = (struct dkv_reader){
        .base = (const uint8_t *)view->base + view->offset + (int64_t)head * view->head_stride,
        .page_stride = view->page_stride,
        .token_stride = view->token_stride,
        .page_tokens = page_tokens,
        .table = table != NULL && table->entries != NULL ? table : NULL,
        .entry_limit = entry_limit,
        .dtype = view->dtype,
        .scale = scale,
    };
}

bool dkv_reader_is_null(const struct dkv_page_table *table, int64_t stored)
{
    const int64_t entry = table->mask != 0 ? stored & table->mask : stored;
    return table->has_null_entry && (stored == table->null_entry || entry == table->null_entry);
}

bool dkv_reader_entry(const struct dkv_reader *reader, uint64_t index, int64_t *entry_out)
{
    const struct dkv_page_table *table = reader->table;
    if (table == NULL) {
        *entry_out = (int64_t)index;
        return index < reader->entry_limit;
    }
    int64_t entry;
    if (table->entry_bytes == 8) {
        memcpy(&entry, (const uint8_t *)table->entries + 8 * index, sizeof(entry));
    } else {
        int32_t narrow;
        memcpy(&narrow, (const uint8_t *)table->entries + 4 * index, sizeof(narrow));
        entry = narrow;
    }
    /* Its owner may write there meanwhile: what is judged is what is used, not read again. */
    __asm__("" : "+r"(entry));
    *entry_out = entry;
    if (dkv_reader_is_null(table, entry))
        return false;
    if (table->mask != 0)
        entry &= table->mask;
    *entry_out = entry;
    return entry >= 0 && (uint64_t)entry < reader->entry_limit;
}

bool dkv_reader_rows(const struct dkv_reader *reader, uint64_t first, size_t n,
                     const void **rows_out)
{
    const uint64_t page_tokens = reader->page_tokens;
    if (page_tokens == 0) {
        const uint8_t *row = reader->base + (int64_t)first * reader->token_stride;
        for (size_t i = 0; i < n; i++, row += reader->token_stride)
            rows_out[i] = row;
        return true;
    }
    size_t done = 0;
    uint64_t page = first / page_tokens, inside = first % page_tokens;
    while (done < n) {
        int64_t entry;
        if (!dkv_reader_entry(reader, page, &entry))
            return false;
        const uint8_t *row = reader->base + entry * reader->page_stride +
                             (int64_t)inside * reader->token_stride;
        for (; done < n && inside < page_tokens; inside++, row += reader->token_stride)
            rows_out[done++] = row;
        inside = 0;
        page++;
    }
    return true;
}
