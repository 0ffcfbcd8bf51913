/* Requests on their way.
 *
 * A carrier has one job until it is handed back. Carriers and the memory of copied bytes are used
 * again. Bulks belong to the connection from the moment a message names them until it has sent
 * them, so a request may be given up while it is still being sent.
 */
#include "client/ipc_priv.h"

#include <stdlib.h>

#define BULK_KEPT_BYTES_MAX (UINT64_C(4) << 20)  /* a larger one is not kept, */
#define IDLE_BYTES_MAX      (UINT64_C(64) << 20) /* nor more than this of all */

/* ---- copied bytes ---- */

/* The smallest that is large enough, so that small requests leave large memory to large ones; else
 * the first, which grows. */
static struct dkv_ipc_bulk *take_idle(struct dkv_transport *t, uint64_t bytes)
{
    struct dkv_ipc_bulk **at = NULL;
    for (struct dkv_ipc_bulk **i = &t->idle_bulks; *i != NULL; i = &(*i)->next) {
        if ((*i)->room >= bytes && (at == NULL || (*i)->room < (*at)->room))
            at = i;
    }
    if (at == NULL)
        at = &t->idle_bulks;
    struct dkv_ipc_bulk *bulk = *at;
    if (bulk != NULL) {
        *at = bulk->next;
        t->idle_bytes -= bulk->room;
    }
    return bulk;
}

static void bulk_free(struct dkv_ipc_bulk *bulk)
{
    free(bulk->bytes);
    free(bulk);
}

struct dkv_ipc_bulk *dkv_ipc_bulk_get(struct dkv_transport *t, uint64_t bytes)
{
    struct dkv_ipc_bulk *bulk = take_idle(t, bytes);
    if (bulk == NULL && (bulk = calloc(1, sizeof(*bulk))) == NULL)
        return NULL;
    if (bulk->room >= bytes)
        return bulk;
    free(bulk->bytes);
    bulk->bytes = malloc(bytes);
    bulk->room = bulk->bytes != NULL ? bytes : 0;
    if (bulk->bytes != NULL)
        return bulk;
    free(bulk);
    return NULL;
}

void dkv_ipc_bulk_put(struct dkv_transport *t, struct dkv_ipc_bulk *bulk)
{
    if (bulk == NULL)
        return;
    if (bulk->room > BULK_KEPT_BYTES_MAX || t->idle_bytes + bulk->room > IDLE_BYTES_MAX) {
        bulk_free(bulk);
        return;
    }
    bulk->next = t->idle_bulks;
    t->idle_bulks = bulk;
    t->idle_bytes += bulk->room;
}

void dkv_ipc_bulk_given(struct dkv_transport *t, struct dkv_ipc_bulk *bulk)
{
    bulk->next = NULL;
    bulk->number = ++t->n_bulks;
    *t->last_bulk = bulk;
    t->last_bulk = &bulk->next;
}

void dkv_ipc_bulks_sent(struct dkv_transport *t, uint64_t up_to)
{
    struct dkv_ipc_bulk *bulk;
    while ((bulk = t->first_bulk) != NULL && bulk->number <= up_to) {
        t->first_bulk = bulk->next;
        dkv_ipc_bulk_put(t, bulk);
    }
    if (t->first_bulk == NULL)
        t->last_bulk = &t->first_bulk;
}

/* ---- carriers ---- */

enum dkv_status dkv_ipc_carrier_add(struct dkv_transport *t, struct dkv_job *job,
                                    struct dkv_error *err)
{
    struct dkv_ipc_carrier *c = t->idle;
    if (c != NULL)
        t->idle = c->next;
    else if ((c = malloc(sizeof(*c))) == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    *c = (struct dkv_ipc_carrier){.job = job};
    job->carrier = c;
    struct dkv_ipc_carrier **end = &t->first;
    while (*end != NULL)
        end = &(*end)->next;
    *end = c;
    return DKV_OK;
}

void dkv_ipc_carrier_remove(struct dkv_transport *t, struct dkv_ipc_carrier *c)
{
    struct dkv_ipc_carrier **at = &t->first;
    dkv_ipc_answer_give_up(t, c);
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

struct dkv_ipc_carrier *dkv_ipc_carrier_find(const struct dkv_transport *t, uint64_t id)
{
    struct dkv_ipc_carrier *c = t->first;
    while (c != NULL && c->id != id)
        c = c->next;
    return c;
}

void dkv_ipc_hand_back(struct dkv_transport *t, struct dkv_ipc_carrier *c, enum dkv_status status,
                       const char *text)
{
    struct dkv_job *job = c->job;
    job->result->n_attempts = c->n_attempts;
    if (status == DKV_OK) {
        dkv_result_set_backend(job->result, t->about.backend);
        dkv_ipc_answer_hold(c);
    }
    dkv_ipc_carrier_remove(t, c);
    dkv_job_done(job, status, text);
}

void dkv_ipc_retry(struct dkv_transport *t, struct dkv_ipc_carrier *c, int64_t pause_ns,
                   enum dkv_status status, const char *text)
{
    const int64_t at_ns = dkv_now_ns() + pause_ns;
    if (c->n_attempts > t->max_retries || at_ns >= c->job->deadline_ns) {
        dkv_ipc_hand_back(t, c, status, text);
        return;
    }
    dkv_ipc_answer_give_up(t, c);
    c->id = 0;
    c->not_before_ns = at_ns;
}

/* ---- sending ---- */

static enum dkv_status put_request(struct dkv_transport *t, const struct dkv_job *job,
                                   struct dkv_ipc_request *request, struct dkv_error *err)
{
    const int64_t left_us = (job->deadline_ns - dkv_now_ns()) / 1000;
    const uint64_t timeout_us = left_us < 1 ? 1 : (uint64_t)left_us;
    return job->call.is_prompt ? dkv_ipc_put_prompt(t, &job->call, timeout_us, request, err)
                               : dkv_ipc_put_blocks(t, &job->call, timeout_us, request, err);
}

/* *full_out: nothing is wrong but that the connection has no room now. */
static enum dkv_status send_request(struct dkv_transport *t, struct dkv_ipc_carrier *c,
                                    bool *full_out, struct dkv_error *err)
{
    struct dkv_ipc_request request = {.payload = t->payload};
    *full_out = false;
    dkv_ipc_answer_place(t, c);
    enum dkv_status status = put_request(t, c->job, &request, err);
    if (status == DKV_OK && request.bulk_bytes > t->welcome.max_bulk_bytes)
        status = dkv_error_set(err, DKV_E_TOO_LARGE, "%llu bytes of tensors, the daemon takes %llu",
                               (unsigned long long)request.bulk_bytes,
                               (unsigned long long)t->welcome.max_bulk_bytes);
    if (status == DKV_OK) {
        status = dkv_wire_conn_send(t->conn,
                                    &(struct dkv_wire_conn_output){
                                        .type = request.type,
                                        .id = t->last_id + 1,
                                        .payload = request.payload,
                                        .payload_bytes = request.payload_bytes,
                                        .bulk = request.bulk != NULL ? request.bulk->bytes : NULL,
                                        .bulk_bytes = request.bulk_bytes,
                                    },
                                    err);
        *full_out = status == DKV_E_BUSY;
    }
    if (status != DKV_OK) {
        dkv_ipc_bulk_put(t, request.bulk);
        return status;
    }
    if (request.bulk != NULL)
        dkv_ipc_bulk_given(t, request.bulk);
    c->id = ++t->last_id;
    c->n_attempts++;
    return DKV_OK;
}

bool dkv_ipc_send_waiting(struct dkv_transport *t)
{
    struct dkv_ipc_carrier *next;
    uint32_t n_sent = 0;
    const int64_t now_ns = dkv_now_ns();
    for (struct dkv_ipc_carrier *c = t->first; c != NULL; c = c->next)
        n_sent += c->id != 0;
    for (struct dkv_ipc_carrier *c = t->first; c != NULL && n_sent < t->welcome.max_in_flight;
         c = next) {
        struct dkv_error err = {0};
        next = c->next;
        if (c->id != 0 || c->not_before_ns > now_ns)
            continue;
        bool full;
        const enum dkv_status status = send_request(t, c, &full, &err);
        if (full)
            return true;
        if (status != DKV_OK)
            dkv_ipc_hand_back(t, c, status, err.text);
        n_sent++;
    }
    return false;
}

void dkv_ipc_expire(struct dkv_transport *t)
{
    struct dkv_ipc_carrier *next;
    const int64_t now_ns = dkv_now_ns();
    for (struct dkv_ipc_carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        if (now_ns < c->job->deadline_ns)
            continue;
        uint8_t payload[8];
        uint64_t id;
        if (c->id != 0 && t->conn != NULL) {
            dkv_wire_put_cancel(payload, &(struct dkv_wire_cancel){c->id});
            (void)dkv_ipc_send(t, DKV_WIRE_CANCEL, payload, sizeof(payload), &id);
        }
        dkv_ipc_hand_back(t, c, DKV_E_TIMEOUT, "the deadline passed before the answer came");
    }
}

void dkv_ipc_send_fini(struct dkv_transport *t)
{
    dkv_ipc_bulks_sent(t, UINT64_MAX);
    while (t->idle_bulks != NULL) {
        struct dkv_ipc_bulk *bulk = t->idle_bulks;
        t->idle_bulks = bulk->next;
        bulk_free(bulk);
    }
    while (t->idle != NULL) {
        struct dkv_ipc_carrier *c = t->idle;
        t->idle = c->next;
        free(c);
    }
}
