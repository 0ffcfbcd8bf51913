/* The addresses that stand for a loan are a mapping without any access: free of charge, and an
 * access by mistake ends the process instead of reading something else.
 *
 * A sealed file that has holes is treated like a loose one: to read a hole through a mapping takes
 * a page, and on our account, so a terabyte of holes, which costs its owner nothing, would cost us
 * a terabyte. Holes can be punched later, but then their owner had the pages first.
 */
#include "server/loan.h"

#include "proto/memfd.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK_BYTES 512u /* of st_blocks */

static bool has_all_pages(int fd, uint64_t bytes)
{
    struct stat st;
    return fstat(fd, &st) == 0 && (uint64_t)st.st_blocks >= bytes / BLOCK_BYTES;
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
                              .loose = info.kind != DKV_MEMFD_SEALED ||
                                       !has_all_pages(fd, info.bytes)};
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    loan->base = base != MAP_FAILED ? base : NULL;
    if (loan->fd < 0 || loan->base == NULL) {
        dkv_loan_free(loan);
        return dkv_error_set(err, DKV_E_NOMEM, "region: no %s for %llu bytes",
                             base == MAP_FAILED ? "addresses" : "file descriptor",
                             (unsigned long long)bytes);
    }
    *loan_out = loan;
    return DKV_OK;
}

void dkv_loan_free(struct dkv_loan *loan)
{
    if (loan->base != NULL)
        munmap((void *)(uintptr_t)loan->base, loan->bytes);
    if (loan->fd >= 0)
        close(loan->fd);
    free(loan);
}

enum dkv_loan_kind dkv_loan_kind_of(const struct dkv_loan *loan)
{
    return loan->loose ? DKV_LOAN_LOOSE : DKV_LOAN_SEALED;
}

struct dkv_link_range dkv_loan_range(const struct dkv_loan *loan)
{
    return (struct dkv_link_range){loan->number, loan->base, loan->bytes};
}
