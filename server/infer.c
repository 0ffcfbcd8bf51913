/* The one path of an inference request:
 *
 *   header   admit: our model? draining? queue full? -> 404, 503 before the body is sent
 *   body     progress: JSON part complete -> parse  -> 400 before the tensors are sent
 *   end      bind, gate, outputs allocated, queued; the connection is suspended
 *   job done resume; reply encoded over the job's outputs, which are sent in place
 *
 * The job is made when the JSON part has been read and owns the body from the end of its reception
 * on. Every request is counted with exactly one outcome: in refuse() for those that never became a
 * queued job, in finish() or gone() for the others.
 */
#include "server/infer.h"

#include "server/clock.h"
#include "server/handlers.h"
#include "server/http.h"

#include <stdlib.h>
#include <string.h>

#define REPLY_BYTES_MAX (UINT64_C(1) << 31)

void dkv_infer_count_refusal(struct dkv_exchange *exchange, enum dkv_status status)
{
    const struct dkv_timing timing = {.total_ns = dkv_clock_ns() - exchange->started_ns};
    dkv_metrics_request(&exchange->server->metrics, dkv_outcome_of(status), &timing);
}

void dkv_infer_release(struct dkv_exchange *exchange)
{
    dkv_body_release(&exchange->body);
    dkv_job_free(exchange->job);
    exchange->job = NULL;
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
    if (strcmp(match->model, DKV_OIP_MODEL) != 0)
        return dkv_error_set(err, DKV_E_NOT_FOUND,
                             "Request for unknown model: only 'dropkv' is found here");
    if (*match->version != '\0' && strcmp(match->version, DKV_OIP_MODEL_VERSION) != 0)
        return dkv_error_set(err, DKV_E_NOT_FOUND,
                             "Request for unknown model version: 'dropkv' has version 1");
    if (server->draining)
        return dkv_error_set(err, DKV_E_DRAINING, "the server is shutting down");
    if (server->n_accepted >= server->config->max_queue_requests)
        return dkv_error_set(err, DKV_E_BUSY, "%llu requests are waiting already",
                             (unsigned long long)server->config->max_queue_requests);
    if (!dkv_backend_ready(server->backend))
        return dkv_error_set(err, DKV_E_BUSY, "no device answers now; its worker is restarting");
    server->n_accepted++;
    exchange->accepted = true;
    return DKV_OK;
}

/* Reads the JSON part, with `binary_bytes` expected behind it. */
static enum dkv_status parse(struct dkv_exchange *exchange, uint64_t json_bytes,
                             uint64_t binary_bytes, struct dkv_error *err)
{
    exchange->parsed = true;
    exchange->job = dkv_job_new(&exchange->server->arena);
    if (exchange->job == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    enum dkv_status status = dkv_oip_infer_parse((const char *)exchange->body.data,
                                                 (size_t)json_bytes, binary_bytes,
                                                 &exchange->job->infer, err);
    if (status == DKV_OK && exchange->job->infer.uses_shm)
        status = dkv_error_set(err, DKV_E_DENIED,
                               "shared memory of HTTP clients is not accepted: send tensors in the "
                               "body");
    return status;
}

enum dkv_status dkv_infer_progress(struct dkv_exchange *exchange, struct dkv_error *err)
{
    const bool early = exchange->has_json_length && exchange->has_length;
    if (exchange->parsed || !early || exchange->body.received_bytes < exchange->json_length)
        return DKV_OK;
    return parse(exchange, exchange->json_length, exchange->content_length - exchange->json_length,
                 err);
}

static enum dkv_status parse_complete_body(struct dkv_exchange *exchange, struct dkv_error *err)
{
    const uint64_t n_bytes = exchange->body.received_bytes;
    if (exchange->parsed)
        return DKV_OK;
    if (exchange->has_json_length && exchange->json_length > n_bytes)
        return dkv_error_set(err, DKV_E_MALFORMED,
                             "Inference-Header-Content-Length: %llu is above the body's %llu bytes",
                             (unsigned long long)exchange->json_length,
                             (unsigned long long)n_bytes);
    const uint64_t json_bytes = exchange->has_json_length ? exchange->json_length : n_bytes;
    return parse(exchange, json_bytes, n_bytes - json_bytes, err);
}

/* From a parsed head and a received body to a job that is ready to run. */
static enum dkv_status prepare(struct dkv_exchange *exchange, struct dkv_error *err)
{
    struct dkv_job *job = exchange->job;
    struct dkv_oip_memory memory = {0};
    const uint64_t json_bytes = exchange->has_json_length ? exchange->json_length
                                                          : exchange->body.received_bytes;

    job->body = exchange->body;
    exchange->body = (struct dkv_body){0};
    memory.binary = job->body.data + json_bytes;
    if (job->infer.side_bytes > 0) {
        if (dkv_job_add_side(job, job->infer.side_bytes, err) != DKV_OK)
            return DKV_E_NOMEM;
        memory.side = job->side;
    }
    enum dkv_status status = dkv_job_add_blocks(job, job->infer.n_blocks, err);
    if (status == DKV_OK)
        status = dkv_oip_infer_bind(&job->infer, &memory, job->blocks, &job->request, err);
    if (status == DKV_OK)
        status = dkv_request_validate(&job->request, job->plans, err);
    if (status == DKV_OK)
        status = dkv_job_prepare(job, REPLY_BYTES_MAX, err);
    return status;
}

static void refuse_with(struct dkv_exchange *exchange, unsigned http_status,
                        const struct dkv_error *err)
{
    dkv_infer_count_refusal(exchange, err->status);
    dkv_infer_release(exchange);
    dkv_reply_error(exchange, http_status, err->text);
}

static void refuse(struct dkv_exchange *exchange, const struct dkv_error *err)
{
    refuse_with(exchange, dkv_status_info(err->status)->http_status, err);
}

/* Who shares the device fairly with others: the holder of a token, over all its connections, or the
 * connection. Kept with the connection, since its next request will be the same one's. */
static struct dkv_backend_client *client_of(struct dkv_exchange *exchange)
{
    struct dkv_conn *conn = exchange->conn;
    const char *name = *exchange->client_name != '\0' ? exchange->client_name : NULL;
    if (conn->client != NULL && dkv_backend_client_is(conn->client, name))
        return conn->client;
    dkv_backend_client_put(conn->client);
    conn->client = dkv_backend_client_get(exchange->server->backend, name);
    return conn->client;
}

static void count_batch(struct dkv_metrics *metrics, const struct dkv_job *job)
{
    if (!job->batch_first)
        return;
    metrics->stats.execution_count++;
    dkv_histogram_add(&metrics->batch_items, job->batch_items);
    dkv_histogram_add(&metrics->batch_tokens, (double)job->batch_tokens);
    dkv_histogram_add(&metrics->batch_bytes, (double)job->batch_bytes);
}

/* The backend gives the job back. */
static void on_done(struct dkv_job *job, void *owner)
{
    struct dkv_exchange *exchange = owner;
    exchange->away = NULL;
    exchange->job = job;
    dkv_job_release_inputs(job);
    count_batch(&exchange->server->metrics, job);
    dkv_http_resume(exchange);
}

static void submit(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    struct dkv_backend_refusal refusal = {.http_status = 503};
    struct dkv_job *job = exchange->job;
    struct dkv_backend_client *client = client_of(exchange);
    job->done = on_done;
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
    dkv_http_suspend(exchange);
}

void dkv_handle_infer(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    enum dkv_status status = parse_complete_body(exchange, &err);
    if (status == DKV_OK)
        status = prepare(exchange, &err);
    if (status == DKV_OK)
        submit(exchange);
    else
        refuse(exchange, &err);
}

struct outgoing {
    struct dkv_oip_reply reply;
    struct dkv_job *job; /* owns what the reply's segments point at */
};

static void free_outgoing(void *argument)
{
    struct outgoing *outgoing = argument;
    dkv_oip_reply_fini(&outgoing->reply);
    dkv_job_free(outgoing->job);
    free(outgoing);
}

/* A response over the reply's own memory: nothing is copied. Takes `outgoing`, also on failure. */
static struct MHD_Response *response_over(struct outgoing *outgoing)
{
    const struct dkv_oip_reply *reply = &outgoing->reply;
    struct MHD_IoVec parts[1 + DKV_OIP_OUTPUTS];
    unsigned n_parts = 0;
    parts[n_parts++] = (struct MHD_IoVec){reply->head.bytes, reply->head.n_bytes};
    for (unsigned i = 0; i < reply->n_segments; i++)
        if (reply->segments[i].n_bytes > 0)
            parts[n_parts++] = (struct MHD_IoVec){reply->segments[i].bytes,
                                                  (size_t)reply->segments[i].n_bytes};
    struct MHD_Response *response = MHD_create_response_from_iovec(parts, n_parts, free_outgoing,
                                                                   outgoing);
    if (response == NULL) {
        free_outgoing(outgoing);
        return NULL;
    }
    char length[24];
    snprintf(length, sizeof(length), "%zu", reply->head.n_bytes);
    if (reply->binary_bytes > 0)
        MHD_add_response_header(response, DKV_OIP_HEADER, length);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE,
                            reply->binary_bytes > 0 ? "application/octet-stream"
                                                    : "application/json");
    return response;
}

static void count_answer(struct dkv_exchange *exchange, const struct dkv_job *job,
                         uint64_t output_ns)
{
    struct dkv_metrics *metrics = &exchange->server->metrics;
    const struct dkv_timing timing = {
        .total_ns = dkv_clock_ns() - exchange->started_ns,
        .queue_ns = job->started_ns - job->queued_ns,
        .input_ns = job->queued_ns - exchange->started_ns,
        .compute_ns = job->finished_ns - job->started_ns,
        .output_ns = output_ns,
    };
    metrics->stats.inference_count += job->request.n_blocks;
    metrics->degraded += job->degraded;
    metrics->tokens_in += job->n_scored_tokens;
    metrics->tokens_kept += job->n_keep;
    dkv_metrics_request(metrics, DKV_OUTCOME_OK, &timing);
}

static enum dkv_status encode(struct dkv_exchange *exchange, struct outgoing *outgoing,
                              struct dkv_error *err)
{
    const struct dkv_job *job = outgoing->job;
    const struct dkv_oip_result result = {
        .n_blocks = job->request.n_blocks,
        .kv_heads = job->kv_heads,
        .keep_tokens = job->keep_tokens,
        .n_tokens = job->n_tokens,
        .keep = job->keep,
        .scores = job->scores,
        .backend = job->backend != NULL ? job->backend : exchange->server->facts.backend,
        .window = job->window,
        .degraded = job->degraded,
    };
    return dkv_oip_reply_encode(&job->infer, &result, &outgoing->reply, err);
}

static void reply_answer(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    const uint64_t began_ns = dkv_clock_ns();
    struct outgoing *outgoing = calloc(1, sizeof(*outgoing));
    if (outgoing == NULL) {
        dkv_error_set(&err, DKV_E_NOMEM, "out of memory");
        refuse(exchange, &err);
        return;
    }
    outgoing->job = exchange->job;
    if (encode(exchange, outgoing, &err) != DKV_OK) {
        free(outgoing);
        refuse(exchange, &err);
        return;
    }
    exchange->job = NULL; /* now the reply's */
    count_answer(exchange, outgoing->job, dkv_clock_ns() - began_ns);
    const uint64_t n_bytes = outgoing->reply.head.n_bytes + outgoing->reply.binary_bytes;
    dkv_reply_response(exchange, 200, response_over(outgoing), n_bytes);
}

void dkv_infer_finish(struct dkv_exchange *exchange)
{
    struct dkv_job *job = exchange->job;
    if (job->status == DKV_OK)
        reply_answer(exchange);
    else {
        const struct dkv_error err = job->error;
        refuse(exchange, &err);
    }
}

/* A job that ends after its peer has left: only its memory is of interest. */
static void on_done_orphan(struct dkv_job *job, void *owner)
{
    struct dkv_server *server = owner;
    count_batch(&server->metrics, job);
    dkv_job_free(job);
}

void dkv_infer_gone(struct dkv_exchange *exchange)
{
    struct dkv_job *job = exchange->away;
    exchange->gone = true;
    exchange->away = NULL;
    dkv_infer_count_refusal(exchange, DKV_E_CANCELLED);
    dkv_infer_leave(exchange);
    if (job != NULL) {
        job->done = on_done_orphan;
        job->owner = exchange->server;
        dkv_backend_cancel(exchange->server->backend, job);
    }
    dkv_http_resume(exchange);
}
