/* How descriptors and bytes are kept together.
 *
 * The kernel attaches descriptors to the first byte of the sendmsg() that carries them, and stops a
 * recvmsg() behind the piece of the stream they came with. So the ones that arrive in one recvmsg()
 * belong to a message that begins within what it returned. That is remembered as a range of
 * stream positions: a message that announces descriptors must begin inside the range they came
 * with, and descriptors whose range ends before the next message begins were announced by nobody.
 * At most one such batch can be pending, since input is only read when no complete message is
 * left; a second one breaks the connection. Our own output starts a sendmsg() at each message that
 * carries descriptors.
 *
 * Bulk is received directly to its place, limited to what is left of it, so it never swallows bytes
 * (or descriptors) of the next message. Descriptors in the middle of bulk are nobody's.
 */
#include "proto/conn_priv.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define PAGE_MAX ((uintptr_t)65536) /* a multiple of every page size */

/* --- life cycle ---------------------------------------------------------------------------- */

enum dkv_status dkv_wire_conn_open(int fd, enum dkv_wire_sender peer,
                                   struct dkv_wire_conn **conn_out, struct dkv_error *err)
{
    const int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
        return dkv_error_set(err, DKV_E_INVALID, "conn: not a socket: %s", strerror(errno));
    struct dkv_wire_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "conn: no memory");
    conn->fd = fd;
    conn->peer = peer;
    *conn_out = conn;
    return DKV_OK;
}

void dkv_wire_conn_close(struct dkv_wire_conn *conn)
{
    if (conn == NULL)
        return;
    dkv_wire_conn_close_fds(conn->pending.fds, conn->pending.n);
    dkv_wire_conn_close_fds(conn->message_fds, conn->n_message_fds);
    for (uint32_t i = 0; i < conn->n_marks; i++) {
        struct dkv_wire_conn_mark *mark =
            &conn->marks[(conn->first_mark + i) % DKV_WIRE_CONN_MARKS];
        dkv_wire_conn_close_fds(mark->fds, mark->n_fds);
    }
    close(conn->fd);
    free(conn);
}

int dkv_wire_conn_fd(const struct dkv_wire_conn *conn)
{
    return conn->fd;
}

/* Only whole pages of [kept, *used) go. */
static void give_back(uint8_t *buffer, size_t kept, size_t *used)
{
    const uintptr_t from = ((uintptr_t)buffer + kept + PAGE_MAX - 1) & ~(PAGE_MAX - 1);
    const uintptr_t to = ((uintptr_t)buffer + *used) & ~(PAGE_MAX - 1);
    if (to <= from)
        return;
    (void)madvise(buffer + (from - (uintptr_t)buffer), to - from, MADV_DONTNEED);
    *used = from - (uintptr_t)buffer;
}

void dkv_wire_conn_trim(struct dkv_wire_conn *conn)
{
    if (conn->in_start == conn->in_end && !conn->handed_out)
        conn->in_start = conn->in_end = 0;
    give_back(conn->in, conn->in_end, &conn->in_used);
    give_back(conn->out, conn->out_end, &conn->out_used);
}

/* --- receiving ----------------------------------------------------------------------------- */

/* Copies the descriptors of a received message; all of them are ours now. */
static uint32_t collect_fds(struct msghdr *msg, int *fds)
{
    uint32_t n = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count && n < DKV_WIRE_CONN_SCM_MAX; i++)
            memcpy(&fds[n++], CMSG_DATA(c) + i * sizeof(int), sizeof(int));
    }
    return n;
}

/* One recvmsg(). *n_out 0: nothing there now. The descriptors that came are in fds[*n_fds_out],
 * whatever is returned. */
static enum dkv_status receive(struct dkv_wire_conn *conn, void *to, size_t bytes, size_t *n_out,
                               int *fds, uint32_t *n_fds_out, struct dkv_error *err)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(DKV_WIRE_CONN_SCM_MAX * sizeof(int))];
    } control;
    struct iovec iov = {.iov_base = to, .iov_len = bytes};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    ssize_t n;

    *n_out = 0;
    *n_fds_out = 0;
    do
        n = recvmsg(conn->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return DKV_OK;
    if (n < 0)
        return dkv_wire_conn_broken(
            conn, dkv_error_set(err, DKV_E_UNAVAILABLE, "receiving: %s", strerror(errno)));
    *n_fds_out = collect_fds(&msg, fds);
    if (msg.msg_flags & MSG_CTRUNC) /* what did fit is installed, and closed by the caller */
        return DKV_WIRE_CONN_BREAK(
            conn, "descriptors were lost on the way: too many, or no room for them");
    if (n == 0)
        return dkv_wire_conn_broken(
            conn, dkv_error_set(err, DKV_E_UNAVAILABLE, "the peer closed the connection"));
    *n_out = (size_t)n;
    return DKV_OK;
}

static void make_room(struct dkv_wire_conn *conn)
{
    if (conn->in_start == 0)
        return;
    memmove(conn->in, conn->in + conn->in_start, conn->in_end - conn->in_start);
    conn->in_end -= conn->in_start;
    conn->in_start = 0;
}

/* Descriptors wait for a message that may be here already: next() has to look before more come. */
static bool hands_out_first(const struct dkv_wire_conn *conn)
{
    return conn->pending.n > 0 &&
           (conn->handed_out || conn->in_end - conn->in_start >= DKV_WIRE_HEADER_BYTES);
}

enum dkv_status dkv_wire_conn_read(struct dkv_wire_conn *conn, bool *got_out, struct dkv_error *err)
{
    struct dkv_wire_conn_fd_batch batch;
    size_t n = 0;

    *got_out = false;
    if (conn->broken)
        return DKV_WIRE_CONN_BREAK(conn, "the connection is broken");
    if (conn->handed_out && conn->bulk_left > 0) /* the bulk is read by read_bulk() */
        return DKV_OK;
    make_room(conn);
    conn->drained = false;
    if (conn->in_end == DKV_WIRE_CONN_IN_BYTES || hands_out_first(conn))
        return DKV_OK;
    const size_t room = DKV_WIRE_CONN_IN_BYTES - conn->in_end;
    batch.from = conn->in_position + conn->in_end;
    enum dkv_status status = receive(conn, conn->in + conn->in_end, room, &n, batch.fds, &batch.n,
                                     err);
    batch.to = batch.from + n;
    if (status == DKV_OK && batch.n > 0 && conn->pending.n > 0)
        status = DKV_WIRE_CONN_BREAK(conn, "descriptors that no message announced");
    if (status != DKV_OK) {
        dkv_wire_conn_close_fds(batch.fds, batch.n);
        return status;
    }
    if (batch.n > 0)
        conn->pending = batch;
    conn->in_end += n;
    if (conn->in_end > conn->in_used)
        conn->in_used = conn->in_end;
    conn->drained = n < room && batch.n == 0;
    *got_out = n > 0;
    return DKV_OK;
}

bool dkv_wire_conn_drained(const struct dkv_wire_conn *conn)
{
    return conn->drained;
}

/* --- messages ------------------------------------------------------------------------------ */

static void consume(struct dkv_wire_conn *conn, size_t bytes)
{
    conn->in_start += bytes;
    conn->in_position += bytes;
}

/* The descriptors of the message that begins here. */
static enum dkv_status claim_fds(struct dkv_wire_conn *conn, uint32_t n, struct dkv_error *err)
{
    struct dkv_wire_conn_fd_batch *batch = &conn->pending;
    const uint64_t here = conn->in_position;

    if (batch->n > 0 && batch->to <= here)
        return DKV_WIRE_CONN_BREAK(conn, "%u descriptors that no message announced", batch->n);
    if (n == 0)
        return DKV_OK;
    if (batch->n != n || here < batch->from)
        return DKV_WIRE_CONN_BREAK(conn, "%s: %u descriptors announced, %u came",
                                   dkv_wire_type_name(conn->header.type), n, batch->n);
    memcpy(conn->message_fds, batch->fds, n * sizeof(int));
    conn->n_message_fds = n;
    batch->n = 0;
    return DKV_OK;
}

/* Reads the header that begins here, if it is complete. */
static enum dkv_status begin_message(struct dkv_wire_conn *conn, struct dkv_error *err)
{
    if (conn->in_end - conn->in_start < DKV_WIRE_HEADER_BYTES)
        return DKV_OK;
    enum dkv_status status = dkv_wire_get_header(conn->in + conn->in_start, conn->peer,
                                                 &conn->header, err);
    if (status != DKV_OK)
        return dkv_wire_conn_broken(conn, status);
    return claim_fds(conn, conn->header.n_fds, err);
}

static void end_message(struct dkv_wire_conn *conn)
{
    assert(conn->bulk_left == 0);
    dkv_wire_conn_close_fds(conn->message_fds, conn->n_message_fds);
    conn->n_message_fds = 0;
    conn->header.type = 0;
    conn->handed_out = false;
}

enum dkv_status dkv_wire_conn_next(struct dkv_wire_conn *conn,
                                   struct dkv_wire_conn_message *message_out, struct dkv_error *err)
{
    *message_out = (struct dkv_wire_conn_message){.payload = NULL};
    if (conn->broken)
        return DKV_WIRE_CONN_BREAK(conn, "the connection is broken");
    if (conn->handed_out)
        end_message(conn);
    if (conn->header.type == 0) {
        enum dkv_status status = begin_message(conn, err);
        if (status != DKV_OK)
            return status;
    }
    const size_t needed = DKV_WIRE_HEADER_BYTES + conn->header.payload_bytes;
    if (conn->header.type == 0)
        return DKV_OK;
    if (conn->in_end - conn->in_start < needed) {
        /* All that is here is this message's, which has what it announced. */
        if (conn->pending.n > 0)
            return DKV_WIRE_CONN_BREAK(conn, "descriptors in the middle of a message");
        return DKV_OK;
    }

    *message_out = (struct dkv_wire_conn_message){
        .header = conn->header,
        .payload = conn->in + conn->in_start + DKV_WIRE_HEADER_BYTES,
        .fds = conn->message_fds,
    };
    conn->handed_out = true;
    conn->bulk_left = conn->header.bulk_bytes;
    consume(conn, needed);
    return DKV_OK;
}

bool dkv_wire_conn_in_message(const struct dkv_wire_conn *conn)
{
    return !conn->handed_out && (conn->header.type != 0 || conn->in_end > conn->in_start);
}

uint64_t dkv_wire_conn_bulk_left(const struct dkv_wire_conn *conn)
{
    return conn->bulk_left;
}

/* The start of the bulk may have come in with its header. */
static uint64_t buffered_bulk(struct dkv_wire_conn *conn, void *to, uint64_t bytes)
{
    const size_t n = (size_t)dkv_wire_conn_smaller(bytes, conn->in_end - conn->in_start);

    if (n > 0 && to != NULL)
        memcpy(to, conn->in + conn->in_start, n);
    consume(conn, n);
    return n;
}

enum dkv_status dkv_wire_conn_read_bulk(struct dkv_wire_conn *conn, void *to, uint64_t bytes,
                                        uint64_t *got_out, struct dkv_error *err)
{
    int fds[DKV_WIRE_CONN_SCM_MAX];
    uint8_t waste[16384];
    uint32_t n_fds = 0;
    size_t n = 0;

    *got_out = 0;
    if (conn->broken)
        return DKV_WIRE_CONN_BREAK(conn, "the connection is broken");
    bytes = dkv_wire_conn_smaller(bytes, conn->bulk_left);
    *got_out = buffered_bulk(conn, to, bytes);
    if (*got_out == 0 && bytes > 0) {
        const bool keep = to != NULL;
        enum dkv_status status = receive(
            conn, keep ? to : waste,
            (size_t)dkv_wire_conn_smaller(bytes, keep ? bytes : sizeof(waste)), &n, fds, &n_fds,
            err);
        dkv_wire_conn_close_fds(fds, n_fds);
        if (status == DKV_OK && n_fds > 0)
            status = DKV_WIRE_CONN_BREAK(conn, "descriptors in the middle of a message");
        if (status != DKV_OK)
            return status;
        conn->in_position += n;
        *got_out = n;
    }
    conn->bulk_left -= *got_out;
    return DKV_OK;
}
