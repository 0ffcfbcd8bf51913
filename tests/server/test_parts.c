/* Unit tests of the small parts of server/: log, metrics, tokens, addresses, bodies, deadlines. */
#include "server/auth.h"
#include "server/body.h"
#include "server/clock.h"
#include "server/conn.h"
#include "server/group_limits.h"
#include "server/listen.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/spin.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

/* ---- log ---- */

/* The line that one message becomes, without its time. */
static void logged(enum dkv_log_format format, const char *message, char *line, size_t line_bytes)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    dkv_log_init(format, DKV_LOG_INFO, ends[1]);
    dkv_log(DKV_LOG_INFO, "%s", message);
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_INFO, STDERR_FILENO);
    close(ends[1]);
    ssize_t n = read(ends[0], line, line_bytes - 1);
    assert_true(n > 0);
    line[n] = '\0';
    close(ends[0]);
}

static void a_client_cannot_start_a_line_of_its_own(void **unused)
{
    char line[2048];
    (void)unused;
    logged(DKV_LOG_TEXT, "a\r\nb\x1b[31m\\\xff", line, sizeof(line));
    assert_non_null(strstr(line, "info  a\\x0d\\x0ab\\x1b[31m\\\\\\xff\n"));
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
    logged(DKV_LOG_JSON, "\"\\\n\x1b", line, sizeof(line));
    assert_non_null(strstr(line, "\"message\":\"\\\"\\\\\\u000a\\u001b\"}\n"));
}

static void a_long_message_is_cut_and_stays_one_line(void **unused)
{
    char message[4096], line[4096];
    (void)unused;
    memset(message, '\n', sizeof(message) - 1);
    message[sizeof(message) - 1] = '\0';
    logged(DKV_LOG_JSON, message, line, sizeof(line));
    assert_int_equal(strlen(line) - strcspn(line, "\n"), 1);
    assert_string_equal(line + strlen(line) - 3, "\"}\n");
}

static void escapes_are_never_cut_in_two(void **unused)
{
    char out[16];
    (void)unused;
    for (size_t room = 1; room <= sizeof(out); room++) {
        size_t n = dkv_log_escape(out, room, "\n\n\n\n\n", DKV_LOG_TEXT);
        assert_true(n < room);
        assert_int_equal(n % 4, 0);
    }
}

static void a_budget_lets_a_burst_and_then_a_rate_pass(void **unused)
{
    struct dkv_log_limit limit = {.burst = 3, .per_s = 2};
    unsigned passed = 0;
    (void)unused;
    for (int i = 0; i < 100; i++)
        passed += dkv_log_limit_take(&limit, 1000);
    assert_int_equal(passed, 3);
    assert_int_equal(limit.held_back, 97);
    assert_false(dkv_log_limit_take(&limit, 1499));
    assert_true(dkv_log_limit_take(&limit, 1500));
    assert_false(dkv_log_limit_take(&limit, 1501));
    passed = 0;
    for (int i = 0; i < 10; i++)
        passed += dkv_log_limit_take(&limit, 1000000);
    assert_int_equal(passed, 3);
}

static void a_line_that_is_cut_stays_json(void **unused)
{
    char line[4096];
    char text[700];
    struct dkv_log_field fields[8];
    int ends[2];
    (void)unused;
    memset(text, '"', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    for (unsigned i = 0; i < 8; i++)
        fields[i] = (struct dkv_log_field){.name = "field", .text = text};
    fields[7] = (struct dkv_log_field){.name = "last", .number = 7};
    assert_int_equal(pipe(ends), 0);
    dkv_log_init(DKV_LOG_JSON, DKV_LOG_INFO, ends[1]);
    dkv_log_event(DKV_LOG_INFO, fields, 8, "m");
    dkv_log_init(DKV_LOG_TEXT, DKV_LOG_INFO, STDERR_FILENO);
    const ssize_t n = read(ends[0], line, sizeof(line) - 1);
    assert_true(n > 0 && n <= 2048);
    line[n] = '\0';
    json_error_t error;
    json_t *root = json_loads(line, 0, &error);
    assert_non_null(root);
    assert_int_equal(json_integer_value(json_object_get(root, "last")), 7);
    json_decref(root);
    close(ends[0]);
    close(ends[1]);
}

/* ---- metrics ---- */

static char *metrics_text(const struct dkv_metrics *metrics, bool nv_names)
{
    const struct dkv_admission_stats queue = {.level[1] = {.n_waiting = 3, .oldest_us = 1500}};
    const struct dkv_worker_facts worker = {.device = "cpu", .restarts = 2, .busy_ns = 1500000000};
    const uint64_t regions[DKV_LOAN_KINDS] = {4, 0, 0};
    const struct dkv_gauges gauges = {.workers = &worker,
                                      .n_workers = 1,
                                      .queue = &queue,
                                      .n_levels = 2,
                                      .regions = regions,
                                      .region_bytes = regions,
                                      .queue_requests = 3,
                                      .ready = true};
    char *text = NULL;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    dkv_metrics_write(metrics, &gauges, nv_names, out);
    fclose(out);
    return text;
}

static void every_counter_is_there_before_the_first_request(void **unused)
{
    struct dkv_metrics metrics;
    (void)unused;
    dkv_metrics_init(&metrics, "cpu/test");
    char *text = metrics_text(&metrics, true);
    static const char *const lines[] = {
        "dropkv_backend_info{backend=\"cpu/test\"} 1\n",
        "dropkv_requests_total{outcome=\"ok\"} 0\n",
        "dropkv_requests_total{outcome=\"cancelled\"} 0\n",
        "dropkv_http_refused_total{reason=\"framing\"} 0\n",
        "dropkv_queue_depth 3\n",
        "dropkv_queue_waiting{priority=\"1\"} 0\n",
        "dropkv_queue_waiting{priority=\"2\"} 3\n",
        "dropkv_queue_age_seconds{priority=\"2\"} 0.001500\n",
        "dropkv_admission_total{verdict=\"quota\"} 0\n",
        "dropkv_degraded_total 0\n",
        "dropkv_worker_up{worker=\"0\",device=\"cpu\"} 0\n",
        "dropkv_worker_restarts_total{worker=\"0\",device=\"cpu\"} 2\n",
        "dropkv_replayed_total 0\n",
        "dropkv_worker_busy_seconds_total{worker=\"0\",device=\"cpu\"} 1.5\n",
        "dropkv_regions{kind=\"sealed\"} 4\n",
        "dropkv_regions{kind=\"device\"} 0\n",
        "dropkv_regions_released_total{reason=\"disconnect\"} 0\n",
        "dropkv_bytes_in_total{transport=\"shared\"} 0\n",
        "dropkv_answered_total{transport=\"device\"} 0\n",
        "dropkv_nonfinite_inputs_total{action=\"masked\"} 0\n",
        "dropkv_connections{transport=\"socket\"} 0\n",
        "dropkv_queue_seconds_bucket{le=\"+Inf\"} 0\n",
        "dropkv_compute_seconds_count 0\n",
        "dropkv_request_seconds_sum 0\n",
        "nv_inference_request_failure{model=\"dropkv\",version=\"1\",reason=\"REJECTED\"} 0\n",
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
        if (strstr(text, lines[i]) == NULL)
            fail_msg("missing: %s", lines[i]);
    free(text);
    text = metrics_text(&metrics, false);
    assert_null(strstr(text, "nv_"));
    free(text);
}

static void histogram_bounds_are_inclusive_and_cumulative(void **unused)
{
    struct dkv_metrics metrics;
    (void)unused;
    dkv_metrics_init(&metrics, "x");
    dkv_histogram_add(&metrics.batch_items, 1);
    dkv_histogram_add(&metrics.batch_items, 1.5);
    dkv_histogram_add(&metrics.batch_items, 4096);
    dkv_histogram_add(&metrics.batch_items, 4097);
    char *text = metrics_text(&metrics, false);
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"1\"} 1\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"2\"} 2\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"4096\"} 3\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_bucket{le=\"+Inf\"} 4\n"));
    assert_non_null(strstr(text, "dropkv_batch_items_count 4\n"));
    free(text);
}

static void a_request_counts_in_one_outcome_and_its_durations(void **unused)
{
    struct dkv_metrics metrics;
    const struct dkv_timing timing = {3000000, 1000000, 500000, 1500000, 10};
    (void)unused;
    dkv_metrics_init(&metrics, "x");
    dkv_metrics_request(&metrics, DKV_OUTCOME_OK, &timing);
    dkv_metrics_request(&metrics, DKV_OUTCOME_TIMEOUT, &timing);
    assert_int_equal(metrics.requests[DKV_OUTCOME_OK], 1);
    assert_int_equal(metrics.requests[DKV_OUTCOME_TIMEOUT], 1);
    assert_int_equal(metrics.stats.success.count, 1);
    assert_int_equal(metrics.stats.fail.count, 1);
    assert_int_equal(metrics.stats.queue.ns, 1000000);
    assert_int_equal(metrics.stats.compute_infer.ns, 1500000);
    assert_true(metrics.stats.last_inference_ms > 0);
}

static void every_status_has_an_outcome(void **unused)
{
    (void)unused;
    assert_int_equal(dkv_outcome_of(DKV_E_INVALID), DKV_OUTCOME_INVALID);
    assert_int_equal(dkv_outcome_of(DKV_E_TOO_LARGE), DKV_OUTCOME_INVALID);
    assert_int_equal(dkv_outcome_of(DKV_E_BUSY), DKV_OUTCOME_BUSY);
    assert_int_equal(dkv_outcome_of(DKV_E_NOMEM), DKV_OUTCOME_FAILED);
    assert_int_equal(dkv_outcome_of(DKV_E_DEVICE), DKV_OUTCOME_FAILED);
}

/* ---- tokens ---- */

#define TOKEN_A "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
#define TOKEN_B "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

static enum dkv_status load_tokens(struct dkv_auth *auth, const char *text, mode_t mode,
                                   struct dkv_error *err)
{
    char path[] = "/tmp/dropkvd-test-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    fchmod(fd, mode);
    close(fd);
    enum dkv_status status = dkv_auth_load(auth, path, err);
    unlink(path);
    return status;
}

static void tokens_belong_to_clients(void **unused)
{
    struct dkv_auth auth = {0};
    struct dkv_error err;
    (void)unused;
    assert_string_equal(dkv_auth_check(&auth, NULL), "local");
    assert_int_equal(load_tokens(&auth, "# x\n\nalice " TOKEN_A "\r\n" TOKEN_B, 0600, &err),
                     DKV_OK);
    assert_string_equal(dkv_auth_check(&auth, "Bearer " TOKEN_A), "alice");
    assert_string_equal(dkv_auth_check(&auth, "bearer " TOKEN_B), "client2");
    assert_null(dkv_auth_check(&auth, NULL));
    assert_null(dkv_auth_check(&auth, ""));
    assert_null(dkv_auth_check(&auth, "Bearer"));
    assert_null(dkv_auth_check(&auth, "Bearer "));
    assert_null(dkv_auth_check(&auth, TOKEN_A));
    assert_null(dkv_auth_check(&auth, "Bearer  " TOKEN_A));
    assert_null(dkv_auth_check(&auth, "Bearer " TOKEN_A "a"));
    assert_null(dkv_auth_check(&auth, "Bearer " TOKEN_A " "));
    dkv_auth_fini(&auth);
}

static void a_bad_token_file_changes_nothing(void **unused)
{
    static const struct {
        const char *text;
        mode_t mode;
        enum dkv_status status;
    } rows[] = {
        {TOKEN_A, 0644, DKV_E_DENIED},
        {TOKEN_A, 0620, DKV_E_DENIED},
        {TOKEN_A, 0640, DKV_E_DENIED}, /* its owner is this user, who can do better */
        {"", 0600, DKV_E_INVALID},
        {"# nothing\n", 0600, DKV_E_INVALID},
        {"short", 0600, DKV_E_INVALID},
        {"name short", 0600, DKV_E_INVALID},
        {TOKEN_A "\t", 0600, DKV_E_INVALID},
        {TOKEN_A "\xc3\xa9", 0600, DKV_E_INVALID},
        {"a b " TOKEN_A, 0600, DKV_E_INVALID},
        {"averyveryveryveryveryverylongname1 " TOKEN_A, 0600, DKV_E_INVALID},
    };
    struct dkv_auth auth = {0};
    struct dkv_error err;
    (void)unused;
    assert_int_equal(load_tokens(&auth, TOKEN_B, 0400, &err), DKV_OK);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(load_tokens(&auth, rows[i].text, rows[i].mode, &err), rows[i].status);
        assert_null(strstr(err.text, TOKEN_A));
        assert_non_null(dkv_auth_check(&auth, "Bearer " TOKEN_B));
    }
    assert_int_equal(dkv_auth_load(&auth, "/tmp", &err), DKV_E_IO);
    assert_int_equal(dkv_auth_load(&auth, "/nonexistent", &err), DKV_E_IO);
    dkv_auth_fini(&auth);
}

/* As Kubernetes hands secrets over: root's, readable by the group of the pod. */
static void tokens_of_another_user_may_be_readable_by_our_group(void **unused)
{
    static const struct {
        gid_t group;
        mode_t mode;
        enum dkv_status status;
    } rows[] = {{0, 0440, DKV_OK},
                {0, 0640, DKV_OK},
                {0, 0660, DKV_E_DENIED},
                {0, 0444, DKV_E_DENIED},
                {1, 0440, DKV_E_DENIED}};
    char path[] = "/tmp/dropkvd-test-XXXXXX";
    struct dkv_auth auth = {0};
    struct dkv_error err;
    (void)unused;
    if (geteuid() != 0)
        skip();
    int fd = mkstemp(path);
    assert_int_equal(write(fd, TOKEN_A, strlen(TOKEN_A)), (ssize_t)strlen(TOKEN_A));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_int_equal(fchown(fd, 1, rows[i].group + getegid()), 0);
        assert_int_equal(fchmod(fd, rows[i].mode), 0);
        assert_int_equal(dkv_auth_load(&auth, path, &err), rows[i].status);
    }
    close(fd);
    unlink(path);
    dkv_auth_fini(&auth);
}

/* ---- looking before sleeping ---- */

static void note_closed(uv_handle_t *handle)
{
    *(bool *)handle->data = true;
}

static void the_loop_looks_for_a_while_and_then_sleeps(void **unused)
{
    uv_loop_t loop;
    struct dkv_spin spin;
    bool closed = false;
    (void)unused;
    uv_loop_init(&loop);
    dkv_spin_open(&spin, &loop, 2000000);
    assert_false(uv_is_active((uv_handle_t *)&spin.idle));
    const uint64_t began_ns = dkv_clock_ns();
    dkv_spin_poke(&spin, 3);
    assert_int_equal(uv_backend_timeout(&loop), 0); /* it does not wait for events */
    while (uv_is_active((uv_handle_t *)&spin.idle))
        uv_run(&loop, UV_RUN_NOWAIT);
    assert_true(dkv_clock_ns() - began_ns >= 6000000);
    dkv_spin_poke(&spin, 1); /* and again */
    assert_true(uv_is_active((uv_handle_t *)&spin.idle));
    spin.idle.data = &closed;
    dkv_spin_close(&spin, note_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_true(closed);
    assert_int_equal(uv_loop_close(&loop), 0);

    uv_loop_init(&loop);
    dkv_spin_open(&spin, &loop, 0); /* never */
    dkv_spin_poke(&spin, 5);
    assert_false(uv_is_active((uv_handle_t *)&spin.idle));
    spin.idle.data = &closed;
    dkv_spin_close(&spin, note_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

static void how_long_it_looks_is_the_configurations(void **unused)
{
    struct dkv_config_state state;
    struct dkv_error err;
    (void)unused;
    dkv_config_init(&state);
    assert_int_equal(dkv_spin_patience_ns(&state.config), 0); /* the CPU has better to do */
    assert_int_equal(
        dkv_config_set(&state, dkv_config_find("busy_poll_us"), "70", DKV_SOURCE_ARG, "", &err),
        DKV_OK);
    assert_int_equal(dkv_spin_patience_ns(&state.config), 70000);
    dkv_config_fini(&state);
}

/* ---- memory ---- */

static void put(const char *folder, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void the_least_limit_on_the_way_up_counts(void **unused)
{
    static const struct {
        const char *membership;
        uint64_t bytes;
    } rows[] = {
        {"0::/a/b\n", 3000},              /* a says less than b */
        {"5:memory:/a\n0::/a/b\n", 3000}, /* version 1 beside it */
        {"0::/a\n", 3000},
        {"0::/c\n", UINT64_MAX}, /* "max" */
        {"0::/\n", UINT64_MAX},
        {"0::/../../elsewhere\n", UINT64_MAX}, /* a container that sees its host's path */
        {"4:memory:/a\n", UINT64_MAX},
        {"", UINT64_MAX},
    };
    char mount[] = "/tmp/dropkvd-test-XXXXXX", command[128], membership[64];
    (void)unused;
    assert_non_null(mkdtemp(mount));
    snprintf(command, sizeof(command), "mkdir -p %s/a/b %s/c", mount, mount);
    assert_int_equal(system(command), 0);
    put(mount, "a/memory.max", "3000\n");
    put(mount, "a/b/memory.max", "5000\n");
    put(mount, "c/memory.max", "max\n");
    put(mount, "a/cpu.max", "250000 100000\n"); /* two and a half processors */
    put(mount, "a/b/cpu.max", "max 100000\n");
    put(mount, "c/cpu.max", "100000 0\n"); /* no period: nothing to go by */
    snprintf(membership, sizeof(membership), "%s/membership", mount);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        put(mount, "membership", rows[i].membership);
        assert_true(dkv_memory_limit(membership, mount) == rows[i].bytes);
        assert_true(dkv_cpu_limit(membership, mount) ==
                    (rows[i].bytes == 3000 ? 2500 : UINT64_MAX));
    }
    /* A container's own mount begins at its group. */
    put(mount, "memory.max", "2000\n");
    assert_true(dkv_memory_limit(membership, mount) == 2000);
    assert_true(dkv_memory_limit("/nonexistent", mount) == 2000);
    assert_true(dkv_memory_limit("/nonexistent", "/nonexistent") == UINT64_MAX);
    snprintf(command, sizeof(command), "rm -r %s", mount);
    assert_int_equal(system(command), 0);
}

/* ---- addresses ---- */

static void addresses_are_loopback_or_not(void **unused)
{
    static const struct {
        const char *text;
        bool good, loopback;
    } rows[] = {
        {"127.0.0.1:8480", true, true},
        {"127.8.8.8:0", true, true},
        {"[::1]:8480", true, true},
        {"localhost:80", true, true},
        {"0.0.0.0:8480", true, false},
        {"[::]:8480", true, false},
        {"10.0.0.1:65535", true, false},
        {"128.0.0.1:1", true, false},
        {"[::ffff:127.0.0.1]:1", true, false},
        {"", false, false},
        {":8480", false, false},
        {"127.0.0.1:", false, false},
        {"127.0.0.1:-1", false, false},
        {"127.0.0.1:+1", false, false},
        {"127.0.0.1: 1", false, false},
        {"127.0.0.1:99999", false, false},
        {"127.1:80", false, false},
        {"[::1:80", false, false},
        {"::1]:80", false, false},
        {"[]:80", false, false},
        {"[127.0.0.1]x:80", false, false},
    };
    struct dkv_listen_address address;
    struct dkv_error err;
    (void)unused;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        bool good = dkv_listen_parse(rows[i].text, &address, &err) == DKV_OK;
        if (good != rows[i].good || (good && address.loopback != rows[i].loopback))
            fail_msg("%s", rows[i].text);
    }
}

/* ---- shared memory and bodies ---- */

static struct dkv_arena open_arena(void)
{
    struct dkv_arena arena;
    struct dkv_error err;
    assert_int_equal(dkv_arena_open(&arena, UINT64_C(4) << 30, 1u << 20, &err), DKV_OK);
    return arena;
}

/* Blocks that the file has. */
static uint64_t backed_bytes(const struct dkv_arena *arena)
{
    struct stat info;
    assert_int_equal(fstat(arena->fd, &info), 0);
    return (uint64_t)info.st_blocks * 512;
}

/* Many ranges of random sizes, each filled with its own byte, freed in random order. */
static void ranges_never_overlap_and_all_comes_back(void **unused)
{
    enum { N = 64 };
    struct dkv_arena arena = open_arena();
    unsigned char *ranges[N] = {0};
    uint64_t sizes[N] = {0};
    uint32_t seed = 1;
    (void)unused;
    for (unsigned step = 0; step < 4000; step++) {
        seed = seed * 1664525u + 1013904223u;
        const unsigned i = (seed >> 8) % N;
        if (ranges[i] != NULL) {
            for (uint64_t at = 0; at < sizes[i]; at += 1 + sizes[i] / 7)
                assert_int_equal(ranges[i][at], i);
            dkv_arena_free(&arena, ranges[i], sizes[i], sizes[i]);
            ranges[i] = NULL;
            continue;
        }
        sizes[i] = 1 + (seed >> 14) % (1u << ((seed >> 4) % 22));
        ranges[i] = dkv_arena_alloc(&arena, sizes[i]);
        assert_non_null(ranges[i]);
        assert_int_equal((uintptr_t)ranges[i] % DKV_ARENA_PAGE, 0);
        assert_true(dkv_arena_has(&arena, ranges[i] + sizes[i] - 1));
        memset(ranges[i], (int)i, sizes[i]);
    }
    for (unsigned i = 0; i < N; i++)
        dkv_arena_free(&arena, ranges[i], sizes[i], sizes[i]);
    assert_int_equal(arena.used_bytes, 0);
    assert_true(backed_bytes(&arena) <= DKV_ARENA_KEPT_BYTES);
    assert_null(dkv_arena_alloc(&arena, arena.bytes + 1));
    dkv_arena_close(&arena);
}

/* A worker that is wrong, or a peer that the fd reached, cannot make the daemon fault. */
static void the_arena_cannot_be_resized(void **unused)
{
    struct dkv_arena arena = open_arena();
    (void)unused;
    assert_int_equal(ftruncate(arena.fd, 0), -1);
    assert_int_equal(ftruncate(arena.fd, (off_t)(arena.bytes * 2)), -1);
    dkv_arena_close(&arena);
}

static void the_tensor_section_is_aligned_whatever_the_head(void **unused)
{
    struct dkv_body_pool pool;
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 64u << 20);
    for (uint64_t head = 0; head < 200; head++)
        for (uint64_t capacity = 1000; capacity < 4u << 20; capacity += (1u << 20) - 1) {
            struct dkv_body body = {0};
            assert_int_equal(dkv_body_reserve(&body, &pool, capacity, head, true, &err), DKV_OK);
            assert_int_equal((uintptr_t)(body.data + head) % DKV_BODY_ALIGN, 0);
            memset(body.data, 1, capacity);
            dkv_body_release(&body);
        }
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

static void a_body_takes_what_fits_and_no_more(void **unused)
{
    struct dkv_body_pool pool;
    struct dkv_body body = {0};
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 1u << 20);
    assert_int_equal(dkv_body_reserve(&body, &pool, 10, 0, true, &err), DKV_OK);
    assert_int_equal(dkv_body_append(&body, "12345", 5, &err), DKV_OK);
    assert_int_equal(dkv_body_append(&body, "123456", 6, &err), DKV_E_TOO_LARGE);
    assert_int_equal(body.received_bytes, 5);
    assert_int_equal(dkv_body_append(&body, "67890", 5, &err), DKV_OK);
    assert_memory_equal(body.data, "1234567890", 10);
    assert_int_equal(dkv_body_append(&body, "", 0, &err), DKV_OK);
    dkv_body_release(&body);
    dkv_body_release(&body);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

static void a_large_body_arrives_as_it_was_sent(void **unused)
{
    static unsigned char sent[5u << 20];
    struct dkv_body_pool pool;
    struct dkv_body body = {0};
    struct dkv_error err;
    (void)unused;
    for (size_t i = 0; i < sizeof(sent); i++)
        sent[i] = (unsigned char)(i * 2654435761u >> 13);
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 64u << 20);
    assert_int_equal(dkv_body_reserve(&body, &pool, sizeof(sent), 13, true, &err), DKV_OK);
    for (size_t at = 0, n = 1; at < sizeof(sent); at += n, n = n * 3 % 99991) {
        n = n < sizeof(sent) - at ? n : sizeof(sent) - at;
        assert_int_equal(dkv_body_append(&body, sent + at, n, &err), DKV_OK);
    }
    assert_memory_equal(body.data, sent, sizeof(sent));
    dkv_body_release(&body);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

static void bodies_together_stay_within_the_limit(void **unused)
{
    static const char piece[65536];
    struct dkv_body_pool pool;
    struct dkv_body known = {0}, chunked = {0}, refused = {0};
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 4u << 20);
    assert_int_equal(dkv_body_reserve(&known, &pool, 3u << 20, 0, true, &err), DKV_OK);
    assert_int_equal(pool.charged_bytes, 3u << 20);
    assert_int_equal(dkv_body_reserve(&refused, &pool, (1u << 20) + 1, 0, true, &err), DKV_E_BUSY);
    assert_null(refused.pool);
    assert_int_equal(dkv_body_reserve(&chunked, &pool, 1u << 30, 0, false, &err), DKV_OK);
    assert_int_equal(pool.charged_bytes, 3u << 20);
    enum dkv_status status = DKV_OK;
    while ((status = dkv_body_append(&chunked, piece, sizeof(piece), &err)) == DKV_OK)
        assert_true(pool.charged_bytes <= pool.limit_bytes);
    assert_int_equal(status, DKV_E_BUSY);
    assert_int_equal(chunked.received_bytes, 1u << 20);
    dkv_body_release(&chunked);
    dkv_body_release(&known);
    assert_int_equal(pool.charged_bytes, 0);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

/* Fills a body of `n_bytes` and releases it, so that its mapping is warm. */
static void *use_body(struct dkv_body_pool *pool, uint64_t n_bytes)
{
    struct dkv_body body = {0};
    struct dkv_error err;
    assert_int_equal(dkv_body_reserve(&body, pool, n_bytes, 0, true, &err), DKV_OK);
    void *mapping = body.mapping;
    body.received_bytes = n_bytes;
    dkv_body_release(&body);
    return mapping;
}

static void a_mapping_stays_warm_for_a_second(void **unused)
{
    struct dkv_body_pool pool;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 1u << 30);
    void *first = use_body(&pool, 8u << 20);
    assert_ptr_equal(pool.warm, first);
    assert_ptr_equal(use_body(&pool, 8u << 20), first);
    dkv_body_pool_trim(&pool, pool.warm_ms + DKV_BODY_WARM_MS - 1);
    assert_non_null(pool.warm);
    dkv_body_pool_trim(&pool, pool.warm_ms + DKV_BODY_WARM_MS);
    assert_null(pool.warm);
    use_body(&pool, 8u << 20);
    use_body(&pool, 4u << 20);
    assert_true(pool.warm_bytes < 5u << 20);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

/* ---- deadlines ---- */

static void each_phase_has_its_own_deadline(void **unused)
{
    struct dkv_config config = {
        .header_timeout_ms = 5000,
        .keepalive_timeout_ms = 75000,
        .body_grace_ms = 2000,
        .body_min_bytes_per_s = 1000,
    };
    struct dkv_conn conn = {0};
    enum dkv_refusal reason;
    (void)unused;
    dkv_conn_enter(&conn, DKV_CONN_HEADER, 100);
    assert_false(dkv_conn_overdue(&conn, &config, 5100, &reason));
    assert_true(dkv_conn_overdue(&conn, &config, 5101, &reason));
    assert_int_equal(reason, DKV_REFUSAL_HEADER_TIME);
    dkv_conn_enter(&conn, DKV_CONN_IDLE, 100);
    assert_false(dkv_conn_overdue(&conn, &config, 75100, &reason));
    assert_true(dkv_conn_overdue(&conn, &config, 75101, &reason));
    dkv_conn_enter(&conn, DKV_CONN_BODY, 100);
    assert_false(dkv_conn_overdue(&conn, &config, 2100, &reason));
    assert_true(dkv_conn_overdue(&conn, &config, 2101, &reason));
    assert_int_equal(reason, DKV_REFUSAL_BODY_TIME);
    conn.body_bytes = 3000;
    assert_false(dkv_conn_overdue(&conn, &config, 5100, &reason));
    assert_true(dkv_conn_overdue(&conn, &config, 5101, &reason));
    conn.body_bytes = UINT64_MAX;
    assert_false(dkv_conn_overdue(&conn, &config, UINT32_MAX, &reason));
    dkv_conn_enter(&conn, DKV_CONN_WORK, 100);
    assert_false(dkv_conn_overdue(&conn, &config, UINT64_MAX, &reason));
    dkv_conn_enter(&conn, DKV_CONN_REPLY, 100);
    conn.reply_bytes = 1000;
    assert_false(dkv_conn_overdue(&conn, &config, 3100, &reason));
    assert_true(dkv_conn_overdue(&conn, &config, 3101, &reason));
    assert_int_equal(reason, DKV_REFUSAL_REPLY_TIME);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_client_cannot_start_a_line_of_its_own),
        cmocka_unit_test(a_long_message_is_cut_and_stays_one_line),
        cmocka_unit_test(escapes_are_never_cut_in_two),
        cmocka_unit_test(a_line_that_is_cut_stays_json),
        cmocka_unit_test(a_budget_lets_a_burst_and_then_a_rate_pass),
        cmocka_unit_test(every_counter_is_there_before_the_first_request),
        cmocka_unit_test(histogram_bounds_are_inclusive_and_cumulative),
        cmocka_unit_test(a_request_counts_in_one_outcome_and_its_durations),
        cmocka_unit_test(every_status_has_an_outcome),
        cmocka_unit_test(tokens_belong_to_clients),
        cmocka_unit_test(a_bad_token_file_changes_nothing),
        cmocka_unit_test(tokens_of_another_user_may_be_readable_by_our_group),
        cmocka_unit_test(the_loop_looks_for_a_while_and_then_sleeps),
        cmocka_unit_test(how_long_it_looks_is_the_configurations),
        cmocka_unit_test(the_least_limit_on_the_way_up_counts),
        cmocka_unit_test(addresses_are_loopback_or_not),
        cmocka_unit_test(the_tensor_section_is_aligned_whatever_the_head),
        cmocka_unit_test(ranges_never_overlap_and_all_comes_back),
        cmocka_unit_test(the_arena_cannot_be_resized),
        cmocka_unit_test(a_body_takes_what_fits_and_no_more),
        cmocka_unit_test(a_large_body_arrives_as_it_was_sent),
        cmocka_unit_test(bodies_together_stay_within_the_limit),
        cmocka_unit_test(a_mapping_stays_warm_for_a_second),
        cmocka_unit_test(each_phase_has_its_own_deadline),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
