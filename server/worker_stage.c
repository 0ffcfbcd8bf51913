/* What a block reads from loose loans, read before its batch.
 *
 * Which bytes those are follows from its views alone: rows of one head are token_stride apart,
 * heads head_stride, pages page_stride times their entry in the table. Rows that lie densely are
 * read in one go, gaps and all, since a call costs more than a few kilobytes.
 *
 * A view of DKV_READERS_FROM and more is cut into ranges of tokens, whole pages each, that several
 * threads read; whatever the layout, each range's bytes are its own.
 */
#include "server/worker_memory.h"

#include "proto/memfd.h"

#include <stdatomic.h>
#include <string.h>

/* One view, while it is read. */
struct staging {
    const struct dkv_held *held;
    struct dkv_view view; /* its offset counts from the loan's start */
    uint64_t heads, rows, row_bytes;
    uint64_t page_tokens; /* 0: no pages */
    const struct dkv_page_table *table;
    uint64_t entry_limit;
    uint64_t rows_per_task;
    _Atomic uint64_t n_read;
};

/* ---- reading ---- */

static enum dkv_status fetch(struct staging *s, uint64_t offset, uint64_t bytes,
                             struct dkv_error *err)
{
    const struct dkv_held *held = s->held;
    atomic_fetch_add_explicit(&s->n_read, bytes, memory_order_relaxed);
    return dkv_memfd_read(held->fd, held->offset + offset, held->base + offset, bytes, err);
}

/* n stretches of `bytes`, `stride` apart. Gaps up to their own size are read along, since a call
 * costs more; larger ones are not, since they may be all there is: a file of holes is free to its
 * owner and becomes memory here. */
static enum dkv_status fetch_stretches(struct staging *s, uint64_t offset, uint64_t n,
                                       uint64_t stride, uint64_t bytes, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (stride <= 2 * bytes)
        return fetch(s, offset, (n - 1) * stride + bytes, err);
    for (uint64_t i = 0; status == DKV_OK && i < n; i++)
        status = fetch(s, offset + i * stride, bytes, err);
    return status;
}

/* `rows` rows of every head from `offset` on: the closer of the two directions within the other. */
static enum dkv_status fetch_rows(struct staging *s, uint64_t offset, uint64_t rows,
                                  struct dkv_error *err)
{
    const uint64_t token_stride = (uint64_t)s->view.token_stride;
    const uint64_t head_stride = (uint64_t)s->view.head_stride;
    const bool heads_inside = head_stride < token_stride;
    const uint64_t inner = heads_inside ? head_stride : token_stride;
    const uint64_t outer = heads_inside ? token_stride : head_stride;
    const uint64_t n_inner = heads_inside ? s->heads : rows;
    const uint64_t n_outer = heads_inside ? rows : s->heads;
    const uint64_t span = (n_inner - 1) * inner + s->row_bytes;
    enum dkv_status status = DKV_OK;
    if (inner <= 2 * s->row_bytes)
        return fetch_stretches(s, offset, n_outer, outer, span, err);
    for (uint64_t i = 0; status == DKV_OK && i < n_outer; i++)
        status = fetch_stretches(s, offset + i * outer, n_inner, inner, s->row_bytes, err);
    return status;
}

static int64_t entry_at(const struct dkv_page_table *table, uint64_t i)
{
    int64_t wide = (int64_t)i;
    int32_t narrow;
    if (table->entries == NULL)
        return wide;
    const unsigned char *at = (const unsigned char *)table->entries + i * table->entry_bytes;
    if (table->entry_bytes == sizeof(narrow)) {
        memcpy(&narrow, at, sizeof(narrow));
        wide = narrow;
    } else {
        memcpy(&wide, at, sizeof(wide));
    }
    return wide;
}

/* Entries that point nowhere are the engine's to report: nothing is read for them. */
static enum dkv_status fetch_page(struct staging *s, uint64_t page, uint64_t rows,
                                  struct dkv_error *err)
{
    const struct dkv_page_table *table = s->table;
    int64_t entry = entry_at(table, page);
    if (table->entries != NULL && table->has_null_entry && entry == table->null_entry)
        return DKV_OK;
    if (table->entries != NULL && table->mask != 0)
        entry &= table->mask;
    if (entry < 0 || (table->entries != NULL && (uint64_t)entry >= s->entry_limit))
        return DKV_OK;
    return fetch_rows(s, s->view.offset + (uint64_t)entry * (uint64_t)s->view.page_stride, rows,
                      err);
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* A dkv_readers_fn: one range of tokens. */
static enum dkv_status fetch_range(void *context, uint64_t task, struct dkv_error *err)
{
    struct staging *s = context;
    const uint64_t from = task * s->rows_per_task;
    const uint64_t to = smaller(from + s->rows_per_task, s->rows);
    enum dkv_status status = DKV_OK;
    if (s->page_tokens == 0)
        return fetch_rows(s, s->view.offset + from * (uint64_t)s->view.token_stride, to - from,
                          err);
    for (uint64_t t = from; status == DKV_OK && t < to; t += s->page_tokens)
        status = fetch_page(s, t / s->page_tokens, smaller(s->page_tokens, to - t), err);
    return status;
}

/* ---- dividing ---- */

static enum dkv_status fetch_view(struct staging *s, struct dkv_held *held, struct dkv_error *err)
{
    const uint64_t row_bytes = s->heads * s->row_bytes; /* of a token, all heads */
    const uint64_t unit = s->page_tokens > 0 ? s->page_tokens : 1;
    uint64_t n_tasks = 1;
    s->rows_per_task = s->rows;
    if (held->readers != NULL && s->rows * row_bytes >= DKV_READERS_FROM) {
        const uint64_t units = DKV_READERS_TASK / (unit * row_bytes);
        s->rows_per_task = unit * (units > 0 ? units : 1);
        n_tasks = (s->rows + s->rows_per_task - 1) / s->rows_per_task;
    }
    const enum dkv_status status = dkv_readers_run(held->readers, fetch_range, s, n_tasks, err);
    held->staged_bytes += s->n_read;
    return status;
}

static enum dkv_status stage_table(struct dkv_worker_memory *memory,
                                   const struct dkv_link_addr *addr,
                                   const struct dkv_page_table *table, struct dkv_error *err)
{
    struct dkv_held *held = dkv_worker_memory_held(memory, addr->memory);
    const uint64_t bytes = table->n_entries * table->entry_bytes;
    if (table->entries == NULL || held == NULL || held->fd < 0)
        return DKV_OK;
    held->staged_bytes += bytes;
    return dkv_memfd_read(held->fd, held->offset + addr->offset, held->base + addr->offset, bytes,
                          err);
}

static enum dkv_status stage_view(struct dkv_worker_memory *memory,
                                  const struct dkv_link_block *packed,
                                  const struct dkv_block *block, unsigned which,
                                  struct dkv_error *err)
{
    const bool is_query = which == DKV_LINK_QUERY, is_key = which == DKV_LINK_KEY;
    const struct dkv_link_addr *addr = &packed->pointers[which];
    struct dkv_held *held = dkv_worker_memory_held(memory, addr->memory);
    if (held == NULL || held->fd < 0)
        return DKV_OK;
    const bool own_table = !is_key && block->v_table.entries != NULL;
    const uint64_t dim = is_query || is_key ? block->head_dim : packed->plan.v_dim;
    struct staging s = {
        .held = held,
        .view = is_query ? block->query
                : is_key ? block->key
                         : block->value,
        .heads = is_query ? block->q_heads : block->kv_heads,
        .rows = is_query ? block->q_rows : block->n_tokens,
        .page_tokens = is_query ? 0 : block->page_tokens,
        .table = own_table ? &block->v_table : &block->table,
        .entry_limit = is_key ? packed->plan.k_entry_limit : packed->plan.v_entry_limit,
    };
    s.row_bytes = dim * dkv_dtype_bytes(s.view.dtype);
    s.view.offset += addr->offset;
    return fetch_view(&s, held, err);
}

enum dkv_status dkv_worker_memory_stage(struct dkv_worker_memory *memory,
                                        const struct dkv_link_block *packed,
                                        const struct dkv_block *block, struct dkv_error *err)
{
    enum dkv_status status = stage_table(memory, &packed->pointers[DKV_LINK_TABLE], &block->table,
                                         err);
    if (status == DKV_OK)
        status = stage_table(memory, &packed->pointers[DKV_LINK_V_TABLE], &block->v_table, err);
    for (unsigned i = DKV_LINK_QUERY; status == DKV_OK && i <= DKV_LINK_VALUE; i++)
        status = stage_view(memory, packed, block, i, err);
    return status;
}
