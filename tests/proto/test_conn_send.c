/* What one end queues and the other end hears: order, room, bulk that is sent from where it lies.
 */
#include "tests/proto/conn_fixture.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

static void what_one_end_queues_the_other_end_hears_in_order(void **state)
{
    (void)state;
    struct pair p = begin(true);
    for (uint64_t id = 1; id <= 30; id += 3) {
        assert_int_equal(send_ping(p.client, id), DKV_OK);
        send_region(p.client, id + 1);
        send_region(p.client, id + 2);
    }
    assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
    assert_false(dkv_wire_conn_wants_write(p.client));
    for (uint64_t id = 1; id <= 30; id += 3) {
        expect(&p, DKV_WIRE_PING, id);
        expect(&p, DKV_WIRE_REGION_ADD, id + 1);
        expect(&p, DKV_WIRE_REGION_ADD, id + 2);
    }
    end(&p);
}

static void a_full_queue_is_busy_and_takes_nothing(void **state)
{
    (void)state;
    struct pair p = begin(true);
    uint64_t queued = 0, heard = 0;
    while (send_ping(p.client, queued + 1) == DKV_OK)
        queued++;
    assert_int_equal(err.status, DKV_E_BUSY);
    while (heard < queued) {
        assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
        struct dkv_wire_conn_message m;
        while (heard < queued) {
            assert_int_equal(next(p.daemon, &m), DKV_OK);
            if (m.header.type == 0)
                break;
            assert_int_equal(m.header.id, ++heard);
        }
    }
    assert_int_equal(send_ping(p.client, queued + 1), DKV_OK);
    end(&p);
}

static void bulk_is_sent_from_where_it_lies_and_given_back(void **state)
{
    (void)state;
    struct pair p = begin(true);
    struct dkv_wire_conn_message m;
    enum { BULK = 3000000 };
    uint8_t *bulk = malloc(BULK), *got = calloc(1, BULK), payload[120];
    assert_true(bulk != NULL && got != NULL);
    for (size_t i = 0; i < BULK; i++)
        bulk[i] = (uint8_t)(i ^ i >> 8);
    const struct dkv_wire_score score = {.cache = 1, .stash = 1, .n_layers = 1};
    const struct dkv_wire_conn_output out = {.type = DKV_WIRE_SCORE,
                                             .id = 1,
                                             .payload = payload,
                                             .payload_bytes = dkv_wire_put_score(payload, &score),
                                             .bulk = bulk,
                                             .bulk_bytes = BULK};
    assert_int_equal(dkv_wire_conn_send(p.client, &out, &err), DKV_OK);
    send_region(p.client, 2);
    assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
    assert_int_equal(dkv_wire_conn_bulks_sent(p.client),
                     0); /* more than the socket takes at once */
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    uint64_t read = 0, step;
    while (dkv_wire_conn_bulk_left(p.daemon) > 0) {
        assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
        assert_int_equal(dkv_wire_conn_read_bulk(p.daemon, got + read, BULK, &step, &err), DKV_OK);
        read += step;
    }
    assert_memory_equal(bulk, got, BULK);
    assert_int_equal(dkv_wire_conn_bulks_sent(p.client), 1);
    assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
    expect(&p, DKV_WIRE_REGION_ADD, 2);
    free(bulk);
    free(got);
    end(&p);
}

static void send_score(struct dkv_wire_conn *conn, uint64_t id, const uint8_t *bulk, uint64_t bytes)
{
    uint8_t payload[120];
    const struct dkv_wire_score score = {.cache = 1, .stash = 1, .n_layers = 1};
    const struct dkv_wire_conn_output out = {.type = DKV_WIRE_SCORE,
                                             .id = id,
                                             .payload = payload,
                                             .payload_bytes = dkv_wire_put_score(payload, &score),
                                             .bulk = bulk,
                                             .bulk_bytes = bytes};
    assert_int_equal(dkv_wire_conn_send(conn, &out, &err), DKV_OK);
}

/* A socket that keeps calls apart says how many there were. */
static void messages_with_small_bulks_leave_in_one_call(void **state)
{
    (void)state;
    static uint8_t bulk[256], got[65536];
    struct dkv_wire_conn *conn;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(dkv_wire_conn_open(fds[0], DKV_WIRE_FROM_DAEMON, &conn, &err), DKV_OK);
    for (uint64_t id = 1; id <= 20; id++)
        send_score(conn, id, bulk, sizeof(bulk));
    assert_int_equal(dkv_wire_conn_flush(conn, &err), DKV_OK);
    assert_int_equal(dkv_wire_conn_bulks_sent(conn), 20);
    assert_true(recv(fds[1], got, sizeof(got), MSG_DONTWAIT) > 20 * (ssize_t)sizeof(bulk));
    assert_true(recv(fds[1], got, sizeof(got), MSG_DONTWAIT) < 0);
    dkv_wire_conn_close(conn);
    close(fds[1]);
}

/* Reads the bulk of the message in hand; the sender may have to send first. */
static void expect_bulk(struct pair *p, const uint8_t *bulk, uint64_t bytes)
{
    static uint8_t got[32768];
    uint64_t read = 0, step;
    assert_int_equal(dkv_wire_conn_bulk_left(p->daemon), bytes);
    while (read < bytes) {
        assert_int_equal(dkv_wire_conn_flush(p->client, &err), DKV_OK);
        assert_int_equal(dkv_wire_conn_read_bulk(p->daemon, got + read, bytes - read, &step, &err),
                         DKV_OK);
        read += step;
    }
    assert_memory_equal(got, bulk, bytes);
}

/* Bulks, descriptors and neither in every order, to a socket that takes little at a time. */
struct drain {
    int fd;
    _Atomic uint64_t n_bytes;
};

static void *drain(void *argument)
{
    static char waste[1 << 20];
    struct drain *d = argument;
    for (ssize_t n; (n = recv(d->fd, waste, sizeof(waste), 0)) > 0;)
        d->n_bytes += (uint64_t)n;
    return NULL;
}

/* To a peer that reads all the while, so that the socket never fills. */
static void a_flush_of_long_bulk_has_an_end(void **state)
{
    enum { BULK = 64 << 20 };
    (void)state;
    struct pair p = begin(true);
    struct drain d = {.fd = dup(dkv_wire_conn_fd(p.daemon))};
    uint8_t *bulk = calloc(1, BULK);
    unsigned n_flushes = 0;
    pthread_t thread;
    assert_int_equal(fcntl(d.fd, F_SETFL, 0), 0);
    assert_int_equal(pthread_create(&thread, NULL, drain, &d), 0);
    send_score(p.client, 1, bulk, BULK);
    for (; dkv_wire_conn_wants_write(p.client); n_flushes++) {
        struct pollfd ready = {.fd = dkv_wire_conn_fd(p.client), .events = POLLOUT};
        assert_int_equal(poll(&ready, 1, 10000), 1);
        assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
    }
    assert_true(n_flushes >= 32); /* two MiB and less */
    assert_int_equal(dkv_wire_conn_bulks_sent(p.client), 1);
    shutdown(dkv_wire_conn_fd(p.client), SHUT_WR);
    pthread_join(thread, NULL);
    assert_true(d.n_bytes > BULK);
    close(d.fd);
    free(bulk);
    end(&p);
}

static void what_is_sent_in_pieces_stays_in_order(void **state)
{
    (void)state;
    struct pair p = begin(true);
    struct dkv_wire_conn_message m;
    const int room = 4096;
    static uint8_t bulk[32768];
    enum { N = 90 };
    for (size_t i = 0; i < sizeof(bulk); i++)
        bulk[i] = (uint8_t)(i * 7 ^ i >> 8);
    setsockopt(p.raw, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
    for (uint64_t id = 1; id <= N; id++)
        switch (id * id % 7) {
        case 0: assert_int_equal(send_ping(p.client, id), DKV_OK); break;
        case 1: send_region(p.client, id); break;
        default: send_score(p.client, id, bulk + id, id * 331 % 20000 + 1); break;
        }
    for (uint64_t id = 1; id <= N; id++) {
        for (m.header.type = 0; m.header.type == 0;) {
            assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_OK);
            assert_int_equal(next(p.daemon, &m), DKV_OK);
        }
        assert_int_equal(m.header.id, id);
        if (m.header.bulk_bytes > 0)
            expect_bulk(&p, bulk + id, id * 331 % 20000 + 1);
    }
    assert_false(dkv_wire_conn_wants_write(p.client));
    end(&p);
}

static void writing_to_a_peer_that_is_gone_is_unavailable_and_no_signal(void **state)
{
    (void)state;
    struct pair p = begin(true);
    dkv_wire_conn_close(p.daemon);
    p.daemon = NULL;
    assert_int_equal(send_ping(p.client, 1), DKV_OK);
    assert_int_equal(dkv_wire_conn_flush(p.client, &err), DKV_E_UNAVAILABLE);
    end(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_one_end_queues_the_other_end_hears_in_order),
        cmocka_unit_test(a_full_queue_is_busy_and_takes_nothing),
        cmocka_unit_test(bulk_is_sent_from_where_it_lies_and_given_back),
        cmocka_unit_test(messages_with_small_bulks_leave_in_one_call),
        cmocka_unit_test(a_flush_of_long_bulk_has_an_end),
        cmocka_unit_test(what_is_sent_in_pieces_stays_in_order),
        cmocka_unit_test(writing_to_a_peer_that_is_gone_is_unavailable_and_no_signal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
