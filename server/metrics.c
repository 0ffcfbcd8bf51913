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

static const char *const outcome_names[DKV_OUTCOMES] = {"ok",        "invalid",  "busy",  "timeout",
                                                        "cancelled", "draining", "failed"};
static const char *const refusal_names[DKV_REFUSALS] = {
    "framing", "auth", "host", "size", "header_time", "body_time", "reply_time"};

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

void dkv_metrics_batch(struct dkv_metrics *metrics, const struct dkv_job *job)
{
    if (!job->batch_first)
        return;
    metrics->stats.execution_count++;
    dkv_histogram_add(&metrics->batch_items, job->batch_items);
    dkv_histogram_add(&metrics->batch_tokens, (double)job->batch_tokens);
    dkv_histogram_add(&metrics->batch_bytes, (double)job->batch_bytes);
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

static void write_head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void write_number(FILE *out, const char *name, const char *type, const char *help,
                         uint64_t value)
{
    write_head(out, name, type, help);
    fprintf(out, "%s %llu\n", name, (unsigned long long)value);
}

static void write_family(FILE *out, const char *name, const char *help, const char *label,
                         const char *const *label_values, const uint64_t *values, unsigned n)
{
    write_head(out, name, "counter", help);
    for (unsigned i = 0; i < n; i++)
        fprintf(out, "%s{%s=\"%s\"} %llu\n", name, label, label_values[i],
                (unsigned long long)values[i]);
}

static void write_histogram(FILE *out, const char *name, const char *help,
                            const struct dkv_histogram *histogram)
{
    uint64_t cumulative = 0;
    write_head(out, name, "histogram", help);
    for (unsigned i = 0; i < histogram->n_bounds; i++) {
        cumulative += histogram->counts[i];
        fprintf(out, "%s_bucket{le=\"%.10g\"} %llu\n", name, histogram->bounds[i],
                (unsigned long long)cumulative);
    }
    cumulative += histogram->counts[histogram->n_bounds];
    fprintf(out, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum %.9g\n%s_count %llu\n", name,
            (unsigned long long)cumulative, name, histogram->sum, name,
            (unsigned long long)cumulative);
}

static void write_counters(const struct dkv_metrics *m, FILE *out)
{
    static const char *const classes[] = {"1xx", "2xx", "3xx", "4xx", "5xx"};
    write_family(out, "dropkv_requests_total", "Inference requests by how they ended.", "outcome",
                 outcome_names, m->requests, DKV_OUTCOMES);
    write_family(out, "dropkv_http_refused_total",
                 "Requests and connections refused before their body was read.", "reason",
                 refusal_names, m->refusals, DKV_REFUSALS);
    write_family(out, "dropkv_http_responses_total", "HTTP responses by class.", "class", classes,
                 m->responses, COUNT_OF(classes));
    write_number(out, "dropkv_http_connections_total", "counter", "Connections accepted.",
                 m->connections_total);
    write_number(out, "dropkv_http_body_bytes_total", "counter", "Body bytes received.",
                 m->bytes_in);
    write_number(out, "dropkv_blocks_total", "counter", "Blocks scored.", m->stats.inference_count);
    write_number(out, "dropkv_batches_total", "counter", "Engine batches run.",
                 m->stats.execution_count);
    write_number(out, "dropkv_degraded_total", "counter",
                 "Requests answered by recency because of overload.", m->degraded);
    write_number(out, "dropkv_tokens_in_total", "counter",
                 "Valid tokens of scored blocks, times their KV heads.", m->tokens_in);
    write_number(out, "dropkv_tokens_kept_total", "counter",
                 "Tokens kept in scored blocks, over all KV heads.", m->tokens_kept);
}

/* The admission queue: by priority what waits and for how long, and how it judged. */
static void write_queue(const struct dkv_gauges *g, FILE *out)
{
    write_head(out, "dropkv_queue_waiting", "gauge", "Requests waiting, by priority.");
    for (unsigned i = 0; i < g->n_levels; i++)
        fprintf(out, "dropkv_queue_waiting{priority=\"%u\"} %u\n", i + 1,
                g->queue->level[i].n_waiting);
    write_head(out, "dropkv_queue_waiting_bytes", "gauge",
               "Tensor bytes that waiting requests will read, by priority.");
    for (unsigned i = 0; i < g->n_levels; i++)
        fprintf(out, "dropkv_queue_waiting_bytes{priority=\"%u\"} %llu\n", i + 1,
                (unsigned long long)g->queue->level[i].waiting_bytes);
    write_head(out, "dropkv_queue_age_seconds", "gauge",
               "Age of the oldest waiting request, by priority.");
    for (unsigned i = 0; i < g->n_levels; i++)
        fprintf(out, "dropkv_queue_age_seconds{priority=\"%u\"} %.6f\n", i + 1,
                (double)g->queue->level[i].oldest_us * 1e-6);
    write_head(out, "dropkv_admission_total", "counter",
               "Prepared requests by what the queue said to them.");
    for (unsigned i = 0; i < DKV_ADMISSION_VERDICTS; i++)
        fprintf(out, "dropkv_admission_total{verdict=\"%s\"} %llu\n",
                dkv_admission_verdict_info((enum dkv_admission_verdict)i)->name,
                (unsigned long long)g->queue->verdicts[i]);
    write_number(out, "dropkv_clients", "gauge", "Clients among which devices are shared.",
                 g->queue->n_clients);
}

static void write_workers(const struct dkv_gauges *g, FILE *out)
{
    static const struct {
        const char *name, *type, *help;
    } rows[] = {
        {"dropkv_worker_up", "gauge", "1 while the worker of a device answers."},
        {"dropkv_worker_given_up", "gauge", "1 after a device's workers ended again and again."},
        {"dropkv_worker_fallback", "gauge", "1 while the CPU computes in place of a device."},
        {"dropkv_worker_restarts_total", "counter", "Workers started in place of one that ended."},
    };
    for (unsigned r = 0; r < COUNT_OF(rows); r++) {
        write_head(out, rows[r].name, rows[r].type, rows[r].help);
        for (unsigned i = 0; i < g->n_workers; i++) {
            const struct dkv_worker_facts *w = &g->workers[i];
            const uint64_t values[] = {g->queue->device[i].up, w->given_up, w->fallback,
                                       w->restarts};
            fprintf(out, "%s{worker=\"%u\",device=\"%s\"} %llu\n", rows[r].name, i, w->device,
                    (unsigned long long)values[r]);
        }
    }
    write_number(out, "dropkv_batches_lost_total", "counter",
                 "Batches that were in flight when a worker ended.", g->queue->batches_lost);
    write_number(out, "dropkv_replayed_total", "counter",
                 "Requests that ran again after a worker had ended.", g->queue->parts_replayed);
    write_number(out, "dropkv_regions", "gauge", "Regions of memory that clients lend.",
                 g->regions);
    write_number(out, "dropkv_region_bytes", "gauge", "Their bytes.", g->region_bytes);
}

static void write_gauges(const struct dkv_gauges *g, FILE *out)
{
    write_number(out, "dropkv_ready", "gauge", "1 while new requests are accepted.", g->ready);
    write_number(out, "dropkv_queue_depth", "gauge", "Requests waiting for the engine.",
                 g->queue_requests);
    write_number(out, "dropkv_running_requests", "gauge", "Requests in the engine.",
                 g->running_requests);
    write_number(out, "dropkv_body_bytes", "gauge", "Bytes of bodies held.", g->body_bytes);
    write_number(out, "dropkv_body_limit_bytes", "gauge", "Most bytes of bodies that may be held.",
                 g->body_limit_bytes);
    write_number(out, "dropkv_http_connections", "gauge", "Connections open.", g->connections);
    write_number(out, "dropkv_scratch_bytes", "gauge", "Working memory of the engine.",
                 g->scratch_bytes);
}

/* The names of Triton's metrics, in its unit (microseconds). */
static void write_nv(const struct dkv_metrics *m, const struct dkv_gauges *g, FILE *out)
{
    static const char *const reasons[] = {"REJECTED", "CANCELED", "BACKEND", "OTHER"};
    const uint64_t failures[] = {
        m->requests[DKV_OUTCOME_BUSY] + m->requests[DKV_OUTCOME_TIMEOUT] +
            m->requests[DKV_OUTCOME_DRAINING],
        m->requests[DKV_OUTCOME_CANCELLED],
        m->requests[DKV_OUTCOME_FAILED],
        m->requests[DKV_OUTCOME_INVALID],
    };
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"nv_inference_request_success", m->requests[DKV_OUTCOME_OK]},
        {"nv_inference_count", m->stats.inference_count},
        {"nv_inference_exec_count", m->stats.execution_count},
        {"nv_inference_request_duration_us", m->stats.success.ns / 1000},
        {"nv_inference_queue_duration_us", m->stats.queue.ns / 1000},
        {"nv_inference_compute_input_duration_us", m->stats.compute_input.ns / 1000},
        {"nv_inference_compute_infer_duration_us", m->stats.compute_infer.ns / 1000},
        {"nv_inference_compute_output_duration_us", m->stats.compute_output.ns / 1000},
    };
    const char *labels = "model=\"dropkv\",version=\"1\"";
    for (unsigned i = 0; i < COUNT_OF(rows); i++) {
        write_head(out, rows[i].name, "counter", "As Triton's metric of this name.");
        fprintf(out, "%s{%s} %llu\n", rows[i].name, labels, (unsigned long long)rows[i].value);
    }
    write_head(out, "nv_inference_request_failure", "counter", "As Triton's metric of this name.");
    for (unsigned i = 0; i < COUNT_OF(reasons); i++)
        fprintf(out, "nv_inference_request_failure{%s,reason=\"%s\"} %llu\n", labels, reasons[i],
                (unsigned long long)failures[i]);
    write_head(out, "nv_inference_pending_request_count", "gauge",
               "As Triton's metric of this name.");
    fprintf(out, "nv_inference_pending_request_count{%s} %llu\n", labels,
            (unsigned long long)g->queue_requests);
}

void dkv_metrics_write(const struct dkv_metrics *metrics, const struct dkv_gauges *gauges,
                       bool nv_names, FILE *out)
{
    write_head(out, "dropkv_backend_info", "gauge", "Always 1; the label names the engine in use.");
    fprintf(out, "dropkv_backend_info{backend=\"%s\"} 1\n", metrics->backend);
    write_counters(metrics, out);
    write_gauges(gauges, out);
    write_queue(gauges, out);
    write_workers(gauges, out);
    write_histogram(out, "dropkv_queue_seconds", "Time from acceptance to the engine.",
                    &metrics->queue_seconds);
    write_histogram(out, "dropkv_compute_seconds", "Time in the engine.",
                    &metrics->compute_seconds);
    write_histogram(out, "dropkv_request_seconds",
                    "Time from a request's header to its reply being ready.",
                    &metrics->request_seconds);
    write_histogram(out, "dropkv_batch_items", "Blocks of an engine batch.", &metrics->batch_items);
    write_histogram(out, "dropkv_batch_tokens", "Stored tokens of an engine batch.",
                    &metrics->batch_tokens);
    write_histogram(out, "dropkv_batch_bytes", "Tensor bytes that an engine batch reads.",
                    &metrics->batch_bytes);
    if (nv_names)
        write_nv(metrics, gauges, out);
}
