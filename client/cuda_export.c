/* Which way a pointer can be exported is asked, never tried: an attempt that fails says nothing
 * about why. The driver answers for one allocation at a time, so the range is walked. */
#include "client/cuda_export.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the driver says about a pointer. Every value has eight bytes of room, whatever its size. */
struct facts {
    uint64_t context, memory_type, is_managed, device, is_legacy_capable, handle_types, pool;
};

static enum dkv_status ask(const struct dkv_cuda_driver *driver, dkv_cuda_ptr pointer,
                           struct facts *facts, struct dkv_error *err)
{
    static const int attributes[] = {
        DKV_CUDA_POINTER_CONTEXT, DKV_CUDA_POINTER_MEMORY_TYPE,       DKV_CUDA_POINTER_IS_MANAGED,
        DKV_CUDA_POINTER_DEVICE,  DKV_CUDA_POINTER_IS_LEGACY_CAPABLE, DKV_CUDA_POINTER_HANDLE_TYPES,
        DKV_CUDA_POINTER_POOL,
    };
    void *const values[] = {
        &facts->context,           &facts->memory_type,  &facts->is_managed, &facts->device,
        &facts->is_legacy_capable, &facts->handle_types, &facts->pool,
    };
    memset(facts, 0, sizeof(*facts));
    const dkv_cuda_result result = driver->pointer_attributes(
        sizeof(attributes) / sizeof(attributes[0]), attributes, values, pointer);
    if (result != 0 || facts->memory_type == 0)
        return dkv_error_set(err, DKV_E_INVALID, "pointer: it is not CUDA memory of this process");
    if ((uint32_t)facts->memory_type != DKV_CUDA_MEMORY_DEVICE)
        return dkv_error_set(err, DKV_E_INVALID,
                             "pointer: it is host memory; share it by dropkv_buffer_new()");
    if ((facts->is_managed & 0xff) != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "pointer: managed memory cannot be shared; allocate by cudaMalloc()");
    return DKV_OK;
}

static enum dkv_status not_exportable(const struct facts *facts, enum dropkv_cuda_export how,
                                      struct dkv_error *err)
{
    if (facts->pool != 0)
        return dkv_error_set(
            err, DKV_E_UNSUPPORTED,
            "pointer: memory of cudaMallocAsync() pools cannot be shared; allocate "
            "by cudaMalloc() (PyTorch: PYTORCH_CUDA_ALLOC_CONF=backend:native)");
    if (how == DROPKV_CUDA_LEGACY)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "pointer: memory of cuMemCreate() has no legacy handle; export it as "
                             "DROPKV_CUDA_VMM");
    if (how == DROPKV_CUDA_VMM && (facts->is_legacy_capable & 0xff) != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "pointer: memory of cudaMalloc() has no descriptor; export it as "
                             "DROPKV_CUDA_LEGACY");
    if ((facts->handle_types & DKV_CUDA_HANDLE_FABRIC) != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "pointer: this memory has a fabric handle only; create it with "
                             "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
    return dkv_error_set(err, DKV_E_UNSUPPORTED,
                         "pointer: this memory of cuMemCreate() was created without a handle type; "
                         "set requestedHandleTypes to CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
}

/* ---- legacy ---- */

static enum dkv_status outside(dkv_cuda_ptr pointer, uint64_t bytes, dkv_cuda_ptr base,
                               uint64_t there, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_INVALID,
                         "bytes: %" PRIu64
                         " from the pointer on, its allocation ends after %" PRIu64,
                         bytes, base + there - pointer);
}

static enum dkv_status export_legacy(const struct dkv_cuda_driver *driver,
                                     struct dkv_cuda_export *export, dkv_cuda_ptr pointer,
                                     uint64_t bytes, struct dkv_error *err)
{
    dkv_cuda_ptr base = 0;
    size_t there = 0;
    dkv_cuda_result result = driver->address_range(&base, &there, pointer);
    if (result == 0 && !dkv_range_fits(pointer - base, bytes, there))
        return outside(pointer, bytes, base, there, err);
    if (result == 0)
        result = driver->legacy_handle(export->handle, base);
    if (result != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "pointer: no handle can be had of it (%s)",
                             dkv_cuda_error_name(driver, result));
    export->kind = DKV_WIRE_REGION_CUDA_LEGACY;
    export->offset = pointer - base;
    return DKV_OK;
}

/* ---- chunks ---- */

static enum dkv_status add_chunk(const struct dkv_cuda_driver *driver,
                                 struct dkv_cuda_export *export, dkv_cuda_ptr base, size_t there,
                                 uint64_t offset, struct dkv_error *err)
{
    uint64_t memory;
    int fd = -1;
    if (export->n_chunks == DKV_WIRE_FDS_MAX)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "bytes: they lie in more than %u chunks; share them in parts",
                             DKV_WIRE_FDS_MAX);
    dkv_cuda_result result = driver->retain(&memory, (void *)(uintptr_t)base);
    if (result == 0) {
        result = driver->export_memory(&fd, memory, DKV_CUDA_HANDLE_FD, 0);
        (void)driver->forget(memory);
    }
    if (result != 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "pointer: no descriptor can be had of the chunk at offset %" PRIu64
                             " (%s)",
                             offset, dkv_cuda_error_name(driver, result));
    export->chunks[export->n_chunks] = (struct dkv_wire_chunk){offset, there};
    export->fds[export->n_chunks++] = fd;
    return DKV_OK;
}

/* The range may span several allocations that were mapped side by side. */
static enum dkv_status export_chunks(const struct dkv_cuda_driver *driver,
                                     struct dkv_cuda_export *export, dkv_cuda_ptr pointer,
                                     uint64_t bytes, struct dkv_error *err)
{
    dkv_cuda_ptr first = 0, at = pointer;
    enum dkv_status status = DKV_OK;
    export->chunks = calloc(DKV_WIRE_FDS_MAX, sizeof(*export->chunks));
    export->fds = calloc(DKV_WIRE_FDS_MAX, sizeof(*export->fds));
    if (export->chunks == NULL || export->fds == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a buffer");
    while (status == DKV_OK && at < pointer + bytes) {
        dkv_cuda_ptr base = 0;
        size_t there = 0;
        if (driver->address_range(&base, &there, at) != 0 || at < base || at - base >= there)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "bytes: %" PRIu64 " from the pointer on, %" PRIu64
                                 " of them are mapped",
                                 bytes, at - pointer);
        if (export->n_chunks == 0)
            first = base;
        status = add_chunk(driver, export, base, there, base - first, err);
        at = base + there;
    }
    export->kind = DKV_WIRE_REGION_CUDA_VMM;
    export->offset = pointer - first;
    return status;
}

/* ---- both ---- */

static enum dkv_status export_as(const struct dkv_cuda_driver *driver,
                                 struct dkv_cuda_export *export, dkv_cuda_ptr pointer,
                                 uint64_t bytes, const struct facts *facts,
                                 enum dropkv_cuda_export how, struct dkv_error *err)
{
    const bool has_fd = (facts->handle_types & DKV_CUDA_HANDLE_FD) != 0 && facts->pool == 0;
    const bool has_handle = (facts->is_legacy_capable & 0xff) != 0;
    if (has_fd && how != DROPKV_CUDA_LEGACY)
        return export_chunks(driver, export, pointer, bytes, err);
    if (has_handle && how != DROPKV_CUDA_VMM)
        return export_legacy(driver, export, pointer, bytes, err);
    return not_exportable(facts, how, err);
}

enum dkv_status dkv_cuda_export_init(struct dkv_cuda_export *export_out, const void *pointer,
                                     uint64_t bytes, enum dropkv_cuda_export how,
                                     struct dkv_error *err)
{
    const struct dkv_cuda_driver *driver;
    const dkv_cuda_ptr at = (uint64_t)(uintptr_t)pointer;
    struct facts facts;
    uint64_t end;
    int device;
    *export_out = (struct dkv_cuda_export){0};
    if (how != DROPKV_CUDA_ANY && how != DROPKV_CUDA_VMM && how != DROPKV_CUDA_LEGACY)
        return dkv_error_set(err, DKV_E_INVALID, "how: %d not in 0..2", (int)how);
    if (pointer == NULL || bytes == 0 || !dkv_add_u64(at, bytes, &end))
        return dkv_error_set(err, DKV_E_INVALID, "pointer: null, or %" PRIu64 " bytes", bytes);
    enum dkv_status status = dkv_cuda_driver(&driver, err);
    if (status == DKV_OK)
        status = ask(driver, at, &facts, err);
    if (status != DKV_OK)
        return status;
    void *context = (void *)(uintptr_t)facts.context, *before;
    const bool pushed = context != NULL && driver->push_context(context) == 0;
    status = export_as(driver, export_out, at, bytes, &facts, how, err);
    if (pushed)
        (void)driver->pop_context(&before);
    if (status == DKV_OK && (driver->device(&device, (int)(uint32_t)facts.device) != 0 ||
                             driver->uuid(export_out->uuid, device) != 0))
        status = dkv_error_set(err, DKV_E_UNSUPPORTED, "pointer: its GPU has no UUID");
    if (status != DKV_OK)
        dkv_cuda_export_fini(export_out);
    return status;
}

void dkv_cuda_export_fini(struct dkv_cuda_export *export)
{
    for (uint16_t i = 0; i < export->n_chunks; i++)
        close(export->fds[i]);
    free(export->chunks);
    free(export->fds);
    *export = (struct dkv_cuda_export){0};
}
