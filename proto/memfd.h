/* Host memory shared by passing a file descriptor.
 *
 * What a peer sends is hostile: it can truncate the file while we read it, and reading a mapping
 * beyond the file's end is a SIGBUS. So memory is only mapped if the fd is a memfd sealed against
 * shrinking and growing, not of huge pages, with its size looked at after its seals; anything else
 * that is memory is read by dkv_memfd_read(), which cannot fault. Contents may change at any time,
 * sealed or not: nothing that was checked there stays true.
 *
 * Owner   fds stay the caller's.
 * Thread  any; no state.
 * Errors  INVALID says what kind of thing the fd is instead; never a path.
 */
#ifndef DKV_PROTO_MEMFD_H
#define DKV_PROTO_MEMFD_H

#include "proto/types.h"

enum dkv_memfd_kind {
    DKV_MEMFD_SEALED, /* of a fixed size: may be mapped */
    DKV_MEMFD_LOOSE,  /* memory that its owner can take away: read only by dkv_memfd_read() */
};

struct dkv_memfd_info {
    enum dkv_memfd_kind kind;
    uint64_t bytes; /* of the file; LOOSE: at this moment */
    bool writable;  /* results could be written there, by write() too: not to huge pages */
};

/* What is it? INVALID if it is no memory: a file on disk, a pipe, a socket, a device, a directory,
 * an fd opened by O_PATH or not for reading. */
enum dkv_status dkv_memfd_inspect(int fd, struct dkv_memfd_info *info_out, struct dkv_error *err);

/* Some of the file's pages are not there yet: whoever writes to them, or reads them through a
 * mapping, makes them, on his own account. */
bool dkv_memfd_has_holes(int fd);

/* A new memfd of `bytes`, allocated now (so that touching it cannot fail later), mapped read-write
 * and sealed against shrinking, growing and further seals. Close with dkv_memfd_unmap() and
 * close(). NOMEM, INVALID for 0 bytes. */
enum dkv_status dkv_memfd_new(uint64_t bytes, int *fd_out, void **base_out, struct dkv_error *err);

/* Maps [offset, offset + bytes) of a SEALED memfd. The seals and the size are read here again, so
 * nobody can map what was not inspected. INVALID if it is not sealed or too small. */
enum dkv_status dkv_memfd_map(int fd, uint64_t offset, uint64_t bytes, bool writable,
                              void **base_out, struct dkv_error *err);

/* Undoes map and new; any offset. NULL is fine. */
void dkv_memfd_unmap(void *base, uint64_t bytes);

/* Copies [offset, offset + bytes) to `to`, without mapping. INVALID if the file ends before. */
enum dkv_status dkv_memfd_read(int fd, uint64_t offset, void *to, uint64_t bytes,
                               struct dkv_error *err);

#endif
