/* What is told about a request when it has ended: counted in the metrics, one line in the log, its
 * spans if it is traced, and its place among the streams.
 *
 * Every inference request ends in exactly one record, whichever front took it and however it ended.
 * An answer is a line at debug; so is what the caller has to change. What the daemon refused or
 * could not do is told at info and warn. All of these lines are limited: a client can cause each.
 *
 * Owner   the record borrows all it points to, for the call.
 * Thread  loop.
 */
#ifndef DKV_SERVER_RECORD_H
#define DKV_SERVER_RECORD_H

#include "server/server.h"

struct dkv_record {
    enum dkv_transport transport;  /* the front's: HTTP or SOCKET; SHARED is found from the job */
    enum dkv_status status;        /* how it ended */
    const char *error;             /* the sentence, unless it is OK */
    const struct dkv_job *job;     /* NULL: refused before there was one */
    const char *id;                /* the client's own, "" for none */
    const char *client;            /* of its token, "" for none */
    uint64_t session;              /* of the local socket; 0 for none, or if it has ended */
    const struct dkv_trace *trace; /* of a header; NULL for none */
    uint64_t started_ns;           /* when its header had been read; 0: at once */
    uint64_t output_ns;            /* what encoding the answer took */
};

void dkv_record_end(struct dkv_server *server, const struct dkv_record *record);

#endif
