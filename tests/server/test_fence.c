/* How often a fence's slot is looked at, and what comes of it, at times of the test's. */
#include "server/fence.h"

#include "server/clock.h"
#include "server/loan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#define US UINT64_C(1000)
#define MS (1000 * US)

static struct {
    uv_loop_t loop;
    struct dkv_fences *fences;
    struct dkv_loan loan;
    struct dkv_region region;
    unsigned n_ready;
    enum dkv_status status;
} world;

static void on_ready(struct dkv_fence *fence, enum dkv_status status, const struct dkv_error *err)
{
    (void)fence;
    (void)err;
    world.n_ready++;
    world.status = status;
}

static int open_world(void **state)
{
    struct dkv_error err;
    (void)state;
    memset(&world, 0, sizeof(world));
    world.loan.fd = memfd_create("test", MFD_CLOEXEC);
    world.region = (struct dkv_region){.loan = &world.loan, .bytes = 64};
    uv_loop_init(&world.loop);
    return ftruncate(world.loan.fd, 64) != 0 ||
           dkv_fences_open(&world.loop, &world.fences, &err) != DKV_OK;
}

static int close_world(void **state)
{
    (void)state;
    dkv_fences_close(world.fences);
    uv_run(&world.loop, UV_RUN_DEFAULT);
    close(world.loan.fd);
    return uv_loop_close(&world.loop);
}

/* Waits for the slot at `offset` to be 5; `before_ns` ago it began. */
static void wait_for(struct dkv_fence *fence, uint64_t offset, uint64_t before_ns)
{
    *fence = (struct dkv_fence){.region = &world.region,
                                .offset = offset,
                                .value = 5,
                                .deadline_ns = UINT64_MAX,
                                .ready = on_ready};
    dkv_list_init(&fence->node);
    dkv_fence_wait(world.fences, fence);
    fence->since_ns -= before_ns;
}

static void write_slot(off_t offset, uint64_t value)
{
    assert_int_equal(pwrite(world.loan.fd, &value, sizeof(value), offset), sizeof(value));
}

static void who_waits_for_long_is_not_looked_at_more_often_when_others_come(void **state)
{
    struct dkv_fence old, young;
    uint64_t n_old = 0, n_young = 0;
    (void)state;
    wait_for(&old, 0, 1000 * MS);
    wait_for(&young, 8, 0);
    const uint64_t start_ns = young.since_ns;
    for (uint64_t at_ns = start_ns; at_ns < start_ns + 20 * MS; at_ns += 50 * US) {
        const uint64_t old_ns = old.next_ns, young_ns = young.next_ns;
        const uint64_t pause_ns = dkv_fences_look(world.fences, at_ns);
        assert_true(pause_ns > 0 && pause_ns <= 1 * MS);
        n_old += old.next_ns != old_ns;
        n_young += young.next_ns != young_ns;
    }
    assert_in_range(n_old, 19, 21);   /* once a millisecond */
    assert_in_range(n_young, 50, 90); /* 20 times in the first, ever less then */
    dkv_fence_drop(&old);
    dkv_fence_drop(&young);
    assert_int_equal(dkv_fences_look(world.fences, start_ns + 30 * MS), 0);
    assert_int_equal(world.n_ready, 0);
}

static void each_is_decided_at_its_own_turn(void **state)
{
    struct dkv_fence old, young;
    (void)state;
    wait_for(&old, 0, 1000 * MS);
    wait_for(&young, 8, 0);
    const uint64_t start_ns = young.since_ns;
    (void)dkv_fences_look(world.fences, start_ns + 50 * US);
    write_slot(0, 5);
    write_slot(8, 6);
    assert_int_equal(dkv_fences_look(world.fences, start_ns + 60 * US), 40 * US);
    assert_int_equal(world.n_ready, 0);
    assert_in_range(dkv_fences_look(world.fences, start_ns + 100 * US), 1, 1 * MS);
    assert_int_equal(world.n_ready, 1);
    assert_int_equal(world.status, DKV_OK);
    assert_int_equal(dkv_fences_look(world.fences, start_ns + 1100 * US), 0);
    assert_int_equal(world.n_ready, 2);
    assert_int_equal(world.status, DKV_OK);
}

static void a_deadline_is_told(void **state)
{
    struct dkv_fence fence;
    (void)state;
    wait_for(&fence, 16, 0);
    fence.deadline_ns = fence.since_ns + 70 * US;
    (void)dkv_fences_look(world.fences, fence.since_ns + 50 * US);
    assert_int_equal(world.n_ready, 0);
    assert_int_equal(dkv_fences_look(world.fences, fence.since_ns + 100 * US), 0);
    assert_int_equal(world.n_ready, 1);
    assert_int_equal(world.status, DKV_E_TIMEOUT);
}

/* No turn takes long, and nobody is forgotten. */
static void a_crowd_is_looked_at_in_turns(void **state)
{
    enum { N = 1000, TURN = 256 };
    static struct dkv_fence fences[N];
    uint64_t seen_ns[N];
    (void)state;
    for (int i = 0; i < N; i++)
        wait_for(&fences[i], 24, 1000 * MS);
    const uint64_t start_ns = fences[N - 1].next_ns;
    uint64_t at_ns = start_ns;
    for (int turn = 0; turn < 8; turn++) {
        unsigned n_looked = 0;
        for (int i = 0; i < N; i++)
            seen_ns[i] = fences[i].next_ns;
        const uint64_t pause_ns = dkv_fences_look(world.fences, at_ns);
        assert_in_range(pause_ns, 200 * US, 300 * US);
        for (int i = 0; i < N; i++)
            n_looked += fences[i].next_ns != seen_ns[i];
        assert_in_range(n_looked, turn < 3 ? TURN : 1, TURN);
        at_ns += pause_ns;
    }
    for (int i = 0; i < N; i++)
        assert_true(fences[i].next_ns > start_ns); /* looked at since */
    write_slot(24, 5);
    while (dkv_fences_look(world.fences, at_ns) > 0)
        at_ns += 256 * US;
    assert_int_equal(world.n_ready, N);
    assert_true(at_ns < start_ns + 8 * MS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_crowd_is_looked_at_in_turns, open_world, close_world),
        cmocka_unit_test_setup_teardown(
            who_waits_for_long_is_not_looked_at_more_often_when_others_come, open_world,
            close_world),
        cmocka_unit_test_setup_teardown(each_is_decided_at_its_own_turn, open_world, close_world),
        cmocka_unit_test_setup_teardown(a_deadline_is_told, open_world, close_world),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
