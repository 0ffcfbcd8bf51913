/* Memory of other processes: the CUDA engine's import(), release() and unroll() (kernels/engine.h).
 *
 * Thread  the engine's.
 */
#ifndef DKV_KERNELS_CUDA_IMPORT_H
#define DKV_KERNELS_CUDA_IMPORT_H

#include "kernels/cuda/host.h"

enum dkv_status dkv_cu_import(struct dkv_engine *engine, const struct dkv_import *from,
                              struct dkv_mapping **mapping_out, struct dkv_error *err);
enum dkv_status dkv_cu_release(struct dkv_engine *engine, struct dkv_mapping *mapping,
                               struct dkv_error *err);

/* Its unroll(): a slot's copies are behind its batch's kernels in the stream, and gone with it. */
enum dkv_status dkv_cu_unroll(struct dkv_engine *engine, const struct dkv_ring *ring,
                              struct dkv_block *block, struct dkv_error *err);

#endif
