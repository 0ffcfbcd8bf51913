/* Pinned memory that host tensors pass through: filled by several threads, sent by one.
 *
 * One thread's memcpy() moves a seventh of what the bus does, so several fill chunks. Only one
 * calls CUDA, since calls from several threads wait for each other's locks, up to 90 us a chunk. It
 * sends chunks in order: at once while the bus has less than two copies to do, and otherwise as
 * many as are full, since every copy costs the bus a few us whatever its size. Nothing here is per
 * batch: while one flush ends and the next begins, the copies in between keep the bus busy.
 *
 * Thread  dkv_cu_ring_run() is called by the engine's thread alone.
 */
#include "kernels/cpu/threads.h"
#include "kernels/cuda/host.h"

enum dkv_status dkv_cu_ring_open(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    struct dkv_cu_ring *ring = &engine->ring;
    pthread_mutex_init(&ring->lock, NULL);
    pthread_cond_init(&ring->filled, NULL);
    pthread_cond_init(&ring->freed, NULL);
    ring->is_open = true;
    enum dkv_status status = dkv_cu_check(
        engine, cudaMallocHost((void **)&ring->memory, DKV_CU_CHUNKS * DKV_CU_CHUNK_BYTES),
        "allocating pinned memory", err);
    for (unsigned i = 0; i < DKV_CU_COPIES && status == DKV_OK; i++)
        status = dkv_cu_check(
            engine, cudaEventCreateWithFlags(&ring->copies[i].done, cudaEventDisableTiming),
            "creating an event", err);
    return status;
}

void dkv_cu_ring_close(struct dkv_cu_engine *engine)
{
    struct dkv_cu_ring *ring = &engine->ring;
    if (!ring->is_open)
        return;
    (void)cudaFreeHost(ring->memory);
    for (unsigned i = 0; i < DKV_CU_COPIES; i++)
        if (ring->copies[i].done != NULL)
            (void)cudaEventDestroy(ring->copies[i].done);
    pthread_cond_destroy(&ring->freed);
    pthread_cond_destroy(&ring->filled);
    pthread_mutex_destroy(&ring->lock);
}

static unsigned char *chunk_of(const struct dkv_cu_ring *ring, uint64_t number)
{
    return ring->memory + number % DKV_CU_CHUNKS * DKV_CU_CHUNK_BYTES;
}

/* ---- filling ---- */

/* Job `index` of the flush goes into chunk ring->first + index, once that is free. */
static void fill_job(struct dkv_cu_engine *engine, size_t index)
{
    struct dkv_cu_ring *ring = &engine->ring;
    struct dkv_cu_stage_job *job = &engine->jobs[index];
    const uint64_t number = ring->first + index;
    pthread_mutex_lock(&ring->lock);
    while (number - ring->free_upto >= DKV_CU_CHUNKS && ring->failure == cudaSuccess)
        pthread_cond_wait(&ring->freed, &ring->lock);
    const bool usable = ring->failure == cudaSuccess;
    pthread_mutex_unlock(&ring->lock);
    if (usable)
        job->error.status = dkv_cu_stage_fill(engine, job, chunk_of(ring, number), &job->error);
    pthread_mutex_lock(&ring->lock);
    job->filled = true;
    pthread_cond_signal(&ring->filled);
    pthread_mutex_unlock(&ring->lock);
}

/* ---- sending ---- */

static void fail(struct dkv_cu_ring *ring, cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    pthread_mutex_lock(&ring->lock);
    if (ring->failure == cudaSuccess)
        ring->failure = error;
    pthread_cond_broadcast(&ring->freed);
    pthread_mutex_unlock(&ring->lock);
}

/* Waits for the oldest copy under way and frees its chunks. */
static void await_oldest(struct dkv_cu_ring *ring)
{
    const struct dkv_cu_copy *copy = &ring->copies[ring->copies_done % DKV_CU_COPIES];
    fail(ring, cudaEventSynchronize(copy->done));
    ring->copies_done++;
    pthread_mutex_lock(&ring->lock);
    ring->free_upto = copy->upto;
    pthread_cond_broadcast(&ring->freed);
    pthread_mutex_unlock(&ring->lock);
}

/* How many jobs from `from` on are full and follow each other on both sides; whether the next one
 * may become another. */
static unsigned count_ready(const struct dkv_cu_engine *engine, unsigned from, bool *may_grow)
{
    const struct dkv_cu_stage_job *job = &engine->jobs[from];
    const uint64_t number = engine->ring.first + from;
    unsigned n = 0;
    while (from + n < engine->n_jobs && n < DKV_CU_RUN && job[n].filled) {
        if (n > 0 && ((number + n) % DKV_CU_CHUNKS == 0 || job[n].error.status != DKV_OK ||
                      job[n - 1].error.status != DKV_OK || job[n - 1].bytes != DKV_CU_CHUNK_BYTES ||
                      job[n].to_device != job[n - 1].to_device + DKV_CU_CHUNK_BYTES))
            break;
        n++;
    }
    *may_grow = from + n < engine->n_jobs && n < DKV_CU_RUN && !job[n].filled;
    return n;
}

/* Waits for something to send: returns the number of jobs. */
static unsigned await_ready(struct dkv_cu_engine *engine, unsigned from)
{
    struct dkv_cu_ring *ring = &engine->ring;
    for (;;) {
        const uint64_t under_way = ring->copies_begun - ring->copies_done;
        pthread_mutex_lock(&ring->lock);
        while (under_way < 2 && !engine->jobs[from].filled)
            pthread_cond_wait(&ring->filled, &ring->lock);
        bool may_grow;
        const unsigned n = count_ready(engine, from, &may_grow);
        pthread_mutex_unlock(&ring->lock);
        if (n > 0 && (under_way < 2 || !may_grow))
            return n;
        await_oldest(ring);
    }
}

/* Sends jobs from .. from + n - 1 in one copy. */
static void send_jobs(struct dkv_cu_engine *engine, unsigned from, unsigned n)
{
    struct dkv_cu_ring *ring = &engine->ring;
    const struct dkv_cu_stage_job *job = &engine->jobs[from];
    while (ring->copies_begun - ring->copies_done == DKV_CU_COPIES)
        await_oldest(ring);
    struct dkv_cu_copy *copy = &ring->copies[ring->copies_begun++ % DKV_CU_COPIES];
    copy->upto = ring->first + from + n;
    if (ring->failure == cudaSuccess && job->error.status == DKV_OK)
        fail(ring, cudaMemcpyAsync(job->to_device, chunk_of(ring, ring->first + from),
                                   (n - 1) * DKV_CU_CHUNK_BYTES + job[n - 1].bytes,
                                   cudaMemcpyHostToDevice, engine->copies));
    fail(ring, cudaEventRecord(copy->done, engine->copies));
    ring->sent += n;
}

/* ---- a flush ---- */

/* Task 0 sends, every other one fills a chunk. */
static void ring_task(void *context, size_t task, unsigned thread)
{
    struct dkv_cu_engine *engine = context;
    (void)thread;
    if (task > 0) {
        fill_job(engine, task - 1);
        return;
    }
    const bool entered = dkv_cu_enter(engine, NULL) == DKV_OK; /* on this thread */
    if (!entered)
        fail(&engine->ring, cudaErrorContextIsDestroyed);
    for (unsigned i = 0, n; i < engine->n_jobs; i += n) {
        n = await_ready(engine, i);
        send_jobs(engine, i, n);
    }
    if (entered)
        dkv_cu_leave();
}

cudaError_t dkv_cu_ring_run(struct dkv_cu_engine *engine, bool by_threads)
{
    struct dkv_cu_ring *ring = &engine->ring;
    ring->first = ring->sent;
    ring->failure = cudaSuccess;
    if (by_threads && engine->n_jobs > 1 && dkv_threads_count(engine->crew) > 1) {
        dkv_threads_run(engine->crew, ring_task, engine, engine->n_jobs + 1);
        return ring->failure;
    }
    for (unsigned i = 0; i < engine->n_jobs; i++) {
        while (ring->sent - ring->free_upto == DKV_CU_CHUNKS)
            await_oldest(ring);
        fill_job(engine, i);
        send_jobs(engine, i, 1);
    }
    return ring->failure;
}
