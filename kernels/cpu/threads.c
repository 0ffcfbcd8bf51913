/* One mutex, two condition variables, and a counter that hands out tasks.
 *
 * A loop is announced by a new generation number; sleeping threads wake, draw tasks from the shared
 * counter until none is left, and the last to finish wakes the caller. Nobody spins: tasks are tens
 * of microseconds to milliseconds long, and an idle engine must cost nothing.
 */
#include "kernels/cpu/threads.h"

#include "kernels/cpu/cpu.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

struct dkv_threads {
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    /* under lock */
    uint64_t generation;
    unsigned busy; /* helpers that have not finished this generation */
    bool closing;
    /* written by the caller before a generation starts */
    dkv_task_fn fn;
    void *context;
    size_t n_tasks;
    _Atomic size_t next;

    unsigned n_helpers; /* threads that exist besides the caller */
    struct helper {
        struct dkv_threads *crew;
        pthread_t thread;
        unsigned index;
    } helpers[];
};

static void draw_tasks(struct dkv_threads *crew, unsigned thread)
{
    const unsigned fpu = dkv_cpu_fpu_enter();
    for (;;) {
        const size_t task = atomic_fetch_add_explicit(&crew->next, 1, memory_order_relaxed);
        if (task >= crew->n_tasks)
            break;
        crew->fn(crew->context, task, thread);
    }
    dkv_cpu_fpu_leave(fpu);
}

static void *helper_main(void *arg)
{
    const struct helper *self = arg;
    struct dkv_threads *crew = self->crew;
    uint64_t seen = 0;
    pthread_mutex_lock(&crew->lock);
    for (;;) {
        while (crew->generation == seen && !crew->closing)
            pthread_cond_wait(&crew->start, &crew->lock);
        if (crew->closing)
            break;
        seen = crew->generation;
        pthread_mutex_unlock(&crew->lock);
        draw_tasks(crew, self->index);
        pthread_mutex_lock(&crew->lock);
        if (--crew->busy == 0)
            pthread_cond_signal(&crew->done);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* Helpers take no signals: those belong to the program's own threads. */
static int start_helper(struct helper *helper)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&helper->thread, NULL, helper_main, helper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc == 0)
        pthread_setname_np(helper->thread, "dkv-cpu");
    return rc;
}

enum dkv_status dkv_threads_open(unsigned threads, struct dkv_threads **threads_out,
                                 struct dkv_error *err)
{
    assert(threads >= 1);
    struct dkv_threads *crew = calloc(1, sizeof(*crew) + (threads - 1) * sizeof(crew->helpers[0]));
    if (crew == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cpu engine: no memory for %u threads", threads);
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->start, NULL);
    pthread_cond_init(&crew->done, NULL);
    for (unsigned i = 0; i + 1 < threads; i++) {
        crew->helpers[i] = (struct helper){.crew = crew, .index = i + 1};
        if (start_helper(&crew->helpers[i]) != 0) {
            dkv_threads_close(crew);
            return dkv_error_set(err, DKV_E_INTERNAL,
                                 "cpu engine: the system allows only %u of %u threads", i + 1,
                                 threads);
        }
        crew->n_helpers++;
    }
    *threads_out = crew;
    return DKV_OK;
}

void dkv_threads_close(struct dkv_threads *crew)
{
    if (crew == NULL)
        return;
    pthread_mutex_lock(&crew->lock);
    crew->closing = true;
    pthread_cond_broadcast(&crew->start);
    pthread_mutex_unlock(&crew->lock);
    for (unsigned i = 0; i < crew->n_helpers; i++)
        pthread_join(crew->helpers[i].thread, NULL);
    pthread_cond_destroy(&crew->done);
    pthread_cond_destroy(&crew->start);
    pthread_mutex_destroy(&crew->lock);
    free(crew);
}

unsigned dkv_threads_count(const struct dkv_threads *crew)
{
    return crew->n_helpers + 1;
}

void dkv_threads_run(struct dkv_threads *crew, dkv_task_fn fn, void *context, size_t n_tasks)
{
    crew->fn = fn;
    crew->context = context;
    crew->n_tasks = n_tasks;
    atomic_store_explicit(&crew->next, 0, memory_order_relaxed);
    const bool alone = crew->n_helpers == 0 || n_tasks <= 1;
    if (!alone) {
        pthread_mutex_lock(&crew->lock);
        crew->generation++;
        crew->busy = crew->n_helpers;
        pthread_cond_broadcast(&crew->start);
        pthread_mutex_unlock(&crew->lock);
    }
    draw_tasks(crew, 0);
    if (!alone) {
        pthread_mutex_lock(&crew->lock);
        while (crew->busy != 0)
            pthread_cond_wait(&crew->done, &crew->lock);
        pthread_mutex_unlock(&crew->lock);
    }
}
