/* Two things end a region's memory, in this order: the last request that uses it, which may still
 * wait for its fence and be unknown to the backend, and then the loan, which the backend gives back
 * when no job and no worker has it.
 */
#include "server/region.h"

#include "proto/memfd.h"
#include "server/shm_name.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void settle(struct dkv_region *region, const struct dkv_error *error)
{
    const dkv_region_settled_fn on_settled = region->on_settled;
    region->on_settled = NULL;
    if (on_settled != NULL)
        on_settled(region->owner, error);
}

static enum dkv_status check_pages(int fd, struct dkv_error *err)
{
    if (!dkv_memfd_has_holes(fd))
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "output: the region's file has holes, which answers would fill at the "
                         "daemon's cost: allocate it (fallocate)");
}

enum dkv_status dkv_region_check_pages(const struct dkv_region *region, struct dkv_error *err)
{
    return region->fills ? DKV_OK : check_pages(region->loan->fd, err);
}

static void on_attached(struct dkv_loan *loan, void *owner, const struct dkv_error *error)
{
    (void)loan;
    settle(owner, error);
}

static enum dkv_status lend_file(struct dkv_region *region, const struct dkv_region_source *source,
                                 int fd, struct dkv_error *err)
{
    const struct dkv_wire_region *wire = source->wire;
    struct dkv_memfd_info info;
    enum dkv_status status = dkv_memfd_inspect(fd, &info, err);
    if (status == DKV_OK && wire->writable && !info.writable)
        status = dkv_error_set(err, DKV_E_INVALID,
                               "region: results are to be written there, but the fd does not allow "
                               "writing or has huge pages");
    if (status == DKV_OK && wire->writable && !region->fills)
        status = check_pages(fd, err);
    if (status != DKV_OK)
        return status;
    return dkv_backend_attach(region->backend, fd, wire->offset, wire->bytes, wire->writable != 0,
                              source->connection, source->uid, on_attached, region, &region->loan,
                              err);
}

static enum dkv_status lend_name(struct dkv_region *region, const struct dkv_region_source *source,
                                 struct dkv_error *err)
{
    const struct dkv_wire_region *wire = source->wire;
    int fd = -1;
    if (source->shm_prefix == NULL || *source->shm_prefix == '\0')
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "region: this daemon takes no names of shared memory: pass a memfd");
    enum dkv_status status = dkv_shm_name_open_suffix(source->shm_prefix, wire->handle,
                                                      sizeof(wire->handle), source->uid, &fd, err);
    if (status != DKV_OK)
        return status;
    status = lend_file(region, source, fd, err);
    close(fd);
    return status;
}

/* Lends the memory that was passed. on_attached may be called within, so the region is attached
 * before. */
static enum dkv_status lend(struct dkv_region *region, const struct dkv_region_source *source,
                            struct dkv_error *err)
{
    const struct dkv_wire_region *wire = source->wire;
    const bool named = wire->kind == DKV_WIRE_REGION_SHM_NAME;
    const bool on_gpu = wire->kind != DKV_WIRE_REGION_MEMFD && !named;
    if (on_gpu && wire->writable)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "region: results are written into host memory (memfd) only");
    if (wire->kind == DKV_WIRE_REGION_CUDA_LEGACY && !source->trusted)
        return dkv_error_set(err, DKV_E_DENIED,
                             "region: legacy CUDA handles are taken from the daemon's own user "
                             "only, since they carry no rights: pass VMM descriptors");
    region->generation = wire->generation;
    region->attached = true;
    region->writable = wire->writable != 0;
    region->fills = source->fills;
    region->bytes = wire->bytes;
    if (named)
        return lend_name(region, source, err);
    return on_gpu ? dkv_backend_attach_cuda(region->backend, wire, source->fds, source->connection,
                                            on_attached, region, &region->loan, err)
                  : lend_file(region, source, source->fds[0], err);
}

enum dkv_status dkv_region_new(struct dkv_backend *backend, const struct dkv_region_source *source,
                               dkv_region_settled_fn on_settled, void *owner,
                               struct dkv_region **region_out, struct dkv_error *err)
{
    struct dkv_region *region = calloc(1, sizeof(*region));
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a region");
    region->n_refs = 1;
    region->backend = backend;
    region->on_settled = on_settled;
    region->owner = owner;
    *region_out = region;
    const enum dkv_status status = lend(region, source, err);
    if (status != DKV_OK)
        free(region);
    return status;
}

enum dkv_status dkv_region_attach(struct dkv_region *region, const struct dkv_region_source *source,
                                  dkv_region_settled_fn on_settled, void *owner,
                                  struct dkv_error *err)
{
    const uint32_t generation = source->wire->generation, before = region->generation;
    if (region->attached || region->loan != NULL)
        return dkv_error_set(err, DKV_E_INVALID, "region: it is not detached");
    if (generation <= region->generation)
        return dkv_error_set(err, DKV_E_INVALID, "region: generation %u is not above %u",
                             generation, region->generation);
    region->on_settled = on_settled;
    region->owner = owner;
    const enum dkv_status status = lend(region, source, err);
    if (status != DKV_OK) { /* on_settled was not called, and the generation may be tried again */
        region->attached = false;
        region->generation = before;
        region->on_settled = NULL;
    }
    return status;
}

static void on_released(void *owner)
{
    static const struct dkv_error none;
    struct dkv_region *region = owner;
    region->loan = NULL;
    settle(region, &none);
    dkv_region_unref(region);
}

/* Nobody uses it any more. The loan holds a reference until it is gone. */
static void give_back(struct dkv_region *region)
{
    region->n_refs++;
    dkv_backend_detach(region->loan, on_released, region);
}

void dkv_region_detach(struct dkv_region *region, dkv_region_settled_fn on_settled, void *owner)
{
    assert(region->attached && region->on_settled == NULL);
    region->attached = false;
    region->on_settled = on_settled;
    region->owner = owner;
    if (region->n_uses == 0)
        give_back(region);
}

void *dkv_region_abandon(struct dkv_region *region)
{
    void *owner = region->on_settled != NULL ? region->owner : NULL;
    region->on_settled = NULL;
    if (region->attached)
        dkv_region_detach(region, NULL, NULL);
    dkv_region_unref(region);
    return owner;
}

void dkv_region_unref(struct dkv_region *region)
{
    if (region == NULL || --region->n_refs > 0)
        return;
    assert(region->loan == NULL);
    free(region);
}

void dkv_region_use(struct dkv_region *region)
{
    assert(region->attached);
    region->n_refs++;
    region->n_uses++;
}

void dkv_region_unuse(struct dkv_region *region)
{
    if (--region->n_uses == 0 && !region->attached)
        give_back(region);
    dkv_region_unref(region);
}

enum dkv_status dkv_region_read(const struct dkv_region *region, uint64_t offset, void *to,
                                uint64_t bytes, struct dkv_error *err)
{
    assert(dkv_range_fits(offset, bytes, region->bytes) && !dkv_loan_on_gpu(region->loan));
    return dkv_memfd_read(region->loan->fd, region->loan->offset + offset, to, bytes, err);
}

enum dkv_status dkv_region_write(const struct dkv_region *region, uint64_t offset, const void *from,
                                 uint64_t bytes, struct dkv_error *err)
{
    const uint8_t *next = from;
    const enum dkv_status status = dkv_region_check_pages(region, err);
    if (status != DKV_OK)
        return status;
    assert(dkv_range_fits(offset, bytes, region->bytes) && !dkv_loan_on_gpu(region->loan));
    while (bytes > 0) {
        const ssize_t n = pwrite(region->loan->fd, next, bytes,
                                 (off_t)(region->loan->offset + offset));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return dkv_error_set(err, DKV_E_INVALID, "output: the region cannot be written: %s",
                                 n < 0 ? strerror(errno) : "it is full");
        next += n;
        offset += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return DKV_OK;
}
