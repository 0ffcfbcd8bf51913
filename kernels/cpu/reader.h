/* The address rule of proto/block.h as pointers: where the rows of one KV head's keys or values
 * are.
 *
 * Owner   borrows the block.
 * Thread  any; a reader does not change after init.
 * Errors  a page table entry is checked where it is read, every time: null, negative or not below
 *         the limit is `false`, and nothing was read through it.
 */
#ifndef DKV_KERNELS_CPU_READER_H
#define DKV_KERNELS_CPU_READER_H

#include "proto/block.h"

struct dkv_reader {
    const uint8_t *base; /* entry 0, token 0 of this head */
    int64_t page_stride, token_stride;
    uint64_t page_tokens; /* 0: not paged */
    const struct dkv_page_table *table;
    uint64_t entry_limit;
    enum dkv_dtype dtype;
    float scale; /* element value = stored value * scale */
};

/* table NULL, or without entries: entry(i) = i. */
void dkv_reader_init(struct dkv_reader *reader, const struct dkv_view *view,
                     const struct dkv_page_table *table, uint32_t page_tokens, uint64_t entry_limit,
                     uint32_t head);

/* Whether an entry, as stored, is the table's null entry. */
bool dkv_reader_is_null(const struct dkv_page_table *table, int64_t stored);

/* Entry `index` after the mask; false where it may not be followed (a null entry as stored). */
bool dkv_reader_entry(const struct dkv_reader *reader, uint64_t index, int64_t *entry_out);

/* Pointers to the rows of stored tokens first .. first+n-1. */
bool dkv_reader_rows(const struct dkv_reader *reader, uint64_t first, size_t n,
                     const void **rows_out);

#endif
