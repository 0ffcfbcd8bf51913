/* One function through which every request leaves, so that no two counts can disagree. */
#include "server/record.h"

#include "server/clock.h"

#define FIELDS_MAX       16u
#define NOTABLE_OUTCOMES (1u << DKV_OUTCOME_BUSY | 1u << DKV_OUTCOME_TIMEOUT)

/* Stages that it never reached are 0. */
static struct dkv_timing timing_of(const struct dkv_record *record)
{
    const struct dkv_job *job = record->job;
    struct dkv_timing timing = {.output_ns = record->output_ns};
    if (record->started_ns != 0)
        timing.total_ns = dkv_clock_ns() - record->started_ns;
    if (record->status != DKV_OK)
        return timing;
    timing.queue_ns = job->started_ns - job->queued_ns;
    timing.input_ns = job->queued_ns - record->started_ns;
    timing.compute_ns = job->finished_ns - job->started_ns;
    return timing;
}

static const char *stream_of(const struct dkv_record *record)
{
    return record->job != NULL ? record->job->request.params.stream : "";
}

/* What the header said, or the parameter, which is all that the local socket has. */
static struct dkv_trace trace_of(const struct dkv_record *record)
{
    struct dkv_trace trace = {0};
    if (record->trace != NULL && *record->trace->trace_id != '\0')
        trace = *record->trace;
    else if (record->job != NULL)
        dkv_trace_parse(record->job->request.params.traceparent, &trace);
    return trace;
}

static enum dkv_transport transport_of(const struct dkv_record *record)
{
    return record->job != NULL ? dkv_job_transport(record->job, record->transport)
                               : record->transport;
}

/* ---- the log ---- */

struct fields {
    struct dkv_log_field all[FIELDS_MAX];
    unsigned n;
};

static void add_text(struct fields *fields, const char *name, const char *text)
{
    if (text != NULL && *text != '\0')
        fields->all[fields->n++] = (struct dkv_log_field){.name = name, .text = text};
}

static void add_number(struct fields *fields, const char *name, uint64_t number)
{
    fields->all[fields->n++] = (struct dkv_log_field){.name = name, .number = number};
}

static enum dkv_log_level level_of(enum dkv_outcome outcome)
{
    if (outcome == DKV_OUTCOME_FAILED)
        return DKV_LOG_WARN;
    return NOTABLE_OUTCOMES & 1u << outcome ? DKV_LOG_INFO : DKV_LOG_DEBUG;
}

static void write_line(struct dkv_server *server, const struct dkv_record *record,
                       const struct dkv_trace *trace, enum dkv_outcome outcome,
                       const struct dkv_timing *timing)
{
    struct fields fields = {.n = 0};
    const struct dkv_job *job = record->job;
    const enum dkv_log_level level = level_of(outcome);
    struct dkv_log_limit *limit = level == DKV_LOG_DEBUG ? &server->request_log
                                                         : &server->client_log;
    if (!dkv_log_may(limit, level))
        return;
    add_text(&fields, "outcome", dkv_outcome_name(outcome));
    add_text(&fields, "transport", dkv_transport_name(transport_of(record)));
    add_text(&fields, "stream", stream_of(record));
    add_text(&fields, "client", record->client);
    add_text(&fields, "id", record->id);
    if (record->session != 0)
        add_number(&fields, "session", record->session);
    add_text(&fields, "traceparent", trace->text);
    if (job != NULL && job->n_stored_tokens > 0) {
        add_number(&fields, "blocks", job->request.n_blocks);
        add_number(&fields, "tokens", job->n_stored_tokens);
        add_number(&fields, "kept", outcome == DKV_OUTCOME_OK ? job->n_keep : 0);
        add_number(&fields, "bytes", job->n_read_bytes);
    }
    if (outcome == DKV_OUTCOME_OK) {
        add_number(&fields, "queue_us", timing->queue_ns / 1000);
        add_number(&fields, "device_us", timing->compute_ns / 1000);
    }
    add_number(&fields, "total_us", timing->total_ns / 1000);
    if (outcome == DKV_OUTCOME_OK)
        dkv_log_event(level, fields.all, fields.n, "answered request %llu%s",
                      (unsigned long long)server->n_records, job->degraded ? " by recency" : "");
    else
        dkv_log_event(level, fields.all, fields.n, "request %llu ended without an answer, %s",
                      (unsigned long long)server->n_records, record->error);
}

/* ---- traces ---- */

static void write_spans(struct dkv_server *server, const struct dkv_record *record,
                        const struct dkv_trace *trace, enum dkv_outcome outcome)
{
    const struct dkv_job *job = record->job;
    struct dkv_trace_request request = {
        .trace = trace,
        .outcome = dkv_outcome_name(outcome),
        .error = outcome != DKV_OUTCOME_OK ? record->error : NULL,
        .transport = dkv_transport_name(transport_of(record)),
        .stream = stream_of(record),
        .number = server->n_records,
        .started_ns = record->started_ns,
    };
    if (job != NULL) {
        request.blocks = job->request.n_blocks;
        request.tokens = job->n_stored_tokens;
        request.kept = outcome == DKV_OUTCOME_OK ? job->n_keep : 0;
        request.bytes = job->n_read_bytes;
        request.queued_ns = job->queued_ns;
    }
    if (outcome == DKV_OUTCOME_OK) {
        request.launched_ns = job->started_ns;
        request.finished_ns = job->finished_ns;
    }
    dkv_trace_write(&server->traces, &request);
}

/* ---- streams ---- */

static void note_stream(struct dkv_server *server, const struct dkv_record *record,
                        const struct dkv_timing *timing)
{
    const uint64_t now_ms = dkv_clock_ms();
    const char *client = record->client != NULL ? record->client : "";
    struct dkv_stream *stream = dkv_streams_get(&server->streams, stream_of(record), client,
                                                now_ms);
    if (record->status == DKV_OK)
        dkv_stream_answered(&server->streams, stream, record->job, transport_of(record),
                            timing->total_ns, now_ms);
    else
        stream->n_failed++;
}

void dkv_record_end(struct dkv_server *server, const struct dkv_record *record)
{
    const enum dkv_outcome outcome = dkv_outcome_of(record->status);
    const struct dkv_timing timing = timing_of(record);
    server->n_records++;
    if (outcome == DKV_OUTCOME_OK)
        dkv_metrics_answer(&server->metrics, record->job, record->transport);
    dkv_metrics_request(&server->metrics, outcome, &timing);
    note_stream(server, record, &timing);
    const struct dkv_trace trace = trace_of(record);
    write_spans(server, record, &trace, outcome);
    write_line(server, record, &trace, outcome, &timing);
}
