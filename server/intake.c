/* What may come in, and how.
 *
 * The HTTP library takes a response in its first call, which refuses the body and closes the
 * connection, or in its last; in between only the socket itself is left (dkv_conn_abort). So a
 * refusal is answered at once if the body is large or cannot be delimited, and otherwise after a
 * small body has been read over, which keeps the connection usable.
 */
#include "server/intake.h"

#include "server/clock.h"
#include "server/infer.h"

#include <string.h>

#define SWALLOW_BYTES    (UINT64_C(1) << 20) /* refused bodies up to this are read over */
#define SMALL_BODY_BYTES 65536u              /* bodies of everything but inference */

/* libmicrohttpd before 1.0 takes a bare LF for a line's end and offers no setting against it. */
#define LIBRARY_TAKES_BARE_LF (MHD_VERSION < 0x00097701)

/* ---- a request's header ---- */

static enum MHD_Result add_field(void *cls, enum MHD_ValueKind kind, const char *name,
                                 size_t name_bytes, const char *value, size_t value_bytes)
{
    struct dkv_http_head *head = cls;
    (void)kind;
    if (head->n_fields < DKV_HTTP_FIELDS_MAX)
        head->fields[head->n_fields] = (struct dkv_http_field){
            name, name_bytes, value != NULL ? value : "", value != NULL ? value_bytes : 0};
    head->n_fields++;
    return MHD_YES;
}

static void refuse(struct dkv_exchange *exchange, unsigned http_status, enum dkv_status status,
                   const char *text)
{
    exchange->refused_status = http_status;
    dkv_error_set(&exchange->refusal, status, "%s", text);
}

/* Who is asking: by a bearer token, or on the status page's routes, which change nothing, by a
 * password, since a browser can send no other. NULL if by neither. */
static const char *client_of(struct dkv_exchange *exchange, const struct dkv_http_head *head,
                             bool page)
{
    const struct dkv_auth *auth = &exchange->server->auth;
    const char *client = dkv_auth_check(auth, head->authorization);
    char *name = NULL, *password = NULL;
    if (client == NULL && page)
        name = MHD_basic_auth_get_username_password(exchange->mhd, &password);
    if (password != NULL) {
        client = dkv_auth_check_token(auth, password, strlen(password));
        explicit_bzero(password, strlen(password));
    }
    MHD_free(name);
    MHD_free(password);
    return client;
}

/* Where the header ends that begins with its method, if its lines have to be looked at. */
static const char *end_of_header(struct MHD_Connection *mhd, const char *method)
{
    const union MHD_ConnectionInfo *info = NULL;
    if (LIBRARY_TAKES_BARE_LF)
        info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    return info != NULL ? method + info->header_size : NULL;
}

/* What the guard, the route table and the tokens say; sets refused_status if it may not go on. */
static void judge_header(struct dkv_exchange *exchange, const struct dkv_http_rules *rules,
                         const char *method, const char *path, const char *version)
{
    struct dkv_server *server = exchange->server;
    struct dkv_http_head head = {.method = method,
                                 .target = path,
                                 .version = version,
                                 .end = end_of_header(exchange->mhd, method)};
    MHD_get_connection_values_n(exchange->mhd, MHD_HEADER_KIND, add_field, &head);
    struct dkv_http_verdict verdict = dkv_http_guard(&head, rules);
    if (verdict.http_status != 0) {
        server->metrics.refusals[verdict.reason]++;
        exchange->close_after = true;
        refuse(exchange, verdict.http_status, DKV_E_MALFORMED, verdict.text);
        dkv_log_limited(&server->client_log, DKV_LOG_INFO, "refused a request: %s", verdict.text);
        return;
    }
    exchange->has_length = head.has_length;
    exchange->content_length = head.content_length;
    exchange->has_json_length = head.has_json_length;
    exchange->json_length = head.json_length;
    if (head.traceparent != NULL)
        dkv_trace_parse(head.traceparent, &exchange->trace);
    /* How a chunked body is delimited is where readers differ most: nothing is read behind one. */
    exchange->close_after = head.chunked;

    enum dkv_route_result found = dkv_route_find(method, path, &exchange->match, &exchange->allow);
    const bool open = found == DKV_ROUTE_FOUND && exchange->match.route->open;
    const bool page = found == DKV_ROUTE_FOUND && exchange->match.route->page;
    const char *client = open ? "" : client_of(exchange, &head, page);
    if (client == NULL) {
        server->metrics.refusals[DKV_REFUSAL_AUTH]++;
        refuse(exchange, 401, DKV_E_DENIED, "a valid bearer token is needed");
    } else if (found == DKV_ROUTE_NONE) {
        refuse(exchange, 404, DKV_E_NOT_FOUND, "Not Found");
    } else if (found == DKV_ROUTE_WRONG_METHOD) {
        refuse(exchange, 405, DKV_E_INVALID, "Method Not Allowed");
    } else if (server->auth.required) {
        snprintf(exchange->client_name, sizeof(exchange->client_name), "%s", client);
    }
}

/* Room for the body of an accepted request, reserved before its first byte is read. */
static enum dkv_status reserve(struct dkv_exchange *exchange, struct dkv_error *err)
{
    const struct dkv_config *config = exchange->server->config;
    const bool tensor = exchange->match.route->tensor;
    uint64_t limit = SMALL_BODY_BYTES;
    const char *what = "body";
    if (tensor && exchange->has_json_length) {
        limit = exchange->server->max_body_bytes;
    } else if (tensor) {
        limit = config->max_json_bytes;
        what = "body without Inference-Header-Content-Length";
    }
    if (exchange->has_json_length && exchange->json_length > DKV_OIP_HEAD_BYTES_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "Inference-Header-Content-Length: %llu is above %u",
                             (unsigned long long)exchange->json_length, DKV_OIP_HEAD_BYTES_MAX);
    if (exchange->has_length && exchange->content_length > limit)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "%s: %llu bytes are above %llu", what,
                             (unsigned long long)exchange->content_length,
                             (unsigned long long)limit);
    const uint64_t capacity = exchange->has_length ? exchange->content_length : limit;
    const uint64_t head = exchange->has_json_length ? exchange->json_length : 0;
    struct dkv_backend_client *client = tensor ? dkv_infer_client(exchange) : NULL;
    if (tensor && client == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    struct dkv_quota_holder *holder = tensor ? dkv_backend_client_holder(client) : NULL;
    const enum dkv_status status = dkv_body_reserve(
        &exchange->body, &exchange->server->bodies, holder, capacity,
        head <= capacity ? head : capacity, exchange->has_length, err);
    exchange->over_share = holder != NULL && holder->over_share;
    return status;
}

static void admit(struct dkv_exchange *exchange)
{
    struct dkv_error err = {0};
    enum dkv_status status = DKV_OK;
    const bool is_post = exchange->match.route->method == DKV_ROUTE_POST;
    if (exchange->match.route->tensor)
        status = dkv_infer_admit(exchange, &err);
    if (status == DKV_OK && is_post)
        status = reserve(exchange, &err);
    if (status == DKV_OK)
        return;
    if (status == DKV_E_TOO_LARGE)
        exchange->server->metrics.refusals[DKV_REFUSAL_SIZE]++;
    if (exchange->match.route->tensor)
        dkv_infer_count_refusal(exchange, &err);
    dkv_infer_release(exchange);
    dkv_infer_leave(exchange);
    refuse(exchange, dkv_infer_http_status(exchange, status), status, err.text);
}

bool dkv_intake_begin(struct dkv_exchange *exchange, const struct dkv_http_rules *rules,
                      const char *method, const char *path, const char *version)
{
    judge_header(exchange, rules, method, path, version);
    if (exchange->refused_status == 0)
        admit(exchange);
    dkv_conn_enter(exchange->conn, DKV_CONN_BODY, dkv_clock_ms());
    const bool read_over = exchange->content_length <= SWALLOW_BYTES;
    if (exchange->refused_status != 0 && (exchange->close_after || !read_over)) {
        exchange->close_after = true;
        exchange->conn->linger = true;
        dkv_reply_error(exchange, exchange->refused_status, exchange->refusal.text);
        return !exchange->gone;
    }
    return true;
}

/* ---- its body ---- */

/* Something is wrong while the body still comes. */
static bool give_up_body(struct dkv_exchange *exchange, const struct dkv_error *err)
{
    const uint64_t left = exchange->content_length - exchange->received_bytes;
    if (exchange->match.route->tensor)
        dkv_infer_count_refusal(exchange, err);
    dkv_infer_release(exchange);
    dkv_infer_leave(exchange);
    const unsigned http_status = dkv_infer_http_status(exchange, err->status);
    if (exchange->has_length && left <= SWALLOW_BYTES) {
        refuse(exchange, http_status, err->status, err->text);
        return true;
    }
    exchange->conn->linger = true;
    dkv_conn_abort(exchange->conn, http_status, err->text);
    return false;
}

bool dkv_intake_receive(struct dkv_exchange *exchange, const char *bytes, size_t n_bytes)
{
    struct dkv_error err = {0};
    enum dkv_status status = DKV_OK;
    exchange->conn->body_bytes += n_bytes;
    exchange->received_bytes += n_bytes;
    exchange->server->metrics.bytes_in[DKV_TRANSPORT_HTTP] += n_bytes;
    if (exchange->refused_status != 0)
        return true; /* read over */
    status = dkv_body_append(&exchange->body, bytes, n_bytes, &err);
    exchange->over_share = exchange->body.charge.holder != NULL &&
                           exchange->body.charge.holder->over_share;
    if (status == DKV_OK && exchange->match.route->tensor)
        status = dkv_infer_progress(exchange, &err);
    return status == DKV_OK || give_up_body(exchange, &err);
}

bool dkv_intake_finish(struct dkv_exchange *exchange)
{
    if (exchange->refused_status != 0)
        dkv_reply_error(exchange, exchange->refused_status, exchange->refusal.text);
    else if (exchange->gone)
        return false;
    else if (exchange->submitted && exchange->resumed != NULL)
        exchange->resumed(exchange);
    else if (exchange->submitted)
        dkv_infer_finish(exchange);
    else
        exchange->match.route->handler(exchange);
    return !exchange->gone;
}
