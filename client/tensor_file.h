/* Tensor files: a file of named tensors, mapped read-only and checked before anything is believed.
 *
 * Two formats are read, told apart by their first bytes, never by the file's name: safetensors
 * (client/safetensors.c) and .npy (client/npy.c). Parsers work on bytes in memory, so that they
 * can be fuzzed without a file system; dkv_tensor_file_open() maps a file and calls the right one.
 *
 * Owner   an index owns its tensors and names, and borrows the bytes it was parsed from. A file
 *         owns its mapping and its index.
 * Thread  any; an open file is read-only and may be shared.
 * Errors  INVALID or UNSUPPORTED for what is wrong with the bytes, IO for the file system, NOMEM.
 *         The text names the tensor, the value and what was expected.
 * Shrink  a file that another process truncates while it is mapped raises SIGBUS on the next read
 *         beyond its new end. Nothing a library does can turn that into an error code safely, so
 *         the command line installs a handler that says what happened (client/cli/guard.h).
 */
#ifndef DKV_CLIENT_TENSOR_FILE_H
#define DKV_CLIENT_TENSOR_FILE_H

#include "proto/types.h"

/* Dimensions that are kept of a tensor's shape; tensors of a higher rank are checked all the same,
 * but only their rank and these first dimensions are known afterwards. */
#define DKV_TENSOR_DIMS_MAX 6u

struct dkv_tensor {
    const char *name;     /* unique in its index, UTF-8, no NUL inside */
    char type_name[12];   /* the element type as the file spells it, cut to fit */
    enum dkv_dtype dtype; /* DKV_DTYPE_NONE: a type that scoring does not read */
    uint32_t n_dims;
    uint64_t shape[DKV_TENSOR_DIMS_MAX]; /* zero from n_dims on */
    const uint8_t *data;                 /* inside the parsed bytes; any alignment */
    uint64_t bytes;
};

/* Zero is an empty index. */
struct dkv_tensor_index {
    struct dkv_tensor *tensors; /* [n_tensors], by name in strcmp() order */
    size_t n_tensors;
    char *names; /* what the names point into */
};

void dkv_tensor_index_fini(struct dkv_tensor_index *index);

/* NULL if there is none of that name. O(log n). */
const struct dkv_tensor *dkv_tensor_index_find(const struct dkv_tensor_index *index,
                                               const char *name);

/* Zero is a closed file. */
struct dkv_tensor_file {
    char *path;
    void *map;
    uint64_t bytes;
    struct dkv_tensor_index index;
};

enum dkv_status dkv_tensor_file_open(const char *path, struct dkv_tensor_file *file_out,
                                     struct dkv_error *err);
void dkv_tensor_file_close(struct dkv_tensor_file *file); /* a closed file is fine */

/* Copies `text` for people's eyes: control characters and broken UTF-8 become '?', and what does
 * not fit ends in "...". A tensor's name comes from a stranger and may hold terminal commands.
 * Returns `out`. */
const char *dkv_printable(const char *text, char *out, size_t out_bytes);

#endif
