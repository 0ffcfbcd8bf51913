/* Every allocation of the JSON library fails in turn, once and from then on: each call of the codec
 * answers NOMEM (or does without), leaves its output alone, leaks nothing and works the next time.
 * Parsers may also answer MALFORMED, because jansson's lexer calls a failed allocation a bad token.
 */
#include "proto/oip.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

static struct {
    long until_failure; /* allocations that still succeed; negative: all do */
    bool sticky;        /* later ones fail too */
    long live;          /* allocated and not yet freed */
} heap;

static void *failing_malloc(size_t size)
{
    if (heap.until_failure == 0) {
        if (!heap.sticky)
            heap.until_failure = -1;
        return NULL;
    }
    if (heap.until_failure > 0)
        heap.until_failure--;
    void *p = malloc(size);
    heap.live += p != NULL;
    return p;
}

static void counting_free(void *p)
{
    heap.live -= p != NULL;
    free(p);
}

/* Texts are given back with free(): they leave the count. */
static void drop(struct dkv_oip_text *text)
{
    heap.live -= text->bytes != NULL;
    dkv_oip_text_fini(text);
}

static const struct dkv_oip_facts facts = {.version = "1",
                                           .backend = "cpu",
                                           .device = "d",
                                           .dtype = DKV_FP32,
                                           .max_blocks = 1,
                                           .shm = true};

static enum dkv_status do_server_metadata(void)
{
    struct dkv_oip_text text = {0};
    const enum dkv_status status = dkv_oip_server_metadata(&facts, &text);
    drop(&text);
    return status;
}

static enum dkv_status do_model_metadata(void)
{
    struct dkv_oip_text text = {0};
    const enum dkv_status status = dkv_oip_model_metadata(&facts, &text);
    drop(&text);
    return status;
}

static enum dkv_status do_model_config(void)
{
    struct dkv_oip_text text = {0};
    const enum dkv_status status = dkv_oip_model_config(&facts, &text);
    drop(&text);
    return status;
}

static enum dkv_status do_model_stats(void)
{
    static const struct dkv_oip_batch_stats batch = {.batch_size = 1};
    const struct dkv_oip_stats stats = {.batches = &batch, .n_batches = 1};
    struct dkv_oip_text text = {0};
    const enum dkv_status status = dkv_oip_model_stats(&stats, &text);
    drop(&text);
    return status;
}

static const char head[] =
    "{\"id\":\"1\",\"parameters\":{\"window\":4},\"inputs\":["
    "{\"name\":\"query\",\"shape\":[1,1,1,8],\"datatype\":\"FP32\",\"data\":[1,2,3,4,5,6,7,8]},"
    "{\"name\":\"key\",\"shape\":[1,1,1,8],\"datatype\":\"FP32\",\"data\":[1,2,3,4,5,6,7,8]},"
    "{\"name\":\"value\",\"shape\":[1,1,1,8],\"datatype\":\"FP32\",\"data\":[1,2,3,4,5,6,7,8]}]}";

static enum dkv_status do_infer_parse(void)
{
    struct dkv_oip_infer infer = {0};
    struct dkv_error err;
    const enum dkv_status status = dkv_oip_infer_parse(head, sizeof(head) - 1, 0, &infer, &err);
    dkv_oip_infer_fini(&infer);
    return status;
}

static enum dkv_status do_call_encode(void)
{
    static float numbers[8];
    static struct dkv_block block;
    struct dkv_request request = {.blocks = &block, .n_blocks = 1, .want_scores = true};
    struct dkv_oip_call call = {0};
    struct dkv_error err;

    block = (struct dkv_block){.q_heads = 1,
                               .kv_heads = 1,
                               .head_dim = 8,
                               .q_rows = 1,
                               .n_tokens = 1,
                               .sink_logits = numbers};
    block.query = block.key = block.value = dkv_view_dense(numbers, sizeof(numbers), DKV_FP32, 1,
                                                           8);
    dkv_params_init(&request.params);
    dkv_params_set_text(&request.params, "keep_ratio", "0.5", NULL);
    dkv_params_resolve(&request.params);
    const enum dkv_status status = dkv_oip_call_encode(&request, "id", &call, &err);
    drop(&call.head);
    return status;
}

static enum dkv_status do_answer_parse(void)
{
    static const char json[] =
        "{\"id\":\"7\",\"outputs\":[{\"name\":\"keep_indices\",\"datatype\":\"INT32\","
        "\"shape\":[1,1,3],\"parameters\":{\"binary_data_size\":12}}]}";
    struct dkv_oip_answer answer;
    return dkv_oip_answer_parse(json, sizeof(json) - 1, 12, &answer, NULL);
}

static enum dkv_status do_error_parse(void)
{
    struct dkv_error err;
    return dkv_oip_error_parse(503, "{\"error\":\"x\"}", 13, &err) == DKV_E_BUSY ? DKV_OK
                                                                                 : DKV_E_INTERNAL;
}

static void fail_every_allocation(enum dkv_status (*call)(void), enum dkv_status also_allowed)
{
    for (int sticky = 0; sticky < 2; sticky++)
        for (long n = 0;; n++) {
            heap.until_failure = n;
            heap.sticky = sticky;
            heap.live = 0;
            const enum dkv_status status = call();
            const bool reached = sticky ? heap.until_failure == 0 : heap.until_failure < 0;
            heap.until_failure = -1;
            if (status != DKV_OK && status != DKV_E_NOMEM && status != also_allowed)
                fail_msg("allocation %ld fails: status %d", n, status);
            if (heap.live != 0)
                fail_msg("allocation %ld fails: %ld blocks leaked", n, heap.live);
            assert_int_equal(call(), DKV_OK);
            if (!reached)
                break;
            assert_true(n < 10000);
        }
}

static void every_document_survives_any_allocation_failing(void **state)
{
    (void)state;
    fail_every_allocation(do_server_metadata, DKV_E_NOMEM);
    fail_every_allocation(do_model_metadata, DKV_E_NOMEM);
    fail_every_allocation(do_model_config, DKV_E_NOMEM);
    fail_every_allocation(do_model_stats, DKV_E_NOMEM);
}

static void every_parser_survives_any_allocation_failing(void **state)
{
    (void)state;
    fail_every_allocation(do_infer_parse, DKV_E_MALFORMED);
    fail_every_allocation(do_answer_parse, DKV_E_MALFORMED);
    fail_every_allocation(do_error_parse, DKV_E_MALFORMED);
}

static void the_clients_encoder_survives_any_allocation_failing(void **state)
{
    (void)state;
    fail_every_allocation(do_call_encode, DKV_E_NOMEM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_document_survives_any_allocation_failing),
        cmocka_unit_test(every_parser_survives_any_allocation_failing),
        cmocka_unit_test(the_clients_encoder_survives_any_allocation_failing),
    };
    json_set_alloc_funcs(failing_malloc, counting_free);
    heap.until_failure = -1;
    dkv_oip_init();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
