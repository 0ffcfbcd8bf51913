/* What the client's files share; nobody else includes this.
 *
 *   client.c   opening and closing, what is registered, what the server says of itself
 *   jobs.c     requests: submitted, waited for, taken
 *
 * Thread  the client's.
 */
#ifndef DKV_CLIENT_CLIENT_PRIV_H
#define DKV_CLIENT_CLIENT_PRIV_H

#include "client/transport.h"
#include "proto/look.h"

#include <sys/types.h>

#define DKV_TIMEOUT_US_MAX (86400 * INT64_C(1000000))

struct dkv_job_list {
    struct dkv_job *first;
    struct dkv_job *last;
};

/* A job is in exactly one of three lists: `in_flight`, while a transport carries it, `finished`,
 * from dkv_job_done() until its result is taken, or `idle`, to be used again. */
struct dropkv_client {
    const struct dkv_transport_ops *ops;
    struct dkv_transport *transport;
    struct dkv_results *results;
    struct dkv_job_list in_flight;
    struct dkv_job_list finished; /* oldest first */
    struct dkv_job *idle;         /* by next */
    uint32_t n_in_flight;
    uint32_t max_in_flight;
    int64_t timeout_us;
    int64_t busy_poll_ns; /* 0: as `look` says, if the client learns */
    bool learns;
    struct dkv_look look;
    uint64_t last_id;
    pid_t process; /* that opened it: a forked child leaves it alone */
};

/* Lets go of every job. The transport is still open. */
void dkv_jobs_drop(struct dropkv_client *client);

#endif
