/* Memory that a daemon on the same host can read where it lies: the library's own, or the caller's
 * on a GPU.
 *
 * Owner   dropkv_buffer_new() or dropkv_buffer_from_cuda() makes it, the caller frees it, not
 * before it was removed from every client it was added to. Thread  any, one at a time.
 */
#ifndef DKV_CLIENT_BUFFER_H
#define DKV_CLIENT_BUFFER_H

#include "client/cuda_export.h"

struct dropkv_buffer {
    int fd;     /* a memfd, sealed against shrink and grow; -1: GPU memory */
    void *base; /* of GPU memory the device's address: never read here */
    size_t bytes;
    bool on_gpu;
    enum dropkv_cuda_export how;
    struct dkv_cuda_export cuda;
};

/* What a message that registers the buffer says and brings. */
struct dkv_buffer_message {
    uint8_t payload[112 + DKV_WIRE_FDS_MAX * DKV_WIRE_CHUNK_BYTES];
    size_t payload_bytes;
    int fds[DKV_WIRE_FDS_MAX]; /* duplicates: of the connection that sends them */
    uint16_t n_fds;
};

/* Fills `wire`'s description of the memory into the rest of it (region, generation and writable are
 * the caller's) and writes the message. UNSUPPORTED: GPU memory that is not exported now; IO: no
 * descriptors are left. */
enum dkv_status dkv_buffer_describe(const struct dropkv_buffer *buffer, struct dkv_wire_region wire,
                                    struct dkv_buffer_message *message_out, struct dkv_error *err);

/* True if [at, at + bytes) lies inside; *offset_out is where. */
static inline bool dkv_buffer_holds(const struct dropkv_buffer *buffer, const void *at,
                                    uint64_t bytes, uint64_t *offset_out)
{
    const uint64_t offset = (uint64_t)(uintptr_t)at - (uint64_t)(uintptr_t)buffer->base;
    *offset_out = offset;
    return offset <= buffer->bytes && bytes <= buffer->bytes - offset;
}

/* True if `at` is an address of GPU memory, which cannot be read here. */
static inline bool dkv_buffer_is_gpu_at(const struct dropkv_buffer *buffer, const void *at)
{
    return buffer->on_gpu &&
           (uint64_t)(uintptr_t)at - (uint64_t)(uintptr_t)buffer->base < buffer->bytes;
}

#endif
