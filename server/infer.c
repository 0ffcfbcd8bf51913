/* The one path of an inference request:
 *
 *   header   admit: our model? draining? queue full? -> 404, 503 before the body is sent
 *   body     progress: JSON part complete -> parse  -> 400 before the tensors are sent
 *   end      bind, gate, outputs allocated, queued; the connection is suspended
 *   job done resume; reply encoded over the job's outputs, which are sent in place
 *   or its deadline passes while it runs: resume, 503; the job stays the backend's until it ends
 *
 * Reading and writing tensors as JSON numbers takes up to a second, in which the loop could serve
 * nobody else. So what is long runs as an errand, with the connection suspended already: reading
 * between the end of the body and `bind`, writing between the end of the job and the resume.
 *
 * The job is made when the JSON part has been read and owns the body from the end of its reception
 * on. Every request is counted with exactly one outcome: in refuse() for those that never became a
 * queued job, in finish() or gone() for the others.
 */
#include "server/infer.h"

#include "server/answer.h"
#include "server/clock.h"
#include "server/errand.h"
#include "server/handlers.h"
#include "server/http.h"
#include "server/infer_shm.h"
#include "server/record.h"

#include <stdlib.h>
#include <string.h>

#define REPLY_BYTES_MAX (UINT64_C(1) << 31)
#define LONG_JSON_BYTES 16384u /* reading more would hold the loop up for too long */

#define JSON_NUMBER_BYTES 16u /* at most: "-1.23456789e-38," */

void dkv_infer_count_refusal(struct dkv_exchange *exchange, const struct dkv_error *err)
{
    const struct dkv_job *job = exchange->job != NULL ? exchange->job : exchange->away;
    const struct dkv_record record = {
        .transport = DKV_TRANSPORT_HTTP,
        .status = err->status,
        .error = err->text,
        .job = job,
        .id = job != NULL ? job->infer->id : "",
        .client = exchange->client_name,
        .trace = &exchange->trace,
        .started_ns = exchange->started_ns,
    };
    dkv_record_end(exchange->server, &record);
}

void dkv_infer_count_gone(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    dkv_error_set(&err, DKV_E_CANCELLED, "the caller went away");
    dkv_infer_count_refusal(exchange, &err);
}

void dkv_infer_release(struct dkv_exchange *exchange)
{
    dkv_body_release(&exchange->body);
    dkv_job_free(exchange->job);
    exchange->job = NULL;
    dkv_errand_abandon(exchange->errand);
    dkv_answer_free(exchange->answer);
    exchange->answer = NULL;
}

void dkv_infer_leave(struct dkv_exchange *exchange)
{
    if (exchange->accepted)
        exchange->server->n_accepted--;
    exchange->accepted = false;
}

enum dkv_status dkv_infer_admit(struct dkv_exchange *exchange, struct dkv_error *err)
{
    struct dkv_server *server = exchange->server;
    const struct dkv_route_match *match = &exchange->match;
    enum dkv_policy policy;
    if (!dkv_oip_find_model(match->model, &policy))
        return dkv_error_set(
            err, DKV_E_NOT_FOUND,
            "Request for unknown model: 'dropkv' and the names of its policies are "
            "found here");
    if (*match->version != '\0' && strcmp(match->version, DKV_OIP_MODEL_VERSION) != 0)
        return dkv_error_set(err, DKV_E_NOT_FOUND,
                             "Request for unknown model version: 'dropkv' has version 1");
    if (server->draining)
        return dkv_error_set(err, DKV_E_DRAINING, "the server is shutting down");
    if (server->n_accepted - server->n_fenced >= server->config->max_queue_requests)
        return dkv_error_set(err, DKV_E_BUSY, "%llu requests are waiting already",
                             (unsigned long long)server->config->max_queue_requests);
    if (!dkv_backend_ready(server->backend))
        return dkv_error_set(err, DKV_E_BUSY, "no device answers now; its worker is restarting");
    server->n_accepted++;
    exchange->accepted = true;
    return DKV_OK;
}

/* Kept with the connection, since its next request will be the same one's. */
struct dkv_backend_client *dkv_infer_client(struct dkv_exchange *exchange)
{
    struct dkv_conn *conn = exchange->conn;
    const char *name = *exchange->client_name != '\0' ? exchange->client_name : NULL;
    if (conn->client != NULL && dkv_backend_client_is(conn->client, name))
        return conn->client;
    dkv_backend_client_put(conn->client);
    conn->client = dkv_backend_client_get(exchange->server->backend, name);
    return conn->client;
}

unsigned dkv_infer_http_status(const struct dkv_exchange *exchange, enum dkv_status status)
{
    return status == DKV_E_BUSY && exchange->over_share ? 429
                                                        : dkv_status_info(status)->http_status;
}

/* A job whose memory is its client's. */
static struct dkv_job *new_job(struct dkv_exchange *exchange)
{
    struct dkv_server *server = exchange->server;
    const struct dkv_backend_client *client = dkv_infer_client(exchange);
    struct dkv_job *job = client != NULL ? dkv_job_new(&server->arena) : NULL;
    if (job != NULL && (job->infer = calloc(1, sizeof(*job->infer))) == NULL) {
        dkv_job_free(job);
        return NULL;
    }
    if (job != NULL)
        dkv_job_charge_to(job, &server->bodies.quota, dkv_backend_client_holder(client));
    return job;
}

/* Any thread. */
static enum dkv_status read_json(const struct dkv_server *server, struct dkv_job *job,
                                 const unsigned char *json, uint64_t json_bytes,
                                 uint64_t binary_bytes, struct dkv_error *err)
{
    enum dkv_status status = dkv_oip_infer_parse((const char *)json, (size_t)json_bytes,
                                                 binary_bytes, job->infer, err);
    if (status == DKV_OK && job->infer->uses_shm && server->shm == NULL)
        status = dkv_error_set(err, DKV_E_DENIED,
                               "shared memory of HTTP clients is not accepted: send tensors in the "
                               "body");
    return status;
}

/* Reads the JSON part, with `binary_bytes` expected behind it. */
static enum dkv_status parse(struct dkv_exchange *exchange, uint64_t json_bytes,
                             uint64_t binary_bytes, struct dkv_error *err)
{
    exchange->parsed = true;
    exchange->job = new_job(exchange);
    if (exchange->job == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    return read_json(exchange->server, exchange->job, exchange->body.data, json_bytes, binary_bytes,
                     err);
}

enum dkv_status dkv_infer_progress(struct dkv_exchange *exchange, struct dkv_error *err)
{
    const bool early = exchange->has_json_length && exchange->has_length;
    if (exchange->parsed || !early || exchange->body.received_bytes < exchange->json_length)
        return DKV_OK;
    return parse(exchange, exchange->json_length, exchange->content_length - exchange->json_length,
                 err);
}

/* Sizes of the JSON part and of what is behind it, of a complete body. */
static enum dkv_status divide(const struct dkv_exchange *exchange, uint64_t *json_bytes_out,
                              uint64_t *binary_bytes_out, struct dkv_error *err)
{
    const uint64_t n_bytes = exchange->body.received_bytes;
    if (exchange->has_json_length && exchange->json_length > n_bytes)
        return dkv_error_set(err, DKV_E_MALFORMED,
                             "Inference-Header-Content-Length: %llu is above the body's %llu bytes",
                             (unsigned long long)exchange->json_length,
                             (unsigned long long)n_bytes);
    *json_bytes_out = exchange->has_json_length ? exchange->json_length : n_bytes;
    *binary_bytes_out = n_bytes - *json_bytes_out;
    return DKV_OK;
}

static void own_body(struct dkv_exchange *exchange)
{
    if (exchange->body.pool == NULL)
        return;
    exchange->job->body = exchange->body;
    exchange->body = (struct dkv_body){0};
}

/* Text takes a multiple of the numbers' size and is made in one piece. */
static enum dkv_status charge_json_outputs(struct dkv_job *job, struct dkv_error *err)
{
    const uint64_t n_numbers = dkv_answer_numbers(job);
    if (n_numbers <= DKV_OIP_JSON_VALUES_MAX)
        return dkv_job_charge(job, n_numbers * JSON_NUMBER_BYTES, err);
    return dkv_error_set(err, DKV_E_TOO_LARGE,
                         "outputs: %llu JSON numbers are above %u, ask for binary_data",
                         (unsigned long long)n_numbers, DKV_OIP_JSON_VALUES_MAX);
}

/* From a parsed head and a received body to a job that is ready to run. */
static enum dkv_status prepare(struct dkv_exchange *exchange, struct dkv_error *err)
{
    struct dkv_job *job = exchange->job;
    struct dkv_oip_memory memory = {0};
    enum dkv_status status;
    void *vectors;

    own_body(exchange);
    const uint64_t json_bytes = exchange->has_json_length ? exchange->json_length
                                                          : job->body.received_bytes;
    memory.binary = job->body.data + json_bytes;
    if (job->infer->side_bytes > 0) {
        status = dkv_job_add_side(job, job->infer->side_bytes, err);
        if (status != DKV_OK)
            return status;
        memory.side = job->side;
    }
    status = dkv_oip_infer_set_model(job->infer, exchange->match.model, err);
    if (status != DKV_OK)
        return status;
    status = dkv_infer_shm_find(exchange, job, &memory, &vectors, err);
    if (status == DKV_OK)
        status = dkv_job_add_blocks(job, job->infer->n_blocks, err);
    if (status == DKV_OK)
        status = dkv_oip_infer_bind(job->infer, &memory, job->blocks, &job->request, err);
    free(vectors);
    if (status == DKV_OK)
        status = dkv_infer_shm_lend(job, err);
    if (status == DKV_OK)
        status = dkv_request_validate(&job->request, job->plans, err);
    if (status == DKV_OK)
        status = dkv_job_prepare(job, REPLY_BYTES_MAX, err);
    if (status == DKV_OK)
        status = dkv_infer_shm_check(exchange, job, err);
    if (status == DKV_OK)
        status = charge_json_outputs(job, err);
    exchange->over_share = dkv_backend_client_holder(exchange->conn->client)->over_share;
    return status;
}

static void refuse_with(struct dkv_exchange *exchange, unsigned http_status,
                        const struct dkv_error *err)
{
    dkv_infer_count_refusal(exchange, err);
    dkv_infer_release(exchange);
    if (!exchange->suspended) {
        dkv_reply_error(exchange, http_status, err->text);
        return;
    }
    exchange->refused_status = http_status;
    exchange->refusal = *err;
    dkv_http_resume(exchange);
}

static void refuse(struct dkv_exchange *exchange, const struct dkv_error *err)
{
    refuse_with(exchange, dkv_infer_http_status(exchange, err->status), err);
}

/* The backend gives the job back. */
static void on_done(struct dkv_job *job, void *owner)
{
    struct dkv_exchange *exchange = owner;
    exchange->away = NULL;
    if (dkv_infer_shm_bytes(job) == 0) /* else the regions that the answer goes to are needed */
        dkv_job_release_inputs(job);
    dkv_metrics_batch(&exchange->server->metrics, job);
    if (job->status == DKV_OK && dkv_answer_begin(exchange, job))
        return;
    dkv_job_release_inputs(job);
    exchange->job = job;
    dkv_http_resume(exchange);
}

/* A job that ends after its peer has left or was answered: only its memory is of interest. */
static void on_done_orphan(struct dkv_job *job, void *owner)
{
    struct dkv_server *server = owner;
    dkv_metrics_batch(&server->metrics, job);
    dkv_job_free(job);
}

/* The backend keeps it, and nobody waits for it. */
static void leave_to_backend(struct dkv_job *job, struct dkv_server *server)
{
    job->done = on_done_orphan;
    job->overdue = NULL;
    job->owner = server;
}

static void on_overdue(struct dkv_job *job, void *owner, const struct dkv_error *why)
{
    struct dkv_exchange *exchange = owner;
    leave_to_backend(job, exchange->server);
    refuse(exchange, why); /* which counts the job it had away */
    exchange->away = NULL;
}

static void submit(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    struct dkv_backend_refusal refusal = {.http_status = 503};
    struct dkv_job *job = exchange->job;
    struct dkv_backend_client *client = dkv_infer_client(exchange);
    job->done = on_done;
    job->overdue = on_overdue;
    job->owner = exchange;
    enum dkv_status status = client == NULL ? dkv_error_set(&err, DKV_E_NOMEM, "out of memory")
                                            : dkv_backend_submit(exchange->server->backend, client,
                                                                 job, &refusal, &err);
    if (status != DKV_OK) {
        exchange->retry_us = refusal.retry_us;
        refuse_with(exchange, refusal.http_status, &err);
        return;
    }
    exchange->job = NULL;
    exchange->away = job;
    if (!exchange->suspended)
        dkv_http_suspend(exchange);
}

/* From a read JSON part on. */
static void go_on(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    if (prepare(exchange, &err) == DKV_OK)
        submit(exchange);
    else
        refuse(exchange, &err);
}

/* A JSON part that is read as an errand, with its body and its job. */
struct reading {
    struct dkv_errand errand;
    const struct dkv_server *server;
    struct dkv_job *job;
    uint64_t json_bytes, binary_bytes;
    uint64_t deadline_ns; /* of the request, as far as is known without reading it */
    enum dkv_status status;
    struct dkv_error error;
};

/* Pool thread. */
static void read_long(struct dkv_errand *errand)
{
    struct reading *reading = (struct reading *)errand;
    struct dkv_job *job = reading->job;
    struct dkv_error *err = &reading->error;
    if (dkv_clock_ns() > reading->deadline_ns) {
        reading->status = dkv_error_set(err, DKV_E_TIMEOUT,
                                        "the deadline passed before the work started");
        return;
    }
    reading->status = read_json(reading->server, job, job->body.data, reading->json_bytes,
                                reading->binary_bytes, err);
    if (reading->status == DKV_OK)
        reading->status = dkv_oip_infer_settle(job->infer, err);
    dkv_errand_tidy(); /* the parser's tree is gone */
}

static void on_read(struct dkv_errand *errand, struct dkv_exchange *exchange)
{
    struct reading *reading = (struct reading *)errand;
    if (exchange == NULL) {
        dkv_job_free(reading->job);
    } else {
        exchange->job = reading->job;
        if (reading->status == DKV_OK)
            go_on(exchange);
        else
            refuse(exchange, &reading->error);
    }
    free(reading);
}

static enum dkv_status start_reading(struct dkv_exchange *exchange, uint64_t json_bytes,
                                     uint64_t binary_bytes, struct dkv_error *err)
{
    struct dkv_server *server = exchange->server;
    struct reading *reading = calloc(1, sizeof(*reading));
    exchange->job = new_job(exchange);
    if (reading == NULL || exchange->job == NULL) {
        free(reading);
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    }
    own_body(exchange);
    reading->server = server;
    reading->job = exchange->job;
    reading->json_bytes = json_bytes;
    reading->binary_bytes = binary_bytes;
    reading->deadline_ns = dkv_clock_ns() + server->config->request_timeout_ms * 1000000u;
    exchange->job = NULL;
    exchange->parsed = true;
    dkv_http_suspend(exchange);
    dkv_errand_start(&reading->errand, server->loop, exchange, read_long, on_read);
    return DKV_OK;
}

void dkv_handle_infer(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    uint64_t json_bytes = 0, binary_bytes = 0;
    enum dkv_status status = DKV_OK;
    if (!exchange->parsed) {
        status = divide(exchange, &json_bytes, &binary_bytes, &err);
        if (status == DKV_OK && json_bytes > LONG_JSON_BYTES)
            status = start_reading(exchange, json_bytes, binary_bytes, &err);
        else if (status == DKV_OK)
            status = parse(exchange, json_bytes, binary_bytes, &err);
    }
    if (status != DKV_OK)
        refuse(exchange, &err);
    else if (exchange->errand == NULL)
        go_on(exchange);
}

void dkv_infer_finish(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    enum dkv_status status;
    if (exchange->answer != NULL)
        status = dkv_answer_send(exchange, &err);
    else if (exchange->job->status == DKV_OK)
        status = dkv_error_set(&err, DKV_E_NOMEM, "out of memory");
    else {
        err = exchange->job->error;
        status = err.status;
    }
    if (status != DKV_OK)
        refuse(exchange, &err);
}

void dkv_infer_gone(struct dkv_exchange *exchange)
{
    struct dkv_job *job = exchange->away;
    exchange->gone = true;
    dkv_infer_count_gone(exchange);
    exchange->away = NULL;
    dkv_infer_leave(exchange);
    dkv_errand_abandon(exchange->errand);
    if (job != NULL) {
        leave_to_backend(job, exchange->server);
        dkv_backend_cancel(exchange->server->backend, job);
    }
    dkv_http_resume(exchange);
}
