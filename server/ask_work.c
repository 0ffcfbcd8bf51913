/* What takes the front long: query rows that are copied, and answers for memory that no worker
 * writes to, as regions that are not sealed, or that were moved together or looked at when they
 * were there.
 *
 * A few MiB are milliseconds, during which everybody else would wait, so a thread of the pool does
 * it. Meanwhile the ask is in its session's list like one that runs, and what it uses of regions
 * and of the job stays.
 */
#include "server/ask.h"

#define DONE_HERE_MAX (UINT64_C(256) << 10) /* some 50 us */

static void on_work(uv_work_t *work)
{
    struct dkv_ask *ask = work->data;
    ask->work_run(ask);
}

static void on_back(uv_work_t *work, int status)
{
    struct dkv_ask *ask = work->data;
    (void)status; /* one that was cancelled is called off */
    ask->server->n_working--;
    ask->work_back(ask);
}

static bool do_work(struct dkv_ask *ask, uint64_t bytes, enum dkv_ask_phase phase,
                    dkv_ask_work_fn run, dkv_ask_work_fn back)
{
    if (bytes <= DONE_HERE_MAX) {
        run(ask);
        return true;
    }
    ask->phase = phase;
    ask->work_run = run;
    ask->work_back = back;
    ask->work.data = ask;
    ask->server->n_working++;
    uv_queue_work(ask->server->loop, &ask->work, on_work, on_back);
    return false;
}

static void read_rows(struct dkv_ask *ask)
{
    (void)dkv_ask_read_rows(ask, &ask->error);
}

bool dkv_ask_fetch(struct dkv_ask *ask, dkv_ask_work_fn back)
{
    if (ask->rings == NULL)
        return true;
    return do_work(ask, ask->job->rows.capacity_bytes, DKV_ASK_READING, read_rows, back);
}

static void write_answer(struct dkv_ask *ask)
{
    (void)dkv_region_write(ask->output, ask->output_offset, ask->job->keep,
                           dkv_ask_answer_bytes(ask), &ask->error);
}

bool dkv_ask_write(struct dkv_ask *ask, dkv_ask_work_fn back)
{
    if (ask->output == NULL || (ask->job->target != NULL && !ask->job->degraded))
        return true;
    return do_work(ask, dkv_ask_answer_bytes(ask), DKV_ASK_WRITING, write_answer, back);
}
