/* The listening end: who may come in, and what all sessions have in common. */
#include "server/session_priv.h"

#include "server/clock.h"
#include "server/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define ACCEPTS_PER_TURN 32u

static void let_in(struct dkv_sessions *all, int fd)
{
    struct dkv_error err = {0};
    unsigned uid;
    struct dkv_server *server = all->server;
    if (!dkv_socket_peer_may_enter(fd, all->group, &uid)) {
        dkv_log_limited(&server->client_log, DKV_LOG_WARN, "socket: user %u may not connect", uid);
        close(fd);
    } else if (all->n_sessions >= server->config->max_connections) {
        dkv_log_limited(&server->client_log, DKV_LOG_WARN,
                        "socket: a client is turned away: max_connections %llu is reached",
                        (unsigned long long)server->config->max_connections);
        close(fd);
    } else if (dkv_session_new(all, fd, uid, &err) != DKV_OK) {
        dkv_log_limited(&server->client_log, DKV_LOG_WARN, "socket: a client is turned away: %s",
                        err.text);
    } else if (dkv_log_may(&server->request_log, DKV_LOG_DEBUG)) {
        dkv_log(DKV_LOG_DEBUG, "session %llu: user %u has connected",
                (unsigned long long)all->n_ever, uid);
    }
}

/* No descriptor is left: the spare one makes room to take the client from the queue and close it,
 * so that it learns, and so that the listening socket does not stay readable for ever. */
static void turn_away(struct dkv_sessions *all)
{
    dkv_log_limited(&all->server->client_log, DKV_LOG_WARN,
                    "socket: a client is turned away: no file descriptors are left");
    close(all->spare_fd);
    const int fd = accept4(all->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    all->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void on_listen(uv_poll_t *poll, int status, int events)
{
    struct dkv_sessions *all = poll->data;
    (void)status;
    (void)events;
    for (unsigned i = 0; i < ACCEPTS_PER_TURN; i++) {
        const int fd = accept4(all->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0)
            let_in(all, fd);
        else if (errno == EMFILE || errno == ENFILE)
            turn_away(all);
        else if (errno != EINTR && errno != ECONNABORTED)
            return;
    }
}

/* ---- open and close ---- */

static enum dkv_status listen_at(struct dkv_sessions *all, struct dkv_error *err)
{
    const struct dkv_config *config = all->server->config;
    enum dkv_status status = dkv_socket_group(config->socket_group, &all->group, err);
    if (status != DKV_OK)
        return status;
    all->inherited = all->server->inherited.socket_fd >= 0;
    if (all->inherited) {
        all->listen_fd = all->server->inherited.socket_fd;
        dkv_socket_adopt(all->listen_fd, all->path);
        return DKV_OK;
    }
    status = dkv_socket_path(config->socket, all->path, err);
    return status == DKV_OK ? dkv_socket_listen(all->path, all->group, &all->listen_fd, err)
                            : status;
}

static void stop_listening(struct dkv_sessions *all)
{
    if (!all->inherited)
        unlink(all->path);
    close(all->listen_fd);
}

/* One call for all answers of a batch to one client. */
static void send_unsent(void *owner)
{
    struct dkv_sessions *all = owner;
    struct dkv_list *node;
    while ((node = dkv_list_first(&all->unsent)) != NULL) {
        dkv_list_remove(node);
        dkv_session_flush(DKV_LIST_OF(node, struct dkv_session, unsent_node));
    }
}

static enum dkv_status start(struct dkv_sessions *all, struct dkv_error *err)
{
    struct dkv_server *server = all->server;
    enum dkv_status status = listen_at(all, err);
    if (status != DKV_OK)
        return status;
    status = dkv_fences_open(server->loop, &all->fences, err);
    if (status == DKV_OK && uv_poll_init(server->loop, &all->poll, all->listen_fd) != 0) {
        dkv_fences_close(all->fences);
        status = dkv_error_set(err, DKV_E_IO, "socket: it cannot be polled");
    }
    if (status != DKV_OK) {
        stop_listening(all);
        return status;
    }
    all->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (getrandom(&all->instance, sizeof(all->instance), 0) != sizeof(all->instance))
        all->instance = dkv_clock_ns();
    all->poll.data = all;
    uv_poll_start(&all->poll, UV_READABLE, on_listen);
    return DKV_OK;
}

static void free_sessions(uv_handle_t *handle)
{
    free(handle->data);
}

enum dkv_status dkv_sessions_open(struct dkv_server *server, struct dkv_sessions **sessions_out,
                                  struct dkv_error *err)
{
    *sessions_out = NULL;
    if (strcmp(server->config->socket, "off") == 0 && server->inherited.socket_fd < 0)
        return DKV_OK;
    struct dkv_sessions *all = calloc(1, sizeof(*all));
    if (all == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the local socket");
    all->server = server;
    dkv_list_init(&all->sessions);
    dkv_list_init(&all->unsent);
    enum dkv_status status = start(all, err);
    if (status == DKV_OK) {
        dkv_backend_on_settled(server->backend, send_unsent, all);
        *sessions_out = all;
        return DKV_OK;
    }
    free(all);
    const bool optional = *server->config->socket == '\0' &&
                          *server->config->socket_group == '\0' && server->inherited.socket_fd < 0;
    if (!optional || strcmp(server->config->http, "off") == 0)
        return status;
    dkv_log(DKV_LOG_WARN, "%s; serving HTTP only", err->text);
    return DKV_OK;
}

const char *dkv_sessions_path(const struct dkv_sessions *sessions)
{
    return sessions->path;
}

bool dkv_sessions_are_quiet(const struct dkv_sessions *sessions)
{
    if (sessions == NULL)
        return true;
    DKV_LIST_EACH (node, &sessions->sessions) {
        const struct dkv_session *session = DKV_LIST_OF(node, struct dkv_session, node);
        if (session->n_asks > 0 || dkv_wire_conn_wants_write(session->conn))
            return false;
    }
    return true;
}

void dkv_sessions_close(struct dkv_sessions *sessions)
{
    struct dkv_list *node;
    if (sessions == NULL)
        return;
    dkv_backend_on_settled(sessions->server->backend, NULL, NULL);
    while ((node = dkv_list_first(&sessions->sessions)) != NULL)
        dkv_session_end(DKV_LIST_OF(node, struct dkv_session, node));
    dkv_fences_close(sessions->fences);
    close(sessions->spare_fd);
    uv_close((uv_handle_t *)&sessions->poll, free_sessions);
    stop_listening(sessions);
}
