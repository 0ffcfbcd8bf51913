/* The driver's functions, by name. Those that exist in several versions have the suffix of the one
 * whose types the header declares. */
#include "client/cuda_driver.h"

#include <dlfcn.h>
#include <stddef.h>

static const struct {
    const char *name;
    size_t at;
} symbols[] = {
    {"cuInit", offsetof(struct dkv_cuda_driver, init)},
    {"cuGetErrorName", offsetof(struct dkv_cuda_driver, error_name)},
    {"cuDeviceGet", offsetof(struct dkv_cuda_driver, device)},
    {"cuDeviceGetUuid_v2", offsetof(struct dkv_cuda_driver, uuid)},
    {"cuCtxPushCurrent_v2", offsetof(struct dkv_cuda_driver, push_context)},
    {"cuCtxPopCurrent_v2", offsetof(struct dkv_cuda_driver, pop_context)},
    {"cuDevicePrimaryCtxRetain", offsetof(struct dkv_cuda_driver, primary_context)},
    {"cuPointerGetAttributes", offsetof(struct dkv_cuda_driver, pointer_attributes)},
    {"cuMemGetAddressRange_v2", offsetof(struct dkv_cuda_driver, address_range)},
    {"cuIpcGetMemHandle", offsetof(struct dkv_cuda_driver, legacy_handle)},
    {"cuMemRetainAllocationHandle", offsetof(struct dkv_cuda_driver, retain)},
    {"cuMemExportToShareableHandle", offsetof(struct dkv_cuda_driver, export_memory)},
    {"cuMemRelease", offsetof(struct dkv_cuda_driver, forget)},
    {"cuMemAlloc_v2", offsetof(struct dkv_cuda_driver, alloc)},
    {"cuMemFree_v2", offsetof(struct dkv_cuda_driver, free)},
    {"cuMemGetAllocationGranularity", offsetof(struct dkv_cuda_driver, granularity)},
    {"cuMemCreate", offsetof(struct dkv_cuda_driver, create)},
    {"cuMemAddressReserve", offsetof(struct dkv_cuda_driver, reserve)},
    {"cuMemAddressFree", offsetof(struct dkv_cuda_driver, unreserve)},
    {"cuMemMap", offsetof(struct dkv_cuda_driver, map)},
    {"cuMemUnmap", offsetof(struct dkv_cuda_driver, unmap)},
    {"cuMemSetAccess", offsetof(struct dkv_cuda_driver, set_access)},
    {"cuMemcpyHtoD_v2", offsetof(struct dkv_cuda_driver, copy_to_device)},
};

/* Two threads that come here at once write the same addresses. */
enum dkv_status dkv_cuda_driver(const struct dkv_cuda_driver **driver_out, struct dkv_error *err)
{
    static struct dkv_cuda_driver driver;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "CUDA: this host has no NVIDIA driver (libcuda.so.1)");
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (symbol == NULL)
            return dkv_error_set(err, DKV_E_UNSUPPORTED, "CUDA: the NVIDIA driver has no %s",
                                 symbols[i].name);
        *(void **)(void *)((char *)&driver + symbols[i].at) = symbol;
    }
    const dkv_cuda_result result = driver.init(0);
    if (result != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "CUDA: the driver does not start (%s)",
                             dkv_cuda_error_name(&driver, result));
    *driver_out = &driver;
    return DKV_OK;
}

const char *dkv_cuda_error_name(const struct dkv_cuda_driver *driver, dkv_cuda_result result)
{
    const char *name = NULL;
    return driver->error_name(result, &name) == 0 && name != NULL ? name : "an unknown error";
}
