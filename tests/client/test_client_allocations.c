/* Once a client has had as many requests in flight as it ever will, a request allocates nothing:
 * malloc and its kin are wrapped and counted.
 *
 * usage: test_client_allocations DROPKVD
 */
#include "client/cli/synth.h"
#include "tests/client/calls.h"
#include "tests/client/ipc_fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    Q_HEADS = 4,
    KV_HEADS = 2,
    TOKENS = 256,
    DIM = 32,
    ROWS = 8,
    BATCH = 3,
    PIPELINE = 16,
    N = 50
};

struct tensors {
    float query[BATCH][Q_HEADS][ROWS][DIM];
    float key[BATCH][KV_HEADS][TOKENS][DIM];
    float value[BATCH][KV_HEADS][TOKENS][DIM];
};

static const char *program;
static struct tensors tensors;
static size_t n_allocations;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__real_reallocarray(void *old, size_t n, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_reallocarray(void *old, size_t n, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    n_allocations++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    n_allocations++;
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
    n_allocations++;
    return __real_realloc(old, bytes);
}

void *__wrap_reallocarray(void *old, size_t n, size_t bytes)
{
    n_allocations++;
    return __real_reallocarray(old, n, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    n_allocations++;
    return __real_aligned_alloc(alignment, bytes);
}

static const float sinks[Q_HEADS] = {1, 2, 3, 4};

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static struct dropkv_request make_request(const struct tensors *from, uint32_t batch, int scores)
{
    static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, 20, 0, NULL}};
    struct dropkv_request r = dkv_test_request(&shape, batch, from->query, from->key, from->value);
    r.sink_logits = sinks;
    r.params = params;
    r.n_params = 1;
    r.want_scores = scores;
    return r;
}

/* As many as the pipeline holds, of different kinds, each taken and freed. No prompt: NULL. `held`:
 * the daemon reads nothing until all are submitted, so that as many wait to be sent as ever can. */
static void run(struct dropkv_client *client, const struct tensors *shared,
                const struct dropkv_prompt *prompt, bool held)
{
    struct dropkv_result *result;
    struct dropkv_error error;
    if (held)
        kill(dkv_test_daemon_pid, SIGSTOP);
    for (uint32_t i = 0; i < PIPELINE; i++) {
        const struct dropkv_request r = make_request(i % 4 == 3 ? &tensors : shared, 1 + i % BATCH,
                                                     i % 2);
        const enum dropkv_status status = i % 5 == 4 && prompt != NULL
                                              ? dropkv_submit_prompt(client, prompt, NULL, &error)
                                              : dropkv_submit(client, &r, NULL, &error);
        if (status != DROPKV_OK)
            fail_msg("%s", error.text);
    }
    if (held)
        kill(dkv_test_daemon_pid, SIGCONT);
    while (dropkv_in_flight(client) > 0) {
        if (dropkv_dispatch(client, -1, &error) != DROPKV_OK)
            fail_msg("%s", error.text);
        while ((result = dropkv_next_result(client)) != NULL) {
            if (result->status != DROPKV_OK)
                fail_msg("%s", result->error_text);
            dropkv_result_free(result);
        }
    }
    const struct dropkv_request r = make_request(shared, 1, 0);
    if (dropkv_score(client, &r, &result, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    dropkv_result_free(result);
}

static struct dropkv_prompt make_prompt(struct dropkv_client *client,
                                        const struct dropkv_buffer *buffer)
{
    static const int32_t table[TOKENS / 16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                               8, 9, 10, 11, 12, 13, 14, 15};
    struct dropkv_view view = {.buffer = buffer,
                               .offset = offsetof(struct tensors, key),
                               .dtype = DROPKV_FP32,
                               .page_stride = 16 * DIM * sizeof(float),
                               .token_stride = DIM * sizeof(float),
                               .head_stride = TOKENS * DIM * sizeof(float)};
    struct dropkv_layer layer = {view, view};
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout stash = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    layer.value.offset = offsetof(struct tensors, value);
    layout.q_heads = Q_HEADS;
    layout.kv_heads = KV_HEADS;
    layout.head_dim = DIM;
    layout.page_tokens = 16;
    layout.n_layers = 1;
    layout.layers = &layer;
    stash.buffer = buffer;
    stash.dtype = DROPKV_FP32;
    stash.n_layers = 1;
    stash.n_slots = 1;
    stash.n_rows = ROWS;
    stash.row_stride = DIM * sizeof(float);
    stash.head_stride = ROWS * DIM * sizeof(float);
    assert_int_equal(dropkv_cache_add(client, &layout, &prompt.cache, NULL), DROPKV_OK);
    assert_int_equal(dropkv_stash_add(client, &stash, &prompt.stash, NULL), DROPKV_OK);
    prompt.n_tokens = TOKENS;
    prompt.newest_row = ROWS - 1;
    prompt.q_rows = ROWS;
    prompt.table = table;
    prompt.table_entries = TOKENS / 16;
    prompt.table_entry_bytes = 4;
    return prompt;
}

static void a_request_like_earlier_ones_allocates_nothing(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_buffer *buffer = dkv_test_buffer(client, sizeof(tensors), false);
    const struct dropkv_prompt prompt = make_prompt(client, buffer);
    (void)unused;
    memcpy(dropkv_buffer_data(buffer), &tensors, sizeof(tensors));
    assert_true(n_allocations > 0); /* they are counted */
    for (int i = 0; i < 3 * BATCH * PIPELINE; i++)
        run(client, dropkv_buffer_data(buffer), &prompt, i % PIPELINE == 0);
    const size_t before = n_allocations;
    for (int i = 0; i < N; i++)
        run(client, dropkv_buffer_data(buffer), &prompt, false);
    assert_int_equal(n_allocations - before, 0);
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
}

/* The engine is linked, so its allocations are counted, too. */
static void nor_does_one_to_the_embedded_engine(void **unused)
{
    struct dropkv_client *client = dkv_test_open("embedded:cpu?threads=2");
    (void)unused;
    for (int i = 0; i < 3 * BATCH; i++)
        run(client, &tensors, NULL, false);
    const size_t before = n_allocations;
    for (int i = 0; i < N; i++)
        run(client, &tensors, NULL, false);
    assert_int_equal(n_allocations - before, 0);
    dropkv_client_close(client);
}

static void a_result_outlives_its_client(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    const struct dropkv_request r = make_request(&tensors, BATCH, 1);
    (void)unused;
    struct dropkv_result *first = dkv_test_score(client, &r);
    struct dropkv_result *second = dkv_test_score(client, &r);
    dropkv_result_free(dkv_test_score(client, &r));
    dropkv_client_close(client);
    assert_memory_equal(first->scores, second->scores, BATCH * KV_HEADS * TOKENS * sizeof(float));
    dropkv_result_free(first);
    dropkv_result_free(second);
}

static int begin(void **unused)
{
    (void)unused;
    dkv_test_fill(&tensors, sizeof(tensors), 23);
    return dkv_test_begin(program);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_like_earlier_ones_allocates_nothing),
        cmocka_unit_test(nor_does_one_to_the_embedded_engine),
        cmocka_unit_test(a_result_outlives_its_client),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, dkv_test_end);
}
