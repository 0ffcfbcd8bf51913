/* A backend with a real worker, and requests over made-up tensors in memory of every kind. The
 * program is its own worker: the backend starts /proc/self/exe with --worker, which main() has to
 * see to. */
#ifndef DKV_TESTS_SERVER_BACKEND_WORLD_H
#define DKV_TESTS_SERVER_BACKEND_WORLD_H

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

static inline void fill_data(void)
{
    uint32_t seed = 7;
    for (size_t i = 0; i < sizeof(data) / sizeof(data[0]); i++) {
        seed = seed * 1664525u + 1013904223u;
        data[i] = (float)(seed >> 8) / (float)(1u << 24) - 0.5f;
    }
}

static inline void open_world(struct world *world, const char *const *options)
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

static inline void close_world(struct world *world)
{
    dkv_backend_client_put(world->client);
    dkv_backend_close(world->backend);
    uv_run(&world->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&world->loop), 0);
    dkv_arena_close(&world->arena); /* asserts that every range has come back */
    dkv_config_fini(&world->config);
}

static inline void turn(struct world *world)
{
    uv_run(&world->loop, UV_RUN_ONCE);
}

/* ---- requests ---- */

static inline struct dkv_block dense_block(const void *base)
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

static inline void on_done(struct dkv_job *job, void *owner)
{
    (void)job;
    *(bool *)owner = true;
}

/* A prepared job over `block`; `loan` may be NULL. */
static inline struct dkv_job *make_job(struct world *world, const struct dkv_block *block,
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

static inline void submit(struct world *world, struct dkv_job *job, bool *done)
{
    struct dkv_error err;
    struct dkv_backend_refusal refusal;
    *done = false;
    job->done = on_done;
    job->owner = done;
    if (dkv_backend_submit(world->backend, world->client, job, &refusal, &err) != DKV_OK)
        fail_msg("%s", err.text);
}

static inline enum dkv_status run(struct world *world, struct dkv_job *job)
{
    bool done;
    submit(world, job, &done);
    while (!done)
        turn(world);
    return job->status;
}

/* The right answer, from a copy of the data in the arena. */
static inline void expected_answer(struct world *world, int32_t *keep)
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

static inline void check_answer(struct world *world, const struct dkv_block *block,
                                struct dkv_loan *loan)
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

static inline int make_file(uint64_t bytes, bool sealed)
{
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    if (sealed)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    return fd;
}

static inline void write_file(int fd, const void *bytes, size_t n_bytes, uint64_t at)
{
    assert_int_equal(pwrite(fd, bytes, n_bytes, (off_t)at), n_bytes);
}

static inline void note_attached(struct dkv_loan *loan, void *owner, const struct dkv_error *error)
{
    (void)loan;
    assert_int_equal(error->status, DKV_OK);
    *(bool *)owner = true;
}

static inline void note_released(void *owner)
{
    *(bool *)owner = true;
}

static inline struct dkv_loan *lend(struct world *world, int fd, uint64_t offset, uint64_t bytes)
{
    struct dkv_loan *loan;
    struct dkv_error err;
    bool attached = false;
    if (dkv_backend_attach(world->backend, fd, offset, bytes, false, 1, 0, note_attached, &attached,
                           &loan, &err) != DKV_OK)
        fail_msg("%s", err.text);
    while (!attached)
        turn(world);
    return loan;
}

static inline void give_back(struct world *world, struct dkv_loan *loan)
{
    bool released = false;
    dkv_backend_detach(loan, note_released, &released);
    while (!released)
        turn(world);
}

static inline unsigned count_entries(int pid, const char *folder_name)
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
static inline unsigned holdings(int pid)
{
    return count_entries(pid, "fd") + count_entries(pid, "map_files");
}

static inline int worker_pid(struct world *world)
{
    struct dkv_backend_info info;
    dkv_backend_info(world->backend, &info);
    assert_true(info.workers[0].pid > 0); /* kill(0) would end us */
    return info.workers[0].pid;
}

#endif
