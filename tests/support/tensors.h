/* A reader of safetensors files for tests, on jansson alone: it shares no code with client/, so
 * that the golden files judge independently. It trusts its files.
 *
 * Owner   the file owns every tensor it hands out; dkv_tensors_close() frees all.
 */
#ifndef DKV_TESTS_SUPPORT_TENSORS_H
#define DKV_TESTS_SUPPORT_TENSORS_H

#include <stddef.h>
#include <stdint.h>

struct dkv_tensor {
    const char *dtype; /* "BF16", "F16", "F32", "F64", "I32" */
    size_t n_dims;
    uint64_t shape[8];
    const void *data;
    uint64_t bytes;
};

struct dkv_tensors;

/* NULL, with a line on standard error, if the file cannot be read. */
struct dkv_tensors *dkv_tensors_open(const char *path);
void dkv_tensors_close(struct dkv_tensors *tensors);

/* The name of the i-th tensor, in the order of the file's header; NULL past the last. */
const char *dkv_tensors_name(const struct dkv_tensors *tensors, size_t i);

/* False if there is no tensor of that name. */
int dkv_tensors_find(const struct dkv_tensors *tensors, const char *name,
                     struct dkv_tensor *tensor_out);

#endif
