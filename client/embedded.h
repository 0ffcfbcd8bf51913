/* Endpoints "embedded:": the engine in the caller's process.
 *
 * Address  embedded:[DEVICE][?threads=N], DEVICE being cpu (the default), cuda or cuda:N.
 * Thread   the client's. The CPU engine computes within dispatch, a batch of waiting requests at a
 *          time, with threads of its own. The CUDA engine computes behind what is in its stream
 *          from submission on; a thread of the driver's makes the descriptor readable.
 */
#ifndef DKV_CLIENT_EMBEDDED_H
#define DKV_CLIENT_EMBEDDED_H

#include "client/transport.h"
#include "kernels/engine.h"

/* dkv_engine_find() of kernels/engine.h, from wherever the engines are: libdropkv, which has none,
 * opens the module dkv-engine.so (embedded_module.c); programs that link them have them there
 * (embedded_linked.c). Thread: any. UNSUPPORTED: there is no module, or one of another version. */
enum dkv_status dkv_embedded_find(const char *device, const struct dkv_engine_ops **ops_out,
                                  int *ordinal_out, struct dkv_error *err);

#endif
