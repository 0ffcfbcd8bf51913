/* Records of connections.
 *
 * While a request is being computed its connection is suspended, and the HTTP library neither reads
 * nor polls its socket. dkv_conn_watch() polls it meanwhile for the peer's end of stream, so that
 * work nobody waits for any more is not started. A peer that closes only its sending side counts as
 * gone, as it does for other HTTP servers: from here the two look alike.
 */
#include "server/conn.h"

#include "server/backend.h"
#include "server/raw_reply.h"

#include <stdlib.h>
#include <sys/socket.h>

struct dkv_conn *dkv_conn_add(struct dkv_conn_list *list, int fd, uint64_t now_ms)
{
    struct dkv_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL)
        return NULL;
    conn->fd = fd;
    dkv_conn_enter(conn, DKV_CONN_HEADER, now_ms);
    conn->next = list->first;
    if (conn->next != NULL)
        conn->next->prev = conn;
    list->first = conn;
    list->n++;
    return conn;
}

void dkv_conn_remove(struct dkv_conn_list *list, struct dkv_conn *conn)
{
    dkv_conn_unwatch(conn);
    if (conn->prev != NULL)
        conn->prev->next = conn->next;
    else
        list->first = conn->next;
    if (conn->next != NULL)
        conn->next->prev = conn->prev;
    list->n--;
    dkv_backend_client_put(conn->client);
    free(conn);
}

void dkv_conn_enter(struct dkv_conn *conn, enum dkv_conn_phase phase, uint64_t now_ms)
{
    conn->phase = phase;
    conn->phase_ms = now_ms;
    conn->body_bytes = 0;
}

/* Milliseconds that `n_bytes` may take at the lowest rate allowed. A real, since no product of
 * clients' lengths overflows one. */
static double slowest_ms(uint64_t n_bytes, const struct dkv_config *config)
{
    return (double)config->body_grace_ms +
           (double)n_bytes * 1000.0 / (double)config->body_min_bytes_per_s;
}

bool dkv_conn_overdue(const struct dkv_conn *conn, const struct dkv_config *config, uint64_t now_ms,
                      enum dkv_refusal *reason_out)
{
    const uint64_t lasted_ms = now_ms - conn->phase_ms;
    switch (conn->phase) {
    case DKV_CONN_HEADER:
        *reason_out = DKV_REFUSAL_HEADER_TIME;
        return lasted_ms > config->header_timeout_ms;
    case DKV_CONN_IDLE:
        *reason_out = DKV_REFUSAL_HEADER_TIME;
        return lasted_ms > config->keepalive_timeout_ms;
    case DKV_CONN_BODY:
        *reason_out = DKV_REFUSAL_BODY_TIME;
        return (double)lasted_ms > slowest_ms(conn->body_bytes, config);
    case DKV_CONN_REPLY:
        *reason_out = DKV_REFUSAL_REPLY_TIME;
        return (double)lasted_ms > slowest_ms(conn->reply_bytes, config);
    case DKV_CONN_WORK: break;
    }
    return false;
}

void dkv_conn_abort(struct dkv_conn *conn, unsigned http_status, const char *text)
{
    if (conn->doomed)
        return;
    if (!dkv_raw_reply(conn->fd, http_status, text))
        conn->linger = false;
    shutdown(conn->fd, conn->linger ? SHUT_WR : SHUT_RDWR);
    conn->doomed = true;
}

struct dkv_conn_watch {
    uv_poll_t poll;
    struct dkv_conn *conn;
    dkv_conn_gone_fn gone;
};

static void free_watch(uv_handle_t *handle)
{
    free(handle->data);
}

static void on_watch(uv_poll_t *poll, int status, int events)
{
    struct dkv_conn_watch *watch = poll->data;
    if (status == 0 && (events & UV_DISCONNECT) == 0)
        return;
    struct dkv_conn *conn = watch->conn;
    dkv_conn_gone_fn gone = watch->gone;
    dkv_conn_unwatch(conn);
    gone(conn);
}

bool dkv_conn_watch(struct dkv_conn *conn, uv_loop_t *loop, dkv_conn_gone_fn gone)
{
    struct dkv_conn_watch *watch = calloc(1, sizeof(*watch));
    if (watch == NULL)
        return false;
    watch->conn = conn;
    watch->gone = gone;
    watch->poll.data = watch;
    if (uv_poll_init(loop, &watch->poll, conn->fd) != 0) {
        free(watch);
        return false;
    }
    conn->watch = watch;
    uv_poll_start(&watch->poll, UV_DISCONNECT, on_watch);
    return true;
}

void dkv_conn_unwatch(struct dkv_conn *conn)
{
    if (conn->watch == NULL)
        return;
    /* Closed before the library polls the socket again or closes it. */
    uv_close((uv_handle_t *)&conn->watch->poll, free_watch);
    conn->watch = NULL;
}
