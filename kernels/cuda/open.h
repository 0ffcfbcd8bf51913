/* Opening and closing the CUDA engine (kernels/engine.h: open, close).
 *
 * Thread  the engine's.
 */
#ifndef DKV_KERNELS_CUDA_OPEN_H
#define DKV_KERNELS_CUDA_OPEN_H

#include "kernels/cuda/host.h"

enum dkv_status dkv_cu_open(const struct dkv_engine_config *config, struct dkv_engine **engine_out,
                            struct dkv_error *err);
void dkv_cu_close(struct dkv_engine *engine);

#endif
