/* Counters and fixed-bucket histograms: adding a value is a short scan and an increment, which is
 * why the daemon can afford them on every request and why several instances can be added up. */
#include "server/metrics.h"

#include <stddef.h>
#include <string.h>
#include <time.h>

static const double seconds_bounds[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
                                        0.05,   0.1,     0.25,   0.5,   1.0,    2.5,   10.0, 30.0};
static const double items_bounds[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096};
static const double tokens_bounds[] = {256,    1024,   4096,   16384,   32768,  65536,
                                       131072, 262144, 524288, 1048576, 4194304};

static const double bytes_bounds[] = {65536,    262144,    1048576,    4194304,    16777216,
                                      67108864, 268435456, 1073741824, 4294967296, 17179869184};

const char *const dkv_outcome_names[DKV_OUTCOMES] = {"ok",        "invalid",  "busy",  "timeout",
                                                     "cancelled", "draining", "failed"};
const char *const dkv_transport_names[DKV_TRANSPORTS] = {"http", "socket", "shared", "device"};

#define COUNT_OF(array) ((unsigned)(sizeof(array) / sizeof((array)[0])))

void dkv_metrics_init(struct dkv_metrics *metrics, const char *backend)
{
    memset(metrics, 0, sizeof(*metrics));
    snprintf(metrics->backend, sizeof(metrics->backend), "%s", backend);
    const struct dkv_histogram seconds = {seconds_bounds, COUNT_OF(seconds_bounds), {0}, 0};
    metrics->queue_seconds = seconds;
    metrics->compute_seconds = seconds;
    metrics->request_seconds = seconds;
    metrics->batch_items = (struct dkv_histogram){items_bounds, COUNT_OF(items_bounds), {0}, 0};
    metrics->batch_bytes = (struct dkv_histogram){bytes_bounds, COUNT_OF(bytes_bounds), {0}, 0};
    metrics->batch_tokens = (struct dkv_histogram){tokens_bounds, COUNT_OF(tokens_bounds), {0}, 0};
}

void dkv_histogram_add(struct dkv_histogram *histogram, double value)
{
    unsigned i = 0;
    while (i < histogram->n_bounds && value > histogram->bounds[i])
        i++;
    histogram->counts[i]++;
    histogram->sum += value;
}

enum dkv_outcome dkv_outcome_of(enum dkv_status status)
{
    switch (status) {
    case DKV_OK: return DKV_OUTCOME_OK;
    case DKV_E_BUSY: return DKV_OUTCOME_BUSY;
    case DKV_E_TIMEOUT: return DKV_OUTCOME_TIMEOUT;
    case DKV_E_DRAINING: return DKV_OUTCOME_DRAINING;
    case DKV_E_CANCELLED: return DKV_OUTCOME_CANCELLED;
    default: return status < DKV_E_BUSY ? DKV_OUTCOME_INVALID : DKV_OUTCOME_FAILED;
    }
}

static void add_duration(struct dkv_oip_duration *duration, uint64_t ns)
{
    duration->count++;
    duration->ns += ns;
}

/* 1..EXACT as they are, then (EXACT, 2 EXACT], and so on. */
static unsigned size_index(uint64_t n_items)
{
    unsigned i = DKV_METRICS_EXACT;
    if (n_items <= DKV_METRICS_EXACT)
        return n_items > 0 ? (unsigned)n_items - 1 : 0;
    for (uint64_t top = 2 * DKV_METRICS_EXACT; n_items > top && i + 1 < DKV_METRICS_SIZES; top *= 2)
        i++;
    return i;
}

size_t dkv_metrics_sizes(const struct dkv_metrics *metrics,
                         struct dkv_oip_batch_stats out[DKV_METRICS_SIZES])
{
    size_t n = 0;
    for (unsigned i = 0; i < DKV_METRICS_SIZES; i++) {
        const struct dkv_oip_duration *time = &metrics->by_size[i];
        if (time->count == 0)
            continue;
        const struct dkv_oip_duration none = {time->count, 0};
        out[n++] = (struct dkv_oip_batch_stats){
            .batch_size = i < DKV_METRICS_EXACT
                              ? i + 1
                              : UINT64_C(2) * DKV_METRICS_EXACT << (i - DKV_METRICS_EXACT),
            .compute_input = none, /* a part of infer: the engine reads in place */
            .compute_infer = *time,
            .compute_output = none,
        };
    }
    return n;
}

void dkv_metrics_batch(struct dkv_metrics *metrics, const struct dkv_job *job)
{
    metrics->nonfinite_refused += job->n_refused_nonfinite;
    metrics->nonfinite_masked += job->n_masked_nonfinite;
    if (!job->batch_first)
        return;
    metrics->stats.execution_count++;
    add_duration(&metrics->by_size[size_index(job->batch_items)],
                 job->finished_ns - job->started_ns);
    dkv_histogram_add(&metrics->batch_items, job->batch_items);
    dkv_histogram_add(&metrics->batch_tokens, (double)job->batch_tokens);
    dkv_histogram_add(&metrics->batch_bytes, (double)job->batch_bytes);
}

void dkv_metrics_answer(struct dkv_metrics *metrics, const struct dkv_job *job,
                        enum dkv_transport front)
{
    const enum dkv_transport transport = dkv_job_transport(job, front);
    metrics->answered[transport]++;
    if (transport == DKV_TRANSPORT_SHARED || transport == DKV_TRANSPORT_DEVICE)
        metrics->bytes_in[transport] += job->n_read_bytes;
    metrics->stats.inference_count += job->request.n_blocks;
    metrics->degraded += job->degraded;
    metrics->tokens_in += job->n_scored_tokens;
    metrics->tokens_kept += job->n_keep;
}

void dkv_metrics_request(struct dkv_metrics *metrics, enum dkv_outcome outcome,
                         const struct dkv_timing *timing)
{
    struct timespec now;
    metrics->requests[outcome]++;
    dkv_histogram_add(&metrics->request_seconds, (double)timing->total_ns * 1e-9);
    if (outcome != DKV_OUTCOME_OK) {
        add_duration(&metrics->stats.fail, timing->total_ns);
        return;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    metrics->stats.last_inference_ms = (uint64_t)now.tv_sec * 1000 +
                                       (uint64_t)now.tv_nsec / 1000000;
    dkv_histogram_add(&metrics->queue_seconds, (double)timing->queue_ns * 1e-9);
    dkv_histogram_add(&metrics->compute_seconds, (double)timing->compute_ns * 1e-9);
    add_duration(&metrics->stats.success, timing->total_ns);
    add_duration(&metrics->stats.queue, timing->queue_ns);
    add_duration(&metrics->stats.compute_input, timing->input_ns);
    add_duration(&metrics->stats.compute_infer, timing->compute_ns);
    add_duration(&metrics->stats.compute_output, timing->output_ns);
}
