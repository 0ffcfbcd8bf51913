/* A list of free extents in ascending order, first fit, neighbours joined when freed; and before
 * it, for small ranges, a few kept ones per power of two, so that a small request costs no system
 * call and no page fault. There are about as many extents as requests in flight, so walking them is
 * cheap beside receiving a body.
 *
 * Bookkeeping is in ordinary memory: a worker that runs wild can spoil the data of the requests it
 * had, and no more than those.
 */
#include "server/arena.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PUNCHED_AT_ONCE (UINT64_C(1) << 20) /* pages that do not wait for scrub() */

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

struct dkv_arena_extent {
    struct dkv_arena_extent *next;
    uint64_t offset;
    uint64_t bytes;
    uint64_t dirty_bytes; /* at its beginning, of a dirty one */
};

struct dkv_arena_kept {
    struct dkv_arena_kept *next;
    uint64_t offset;
};

static int create(void)
{
    const int fd = memfd_create("dropkvd", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd >= 0 || errno != EINVAL) /* kernels before 6.3 do not know NOEXEC_SEAL */
        return fd;
    return memfd_create("dropkvd", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

/* Maps as much as there is address space for. */
static bool map(struct dkv_arena *arena, uint64_t bytes, uint64_t least_bytes)
{
    for (;; bytes = bytes / 2 > least_bytes ? bytes / 2 : least_bytes) {
        void *base = MAP_FAILED;
        if (ftruncate(arena->fd, (off_t)bytes) == 0)
            base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena->fd,
                        0);
        if (base != MAP_FAILED) {
            arena->base = base;
            arena->bytes = bytes;
            madvise(base, bytes, MADV_DONTDUMP);
            madvise(base, bytes, MADV_HUGEPAGE);
            return true;
        }
        if (bytes <= least_bytes)
            return false;
    }
}

enum dkv_status dkv_arena_open(struct dkv_arena *arena, uint64_t bytes, uint64_t least_bytes,
                               struct dkv_error *err)
{
    bytes &= ~(uint64_t)(DKV_ARENA_PAGE - 1);
    *arena = (struct dkv_arena){.fd = create()};
    struct dkv_arena_extent *whole = calloc(1, sizeof(*whole));
    if (arena->fd < 0 || whole == NULL || !map(arena, bytes, least_bytes) ||
        fcntl(arena->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        const int why = errno;
        free(whole);
        dkv_arena_close(arena);
        return dkv_error_set(err, DKV_E_NOMEM, "no shared memory of %llu bytes: %s",
                             (unsigned long long)least_bytes, strerror(why));
    }
    *whole = (struct dkv_arena_extent){.bytes = arena->bytes};
    arena->free_extents = whole;
    return DKV_OK;
}

static void free_list(struct dkv_arena_extent *extent)
{
    while (extent != NULL) {
        struct dkv_arena_extent *next = extent->next;
        free(extent);
        extent = next;
    }
}

void dkv_arena_close(struct dkv_arena *arena)
{
    assert(arena->used_bytes == 0);
    for (unsigned i = 0; i < DKV_ARENA_CLASSES; i++)
        while (arena->kept[i] != NULL) {
            struct dkv_arena_kept *kept = arena->kept[i];
            arena->kept[i] = kept->next;
            free(kept);
        }
    free_list(arena->free_extents);
    free_list(arena->dirty);
    if (arena->base != NULL)
        munmap(arena->base, arena->bytes);
    if (arena->fd > 0)
        close(arena->fd);
    *arena = (struct dkv_arena){.fd = -1};
}

/* ---- sizes ---- */

/* The class of a small range, or CLASSES; *bytes_out is what is really taken. */
static unsigned class_of(uint64_t bytes, uint64_t *bytes_out)
{
    uint64_t size = DKV_ARENA_PAGE;
    for (unsigned i = 0; i < DKV_ARENA_CLASSES; i++, size *= 2)
        if (bytes <= size) {
            *bytes_out = size;
            return i;
        }
    *bytes_out = (bytes + DKV_ARENA_PAGE - 1) & ~(uint64_t)(DKV_ARENA_PAGE - 1);
    return DKV_ARENA_CLASSES;
}

/* ---- extents ---- */

static void *take_extent(struct dkv_arena *arena, uint64_t bytes)
{
    struct dkv_arena_extent **link = &arena->free_extents;
    while (*link != NULL && (*link)->bytes < bytes)
        link = &(*link)->next;
    struct dkv_arena_extent *extent = *link;
    if (extent == NULL)
        return NULL;
    const uint64_t offset = extent->offset;
    extent->offset += bytes;
    extent->bytes -= bytes;
    if (extent->bytes == 0) {
        *link = extent->next;
        free(extent);
    }
    return arena->base + offset;
}

static void join_next(struct dkv_arena_extent *extent)
{
    struct dkv_arena_extent *next = extent->next;
    if (next == NULL || extent->offset + extent->bytes != next->offset)
        return;
    extent->bytes += next->bytes;
    extent->next = next->next;
    free(next);
}

static void give_extent(struct dkv_arena *arena, uint64_t offset, uint64_t bytes)
{
    struct dkv_arena_extent *before = NULL;
    for (struct dkv_arena_extent *e = arena->free_extents; e != NULL && e->offset < offset;
         e = e->next)
        before = e;
    if (before != NULL && before->offset + before->bytes == offset) {
        before->bytes += bytes;
        join_next(before);
        return;
    }
    struct dkv_arena_extent *extent = malloc(sizeof(*extent));
    if (extent == NULL)
        return; /* the address space is lost, which there is plenty of; the pages are not */
    struct dkv_arena_extent **link = before != NULL ? &before->next : &arena->free_extents;
    *extent = (struct dkv_arena_extent){.next = *link, .offset = offset, .bytes = bytes};
    *link = extent;
    join_next(extent);
}

/* ---- ranges ---- */

void *dkv_arena_alloc(struct dkv_arena *arena, uint64_t bytes)
{
    uint64_t size;
    if (bytes == 0 || bytes > arena->bytes)
        return NULL;
    const unsigned class = class_of(bytes, &size);
    void *range = NULL;
    if (class < DKV_ARENA_CLASSES && arena->kept[class] != NULL) {
        struct dkv_arena_kept *kept = arena->kept[class];
        arena->kept[class] = kept->next;
        arena->kept_bytes -= size;
        range = arena->base + kept->offset;
        free(kept);
    } else {
        range = take_extent(arena, size);
    }
    if (range != NULL)
        arena->used_bytes += size;
    return range;
}

static bool keep(struct dkv_arena *arena, unsigned class, uint64_t offset, uint64_t size)
{
    if (class == DKV_ARENA_CLASSES || arena->kept_bytes + size > DKV_ARENA_KEPT_BYTES)
        return false;
    struct dkv_arena_kept *kept = malloc(sizeof(*kept));
    if (kept == NULL)
        return false;
    *kept = (struct dkv_arena_kept){arena->kept[class], offset};
    arena->kept[class] = kept;
    arena->kept_bytes += size;
    return true;
}

static void punch(const struct dkv_arena *arena, uint64_t offset, uint64_t bytes)
{
    if (bytes > 0)
        (void)fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset,
                        (off_t)bytes);
}

/* False: there are too many already, or so few that it is not worth it. */
static bool put_off(struct dkv_arena *arena, uint64_t offset, uint64_t size, uint64_t touched)
{
    if (touched <= PUNCHED_AT_ONCE || touched > DKV_ARENA_DIRTY_BYTES - arena->dirty_bytes)
        return false;
    struct dkv_arena_extent *extent = malloc(sizeof(*extent));
    if (extent == NULL)
        return false;
    *extent = (struct dkv_arena_extent){arena->dirty, offset, size, touched};
    arena->dirty = extent;
    arena->dirty_bytes += touched;
    return true;
}

bool dkv_arena_scrub(struct dkv_arena *arena, uint64_t bytes)
{
    while (arena->dirty != NULL && bytes > 0) {
        struct dkv_arena_extent *extent = arena->dirty;
        const uint64_t n = bytes < extent->dirty_bytes ? bytes : extent->dirty_bytes;
        extent->dirty_bytes -= n;
        arena->dirty_bytes -= n;
        bytes -= n;
        punch(arena, extent->offset + extent->dirty_bytes, n);
        if (extent->dirty_bytes > 0)
            break;
        arena->dirty = extent->next;
        give_extent(arena, extent->offset, extent->bytes);
        free(extent);
    }
    return arena->dirty != NULL;
}

void dkv_arena_free(struct dkv_arena *arena, void *range, uint64_t bytes, uint64_t touched_bytes)
{
    uint64_t size, touched;
    if (range == NULL)
        return;
    const unsigned class = class_of(bytes, &size);
    const uint64_t offset = dkv_arena_offset(arena, range);
    arena->used_bytes -= size;
    if (keep(arena, class, offset, size))
        return;
    if (class < DKV_ARENA_CLASSES)
        touched_bytes = size; /* by an earlier owner, since it may have been kept */
    touched = (touched_bytes + DKV_ARENA_PAGE - 1) & ~(uint64_t)(DKV_ARENA_PAGE - 1);
    touched = touched < size ? touched : size;
    if (put_off(arena, offset, size, touched))
        return;
    punch(arena, offset, touched);
    give_extent(arena, offset, size);
}

void dkv_arena_populate(void *range, uint64_t bytes)
{
    const uint64_t lead = (uint64_t)(uintptr_t)range & (DKV_ARENA_PAGE - 1);
    (void)madvise((unsigned char *)range - lead, bytes + lead, MADV_POPULATE_WRITE);
}
