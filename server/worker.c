/* One thread that owns the engine, a mutex, and two slots.
 *
 *   loop                    mutex                 engine thread
 *   launch ---------------> next   -------------> engine
 *   done() <-- uv_async <-- ended  <------------- results are in the jobs
 *
 * The engine must be used from one thread, so that thread opens and closes it as well; open() waits
 * for the outcome. Between launch and done nothing is allocated.
 */
#include "server/worker.h"

#include "server/clock.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct dkv_worker {
    const struct dkv_config *config;
    struct dkv_worker_calls calls;
    char device[32];
    unsigned index;
    pthread_t thread;
    uv_async_t wake_loop;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t wake_thread;
    struct dkv_run *next;
    struct dkv_run *ended;
    bool stopping;
    bool opened; /* open() may go on: open_status says how it went */
    enum dkv_status open_status;
    struct dkv_error open_error;
    struct dkv_engine_info info;

    /* The engine thread's own. */
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    struct dkv_item *items; /* [n_items] */
    size_t n_items;
};

static void publish_engine(struct dkv_worker *worker)
{
    struct dkv_error err = {0};
    struct dkv_engine_config config = {.threads = (unsigned)worker->config->threads};
    enum dkv_status status = dkv_engine_find(worker->device, &worker->ops, &config.device, &err);
    if (status == DKV_OK)
        status = worker->ops->open(&config, &worker->engine, &err);
    pthread_mutex_lock(&worker->lock);
    if (status == DKV_OK)
        worker->ops->info(worker->engine, &worker->info);
    worker->open_status = status;
    worker->open_error = err;
    worker->opened = true;
    pthread_cond_broadcast(&worker->wake_thread);
    pthread_mutex_unlock(&worker->lock);
}

static void run_batch(struct dkv_worker *worker, struct dkv_run *run)
{
    size_t at = 0;
    run->started_ns = dkv_clock_ns();
    for (unsigned i = 0; i < run->n_jobs; i++) {
        const struct dkv_job *job = run->jobs[i];
        memcpy(worker->items + at, job->items, job->request.n_blocks * sizeof(*worker->items));
        at += job->request.n_blocks;
    }
    assert(at == run->n_blocks && at <= worker->n_items);
    run->status = dkv_engine_run(worker->ops, worker->engine, worker->items, at, &run->error);
    run->finished_ns = dkv_clock_ns();
    at = 0;
    for (unsigned i = 0; i < run->n_jobs; i++) {
        struct dkv_job *job = run->jobs[i];
        memcpy(job->items, worker->items + at, job->request.n_blocks * sizeof(*worker->items));
        at += job->request.n_blocks;
    }
}

static void *engine_thread(void *argument)
{
    struct dkv_worker *worker = argument;
    publish_engine(worker);
    if (worker->open_status != DKV_OK)
        return NULL;
    pthread_mutex_lock(&worker->lock);
    for (;;) {
        while (worker->next == NULL && !worker->stopping)
            pthread_cond_wait(&worker->wake_thread, &worker->lock);
        if (worker->stopping)
            break;
        struct dkv_run *run = worker->next;
        worker->next = NULL;
        pthread_mutex_unlock(&worker->lock);
        run_batch(worker, run);
        pthread_mutex_lock(&worker->lock);
        worker->ops->info(worker->engine, &worker->info);
        worker->ended = run;
        uv_async_send(&worker->wake_loop);
    }
    pthread_mutex_unlock(&worker->lock);
    worker->ops->close(worker->engine);
    return NULL;
}

static void on_wake(uv_async_t *async)
{
    struct dkv_worker *worker = async->data;
    pthread_mutex_lock(&worker->lock);
    struct dkv_run *run = worker->ended;
    worker->ended = NULL;
    pthread_mutex_unlock(&worker->lock);
    if (run != NULL)
        worker->calls.done(worker->calls.owner, worker->index, run);
}

static void free_worker(uv_handle_t *handle)
{
    struct dkv_worker *worker = handle->data;
    pthread_cond_destroy(&worker->wake_thread);
    pthread_mutex_destroy(&worker->lock);
    free(worker->items);
    free(worker);
}

enum dkv_status dkv_worker_open(const struct dkv_config *config, const char *device, unsigned index,
                                uv_loop_t *loop, const struct dkv_worker_calls *calls,
                                struct dkv_worker **worker_out, struct dkv_error *err)
{
    struct dkv_worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a worker");
    worker->config = config;
    worker->calls = *calls;
    worker->index = index;
    snprintf(worker->device, sizeof(worker->device), "%s", device);
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->wake_thread, NULL);
    uv_async_init(loop, &worker->wake_loop, on_wake);
    worker->wake_loop.data = worker;
    worker->n_items = config->max_batch_items > DKV_BLOCKS_MAX ? config->max_batch_items
                                                               : DKV_BLOCKS_MAX;
    worker->items = calloc(worker->n_items, sizeof(*worker->items));

    enum dkv_status status = DKV_E_NOMEM;
    if (worker->items == NULL ||
        pthread_create(&worker->thread, NULL, engine_thread, worker) != 0) {
        dkv_error_set(err, status, "no memory for the engine's thread");
    } else {
        pthread_mutex_lock(&worker->lock);
        while (!worker->opened)
            pthread_cond_wait(&worker->wake_thread, &worker->lock);
        pthread_mutex_unlock(&worker->lock);
        status = worker->open_status;
        if (status == DKV_OK) {
            *worker_out = worker;
            calls->up(calls->owner, index, &worker->info);
            return DKV_OK;
        }
        pthread_join(worker->thread, NULL);
        if (err != NULL)
            *err = worker->open_error;
    }
    uv_close((uv_handle_t *)&worker->wake_loop, free_worker);
    return status;
}

void dkv_worker_close(struct dkv_worker *worker)
{
    if (worker == NULL)
        return;
    pthread_mutex_lock(&worker->lock);
    worker->stopping = true;
    pthread_cond_broadcast(&worker->wake_thread);
    pthread_mutex_unlock(&worker->lock);
    pthread_join(worker->thread, NULL);
    uv_close((uv_handle_t *)&worker->wake_loop, free_worker);
}

void dkv_worker_launch(struct dkv_worker *worker, struct dkv_run *run)
{
    pthread_mutex_lock(&worker->lock);
    assert(worker->next == NULL);
    worker->next = run;
    pthread_cond_signal(&worker->wake_thread);
    pthread_mutex_unlock(&worker->lock);
}
