/* Requests: SCORE and SCORE_BLOCKS. Fences, outputs and page tables are the same in both. Fields
 * that have no meaning in a message must be zero, which leaves one way to say each thing.
 */
#include <inttypes.h>

#include "proto/wire_check.h"

static enum dkv_status check_fence(const struct dkv_wire_fence *fence, struct dkv_error *err)
{
    if (fence->offset % 8 != 0)
        return DKV_WIRE_REFUSE("fence", "offset %" PRIu64 " is not a multiple of 8", fence->offset);
    if (fence->region == 0 && (fence->offset != 0 || fence->value != 0))
        return DKV_WIRE_REFUSE("fence", "a slot without a region");
    return DKV_OK;
}

static enum dkv_status check_output(const struct dkv_wire_output *output, struct dkv_error *err)
{
    uint64_t end;
    if (output->region == 0 && (output->offset != 0 || output->bytes != 0))
        return DKV_WIRE_REFUSE("output", "a place without a region");
    if (!dkv_add_u64(output->offset, output->bytes, &end))
        return DKV_WIRE_REFUSE("output", "offset %" PRIu64 " and %" PRIu64 " bytes overflow",
                               output->offset, output->bytes);
    return DKV_OK;
}

struct table {
    uint32_t region, entries;
    uint64_t offset, mask;
    int64_t null_entry;
    uint8_t kind, entry_bytes;
    bool has_null;
};

static enum dkv_status check_table(const struct table *t, struct dkv_error *err)
{
    if (t->kind > DKV_WIRE_TABLE_REGION)
        return DKV_WIRE_REFUSE("table", "kind %u is not in 0..2", t->kind);
    if (t->kind == DKV_WIRE_TABLE_NONE) {
        if (t->region != 0 || t->entries != 0 || t->offset != 0 || t->mask != 0 ||
            t->null_entry != 0 || t->entry_bytes != 0 || t->has_null)
            return DKV_WIRE_REFUSE("table", "fields of a table without one");
        return DKV_OK;
    }
    if (t->entry_bytes != 4 && t->entry_bytes != 8)
        return DKV_WIRE_REFUSE("table", "entries of %u bytes, 4 or 8 allowed", t->entry_bytes);
    if (t->entries == 0)
        return DKV_WIRE_REFUSE("table", "no entries");
    if ((t->kind == DKV_WIRE_TABLE_REGION) != (t->region != 0))
        return DKV_WIRE_REFUSE("table", "region %u with kind %u", t->region, t->kind);
    if (!t->has_null && t->null_entry != 0)
        return DKV_WIRE_REFUSE("table", "a null entry that is not meant");
    return DKV_OK;
}

static enum dkv_status check_params_bytes(uint16_t bytes, struct dkv_error *err)
{
    if (bytes % 8 != 0 || bytes > DKV_WIRE_PARAMS_MAX)
        return DKV_WIRE_REFUSE("params", "%u bytes: a multiple of 8 up to %u allowed", bytes,
                               DKV_WIRE_PARAMS_MAX);
    return DKV_OK;
}

static enum dkv_status check_score(const struct dkv_wire_score *m, struct dkv_error *err)
{
    const struct table table = {
        m->table_region, m->table_entries, m->table_offset, m->table_mask,
        m->null_entry,   m->table_kind,    m->entry_bytes,  (m->flags & DKV_WIRE_NULL_ENTRY) != 0};
    enum dkv_status status;

    if (m->cache == 0 || m->stash == 0)
        return DKV_WIRE_REFUSE("score", "cache %u, stash %u", m->cache, m->stash);
    if (m->n_layers == 0 || m->first_layer + m->n_layers > DKV_WIRE_LAYERS_MAX)
        return DKV_WIRE_REFUSE("score", "layers %u + %u are not in 1..%u", m->first_layer,
                               m->n_layers, DKV_WIRE_LAYERS_MAX);
    if (m->flags > (DKV_WIRE_WANT_SCORES | DKV_WIRE_NULL_ENTRY | DKV_WIRE_RECENCY_IF_BUSY))
        return DKV_WIRE_REFUSE("score", "flags 0x%x", m->flags);
    if (m->extras >= 2 * DKV_WIRE_VALUE_METRIC)
        return DKV_WIRE_REFUSE("score", "extras 0x%x", m->extras);
    if (m->table_kind == DKV_WIRE_TABLE_BULK && m->table_offset != 0)
        return DKV_WIRE_REFUSE("score", "the bulk begins with the table: offset %" PRIu64,
                               m->table_offset);
    if ((status = check_table(&table, err)) != DKV_OK)
        return status;
    if ((status = check_fence(&m->fence, err)) != DKV_OK)
        return status;
    return check_output(&m->output, err);
}

enum dkv_status dkv_wire_get_score(const uint8_t *in, size_t bytes,
                                   struct dkv_wire_score *score_out, struct dkv_error *err)
{
    struct dkv_wire_score m;
    enum dkv_status status = dkv_wire_get_fixed("score", DKV_LAYOUT_SCORE, in, bytes, &m, err);
    if (status == DKV_OK)
        status = check_params_bytes(m.params_bytes, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("score", DKV_LAYOUT_SCORE, bytes, m.params_bytes, err);
    if (status == DKV_OK)
        status = check_score(&m, err);
    if (status != DKV_OK)
        return status;
    m.params = in + dkv_wire_layouts[DKV_LAYOUT_SCORE].wire_bytes;
    *score_out = m;
    return DKV_OK;
}

uint64_t dkv_wire_score_bulk_bytes(const struct dkv_wire_score *score)
{
    if (score->table_kind != DKV_WIRE_TABLE_BULK)
        return 0;
    return (uint64_t)score->table_entries * score->entry_bytes;
}

static enum dkv_status check_block(const uint8_t *record, uint32_t index, struct dkv_error *err)
{
    struct dkv_wire_block m;
    enum dkv_status status = dkv_wire_get_fixed("block", DKV_LAYOUT_BLOCK, record,
                                                DKV_WIRE_BLOCK_BYTES, &m, err);
    if (status != DKV_OK)
        return status;
    const struct table table = {
        m.table_region, m.table_entries, m.table_offset, m.table_mask,
        m.null_entry,   m.table_kind,    m.entry_bytes,  (m.flags & DKV_WIRE_NULL_ENTRY) != 0};
    if (!dkv_wire_known_dtype(m.query.dtype) || !dkv_wire_known_dtype(m.key.dtype) ||
        !dkv_wire_known_dtype(m.value.dtype))
        return DKV_WIRE_REFUSE("block", "%u: dtypes %u, %u, %u", index, m.query.dtype, m.key.dtype,
                               m.value.dtype);
    if ((m.flags & ~DKV_WIRE_NULL_ENTRY) != 0)
        return DKV_WIRE_REFUSE("block", "%u: flags 0x%x", index, m.flags);
    return check_table(&table, err);
}

static enum dkv_status check_blocks(const struct dkv_wire_blocks *m, struct dkv_error *err)
{
    enum dkv_status status = check_fence(&m->fence, err);

    if (status == DKV_OK)
        status = check_output(&m->output, err);
    for (uint32_t i = 0; status == DKV_OK && i < m->n_blocks; i++)
        status = check_block(m->blocks + (size_t)i * DKV_WIRE_BLOCK_BYTES, i, err);
    return status;
}

enum dkv_status dkv_wire_get_blocks(const uint8_t *in, size_t bytes,
                                    struct dkv_wire_blocks *blocks_out, struct dkv_error *err)
{
    struct dkv_wire_blocks m;
    enum dkv_status status = dkv_wire_get_fixed("score_blocks", DKV_LAYOUT_BLOCKS, in, bytes, &m,
                                                err);
    if (status == DKV_OK)
        status = check_params_bytes(m.params_bytes, err);
    if (status != DKV_OK)
        return status;
    if (m.n_blocks == 0 || m.n_blocks > DKV_WIRE_BLOCKS_MAX)
        return DKV_WIRE_REFUSE("score_blocks", "%u blocks are not in 1..%u", m.n_blocks,
                               DKV_WIRE_BLOCKS_MAX);
    if (m.flags & ~(DKV_WIRE_WANT_SCORES | DKV_WIRE_RECENCY_IF_BUSY))
        return DKV_WIRE_REFUSE("score_blocks", "flags 0x%x", m.flags);
    status = dkv_wire_exact("score_blocks", DKV_LAYOUT_BLOCKS, bytes,
                            m.params_bytes + (uint64_t)m.n_blocks * DKV_WIRE_BLOCK_BYTES, err);
    if (status != DKV_OK)
        return status;
    m.params = in + dkv_wire_layouts[DKV_LAYOUT_BLOCKS].wire_bytes;
    m.blocks = m.params + m.params_bytes;
    status = check_blocks(&m, err);
    if (status == DKV_OK)
        *blocks_out = m;
    return status;
}
