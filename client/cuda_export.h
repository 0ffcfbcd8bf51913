/* GPU memory of the caller's, made ready to be passed to a daemon: what dropkv_buffer_from_cuda()
 * finds out about a pointer.
 *
 * Memory of cuMemCreate() is a list of chunks, each with a descriptor, since an allocator may have
 * mapped several side by side under one address. Memory of cudaMalloc() is a legacy handle of its
 * whole allocation. Either way `offset` leads to the pointer.
 *
 * Owner   init/fini; open descriptors keep the memory allocated.
 * Thread  any.
 */
#ifndef DKV_CLIENT_CUDA_EXPORT_H
#define DKV_CLIENT_CUDA_EXPORT_H

#include "client/cuda_driver.h"
#include "client/dropkv.h"
#include "proto/wire.h"

struct dkv_cuda_export {
    uint8_t kind; /* DKV_WIRE_REGION_CUDA_*; 0: not exported now */
    uint8_t uuid[DKV_WIRE_UUID_BYTES];
    uint64_t offset;
    uint8_t handle[DKV_CUDA_HANDLE_BYTES];
    struct dkv_wire_chunk *chunks; /* [n_chunks] */
    int *fds;                      /* [n_chunks] */
    uint16_t n_chunks;
};

/* INVALID: not GPU memory of this process. UNSUPPORTED says how to allocate memory that can be
 * shared, or why this cannot. NOMEM. */
enum dkv_status dkv_cuda_export_init(struct dkv_cuda_export *export_out, const void *pointer,
                                     uint64_t bytes, enum dropkv_cuda_export how,
                                     struct dkv_error *err);
void dkv_cuda_export_fini(struct dkv_cuda_export *export);

#endif
