/* libdropkv: memory that is shared with a daemon on the same host, a GPU's too. Part of dropkv.h.
 */
#ifndef DROPKV_BUFFER_H
#define DROPKV_BUFFER_H

#include "base.h"
#include "client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- memory shared with a daemon on the same host ----
 *
 * Over unix:/// tensors that lie in a buffer are read by the daemon where they are; others are
 * sent. The answers are the same. With other endpoints a buffer is memory like any other, so a
 * program need not know which one it has.
 *
 *     struct dropkv_buffer *buffer;
 *     dropkv_buffer_new(bytes, &buffer, &error);
 *     dropkv_client_add_buffer(client, buffer, &error);
 *     request.key.data = (char *)dropkv_buffer_data(buffer) + offset;
 */

struct dropkv_buffer;

/* A memfd of `bytes`, sealed against shrinking and growing, allocated and mapped, zeroed. NOMEM,
 * INVALID for 0 bytes. */
DROPKV_API enum dropkv_status dropkv_buffer_new(size_t bytes, struct dropkv_buffer **buffer_out,
                                                struct dropkv_error *error);

/* Not before it was removed from its clients, or they were closed. NULL is fine. */
DROPKV_API void dropkv_buffer_free(struct dropkv_buffer *buffer);

/* Of GPU memory: the device's address, not to be read by the host. */
DROPKV_API void *dropkv_buffer_data(const struct dropkv_buffer *buffer);
DROPKV_API size_t dropkv_buffer_bytes(const struct dropkv_buffer *buffer);

/* The memfd, to be passed to other processes that write there; -1: GPU memory. Owned by the buffer.
 */
DROPKV_API int dropkv_buffer_fd(const struct dropkv_buffer *buffer);

/* ---- GPU memory ----
 *
 * A buffer over the caller's own GPU memory, which a daemon on the same host reads in place. It is
 * used like any other buffer, and tensors are given by their device addresses:
 *
 *     dropkv_buffer_from_cuda(kv, bytes, DROPKV_CUDA_ANY, &buffer, &error);
 *     dropkv_client_add_buffer(client, buffer, &error);
 *     request.key.data = (char *)kv + offset;
 *
 * It is for unix:/// and a daemon whose worker has that GPU; nothing is ever copied or sent
 * instead, so where a daemon refuses the memory, requests that need it fail with the reason. The
 * daemon reads whenever it likes between submission and answer: what the producer's stream writes
 * must be there before (a fence, or a synchronise).
 *
 * The CUDA driver is opened when this is first called; libdropkv does not link to it.
 */

enum dropkv_cuda_export {
    DROPKV_CUDA_ANY = 0,
    DROPKV_CUDA_VMM = 1,    /* memory of cuMemCreate() with POSIX file descriptor handles, in one
                               chunk or several side by side; for daemons of any user */
    DROPKV_CUDA_LEGACY = 2, /* memory of cudaMalloc(); for daemons of the caller's own user. The
                               daemon can then reach all of the allocation, and what shares its
                               2 MiB block */
};

/* [pointer, pointer + bytes): anywhere inside one allocation, or across chunks. The memory stays
 * the caller's. The buffer holds descriptors of VMM memory, which keep it allocated. INVALID: not
 * GPU memory of this process, or not so much. UNSUPPORTED: no driver, or memory that cannot be
 * shared; the text says how to allocate it instead. */
DROPKV_API enum dropkv_status dropkv_buffer_from_cuda(const void *pointer, size_t bytes,
                                                      enum dropkv_cuda_export how,
                                                      struct dropkv_buffer **buffer_out,
                                                      struct dropkv_error *error);

/* For an owner that releases the memory and maps other memory at the same address: after the daemon
 * has let go, the buffer lets go too; before the daemon gets it back, it is exported anew. In
 * between the buffer cannot be registered. */
DROPKV_API void dropkv_buffer_unexport(struct dropkv_buffer *buffer);
DROPKV_API enum dropkv_status dropkv_buffer_export_again(struct dropkv_buffer *buffer,
                                                         struct dropkv_error *error);

/* Tensors of requests submitted from now on may lie in the buffer. A client registers it with its
 * daemon, and again whenever it has to connect again. The buffer is borrowed until it is removed or
 * the client is closed. One that the daemon refuses is sent like other memory. NOMEM. */
DROPKV_API enum dropkv_status dropkv_client_add_buffer(struct dropkv_client *client,
                                                       const struct dropkv_buffer *buffer,
                                                       struct dropkv_error *error);

/* The same for a buffer that answers may be written to as well (dropkv_prompt.output). Without this
 * a daemon has a buffer for reading alone. */
DROPKV_API enum dropkv_status dropkv_client_add_output(struct dropkv_client *client,
                                                       const struct dropkv_buffer *buffer,
                                                       struct dropkv_error *error);

/* Requests in flight that use it are still answered. The daemon may look at the memory until they
 * are. Caches and stashes that lie in it are removed first. */
DROPKV_API void dropkv_client_remove_buffer(struct dropkv_client *client,
                                            const struct dropkv_buffer *buffer);

/* For an owner that is about to free, remap or hand on the memory while its registrations stay:
 * returns when the last work that reads the buffer has ended and the daemon has let go of it. Until
 * attach, prompts that need the buffer fail with NOT_FOUND, and tensors that lie in it are sent.
 * Blocks until timeout_us at most (0: the client's). An embedded engine waits for what is under
 * way, and keeps no account of buffers. UNSUPPORTED over HTTP; NOT_FOUND for a buffer that was not
 * added; TIMEOUT: the daemon may still have it. */
DROPKV_API enum dropkv_status dropkv_client_detach_buffer(struct dropkv_client *client,
                                                          const struct dropkv_buffer *buffer,
                                                          int64_t timeout_us,
                                                          struct dropkv_error *error);

/* The memory is back, in the same place of the same buffer; GPU memory that was mapped anew has
 * been exported again (dropkv_buffer_unexport() after detach, dropkv_buffer_export_again() before
 * this). Does not wait. INVALID unless it is detached. */
DROPKV_API enum dropkv_status dropkv_client_attach_buffer(struct dropkv_client *client,
                                                          const struct dropkv_buffer *buffer,
                                                          struct dropkv_error *error);

#ifdef __cplusplus
}
#endif
#endif
