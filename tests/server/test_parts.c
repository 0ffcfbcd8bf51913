/* Smaller parts of the daemon: tokens, looking before sleeping, limits of control groups,
 * addresses, phases of a connection, answers whose heads keep unequal numbers of tokens. */
#include "server/auth.h"
#include "server/clock.h"
#include "server/conn.h"
#include "server/group_limits.h"
#include "server/job.h"
#include "server/listen.h"
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
    dkv_spin_open(&spin, &loop, 2000000, false);
    assert_false(uv_is_active((uv_handle_t *)&spin.idle));
    const uint64_t began_ns = dkv_clock_ns();
    dkv_spin_poke(&spin, DKV_SPIN_FOR_BATCH, began_ns);
    assert_int_equal(uv_backend_timeout(&loop), 0); /* it does not wait for events */
    while (uv_is_active((uv_handle_t *)&spin.idle))
        uv_run(&loop, UV_RUN_NOWAIT);
    assert_true(dkv_clock_ns() - began_ns >= 10000000);
    dkv_spin_poke(&spin, DKV_SPIN_FOR_REQUEST, dkv_clock_ns()); /* and again */
    assert_true(uv_is_active((uv_handle_t *)&spin.idle));
    spin.idle.data = &closed;
    dkv_spin_close(&spin, note_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_true(closed);
    assert_int_equal(uv_loop_close(&loop), 0);

    uv_loop_init(&loop);
    dkv_spin_open(&spin, &loop, 0, false); /* never */
    dkv_spin_poke(&spin, DKV_SPIN_FOR_BATCH, dkv_clock_ns());
    assert_false(uv_is_active((uv_handle_t *)&spin.idle));
    spin.idle.data = &closed;
    dkv_spin_close(&spin, note_closed);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

static void the_loop_learns_for_requests_and_batches_apart(void **unused)
{
    uv_loop_t loop;
    struct dkv_spin spin;
    uint64_t now_ns = 1000;
    (void)unused;
    uv_loop_init(&loop);
    dkv_spin_open(&spin, &loop, 0, true);
    for (unsigned i = 0; i < 4 * DKV_LOOK_TRIAL; i++) {
        const bool looked = uv_is_active((uv_handle_t *)&spin.idle) != 0;
        dkv_spin_poke(&spin, DKV_SPIN_FOR_BATCH, now_ns += looked ? 20000 : 40000);
        assert_false(spin.looks[DKV_SPIN_FOR_BATCH].looks); /* which takes long */
        dkv_spin_poke(&spin, DKV_SPIN_FOR_REQUEST, now_ns += 500000);
    }
    assert_true(spin.looks[DKV_SPIN_FOR_REQUEST].looks);
    assert_int_equal(uv_backend_timeout(&loop), 0); /* it does not wait for events */
    while (uv_is_active((uv_handle_t *)&spin.idle)) /* for ever: it began long ago */
        uv_run(&loop, UV_RUN_NOWAIT);
    dkv_spin_close(&spin, NULL);
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
    assert_false(dkv_spin_front_learns(&state.config));
    assert_false(dkv_spin_worker_learns(&state.config));
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

/* ---- ragged answers ---- */

/* Two blocks of two heads, with room for six indices each, and the heads' counts as a worker left
 * them. */
struct ragged {
    int32_t numbers[2 * 6 + 5];
    struct dkv_block blocks[2];
    struct dkv_plan plans[2];
    struct dkv_job job;
};

static void make_ragged(struct ragged *r, const int32_t counts[4])
{
    *r = (struct ragged){
        .numbers = {10, 20, 21, 22, 0, 0, 30, 31, 40, 41, 0, 0},
        .blocks = {{.kv_heads = 2}, {.kv_heads = 2}},
        .plans = {{.ragged = true, .keep_capacity = 6}, {.ragged = true, .keep_capacity = 6}}};
    memcpy(r->numbers + 13, counts, 4 * sizeof(*counts));
    r->job = (struct dkv_job){.request = {.n_blocks = 2},
                              .blocks = r->blocks,
                              .plans = r->plans,
                              .keep = r->numbers,
                              .n_keep = 12,
                              .n_heads = 4,
                              .offsets = r->numbers + 12};
}

static void heads_of_unequal_lengths_close_ranks(void **unused)
{
    static const int32_t counts[] = {1, 3, 2, 2}, offsets[] = {0, 1, 4, 6, 8},
                         keep[] = {10, 20, 21, 22, 30, 31, 40, 41};
    struct ragged r;
    (void)unused;
    make_ragged(&r, counts);
    assert_int_equal(dkv_job_close_ranks(&r.job, NULL), DKV_OK);
    assert_int_equal(r.job.n_keep, 8);
    assert_memory_equal(r.job.keep, keep, sizeof(keep));
    assert_ptr_equal(r.job.offsets, r.numbers + 8);
    assert_memory_equal(r.job.offsets, offsets, sizeof(offsets));
}

/* A worker that runs wild spoils its own answers and not the front. */
static void counts_above_the_room_are_an_error(void **unused)
{
    static const int32_t counts[][4] = {
        {4, 3, 2, 2}, {1, 3, 7, 0}, {-1, 3, 2, 2}, {1, 3, 2, INT32_MAX}, {INT32_MIN, 3, 2, 2}};
    (void)unused;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        struct ragged r;
        struct dkv_error err;
        make_ragged(&r, counts[i]);
        assert_int_equal(dkv_job_close_ranks(&r.job, &err), DKV_E_INTERNAL);
        assert_non_null(strstr(err.text, "the 6 indices"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tokens_belong_to_clients),
        cmocka_unit_test(a_bad_token_file_changes_nothing),
        cmocka_unit_test(tokens_of_another_user_may_be_readable_by_our_group),
        cmocka_unit_test(the_loop_looks_for_a_while_and_then_sleeps),
        cmocka_unit_test(the_loop_learns_for_requests_and_batches_apart),
        cmocka_unit_test(how_long_it_looks_is_the_configurations),
        cmocka_unit_test(the_least_limit_on_the_way_up_counts),
        cmocka_unit_test(addresses_are_loopback_or_not),
        cmocka_unit_test(each_phase_has_its_own_deadline),
        cmocka_unit_test(heads_of_unequal_lengths_close_ranks),
        cmocka_unit_test(counts_above_the_room_are_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
