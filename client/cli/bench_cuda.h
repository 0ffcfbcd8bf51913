/* GPU memory for a benchmark's tensors, shared with the daemon as a serving engine would share its
 * cache: made by cuMemCreate() and passed as a descriptor, or by cudaMalloc() and passed as a
 * legacy handle.
 *
 * Owner   new/free.
 * Thread  the main thread.
 * Errors  UNSUPPORTED without a GPU, NOMEM.
 */
#ifndef DKV_CLIENT_CLI_BENCH_CUDA_H
#define DKV_CLIENT_CLI_BENCH_CUDA_H

#include "client/dropkv.h"
#include "proto/types.h"

struct dkv_bench_cuda;

/* On the first GPU. *buffer_out covers it and belongs to it. */
enum dkv_status dkv_bench_cuda_new(bool vmm, uint64_t bytes, struct dkv_bench_cuda **memory_out,
                                   struct dropkv_buffer **buffer_out, struct dkv_error *err);

/* Copies [offset, offset + bytes) there, at once. */
enum dkv_status dkv_bench_cuda_write(struct dkv_bench_cuda *memory, uint64_t offset,
                                     const void *from, uint64_t bytes, struct dkv_error *err);
void dkv_bench_cuda_free(struct dkv_bench_cuda *memory); /* NULL is fine */

#endif
