/* What dkv-engine.so exports: the engines, for libdropkv to open at run time. Programs of this
 * project link them. */
#include "kernels/engine.h"

__attribute__((visibility("default"))) extern const struct dkv_engine_module dkv_engine_module;

const struct dkv_engine_module dkv_engine_module = {
    .abi = DKV_ENGINE_ABI,
    .find = dkv_engine_find,
};
