/* What the checks of all messages begin with; for wire.c and wire_request.c. */
#ifndef DKV_PROTO_WIRE_CHECK_H
#define DKV_PROTO_WIRE_CHECK_H

#include "proto/wire_layout.h"

/* Returns MALFORMED with a sentence that begins with the message's name. */
#define DKV_WIRE_REFUSE(name, ...) dkv_error_set(err, DKV_E_MALFORMED, name ": " __VA_ARGS__)

/* Decodes the fixed part: long enough, reserved bytes zero. */
enum dkv_status dkv_wire_get_fixed(const char *name, enum dkv_wire_layout_id id, const uint8_t *in,
                                   size_t bytes, void *to, struct dkv_error *err);

/* The payload is exactly the fixed part and `extra` bytes. */
enum dkv_status dkv_wire_exact(const char *name, enum dkv_wire_layout_id id, size_t bytes,
                               uint64_t extra, struct dkv_error *err);

static inline bool dkv_wire_known_dtype(uint8_t dtype)
{
    return dkv_dtype_bytes((enum dkv_dtype)dtype) != 0;
}

#endif
