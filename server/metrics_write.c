/* The metrics as Prometheus text, format 0.0.4.
 *
 * What may become a label is a short list: devices, priorities, and words of ours. Nothing that a
 * client says does (streams, request ids, client names), so the number of series is fixed by the
 * configuration and no client can make it grow.
 */
#include "server/metrics.h"

#include "proto/wire.h"
#include "server/process.h"

#include <string.h>

#define COUNT_OF(array) ((unsigned)(sizeof(array) / sizeof((array)[0])))

static const char *const refusal_names[DKV_REFUSALS] = {
    "framing", "auth", "host", "size", "header_time", "body_time", "reply_time"};

static const char *const release_names[DKV_RELEASES] = {"asked", "disconnect"};
static const char *const loan_names[DKV_LOAN_KINDS] = {"sealed", "loose", "device"};

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

static void write_family(FILE *out, const char *name, const char *type, const char *help,
                         const char *label, const char *const *label_values, const uint64_t *values,
                         unsigned n)
{
    write_head(out, name, type, help);
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

static void write_info(const struct dkv_metrics *m, FILE *out)
{
    write_head(out, "dropkv_build_info", "gauge",
               "Always 1; the labels name the program and the protocol of its socket.");
    fprintf(out, "dropkv_build_info{version=\"%s\",protocol=\"%u\"} 1\n", DKV_VERSION,
            DKV_WIRE_VERSION);
    write_head(out, "dropkv_backend_info", "gauge", "Always 1; the label names the engine in use.");
    fprintf(out, "dropkv_backend_info{backend=\"%s\"} 1\n", m->backend);
}

static void write_fronts(const struct dkv_metrics *m, FILE *out)
{
    static const char *const classes[] = {"1xx", "2xx", "3xx", "4xx", "5xx"};
    uint64_t open[DKV_FRONTS];
    write_family(out, "dropkv_http_refused_total", "counter",
                 "Requests and connections refused before their body was read.", "reason",
                 refusal_names, m->refusals, DKV_REFUSALS);
    write_family(out, "dropkv_http_responses_total", "counter", "HTTP responses by class.", "class",
                 classes, m->responses, COUNT_OF(classes));
    write_family(out, "dropkv_connections_total", "counter", "Connections accepted.", "transport",
                 dkv_transport_names, m->connections_total, DKV_FRONTS);
    for (unsigned i = 0; i < DKV_FRONTS; i++)
        open[i] = m->connections_total[i] - m->connections_closed[i];
    write_family(out, "dropkv_connections", "gauge", "Connections open.", "transport",
                 dkv_transport_names, open, DKV_FRONTS);
    write_family(
        out, "dropkv_bytes_in_total", "counter",
        "Bytes of requests: received in bodies (http), behind messages of the local socket "
        "(socket), or read where clients lend them (shared, device).",
        "transport", dkv_transport_names, m->bytes_in, DKV_TRANSPORTS);
}

static void write_counters(const struct dkv_metrics *m, FILE *out)
{
    static const char *const actions[] = {"refused", "masked"};
    const uint64_t nonfinite[] = {m->nonfinite_refused, m->nonfinite_masked};
    write_family(out, "dropkv_requests_total", "counter", "Inference requests by how they ended.",
                 "outcome", dkv_outcome_names, m->requests, DKV_OUTCOMES);
    write_family(out, "dropkv_answered_total", "counter",
                 "Requests answered, by the way their tensors came.", "transport",
                 dkv_transport_names, m->answered, DKV_TRANSPORTS);
    write_number(out, "dropkv_degraded_total", "counter",
                 "Requests answered by recency because of overload.", m->degraded);
    write_number(out, "dropkv_blocks_total", "counter", "Blocks scored.", m->stats.inference_count);
    write_number(out, "dropkv_batches_total", "counter", "Engine batches run.",
                 m->stats.execution_count);
    write_number(out, "dropkv_tokens_in_total", "counter",
                 "Valid tokens of scored blocks, times their KV heads.", m->tokens_in);
    write_number(out, "dropkv_tokens_kept_total", "counter",
                 "Tokens kept in scored blocks, over all KV heads.", m->tokens_kept);
    write_family(out, "dropkv_nonfinite_inputs_total", "counter",
                 "Blocks in which NaN or infinity was met, by what became of them.", "action",
                 actions, nonfinite, COUNT_OF(nonfinite));
    write_family(out, "dropkv_regions_released_total", "counter",
                 "Regions of memory given back: the client asked, or its connection ended.",
                 "reason", release_names, m->regions_released, DKV_RELEASES);
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

/* One family over all workers. */
static void write_worker(const struct dkv_gauges *g, FILE *out, const char *name, const char *type,
                         const char *help, double (*value)(const struct dkv_gauges *, unsigned))
{
    write_head(out, name, type, help);
    for (unsigned i = 0; i < g->n_workers; i++)
        fprintf(out, "%s{worker=\"%u\",device=\"%s\"} %.15g\n", name, i, g->workers[i].device,
                value(g, i));
}

static double up(const struct dkv_gauges *g, unsigned i)
{
    return g->queue->device[i].up;
}

static double given_up(const struct dkv_gauges *g, unsigned i)
{
    return g->workers[i].given_up;
}

static double fallback(const struct dkv_gauges *g, unsigned i)
{
    return g->workers[i].fallback;
}

static double restarts(const struct dkv_gauges *g, unsigned i)
{
    return (double)g->workers[i].restarts;
}

static double in_flight(const struct dkv_gauges *g, unsigned i)
{
    return g->queue->device[i].n_batches;
}

static double busy_s(const struct dkv_gauges *g, unsigned i)
{
    return (double)g->workers[i].busy_ns * 1e-9;
}

static double blocks(const struct dkv_gauges *g, unsigned i)
{
    return (double)g->workers[i].n_blocks;
}

static double scratch_bytes(const struct dkv_gauges *g, unsigned i)
{
    return (double)g->workers[i].scratch_bytes;
}

static double resident_bytes(const struct dkv_gauges *g, unsigned i)
{
    return (double)dkv_process_resident_bytes(g->workers[i].pid);
}

static double mapped_bytes(const struct dkv_gauges *g, unsigned i)
{
    return (double)g->workers[i].mapped_bytes;
}

static void write_workers(const struct dkv_gauges *g, FILE *out)
{
    static const struct {
        const char *name, *type, *help;
        double (*value)(const struct dkv_gauges *, unsigned);
    } rows[] = {
        {"dropkv_worker_up", "gauge", "1 while the worker of a device answers.", up},
        {"dropkv_worker_given_up", "gauge", "1 after a device's workers ended again and again.",
         given_up},
        {"dropkv_worker_fallback", "gauge", "1 while the CPU computes in place of a device.",
         fallback},
        {"dropkv_worker_restarts_total", "counter", "Workers started in place of one that ended.",
         restarts},
        {"dropkv_worker_batches_in_flight", "gauge", "Batches given to a worker, not answered yet.",
         in_flight},
        {"dropkv_worker_busy_seconds_total", "counter",
         "Time with a batch in work: its rate is the share of time in use.", busy_s},
        {"dropkv_worker_blocks_total", "counter", "Blocks that a worker ran.", blocks},
        {"dropkv_worker_scratch_bytes", "gauge", "Working memory of a worker's engine.",
         scratch_bytes},
        {"dropkv_worker_resident_memory_bytes", "gauge",
         "Resident memory of a worker process, what it shares with the front and clients included.",
         resident_bytes},
        {"dropkv_worker_mapped_bytes", "gauge", "Clients' memory that a worker has mapped.",
         mapped_bytes},
    };
    for (unsigned r = 0; r < COUNT_OF(rows); r++)
        write_worker(g, out, rows[r].name, rows[r].type, rows[r].help, rows[r].value);
    write_number(out, "dropkv_batches_lost_total", "counter",
                 "Batches that were in flight when a worker ended.", g->queue->batches_lost);
    write_number(out, "dropkv_replayed_total", "counter",
                 "Requests that ran again after a worker had ended.", g->queue->parts_replayed);
    write_family(out, "dropkv_regions", "gauge",
                 "Regions of memory that clients lend: mapped (sealed), read by copying (loose), "
                 "or of a GPU (device).",
                 "kind", loan_names, g->regions, DKV_LOAN_KINDS);
    write_family(out, "dropkv_region_bytes", "gauge", "Their bytes.", "kind", loan_names,
                 g->region_bytes, DKV_LOAN_KINDS);
}

static void write_gauges(const struct dkv_gauges *g, FILE *out)
{
    write_number(out, "dropkv_ready", "gauge", "1 while new requests are accepted.", g->ready);
    write_number(out, "dropkv_draining", "gauge", "1 while shutting down.", g->draining);
    write_number(out, "dropkv_queue_depth", "gauge", "Requests waiting for the engine.",
                 g->queue_requests);
    write_number(out, "dropkv_running_requests", "gauge", "Requests in the engine.",
                 g->running_requests);
    write_number(out, "dropkv_queue_requests", "gauge",
                 "Requests that the queue has accepted and not ended: waiting or running.",
                 g->queue->n_open);
    write_number(out, "dropkv_queue_limit_requests", "gauge", "Most of them that there may be.",
                 g->queue_limit_requests);
    write_number(out, "dropkv_body_bytes", "gauge", "Bytes of bodies and answers held.",
                 g->body_bytes);
    write_number(out, "dropkv_body_limit_bytes", "gauge",
                 "Most bytes of bodies and answers that may be held.", g->body_limit_bytes);
    write_number(out, "dropkv_scratch_bytes", "gauge", "Working memory of all engines.",
                 g->scratch_bytes);
}

static void write_daemon(const struct dkv_metrics *m, const struct dkv_gauges *g, FILE *out)
{
    static const char *const results[] = {"ok", "failed"};
    write_number(out, "dropkv_streams", "gauge", "Streams remembered for the status page.",
                 g->streams);
    write_number(out, "dropkv_streams_evicted_total", "counter",
                 "Streams forgotten because there were more than max_streams.", g->streams_evicted);
    write_number(out, "dropkv_log_lines_held_back_total", "counter",
                 "Lines of the log that a limit held back.", g->log_held_back);
    write_number(out, "dropkv_log_lines_lost_total", "counter",
                 "Lines of the log that could not be written.", g->log_lost);
    write_number(out, "dropkv_spans_total", "counter", "Spans written to the trace file.",
                 g->spans);
    write_number(out, "dropkv_spans_lost_total", "counter", "Spans that could not be written.",
                 g->spans_lost);
    write_family(out, "dropkv_config_reloads_total", "counter", "Reloads asked for by SIGHUP.",
                 "result", results, m->reloads, DKV_RELOADS);
}

/* The names that every Prometheus client library uses. */
static void write_process(FILE *out)
{
    struct dkv_process_facts facts;
    dkv_process_facts(&facts);
    write_head(out, "process_cpu_seconds_total", "counter",
               "User and system time of the front process.");
    fprintf(out, "process_cpu_seconds_total %.3f\n", facts.cpu_s);
    write_number(out, "process_resident_memory_bytes", "gauge",
                 "Resident memory of the front process.", facts.resident_bytes);
    write_head(out, "process_start_time_seconds", "gauge", "Start, in seconds since 1970.");
    fprintf(out, "process_start_time_seconds %.3f\n", facts.start_time_s);
    write_number(out, "process_open_fds", "gauge", "Open file descriptors.", facts.n_fds);
    write_number(out, "process_max_fds", "gauge", "Most that there may be.", facts.max_fds);
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
    write_info(metrics, out);
    write_gauges(gauges, out);
    write_counters(metrics, out);
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
    write_queue(gauges, out);
    write_workers(gauges, out);
    write_fronts(metrics, out);
    write_daemon(metrics, gauges, out);
    write_process(out);
    if (nv_names)
        write_nv(metrics, gauges, out);
}
