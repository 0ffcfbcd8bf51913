/* The local socket's transport: one connection, many requests on it.
 *
 *   disconnected --connect--> greeting --welcome, regions registered--> ready
 *        ^                                                                |
 *        '---------- the daemon went away, or broke the protocol ---------'
 *
 * Requests are sent once the connection is ready, and answered in any order. When it breaks, those
 * that were sent wait for the next one, within their deadlines and as often as the caller allows:
 * scoring changes nothing in the daemon, so doing it twice is harmless. Buffers are registered
 * again on every connection, since the daemon forgets a connection's objects with it.
 *
 * The socket and a timerfd for deadlines and pauses are in one epoll instance, which is the
 * descriptor that the caller watches.
 */
#include "client/alarm.h"
#include "client/ipc_message.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FIRST_PAUSE_NS INT64_C(20000000)
#define NEVER_NS       DKV_ALARM_NEVER
#define READS_MAX      256 /* of one dispatch */
#define FEATURES \
    ((uint32_t)DKV_WIRE_FEATURE_MEMFD | DKV_WIRE_FEATURE_CUDA_LEGACY | DKV_WIRE_FEATURE_CUDA_VMM)

struct carrier {
    struct carrier *next;
    struct dkv_job *job;
    uint64_t id;           /* 0: not sent on this connection */
    int64_t not_before_ns; /* of the next attempt */
    uint32_t n_attempts;
};

/* Copied tensors that the connection is sending. */
struct sent_bulk {
    struct sent_bulk *next;
    void *bytes;
    uint64_t number;
};

struct dkv_transport {
    struct sockaddr_un address;
    struct dkv_wire_conn *conn; /* NULL: disconnected */
    bool greeted;
    struct dkv_wire_welcome welcome;
    struct dkv_oip_info about; /* the daemon */
    uint64_t last_id;
    uint64_t pong_id; /* of the last pong */
    int64_t connect_not_before_ns;
    unsigned n_failures; /* to connect, in a row */

    struct carrier *first; /* all, oldest first */
    struct carrier *idle;  /* to be used again */
    struct carrier *receiving;
    uint64_t received_bytes; /* of its bulk */
    bool skipping;           /* a bulk that nobody wants */

    struct dkv_ipc_region *regions;
    size_t n_regions;
    struct sent_bulk *first_bulk, **last_bulk;
    uint64_t n_bulks;

    int epoll_fd;
    struct dkv_alarm alarm;
    uint32_t events; /* that the socket is watched for */
    uint32_t max_retries;
    uint8_t payload[DKV_WIRE_PAYLOAD_MAX];
};

/* ---- ends ---- */

static void remove_carrier(struct dkv_transport *t, struct carrier *c)
{
    struct carrier **at = &t->first;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    if (t->receiving == c) {
        t->receiving = NULL;
        t->skipping = t->conn != NULL && dkv_wire_conn_bulk_left(t->conn) > 0;
    }
    c->next = t->idle;
    t->idle = c;
}

static void hand_back(struct dkv_transport *t, struct carrier *c, enum dkv_status status,
                      const char *text)
{
    struct dkv_job *job = c->job;
    job->result->n_attempts = c->n_attempts;
    if (status == DKV_OK)
        dkv_result_set_backend(job->result, t->about.backend);
    remove_carrier(t, c);
    dkv_job_done(job, status, text);
}

/* Another attempt after a pause, or the end. */
static void retry_or_end(struct dkv_transport *t, struct carrier *c, int64_t pause_ns,
                         enum dkv_status status, const char *text)
{
    const int64_t at_ns = dkv_now_ns() + pause_ns;
    if (c->n_attempts > t->max_retries || at_ns >= c->job->deadline_ns) {
        hand_back(t, c, status, text);
        return;
    }
    c->id = 0;
    c->not_before_ns = at_ns;
}

static void free_bulks(struct dkv_transport *t, uint64_t up_to)
{
    struct sent_bulk *bulk;
    while ((bulk = t->first_bulk) != NULL && bulk->number <= up_to) {
        t->first_bulk = bulk->next;
        free(bulk->bytes);
        free(bulk);
    }
    if (t->first_bulk == NULL)
        t->last_bulk = &t->first_bulk;
}

/* Nobody is there: those who wait are told, or wait for the next try. */
static void fail_to_connect(struct dkv_transport *t, enum dkv_status status, const char *text)
{
    struct carrier *next;
    const int64_t pause_ns = FIRST_PAUSE_NS << (t->n_failures < 6 ? t->n_failures : 6);
    t->n_failures++;
    t->connect_not_before_ns = dkv_now_ns() + pause_ns;
    for (struct carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        c->n_attempts++;
        retry_or_end(t, c, pause_ns, status, text);
    }
}

static void disconnect(struct dkv_transport *t, enum dkv_status status, const char *text)
{
    struct carrier *next;
    const bool was_greeted = t->greeted;
    if (t->conn == NULL)
        return;
    dkv_wire_conn_close(t->conn); /* which takes the socket out of the epoll instance */
    t->conn = NULL;
    t->greeted = false;
    t->skipping = false;
    t->receiving = NULL;
    t->events = 0;
    free_bulks(t, UINT64_MAX);
    t->n_bulks = 0;
    for (size_t i = 0; i < t->n_regions; i++)
        t->regions[i].number = 0, t->regions[i].add_id = 0, t->regions[i].refused = false;
    for (struct carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        if (c->id != 0)
            retry_or_end(t, c, 0, status, text);
    }
    if (!was_greeted)
        fail_to_connect(t, status, text);
}

/* ---- connecting ---- */

static enum dkv_status send_message(struct dkv_transport *t, uint8_t type, const void *payload,
                                    size_t n_bytes, uint64_t *id_out)
{
    struct dkv_error ignored;
    const enum dkv_status status = dkv_wire_conn_send(
        t->conn,
        &(struct dkv_wire_conn_output){
            .type = type, .id = t->last_id + 1, .payload = payload, .payload_bytes = n_bytes},
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
    return send_message(t, DKV_WIRE_HELLO, hello, n, &id);
}

static enum dkv_status register_region(struct dkv_transport *t, struct dkv_ipc_region *region)
{
    struct dkv_buffer_message message;
    struct dkv_error err;
    enum dkv_status status = dkv_buffer_describe(region->buffer, (struct dkv_wire_region){0},
                                                 &message, &err);
    if (status != DKV_OK) {
        region->refused = region->buffer->on_gpu;
        region->why = err;
        return status;
    }
    status = dkv_wire_conn_send(
        t->conn,
        &(struct dkv_wire_conn_output){.type = DKV_WIRE_REGION_ADD,
                                       .id = t->last_id + 1,
                                       .payload = message.payload,
                                       .payload_bytes = message.payload_bytes,
                                       .fds = message.fds,
                                       .n_fds = message.n_fds},
        &err);
    if (status == DKV_OK)
        region->add_id = ++t->last_id;
    for (uint16_t i = 0; status != DKV_OK && i < message.n_fds; i++)
        close(message.fds[i]); /* else the connection closes them when they are sent */
    return status;
}

static bool is_ready(const struct dkv_transport *t)
{
    if (t->conn == NULL || !t->greeted)
        return false;
    for (size_t i = 0; i < t->n_regions; i++)
        if (t->regions[i].number == 0 && !t->regions[i].refused)
            return false;
    return true;
}

/* ---- sending ---- */

/* BUSY: the connection has no room now. */
static enum dkv_status send_request(struct dkv_transport *t, struct carrier *c,
                                    struct dkv_error *err)
{
    struct dkv_ipc_request request = {.payload = t->payload};
    const int64_t left_us = (c->job->deadline_ns - dkv_now_ns()) / 1000;
    struct sent_bulk *bulk = NULL;
    enum dkv_status status = dkv_ipc_put_request(&c->job->call, t->regions, t->n_regions,
                                                 left_us < 1 ? 1 : (uint64_t)left_us, &request,
                                                 err);
    if (status == DKV_OK && request.bulk_bytes > t->welcome.max_bulk_bytes)
        status = dkv_error_set(err, DKV_E_TOO_LARGE, "%llu bytes of tensors, the daemon takes %llu",
                               (unsigned long long)request.bulk_bytes,
                               (unsigned long long)t->welcome.max_bulk_bytes);
    if (status == DKV_OK && request.bulk != NULL && (bulk = malloc(sizeof(*bulk))) == NULL)
        status = dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    if (status == DKV_OK)
        status = dkv_wire_conn_send(t->conn,
                                    &(struct dkv_wire_conn_output){
                                        .type = DKV_WIRE_SCORE_BLOCKS,
                                        .id = t->last_id + 1,
                                        .payload = request.payload,
                                        .payload_bytes = request.payload_bytes,
                                        .bulk = request.bulk,
                                        .bulk_bytes = request.bulk_bytes,
                                    },
                                    err);
    if (status != DKV_OK) {
        free(request.bulk);
        free(bulk);
        return status;
    }
    c->id = ++t->last_id;
    c->n_attempts++;
    if (bulk != NULL) {
        *bulk = (struct sent_bulk){NULL, request.bulk, ++t->n_bulks};
        *t->last_bulk = bulk;
        t->last_bulk = &bulk->next;
    }
    return DKV_OK;
}

static void send_waiting(struct dkv_transport *t)
{
    struct carrier *next;
    uint32_t n_sent = 0;
    const int64_t now_ns = dkv_now_ns();
    for (struct carrier *c = t->first; c != NULL; c = c->next)
        n_sent += c->id != 0;
    for (struct carrier *c = t->first; c != NULL && n_sent < t->welcome.max_in_flight; c = next) {
        struct dkv_error err = {0};
        next = c->next;
        if (c->id != 0 || c->not_before_ns > now_ns)
            continue;
        const enum dkv_status status = send_request(t, c, &err);
        if (status == DKV_E_BUSY)
            return;
        if (status != DKV_OK)
            hand_back(t, c, status, err.text);
        n_sent++;
    }
}

/* Whatever the state allows to do next. */
static void advance(struct dkv_transport *t)
{
    struct dkv_error err = {0};
    if (t->conn == NULL && t->first != NULL && dkv_now_ns() >= t->connect_not_before_ns) {
        if (connect_now(t, &err) != DKV_OK) {
            if (t->conn != NULL)
                disconnect(t, err.status, err.text);
            else
                fail_to_connect(t, err.status, err.text);
        }
    }
    if (t->conn == NULL)
        return;
    for (size_t i = 0; t->greeted && i < t->n_regions; i++)
        if (t->regions[i].number == 0 && t->regions[i].add_id == 0 && !t->regions[i].refused)
            (void)register_region(t, &t->regions[i]); /* no room: tried again */
    if (is_ready(t))
        send_waiting(t);
    if (dkv_wire_conn_flush(t->conn, &err) != DKV_OK) {
        disconnect(t, DKV_E_UNAVAILABLE, "the daemon closed the connection");
        return;
    }
    free_bulks(t, dkv_wire_conn_bulks_sent(t->conn));
    struct epoll_event event = {
        .events = EPOLLIN | (dkv_wire_conn_wants_write(t->conn) ? (uint32_t)EPOLLOUT : 0)};
    if (event.events != t->events)
        (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_MOD, dkv_wire_conn_fd(t->conn), &event);
    t->events = event.events;
}

/* ---- receiving ---- */

static struct carrier *find_carrier(struct dkv_transport *t, uint64_t id)
{
    struct carrier *c = t->first;
    while (c != NULL && c->id != id)
        c = c->next;
    return c;
}

static void take_text(const struct dkv_transport *t, const uint8_t *payload,
                      enum dkv_wire_about which, char *to, size_t bytes)
{
    snprintf(to, bytes, "%s", dkv_wire_get_about(payload, &t->welcome, which));
}

static void take_about(struct dkv_transport *t, const uint8_t *payload)
{
    struct dkv_oip_info *about = &t->about;
    strcpy(about->server, "dropkvd"); /* nobody else speaks this protocol */
    take_text(t, payload, DKV_WIRE_ABOUT_VERSION, about->version, sizeof(about->version));
    take_text(t, payload, DKV_WIRE_ABOUT_PLATFORM, about->platform, sizeof(about->platform));
    take_text(t, payload, DKV_WIRE_ABOUT_BACKEND, about->backend, sizeof(about->backend));
    take_text(t, payload, DKV_WIRE_ABOUT_DEVICE, about->device, sizeof(about->device));
}

static enum dkv_status take_welcome(struct dkv_transport *t,
                                    const struct dkv_wire_conn_message *message,
                                    struct dkv_error *err)
{
    enum dkv_status status = dkv_wire_get_welcome(message->payload, message->header.payload_bytes,
                                                  &t->welcome, err);
    if (status != DKV_OK)
        return status;
    if (t->greeted)
        return dkv_error_set(err, DKV_E_MALFORMED, "a second welcome");
    take_about(t, message->payload);
    t->greeted = true;
    t->n_failures = 0;
    return DKV_OK;
}

static enum dkv_status take_done(struct dkv_transport *t,
                                 const struct dkv_wire_conn_message *message, struct dkv_error *err)
{
    struct dkv_wire_object object;
    const enum dkv_status status = dkv_wire_get_object(message->payload,
                                                       message->header.payload_bytes, &object, err);
    for (size_t i = 0; status == DKV_OK && i < t->n_regions; i++)
        if (t->regions[i].add_id == message->header.id) {
            t->regions[i].number = object.object;
            t->regions[i].add_id = 0;
        }
    return status;
}

/* A buffer that the daemon does not take makes no request fail: its tensors are sent instead. Those
 * of GPU memory cannot be sent, so it is remembered why. */
static bool drop_refused_region(struct dkv_transport *t, uint64_t id, const struct dkv_error *why)
{
    for (size_t i = 0; i < t->n_regions; i++) {
        struct dkv_ipc_region *region = &t->regions[i];
        if (region->add_id != id)
            continue;
        if (region->buffer->on_gpu)
            region->add_id = 0, region->refused = true, region->why = *why;
        else
            *region = t->regions[--t->n_regions];
        return true;
    }
    return false;
}

static enum dkv_status take_error(struct dkv_transport *t,
                                  const struct dkv_wire_conn_message *message,
                                  struct dkv_error *err)
{
    struct dkv_wire_error wire;
    struct dkv_error told;
    enum dkv_status status = dkv_wire_get_error(message->payload, message->header.payload_bytes,
                                                &wire, err);
    if (status != DKV_OK)
        return status;
    dkv_error_set(&told, (enum dkv_status)wire.status, "%.*s", (int)wire.text_bytes,
                  (const char *)wire.text);
    struct carrier *c = find_carrier(t, message->header.id);
    if (message->header.id == 0 || (!t->greeted && c == NULL)) {
        *err = told; /* about the connection */
        return told.status;
    }
    if (drop_refused_region(t, message->header.id, &told) || c == NULL)
        return DKV_OK;
    if (told.status == DKV_E_BUSY || told.status == DKV_E_DRAINING)
        retry_or_end(t, c, wire.retry_us > 0 ? wire.retry_us * INT64_C(1000) : FIRST_PAUSE_NS,
                     told.status, told.text);
    else
        hand_back(t, c, told.status, told.text);
    return DKV_OK;
}

static enum dkv_status take_result(struct dkv_transport *t,
                                   const struct dkv_wire_conn_message *message,
                                   struct dkv_error *err)
{
    struct carrier *c = find_carrier(t, message->header.id);
    t->skipping = message->header.bulk_bytes > 0;
    if (c == NULL)
        return DKV_OK; /* it was given up */
    const enum dkv_status status = dkv_ipc_take_result(c->job, message, err);
    if (status == DKV_E_NOMEM) {
        hand_back(t, c, status, err->text);
        return DKV_OK;
    }
    if (status != DKV_OK)
        return status;
    t->skipping = false;
    t->receiving = c;
    t->received_bytes = 0;
    return DKV_OK;
}

static enum dkv_status take_message(struct dkv_transport *t,
                                    const struct dkv_wire_conn_message *message,
                                    struct dkv_error *err)
{
    switch (message->header.type) {
    case DKV_WIRE_WELCOME: return take_welcome(t, message, err);
    case DKV_WIRE_DONE: return take_done(t, message, err);
    case DKV_WIRE_ERROR: return take_error(t, message, err);
    case DKV_WIRE_RESULT: return take_result(t, message, err);
    default: t->pong_id = message->header.id; return DKV_OK;
    }
}

/* Where the bulk's next byte goes, and how many more behind it. */
static void *next_place(const struct dkv_transport *t, uint64_t *room_out)
{
    struct dropkv_result *result = t->receiving->job->result;
    const uint64_t n_heads = (uint64_t)result->batch * result->kv_heads;
    const uint64_t keep_bytes = n_heads * result->keep_tokens * sizeof(int32_t);
    const uint64_t at = t->received_bytes;
    if (at < keep_bytes) {
        *room_out = keep_bytes - at;
        return (uint8_t *)dkv_result_keep(result) + at;
    }
    *room_out = n_heads * result->n_tokens * sizeof(float) - (at - keep_bytes);
    return (uint8_t *)dkv_result_scores(result) + (at - keep_bytes);
}

/* *more_out: something was there. */
static enum dkv_status read_bulk(struct dkv_transport *t, bool *more_out, struct dkv_error *err)
{
    uint64_t got = 0;
    uint64_t room = UINT64_MAX;
    void *to = NULL;
    if (dkv_wire_conn_bulk_left(t->conn) > 0) {
        to = t->receiving != NULL ? next_place(t, &room) : NULL;
        enum dkv_status status = dkv_wire_conn_read_bulk(t->conn, to, room, &got, err);
        if (status != DKV_OK)
            return status;
    }
    t->received_bytes += got;
    *more_out = got > 0;
    if (dkv_wire_conn_bulk_left(t->conn) > 0)
        return DKV_OK;
    *more_out = true;
    t->skipping = false;
    struct carrier *c = t->receiving;
    t->receiving = NULL;
    if (c != NULL)
        hand_back(t, c, DKV_OK, "");
    return DKV_OK;
}

/* *drained: an earlier step took all there was. */
static enum dkv_status read_step(struct dkv_transport *t, bool *drained, bool *more_out,
                                 struct dkv_error *err)
{
    struct dkv_wire_conn_message message;
    if (t->receiving != NULL || t->skipping)
        return read_bulk(t, more_out, err);
    enum dkv_status status = dkv_wire_conn_next(t->conn, &message, err);
    if (status != DKV_OK)
        return status;
    if (message.header.type == 0) {
        if (*drained)
            return DKV_OK;
        status = dkv_wire_conn_read(t->conn, more_out, err);
        *drained = dkv_wire_conn_drained(t->conn);
        return status;
    }
    *more_out = true;
    return take_message(t, &message, err);
}

static void receive(struct dkv_transport *t)
{
    bool more = true, drained = false;
    for (int i = 0; t->conn != NULL && more && i < READS_MAX; i++) {
        struct dkv_error err = {0};
        more = false;
        const enum dkv_status status = read_step(t, &drained, &more, &err);
        if (status != DKV_OK)
            disconnect(t, status, err.text);
    }
}

/* ---- time ---- */

static void expire(struct dkv_transport *t)
{
    struct carrier *next;
    const int64_t now_ns = dkv_now_ns();
    for (struct carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        if (now_ns < c->job->deadline_ns)
            continue;
        uint8_t payload[8];
        uint64_t id;
        if (c->id != 0 && t->conn != NULL) {
            dkv_wire_put_cancel(payload, &(struct dkv_wire_cancel){c->id});
            (void)send_message(t, DKV_WIRE_CANCEL, payload, sizeof(payload), &id);
        }
        hand_back(t, c, DKV_E_TIMEOUT, "the deadline passed before the answer came");
    }
}

static void arm_timer(struct dkv_transport *t)
{
    int64_t due_ns = NEVER_NS;
    const int64_t now_ns = dkv_now_ns();
    for (const struct carrier *c = t->first; c != NULL; c = c->next) {
        due_ns = c->job->deadline_ns < due_ns ? c->job->deadline_ns : due_ns;
        if (c->id == 0 && c->not_before_ns > now_ns && c->not_before_ns < due_ns)
            due_ns = c->not_before_ns;
    }
    if (t->first != NULL && t->conn == NULL && t->connect_not_before_ns < due_ns)
        due_ns = t->connect_not_before_ns;
    dkv_alarm_set(&t->alarm, due_ns);
}

static enum dkv_status ipc_dispatch(struct dkv_transport *t, struct dkv_error *err)
{
    if (t->alarm.set_ns != NEVER_NS && dkv_now_ns() >= t->alarm.set_ns) {
        enum dkv_status status = dkv_alarm_clear(&t->alarm, err);
        if (status != DKV_OK)
            return status;
        expire(t);
    }
    receive(t);
    advance(t);
    arm_timer(t);
    return DKV_OK;
}

/* ---- the client's calls ---- */

static enum dkv_status ipc_submit(struct dkv_transport *t, struct dkv_job *job,
                                  struct dkv_error *err)
{
    struct carrier *c = t->idle;
    if (c != NULL)
        t->idle = c->next;
    else if ((c = malloc(sizeof(*c))) == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    *c = (struct carrier){.job = job};
    job->carrier = c;
    struct carrier **end = &t->first;
    while (*end != NULL)
        end = &(*end)->next;
    *end = c;
    if (is_ready(t)) /* else a dispatch connects, which may end jobs at once */
        advance(t);
    else if (t->conn == NULL)
        t->connect_not_before_ns = t->n_failures == 0 ? 1 : t->connect_not_before_ns;
    arm_timer(t);
    return DKV_OK;
}

static void ipc_cancel(struct dkv_transport *t, struct dkv_job *job)
{
    struct carrier *c = job->carrier;
    uint8_t payload[8];
    uint64_t id;
    struct dkv_error ignored;
    if (c->id != 0 && t->conn != NULL) {
        dkv_wire_put_cancel(payload, &(struct dkv_wire_cancel){c->id});
        if (send_message(t, DKV_WIRE_CANCEL, payload, sizeof(payload), &id) == DKV_OK)
            (void)dkv_wire_conn_flush(t->conn, &ignored); /* a failure shows at the next dispatch */
    }
    remove_carrier(t, c);
    job->carrier = NULL;
    arm_timer(t);
}

static int ipc_fd(const struct dkv_transport *t)
{
    return t->epoll_fd;
}

static enum dkv_status ipc_add_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                                      struct dkv_error *err)
{
    struct dkv_ipc_region *regions = reallocarray(t->regions, t->n_regions + 1,
                                                  sizeof(t->regions[0]));
    if (regions == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a buffer");
    t->regions = regions;
    t->regions[t->n_regions++] = (struct dkv_ipc_region){.buffer = buffer};
    return DKV_OK;
}

static void ipc_remove_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer)
{
    uint8_t payload[8];
    uint64_t id;
    for (size_t i = 0; i < t->n_regions; i++) {
        if (t->regions[i].buffer != buffer)
            continue;
        if (t->regions[i].number != 0) {
            dkv_wire_put_object(payload, &(struct dkv_wire_object){t->regions[i].number, 0});
            (void)send_message(t, DKV_WIRE_REGION_DROP, payload, sizeof(payload), &id);
        }
        t->regions[i] = t->regions[--t->n_regions];
        return;
    }
}

/* ---- about the server ---- */

static enum dkv_status wait_for(struct dkv_transport *t, uint64_t pong_id, int64_t deadline_ns,
                                struct dkv_error *err)
{
    while (t->conn != NULL && !(pong_id == 0 ? t->greeted : t->pong_id >= pong_id)) {
        struct pollfd pollfd = {.fd = t->epoll_fd, .events = POLLIN};
        const int64_t left_ns = deadline_ns - dkv_now_ns();
        if (left_ns <= 0)
            return dkv_error_set(err, DKV_E_TIMEOUT, "the daemon did not answer in time");
        (void)poll(&pollfd, 1, (int)(left_ns / 1000000 + 1));
        const enum dkv_status status = ipc_dispatch(t, err);
        if (status != DKV_OK)
            return status;
    }
    return t->conn != NULL
               ? DKV_OK
               : dkv_error_set(err, DKV_E_UNAVAILABLE, "the daemon closed the connection");
}

static enum dkv_status ipc_health(struct dkv_transport *t, int64_t deadline_ns,
                                  struct dkv_error *err)
{
    uint8_t payload[8];
    uint64_t id;
    enum dkv_status status = t->conn != NULL ? DKV_OK : connect_now(t, err);
    if (status != DKV_OK) {
        disconnect(t, status, "");
        return status;
    }
    advance(t);
    status = wait_for(t, 0, deadline_ns, err);
    if (status != DKV_OK)
        return status;
    dkv_wire_put_ping(payload, &(struct dkv_wire_ping){0});
    status = send_message(t, DKV_WIRE_PING, payload, sizeof(payload), &id);
    if (status != DKV_OK)
        return dkv_error_set(err, status, "the connection is full");
    advance(t);
    return wait_for(t, id, deadline_ns, err);
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
    disconnect(t, DKV_E_CANCELLED, "");
    while (t->idle != NULL) {
        struct carrier *c = t->idle;
        t->idle = c->next;
        free(c);
    }
    dkv_alarm_close(&t->alarm);
    if (t->epoll_fd >= 0)
        close(t->epoll_fd);
    free(t->regions);
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
    .health = ipc_health,
    .info = ipc_info,
    .add_buffer = ipc_add_buffer,
    .remove_buffer = ipc_remove_buffer,
};
