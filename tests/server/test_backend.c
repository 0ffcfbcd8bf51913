/* The backend with a real worker: memory that clients lend, of every kind, has the answer of memory
 * that was sent. */
#include "tests/server/backend_world.h"

static void lent_memory_has_the_same_answer_as_sent_memory(void **state)
{
    struct world world;
    (void)state;
    open_world(&world, NULL);
    for (int sealed = 0; sealed <= 1; sealed++) {
        const uint64_t at = 12345 * sizeof(float); /* not on a page */
        const int fd = make_file(at + ALL_BYTES, sealed);
        write_file(fd, data, ALL_BYTES, at);
        struct dkv_loan *loan = lend(&world, fd, at, ALL_BYTES);
        close(fd); /* the backend has its own */
        const struct dkv_block block = dense_block(dkv_loan_base(loan));
        check_answer(&world, &block, loan);
        give_back(&world, loan);
    }
    close_world(&world);
}

/* The same tokens in pages in random order, keys and values packed, the table on the heap. */
static void pages_are_found_wherever_they_lie(void **state)
{
    struct world world;
    int32_t table[N_PAGES];
    (void)state;
    open_world(&world, NULL);
    for (int sealed = 0; sealed <= 1; sealed++) {
        const uint64_t n_slots = 4 * N_PAGES, pages_at = Q_BYTES;
        const uint64_t bytes = pages_at + n_slots * 2 * PAGE_BYTES;
        const int fd = make_file(bytes, sealed);
        write_file(fd, data, Q_BYTES, 0);
        for (uint32_t t = 0; t < TOKENS; t++) {
            table[t / PAGE] = (int32_t)((t / PAGE * 53u + 17u) % n_slots);
            for (uint32_t h = 0; h < KV_HEADS; h++)
                for (uint32_t kv = 0; kv < 2; kv++)
                    write_file(fd,
                               data + (Q_BYTES + kv * KV_BYTES) / sizeof(float) +
                                   (h * TOKENS + t) * DIM,
                               DIM * sizeof(float),
                               pages_at + ((uint64_t)table[t / PAGE] * 2 + kv) * PAGE_BYTES +
                                   (h * PAGE + t % PAGE) * DIM * sizeof(float));
        }
        struct dkv_loan *loan = lend(&world, fd, 0, bytes);
        struct dkv_block block = dense_block(dkv_loan_base(loan));
        block.page_tokens = PAGE;
        block.table = (struct dkv_page_table){
            .entries = table, .n_entries = N_PAGES, .entry_bytes = 4};
        block.key = (struct dkv_view){.base = dkv_loan_base(loan),
                                      .bytes = bytes,
                                      .offset = pages_at,
                                      .page_stride = 2 * PAGE_BYTES,
                                      .token_stride = DIM * sizeof(float),
                                      .head_stride = PAGE * DIM * sizeof(float),
                                      .dtype = DKV_FP32};
        block.value = block.key;
        block.value.offset += PAGE_BYTES;
        check_answer(&world, &block, loan);
        give_back(&world, loan);
        close(fd);
    }
    close_world(&world);
}

static void a_file_cut_short_fails_its_own_request_alone(void **state)
{
    struct world world;
    bool done[2];
    (void)state;
    open_world(&world, NULL);
    const int fd = make_file(ALL_BYTES, false);
    write_file(fd, data, ALL_BYTES, 0);
    struct dkv_loan *loan = lend(&world, fd, 0, ALL_BYTES);
    const struct dkv_block bad_block = dense_block(dkv_loan_base(loan));
    void *copy = dkv_arena_alloc(&world.arena, ALL_BYTES);
    memcpy(copy, data, ALL_BYTES);
    const struct dkv_block good_block = dense_block(copy);
    const int worker = worker_pid(&world);
    for (int round = 0; round < 20; round++) {
        assert_int_equal(ftruncate(fd, round % 2 == 0 ? 0 : 4096 * round), 0);
        struct dkv_job *bad = make_job(&world, &bad_block, loan);
        struct dkv_job *good = make_job(&world, &good_block, NULL);
        submit(&world, bad, &done[0]);
        submit(&world, good, &done[1]);
        while (!done[0] || !done[1])
            turn(&world);
        assert_int_equal(bad->status, DKV_E_INVALID);
        assert_int_equal(good->status, DKV_OK);
        dkv_job_free(bad);
        dkv_job_free(good);
    }
    assert_int_equal(worker_pid(&world), worker);
    dkv_arena_free(&world.arena, copy, ALL_BYTES, ALL_BYTES);
    give_back(&world, loan);
    close(fd);
    close_world(&world);
}

struct tasks {
    _Atomic uint32_t seen[1000];
    _Atomic unsigned n_meeting; /* tasks that wait for another one */
};

static enum dkv_status mark_task(void *context, uint64_t task, struct dkv_error *err)
{
    struct tasks *tasks = context;
    tasks->seen[task]++;
    return task % 100 == 99 ? dkv_error_set(err, DKV_E_INVALID, "task %u", (unsigned)task) : DKV_OK;
}

/* Ends when two are here at a time, which takes two threads. */
static enum dkv_status meet(void *context, uint64_t task, struct dkv_error *err)
{
    struct tasks *tasks = context;
    const uint64_t patience_ns = dkv_clock_ns() + UINT64_C(60000000000);
    tasks->n_meeting++;
    while (tasks->n_meeting < 2)
        if (dkv_clock_ns() > patience_ns)
            return dkv_error_set(err, DKV_E_TIMEOUT, "task %u is alone", (unsigned)task);
    return DKV_OK;
}

static void readers_do_every_task_once_and_together(void **state)
{
    static const uint64_t counts[] = {0, 1, 2, 99, 1000};
    struct dkv_readers *readers = dkv_readers_open();
    struct dkv_error err;
    (void)state;
    for (int alone = 0; alone < 2; alone++)
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
            struct tasks tasks = {0};
            const enum dkv_status status = dkv_readers_run(alone ? NULL : readers, mark_task,
                                                           &tasks, counts[i], &err);
            assert_int_equal(status, counts[i] >= 100 ? DKV_E_INVALID : DKV_OK);
            for (uint64_t task = 0; task < 1000; task++)
                assert_int_equal(tasks.seen[task], task < counts[i]);
        }
    struct tasks tasks = {0};
    if (readers != NULL)
        assert_int_equal(dkv_readers_run(readers, meet, &tasks, 2, &err), DKV_OK);
    dkv_readers_close(readers);
}

/* Caches above what threads read together, no two tokens alike: read by copying and in place they
 * have one answer, dense, with a token's heads side by side, and in pages in any order. */
static void large_loose_memory_is_read_whole_in_every_layout(void **state)
{
    enum { MANY = 70000, BIG_PAGE = 64, BIG_PAGES = (MANY + BIG_PAGE - 1) / BIG_PAGE };
    const uint64_t row = DIM * sizeof(float), q_bytes = Q_BYTES;
    const uint64_t kv_bytes = (uint64_t)BIG_PAGES * BIG_PAGE * KV_HEADS * row;
    const uint64_t all_bytes = q_bytes + 2 * kv_bytes;
    int32_t table[BIG_PAGES];
    struct world world;
    int fds[2];
    (void)state;
    assert_true(MANY * KV_HEADS * row > DKV_READERS_FROM);
    assert_true(MANY * row < DKV_READERS_FROM); /* one head alone is not */
    open_world(&world, NULL);
    for (uint32_t i = 0; i < BIG_PAGES; i++)
        table[i] = (int32_t)(i * 613u % BIG_PAGES); /* a prime that does not divide it */
    for (int sealed = 0; sealed <= 1; sealed++) {
        fds[sealed] = make_file(all_bytes, sealed);
        float *map = mmap(NULL, all_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[sealed], 0);
        assert_true(map != MAP_FAILED);
        uint32_t seed = 5;
        for (uint64_t i = 0; i < all_bytes / sizeof(float); i++) {
            seed = seed * 1664525u + 1013904223u;
            map[i] = (float)(seed >> 8) / (float)(1u << 24) - 0.5f;
        }
        munmap(map, all_bytes);
    }
    for (int layout = 0; layout < 3; layout++) {
        int32_t keep[2][KV_HEADS * KEEP];
        for (int sealed = 0; sealed <= 1; sealed++) {
            struct dkv_loan *loan = lend(&world, fds[sealed], 0, all_bytes);
            assert_int_equal(loan->loose, !sealed);
            struct dkv_block block = dense_block(dkv_loan_base(loan));
            block.n_tokens = MANY;
            block.key = (struct dkv_view){.base = dkv_loan_base(loan),
                                          .bytes = all_bytes,
                                          .offset = q_bytes,
                                          .token_stride = (int64_t)row,
                                          .head_stride = (int64_t)(MANY * row),
                                          .dtype = DKV_FP32};
            if (layout > 0) {
                block.key.token_stride = (int64_t)(KV_HEADS * row);
                block.key.head_stride = (int64_t)row;
            }
            if (layout == 2) {
                block.page_tokens = BIG_PAGE;
                block.key.page_stride = (int64_t)(BIG_PAGE * KV_HEADS * row);
                block.table = (struct dkv_page_table){
                    .entries = table, .n_entries = BIG_PAGES, .entry_bytes = 4};
            }
            block.value = block.key;
            block.value.offset += kv_bytes;
            struct dkv_job *job = make_job(&world, &block, loan);
            if (run(&world, job) != DKV_OK)
                fail_msg("%s", job->error.text);
            memcpy(keep[sealed], job->keep, sizeof(keep[sealed]));
            dkv_job_free(job);
            give_back(&world, loan);
        }
        assert_memory_equal(keep[0], keep[1], sizeof(keep[0]));
    }
    close(fds[0]);
    close(fds[1]);
    close_world(&world);
}

static void what_is_no_memory_or_too_small_is_refused(void **state)
{
    struct world world;
    struct dkv_error err;
    struct dkv_loan *loan;
    int ends[2];
    (void)state;
    open_world(&world, NULL);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    const int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    const int file = make_file(8192, true);
    const struct {
        int fd;
        uint64_t offset, bytes;
    } rows[] = {
        {ends[0], 0, 4096},        {zero, 0, 4096},          {-1, 0, 4096},
        {file, 0, 8193},           {file, 8192, 1},          {file, 1, 8192},
        {file, UINT64_MAX, 2},     {file, 4096, UINT64_MAX}, {file, 0, 0},
        {file, UINT64_MAX - 1, 1},
    };
    const unsigned fds = count_entries(getpid(), "fd");
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        assert_int_equal(dkv_backend_attach(world.backend, rows[i].fd, rows[i].offset,
                                            rows[i].bytes, false, 1, 0, NULL, NULL, &loan, &err),
                         DKV_E_INVALID);
    assert_int_equal(count_entries(getpid(), "fd"), fds);
    close(ends[0]);
    close(ends[1]);
    close(zero);
    close(file);
    close_world(&world);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--worker") == 0)
        return dkv_worker_main();
    fill_data();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lent_memory_has_the_same_answer_as_sent_memory),
        cmocka_unit_test(pages_are_found_wherever_they_lie),
        cmocka_unit_test(a_file_cut_short_fails_its_own_request_alone),
        cmocka_unit_test(readers_do_every_task_once_and_together),
        cmocka_unit_test(large_loose_memory_is_read_whole_in_every_layout),
        cmocka_unit_test(what_is_no_memory_or_too_small_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
