/* The guard: judges a request's header before anything acts on it, in the HTTP library's first
 * call.
 *
 * Two programs that disagree where a request ends are how requests get smuggled past a proxy. So a
 * header that could be read in two ways is refused and its connection closed: conflicting or
 * repeated lengths, unknown transfer codings, a space before a colon, numbers that are not plain
 * digits. The same pass finds the fields that the rest of the front needs.
 *
 * Owner   borrows every string; they live as long as the request.
 * Thread  any; pure.
 * Errors  a verdict: HTTP status, reason for the metrics, and a fixed text (never client text).
 */
#ifndef DKV_SERVER_HTTP_GUARD_H
#define DKV_SERVER_HTTP_GUARD_H

#include "server/metrics.h"

#define DKV_HTTP_FIELDS_MAX      64u
#define DKV_HTTP_HEAD_BYTES_MAX  16384u
#define DKV_HTTP_JSON_LENGTH_KEY "Inference-Header-Content-Length"

struct dkv_http_field {
    const char *name;
    size_t name_bytes;
    const char *value;
    size_t value_bytes;
};

struct dkv_http_head {
    /* In. */
    const char *method;
    const char *target;  /* path or "*", as it stood in the request line, without the query */
    const char *version; /* "HTTP/1.1" */
    struct dkv_http_field fields[DKV_HTTP_FIELDS_MAX];
    unsigned n_fields; /* as counted: may be above DKV_HTTP_FIELDS_MAX, the rest is not stored */
    const char *end;   /* behind the empty line; NULL: line ends are not to be looked at here */

    /* Out, on acceptance. */
    bool has_length;
    uint64_t content_length;
    bool chunked;
    bool has_json_length;
    uint64_t json_length;
    const char *authorization; /* or NULL */
    const char *traceparent;   /* or NULL */
};

struct dkv_http_rules {
    uint64_t max_body_bytes;
    bool local_names_only; /* Host and Origin must name this machine's loopback */
};

struct dkv_http_verdict {
    unsigned http_status; /* 0: go on */
    enum dkv_refusal reason;
    const char *text;
};

struct dkv_http_verdict dkv_http_guard(struct dkv_http_head *head,
                                       const struct dkv_http_rules *rules);

/* "localhost", 127.0.0.0/8 or [::1], with or without a port. */
bool dkv_http_host_is_local(const char *host, size_t n_bytes);

/* Plain digits without sign, space or overflow. */
bool dkv_http_parse_length(const char *text, size_t n_bytes, uint64_t *out);

#endif
