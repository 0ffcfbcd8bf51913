/* F_GET_SEALS is the question that tells memory from everything else: the kernel answers it for
 * memfds, tmpfs and hugetlbfs files only. It must be asked before fstat(): a file that is sealed
 * now keeps the size that is read afterwards, while a size that was read first may be gone by the
 * time of the seal. F_SEAL_SHRINK alone is not enough, since a file can be short from the start.
 *
 * Holes may still be punched into a sealed file; the pages read as zeros then, which spoils the
 * owner's own answer and nothing else. Not so with huge pages: the next access needs one of a pool
 * that may be empty by then, which is a SIGBUS. So these are never mapped.
 */
#include "proto/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define BLOCK_BYTES     512 /* of st_blocks */
#define MFD_NOEXEC_SEAL 8U
#endif

#define SIZE_SEALS  (F_SEAL_SHRINK | F_SEAL_GROW)
#define BLOCK_BYTES 512 /* of st_blocks */

static const char *kind_name(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return "a file on disk";
    case S_IFDIR: return "a directory";
    case S_IFIFO: return "a pipe";
    case S_IFSOCK: return "a socket";
    case S_IFCHR:
    case S_IFBLK: return "a device";
    default: return "not a file";
    }
}

/* Seals, or the reason why this fd is no memory. */
static enum dkv_status get_seals(int fd, int *seals_out, struct dkv_error *err)
{
    struct stat st;
    const int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || (flags & O_PATH) != 0 || (flags & O_ACCMODE) == O_WRONLY)
        return dkv_error_set(err, DKV_E_INVALID, "the fd is not open for reading");
    *seals_out = fcntl(fd, F_GET_SEALS);
    if (*seals_out >= 0)
        return DKV_OK;
    if (fstat(fd, &st) != 0)
        return dkv_error_set(err, DKV_E_INVALID, "the fd cannot be examined");
    return dkv_error_set(err, DKV_E_INVALID,
                         "the fd is %s; a memfd sealed against shrink and grow is wanted",
                         kind_name(st.st_mode));
}

static bool has_huge_pages(int fd)
{
    struct statfs fs;
    return fstatfs(fd, &fs) != 0 || fs.f_type == HUGETLBFS_MAGIC;
}

enum dkv_status dkv_memfd_inspect(int fd, struct dkv_memfd_info *info_out, struct dkv_error *err)
{
    struct stat st;
    int seals = 0;
    enum dkv_status status = get_seals(fd, &seals, err);

    if (status != DKV_OK)
        return status;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < 0)
        return dkv_error_set(err, DKV_E_INVALID, "the fd has no size");
    const bool huge = has_huge_pages(fd);
    info_out->kind = (seals & SIZE_SEALS) == SIZE_SEALS && !huge ? DKV_MEMFD_SEALED
                                                                 : DKV_MEMFD_LOOSE;
    info_out->bytes = (uint64_t)st.st_size;
    info_out->writable = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR && !huge &&
                         (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) == 0;
    return DKV_OK;
}

bool dkv_memfd_has_holes(int fd)
{
    struct stat st;
    return fstat(fd, &st) != 0 || st.st_blocks < st.st_size / BLOCK_BYTES;
}

/* --- our own ------------------------------------------------------------------------------- */

static int create(void)
{
    const int fd = memfd_create("dropkv", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd >= 0 || errno != EINVAL) /* kernels before 6.3 do not know NOEXEC_SEAL */
        return fd;
    return memfd_create("dropkv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

static int allocate(int fd, uint64_t bytes)
{
    int result;
    do
        result = fallocate(fd, 0, 0, (off_t)bytes);
    while (result != 0 && errno == EINTR);
    return result;
}

/* What can be had without killing somebody. Asked before fallocate(), which takes page after page
 * until the kernel does. Where it cannot be known, half of the machine. */
static uint64_t available_memory(void)
{
    const uint64_t half = (uint64_t)sysconf(_SC_PHYS_PAGES) / 2 * (uint64_t)sysconf(_SC_PAGESIZE);
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t kib = 0;
    char line[128];

    while (file != NULL && kib == 0 && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) != 1)
            kib = 0;
    if (file != NULL)
        fclose(file);
    return kib != 0 ? kib * 1024 : half;
}

enum dkv_status dkv_memfd_new(uint64_t bytes, int *fd_out, void **base_out, struct dkv_error *err)
{
    if (bytes == 0)
        return dkv_error_set(err, DKV_E_INVALID, "memfd: %" PRIu64 " bytes", bytes);
    const uint64_t available = available_memory();
    if (bytes > available)
        return dkv_error_set(err, DKV_E_NOMEM,
                             "memfd: %" PRIu64 " bytes, %" PRIu64 " are available", bytes,
                             available);
    const int fd = create();
    if (fd < 0)
        return dkv_error_set(err, DKV_E_NOMEM, "memfd: %s", strerror(errno));
    if (allocate(fd, bytes) != 0) {
        dkv_error_set(err, DKV_E_NOMEM, "memfd of %" PRIu64 " bytes: %s", bytes, strerror(errno));
        goto err_close;
    }
    if (fcntl(fd, F_ADD_SEALS, SIZE_SEALS | F_SEAL_SEAL) != 0) {
        dkv_error_set(err, DKV_E_NOMEM, "memfd: sealing: %s", strerror(errno));
        goto err_close;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        dkv_error_set(err, DKV_E_NOMEM, "memfd: mapping %" PRIu64 " bytes: %s", bytes,
                      strerror(errno));
        goto err_close;
    }
    *fd_out = fd;
    *base_out = base;
    return DKV_OK;

err_close:
    close(fd);
    return DKV_E_NOMEM;
}

/* --- a peer's ------------------------------------------------------------------------------ */

static uint64_t below_page(uint64_t offset)
{
    return offset & ((uint64_t)sysconf(_SC_PAGESIZE) - 1);
}

enum dkv_status dkv_memfd_map(int fd, uint64_t offset, uint64_t bytes, bool writable,
                              void **base_out, struct dkv_error *err)
{
    struct dkv_memfd_info info;
    enum dkv_status status = dkv_memfd_inspect(fd, &info, err);

    if (status != DKV_OK)
        return status;
    if (info.kind != DKV_MEMFD_SEALED)
        return dkv_error_set(err, DKV_E_INVALID,
                             "memfd is not sealed against shrink and grow, or has huge pages");
    if (bytes == 0 || !dkv_range_fits(offset, bytes, info.bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "memfd: %" PRIu64 " bytes at %" PRIu64 " are not within %" PRIu64,
                             bytes, offset, info.bytes);
    if (writable && !info.writable)
        return dkv_error_set(err, DKV_E_INVALID, "memfd cannot be written");

    const uint64_t lead = below_page(offset);
    char *base = mmap(NULL, bytes + lead, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd,
                      (off_t)(offset - lead));
    if (base == MAP_FAILED)
        return dkv_error_set(err, DKV_E_NOMEM, "memfd: mapping %" PRIu64 " bytes: %s", bytes,
                             strerror(errno));
    *base_out = base + lead;
    return DKV_OK;
}

void dkv_memfd_unmap(void *base, uint64_t bytes)
{
    if (base == NULL)
        return;
    const uint64_t lead = below_page((uint64_t)(uintptr_t)base);
    munmap((char *)base - lead, bytes + lead);
}

enum dkv_status dkv_memfd_read(int fd, uint64_t offset, void *to, uint64_t bytes,
                               struct dkv_error *err)
{
    char *at = to;
    uint64_t end;

    if (!dkv_add_u64(offset, bytes, &end) || end > (uint64_t)INT64_MAX)
        return dkv_error_set(err, DKV_E_INVALID,
                             "memfd: offset %" PRIu64 " and %" PRIu64 " bytes overflow", offset,
                             bytes);
    while (offset < end) {
        const ssize_t n = pread(fd, at, end - offset, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return dkv_error_set(err, DKV_E_IO, "memfd: reading: %s", strerror(errno));
        if (n == 0)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "memfd ends at %" PRIu64 ", %" PRIu64 " needed", offset, end);
        at += n;
        offset += (uint64_t)n;
    }
    return DKV_OK;
}
