/* Descriptors come in with the message that announces them, and whatever else comes is closed. */
#include "tests/proto/conn_fixture.h"

#include <sys/resource.h>
#include <sys/wait.h>

static void descriptors_arrive_with_their_message(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[512];
    put(&p, bytes, message(bytes, DKV_WIRE_PING, 0, 1, 0), 0);
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 2, 2, 0), 2);
    put(&p, bytes, message(bytes, DKV_WIRE_PING, 0, 3, 0), 0);
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 1, 4, 0), 1);
    expect(&p, DKV_WIRE_PING, 1);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_int_equal(m.header.n_fds, 2);
    assert_true(fcntl(m.fds[0], F_GETFD) & FD_CLOEXEC);
    const int taken = m.fds[1];
    m.fds[1] = -1;
    expect(&p, DKV_WIRE_PING, 3);
    assert_true(fcntl(taken, F_GETFD) >= 0); /* ours now; the other one is closed */
    close(taken);
    expect(&p, DKV_WIRE_REGION_ADD, 4);
    end(&p);
}

static void descriptors_of_a_message_in_pieces_are_kept(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[512];
    const size_t n = message(bytes, DKV_WIRE_REGION_ADD, 1, 7, 0);
    put(&p, bytes, 1, 1);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    put(&p, bytes + 1, 30, 0);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_int_equal(m.header.type, 0);
    put(&p, bytes + 31, n - 31, 0);
    expect(&p, DKV_WIRE_REGION_ADD, 7);
    end(&p);
}

static void more_or_fewer_than_announced_break_the_connection(void **state)
{
    (void)state;
    for (uint16_t announced = 0; announced < 4; announced++)
        for (unsigned passed = 0; passed < 4; passed++) {
            struct pair p = begin(false);
            uint8_t bytes[512], after[64];
            put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, announced, 1, 0), passed);
            put(&p, after, message(after, DKV_WIRE_PING, 0, 2, 0), 0);
            if (announced == passed) {
                expect(&p, DKV_WIRE_REGION_ADD, 1);
                expect(&p, DKV_WIRE_PING, 2);
            } else {
                expect_broken(&p);
            }
            end(&p);
        }
}

static void a_message_never_gets_the_next_ones_descriptors(void **state)
{
    (void)state;
    struct pair p = begin(false);
    uint8_t bytes[512];
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 1, 1, 0), 0);
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 1, 2, 0), 1);
    expect_broken(&p); /* one came for two */
    end(&p);
}

static void descriptors_in_the_middle_break_the_connection(void **state)
{
    (void)state;
    for (size_t at = 1; at < 32; at++) {
        struct pair p = begin(false);
        struct dkv_wire_conn_message m;
        uint8_t bytes[64];
        const size_t n = message(bytes, DKV_WIRE_PING, 0, 1, 0);
        put(&p, bytes, at, 0);
        assert_int_equal(next(p.daemon, &m), DKV_OK);
        put(&p, bytes + at, n - at, 1);
        put(&p, bytes, n, 0);
        expect_broken(&p);
        end(&p);
    }
}

static void descriptors_amid_a_payload_are_noticed_before_it_is_complete(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    message(bytes, DKV_WIRE_PING, 0, 1, 0);
    put(&p, bytes, DKV_WIRE_HEADER_BYTES + 1, 0);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    put(&p, bytes + DKV_WIRE_HEADER_BYTES + 1, 1, 1);
    assert_int_equal(next(p.daemon, &m), DKV_E_MALFORMED);
    end(&p);
}

static void announced_descriptors_come_with_the_first_byte_or_not_at_all(void **state)
{
    (void)state;
    for (size_t at = 1; at < 136; at += 5) {
        struct pair p = begin(false);
        struct dkv_wire_conn_message m;
        uint8_t bytes[512];
        const size_t n = message(bytes, DKV_WIRE_REGION_ADD, 1, 1, 0);
        put(&p, bytes, at, 0);
        (void)next(p.daemon, &m); /* from byte 24 on they are missed already */
        put(&p, bytes + at, n - at, 1);
        expect_broken(&p);
        end(&p);
    }
}

static void the_most_descriptors_a_kernel_passes_are_all_closed(void **state)
{
    (void)state;
    struct pair p = begin(false);
    uint8_t bytes[512];
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 1, 1, 0), 253);
    expect_broken(&p);
    end(&p);
}

/* In a process of its own, since the limit cannot be raised again. */
static void descriptors_beyond_the_process_limit_break_the_connection(void **state)
{
    (void)state;
    const pid_t pid = fork();
    if (pid == 0) {
        struct pair p = begin(false);
        struct dkv_wire_conn_message m;
        uint8_t bytes[512];
        put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 60, 1, 0), 60);
        struct rlimit limit = {64, 64};
        setrlimit(RLIMIT_NOFILE, &limit);
        for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0 && fd < 40;)
            continue; /* room for 20 of the 60 */
        enum dkv_status status = next(p.daemon, &m);
        _exit(status == DKV_E_MALFORMED && strstr(err.text, "lost") != NULL ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void descriptors_in_the_middle_of_bulk_break_the_connection(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[512], to[64];
    uint64_t step;
    put(&p, bytes, message(bytes, DKV_WIRE_SCORE, 0, 1, 64), 0);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    put(&p, bytes, 64, 1);
    assert_int_equal(dkv_wire_conn_read_bulk(p.daemon, to, 64, &step, &err), DKV_E_MALFORMED);
    end(&p);
}

static void descriptors_that_were_not_sent_are_closed_with_the_connection(void **state)
{
    (void)state;
    struct pair p = begin(true);
    for (uint64_t id = 1; id <= 20; id++)
        send_region(p.client, id);
    end(&p); /* counts */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(descriptors_arrive_with_their_message),
        cmocka_unit_test(descriptors_of_a_message_in_pieces_are_kept),
        cmocka_unit_test(more_or_fewer_than_announced_break_the_connection),
        cmocka_unit_test(a_message_never_gets_the_next_ones_descriptors),
        cmocka_unit_test(descriptors_in_the_middle_break_the_connection),
        cmocka_unit_test(descriptors_amid_a_payload_are_noticed_before_it_is_complete),
        cmocka_unit_test(announced_descriptors_come_with_the_first_byte_or_not_at_all),
        cmocka_unit_test(the_most_descriptors_a_kernel_passes_are_all_closed),
        cmocka_unit_test(descriptors_beyond_the_process_limit_break_the_connection),
        cmocka_unit_test(descriptors_in_the_middle_of_bulk_break_the_connection),
        cmocka_unit_test(descriptors_that_were_not_sent_are_closed_with_the_connection),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
