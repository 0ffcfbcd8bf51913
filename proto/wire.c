/* Is a message what it claims to be?
 *
 * Three steps, each before the next byte is believed. The header alone says whether this type may
 * come from this side, with so many bytes and fds. Then the fixed part is decoded by its layout
 * (wire_layout.c), which refuses reserved bytes that are not zero, so that they can mean something
 * one day. Then the checks of its type: counts against the payload's exact size, enumerations,
 * what excludes what. Fields that have no meaning in a message must be zero, which leaves one way
 * to say each thing.
 */
#include "proto/wire.h"

#include <inttypes.h>
#include <string.h>

#include "proto/wire_check.h"

#define ABOUT_TEXT_MAX (DKV_WIRE_ABOUT_MAX / DKV_WIRE_ABOUT_TEXTS - 1)

struct type_row {
    const char *name;
    enum dkv_wire_sender sender;
    enum dkv_wire_layout_id layout;
    bool fds;
    bool bulk;
};

static const struct type_row types[] = {
    [DKV_WIRE_HELLO] = {"hello", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_HELLO, false, false},
    [DKV_WIRE_REGION_ADD] = {"region_add", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_REGION, true, false},
    [DKV_WIRE_REGION_DROP] = {"region_drop", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_OBJECT, false, false},
    [DKV_WIRE_REGION_DETACH] = {"region_detach", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_OBJECT, false,
                                false},
    [DKV_WIRE_REGION_ATTACH] = {"region_attach", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_REGION, true,
                                false},
    [DKV_WIRE_CACHE_ADD] = {"cache_add", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_CACHE, false, true},
    [DKV_WIRE_CACHE_DROP] = {"cache_drop", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_OBJECT, false, false},
    [DKV_WIRE_STASH_ADD] = {"stash_add", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_STASH, false, false},
    [DKV_WIRE_STASH_DROP] = {"stash_drop", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_OBJECT, false, false},
    [DKV_WIRE_SCORE] = {"score", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_SCORE, false, true},
    [DKV_WIRE_SCORE_BLOCKS] = {"score_blocks", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_BLOCKS, false,
                               true},
    [DKV_WIRE_CANCEL] = {"cancel", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_CANCEL, false, false},
    [DKV_WIRE_PING] = {"ping", DKV_WIRE_FROM_CLIENT, DKV_LAYOUT_PING, false, false},
    [DKV_WIRE_WELCOME] = {"welcome", DKV_WIRE_FROM_DAEMON, DKV_LAYOUT_WELCOME, false, false},
    [DKV_WIRE_DONE] = {"done", DKV_WIRE_FROM_DAEMON, DKV_LAYOUT_OBJECT, false, false},
    [DKV_WIRE_RESULT] = {"result", DKV_WIRE_FROM_DAEMON, DKV_LAYOUT_RESULT, false, true},
    [DKV_WIRE_ERROR] = {"error", DKV_WIRE_FROM_DAEMON, DKV_LAYOUT_ERROR, false, false},
    [DKV_WIRE_PONG] = {"pong", DKV_WIRE_FROM_DAEMON, DKV_LAYOUT_PING, false, false},
};

static const struct type_row *row_of(unsigned type)
{
    if (type >= sizeof(types) / sizeof(types[0]) || types[type].name == NULL)
        return NULL;
    return &types[type];
}

const char *dkv_wire_type_name(unsigned type)
{
    const struct type_row *row = row_of(type);
    return row != NULL ? row->name : NULL;
}

size_t dkv_wire_fixed_bytes(unsigned type)
{
    const struct type_row *row = row_of(type);
    return row != NULL ? dkv_wire_layouts[row->layout].wire_bytes : 0;
}

/* --- headers ------------------------------------------------------------------------------- */

void dkv_wire_put_header(uint8_t out[DKV_WIRE_HEADER_BYTES], const struct dkv_wire_header *header)
{
    dkv_wire_encode(DKV_LAYOUT_HEADER, out, header);
}

enum dkv_status dkv_wire_get_header(const uint8_t in[DKV_WIRE_HEADER_BYTES],
                                    enum dkv_wire_sender sender, struct dkv_wire_header *header_out,
                                    struct dkv_error *err)
{
    struct dkv_wire_header h;
    dkv_wire_decode(DKV_LAYOUT_HEADER, in, &h); /* nothing in it is reserved */
    const struct type_row *row = row_of(h.type);

    if (h.version != DKV_WIRE_VERSION)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "protocol version %u, this side speaks %u",
                             h.version, DKV_WIRE_VERSION);
    if (row == NULL || row->sender != sender)
        return dkv_error_set(err, DKV_E_MALFORMED, "message type %u is none of this direction",
                             h.type);
    const uint32_t fixed_bytes = dkv_wire_layouts[row->layout].wire_bytes;
    if (h.payload_bytes < fixed_bytes || h.payload_bytes > DKV_WIRE_PAYLOAD_MAX)
        return dkv_error_set(err, DKV_E_MALFORMED, "%s: payload of %u bytes is not in %u..%u",
                             row->name, h.payload_bytes, fixed_bytes, DKV_WIRE_PAYLOAD_MAX);
    if (h.n_fds > (row->fds ? DKV_WIRE_FDS_MAX : 0))
        return dkv_error_set(err, DKV_E_MALFORMED, "%s: %u fds are more than %u", row->name,
                             h.n_fds, row->fds ? DKV_WIRE_FDS_MAX : 0);
    if (h.bulk_bytes > 0 && !row->bulk)
        return dkv_error_set(err, DKV_E_MALFORMED, "%s has no bulk, %" PRIu64 " bytes announced",
                             row->name, h.bulk_bytes);
    if (h.id == 0 && h.type != DKV_WIRE_ERROR) /* an error about the connection itself */
        return dkv_error_set(err, DKV_E_MALFORMED, "%s: id 0", row->name);
    *header_out = h;
    return DKV_OK;
}

/* --- shared checks ------------------------------------------------------------------------- */

/* The fixed part: long enough, reserved bytes zero. */
enum dkv_status dkv_wire_get_fixed(const char *name, enum dkv_wire_layout_id id, const uint8_t *in,
                                   size_t bytes, void *to, struct dkv_error *err)
{
    if (bytes < dkv_wire_layouts[id].wire_bytes)
        return dkv_error_set(err, DKV_E_MALFORMED, "%s: %zu bytes, %u needed", name, bytes,
                             dkv_wire_layouts[id].wire_bytes);
    if (!dkv_wire_decode(id, in, to))
        return dkv_error_set(err, DKV_E_MALFORMED, "%s: reserved bytes are not zero", name);
    return DKV_OK;
}

/* The payload is exactly the fixed part and `extra` bytes. */
enum dkv_status dkv_wire_exact(const char *name, enum dkv_wire_layout_id id, size_t bytes,
                               uint64_t extra, struct dkv_error *err)
{
    const uint64_t needed = dkv_wire_layouts[id].wire_bytes + extra;
    if (bytes == needed)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_MALFORMED, "%s: %zu bytes, exactly %" PRIu64 " needed", name,
                         bytes, needed);
}

static bool zeros(const uint8_t *bytes, size_t n)
{
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= bytes[i];
    return any == 0;
}

/* --- connection ---------------------------------------------------------------------------- */

enum dkv_status dkv_wire_get_hello(const uint8_t *in, size_t bytes,
                                   struct dkv_wire_hello *hello_out, struct dkv_error *err)
{
    struct dkv_wire_hello m;
    enum dkv_status status = dkv_wire_get_fixed("hello", DKV_LAYOUT_HELLO, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("hello", DKV_LAYOUT_HELLO, bytes, 0, err);
    if (status != DKV_OK)
        return status;
    if (m.magic != DKV_WIRE_MAGIC)
        return DKV_WIRE_REFUSE("hello", "not this protocol");
    if (m.version_min > m.version_max || m.version_min == 0)
        return DKV_WIRE_REFUSE("hello", "versions %u..%u", m.version_min, m.version_max);
    *hello_out = m;
    return DKV_OK;
}

/* As many printable texts as there are, each with its zero byte, and nothing else. */
static enum dkv_status check_about(const uint8_t *about, uint16_t bytes, struct dkv_error *err)
{
    unsigned n = 0;
    if (bytes > DKV_WIRE_ABOUT_MAX)
        return DKV_WIRE_REFUSE("welcome", "%u bytes of texts are more than %u", bytes,
                               DKV_WIRE_ABOUT_MAX);
    for (uint16_t i = 0; i < bytes; i++) {
        if (about[i] != 0 && (about[i] < 0x20 || about[i] > 0x7e))
            return DKV_WIRE_REFUSE("welcome", "text byte %u is not printable", i);
        n += about[i] == 0;
    }
    if (n != DKV_WIRE_ABOUT_TEXTS || about[bytes - 1] != 0)
        return DKV_WIRE_REFUSE("welcome", "%u texts instead of %u", n, DKV_WIRE_ABOUT_TEXTS);
    return DKV_OK;
}

enum dkv_status dkv_wire_get_welcome(const uint8_t *in, size_t bytes,
                                     struct dkv_wire_welcome *welcome_out, struct dkv_error *err)
{
    struct dkv_wire_welcome m;
    struct dkv_wire_device device;
    enum dkv_status status = dkv_wire_get_fixed("welcome", DKV_LAYOUT_WELCOME, in, bytes, &m, err);
    if (status != DKV_OK)
        return status;
    if (m.magic != DKV_WIRE_MAGIC)
        return DKV_WIRE_REFUSE("welcome", "not this protocol");
    if (m.n_devices > DKV_WIRE_DEVICES_MAX)
        return DKV_WIRE_REFUSE("welcome", "%u devices are more than %u", m.n_devices,
                               DKV_WIRE_DEVICES_MAX);
    status = dkv_wire_exact("welcome", DKV_LAYOUT_WELCOME, bytes,
                            (uint64_t)m.n_devices * DKV_WIRE_DEVICE_BYTES + m.about_bytes, err);
    const uint8_t *devices = dkv_wire_welcome_devices(in);
    for (uint16_t i = 0; status == DKV_OK && i < m.n_devices; i++)
        status = dkv_wire_get_fixed("welcome: device", DKV_LAYOUT_DEVICE,
                                    devices + (size_t)i * DKV_WIRE_DEVICE_BYTES,
                                    DKV_WIRE_DEVICE_BYTES, &device, err);
    if (status == DKV_OK)
        status = check_about(devices + (size_t)m.n_devices * DKV_WIRE_DEVICE_BYTES, m.about_bytes,
                             err);
    if (status == DKV_OK)
        *welcome_out = m;
    return status;
}

const uint8_t *dkv_wire_welcome_devices(const uint8_t *payload)
{
    return payload + dkv_wire_layouts[DKV_LAYOUT_WELCOME].wire_bytes;
}

size_t dkv_wire_put_about(uint8_t *out, const char *const texts[DKV_WIRE_ABOUT_TEXTS])
{
    size_t n = 0;
    for (unsigned t = 0; t < DKV_WIRE_ABOUT_TEXTS; t++) {
        for (const char *c = texts[t]; *c != '\0' && c - texts[t] < ABOUT_TEXT_MAX; c++)
            out[n++] = *c >= 0x20 && *c <= 0x7e ? (uint8_t)*c : '?';
        out[n++] = 0;
    }
    return n;
}

const char *dkv_wire_get_about(const uint8_t *payload, const struct dkv_wire_welcome *welcome,
                               enum dkv_wire_about which)
{
    const char *text = (const char *)dkv_wire_welcome_devices(payload) +
                       (size_t)welcome->n_devices * DKV_WIRE_DEVICE_BYTES;
    for (unsigned t = 0; t < which; t++)
        text += strlen(text) + 1;
    return text;
}

/* --- regions ------------------------------------------------------------------------------- */

static enum dkv_status check_chunks(const struct dkv_wire_region *m, struct dkv_error *err)
{
    struct dkv_wire_chunk chunk;
    uint64_t end = 0, region_end = 0;

    for (uint16_t i = 0; i < m->n_chunks; i++) {
        dkv_wire_get_chunk(m->chunks, i, &chunk);
        if (chunk.bytes == 0 || chunk.offset < end || !dkv_add_u64(chunk.offset, chunk.bytes, &end))
            return DKV_WIRE_REFUSE("region", "chunk %u is empty, overlaps or wraps", i);
    }
    dkv_add_u64(m->offset, m->bytes, &region_end); /* checked before */
    if (region_end > end)
        return DKV_WIRE_REFUSE("region", "ends at %" PRIu64 ", its chunks at %" PRIu64, region_end,
                               end);
    return DKV_OK;
}

/* Each kind has its own way to name memory; the others' fields stay zero. */
static enum dkv_status check_region_kind(const struct dkv_wire_region *m, struct dkv_error *err)
{
    const bool has_uuid = !zeros(m->device_uuid, sizeof(m->device_uuid));
    const bool has_handle = !zeros(m->handle, sizeof(m->handle));

    const bool on_gpu = m->kind == DKV_WIRE_REGION_CUDA_LEGACY ||
                        m->kind == DKV_WIRE_REGION_CUDA_VMM;

    if (m->kind < DKV_WIRE_REGION_MEMFD || m->kind > DKV_WIRE_REGION_SHM_NAME)
        return DKV_WIRE_REFUSE("region", "kind %u is not in 1..4", m->kind);
    if (has_uuid != on_gpu)
        return DKV_WIRE_REFUSE("region", "device %s", has_uuid ? "of host memory" : "missing");
    if (has_handle !=
        (m->kind == DKV_WIRE_REGION_CUDA_LEGACY || m->kind == DKV_WIRE_REGION_SHM_NAME))
        return DKV_WIRE_REFUSE("region", "handle %s", has_handle ? "not of this kind" : "missing");
    if ((m->n_chunks > 0) != (m->kind == DKV_WIRE_REGION_CUDA_VMM) ||
        m->n_chunks > DKV_WIRE_FDS_MAX)
        return DKV_WIRE_REFUSE("region", "%u chunks with kind %u", m->n_chunks, m->kind);
    return m->n_chunks > 0 ? check_chunks(m, err) : DKV_OK;
}

enum dkv_status dkv_wire_get_region(const uint8_t *in, size_t bytes,
                                    struct dkv_wire_region *region_out, struct dkv_error *err)
{
    struct dkv_wire_region m;
    uint64_t end;
    enum dkv_status status = dkv_wire_get_fixed("region", DKV_LAYOUT_REGION, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("region", DKV_LAYOUT_REGION, bytes,
                                (uint64_t)m.n_chunks * DKV_WIRE_CHUNK_BYTES, err);
    if (status != DKV_OK)
        return status;
    m.chunks = in + dkv_wire_layouts[DKV_LAYOUT_REGION].wire_bytes;
    if (m.writable > 1)
        return DKV_WIRE_REFUSE("region", "writable %u is not 0 or 1", m.writable);
    if (m.bytes == 0 || !dkv_add_u64(m.offset, m.bytes, &end))
        return DKV_WIRE_REFUSE("region", "%" PRIu64 " bytes at %" PRIu64, m.bytes, m.offset);
    status = check_region_kind(&m, err);
    if (status == DKV_OK)
        *region_out = m;
    return status;
}

enum dkv_status dkv_wire_check_region_fds(const struct dkv_wire_region *region, uint32_t n_fds,
                                          struct dkv_error *err)
{
    const uint32_t needed = region->kind == DKV_WIRE_REGION_MEMFD ? 1 : region->n_chunks;
    if (n_fds != needed)
        return DKV_WIRE_REFUSE("region", "%u fds came, %u belong to it", n_fds, needed);
    return DKV_OK;
}

enum dkv_status dkv_wire_get_object(const uint8_t *in, size_t bytes,
                                    struct dkv_wire_object *object_out, struct dkv_error *err)
{
    struct dkv_wire_object m;
    enum dkv_status status = dkv_wire_get_fixed("object", DKV_LAYOUT_OBJECT, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("object", DKV_LAYOUT_OBJECT, bytes, 0, err);
    if (status == DKV_OK)
        *object_out = m;
    return status;
}

/* --- caches and stashes -------------------------------------------------------------------- */

enum dkv_status dkv_wire_get_cache(const uint8_t *in, size_t bytes,
                                   struct dkv_wire_cache *cache_out, struct dkv_error *err)
{
    struct dkv_wire_cache m;
    enum dkv_status status = dkv_wire_get_fixed("cache", DKV_LAYOUT_CACHE, in, bytes, &m, err);
    if (status != DKV_OK)
        return status;
    if (m.n_layers == 0 || m.n_layers > DKV_WIRE_LAYERS_MAX)
        return DKV_WIRE_REFUSE("cache", "%u layers are not in 1..%u", m.n_layers,
                               DKV_WIRE_LAYERS_MAX);
    if (m.scales > DKV_WIRE_SCALES_HEAD || m.has_sinks > 1)
        return DKV_WIRE_REFUSE("cache", "scales %u, sinks %u are not 0 or 1", m.scales,
                               m.has_sinks);
    status = dkv_wire_exact("cache", DKV_LAYOUT_CACHE, bytes,
                            (uint64_t)m.n_layers * 2 * DKV_WIRE_VIEW_BYTES, err);
    m.layers = in + dkv_wire_layouts[DKV_LAYOUT_CACHE].wire_bytes;
    for (uint32_t i = 0; status == DKV_OK && i < 2u * m.n_layers; i++) {
        struct dkv_wire_view view;
        status = dkv_wire_get_fixed("cache: view", DKV_LAYOUT_VIEW,
                                    m.layers + i * DKV_WIRE_VIEW_BYTES, DKV_WIRE_VIEW_BYTES, &view,
                                    err);
        if (status == DKV_OK && (!dkv_wire_known_dtype(view.dtype) || view.region == 0))
            return DKV_WIRE_REFUSE("cache", "view %u: dtype %u, region %u", i, view.dtype,
                                   view.region);
    }
    if (status == DKV_OK)
        *cache_out = m;
    return status;
}

uint64_t dkv_wire_cache_bulk_bytes(const struct dkv_wire_cache *cache)
{
    /* At most 2^10 layers times 2^33: no overflow. */
    uint64_t floats = 0;
    if (cache->scales == DKV_WIRE_SCALES_HEAD)
        floats += 2 * (uint64_t)cache->kv_heads;
    if (cache->has_sinks)
        floats += cache->q_heads;
    return floats * cache->n_layers * sizeof(float);
}

enum dkv_status dkv_wire_get_stash(const uint8_t *in, size_t bytes,
                                   struct dkv_wire_stash *stash_out, struct dkv_error *err)
{
    struct dkv_wire_stash m;
    enum dkv_status status = dkv_wire_get_fixed("stash", DKV_LAYOUT_STASH, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("stash", DKV_LAYOUT_STASH, bytes, 0, err);
    if (status != DKV_OK)
        return status;
    if (m.region == 0 || m.n_slots == 0 || m.n_rows == 0)
        return DKV_WIRE_REFUSE("stash", "region %u, %u slots of %u rows", m.region, m.n_slots,
                               m.n_rows);
    if (m.n_layers == 0 || m.n_layers > DKV_WIRE_LAYERS_MAX)
        return DKV_WIRE_REFUSE("stash", "%u layers are not in 1..%u", m.n_layers,
                               DKV_WIRE_LAYERS_MAX);
    if (!dkv_wire_known_dtype(m.dtype))
        return DKV_WIRE_REFUSE("stash", "dtype %u", m.dtype);
    *stash_out = m;
    return DKV_OK;
}

enum dkv_status dkv_wire_get_cancel(const uint8_t *in, size_t bytes,
                                    struct dkv_wire_cancel *cancel_out, struct dkv_error *err)
{
    struct dkv_wire_cancel m;
    enum dkv_status status = dkv_wire_get_fixed("cancel", DKV_LAYOUT_CANCEL, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("cancel", DKV_LAYOUT_CANCEL, bytes, 0, err);
    if (status == DKV_OK)
        *cancel_out = m;
    return status;
}

enum dkv_status dkv_wire_get_ping(const uint8_t *in, size_t bytes, struct dkv_wire_ping *ping_out,
                                  struct dkv_error *err)
{
    struct dkv_wire_ping m;
    enum dkv_status status = dkv_wire_get_fixed("ping", DKV_LAYOUT_PING, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("ping", DKV_LAYOUT_PING, bytes, 0, err);
    if (status == DKV_OK)
        *ping_out = m;
    return status;
}

/* --- answers ------------------------------------------------------------------------------- */

enum dkv_status dkv_wire_get_result(const uint8_t *in, size_t bytes,
                                    struct dkv_wire_result *result_out, struct dkv_error *err)
{
    struct dkv_wire_result m;
    struct dkv_wire_result_block block;
    enum dkv_status status = dkv_wire_get_fixed("result", DKV_LAYOUT_RESULT, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("result", DKV_LAYOUT_RESULT, bytes,
                                (uint64_t)m.n_blocks * DKV_WIRE_RESULT_BLOCK_BYTES, err);
    if (status != DKV_OK)
        return status;
    if (m.degraded > 1 || m.in_region > 1)
        return DKV_WIRE_REFUSE("result", "degraded %u, in_region %u are not 0 or 1", m.degraded,
                               m.in_region);
    m.blocks = in + dkv_wire_layouts[DKV_LAYOUT_RESULT].wire_bytes;
    for (uint32_t i = 0; status == DKV_OK && i < m.n_blocks; i++)
        status = dkv_wire_get_fixed("result: block", DKV_LAYOUT_RESULT_BLOCK,
                                    m.blocks + (size_t)i * DKV_WIRE_RESULT_BLOCK_BYTES,
                                    DKV_WIRE_RESULT_BLOCK_BYTES, &block, err);
    if (status == DKV_OK)
        *result_out = m;
    return status;
}

enum dkv_status dkv_wire_get_error(const uint8_t *in, size_t bytes,
                                   struct dkv_wire_error *error_out, struct dkv_error *err)
{
    struct dkv_wire_error m;
    enum dkv_status status = dkv_wire_get_fixed("error", DKV_LAYOUT_ERROR, in, bytes, &m, err);
    if (status == DKV_OK)
        status = dkv_wire_exact("error", DKV_LAYOUT_ERROR, bytes, m.text_bytes, err);
    if (status != DKV_OK)
        return status;
    m.text = in + dkv_wire_layouts[DKV_LAYOUT_ERROR].wire_bytes;
    if (m.status == 0 || m.text_bytes > DKV_WIRE_TEXT_MAX)
        return DKV_WIRE_REFUSE("error", "status %u, text of %u bytes", m.status, m.text_bytes);
    for (uint16_t i = 0; i < m.text_bytes; i++)
        if (m.text[i] < 0x20 || m.text[i] > 0x7e)
            return DKV_WIRE_REFUSE("error", "text byte %u is not printable", i);
    *error_out = m;
    return DKV_OK;
}

/* --- writing, and records ------------------------------------------------------------------ */

#define PUT(name, layout)                                                        \
    size_t dkv_wire_put_##name(uint8_t *out, const struct dkv_wire_##name *name) \
    {                                                                            \
        return dkv_wire_encode(layout, out, name);                               \
    }

PUT(hello, DKV_LAYOUT_HELLO)
PUT(welcome, DKV_LAYOUT_WELCOME)
PUT(region, DKV_LAYOUT_REGION)
PUT(object, DKV_LAYOUT_OBJECT)
PUT(cache, DKV_LAYOUT_CACHE)
PUT(stash, DKV_LAYOUT_STASH)
PUT(score, DKV_LAYOUT_SCORE)
PUT(blocks, DKV_LAYOUT_BLOCKS)
PUT(result, DKV_LAYOUT_RESULT)
PUT(error, DKV_LAYOUT_ERROR)
PUT(cancel, DKV_LAYOUT_CANCEL)
PUT(ping, DKV_LAYOUT_PING)

#define RECORD(name, layout)                                                                     \
    PUT(name, layout)                                                                            \
    void dkv_wire_get_##name(const uint8_t *records, size_t at,                                  \
                             struct dkv_wire_##name *name##_out)                                 \
    {                                                                                            \
        dkv_wire_decode(layout, records + at * dkv_wire_layouts[layout].wire_bytes, name##_out); \
    }

RECORD(device, DKV_LAYOUT_DEVICE)
RECORD(chunk, DKV_LAYOUT_CHUNK)
RECORD(view, DKV_LAYOUT_VIEW)
RECORD(block, DKV_LAYOUT_BLOCK)
RECORD(result_block, DKV_LAYOUT_RESULT_BLOCK)
