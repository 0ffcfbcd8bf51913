/* Through the driver alone (client/cuda_driver.h), in the primary context of GPU 0. */
#include "client/cli/bench_cuda.h"

#include "client/cuda_driver.h"

#include <stdlib.h>

struct dkv_bench_cuda {
    const struct dkv_cuda_driver *driver;
    struct dropkv_buffer *buffer;
    dkv_cuda_ptr at;
    size_t bytes;
    uint64_t memory; /* vmm: of cuMemCreate() */
    bool is_vmm, is_mapped;
};

static enum dkv_status check(const struct dkv_bench_cuda *memory, dkv_cuda_result result,
                             const char *what, struct dkv_error *err)
{
    if (result == 0)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_NOMEM, "GPU memory: %s (%s)", what,
                         dkv_cuda_error_name(memory->driver, result));
}

static enum dkv_status enter_context(struct dkv_bench_cuda *memory, struct dkv_error *err)
{
    int device;
    void *context = NULL;
    enum dkv_status status = check(memory, memory->driver->device(&device, 0), "no device", err);
    if (status == DKV_OK)
        status = check(memory, memory->driver->primary_context(&context, device), "no context",
                       err);
    return status == DKV_OK
               ? check(memory, memory->driver->push_context(context), "no context", err)
               : DKV_E_UNSUPPORTED;
}

static enum dkv_status create(struct dkv_bench_cuda *memory, struct dkv_error *err)
{
    const struct dkv_cuda_driver *driver = memory->driver;
    const struct dkv_cuda_properties properties = {
        .type = DKV_CUDA_PINNED,
        .handle_types = DKV_CUDA_HANDLE_FD,
        .location = {DKV_CUDA_LOCATION_DEVICE, 0},
    };
    const struct dkv_cuda_access access = {{DKV_CUDA_LOCATION_DEVICE, 0}, DKV_CUDA_READ_WRITE};
    size_t grain = 0;
    enum dkv_status status = check(memory, driver->granularity(&grain, &properties, 0),
                                   "no granularity", err);
    if (status != DKV_OK || grain == 0)
        return DKV_E_NOMEM;
    memory->bytes = (memory->bytes + grain - 1) / grain * grain;
    status = check(memory, driver->create(&memory->memory, memory->bytes, &properties, 0),
                   "none is left", err);
    if (status == DKV_OK)
        status = check(memory, driver->reserve(&memory->at, memory->bytes, 0, 0, 0), "no addresses",
                       err);
    if (status == DKV_OK)
        status = check(memory, driver->map(memory->at, memory->bytes, 0, memory->memory, 0),
                       "it cannot be mapped", err);
    memory->is_mapped = status == DKV_OK;
    if (status == DKV_OK)
        status = check(memory, driver->set_access(memory->at, memory->bytes, &access, 1),
                       "it cannot be accessed", err);
    return status;
}

enum dkv_status dkv_bench_cuda_new(bool vmm, uint64_t bytes, struct dkv_bench_cuda **memory_out,
                                   struct dropkv_buffer **buffer_out, struct dkv_error *err)
{
    struct dkv_bench_cuda *memory = calloc(1, sizeof(*memory));
    if (memory == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    memory->is_vmm = vmm;
    memory->bytes = bytes;
    enum dkv_status status = dkv_cuda_driver(&memory->driver, err);
    if (status == DKV_OK)
        status = enter_context(memory, err);
    if (status == DKV_OK)
        status = vmm ? create(memory, err)
                     : check(memory, memory->driver->alloc(&memory->at, bytes), "none is left",
                             err);
    if (status == DKV_OK)
        status = (enum dkv_status)dropkv_buffer_from_cuda(
            (void *)(uintptr_t)memory->at, bytes, vmm ? DROPKV_CUDA_VMM : DROPKV_CUDA_LEGACY,
            &memory->buffer, (struct dropkv_error *)err);
    if (status != DKV_OK) {
        dkv_bench_cuda_free(memory);
        return status;
    }
    *memory_out = memory;
    *buffer_out = memory->buffer;
    return DKV_OK;
}

enum dkv_status dkv_bench_cuda_write(struct dkv_bench_cuda *memory, uint64_t offset,
                                     const void *from, uint64_t bytes, struct dkv_error *err)
{
    return check(memory, memory->driver->copy_to_device(memory->at + offset, from, bytes),
                 "it cannot be written", err);
}

void dkv_bench_cuda_free(struct dkv_bench_cuda *memory)
{
    if (memory == NULL)
        return;
    dropkv_buffer_free(memory->buffer);
    if (memory->is_mapped)
        (void)memory->driver->unmap(memory->at, memory->bytes);
    if (memory->is_vmm && memory->at != 0)
        (void)memory->driver->unreserve(memory->at, memory->bytes);
    if (memory->memory != 0)
        (void)memory->driver->forget(memory->memory);
    if (!memory->is_vmm && memory->at != 0)
        (void)memory->driver->free(memory->at);
    free(memory);
}
