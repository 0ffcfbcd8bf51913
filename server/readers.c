/* Whoever is free takes the next task, the caller too, so that a thread that the system does not
 * let run delays one task and not its whole share. */
#include "server/readers.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS_MAX 3u

struct dkv_readers {
    pthread_t threads[THREADS_MAX];
    unsigned n_threads;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    pthread_cond_t done;
    bool stopping;
    dkv_readers_fn fn;
    void *context;
    uint64_t n_tasks, n_taken, n_done;
    enum dkv_status status; /* of the first task that failed */
    struct dkv_error error;
};

/* Does tasks until none is left to take. With the lock held, which is let go meanwhile. */
static void do_tasks(struct dkv_readers *r)
{
    while (r->n_taken < r->n_tasks) {
        const uint64_t task = r->n_taken++;
        struct dkv_error err = {0};
        pthread_mutex_unlock(&r->lock);
        const enum dkv_status status = r->fn(r->context, task, &err);
        pthread_mutex_lock(&r->lock);
        if (status != DKV_OK && r->status == DKV_OK) {
            r->status = status;
            r->error = err;
        }
        if (++r->n_done == r->n_tasks)
            pthread_cond_signal(&r->done);
    }
}

static void *reader(void *argument)
{
    struct dkv_readers *r = argument;
    pthread_mutex_lock(&r->lock);
    while (!r->stopping) {
        do_tasks(r);
        if (!r->stopping)
            pthread_cond_wait(&r->work, &r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

struct dkv_readers *dkv_readers_open(void)
{
    const long n_processors = sysconf(_SC_NPROCESSORS_ONLN);
    struct dkv_readers *r = n_processors > 1 ? calloc(1, sizeof(*r)) : NULL;
    if (r == NULL)
        return NULL;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->work, NULL);
    pthread_cond_init(&r->done, NULL);
    while (r->n_threads < THREADS_MAX && r->n_threads + 1 < (unsigned)n_processors &&
           pthread_create(&r->threads[r->n_threads], NULL, reader, r) == 0)
        r->n_threads++;
    return r;
}

void dkv_readers_close(struct dkv_readers *r)
{
    if (r == NULL)
        return;
    pthread_mutex_lock(&r->lock);
    r->stopping = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
    for (unsigned i = 0; i < r->n_threads; i++)
        pthread_join(r->threads[i], NULL);
    pthread_cond_destroy(&r->done);
    pthread_cond_destroy(&r->work);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

static enum dkv_status do_alone(dkv_readers_fn fn, void *context, uint64_t n_tasks,
                                struct dkv_error *err)
{
    enum dkv_status first = DKV_OK;
    for (uint64_t task = 0; task < n_tasks; task++) {
        struct dkv_error why = {0};
        const enum dkv_status status = fn(context, task, &why);
        if (status == DKV_OK || first != DKV_OK)
            continue;
        first = status;
        if (err != NULL)
            *err = why;
    }
    return first;
}

enum dkv_status dkv_readers_run(struct dkv_readers *r, dkv_readers_fn fn, void *context,
                                uint64_t n_tasks, struct dkv_error *err)
{
    if (r == NULL || n_tasks <= 1)
        return do_alone(fn, context, n_tasks, err);
    pthread_mutex_lock(&r->lock);
    r->fn = fn;
    r->context = context;
    r->n_taken = 0;
    r->n_done = 0;
    r->n_tasks = n_tasks;
    r->status = DKV_OK;
    pthread_cond_broadcast(&r->work);
    do_tasks(r);
    while (r->n_done < r->n_tasks)
        pthread_cond_wait(&r->done, &r->lock);
    const enum dkv_status status = r->status;
    if (status != DKV_OK && err != NULL)
        *err = r->error;
    pthread_mutex_unlock(&r->lock);
    return status;
}
