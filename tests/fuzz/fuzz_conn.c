/* The stream under a hostile peer: pieces of any size, descriptors anywhere. The input is a list of
 * sendmsg() calls: one byte of length, one byte of how many descriptors, the bytes. Whatever
 * happens, no descriptor may stay open.
 */
#include <assert.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/conn.h"
#include "tests/fuzz/fuzz.h"

#define FDS_MAX 7

static bool hear(struct dkv_wire_conn *conn)
{
    struct dkv_wire_conn_message message;
    uint8_t bulk[100];
    uint64_t step;

    for (bool got = true; got;) {
        if (dkv_wire_conn_next(conn, &message, NULL) != DKV_OK)
            return false;
        if (message.header.type == 0) {
            if (dkv_wire_conn_read(conn, &got, NULL) != DKV_OK)
                return false;
            continue;
        }
        for (uint16_t i = 0; i < message.header.n_fds; i++)
            assert(fcntl(message.fds[i], F_GETFD) >= 0);
        for (step = 1; step > 0 && dkv_wire_conn_bulk_left(conn) > 0;)
            if (dkv_wire_conn_read_bulk(conn, message.header.id & 1 ? bulk : NULL, sizeof(bulk),
                                        &step, NULL) != DKV_OK)
                return false;
        if (dkv_wire_conn_bulk_left(conn) > 0)
            return true; /* until the next piece: next() must not be called before it is read */
    }
    return true;
}

/* Reads what is left of a bulk before anything else. */
static bool hear_piece(struct dkv_wire_conn *conn)
{
    uint64_t step = 1;

    while (step > 0 && dkv_wire_conn_bulk_left(conn) > 0)
        if (dkv_wire_conn_read_bulk(conn, NULL, UINT64_MAX, &step, NULL) != DKV_OK)
            return false;
    return dkv_wire_conn_bulk_left(conn) > 0 || hear(conn);
}

static void say(int fd, const uint8_t *bytes, size_t n, unsigned n_fds, int what)
{
    char control[CMSG_SPACE(FDS_MAX * sizeof(int))];
    int fds[FDS_MAX];
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    memset(control, 0, sizeof(control));
    if (n_fds > 0) {
        for (unsigned i = 0; i < n_fds; i++)
            fds[i] = what;
        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    if (sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        return; /* full: the input is long, and this piece is lost */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dkv_wire_conn *conn;
    int sockets[2];
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const int lowest_free = dup(null);

    close(lowest_free);
    assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    assert(dkv_wire_conn_open(sockets[0], DKV_WIRE_FROM_CLIENT, &conn, NULL) == DKV_OK);
    while (size >= 2) {
        const size_t n = data[0] < size - 2 ? data[0] : size - 2;
        if (n > 0)
            say(sockets[1], data + 2, n, data[1] & FDS_MAX, null);
        if (!hear_piece(conn))
            break;
        data += 2 + n;
        size -= 2 + n;
    }
    dkv_wire_conn_close(conn);
    close(sockets[1]);
    const int after = dup(null);
    assert(after == lowest_free); /* else one is still open */
    close(after);
    close(null);
    return 0;
}
