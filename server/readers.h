/* Threads that read one large piece of a file together, in tasks of about DKV_READERS_TASK bytes.
 *
 * Copying out of a file is bound by one processor's rate of page copies, so several do it faster;
 * for less than DKV_READERS_FROM it is not worth waking them.
 *
 * Owner   open/close.
 * Thread  one caller at a time; it takes part.
 * Errors  the first of a task's, in no order; the other tasks are done all the same.
 */
#ifndef DKV_SERVER_READERS_H
#define DKV_SERVER_READERS_H

#include "proto/types.h"

#define DKV_READERS_FROM (UINT64_C(16) << 20)
#define DKV_READERS_TASK (UINT64_C(2) << 20)

struct dkv_readers;

/* One thread less than there are processors, at most three. NULL if there is but one processor, or
 * no memory: reading works without. */
struct dkv_readers *dkv_readers_open(void);
void dkv_readers_close(struct dkv_readers *readers); /* NULL is fine */

/* Called for every task in 0..n_tasks-1, on any thread. */
typedef enum dkv_status (*dkv_readers_fn)(void *context, uint64_t task, struct dkv_error *err);

/* Returns when every task has been done. `readers` may be NULL: the caller does them all. */
enum dkv_status dkv_readers_run(struct dkv_readers *readers, dkv_readers_fn fn, void *context,
                                uint64_t n_tasks, struct dkv_error *err);

#endif
