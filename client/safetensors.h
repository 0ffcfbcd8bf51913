/* The safetensors format, reading and writing.
 *
 * A file is a 64-bit little-endian header length, that many bytes of JSON, and tensor bytes. The
 * header maps each tensor's name to {"dtype", "shape", "data_offsets": [begin, end)}, counted from
 * the end of the header; "__metadata__" maps strings to strings. The tensors must tile the data
 * without overlap or gap.
 *
 * Thread  any; no shared state.
 */
#ifndef DKV_CLIENT_SAFETENSORS_H
#define DKV_CLIENT_SAFETENSORS_H

#include "client/tensor_file.h"

#include <stdio.h>

/* The format's own bound. */
#define DKV_SAFETENSORS_HEADER_MAX 100000000u

/* Reads a whole file's bytes into an index.
 *
 * bytes   borrowed by the index; any content is safe.
 * Time    O(n log n) for n tensors; about 100 bytes of memory for each, and their names.
 * Errors  INVALID naming what is wrong; NOMEM. *index_out is written only on success.
 */
enum dkv_status dkv_safetensors_parse(const void *bytes, uint64_t size,
                                      struct dkv_tensor_index *index_out, struct dkv_error *err);

/* One tensor to be written. `type_name` as the format spells it: "I32", "F32". */
struct dkv_safetensors_out {
    const char *name;
    const char *type_name;
    uint32_t n_dims;
    const uint64_t *shape;
    const void *data;
    uint64_t bytes;
};

/* Writes a file: `metadata` is [n_metadata][2] of key and value. Tensors are written in the order
 * given; the data starts at a multiple of 64 bytes. IO if the stream fails. */
enum dkv_status dkv_safetensors_write(FILE *stream, const struct dkv_safetensors_out *tensors,
                                      size_t n_tensors, const char *const (*metadata)[2],
                                      size_t n_metadata, struct dkv_error *err);

#endif
