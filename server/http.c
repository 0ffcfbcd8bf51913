/* Glue between the loop, the HTTP library and the exchanges.
 *
 * The library calls on_request() once when a header is complete, then for each piece of body, then
 * once more at the end (and again after a resume): the intake's three functions. It does not listen
 * itself: the door hands it sockets whose first header is complete.
 *
 * The library's socket events are edge-triggered: after MHD_run() it may hold connections that are
 * ready still, which MHD_get_timeout() tells with a timeout of 0. pump() therefore goes on for a
 * few rounds and then lets the loop see its other events before it continues.
 */
#include "server/http.h"

#include "server/clock.h"
#include "server/door.h"
#include "server/exchange.h"
#include "server/infer.h"
#include "server/intake.h"
#include "server/linger.h"
#include "server/listen.h"
#include "server/shm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MEMORY_PER_CONNECTION (128u << 10) /* what one read of a body can take */
#define MEMORY_STEP           (64u << 10)
#define PUMP_ROUNDS           32
#define SWEEP_MS              50

/* How much the library forgives. From 1.0 on it can be told to refuse bare line feeds, and by
 * itself it takes them in headers and between chunks; before, intake.c sees to the headers. */
#if MHD_VERSION >= 0x00097701
#define STRICTNESS MHD_OPTION_CLIENT_DISCIPLINE_LVL, 1
#else
#define STRICTNESS MHD_OPTION_STRICT_FOR_CLIENT, 0
#endif

struct dkv_http {
    struct dkv_server *server;
    struct MHD_Daemon *library;
    struct dkv_door *door;
    uv_poll_t poll;
    uv_timer_t run_timer;
    uv_timer_t sweep_timer;
    struct dkv_conn_list conns;
    struct dkv_linger_set lingering;
    struct dkv_http_rules rules;
    unsigned port;
    bool pumping; /* inside MHD_run() */
    bool again;   /* somebody asked for one more round meanwhile */
    bool closed;
    unsigned n_closed_handles;
};

/* ---- the library's work on the loop ---- */

static void on_run_timer(uv_timer_t *timer);

static void pump(struct dkv_http *http)
{
    MHD_UNSIGNED_LONG_LONG timeout_ms = 0;
    bool more = true;
    if (http->pumping || http->closed)
        return;
    http->pumping = true;
    for (int i = 0; i < PUMP_ROUNDS && more; i++) {
        http->again = false;
        MHD_run(http->library);
        more = http->again ||
               (MHD_get_timeout(http->library, &timeout_ms) == MHD_YES && timeout_ms == 0);
    }
    http->pumping = false;
    /* The library's own timeouts are off, so there is nothing to wait for but more of the same. */
    if (more)
        uv_timer_start(&http->run_timer, on_run_timer, 0, 0);
    else
        uv_timer_stop(&http->run_timer);
}

static void on_run_timer(uv_timer_t *timer)
{
    pump(timer->data);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    pump(poll->data);
}

/* Asks for a pump soon: callable from inside the library's own calls. */
static void pump_soon(struct dkv_http *http)
{
    if (http->pumping)
        http->again = true;
    else if (!http->closed)
        uv_timer_start(&http->run_timer, on_run_timer, 0, 0);
}

static void on_sweep(uv_timer_t *timer);

/* ---- what the library calls ---- */

static struct dkv_conn *conn_of(struct MHD_Connection *mhd)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(
        mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info != NULL ? info->socket_context : NULL;
}

static enum MHD_Result to_library(bool go_on)
{
    return go_on ? MHD_YES : MHD_NO;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *mhd, const char *path,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **request)
{
    struct dkv_http *http = cls;
    struct dkv_exchange *exchange = *request;
    if (exchange == NULL) {
        struct dkv_conn *conn = conn_of(mhd);
        exchange = conn != NULL ? calloc(1, sizeof(*exchange)) : NULL;
        if (exchange == NULL)
            return MHD_NO;
        *request = exchange;
        exchange->server = http->server;
        exchange->mhd = mhd;
        exchange->conn = conn;
        exchange->started_ns = dkv_clock_ns();
        conn->exchange = exchange;
        return to_library(dkv_intake_begin(exchange, &http->rules, method, path, version));
    }
    if (exchange->replied)
        return MHD_YES;
    if (*upload_bytes == 0)
        return to_library(dkv_intake_finish(exchange));
    const size_t n_bytes = *upload_bytes;
    *upload_bytes = 0;
    return to_library(dkv_intake_receive(exchange, upload, n_bytes));
}

/* The first line of a request has been read. */
static void *on_first_line(void *cls, const char *uri, struct MHD_Connection *mhd)
{
    struct dkv_conn *conn = conn_of(mhd);
    (void)cls;
    (void)uri;
    if (conn != NULL && conn->phase == DKV_CONN_IDLE)
        dkv_conn_enter(conn, DKV_CONN_HEADER, dkv_clock_ms());
    return NULL;
}

static void on_completed(void *cls, struct MHD_Connection *mhd, void **request,
                         enum MHD_RequestTerminationCode why)
{
    struct dkv_exchange *exchange = *request;
    (void)cls;
    (void)mhd;
    if (exchange == NULL)
        return;
    if (exchange->accepted && !exchange->replied)
        dkv_infer_count_gone(exchange); /* while it sent its body */
    dkv_infer_release(exchange);
    dkv_infer_leave(exchange);
    dkv_log(DKV_LOG_TRACE, "%s ended (%s) after %llu us, %llu bytes in",
            exchange->match.route != NULL ? exchange->match.route->pattern : "a refused request",
            why == MHD_REQUEST_TERMINATED_COMPLETED_OK ? "answered" : "cut",
            (unsigned long long)((dkv_clock_ns() - exchange->started_ns) / 1000),
            (unsigned long long)exchange->received_bytes);
    exchange->conn->exchange = NULL;
    dkv_conn_enter(exchange->conn, DKV_CONN_IDLE, dkv_clock_ms());
    free(exchange);
    *request = NULL;
}

static void on_connection(void *cls, struct MHD_Connection *mhd, void **context,
                          enum MHD_ConnectionNotificationCode what)
{
    struct dkv_http *http = cls;
    struct dkv_conn *conn = *context;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(
            mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        *context = dkv_conn_add(&http->conns, info->connect_fd, dkv_clock_ms());
        http->server->metrics.connections_total[DKV_TRANSPORT_HTTP]++;
        if (!uv_is_active((uv_handle_t *)&http->sweep_timer))
            uv_timer_start(&http->sweep_timer, on_sweep, SWEEP_MS, SWEEP_MS);
    } else if (conn != NULL) {
        http->server->metrics.connections_closed[DKV_TRANSPORT_HTTP]++;
        if (conn->linger && !http->closed)
            dkv_linger_add(&http->lingering, http->server->loop, conn->fd);
        dkv_conn_remove(&http->conns, conn);
        *context = NULL;
        if (!http->closed)
            dkv_door_room(http->door);
    }
}

/* Paths are decoded by the route table, segment by segment. */
static size_t keep_escapes(void *cls, struct MHD_Connection *mhd, char *text)
{
    (void)cls;
    (void)mhd;
    return strlen(text);
}

DKV_PRINTF(2, 0)
static void on_library_log(void *cls, const char *format, va_list args)
{
    char text[256];
    struct dkv_http *http = cls;
    if (!dkv_log_enabled(DKV_LOG_DEBUG))
        return;
    vsnprintf(text, sizeof(text), format, args);
    text[strcspn(text, "\n")] = '\0';
    dkv_log_limited(&http->server->client_log, DKV_LOG_DEBUG, "libmicrohttpd: %s", text);
}

/* ---- suspend and resume ---- */

static void on_peer_gone(struct dkv_conn *conn)
{
    struct dkv_exchange *exchange = conn->exchange;
    if (exchange == NULL)
        return;
    if (!exchange->waits_for_region) {
        dkv_infer_gone(exchange);
        return;
    }
    dkv_shm_forget(exchange->server->shm, exchange); /* the region stays registered */
    exchange->gone = true;
    dkv_http_resume(exchange);
}

void dkv_http_suspend(struct dkv_exchange *exchange)
{
    struct dkv_conn *conn = exchange->conn;
    exchange->submitted = true;
    exchange->suspended = true;
    MHD_suspend_connection(exchange->mhd);
    dkv_conn_enter(conn, DKV_CONN_WORK, dkv_clock_ms());
    dkv_conn_watch(conn, exchange->server->loop, on_peer_gone);
}

void dkv_http_resume(struct dkv_exchange *exchange)
{
    if (!exchange->suspended)
        return;
    exchange->suspended = false;
    dkv_conn_unwatch(exchange->conn);
    MHD_resume_connection(exchange->mhd);
    pump_soon(exchange->server->http);
}

/* ---- the sweeper ---- */

/* Ends a connection without a word; the library notices and cleans up. */
static void shut(struct dkv_conn *conn)
{
    shutdown(conn->fd, SHUT_RDWR);
    conn->doomed = true;
}

static void close_overdue(struct dkv_http *http, struct dkv_conn *conn, enum dkv_refusal reason)
{
    http->server->metrics.refusals[reason]++;
    if (conn->phase == DKV_CONN_BODY)
        dkv_conn_abort(conn, 408, "the body arrived too slowly");
    else if (conn->phase == DKV_CONN_HEADER)
        dkv_conn_abort(conn, 408, "the header arrived too slowly");
    else
        shut(conn);
}

static void on_sweep(uv_timer_t *timer)
{
    struct dkv_http *http = timer->data;
    const uint64_t now_ms = dkv_clock_ms();
    for (struct dkv_conn *conn = http->conns.first; conn != NULL; conn = conn->next) {
        enum dkv_refusal reason;
        if (!conn->doomed && dkv_conn_overdue(conn, http->server->config, now_ms, &reason))
            close_overdue(http, conn, reason);
    }
    dkv_body_pool_trim(&http->server->bodies, now_ms);
    if (http->conns.n == 0 && http->server->bodies.warm == NULL)
        uv_timer_stop(timer); /* an idle daemon sleeps */
}

/* ---- open and close ---- */

static struct MHD_Daemon *start_library(struct dkv_http *http)
{
    const struct dkv_config *config = http->server->config;
    return MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | MHD_USE_NO_LISTEN_SOCKET, 0,
        NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_library_log, http,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)config->max_connections,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MEMORY_PER_CONNECTION,
        MHD_OPTION_CONNECTION_MEMORY_INCREMENT, (size_t)MEMORY_STEP, MHD_OPTION_CONNECTION_TIMEOUT,
        0u, STRICTNESS, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, http, MHD_OPTION_URI_LOG_CALLBACK, on_first_line,
        http, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, http, MHD_OPTION_END);
}

static void attach_to_loop(struct dkv_http *http)
{
    uv_loop_t *loop = http->server->loop;
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(http->library, MHD_DAEMON_INFO_EPOLL_FD);
    uv_poll_init(loop, &http->poll, info->epoll_fd);
    uv_timer_init(loop, &http->run_timer);
    uv_timer_init(loop, &http->sweep_timer);
    http->poll.data = http;
    http->run_timer.data = http;
    http->sweep_timer.data = http;
    uv_poll_start(&http->poll, UV_READABLE, on_poll);
}

static void welcome(void *owner, int fd, const struct sockaddr *address, socklen_t address_bytes)
{
    struct dkv_http *http = owner;
    /* The library closes the socket if it cannot take it. */
    if (MHD_add_connection(http->library, fd, address, address_bytes) == MHD_YES)
        pump_soon(http);
}

static void refused(void *owner, enum dkv_refusal reason, const char *text)
{
    struct dkv_http *http = owner;
    http->server->metrics.connections_total[DKV_TRANSPORT_HTTP]++;
    http->server->metrics.connections_closed[DKV_TRANSPORT_HTTP]++;
    http->server->metrics.refusals[reason]++;
    dkv_log_limited(&http->server->client_log, DKV_LOG_INFO, "refused a connection: %s", text);
}

static unsigned n_inside(void *owner)
{
    const struct dkv_http *http = owner;
    return http->conns.n;
}

/* Closes the connection that has been idle longest. */
static void make_room(void *owner)
{
    struct dkv_http *http = owner;
    struct dkv_conn *oldest = NULL;
    for (struct dkv_conn *conn = http->conns.first; conn != NULL; conn = conn->next)
        if (conn->phase == DKV_CONN_IDLE && !conn->doomed &&
            (oldest == NULL || conn->phase_ms <= oldest->phase_ms))
            oldest = conn;
    if (oldest == NULL)
        return;
    shut(oldest);
}

/* The listening socket: the service manager's, or one that is made here. */
static enum dkv_status open_socket(struct dkv_http *http, struct dkv_listen_address *address_out,
                                   int *fd_out, struct dkv_error *err)
{
    const struct dkv_config *config = http->server->config;
    *fd_out = http->server->inherited.http_fd;
    if (*fd_out >= 0) {
        if (!dkv_listen_adopt(*fd_out, address_out, &http->port))
            return dkv_error_set(err, DKV_E_INVALID, "http: the inherited socket has no address");
        return dkv_config_check_reach(config, address_out->loopback, "the inherited socket", err);
    }
    const enum dkv_status status = dkv_listen_parse(config->http, address_out, err);
    return status == DKV_OK ? dkv_listen_open(address_out, fd_out, &http->port, err) : status;
}

static struct dkv_door_config door_config(const struct dkv_server *server)
{
    return (struct dkv_door_config){server->config->header_timeout_ms,
                                    (unsigned)server->config->max_connections};
}

void dkv_http_relimit(struct dkv_http *http)
{
    const struct dkv_door_config door = door_config(http->server);
    http->rules.max_body_bytes = http->server->max_body_bytes;
    dkv_door_configure(http->door, &door);
}

/* The door, which owns the listening socket from then on. */
static enum dkv_status open_door(struct dkv_http *http, struct dkv_error *err)
{
    const struct dkv_door_config door = door_config(http->server);
    const struct dkv_door_calls calls = {http, welcome, refused, n_inside, make_room};
    struct dkv_listen_address address;
    int listen_fd;
    enum dkv_status status = open_socket(http, &address, &listen_fd, err);
    if (status != DKV_OK)
        return status;
    /* A web page cannot know a token, so names matter only where none is asked for. */
    http->rules.local_names_only = address.loopback && !http->server->auth.required;
    http->door = dkv_door_open(http->server->loop, listen_fd, &door, &calls);
    if (http->door == NULL) {
        close(listen_fd);
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    }
    return DKV_OK;
}

enum dkv_status dkv_http_open(struct dkv_server *server, struct dkv_error *err)
{
    struct dkv_http *http = calloc(1, sizeof(*http));
    if (http == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    http->server = server;
    http->rules.max_body_bytes = server->max_body_bytes;
    http->library = start_library(http);
    if (http->library == NULL) {
        free(http);
        return dkv_error_set(err, DKV_E_IO, "http: libmicrohttpd did not start");
    }
    server->http = http; /* closed with dkv_http_close(), also if the door does not open */
    attach_to_loop(http);
    return open_door(http, err);
}

unsigned dkv_http_port(const struct dkv_http *http)
{
    return http->port;
}

void dkv_http_drain(struct dkv_http *http)
{
    for (struct dkv_conn *conn = http->conns.first; conn != NULL; conn = conn->next)
        if (conn->phase == DKV_CONN_IDLE && !conn->doomed)
            shut(conn);
}

bool dkv_http_is_quiet(const struct dkv_http *http)
{
    for (const struct dkv_conn *conn = http->conns.first; conn != NULL; conn = conn->next)
        if (conn->phase == DKV_CONN_REPLY && !conn->doomed)
            return false;
    return true;
}

static void free_http(uv_handle_t *handle)
{
    struct dkv_http *http = handle->data;
    if (++http->n_closed_handles == 3)
        free(http);
}

void dkv_http_close(struct dkv_http *http)
{
    if (http == NULL)
        return;
    /* The library must not be stopped while it holds suspended connections. */
    for (struct dkv_conn *conn = http->conns.first; conn != NULL; conn = conn->next)
        if (conn->exchange != NULL && conn->exchange->suspended) {
            conn->exchange->gone = true;
            if (conn->exchange->waits_for_region)
                dkv_shm_forget(http->server->shm, conn->exchange);
            dkv_http_resume(conn->exchange);
        }
    pump(http);
    http->closed = true;
    dkv_door_close(http->door);
    dkv_linger_close_all(&http->lingering);
    uv_close((uv_handle_t *)&http->poll, free_http);
    uv_close((uv_handle_t *)&http->run_timer, free_http);
    uv_close((uv_handle_t *)&http->sweep_timer, free_http);
    MHD_stop_daemon(http->library);
}
