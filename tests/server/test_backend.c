/* The backend with real workers: memory that clients lend, and workers that die meanwhile.
 *
 * This program is its own worker: the backend starts /proc/self/exe with --worker.
 */
#include "server/backend.h"

#include "proto/memfd.h"
#include "server/clock.h"
#include "server/log.h"
#include "server/readers.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

enum { Q_HEADS = 4, KV_HEADS = 2, ROWS = 16, DIM = 32, TOKENS = 600, PAGE = 16, KEEP = 100 };
#define N_PAGES    ((TOKENS + PAGE - 1) / PAGE)
#define Q_BYTES    (sizeof(float) * Q_HEADS * ROWS * DIM)
#define KV_BYTES   (sizeof(float) * KV_HEADS * TOKENS * DIM)
#define ALL_BYTES  (Q_BYTES + 2 * KV_BYTES)
#define PAGE_BYTES (sizeof(float) * KV_HEADS * PAGE * DIM)

struct world {
    struct dkv_config_state config;
    uv_loop_t loop;
    struct dkv_arena arena;
    struct dkv_backend *backend;
    struct dkv_backend_client *client;
};

static float data[ALL_BYTES / sizeof(float)];

static void fill_data(void)
{
    uint32_t seed = 7;
    for (size_t i = 0; i < sizeof(data) / sizeof(data[0]); i++) {
        seed = seed * 1664525u + 1013904223u;
        data[i] = (float)(seed >> 8) / (float)(1u << 24) - 0.5f;
    }
}

static void open_world(struct world *world, const char *const *options)
{
    struct dkv_error err;
    memset(world, 0, sizeof(*world));
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_ERROR, STDERR_FILENO);
    dkv_config_init(&world->config);
    dkv_config_set(&world->config, dkv_config_find("threads"), "1", DKV_SOURCE_ARG, "", &err);
    dkv_config_set(&world->config, dkv_config_find("log_level"), "error", DKV_SOURCE_ARG, "", &err);
    for (; options != NULL && options[0] != NULL; options += 2)
        assert_int_equal(dkv_config_set(&world->config, dkv_config_find(options[0]), options[1],
                                        DKV_SOURCE_ARG, options[0], &err),
                         DKV_OK);
    uv_loop_init(&world->loop);
    assert_int_equal(dkv_arena_open(&world->arena, UINT64_C(1) << 32, 1u << 24, &err), DKV_OK);
    if (dkv_backend_open(&world->config.config, &world->loop, &world->arena, &world->backend,
                         &err) != DKV_OK)
        fail_msg("%s", err.text);
    world->client = dkv_backend_client_get(world->backend, NULL);
    assert_non_null(world->client);
}

static void close_world(struct world *world)
{
    dkv_backend_client_put(world->client);
    dkv_backend_close(world->backend);
    uv_run(&world->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&world->loop), 0);
    dkv_arena_close(&world->arena); /* asserts that every range has come back */
    dkv_config_fini(&world->config);
}

static void turn(struct world *world)
{
    uv_run(&world->loop, UV_RUN_ONCE);
}

/* ---- requests ---- */

static struct dkv_block dense_block(const void *base)
{
    const char *at = base;
    return (struct dkv_block){
        .q_heads = Q_HEADS,
        .kv_heads = KV_HEADS,
        .head_dim = DIM,
        .q_rows = ROWS,
        .n_tokens = TOKENS,
        .query = dkv_view_dense(at, Q_BYTES, DKV_FP32, ROWS, DIM),
        .key = dkv_view_dense(at + Q_BYTES, KV_BYTES, DKV_FP32, TOKENS, DIM),
        .value = dkv_view_dense(at + Q_BYTES + KV_BYTES, KV_BYTES, DKV_FP32, TOKENS, DIM),
    };
}

static void on_done(struct dkv_job *job, void *owner)
{
    (void)job;
    *(bool *)owner = true;
}

/* A prepared job over `block`; `loan` may be NULL. */
static struct dkv_job *make_job(struct world *world, const struct dkv_block *block,
                                struct dkv_loan *loan)
{
    struct dkv_error err;
    struct dkv_job *job = dkv_job_new(&world->arena);
    assert_int_equal(dkv_job_add_blocks(job, 1, &err), DKV_OK);
    job->blocks[0] = *block;
    dkv_params_init(&job->request.params);
    dkv_params_set_text(&job->request.params, "keep_tokens", "100", &err);
    dkv_params_set_text(&job->request.params, "window", "16", &err);
    dkv_params_resolve(&job->request.params);
    if (dkv_request_validate(&job->request, job->plans, &err) != DKV_OK)
        fail_msg("%s", err.text);
    if (loan != NULL) {
        job->loans = malloc(sizeof(struct dkv_loan *));
        job->loans[0] = loan;
        job->n_loans = 1;
    }
    if (dkv_job_prepare(job, 1u << 30, &err) != DKV_OK)
        fail_msg("%s", err.text);
    return job;
}

static void submit(struct world *world, struct dkv_job *job, bool *done)
{
    struct dkv_error err;
    struct dkv_backend_refusal refusal;
    *done = false;
    job->done = on_done;
    job->owner = done;
    if (dkv_backend_submit(world->backend, world->client, job, &refusal, &err) != DKV_OK)
        fail_msg("%s", err.text);
}

static enum dkv_status run(struct world *world, struct dkv_job *job)
{
    bool done;
    submit(world, job, &done);
    while (!done)
        turn(world);
    return job->status;
}

/* The right answer, from a copy of the data in the arena. */
static void expected_answer(struct world *world, int32_t *keep)
{
    void *copy = dkv_arena_alloc(&world->arena, ALL_BYTES);
    memcpy(copy, data, ALL_BYTES);
    const struct dkv_block block = dense_block(copy);
    struct dkv_job *job = make_job(world, &block, NULL);
    assert_int_equal(run(world, job), DKV_OK);
    memcpy(keep, job->keep, sizeof(int32_t) * KV_HEADS * KEEP);
    dkv_job_free(job);
    dkv_arena_free(&world->arena, copy, ALL_BYTES, ALL_BYTES);
}

static void check_answer(struct world *world, const struct dkv_block *block, struct dkv_loan *loan)
{
    int32_t keep[KV_HEADS * KEEP];
    expected_answer(world, keep);
    struct dkv_job *job = make_job(world, block, loan);
    if (run(world, job) != DKV_OK)
        fail_msg("%s", job->error.text);
    assert_memory_equal(job->keep, keep, sizeof(keep));
    dkv_job_free(job);
}

/* ---- memory ---- */

static int make_file(uint64_t bytes, bool sealed)
{
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    if (sealed)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    return fd;
}

static void write_file(int fd, const void *bytes, size_t n_bytes, uint64_t at)
{
    assert_int_equal(pwrite(fd, bytes, n_bytes, (off_t)at), n_bytes);
}

static void note_attached(struct dkv_loan *loan, void *owner, const struct dkv_error *error)
{
    (void)loan;
    assert_int_equal(error->status, DKV_OK);
    *(bool *)owner = true;
}

static void note_released(void *owner)
{
    *(bool *)owner = true;
}

static struct dkv_loan *lend(struct world *world, int fd, uint64_t offset, uint64_t bytes)
{
    struct dkv_loan *loan;
    struct dkv_error err;
    bool attached = false;
    if (dkv_backend_attach(world->backend, fd, offset, bytes, false, note_attached, &attached,
                           &loan, &err) != DKV_OK)
        fail_msg("%s", err.text);
    while (!attached)
        turn(world);
    return loan;
}

static void give_back(struct world *world, struct dkv_loan *loan)
{
    bool released = false;
    dkv_backend_detach(loan, note_released, &released);
    while (!released)
        turn(world);
}

static unsigned count_entries(int pid, const char *folder_name)
{
    char path[64];
    unsigned n = 0;
    snprintf(path, sizeof(path), "/proc/%d/%s", pid, folder_name);
    DIR *folder = opendir(path);
    if (folder == NULL)
        return 0;
    while (readdir(folder) != NULL)
        n++;
    closedir(folder);
    return n;
}

/* Descriptors and mappings of a process. */
static unsigned holdings(int pid)
{
    return count_entries(pid, "fd") + count_entries(pid, "map_files");
}

static int worker_pid(struct world *world)
{
    struct dkv_backend_info info;
    dkv_backend_info(world->backend, &info);
    assert_true(info.workers[0].pid > 0); /* kill(0) would end us */
    return info.workers[0].pid;
}

/* ---- tests ---- */

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
                                            rows[i].bytes, false, NULL, NULL, &loan, &err),
                         DKV_E_INVALID);
    assert_int_equal(count_entries(getpid(), "fd"), fds);
    close(ends[0]);
    close(ends[1]);
    close(zero);
    close(file);
    close_world(&world);
}

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
        cmocka_unit_test(lent_memory_has_the_same_answer_as_sent_memory),
        cmocka_unit_test(pages_are_found_wherever_they_lie),
        cmocka_unit_test(a_file_cut_short_fails_its_own_request_alone),
        cmocka_unit_test(readers_do_every_task_once_and_together),
        cmocka_unit_test(large_loose_memory_is_read_whole_in_every_layout),
        cmocka_unit_test(what_is_no_memory_or_too_small_is_refused),
        cmocka_unit_test(a_loan_lasts_until_its_last_job_has_ended),
        cmocka_unit_test(clients_that_vanish_leave_nothing_behind),
        cmocka_unit_test(a_client_that_left_lasts_until_its_last_job_is_handed_out),
        cmocka_unit_test(killed_workers_are_replaced_with_their_loans),
        cmocka_unit_test(two_batches_can_be_in_flight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
