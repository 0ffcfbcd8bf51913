/* Threads that read one large piece of a file together.
 *
 * Copying out of a file is bound by one processor's rate of page copies, so several do it faster;
 * for less than DKV_READERS_FROM it is not worth waking them.
 *
 * Owner   open/close.
 * Thread  one caller at a time; it reads along.
 * Errors  those of dkv_memfd_read().
 */
#ifndef DKV_SERVER_READERS_H
#define DKV_SERVER_READERS_H

#include "proto/types.h"

#define DKV_READERS_FROM (UINT64_C(16) << 20)

struct dkv_readers;

/* One thread less than there are processors, at most three. NULL if there is but one processor, or
 * no memory: reading works without. */
struct dkv_readers *dkv_readers_open(void);
void dkv_readers_close(struct dkv_readers *readers); /* NULL is fine */

/* As dkv_memfd_read(). `readers` may be NULL. */
enum dkv_status dkv_readers_read(struct dkv_readers *readers, int fd, uint64_t offset, void *to,
                                 uint64_t bytes, struct dkv_error *err);

#endif
