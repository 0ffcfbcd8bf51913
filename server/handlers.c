/* Handlers that answer from what the server knows: health, metadata, statistics, metrics. */
#include "server/handlers.h"

#include "server/exchange.h"
#include "server/page.h"
#include "server/stats.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JSON "application/json"

/* The engine in use may be another one than at start: a worker can be replaced. */
static void refresh_engine(struct dkv_server *server, struct dkv_backend_info *info_out)
{
    dkv_backend_info(server->backend, info_out);
    server->engine_info = info_out->engine;
    snprintf(server->metrics.backend, sizeof(server->metrics.backend), "%s",
             info_out->engine.backend);
}

static bool is_ready(const struct dkv_server *server)
{
    return !server->leaving && dkv_backend_ready(server->backend);
}

/* True if the path names our model; answers 404 otherwise. */
static bool names_model(struct dkv_exchange *exchange, enum dkv_policy *policy_out)
{
    const struct dkv_route_match *match = &exchange->match;
    const bool known = dkv_oip_find_model(match->model, policy_out);
    if (known && (*match->version == '\0' || strcmp(match->version, DKV_OIP_MODEL_VERSION) == 0))
        return true;
    dkv_reply_error(exchange, 404,
                    known ? "Request for unknown model version: 'dropkv' has version 1"
                          : "Request for unknown model: 'dropkv' and the names of its policies are "
                            "found here");
    return false;
}

static void reply_document(struct dkv_exchange *exchange, enum dkv_status status,
                           struct dkv_oip_text *text)
{
    if (status != DKV_OK) {
        dkv_reply_error(exchange, dkv_status_info(status)->http_status,
                        dkv_status_info(status)->text);
        return;
    }
    dkv_reply_bytes(exchange, 200, JSON, text->bytes, text->n_bytes);
}

static void reply_literal(struct dkv_exchange *exchange, unsigned http_status, const char *json)
{
    char *copy = strdup(json);
    if (copy == NULL)
        dkv_reply_error(exchange, 503, "out of memory");
    else
        dkv_reply_bytes(exchange, http_status, JSON, copy, strlen(copy));
}

void dkv_handle_server(struct dkv_exchange *exchange)
{
    struct dkv_oip_text text = {0};
    struct dkv_backend_info backend;
    refresh_engine(exchange->server, &backend);
    reply_document(exchange, dkv_oip_server_metadata(&exchange->server->facts, &text), &text);
}

void dkv_handle_live(struct dkv_exchange *exchange)
{
    dkv_reply_empty(exchange, 200);
}

void dkv_handle_ready(struct dkv_exchange *exchange)
{
    dkv_reply_empty(exchange, is_ready(exchange->server) ? 200 : 400);
}

void dkv_handle_model(struct dkv_exchange *exchange)
{
    struct dkv_oip_text text = {0};
    struct dkv_oip_facts facts = exchange->server->facts;
    if (names_model(exchange, &facts.policy))
        reply_document(exchange, dkv_oip_model_metadata(&facts, &text), &text);
}

void dkv_handle_model_ready(struct dkv_exchange *exchange)
{
    enum dkv_policy policy;
    if (!names_model(exchange, &policy))
        return;
    if (!is_ready(exchange->server))
        dkv_reply_error(exchange, 400, "Model version not ready");
    else
        dkv_reply_empty(exchange, 200);
}

void dkv_handle_config(struct dkv_exchange *exchange)
{
    struct dkv_oip_text text = {0};
    struct dkv_oip_facts facts = exchange->server->facts;
    if (names_model(exchange, &facts.policy))
        reply_document(exchange, dkv_oip_model_config(&facts, &text), &text);
}

void dkv_handle_stats_all(struct dkv_exchange *exchange)
{
    struct dkv_server *server = exchange->server;
    struct dkv_oip_text text = {0};
    struct dkv_backend_info info;
    refresh_engine(server, &info);
    reply_document(exchange, dkv_stats_text(server, &info, is_ready(server), &text), &text);
}

void dkv_handle_stats(struct dkv_exchange *exchange)
{
    enum dkv_policy policy;
    if (names_model(exchange, &policy))
        dkv_handle_stats_all(exchange);
}

void dkv_handle_index(struct dkv_exchange *exchange)
{
    const bool ready = is_ready(exchange->server);
    const char *reason = exchange->server->leaving ? "shutting down"
                         : ready                   ? ""
                                                   : "no device answers";
    char text[DKV_POLICY_COUNT * 128] = "[";
    size_t n = 1;
    for (unsigned i = 0; i < DKV_POLICY_COUNT; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n,
                              "%s{\"name\":\"%s\",\"version\":\"1\",\"state\":\"%s\","
                              "\"reason\":\"%s\"}",
                              i > 0 ? "," : "", dkv_policy_name((enum dkv_policy)i),
                              ready ? "READY" : "UNAVAILABLE", reason);
    snprintf(text + n, sizeof(text) - n, "]");
    reply_literal(exchange, 200, text);
}

void dkv_handle_page(struct dkv_exchange *exchange)
{
    static const char *const fields[][2] = {
        {MHD_HTTP_HEADER_CONTENT_TYPE, "text/html; charset=utf-8"},
        {"Content-Security-Policy", dkv_page_policy},
        {"X-Content-Type-Options", "nosniff"},
        {"Referrer-Policy", "no-referrer"},
        {"Cross-Origin-Opener-Policy", "same-origin"},
        {"Cross-Origin-Resource-Policy", "same-origin"},
        {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"},
    };
    struct MHD_Response *response = MHD_create_response_from_buffer(
        dkv_page_bytes, (void *)(uintptr_t)dkv_page, MHD_RESPMEM_PERSISTENT);
    for (unsigned i = 0; response != NULL && i < sizeof(fields) / sizeof(fields[0]); i++)
        MHD_add_response_header(response, fields[i][0], fields[i][1]);
    dkv_reply_response(exchange, 200, response, dkv_page_bytes);
}

void dkv_handle_metrics(struct dkv_exchange *exchange)
{
    struct dkv_server *server = exchange->server;
    struct dkv_backend_info backend;
    char *text = NULL;
    size_t n_bytes = 0;
    refresh_engine(server, &backend);
    const struct dkv_gauges gauges = {
        .queue = &backend.queue,
        .n_levels = backend.n_levels,
        .workers = backend.workers,
        .n_workers = backend.n_devices,
        .regions = backend.n_loans,
        .region_bytes = backend.loan_bytes,
        .queue_requests = backend.n_queued,
        .running_requests = backend.n_running,
        .body_bytes = server->bodies.quota.charged_bytes,
        .body_limit_bytes = server->bodies.quota.limit_bytes,
        .queue_limit_requests = backend.max_queue_requests,
        .scratch_bytes = backend.engine.scratch_bytes,
        .streams = server->streams.n,
        .streams_evicted = server->streams.n_evicted,
        .log_held_back = dkv_log_n_held_back(),
        .log_lost = dkv_log_n_lost(),
        .spans = server->traces.n_spans,
        .spans_lost = server->traces.n_lost,
        .ready = is_ready(server),
        .draining = server->leaving,
    };
    FILE *out = open_memstream(&text, &n_bytes);
    if (out != NULL) {
        dkv_metrics_write(&server->metrics, &gauges, server->config->nv_metrics, out);
        fclose(out);
    }
    if (text == NULL)
        dkv_reply_error(exchange, 503, "out of memory");
    else
        dkv_reply_bytes(exchange, 200, "text/plain; version=0.0.4; charset=utf-8", text, n_bytes);
}
