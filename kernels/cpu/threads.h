/* A fixed set of threads that run one loop at a time.
 *
 * Owner   dkv_threads_open() makes the threads, dkv_threads_close() joins them; NULL is fine.
 * Thread  one caller at a time. The caller takes part and counts as thread 0.
 * Errors  open: NOMEM, or INTERNAL where the system refuses threads. run: none.
 */
#ifndef DKV_KERNELS_CPU_THREADS_H
#define DKV_KERNELS_CPU_THREADS_H

#include "proto/types.h"

struct dkv_threads;

/* Called for every task in 0..n_tasks-1, in any order and on any thread in 0..threads-1. */
typedef void (*dkv_task_fn)(void *context, size_t task, unsigned thread);

enum dkv_status dkv_threads_open(unsigned threads, struct dkv_threads **threads_out,
                                 struct dkv_error *err);
void dkv_threads_close(struct dkv_threads *crew);
unsigned dkv_threads_count(const struct dkv_threads *crew);

/* Runs the loop and returns when every task has. Allocates nothing. */
void dkv_threads_run(struct dkv_threads *crew, dkv_task_fn fn, void *context, size_t n_tasks);

#endif
