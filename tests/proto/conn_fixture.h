/* Connections for tests of the stream: a real end, and one that the test plays by plain sendmsg()
 * or by the same code, with cmocka's assertions. */
#ifndef DKV_TESTS_PROTO_CONN_FIXTURE_H
#define DKV_TESTS_PROTO_CONN_FIXTURE_H

#include "proto/conn.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static struct dkv_error err;

struct pair {
    struct dkv_wire_conn *daemon; /* hears the client */
    struct dkv_wire_conn *client; /* NULL: the test speaks for it */
    int raw;                      /* the client's socket */
    unsigned fds_before;
};

static inline unsigned open_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    unsigned n = 0;
    assert_non_null(dir);
    while (readdir(dir) != NULL)
        n++;
    closedir(dir);
    return n;
}

static inline struct pair begin(bool real_client)
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
static inline void end(struct pair *p)
{
    dkv_wire_conn_close(p->daemon);
    if (p->client != NULL)
        dkv_wire_conn_close(p->client);
    else if (p->raw >= 0)
        close(p->raw);
    assert_int_equal(open_fds(), p->fds_before);
}

static inline int some_fd(void)
{
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    return fd;
}

/* The raw peer: bytes with `n_fds` copies of /dev/null. */
static inline void put(const struct pair *p, const void *bytes, size_t n, unsigned n_fds)
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
static inline size_t message(uint8_t *out, uint8_t type, uint16_t n_fds, uint64_t id,
                             uint64_t bulk_bytes)
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
static inline enum dkv_status next(struct dkv_wire_conn *conn, struct dkv_wire_conn_message *m)
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

static inline void expect(struct pair *p, uint8_t type, uint64_t id)
{
    struct dkv_wire_conn_message m;
    if (next(p->daemon, &m) != DKV_OK)
        fail_msg("%s", err.text);
    assert_int_equal(m.header.type, type);
    assert_int_equal(m.header.id, id);
}

static inline void expect_broken(struct pair *p)
{
    struct dkv_wire_conn_message m;
    enum dkv_status status;
    do
        status = next(p->daemon, &m);
    while (status == DKV_OK && m.header.type != 0);
    assert_int_equal(status, DKV_E_MALFORMED);
    assert_int_equal(next(p->daemon, &m), DKV_E_MALFORMED); /* and stays so */
}

static inline enum dkv_status send_ping(struct dkv_wire_conn *conn, uint64_t id)
{
    uint8_t payload[8];
    const struct dkv_wire_conn_output out = {
        .type = DKV_WIRE_PING,
        .id = id,
        .payload = payload,
        .payload_bytes = dkv_wire_put_ping(payload, &(struct dkv_wire_ping){.cookie = id})};
    return dkv_wire_conn_send(conn, &out, &err);
}

static inline void send_region(struct dkv_wire_conn *conn, uint64_t id)
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

#endif
