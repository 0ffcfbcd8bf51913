/* Requests of a session: taken in, sent on their way, answered.
 *
 * An ask is in one of three lists of its session: `asks` while somebody works on it, `ended` when
 * its answer waits for room in the connection, `sending` while the connection sends its numbers
 * from the job's own memory. Every ask leaves through exactly one answer, or through drop_asks()
 * when the peer has gone. One whose peer has gone, or was told that the deadline passed while the
 * work ran, comes back from the backend to nobody and is freed.
 */
#include "server/ask.h"

#include "server/record.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define CANCELLED_TEXT "the request was cancelled"

static void end_ask(struct dkv_ask *ask);
static bool settle_ask(struct dkv_ask *ask, struct dkv_session *session);

/* ---- on the way to the backend ---- */

static void fail_ask(struct dkv_ask *ask, const struct dkv_error *err)
{
    ask->error = *err;
    end_ask(ask);
}

static void on_job_done(struct dkv_job *job, void *owner)
{
    struct dkv_ask *ask = owner;
    struct dkv_session *session = ask->session;
    dkv_metrics_batch(&ask->server->metrics, job);
    if (job->status != DKV_OK)
        ask->error = job->error;
    else if (session != NULL && !dkv_ask_write(ask, end_ask))
        return;
    if (!settle_ask(ask, session))
        return;
    /* More of its answers may be in the same batch. */
    if (dkv_list_empty(&session->asks))
        dkv_session_flush(session);
    else if (!dkv_list_linked(&session->unsent_node))
        dkv_list_push_back(&session->all->unsent, &session->unsent_node);
}

static void count_answer(const struct dkv_ask *ask);

/* The client is told, and the ask keeps what the work reads until that has ended. */
static void on_job_overdue(struct dkv_job *job, void *owner, const struct dkv_error *why)
{
    struct dkv_ask *ask = owner;
    struct dkv_session *session = ask->session;
    (void)job;
    if (session == NULL)
        return;
    ask->error = *why;
    count_answer(ask);
    ask->answered = true;
    ask->session = NULL;
    ask->server->n_accepted--;
    dkv_list_remove(&ask->node);
    session->n_asks--;
    dkv_session_send_error(session, ask->id, why, 0);
    dkv_session_flush(session);
}

static void submit(struct dkv_ask *ask)
{
    struct dkv_error err = {0};
    struct dkv_backend_refusal refusal = {0};
    struct dkv_job *job = ask->job;
    job->done = on_job_done;
    job->overdue = job->target == NULL ? on_job_overdue
                                       : NULL; /* no answer before the last write */
    job->owner = ask;
    job->entry.arrival_us = ask->started_ns / 1000;
    ask->phase = DKV_ASK_QUEUED;
    if (dkv_backend_submit(ask->server->backend, ask->session->client, job, &refusal, &err) !=
        DKV_OK) {
        ask->retry_us = refusal.retry_us;
        fail_ask(ask, &err);
    }
}

/* Its query rows are there, or why not. */
static void on_fetched(struct dkv_ask *ask)
{
    if (ask->called_off)
        dkv_error_set(&ask->error, DKV_E_CANCELLED, CANCELLED_TEXT);
    if (ask->error.status != DKV_OK)
        end_ask(ask);
    else
        submit(ask);
}

/* The producer has written what is to be read. */
static void go_on(struct dkv_ask *ask)
{
    if (dkv_ask_fetch(ask, on_fetched))
        on_fetched(ask);
}

static void on_fence(struct dkv_fence *fence, enum dkv_status status, const struct dkv_error *err)
{
    struct dkv_ask *ask = DKV_LIST_OF(fence, struct dkv_ask, fence);
    ask->phase = DKV_ASK_BUILDING;
    ask->server->n_fenced--;
    if (status == DKV_OK)
        go_on(ask);
    else
        fail_ask(ask, err);
}

static uint64_t deadline_of(const struct dkv_ask *ask)
{
    const uint64_t limit_us = ask->server->config->request_timeout_ms * 1000;
    const int64_t asked_us = ask->job->request.params.timeout;
    const uint64_t us = asked_us > 0 && (uint64_t)asked_us < limit_us ? (uint64_t)asked_us
                                                                      : limit_us;
    return ask->started_ns + us * 1000;
}

static void start(struct dkv_ask *ask)
{
    struct dkv_error err = {0};
    ask->deadline_ns = deadline_of(ask);
    if (ask->fence.region == NULL) {
        go_on(ask);
        return;
    }
    ask->fence.deadline_ns = ask->deadline_ns;
    ask->fence.ready = on_fence;
    if (dkv_fence_reached(&ask->fence, &err)) {
        go_on(ask);
    } else if (err.status != DKV_OK) {
        fail_ask(ask, &err);
    } else {
        ask->phase = DKV_ASK_FENCED;
        ask->server->n_fenced++;
        dkv_fence_wait(ask->session->all->fences, &ask->fence);
    }
}

/* ---- the message ---- */

static enum dkv_status build(struct dkv_ask *ask, const struct dkv_wire_header *header,
                             const uint8_t *payload, struct dkv_error *err)
{
    if (header->type == DKV_WIRE_SCORE) {
        struct dkv_wire_score score;
        const enum dkv_status status = dkv_wire_get_score(payload, header->payload_bytes, &score,
                                                          err);
        return status == DKV_OK ? dkv_ask_build_score(ask, &score, err) : status;
    }
    struct dkv_wire_blocks blocks;
    const enum dkv_status status = dkv_wire_get_blocks(payload, header->payload_bytes, &blocks,
                                                       err);
    return status == DKV_OK ? dkv_ask_build_blocks(ask, &blocks, err) : status;
}

/* A broken message inside an accepted frame concerns the connection; all else the request. */
static void build_and_start(struct dkv_ask *ask, const struct dkv_wire_header *header,
                            const uint8_t *payload)
{
    struct dkv_error err = {0};
    struct dkv_session *session = ask->session;
    const enum dkv_status status = build(ask, header, payload, &err);
    if (status == DKV_OK)
        start(ask);
    else if (status == DKV_E_MALFORMED)
        dkv_session_violation(session, header->id, &err);
    else
        fail_ask(ask, &err);
}

void dkv_session_ask_received(struct dkv_session *session)
{
    struct dkv_ask *ask = session->bulk.ask;
    session->bulk.ask = NULL;
    ask->job->body.received_bytes = session->bulk.got;
    build_and_start(ask, &session->bulk.header, session->bulk.payload);
}

static enum dkv_status check_message(const struct dkv_wire_header *header, const uint8_t *payload,
                                     struct dkv_error *err)
{
    struct dkv_wire_score score;
    if (header->type != DKV_WIRE_SCORE)
        return DKV_OK;
    enum dkv_status status = dkv_wire_get_score(payload, header->payload_bytes, &score, err);
    const uint64_t table_bytes = status == DKV_OK ? dkv_wire_score_bulk_bytes(&score) : 0;
    if (status == DKV_OK && (header->bulk_bytes < table_bytes ||
                             (score.extras == 0 && header->bulk_bytes != table_bytes)))
        status = dkv_error_set(err, DKV_E_MALFORMED, "score: %llu bytes of bulk, %llu belong",
                               (unsigned long long)header->bulk_bytes,
                               (unsigned long long)table_bytes);
    return status;
}

/* Clients that count upwards cost no search. */
static bool id_is_used(struct dkv_session *session, uint64_t id)
{
    if (id > session->newest_id) {
        session->newest_id = id;
        return false;
    }
    DKV_LIST_EACH (node, &session->asks)
        if (DKV_LIST_OF(node, struct dkv_ask, node)->id == id)
            return true;
    return false;
}

/* May it come in at all? Judged before its bulk is read. */
static enum dkv_status admit(const struct dkv_session *session,
                             const struct dkv_wire_header *header, struct dkv_error *err)
{
    const struct dkv_server *server = session->all->server;
    if (server->draining)
        return dkv_error_set(err, DKV_E_DRAINING, "the server is shutting down");
    if (header->bulk_bytes > server->max_body_bytes)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "bulk: %llu bytes are above %llu",
                             (unsigned long long)header->bulk_bytes,
                             (unsigned long long)server->max_body_bytes);
    if (session->n_asks >= DKV_SESSION_IN_FLIGHT)
        return dkv_error_set(err, DKV_E_BUSY,
                             "%u requests of this connection are in flight, the "
                             "most allowed",
                             session->n_asks);
    return DKV_OK;
}

static void refuse(struct dkv_session *session, uint64_t id, const struct dkv_error *err)
{
    const struct dkv_record record = {
        .transport = DKV_TRANSPORT_SOCKET,
        .status = err->status,
        .error = err->text,
        .session = session->number,
    };
    dkv_record_end(session->all->server, &record);
    dkv_session_send_error(session, id, err, 0);
}

void dkv_session_handle_score(struct dkv_session *session,
                              const struct dkv_wire_conn_message *message)
{
    struct dkv_error err = {0};
    const struct dkv_wire_header *header = &message->header;
    enum dkv_status status = check_message(header, message->payload, &err);
    if (status == DKV_OK && id_is_used(session, header->id))
        status = dkv_error_set(&err, DKV_E_MALFORMED,
                               "id %llu names a request that has no answer "
                               "yet",
                               (unsigned long long)header->id);
    if (status != DKV_OK) {
        dkv_session_violation(session, header->id, &err);
        return;
    }
    status = admit(session, header, &err);
    struct dkv_ask *ask = status == DKV_OK ? dkv_ask_new(session, header->id) : NULL;
    if (status == DKV_OK && ask == NULL)
        status = dkv_error_set(&err, DKV_E_NOMEM, "out of memory");
    if (status == DKV_OK && header->bulk_bytes > 0)
        status = dkv_body_reserve(&ask->job->body, &session->all->server->bodies,
                                  dkv_backend_client_holder(session->client), header->bulk_bytes, 0,
                                  true, &err);
    if (status != DKV_OK) {
        dkv_ask_free(ask);
        refuse(session, header->id, &err);
        return;
    }
    dkv_list_push_back(&session->asks, &ask->node);
    session->n_asks++;
    session->all->server->n_accepted++;
    if (header->bulk_bytes == 0) {
        build_and_start(ask, header, message->payload);
        return;
    }
    session->bulk.to = ask->job->body.data;
    session->bulk.ask = ask;
}

/* ---- the answer ---- */

static void count_answer(const struct dkv_ask *ask)
{
    const struct dkv_record record = {
        .transport = DKV_TRANSPORT_SOCKET,
        .status = ask->error.status,
        .error = ask->error.text,
        .session = ask->session != NULL ? ask->session->number : 0,
        .job = ask->job,
        .started_ns = ask->started_ns,
    };
    dkv_record_end(ask->server, &record);
}

/* Nobody works on it any more: what it read is let go of, so that a region that is being detached
 * does not wait for a client that is slow to read answers. Letting go may end the session, which
 * must not find the ask in its lists then. False: nobody wants an answer. */
static bool settle_ask(struct dkv_ask *ask, struct dkv_session *session)
{
    ask->phase = DKV_ASK_ENDED;
    if (ask->answered) {
        dkv_ask_free(ask);
        return false;
    }
    dkv_list_remove(&ask->node);
    if (session == NULL)
        ask->error.status = DKV_E_CANCELLED;
    else
        ask->server->n_accepted--;
    count_answer(ask);
    dkv_ask_let_go(ask);
    if (session == NULL || session->conn == NULL) {
        dkv_ask_free(ask);
        return false;
    }
    dkv_list_push_back(&session->ended, &ask->node);
    return true;
}

static void end_ask(struct dkv_ask *ask)
{
    struct dkv_session *session = ask->session;
    if (settle_ask(ask, session))
        dkv_session_flush(session);
}

/* Puts the numbers where the client wants them and describes them. */
static size_t put_records(const struct dkv_ask *ask, uint8_t *records)
{
    const struct dkv_job *job = ask->job;
    uint64_t keep_at = 0;
    uint64_t scores_at = job->n_keep * sizeof(int32_t);
    uint64_t head = 0;
    size_t n = 0;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const struct dkv_block *block = &job->blocks[i];
        const uint64_t n_kept = job->offsets != NULL
                                    ? (uint64_t)(job->offsets[head + block->kv_heads] -
                                                 job->offsets[head])
                                    : job->plans[i].keep_tokens * block->kv_heads;
        const struct dkv_wire_result_block record = {
            .kv_heads = block->kv_heads,
            .keep_tokens = (uint32_t)job->plans[i].keep_tokens,
            .n_tokens = (uint32_t)block->n_tokens,
            .n_ragged = job->offsets != NULL ? (uint32_t)n_kept : 0,
            .keep_offset = keep_at,
            .scores_offset = job->n_scores > 0 ? scores_at : DKV_WIRE_NO_SCORES,
        };
        n += dkv_wire_put_result_block(records + n, &record);
        keep_at += n_kept * sizeof(int32_t);
        head += block->kv_heads;
        if (job->n_scores > 0)
            scores_at += block->n_tokens * block->kv_heads * sizeof(float);
    }
    return n;
}

static enum dkv_status send_result(struct dkv_session *session, struct dkv_ask *ask)
{
    uint8_t fixed[24];
    static uint8_t records[DKV_WIRE_BLOCKS_MAX * DKV_WIRE_RESULT_BLOCK_BYTES]; /* the loop's */
    struct dkv_error ignored;
    const struct dkv_job *job = ask->job;
    const struct dkv_wire_result result = {
        .n_blocks = job->request.n_blocks,
        .degraded = job->degraded,
        .in_region = ask->output != NULL,
        .queue_us = (job->started_ns - job->queued_ns) / 1000,
        .run_us = (job->finished_ns - job->started_ns) / 1000,
    };
    const struct dkv_wire_conn_output output = {
        .type = DKV_WIRE_RESULT,
        .id = ask->id,
        .payload = fixed,
        .payload_bytes = dkv_wire_put_result(fixed, &result),
        .more = records,
        .more_bytes = put_records(ask, records),
        .bulk = job->keep,
        .bulk_bytes = ask->output == NULL ? dkv_ask_answer_bytes(ask) : 0,
    };
    return dkv_wire_conn_send(session->conn, &output, &ignored);
}

static void answered(struct dkv_session *session, struct dkv_ask *ask)
{
    dkv_list_remove(&ask->node);
    session->n_asks--;
    dkv_ask_free(ask);
}

void dkv_session_send_ended(struct dkv_session *session)
{
    struct dkv_list *node;
    while (dkv_list_empty(&session->outbox) && (node = dkv_list_first(&session->ended)) != NULL) {
        struct dkv_ask *ask = DKV_LIST_OF(node, struct dkv_ask, node);
        if (ask->error.status != DKV_OK) {
            const struct dkv_error err = ask->error;
            const uint64_t id = ask->id;
            const uint64_t retry_us = ask->retry_us;
            answered(session, ask);
            dkv_session_send_error(session, id, &err, retry_us);
            continue;
        }
        if (send_result(session, ask) != DKV_OK)
            return; /* no room: it is tried again after a flush */
        if (ask->output != NULL) {
            answered(session, ask);
            continue;
        }
        dkv_list_remove(&ask->node);
        dkv_list_push_back(&session->sending, &ask->node);
        ask->bulk_number = ++session->n_bulks;
    }
}

void dkv_session_free_sent(struct dkv_session *session)
{
    struct dkv_list *node;
    const uint64_t n_sent = dkv_wire_conn_bulks_sent(session->conn);
    while ((node = dkv_list_first(&session->sending)) != NULL) {
        struct dkv_ask *ask = DKV_LIST_OF(node, struct dkv_ask, node);
        if (ask->bulk_number > n_sent)
            return;
        answered(session, ask);
    }
}

/* ---- giving up ---- */

/* Takes an ask back from whoever has it. */
static void call_off(struct dkv_ask *ask)
{
    struct dkv_error err;
    switch (ask->phase) {
    case DKV_ASK_QUEUED: dkv_backend_cancel(ask->server->backend, ask->job); return;
    case DKV_ASK_BUILDING:
    case DKV_ASK_FENCED:
        ask->server->n_fenced -= ask->phase == DKV_ASK_FENCED;
        dkv_fence_drop(&ask->fence);
        dkv_error_set(&err, DKV_E_CANCELLED, CANCELLED_TEXT);
        fail_ask(ask, &err);
        return;
    case DKV_ASK_READING:
        ask->called_off = true;
        uv_cancel((uv_req_t *)&ask->work); /* fails if a thread has it already */
        return;
    case DKV_ASK_WRITING: /* it is too late, and comes back soon */
    case DKV_ASK_ENDED: return;
    }
}

void dkv_session_cancel(struct dkv_session *session, uint64_t target)
{
    DKV_LIST_EACH (node, &session->asks) {
        struct dkv_ask *ask = DKV_LIST_OF(node, struct dkv_ask, node);
        if (ask->id == target && ask != session->bulk.ask) {
            call_off(ask);
            return;
        }
    }
}

static void free_list(struct dkv_list *list)
{
    struct dkv_list *node;
    while ((node = dkv_list_first(list)) != NULL)
        dkv_ask_free(DKV_LIST_OF(node, struct dkv_ask, node));
}

void dkv_session_drop_asks(struct dkv_session *session)
{
    struct dkv_list *node;
    session->bulk.ask = NULL; /* it is in the list as well */
    while ((node = dkv_list_first(&session->asks)) != NULL) {
        struct dkv_ask *ask = DKV_LIST_OF(node, struct dkv_ask, node);
        dkv_list_remove(node);
        ask->session = NULL;
        ask->server->n_accepted--; /* nobody waits for it, though a worker may have it still */
        call_off(ask);
    }
    free_list(&session->ended);
    free_list(&session->sending);
    session->n_asks = 0;
}
