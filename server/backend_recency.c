/* Jobs that are answered by recency, without a device: they end at the loop's next turn, behind a
 * thread of the pool if the answer is large. */
#include "server/backend_priv.h"

#include "server/clock.h"

#include <stdlib.h>

#define RECENCY_HERE_MAX 65536u /* indices that the loop writes itself: some 50 us */

static void end_by_recency(struct dkv_backend *backend, struct dkv_job *job)
{
    job->finished_ns = dkv_clock_ns();
    dkv_list_push_back(&backend->ended, &job->ended_node);
    dkv_backend_pump_soon(backend);
}

struct dkv_by_recency {
    uv_work_t work;
    struct dkv_backend *backend;
    struct dkv_job *job;
};

static void on_work(uv_work_t *work)
{
    const struct dkv_by_recency *by = work->data;
    dkv_job_write_recency(by->job);
}

static void on_written(uv_work_t *work, int status)
{
    struct dkv_by_recency *by = work->data;
    if (status != 0) /* before it began: see cancel() */
        by->job->entry.status = DKV_E_CANCELLED;
    by->job->by_recency = NULL;
    by->backend->n_by_recency--;
    end_by_recency(by->backend, by->job);
    free(by);
}

/* A large answer takes long enough for a thread of the pool. False: no memory for that. */
static bool let_write(struct dkv_backend *backend, struct dkv_job *job)
{
    struct dkv_by_recency *by = malloc(sizeof(*by));
    if (by == NULL)
        return false;
    by->work.data = by;
    by->backend = backend;
    by->job = job;
    job->by_recency = by;
    backend->n_by_recency++;
    uv_queue_work(backend->loop, &by->work, on_work, on_written);
    return true;
}

void dkv_backend_answer_by_recency(struct dkv_backend *backend, struct dkv_job *job)
{
    dkv_job_answer_by_recency(job);
    job->entry.status = DKV_OK;
    job->started_ns = dkv_clock_ns();
    if (job->n_keep > RECENCY_HERE_MAX && let_write(backend, job))
        return;
    dkv_job_write_recency(job);
    end_by_recency(backend, job);
}

bool dkv_backend_is_writing(const struct dkv_backend *backend)
{
    return backend != NULL && backend->n_by_recency > 0;
}

void dkv_backend_call_off_recency(struct dkv_job *job)
{
    if (job->by_recency != NULL)
        uv_cancel((uv_req_t *)&job->by_recency->work); /* fails if a thread has it already */
}
