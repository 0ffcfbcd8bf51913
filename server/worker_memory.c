/* Loans arrive, are found and go; what is read from loose ones is in worker_stage.c. */
#include "server/worker_memory.h"

#include "proto/memfd.h"
#include "server/clock.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define STAGED_KEPT_BYTES (UINT64_C(16) << 20) /* of a shadow, between batches */

enum dkv_status dkv_worker_memory_open(struct dkv_worker_memory *memory, int arena_fd,
                                       uint64_t arena_bytes, struct dkv_error *err)
{
    void *base = mmap(NULL, arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      arena_fd, 0);
    if (base == MAP_FAILED)
        return dkv_error_set(err, DKV_E_NOMEM, "worker: the shared memory cannot be mapped");
    madvise(base, arena_bytes, MADV_DONTDUMP);
    *memory = (struct dkv_worker_memory){.arena = base, .arena_bytes = arena_bytes};
    return DKV_OK;
}

static void let_go(struct dkv_held *held)
{
    if (held->base == NULL)
        return;
    if (held->fd >= 0) {
        munmap(held->base, held->bytes);
        close(held->fd);
    } else {
        dkv_memfd_unmap(held->base, held->bytes);
    }
    *held = (struct dkv_held){.fd = -1};
}

static void forget_arriving(struct dkv_arriving *arriving)
{
    for (uint32_t i = 0; arriving->chunks != NULL && i < arriving->n_come; i++)
        if (arriving->chunks[i].fd >= 0)
            close(arriving->chunks[i].fd);
    free(arriving->chunks);
    *arriving = (struct dkv_arriving){0};
}

void dkv_worker_memory_close(struct dkv_worker_memory *memory)
{
    for (uint32_t i = 0; i < memory->n_held; i++)
        if (memory->held[i].imported == NULL)
            let_go(&memory->held[i]);
    free(memory->held);
    forget_arriving(&memory->arriving);
    dkv_imports_fini(&memory->imports);
    dkv_readers_close(memory->readers);
    if (memory->arena != NULL)
        munmap(memory->arena, memory->arena_bytes);
    *memory = (struct dkv_worker_memory){0};
}

static struct dkv_held *place_for(struct dkv_worker_memory *memory, uint32_t number)
{
    const uint32_t index = number - DKV_LINK_LOANS;
    if (index >= memory->n_held) {
        const uint32_t n = index + 64;
        struct dkv_held *held = realloc(memory->held, n * sizeof(*held));
        if (held == NULL)
            return NULL;
        for (uint32_t i = memory->n_held; i < n; i++)
            held[i] = (struct dkv_held){.fd = -1};
        memory->held = held;
        memory->n_held = n;
    }
    return &memory->held[index];
}

struct dkv_held *dkv_worker_memory_held(struct dkv_worker_memory *memory, uint32_t number)
{
    if (number < DKV_LINK_LOANS || number - DKV_LINK_LOANS >= memory->n_held)
        return NULL;
    return &memory->held[number - DKV_LINK_LOANS];
}

static enum dkv_status make_shadow(struct dkv_held *held, const struct dkv_link_loan *loan,
                                   struct dkv_error *err)
{
    void *base = mmap(NULL, loan->bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return dkv_error_set(err, DKV_E_NOMEM, "region: no addresses for %llu bytes",
                             (unsigned long long)loan->bytes);
    held->base = base;
    return DKV_OK;
}

static enum dkv_status attach_file(struct dkv_worker_memory *memory, struct dkv_held *held, int fd,
                                   const struct dkv_link_loan *loan, struct dkv_error *err)
{
    void *base = NULL;
    enum dkv_status status;
    if (loan->loose) {
        status = make_shadow(held, loan, err);
    } else {
        status = dkv_memfd_map(fd, loan->offset, loan->bytes, loan->writable, &base, err);
        held->base = base;
        held->writable = status == DKV_OK && loan->writable;
    }
    if (status != DKV_OK || !loan->loose) {
        close(fd);
        fd = -1;
    }
    if (status == DKV_OK && loan->loose && memory->readers == NULL)
        memory->readers = dkv_readers_open(); /* not when a batch waits for it */
    if (status == DKV_OK) {
        held->readers = memory->readers;
        held->bytes = loan->bytes;
        held->offset = loan->offset;
        held->fd = fd;
    }
    if (status == DKV_OK && held->writable)
        status = dkv_imports_pin(&memory->imports, loan, base, &held->imported, err);
    return status;
}

static enum dkv_status attach_gpu(struct dkv_worker_memory *memory, struct dkv_held *held,
                                  const struct dkv_link_loan *loan,
                                  const struct dkv_import_chunk *chunks, struct dkv_error *err)
{
    const void *base = NULL;
    const enum dkv_status status = dkv_imports_attach(&memory->imports, loan, chunks,
                                                      &held->imported, &base, err);
    if (status == DKV_OK) {
        held->base = (unsigned char *)(uintptr_t)base;
        held->bytes = loan->bytes;
    }
    return status;
}

/* From now on chunks are expected. */
static enum dkv_status expect_chunks(struct dkv_worker_memory *memory, uint32_t number,
                                     const struct dkv_link_loan *loan, struct dkv_error *err)
{
    struct dkv_import_chunk *chunks = calloc(loan->n_chunks, sizeof(*chunks));
    memory->arriving = (struct dkv_arriving){.number = number, .loan = *loan, .chunks = chunks};
    return chunks != NULL ? DKV_OK : dkv_error_set(err, DKV_E_NOMEM, "region: out of memory");
}

enum dkv_status dkv_worker_memory_attach(struct dkv_worker_memory *memory, uint32_t number, int fd,
                                         const struct dkv_link_loan *loan, bool *more_out,
                                         struct dkv_error *err)
{
    struct dkv_held *held = place_for(memory, number);
    *more_out = loan->memory == DKV_LINK_CUDA_VMM;
    if (*more_out) /* without memory for them the last chunk reports it */
        return expect_chunks(memory, number, loan, err);
    if (held == NULL) {
        if (fd >= 0)
            close(fd);
        return dkv_error_set(err, DKV_E_NOMEM, "region: out of memory");
    }
    return loan->memory == DKV_LINK_HOST ? attach_file(memory, held, fd, loan, err)
                                         : attach_gpu(memory, held, loan, NULL, err);
}

/* Once imported, the memory needs its descriptors no more: open, they would keep it allocated. */
enum dkv_status dkv_worker_memory_chunk(struct dkv_worker_memory *memory, uint32_t number, int fd,
                                        const struct dkv_link_chunk *chunk, bool *more_out,
                                        struct dkv_error *err)
{
    struct dkv_arriving *arriving = &memory->arriving;
    struct dkv_held *held = place_for(memory, number);
    assert(arriving->number == number && arriving->n_come < arriving->loan.n_chunks);
    if (arriving->chunks == NULL) {
        if (fd >= 0)
            close(fd);
    } else {
        arriving->chunks[arriving->n_come] = (struct dkv_import_chunk){chunk->offset, chunk->bytes,
                                                                       fd};
    }
    *more_out = ++arriving->n_come < arriving->loan.n_chunks;
    if (*more_out)
        return DKV_OK;
    enum dkv_status status = DKV_E_NOMEM;
    if (held == NULL || arriving->chunks == NULL)
        dkv_error_set(err, status, "region: out of memory");
    else
        status = attach_gpu(memory, held, &arriving->loan, arriving->chunks, err);
    forget_arriving(arriving);
    return status;
}

bool dkv_worker_memory_detach(struct dkv_worker_memory *memory, uint32_t number)
{
    struct dkv_held *held = dkv_worker_memory_held(memory, number);
    if (held == NULL)
        return true;
    struct dkv_imported *imported = held->imported;
    if (imported == NULL) {
        let_go(held);
        return true;
    }
    *held = (struct dkv_held){.fd = -1};
    return dkv_imports_detach(&memory->imports, imported, number, dkv_clock_ns());
}

const void *dkv_worker_memory_find(void *owner, uint32_t number)
{
    struct dkv_worker_memory *memory = owner;
    if (number == DKV_LINK_IN_ARENA)
        return memory->arena;
    const struct dkv_held *held = dkv_worker_memory_held(memory, number);
    return held != NULL ? held->base : NULL;
}

void *dkv_worker_memory_output(const struct dkv_worker_memory *memory,
                               const struct dkv_link_addr *at)
{
    if (at->memory == DKV_LINK_IN_ARENA)
        return memory->arena + at->offset;
    const uint32_t index = at->memory - DKV_LINK_LOANS;
    if (at->memory < DKV_LINK_LOANS || index >= memory->n_held || !memory->held[index].writable)
        return NULL;
    return memory->held[index].base + at->offset;
}

void dkv_worker_memory_idle(struct dkv_worker_memory *memory)
{
    for (uint32_t i = 0; i < memory->n_held; i++) {
        struct dkv_held *held = &memory->held[i];
        if (held->fd < 0 || held->staged_bytes <= STAGED_KEPT_BYTES)
            continue;
        madvise(held->base, held->bytes, MADV_DONTNEED);
        held->staged_bytes = 0;
    }
}
