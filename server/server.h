/* What the parts of the daemon share: one struct, made by main() and handed to each.
 *
 * Owner   main() owns everything in it.
 * Thread  loop.
 */
#ifndef DKV_SERVER_SERVER_H
#define DKV_SERVER_SERVER_H

#include "server/auth.h"
#include "server/backend.h"
#include "server/body.h"
#include "server/config.h"
#include "server/inherited.h"
#include "server/list.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/streams.h"
#include "server/trace.h"

#define DKV_REQUEST_LINES_PER_S 1000u /* at debug: beyond, lines are counted instead of written */

struct dkv_http;
struct dkv_shm;
struct dkv_sessions;

/* What memory was laid out for at start. */
struct dkv_ceilings {
    uint64_t body_bytes, queue_bytes, queue_requests, connections, batch_items;
};

struct dkv_server {
    const struct dkv_config *config; /* state's */
    struct dkv_config_state *state;
    int argc; /* the arguments, for SIGHUP */
    const char **argv;
    struct dkv_ceilings ceilings;
    struct dkv_inherited inherited; /* each becomes whoever's serves it */
    uv_loop_t *loop;
    struct dkv_auth auth;
    struct dkv_metrics metrics;
    struct dkv_arena arena; /* shared with the workers: bodies, descriptors, answers */
    uint64_t cache_bytes;   /* of all registered caches, and those that requests still use */
    struct dkv_body_pool bodies;
    uint64_t max_body_bytes; /* the config's, or less: a body that could never be held is too large,
                                not a reason to try again */
    struct dkv_backend *backend;
    struct dkv_http *http;         /* NULL: HTTP is off */
    struct dkv_shm *shm;           /* NULL: HTTP clients may not name memory */
    struct dkv_sessions *sessions; /* NULL: the local socket is off */
    struct dkv_list idle_asks;     /* [n_idle_asks]: memory of its requests, to be used again */
    unsigned n_idle_asks;
    unsigned n_working;         /* of its requests that threads of the pool copy for just now */
    struct dkv_oip_facts facts; /* its strings are in engine_info */
    struct dkv_engine_info engine_info;
    struct dkv_streams streams;
    struct dkv_trace_file traces;
    struct dkv_log_limit client_log;  /* lines that clients can cause */
    struct dkv_log_limit request_log; /* lines of requests: many, but not without end */
    uint64_t n_records;               /* requests that have ended: the number of the last one */
    uint64_t begun_ns;                /* when the daemon was ready */
    unsigned n_accepted;              /* inference requests accepted and not answered yet */
    unsigned n_fenced;                /* of them: wait for their producers, not in the queue yet */
    bool leaving;  /* the end was announced: not ready, but everything is accepted still */
    bool draining; /* what was accepted is answered, nothing more is accepted */
};

/* Serves until a signal ends it; the exit status of the process: 0 if every accepted request was
 * answered. SIGHUP reads the configuration again from `argv`. */
int dkv_server_run(struct dkv_config_state *state, int argc, const char **argv);

#endif
