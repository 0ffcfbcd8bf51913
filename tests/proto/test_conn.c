/* The stream: messages however the bytes are cut, and descriptors with the message they belong to.
 * Broken peers are played with plain sendmsg(), good ones by the same code at both ends. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/conn.h"

static struct dkv_error err;

struct pair {
    struct dkv_wire_conn *daemon; /* hears the client */
    struct dkv_wire_conn *client; /* NULL: the test speaks for it */
    int raw;                      /* the client's socket */
    unsigned fds_before;
};

static unsigned open_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    unsigned n = 0;
    assert_non_null(dir);
    while (readdir(dir) != NULL)
        n++;
    closedir(dir);
    return n;
}

static struct pair begin(bool real_client)
{
    struct pair p = {.fds_before = open_fds()};
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(dkv_wire_conn_open(fds[0], DKV_WIRE_FROM_CLIENT, &p.daemon, &err), DKV_OK);
    p.raw = fds[1];
    if (real_client)
        assert_int_equal(dkv_wire_conn_open(fds[1], DKV_WIRE_FROM_DAEMON, &p.client, &err), DKV_OK);
    return p;
}

/* Nothing may be left open, however it went. */
static void end(struct pair *p)
{
    dkv_wire_conn_close(p->daemon);
    if (p->client != NULL)
        dkv_wire_conn_close(p->client);
    else if (p->raw >= 0)
        close(p->raw);
    assert_int_equal(open_fds(), p->fds_before);
}

static int some_fd(void)
{
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

/* The raw peer: bytes with `n_fds` copies of /dev/null. */
static void put(const struct pair *p, const void *bytes, size_t n, unsigned n_fds)
{
    char control[CMSG_SPACE(253 * sizeof(int))];
    int fds[253];
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    memset(control, 0, sizeof(control));
    if (n_fds > 0) {
        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        for (unsigned i = 0; i < n_fds; i++)
            fds[i] = some_fd();
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    assert_int_equal(sendmsg(p->raw, &msg, MSG_NOSIGNAL), (ssize_t)n);
    for (unsigned i = 0; i < n_fds; i++)
        close(fds[i]);
}

/* A ping, or a region_add of a memfd that announces n_fds. */
static size_t message(uint8_t *out, uint8_t type, uint16_t n_fds, uint64_t id, uint64_t bulk_bytes)
{
    size_t bytes = DKV_WIRE_HEADER_BYTES;

    if (type == DKV_WIRE_PING)
        bytes += dkv_wire_put_ping(out + bytes, &(struct dkv_wire_ping){.cookie = id});
    else if (type == DKV_WIRE_REGION_ADD)
        bytes += dkv_wire_put_region(
            out + bytes, &(struct dkv_wire_region){.kind = DKV_WIRE_REGION_MEMFD, .bytes = 1});
    else
        bytes += dkv_wire_put_score(
            out + bytes, &(struct dkv_wire_score){.cache = 1, .stash = 1, .n_layers = 1});
    dkv_wire_put_header(
        out, &(struct dkv_wire_header){.version = DKV_WIRE_VERSION,
                                       .type = type,
                                       .n_fds = n_fds,
                                       .payload_bytes = (uint32_t)(bytes - DKV_WIRE_HEADER_BYTES),
                                       .id = id,
                                       .bulk_bytes = bulk_bytes});
    return bytes;
}

/* Hands out what is there: the next message, or what went wrong. */
static enum dkv_status next(struct dkv_wire_conn *conn, struct dkv_wire_conn_message *m)
{
    for (bool got = true;;) {
        enum dkv_status status = dkv_wire_conn_next(conn, m, &err);
        if (status != DKV_OK || m->header.type != 0 || !got)
            return status;
        status = dkv_wire_conn_read(conn, &got, &err);
        if (status != DKV_OK)
            return status;
    }
}

static void expect(struct pair *p, uint8_t type, uint64_t id)
{
    struct dkv_wire_conn_message m;
    if (next(p->daemon, &m) != DKV_OK)
        fail_msg("%s", err.text);
    assert_int_equal(m.header.type, type);
    assert_int_equal(m.header.id, id);
}

static void expect_broken(struct pair *p)
{
    struct dkv_wire_conn_message m;
    enum dkv_status status;
    do
        status = next(p->daemon, &m);
    while (status == DKV_OK && m.header.type != 0);
    assert_int_equal(status, DKV_E_MALFORMED);
    assert_int_equal(next(p->daemon, &m), DKV_E_MALFORMED); /* and stays so */
}

/* --- bytes --------------------------------------------------------------------------------- */

static void a_message_comes_together_byte_by_byte(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    const size_t n = message(bytes, DKV_WIRE_PING, 0, 42, 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(next(p.daemon, &m), DKV_OK);
        assert_int_equal(m.header.type, 0);
        assert_int_equal(dkv_wire_conn_in_message(p.daemon), i > 0);
        put(&p, bytes + i, 1, 0);
    }
    expect(&p, DKV_WIRE_PING, 42);
    assert_false(dkv_wire_conn_in_message(p.daemon));
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_false(dkv_wire_conn_in_message(p.daemon));
    end(&p);
}

static void several_messages_in_one_piece_come_one_by_one(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[4096];
    size_t n = 0;
    for (uint64_t id = 1; id <= 100; id++)
        n += message(bytes + n, DKV_WIRE_PING, 0, id, 0);
    put(&p, bytes, n, 0);
    for (uint64_t id = 1; id <= 100; id++)
        expect(&p, DKV_WIRE_PING, id);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_int_equal(m.header.type, 0);
    end(&p);
}

static void another_version_is_told_from_rubbish(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    const size_t n = message(bytes, DKV_WIRE_PING, 0, 1, 0);
    bytes[0] = 9;
    put(&p, bytes, n, 0);
    assert_int_equal(next(p.daemon, &m), DKV_E_UNSUPPORTED);
    end(&p);
    p = begin(false);
    put(&p, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 35, 0);
    assert_int_equal(next(p.daemon, &m), DKV_E_UNSUPPORTED); /* 'G' is no version we know */
    end(&p);
}

static void a_peer_that_goes_away_is_unavailable(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    const size_t n = message(bytes, DKV_WIRE_PING, 0, 1, 0);
    put(&p, bytes, n - 1, 0);
    close(p.raw);
    p.raw = -1;
    assert_int_equal(next(p.daemon, &m), DKV_E_UNAVAILABLE);
    end(&p);
}

/* --- descriptors --------------------------------------------------------------------------- */

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

/* --- bulk ---------------------------------------------------------------------------------- */

static void bulk_goes_to_its_place_and_the_next_message_follows(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    enum { BULK = 300000 };
    uint8_t *bulk = malloc(BULK), *got = calloc(1, BULK), bytes[512];
    assert_true(bulk != NULL && got != NULL);
    for (size_t i = 0; i < BULK; i++)
        bulk[i] = (uint8_t)(i * 7);
    const size_t n = message(bytes, DKV_WIRE_SCORE, 0, 1, BULK);
    memcpy(bytes + n, bulk, 100); /* the start of the bulk comes with its header */
    put(&p, bytes, n + 100, 0);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_int_equal(dkv_wire_conn_bulk_left(p.daemon), BULK);
    size_t sent = 100, read = 0;
    uint64_t step;
    while (dkv_wire_conn_bulk_left(p.daemon) > 0) {
        const size_t piece = sent < BULK && BULK - sent > 5000 ? 5000 : BULK - sent;
        if (piece > 0)
            put(&p, bulk + sent, piece, 0);
        sent += piece;
        assert_int_equal(dkv_wire_conn_read_bulk(p.daemon, got + read, 7000, &step, &err), DKV_OK);
        read += step;
    }
    assert_int_equal(read, BULK);
    assert_memory_equal(bulk, got, BULK);
    put(&p, bytes, message(bytes, DKV_WIRE_PING, 0, 2, 0), 0);
    expect(&p, DKV_WIRE_PING, 2);
    free(bulk);
    free(got);
    end(&p);
}

static void bulk_can_be_thrown_away(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[512], zeros[1000] = {0};
    uint64_t step;
    put(&p, bytes, message(bytes, DKV_WIRE_SCORE, 0, 1, 50 * sizeof(zeros)), 0);
    for (int i = 0; i < 50; i++)
        put(&p, zeros, sizeof(zeros), 0);
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 1, 2, 0), 1);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    while (dkv_wire_conn_bulk_left(p.daemon) > 0)
        assert_int_equal(dkv_wire_conn_read_bulk(p.daemon, NULL, UINT64_MAX, &step, &err), DKV_OK);
    expect(&p, DKV_WIRE_REGION_ADD, 2);
    end(&p);
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

/* --- both ends ----------------------------------------------------------------------------- */

static enum dkv_status send_ping(struct dkv_wire_conn *conn, uint64_t id)
{
    uint8_t payload[8];
    const struct dkv_wire_conn_output out = {
        .type = DKV_WIRE_PING,
        .id = id,
        .payload = payload,
        .payload_bytes = dkv_wire_put_ping(payload, &(struct dkv_wire_ping){.cookie = id})};
    return dkv_wire_conn_send(conn, &out, &err);
}

static void send_region(struct dkv_wire_conn *conn, uint64_t id)
{
    uint8_t payload[112];
    const int fd = some_fd();
    const struct dkv_wire_region region = {.kind = DKV_WIRE_REGION_MEMFD, .bytes = 1};
    const struct dkv_wire_conn_output out = {.type = DKV_WIRE_REGION_ADD,
                                             .id = id,
                                             .payload = payload,
                                             .payload_bytes = dkv_wire_put_region(payload, &region),
                                             .fds = &fd,
                                             .n_fds = 1};
    assert_int_equal(dkv_wire_conn_send(conn, &out, &err), DKV_OK);
}

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

static void descriptors_that_were_not_sent_are_closed_with_the_connection(void **state)
{
    (void)state;
    struct pair p = begin(true);
    for (uint64_t id = 1; id <= 20; id++)
        send_region(p.client, id);
    end(&p); /* counts */
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
        cmocka_unit_test(a_message_comes_together_byte_by_byte),
        cmocka_unit_test(several_messages_in_one_piece_come_one_by_one),
        cmocka_unit_test(another_version_is_told_from_rubbish),
        cmocka_unit_test(a_peer_that_goes_away_is_unavailable),
        cmocka_unit_test(descriptors_arrive_with_their_message),
        cmocka_unit_test(descriptors_of_a_message_in_pieces_are_kept),
        cmocka_unit_test(more_or_fewer_than_announced_break_the_connection),
        cmocka_unit_test(a_message_never_gets_the_next_ones_descriptors),
        cmocka_unit_test(descriptors_in_the_middle_break_the_connection),
        cmocka_unit_test(descriptors_amid_a_payload_are_noticed_before_it_is_complete),
        cmocka_unit_test(announced_descriptors_come_with_the_first_byte_or_not_at_all),
        cmocka_unit_test(the_most_descriptors_a_kernel_passes_are_all_closed),
        cmocka_unit_test(descriptors_beyond_the_process_limit_break_the_connection),
        cmocka_unit_test(bulk_goes_to_its_place_and_the_next_message_follows),
        cmocka_unit_test(bulk_can_be_thrown_away),
        cmocka_unit_test(descriptors_in_the_middle_of_bulk_break_the_connection),
        cmocka_unit_test(what_one_end_queues_the_other_end_hears_in_order),
        cmocka_unit_test(a_full_queue_is_busy_and_takes_nothing),
        cmocka_unit_test(bulk_is_sent_from_where_it_lies_and_given_back),
        cmocka_unit_test(messages_with_small_bulks_leave_in_one_call),
        cmocka_unit_test(what_is_sent_in_pieces_stays_in_order),
        cmocka_unit_test(descriptors_that_were_not_sent_are_closed_with_the_connection),
        cmocka_unit_test(writing_to_a_peer_that_is_gone_is_unavailable_and_no_signal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
