/* A cache of three layers as an engine has it, and what is right: for tests of registered caches
 * through the library's calls, against a real daemon. main() sets `program`. */
#ifndef DKV_TESTS_CLIENT_CACHE_WORLD_H
#define DKV_TESTS_CLIENT_CACHE_WORLD_H

#include "tests/client/calls.h"
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
static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};
static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, KEEP, 0, NULL}};

/* ---- what the daemon is told ---- */

static inline uint32_t place_of_page(uint32_t page)
{
    return (page * 7 + 3) % (2 * PAGES); /* 7 and 38 have no common factor */
}

struct world {
    struct dropkv_client *client;
    struct dropkv_buffer *kv, *rows, *more;
    struct dropkv_cache *cache;
    struct dropkv_stash *stash;
};

static inline void fill_kv(struct kv *kv)
{
    for (int l = 0; l < LAYERS; l++)
        for (int t = 0; t < TOKENS; t++)
            for (int h = 0; h < KV_HEADS; h++) {
                memcpy(kv->key[l][t][h], layers[l].key[h][t], sizeof(kv->key[l][t][h]));
                memcpy(kv->value[l][t][h], layers[l].value[h][t], sizeof(kv->value[l][t][h]));
            }
}

static inline void fill_pages(struct paged *paged)
{
    for (int l = 0; l < LAYERS; l++)
        for (uint32_t t = 0; t < TOKENS; t++)
            for (int h = 0; h < KV_HEADS; h++) {
                float(*page)[PAGE][KV_HEADS][DIM] = paged->page[l][place_of_page(t / PAGE)];
                memcpy(page[0][t % PAGE][h], layers[l].key[h][t], DIM * sizeof(float));
                memcpy(page[1][t % PAGE][h], layers[l].value[h][t], DIM * sizeof(float));
            }
}

static inline void fill_rows(struct rows *rows)
{
    for (int l = 0; l < LAYERS; l++)
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < Q_HEADS; h++)
                memcpy(rows->row[l][SLOT][(NEWEST + 1 + RING - ROWS + r) % RING][h],
                       layers[l].query[h][r], DIM * sizeof(float));
}

static inline struct dropkv_cache_layout base_layout(void)
{
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    layout.q_heads = Q_HEADS;
    layout.kv_heads = KV_HEADS;
    layout.head_dim = DIM;
    layout.n_layers = LAYERS;
    return layout;
}

static inline struct dropkv_cache *add_cache(const struct world *world,
                                             struct dropkv_cache_layout *layout,
                                             const struct dropkv_layer *where)
{
    struct dropkv_cache *cache = NULL;
    struct dropkv_error error;
    layout->layers = where;
    if (dropkv_cache_add(world->client, layout, &cache, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return cache;
}

/* `layout` says what is not about where keys and values lie. */
static inline struct dropkv_cache *add_plain_layout(const struct world *world,
                                                    struct dropkv_cache_layout layout)
{
    struct dropkv_layer where[LAYERS];
    for (int l = 0; l < LAYERS; l++) {
        where[l].key = (struct dropkv_view){.buffer = world->kv,
                                            .offset = offsetof(struct kv, key[l]),
                                            .dtype = DROPKV_FP32,
                                            .token_stride = KV_HEADS * DIM * sizeof(float),
                                            .head_stride = DIM * sizeof(float)};
        where[l].value = where[l].key;
        where[l].value.offset = offsetof(struct kv, value[l]);
    }
    return add_cache(world, &layout, where);
}

static inline struct dropkv_cache *add_plain_cache(const struct world *world, const float *sinks)
{
    struct dropkv_cache_layout layout = base_layout();
    layout.sink_logits = sinks;
    return add_plain_layout(world, layout);
}

static inline struct dropkv_stash *add_stash(const struct world *world)
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

static inline struct world open_world_at(const char *endpoint)
{
    struct world world = {.client = dkv_test_open(endpoint)};
    world.kv = dkv_test_buffer(world.client, sizeof(struct kv), false);
    world.rows = dkv_test_buffer(world.client, sizeof(struct rows), false);
    fill_kv(dropkv_buffer_data(world.kv));
    fill_rows(dropkv_buffer_data(world.rows));
    world.cache = add_plain_cache(&world, NULL);
    world.stash = add_stash(&world);
    return world;
}

static inline struct world open_world(void)
{
    return open_world_at(dkv_test_endpoint);
}

static inline void close_world(struct world *world)
{
    dropkv_client_close(world->client);
    dropkv_buffer_free(world->kv);
    dropkv_buffer_free(world->rows);
    dropkv_buffer_free(world->more);
}

static inline struct dropkv_prompt make_prompt(const struct world *world)
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

static inline struct dropkv_result *ask(const struct world *world,
                                        const struct dropkv_prompt *prompt)
{
    struct dropkv_result *result = NULL;
    struct dropkv_error error;
    if (dropkv_score_prompt(world->client, prompt, &result, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return result;
}

static inline void assert_refused(const struct world *world, const struct dropkv_prompt *prompt,
                                  enum dropkv_status status, const char *text)
{
    struct dropkv_result *result = NULL;
    struct dropkv_error error = {0};
    assert_int_equal(dropkv_score_prompt(world->client, prompt, &result, &error), status);
    if (strstr(error.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", error.text, text);
}

/* ---- what is right ---- */

static inline struct dropkv_request plain_request(int layer, int want_scores)
{
    const struct layer *at = &layers[layer];
    struct dropkv_request r = dkv_test_request(&shape, 1, at->query, at->key, at->value);
    r.params = params;
    r.n_params = 1;
    r.want_scores = want_scores;
    return r;
}

static inline void assert_layers(const struct dropkv_result *result, int first, int n,
                                 const float *sinks)
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

static inline int begin(void **unused)
{
    (void)unused;
    dkv_test_fill(layers, sizeof(layers), 17);
    return dkv_test_begin(program);
}

#endif
