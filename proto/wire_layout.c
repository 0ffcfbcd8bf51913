/* The layouts, and the one loop that reads and the one that writes.
 *
 * Numbers are assembled from bytes, so neither the host's byte order nor alignment matters. Every
 * number sits at a multiple of its size, which costs a few reserved bytes and lets people read the
 * diagrams. A float travels as its bits.
 */
#include "proto/wire_layout.h"

#include <endian.h>
#include <string.h>

#define N(type, m)                                                                           \
    {                                                                                        \
        offsetof(struct dkv_wire_##type, m), sizeof(((struct dkv_wire_##type *)0)->m), false \
    }
#define RAW(type, m)                                                                        \
    {                                                                                       \
        offsetof(struct dkv_wire_##type, m), sizeof(((struct dkv_wire_##type *)0)->m), true \
    }
#define ZERO(n)                    \
    {                              \
        DKV_WIRE_RESERVED, n, true \
    }

static const struct dkv_wire_field header_fields[] = {N(header, version), N(header, type),
                                                      N(header, n_fds),   N(header, payload_bytes),
                                                      N(header, id),      N(header, bulk_bytes)};

static const struct dkv_wire_field hello_fields[] = {
    N(hello, magic), N(hello, version_min), N(hello, version_max), N(hello, features), ZERO(4)};

static const struct dkv_wire_field welcome_fields[] = {
    N(welcome, magic),         N(welcome, version),     N(welcome, n_devices),
    N(welcome, features),      N(welcome, about_bytes), ZERO(2),
    N(welcome, instance),      N(welcome, max_regions), N(welcome, max_caches),
    N(welcome, max_in_flight), N(welcome, max_fds),     N(welcome, max_bulk_bytes)};

static const struct dkv_wire_field device_fields[] = {RAW(device, uuid), N(device, kind), ZERO(7)};

static const struct dkv_wire_field region_fields[] = {
    N(region, region),   N(region, generation), N(region, kind),
    N(region, writable), N(region, n_chunks),   ZERO(4),
    N(region, offset),   N(region, bytes),      RAW(region, device_uuid),
    RAW(region, handle)};

static const struct dkv_wire_field chunk_fields[] = {N(chunk, offset), N(chunk, bytes)};

static const struct dkv_wire_field object_fields[] = {N(object, object), N(object, generation)};

static const struct dkv_wire_field cache_fields[] = {
    N(cache, q_heads),     N(cache, kv_heads),     N(cache, head_dim), N(cache, v_dim),
    N(cache, page_tokens), N(cache, n_layers),     N(cache, scales),   N(cache, has_sinks),
    N(cache, scale),       N(cache, logit_softcap)};

static const struct dkv_wire_field view_fields[] = {N(view, region),
                                                    N(view, dtype),
                                                    ZERO(3),
                                                    N(view, scale),
                                                    ZERO(4),
                                                    N(view, offset),
                                                    N(view, page_stride),
                                                    N(view, token_stride),
                                                    N(view, head_stride)};

static const struct dkv_wire_field stash_fields[] = {N(stash, region),      N(stash, n_slots),
                                                     N(stash, n_rows),      N(stash, n_layers),
                                                     N(stash, dtype),       ZERO(1),
                                                     N(stash, scale),       ZERO(4),
                                                     N(stash, offset),      N(stash, layer_stride),
                                                     N(stash, slot_stride), N(stash, row_stride),
                                                     N(stash, head_stride)};

#define FENCE(type)  N(type, fence.region), ZERO(4), N(type, fence.offset), N(type, fence.value)
#define OUTPUT(type) N(type, output.region), ZERO(4), N(type, output.offset), N(type, output.bytes)

static const struct dkv_wire_field score_fields[] = {N(score, cache),
                                                     N(score, stash),
                                                     N(score, slot),
                                                     N(score, newest_row),
                                                     N(score, q_rows),
                                                     N(score, first_layer),
                                                     N(score, n_layers),
                                                     N(score, n_tokens),
                                                     N(score, valid_from),
                                                     N(score, table_region),
                                                     N(score, table_entries),
                                                     N(score, table_kind),
                                                     N(score, entry_bytes),
                                                     N(score, flags),
                                                     N(score, extras),
                                                     N(score, params_bytes),
                                                     ZERO(2),
                                                     N(score, table_offset),
                                                     N(score, table_mask),
                                                     N(score, null_entry),
                                                     FENCE(score),
                                                     OUTPUT(score)};

static const struct dkv_wire_field blocks_fields[] = {N(blocks, n_blocks), N(blocks, params_bytes),
                                                      N(blocks, flags),    ZERO(1),
                                                      FENCE(blocks),       OUTPUT(blocks)};

#define VIEW(m)                                                                            \
    N(block, m.region), N(block, m.dtype), ZERO(3), N(block, m.scale), N(block, m.floats), \
        N(block, m.offset), N(block, m.page_stride), N(block, m.token_stride),             \
        N(block, m.head_stride)

static const struct dkv_wire_field block_fields[] = {N(block, q_heads),
                                                     N(block, kv_heads),
                                                     N(block, head_dim),
                                                     N(block, v_dim),
                                                     N(block, q_rows),
                                                     N(block, n_tokens),
                                                     N(block, valid_from),
                                                     N(block, page_tokens),
                                                     N(block, table_region),
                                                     N(block, table_entries),
                                                     N(block, table_kind),
                                                     N(block, entry_bytes),
                                                     N(block, flags),
                                                     ZERO(1),
                                                     N(block, sink_floats),
                                                     N(block, table_offset),
                                                     N(block, table_mask),
                                                     N(block, null_entry),
                                                     VIEW(query),
                                                     VIEW(key),
                                                     VIEW(value),
                                                     N(block, token_weight),
                                                     N(block, carry_in),
                                                     N(block, external_scores),
                                                     N(block, value_metric)};

static const struct dkv_wire_field result_fields[] = {N(result, n_blocks),  N(result, degraded),
                                                      N(result, in_region), ZERO(2),
                                                      N(result, queue_us),  N(result, run_us)};

static const struct dkv_wire_field result_block_fields[] = {
    N(result_block, kv_heads), N(result_block, keep_tokens), N(result_block, n_tokens),
    N(result_block, n_ragged), N(result_block, keep_offset), N(result_block, scores_offset)};

static const struct dkv_wire_field error_fields[] = {
    N(error, status), N(error, retry_us), N(error, block), N(error, text_bytes), ZERO(2)};

static const struct dkv_wire_field cancel_fields[] = {N(cancel, target)};

static const struct dkv_wire_field ping_fields[] = {N(ping, cookie)};

#define LAYOUT(fields, bytes)                               \
    {                                                       \
        fields, sizeof(fields) / sizeof((fields)[0]), bytes \
    }

const struct dkv_wire_layout dkv_wire_layouts[DKV_LAYOUTS] = {
    [DKV_LAYOUT_HEADER] = LAYOUT(header_fields, DKV_WIRE_HEADER_BYTES),
    [DKV_LAYOUT_HELLO] = LAYOUT(hello_fields, 16),
    [DKV_LAYOUT_WELCOME] = LAYOUT(welcome_fields, 48),
    [DKV_LAYOUT_DEVICE] = LAYOUT(device_fields, DKV_WIRE_DEVICE_BYTES),
    [DKV_LAYOUT_REGION] = LAYOUT(region_fields, 112),
    [DKV_LAYOUT_CHUNK] = LAYOUT(chunk_fields, DKV_WIRE_CHUNK_BYTES),
    [DKV_LAYOUT_OBJECT] = LAYOUT(object_fields, 8),
    [DKV_LAYOUT_CACHE] = LAYOUT(cache_fields, 40),
    [DKV_LAYOUT_VIEW] = LAYOUT(view_fields, DKV_WIRE_VIEW_BYTES),
    [DKV_LAYOUT_STASH] = LAYOUT(stash_fields, 64),
    [DKV_LAYOUT_SCORE] = LAYOUT(score_fields, 120),
    [DKV_LAYOUT_BLOCKS] = LAYOUT(blocks_fields, 56),
    [DKV_LAYOUT_BLOCK] = LAYOUT(block_fields, DKV_WIRE_BLOCK_BYTES),
    [DKV_LAYOUT_RESULT] = LAYOUT(result_fields, 24),
    [DKV_LAYOUT_RESULT_BLOCK] = LAYOUT(result_block_fields, DKV_WIRE_RESULT_BLOCK_BYTES),
    [DKV_LAYOUT_ERROR] = LAYOUT(error_fields, 16),
    [DKV_LAYOUT_CANCEL] = LAYOUT(cancel_fields, 8),
    [DKV_LAYOUT_PING] = LAYOUT(ping_fields, 8),
};

static void put_number(uint8_t *out, const void *member, size_t bytes)
{
    uint16_t two;
    uint32_t four; /* a float's bits too */
    uint64_t eight;

    switch (bytes) {
    case 1: *out = *(const uint8_t *)member; break;
    case 2:
        memcpy(&two, member, 2);
        two = htole16(two);
        memcpy(out, &two, 2);
        break;
    case 4:
        memcpy(&four, member, 4);
        four = htole32(four);
        memcpy(out, &four, 4);
        break;
    default:
        memcpy(&eight, member, 8);
        eight = htole64(eight);
        memcpy(out, &eight, 8);
        break;
    }
}

static void get_number(const uint8_t *in, void *member, size_t bytes)
{
    put_number(member, in, bytes); /* turning bytes around twice changes nothing */
}

size_t dkv_wire_encode(enum dkv_wire_layout_id id, uint8_t *out, const void *from)
{
    const struct dkv_wire_layout *layout = &dkv_wire_layouts[id];
    uint8_t *at = out;

    for (uint16_t i = 0; i < layout->n_fields; i++) {
        const struct dkv_wire_field *field = &layout->fields[i];
        if (field->member == DKV_WIRE_RESERVED)
            memset(at, 0, field->bytes);
        else if (field->raw)
            memcpy(at, (const char *)from + field->member, field->bytes);
        else
            put_number(at, (const char *)from + field->member, field->bytes);
        at += field->bytes;
    }
    return layout->wire_bytes;
}

static bool all_zero(const uint8_t *in, size_t bytes)
{
    uint8_t any = 0;
    for (size_t i = 0; i < bytes; i++)
        any |= in[i];
    return any == 0;
}

bool dkv_wire_decode(enum dkv_wire_layout_id id, const uint8_t *in, void *to)
{
    const struct dkv_wire_layout *layout = &dkv_wire_layouts[id];
    bool clean = true;

    for (uint16_t i = 0; i < layout->n_fields; i++) {
        const struct dkv_wire_field *field = &layout->fields[i];
        if (field->member == DKV_WIRE_RESERVED)
            clean = clean && all_zero(in, field->bytes);
        else if (field->raw)
            memcpy((char *)to + field->member, in, field->bytes);
        else
            get_number(in, (char *)to + field->member, field->bytes);
        in += field->bytes;
    }
    return clean;
}
