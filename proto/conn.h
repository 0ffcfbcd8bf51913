/* A stream of messages over a unix socket, with file descriptors; the same code at both ends.
 *
 * Buffers are fixed and taken at the start. Input is one message at a time: header and payload in
 * the buffer, bulk read by the caller straight to where it belongs. Output is queued and flushed by
 * the caller, bulk sent from where it lies. Nothing blocks.
 *
 *   while ((status = dkv_wire_conn_next(conn, &message, &err)) == DKV_OK &&
 *          message.header.type != 0)
 *       ... handle it, read its bulk ...
 *   dkv_wire_conn_read(conn, ...) when the socket is readable
 *
 * Descriptors come in only with the message that announces them, exactly as many as it says.
 * Everything else - too many, too few, in the middle of another message, cut off by the kernel
 * (MSG_CTRUNC) - breaks the connection, and every descriptor that came is closed.
 *
 * Owner   the caller owns conn (open/close); close() closes the socket and every fd inside.
 * Thread  one.
 * Errors  MALFORMED, UNSUPPORTED: the peer broke the protocol; UNAVAILABLE: it is gone. After
 *         any of them only close() is left. BUSY: the output queue is full, flush first.
 */
#ifndef DKV_PROTO_CONN_H
#define DKV_PROTO_CONN_H

#include "proto/wire.h"

struct dkv_wire_conn;

/* One message as it came in. type 0: there is no complete one yet.
 *
 * payload  valid until the next call of next() or read().
 * fds      [header.n_fds]; whoever wants one takes it and puts -1 in its place. The others are
 *          closed by the next next().
 */
struct dkv_wire_conn_message {
    struct dkv_wire_header header;
    const uint8_t *payload;
    int *fds;
};

/* A message to send. The payload may be in two pieces (fixed part, records). */
struct dkv_wire_conn_output {
    uint8_t type;
    uint64_t id;
    const void *payload;
    size_t payload_bytes;
    const void *more;
    size_t more_bytes;
    const int *fds; /* owned by conn once queued, closed when sent */
    uint16_t n_fds;
    const void *bulk; /* borrowed until dkv_wire_conn_bulks_sent() counts it */
    uint64_t bulk_bytes;
};

/* Takes `fd`, a connected unix stream socket; on an error it is still the caller's. `peer` says
 * whose messages come in. NOMEM, INVALID. */
enum dkv_status dkv_wire_conn_open(int fd, enum dkv_wire_sender peer,
                                   struct dkv_wire_conn **conn_out, struct dkv_error *err);
void dkv_wire_conn_close(struct dkv_wire_conn *conn); /* NULL is fine */

int dkv_wire_conn_fd(const struct dkv_wire_conn *conn);

/* Gives the system back what the buffers have beyond what they hold now: one large message is not
 * to cost 3 MiB for as long as its connection lasts. */
void dkv_wire_conn_trim(struct dkv_wire_conn *conn);

/* Receives once, if next() has nothing left to hand out. *got_out: bytes came; false: none are
 * there now. */
enum dkv_status dkv_wire_conn_read(struct dkv_wire_conn *conn, bool *got_out,
                                   struct dkv_error *err);

/* The last read() took all that was there: another one before the socket is readable is in vain. */
bool dkv_wire_conn_drained(const struct dkv_wire_conn *conn);

/* The last next() found only the beginning of a message. */
bool dkv_wire_conn_in_message(const struct dkv_wire_conn *conn);

/* The next complete message. The bulk of the one before must have been read or skipped. */
enum dkv_status dkv_wire_conn_next(struct dkv_wire_conn *conn,
                                   struct dkv_wire_conn_message *message_out,
                                   struct dkv_error *err);

/* Bytes of the current message's bulk that were not read yet. */
uint64_t dkv_wire_conn_bulk_left(const struct dkv_wire_conn *conn);

/* Reads up to `bytes` of the bulk; `to` may be NULL to throw them away. *got_out may be less, 0 if
 * none are there now. */
enum dkv_status dkv_wire_conn_read_bulk(struct dkv_wire_conn *conn, void *to, uint64_t bytes,
                                        uint64_t *got_out, struct dkv_error *err);

/* Queues a message. BUSY: no room now, and nothing was taken. TOO_LARGE: never. */
enum dkv_status dkv_wire_conn_send(struct dkv_wire_conn *conn,
                                   const struct dkv_wire_conn_output *output,
                                   struct dkv_error *err);

/* Sends what the socket takes, but for the rest of what is long: a MiB or so at once. */
enum dkv_status dkv_wire_conn_flush(struct dkv_wire_conn *conn, struct dkv_error *err);

/* Something is queued that was not sent; the socket may have room for it. */
bool dkv_wire_conn_wants_write(const struct dkv_wire_conn *conn);

/* How many bulks were sent so far, in the order of send(): the n-th may be reused once this is n.*/
uint64_t dkv_wire_conn_bulks_sent(const struct dkv_wire_conn *conn);

#endif
