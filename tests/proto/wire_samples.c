/* Samples use a different value in every field, so that two that are mixed up show. */
#include "tests/proto/wire_samples.h"

#include <string.h>

static struct dkv_wire_view view(uint32_t region)
{
    return (struct dkv_wire_view){.region = region,
                                  .dtype = DKV_F8_E4M3,
                                  .scale = 0.125f,
                                  .offset = 4096,
                                  .page_stride = 65536,
                                  .token_stride = -256,
                                  .head_stride = 128};
}

static void hello(struct wire_sample *s)
{
    const struct dkv_wire_hello m = {
        .magic = DKV_WIRE_MAGIC, .version_min = 1, .version_max = 3, .features = 0x1f};
    s->bytes = dkv_wire_put_hello(s->payload, &m);
}

static void welcome(struct wire_sample *s)
{
    const struct dkv_wire_welcome m = {.magic = DKV_WIRE_MAGIC,
                                       .version = 1,
                                       .n_devices = 2,
                                       .features = 7,
                                       .about_bytes = sizeof("1.2") + sizeof("p") + sizeof("") +
                                                      sizeof("shm-") + sizeof("a device"),
                                       .instance = UINT64_C(0x1122334455667788),
                                       .max_regions = 64,
                                       .max_caches = 16,
                                       .max_in_flight = 32,
                                       .max_fds = 512,
                                       .max_bulk_bytes = UINT64_C(1) << 31};
    const struct dkv_wire_device cpu = {.kind = DKV_WIRE_DEVICE_CPU},
                                 gpu = {.uuid = "a gpu's uuid...", .kind = DKV_WIRE_DEVICE_CUDA};
    s->bytes = dkv_wire_put_welcome(s->payload, &m);
    s->bytes += dkv_wire_put_device(s->payload + s->bytes, &cpu);
    s->bytes += dkv_wire_put_device(s->payload + s->bytes, &gpu);
    s->bytes += dkv_wire_put_about(s->payload + s->bytes,
                                   (const char *const[]){"1.2", "p", "", "a device", "shm-"});
}

static void memfd(struct wire_sample *s)
{
    const struct dkv_wire_region m = {
        .kind = DKV_WIRE_REGION_MEMFD, .writable = 1, .offset = 4096, .bytes = 1 << 20};
    s->n_fds = 1;
    s->bytes = dkv_wire_put_region(s->payload, &m);
}

static void legacy(struct wire_sample *s)
{
    const struct dkv_wire_region m = {.region = 9,
                                      .generation = 2,
                                      .kind = DKV_WIRE_REGION_CUDA_LEGACY,
                                      .offset = 512,
                                      .bytes = 4096,
                                      .device_uuid = "a gpu's uuid...",
                                      .handle = "sixty-four bytes that mean nothing to us"};
    s->bytes = dkv_wire_put_region(s->payload, &m);
}

static void vmm(struct wire_sample *s)
{
    const struct dkv_wire_region m = {.kind = DKV_WIRE_REGION_CUDA_VMM,
                                      .n_chunks = 3,
                                      .offset = 2 << 20,
                                      .bytes = 20 << 20,
                                      .device_uuid = "a gpu's uuid..."};
    const struct dkv_wire_chunk chunks[3] = {
        {0, 2 << 20}, {2 << 20, 4 << 20}, {8 << 20, 14 << 20} /* a hole before it */};
    s->n_fds = 3;
    s->bytes = dkv_wire_put_region(s->payload, &m);
    for (int i = 0; i < 3; i++)
        s->bytes += dkv_wire_put_chunk(s->payload + s->bytes, &chunks[i]);
}

static void named(struct wire_sample *s)
{
    const struct dkv_wire_region m = {
        .kind = DKV_WIRE_REGION_SHM_NAME, .offset = 64, .bytes = 65536, .handle = "kv0"};
    s->bytes = dkv_wire_put_region(s->payload, &m);
}

static void object(struct wire_sample *s)
{
    const struct dkv_wire_object m = {.object = 77, .generation = 3};
    s->bytes = dkv_wire_put_object(s->payload, &m);
}

static void cache(struct wire_sample *s)
{
    const struct dkv_wire_cache m = {.q_heads = 32,
                                     .kv_heads = 8,
                                     .head_dim = 128,
                                     .v_dim = 96,
                                     .page_tokens = 16,
                                     .n_layers = 2,
                                     .scales = DKV_WIRE_SCALES_HEAD,
                                     .has_sinks = 1,
                                     .scale = 0.0883,
                                     .logit_softcap = 30.0};
    s->bytes = dkv_wire_put_cache(s->payload, &m);
    for (uint32_t i = 0; i < 4; i++) {
        const struct dkv_wire_view v = view(i + 1);
        s->bytes += dkv_wire_put_view(s->payload + s->bytes, &v);
    }
    s->bulk_bytes = dkv_wire_cache_bulk_bytes(&m);
}

static void stash(struct wire_sample *s)
{
    const struct dkv_wire_stash m = {.region = 5,
                                     .n_slots = 256,
                                     .n_rows = 64,
                                     .n_layers = 32,
                                     .dtype = DKV_BF16,
                                     .scale = 1.0f,
                                     .offset = 128,
                                     .layer_stride = 1 << 20,
                                     .slot_stride = 1 << 14,
                                     .row_stride = 8192,
                                     .head_stride = 256};
    s->bytes = dkv_wire_put_stash(s->payload, &m);
}

static void put_params(struct wire_sample *s, uint16_t *bytes, uint8_t *to)
{
    struct dkv_params params;

    (void)s;
    dkv_params_init(&params);
    dkv_params_set_text(&params, "profile", "author", NULL);
    dkv_params_set_text(&params, "window", "16", NULL);
    dkv_params_set_text(&params, "keep_ratio", "0.25", NULL);
    dkv_params_set_text(&params, "stream", "a-stream", NULL);
    *bytes = (uint16_t)dkv_wire_put_params(to, &params);
}

static struct dkv_wire_score score_base(void)
{
    return (struct dkv_wire_score){.cache = 3,
                                   .stash = 4,
                                   .slot = 17,
                                   .newest_row = 63,
                                   .q_rows = 32,
                                   .first_layer = 2,
                                   .n_layers = 30,
                                   .n_tokens = 131072,
                                   .valid_from = 5};
}

static void finish_score(struct wire_sample *s, struct dkv_wire_score *m)
{
    uint8_t params[DKV_WIRE_PARAMS_MAX];

    put_params(s, &m->params_bytes, params);
    s->bytes = dkv_wire_put_score(s->payload, m);
    memcpy(s->payload + s->bytes, params, m->params_bytes);
    s->bytes += m->params_bytes;
    s->bulk_bytes = dkv_wire_score_bulk_bytes(m);
}

static void score_plain(struct wire_sample *s)
{
    struct dkv_wire_score m = score_base();
    s->bytes = dkv_wire_put_score(s->payload, &m); /* no parameters: the defaults */
}

static void score_table_inline(struct wire_sample *s)
{
    struct dkv_wire_score m = score_base();
    m.table_kind = DKV_WIRE_TABLE_BULK;
    m.entry_bytes = 4;
    m.table_entries = 8192;
    m.table_mask = 0x7fffffff;
    m.extras = DKV_WIRE_TOKEN_WEIGHT | DKV_WIRE_VALUE_METRIC;
    m.flags = DKV_WIRE_WANT_SCORES | DKV_WIRE_RECENCY_IF_BUSY;
    finish_score(s, &m);
}

static void score_table_region(struct wire_sample *s)
{
    struct dkv_wire_score m = score_base();
    m.table_kind = DKV_WIRE_TABLE_REGION;
    m.table_region = 6;
    m.table_offset = 12;
    m.entry_bytes = 8;
    m.table_entries = 8192;
    m.null_entry = -1;
    m.flags = DKV_WIRE_NULL_ENTRY;
    m.fence = (struct dkv_wire_fence){7, 64, 1234567};
    m.output = (struct dkv_wire_output){8, 4096, 65536};
    finish_score(s, &m);
}

static void blocks(struct wire_sample *s)
{
    struct dkv_wire_blocks m = {
        .n_blocks = 2, .flags = DKV_WIRE_WANT_SCORES, .output = {8, 0, 1 << 20}};
    struct dkv_wire_block b = {.q_heads = 8,
                               .kv_heads = 2,
                               .head_dim = 64,
                               .v_dim = 64,
                               .q_rows = 64,
                               .n_tokens = 1024,
                               .valid_from = 3,
                               .page_tokens = 16,
                               .table_entries = 64,
                               .table_offset = 8,
                               .table_mask = 0xffff,
                               .table_kind = DKV_WIRE_TABLE_BULK,
                               .entry_bytes = 4,
                               .query = view(0),
                               .key = view(11),
                               .value = view(12),
                               .sink_floats = 77,
                               .token_weight = 401,
                               .carry_in = 2449,
                               .external_scores = 4497,
                               .value_metric = 6545};
    uint8_t params[DKV_WIRE_PARAMS_MAX];

    b.query.floats = 101;
    b.key.floats = 201;
    b.value.floats = 301;
    put_params(s, &m.params_bytes, params);
    s->bytes = dkv_wire_put_blocks(s->payload, &m);
    memcpy(s->payload + s->bytes, params, m.params_bytes);
    s->bytes += m.params_bytes;
    for (uint32_t i = 0; i < m.n_blocks; i++)
        s->bytes += dkv_wire_put_block(s->payload + s->bytes, &b);
    s->bulk_bytes = 100000;
}

static void cancel(struct wire_sample *s)
{
    const struct dkv_wire_cancel m = {.target = UINT64_C(0x8000000000000001)};
    s->bytes = dkv_wire_put_cancel(s->payload, &m);
}

static void ping(struct wire_sample *s)
{
    const struct dkv_wire_ping m = {.cookie = UINT64_C(0xfedcba9876543210)};
    s->bytes = dkv_wire_put_ping(s->payload, &m);
}

static void result(struct wire_sample *s)
{
    const struct dkv_wire_result m = {
        .n_blocks = 2, .degraded = 1, .in_region = 1, .queue_us = 120, .run_us = 350};
    const struct dkv_wire_result_block b[2] = {{8, 102, 1024, 0, 0, 3264},
                                               {2, 7, 64, 13, 36032, DKV_WIRE_NO_SCORES}};
    s->bytes = dkv_wire_put_result(s->payload, &m);
    for (int i = 0; i < 2; i++)
        s->bytes += dkv_wire_put_result_block(s->payload + s->bytes, &b[i]);
}

static void error(struct wire_sample *s)
{
    static const char text[] = "queue full: 8 of 8 requests";
    const struct dkv_wire_error m = {.status = DKV_E_BUSY,
                                     .retry_us = 2500,
                                     .block = UINT32_MAX,
                                     .text_bytes = sizeof(text) - 1};
    s->bytes = dkv_wire_put_error(s->payload, &m);
    memcpy(s->payload + s->bytes, text, sizeof(text) - 1);
    s->bytes += sizeof(text) - 1;
}

static const struct {
    unsigned type;
    void (*fill)(struct wire_sample *s);
} samples[N_WIRE_SAMPLES] = {
    {DKV_WIRE_HELLO, hello},
    {DKV_WIRE_REGION_ADD, memfd},
    {DKV_WIRE_REGION_ADD, legacy},
    {DKV_WIRE_REGION_ADD, vmm},
    {DKV_WIRE_REGION_DROP, object},
    {DKV_WIRE_REGION_DETACH, object},
    {DKV_WIRE_REGION_ATTACH, memfd},
    {DKV_WIRE_CACHE_ADD, cache},
    {DKV_WIRE_CACHE_DROP, object},
    {DKV_WIRE_STASH_ADD, stash},
    {DKV_WIRE_STASH_DROP, object},
    {DKV_WIRE_SCORE, score_plain},
    {DKV_WIRE_SCORE, score_table_inline},
    {DKV_WIRE_SCORE, score_table_region},
    {DKV_WIRE_SCORE_BLOCKS, blocks},
    {DKV_WIRE_CANCEL, cancel},
    {DKV_WIRE_PING, ping},
    {DKV_WIRE_WELCOME, welcome},
    {DKV_WIRE_DONE, object},
    {DKV_WIRE_RESULT, result},
    {DKV_WIRE_ERROR, error},
    {DKV_WIRE_REGION_ADD, named},
};

void wire_sample(unsigned i, struct wire_sample *sample)
{
    memset(sample, 0, sizeof(*sample));
    sample->type = samples[i].type;
    samples[i].fill(sample);
}

/* --- any message --------------------------------------------------------------------------- */

#define DECODE(name)                                                  \
    struct dkv_wire_##name m;                                         \
    enum dkv_status status = dkv_wire_get_##name(in, bytes, &m, err); \
    if (status != DKV_OK)                                             \
        return status;                                                \
    *again_bytes = dkv_wire_put_##name(again, &m)

#define RECORDS(name, records, n)                                           \
    for (size_t i = 0; i < (n); i++) {                                      \
        struct dkv_wire_##name record;                                      \
        dkv_wire_get_##name(records, i, &record);                           \
        *again_bytes += dkv_wire_put_##name(again + *again_bytes, &record); \
    }

#define ARGS \
    const uint8_t *in, size_t bytes, uint8_t *again, size_t *again_bytes, struct dkv_error *err

static enum dkv_status any_params(const uint8_t *in, size_t bytes, uint8_t *again,
                                  size_t *again_bytes, struct dkv_error *err)
{
    struct dkv_params params;

    dkv_params_init(&params);
    enum dkv_status status = dkv_wire_get_params(in, bytes, &params, err);
    if (status == DKV_OK)
        *again_bytes += dkv_wire_put_params(again + *again_bytes, &params);
    return status;
}

static enum dkv_status any_welcome(ARGS)
{
    DECODE(welcome);
    RECORDS(device, dkv_wire_welcome_devices(in), m.n_devices);
    const char *texts[DKV_WIRE_ABOUT_TEXTS];
    for (unsigned t = 0; t < DKV_WIRE_ABOUT_TEXTS; t++)
        texts[t] = dkv_wire_get_about(in, &m, t);
    memcpy(again + *again_bytes, texts[0], m.about_bytes);
    *again_bytes += m.about_bytes;
    return DKV_OK;
}

static enum dkv_status any_region(ARGS)
{
    DECODE(region);
    RECORDS(chunk, m.chunks, m.n_chunks);
    return DKV_OK;
}

static enum dkv_status any_cache(ARGS)
{
    DECODE(cache);
    RECORDS(view, m.layers, 2u * m.n_layers);
    return DKV_OK;
}

static enum dkv_status any_score(ARGS)
{
    DECODE(score);
    return any_params(m.params, m.params_bytes, again, again_bytes, err);
}

static enum dkv_status any_blocks(ARGS)
{
    DECODE(blocks);
    status = any_params(m.params, m.params_bytes, again, again_bytes, err);
    if (status != DKV_OK)
        return status;
    RECORDS(block, m.blocks, m.n_blocks);
    return DKV_OK;
}

static enum dkv_status any_result(ARGS)
{
    DECODE(result);
    RECORDS(result_block, m.blocks, m.n_blocks);
    return DKV_OK;
}

static enum dkv_status any_error(ARGS)
{
    DECODE(error);
    memcpy(again + *again_bytes, m.text, m.text_bytes);
    *again_bytes += m.text_bytes;
    return DKV_OK;
}

#define SIMPLE(name)                        \
    static enum dkv_status any_##name(ARGS) \
    {                                       \
        DECODE(name);                       \
        return DKV_OK;                      \
    }

SIMPLE(hello)
SIMPLE(object)
SIMPLE(stash)
SIMPLE(cancel)
SIMPLE(ping)

enum dkv_status wire_decode_any(unsigned type, const uint8_t *in, size_t bytes, uint8_t *again,
                                size_t *again_bytes, struct dkv_error *err)
{
    switch (type) {
    case DKV_WIRE_HELLO: return any_hello(in, bytes, again, again_bytes, err);
    case DKV_WIRE_WELCOME: return any_welcome(in, bytes, again, again_bytes, err);
    case DKV_WIRE_REGION_ADD:
    case DKV_WIRE_REGION_ATTACH: return any_region(in, bytes, again, again_bytes, err);
    case DKV_WIRE_REGION_DROP:
    case DKV_WIRE_REGION_DETACH:
    case DKV_WIRE_CACHE_DROP:
    case DKV_WIRE_STASH_DROP:
    case DKV_WIRE_DONE: return any_object(in, bytes, again, again_bytes, err);
    case DKV_WIRE_CACHE_ADD: return any_cache(in, bytes, again, again_bytes, err);
    case DKV_WIRE_STASH_ADD: return any_stash(in, bytes, again, again_bytes, err);
    case DKV_WIRE_SCORE: return any_score(in, bytes, again, again_bytes, err);
    case DKV_WIRE_SCORE_BLOCKS: return any_blocks(in, bytes, again, again_bytes, err);
    case DKV_WIRE_CANCEL: return any_cancel(in, bytes, again, again_bytes, err);
    case DKV_WIRE_PING:
    case DKV_WIRE_PONG: return any_ping(in, bytes, again, again_bytes, err);
    case DKV_WIRE_RESULT: return any_result(in, bytes, again, again_bytes, err);
    case DKV_WIRE_ERROR: return any_error(in, bytes, again, again_bytes, err);
    default: return dkv_error_set(err, DKV_E_MALFORMED, "type %u", type);
    }
}
