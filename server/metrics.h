/* What the daemon counts, as Prometheus text and as the protocol's statistics.
 *
 * Every series exists from the start, at 0: an absent counter and a counter that never moved must
 * not look alike.
 *
 * Thread  loop only; what a worker measures travels in the job.
 * Unit    nanoseconds inside, seconds in Prometheus text.
 */
#ifndef DKV_SERVER_METRICS_H
#define DKV_SERVER_METRICS_H

#include "proto/oip.h"
#include "server/admission.h"
#include "server/worker.h"

#include <stdio.h>

/* How an inference request ended: each ends in exactly one. */
enum dkv_outcome {
    DKV_OUTCOME_OK = 0,
    DKV_OUTCOME_INVALID,   /* the caller has to change the request */
    DKV_OUTCOME_BUSY,      /* refused: a bound of the queue */
    DKV_OUTCOME_TIMEOUT,   /* its deadline passed */
    DKV_OUTCOME_CANCELLED, /* the client went away */
    DKV_OUTCOME_DRAINING,  /* refused: shutting down */
    DKV_OUTCOME_FAILED,    /* our side */
    DKV_OUTCOMES,
};

/* Why a connection was closed or a request was refused before it was read. */
enum dkv_refusal {
    DKV_REFUSAL_FRAMING = 0, /* the request's limits are ambiguous or malformed */
    DKV_REFUSAL_AUTH,        /* token missing or wrong */
    DKV_REFUSAL_HOST,        /* Host or Origin of a browser's rebinding attack */
    DKV_REFUSAL_SIZE,        /* above a size limit */
    DKV_REFUSAL_HEADER_TIME, /* header too slow */
    DKV_REFUSAL_BODY_TIME,   /* body too slow */
    DKV_REFUSAL_REPLY_TIME,  /* reply not read */
    DKV_REFUSALS,
};

/* The fronts, by which connections are counted: the first two. */
#define DKV_FRONTS 2

/* What SIGHUP came to. */
enum dkv_reload { DKV_RELOAD_OK = 0, DKV_RELOAD_FAILED, DKV_RELOADS };

/* How a client's region ended. */
enum dkv_release {
    DKV_RELEASE_ASKED = 0,
    DKV_RELEASE_DISCONNECT, /* its connection ended, as by the client's death */
    DKV_RELEASES,
};

#define DKV_HISTOGRAM_BUCKETS_MAX 16

/* Sizes of batches that are told apart: each up to EXACT, then powers of two. */
#define DKV_METRICS_EXACT 64u
#define DKV_METRICS_SIZES (DKV_METRICS_EXACT + 26u)

struct dkv_histogram {
    const double *bounds; /* ascending upper bounds, inclusive */
    unsigned n_bounds;
    uint64_t counts[DKV_HISTOGRAM_BUCKETS_MAX + 1]; /* the last: above every bound */
    double sum;
};

struct dkv_metrics {
    char backend[64];
    uint64_t requests[DKV_OUTCOMES];
    uint64_t refusals[DKV_REFUSALS];
    uint64_t responses[5]; /* by first digit of the HTTP status, 1xx first */
    uint64_t connections_total[DKV_FRONTS];
    uint64_t connections_closed[DKV_FRONTS];
    uint64_t bytes_in[DKV_TRANSPORTS];
    uint64_t answered[DKV_TRANSPORTS];
    uint64_t regions_released[DKV_RELEASES];
    uint64_t reloads[DKV_RELOADS];
    uint64_t nonfinite_refused; /* blocks */
    uint64_t nonfinite_masked;
    uint64_t tokens_in;
    uint64_t tokens_kept;
    struct dkv_histogram queue_seconds;
    struct dkv_histogram compute_seconds;
    struct dkv_histogram request_seconds;
    struct dkv_histogram batch_items;
    struct dkv_histogram batch_tokens;
    struct dkv_histogram batch_bytes;
    struct dkv_oip_duration by_size[DKV_METRICS_SIZES]; /* engine batches and their time */
    uint64_t degraded;                                  /* answered by recency */
    struct dkv_oip_stats stats; /* the protocol's: its blocks and batches are counted there */
};

/* Values that are looked up when asked for. */
struct dkv_gauges {
    const struct dkv_admission_stats *queue;
    unsigned n_levels;
    const struct dkv_worker_facts *workers; /* [n_workers] */
    unsigned n_workers;
    const uint64_t *regions; /* [DKV_LOAN_KINDS], that clients lend */
    const uint64_t *region_bytes;
    uint64_t queue_requests;
    uint64_t running_requests;
    uint64_t body_bytes;
    uint64_t body_limit_bytes;
    uint64_t queue_limit_requests;
    uint64_t scratch_bytes;
    uint64_t streams;
    uint64_t streams_evicted;
    uint64_t log_held_back, log_lost; /* lines */
    uint64_t spans, spans_lost;
    bool ready;
    bool draining;
};

void dkv_metrics_init(struct dkv_metrics *metrics, const char *backend);

void dkv_histogram_add(struct dkv_histogram *histogram, double value);

/* Counts what the engine made of an ended job, and the batch that it ran in, once: by the job that
 * is marked first. */
void dkv_metrics_batch(struct dkv_metrics *metrics, const struct dkv_job *job);

/* The batches by size, of those sizes that there were; how many. */
size_t dkv_metrics_sizes(const struct dkv_metrics *metrics,
                         struct dkv_oip_batch_stats out[DKV_METRICS_SIZES]);

/* Counts what was answered: blocks, tokens, and the way it came, in a front of that name. */
void dkv_metrics_answer(struct dkv_metrics *metrics, const struct dkv_job *job,
                        enum dkv_transport front);

/* Counts an inference that ended; durations of stages it never reached are 0. */
struct dkv_timing {
    uint64_t total_ns, queue_ns, input_ns, compute_ns, output_ns;
};
void dkv_metrics_request(struct dkv_metrics *metrics, enum dkv_outcome outcome,
                         const struct dkv_timing *timing);

enum dkv_outcome dkv_outcome_of(enum dkv_status status);

/* "ok", "busy"; "http", "shared": in the metrics, the log and traces. */
extern const char *const dkv_outcome_names[DKV_OUTCOMES];
extern const char *const dkv_transport_names[DKV_TRANSPORTS];

static inline const char *dkv_outcome_name(enum dkv_outcome outcome)
{
    return dkv_outcome_names[outcome];
}

static inline const char *dkv_transport_name(enum dkv_transport transport)
{
    return dkv_transport_names[transport];
}

/* Prometheus text format 0.0.4. `nv_names`: also the names that perf_analyzer reads. */
void dkv_metrics_write(const struct dkv_metrics *metrics, const struct dkv_gauges *gauges,
                       bool nv_names, FILE *out);

#endif
