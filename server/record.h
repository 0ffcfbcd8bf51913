/* What is told about a request when it has ended: counted in the metrics.
 *
 * Every inference request ends in exactly one record, whichever front took it and however it ended.
 *
 * Owner   the record borrows all it points to, for the call.
 * Thread  loop.
 */
#ifndef DKV_SERVER_RECORD_H
#define DKV_SERVER_RECORD_H

#include "server/server.h"

struct dkv_record {
    enum dkv_transport transport; /* the front's: HTTP or SOCKET; SHARED is found from the job */
    enum dkv_status status;       /* how it ended */
    const struct dkv_job *job;    /* NULL: refused before there was one */
    uint64_t started_ns;          /* when its header had been read; 0: at once */
    uint64_t output_ns;           /* what encoding the answer took */
};

void dkv_record_end(struct dkv_server *server, const struct dkv_record *record);

#endif
