/* The local socket's transport: one connection, many requests on it.
 *
 *   disconnected --connect--> greeting --welcome, objects registered--> ready
 *        ^                                                                |
 *        '---------- the daemon went away, or broke the protocol ---------'
 *
 * Requests are sent once the connection is ready, and answered in any order. When it breaks, those
 * that were sent wait for the next one, within their deadlines and as often as the caller allows:
 * scoring changes nothing in the daemon, so doing it twice is harmless. Objects are registered
 * again on every connection, since the daemon forgets a connection's with it.
 *
 * The socket and a timerfd for deadlines and pauses are in one epoll instance, which is the
 * descriptor that the caller watches.
 */
#include "client/ipc_priv.h"
#include "client/layout.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define NEVER_NS   DKV_ALARM_NEVER
#define LAST_LOOKS 64 /* at answers before deadlines, were there no end of them */
#define FEATURES                                                        \
    ((uint32_t)(DKV_WIRE_FEATURE_MEMFD | DKV_WIRE_FEATURE_CUDA_LEGACY | \
                DKV_WIRE_FEATURE_CUDA_VMM | DKV_WIRE_FEATURE_OUTPUT | DKV_WIRE_FEATURE_FENCE))

/* ---- ends ---- */

/* Nobody is there: those who wait are told, or wait for the next try. */
static void fail_to_connect(struct dkv_transport *t, enum dkv_status status, const char *text)
{
    struct dkv_ipc_carrier *next;
    const int64_t pause_ns = DKV_IPC_FIRST_PAUSE_NS << (t->n_failures < 6 ? t->n_failures : 6);
    t->n_failures++;
    t->connect_not_before_ns = dkv_now_ns() + pause_ns;
    for (struct dkv_ipc_carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        c->n_attempts++;
        dkv_ipc_retry(t, c, pause_ns, status, text);
    }
}

void dkv_ipc_disconnect(struct dkv_transport *t, enum dkv_status status, const char *text)
{
    struct dkv_ipc_carrier *next;
    const bool was_greeted = t->greeted;
    if (t->conn == NULL)
        return;
    dkv_wire_conn_close(t->conn); /* which takes the socket out of the epoll instance */
    t->conn = NULL;
    t->greeted = false;
    t->skipping = false;
    t->receiving = NULL;
    t->events = 0;
    dkv_ipc_bulks_sent(t, UINT64_MAX);
    t->n_bulks = 0;
    dkv_ipc_objects_forget(t);
    for (struct dkv_ipc_carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        if (c->id != 0)
            dkv_ipc_retry(t, c, 0, status, text);
    }
    if (!was_greeted)
        fail_to_connect(t, status, text);
}

/* ---- connecting ---- */

enum dkv_status dkv_ipc_send(struct dkv_transport *t, uint8_t type, const void *payload,
                             size_t payload_bytes, uint64_t *id_out)
{
    struct dkv_error ignored;
    const enum dkv_status status = dkv_wire_conn_send(
        t->conn,
        &(struct dkv_wire_conn_output){
            .type = type, .id = t->last_id + 1, .payload = payload, .payload_bytes = payload_bytes},
        &ignored);
    if (status == DKV_OK)
        *id_out = ++t->last_id;
    return status;
}

static enum dkv_status connect_now(struct dkv_transport *t, struct dkv_error *err)
{
    uint8_t hello[16];
    uint64_t id;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return dkv_error_set(err, DKV_E_IO, "could not make a socket: %s", strerror(errno));
    struct epoll_event event = {.events = EPOLLIN};
    enum dkv_status status = DKV_E_UNAVAILABLE;
    if (connect(fd, (const struct sockaddr *)&t->address, sizeof(t->address)) != 0)
        dkv_error_set(err, status, "nobody answers at the socket: %s", strerror(errno));
    else if (epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0)
        status = dkv_error_set(err, DKV_E_IO, "could not poll: %s", strerror(errno));
    else
        status = dkv_wire_conn_open(fd, DKV_WIRE_FROM_DAEMON, &t->conn, err);
    if (status != DKV_OK) {
        close(fd);
        return status;
    }
    t->events = EPOLLIN;
    const size_t n = dkv_wire_put_hello(hello,
                                        &(struct dkv_wire_hello){.magic = DKV_WIRE_MAGIC,
                                                                 .version_min = DKV_WIRE_VERSION,
                                                                 .version_max = DKV_WIRE_VERSION,
                                                                 .features = FEATURES});
    return dkv_ipc_send(t, DKV_WIRE_HELLO, hello, n, &id);
}

/* Whatever the state allows to do next. */
static void advance(struct dkv_transport *t)
{
    struct dkv_error err = {0};
    if (t->conn == NULL && t->first != NULL && dkv_now_ns() >= t->connect_not_before_ns) {
        if (connect_now(t, &err) != DKV_OK) {
            if (t->conn != NULL)
                dkv_ipc_disconnect(t, err.status, err.text);
            else
                fail_to_connect(t, err.status, err.text);
        }
    }
    if (t->conn == NULL)
        return;
    if (t->greeted)
        dkv_ipc_objects_register(t);
    bool full = true;
    while (full) { /* and emptied at once: nobody would wake us for the rest */
        full = t->greeted && dkv_ipc_objects_settled(t) && dkv_ipc_send_waiting(t);
        if (dkv_wire_conn_flush(t->conn, &err) != DKV_OK) {
            dkv_ipc_disconnect(t, DKV_E_UNAVAILABLE, "the daemon closed the connection");
            return;
        }
        dkv_ipc_bulks_sent(t, dkv_wire_conn_bulks_sent(t->conn));
        full = full && !dkv_wire_conn_wants_write(t->conn);
    }
    struct epoll_event event = {
        .events = EPOLLIN | (dkv_wire_conn_wants_write(t->conn) ? (uint32_t)EPOLLOUT : 0)};
    if (event.events != t->events)
        (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_MOD, dkv_wire_conn_fd(t->conn), &event);
    t->events = event.events;
}

/* ---- driving ---- */

static void arm_timer(struct dkv_transport *t)
{
    int64_t due_ns = t->unread ? 0 : NEVER_NS; /* what conn holds makes no socket readable */
    const int64_t now_ns = dkv_now_ns();
    for (const struct dkv_ipc_carrier *c = t->first; c != NULL; c = c->next) {
        due_ns = c->job->deadline_ns < due_ns ? c->job->deadline_ns : due_ns;
        if (c->id == 0 && c->not_before_ns > now_ns && c->not_before_ns < due_ns)
            due_ns = c->not_before_ns;
    }
    if (t->first != NULL && t->conn == NULL && t->connect_not_before_ns < due_ns)
        due_ns = t->connect_not_before_ns;
    dkv_alarm_set(&t->alarm, due_ns);
}

/* Deadlines are looked at behind answers: whoever comes late to a dispatch finds what lay in the
 * socket in time. */
static enum dkv_status ipc_dispatch(struct dkv_transport *t, struct dkv_error *err)
{
    const bool rings = t->alarm.set_ns != NEVER_NS && dkv_now_ns() >= t->alarm.set_ns;
    enum dkv_status status = rings ? dkv_alarm_clear(&t->alarm, err) : DKV_OK;
    if (status != DKV_OK)
        return status;
    dkv_ipc_receive(t);
    for (int i = 0; rings && t->unread && i < LAST_LOOKS; i++)
        dkv_ipc_receive(t);
    if (rings)
        dkv_ipc_expire(t);
    advance(t);
    arm_timer(t);
    return DKV_OK;
}

enum dkv_status dkv_ipc_wait(struct dkv_transport *t,
                             bool (*done)(const struct dkv_transport *t, const void *what),
                             const void *what, int64_t deadline_ns, struct dkv_error *err)
{
    enum dkv_status status = ipc_dispatch(t, err); /* what waits may have to be sent first */
    while (status == DKV_OK && t->conn != NULL && !done(t, what)) {
        struct pollfd pollfd = {.fd = t->epoll_fd, .events = POLLIN};
        const int64_t left_ns = deadline_ns - dkv_now_ns();
        if (left_ns <= 0)
            return dkv_error_set(err, DKV_E_TIMEOUT, "the daemon did not answer in time");
        const struct timespec left = {left_ns / 1000000000, left_ns % 1000000000};
        if (ppoll(&pollfd, 1, &left, NULL) < 0 && errno != EINTR)
            return dkv_error_set(err, DKV_E_IO, "could not poll: %s", strerror(errno));
        status = ipc_dispatch(t, err);
    }
    if (status == DKV_OK && t->conn == NULL)
        status = dkv_error_set(err, DKV_E_UNAVAILABLE, "the daemon closed the connection");
    return status;
}

/* ---- the client's calls ---- */

static enum dkv_status check_prompt(const struct dkv_transport *t, struct dropkv_prompt *prompt,
                                    struct dkv_error *err)
{
    const bool has_cache = dkv_ipc_object_has(t, DKV_IPC_CACHE, prompt->cache);
    if (!has_cache || !dkv_ipc_object_has(t, DKV_IPC_STASH, prompt->stash))
        return dkv_error_set(err, DKV_E_INVALID, "%s: it belongs to another client",
                             has_cache ? "stash" : "cache");
    return dkv_count_layers(prompt, prompt->cache->wire.n_layers, err);
}

static enum dkv_status ipc_submit(struct dkv_transport *t, struct dkv_job *job,
                                  struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (job->call.is_prompt)
        status = check_prompt(t, &job->call.prompt, err);
    if (status == DKV_OK)
        status = dkv_ipc_carrier_add(t, job, err);
    if (status != DKV_OK)
        return status;
    if (t->greeted) /* else what makes it so, or the timer, asks for a dispatch */
        advance(t);
    else if (t->conn == NULL)
        t->connect_not_before_ns = t->n_failures == 0 ? 1 : t->connect_not_before_ns;
    arm_timer(t);
    return DKV_OK;
}

static void ipc_cancel(struct dkv_transport *t, struct dkv_job *job)
{
    struct dkv_ipc_carrier *c = job->carrier;
    uint8_t payload[8];
    uint64_t id;
    struct dkv_error ignored;
    if (c->id != 0 && t->conn != NULL) {
        dkv_wire_put_cancel(payload, &(struct dkv_wire_cancel){c->id});
        if (dkv_ipc_send(t, DKV_WIRE_CANCEL, payload, sizeof(payload), &id) == DKV_OK)
            (void)dkv_wire_conn_flush(t->conn, &ignored); /* a failure shows at the next dispatch */
    }
    dkv_ipc_carrier_remove(t, c);
    job->carrier = NULL;
    arm_timer(t);
}

/* Cheaper than the epoll instance, which asks the socket in its turn. */
static bool ipc_ready(struct dkv_transport *t)
{
    struct pollfd pollfd = {.fd = t->epoll_fd, .events = POLLIN};
    if (t->conn != NULL) {
        if (dkv_now_ns() >= t->alarm.set_ns)
            return true;
        pollfd.fd = dkv_wire_conn_fd(t->conn);
        pollfd.events |= (t->events & EPOLLOUT) != 0 ? POLLOUT : 0;
    }
    return poll(&pollfd, 1, 0) != 0;
}

static int ipc_fd(const struct dkv_transport *t)
{
    return t->epoll_fd;
}

/* ---- about the server ---- */

static bool is_greeted(const struct dkv_transport *t, const void *what)
{
    (void)what;
    return t->greeted;
}

static bool has_pong(const struct dkv_transport *t, const void *what)
{
    return t->pong_id == *(const uint64_t *)what;
}

static enum dkv_status ipc_health(struct dkv_transport *t, int64_t deadline_ns,
                                  struct dkv_error *err)
{
    uint8_t payload[8];
    uint64_t id;
    enum dkv_status status = t->conn != NULL ? DKV_OK : connect_now(t, err);
    if (status != DKV_OK) {
        dkv_ipc_disconnect(t, status, "");
        return status;
    }
    status = dkv_ipc_wait(t, is_greeted, NULL, deadline_ns, err);
    if (status != DKV_OK)
        return status;
    dkv_wire_put_ping(payload, &(struct dkv_wire_ping){0});
    status = dkv_ipc_send(t, DKV_WIRE_PING, payload, sizeof(payload), &id);
    if (status != DKV_OK)
        return dkv_error_set(err, status, "the connection is full");
    return dkv_ipc_wait(t, has_pong, &id, deadline_ns, err);
}

static enum dkv_status ipc_info(struct dkv_transport *t, int64_t deadline_ns,
                                struct dkv_oip_info *info_out, struct dkv_error *err)
{
    const enum dkv_status status = ipc_health(t, deadline_ns, err);
    if (status != DKV_OK)
        return status;
    *info_out = t->about;
    return DKV_OK;
}

/* ---- opening and closing ---- */

static void ipc_close(struct dkv_transport *t)
{
    if (t == NULL)
        return;
    dkv_ipc_disconnect(t, DKV_E_CANCELLED, "");
    dkv_ipc_answers_fini(t);
    dkv_ipc_send_fini(t);
    dkv_ipc_objects_fini(t);
    dkv_alarm_close(&t->alarm);
    if (t->epoll_fd >= 0)
        close(t->epoll_fd);
    free(t);
}

static enum dkv_status take_address(struct dkv_transport *t, const char *address,
                                    struct dkv_error *err)
{
    const char *path = address + strlen("unix:");
    path += strncmp(path, "//", 2) == 0 ? 2 : 0;
    t->address.sun_family = AF_UNIX;
    if (*path != '/' || strlen(path) >= sizeof(t->address.sun_path))
        return dkv_error_set(err, DKV_E_INVALID,
                             "endpoint: '%.60s' is not unix:///PATH with up to %zu bytes of path",
                             address, sizeof(t->address.sun_path) - 1);
    strcpy(t->address.sun_path, path);
    return DKV_OK;
}

static enum dkv_status ipc_open(const struct dkv_transport_config *config,
                                struct dkv_transport **transport_out, struct dkv_error *err)
{
    struct dkv_transport *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a transport");
    t->max_retries = config->max_retries;
    t->alarm = DKV_ALARM_NONE;
    t->last_bulk = &t->first_bulk;
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    enum dkv_status status = take_address(t, config->address, err);
    if (status == DKV_OK && t->epoll_fd < 0)
        status = dkv_error_set(err, DKV_E_IO, "could not make an epoll instance: %s",
                               strerror(errno));
    if (status == DKV_OK)
        status = dkv_alarm_open(&t->alarm, t->epoll_fd, err);
    if (status != DKV_OK) {
        ipc_close(t);
        return status;
    }
    *transport_out = t;
    return DKV_OK;
}

const struct dkv_transport_ops dkv_transport_ipc = {
    .open = ipc_open,
    .close = ipc_close,
    .submit = ipc_submit,
    .cancel = ipc_cancel,
    .fd = ipc_fd,
    .dispatch = ipc_dispatch,
    .ready = ipc_ready,
    .learns = true,
    .health = ipc_health,
    .info = ipc_info,
    .add_buffer = dkv_ipc_add_buffer,
    .remove_buffer = dkv_ipc_remove_buffer,
    .objects = &dkv_ipc_objects,
};
