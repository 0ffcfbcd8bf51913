/* Answers to prompts of registered caches through the library's calls: layer by layer those of
 * plain requests to the engine in this process.
 *
 * usage: test_client_cache DROPKVD
 */
#include "client/cli/synth.h"
#include "tests/client/cache_world.h"

static void a_prompt_has_the_answers_of_its_layers(void **unused)
{
    struct world world = open_world();
    (void)unused;
    for (int scores = 0; scores < 2; scores++)
        for (int first = 0; first < LAYERS; first++)
            for (int n = 0; n <= LAYERS - first; n++) {
                struct dropkv_prompt prompt = make_prompt(&world);
                prompt.first_layer = (uint32_t)first;
                prompt.n_layers = (uint32_t)n;
                prompt.want_scores = scores;
                struct dropkv_result *result = ask(&world, &prompt);
                assert_layers(result, first, n == 0 ? LAYERS - first : n, NULL);
                assert_int_equal(result->scores != NULL, scores);
                assert_true(result->backend[0] != '\0');
                dropkv_result_free(result);
            }
    close_world(&world);
}

static void pages_are_found_by_a_table_of_either_kind(void **unused)
{
    struct world world = open_world();
    struct dropkv_layer where[LAYERS];
    struct dropkv_cache_layout layout = base_layout();
    const struct paged *at = NULL;
    (void)unused;
    const size_t tables_at = sizeof(struct paged);
    world.more = dkv_test_buffer(world.client, tables_at + PAGES * sizeof(int64_t), false);
    fill_pages(dropkv_buffer_data(world.more));
    int64_t *shared = (int64_t *)(void *)((char *)dropkv_buffer_data(world.more) + tables_at);
    int32_t table[PAGES];
    for (uint32_t i = 0; i < PAGES; i++) {
        shared[i] = place_of_page(i);
        table[i] = (int32_t)place_of_page(i) | 1 << 30; /* a flag that the mask takes away */
    }
    for (int l = 0; l < LAYERS; l++) {
        where[l].key = (struct dropkv_view){.buffer = world.more,
                                            .offset = offsetof(struct paged, page[l]),
                                            .dtype = DROPKV_FP32,
                                            .page_stride = sizeof(at->page[0][0]),
                                            .token_stride = KV_HEADS * DIM * sizeof(float),
                                            .head_stride = DIM * sizeof(float)};
        where[l].value = where[l].key;
        where[l].value.offset += sizeof(at->page[0][0][0]);
    }
    layout.page_tokens = PAGE;
    struct dropkv_cache *paged = add_cache(&world, &layout, where);
    struct dropkv_prompt prompt = make_prompt(&world);
    prompt.cache = paged;
    prompt.want_scores = 1;
    prompt.table_entries = PAGES;
    prompt.table = table;
    prompt.table_entry_bytes = 4;
    prompt.table_mask = (1 << 30) - 1;
    struct dropkv_result *result = ask(&world, &prompt);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    prompt.table = NULL;
    prompt.table_buffer = world.more;
    prompt.table_offset = tables_at;
    prompt.table_entry_bytes = 8;
    result = ask(&world, &prompt);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    shared[3] = 2 * PAGES; /* one page too far */
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "table");
    close_world(&world);
}

static void what_policies_take_is_each_layers_own(void **unused)
{
    static float tokens[LAYERS][KV_HEADS][TOKENS], metric[LAYERS][Q_HEADS][DIM][DIM];
    static const char *const policies[] = {"criticalkv", "h2o", "external", "restkv"};
    struct world world = open_world();
    (void)unused;
    dkv_test_fill(tokens, sizeof(tokens), 21);
    dkv_test_fill(metric, sizeof(metric), 121);
    for (float *x = &tokens[0][0][0]; x < &tokens[0][0][0] + sizeof(tokens) / sizeof(float); x++)
        *x = fabsf(*x);
    for (int which = 0; which < 4; which++) {
        struct dropkv_param with_policy[] = {dropkv_int("keep_tokens", 60),
                                             dropkv_text("policy", policies[which])};
        struct dropkv_prompt prompt = make_prompt(&world);
        prompt.params = with_policy;
        prompt.n_params = 2;
        prompt.want_scores = 1;
        prompt.token_weight = which == 0 ? &tokens[0][0][0] : NULL;
        prompt.carry_in = which == 1 ? &tokens[0][0][0] : NULL;
        prompt.external_scores = which == 2 ? &tokens[0][0][0] : NULL;
        prompt.value_metric = which == 3 ? &metric[0][0][0][0] : NULL;
        struct dropkv_result *result = ask(&world, &prompt);
        assert_int_equal(result->status, DROPKV_OK);
        for (int l = 0; l < LAYERS; l++) {
            struct dropkv_request r = plain_request(l, 1);
            r.params = with_policy;
            r.n_params = 2;
            r.token_weight = which == 0 ? &tokens[l][0][0] : NULL;
            r.carry_in = which == 1 ? &tokens[l][0][0] : NULL;
            r.external_scores = which == 2 ? &tokens[l][0][0] : NULL;
            r.value_metric = which == 3 ? &metric[l][0][0][0] : NULL;
            struct dropkv_result *wanted = dkv_test_expect(&r);
            assert_memory_equal(result->keep_indices + l * KV_HEADS * 60, wanted->keep_indices,
                                KV_HEADS * 60 * sizeof(int32_t));
            assert_memory_equal(result->scores + l * KV_HEADS * TOKENS, wanted->scores,
                                KV_HEADS * TOKENS * sizeof(float));
            dropkv_result_free(wanted);
        }
        dropkv_result_free(result);
    }
    struct dropkv_prompt wrong = make_prompt(&world);
    wrong.token_weight = &tokens[0][0][0];
    assert_refused(&world, &wrong, DROPKV_E_INVALID, "token_weight");
    close_world(&world);
}

static void sink_logits_of_a_cache_are_each_layers_own(void **unused)
{
    struct world world = open_world();
    float sinks[LAYERS * Q_HEADS];
    (void)unused;
    for (int i = 0; i < LAYERS * Q_HEADS; i++)
        sinks[i] = (float)i - 5.0f;
    struct dropkv_prompt prompt = make_prompt(&world);
    prompt.cache = add_plain_cache(&world, sinks);
    prompt.want_scores = 1;
    struct dropkv_result *result = ask(&world, &prompt);
    assert_layers(result, 0, LAYERS, sinks);
    dropkv_result_free(result);
    close_world(&world);
}

/* The wire has them behind one another: keys and values of each layer, in this order. */
static void scales_of_a_cache_are_each_layers_and_heads_own(void **unused)
{
    static uint8_t quantised[LAYERS][2][KV_HEADS][TOKENS][DIM];
    struct world world = open_world();
    struct dropkv_layer where[LAYERS];
    struct dropkv_cache_layout layout = base_layout();
    float scales[LAYERS][2][KV_HEADS];
    struct dkv_random random;
    (void)unused;
    dkv_random_init(&random, 31);
    dkv_random_normal(&random, DKV_F8_E4M3, quantised, sizeof(quantised));
    world.more = dkv_test_buffer(world.client, sizeof(quantised), false);
    memcpy(dropkv_buffer_data(world.more), quantised, sizeof(quantised));
    for (int l = 0; l < LAYERS; l++) {
        where[l].key = (struct dropkv_view){.buffer = world.more,
                                            .offset = (size_t)l * sizeof(quantised[0]),
                                            .dtype = DROPKV_F8_E4M3,
                                            .token_stride = DIM,
                                            .head_stride = TOKENS * DIM};
        where[l].value = where[l].key;
        where[l].value.offset += sizeof(quantised[0][0]);
        for (int i = 0; i < 2 * KV_HEADS; i++)
            (&scales[l][0][0])[i] = 0.25f + (float)(l * 2 * KV_HEADS + i);
    }
    layout.head_scales = &scales[0][0][0];
    struct dropkv_prompt prompt = make_prompt(&world);
    prompt.cache = add_cache(&world, &layout, where);
    prompt.want_scores = 1;
    struct dropkv_result *result = ask(&world, &prompt);
    for (int l = 0; l < LAYERS; l++) {
        struct dropkv_request r = plain_request(l, 1);
        r.key = (struct dropkv_tensor){
            .data = quantised[l][0], .dtype = DROPKV_F8_E4M3, .head_scales = scales[l][0]};
        r.value = (struct dropkv_tensor){
            .data = quantised[l][1], .dtype = DROPKV_F8_E4M3, .head_scales = scales[l][1]};
        struct dropkv_result *wanted = dkv_test_expect(&r);
        assert_memory_equal(result->scores + l * KV_HEADS * TOKENS, wanted->scores,
                            KV_HEADS * TOKENS * sizeof(float));
        dropkv_result_free(wanted);
    }
    dropkv_result_free(result);
    close_world(&world);
}

/* At the daemon and in this process, where the same code decides. */
static void what_a_cache_says_of_logits_holds_unless_the_prompt_says_otherwise(void **unused)
{
    const char *endpoints[] = {dkv_test_endpoint, "embedded:cpu"};
    const struct dropkv_param own[] = {params[0],
                                       {"scale", DROPKV_PARAM_REAL, 0, 0.5, NULL},
                                       {"logit_softcap", DROPKV_PARAM_REAL, 0, 5, NULL}};
    const struct dropkv_param of_cache[] = {params[0],
                                            {"scale", DROPKV_PARAM_REAL, 0, 0.25, NULL},
                                            {"logit_softcap", DROPKV_PARAM_REAL, 0, 2, NULL}};
    (void)unused;
    for (int e = 0; e < 2; e++) {
        struct world world = open_world_at(endpoints[e]);
        struct dropkv_cache_layout layout = base_layout();
        layout.scale = 0.25;
        layout.logit_softcap = 2;
        struct dropkv_prompt prompt = make_prompt(&world);
        prompt.cache = add_plain_layout(&world, layout);
        prompt.n_layers = 1;
        prompt.want_scores = 1;
        for (int says = 0; says < 2; says++) {
            struct dropkv_request r = plain_request(0, 1);
            prompt.params = own;
            prompt.n_params = says ? 3 : 1;
            r.params = says ? own : of_cache;
            r.n_params = 3;
            struct dropkv_result *result = ask(&world, &prompt), *wanted = dkv_test_expect(&r);
            assert_memory_equal(result->scores, wanted->scores, KV_HEADS * TOKENS * sizeof(float));
            dropkv_result_free(wanted);
            dropkv_result_free(result);
        }
        close_world(&world);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_has_the_answers_of_its_layers),
        cmocka_unit_test(pages_are_found_by_a_table_of_either_kind),
        cmocka_unit_test(what_policies_take_is_each_layers_own),
        cmocka_unit_test(sink_logits_of_a_cache_are_each_layers_own),
        cmocka_unit_test(scales_of_a_cache_are_each_layers_and_heads_own),
        cmocka_unit_test(what_a_cache_says_of_logits_holds_unless_the_prompt_says_otherwise),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, dkv_test_end);
}
