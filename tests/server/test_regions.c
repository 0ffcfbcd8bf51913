/* Regions of host memory: where answers may go, and whose memory named objects are. */
#include "tests/server/backend_world.h"

#include "server/region.h"
#include "server/server.h"
#include "server/shm.h"

#include <sys/stat.h>

static void note_settled(void *owner, const struct dkv_error *error)
{
    *(struct dkv_error *)owner = *error;
}

/* Registers [0, bytes) of the file for answers. */
static enum dkv_status add_output(struct world *world, int fd, uint64_t bytes, bool fills,
                                  struct dkv_region **region_out, struct dkv_error *err)
{
    struct dkv_error told = {.status = DKV_E_INTERNAL};
    const struct dkv_wire_region wire = {
        .kind = DKV_WIRE_REGION_MEMFD, .bytes = bytes, .writable = 1};
    const struct dkv_region_source source = {
        .wire = &wire, .fds = &fd, .connection = 1, .fills = fills};
    const enum dkv_status status = dkv_region_new(world->backend, &source, note_settled, &told,
                                                  region_out, err);
    while (status == DKV_OK && told.status == DKV_E_INTERNAL)
        turn(world);
    return status;
}

static void drop_output(struct world *world, struct dkv_region *region)
{
    struct dkv_error told = {.status = DKV_E_INTERNAL};
    dkv_region_detach(region, note_settled, &told);
    while (told.status == DKV_E_INTERNAL)
        turn(world);
    assert_null(dkv_region_abandon(region));
}

static uint64_t backed_bytes(int fd)
{
    struct stat info;
    assert_int_equal(fstat(fd, &info), 0);
    return (uint64_t)info.st_blocks * 512;
}

static void answers_make_no_pages_in_a_clients_file(void **state)
{
    enum { BYTES = 1 << 16 };
    static const char answer[BYTES / 2];
    struct world world;
    struct dkv_region *region = NULL;
    struct dkv_error err;
    (void)state;
    open_world(&world, NULL);
    for (int sealed = 0; sealed < 2; sealed++) {
        const int fd = make_file(BYTES, sealed == 1);
        write_file(fd, "x", 1, 0);
        assert_int_equal(add_output(&world, fd, BYTES, false, &region, &err), DKV_E_INVALID);
        assert_non_null(strstr(err.text, "has holes"));
        assert_int_equal(fallocate(fd, 0, 0, BYTES), 0);
        assert_int_equal(add_output(&world, fd, BYTES, false, &region, &err), DKV_OK);
        assert_int_equal(dkv_region_check_pages(region, &err), DKV_OK);
        assert_int_equal(dkv_region_write(region, 100, answer, sizeof(answer), &err), DKV_OK);
        assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, BYTES / 2),
                         0);
        const uint64_t left = backed_bytes(fd);
        assert_int_equal(dkv_region_check_pages(region, &err), DKV_E_INVALID);
        assert_int_equal(dkv_region_write(region, 0, answer, sizeof(answer), &err), DKV_E_INVALID);
        assert_int_equal(backed_bytes(fd), left);
        drop_output(&world, region);
        close(fd);
    }
    close_world(&world);
}

static void named_objects_are_filled(void **state)
{
    enum { BYTES = 1 << 16 };
    struct world world;
    struct dkv_region *region = NULL;
    struct dkv_error err;
    char byte = 0;
    (void)state;
    open_world(&world, NULL);
    const int fd = make_file(BYTES, false);
    assert_int_equal(add_output(&world, fd, BYTES, true, &region, &err), DKV_OK);
    assert_int_equal(dkv_region_write(region, 5000, "a", 1, &err), DKV_OK);
    assert_int_equal(pread(fd, &byte, 1, 5000), 1);
    assert_int_equal(byte, 'a');
    drop_output(&world, region);
    close(fd);
    close_world(&world);
}

/* ---- by name, over HTTP ---- */

static void on_registered(void *waiter, const struct dkv_error *error)
{
    *(struct dkv_error *)waiter = *error;
}

static const struct dkv_link_key *key_of(struct world *world, struct dkv_shm *shm,
                                         const char *owner, const char *key, const char *name)
{
    struct dkv_error told = {.status = DKV_E_INTERNAL}, err;
    struct dkv_oip_region region = {.bytes = 4096};
    struct dkv_region *found;
    snprintf(region.key, sizeof(region.key), "/%s", key);
    snprintf(region.name, sizeof(region.name), "%s", name);
    if (dkv_shm_register(shm, owner, &region, on_registered, &told, &err) != DKV_OK)
        fail_msg("%s", err.text);
    while (told.status == DKV_E_INTERNAL)
        turn(world);
    assert_int_equal(told.status, DKV_OK);
    assert_int_equal(dkv_shm_find(shm, owner, name, &found, &err), DKV_OK);
    return &found->loan->key;
}

/* What each of them has pinned is bounded by itself, and together by the user's. */
static void each_tokens_holder_lends_as_one_connection_of_the_daemons_user(void **state)
{
    struct world world;
    char name[64];
    (void)state;
    open_world(&world, NULL);
    struct dkv_server server = {.config = &world.config.config, .backend = world.backend};
    struct dkv_shm *shm = dkv_shm_open(&server);
    assert_non_null(shm);
    snprintf(name, sizeof(name), "test-regions-%d", (int)getpid());
    const int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 8192), 0);
    const struct dkv_link_key *first = key_of(&world, shm, "anna", name, "first");
    const struct dkv_link_key *second = key_of(&world, shm, "anna", name, "second");
    const struct dkv_link_key *others = key_of(&world, shm, "berta", name, "first");
    assert_true(first->owner == second->owner && first->owner != others->owner);
    assert_true(first->owner > UINT64_MAX / 2 && others->owner > UINT64_MAX / 2);
    assert_int_equal(first->user, geteuid());
    assert_int_equal(others->user, geteuid());
    shm_unlink(name);
    close(fd);
    dkv_backend_client_put(world.client);
    dkv_backend_close(world.backend);
    dkv_shm_close(shm);
    uv_run(&world.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&world.loop), 0);
    dkv_arena_close(&world.arena);
    dkv_config_fini(&world.config);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--worker") == 0)
        return dkv_worker_main();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_make_no_pages_in_a_clients_file),
        cmocka_unit_test(named_objects_are_filled),
        cmocka_unit_test(each_tokens_holder_lends_as_one_connection_of_the_daemons_user),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
