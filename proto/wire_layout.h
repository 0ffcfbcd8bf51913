/* How a struct lies on the wire: one table per message, read in both directions, so that what is
 * written and what is read cannot differ. wire.c has the tables; PROTOCOL.md draws them.
 */
#ifndef DKV_PROTO_WIRE_LAYOUT_H
#define DKV_PROTO_WIRE_LAYOUT_H

#include <stddef.h>

#include "proto/wire.h"

/* Bytes that must be zero. */
#define DKV_WIRE_RESERVED UINT16_MAX

struct dkv_wire_field {
    uint16_t member; /* offset in the struct, or RESERVED */
    uint16_t bytes;
    bool raw; /* bytes as they are; else one little-endian number of 1, 2, 4 or 8 bytes */
};

struct dkv_wire_layout {
    const struct dkv_wire_field *fields;
    uint16_t n_fields;
    uint16_t wire_bytes; /* the sum of the fields: checked by a test */
};

enum dkv_wire_layout_id {
    DKV_LAYOUT_HEADER,
    DKV_LAYOUT_HELLO,
    DKV_LAYOUT_WELCOME,
    DKV_LAYOUT_DEVICE,
    DKV_LAYOUT_REGION,
    DKV_LAYOUT_CHUNK,
    DKV_LAYOUT_OBJECT,
    DKV_LAYOUT_CACHE,
    DKV_LAYOUT_VIEW,
    DKV_LAYOUT_STASH,
    DKV_LAYOUT_SCORE,
    DKV_LAYOUT_BLOCKS,
    DKV_LAYOUT_BLOCK,
    DKV_LAYOUT_RESULT,
    DKV_LAYOUT_RESULT_BLOCK,
    DKV_LAYOUT_ERROR,
    DKV_LAYOUT_CANCEL,
    DKV_LAYOUT_PING,
    DKV_LAYOUTS,
};

extern const struct dkv_wire_layout dkv_wire_layouts[DKV_LAYOUTS];

/* Returns the bytes written. */
size_t dkv_wire_encode(enum dkv_wire_layout_id id, uint8_t *out, const void *from);

/* False if a reserved byte is not zero. Members that are not on the wire are left alone. */
bool dkv_wire_decode(enum dkv_wire_layout_id id, const uint8_t *in, void *to);

#endif
