/* Whether a file may be mapped is decided once, when it comes, from what cannot change afterwards:
 * seals first, then size (proto/memfd.c). That every page is there is no such fact, since holes can
 * be punched into a sealed file at any time. It is looked at to keep honest sparse files and the
 * cheapest attack (a terabyte of holes) away from the mapping: a read fault in a hole would take a
 * page on our account. Whoever punches holes later had paid for those pages first.
 */
#include "server/region.h"

#include "proto/memfd.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK_BYTES 512u /* of st_blocks */

static bool has_all_pages(int fd, uint64_t bytes)
{
    struct stat st;
    return fstat(fd, &st) == 0 && (uint64_t)st.st_blocks >= bytes / BLOCK_BYTES;
}

/* Puts the memory behind `fd` into the region, which is taken on success. */
static enum dkv_status take(struct dkv_region *region, const struct dkv_wire_region *wire, int fd,
                            struct dkv_error *err)
{
    struct dkv_memfd_info info;
    void *base = NULL;
    if (wire->kind != DKV_WIRE_REGION_MEMFD)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "region: this daemon takes host memory (memfd) only: no CUDA worker "
                             "is there that could import GPU memory");
    enum dkv_status status = dkv_memfd_inspect(fd, &info, err);
    if (status != DKV_OK)
        return status;
    if (!dkv_range_fits(wire->offset, wire->bytes, info.bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "region: %" PRIu64 " bytes at %" PRIu64
                             " are not within the file's %" PRIu64,
                             wire->bytes, wire->offset, info.bytes);
    const bool mapped = info.kind == DKV_MEMFD_SEALED && has_all_pages(fd, info.bytes);
    if (wire->writable && !(mapped && info.writable))
        return dkv_error_set(err, DKV_E_INVALID,
                             "region: results are written only to a memfd that is sealed against "
                             "shrink and grow, allocated and open for writing");
    if (mapped)
        status = dkv_memfd_map(fd, wire->offset, wire->bytes, wire->writable != 0, &base, err);
    if (status != DKV_OK)
        return status;
    region->generation = wire->generation;
    region->attached = true;
    region->writable = wire->writable != 0;
    region->fd = fd;
    region->base = base;
    region->offset = wire->offset;
    region->bytes = wire->bytes;
    return DKV_OK;
}

static void let_go(struct dkv_region *region)
{
    dkv_memfd_unmap(region->base, region->bytes);
    region->base = NULL;
    if (region->fd >= 0)
        close(region->fd);
    region->fd = -1;
}

enum dkv_status dkv_region_new(const struct dkv_wire_region *wire, int fd,
                               struct dkv_region **region_out, struct dkv_error *err)
{
    struct dkv_region *region = calloc(1, sizeof(*region));
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a region");
    region->n_refs = 1;
    region->fd = -1;
    enum dkv_status status = take(region, wire, fd, err);
    if (status != DKV_OK) {
        free(region);
        return status;
    }
    *region_out = region;
    return DKV_OK;
}

enum dkv_status dkv_region_attach(struct dkv_region *region, const struct dkv_wire_region *wire,
                                  int fd, struct dkv_error *err)
{
    if (region->attached || region->fd >= 0)
        return dkv_error_set(err, DKV_E_INVALID, "region: it is not detached");
    if (wire->generation <= region->generation)
        return dkv_error_set(err, DKV_E_INVALID, "region: generation %u is not above %u",
                             wire->generation, region->generation);
    return take(region, wire, fd, err);
}

/* on_idle may give up the last reference. */
static void become_idle(struct dkv_region *region)
{
    dkv_region_idle_fn on_idle = region->on_idle;
    let_go(region);
    region->on_idle = NULL;
    if (on_idle != NULL)
        on_idle(region, region->idle_owner);
}

void dkv_region_detach(struct dkv_region *region, dkv_region_idle_fn on_idle, void *owner)
{
    assert(region->attached && region->on_idle == NULL);
    region->attached = false;
    region->on_idle = on_idle;
    region->idle_owner = owner;
    if (region->n_uses == 0)
        become_idle(region);
}

void dkv_region_forget(struct dkv_region *region)
{
    region->on_idle = NULL;
}

void dkv_region_unref(struct dkv_region *region)
{
    if (region == NULL || --region->n_refs > 0)
        return;
    let_go(region);
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
        become_idle(region);
    dkv_region_unref(region);
}

enum dkv_status dkv_region_read(const struct dkv_region *region, uint64_t offset, void *to,
                                uint64_t bytes, struct dkv_error *err)
{
    assert(dkv_range_fits(offset, bytes, region->bytes));
    if (region->base == NULL)
        return dkv_memfd_read(region->fd, region->offset + offset, to, bytes, err);
    memcpy(to, region->base + offset, bytes);
    return DKV_OK;
}
