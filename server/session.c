/* One connection: reading messages, sending answers, and the end.
 *
 * One turn of a session: read and handle messages while there are any (at most MESSAGES_PER_TURN,
 * and for TURN_NS, so that one client cannot keep the loop), then send what there is to send, then
 * say what to wait for. A session whose answers do not fit into its connection is not read from
 * until they do: who does not listen cannot ask.
 *
 * The end comes from anywhere: a handler that finds the protocol broken, a send that fails, the
 * peer's death. dkv_session_end() closes the connection, gives back everything and leaves the
 * struct, with conn NULL, to the callbacks of its libuv handles; so whoever may have ended a
 * session looks at conn afterwards and at nothing else.
 *
 * Three things have a deadline, judged by one timer: the first message, the rest of a message that
 * stopped coming, answers that are not read.
 */
#include "server/session_priv.h"

#include "server/clock.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MESSAGES_PER_TURN 64u
#define TURN_NS           500000u /* a message of 150 bytes may ask for 1,024 layers */
#define BULK_PER_TURN     (UINT64_C(16) << 20)
#define ERROR_BYTES       (16 + DKV_WIRE_TEXT_MAX)
#define SEND_ROOM         (1 << 20) /* an answer of 128K tokens goes out in one piece */
#define TIMER_MS          250u

/* A small message that did not fit. */
struct kept {
    struct dkv_list node;
    uint64_t id;
    uint8_t type;
    uint16_t n_bytes;
    uint8_t payload[280];
};

/* ---- the end ---- */

static void free_session(uv_handle_t *handle)
{
    struct dkv_session *session = handle->data;
    if (--session->n_open_handles > 0)
        return;
    free(session);
}

static void free_outbox(struct dkv_session *session)
{
    struct dkv_list *node;
    while ((node = dkv_list_first(&session->outbox)) != NULL) {
        dkv_list_remove(node);
        free(DKV_LIST_OF(node, struct kept, node));
    }
}

void dkv_session_end(struct dkv_session *session)
{
    struct dkv_wire_conn *conn = session->conn;
    if (conn == NULL)
        return;
    struct dkv_server *server = session->all->server;
    session->conn = NULL;
    uv_close((uv_handle_t *)&session->poll, free_session);
    uv_close((uv_handle_t *)&session->timer, free_session);
    dkv_wire_conn_close(conn); /* before what its bulks point into */
    dkv_session_drop_asks(session);
    dkv_backend_client_put(session->client);
    const unsigned n_regions = dkv_session_free_objects(session);
    free_outbox(session);
    dkv_list_remove(&session->node);
    dkv_list_remove(&session->unsent_node);
    session->all->n_sessions--;
    server->metrics.connections_closed[DKV_TRANSPORT_SOCKET]++;
    server->metrics.regions_released[DKV_RELEASE_DISCONNECT] += n_regions;
    if (dkv_log_may(&server->request_log, DKV_LOG_DEBUG))
        dkv_log(DKV_LOG_DEBUG, "session %llu: ended, %u regions it had left are released",
                (unsigned long long)session->number, n_regions);
}

/* ---- sending ---- */

static enum dkv_status put(struct dkv_session *session, uint8_t type, uint64_t id,
                           const void *payload, size_t n_bytes)
{
    struct dkv_error ignored;
    return dkv_wire_conn_send(
        session->conn,
        &(struct dkv_wire_conn_output){
            .type = type, .id = id, .payload = payload, .payload_bytes = n_bytes},
        &ignored);
}

void dkv_session_send(struct dkv_session *session, uint8_t type, uint64_t id, const void *payload,
                      size_t payload_bytes)
{
    if (session->conn == NULL)
        return;
    if (dkv_list_empty(&session->outbox) &&
        put(session, type, id, payload, payload_bytes) == DKV_OK)
        return;
    struct kept *kept = malloc(sizeof(*kept));
    if (kept == NULL) {
        session->doomed = true;
        return;
    }
    assert(payload_bytes <= sizeof(kept->payload));
    kept->id = id;
    kept->type = type;
    kept->n_bytes = (uint16_t)payload_bytes;
    memcpy(kept->payload, payload, payload_bytes);
    dkv_list_push_back(&session->outbox, &kept->node);
}

static size_t put_error(uint8_t payload[ERROR_BYTES], const struct dkv_error *err,
                        uint64_t retry_us)
{
    size_t n_text = strnlen(err->text, DKV_WIRE_TEXT_MAX);
    const struct dkv_wire_error message = {
        .status = err->status,
        .retry_us = retry_us < UINT32_MAX ? (uint32_t)retry_us : UINT32_MAX,
        .block = UINT32_MAX,
        .text_bytes = (uint16_t)n_text,
    };
    const size_t n_fixed = dkv_wire_put_error(payload, &message);
    for (size_t i = 0; i < n_text; i++)
        payload[n_fixed + i] = err->text[i] >= 0x20 && err->text[i] < 0x7f ? (uint8_t)err->text[i]
                                                                           : '?';
    return n_fixed + n_text;
}

void dkv_session_send_error(struct dkv_session *session, uint64_t id, const struct dkv_error *err,
                            uint64_t retry_us)
{
    uint8_t payload[ERROR_BYTES];
    dkv_session_send(session, DKV_WIRE_ERROR, id, payload, put_error(payload, err, retry_us));
}

/* The last words, past conn, which sends nothing any more once its peer broke the framing. Not
 * behind a message that is half sent, and nobody waits for room. */
static void send_last_words(struct dkv_session *session, uint64_t id, const struct dkv_error *err)
{
    uint8_t message[DKV_WIRE_HEADER_BYTES + ERROR_BYTES];
    struct dkv_error ignored;
    (void)dkv_wire_conn_flush(session->conn, &ignored);
    if (dkv_wire_conn_wants_write(session->conn))
        return;
    const size_t n = put_error(message + DKV_WIRE_HEADER_BYTES, err, 0);
    dkv_wire_put_header(message, &(struct dkv_wire_header){.version = DKV_WIRE_VERSION,
                                                           .type = DKV_WIRE_ERROR,
                                                           .payload_bytes = (uint32_t)n,
                                                           .id = id});
    (void)!send(dkv_wire_conn_fd(session->conn), message, DKV_WIRE_HEADER_BYTES + n,
                MSG_DONTWAIT | MSG_NOSIGNAL);
}

void dkv_session_violation(struct dkv_session *session, uint64_t id, const struct dkv_error *err)
{
    if (session->conn == NULL)
        return;
    dkv_log_limited(&session->all->server->client_log, DKV_LOG_WARN,
                    "socket: a client broke the protocol and is closed: %s", err->text);
    send_last_words(session, id, err);
    dkv_session_end(session);
}

void dkv_session_send_done(struct dkv_session *session, uint64_t id, uint32_t object,
                           uint32_t generation)
{
    uint8_t payload[8];
    dkv_wire_put_object(payload, &(struct dkv_wire_object){object, generation});
    dkv_session_send(session, DKV_WIRE_DONE, id, payload, sizeof(payload));
}

static void empty_outbox(struct dkv_session *session)
{
    struct dkv_list *node;
    while ((node = dkv_list_first(&session->outbox)) != NULL) {
        struct kept *kept = DKV_LIST_OF(node, struct kept, node);
        if (put(session, kept->type, kept->id, kept->payload, kept->n_bytes) != DKV_OK)
            return;
        dkv_list_remove(node);
        free(kept);
    }
}

static void on_event(uv_poll_t *poll, int status, int events);

static bool is_full(const struct dkv_session *session)
{
    return !dkv_list_empty(&session->outbox) || !dkv_list_empty(&session->ended);
}

/* Messages that wait inside conn make no socket readable; one that can be written to wakes us. */
static void wait_for_events(struct dkv_session *session)
{
    const int events = (is_full(session) ? 0 : UV_READABLE) | UV_DISCONNECT |
                       (dkv_wire_conn_wants_write(session->conn) || session->unread ? UV_WRITABLE
                                                                                    : 0);
    if (events == session->events)
        return;
    session->events = events;
    uv_poll_start(&session->poll, events, on_event);
}

void dkv_session_flush(struct dkv_session *session)
{
    struct dkv_error err;
    bool more = true;
    if (session->conn == NULL)
        return;
    while (more) {
        empty_outbox(session);
        dkv_session_send_ended(session);
        if (session->doomed || dkv_wire_conn_flush(session->conn, &err) != DKV_OK) {
            dkv_session_end(session);
            return;
        }
        dkv_session_free_sent(session);
        more = is_full(session) && !dkv_wire_conn_wants_write(session->conn);
    }
    wait_for_events(session);
}

/* ---- messages ---- */

static void answer_ping(struct dkv_session *session, const struct dkv_wire_conn_message *message)
{
    struct dkv_error err = {0};
    struct dkv_wire_ping ping;
    uint8_t payload[8];
    if (dkv_wire_get_ping(message->payload, message->header.payload_bytes, &ping, &err) != DKV_OK) {
        dkv_session_violation(session, message->header.id, &err);
        return;
    }
    dkv_session_send(session, DKV_WIRE_PONG, message->header.id, payload,
                     dkv_wire_put_ping(payload, &ping));
}

static void take_cancel(struct dkv_session *session, const struct dkv_wire_conn_message *message)
{
    struct dkv_error err = {0};
    struct dkv_wire_cancel cancel;
    if (dkv_wire_get_cancel(message->payload, message->header.payload_bytes, &cancel, &err) !=
        DKV_OK)
        dkv_session_violation(session, message->header.id, &err);
    else
        dkv_session_cancel(session, cancel.target);
}

static void handle(struct dkv_session *session, const struct dkv_wire_conn_message *message)
{
    struct dkv_error err = {0};
    if (message->header.bulk_bytes > 0) {
        session->receiving = true;
        session->bulk = (struct dkv_session_bulk){.header = message->header,
                                                  .payload = message->payload};
    }
    if (!session->greeted) {
        dkv_session_greet(session, message);
        return;
    }
    switch (message->header.type) {
    case DKV_WIRE_SCORE:
    case DKV_WIRE_SCORE_BLOCKS: dkv_session_handle_score(session, message); return;
    case DKV_WIRE_CANCEL: take_cancel(session, message); return;
    case DKV_WIRE_PING: answer_ping(session, message); return;
    default: break;
    }
    if (dkv_session_handle_object(session, message))
        return;
    dkv_error_set(&err, DKV_E_MALFORMED, "%s after hello",
                  dkv_wire_type_name(message->header.type));
    dkv_session_violation(session, message->header.id, &err);
}

/* ---- reading ---- */

static void finish_bulk(struct dkv_session *session)
{
    session->receiving = false;
    if (session->bulk.cache != NULL)
        dkv_session_cache_received(session);
    else if (session->bulk.ask != NULL)
        dkv_session_ask_received(session);
}

/* False: nothing more can be read now. */
static bool read_bulk(struct dkv_session *session, uint64_t *left_of_turn, struct dkv_error *err)
{
    struct dkv_session_bulk *bulk = &session->bulk;
    const uint64_t left = dkv_wire_conn_bulk_left(session->conn);
    uint64_t n = 0;
    const uint64_t wanted = left < *left_of_turn ? left : *left_of_turn;
    if (left > 0 && wanted == 0)
        return false;
    if (dkv_wire_conn_read_bulk(session->conn, bulk->to == NULL ? NULL : bulk->to + bulk->got,
                                wanted, &n, err) != DKV_OK)
        return false;
    bulk->got += n;
    session->all->server->metrics.bytes_in[DKV_TRANSPORT_SOCKET] += n;
    *left_of_turn -= n;
    session->heard_ms = n > 0 ? dkv_clock_ms() : session->heard_ms;
    if (dkv_wire_conn_bulk_left(session->conn) > 0)
        return n > 0;
    finish_bulk(session);
    return session->conn != NULL;
}

/* One step of reading; false: stop for now. *drained: an earlier step took all there was. */
static bool read_step(struct dkv_session *session, uint64_t *bulk_of_turn, bool *drained,
                      struct dkv_error *err)
{
    struct dkv_wire_conn_message message;
    bool got = false;
    if (session->receiving)
        return read_bulk(session, bulk_of_turn, err);
    if (dkv_wire_conn_next(session->conn, &message, err) != DKV_OK)
        return false;
    if (message.header.type != 0) {
        handle(session, &message);
        return session->conn != NULL;
    }
    if (*drained || dkv_wire_conn_read(session->conn, &got, err) != DKV_OK)
        return false;
    *drained = dkv_wire_conn_drained(session->conn);
    return got;
}

/* Errors of the connection itself: a peer that went away is nothing to talk about. */
static void fail(struct dkv_session *session, const struct dkv_error *err)
{
    if (err->status == DKV_E_UNAVAILABLE)
        dkv_session_end(session);
    else
        dkv_session_violation(session, 0, err);
}

static void read_messages(struct dkv_session *session)
{
    struct dkv_error err = {0};
    uint64_t bulk_of_turn = BULK_PER_TURN;
    bool drained = false;
    uint64_t began_ns = 0;
    session->unread = false;
    for (unsigned i = 0; read_step(session, &bulk_of_turn, &drained, &err); i++) {
        if (i == 2) /* one message or two need no clock */
            began_ns = dkv_clock_ns();
        if (i == 2 * MESSAGES_PER_TURN || is_full(session) ||
            (i > 2 && dkv_clock_ns() - began_ns > TURN_NS)) {
            session->unread = true;
            break;
        }
    }
    if (session->conn != NULL && err.status != DKV_OK)
        fail(session, &err);
    else if (session->conn != NULL && dkv_wire_conn_in_message(session->conn))
        session->heard_ms = dkv_clock_ms();
}

static void on_event(uv_poll_t *poll, int status, int events)
{
    struct dkv_session *session = poll->data;
    if (status < 0) {
        dkv_session_end(session);
        return;
    }
    if ((events & UV_WRITABLE) != 0)
        session->took_ms = dkv_clock_ms();
    /* A hangup shows as readable too; where reading is off, it is the only sign of it. */
    if ((events & UV_DISCONNECT) != 0 && is_full(session)) {
        dkv_session_end(session);
        return;
    }
    if ((events & (UV_READABLE | UV_DISCONNECT)) != 0 || (session->unread && !is_full(session)))
        read_messages(session);
    dkv_session_flush(session);
}

/* The peer began something, and what is missing was not left unread by us. */
static bool owes_bytes(const struct dkv_session *session)
{
    const bool begun = session->receiving ||
                       (dkv_wire_conn_in_message(session->conn) && !session->unread);
    return !session->greeted || (begun && !is_full(session));
}

static void on_timer(uv_timer_t *timer)
{
    struct dkv_session *session = timer->data;
    const struct dkv_config *config = session->all->server->config;
    const uint64_t now_ms = dkv_clock_ms();
    struct dkv_error err = {0};
    if (!owes_bytes(session))
        session->heard_ms = now_ms;
    if (!dkv_wire_conn_wants_write(session->conn))
        session->took_ms = now_ms;
    if (now_ms - session->heard_ms > config->header_timeout_ms && !session->greeted)
        dkv_error_set(&err, DKV_E_TIMEOUT, "no hello came in %llu ms",
                      (unsigned long long)config->header_timeout_ms);
    else if (now_ms - session->heard_ms > config->header_timeout_ms)
        dkv_error_set(&err, DKV_E_TIMEOUT, "the rest of a message did not come");
    else if (now_ms - session->took_ms > config->request_timeout_ms)
        dkv_error_set(&err, DKV_E_TIMEOUT, "answers are not read");
    if (err.status != DKV_OK)
        dkv_session_violation(session, 0, &err);
    else
        dkv_wire_conn_trim(session->conn);
}

/* ---- the beginning ---- */

static enum dkv_status init_parts(struct dkv_session *session, struct dkv_backend *backend)
{
    session->client = dkv_backend_client_get(backend, NULL);
    if (session->client == NULL)
        return DKV_E_NOMEM;
    enum dkv_status status = dkv_slots_init(&session->regions, DKV_SESSION_REGIONS);
    if (status == DKV_OK)
        status = dkv_slots_init(&session->caches, DKV_SESSION_CACHES);
    return status == DKV_OK ? dkv_slots_init(&session->stashes, DKV_SESSION_STASHES) : status;
}

/* One that no handle of the loop's knows yet; NULL is fine. */
static void give_up(struct dkv_session *session, int fd)
{
    if (session == NULL || session->conn == NULL)
        close(fd);
    if (session == NULL)
        return;
    dkv_wire_conn_close(session->conn); /* and the descriptor */
    dkv_backend_client_put(session->client);
    dkv_session_free_objects(session);
    free(session);
}

enum dkv_status dkv_session_new(struct dkv_sessions *all, int fd, uid_t uid, struct dkv_error *err)
{
    struct dkv_session *session = calloc(1, sizeof(*session));
    enum dkv_status status = session == NULL || init_parts(session, all->server->backend) != DKV_OK
                                 ? dkv_error_set(err, DKV_E_NOMEM, "no memory for a session")
                                 : DKV_OK;
    if (status == DKV_OK)
        status = dkv_wire_conn_open(fd, DKV_WIRE_FROM_CLIENT, &session->conn, err);
    if (status == DKV_OK && uv_poll_init(all->server->loop, &session->poll, fd) != 0)
        status = dkv_error_set(err, DKV_E_NOMEM, "a session's socket cannot be polled");
    if (status != DKV_OK) {
        give_up(session, fd);
        return status;
    }
    const int room = SEND_ROOM;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)); /* at most wmem_max */
    session->all = all;
    session->number = ++all->n_ever;
    session->uid = uid;
    session->trusted = uid == geteuid();
    dkv_list_init(&session->asks);
    dkv_list_init(&session->ended);
    dkv_list_init(&session->sending);
    dkv_list_init(&session->outbox);
    dkv_list_init(&session->node);
    dkv_list_init(&session->unsent_node);
    dkv_list_push_back(&all->sessions, &session->node);
    all->n_sessions++;
    all->server->metrics.connections_total[DKV_TRANSPORT_SOCKET]++;
    session->n_open_handles = 2;
    session->heard_ms = session->took_ms = dkv_clock_ms();
    uv_timer_init(all->server->loop, &session->timer);
    session->poll.data = session;
    session->timer.data = session;
    uv_timer_start(&session->timer, on_timer, TIMER_MS, TIMER_MS);
    wait_for_events(session);
    return DKV_OK;
}
