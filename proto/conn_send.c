/* The output queue: a buffer of headers and payloads, and a short list of marks, "here come
 * descriptors", "here goes that bulk". Positions count the buffer's bytes only. Each message that
 * carries descriptors begins a sendmsg(), since the kernel attaches them to its first byte.
 *
 * A peer that reads as fast as we write never fills the socket, also not within one call, so both
 * have an end: a gigabyte's answer to one peer is no reason for the others to wait.
 */
#include "proto/conn_priv.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define PIECES_MAX 64                /* of one sendmsg() */
#define FLUSH_MAX  ((size_t)1 << 20) /* of bulk, and of a flush: some 0.2 ms */

static struct dkv_wire_conn_mark *add_mark(struct dkv_wire_conn *conn)
{
    struct dkv_wire_conn_mark *mark = dkv_wire_conn_mark_at(conn, conn->n_marks++);
    mark->at = conn->out_position + (conn->out_end - conn->out_start);
    mark->n_fds = 0;
    return mark;
}

static void append(struct dkv_wire_conn *conn, const void *bytes, size_t n)
{
    if (n > 0)
        memcpy(conn->out + conn->out_end, bytes, n);
    conn->out_end += n;
    if (conn->out_end > conn->out_used)
        conn->out_used = conn->out_end;
}

static bool has_room(struct dkv_wire_conn *conn, size_t bytes, uint32_t n_marks)
{
    if (bytes > DKV_WIRE_CONN_OUT_BYTES - conn->out_end && conn->out_start > 0) {
        memmove(conn->out, conn->out + conn->out_start, conn->out_end - conn->out_start);
        conn->out_end -= conn->out_start;
        conn->out_start = 0;
    }
    return bytes <= DKV_WIRE_CONN_OUT_BYTES - conn->out_end &&
           n_marks <= DKV_WIRE_CONN_MARKS - conn->n_marks;
}

enum dkv_status dkv_wire_conn_send(struct dkv_wire_conn *conn,
                                   const struct dkv_wire_conn_output *output, struct dkv_error *err)
{
    const size_t payload_bytes = output->payload_bytes + output->more_bytes;
    uint8_t header[DKV_WIRE_HEADER_BYTES];

    if (payload_bytes > DKV_WIRE_PAYLOAD_MAX || output->n_fds > DKV_WIRE_FDS_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "payload of %zu bytes, %u fds", payload_bytes,
                             output->n_fds);
    if (!has_room(conn, sizeof(header) + payload_bytes,
                  (output->n_fds > 0) + (output->bulk_bytes > 0)))
        return dkv_error_set(err, DKV_E_BUSY, "the connection's output is full");

    dkv_wire_put_header(header, &(struct dkv_wire_header){.version = DKV_WIRE_VERSION,
                                                          .type = output->type,
                                                          .n_fds = output->n_fds,
                                                          .payload_bytes = (uint32_t)payload_bytes,
                                                          .id = output->id,
                                                          .bulk_bytes = output->bulk_bytes});
    if (output->n_fds > 0) {
        struct dkv_wire_conn_mark *mark = add_mark(conn);
        mark->n_fds = output->n_fds;
        memcpy(mark->fds, output->fds, output->n_fds * sizeof(int));
    }
    append(conn, header, sizeof(header));
    append(conn, output->payload, output->payload_bytes);
    append(conn, output->more, output->more_bytes);
    if (output->bulk_bytes > 0) {
        struct dkv_wire_conn_mark *mark = add_mark(conn);
        mark->bulk = output->bulk;
        mark->bulk_left = output->bulk_bytes;
    }
    return DKV_OK;
}

/* One sendmsg(). *n_out 0: the socket takes nothing now. */
static enum dkv_status transmit(struct dkv_wire_conn *conn, struct iovec *pieces, size_t n_pieces,
                                const int *fds, uint16_t n_fds, size_t *n_out,
                                struct dkv_error *err)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(DKV_WIRE_FDS_MAX * sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = pieces, .msg_iovlen = n_pieces};
    ssize_t n;

    if (n_fds > 0) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = control.bytes;
        msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    do
        n = sendmsg(conn->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    *n_out = n > 0 ? (size_t)n : 0;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        return dkv_wire_conn_broken(
            conn, dkv_error_set(err, DKV_E_UNAVAILABLE, "sending: %s", strerror(errno)));
    return DKV_OK;
}

static void pop_mark(struct dkv_wire_conn *conn)
{
    conn->first_mark = (conn->first_mark + 1) % DKV_WIRE_CONN_MARKS;
    conn->n_marks--;
}

static struct iovec piece_of_bulk(const struct dkv_wire_conn_mark *mark, size_t most)
{
    return (struct iovec){(void *)(uintptr_t)mark->bulk,
                          (size_t)dkv_wire_conn_smaller(mark->bulk_left, most)};
}

static void bulk_went(struct dkv_wire_conn *conn, struct dkv_wire_conn_mark *mark, size_t bytes)
{
    mark->bulk += bytes;
    mark->bulk_left -= bytes;
    if (mark->bulk_left == 0) {
        pop_mark(conn);
        conn->bulks_sent++;
    }
}

/* What one call can take from here on: the buffer up to the next descriptors, and the bulks that
 * belong among it. Several small answers are one call here and one wake-up at the other end. */
static size_t gather(struct dkv_wire_conn *conn, uint32_t mark, struct iovec pieces[PIECES_MAX])
{
    uint8_t *at = conn->out + conn->out_start;
    uint64_t position = conn->out_position;
    const uint64_t end = position + (conn->out_end - conn->out_start);
    size_t n = 0, bulk_room = FLUSH_MAX;

    for (;; mark++) {
        struct dkv_wire_conn_mark *next = mark < conn->n_marks ? dkv_wire_conn_mark_at(conn, mark)
                                                               : NULL;
        const uint64_t stop = next != NULL ? next->at : end;
        if (stop > position) {
            pieces[n++] = (struct iovec){at, (size_t)(stop - position)};
            at += stop - position;
            position = stop;
        }
        if (next == NULL || next->n_fds > 0 || n == PIECES_MAX || bulk_room == 0)
            return n;
        pieces[n++] = piece_of_bulk(next, bulk_room);
        bulk_room -= pieces[n - 1].iov_len;
        if (n >= PIECES_MAX - 1 || pieces[n - 1].iov_len < next->bulk_left)
            return n;
    }
}

/* Takes `n` bytes that were sent off the queue. */
static void went(struct dkv_wire_conn *conn, size_t n)
{
    while (n > 0) {
        struct dkv_wire_conn_mark *mark = conn->n_marks > 0 ? dkv_wire_conn_mark_at(conn, 0) : NULL;
        const uint64_t end = conn->out_position + (conn->out_end - conn->out_start);
        const uint64_t buffered = (mark != NULL ? mark->at : end) - conn->out_position;
        const size_t step = (size_t)dkv_wire_conn_smaller(n, buffered > 0 ? buffered
                                                                          : mark->bulk_left);
        if (buffered > 0) {
            conn->out_start += step;
            conn->out_position += step;
        } else {
            bulk_went(conn, mark, step);
        }
        n -= step;
    }
    if (conn->out_start == conn->out_end) /* the same few cache lines are used again */
        conn->out_start = conn->out_end = 0;
}

/* One call, with the descriptors of `due` if they are due here. */
static enum dkv_status send_some(struct dkv_wire_conn *conn, struct dkv_wire_conn_mark *due,
                                 size_t *n_out, struct dkv_error *err)
{
    struct iovec pieces[PIECES_MAX];
    const size_t n_pieces = gather(conn, due != NULL ? 1 : 0, pieces);
    enum dkv_status status = transmit(conn, pieces, n_pieces, due != NULL ? due->fds : NULL,
                                      due != NULL ? due->n_fds : 0, n_out, err);
    if (due != NULL && *n_out > 0) {
        dkv_wire_conn_close_fds(due->fds, due->n_fds);
        pop_mark(conn);
    }
    went(conn, *n_out);
    return status;
}

enum dkv_status dkv_wire_conn_flush(struct dkv_wire_conn *conn, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    size_t n = 1, total = 0;

    if (conn->broken)
        return DKV_WIRE_CONN_BREAK(conn, "the connection is broken");
    while (status == DKV_OK && n > 0 && total < FLUSH_MAX && dkv_wire_conn_wants_write(conn)) {
        struct dkv_wire_conn_mark *mark = conn->n_marks > 0 ? dkv_wire_conn_mark_at(conn, 0) : NULL;
        const bool due = mark != NULL && mark->n_fds > 0 && mark->at == conn->out_position;
        status = send_some(conn, due ? mark : NULL, &n, err);
        total += n;
    }
    return status;
}

bool dkv_wire_conn_wants_write(const struct dkv_wire_conn *conn)
{
    return conn->out_end > conn->out_start || conn->n_marks > 0;
}

uint64_t dkv_wire_conn_bulks_sent(const struct dkv_wire_conn *conn)
{
    return conn->bulks_sent;
}
