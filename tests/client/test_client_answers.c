/* Large answers, which a worker of the daemon writes to memory of the client's: the same numbers,
 * whatever becomes of results, requests and the daemon.
 *
 * usage: test_client_answers DROPKVD
 */
#include "client/cli/synth.h"
#include "tests/client/calls.h"
#include "tests/client/ipc_fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 20000, DIM = 8, ROWS = 8, BATCH = 2, KEEP = 9000 };

static const char *program;
static struct {
    float query[BATCH][Q_HEADS][ROWS][DIM];
    float key[BATCH][KV_HEADS][TOKENS][DIM];
    float value[BATCH][KV_HEADS][TOKENS][DIM];
} tensors;

static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, KEEP, 0, NULL}};

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static struct dropkv_request make_request(uint32_t batch, int want_scores)
{
    struct dropkv_request r = dkv_test_request(&shape, batch, tensors.query, tensors.key,
                                               tensors.value);
    r.params = params;
    r.n_params = 1;
    r.want_scores = want_scores;
    return r;
}

/* Which file this address is a mapping of: its inode; 0: of none. */
static unsigned long file_at(const void *at)
{
    char line[512];
    unsigned long found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps) != NULL) {
        unsigned long from, to, inode;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) == 3 &&
            from <= (uintptr_t)at && (uintptr_t)at < to)
            found = inode;
    }
    fclose(maps);
    return found;
}

/* The first of a size only has the memory made. */
static void warm_up(struct dropkv_client *client, const struct dropkv_request *r)
{
    dropkv_result_free(dkv_test_score(client, r));
    dropkv_result_free(dkv_test_score(client, r));
}

static void they_are_the_engines(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    (void)unused;
    for (uint32_t batch = 1; batch <= BATCH; batch++)
        for (int scores = 0; scores < 2; scores++) {
            const struct dropkv_request r = make_request(batch, scores);
            struct dropkv_result *wanted = dkv_test_expect(&r);
            warm_up(client, &r);
            struct dropkv_result *result = dkv_test_score(client, &r);
            assert_true(file_at(result->keep_indices) != 0);
            dkv_test_assert_same(result, wanted);
            dropkv_result_free(result);
            dropkv_result_free(wanted);
        }
    dropkv_client_close(client);
}

static void answers_of_four_kilobytes_are_and_smaller_ones_come_with_the_reply(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    const int64_t enough = 4096 / (KV_HEADS * (int64_t)sizeof(int32_t));
    (void)unused;
    for (int64_t less = 0; less < 2; less++) {
        const struct dropkv_param keep[] = {
            {"keep_tokens", DROPKV_PARAM_INT, enough - less, 0, NULL}};
        struct dropkv_request r = make_request(1, 0);
        r.params = keep;
        struct dropkv_result *wanted = dkv_test_expect(&r);
        warm_up(client, &r);
        struct dropkv_result *result = dkv_test_score(client, &r);
        assert_int_equal(file_at(result->keep_indices) != 0, less == 0);
        dkv_test_assert_same(result, wanted);
        dropkv_result_free(result);
        dropkv_result_free(wanted);
    }
    dropkv_client_close(client);
}

/* More at a time than there are buffers, kept while others are computed, and when the client has
 * gone. */
static void a_result_keeps_its_memory(void **unused)
{
    enum { N = 12 };
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    const struct dropkv_request r[] = {make_request(1, 0), make_request(2, 1)};
    struct dropkv_result *wanted[] = {dkv_test_expect(&r[0]), dkv_test_expect(&r[1])};
    struct dropkv_result *results[2 * N];
    (void)unused;
    for (int round = 0; round < 2; round++) {
        int n = 0;
        warm_up(client, &r[round]);
        for (int i = 0; i < N; i++)
            assert_int_equal(dropkv_submit(client, &r[round], NULL, NULL), DROPKV_OK);
        while (dropkv_in_flight(client) > 0) {
            assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
            while (n < N && (results[round * N + n] = dropkv_next_result(client)) != NULL)
                n++;
        }
        assert_int_equal(n, N);
    }
    dropkv_client_close(client);
    for (int i = 0; i < 2 * N; i++) {
        dkv_test_assert_same(results[i], wanted[i / N]);
        dropkv_result_free(results[i]);
    }
    dropkv_result_free(wanted[0]);
    dropkv_result_free(wanted[1]);
}

static void memory_is_used_again(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    const struct dropkv_request r = make_request(1, 0);
    (void)unused;
    warm_up(client, &r);
    struct dropkv_result *first = dkv_test_score(client, &r);
    const unsigned long file = file_at(first->keep_indices);
    dropkv_result_free(first);
    for (int i = 0; i < 5; i++) {
        struct dropkv_result *result = dkv_test_score(client, &r);
        assert_int_equal(file_at(result->keep_indices), file);
        dropkv_result_free(result);
    }
    dropkv_client_close(client);
}

/* The daemon may write there at any time. */
static void memory_of_a_request_that_was_given_up_is_not(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    struct dropkv_request r = make_request(1, 0);
    struct dropkv_result *wanted = dkv_test_expect(&r), *result;
    uint64_t id;
    (void)unused;
    for (int by_deadline = 0; by_deadline < 2; by_deadline++) {
        r.timeout_us = 0;
        warm_up(client, &r);
        result = dkv_test_score(client, &r);
        const unsigned long file = file_at(result->keep_indices);
        assert_true(file != 0);
        dropkv_result_free(result);
        kill(dkv_test_daemon_pid, SIGSTOP);
        r.timeout_us = by_deadline ? 1000 : 0;
        assert_int_equal(dropkv_submit(client, &r, &id, NULL), DROPKV_OK);
        if (by_deadline)
            assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
        assert_int_equal(dropkv_cancel(client, id), DROPKV_OK);
        kill(dkv_test_daemon_pid, SIGCONT);
        r.timeout_us = 0;
        for (int i = 0; i < 3; i++) {
            result = dkv_test_score(client, &r);
            assert_true(file_at(result->keep_indices) != file);
            dkv_test_assert_same(result, wanted);
            dropkv_result_free(result);
        }
    }
    dropkv_result_free(wanted);
    dropkv_client_close(client);
}

/* A refused request gives its memory back at once. */
static void memory_of_a_refused_request_is_used_again(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    const struct dropkv_request r = make_request(1, 0);
    struct dropkv_result *result;
    (void)unused;
    warm_up(client, &r);
    result = dkv_test_score(client, &r);
    const unsigned long file = file_at(result->keep_indices);
    dropkv_result_free(result);
    const float good = tensors.key[0][1][77][5];
    const uint32_t nan = 0x7fc00000;
    memcpy(&tensors.key[0][1][77][5], &nan, sizeof(nan));
    assert_int_equal(dropkv_score(client, &r, &result, NULL), DROPKV_E_INVALID);
    tensors.key[0][1][77][5] = good;
    result = dkv_test_score(client, &r);
    assert_int_equal(file_at(result->keep_indices), file);
    dropkv_result_free(result);
    dropkv_client_close(client);
}

static void a_daemon_that_was_killed_is_found_again(void **unused)
{
    struct dropkv_client *client = dkv_test_open(dkv_test_endpoint);
    const struct dropkv_request r = make_request(1, 1);
    struct dropkv_result *wanted = dkv_test_expect(&r), *result;
    (void)unused;
    warm_up(client, &r);
    kill(dkv_test_daemon_pid, SIGSTOP);
    assert_int_equal(dropkv_submit(client, &r, NULL, NULL), DROPKV_OK);
    dkv_test_stop_daemon(SIGKILL);
    dkv_test_start_daemon();
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    result = dropkv_next_result(client);
    dkv_test_assert_same(result, wanted);
    dropkv_result_free(result);
    warm_up(client, &r);
    result = dkv_test_score(client, &r);
    assert_true(file_at(result->keep_indices) != 0);
    dkv_test_assert_same(result, wanted);
    dropkv_result_free(result);
    dropkv_result_free(wanted);
    dropkv_client_close(client);
}

static int begin(void **unused)
{
    (void)unused;
    dkv_test_fill(&tensors, sizeof(tensors), 29);
    return dkv_test_begin(program);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(they_are_the_engines),
        cmocka_unit_test(answers_of_four_kilobytes_are_and_smaller_ones_come_with_the_reply),
        cmocka_unit_test(a_result_keeps_its_memory),
        cmocka_unit_test(memory_is_used_again),
        cmocka_unit_test(memory_of_a_request_that_was_given_up_is_not),
        cmocka_unit_test(memory_of_a_refused_request_is_used_again),
        cmocka_unit_test(a_daemon_that_was_killed_is_found_again),
    };
    if (argc != 2)
        return 2;
    program = argv[1];
    return cmocka_run_group_tests(tests, begin, dkv_test_end);
}
