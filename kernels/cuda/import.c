/* Memory of other processes on this device (kernels/engine.h: import, release).
 *
 * Two ways in. Descriptors of cuMemExportToShareableHandle(): each chunk is mapped, exactly as long
 * as it was allocated and for reading alone, side by side in one reservation; the driver refuses a
 * length that is not the real one. A legacy handle: the driver maps the whole allocation, for
 * writing too, and does not check most of its bytes, so only trusted peers may pass one.
 *
 * Host memory that answers go to is pinned, so that the device can write it (direct.c).
 *
 * A mapping pins the memory until it is released, whatever its owner does. The driver's functions
 * are found through the runtime, so nothing links to libcuda.
 */
#include "kernels/cuda/import.h"

#include <cuda.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER_VERSION 12000 /* whose signatures are used here */

struct driver {
    CUresult (*get_error_name)(CUresult, const char **);
    CUresult (*ipc_open)(CUdeviceptr *, CUipcMemHandle, unsigned int);
    CUresult (*ipc_close)(CUdeviceptr);
    CUresult (*address_range)(CUdeviceptr *, size_t *, CUdeviceptr);
    CUresult (*pointer_attribute)(void *, CUpointer_attribute, CUdeviceptr);
    CUresult (*import)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*properties)(CUmemAllocationProp *, CUmemGenericAllocationHandle);
    CUresult (*granularity)(size_t *, const CUmemAllocationProp *,
                            CUmemAllocationGranularity_flags);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*forget)(CUmemGenericAllocationHandle);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
};

static const struct {
    const char *name;
    size_t at;
} symbols[] = {
    {"cuGetErrorName", offsetof(struct driver, get_error_name)},
    {"cuIpcOpenMemHandle", offsetof(struct driver, ipc_open)},
    {"cuIpcCloseMemHandle", offsetof(struct driver, ipc_close)},
    {"cuMemGetAddressRange", offsetof(struct driver, address_range)},
    {"cuPointerGetAttribute", offsetof(struct driver, pointer_attribute)},
    {"cuMemImportFromShareableHandle", offsetof(struct driver, import)},
    {"cuMemGetAllocationPropertiesFromHandle", offsetof(struct driver, properties)},
    {"cuMemGetAllocationGranularity", offsetof(struct driver, granularity)},
    {"cuMemAddressReserve", offsetof(struct driver, reserve)},
    {"cuMemAddressFree", offsetof(struct driver, unreserve)},
    {"cuMemMap", offsetof(struct driver, map)},
    {"cuMemUnmap", offsetof(struct driver, unmap)},
    {"cuMemRelease", offsetof(struct driver, forget)},
    {"cuMemSetAccess", offsetof(struct driver, set_access)},
};

/* One chunk of a mapping; a legacy mapping has none. */
struct piece {
    CUdeviceptr at;
    size_t bytes;
};

struct mapping {
    struct dkv_mapping shown; /* first: what callers see */
    void *pinned;             /* host memory; NULL: it is not */
    CUdeviceptr reserved;     /* 0: legacy, or host memory */
    size_t reserved_bytes;
    uint32_t n_pieces; /* mapped so far */
    struct piece pieces[];
};

static const struct driver *the_driver(struct dkv_error *err)
{
    static struct driver driver;
    static bool found;
    for (size_t i = 0; !found && i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        enum cudaDriverEntryPointQueryResult result;
        void **to = (void **)(void *)((char *)&driver + symbols[i].at);
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            symbols[i].name, to, DRIVER_VERSION, cudaEnableDefault, &result);
        if (error == cudaSuccess && result == cudaDriverEntryPointSuccess && *to != NULL)
            continue;
        (void)cudaGetLastError();
        dkv_error_set(err, DKV_E_UNSUPPORTED, "region: the GPU driver has no %s", symbols[i].name);
        return NULL;
    }
    found = true;
    return &driver;
}

/* ---- errors ---- */

static const char *name_of(const struct driver *driver, CUresult result)
{
    const char *name;
    return driver->get_error_name(result, &name) == CUDA_SUCCESS ? name : "an unknown error";
}

/* Errors after which this process can do nothing more on the device. CUDA_ERROR_UNKNOWN is not one
 * of them here: it is what importing a descriptor of something else gives. */
static bool is_lost(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return true;
    default: return false;
    }
}

static enum dkv_status failed(struct dkv_cu_engine *engine, const struct driver *driver,
                              CUresult result, const char *what, struct dkv_error *err)
{
    enum dkv_status status = DKV_E_INVALID;
    if (is_lost(result)) {
        engine->lost = true;
        status = DKV_E_DEVICE;
    } else if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        status = DKV_E_NOMEM;
    }
    return dkv_error_set(err, status, "region: %s (%s)", what, name_of(driver, result));
}

/* ---- legacy handles ---- */

static const char *legacy_advice(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_INVALID_VALUE:
        return "the handle names no memory: it was freed since, or these are not the bytes of "
               "cuIpcGetMemHandle(); export the allocation again";
    case CUDA_ERROR_INVALID_CONTEXT:
        return "the handle's process has this worker's own process number, in another PID "
               "namespace; pass VMM descriptors instead";
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_MAP_FAILED:
        return "the handle's process has ended or its memory cannot be mapped; export it again "
               "from a process that lives";
    case CUDA_ERROR_NOT_PERMITTED:
        return "the handle's memory was not exported; pass what cuIpcGetMemHandle() gives";
    case CUDA_ERROR_NOT_SUPPORTED:
        return "legacy handles do not work on this device; pass VMM descriptors instead";
    default: return "the handle cannot be opened";
    }
}

static enum dkv_status check_device(struct dkv_cu_engine *engine, int ordinal,
                                    struct dkv_error *err)
{
    if (ordinal == engine->device.ordinal)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "region: the memory lies on device %d, and is said to lie on device %d",
                         ordinal, engine->device.ordinal);
}

static enum dkv_status open_legacy(struct dkv_cu_engine *engine, const struct driver *driver,
                                   const unsigned char *handle, struct mapping *mapping,
                                   struct dkv_error *err)
{
    CUipcMemHandle legacy;
    CUdeviceptr at = 0, base = 0;
    size_t bytes = 0;
    int ordinal = -1;
    _Static_assert(sizeof(legacy) == DKV_IMPORT_HANDLE_BYTES, "a handle's size");
    memcpy(&legacy, handle, sizeof(legacy));
    CUresult result = driver->ipc_open(&at, legacy, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result != CUDA_SUCCESS)
        return failed(engine, driver, result, legacy_advice(result), err);
    result = driver->address_range(&base, &bytes, at);
    if (result == CUDA_SUCCESS)
        result = driver->pointer_attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at);
    enum dkv_status status = DKV_OK;
    if (result != CUDA_SUCCESS)
        status = failed(engine, driver, result, "the handle's memory has no known size", err);
    else if (base != at)
        status = dkv_error_set(err, DKV_E_INVALID, "region: the handle is not of an allocation");
    if (status == DKV_OK)
        status = check_device(engine, ordinal, err);
    if (status != DKV_OK) {
        (void)driver->ipc_close(at);
        return status;
    }
    mapping->shown = (struct dkv_mapping){.base = (const void *)(uintptr_t)at, .bytes = bytes};
    return DKV_OK;
}

/* ---- chunks ---- */

static enum dkv_status check_chunk(struct dkv_cu_engine *engine, const struct driver *driver,
                                   CUmemGenericAllocationHandle handle, uint32_t i,
                                   struct dkv_error *err)
{
    CUmemAllocationProp properties = {0};
    const CUresult result = driver->properties(&properties, handle);
    if (result != CUDA_SUCCESS)
        return failed(engine, driver, result, "a chunk does not say where it lies", err);
    if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return dkv_error_set(err, DKV_E_INVALID,
                             "region: chunk %u is not memory of a GPU (location type %d)", i,
                             (int)properties.location.type);
    return check_device(engine, properties.location.id, err);
}

/* Once mapped, the memory stays without the handle and the descriptor. */
static enum dkv_status map_chunk(struct dkv_cu_engine *engine, const struct driver *driver,
                                 const struct dkv_import_chunk *chunk, uint32_t i,
                                 struct mapping *mapping, struct dkv_error *err)
{
    char what[160];
    CUmemGenericAllocationHandle handle;
    const CUdeviceptr at = mapping->reserved + (chunk->offset - mapping->shown.first);
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = engine->device.ordinal},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READ,
    };
    CUresult result = driver->import(&handle, (void *)(uintptr_t)chunk->fd,
                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result != CUDA_SUCCESS) {
        snprintf(what, sizeof(what),
                 "chunk %u's descriptor is no GPU memory: pass what cuMemExportToShareableHandle() "
                 "gave",
                 i);
        return failed(engine, driver, result, what, err);
    }
    enum dkv_status status = check_chunk(engine, driver, handle, i, err);
    if (status == DKV_OK) {
        result = driver->map(at, chunk->bytes, 0, handle, 0);
        if (result != CUDA_SUCCESS) {
            snprintf(what, sizeof(what),
                     "chunk %u is not %" PRIu64 " bytes long, or its offset %" PRIu64
                     " is no multiple of the granularity",
                     i, chunk->bytes, chunk->offset);
            status = failed(engine, driver, result, what, err);
        }
    }
    (void)driver->forget(handle);
    if (status != DKV_OK)
        return status;
    mapping->pieces[mapping->n_pieces++] = (struct piece){at, chunk->bytes};
    result = driver->set_access(at, chunk->bytes, &access, 1);
    return result == CUDA_SUCCESS
               ? DKV_OK
               : failed(engine, driver, result, "a chunk cannot be made readable", err);
}

static enum dkv_status let_go(struct dkv_cu_engine *engine, const struct driver *driver,
                              struct mapping *mapping, struct dkv_error *err)
{
    CUresult result = CUDA_SUCCESS;
    if (mapping->pinned != NULL)
        result = cudaHostUnregister(mapping->pinned) == cudaSuccess ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_UNKNOWN;
    else if (mapping->reserved == 0)
        result = driver->ipc_close((CUdeviceptr)(uintptr_t)mapping->shown.base);
    for (uint32_t i = 0; i < mapping->n_pieces && result == CUDA_SUCCESS; i++)
        result = driver->unmap(mapping->pieces[i].at, mapping->pieces[i].bytes);
    if (mapping->reserved != 0 && result == CUDA_SUCCESS)
        result = driver->unreserve(mapping->reserved, mapping->reserved_bytes);
    free(mapping);
    if (result == CUDA_SUCCESS)
        return DKV_OK;
    engine->lost = true; /* what could not be unmapped would stay for ever */
    return dkv_error_set(err, DKV_E_DEVICE, "cuda:%d: memory of a client cannot be unmapped (%s)",
                         engine->device.ordinal, name_of(driver, result));
}

static enum dkv_status map_chunks(struct dkv_cu_engine *engine, const struct driver *driver,
                                  const struct dkv_import *from, struct mapping *mapping,
                                  struct dkv_error *err)
{
    const struct dkv_import_chunk *last = &from->chunks[from->n_chunks - 1];
    const uint64_t first = from->chunks[0].offset;
    const uint64_t span = last->offset + last->bytes - first;
    if (span > DKV_IMPORT_SPAN_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "region: its chunks span %" PRIu64 " bytes, at most %" PRIu64, span,
                             DKV_IMPORT_SPAN_MAX);
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = engine->device.ordinal},
    };
    size_t grain = 0;
    CUresult result = driver->granularity(&grain, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS || grain == 0)
        return failed(engine, driver, result, "the driver does not say its granularity", err);
    for (uint32_t i = 0; i < from->n_chunks; i++)
        if (from->chunks[i].offset % grain != 0 || from->chunks[i].bytes % grain != 0)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "region: chunk %u, %" PRIu64 " bytes at %" PRIu64
                                 ", is not on multiples of %zu",
                                 i, from->chunks[i].bytes, from->chunks[i].offset, grain);
    result = driver->reserve(&mapping->reserved, span, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return failed(engine, driver, result, "no addresses for its chunks", err);
    mapping->reserved_bytes = span;
    mapping->shown = (struct dkv_mapping){
        .base = (const void *)(uintptr_t)mapping->reserved, .first = first, .bytes = span};
    enum dkv_status status = DKV_OK;
    for (uint32_t i = 0; i < from->n_chunks && status == DKV_OK; i++)
        status = map_chunk(engine, driver, &from->chunks[i], i, mapping, err);
    return status;
}

static enum dkv_status import(struct dkv_cu_engine *engine, const struct driver *driver,
                              const struct dkv_import *from, struct dkv_mapping **mapping_out,
                              struct dkv_error *err)
{
    const size_t n_pieces = from->handle != NULL ? 0 : from->n_chunks;
    struct mapping *mapping = calloc(1, sizeof(*mapping) + n_pieces * sizeof(mapping->pieces[0]));
    if (mapping == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "region: out of host memory");
    enum dkv_status status;
    if (from->handle != NULL) {
        status = open_legacy(engine, driver, from->handle, mapping, err);
        if (status != DKV_OK)
            free(mapping);
    } else {
        status = map_chunks(engine, driver, from, mapping, err);
        struct dkv_error lost;
        if (status != DKV_OK && mapping->reserved == 0)
            free(mapping);
        else if (status != DKV_OK && let_go(engine, driver, mapping, &lost) != DKV_OK) {
            status = lost.status;
            if (err != NULL)
                *err = lost;
        }
    }
    if (status == DKV_OK)
        *mapping_out = &mapping->shown;
    return status;
}

static enum dkv_status pin(struct dkv_cu_engine *engine, const struct dkv_import *from,
                           struct dkv_mapping **mapping_out, struct dkv_error *err)
{
    struct mapping *mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "region: out of host memory");
    const enum dkv_status status = dkv_cu_check(
        engine, cudaHostRegister(from->host, from->host_bytes, cudaHostRegisterDefault),
        "pinning a region", err);
    if (status != DKV_OK) {
        free(mapping);
        return status;
    }
    mapping->pinned = from->host;
    mapping->shown = (struct dkv_mapping){.base = from->host, .bytes = from->host_bytes};
    *mapping_out = &mapping->shown;
    return DKV_OK;
}

/* ---- the engine's two functions ---- */

enum dkv_status dkv_cu_import(struct dkv_engine *opaque, const struct dkv_import *from,
                              struct dkv_mapping **mapping_out, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    const struct driver *driver = the_driver(err);
    if (driver == NULL)
        return DKV_E_UNSUPPORTED;
    enum dkv_status status = dkv_cu_enter(engine, err);
    if (status != DKV_OK)
        return status;
    status = from->host != NULL ? pin(engine, from, mapping_out, err)
                                : import(engine, driver, from, mapping_out, err);
    dkv_cu_leave();
    return status;
}

enum dkv_status dkv_cu_release(struct dkv_engine *opaque, struct dkv_mapping *mapping,
                               struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    const struct driver *driver = the_driver(err);
    enum dkv_status status = dkv_cu_enter(engine, err);
    if (status != DKV_OK)
        return status;
    status = let_go(engine, driver, (struct mapping *)mapping, err);
    dkv_cu_leave();
    return status == DKV_OK ? DKV_OK : DKV_E_DEVICE;
}
