/* Whose context an engine works in: that of the caller's stream, else the device's primary one,
 * which the caller's runtime uses as well.
 *
 * A program that uses CUDA itself has a context of its own current on its thread. Each of the
 * engine's functions makes the engine's current on top of it and takes it off at the end, so the
 * thread is left as it was found. Nothing here creates a context of its own.
 */
#include <cuda.h>
#include <dlfcn.h>

#include "kernels/cuda/host.h"

struct driver {
    CUresult (*get_error_name)(CUresult, const char **);
    CUresult (*current)(CUcontext *);
    CUresult (*set_current)(CUcontext);
    CUresult (*push)(CUcontext);
    CUresult (*pop)(CUcontext *);
    CUresult (*current_device)(CUdevice *);
    CUresult (*device)(CUdevice *, int);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*release)(CUdevice);
    CUresult (*context_of)(CUstream, CUcontext *);
};

/* Filled before there is an engine, by several threads with the same numbers. */
static struct driver driver;

/* By the names that the library exports: asking the runtime may make the primary context current.
 */
static bool find_driver(void)
{
    static const struct {
        const char *name;
        size_t at;
    } symbols[] = {
        {"cuGetErrorName", offsetof(struct driver, get_error_name)},
        {"cuCtxGetCurrent", offsetof(struct driver, current)},
        {"cuCtxSetCurrent", offsetof(struct driver, set_current)},
        {"cuCtxPushCurrent_v2", offsetof(struct driver, push)},
        {"cuCtxPopCurrent_v2", offsetof(struct driver, pop)},
        {"cuCtxGetDevice", offsetof(struct driver, current_device)},
        {"cuDeviceGet", offsetof(struct driver, device)},
        {"cuDevicePrimaryCtxRetain", offsetof(struct driver, retain)},
        {"cuDevicePrimaryCtxRelease_v2", offsetof(struct driver, release)},
        {"cuStreamGetCtx", offsetof(struct driver, context_of)},
    };
    void *library = dlopen("libcuda.so.1", RTLD_NOW); /* never closed: CUDA does not survive it */
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *function = library != NULL ? dlsym(library, symbols[i].name) : NULL;
        if (function == NULL)
            return false;
        __atomic_store_n((void **)(void *)((char *)&driver + symbols[i].at), function,
                         __ATOMIC_RELAXED);
    }
    return true;
}

struct CUctx_st *dkv_cu_current(void)
{
    CUcontext context = NULL;
    if (!find_driver() || driver.current(&context) != CUDA_SUCCESS)
        return NULL; /* the driver may not have been initialised */
    return context;
}

void dkv_cu_set_current(struct CUctx_st *context)
{
    if (driver.set_current != NULL)
        (void)driver.set_current(context);
}

static enum dkv_status failed(const struct dkv_cu_engine *engine, CUresult result, const char *what,
                              struct dkv_error *err)
{
    const char *name = "an unknown error";
    (void)driver.get_error_name(result, &name);
    return dkv_error_set(err, result == CUDA_ERROR_OUT_OF_MEMORY ? DKV_E_NOMEM : DKV_E_UNSUPPORTED,
                         "cuda:%d: %s (%s)", engine->device.ordinal, what, name);
}

static enum dkv_status of_stream(struct dkv_cu_engine *engine, CUstream stream,
                                 struct dkv_error *err)
{
    CUcontext context;
    CUdevice device = -1;
    CUresult result = driver.context_of(stream, &context);
    if (result != CUDA_SUCCESS)
        return failed(engine, result, "the caller's stream is not a stream of this process", err);
    if ((result = driver.push(context)) != CUDA_SUCCESS)
        return failed(engine, result, "the context of the caller's stream cannot be used", err);
    (void)driver.current_device(&device);
    (void)driver.pop(&context);
    if (device != engine->device.ordinal)
        return dkv_error_set(err, DKV_E_INVALID,
                             "cuda:%d: the caller's stream is one of cuda:%d, which is the device "
                             "to name",
                             engine->device.ordinal, device);
    engine->context = context;
    return DKV_OK;
}

enum dkv_status dkv_cu_context_open(struct dkv_cu_engine *engine, void *callers_stream,
                                    struct dkv_error *err)
{
    CUdevice device;
    CUresult result;
    if (!find_driver())
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "cuda: the driver has no functions for contexts");
    if (callers_stream != NULL)
        return of_stream(engine, callers_stream, err);
    if ((result = driver.device(&device, engine->device.ordinal)) != CUDA_SUCCESS ||
        (result = driver.retain(&engine->context, device)) != CUDA_SUCCESS)
        return failed(engine, result, "its primary context cannot be had", err);
    engine->retained = true;
    return DKV_OK;
}

void dkv_cu_context_close(struct dkv_cu_engine *engine)
{
    CUdevice device;
    if (engine->retained && driver.device(&device, engine->device.ordinal) == CUDA_SUCCESS)
        (void)driver.release(device);
    engine->retained = false;
    engine->context = NULL;
}

enum dkv_status dkv_cu_enter(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    const CUresult result = driver.push(engine->context);
    if (result == CUDA_SUCCESS)
        return DKV_OK;
    engine->lost = true;
    (void)failed(engine, result, "its context is gone", err);
    if (err != NULL)
        err->status = DKV_E_DEVICE;
    return DKV_E_DEVICE;
}

void dkv_cu_leave(void)
{
    CUcontext ours;
    (void)driver.pop(&ours);
}
