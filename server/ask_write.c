/* Answers for memory that no worker writes to: regions that are not sealed, answers that were moved
 * together or looked at when they were there.
 *
 * A large one takes milliseconds, during which everybody else would wait, so a thread of the pool
 * does it. Until it has, the ask is in its session's list like one that runs, and what it uses of
 * the region and of the job stays.
 */
#include "server/ask.h"

#define WRITTEN_HERE_MAX (UINT64_C(256) << 10) /* some 50 us */

static void write_answer(struct dkv_ask *ask)
{
    dkv_region_write(ask->output, ask->output_offset, ask->job->keep, dkv_ask_answer_bytes(ask),
                     &ask->error);
}

static void on_work(uv_work_t *work)
{
    write_answer(work->data);
}

static void on_back(uv_work_t *work, int status)
{
    struct dkv_ask *ask = work->data;
    (void)status; /* nobody cancels it */
    ask->server->n_writing--;
    ask->written(ask);
}

bool dkv_ask_write(struct dkv_ask *ask, void (*written)(struct dkv_ask *ask))
{
    if (ask->output == NULL || (ask->job->target != NULL && !ask->job->degraded))
        return true;
    if (dkv_ask_answer_bytes(ask) <= WRITTEN_HERE_MAX) {
        write_answer(ask);
        return true;
    }
    ask->phase = DKV_ASK_WRITING;
    ask->written = written;
    ask->work.data = ask;
    ask->server->n_writing++;
    uv_queue_work(ask->server->loop, &ask->work, on_work, on_back);
    return false;
}
