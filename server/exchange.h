/* One request and its reply.
 *
 * Owner   the HTTP front: made when a header has been read, freed when the library has finished
 *         with the reply or given up on the connection.
 * Thread  loop only.
 * Errors  the reply functions cannot fail as far as the caller is concerned: where no reply can be
 *         made, the connection is closed.
 */
#ifndef DKV_SERVER_EXCHANGE_H
#define DKV_SERVER_EXCHANGE_H

#include "server/conn.h"
#include "server/http_guard.h"
#include "server/job.h"
#include "server/routes.h"
#include "server/server.h"

#include <microhttpd.h>

struct dkv_answer;
struct dkv_errand;

struct dkv_exchange {
    struct dkv_server *server;
    struct dkv_conn *conn;
    struct MHD_Connection *mhd;
    struct dkv_route_match match;
    uint64_t started_ns; /* its header had been read */

    struct dkv_trace trace; /* its header's */

    /* The body. */
    struct dkv_body body;
    bool has_json_length;
    uint64_t json_length;
    bool has_length;
    uint64_t content_length;
    uint64_t received_bytes;

    /* A refusal that waits until the rest of a small body has been read over, or until the library
     * asks again after a resume. */
    unsigned refused_status;
    struct dkv_error refusal;
    const char *allow; /* of a 405 */
    bool over_share;   /* why memory was refused: its client holds its share already */
    uint64_t retry_us; /* of a 429 or 503: advice for Retry-After; 0: none */
    char client_name[DKV_CLIENT_NAME_BYTES + 1]; /* of its token; "": the connection itself */

    /* What became of it. */
    bool close_after; /* the connection ends with this reply */
    bool replied;
    bool submitted; /* it was suspended for its work: when it is resumed, the work has ended */
    bool suspended;
    bool gone;                 /* the peer has left: no reply */
    struct dkv_job *job;       /* being prepared, or ended; NULL while somebody else has it */
    struct dkv_job *away;      /* the backend has it */
    struct dkv_errand *errand; /* has it, or its reply */
    struct dkv_answer *answer; /* a reply encoded already; it has the job */
    bool waits_for_region;     /* it registers one: not suspended for a job */
    void (*resumed)(struct dkv_exchange *exchange); /* replies then; NULL: its job has ended */
    bool parsed;                                    /* the JSON part has been read */
    bool accepted;                                  /* counts in server->n_accepted */
};

/* {"error": text}. 401, 405 and 503 get the fields that belong to them. */
void dkv_reply_error(struct dkv_exchange *exchange, unsigned http_status, const char *text);

/* No body. */
void dkv_reply_empty(struct dkv_exchange *exchange, unsigned http_status);

/* `bytes` is from malloc and becomes the reply's, also on failure. */
void dkv_reply_bytes(struct dkv_exchange *exchange, unsigned http_status, const char *content_type,
                     char *bytes, size_t n_bytes);

/* Sends `response`, whose content is `n_bytes`, and drops the caller's reference. */
void dkv_reply_response(struct dkv_exchange *exchange, unsigned http_status,
                        struct MHD_Response *response, uint64_t n_bytes);

#endif
