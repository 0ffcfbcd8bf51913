/* Tasks are drawn from one word, and threads sleep only when a moment of looking brought nothing.
 *
 * The word holds the loop's number and its next task. A thread that draws a task swaps the word, so
 * what it read of the loop before is that loop's if the swap succeeds; a thread that comes too late
 * finds another number or no task left, and is not waited for. The caller waits for tasks, not for
 * threads: on a busy machine a helper may get no processor before the loop is over.
 *
 * Waking a sleeping thread costs more than a short block takes (tens of microseconds where the
 * processor has to leave an idle state first), so whoever runs out of work looks for LOOK_NS before
 * it sleeps: helpers for the next loop, which within a block follows at once, the caller for the
 * last tasks. Beyond that nobody spins: an idle engine costs nothing. Only as many helpers are
 * woken as there are tasks for.
 */
#include "kernels/cpu/threads.h"

#include "kernels/cpu/cpu.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define LOOK_NS    INT64_C(100000)
#define LOOK_TURNS 64 /* between two looks at the clock */

struct dkv_threads {
    /* The loop: written by the caller while no task of the loop before is left. */
    _Atomic(dkv_task_fn) fn;
    _Atomic(void *) context;
    _Atomic uint32_t n_tasks;
    _Atomic uint64_t next;   /* number of the loop << 32 | next task */
    _Atomic uint32_t n_left; /* tasks that have not ended */

    _Atomic bool caller_sleeps;
    _Atomic bool closing;
    pthread_mutex_t lock; /* guards what follows, and going to sleep */
    pthread_cond_t start, done;
    unsigned n_sleeping; /* helpers */

    unsigned n_helpers; /* threads that exist besides the caller */
    struct helper {
        struct dkv_threads *crew;
        pthread_t thread;
        unsigned index;
    } helpers[];
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Does the loop that `next` names have a task left? Acquire: whoever sees this loop's tasks sees
 * its function and context too. */
static bool has_task(struct dkv_threads *crew, uint64_t next)
{
    return (uint32_t)next < atomic_load_explicit(&crew->n_tasks, memory_order_acquire);
}

static void end_task(struct dkv_threads *crew)
{
    if (atomic_fetch_sub(&crew->n_left, 1) > 1 || !atomic_load(&crew->caller_sleeps))
        return;
    pthread_mutex_lock(&crew->lock); /* the caller is asleep, or sees n_left before it is */
    pthread_mutex_unlock(&crew->lock);
    pthread_cond_signal(&crew->done);
}

static void draw_tasks(struct dkv_threads *crew, unsigned thread)
{
    const unsigned fpu = dkv_cpu_fpu_enter();
    uint64_t next = atomic_load(&crew->next);
    while (has_task(crew, next)) {
        const dkv_task_fn fn = atomic_load_explicit(&crew->fn, memory_order_relaxed);
        void *context = atomic_load_explicit(&crew->context, memory_order_relaxed);
        if (!atomic_compare_exchange_weak(&crew->next, &next, next + 1))
            continue;
        fn(context, (uint32_t)next, thread);
        end_task(crew);
        next = atomic_load(&crew->next);
    }
    dkv_cpu_fpu_leave(fpu);
}

/* Looks until there is something to do, for LOOK_NS at most. */
static bool look_for_task(struct dkv_threads *crew)
{
    const int64_t end_ns = now_ns() + LOOK_NS;
    do
        for (int i = 0; i < LOOK_TURNS; i++) {
            if (has_task(crew, atomic_load(&crew->next)) || atomic_load(&crew->closing))
                return true;
            relax();
        }
    while (now_ns() < end_ns);
    return false;
}

static void sleep_until_task(struct dkv_threads *crew)
{
    pthread_mutex_lock(&crew->lock);
    crew->n_sleeping++;
    while (!has_task(crew, atomic_load(&crew->next)) && !atomic_load(&crew->closing))
        pthread_cond_wait(&crew->start, &crew->lock);
    crew->n_sleeping--;
    pthread_mutex_unlock(&crew->lock);
}

static void *helper_main(void *arg)
{
    const struct helper *self = arg;
    struct dkv_threads *crew = self->crew;
    while (!atomic_load(&crew->closing)) {
        draw_tasks(crew, self->index);
        if (!look_for_task(crew))
            sleep_until_task(crew);
    }
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
    atomic_store(&crew->closing, true);
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

static void wake_helpers(struct dkv_threads *crew, size_t n_wanted)
{
    pthread_mutex_lock(&crew->lock);
    const size_t n = crew->n_sleeping < n_wanted ? crew->n_sleeping : n_wanted;
    const bool all = n == crew->n_sleeping;
    pthread_mutex_unlock(&crew->lock); /* before they are woken: they need it */
    if (n > 0 && all)
        pthread_cond_broadcast(&crew->start);
    else
        for (size_t i = 0; i < n; i++)
            pthread_cond_signal(&crew->start);
}

static void wait_for_tasks(struct dkv_threads *crew)
{
    const int64_t end_ns = now_ns() + LOOK_NS;
    do
        for (int i = 0; i < LOOK_TURNS; i++) {
            if (atomic_load(&crew->n_left) == 0)
                return;
            relax();
        }
    while (now_ns() < end_ns);
    pthread_mutex_lock(&crew->lock);
    atomic_store(&crew->caller_sleeps, true);
    while (atomic_load(&crew->n_left) != 0)
        pthread_cond_wait(&crew->done, &crew->lock);
    atomic_store(&crew->caller_sleeps, false);
    pthread_mutex_unlock(&crew->lock);
}

void dkv_threads_run(struct dkv_threads *crew, dkv_task_fn fn, void *context, size_t n_tasks)
{
    assert(n_tasks < UINT32_MAX);
    if (crew->n_helpers == 0 || n_tasks <= 1) {
        const unsigned fpu = dkv_cpu_fpu_enter();
        for (size_t task = 0; task < n_tasks; task++)
            fn(context, task, 0);
        dkv_cpu_fpu_leave(fpu);
        return;
    }
    /* A late helper may read any mixture of these and the loop before: its swap fails. While
     * `n_tasks` is 0 nobody begins one. */
    const uint64_t number = (atomic_load(&crew->next) >> 32) + 1;
    atomic_store(&crew->n_tasks, 0);
    atomic_store(&crew->next, number << 32);
    atomic_store(&crew->fn, fn);
    atomic_store(&crew->context, context);
    atomic_store(&crew->n_left, (uint32_t)n_tasks);
    atomic_store(&crew->n_tasks, (uint32_t)n_tasks);
    wake_helpers(crew, n_tasks - 1);
    draw_tasks(crew, 0);
    wait_for_tasks(crew);
}
