/* The part of the CUDA driver's interface that the library and the command line use, found at run
 * time: a program without a GPU neither links nor loads anything of CUDA's, and none of CUDA's
 * headers is needed to build this. Types and numbers are the driver's, which keeps them.
 *
 * Thread  any; functions that work on a context need one that is current on the calling thread.
 * Source  CUDA Driver API reference, versions 11.2 and later.
 */
#ifndef DKV_CLIENT_CUDA_DRIVER_H
#define DKV_CLIENT_CUDA_DRIVER_H

#include "proto/types.h"

typedef uint64_t dkv_cuda_ptr; /* CUdeviceptr */
typedef int dkv_cuda_result;   /* CUresult; 0: success */

#define DKV_CUDA_HANDLE_BYTES 64 /* CUipcMemHandle */

enum dkv_cuda_number {
    DKV_CUDA_POINTER_CONTEXT = 1, /* CUpointer_attribute */
    DKV_CUDA_POINTER_MEMORY_TYPE = 2,
    DKV_CUDA_POINTER_IS_MANAGED = 8,
    DKV_CUDA_POINTER_DEVICE = 9,
    DKV_CUDA_POINTER_IS_LEGACY_CAPABLE = 10,
    DKV_CUDA_POINTER_HANDLE_TYPES = 14,
    DKV_CUDA_POINTER_POOL = 17,

    DKV_CUDA_MEMORY_DEVICE = 2, /* CUmemorytype */

    DKV_CUDA_HANDLE_FD = 1, /* CUmemAllocationHandleType */
    DKV_CUDA_HANDLE_FABRIC = 8,

    DKV_CUDA_PINNED = 1,          /* CUmemAllocationType */
    DKV_CUDA_LOCATION_DEVICE = 1, /* CUmemLocationType */
    DKV_CUDA_READ_WRITE = 3,      /* CUmemAccess_flags */
};

struct dkv_cuda_location { /* CUmemLocation */
    int type, id;
};

struct dkv_cuda_properties { /* CUmemAllocationProp */
    int type, handle_types;
    struct dkv_cuda_location location;
    void *security;
    unsigned char flags[8];
};

struct dkv_cuda_access { /* CUmemAccessDesc */
    struct dkv_cuda_location location;
    int flags;
};

struct dkv_cuda_driver {
    dkv_cuda_result (*init)(unsigned flags);
    dkv_cuda_result (*error_name)(dkv_cuda_result result, const char **name_out);
    dkv_cuda_result (*device)(int *device_out, int ordinal);
    dkv_cuda_result (*uuid)(void *uuid_out, int device);
    dkv_cuda_result (*push_context)(void *context);
    dkv_cuda_result (*pop_context)(void **context_out);
    dkv_cuda_result (*primary_context)(void **context_out, int device);
    dkv_cuda_result (*pointer_attributes)(unsigned n, const int *attributes, void *const *values,
                                          dkv_cuda_ptr pointer);
    dkv_cuda_result (*address_range)(dkv_cuda_ptr *base_out, size_t *bytes_out,
                                     dkv_cuda_ptr pointer);
    dkv_cuda_result (*legacy_handle)(void *handle_out, dkv_cuda_ptr base);
    dkv_cuda_result (*retain)(uint64_t *memory_out, void *address);
    dkv_cuda_result (*export_memory)(void *shareable_out, uint64_t memory, int type,
                                     unsigned long long flags);
    dkv_cuda_result (*forget)(uint64_t memory);

    /* For memory of one's own. */
    dkv_cuda_result (*alloc)(dkv_cuda_ptr *pointer_out, size_t bytes);
    dkv_cuda_result (*free)(dkv_cuda_ptr pointer);
    dkv_cuda_result (*granularity)(size_t *bytes_out, const struct dkv_cuda_properties *properties,
                                   int option);
    dkv_cuda_result (*create)(uint64_t *memory_out, size_t bytes,
                              const struct dkv_cuda_properties *properties,
                              unsigned long long flags);
    dkv_cuda_result (*reserve)(dkv_cuda_ptr *pointer_out, size_t bytes, size_t alignment,
                               dkv_cuda_ptr address, unsigned long long flags);
    dkv_cuda_result (*unreserve)(dkv_cuda_ptr pointer, size_t bytes);
    dkv_cuda_result (*map)(dkv_cuda_ptr pointer, size_t bytes, size_t offset, uint64_t memory,
                           unsigned long long flags);
    dkv_cuda_result (*unmap)(dkv_cuda_ptr pointer, size_t bytes);
    dkv_cuda_result (*set_access)(dkv_cuda_ptr pointer, size_t bytes,
                                  const struct dkv_cuda_access *access, size_t n);
    dkv_cuda_result (*copy_to_device)(dkv_cuda_ptr to, const void *from, size_t bytes);
};

/* Opens libcuda.so.1 and initialises it, the first time. UNSUPPORTED says why there is none; the
 * driver is never unloaded. */
enum dkv_status dkv_cuda_driver(const struct dkv_cuda_driver **driver_out, struct dkv_error *err);

/* "CUDA_ERROR_INVALID_VALUE". */
const char *dkv_cuda_error_name(const struct dkv_cuda_driver *driver, dkv_cuda_result result);

#endif
