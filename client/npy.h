/* The .npy format, reading and writing: one array per file.
 *
 * Versions 1 to 3 are read: a magic, a version, the length of a header and a Python dictionary
 * literal {'descr': '<f2', 'fortran_order': False, 'shape': (1, 8, 64, 128), }, then the elements.
 * Fortran order and big-endian elements are refused by name.
 *
 * numpy cannot name bfloat16 or fp8: such arrays are saved as raw ('|V2', '|V1') or as unsigned
 * integers of the same size ('<u2', '|u1'). They are read with the element type unknown; whoever
 * knows what they hold says so afterwards (dkv_npy_set_dtype()).
 *
 * Thread  any; no shared state.
 */
#ifndef DKV_CLIENT_NPY_H
#define DKV_CLIENT_NPY_H

#include "client/tensor_file.h"

#include <stdio.h>

#define DKV_NPY_MAGIC       "\x93NUMPY"
#define DKV_NPY_MAGIC_BYTES 6u
#define DKV_NPY_HEADER_MAX  65536u

/* Reads a whole file's bytes into an index of one tensor called `name` (copied). Same contract as
 * dkv_safetensors_parse(). */
enum dkv_status dkv_npy_parse(const void *bytes, uint64_t size, const char *name,
                              struct dkv_tensor_index *index_out, struct dkv_error *err);

/* Says what a tensor of raw or unsigned elements holds. INVALID if its elements have a type of
 * their own, or another size. */
enum dkv_status dkv_npy_set_dtype(struct dkv_tensor *tensor, enum dkv_dtype dtype,
                                  struct dkv_error *err);

/* Writes an array, version 1. `descr` as numpy spells it: "<i4", "<f4". IO if the stream fails. */
enum dkv_status dkv_npy_write(FILE *stream, const char *descr, uint32_t n_dims,
                              const uint64_t *shape, const void *data, uint64_t bytes,
                              struct dkv_error *err);

#endif
