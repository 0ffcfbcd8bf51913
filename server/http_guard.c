/* Each rule is one small function that returns a verdict; the first that refuses wins, so the order
 * of `rules_in_order` matters: what makes later fields unreadable comes first.
 *
 * guard_lines() needs an explanation. The HTTP library (0.9.7x) takes a bare LF for the end of a
 * line, which a proxy in front may take for part of a value. It parses in place, though, and writes
 * a NUL over each byte of the line's end: a value that ended in CR LF has two NULs behind it, one
 * that ended in a bare LF (or holds a NUL itself) has one NUL and then the next line. So the bytes
 * behind each value tell what the library no longer says. Two bare LFs look like CR LF, but they
 * end the header, which is shorter then than it should be.
 */
#include "server/http_guard.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

static const struct dkv_http_verdict go_on = {0, DKV_REFUSAL_FRAMING, NULL};

static struct dkv_http_verdict refuse(unsigned http_status, enum dkv_refusal reason,
                                      const char *text)
{
    return (struct dkv_http_verdict){http_status, reason, text};
}

static struct dkv_http_verdict bad(const char *text)
{
    return refuse(400, DKV_REFUSAL_FRAMING, text);
}

static bool field_is(const struct dkv_http_field *field, const char *name)
{
    return strlen(name) == field->name_bytes &&
           strncasecmp(field->name, name, field->name_bytes) == 0;
}

static bool value_is(const struct dkv_http_field *field, const char *text)
{
    return strlen(text) == field->value_bytes &&
           strncasecmp(field->value, text, field->value_bytes) == 0;
}

static const struct dkv_http_field *find(const struct dkv_http_head *head, const char *name)
{
    for (unsigned i = 0; i < head->n_fields; i++)
        if (field_is(&head->fields[i], name))
            return &head->fields[i];
    return NULL;
}

bool dkv_http_parse_length(const char *text, size_t n_bytes, uint64_t *out)
{
    uint64_t value = 0;
    if (n_bytes == 0)
        return false;
    for (size_t i = 0; i < n_bytes; i++)
        if (text[i] < '0' || text[i] > '9' || !dkv_mul_u64(value, 10, &value) ||
            !dkv_add_u64(value, (uint64_t)(text[i] - '0'), &value))
            return false;
    *out = value;
    return true;
}

static struct dkv_http_verdict guard_version(struct dkv_http_head *head,
                                             const struct dkv_http_rules *rules)
{
    (void)rules;
    if (strcmp(head->version, "HTTP/1.1") != 0 && strcmp(head->version, "HTTP/1.0") != 0)
        return bad("only HTTP/1.1 and HTTP/1.0 are spoken here");
    return go_on;
}

static struct dkv_http_verdict guard_target(struct dkv_http_head *head,
                                            const struct dkv_http_rules *rules)
{
    (void)rules;
    for (const char *c = head->target; *c != '\0'; c++)
        if ((unsigned char)*c <= ' ' || *c == 0x7f)
            return bad("the request's target holds a space or a control character");
    return go_on;
}

static struct dkv_http_verdict guard_size(struct dkv_http_head *head,
                                          const struct dkv_http_rules *rules)
{
    size_t n_bytes = 0;
    (void)rules;
    if (head->n_fields > DKV_HTTP_FIELDS_MAX)
        return refuse(431, DKV_REFUSAL_SIZE, "more than 64 header fields");
    for (unsigned i = 0; i < head->n_fields; i++)
        n_bytes += head->fields[i].name_bytes + head->fields[i].value_bytes + 4;
    if (n_bytes > DKV_HTTP_HEAD_BYTES_MAX)
        return refuse(431, DKV_REFUSAL_SIZE, "header above 16384 bytes");
    return go_on;
}

static bool ended_in_crlf(const char *end)
{
    return end[0] == '\0' && end[1] == '\0';
}

static struct dkv_http_verdict guard_lines(struct dkv_http_head *head,
                                           const struct dkv_http_rules *rules)
{
    (void)rules;
    if (head->end == NULL)
        return go_on;
    const char *last = head->version + strlen(head->version);
    bool good = ended_in_crlf(last);
    for (unsigned i = 0; i < head->n_fields && good; i++) {
        last = head->fields[i].value + head->fields[i].value_bytes;
        good = ended_in_crlf(last);
    }
    /* The last value and the empty line behind it: CR LF CR LF. */
    good = good && last + 4 == head->end && ended_in_crlf(last + 2);
    return good ? go_on : bad("header lines must end in CR LF and hold no NUL");
}

/* The characters of a token (RFC 9110 5.6.2). */
static bool is_token_char(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL);
}

static struct dkv_http_verdict guard_names(struct dkv_http_head *head,
                                           const struct dkv_http_rules *rules)
{
    (void)rules;
    for (unsigned i = 0; i < head->n_fields; i++) {
        const struct dkv_http_field *field = &head->fields[i];
        if (field->name_bytes == 0)
            return bad("a header field without a name");
        for (size_t c = 0; c < field->name_bytes; c++)
            if (!is_token_char(field->name[c]))
                return bad("a header field's name holds a character that is not allowed");
        for (size_t c = 0; c < field->value_bytes; c++)
            if (((unsigned char)field->value[c] < ' ' && field->value[c] != '\t') ||
                field->value[c] == 0x7f)
                return bad("a header field's value holds a control character");
    }
    return go_on;
}

static struct dkv_http_verdict guard_repeats(struct dkv_http_head *head,
                                             const struct dkv_http_rules *rules)
{
    static const char *const singles[] = {"Content-Length",   "Transfer-Encoding",     "Host",
                                          "Content-Encoding", "Authorization",         "Origin",
                                          "Expect",           DKV_HTTP_JSON_LENGTH_KEY};
    (void)rules;
    for (size_t s = 0; s < sizeof(singles) / sizeof(singles[0]); s++) {
        unsigned seen = 0;
        for (unsigned i = 0; i < head->n_fields; i++)
            seen += field_is(&head->fields[i], singles[s]);
        if (seen > 1)
            return bad("a header field that may stand once is repeated");
    }
    return go_on;
}

static struct dkv_http_verdict guard_transfer(struct dkv_http_head *head,
                                              const struct dkv_http_rules *rules)
{
    const struct dkv_http_field *coding = find(head, "Transfer-Encoding");
    const struct dkv_http_field *length = find(head, "Content-Length");
    (void)rules;
    if (coding != NULL && length != NULL)
        return bad("Content-Length and Transfer-Encoding exclude each other");
    if (coding != NULL && strcmp(head->version, "HTTP/1.0") == 0)
        return bad("HTTP/1.0 has no Transfer-Encoding");
    if (coding != NULL && !value_is(coding, "chunked"))
        return bad("Transfer-Encoding: only chunked is understood");
    head->chunked = coding != NULL;
    head->has_length = length != NULL;
    if (length != NULL) {
        for (size_t i = 0; i < length->value_bytes; i++)
            if (length->value[i] < '0' || length->value[i] > '9')
                return bad("Content-Length is not a plain number");
        if (length->value_bytes == 0)
            return bad("Content-Length is empty");
        if (!dkv_http_parse_length(length->value, length->value_bytes, &head->content_length))
            return refuse(413, DKV_REFUSAL_SIZE, "Content-Length above 64 bits");
    }
    return go_on;
}

static struct dkv_http_verdict guard_body(struct dkv_http_head *head,
                                          const struct dkv_http_rules *rules)
{
    const struct dkv_http_field *encoding = find(head, "Content-Encoding");
    const bool is_post = strcmp(head->method, "POST") == 0;
    if (is_post && !head->has_length && !head->chunked)
        return refuse(411, DKV_REFUSAL_FRAMING, "POST needs a Content-Length");
    if (!is_post && (head->chunked || head->content_length > 0))
        return bad("only POST takes a body");
    if (encoding != NULL && !value_is(encoding, "identity"))
        return refuse(415, DKV_REFUSAL_SIZE, "Content-Encoding: bodies must not be compressed");
    if (head->has_length && head->content_length > rules->max_body_bytes)
        return refuse(413, DKV_REFUSAL_SIZE, "body above max_body_bytes");
    return go_on;
}

static struct dkv_http_verdict guard_json_length(struct dkv_http_head *head,
                                                 const struct dkv_http_rules *rules)
{
    const struct dkv_http_field *field = find(head, DKV_HTTP_JSON_LENGTH_KEY);
    (void)rules;
    head->has_json_length = field != NULL;
    if (field == NULL)
        return go_on;
    if (!dkv_http_parse_length(field->value, field->value_bytes, &head->json_length))
        return bad("Inference-Header-Content-Length is not a plain number");
    if (head->has_length && head->json_length > head->content_length)
        return bad("Inference-Header-Content-Length is above Content-Length");
    return go_on;
}

bool dkv_http_host_is_local(const char *host, size_t n_bytes)
{
    char name[64];
    struct in_addr v4;
    const char *colon;
    if (n_bytes >= sizeof(name))
        return false;
    memcpy(name, host, n_bytes);
    name[n_bytes] = '\0';
    if (strncmp(name, "[::1]", 5) == 0 && (name[5] == '\0' || name[5] == ':'))
        return true;
    colon = strchr(name, ':');
    if (colon != NULL)
        name[colon - name] = '\0';
    if (strcasecmp(name, "localhost") == 0)
        return true;
    return inet_pton(AF_INET, name, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127;
}

static bool origin_is_local(const struct dkv_http_field *origin)
{
    static const char *const schemes[] = {"http://", "https://"};
    for (size_t i = 0; i < 2; i++) {
        size_t n = strlen(schemes[i]);
        if (origin->value_bytes > n && strncasecmp(origin->value, schemes[i], n) == 0)
            return dkv_http_host_is_local(origin->value + n, origin->value_bytes - n);
    }
    return false;
}

/* A web page may make its visitor's browser send requests here under the page's own name (DNS
 * rebinding); a local service knows them by that name. */
static struct dkv_http_verdict guard_names_of_host(struct dkv_http_head *head,
                                                   const struct dkv_http_rules *rules)
{
    const struct dkv_http_field *host = find(head, "Host");
    const struct dkv_http_field *origin = find(head, "Origin");
    if (host == NULL && strcmp(head->version, "HTTP/1.1") == 0)
        return bad("HTTP/1.1 needs a Host field");
    if (!rules->local_names_only)
        return go_on;
    if (host != NULL && !dkv_http_host_is_local(host->value, host->value_bytes))
        return refuse(403, DKV_REFUSAL_HOST, "Host does not name this machine's loopback address");
    if (origin != NULL && !origin_is_local(origin))
        return refuse(403, DKV_REFUSAL_HOST, "requests of web pages are not served");
    return go_on;
}

struct dkv_http_verdict dkv_http_guard(struct dkv_http_head *head,
                                       const struct dkv_http_rules *rules)
{
    static struct dkv_http_verdict (*const rules_in_order[])(struct dkv_http_head *,
                                                             const struct dkv_http_rules *) = {
        guard_version, guard_target,   guard_size, guard_lines,       guard_names,
        guard_repeats, guard_transfer, guard_body, guard_json_length, guard_names_of_host,
    };
    for (size_t i = 0; i < sizeof(rules_in_order) / sizeof(rules_in_order[0]); i++) {
        struct dkv_http_verdict verdict = rules_in_order[i](head, rules);
        if (verdict.http_status != 0)
            return verdict;
    }
    const struct dkv_http_field *authorization = find(head, "Authorization");
    head->authorization = authorization != NULL ? authorization->value : NULL;
    const struct dkv_http_field *traceparent = find(head, "traceparent");
    head->traceparent = traceparent != NULL ? traceparent->value : NULL;
    return go_on;
}
