/* Where the system has no room for one more descriptor to poll: who comes is turned away, and what
 * begins does not begin, and nothing else. The linker sends uv_poll_init() here (--wrap). */
#include "tests/server/backend_world.h"

#include "server/session_priv.h"

#include <sys/socket.h>

static int polls_left;

int __real_uv_poll_init(uv_loop_t *loop, uv_poll_t *handle, int fd);
int __wrap_uv_poll_init(uv_loop_t *loop, uv_poll_t *handle, int fd);

int __wrap_uv_poll_init(uv_loop_t *loop, uv_poll_t *handle, int fd)
{
    return polls_left-- > 0 ? __real_uv_poll_init(loop, handle, fd) : UV_ENOSPC;
}

static void a_session_that_cannot_be_polled_is_turned_away(void **state)
{
    struct world world;
    struct dkv_error err = {0};
    int ends[2];
    char byte;
    (void)state;
    polls_left = 100;
    open_world(&world, NULL);
    struct dkv_server server = {
        .config = &world.config.config, .backend = world.backend, .loop = &world.loop};
    struct dkv_sessions all = {.server = &server};
    dkv_list_init(&all.sessions);
    const unsigned before = count_entries(getpid(), "fd");
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    polls_left = 0;
    assert_int_equal(dkv_session_new(&all, ends[0], geteuid(), &err), DKV_E_NOMEM);
    assert_int_equal(read(ends[1], &byte, 1), 0); /* closed */
    assert_int_equal(all.n_sessions, 0);
    close(ends[1]);
    assert_int_equal(count_entries(getpid(), "fd"), before);
    close_world(&world);
}

static void a_worker_whose_link_cannot_be_polled_does_not_start(void **state)
{
    struct dkv_config_state config;
    struct dkv_error err = {0};
    struct dkv_backend *backend = NULL;
    struct dkv_arena arena;
    uv_loop_t loop;
    (void)state;
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_ERROR, STDERR_FILENO);
    dkv_config_init(&config);
    uv_loop_init(&loop);
    assert_int_equal(dkv_arena_open(&arena, UINT64_C(1) << 32, 1u << 24, &err), DKV_OK);
    polls_left = 0;
    assert_int_equal(dkv_backend_open(&config.config, &loop, &arena, &backend, &err), DKV_E_NOMEM);
    assert_null(backend);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    dkv_arena_close(&arena);
    dkv_config_fini(&config);
}

static void fences_that_cannot_be_polled_do_not_open(void **state)
{
    struct dkv_error err = {0};
    struct dkv_fences *fences = NULL;
    uv_loop_t loop;
    (void)state;
    uv_loop_init(&loop);
    polls_left = 0;
    assert_int_equal(dkv_fences_open(&loop, &fences, &err), DKV_E_IO);
    assert_null(fences);
    assert_int_equal(uv_loop_close(&loop), 0);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--worker") == 0)
        return dkv_worker_main();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_that_cannot_be_polled_is_turned_away),
        cmocka_unit_test(a_worker_whose_link_cannot_be_polled_does_not_start),
        cmocka_unit_test(fences_that_cannot_be_polled_do_not_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
