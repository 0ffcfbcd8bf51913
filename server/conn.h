/* Connections and their deadlines.
 *
 * The HTTP library's timeout restarts with every byte, so a client that drips holds a connection
 * for ever. Here every phase of a connection has an absolute end, judged by a sweeper:
 *
 *   header  header_timeout_ms, from the connection's start or a later request's first line
 *   idle    keepalive_timeout_ms, from the end of a request to the first line of the next
 *   body    body_grace_ms, then at least body_min_bytes_per_s
 *   work    none: the job has its own deadline
 *   reply   as the body, for reading it
 *
 * Owner   the HTTP front: one record per socket, linked in a list.
 * Thread  loop only.
 */
#ifndef DKV_SERVER_CONN_H
#define DKV_SERVER_CONN_H

#include "server/config.h"
#include "server/metrics.h"

#include <uv.h>

enum dkv_conn_phase {
    DKV_CONN_HEADER = 0,
    DKV_CONN_IDLE,
    DKV_CONN_BODY,
    DKV_CONN_WORK,
    DKV_CONN_REPLY,
};

struct dkv_backend_client;
struct dkv_exchange;

struct dkv_conn {
    struct dkv_conn *next, *prev;
    int fd; /* borrowed from the HTTP library */
    enum dkv_conn_phase phase;
    uint64_t phase_ms;   /* when the phase began */
    uint64_t body_bytes; /* received in BODY */
    uint64_t reply_bytes;
    bool doomed;                   /* shut down: only the library's clean-up is left */
    bool linger;                   /* closed while the client may still be sending: see linger.h */
    struct dkv_exchange *exchange; /* the request in progress, or NULL */
    struct dkv_conn_watch *watch;  /* WORK: sees the peer go */
    struct dkv_backend_client *client; /* of the fair share; NULL until a request needs it */
};

struct dkv_conn_list {
    struct dkv_conn *first;
    unsigned n;
};

/* NULL if out of memory. */
struct dkv_conn *dkv_conn_add(struct dkv_conn_list *list, int fd, uint64_t now_ms);
void dkv_conn_remove(struct dkv_conn_list *list, struct dkv_conn *conn);

void dkv_conn_enter(struct dkv_conn *conn, enum dkv_conn_phase phase, uint64_t now_ms);

/* True if the phase has lasted too long; *reason_out says which limit it was. */
bool dkv_conn_overdue(const struct dkv_conn *conn, const struct dkv_config *config, uint64_t now_ms,
                      enum dkv_refusal *reason_out);

/* Answers straight on the socket where the library cannot (it takes a response only before and
 * after a body), and shuts it down. Best effort: the peer may be gone. */
void dkv_conn_abort(struct dkv_conn *conn, unsigned http_status, const char *text);

/* Calls `gone` once if the peer closes while the library does not look. */
typedef void (*dkv_conn_gone_fn)(struct dkv_conn *conn);
bool dkv_conn_watch(struct dkv_conn *conn, uv_loop_t *loop, dkv_conn_gone_fn gone);
void dkv_conn_unwatch(struct dkv_conn *conn);

#endif
