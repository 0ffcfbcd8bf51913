/* A thin layer over uv_queue_work(): what it adds is that either side may end first. */
#include "server/errand.h"

#include "server/exchange.h"

#include <assert.h>
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#define LARGE_BYTES \
    (1 << 20) /* such blocks are not taken from the heap if it has to grow for them */

void dkv_errand_init(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, LARGE_BYTES); /* freeing a large block would raise it otherwise */
#endif
    setenv("UV_THREADPOOL_SIZE", DKV_ERRAND_THREADS, 0); /* an operator's own choice stays */
}

void dkv_errand_tidy(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static void on_work(uv_work_t *work)
{
    struct dkv_errand *errand = work->data;
    errand->run(errand);
}

static void on_back(uv_work_t *work, int status)
{
    struct dkv_errand *errand = work->data;
    struct dkv_exchange *exchange = errand->exchange;
    assert(status == 0 || exchange == NULL); /* only the abandoned are cancelled */
    (void)status;
    if (exchange != NULL)
        exchange->errand = NULL;
    errand->back(errand, exchange);
}

void dkv_errand_start(struct dkv_errand *errand, uv_loop_t *loop, struct dkv_exchange *exchange,
                      dkv_errand_run_fn run, dkv_errand_back_fn back)
{
    assert(exchange->errand == NULL);
    errand->exchange = exchange;
    errand->run = run;
    errand->back = back;
    errand->work.data = errand;
    exchange->errand = errand;
    uv_queue_work(loop, &errand->work, on_work, on_back);
}

void dkv_errand_abandon(struct dkv_errand *errand)
{
    if (errand == NULL)
        return;
    errand->exchange->errand = NULL;
    errand->exchange = NULL;
    uv_cancel((uv_req_t *)&errand->work); /* fails if it runs already, which is fine */
}
