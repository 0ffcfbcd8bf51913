/* The CPU engine's threads: every task of every loop once, whoever sleeps or comes late. */
#include "kernels/cpu/threads.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { THREADS = 5, TASKS_MAX = 300, LOOPS = 20000 };

struct loop {
    uint32_t seen[TASKS_MAX]; /* by the one thread that has the task: no atomics on purpose */
    _Atomic uint32_t n_wrong;
};

static void mark(void *context, size_t task, unsigned thread)
{
    struct loop *loop = context;
    if (thread >= THREADS || task >= TASKS_MAX || loop->seen[task]++ != 0)
        loop->n_wrong++;
}

/* Two loops' contexts take turns, so that a helper that mixed up loops would mark the wrong one. */
static void every_task_of_every_loop_runs_once(void **unused)
{
    static struct loop loops[2];
    struct dkv_threads *crew = NULL;
    size_t n_run[2] = {0};
    (void)unused;
    assert_int_equal(dkv_threads_open(THREADS, &crew, NULL), DKV_OK);
    assert_int_equal(dkv_threads_count(crew), THREADS);
    for (uint32_t i = 0; i < LOOPS; i++) {
        struct loop *loop = &loops[i % 2];
        const size_t n_tasks = i % 97 == 0 ? TASKS_MAX : i * 7919u % 9;
        memset(loop->seen, 0, sizeof(loop->seen));
        dkv_threads_run(crew, mark, loop, n_tasks);
        for (size_t task = 0; task < TASKS_MAX; task++)
            assert_int_equal(loop->seen[task], task < n_tasks);
        n_run[i % 2] += n_tasks;
    }
    assert_int_equal(loops[0].n_wrong + loops[1].n_wrong, 0);
    assert_true(n_run[0] > LOOPS && n_run[1] > LOOPS);
    dkv_threads_close(crew);
}

static void wait_for_all(void *context, size_t task, unsigned thread)
{
    _Atomic unsigned *n_here = context;
    (void)task;
    (void)thread;
    atomic_fetch_add(n_here, 1);
    while (atomic_load(n_here) % THREADS != 0)
        usleep(10);
}

/* As many tasks as threads, which need each other: helpers that sleep are all woken. The pause is
 * longer than helpers look for work. */
static void sleeping_helpers_are_woken(void **unused)
{
    struct dkv_threads *crew = NULL;
    _Atomic unsigned n_here = 0;
    (void)unused;
    assert_int_equal(dkv_threads_open(THREADS, &crew, NULL), DKV_OK);
    for (unsigned i = 1; i <= 200; i++) {
        dkv_threads_run(crew, wait_for_all, &n_here, THREADS);
        assert_int_equal(n_here, i * THREADS);
        if (i % 10 == 0)
            usleep(200);
    }
    dkv_threads_close(crew);
}

static void count(void *context, size_t task, unsigned thread)
{
    (void)task;
    assert_int_equal(thread, 0);
    ++*(unsigned *)context;
}

static void one_thread_needs_nobody(void **unused)
{
    struct dkv_threads *crew = NULL;
    unsigned n = 0;
    (void)unused;
    assert_int_equal(dkv_threads_open(1, &crew, NULL), DKV_OK);
    dkv_threads_run(crew, count, &n, 12);
    dkv_threads_run(crew, count, &n, 0);
    assert_int_equal(n, 12);
    dkv_threads_close(crew);
    dkv_threads_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_of_every_loop_runs_once),
        cmocka_unit_test(sleeping_helpers_are_woken),
        cmocka_unit_test(one_thread_needs_nobody),
    };
    return cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
