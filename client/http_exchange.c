/* The body of a request is never assembled: libcurl asks for the next bytes, and they are copied
 * from the JSON head or, row by row, from the caller's tensors, straight into libcurl's one upload
 * buffer. libcurl may ask to start over (a kept-alive connection turned out to be dead), so the
 * source is a position, not a stream.
 *
 * A reply is received into one buffer whose size is checked against the largest answer that this
 * request can have, before a byte of it is stored.
 */
#include "client/http_exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define UPLOAD_BUFFER_BYTES   (512L * 1024)
#define DOWNLOAD_BUFFER_BYTES (256L * 1024)

/* JSON head of an answer, or the body of an error. */
#define REPLY_SLACK_BYTES UINT64_C(65536)
#define METADATA_BYTES    UINT64_C(1048576)

/* ---- the target ---- */

static bool is_loopback(const char *host)
{
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "[::1]") == 0;
}

static bool part_is_set(CURLU *url, CURLUPart part)
{
    char *text = NULL;
    const bool set = curl_url_get(url, part, &text, 0) == CURLUE_OK;
    curl_free(text);
    return set;
}

static enum dkv_status check_url(const char *endpoint, bool *loopback_out, struct dkv_error *err)
{
    char *host = NULL;
    enum dkv_status status = DKV_OK;
    CURLU *url = curl_url();
    if (url == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a URL");
    if (curl_url_set(url, CURLUPART_URL, endpoint, 0) != CURLUE_OK ||
        curl_url_get(url, CURLUPART_HOST, &host, 0) != CURLUE_OK)
        status = dkv_error_set(err, DKV_E_INVALID, "endpoint is not of the form http://HOST:PORT");
    else if (part_is_set(url, CURLUPART_QUERY) || part_is_set(url, CURLUPART_FRAGMENT))
        status = dkv_error_set(err, DKV_E_INVALID, "endpoint: no '?' or '#' may follow the host");
    else
        *loopback_out = is_loopback(host);
    curl_free(host);
    curl_url_cleanup(url);
    return status;
}

static char *join(const char *base, size_t base_length, const char *path)
{
    char *text = NULL;
    return asprintf(&text, "%.*s%s", (int)base_length, base, path) < 0 ? NULL : text;
}

enum dkv_status dkv_http_target_init(struct dkv_http_target *target_out, const char *endpoint,
                                     const char *token, struct dkv_error *err)
{
    struct dkv_http_target target = {0};
    enum dkv_status status = check_url(endpoint, &target.loopback, err);
    if (status != DKV_OK)
        return status;
    size_t length = strlen(endpoint);
    while (length > 0 && endpoint[length - 1] == '/')
        length--;
    target.infer_url = join(endpoint, length, "/v2/models/" DKV_OIP_MODEL "/infer");
    target.ready_url = join(endpoint, length, "/v2/health/ready");
    target.server_url = join(endpoint, length, "/v2");
    target.model_url = join(endpoint, length, "/v2/models/" DKV_OIP_MODEL);
    if (token != NULL)
        target.authorization = join("Authorization: Bearer ", 22, token);
    if (target.infer_url == NULL || target.ready_url == NULL || target.server_url == NULL ||
        target.model_url == NULL || (token != NULL && target.authorization == NULL)) {
        dkv_http_target_fini(&target);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a URL");
    }
    *target_out = target;
    return DKV_OK;
}

void dkv_http_target_fini(struct dkv_http_target *target)
{
    free(target->infer_url);
    free(target->ready_url);
    free(target->server_url);
    free(target->model_url);
    free(target->authorization);
    *target = (struct dkv_http_target){0};
}

/* ---- receiving ---- */

/* True if `line` is the header `name`; *value_out is its value's first byte. Not terminated. */
static bool is_header(const char *line, size_t n, const char *name, const char **value_out)
{
    const size_t length = strlen(name);
    if (n <= length || strncasecmp(line, name, length) != 0 || line[length] != ':')
        return false;
    *value_out = line + length + 1;
    return true;
}

/* A non-negative decimal number and nothing else; -1 if it is not. */
static int64_t header_number(const char *value, const char *end)
{
    int64_t number = -1;
    while (value < end && (*value == ' ' || *value == '\t'))
        value++;
    for (; value < end && *value >= '0' && *value <= '9'; value++) {
        number = number < 0 ? 0 : number;
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, *value - '0', &number))
            return -1;
    }
    while (value < end && strchr(" \t\r\n", *value) != NULL)
        value++;
    return value == end ? number : -1;
}

static size_t on_header(char *line, size_t size, size_t n, void *context)
{
    struct dkv_http_reply *reply = context;
    const char *value;
    const size_t bytes = size * n;
    if (bytes >= 5 && memcmp(line, "HTTP/", 5) == 0) { /* also after "100 Continue" */
        reply->head_bytes = UINT64_MAX;
        reply->retry_after_s = -1;
    } else if (is_header(line, bytes, DKV_OIP_HEADER, &value)) {
        const int64_t number = header_number(value, line + bytes);
        reply->head_bytes = number < 0 ? UINT64_MAX : (uint64_t)number;
    } else if (is_header(line, bytes, "Retry-After", &value)) {
        reply->retry_after_s = header_number(value, line + bytes);
    } else if (is_header(line, bytes, "Content-Length", &value)) {
        const int64_t number = header_number(value, line + bytes);
        if (number > 0 && (uint64_t)number > reply->limit_bytes)
            reply->too_large = true;
    }
    return reply->too_large ? 0 : bytes;
}

static size_t on_body(char *bytes, size_t size, size_t n, void *context)
{
    struct dkv_http_reply *reply = context;
    const size_t more = size * n;
    if (more > reply->limit_bytes - reply->n_bytes) {
        reply->too_large = true;
        return 0;
    }
    const size_t needed = reply->n_bytes + more + 1;
    if (needed > reply->cap_bytes) {
        const size_t cap = needed < 4096 ? 4096 : needed + needed / 2;
        char *bigger = realloc(reply->bytes, cap);
        if (bigger == NULL)
            return 0;
        reply->bytes = bigger;
        reply->cap_bytes = cap;
    }
    memcpy(reply->bytes + reply->n_bytes, bytes, more);
    reply->n_bytes += more;
    reply->bytes[reply->n_bytes] = '\0';
    return more;
}

/* Ready for the next attempt; the buffer stays. */
static void reply_rewind(struct dkv_http_reply *reply, uint64_t limit_bytes)
{
    reply->n_bytes = 0;
    reply->limit_bytes = limit_bytes;
    reply->too_large = false;
    reply->head_bytes = UINT64_MAX;
    reply->retry_after_s = -1;
}

/* ---- sending ---- */

static size_t on_send(char *to, size_t size, size_t n, void *context)
{
    struct dkv_exchange *ex = context;
    const uint64_t head_bytes = ex->call.head.n_bytes;
    size_t room = size * n;
    size_t done = 0;
    if (ex->sent_bytes < head_bytes) {
        const uint64_t left = head_bytes - ex->sent_bytes;
        done = left < room ? (size_t)left : room;
        memcpy(to, ex->call.head.bytes + ex->sent_bytes, done);
        ex->sent_bytes += done;
        room -= done;
    }
    if (room > 0) {
        const size_t more = dkv_oip_call_read(&ex->call, ex->sent_bytes - head_bytes, to + done,
                                              room);
        ex->sent_bytes += more;
        done += more;
    }
    return done;
}

static int on_seek(void *context, curl_off_t offset, int origin)
{
    struct dkv_exchange *ex = context;
    if (origin != SEEK_SET || offset < 0)
        return CURL_SEEKFUNC_CANTSEEK;
    ex->sent_bytes = (uint64_t)offset;
    return CURL_SEEKFUNC_OK;
}

/* What every handle has in common. */
static void set_common(CURL *easy, const struct dkv_http_target *target,
                       struct dkv_http_reply *reply)
{
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "libdropkv");
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, DOWNLOAD_BUFFER_BYTES);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, reply);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, reply);
    if (target->loopback)
        curl_easy_setopt(easy, CURLOPT_NOPROXY, "*");
}

static bool add_header(struct curl_slist **headers, const char *line)
{
    struct curl_slist *longer = curl_slist_append(*headers, line);
    if (longer == NULL)
        return false;
    *headers = longer;
    return true;
}

static bool make_headers(struct dkv_exchange *ex, const struct dkv_http_target *target)
{
    char head_length[64];
    snprintf(head_length, sizeof(head_length), DKV_OIP_HEADER ": %zu", ex->call.head.n_bytes);
    return add_header(&ex->headers, head_length) &&
           add_header(&ex->headers, "Content-Type: application/octet-stream") &&
           add_header(&ex->headers, "Expect:") && /* a round trip that nobody needs */
           (target->authorization == NULL || add_header(&ex->headers, target->authorization));
}

/* The server's deadline is what is left of ours, so that it does not compute for nobody. */
static void pass_deadline(struct dkv_job *job)
{
    struct dkv_params *params = &job->call.request.params;
    const int64_t left_us = (job->deadline_ns - dkv_now_ns()) / 1000;
    params->timeout = left_us < 1 ? 1 : left_us;
    params->set |= UINT64_C(1) << DKV_PARAM_TIMEOUT;
}

static uint64_t largest_answer(const struct dkv_call *call)
{
    const struct dkv_block *block = &call->blocks[0];
    const uint64_t per_head = block->n_tokens * (sizeof(int32_t) + sizeof(float));
    return (uint64_t)call->request.n_blocks * block->kv_heads * per_head + REPLY_SLACK_BYTES;
}

enum dkv_status dkv_exchange_prepare(struct dkv_exchange *ex, const struct dkv_http_target *target,
                                     struct dkv_error *err)
{
    struct dkv_job *job = ex->job;
    pass_deadline(job);
    enum dkv_status status = dkv_oip_call_encode(&job->call.request, NULL, &ex->call, err);
    if (status != DKV_OK)
        return status;
    if (ex->easy == NULL)
        ex->easy = curl_easy_init();
    if (ex->easy == NULL || !make_headers(ex, target))
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    ex->sent_bytes = 0;
    ex->n_attempts++;
    reply_rewind(&ex->reply, largest_answer(&job->call));
    set_common(ex->easy, target, &ex->reply);
    curl_easy_setopt(ex->easy, CURLOPT_URL, target->infer_url);
    curl_easy_setopt(ex->easy, CURLOPT_POST, 1L);
    curl_easy_setopt(ex->easy, CURLOPT_POSTFIELDSIZE_LARGE,
                     (curl_off_t)(ex->call.head.n_bytes + ex->call.binary_bytes));
    curl_easy_setopt(ex->easy, CURLOPT_UPLOAD_BUFFERSIZE, UPLOAD_BUFFER_BYTES);
    curl_easy_setopt(ex->easy, CURLOPT_READFUNCTION, on_send);
    curl_easy_setopt(ex->easy, CURLOPT_READDATA, ex);
    curl_easy_setopt(ex->easy, CURLOPT_SEEKFUNCTION, on_seek);
    curl_easy_setopt(ex->easy, CURLOPT_SEEKDATA, ex);
    curl_easy_setopt(ex->easy, CURLOPT_HTTPHEADER, ex->headers);
    curl_easy_setopt(ex->easy, CURLOPT_PRIVATE, ex);
    return DKV_OK;
}

void dkv_exchange_reset(struct dkv_exchange *ex)
{
    if (ex->easy != NULL)
        curl_easy_reset(ex->easy);
    curl_slist_free_all(ex->headers);
    ex->headers = NULL;
    dkv_oip_call_fini(&ex->call);
    ex->call = (struct dkv_oip_call){0};
    free(ex->reply.bytes);
    ex->reply = (struct dkv_http_reply){0};
}

/* ---- GET ---- */

static long milliseconds_left(int64_t deadline_ns)
{
    const int64_t left_ns = deadline_ns - dkv_now_ns();
    return left_ns <= 0 ? 1 : (long)((left_ns + 999999) / 1000000);
}

enum dkv_status dkv_http_get(const struct dkv_http_target *target, const char *url,
                             int64_t deadline_ns, char **body_out, size_t *n_bytes_out,
                             struct dkv_error *err)
{
    struct dkv_exchange ex = {.easy = curl_easy_init()};
    long http_status = 0;
    bool may_retry;
    enum dkv_status status = DKV_OK;
    if (ex.easy == NULL ||
        (target->authorization != NULL && !add_header(&ex.headers, target->authorization))) {
        status = dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
        goto out;
    }
    reply_rewind(&ex.reply, METADATA_BYTES);
    set_common(ex.easy, target, &ex.reply);
    curl_easy_setopt(ex.easy, CURLOPT_TIMEOUT_MS, milliseconds_left(deadline_ns));
    curl_easy_setopt(ex.easy, CURLOPT_URL, url);
    curl_easy_setopt(ex.easy, CURLOPT_HTTPHEADER, ex.headers);
    const CURLcode code = curl_easy_perform(ex.easy);
    curl_easy_getinfo(ex.easy, CURLINFO_RESPONSE_CODE, &http_status);
    if (code != CURLE_OK)
        status = dkv_exchange_judge_failure(&ex, code, &may_retry, err);
    else if (http_status != 200)
        status = dkv_oip_error_parse((unsigned)http_status, ex.reply.bytes, ex.reply.n_bytes, err);
    if (status == DKV_OK && body_out != NULL) {
        *body_out = ex.reply.bytes;
        *n_bytes_out = ex.reply.n_bytes;
        ex.reply.bytes = NULL;
    }
out:
    dkv_exchange_reset(&ex);
    curl_easy_cleanup(ex.easy);
    return status;
}
