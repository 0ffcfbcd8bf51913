/* Caches, stashes, fences, outputs and detached buffers through the library's calls, against a real
 * daemon: a prompt's answer is that of plain requests, layer by layer, to the engine in this
 * process.
 *
 * usage: test_client_cache DROPKVD
 */
#include "client/cli/synth.h"
#include "tests/client/ipc_fixture.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum {
    LAYERS = 3,
    Q_HEADS = 4,
    KV_HEADS = 2,
    TOKENS = 300,
    DIM = 32,
    ROWS = 8,
    RING = 16,
    SLOTS = 2,
    SLOT = 1,
    NEWEST = 2, /* the rows that are used lie around the ring's end */
    PAGE = 16,
    PAGES = (TOKENS + PAGE - 1) / PAGE,
    KEEP = 30,
};

/* What is asked about, dense. */
struct layer {
    float query[Q_HEADS][ROWS][DIM];
    float key[KV_HEADS][TOKENS][DIM];
    float value[KV_HEADS][TOKENS][DIM];
};

/* The same as an engine has it: all layers in one buffer, a token's heads side by side. */
struct kv {
    float key[LAYERS][TOKENS][KV_HEADS][DIM];
    float value[LAYERS][TOKENS][KV_HEADS][DIM];
};

/* Keys and values of a page side by side; pages lie in any order, some are not used. */
struct paged {
    float page[LAYERS][2 * PAGES][2][PAGE][KV_HEADS][DIM];
};

struct rows {
    float row[LAYERS][SLOTS][RING][Q_HEADS][DIM];
};

static const char *program;
static struct layer layers[LAYERS];
static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, KEEP, 0, NULL}};

/* ---- what the daemon is told ---- */

static uint32_t place_of_page(uint32_t page)
{
    return (page * 7 + 3) % (2 * PAGES); /* 7 and 38 have no common factor */
}

struct world {
    struct dropkv_client *client;
    struct dropkv_buffer *kv, *rows, *more;
    struct dropkv_cache *cache;
    struct dropkv_stash *stash;
};

static void fill_kv(struct kv *kv)
{
    for (int l = 0; l < LAYERS; l++)
        for (int t = 0; t < TOKENS; t++)
            for (int h = 0; h < KV_HEADS; h++) {
                memcpy(kv->key[l][t][h], layers[l].key[h][t], sizeof(kv->key[l][t][h]));
                memcpy(kv->value[l][t][h], layers[l].value[h][t], sizeof(kv->value[l][t][h]));
            }
}

static void fill_pages(struct paged *paged)
{
    for (int l = 0; l < LAYERS; l++)
        for (uint32_t t = 0; t < TOKENS; t++)
            for (int h = 0; h < KV_HEADS; h++) {
                float(*page)[PAGE][KV_HEADS][DIM] = paged->page[l][place_of_page(t / PAGE)];
                memcpy(page[0][t % PAGE][h], layers[l].key[h][t], DIM * sizeof(float));
                memcpy(page[1][t % PAGE][h], layers[l].value[h][t], DIM * sizeof(float));
            }
}

static void fill_rows(struct rows *rows)
{
    for (int l = 0; l < LAYERS; l++)
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < Q_HEADS; h++)
                memcpy(rows->row[l][SLOT][(NEWEST + 1 + RING - ROWS + r) % RING][h],
                       layers[l].query[h][r], DIM * sizeof(float));
}

static struct dropkv_cache_layout base_layout(void)
{
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    layout.q_heads = Q_HEADS;
    layout.kv_heads = KV_HEADS;
    layout.head_dim = DIM;
    layout.n_layers = LAYERS;
    return layout;
}

static struct dropkv_cache *add_cache(const struct world *world, struct dropkv_cache_layout *layout,
                                      const struct dropkv_layer *where)
{
    struct dropkv_cache *cache = NULL;
    struct dropkv_error error;
    layout->layers = where;
    if (dropkv_cache_add(world->client, layout, &cache, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return cache;
}

static struct dropkv_cache *add_plain_cache(const struct world *world, const float *sinks)
{
    struct dropkv_layer where[LAYERS];
    struct dropkv_cache_layout layout = base_layout();
    for (int l = 0; l < LAYERS; l++) {
        where[l].key = (struct dropkv_view){.buffer = world->kv,
                                            .offset = offsetof(struct kv, key[l]),
                                            .dtype = DROPKV_FP32,
                                            .token_stride = KV_HEADS * DIM * sizeof(float),
                                            .head_stride = DIM * sizeof(float)};
        where[l].value = where[l].key;
        where[l].value.offset = offsetof(struct kv, value[l]);
    }
    layout.sink_logits = sinks;
    return add_cache(world, &layout, where);
}

static struct dropkv_stash *add_stash(const struct world *world)
{
    struct dropkv_stash *stash = NULL;
    struct dropkv_error error;
    struct dropkv_stash_layout layout = DROPKV_STASH_LAYOUT_INIT;
    const struct rows *at = NULL;
    layout.buffer = world->rows;
    layout.dtype = DROPKV_FP32;
    layout.n_layers = LAYERS;
    layout.n_slots = SLOTS;
    layout.n_rows = RING;
    layout.layer_stride = sizeof(at->row[0]);
    layout.slot_stride = sizeof(at->row[0][0]);
    layout.row_stride = sizeof(at->row[0][0][0]);
    layout.head_stride = sizeof(at->row[0][0][0][0]);
    if (dropkv_stash_add(world->client, &layout, &stash, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return stash;
}

static struct world open_world(void)
{
    struct world world = {.client = dkv_test_open(dkv_test_endpoint)};
    world.kv = dkv_test_buffer(world.client, sizeof(struct kv), false);
    world.rows = dkv_test_buffer(world.client, sizeof(struct rows), false);
    fill_kv(dropkv_buffer_data(world.kv));
    fill_rows(dropkv_buffer_data(world.rows));
    world.cache = add_plain_cache(&world, NULL);
    world.stash = add_stash(&world);
    return world;
}

static void close_world(struct world *world)
{
    dropkv_client_close(world->client);
    dropkv_buffer_free(world->kv);
    dropkv_buffer_free(world->rows);
    dropkv_buffer_free(world->more);
}

static struct dropkv_prompt make_prompt(const struct world *world)
{
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    prompt.cache = world->cache;
    prompt.stash = world->stash;
    prompt.n_tokens = TOKENS;
    prompt.slot = SLOT;
    prompt.newest_row = NEWEST;
    prompt.q_rows = ROWS;
    prompt.params = params;
    prompt.n_params = 1;
    return prompt;
}

static struct dropkv_result *ask(const struct world *world, const struct dropkv_prompt *prompt)
{
    struct dropkv_result *result = NULL;
    struct dropkv_error error;
    if (dropkv_score_prompt(world->client, prompt, &result, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return result;
}

static void assert_refused(const struct world *world, const struct dropkv_prompt *prompt,
                           enum dropkv_status status, const char *text)
{
    struct dropkv_result *result = NULL;
    struct dropkv_error error = {0};
    assert_int_equal(dropkv_score_prompt(world->client, prompt, &result, &error), status);
    if (strstr(error.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", error.text, text);
}

/* ---- what is right ---- */

static struct dropkv_request plain_request(int layer, int want_scores)
{
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = 1;
    r.q_heads = Q_HEADS;
    r.kv_heads = KV_HEADS;
    r.head_dim = DIM;
    r.q_rows = ROWS;
    r.n_tokens = TOKENS;
    r.query = (struct dropkv_tensor){.data = layers[layer].query, .dtype = DROPKV_FP32};
    r.key = (struct dropkv_tensor){.data = layers[layer].key, .dtype = DROPKV_FP32};
    r.value = (struct dropkv_tensor){.data = layers[layer].value, .dtype = DROPKV_FP32};
    r.params = params;
    r.n_params = 1;
    r.want_scores = want_scores;
    return r;
}

static void assert_layers(const struct dropkv_result *result, int first, int n, const float *sinks)
{
    assert_int_equal(result->status, DROPKV_OK);
    assert_int_equal(result->batch, n);
    assert_int_equal(result->keep_tokens, KEEP);
    for (int i = 0; i < n; i++) {
        struct dropkv_request r = plain_request(first + i, result->scores != NULL);
        r.sink_logits = sinks != NULL ? sinks + (first + i) * Q_HEADS : NULL;
        struct dropkv_result *wanted = dkv_test_expect(&r);
        assert_memory_equal(result->keep_indices + i * KV_HEADS * KEEP, wanted->keep_indices,
                            KV_HEADS * KEEP * sizeof(int32_t));
        if (result->scores != NULL)
            assert_memory_equal(result->scores + i * KV_HEADS * TOKENS, wanted->scores,
                                KV_HEADS * TOKENS * sizeof(float));
        dropkv_result_free(wanted);
    }
}

/* ---- tests ---- */

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
    struct dkv_random random;
    (void)unused;
    dkv_random_init(&random, 21);
    dkv_random_normal(&random, DKV_FP32, tokens, sizeof(tokens) / sizeof(float));
    dkv_random_normal(&random, DKV_FP32, metric, sizeof(metric) / sizeof(float));
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

static void an_answer_goes_where_the_caller_wants_it(void **unused)
{
    enum { AT = 64, BYTES = LAYERS * KV_HEADS * (KEEP + TOKENS) * 4 };
    struct world world = open_world();
    (void)unused;
    world.more = dkv_test_buffer(world.client, AT + BYTES, true);
    char *memory = dropkv_buffer_data(world.more);
    memset(memory, 0x5a, AT);
    struct dropkv_prompt prompt = make_prompt(&world);
    prompt.want_scores = 1;
    prompt.output = world.more;
    prompt.output_offset = AT;
    prompt.output_bytes = BYTES;
    struct dropkv_result *result = ask(&world, &prompt);
    assert_ptr_equal(result->keep_indices, memory + AT);
    assert_layers(result, 0, LAYERS, NULL);
    for (int i = 0; i < AT; i++)
        assert_int_equal(memory[i], 0x5a);
    dropkv_result_free(result);
    prompt.output_bytes--;
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "room");
    prompt.output_offset = AT + 2;
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "output_offset 66");
    prompt.output_offset = AT;
    prompt.output = world.kv; /* for reading alone */
    assert_refused(&world, &prompt, DROPKV_E_DENIED, "writable");
    close_world(&world);
}

/* That the daemon has looked at the fence is known from its answer to a later message. */
static void nothing_is_read_before_the_fence(void **unused)
{
    struct world world = open_world();
    struct dropkv_error error;
    (void)unused;
    world.more = dkv_test_buffer(world.client, 64, false);
    uint64_t *slot = (uint64_t *)dropkv_buffer_data(world.more) + 2;
    struct kv *kv = dropkv_buffer_data(world.kv);
    const struct kv right = *kv;
    memset(kv, 0xff, sizeof(*kv)); /* not a number: reading it early would be an error */
    struct dropkv_prompt prompt = make_prompt(&world);
    prompt.fence = world.more;
    prompt.fence_offset = 16;
    prompt.fence_value = 7;
    assert_int_equal(dropkv_submit_prompt(world.client, &prompt, NULL, &error), DROPKV_OK);
    assert_int_equal(dropkv_health(world.client, 0, &error), DROPKV_OK);
    *slot = 6;
    assert_int_equal(dropkv_health(world.client, 0, &error), DROPKV_OK);
    assert_int_equal(dropkv_in_flight(world.client), 1);
    *kv = right;
    __atomic_store_n(slot, 7, __ATOMIC_RELEASE);
    assert_int_equal(dropkv_dispatch(world.client, -1, &error), DROPKV_OK);
    struct dropkv_result *result = dropkv_next_result(world.client);
    assert_non_null(result);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    prompt.fence_value = 8;
    prompt.timeout_us = 20000;
    assert_refused(&world, &prompt, DROPKV_E_TIMEOUT, "");
    prompt.fence_offset = 12;
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "fence_offset 12");
    close_world(&world);
}

static void a_detached_buffer_is_let_go_of_and_comes_back(void **unused)
{
    struct world world = open_world();
    struct dropkv_error error;
    (void)unused;
    const struct dropkv_prompt prompt = make_prompt(&world);
    struct dropkv_result *result = ask(&world, &prompt);
    dropkv_result_free(result);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(dropkv_client_detach_buffer(world.client, world.kv, 0, &error), DROPKV_OK);
        assert_refused(&world, &prompt, DROPKV_E_NOT_FOUND, "detached");
        assert_int_equal(dropkv_client_attach_buffer(world.client, world.kv, &error), DROPKV_OK);
        result = ask(&world, &prompt);
        assert_layers(result, 0, LAYERS, NULL);
        dropkv_result_free(result);
    }
    assert_int_equal(dropkv_client_attach_buffer(world.client, world.kv, &error), DROPKV_E_INVALID);
    assert_int_equal(dropkv_client_detach_buffer(world.client, NULL, 0, &error),
                     DROPKV_E_NOT_FOUND);
    close_world(&world);
}

/* Also one that was detached meanwhile. */
static void a_new_daemon_is_told_of_everything(void **unused)
{
    struct world world = open_world();
    struct dropkv_error error;
    (void)unused;
    const struct dropkv_prompt prompt = make_prompt(&world);
    dropkv_result_free(ask(&world, &prompt));
    dkv_test_stop_daemon(SIGKILL);
    assert_refused(&world, &prompt, DROPKV_E_UNAVAILABLE, "");
    dkv_test_start_daemon();
    struct dropkv_result *result = ask(&world, &prompt);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    assert_int_equal(dropkv_client_detach_buffer(world.client, world.kv, 0, &error), DROPKV_OK);
    dkv_test_stop_daemon(SIGTERM);
    dkv_test_start_daemon();
    assert_refused(&world, &prompt, DROPKV_E_NOT_FOUND, "detached");
    assert_int_equal(dropkv_client_attach_buffer(world.client, world.kv, &error), DROPKV_OK);
    result = ask(&world, &prompt);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    close_world(&world);
}

static void what_is_wrong_is_told_by_name(void **unused)
{
    struct world world = open_world();
    struct world other = open_world();
    struct dropkv_client *http = dkv_test_open("http://127.0.0.1:1");
    struct dropkv_cache *cache = NULL;
    struct dropkv_error error;
    struct dropkv_layer far = {.key = {.buffer = world.kv, .dtype = DROPKV_FP32}};
    struct dropkv_cache_layout layout = base_layout();
    (void)unused;
    struct dropkv_prompt prompt = make_prompt(&world);
    prompt.n_layers = LAYERS + 1;
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "n_layers 4");
    prompt = make_prompt(&world);
    prompt.slot = SLOTS;
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "slot 2");
    prompt = make_prompt(&world);
    prompt.cache = other.cache;
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "another client");
    prompt = make_prompt(&world);
    prompt.fence = other.kv;
    assert_refused(&world, &prompt, DROPKV_E_NOT_FOUND, "fence");
    prompt = make_prompt(&world);
    prompt.table = "table";
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "table_entry_bytes");

    layout.n_layers = 1;
    layout.layers = &far;
    far.value = far.key;
    far.value.buffer = NULL;
    assert_int_equal(dropkv_cache_add(world.client, &layout, &cache, &error), DROPKV_E_INVALID);
    far.value = far.key;
    far.value.buffer = other.rows;
    assert_int_equal(dropkv_cache_add(world.client, &layout, &cache, &error), DROPKV_OK);
    prompt = make_prompt(&world);
    prompt.cache = cache;
    assert_refused(&world, &prompt, DROPKV_E_NOT_FOUND, "not added");
    far.key.offset = sizeof(struct kv);
    far.value = far.key;
    assert_int_equal(dropkv_cache_add(world.client, &layout, &prompt.cache, &error), DROPKV_OK);
    assert_refused(&world, &prompt, DROPKV_E_INVALID, "key");
    dropkv_cache_remove(world.client, prompt.cache);
    dropkv_cache_remove(world.client, NULL);
    assert_int_equal(dropkv_cache_add(http, &layout, &cache, &error), DROPKV_E_UNSUPPORTED);
    dropkv_client_close(http);
    close_world(&other);
    close_world(&world);
}

static void what_is_removed_while_it_is_used_is_still_answered(void **unused)
{
    struct world world = open_world();
    struct dropkv_error error;
    (void)unused;
    const struct dropkv_prompt prompt = make_prompt(&world);
    dropkv_result_free(ask(&world, &prompt)); /* so that the next one is sent at once */
    assert_int_equal(dropkv_submit_prompt(world.client, &prompt, NULL, &error), DROPKV_OK);
    dropkv_cache_remove(world.client, world.cache);
    dropkv_stash_remove(world.client, world.stash);
    dropkv_client_remove_buffer(world.client, world.kv);
    assert_int_equal(dropkv_dispatch(world.client, -1, &error), DROPKV_OK);
    struct dropkv_result *result = dropkv_next_result(world.client);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    close_world(&world);
}

/* The daemon is stopped, so the answer to the registration cannot have come. Were it forgotten, the
 * daemon's 256 places for regions would soon be taken. */
static void what_is_removed_before_it_is_registered_leaves_nothing(void **unused)
{
    enum { TIMES = 300, BYTES = LAYERS * KV_HEADS * KEEP * 4 };
    struct world world = open_world();
    struct dropkv_error error;
    uint64_t id;
    (void)unused;
    struct dropkv_prompt prompt = make_prompt(&world);
    dropkv_result_free(ask(&world, &prompt));
    for (int i = 0; i < TIMES; i++) {
        kill(dkv_test_daemon_pid, SIGSTOP);
        struct dropkv_buffer *buffer = dkv_test_buffer(world.client, 4096, false);
        assert_int_equal(dropkv_submit_prompt(world.client, &prompt, &id, &error), DROPKV_OK);
        dropkv_client_remove_buffer(world.client, buffer);
        dropkv_buffer_free(buffer);
        assert_int_equal(dropkv_cancel(world.client, id), DROPKV_OK);
        kill(dkv_test_daemon_pid, SIGCONT);
        assert_int_equal(dropkv_health(world.client, 0, &error), DROPKV_OK);
    }
    world.more = dkv_test_buffer(world.client, BYTES, true);
    prompt.output = world.more;
    prompt.output_bytes = BYTES;
    struct dropkv_result *result = ask(&world, &prompt);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
    close_world(&world);
}

static int begin(void **unused)
{
    struct dkv_random random;
    (void)unused;
    dkv_random_init(&random, 17);
    dkv_random_normal(&random, DKV_FP32, layers, sizeof(layers) / (sizeof(float)));
    return dkv_test_begin(program);
}

static int end(void **unused)
{
    (void)unused;
    return dkv_test_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_has_the_answers_of_its_layers),
        cmocka_unit_test(pages_are_found_by_a_table_of_either_kind),
        cmocka_unit_test(what_policies_take_is_each_layers_own),
        cmocka_unit_test(sink_logits_of_a_cache_are_each_layers_own),
        cmocka_unit_test(scales_of_a_cache_are_each_layers_and_heads_own),
        cmocka_unit_test(an_answer_goes_where_the_caller_wants_it),
        cmocka_unit_test(nothing_is_read_before_the_fence),
        cmocka_unit_test(a_detached_buffer_is_let_go_of_and_comes_back),
        cmocka_unit_test(a_new_daemon_is_told_of_everything),
        cmocka_unit_test(what_is_wrong_is_told_by_name),
        cmocka_unit_test(what_is_removed_while_it_is_used_is_still_answered),
        cmocka_unit_test(what_is_removed_before_it_is_registered_leaves_nothing),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, end);
}
