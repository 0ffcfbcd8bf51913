/* A buffer is a sealed memfd and its mapping (proto/memfd.h). */
#include "client/buffer.h"

#include "proto/memfd.h"

#include <stdlib.h>
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

void dropkv_buffer_free(struct dropkv_buffer *buffer)
{
    if (buffer == NULL)
        return;
    dkv_memfd_unmap(buffer->base, buffer->bytes);
    close(buffer->fd);
    free(buffer);
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
