/* What conn.c (receiving) and conn_send.c share; nobody else includes this. */
#ifndef DKV_PROTO_CONN_PRIV_H
#define DKV_PROTO_CONN_PRIV_H

#include <unistd.h>

#include "proto/conn.h"

#define DKV_WIRE_CONN_IN_BYTES  (DKV_WIRE_HEADER_BYTES + DKV_WIRE_PAYLOAD_MAX)
#define DKV_WIRE_CONN_OUT_BYTES (2 * DKV_WIRE_CONN_IN_BYTES)
#define DKV_WIRE_CONN_MARKS     128u
#define DKV_WIRE_CONN_SCM_MAX                                                \
    253 /* the kernel's limit: room for all, so that what came can be closed \
         */

struct dkv_wire_conn_fd_batch {
    uint64_t from, to; /* stream positions of the recvmsg() that brought them */
    uint32_t n;
    int fds[DKV_WIRE_CONN_SCM_MAX];
};

struct dkv_wire_conn_mark {
    uint64_t at; /* position in the output buffer's stream */
    const uint8_t *bulk;
    uint64_t bulk_left;
    uint16_t n_fds; /* 0: a bulk */
    int fds[DKV_WIRE_FDS_MAX];
};

struct dkv_wire_conn {
    int fd;
    enum dkv_wire_sender peer;
    bool broken;
    bool drained; /* the last recvmsg() took all that was there */

    uint8_t in[DKV_WIRE_CONN_IN_BYTES];
    size_t in_start, in_end;
    size_t in_used;       /* bytes of `in` that may have memory: trim() */
    uint64_t in_position; /* stream position of in[in_start] */
    struct dkv_wire_conn_fd_batch pending;
    struct dkv_wire_header header; /* of the message being read; type 0: none yet */
    bool handed_out;
    uint64_t bulk_left;
    uint32_t n_message_fds;
    int message_fds[DKV_WIRE_FDS_MAX];

    uint8_t out[DKV_WIRE_CONN_OUT_BYTES];
    size_t out_start, out_end;
    size_t out_used;
    uint64_t out_position; /* of out[out_start] */
    struct dkv_wire_conn_mark marks[DKV_WIRE_CONN_MARKS];
    uint32_t first_mark, n_marks;
    uint64_t bulks_sent;
};

static inline void dkv_wire_conn_close_fds(const int *fds, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static inline uint64_t dkv_wire_conn_smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline struct dkv_wire_conn_mark *dkv_wire_conn_mark_at(struct dkv_wire_conn *conn,
                                                               uint32_t i)
{
    return &conn->marks[(conn->first_mark + i) % DKV_WIRE_CONN_MARKS];
}

static inline enum dkv_status dkv_wire_conn_broken(struct dkv_wire_conn *conn,
                                                   enum dkv_status status)
{
    conn->broken = true;
    return status;
}

/* Returns MALFORMED; only close() is left. */
#define DKV_WIRE_CONN_BREAK(conn, ...) \
    dkv_wire_conn_broken((conn), dkv_error_set(err, DKV_E_MALFORMED, __VA_ARGS__))

#endif
