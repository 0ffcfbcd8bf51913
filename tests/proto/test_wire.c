/* The messages: what goes out comes in again, and nothing else does. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/wire_layout.h"
#include "tests/proto/wire_samples.h"

static struct wire_sample sample;
static uint8_t again[DKV_WIRE_PAYLOAD_MAX];
static size_t again_bytes;
static struct dkv_error err;

/* In memory of exactly that size, so that a read past its end shows. */
static enum dkv_status decode(const uint8_t *bytes, size_t n)
{
    uint8_t *exact = malloc(n > 0 ? n : 1);
    assert_non_null(exact);
    memcpy(exact, bytes, n);
    const enum dkv_status status = wire_decode_any(sample.type, exact, n, again, &again_bytes,
                                                   &err);
    free(exact);
    return status;
}

static void layouts_add_up_and_keep_numbers_aligned(void **state)
{
    (void)state;
    for (unsigned i = 0; i < DKV_LAYOUTS; i++) {
        unsigned at = 0;
        for (unsigned f = 0; f < dkv_wire_layouts[i].n_fields; f++) {
            const struct dkv_wire_field *field = &dkv_wire_layouts[i].fields[f];
            if (!field->raw)
                assert_int_equal(at % field->bytes, 0);
            at += field->bytes;
        }
        assert_int_equal(at, dkv_wire_layouts[i].wire_bytes);
    }
}

static void every_message_comes_back_as_it_went(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_WIRE_SAMPLES; i++) {
        wire_sample(i, &sample);
        if (decode(sample.payload, sample.bytes) != DKV_OK)
            fail_msg("sample %u (%s): %s", i, dkv_wire_type_name(sample.type), err.text);
        assert_int_equal(again_bytes, sample.bytes);
        assert_memory_equal(again, sample.payload, sample.bytes);
    }
}

static void every_truncation_of_every_message_is_refused(void **state)
{
    (void)state;
    for (unsigned i = 0; i < N_WIRE_SAMPLES; i++) {
        wire_sample(i, &sample);
        for (size_t n = 0; n < sample.bytes; n++)
            assert_int_equal(decode(sample.payload, n), DKV_E_MALFORMED);
        assert_int_equal(decode(sample.payload, sample.bytes + 1), DKV_E_MALFORMED);
    }
}

/* Whatever one byte becomes, a message is refused or means exactly what it says. */
static void one_wrong_byte_is_refused_or_understood_and_never_lost(void **state)
{
    (void)state;
    static uint8_t changed[DKV_WIRE_PAYLOAD_MAX];
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};

    for (unsigned i = 0; i < N_WIRE_SAMPLES; i++) {
        wire_sample(i, &sample);
        for (size_t at = 0; at < sample.bytes; at++)
            for (unsigned v = 0; v < sizeof(values); v++) {
                memcpy(changed, sample.payload, sample.bytes);
                changed[at] = values[v];
                if (decode(changed, sample.bytes) != DKV_OK)
                    continue;
                assert_int_equal(again_bytes, sample.bytes);
                /* Parameters may come back in another order; nothing else may. */
                if (sample.type != DKV_WIRE_SCORE && sample.type != DKV_WIRE_SCORE_BLOCKS)
                    assert_memory_equal(again, changed, sample.bytes);
            }
    }
}

static void numbers_are_little_endian_and_where_the_document_says(void **state)
{
    (void)state;
    uint8_t bytes[DKV_WIRE_HEADER_BYTES];
    const uint8_t expected[DKV_WIRE_HEADER_BYTES] = {1,    10,   2,    0,    0x78, 0x56, 1,    0,
                                                     0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
                                                     5,    0,    0,    0,    0,    0,    0,    0};
    const struct dkv_wire_header header = {.version = 1,
                                           .type = DKV_WIRE_SCORE,
                                           .n_fds = 2,
                                           .payload_bytes = 0x15678,
                                           .id = UINT64_C(0x1122334455667788),
                                           .bulk_bytes = 5};
    dkv_wire_put_header(bytes, &header);
    assert_memory_equal(bytes, expected, sizeof(expected));
    assert_int_equal(dkv_wire_fixed_bytes(DKV_WIRE_SCORE), 120);
    assert_int_equal(dkv_wire_layouts[DKV_LAYOUT_VIEW].wire_bytes, DKV_WIRE_VIEW_BYTES);
}

/* Reads "| offset | bytes |" rows below "### name (N bytes)". */
static unsigned check_table(FILE *document, const struct dkv_wire_layout *layout)
{
    char line[512];
    unsigned at = 0, f = 0, offset, bytes;

    while (fgets(line, sizeof(line), document) != NULL && line[0] != '#')
        if (sscanf(line, "| %u | %u |", &offset, &bytes) == 2) {
            assert_true(f < layout->n_fields);
            if (offset != at || bytes != layout->fields[f].bytes)
                fail_msg("field at %u: \"%s\"", at, line);
            at += layout->fields[f++].bytes;
        }
    assert_int_equal(f, layout->n_fields);
    if (!feof(document)) /* the next heading */
        fseek(document, -(long)strlen(line), SEEK_CUR);
    return at;
}

static void the_document_has_every_field_where_it_is(void **state)
{
    (void)state;
    static const struct {
        const char *heading;
        enum dkv_wire_layout_id id;
    } tables[] = {
        {"### hello (", DKV_LAYOUT_HELLO},         {"### welcome (", DKV_LAYOUT_WELCOME},
        {"### device (", DKV_LAYOUT_DEVICE},       {"### region_add,", DKV_LAYOUT_REGION},
        {"### chunk (", DKV_LAYOUT_CHUNK},         {"### region_drop,", DKV_LAYOUT_OBJECT},
        {"### cache_add (", DKV_LAYOUT_CACHE},     {"### view (", DKV_LAYOUT_VIEW},
        {"### stash_add (", DKV_LAYOUT_STASH},     {"### score (", DKV_LAYOUT_SCORE},
        {"### score_blocks (", DKV_LAYOUT_BLOCKS}, {"### block (", DKV_LAYOUT_BLOCK},
        {"### cancel (", DKV_LAYOUT_CANCEL},       {"### ping, pong", DKV_LAYOUT_PING},
        {"### result (", DKV_LAYOUT_RESULT},       {"### result_block (", DKV_LAYOUT_RESULT_BLOCK},
        {"### error (", DKV_LAYOUT_ERROR},
    };
    const unsigned n_tables = sizeof(tables) / sizeof(tables[0]);
    FILE *document = fopen(DKV_PROTOCOL_MD, "r");
    char line[512];
    unsigned found = 0, bytes;

    assert_non_null(document);
    assert_int_equal(n_tables, DKV_LAYOUTS - 1); /* the header is drawn */
    while (fgets(line, sizeof(line), document) != NULL)
        for (unsigned i = 0; i < n_tables; i++)
            if (strncmp(line, tables[i].heading, strlen(tables[i].heading)) == 0) {
                assert_int_equal(sscanf(strchr(line, '('), "(%u bytes)", &bytes), 1);
                assert_int_equal(check_table(document, &dkv_wire_layouts[tables[i].id]), bytes);
                found++;
                break;
            }
    fclose(document);
    assert_int_equal(found, n_tables);
}

static enum dkv_status header_status(struct dkv_wire_header header, enum dkv_wire_sender sender)
{
    uint8_t bytes[DKV_WIRE_HEADER_BYTES];
    dkv_wire_put_header(bytes, &header);
    return dkv_wire_get_header(bytes, sender, &header, &err);
}

static void a_header_is_judged_before_anything_else_is_read(void **state)
{
    (void)state;
    const struct dkv_wire_header good = {
        .version = 1, .type = DKV_WIRE_PING, .payload_bytes = 8, .id = 1};
    struct dkv_wire_header h = good;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_OK);
    assert_int_equal(header_status(h, DKV_WIRE_FROM_DAEMON), DKV_E_MALFORMED);
    h.version = 2;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_UNSUPPORTED);
    for (unsigned type = 0; type < 256; type++) {
        h = good;
        h.type = (uint8_t)type;
        h.payload_bytes = 1000;
        const bool ours = type >= DKV_WIRE_HELLO && type <= DKV_WIRE_PING;
        assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), ours ? DKV_OK : DKV_E_MALFORMED);
    }
    h = good;
    h.payload_bytes = 7;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_MALFORMED);
    h.payload_bytes = DKV_WIRE_PAYLOAD_MAX + 1;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_MALFORMED);
    h = good;
    h.n_fds = 1;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_MALFORMED);
    h = good;
    h.bulk_bytes = 1;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_MALFORMED);
    h = good;
    h.id = 0;
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_MALFORMED);
    h = (struct dkv_wire_header){.version = 1,
                                 .type = DKV_WIRE_REGION_ADD,
                                 .n_fds = DKV_WIRE_FDS_MAX + 1,
                                 .payload_bytes = 112,
                                 .id = 1};
    assert_int_equal(header_status(h, DKV_WIRE_FROM_CLIENT), DKV_E_MALFORMED);
}

/* --- what each type refuses ---------------------------------------------------------------- */

static enum dkv_status region_status(struct dkv_wire_region m, const struct dkv_wire_chunk *chunks)
{
    uint8_t bytes[112 + 4 * DKV_WIRE_CHUNK_BYTES];
    size_t n = dkv_wire_put_region(bytes, &m);
    for (uint16_t i = 0; i < m.n_chunks; i++)
        n += dkv_wire_put_chunk(bytes + n, &chunks[i]);
    return dkv_wire_get_region(bytes, n, &m, &err);
}

static void a_region_has_the_fields_of_its_kind_and_no_others(void **state)
{
    (void)state;
    const struct dkv_wire_region memfd = {.kind = DKV_WIRE_REGION_MEMFD, .bytes = 100};
    struct dkv_wire_region m = memfd;
    assert_int_equal(region_status(m, NULL), DKV_OK);
    m.device_uuid[0] = 1;
    assert_int_equal(region_status(m, NULL), DKV_E_MALFORMED);
    m = memfd;
    m.handle[63] = 1;
    assert_int_equal(region_status(m, NULL), DKV_E_MALFORMED);
    m = memfd;
    m.bytes = 0;
    assert_int_equal(region_status(m, NULL), DKV_E_MALFORMED);
    m = memfd;
    m.offset = UINT64_MAX - 50;
    assert_int_equal(region_status(m, NULL), DKV_E_MALFORMED);
    m = memfd;
    m.kind = DKV_WIRE_REGION_CUDA_LEGACY;
    m.device_uuid[0] = 1;
    assert_int_equal(region_status(m, NULL), DKV_E_MALFORMED); /* no handle */
    m.handle[0] = 1;
    assert_int_equal(region_status(m, NULL), DKV_OK);
}

static void chunks_neither_overlap_nor_wrap_and_cover_the_end(void **state)
{
    (void)state;
    struct dkv_wire_region m = {
        .kind = DKV_WIRE_REGION_CUDA_VMM, .bytes = 100, .n_chunks = 2, .device_uuid = {1}};
    struct dkv_wire_chunk chunks[2] = {{0, 50}, {50, 50}};
    assert_int_equal(region_status(m, chunks), DKV_OK);
    chunks[1] = (struct dkv_wire_chunk){49, 60};
    assert_int_equal(region_status(m, chunks), DKV_E_MALFORMED);
    chunks[1] = (struct dkv_wire_chunk){60, 50};
    assert_int_equal(region_status(m, chunks), DKV_OK); /* a hole is not readable, but allowed */
    chunks[1].bytes = 0;
    assert_int_equal(region_status(m, chunks), DKV_E_MALFORMED);
    chunks[1].bytes = UINT64_MAX - 59;
    assert_int_equal(region_status(m, chunks), DKV_E_MALFORMED);
    chunks[1] = (struct dkv_wire_chunk){50, 49};
    assert_int_equal(region_status(m, chunks), DKV_E_MALFORMED);
    m.n_chunks = 0;
    assert_int_equal(region_status(m, chunks), DKV_E_MALFORMED);
}

static void claimed_and_passed_descriptors_have_to_agree(void **state)
{
    (void)state;
    const struct dkv_wire_region memfd = {.kind = DKV_WIRE_REGION_MEMFD},
                                 legacy = {.kind = DKV_WIRE_REGION_CUDA_LEGACY},
                                 vmm = {.kind = DKV_WIRE_REGION_CUDA_VMM, .n_chunks = 3};
    assert_int_equal(dkv_wire_check_region_fds(&memfd, 1, &err), DKV_OK);
    assert_int_equal(dkv_wire_check_region_fds(&memfd, 0, &err), DKV_E_MALFORMED);
    assert_int_equal(dkv_wire_check_region_fds(&memfd, 2, &err), DKV_E_MALFORMED);
    assert_int_equal(dkv_wire_check_region_fds(&legacy, 0, &err), DKV_OK);
    assert_int_equal(dkv_wire_check_region_fds(&legacy, 1, &err), DKV_E_MALFORMED);
    assert_int_equal(dkv_wire_check_region_fds(&vmm, 3, &err), DKV_OK);
    assert_int_equal(dkv_wire_check_region_fds(&vmm, 2, &err), DKV_E_MALFORMED);
}

static enum dkv_status score_status(struct dkv_wire_score m)
{
    uint8_t bytes[120];
    const size_t n = dkv_wire_put_score(bytes, &m);
    return dkv_wire_get_score(bytes, n, &m, &err);
}

static void a_score_says_each_thing_in_one_way(void **state)
{
    (void)state;
    const struct dkv_wire_score good = {.cache = 1, .stash = 2, .n_layers = 4, .n_tokens = 100};
    struct dkv_wire_score m = good;
    assert_int_equal(score_status(m), DKV_OK);
    m.table_entries = 1; /* of no table */
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
    m = good;
    m.table_kind = DKV_WIRE_TABLE_BULK;
    m.table_entries = 7;
    m.entry_bytes = 4;
    assert_int_equal(score_status(m), DKV_OK);
    assert_int_equal(dkv_wire_score_bulk_bytes(&m), 28);
    m.table_region = 3;
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
    m = good;
    m.fence.value = 1; /* no region */
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
    m.fence = (struct dkv_wire_fence){1, 4, 1};
    assert_int_equal(score_status(m), DKV_E_MALFORMED); /* not at a multiple of 8 */
    m = good;
    m.output = (struct dkv_wire_output){1, UINT64_MAX, 2};
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
    m = good;
    m.first_layer = DKV_WIRE_LAYERS_MAX - 3;
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
    m = good;
    m.flags = 8;
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
    m = good;
    m.params_bytes = 8; /* which are not there */
    assert_int_equal(score_status(m), DKV_E_MALFORMED);
}

static void counts_that_would_overflow_do_not(void **state)
{
    (void)state;
    struct dkv_wire_cache cache = {.kv_heads = UINT32_MAX,
                                   .q_heads = UINT32_MAX,
                                   .n_layers = DKV_WIRE_LAYERS_MAX,
                                   .scales = 1,
                                   .has_sinks = 1};
    assert_true(dkv_wire_cache_bulk_bytes(&cache) == UINT64_C(3) * UINT32_MAX * 4096);
    struct dkv_wire_score score = {
        .table_kind = DKV_WIRE_TABLE_BULK, .table_entries = UINT32_MAX, .entry_bytes = 8};
    assert_true(dkv_wire_score_bulk_bytes(&score) == UINT64_C(8) * UINT32_MAX);
    struct dkv_wire_result result = {.n_blocks = UINT32_MAX};
    uint8_t bytes[24];
    dkv_wire_put_result(bytes, &result);
    assert_int_equal(dkv_wire_get_result(bytes, sizeof(bytes), &result, &err), DKV_E_MALFORMED);
}

static void an_errors_text_is_printable_or_refused(void **state)
{
    (void)state;
    struct dkv_wire_error m = {.status = DKV_E_BUSY, .text_bytes = 3};
    uint8_t bytes[19];
    dkv_wire_put_error(bytes, &m);
    memcpy(bytes + 16, "a\x1b[", 3);
    assert_int_equal(dkv_wire_get_error(bytes, 19, &m, &err), DKV_E_MALFORMED);
    memcpy(bytes + 16, "abc", 3);
    assert_int_equal(dkv_wire_get_error(bytes, 19, &m, &err), DKV_OK);
    assert_memory_equal(m.text, "abc", 3);
}

/* --- parameters ---------------------------------------------------------------------------- */

static void every_parameter_travels_with_its_value(void **state)
{
    (void)state;
    static const char *const texts[][2] = {
        {"profile", "kvpress"},
        {"policy", "dropkv"},
        {"window", "32"},
        {"pool", "avg"},
        {"kernel", "7"},
        {"pool_scope", "prefix"},
        {"eps", "1e-6"},
        {"p_round", "input"},
        {"gqa", "max"},
        {"sinks", "4"},
        {"recent", "64"},
        {"keep_ratio", "0.3"},
        {"total_tokens", "4096"},
        {"max_keep_tokens", "99"},
        {"on_conflict", "budget"},
        {"scale", "0.0883883"},
        {"logit_softcap", "30"},
        {"nonfinite", "mask"},
        {"layer", "31"},
        {"stream", "tenant-7"},
        {"priority", "2"},
        {"timeout", "250000"},
        {"on_overload", "recency"},
        {"compression_ratio", "0.5"},
        {"keep_tokens", "7"},
        {"reduce", "mean"},
        {"ema_alpha", "0.25"},
        {"gamma", "150.5"},
        {"anchor", "plain"},
        {"seed", "99"},
        {"heads", "adakv_mix"},
        {"alpha", "0.3"},
        {"layers", "fixed"},
        {"beta", "10"},
        {"tau1", "1.6"},
        {"tau2", "0.4"},
        {"n_layers", "32"},
        {"per_layer", "100,200,300"},
        {"per_head", "1,22,333,4444"},
        {"min_keep", "3"},
        {"counts_protected", "false"},
        {"granularity", "16"},
        {"traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
    };
    assert_int_equal(sizeof(texts) / sizeof(texts[0]), DKV_PARAM_COUNT);
    struct dkv_params sent, received;
    uint8_t bytes[DKV_WIRE_PARAMS_MAX];
    dkv_params_init(&sent);
    dkv_params_init(&received);
    for (unsigned i = 0; i < DKV_PARAM_COUNT; i++)
        if (dkv_params_set_text(&sent, texts[i][0], texts[i][1], &err) != DKV_OK)
            fail_msg("%s", err.text);
    const size_t n = dkv_wire_put_params(bytes, &sent);
    assert_true(n % 8 == 0);
    assert_int_equal(dkv_wire_get_params(bytes, n, &received, &err), DKV_OK);
    assert_true(received.set == sent.set);
    for (unsigned i = 0; i < DKV_PARAM_COUNT; i++) {
        const struct dkv_value a = dkv_params_get(&sent, (enum dkv_param_id)i),
                               b = dkv_params_get(&received, (enum dkv_param_id)i);
        assert_int_equal(a.kind, b.kind);
        assert_true(a.integer == b.integer && memcmp(&a.real, &b.real, sizeof(a.real)) == 0);
        if (a.kind == DKV_VALUE_STRING)
            assert_string_equal(a.string, b.string);
    }
}

/* These numbers are in messages of programs that are already out there. */
static void parameter_numbers_never_change(void **state)
{
    (void)state;
    static const char *const names[] = {
        "profile",
        "policy",
        "window",
        "pool",
        "kernel",
        "pool_scope",
        "eps",
        "p_round",
        "gqa",
        "sinks",
        "recent",
        "keep_ratio",
        "compression_ratio",
        "keep_tokens",
        "total_tokens",
        "max_keep_tokens",
        "on_conflict",
        "scale",
        "logit_softcap",
        "nonfinite",
        "layer",
        "stream",
        "priority",
        "timeout",
        "on_overload",
        "reduce",
        "ema_alpha",
        "gamma",
        "anchor",
        "seed",
        "heads",
        "alpha",
        "layers",
        "beta",
        "tau1",
        "tau2",
        "n_layers",
        "per_layer",
        "per_head",
        "min_keep",
        "counts_protected",
        "granularity",
        "traceparent",
    };
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        assert_string_equal(dkv_param_info((enum dkv_param_id)i)->name, names[i]);
}

static enum dkv_status params_status(const uint8_t *bytes, size_t n)
{
    struct dkv_params params;
    dkv_params_init(&params);
    return dkv_wire_get_params(bytes, n, &params, &err);
}

static void broken_parameters_are_told_from_wrong_ones(void **state)
{
    (void)state;
    uint8_t window[16] = {DKV_PARAM_WINDOW, DKV_VALUE_INT, 8, 0, 0, 0, 0, 0, 16};
    assert_int_equal(params_status(window, 16), DKV_OK);
    assert_int_equal(params_status(window, 15), DKV_E_MALFORMED);
    assert_int_equal(params_status(window, 8), DKV_E_MALFORMED);
    uint8_t twice[32];
    memcpy(twice, window, 16);
    memcpy(twice + 16, window, 16);
    assert_int_equal(params_status(twice, 32), DKV_E_INVALID);
    window[1] = DKV_VALUE_REAL;
    assert_int_equal(params_status(window, 16), DKV_E_INVALID); /* a window is a whole number */
    window[1] = 9;
    assert_int_equal(params_status(window, 16), DKV_E_MALFORMED);
    window[1] = DKV_VALUE_INT;
    window[0] = DKV_PARAM_COUNT;
    assert_int_equal(params_status(window, 16), DKV_E_UNSUPPORTED);
    uint8_t pool[16] = {DKV_PARAM_POOL, DKV_VALUE_STRING, 3, 0, 0, 0, 0, 0, 'm', 'a', 'x'};
    assert_int_equal(params_status(pool, 16), DKV_OK);
    pool[12] = 'x'; /* in the padding */
    assert_int_equal(params_status(pool, 16), DKV_E_MALFORMED);
    pool[12] = 0;
    pool[9] = 0; /* a zero byte in the word */
    assert_int_equal(params_status(pool, 16), DKV_E_MALFORMED);
    pool[9] = 'i';
    assert_int_equal(params_status(pool, 16), DKV_E_INVALID);
    assert_non_null(strstr(err.text, "pool"));
    pool[2] = 255;
    assert_int_equal(params_status(pool, 16), DKV_E_MALFORMED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_add_up_and_keep_numbers_aligned),
        cmocka_unit_test(every_message_comes_back_as_it_went),
        cmocka_unit_test(every_truncation_of_every_message_is_refused),
        cmocka_unit_test(one_wrong_byte_is_refused_or_understood_and_never_lost),
        cmocka_unit_test(numbers_are_little_endian_and_where_the_document_says),
        cmocka_unit_test(the_document_has_every_field_where_it_is),
        cmocka_unit_test(a_header_is_judged_before_anything_else_is_read),
        cmocka_unit_test(a_region_has_the_fields_of_its_kind_and_no_others),
        cmocka_unit_test(chunks_neither_overlap_nor_wrap_and_cover_the_end),
        cmocka_unit_test(claimed_and_passed_descriptors_have_to_agree),
        cmocka_unit_test(a_score_says_each_thing_in_one_way),
        cmocka_unit_test(counts_that_would_overflow_do_not),
        cmocka_unit_test(an_errors_text_is_printable_or_refused),
        cmocka_unit_test(every_parameter_travels_with_its_value),
        cmocka_unit_test(parameter_numbers_never_change),
        cmocka_unit_test(broken_parameters_are_told_from_wrong_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
