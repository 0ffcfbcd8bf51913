/* Memory of the library's own that a daemon on the same host can read where it lies.
 *
 * Owner   dropkv_buffer_new() makes it, the caller frees it, not before it was removed from every
 *         client it was added to.
 * Thread  any, one at a time.
 */
#ifndef DKV_CLIENT_BUFFER_H
#define DKV_CLIENT_BUFFER_H

#include "client/dropkv.h"

#include <stdbool.h>

struct dropkv_buffer {
    int fd; /* a memfd, sealed against shrink and grow */
    void *base;
    size_t bytes;
};

/* True if [at, at + bytes) lies inside; *offset_out is where. */
static inline bool dkv_buffer_holds(const struct dropkv_buffer *buffer, const void *at,
                                    uint64_t bytes, uint64_t *offset_out)
{
    const uint64_t offset = (uint64_t)(uintptr_t)at - (uint64_t)(uintptr_t)buffer->base;
    *offset_out = offset;
    return offset <= buffer->bytes && bytes <= buffer->bytes - offset;
}

#endif
