/* One thread that owns the engine, a mutex, and two lists.
 *
 *   loop                      mutex                        engine thread
 *   submit -----------------> queue (FIFO) --------------> batch (its own array of items)
 *   done() <-- uv_async <---- finished <------------------ results copied back into the jobs
 *
 * uv_async_send() coalesces, so on_finished() takes the whole list every time. The engine must be
 * used from one thread, so that thread opens and closes it as well; open() waits for the outcome.
 *
 * A batch is several jobs only if they are small: together they fill threads that one small job
 * cannot, while a large job gains nothing and would make its companions wait. Between dequeue and
 * reply nothing is allocated: the array of items is made at start.
 */
#include "server/backend.h"

#include "server/clock.h"
#include "server/log.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct job_list {
    struct dkv_job *first;
    struct dkv_job **tail;
    unsigned n;
};

struct dkv_backend {
    const struct dkv_config *config;
    pthread_t thread;
    uv_async_t wake_loop;

    pthread_mutex_t lock; /* guards what follows, and job->cancelled */
    pthread_cond_t wake_thread;
    struct job_list queue;
    struct job_list finished;
    unsigned n_running;
    bool stopping;
    bool opened; /* open() may go on: open_status says how it went */
    enum dkv_status open_status;
    struct dkv_error open_error;
    struct dkv_engine_info engine_info;

    /* The engine thread's own. */
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    struct dkv_item *batch_items; /* [DKV_BLOCKS_MAX] */
};

static void list_init(struct job_list *list)
{
    *list = (struct job_list){NULL, &list->first, 0};
}

static void list_push(struct job_list *list, struct dkv_job *job)
{
    job->next = NULL;
    *list->tail = job;
    list->tail = &job->next;
    list->n++;
}

static struct dkv_job *list_pop(struct job_list *list)
{
    struct dkv_job *job = list->first;
    if (job == NULL)
        return NULL;
    list->first = job->next;
    if (list->first == NULL)
        list->tail = &list->first;
    list->n--;
    job->next = NULL;
    return job;
}

/* Takes everything; the result is a chain by `next`. */
static struct dkv_job *list_take_all(struct job_list *list)
{
    struct dkv_job *chain = list->first;
    list_init(list);
    return chain;
}

static void end_job(struct dkv_job *job, enum dkv_status status, const char *text)
{
    job->status = dkv_error_set(&job->error, status, "%s", text);
    job->finished_ns = dkv_clock_ns();
}

/* ---- the engine thread ---- */

static enum dkv_status open_engine(struct dkv_backend *backend, struct dkv_error *err)
{
    struct dkv_engine_config config = {.threads = (unsigned)backend->config->threads};
    enum dkv_status status = dkv_engine_find(backend->config->device, &backend->ops, &config.device,
                                             err);
    if (status == DKV_OK)
        status = backend->ops->open(&config, &backend->engine, err);
    return status;
}

static void publish_engine(struct dkv_backend *backend)
{
    struct dkv_error err = {0};
    enum dkv_status status = open_engine(backend, &err);
    struct dkv_engine_info info = {0};
    if (status == DKV_OK)
        backend->ops->info(backend->engine, &info);
    pthread_mutex_lock(&backend->lock);
    backend->open_status = status;
    backend->open_error = err;
    backend->engine_info = info;
    backend->opened = true;
    pthread_cond_broadcast(&backend->wake_thread);
    pthread_mutex_unlock(&backend->lock);
}

/* Moves jobs of one batch from the queue to `batch`, with the lock held. Jobs that must not start
 * any more end here. */
static void form_batch(struct dkv_backend *backend, struct job_list *batch, size_t *n_items_out,
                       uint64_t *n_tokens_out)
{
    const uint64_t now_ns = dkv_clock_ns();
    size_t n_items = 0;
    uint64_t n_tokens = 0;
    while (backend->queue.first != NULL) {
        struct dkv_job *job = backend->queue.first;
        if (job->deadline_ns != 0 && now_ns >= job->deadline_ns) {
            list_pop(&backend->queue);
            end_job(job, DKV_E_TIMEOUT, "the deadline passed before the work started");
            list_push(&backend->finished, job);
            continue;
        }
        if (batch->n > 0 && (n_items + job->request.n_blocks > backend->config->max_batch_items ||
                             n_tokens + job->n_stored_tokens > backend->config->max_batch_tokens))
            break;
        list_push(batch, list_pop(&backend->queue));
        n_items += job->request.n_blocks;
        n_tokens += job->n_stored_tokens;
    }
    backend->n_running = batch->n;
    *n_items_out = n_items;
    *n_tokens_out = n_tokens;
}

static void judge_job(struct dkv_job *job)
{
    for (uint32_t i = 0; i < job->request.n_blocks; i++)
        if (job->items[i].status != DKV_OK) {
            job->status = job->items[i].status;
            job->error = job->items[i].error;
            return;
        }
    job->status = DKV_OK;
}

static void run_batch(struct dkv_backend *backend, struct job_list *batch, size_t n_items,
                      uint64_t n_tokens)
{
    struct dkv_item *items = backend->batch_items;
    struct dkv_error err = {0};
    const uint64_t started_ns = dkv_clock_ns();
    size_t at = 0;
    for (struct dkv_job *job = batch->first; job != NULL; job = job->next) {
        memcpy(items + at, job->items, job->request.n_blocks * sizeof(*items));
        at += job->request.n_blocks;
    }
    assert(at == n_items);
    enum dkv_status status = dkv_engine_run(backend->ops, backend->engine, items, n_items, &err);
    const uint64_t finished_ns = dkv_clock_ns();

    at = 0;
    for (struct dkv_job *job = batch->first; job != NULL; job = job->next) {
        memcpy(job->items, items + at, job->request.n_blocks * sizeof(*items));
        at += job->request.n_blocks;
        job->started_ns = started_ns;
        job->finished_ns = finished_ns;
        job->batch_items = (unsigned)n_items;
        job->batch_tokens = n_tokens;
        job->batch_first = job == batch->first;
        if (status == DKV_OK) {
            judge_job(job);
        } else {
            job->status = status;
            job->error = err;
        }
    }
}

static void finish_batch(struct dkv_backend *backend, struct job_list *batch)
{
    struct dkv_job *job;
    const uint64_t now_ns = dkv_clock_ns();
    backend->ops->info(backend->engine, &backend->engine_info);
    while ((job = list_pop(batch)) != NULL) {
        if (job->cancelled)
            end_job(job, DKV_E_CANCELLED, "the caller went away");
        else if (job->deadline_ns != 0 && now_ns >= job->deadline_ns)
            end_job(job, DKV_E_TIMEOUT, "the deadline passed while the work ran");
        list_push(&backend->finished, job);
    }
    backend->n_running = 0;
}

static void *engine_thread(void *argument)
{
    struct dkv_backend *backend = argument;
    publish_engine(backend);
    if (backend->open_status != DKV_OK)
        return NULL;

    pthread_mutex_lock(&backend->lock);
    for (;;) {
        struct job_list batch;
        size_t n_items;
        uint64_t n_tokens;
        while (backend->queue.first == NULL && !backend->stopping)
            pthread_cond_wait(&backend->wake_thread, &backend->lock);
        if (backend->stopping)
            break;
        list_init(&batch);
        form_batch(backend, &batch, &n_items, &n_tokens);
        if (batch.n > 0) {
            pthread_mutex_unlock(&backend->lock);
            run_batch(backend, &batch, n_items, n_tokens);
            pthread_mutex_lock(&backend->lock);
            finish_batch(backend, &batch);
        }
        uv_async_send(&backend->wake_loop);
    }
    pthread_mutex_unlock(&backend->lock);
    backend->ops->close(backend->engine);
    return NULL;
}

/* ---- the loop ---- */

static void finish_chain(struct dkv_job *job)
{
    while (job != NULL) {
        struct dkv_job *next = job->next;
        job->next = NULL;
        job->done(job, job->owner);
        job = next;
    }
}

static void on_finished(uv_async_t *async)
{
    struct dkv_backend *backend = async->data;
    pthread_mutex_lock(&backend->lock);
    struct dkv_job *chain = list_take_all(&backend->finished);
    pthread_mutex_unlock(&backend->lock);
    finish_chain(chain);
}

static void free_backend(uv_handle_t *handle)
{
    struct dkv_backend *backend = handle->data;
    pthread_cond_destroy(&backend->wake_thread);
    pthread_mutex_destroy(&backend->lock);
    free(backend->batch_items);
    free(backend);
}

enum dkv_status dkv_backend_open(const struct dkv_config *config, uv_loop_t *loop,
                                 struct dkv_backend **backend_out, struct dkv_error *err)
{
    struct dkv_backend *backend = calloc(1, sizeof(*backend));
    if (backend == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the backend");
    backend->config = config;
    list_init(&backend->queue);
    list_init(&backend->finished);
    pthread_mutex_init(&backend->lock, NULL);
    pthread_cond_init(&backend->wake_thread, NULL);
    uv_async_init(loop, &backend->wake_loop, on_finished);
    backend->wake_loop.data = backend;
    backend->batch_items = calloc(DKV_BLOCKS_MAX, sizeof(*backend->batch_items));

    enum dkv_status status = DKV_E_NOMEM;
    if (backend->batch_items == NULL ||
        pthread_create(&backend->thread, NULL, engine_thread, backend) != 0) {
        dkv_error_set(err, status, "no memory for the engine's thread");
    } else {
        pthread_mutex_lock(&backend->lock);
        while (!backend->opened)
            pthread_cond_wait(&backend->wake_thread, &backend->lock);
        pthread_mutex_unlock(&backend->lock);
        status = backend->open_status;
        if (status == DKV_OK) {
            *backend_out = backend;
            return DKV_OK;
        }
        pthread_join(backend->thread, NULL);
        if (err != NULL)
            *err = backend->open_error;
    }
    uv_close((uv_handle_t *)&backend->wake_loop, free_backend);
    return status;
}

void dkv_backend_close(struct dkv_backend *backend)
{
    if (backend == NULL)
        return;
    dkv_backend_expire(backend, 0, true);
    pthread_mutex_lock(&backend->lock);
    backend->stopping = true;
    pthread_cond_broadcast(&backend->wake_thread);
    pthread_mutex_unlock(&backend->lock);
    pthread_join(backend->thread, NULL);
    on_finished(&backend->wake_loop);
    uv_close((uv_handle_t *)&backend->wake_loop, free_backend);
}

enum dkv_status dkv_backend_submit(struct dkv_backend *backend, struct dkv_job *job,
                                   struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    job->queued_ns = dkv_clock_ns();
    if (job->deadline_ns != 0 && job->queued_ns >= job->deadline_ns)
        return dkv_error_set(err, DKV_E_TIMEOUT, "the deadline passed before the request was read");
    pthread_mutex_lock(&backend->lock);
    if (backend->queue.n + backend->n_running >= backend->config->max_queue_requests) {
        status = dkv_error_set(err, DKV_E_BUSY, "%llu requests are waiting already",
                               (unsigned long long)backend->config->max_queue_requests);
    } else {
        list_push(&backend->queue, job);
        pthread_cond_signal(&backend->wake_thread);
    }
    pthread_mutex_unlock(&backend->lock);
    return status;
}

/* Takes jobs out of the queue, with the lock held: `job` if given, else all, else those whose
 * deadline passed. Returns a chain. */
static struct dkv_job *extract(struct dkv_backend *backend, const struct dkv_job *job,
                               uint64_t now_ns, bool all)
{
    struct job_list kept, taken;
    struct dkv_job *each;
    list_init(&kept);
    list_init(&taken);
    while ((each = list_pop(&backend->queue)) != NULL) {
        bool expired = each->deadline_ns != 0 && now_ns >= each->deadline_ns;
        bool take = job != NULL ? each == job : all || expired;
        list_push(take ? &taken : &kept, each);
    }
    list_init(&backend->queue);
    while ((each = list_pop(&kept)) != NULL)
        list_push(&backend->queue, each);
    return taken.first;
}

void dkv_backend_cancel(struct dkv_backend *backend, struct dkv_job *job)
{
    pthread_mutex_lock(&backend->lock);
    job->cancelled = true;
    struct dkv_job *chain = extract(backend, job, 0, false);
    pthread_mutex_unlock(&backend->lock);
    if (chain != NULL) {
        end_job(chain, DKV_E_CANCELLED, "the caller went away");
        finish_chain(chain);
    }
}

void dkv_backend_expire(struct dkv_backend *backend, uint64_t now_ns, bool all)
{
    pthread_mutex_lock(&backend->lock);
    struct dkv_job *chain = extract(backend, NULL, now_ns, all);
    pthread_mutex_unlock(&backend->lock);
    for (struct dkv_job *job = chain; job != NULL; job = job->next)
        end_job(job, all ? DKV_E_DRAINING : DKV_E_TIMEOUT,
                all ? "the server is shutting down" : "the deadline passed while waiting");
    finish_chain(chain);
}

void dkv_backend_info(struct dkv_backend *backend, struct dkv_backend_info *info_out)
{
    pthread_mutex_lock(&backend->lock);
    info_out->engine = backend->engine_info;
    info_out->n_queued = backend->queue.n;
    info_out->n_running = backend->n_running;
    pthread_mutex_unlock(&backend->lock);
}
