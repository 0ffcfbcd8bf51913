/* The bytes of regions that are not read where they lie.
 *
 * Page tables are always copied, and before anything else, so that what is worked out from an entry
 * and what the engine reads there are the same number. Query rows around the end of a ring are laid
 * out one after the other. Of a region that is not mapped, one stretch is copied that covers
 * everything the request can read there; with a page table the stretch ends with the largest page
 * that it names.
 *
 * All of that is memory of ours that a client can make us need, so it is charged to the same limit
 * as request bodies, and its size is known before it is taken.
 */
#include "server/ask.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#define COPIES_BYTES_MAX (UINT64_C(64) << 20) /* tables and ring rows of one request */
#define ALIGN_UP(bytes)  (((bytes) + 63) & ~UINT64_C(63))

static uint64_t row_bytes(const struct dkv_view *view, uint32_t dim)
{
    return dim * dkv_dtype_bytes(view->dtype);
}

static uint64_t ring_bytes(const struct dkv_block *block)
{
    return block->q_rows * block->q_heads * row_bytes(&block->query, block->head_dim);
}

/* Blocks of one cache share a table; it is copied once. */
static bool same_table(const struct dkv_ask_source *a, const struct dkv_ask_source *b)
{
    return a->table == b->table && a->table_offset == b->table_offset &&
           a->table_bytes == b->table_bytes;
}

static uint64_t copies_bytes(const struct dkv_ask *ask)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < ask->job->request.n_blocks && total <= COPIES_BYTES_MAX; i++) {
        const struct dkv_ask_source *source = &ask->sources[i];
        if (source->table != NULL && (i == 0 || !same_table(source, source - 1)))
            total += ALIGN_UP(source->table_bytes);
        if (source->ring_rows > 0)
            total += ALIGN_UP(ring_bytes(&ask->job->blocks[i]));
    }
    return total;
}

static enum dkv_status lay_out_copies(struct dkv_ask *ask, struct dkv_error *err)
{
    const uint64_t total = copies_bytes(ask);
    if (total == 0)
        return DKV_OK;
    if (total > COPIES_BYTES_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "page tables and query rows of one request are above %" PRIu64
                             " bytes",
                             COPIES_BYTES_MAX);
    enum dkv_status status = dkv_body_reserve(&ask->copies, &ask->server->bodies, total, 0, true,
                                              err);
    if (status != DKV_OK)
        return status;
    uint8_t *next = ask->copies.data;
    for (uint32_t i = 0; status == DKV_OK && i < ask->job->request.n_blocks; i++) {
        struct dkv_ask_source *source = &ask->sources[i];
        struct dkv_block *block = &ask->job->blocks[i];
        if (source->table != NULL && i > 0 && same_table(source, source - 1)) {
            source->table_copy = (source - 1)->table_copy;
        } else if (source->table != NULL) {
            source->table_copy = next;
            next += ALIGN_UP(source->table_bytes);
            status = dkv_region_read(source->table->region, source->table_offset,
                                     source->table_copy, source->table_bytes, err);
        }
        if (source->table != NULL)
            block->table.entries = source->table_copy;
        if (source->ring_rows > 0) {
            source->ring_copy = next;
            next += ALIGN_UP(ring_bytes(block));
        }
    }
    return status;
}

/* ---- stretches of regions that are not mapped ---- */

static int64_t entry_at(const struct dkv_page_table *table, uint64_t i)
{
    int32_t narrow;
    int64_t wide;
    if (table->entry_bytes == sizeof(narrow)) {
        memcpy(&narrow, (const uint8_t *)table->entries + i * sizeof(narrow), sizeof(narrow));
        wide = narrow;
    } else {
        memcpy(&wide, (const uint8_t *)table->entries + i * sizeof(wide), sizeof(wide));
    }
    return table->mask != 0 ? wide & table->mask : wide;
}

/* The largest page that the block can read and that the gate allows; the engine refuses others. */
static uint64_t last_page(const struct dkv_block *block, uint64_t limit)
{
    const struct dkv_page_table *table = &block->table;
    uint64_t last = 0;
    if (table->entries == NULL)
        return (block->n_tokens - 1) / block->page_tokens;
    for (uint64_t i = 0; i < table->n_entries; i++) {
        const int64_t entry = entry_at(table, i);
        if (entry > 0 && (uint64_t)entry < limit && (uint64_t)entry > last)
            last = (uint64_t)entry;
    }
    return last;
}

/* The gate has seen that this stays inside the region, so nothing overflows. */
static uint64_t view_end(const struct dkv_block *block, const struct dkv_view *view, uint32_t heads,
                         uint64_t tokens, uint32_t dim, uint64_t entry_limit, bool paged)
{
    uint64_t end = view->offset + (heads - 1) * (uint64_t)view->head_stride + row_bytes(view, dim);
    if (!paged)
        return end + (tokens - 1) * (uint64_t)view->token_stride;
    const uint64_t in_page = tokens < block->page_tokens ? tokens : block->page_tokens;
    const uint64_t rows = block->table.entries != NULL ? block->page_tokens : in_page;
    return end + (rows - 1) * (uint64_t)view->token_stride +
           last_page(block, entry_limit) * (uint64_t)view->page_stride;
}

static void stretch(struct dkv_ask_use *use, uint64_t from, uint64_t to)
{
    if (use == NULL || use->region->base != NULL)
        return;
    use->from = from < use->from ? from : use->from;
    use->to = to > use->to ? to : use->to;
}

static void stretch_block(struct dkv_ask *ask, uint32_t i)
{
    const struct dkv_block *block = &ask->job->blocks[i];
    const struct dkv_plan *plan = &ask->job->plans[i];
    struct dkv_ask_source *source = &ask->sources[i];
    const bool paged = block->page_tokens > 0;
    if (source->ring_rows > 0) /* read row by row, from the file */
        ;
    else if (source->query != NULL)
        stretch(source->query, block->query.offset,
                view_end(block, &block->query, block->q_heads, block->q_rows, block->head_dim, 0,
                         false));
    if (source->key != NULL)
        stretch(source->key, block->key.offset,
                view_end(block, &block->key, block->kv_heads, block->n_tokens, block->head_dim,
                         plan->k_entry_limit, paged));
    if (source->value != NULL)
        stretch(source->value, block->value.offset,
                view_end(block, &block->value, block->kv_heads, block->n_tokens, plan->v_dim,
                         plan->v_entry_limit, paged));
}

static enum dkv_status lay_out_stretches(struct dkv_ask *ask, struct dkv_error *err)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < ask->job->request.n_blocks; i++)
        stretch_block(ask, i);
    for (uint32_t i = 0; i < ask->n_uses; i++)
        if (ask->uses[i].from < ask->uses[i].to &&
            !dkv_add_u64(total, ALIGN_UP(ask->uses[i].to - ask->uses[i].from), &total))
            total = UINT64_MAX;
    if (total == 0)
        return DKV_OK;
    if (total > ask->server->max_body_bytes)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "%" PRIu64 " bytes would have to be copied, at most %" PRIu64
                             " are: an allocated memfd sealed against shrink and grow is read "
                             "without copying",
                             total, ask->server->max_body_bytes);
    enum dkv_status status = dkv_body_reserve(&ask->staging, &ask->server->bodies, total, 0, true,
                                              err);
    if (status != DKV_OK)
        return status;
    uint8_t *next = ask->staging.data;
    for (uint32_t i = 0; i < ask->n_uses; i++) {
        struct dkv_ask_use *use = &ask->uses[i];
        if (use->from >= use->to)
            continue;
        use->copy = next;
        next += ALIGN_UP(use->to - use->from);
    }
    return DKV_OK;
}

enum dkv_status dkv_ask_prepare_copies(struct dkv_ask *ask, struct dkv_error *err)
{
    enum dkv_status status = lay_out_copies(ask, err);
    return status == DKV_OK ? lay_out_stretches(ask, err) : status;
}

bool dkv_ask_must_stage(const struct dkv_ask *ask)
{
    return ask->staging.data != NULL;
}

/* ---- copying ---- */

static enum dkv_status copy_ring(struct dkv_ask_source *source, struct dkv_block *block,
                                 struct dkv_error *err)
{
    const uint64_t n = row_bytes(&block->query, block->head_dim);
    uint8_t *to = source->ring_copy;
    for (uint64_t h = 0; h < block->q_heads; h++)
        for (uint64_t r = 0; r < block->q_rows; r++, to += n) {
            const uint64_t row = (source->ring_first + r) % source->ring_rows;
            const uint64_t at = source->ring_start + row * source->ring_row_stride +
                                h * source->ring_head_stride;
            enum dkv_status status = dkv_region_read(source->query->region, at, to, n, err);
            if (status != DKV_OK)
                return status;
        }
    block->query.base = source->ring_copy;
    return DKV_OK;
}

static void point_to_copy(struct dkv_view *view, const struct dkv_ask_use *use)
{
    if (use == NULL || use->copy == NULL)
        return;
    view->base = use->copy;
    view->bytes = use->to - use->from;
    view->offset -= use->from;
}

enum dkv_status dkv_ask_copy(struct dkv_ask *ask, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    for (uint32_t i = 0; status == DKV_OK && i < ask->n_uses; i++)
        if (ask->uses[i].copy != NULL)
            status = dkv_region_read(ask->uses[i].region, ask->uses[i].from, ask->uses[i].copy,
                                     ask->uses[i].to - ask->uses[i].from, err);
    for (uint32_t i = 0; status == DKV_OK && i < ask->job->request.n_blocks; i++) {
        struct dkv_block *block = &ask->job->blocks[i];
        struct dkv_ask_source *source = &ask->sources[i];
        point_to_copy(&block->key, source->key);
        point_to_copy(&block->value, source->value);
        if (source->ring_rows > 0)
            status = copy_ring(source, block, err);
        else
            point_to_copy(&block->query, source->query);
    }
    return status;
}
