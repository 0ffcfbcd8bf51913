/* One request and its reply over HTTP: a libcurl easy handle, what it sends and what it received.
 * http.c decides when an exchange starts, ends and starts again.
 *
 * Owner   the exchange owns its handle and buffers, and borrows the job.
 * Thread  the client's.
 */
#ifndef DKV_CLIENT_HTTP_EXCHANGE_H
#define DKV_CLIENT_HTTP_EXCHANGE_H

#include "client/transport.h"
#include "proto/oip.h"

#include <curl/curl.h>

/* What all exchanges of a transport share. */
struct dkv_http_target {
    char *infer_url;
    char *ready_url;
    char *server_url;
    char *model_url;
    char *authorization; /* the header line, or NULL */
    bool loopback;       /* never through a proxy */
};

enum dkv_status dkv_http_target_init(struct dkv_http_target *target_out, const char *endpoint,
                                     const char *token, struct dkv_error *err);
void dkv_http_target_fini(struct dkv_http_target *target);

/* A reply's bytes, bounded. */
struct dkv_http_reply {
    char *bytes;
    size_t n_bytes;
    size_t cap_bytes;
    uint64_t limit_bytes;  /* more than this is refused */
    bool too_large;        /* it was */
    uint64_t head_bytes;   /* Inference-Header-Content-Length; UINT64_MAX: not there */
    int64_t retry_after_s; /* Retry-After in seconds; negative: not there */
};

struct dkv_exchange {
    struct dkv_job *job;
    CURL *easy;
    struct curl_slist *headers;
    struct dkv_oip_call call;
    uint64_t sent_bytes; /* of head and binary section together */
    struct dkv_http_reply reply;
    uint32_t n_attempts;
    int64_t retry_at_ns; /* 0: running */
    struct dkv_exchange *next;
    struct dkv_exchange *prev;
};

/* Makes the handle and the message for another attempt; the caller gives it to its multi handle. */
enum dkv_status dkv_exchange_prepare(struct dkv_exchange *exchange,
                                     const struct dkv_http_target *target, struct dkv_error *err);

/* Frees the message and the reply; the handle stays, ready for another exchange. */
void dkv_exchange_reset(struct dkv_exchange *exchange);

/* What became of an attempt. On DKV_OK the job's result is filled; otherwise `err` says why, and
 * *may_retry whether another attempt could cure it. */
enum dkv_status dkv_exchange_judge(struct dkv_exchange *exchange, CURLcode code, bool *may_retry,
                                   struct dkv_error *err);

/* The same for what libcurl calls an error. */
enum dkv_status dkv_exchange_judge_failure(const struct dkv_exchange *exchange, CURLcode code,
                                           bool *may_retry, struct dkv_error *err);

/* GET, blocking until the deadline at most. The body is the caller's to free(), 0-terminated;
 * written only on success, which is HTTP 200. */
enum dkv_status dkv_http_get(const struct dkv_http_target *target, const char *url,
                             int64_t deadline_ns, char **body_out, size_t *n_bytes_out,
                             struct dkv_error *err);

#endif
