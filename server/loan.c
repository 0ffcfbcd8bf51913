/* The addresses that stand for a loan are a mapping without any access: free of charge, and an
 * access by mistake ends the process instead of reading something else.
 *
 * A sealed file that has holes is treated like a loose one: to read a hole through a mapping takes
 * a page, and on our account, so a terabyte of holes, which costs its owner nothing, would cost us
 * a terabyte. Holes can be punched later, but then their owner had the pages first.
 */
#include "server/loan.h"

#include "proto/memfd.h"
#include "proto/wire.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void reserve(struct dkv_loan *loan)
{
    void *base = mmap(NULL, loan->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                      0);
    loan->base = base != MAP_FAILED ? base : NULL;
}

static enum dkv_status give_up(struct dkv_loan *loan, struct dkv_error *err)
{
    const char *what = loan->base == NULL ? "addresses" : "file descriptor";
    const uint64_t bytes = loan->bytes;
    dkv_loan_free(loan);
    return dkv_error_set(err, DKV_E_NOMEM, "region: no %s for %llu bytes", what,
                         (unsigned long long)bytes);
}

enum dkv_status dkv_loan_new(int fd, uint64_t offset, uint64_t bytes, struct dkv_loan **loan_out,
                             struct dkv_error *err)
{
    struct dkv_memfd_info info;
    enum dkv_status status = dkv_memfd_inspect(fd, &info, err);
    if (status != DKV_OK)
        return status;
    if (bytes == 0 || !dkv_range_fits(offset, bytes, info.bytes))
        return dkv_error_set(
            err, DKV_E_INVALID, "region: %llu bytes at %llu are not within the file's %llu",
            (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)info.bytes);
    struct dkv_loan *loan = calloc(1, sizeof(*loan));
    if (loan == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a region");
    *loan = (struct dkv_loan){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0),
                              .offset = offset,
                              .bytes = bytes,
                              .device = DKV_LOAN_EVERYWHERE,
                              .loose = info.kind != DKV_MEMFD_SEALED || dkv_memfd_has_holes(fd)};
    reserve(loan);
    if (loan->fd < 0 || loan->base == NULL)
        return give_up(loan, err);
    *loan_out = loan;
    return DKV_OK;
}

/* Chunks that the region does not reach would be mapped for nothing, however far away. */
static enum dkv_status check_chunks(const struct dkv_loan *loan, struct dkv_error *err)
{
    for (uint32_t i = 0; i < loan->n_chunks; i++) {
        const struct dkv_loan_chunk *chunk = &loan->chunks[i];
        if (chunk->offset >= loan->offset + loan->bytes ||
            chunk->offset + chunk->bytes <= loan->offset)
            return dkv_error_set(
                err, DKV_E_INVALID, "region: chunk %u, %llu bytes at %llu, lies outside it", i,
                (unsigned long long)chunk->bytes, (unsigned long long)chunk->offset);
    }
    if (loan->n_chunks > 0 && dkv_loan_end(loan, 0) == 0)
        return dkv_error_set(err, DKV_E_INVALID, "region: offset %llu is in none of its chunks",
                             (unsigned long long)loan->offset);
    return DKV_OK;
}

enum dkv_status dkv_loan_new_cuda(const struct dkv_wire_region *wire, const int *fds,
                                  uint64_t owner, uint32_t device, struct dkv_loan **loan_out,
                                  struct dkv_error *err)
{
    struct dkv_loan *loan = calloc(1, sizeof(*loan));
    struct dkv_loan_chunk *chunks = calloc(wire->n_chunks + 1u, sizeof(*chunks));
    if (loan == NULL || chunks == NULL) {
        free(loan);
        free(chunks);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a region");
    }
    *loan = (struct dkv_loan){
        .memory = wire->kind == DKV_WIRE_REGION_CUDA_LEGACY ? DKV_LINK_CUDA_LEGACY
                                                            : DKV_LINK_CUDA_VMM,
        .device = device,
        .fd = -1,
        .offset = wire->offset,
        .bytes = wire->bytes,
        .key = {.owner = owner, .generation = wire->generation},
        .chunks = chunks,
        .n_chunks = wire->n_chunks,
    };
    memcpy(loan->key.handle, wire->handle, sizeof(loan->key.handle));
    bool have_all = true;
    for (uint32_t i = 0; i < loan->n_chunks; i++) {
        struct dkv_wire_chunk chunk;
        dkv_wire_get_chunk(wire->chunks, i, &chunk);
        chunks[i] = (struct dkv_loan_chunk){chunk.offset, chunk.bytes,
                                            fcntl(fds[i], F_DUPFD_CLOEXEC, 0)};
        have_all = have_all && chunks[i].fd >= 0;
    }
    reserve(loan);
    if (!have_all || loan->base == NULL)
        return give_up(loan, err);
    const enum dkv_status status = check_chunks(loan, err);
    if (status != DKV_OK) {
        dkv_loan_free(loan);
        return status;
    }
    *loan_out = loan;
    return DKV_OK;
}

uint64_t dkv_loan_end(const struct dkv_loan *loan, uint64_t offset)
{
    uint64_t end = 0; /* of the run of adjacent chunks that holds the byte */
    if (offset >= loan->bytes)
        return 0;
    if (loan->n_chunks == 0)
        return loan->bytes;
    for (uint32_t i = 0; i < loan->n_chunks; i++) {
        const struct dkv_loan_chunk *chunk = &loan->chunks[i];
        const uint64_t chunk_end = chunk->offset + chunk->bytes;
        if (end != 0 && chunk->offset != end)
            break;
        if (end != 0 ||
            (chunk->offset <= loan->offset + offset && loan->offset + offset < chunk_end))
            end = chunk_end;
    }
    if (end == 0)
        return 0;
    end -= loan->offset;
    return end < loan->bytes ? end : loan->bytes;
}

void dkv_loan_free(struct dkv_loan *loan)
{
    if (loan->base != NULL)
        munmap((void *)(uintptr_t)loan->base, loan->bytes);
    if (loan->fd >= 0)
        close(loan->fd);
    for (uint32_t i = 0; i < loan->n_chunks; i++)
        if (loan->chunks[i].fd >= 0)
            close(loan->chunks[i].fd);
    free(loan->chunks);
    free(loan);
}

enum dkv_loan_kind dkv_loan_kind_of(const struct dkv_loan *loan)
{
    return dkv_loan_on_gpu(loan) ? DKV_LOAN_DEVICE : loan->loose ? DKV_LOAN_LOOSE : DKV_LOAN_SEALED;
}

struct dkv_link_range dkv_loan_range(const struct dkv_loan *loan)
{
    return (struct dkv_link_range){loan->number, loan->base, loan->bytes};
}
