/* A buffer is a sealed memfd and its mapping (proto/memfd.h), or GPU memory that was exported
 * (client/cuda_export.h). */
#include "client/buffer.h"

#include "proto/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum dropkv_status dropkv_buffer_new(size_t bytes, struct dropkv_buffer **buffer_out,
                                     struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dropkv_buffer *buffer = calloc(1, sizeof(*buffer));
    if (buffer == NULL)
        return (enum dropkv_status)dkv_error_set(err, DKV_E_NOMEM, "no memory for a buffer");
    const enum dkv_status status = dkv_memfd_new(bytes, &buffer->fd, &buffer->base, err);
    if (status != DKV_OK) {
        free(buffer);
        return (enum dropkv_status)status;
    }
    buffer->bytes = bytes;
    *buffer_out = buffer;
    return DROPKV_OK;
}

enum dropkv_status dropkv_buffer_from_cuda(const void *pointer, size_t bytes,
                                           enum dropkv_cuda_export how,
                                           struct dropkv_buffer **buffer_out,
                                           struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dropkv_buffer *buffer = calloc(1, sizeof(*buffer));
    if (buffer == NULL)
        return (enum dropkv_status)dkv_error_set(err, DKV_E_NOMEM, "no memory for a buffer");
    *buffer = (struct dropkv_buffer){
        .fd = -1, .base = (void *)(uintptr_t)pointer, .bytes = bytes, .on_gpu = true, .how = how};
    const enum dkv_status status = dkv_cuda_export_init(&buffer->cuda, pointer, bytes, how, err);
    if (status != DKV_OK) {
        free(buffer);
        return (enum dropkv_status)status;
    }
    *buffer_out = buffer;
    return DROPKV_OK;
}

void dropkv_buffer_unexport(struct dropkv_buffer *buffer)
{
    if (buffer->on_gpu)
        dkv_cuda_export_fini(&buffer->cuda);
}

enum dropkv_status dropkv_buffer_export_again(struct dropkv_buffer *buffer,
                                              struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    if (!buffer->on_gpu)
        return (enum dropkv_status)dkv_error_set(err, DKV_E_INVALID,
                                                 "buffer: it is not GPU memory");
    dkv_cuda_export_fini(&buffer->cuda);
    return (enum dropkv_status)dkv_cuda_export_init(&buffer->cuda, buffer->base, buffer->bytes,
                                                    buffer->how, err);
}

void dropkv_buffer_free(struct dropkv_buffer *buffer)
{
    if (buffer == NULL)
        return;
    if (buffer->on_gpu) {
        dkv_cuda_export_fini(&buffer->cuda);
    } else {
        dkv_memfd_unmap(buffer->base, buffer->bytes);
        close(buffer->fd);
    }
    free(buffer);
}

static enum dkv_status duplicate(const int *fds, uint16_t n, struct dkv_buffer_message *message,
                                 struct dkv_error *err)
{
    for (message->n_fds = 0; message->n_fds < n; message->n_fds++) {
        const int fd = fcntl(fds[message->n_fds], F_DUPFD_CLOEXEC, 0);
        if (fd < 0) {
            dkv_error_set(err, DKV_E_IO, "no file descriptor is left: %s", strerror(errno));
            while (message->n_fds > 0)
                close(message->fds[--message->n_fds]);
            return DKV_E_IO;
        }
        message->fds[message->n_fds] = fd;
    }
    return DKV_OK;
}

enum dkv_status dkv_buffer_describe(const struct dropkv_buffer *buffer, struct dkv_wire_region wire,
                                    struct dkv_buffer_message *message_out, struct dkv_error *err)
{
    const struct dkv_cuda_export *cuda = &buffer->cuda;
    wire.kind = buffer->on_gpu ? cuda->kind : DKV_WIRE_REGION_MEMFD;
    wire.bytes = buffer->bytes;
    if (wire.kind == 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "buffer: its GPU memory is not exported now");
    if (buffer->on_gpu) {
        wire.offset = cuda->offset;
        wire.n_chunks = cuda->n_chunks;
        memcpy(wire.device_uuid, cuda->uuid, sizeof(wire.device_uuid));
        memcpy(wire.handle, cuda->handle, sizeof(wire.handle));
    }
    uint8_t *next = message_out->payload + dkv_wire_put_region(message_out->payload, &wire);
    for (uint16_t i = 0; i < cuda->n_chunks; i++)
        next += dkv_wire_put_chunk(next, &cuda->chunks[i]);
    message_out->payload_bytes = (size_t)(next - message_out->payload);
    return buffer->on_gpu ? duplicate(cuda->fds, cuda->n_chunks, message_out, err)
                          : duplicate(&buffer->fd, 1, message_out, err);
}

void *dropkv_buffer_data(const struct dropkv_buffer *buffer)
{
    return buffer->base;
}

size_t dropkv_buffer_bytes(const struct dropkv_buffer *buffer)
{
    return buffer->bytes;
}

int dropkv_buffer_fd(const struct dropkv_buffer *buffer)
{
    return buffer->fd;
}
