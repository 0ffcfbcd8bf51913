/* Endpoints "embedded:" of libdropkv as its users link it: the same answers and the same errors as
 * a daemon's, from a module that is opened at run time.
 *
 * usage: test_embedded_library DROPKVD
 */
#include "tests/client/calls.h"
#include "tests/client/ipc_fixture.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 500, DIM = 32, ROWS = 16, BATCH = 3 };

static const char *program;
static float query[BATCH][Q_HEADS][ROWS][DIM];
static float key[BATCH][KV_HEADS][TOKENS][DIM];
static float value[BATCH][KV_HEADS][TOKENS][DIM];

#define MAX_PARAMS 3

/* The parameters of one request; a kind of its own ends them. */
struct wish {
    struct dropkv_param params[MAX_PARAMS];
    int want_scores;
};

#define INT(name, value)                       \
    {                                          \
        name, DROPKV_PARAM_INT, value, 0, NULL \
    }
#define REAL(name, value)                       \
    {                                           \
        name, DROPKV_PARAM_REAL, 0, value, NULL \
    }
#define TEXT(name, value)                    \
    {                                        \
        name, DROPKV_PARAM_TEXT, 0, 0, value \
    }

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static struct dropkv_request make_request(const struct wish *wish)
{
    struct dropkv_request r = dkv_test_request(&shape, BATCH, query, key, value);
    r.params = wish->params;
    while (r.n_params < MAX_PARAMS && wish->params[r.n_params].name != NULL)
        r.n_params++;
    r.want_scores = wish->want_scores;
    return r;
}

static void answers_are_those_of_a_daemon(void **state)
{
    static const struct wish wishes[] = {
        {{REAL("keep_ratio", 0.1), INT("sinks", 4)}, 1},
        {{INT("keep_tokens", 77), TEXT("policy", "snapkv")}, 0},
        {{REAL("keep_ratio", 0.2), TEXT("heads", "adakv_floor")}, 1},
        {{REAL("keep_ratio", 0.2), TEXT("layers", "cake"), TEXT("policy", "cake")}, 0},
        {{REAL("keep_ratio", 1.0)}, 1},
    };
    (void)state;
    struct dropkv_client *daemon = dkv_test_open(dkv_test_endpoint);
    struct dropkv_client *here = dkv_test_open("embedded:");
    for (size_t i = 0; i < sizeof(wishes) / sizeof(wishes[0]); i++) {
        const struct dropkv_request r = make_request(&wishes[i]);
        struct dropkv_result *theirs = dkv_test_score(daemon, &r);
        struct dropkv_result *ours = dkv_test_score(here, &r);
        dkv_test_assert_same(theirs, ours);
        assert_string_equal(theirs->backend, ours->backend);
        dropkv_result_free(theirs);
        dropkv_result_free(ours);
    }
    dropkv_client_close(here);
    dropkv_client_close(daemon);
}

static void errors_are_those_of_a_daemon(void **state)
{
    static const struct wish wishes[] = {
        {{INT("keep_tokens", 0)}, 0},
        {{INT("window", 513)}, 0},
        {{REAL("keep_ratio", 0.1), INT("keep_tokens", 5)}, 0},
        {{TEXT("policy", "none")}, 0},
        {{TEXT("nonfinite", "error")}, 0}, /* which the engine finds */
        {{TEXT("policy", "external")}, 0},
        {{INT("timeout", 1)}, 0},
    };
    (void)state;
    struct dropkv_client *daemon = dkv_test_open(dkv_test_endpoint);
    struct dropkv_client *here = dkv_test_open("embedded:cpu?threads=1");
    const float good = key[1][1][77][5];
    key[1][1][77][5] = NAN;
    for (size_t i = 0; i < sizeof(wishes) / sizeof(wishes[0]); i++) {
        const struct dropkv_request r = make_request(&wishes[i]);
        struct dropkv_error theirs, ours;
        struct dropkv_result *result;
        assert_int_not_equal(dropkv_score(daemon, &r, &result, &theirs), DROPKV_OK);
        assert_int_not_equal(dropkv_score(here, &r, &result, &ours), DROPKV_OK);
        assert_int_equal(ours.status, theirs.status);
        if (ours.status != DROPKV_E_TIMEOUT)
            assert_string_equal(ours.text, theirs.text);
    }
    key[1][1][77][5] = good;
    dropkv_client_close(here);
    dropkv_client_close(daemon);
}

/* ---- caches ---- */

enum { LAYERS = 3, PAGE = 16, PAGES = 40, SLOTS = 2, RING = 24 };

struct memory {
    float rows[LAYERS][SLOTS][RING][Q_HEADS][DIM];
    float kv[LAYERS][2][PAGES][PAGE][KV_HEADS][DIM];
    int32_t table[PAGES];
    int32_t answer[LAYERS * KV_HEADS * 2 * TOKENS + LAYERS * KV_HEADS + 1];
};

/* The same cache and stash of both clients, over one memory. */
struct pair {
    struct dropkv_client *clients[2]; /* of the daemon, of the engine here */
    struct dropkv_cache *caches[2];
    struct dropkv_stash *stashes[2];
    struct dropkv_buffer *buffer;
    struct memory *memory;
};

static float sinks[LAYERS][Q_HEADS];

static void register_memory(struct pair *pair, int i)
{
    struct dropkv_layer layers[LAYERS];
    struct dropkv_cache_layout cache = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout stash = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_error error;
    for (int layer = 0; layer < LAYERS; layer++) {
        layers[layer].key = (struct dropkv_view){
            .buffer = pair->buffer,
            .offset = (size_t)((char *)pair->memory->kv[layer][0] - (char *)pair->memory),
            .dtype = DROPKV_FP32,
            .page_stride = sizeof(pair->memory->kv[0][0][0]),
            .token_stride = sizeof(pair->memory->kv[0][0][0][0]),
            .head_stride = DIM * sizeof(float)};
        layers[layer].value = layers[layer].key;
        layers[layer].value.offset += sizeof(pair->memory->kv[0][0]);
    }
    cache.q_heads = Q_HEADS, cache.kv_heads = KV_HEADS, cache.head_dim = DIM;
    cache.page_tokens = PAGE, cache.n_layers = LAYERS, cache.layers = layers;
    cache.sink_logits = &sinks[0][0], cache.scale = 0.25;
    stash.buffer = pair->buffer, stash.dtype = DROPKV_FP32, stash.n_layers = LAYERS;
    stash.n_slots = SLOTS, stash.n_rows = RING;
    stash.layer_stride = sizeof(pair->memory->rows[0]);
    stash.slot_stride = sizeof(pair->memory->rows[0][0]);
    stash.row_stride = sizeof(pair->memory->rows[0][0][0]);
    stash.head_stride = DIM * sizeof(float);
    if (dropkv_client_add_output(pair->clients[i], pair->buffer, &error) != DROPKV_OK ||
        dropkv_cache_add(pair->clients[i], &cache, &pair->caches[i], &error) != DROPKV_OK ||
        dropkv_stash_add(pair->clients[i], &stash, &pair->stashes[i], &error) != DROPKV_OK)
        fail_msg("%s", error.text);
}

static struct pair open_pair(void)
{
    struct pair pair = {
        .clients = {dkv_test_open(dkv_test_endpoint), dkv_test_open("embedded:cpu")}};
    assert_int_equal(dropkv_buffer_new(sizeof(struct memory), &pair.buffer, NULL), DROPKV_OK);
    pair.memory = dropkv_buffer_data(pair.buffer);
    memcpy(pair.memory->rows, value, sizeof(pair.memory->rows));
    for (size_t i = 0; i < sizeof(pair.memory->kv) / sizeof(float); i++)
        (&pair.memory->kv[0][0][0][0][0][0])[i] = (&key[0][0][0][0])[i * 3 % 95999];
    for (int i = 0; i < PAGES; i++)
        pair.memory->table[i] = (i * 7 + 3) % PAGES;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int h = 0; h < Q_HEADS; h++)
            sinks[layer][h] = (float)(layer - h);
    register_memory(&pair, 0);
    register_memory(&pair, 1);
    return pair;
}

static void close_pair(struct pair *pair)
{
    dropkv_cache_remove(pair->clients[1], pair->caches[1]);
    for (int i = 0; i < 2; i++)
        dropkv_client_close(pair->clients[i]);
    dropkv_buffer_free(pair->buffer);
}

static struct dropkv_prompt make_prompt(const struct pair *pair, int i, const struct wish *wish)
{
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    prompt.cache = pair->caches[i];
    prompt.stash = pair->stashes[i];
    prompt.n_tokens = TOKENS;
    prompt.slot = 1;
    prompt.newest_row = RING - 1;
    prompt.q_rows = ROWS;
    prompt.table_buffer = pair->buffer;
    prompt.table_offset = (size_t)((char *)pair->memory->table - (char *)pair->memory);
    prompt.table_entries = PAGES;
    prompt.table_entry_bytes = sizeof(int32_t);
    prompt.params = wish->params;
    while (prompt.n_params < MAX_PARAMS && wish->params[prompt.n_params].name != NULL)
        prompt.n_params++;
    prompt.want_scores = wish->want_scores;
    return prompt;
}

/* Both answers, to be freed. */
static void ask_both(const struct pair *pair, struct dropkv_prompt prompts[2],
                     struct dropkv_result *results[2])
{
    struct dropkv_error error;
    for (int i = 0; i < 2; i++) {
        if (dropkv_score_prompt(pair->clients[i], &prompts[i], &results[i], &error) != DROPKV_OK)
            fail_msg("%s", error.text);
    }
}

static void prompts_have_the_answers_of_a_daemon(void **state)
{
    static const struct wish wishes[] = {
        {{REAL("keep_ratio", 0.1), INT("sinks", 4)}, 1},
        {{REAL("keep_ratio", 0.2), TEXT("heads", "adakv_floor")}, 1},
        {{REAL("keep_ratio", 0.2), TEXT("layers", "cake"), TEXT("policy", "cake")}, 0},
        {{INT("keep_tokens", 60), INT("window", 4), REAL("scale", 0.5)}, 0},
        {{INT("keep_tokens", 60), TEXT("policy", "criticalkv")}, 0},
    };
    static const uint32_t newest[] = {RING - 1, 15, 5, 0}; /* the last two lie around the end */
    static float weights[LAYERS][KV_HEADS][TOKENS];
    (void)state;
    struct pair pair = open_pair();
    for (int i = 0; i < LAYERS * KV_HEADS * TOKENS; i++)
        (&weights[0][0][0])[i] = (float)(i % 13);
    for (size_t w = 0; w < sizeof(wishes) / sizeof(wishes[0]); w++)
        for (size_t n = 0; n < sizeof(newest) / sizeof(newest[0]); n++) {
            struct dropkv_prompt prompts[2];
            struct dropkv_result *results[2];
            for (int i = 0; i < 2; i++) {
                prompts[i] = make_prompt(&pair, i, &wishes[w]);
                prompts[i].newest_row = newest[n];
                prompts[i].token_weight = w == 4 ? &weights[0][0][0] : NULL;
                prompts[i].first_layer = n == 1 ? 1 : 0;
                prompts[i].valid_from = n == 2 ? 20 : 0;
                if (n == 3) { /* a table of one's own */
                    prompts[i].table_buffer = NULL;
                    prompts[i].table = pair.memory->table;
                }
            }
            if (w == 4 && n == 1)
                continue; /* the weights are those of all layers */
            ask_both(&pair, prompts, results);
            dkv_test_assert_same(results[0], results[1]);
            dropkv_result_free(results[0]);
            dropkv_result_free(results[1]);
        }
    close_pair(&pair);
}

static void prompts_are_answered_where_the_caller_wants_it(void **state)
{
    static const struct wish wishes[] = {
        {{REAL("keep_ratio", 0.1)}, 1},
        {{REAL("keep_ratio", 0.2), TEXT("heads", "adakv_floor")}, 1},
    };
    (void)state;
    struct pair pair = open_pair();
    for (size_t w = 0; w < 2; w++) {
        struct dropkv_result *wanted, *result;
        struct dropkv_prompt prompt = make_prompt(&pair, 0, &wishes[w]);
        assert_int_equal(dropkv_score_prompt(pair.clients[0], &prompt, &wanted, NULL), DROPKV_OK);
        prompt = make_prompt(&pair, 1, &wishes[w]);
        prompt.output = pair.buffer;
        prompt.output_offset = (size_t)((char *)pair.memory->answer - (char *)pair.memory);
        prompt.output_bytes = sizeof(pair.memory->answer);
        assert_int_equal(dropkv_score_prompt(pair.clients[1], &prompt, &result, NULL), DROPKV_OK);
        assert_ptr_equal(result->keep_indices, pair.memory->answer);
        dkv_test_assert_same(wanted, result);
        dropkv_result_free(wanted);
        dropkv_result_free(result);
    }
    close_pair(&pair);
}

/* After submission neither the cache nor its scales are looked at. */
static void a_cache_may_go_while_its_prompts_wait(void **state)
{
    static const struct wish wish = {{REAL("keep_ratio", 0.1)}, 1};
    (void)state;
    struct pair pair = open_pair();
    struct dropkv_prompt prompts[] = {make_prompt(&pair, 0, &wish), make_prompt(&pair, 1, &wish)};
    struct dropkv_result *wanted, *result;
    assert_int_equal(dropkv_score_prompt(pair.clients[0], &prompts[0], &wanted, NULL), DROPKV_OK);
    assert_int_equal(dropkv_submit_prompt(pair.clients[1], &prompts[1], NULL, NULL), DROPKV_OK);
    assert_int_equal(dropkv_cache_remove(pair.clients[1], pair.caches[0]), DROPKV_E_INVALID);
    assert_int_equal(dropkv_stash_remove(pair.clients[1], pair.stashes[0]), DROPKV_E_INVALID);
    assert_int_equal(dropkv_cache_remove(pair.clients[1], pair.caches[1]), DROPKV_OK);
    assert_int_equal(dropkv_stash_remove(pair.clients[1], pair.stashes[1]), DROPKV_OK);
    pair.caches[1] = NULL;
    assert_int_equal(dropkv_client_detach_buffer(pair.clients[1], pair.buffer, 0, NULL), DROPKV_OK);
    assert_int_equal(dropkv_client_attach_buffer(pair.clients[1], pair.buffer, NULL), DROPKV_OK);
    assert_int_equal(dropkv_dispatch(pair.clients[1], -1, NULL), DROPKV_OK);
    result = dropkv_next_result(pair.clients[1]);
    assert_int_equal(result->status, DROPKV_OK);
    dkv_test_assert_same(wanted, result);
    dropkv_result_free(wanted);
    dropkv_result_free(result);
    close_pair(&pair);
}

static void errors_of_prompts_are_those_of_a_daemon(void **state)
{
    enum { SLOT, ROW, LAYER, ENTRY, TABLE, ROOM, FENCE, CASES };
    static const struct wish wish = {{REAL("keep_ratio", 0.1)}, 1};
    (void)state;
    struct pair pair = open_pair();
    for (int kind = 0; kind < CASES; kind++) {
        struct dropkv_error errors[2];
        const int32_t good = pair.memory->table[4];
        pair.memory->table[4] = kind == ENTRY ? 99 : good;
        for (int i = 0; i < 2; i++) {
            struct dropkv_result *result;
            struct dropkv_prompt prompt = make_prompt(&pair, i, &wish);
            prompt.slot = kind == SLOT ? SLOTS : prompt.slot;
            prompt.newest_row = kind == ROW ? RING : prompt.newest_row;
            prompt.first_layer = kind == LAYER ? LAYERS : 0;
            prompt.table_offset = kind == TABLE ? sizeof(struct memory) - 8 : prompt.table_offset;
            prompt.output = kind == ROOM ? pair.buffer : NULL;
            prompt.output_bytes = kind == ROOM ? 1000 : 0;
            prompt.fence = kind == FENCE && i == 1 ? pair.buffer : NULL;
            prompt.slot = kind == FENCE && i == 0 ? SLOTS : prompt.slot;
            assert_int_not_equal(dropkv_score_prompt(pair.clients[i], &prompt, &result, &errors[i]),
                                 DROPKV_OK);
        }
        pair.memory->table[4] = good;
        if (kind == FENCE) {
            assert_int_equal(errors[1].status, DROPKV_E_UNSUPPORTED);
            continue;
        }
        assert_int_equal(errors[0].status, errors[1].status);
        assert_string_equal(errors[0].text, errors[1].text);
    }
    close_pair(&pair);
}

/* ---- clients of their own ---- */

static const struct wish plain = {{REAL("keep_ratio", 0.1)}, 1};

struct worker {
    pthread_t thread;
    const struct dropkv_result *expected;
    int n_right;
};

enum { WORKERS = 2, ROUNDS = 40, PIPELINE = 4 };

/* On a thread of its own, where cmocka's assertions do not work: it counts. */
static void *work(void *arg)
{
    struct worker *worker = arg;
    struct dropkv_client *client;
    const struct dropkv_request r = make_request(&plain);
    const size_t bytes = (size_t)BATCH * KV_HEADS * TOKENS * sizeof(float);
    if (dropkv_client_open("embedded:cpu?threads=2", NULL, &client, NULL) != DROPKV_OK)
        return NULL;
    for (int round = 0; round < ROUNDS; round++) {
        struct dropkv_result *result;
        uint64_t unwanted;
        for (int i = 0; i < PIPELINE; i++)
            (void)dropkv_submit(client, &r, &unwanted, NULL);
        (void)dropkv_cancel(client, unwanted);
        while (dropkv_in_flight(client) > 0) {
            (void)dropkv_dispatch(client, -1, NULL);
            while ((result = dropkv_next_result(client)) != NULL) {
                worker->n_right += result->status == DROPKV_OK &&
                                   memcmp(result->scores, worker->expected->scores, bytes) == 0;
                dropkv_result_free(result);
            }
        }
    }
    (void)dropkv_submit(client, &r, NULL, NULL);
    (void)dropkv_submit(client, &r, NULL, NULL);
    dropkv_client_close(client); /* with requests that nobody has computed */
    return NULL;
}

static void clients_do_not_disturb_each_other(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open("embedded:");
    const struct dropkv_request r = make_request(&plain);
    struct dropkv_result *expected = dkv_test_score(client, &r);
    struct worker workers[WORKERS] = {{0}};
    for (int i = 0; i < WORKERS; i++) {
        workers[i].expected = expected;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        assert_int_equal(workers[i].n_right, ROUNDS * (PIPELINE - 1));
    }
    dropkv_result_free(expected);
    dropkv_client_close(client);
}

static void endpoints_and_options_are_checked(void **state)
{
    static const struct {
        const char *endpoint;
        enum dropkv_status status;
        const char *text;
    } wrong[] = {
        {"embedded:cpu", DROPKV_E_INVALID, "embedded:cuda:N"},
        {"embedded:", DROPKV_E_INVALID, "embedded:cuda:N"},
        {"http://127.0.0.1:1", DROPKV_E_INVALID, "cuda_stream"},
        {"unix:///nowhere", DROPKV_E_INVALID, "cuda_stream"},
        {"embedded:tpu", DROPKV_E_INVALID, "'tpu'"},
        {"embedded:cuda:4711", DROPKV_E_INVALID, "4711"},
    };
    (void)state;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    int something;
    options.cuda_stream = &something;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct dropkv_client *client = NULL;
        struct dropkv_error error;
        assert_int_equal(dropkv_client_open(wrong[i].endpoint, &options, &client, &error),
                         wrong[i].status);
        assert_non_null(strstr(error.text, wrong[i].text));
        assert_null(client);
    }
}

static void it_says_what_it_is(void **state)
{
    (void)state;
    struct dropkv_client *client = dkv_test_open("embedded:");
    struct dropkv_info *info;
    assert_int_equal(dropkv_health(client, 0, NULL), DROPKV_OK);
    assert_int_equal(dropkv_client_info(client, 0, &info, NULL), DROPKV_OK);
    assert_string_equal(info->server, "libdropkv (embedded)");
    assert_string_equal(info->version, dropkv_version());
    assert_memory_equal(info->backend, "cpu/", 4);
    dropkv_info_free(info);
    dropkv_client_close(client);
}

static int begin(void **state)
{
    (void)state;
    dkv_test_fill(query, sizeof(query), 41);
    dkv_test_fill(key, sizeof(key), 42);
    dkv_test_fill(value, sizeof(value), 43);
    return dkv_test_begin(program);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_those_of_a_daemon),
        cmocka_unit_test(errors_are_those_of_a_daemon),
        cmocka_unit_test(prompts_have_the_answers_of_a_daemon),
        cmocka_unit_test(prompts_are_answered_where_the_caller_wants_it),
        cmocka_unit_test(a_cache_may_go_while_its_prompts_wait),
        cmocka_unit_test(errors_of_prompts_are_those_of_a_daemon),
        cmocka_unit_test(clients_do_not_disturb_each_other),
        cmocka_unit_test(endpoints_and_options_are_checked),
        cmocka_unit_test(it_says_what_it_is),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, dkv_test_end);
}
