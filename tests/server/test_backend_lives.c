/* How long things last behind the backend: loans, clients, workers that die meanwhile, batches in
 * flight. */
#include "tests/server/backend_world.h"

static void a_loan_lasts_until_its_last_job_has_ended(void **state)
{
    struct world world;
    bool done, released = false;
    (void)state;
    open_world(&world, NULL);
    const int fd = make_file(ALL_BYTES, true);
    write_file(fd, data, ALL_BYTES, 0);
    struct dkv_loan *loan = lend(&world, fd, 0, ALL_BYTES);
    close(fd);
    const struct dkv_block block = dense_block(dkv_loan_base(loan));
    struct dkv_job *job = make_job(&world, &block, loan);
    submit(&world, job, &done);
    dkv_backend_detach(loan, note_released, &released);
    assert_false(released);
    while (!done) {
        assert_false(released);
        turn(&world);
    }
    assert_int_equal(job->status, DKV_OK);
    while (!released)
        turn(&world);
    dkv_job_free(job);
    close_world(&world);
}

/* The client goes in every state its request can be in; nothing stays. */
static void clients_that_vanish_leave_nothing_behind(void **state)
{
    struct world world;
    (void)state;
    open_world(&world, NULL);
    unsigned front = 0, worker = 0;
    for (int round = 0; round < 300; round++) {
        bool done, released = false;
        const int fd = make_file(ALL_BYTES, round % 2 == 0);
        write_file(fd, data, ALL_BYTES, 0);
        struct dkv_loan *loan = lend(&world, fd, 0, ALL_BYTES);
        close(fd);
        const struct dkv_block block = dense_block(dkv_loan_base(loan));
        struct dkv_job *job = make_job(&world, &block, loan);
        const uint64_t began_ns = dkv_clock_ns();
        submit(&world, job, &done);
        for (int i = 0; i < round % 5; i++)
            uv_run(&world.loop, UV_RUN_NOWAIT);
        dkv_backend_client_cancel(world.client);
        dkv_backend_detach(loan, note_released, &released);
        while (!done || !released)
            turn(&world);
        assert_true(dkv_clock_ns() - began_ns < UINT64_C(1000000000));
        assert_true(job->status == DKV_E_CANCELLED || job->status == DKV_OK);
        dkv_job_free(job);
        if (round == 10) {
            front = holdings(getpid());
            worker = holdings(worker_pid(&world));
        }
    }
    assert_true(holdings(getpid()) <= front + 4);
    assert_true(holdings(worker_pid(&world)) <= worker + 4);
    close_world(&world);
}

/* ... also when many of its requests end at once, in one batch. */
static void a_client_that_left_lasts_until_its_last_job_is_handed_out(void **state)
{
    enum { N = 8 };
    struct world world;
    struct dkv_job *jobs[N];
    bool done[N];
    (void)state;
    open_world(&world, NULL);
    void *copy = dkv_arena_alloc(&world.arena, ALL_BYTES);
    memcpy(copy, data, ALL_BYTES);
    const struct dkv_block block = dense_block(copy);
    for (int i = 0; i < N; i++) {
        jobs[i] = make_job(&world, &block, NULL);
        submit(&world, jobs[i], &done[i]);
    }
    while (!done[0]) /* the others collected meanwhile, and run now */
        turn(&world);
    dkv_backend_client_cancel(world.client);
    dkv_backend_client_put(world.client);
    for (int i = 0; i < N; i++) {
        while (!done[i])
            turn(&world);
        dkv_job_free(jobs[i]);
    }
    world.client = dkv_backend_client_get(world.backend, NULL);
    dkv_arena_free(&world.arena, copy, ALL_BYTES, ALL_BYTES);
    close_world(&world);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* 8 GiB of clients' memory are mapped, as 256 loans of one file without holes; each new worker maps
 * them all again and answers from the last one. */
static void killed_workers_are_replaced_with_their_loans(void **state)
{
    enum { KILLS = 50, LOANS = 256 };
    struct dkv_loan *loans[LOANS];
    struct world world;
    double ms[KILLS];
    int32_t keep[KV_HEADS * KEEP];
    (void)state;
    open_world(&world, NULL);
    const uint64_t bytes = UINT64_C(32) << 20, at = bytes - ALL_BYTES;
    const int fd = make_file(bytes, true);
    assert_int_equal(fallocate(fd, 0, 0, (off_t)bytes), 0);
    write_file(fd, data, ALL_BYTES, at);
    for (int i = 0; i < LOANS; i++)
        loans[i] = lend(&world, fd, 0, bytes);
    struct dkv_loan *loan = loans[LOANS - 1];
    assert_false(loan->loose);
    close(fd);
    struct dkv_block block = dense_block((const char *)dkv_loan_base(loan) + at);
    expected_answer(&world, keep);
    for (int i = 0; i < KILLS; i++) {
        bool done;
        struct dkv_backend_info info;
        const int old = worker_pid(&world);
        struct dkv_job *job = make_job(&world, &block, loan);
        const uint64_t began_ns = dkv_clock_ns();
        submit(&world, job, &done); /* in flight, or about to be, when the worker dies */
        kill(old, SIGKILL);
        while (!done)
            turn(&world);
        if (job->status != DKV_OK)
            fail_msg("%s", job->error.text);
        assert_memory_equal(job->keep, keep, sizeof(keep));
        dkv_job_free(job);
        /* The old one may have been quick enough: the new one has to answer too. */
        for (dkv_backend_info(world.backend, &info); !info.ready || info.workers[0].pid == old;
             dkv_backend_info(world.backend, &info))
            turn(&world);
        check_answer(&world, &block, loan);
        ms[i] = (double)(dkv_clock_ns() - began_ns) * 1e-6;
    }
    qsort(ms, KILLS, sizeof(ms[0]), by_value);
    print_message("8 GiB lent, %d workers killed: answered after %.1f ms (median), %.1f ms "
                  "(worst), 0 lost\n",
                  KILLS, ms[KILLS / 2], ms[KILLS - 1]);
    assert_true(ms[KILLS / 2] < 500 && ms[KILLS - 1] < 1000);
    for (int i = 0; i < LOANS; i++)
        give_back(&world, loans[i]);
    close_world(&world);
}

struct end {
    struct dkv_loan *loans[2];
    bool told;
    unsigned n_released;
};

static void count_released(void *owner)
{
    ((struct end *)owner)->n_released++;
}

/* What a session does that finds its connection closed as it sends the answer. */
static void give_back_both(struct dkv_loan *loan, void *owner, const struct dkv_error *error)
{
    struct end *end = owner;
    (void)loan;
    (void)error;
    end->told = true;
    for (int i = 0; i < 2; i++)
        dkv_backend_detach(end->loans[i], count_released, end);
}

/* Its owner is told of a loan when the worker that should have mapped it has died, and gives back
 * all it has, which that worker had mapped. */
static void an_owner_may_go_when_it_is_told_that_a_worker_died(void **state)
{
    struct world world;
    struct dkv_error err;
    (void)state;
    open_world(&world, NULL);
    const int fd = make_file(ALL_BYTES, true);
    for (int late = 0; late < 2; late++) { /* the one that waits is first and last of the table */
        struct end end = {0};
        struct dkv_loan *first = lend(&world, fd, 0, ALL_BYTES);
        end.loans[0] = lend(&world, fd, 0, ALL_BYTES);
        if (late == 0)
            give_back(&world, first);
        const int pid = worker_pid(&world);
        kill(pid, SIGSTOP);
        assert_int_equal(dkv_backend_attach(world.backend, fd, 0, ALL_BYTES, false, 1, 0,
                                            give_back_both, &end, &end.loans[1], &err),
                         DKV_OK);
        kill(pid, SIGKILL);
        while (end.n_released < 2)
            turn(&world);
        assert_true(end.told);
        struct dkv_backend_info info;
        for (dkv_backend_info(world.backend, &info); !info.ready;
             dkv_backend_info(world.backend, &info))
            turn(&world);
        if (late == 1)
            give_back(&world, first);
    }
    close(fd);
    close_world(&world);
}

static void two_batches_can_be_in_flight(void **state)
{
    static const char *const options[] = {
        "batches_in_flight", "2", "max_batch_items", "1", "max_queue_delay_us", "0", NULL};
    enum { N = 20 };
    struct world world;
    struct dkv_job *jobs[N];
    bool done[N];
    int32_t keep[KV_HEADS * KEEP];
    unsigned most = 0;
    (void)state;
    open_world(&world, options);
    expected_answer(&world, keep);
    void *copy = dkv_arena_alloc(&world.arena, ALL_BYTES);
    memcpy(copy, data, ALL_BYTES);
    const struct dkv_block block = dense_block(copy);
    for (int i = 0; i < N; i++) {
        jobs[i] = make_job(&world, &block, NULL);
        submit(&world, jobs[i], &done[i]);
    }
    for (int i = 0; i < N; i++) {
        while (!done[i]) {
            struct dkv_backend_info info;
            dkv_backend_info(world.backend, &info);
            most = info.n_running > most ? info.n_running : most;
            turn(&world);
        }
        assert_int_equal(jobs[i]->status, DKV_OK);
        assert_memory_equal(jobs[i]->keep, keep, sizeof(keep));
        dkv_job_free(jobs[i]);
    }
    assert_int_equal(most, 2);
    dkv_arena_free(&world.arena, copy, ALL_BYTES, ALL_BYTES);
    close_world(&world);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--worker") == 0)
        return dkv_worker_main();
    fill_data();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_loan_lasts_until_its_last_job_has_ended),
        cmocka_unit_test(clients_that_vanish_leave_nothing_behind),
        cmocka_unit_test(a_client_that_left_lasts_until_its_last_job_is_handed_out),
        cmocka_unit_test(killed_workers_are_replaced_with_their_loans),
        cmocka_unit_test(an_owner_may_go_when_it_is_told_that_a_worker_died),
        cmocka_unit_test(two_batches_can_be_in_flight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
