/* A line at a time: each must end in CR LF and hold neither NUL nor a lone CR; the first is "method
 * target HTTP/1.x", each after it "name: value". Of the values only Content-Length is looked at,
 * since it is the one whose errors the library answers itself. */
#include "server/http_scan.h"

#include <string.h>
#include <strings.h>

static enum dkv_http_scan_result bad(struct dkv_http_verdict *verdict, unsigned http_status,
                                     enum dkv_refusal reason, const char *text)
{
    *verdict = (struct dkv_http_verdict){http_status, reason, text};
    return DKV_HTTP_SCAN_BAD;
}

static enum dkv_http_scan_result bad_framing(struct dkv_http_verdict *verdict, const char *text)
{
    return bad(verdict, 400, DKV_REFUSAL_FRAMING, text);
}

/* The value of "name: value" without the blanks around it. */
static void trim(const char **value, size_t *n_bytes)
{
    while (*n_bytes > 0 && (**value == ' ' || **value == '\t')) {
        (*value)++;
        (*n_bytes)--;
    }
    while (*n_bytes > 0 && ((*value)[*n_bytes - 1] == ' ' || (*value)[*n_bytes - 1] == '\t'))
        (*n_bytes)--;
}

static enum dkv_http_scan_result scan_request_line(const char *line, size_t n_bytes,
                                                   struct dkv_http_verdict *verdict)
{
    static const char version[] = " HTTP/1.";
    const size_t n_version = sizeof(version) - 1;
    const char *end = line + n_bytes;
    const char *space = memchr(line, ' ', n_bytes);
    if (n_bytes < n_version + 1 || memcmp(end - n_version - 1, version, n_version) != 0 ||
        (end[-1] != '0' && end[-1] != '1'))
        return bad_framing(verdict, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    end -= n_version + 1;
    if (space == line || space >= end - 1 ||
        memchr(space + 1, ' ', (size_t)(end - space - 1)) != NULL)
        return bad_framing(verdict, "a request line is a method, a target and a version");
    return DKV_HTTP_SCAN_GOOD;
}

static enum dkv_http_scan_result scan_field(const char *line, size_t n_bytes,
                                            struct dkv_http_verdict *verdict)
{
    static const char length_name[] = "content-length";
    const size_t n_name = sizeof(length_name) - 1;
    uint64_t length;
    const char *colon = memchr(line, ':', n_bytes);
    if (*line == ' ' || *line == '\t')
        return bad_framing(verdict, "a header field continues over lines");
    if (colon == NULL || colon == line)
        return bad_framing(verdict, "a header line is not a name, a colon and a value");
    if ((size_t)(colon - line) != n_name || strncasecmp(line, length_name, n_name) != 0)
        return DKV_HTTP_SCAN_GOOD;
    const char *value = colon + 1;
    size_t n_value = n_bytes - n_name - 1;
    trim(&value, &n_value);
    for (size_t i = 0; i < n_value; i++)
        if (value[i] < '0' || value[i] > '9')
            return bad_framing(verdict, "Content-Length is not a plain number");
    if (n_value == 0)
        return bad_framing(verdict, "Content-Length is empty");
    if (!dkv_http_parse_length(value, n_value, &length) || length == UINT64_MAX)
        return bad(verdict, 413, DKV_REFUSAL_SIZE, "Content-Length above 64 bits");
    return DKV_HTTP_SCAN_GOOD;
}

enum dkv_http_scan_result dkv_http_scan(const char *bytes, size_t n_bytes,
                                        struct dkv_http_verdict *verdict_out)
{
    const char *const end = bytes + n_bytes;
    bool first = true;
    for (const char *line = bytes; line < end;) {
        const char *lf = memchr(line, '\n', (size_t)(end - line));
        const size_t n_seen = (size_t)((lf != NULL ? lf : end) - line);
        if (memchr(line, '\0', n_seen) != NULL)
            return bad_framing(verdict_out, "header lines must end in CR LF and hold no NUL");
        if (lf == NULL)
            break;
        if (lf == line || lf[-1] != '\r' || memchr(line, '\r', n_seen) != lf - 1)
            return bad_framing(verdict_out, "header lines must end in CR LF and hold no NUL");
        const size_t n_line = n_seen - 1;
        if (n_line == 0 && !first)
            return DKV_HTTP_SCAN_GOOD;
        /* An empty line before the request line may be left over from a sloppy client. */
        if (n_line > 0 && (first ? scan_request_line(line, n_line, verdict_out)
                                 : scan_field(line, n_line, verdict_out)) == DKV_HTTP_SCAN_BAD)
            return DKV_HTTP_SCAN_BAD;
        first = first && n_line == 0;
        line = lf + 1;
    }
    if (n_bytes > DKV_HTTP_HEAD_BYTES_MAX)
        return bad(verdict_out, 431, DKV_REFUSAL_SIZE, "header above 16384 bytes");
    return DKV_HTTP_SCAN_MORE;
}
