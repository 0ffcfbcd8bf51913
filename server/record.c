/* One function through which every request leaves, so that no two counts can disagree. */
#include "server/record.h"

#include "server/clock.h"

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

void dkv_record_end(struct dkv_server *server, const struct dkv_record *record)
{
    struct dkv_metrics *metrics = &server->metrics;
    const struct dkv_job *job = record->job;
    const struct dkv_timing timing = timing_of(record);
    if (record->status == DKV_OK)
        dkv_metrics_answer(metrics, job, record->transport);
    dkv_metrics_request(metrics, dkv_outcome_of(record->status), &timing);
}
