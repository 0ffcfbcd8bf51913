/* Requests from the client's encoder to the server's parser and back: what arrives is what was
 * sent.
 */
#include "proto/oip.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define B     2u
#define HQ    4u
#define HKV   2u
#define LQ    3u
#define N     11u
#define D     16u
#define DV    8u
#define ELEM  2u /* bytes of bf16 */
#define POOL  (1u << 16)
#define TOTAL (ELEM * B * (HQ * LQ * D + HKV * N * D + HKV * N * DV))

static unsigned char pool[POOL];
static struct dkv_block blocks[B];
static struct dkv_request request;
static struct dkv_error err;

static struct dkv_view strided(size_t start, uint64_t token_stride, uint64_t head_stride)
{
    return (struct dkv_view){.base = pool,
                             .bytes = POOL,
                             .offset = start,
                             .token_stride = (int64_t)token_stride,
                             .head_stride = (int64_t)head_stride,
                             .dtype = DKV_BF16};
}

/* Queries dense; keys NHD with a gap; values with rows together but heads apart. */
static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < POOL; i++)
        pool[i] = (unsigned char)(i * 131 + i / 251);
    memset(blocks, 0, sizeof(blocks));
    for (uint32_t b = 0; b < B; b++) {
        const size_t start = b * 20000u;
        blocks[b] = (struct dkv_block){.q_heads = HQ,
                                       .kv_heads = HKV,
                                       .head_dim = D,
                                       .v_dim = DV,
                                       .q_rows = LQ,
                                       .n_tokens = N,
                                       .query = strided(start, D * ELEM, LQ * D * ELEM),
                                       .key = strided(start + 5001, 2 * 48, 48),
                                       .value = strided(start + 10000, DV * ELEM, 1000)};
    }
    request = (struct dkv_request){.blocks = blocks, .n_blocks = B, .want_scores = true};
    dkv_params_init(&request.params);
    assert_int_equal(dkv_params_set_text(&request.params, "window", "2", NULL), DKV_OK);
    assert_int_equal(dkv_params_set_text(&request.params, "keep_ratio", "0.3", NULL), DKV_OK);
    assert_int_equal(dkv_params_set_text(&request.params, "stream", "s:1", NULL), DKV_OK);
    dkv_params_resolve(&request.params);
    return 0;
}

static void encode(struct dkv_oip_call *call, const char *id)
{
    struct dkv_plan plans[B];
    if (dkv_request_validate(&request, plans, &err) != DKV_OK ||
        dkv_oip_call_encode(&request, id, call, &err) != DKV_OK)
        fail_msg("%s", err.text);
}

static const unsigned char *row_of(const struct dkv_view *v, uint64_t h, uint64_t t)
{
    return (const unsigned char *)v->base + v->offset + h * (uint64_t)v->head_stride +
           t * (uint64_t)v->token_stride;
}

static void assert_same_tensor(const struct dkv_view *a, const struct dkv_view *b, uint64_t heads,
                               uint64_t tokens, uint64_t dim)
{
    assert_int_equal(a->dtype, b->dtype);
    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t t = 0; t < tokens; t++)
            assert_memory_equal(row_of(a, h, t), row_of(b, h, t), dim * dkv_dtype_bytes(a->dtype));
}

static void what_the_client_sends_is_what_the_server_reads(void **state)
{
    struct dkv_oip_call call;
    struct dkv_oip_infer infer;
    struct dkv_block got[B];
    struct dkv_request bound;
    struct dkv_plan plans[B];
    unsigned char *body;
    (void)state;

    encode(&call, "call \"7\"");
    assert_int_equal(call.binary_bytes, TOTAL);
    body = malloc(TOTAL);
    assert_int_equal(dkv_oip_call_read(&call, 0, body, TOTAL), TOTAL);
    if (dkv_oip_infer_parse(call.head.bytes, call.head.n_bytes, TOTAL, &infer, &err) != DKV_OK)
        fail_msg("%s\n%s", err.text, call.head.bytes);
    const struct dkv_oip_memory memory = {.binary = body};
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, got, &bound, &err), DKV_OK);
    assert_int_equal(dkv_request_validate(&bound, plans, &err), DKV_OK);

    assert_string_equal(infer.id, "call \"7\"");
    assert_memory_equal(&bound.params, &request.params, sizeof(bound.params));
    assert_true(bound.want_scores);
    assert_true(infer.outputs[DKV_OIP_KEEP_INDICES].binary);
    for (uint32_t b = 0; b < B; b++) {
        assert_same_tensor(&got[b].query, &blocks[b].query, HQ, LQ, D);
        assert_same_tensor(&got[b].key, &blocks[b].key, HKV, N, D);
        assert_same_tensor(&got[b].value, &blocks[b].value, HKV, N, DV);
    }
    free(body);
    dkv_oip_infer_fini(&infer);
    dkv_oip_call_fini(&call);
}

static void any_chunks_give_the_same_bytes(void **state)
{
    static const size_t chunks[] = {1, 7, 32, 33, 1000, TOTAL + 5};
    unsigned char *whole = malloc(TOTAL), *pieces = malloc(TOTAL);
    struct dkv_oip_call call;
    (void)state;
    encode(&call, NULL);
    assert_int_equal(dkv_oip_call_read(&call, 0, whole, TOTAL + 100), TOTAL);
    for (size_t c = 0; c < sizeof(chunks) / sizeof(chunks[0]); c++) {
        memset(pieces, 0, TOTAL);
        for (uint64_t at = 0; at < TOTAL;) {
            const size_t room = TOTAL - at < chunks[c] ? TOTAL - at : chunks[c];
            assert_int_equal(dkv_oip_call_read(&call, at, pieces + at, room), room);
            at += room;
        }
        assert_memory_equal(pieces, whole, TOTAL);
    }
    assert_int_equal(dkv_oip_call_read(&call, TOTAL, pieces, 10), 0);
    assert_int_equal(dkv_oip_call_read(&call, UINT64_MAX - 5, pieces, 10), 0);
    dkv_oip_call_fini(&call);
    free(whole);
    free(pieces);
}

static void every_parameter_survives_the_way(void **state)
{
    static const struct {
        const char *name, *text;
    } values[] = {
        {"profile", "kvpress"},
        {"pool", "max"},
        {"kernel", "5"},
        {"pool_scope", "prefix"},
        {"eps", "0.30000000000000004"},
        {"p_round", "none"},
        {"gqa", "sum"},
        {"sinks", "4"},
        {"recent", "1"},
        {"total_tokens", "999999"},
        {"max_keep_tokens", "10"},
        {"on_conflict", "budget"},
        {"scale", "0.1"},
        {"logit_softcap", "30"},
        {"nonfinite", "mask"},
        {"layer", "31"},
        {"priority", "1"},
        {"timeout", "9007199254740992"},
    };
    struct dkv_oip_call call;
    struct dkv_oip_infer infer;
    (void)state;
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++)
        assert_int_equal(dkv_params_set_text(&request.params, values[i].name, values[i].text, &err),
                         DKV_OK);
    dkv_params_resolve(&request.params);
    encode(&call, NULL);
    assert_int_equal(dkv_oip_infer_parse(call.head.bytes, call.head.n_bytes, TOTAL, &infer, &err),
                     DKV_OK);
    assert_memory_equal(&infer.params, &request.params, sizeof(infer.params));
    dkv_oip_infer_fini(&infer);
    dkv_oip_call_fini(&call);
}

static void fp8_scales_and_sinks_survive_the_way(void **state)
{
    static const float sinks[HQ] = {0.5f, -1, 2, 3}, key_scales[HKV] = {0.25f, 3};
    struct dkv_oip_call call;
    struct dkv_oip_infer infer;
    struct dkv_block got[B];
    struct dkv_request bound;
    unsigned char *body;
    (void)state;
    for (uint32_t b = 0; b < B; b++) {
        blocks[b].key.dtype = blocks[b].value.dtype = DKV_F8_E4M3;
        blocks[b].key.head_scales = key_scales;
        blocks[b].value.scale = 0.1f;
        blocks[b].sink_logits = sinks;
    }
    encode(&call, NULL);
    body = malloc(call.binary_bytes);
    assert_int_equal(dkv_oip_call_read(&call, 0, body, call.binary_bytes), call.binary_bytes);
    assert_int_equal(
        dkv_oip_infer_parse(call.head.bytes, call.head.n_bytes, call.binary_bytes, &infer, &err),
        DKV_OK);
    const struct dkv_oip_memory memory = {.binary = body,
                                          .side = aligned_alloc(64, infer.side_bytes)};
    assert_int_equal(dkv_oip_infer_bind(&infer, &memory, got, &bound, &err), DKV_OK);
    for (uint32_t b = 0; b < B; b++) {
        assert_same_tensor(&got[b].key, &blocks[b].key, HKV, N, D);
        assert_memory_equal(got[b].sink_logits, sinks, sizeof(sinks));
        assert_memory_equal(got[b].key.head_scales, key_scales, sizeof(key_scales));
        assert_true(got[b].value.scale == 0.1f);
    }
    free(memory.side);
    free(body);
    dkv_oip_infer_fini(&infer);
    dkv_oip_call_fini(&call);
}

static void assert_unsupported(const char *says)
{
    struct dkv_oip_call call;
    assert_int_equal(dkv_oip_call_encode(&request, NULL, &call, &err), DKV_E_UNSUPPORTED);
    if (strstr(err.text, says) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, says);
}

static void what_has_no_form_is_refused_before_sending(void **state)
{
    (void)state;
    blocks[1].page_tokens = 16;
    assert_unsupported("paged");
    setup(NULL);
    blocks[0].valid_from = 1;
    assert_unsupported("valid_from");
    setup(NULL);
    blocks[1].n_tokens--;
    assert_unsupported("one shape");
    setup(NULL);
    blocks[1].key.place = DKV_PLACE_DEVICE;
    assert_unsupported("host memory");
}

static void an_id_is_printable_ascii_of_bounded_length(void **state)
{
    static const char *const bad[] = {"\xff", "a\nb", "\x7f"};
    char id[DKV_OIP_ID_BYTES_MAX + 2];
    struct dkv_oip_call call;
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(dkv_oip_call_encode(&request, bad[i], &call, &err), DKV_E_INVALID);
    memset(id, 'i', sizeof(id));
    id[DKV_OIP_ID_BYTES_MAX + 1] = '\0';
    assert_int_equal(dkv_oip_call_encode(&request, id, &call, &err), DKV_E_INVALID);
    id[DKV_OIP_ID_BYTES_MAX] = '\0';
    assert_int_equal(dkv_oip_call_encode(&request, id, &call, &err), DKV_OK);
    dkv_oip_call_fini(&call);
}

#define TEST(name) cmocka_unit_test_setup(name, setup)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(what_the_client_sends_is_what_the_server_reads),
        TEST(any_chunks_give_the_same_bytes),
        TEST(every_parameter_survives_the_way),
        TEST(fp8_scales_and_sinks_survive_the_way),
        TEST(what_has_no_form_is_refused_before_sending),
        TEST(an_id_is_printable_ascii_of_bounded_length),
    };
    dkv_oip_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
