/* Work for one exchange that would hold up the loop, done on a thread of libuv's pool.
 *
 *   start   the exchange is suspended; run() begins on a pool thread
 *   run     touches nothing but what the errand owns
 *   back    on the loop again, exactly once, whether it ran or not
 *
 * The errand does not keep the exchange alive. When that ends first, dkv_errand_abandon() tells the
 * errand, which is not started any more if it still waits, and then back() gets NULL.
 *
 * The pool has DKV_ERRAND_THREADS threads, which bounds what the errands hold at once.
 *
 * Owner   whoever embeds it; it must stay where it is until back() is called.
 * Thread  loop, but for run().
 */
#ifndef DKV_SERVER_ERRAND_H
#define DKV_SERVER_ERRAND_H

#include <uv.h>

#define DKV_ERRAND_THREADS "2"

struct dkv_errand;
struct dkv_exchange;

typedef void (*dkv_errand_run_fn)(struct dkv_errand *errand);

/* `exchange` is NULL if it was abandoned. The errand is the callee's. */
typedef void (*dkv_errand_back_fn)(struct dkv_errand *errand, struct dkv_exchange *exchange);

struct dkv_errand {
    uv_work_t work;
    struct dkv_exchange *exchange;
    dkv_errand_run_fn run;
    dkv_errand_back_fn back;
};

/* Call once at the start of the program, before there are threads. */
void dkv_errand_init(void);

void dkv_errand_start(struct dkv_errand *errand, uv_loop_t *loop, struct dkv_exchange *exchange,
                      dkv_errand_run_fn run, dkv_errand_back_fn back);

/* Gives memory back to the system that was taken in small pieces, or from where such had been: the
 * allocator keeps it otherwise. For after something large was freed. Any thread. */
void dkv_errand_tidy(void);

/* The exchange ends. NULL is fine. */
void dkv_errand_abandon(struct dkv_errand *errand);

#endif
