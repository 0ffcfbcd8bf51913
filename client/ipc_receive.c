/* What the daemon says: greetings, numbers of objects, answers. An answer's numbers are received
 * where they belong, in the result. */
#include "client/ipc_priv.h"

#include <stdio.h>
#include <string.h>

#define READS_MAX 256 /* of one dispatch */

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
    if (status == DKV_OK)
        dkv_ipc_objects_done(t, message->header.id, object.object);
    return status;
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
    struct dkv_ipc_carrier *c = dkv_ipc_carrier_find(t, message->header.id);
    if (message->header.id == 0 || (!t->greeted && c == NULL)) {
        *err = told; /* about the connection */
        return told.status;
    }
    if (dkv_ipc_objects_refused(t, message->header.id, &told) || c == NULL)
        return DKV_OK;
    dkv_ipc_answer_release(c);
    if (told.status == DKV_E_BUSY || told.status == DKV_E_DRAINING)
        dkv_ipc_retry(t, c,
                      wire.retry_us > 0 ? wire.retry_us * INT64_C(1000) : DKV_IPC_FIRST_PAUSE_NS,
                      told.status, told.text);
    else
        dkv_ipc_hand_back(t, c, told.status, told.text);
    return DKV_OK;
}

static enum dkv_status take_result(struct dkv_transport *t,
                                   const struct dkv_wire_conn_message *message,
                                   struct dkv_error *err)
{
    struct dkv_ipc_carrier *c = dkv_ipc_carrier_find(t, message->header.id);
    t->skipping = message->header.bulk_bytes > 0;
    if (c == NULL)
        return DKV_OK; /* it was given up */
    const enum dkv_status status = dkv_ipc_take_result(c->job, message, err);
    if (status == DKV_E_NOMEM) {
        dkv_ipc_hand_back(t, c, status, err->text);
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
    const uint64_t scores_bytes = result->scores != NULL
                                      ? n_heads * result->n_tokens * sizeof(float)
                                      : 0;
    const uint64_t offsets_bytes = result->keep_offsets != NULL ? (n_heads + 1) * sizeof(int32_t)
                                                                : 0;
    const uint64_t at = t->received_bytes;
    const uint64_t keep_bytes = at + dkv_wire_conn_bulk_left(t->conn) - scores_bytes -
                                offsets_bytes;
    if (at < keep_bytes) {
        *room_out = keep_bytes - at;
        return (uint8_t *)dkv_result_keep(result) + at;
    }
    if (at < keep_bytes + scores_bytes) {
        *room_out = keep_bytes + scores_bytes - at;
        return (uint8_t *)dkv_result_scores(result) + (at - keep_bytes);
    }
    *room_out = keep_bytes + scores_bytes + offsets_bytes - at;
    return (uint8_t *)dkv_result_offsets(result) + (at - keep_bytes - scores_bytes);
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
    struct dkv_ipc_carrier *c = t->receiving;
    t->receiving = NULL;
    if (c == NULL)
        return DKV_OK;
    const struct dropkv_result *result = c->job->result;
    if (result->keep_offsets != NULL) {
        const uint64_t n_heads = (uint64_t)result->batch * result->kv_heads;
        const uint64_t other_bytes =
            (n_heads + 1) * sizeof(int32_t) +
            (result->scores != NULL ? n_heads * result->n_tokens * sizeof(float) : 0);
        const enum dkv_status status = dkv_result_judge(
            result, (t->received_bytes - other_bytes) / sizeof(int32_t), err);
        if (status != DKV_OK)
            return status;
    }
    dkv_ipc_hand_back(t, c, DKV_OK, "");
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

void dkv_ipc_receive(struct dkv_transport *t)
{
    bool more = true, drained = false;
    t->unread = false;
    for (int i = 0; t->conn != NULL && more && i < READS_MAX; i++) {
        struct dkv_error err = {0};
        more = false;
        const enum dkv_status status = read_step(t, &drained, &more, &err);
        if (status != DKV_OK)
            dkv_ipc_disconnect(t, status, err.text);
    }
    t->unread = t->conn != NULL && more;
}
