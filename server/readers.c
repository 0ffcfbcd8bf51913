/* A piece is cut into chunks; whoever is free takes the next one, the caller too, so that a thread
 * that the system does not let run delays one chunk and not its whole share. */
#include "server/readers.h"

#include "proto/memfd.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#define CHUNK_BYTES (UINT64_C(2) << 20)
#define THREADS_MAX 3u

struct dkv_readers {
    pthread_t threads[THREADS_MAX];
    unsigned n_threads;

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t work;
    pthread_cond_t done;
    bool stopping;
    int fd;
    uint64_t offset, bytes;
    char *to;
    uint64_t n_chunks, n_taken, n_read;
    enum dkv_status status; /* of the first chunk that failed */
    struct dkv_error error;
};

/* Reads chunks until none is left to take. With the lock held, which is let go meanwhile. */
static void read_chunks(struct dkv_readers *r)
{
    while (r->n_taken < r->n_chunks) {
        const uint64_t at = r->n_taken++ * CHUNK_BYTES;
        const uint64_t left = r->bytes - at;
        struct dkv_error err = {0};
        pthread_mutex_unlock(&r->lock);
        const enum dkv_status status = dkv_memfd_read(
            r->fd, r->offset + at, r->to + at, left < CHUNK_BYTES ? left : CHUNK_BYTES, &err);
        pthread_mutex_lock(&r->lock);
        if (status != DKV_OK && r->status == DKV_OK) {
            r->status = status;
            r->error = err;
        }
        if (++r->n_read == r->n_chunks)
            pthread_cond_signal(&r->done);
    }
}

static void *reader(void *argument)
{
    struct dkv_readers *r = argument;
    pthread_mutex_lock(&r->lock);
    while (!r->stopping) {
        read_chunks(r);
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

enum dkv_status dkv_readers_read(struct dkv_readers *r, int fd, uint64_t offset, void *to,
                                 uint64_t bytes, struct dkv_error *err)
{
    if (r == NULL || bytes < DKV_READERS_FROM)
        return dkv_memfd_read(fd, offset, to, bytes, err);
    pthread_mutex_lock(&r->lock);
    r->fd = fd;
    r->offset = offset;
    r->bytes = bytes;
    r->to = to;
    r->n_taken = 0;
    r->n_read = 0;
    r->n_chunks = (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
    r->status = DKV_OK;
    pthread_cond_broadcast(&r->work);
    read_chunks(r);
    while (r->n_read < r->n_chunks)
        pthread_cond_wait(&r->done, &r->lock);
    const enum dkv_status status = r->status;
    if (status != DKV_OK && err != NULL)
        *err = r->error;
    pthread_mutex_unlock(&r->lock);
    return status;
}
