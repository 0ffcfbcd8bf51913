/* What happens to registered caches, stashes and buffers: outputs, fences, detaching, a new daemon,
 * errors, removal.
 *
 * usage: test_client_cache_life DROPKVD
 */
#include "tests/client/cache_world.h"

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
    assert_int_equal(dropkv_cache_remove(world.client, prompt.cache), DROPKV_OK);
    assert_int_equal(dropkv_cache_remove(world.client, NULL), DROPKV_OK);
    assert_int_equal(dropkv_cache_add(http, &layout, &cache, &error), DROPKV_E_UNSUPPORTED);
    dropkv_client_close(http);
    close_world(&other);
    close_world(&world);
}

static void what_is_anothers_is_not_removed(void **unused)
{
    struct world world = open_world();
    struct world other = open_world();
    struct dropkv_client *http = dkv_test_open("http://127.0.0.1:1");
    (void)unused;
    assert_int_equal(dropkv_cache_remove(world.client, other.cache), DROPKV_E_INVALID);
    assert_int_equal(dropkv_stash_remove(world.client, other.stash), DROPKV_E_INVALID);
    assert_int_equal(dropkv_cache_remove(http, other.cache), DROPKV_E_INVALID);
    assert_int_equal(dropkv_stash_remove(http, other.stash), DROPKV_E_INVALID);
    const struct dropkv_prompt prompt = make_prompt(&other);
    struct dropkv_result *result = ask(&other, &prompt);
    assert_layers(result, 0, LAYERS, NULL);
    dropkv_result_free(result);
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_goes_where_the_caller_wants_it),
        cmocka_unit_test(nothing_is_read_before_the_fence),
        cmocka_unit_test(a_detached_buffer_is_let_go_of_and_comes_back),
        cmocka_unit_test(a_new_daemon_is_told_of_everything),
        cmocka_unit_test(what_is_wrong_is_told_by_name),
        cmocka_unit_test(what_is_anothers_is_not_removed),
        cmocka_unit_test(what_is_removed_while_it_is_used_is_still_answered),
        cmocka_unit_test(what_is_removed_before_it_is_registered_leaves_nothing),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, dkv_test_end);
}
