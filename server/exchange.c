/* Replies. Each ends in dkv_reply_response(), the one place that queues, counts and starts the time
 * that a client may take to read. */
#include "server/exchange.h"

#include "server/clock.h"
#include "server/handlers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Retry-After counts whole seconds; less than one is 1. */
static void add_retry_after(struct dkv_exchange *exchange, struct MHD_Response *response)
{
    char seconds[24];
    const uint64_t whole = (exchange->retry_us + 999999) / 1000000;
    snprintf(seconds, sizeof(seconds), "%llu", (unsigned long long)(whole > 0 ? whole : 1));
    MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, seconds);
}

void dkv_reply_response(struct dkv_exchange *exchange, unsigned http_status,
                        struct MHD_Response *response, uint64_t n_bytes)
{
    struct dkv_server *server = exchange->server;
    exchange->replied = true;
    if (response == NULL) {
        exchange->gone = true; /* out of memory: the connection is closed instead */
        return;
    }
    if (exchange->close_after || server->leaving)
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    if (MHD_queue_response(exchange->mhd, http_status, response) != MHD_YES)
        exchange->gone = true;
    MHD_destroy_response(response);
    server->metrics.responses[http_status / 100 - 1]++;
    exchange->conn->reply_bytes = n_bytes;
    dkv_conn_enter(exchange->conn, DKV_CONN_REPLY, dkv_clock_ms());
}

/* A person who opens the page is asked for a password; what programs ask for is not, so that a
 * token that is no longer good does not open a dialogue under somebody's hands. */
static const char *challenge(const struct dkv_exchange *exchange)
{
    const struct dkv_route *route = exchange->match.route;
    return route != NULL && route->handler == dkv_handle_page
               ? "Basic realm=\"dropkvd: any name, a token as password\", charset=\"UTF-8\""
               : "Bearer";
}

void dkv_reply_error(struct dkv_exchange *exchange, unsigned http_status, const char *text)
{
    char body[DKV_OIP_ERROR_BYTES];
    size_t n_bytes = dkv_oip_error_encode(text, body);
    struct MHD_Response *response = MHD_create_response_from_buffer(n_bytes, body,
                                                                    MHD_RESPMEM_MUST_COPY);
    if (response != NULL) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "application/json");
        if (http_status == 503 || http_status == 429)
            add_retry_after(exchange, response);
        if (http_status == 401)
            MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE,
                                    challenge(exchange));
        if (http_status == 405 && exchange->allow != NULL)
            MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, exchange->allow);
    }
    dkv_reply_response(exchange, http_status, response, n_bytes);
}

void dkv_reply_empty(struct dkv_exchange *exchange, unsigned http_status)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(0, NULL,
                                                                    MHD_RESPMEM_PERSISTENT);
    dkv_reply_response(exchange, http_status, response, 0);
}

void dkv_reply_bytes(struct dkv_exchange *exchange, unsigned http_status, const char *content_type,
                     char *bytes, size_t n_bytes)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(n_bytes, bytes,
                                                                    MHD_RESPMEM_MUST_FREE);
    if (response == NULL)
        free(bytes);
    else
        MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
    dkv_reply_response(exchange, http_status, response, n_bytes);
}
