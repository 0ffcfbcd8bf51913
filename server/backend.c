/* The admission queue between those who submit and the workers.
 *
 *   submit --> offer ---+                        +--> launch --> worker
 *                       v                        |                  |
 *                  admission queue -- next() ----+    complete() <--+ done / lost
 *                       |
 *                       +-- pop_given_up() --> job->overdue()
 *                       +-- pop_done() --> job->done()
 *
 * The queue never calls back, so every event here is followed by pump(): launch what may run, hand
 * out what has ended, set the timer for the next deadline. A done() may submit or cancel, which
 * comes back here; pump() is not entered twice, it goes round once more instead. submit() launches
 * but leaves endings to the loop's next turn, so that no caller sees its job end before it knows
 * that it was taken.
 */
#include "server/backend_priv.h"

#include "server/clock.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static uint64_t now_us(void)
{
    return dkv_clock_ns() / 1000;
}

static struct dkv_job *job_of(struct dkv_admission_entry *entry)
{
    return DKV_LIST_OF(entry, struct dkv_job, entry);
}

/* ---- how jobs end ---- */

static const char *ending_text(const struct dkv_admission_entry *entry)
{
    switch (entry->status) {
    case DKV_E_TIMEOUT:
        return entry->launched_us == 0 ? "the deadline passed before the work started"
                                       : "the deadline passed while the work ran";
    case DKV_E_CANCELLED: return "the caller went away";
    case DKV_E_DRAINING: return "the server is shutting down";
    case DKV_E_UNAVAILABLE: return "no device is left that could run this";
    case DKV_E_DEVICE: return "the device was lost twice while it ran this request";
    default: return dkv_status_info(entry->status)->text;
    }
}

/* Who waits need not wait for work that comes too late. A job that is given up for another reason
 * has lost its caller. */
static void tell_overdue(struct dkv_admission_entry *entry)
{
    struct dkv_job *job = job_of(entry);
    const dkv_job_overdue_fn overdue = job->overdue;
    struct dkv_error why = {0};
    job->overdue = NULL;
    if (overdue == NULL || entry->status != DKV_E_TIMEOUT)
        return;
    dkv_error_set(&why, entry->status, "%s", ending_text(entry));
    overdue(job, job->owner, &why);
}

static void hand_out(struct dkv_job *job)
{
    struct dkv_backend_client *client = job->client;
    job->client = NULL;
    dkv_backend_drop_loans(job);
    if (job->entry.status != DKV_OK) {
        job->status = dkv_error_set(&job->error, job->entry.status, "%s", ending_text(&job->entry));
        job->finished_ns = dkv_clock_ns();
    }
    if (job->status == DKV_OK)
        job->status = dkv_job_close_ranks(job, &job->error);
    job->done(job, job->owner); /* the job may be gone now */
    client->n_jobs--;
    dkv_backend_client_free_if_unused(client);
}

static void hand_out_ended(struct dkv_backend *backend)
{
    struct dkv_admission_entry *entry;
    struct dkv_list *node;
    while ((entry = dkv_admission_pop_given_up(backend->queue)) != NULL)
        tell_overdue(entry);
    while ((entry = dkv_admission_pop_done(backend->queue)) != NULL)
        hand_out(job_of(entry));
    while ((node = dkv_list_first(&backend->ended)) != NULL) {
        dkv_list_remove(node);
        hand_out(DKV_LIST_OF(node, struct dkv_job, ended_node));
    }
}

/* ---- launches ---- */

static struct dkv_run *free_run(struct dkv_backend_device *device)
{
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++)
        if (device->runs[i].batch == NULL)
            return &device->runs[i];
    assert(false);
    return NULL;
}

static void launch(struct dkv_backend *backend, struct dkv_admission_batch *batch)
{
    struct dkv_backend_device *device = &backend->devices[batch->device];
    struct dkv_run *run = free_run(device);
    run->batch = batch;
    run->n_parts = 0;
    DKV_LIST_EACH (node, &batch->parts) {
        struct dkv_admission_part *part = DKV_LIST_OF(node, struct dkv_admission_part, node);
        struct dkv_job *job = job_of(part->entry);
        assert(run->n_parts < backend->limits.batch_blocks);
        run->parts[run->n_parts++] = (struct dkv_run_part){job,
                                                           job->written[part - job->parts].job};
    }
    backend->n_running += run->n_parts;
    backend->n_launched++;
    dkv_worker_launch(device->worker, run);
    dkv_spin_poke(&backend->spin, DKV_SPIN_FOR_BATCH, dkv_clock_ns());
}

static void launch_all(struct dkv_backend *backend)
{
    struct dkv_admission_batch *batch;
    while ((batch = dkv_admission_next(backend->queue, now_us())) != NULL)
        launch(backend, batch);
}

static void on_timer(uv_timer_t *timer);

static void set_timer(struct dkv_backend *backend)
{
    const uint64_t now = now_us();
    const uint64_t wakeup = dkv_admission_wakeup_us(backend->queue, now);
    if (wakeup == DKV_ADMISSION_NEVER)
        uv_timer_stop(&backend->timer);
    else
        uv_timer_start(&backend->timer, on_timer, wakeup > now ? (wakeup - now + 999) / 1000 : 0,
                       0);
}

static void pump(struct dkv_backend *backend)
{
    if (backend->pumping) {
        backend->again = true;
        return;
    }
    backend->pumping = true;
    backend->soon = false;
    do {
        backend->again = false;
        launch_all(backend);
        hand_out_ended(backend);
    } while (backend->again);
    backend->pumping = false;
    if (backend->settled != NULL)
        backend->settled(backend->settled_owner);
    set_timer(backend);
}

static void on_timer(uv_timer_t *timer)
{
    pump(timer->data);
}

/* ---- what workers say ---- */

static void on_up(void *owner, unsigned index, const struct dkv_engine_info *info)
{
    struct dkv_backend *backend = owner;
    backend->devices[index].engine = *info;
    backend->devices[index].up = true;
    dkv_admission_device_up(backend->queue, index);
    if (backend->devices[index].worker == NULL)
        return; /* while it opens: no loan yet, and nothing to run */
    dkv_backend_show_loans(backend, index);
    pump(backend);
}

/* A job's outcome is its first failed block's. It begins as OK, and a part ends but once. */
static void judge_part(const struct dkv_run_part *part)
{
    struct dkv_job *job = part->job;
    for (uint32_t i = 0; i < part->descriptor->n_blocks; i++) {
        const struct dkv_link_block *block = &part->descriptor->blocks[i];
        job->n_refused_nonfinite += block->nonfinite && block->status != DKV_OK;
        job->n_masked_nonfinite += block->nonfinite && block->status == DKV_OK;
        if (job->status == DKV_OK && block->status != DKV_OK) {
            job->status = block->status;
            job->error = block->error;
        }
    }
}

/* Batches of one device may overlap; a moment counts once. */
static void count_busy(struct dkv_backend_device *device, const struct dkv_run *run)
{
    const uint64_t from = run->started_ns > device->busy_until_ns ? run->started_ns
                                                                  : device->busy_until_ns;
    if (run->finished_ns <= from)
        return;
    device->busy_ns += run->finished_ns - from;
    device->busy_until_ns = run->finished_ns;
}

static void on_done(void *owner, unsigned index, struct dkv_run *run, uint64_t scratch_bytes)
{
    struct dkv_backend *backend = owner;
    struct dkv_admission_batch *batch = run->batch;
    backend->devices[index].scratch_bytes = scratch_bytes;
    backend->devices[index].n_blocks += batch->n_blocks;
    count_busy(&backend->devices[index], run);
    for (unsigned i = 0; i < run->n_parts; i++) {
        struct dkv_job *job = run->parts[i].job;
        if (job->started_ns == 0 || run->started_ns < job->started_ns)
            job->started_ns = run->started_ns;
        if (run->finished_ns > job->finished_ns)
            job->finished_ns = run->finished_ns;
        job->batch_items = (unsigned)batch->n_blocks;
        job->batch_tokens = batch->n_tokens;
        job->batch_bytes = batch->n_bytes;
        job->batch_first = i == 0;
        job->backend = backend->devices[index].engine.backend;
        judge_part(&run->parts[i]);
    }
    backend->n_running -= run->n_parts;
    run->batch = NULL;
    const uint64_t now_ns = dkv_clock_ns();
    dkv_spin_poke(&backend->spin,
                  backend->n_running > 0 ? DKV_SPIN_FOR_BATCH : DKV_SPIN_FOR_REQUEST, now_ns);
    dkv_admission_complete(backend->queue, batch, now_ns / 1000);
    pump(backend);
}

static void forget_runs(struct dkv_backend *backend, struct dkv_backend_device *device)
{
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++)
        if (device->runs[i].batch != NULL) {
            backend->n_running -= device->runs[i].n_parts;
            device->runs[i].batch = NULL;
        }
}

static void on_lost(void *owner, unsigned index, bool for_good)
{
    struct dkv_backend *backend = owner;
    backend->devices[index].up = false;
    forget_runs(backend, &backend->devices[index]);
    if (for_good)
        dkv_admission_device_retire(backend->queue, index, now_us());
    else
        dkv_admission_device_lost(backend->queue, index, now_us());
    dkv_backend_forget_loans(backend, index);
    pump(backend);
}

/* ---- open and close ---- */

static bool make_runs(struct dkv_backend *backend)
{
    for (unsigned d = 0; d < backend->n_devices; d++)
        for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++) {
            struct dkv_run *run = &backend->devices[d].runs[i];
            run->parts = calloc(backend->limits.batch_blocks, sizeof(*run->parts));
            if (run->parts == NULL)
                return false;
        }
    return true;
}

static void free_backend(uv_handle_t *handle)
{
    struct dkv_backend *backend = handle->data;
    if (--backend->n_open_handles > 0)
        return;
    dkv_backend_free_clients(backend);
    dkv_backend_free_loans(backend);
    dkv_admission_free(backend->queue);
    for (unsigned d = 0; d < backend->n_devices; d++)
        for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++)
            free(backend->devices[d].runs[i].parts);
    free(backend);
}

enum dkv_status dkv_backend_open(const struct dkv_config *config, uv_loop_t *loop,
                                 struct dkv_arena *arena, struct dkv_backend **backend_out,
                                 struct dkv_error *err)
{
    struct dkv_backend *backend = calloc(1, sizeof(*backend));
    if (backend == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the backend");
    backend->config = config;
    backend->loop = loop;
    backend->arena = arena;
    dkv_list_init(&backend->clients);
    dkv_list_init(&backend->ended);
    uv_timer_init(loop, &backend->timer);
    dkv_spin_open(&backend->spin, loop, dkv_spin_patience_ns(config),
                  dkv_spin_front_learns(config));
    backend->n_open_handles = 2;
    backend->timer.data = backend;
    const struct dkv_worker_calls calls = {
        backend, on_up, on_done, on_lost, dkv_backend_on_attached, dkv_backend_on_detached};
    enum dkv_status status = dkv_backend_limits(config, &backend->limits, err);
    if (status == DKV_OK)
        status = dkv_admission_new(&backend->limits, &backend->queue, err);
    backend->n_devices = status == DKV_OK ? backend->limits.n_devices : 0;
    if (status == DKV_OK && !make_runs(backend))
        status = dkv_error_set(err, DKV_E_NOMEM, "no memory for the backend");
    for (unsigned d = 0; status == DKV_OK && d < backend->n_devices; d++) {
        struct dkv_backend_device *device = &backend->devices[d];
        char name[DKV_DEVICE_NAME_BYTES];
        dkv_config_device(config, d, name);
        status = dkv_worker_open(config, name, d, loop, arena, device->runs, &calls,
                                 &device->worker, err);
    }
    if (status == DKV_OK)
        *backend_out = backend;
    else
        dkv_backend_close(backend);
    return status;
}

void dkv_backend_close(struct dkv_backend *backend)
{
    if (backend == NULL)
        return;
    for (unsigned d = 0; d < backend->n_devices; d++) {
        struct dkv_backend_device *device = &backend->devices[d];
        dkv_worker_close(device->worker);
        device->worker = NULL;
        device->up = false;
        forget_runs(backend, device);
        dkv_backend_forget_loans(backend, d);
    }
    if (backend->queue != NULL) {
        dkv_admission_fail_all(backend->queue, DKV_E_DRAINING, now_us());
        for (unsigned d = 0; d < backend->n_devices; d++)
            dkv_admission_device_retire(backend->queue, d, now_us());
        dkv_admission_drain(backend->queue);
        pump(backend);
    }
    uv_close((uv_handle_t *)&backend->timer, free_backend);
    backend->spin.idle.data = backend;
    dkv_spin_close(&backend->spin, free_backend);
}

/* ---- what callers ask for ---- */

/* The endings wait for the loop's next turn. */
void dkv_backend_pump_soon(struct dkv_backend *backend)
{
    if (backend->soon)
        return;
    backend->soon = true;
    uv_timer_start(&backend->timer, on_timer, 0, 0);
}

enum dkv_status dkv_backend_submit(struct dkv_backend *backend, struct dkv_backend_client *client,
                                   struct dkv_job *job, struct dkv_backend_refusal *refusal_out,
                                   struct dkv_error *err)
{
    job->queued_ns = dkv_clock_ns();
    job->client = client;
    if (job->entry.priority > backend->limits.n_levels)
        job->entry.priority = 0;
    *refusal_out = (struct dkv_backend_refusal){503, 0};
    const enum dkv_admission_verdict verdict = dkv_admission_offer(
        backend->queue, &client->share, &job->entry, job->queued_ns / 1000, &refusal_out->retry_us,
        err);
    if (verdict == DKV_ADMISSION_DEGRADED) {
        client->n_jobs++;
        dkv_backend_hold_loans(job);
        dkv_backend_answer_by_recency(backend, job);
        return DKV_OK;
    }
    if (verdict != DKV_ADMISSION_ACCEPTED) {
        job->client = NULL;
        refusal_out->http_status = dkv_admission_verdict_info(verdict)->http_status;
        return dkv_admission_verdict_info(verdict)->status;
    }
    client->n_jobs++;
    dkv_backend_hold_loans(job);
    launch_all(backend);
    dkv_backend_pump_soon(backend);
    return DKV_OK;
}

void dkv_backend_cancel(struct dkv_backend *backend, struct dkv_job *job)
{
    if (job->degraded) { /* it has ended, and is handed out at a later turn of the loop */
        dkv_backend_call_off_recency(job);
        return;
    }
    dkv_admission_fail(backend->queue, &job->entry, DKV_E_CANCELLED, now_us());
    pump(backend);
}

void dkv_backend_client_cancel(struct dkv_backend_client *client)
{
    struct dkv_backend *backend = client->backend;
    dkv_admission_client_cancel(backend->queue, &client->share, now_us());
    pump(backend);
}

void dkv_backend_on_settled(struct dkv_backend *backend, dkv_backend_settled_fn settled,
                            void *owner)
{
    backend->settled = settled;
    backend->settled_owner = owner;
}

enum dkv_status dkv_backend_relimit(struct dkv_backend *backend, const struct dkv_config *config,
                                    struct dkv_error *err)
{
    struct dkv_admission_config limits;
    enum dkv_status status = dkv_backend_limits(config, &limits, err);
    if (status == DKV_OK)
        status = dkv_admission_relimit(backend->queue, &limits, err);
    if (status != DKV_OK)
        return status;
    backend->limits.max_entries = limits.max_entries;
    pump(backend); /* what waited for a delay may go now */
    return DKV_OK;
}

void dkv_backend_hangup(const struct dkv_backend *backend)
{
    for (unsigned d = 0; d < backend->n_devices; d++)
        dkv_worker_hangup(backend->devices[d].worker);
}
