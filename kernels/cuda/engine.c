/* The CUDA engine's life: opening a device, the memory it works in, batches in flight.
 *
 * Submitting packs a batch into as few launches as there are kernels, whatever its size (wave.c),
 * and returns; waiting synchronises, checks and copies answers out (answer.c). Two batches may be
 * in flight: while one computes, the host tensors of the next are copied. All kernels run on one
 * stream, so scratch needs no second copy.
 *
 * Nothing is allocated after open. A sticky error (illegal address, failed launch) poisons the
 * process's context for good: it is reported as DKV_E_DEVICE from then on, and the process that
 * owns the engine must be replaced.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/threads.h"
#include "kernels/cuda/import.h"

#ifndef DKV_CUDA_ARCHS
#define DKV_CUDA_ARCHS "unknown"
#endif

/* ---- errors ---- */

/* Errors after which no call of this process can succeed. */
static bool is_sticky(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown: return true;
    default: return false;
    }
}

enum dkv_status dkv_cu_check(struct dkv_cu_engine *engine, cudaError_t error, const char *what,
                             struct dkv_error *err)
{
    if (error == cudaSuccess)
        return DKV_OK;
    (void)cudaGetLastError(); /* a failed launch is kept there too */
    enum dkv_status status = DKV_E_INTERNAL;
    if (is_sticky(error) || engine->lost) {
        engine->lost = true;
        status = DKV_E_DEVICE;
    } else if (error == cudaErrorMemoryAllocation) {
        status = DKV_E_NOMEM;
    }
    return dkv_error_set(err, status, "cuda:%d: %s: %s (%s)", engine->device.ordinal, what,
                         cudaGetErrorString(error), cudaGetErrorName(error));
}

/* ---- opening ---- */

static enum dkv_status no_device(cudaError_t error, struct dkv_error *err)
{
    (void)cudaGetLastError();
    switch (error) {
    case cudaErrorInsufficientDriver:
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "cuda: the NVIDIA driver is missing or older than CUDA %d.%d needs",
                             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    case cudaErrorNoDevice:
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "cuda: no CUDA device is visible");
    default:
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "cuda: %s (%s)", cudaGetErrorString(error),
                             cudaGetErrorName(error));
    }
}

static enum dkv_status find_device(struct dkv_cu_engine *engine, int ordinal, struct dkv_error *err)
{
    struct dkv_cu_device *device = &engine->device;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess)
        return no_device(error, err);
    if (ordinal < 0 || ordinal >= count)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "cuda:%d: devices 0..%d are visible", ordinal,
                             count - 1);
    device->ordinal = ordinal;
    struct cudaDeviceProp prop;
    if ((error = cudaSetDevice(ordinal)) != cudaSuccess ||
        (error = cudaGetDeviceProperties(&prop, ordinal)) != cudaSuccess)
        return no_device(error, err);
    device->major = prop.major;
    device->minor = prop.minor;
    device->multiprocessors = prop.multiProcessorCount;
    device->shared_bytes_max = (int)prop.sharedMemPerBlockOptin;
    device->l2_bytes = prop.l2CacheSize;
    memcpy(engine->uuid, &prop.uuid, sizeof(engine->uuid));
    snprintf(device->name, sizeof(device->name), "%.95s", prop.name);
    return DKV_OK;
}

/* Loads every kernel now, since the first launch of an unloaded one may have to wait for the whole
 * device. This is also where a device without code in this build shows. */
static enum dkv_status load_kernels(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    struct dkv_cu_device *device = &engine->device;
    cudaError_t error = dkv_cu_select_prepare(device);
    if (error == cudaSuccess)
        error = dkv_cu_mask_prepare();
    for (size_t i = 0; dkv_cu_scorers[i] != NULL && error == cudaSuccess; i++) {
        const struct dkv_cu_scorer *scorer = dkv_cu_scorers[i];
        error = scorer->prepare(device);
        const size_t shared = scorer->shared_bytes != NULL ? scorer->shared_bytes(device) : 0;
        if (shared > engine->shared_bytes)
            engine->shared_bytes = shared;
    }
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        (void)cudaGetLastError();
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "cuda:%d: %s is compute capability %d.%d, this build has code for %s",
                             device->ordinal, device->name, device->major, device->minor,
                             DKV_CUDA_ARCHS);
    }
    return dkv_cu_check(engine, error, "loading kernels", err);
}

static enum dkv_status make_slot(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 struct dkv_error *err)
{
    enum dkv_status status;
    slot->pending = malloc(DKV_CU_UNITS_MAX * sizeof(*slot->pending));
    slot->retry = calloc(engine->max_items, 1);
    if (slot->pending == NULL || slot->retry == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cuda: out of host memory");
    slot->io.bytes = DKV_CU_IO_BYTES;
    status = dkv_cu_check(engine, cudaMallocHost((void **)&slot->io.base, DKV_CU_IO_BYTES),
                          "allocating pinned memory", err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine, cudaMalloc((void **)&slot->io_device, DKV_CU_IO_BYTES),
                              "allocating device memory", err);
    if (status == DKV_OK) /* the gaps between results are copied down as well */
        status = dkv_cu_check(engine, cudaMemset(slot->io_device, 0, DKV_CU_IO_BYTES),
                              "clearing device memory", err);
    slot->rows.bytes = DKV_RING_BYTES_MAX;
    if (status == DKV_OK)
        status = dkv_cu_check(engine, cudaMalloc((void **)&slot->rows.base, slot->rows.bytes),
                              "allocating device memory", err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine, cudaEventCreateWithFlags(&slot->done, cudaEventDisableTiming),
                              "creating an event", err);
    return status;
}

static enum dkv_status make_half(struct dkv_cu_engine *engine, struct dkv_cu_half *half,
                                 size_t bytes, struct dkv_error *err)
{
    enum dkv_status status;
    half->arena.bytes = bytes;
    status = dkv_cu_check(engine, cudaMalloc((void **)&half->arena.base, bytes),
                          "allocating device memory", err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine,
                              cudaEventCreateWithFlags(&half->filled, cudaEventDisableTiming),
                              "creating an event", err);
    if (status == DKV_OK)
        status = dkv_cu_check(engine,
                              cudaEventCreateWithFlags(&half->consumed, cudaEventDisableTiming),
                              "creating an event", err);
    return status;
}

static enum dkv_status make_builder(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    struct dkv_cu_builder *b = calloc(1, sizeof(*b));
    engine->builder = b;
    if (b == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cuda: out of host memory");
    b->blocks = calloc(engine->max_items, sizeof(*b->blocks));
    b->scorer = calloc(engine->max_items, sizeof(*b->scorer));
    b->units = calloc(DKV_CU_UNITS_MAX, sizeof(*b->units));
    b->pending = calloc(DKV_CU_UNITS_MAX, sizeof(*b->pending));
    if (b->blocks == NULL || b->scorer == NULL || b->units == NULL || b->pending == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cuda: out of host memory");
    return DKV_OK;
}

static void free_builder(struct dkv_cu_builder *b)
{
    if (b == NULL)
        return;
    free(b->blocks);
    free(b->scorer);
    free(b->units);
    free(b->pending);
    free(b);
}

static enum dkv_status make_memory(struct dkv_cu_engine *engine, size_t stage_bytes,
                                   struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    for (unsigned i = 0; i < DKV_CU_SLOTS && status == DKV_OK; i++)
        status = make_slot(engine, &engine->slots[i], err);
    for (unsigned i = 0; i < 2 && status == DKV_OK; i++)
        status = make_half(engine, &engine->halves[i], dkv_cu_align(stage_bytes / 2), err);
    engine->scratch.bytes = DKV_CU_SCRATCH;
    if (status == DKV_OK)
        status = dkv_cu_check(engine, cudaMalloc((void **)&engine->scratch.base, DKV_CU_SCRATCH),
                              "allocating device memory", err);
    if (status == DKV_OK && engine->shared_bytes > 0)
        status = dkv_cu_check(engine, cudaMalloc((void **)&engine->shared, engine->shared_bytes),
                              "allocating device memory", err);
    return status == DKV_OK ? make_builder(engine, err) : status;
}

static enum dkv_status make_streams(struct dkv_cu_engine *engine, void *callers_stream,
                                    struct dkv_error *err)
{
    enum dkv_status status = dkv_cu_check(
        engine, cudaStreamCreateWithFlags(&engine->copies, cudaStreamNonBlocking),
        "creating a stream", err);
    if (status != DKV_OK)
        return status;
    engine->owns_stream = callers_stream == NULL;
    if (!engine->owns_stream) {
        engine->stream = (cudaStream_t)callers_stream;
        return DKV_OK;
    }
    return dkv_cu_check(engine, cudaStreamCreateWithFlags(&engine->stream, cudaStreamNonBlocking),
                        "creating a stream", err);
}

/* Frees what there is; on a lost device the calls fail, which changes nothing. */
static void cuda_close(struct dkv_engine *opaque)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    if (engine == NULL)
        return;
    (void)cudaSetDevice(engine->device.ordinal);
    if (engine->stream != NULL || !engine->owns_stream)
        (void)cudaStreamSynchronize(engine->stream);
    if (engine->copies != NULL) {
        (void)cudaStreamSynchronize(engine->copies);
        (void)cudaStreamDestroy(engine->copies);
    }
    for (unsigned i = 0; i < DKV_CU_SLOTS; i++) {
        struct dkv_cu_slot *slot = &engine->slots[i];
        free(slot->pending);
        free(slot->retry);
        (void)cudaFreeHost(slot->io.base);
        (void)cudaFree(slot->io_device);
        (void)cudaFree(slot->rows.base);
        if (slot->done != NULL)
            (void)cudaEventDestroy(slot->done);
    }
    for (unsigned i = 0; i < 2; i++) {
        (void)cudaFree(engine->halves[i].arena.base);
        if (engine->halves[i].filled != NULL)
            (void)cudaEventDestroy(engine->halves[i].filled);
        if (engine->halves[i].consumed != NULL)
            (void)cudaEventDestroy(engine->halves[i].consumed);
    }
    dkv_cu_ring_close(engine);
    for (unsigned i = 0; i < DKV_CU_MARKS; i++)
        if (engine->marks[i] != NULL)
            (void)cudaEventDestroy(engine->marks[i]);
    (void)cudaFree(engine->scratch.base);
    (void)cudaFree(engine->shared);
    if (engine->owns_stream && engine->stream != NULL)
        (void)cudaStreamDestroy(engine->stream);
    (void)cudaGetLastError();
    dkv_threads_close(engine->crew);
    free_builder(engine->builder);
    free(engine);
}

/* Threads that stage host tensors, this one included. */
static unsigned default_threads(void)
{
    cpu_set_t mine;
    const unsigned cpus = sched_getaffinity(0, sizeof(mine), &mine) == 0
                              ? (unsigned)CPU_COUNT(&mine)
                              : 1;
    return cpus < DKV_CU_THREADS ? cpus : DKV_CU_THREADS;
}

static enum dkv_status cuda_open(const struct dkv_engine_config *config,
                                 struct dkv_engine **engine_out, struct dkv_error *err)
{
    static const struct dkv_engine_config defaults;
    if (config == NULL)
        config = &defaults;
    struct dkv_cu_engine *engine = calloc(1, sizeof(*engine));
    if (engine == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cuda: out of host memory");
    engine->owns_stream = true; /* until there is one to disown */
    engine->max_items = config->max_batch_items != 0 ? config->max_batch_items : DKV_BLOCKS_MAX;
    const size_t stage = config->max_batch_bytes != 0 ? config->max_batch_bytes
                                                      : DKV_CU_STAGE_BYTES;

    enum dkv_status status = find_device(engine, config->device, err);
    if (status == DKV_OK)
        status = load_kernels(engine, err);
    if (status == DKV_OK)
        status = make_streams(engine, config->stream, err);
    if (status == DKV_OK)
        status = make_memory(engine, stage, err);
    if (status == DKV_OK)
        status = dkv_cu_ring_open(engine, err);
    if (status == DKV_OK)
        status = dkv_threads_open(config->threads != 0 ? config->threads : default_threads(),
                                  &engine->crew, err);
    if (status != DKV_OK) {
        cuda_close((struct dkv_engine *)engine);
        return status;
    }
    *engine_out = (struct dkv_engine *)engine;
    return DKV_OK;
}

static void cuda_info(const struct dkv_engine *opaque, struct dkv_engine_info *info_out)
{
    const struct dkv_cu_engine *engine = (const struct dkv_cu_engine *)opaque;
    *info_out = (struct dkv_engine_info){
        .scratch_bytes = engine->wave_scratch + engine->shared_bytes,
        .scratch_peak_bytes = engine->scratch.peak + engine->shared_bytes,
        .threads = dkv_threads_count(engine->crew),
    };
    snprintf(info_out->backend, sizeof(info_out->backend), "cuda/sm_%d%d", engine->device.major,
             engine->device.minor);
    memcpy(info_out->uuid, engine->uuid, sizeof(info_out->uuid));
    snprintf(info_out->device, sizeof(info_out->device), "%.95s", engine->device.name);
}

/* ---- batches ---- */

static enum dkv_status gone(const struct dkv_cu_engine *engine, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_DEVICE,
                         "cuda:%d: the device was lost to an earlier error; the process that owns "
                         "it must be restarted",
                         engine->device.ordinal);
}

static enum dkv_status cuda_submit(struct dkv_engine *opaque, struct dkv_item *items,
                                   size_t n_items, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    if (engine->lost)
        return gone(engine, err);
    if (engine->n_in_flight == DKV_CU_SLOTS)
        return dkv_error_set(err, DKV_E_INTERNAL, "cuda: %u batches are in flight already",
                             DKV_CU_SLOTS);
    if (n_items > engine->max_items)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "cuda: a batch of %zu blocks, not in 0..%zu",
                             n_items, engine->max_items);
    enum dkv_status status = dkv_cu_check(engine, cudaSetDevice(engine->device.ordinal),
                                          "choosing the device", err);
    if (status != DKV_OK)
        return status;
    struct dkv_cu_slot *slot =
        &engine->slots[(engine->oldest + engine->n_in_flight) % DKV_CU_SLOTS];
    slot->items = items;
    slot->n_items = n_items;
    for (size_t i = 0; i < n_items; i++) {
        items[i].status = DKV_OK;
        items[i].error = (struct dkv_error){.status = DKV_OK};
    }
    memset(slot->retry, 0, n_items);
    status = dkv_cu_run_items(engine, slot, NULL, err);
    if (status == DKV_OK) {
        engine->n_in_flight++;
        return DKV_OK;
    }
    (void)cudaStreamSynchronize(engine->copies); /* nothing of it may be left running */
    (void)cudaStreamSynchronize(engine->stream);
    engine->n_jobs = 0;
    slot->n_pending = 0;
    slot->io.used = 0;
    slot->rows.used = 0;
    slot->items = NULL;
    return status;
}

/* Blocks that a fast scorer gave up on, again and all alone on the general one. */
static enum dkv_status run_again(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 struct dkv_error *err)
{
    bool any = false;
    for (size_t i = 0; i < slot->n_items; i++)
        any = any || slot->retry[i];
    if (!any)
        return DKV_OK;
    engine->general_only = true;
    enum dkv_status status = dkv_cu_run_items(engine, slot, slot->retry, err);
    if (status == DKV_OK)
        status = dkv_cu_drain(engine, slot, err);
    engine->general_only = false;
    return status;
}

static enum dkv_status cuda_wait(struct dkv_engine *opaque, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    if (engine->lost)
        return gone(engine, err);
    if (engine->n_in_flight == 0)
        return DKV_OK;
    struct dkv_cu_slot *slot = &engine->slots[engine->oldest];
    enum dkv_status status = dkv_cu_check(engine, cudaSetDevice(engine->device.ordinal),
                                          "choosing the device", err);
    if (status == DKV_OK)
        status = dkv_cu_drain(engine, slot, err);
    if (status == DKV_OK)
        status = run_again(engine, slot, err);
    engine->oldest = (engine->oldest + 1) % DKV_CU_SLOTS;
    engine->n_in_flight--;
    slot->rows.used = 0;
    slot->items = NULL;
    if (status == DKV_OK)
        return DKV_OK;
    engine->lost = true; /* whatever it was, this batch has no answers */
    if (err != NULL)
        err->status = DKV_E_DEVICE;
    return DKV_E_DEVICE;
}

/* ---- for benchmarks ---- */

__attribute__((visibility("default"))) enum dkv_status dkv_cuda_time_stages(
    struct dkv_engine *opaque, enum dkv_cuda_timing timing, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    enum dkv_status status = DKV_OK;
    for (unsigned i = 0; i < DKV_CU_MARKS && status == DKV_OK && engine->marks[i] == NULL; i++)
        status = dkv_cu_check(engine, cudaEventCreate(&engine->marks[i]), "creating an event", err);
    engine->timed = status == DKV_OK && timing != DKV_CUDA_UNTIMED;
    engine->split = timing == DKV_CUDA_TIMED_SPLIT;
    return status;
}

__attribute__((visibility("default"))) enum dkv_status dkv_cuda_stage_times(
    struct dkv_engine *opaque, float us_out[4], struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    enum dkv_status status = DKV_OK;
    float upto[DKV_CU_MARKS] = {0};
    for (unsigned i = 1; i < DKV_CU_MARKS && status == DKV_OK; i++)
        if (i != DKV_CU_MARK_SCORED || engine->split)
            status = dkv_cu_check(
                engine, cudaEventElapsedTime(&upto[i], engine->marks[0], engine->marks[i]),
                "reading a time", err);
    if (!engine->split)
        upto[DKV_CU_MARK_SCORED] = upto[DKV_CU_MARK_SELECTED];
    for (unsigned i = 0; i + 1 < DKV_CU_MARKS; i++)
        us_out[i] = (upto[i + 1] - upto[i]) * 1000;
    return status;
}

__attribute__((visibility("default"))) extern const struct dkv_engine_ops dkv_engine_cuda;

const struct dkv_engine_ops dkv_engine_cuda = {
    .abi = DKV_ENGINE_ABI,
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .info = cuda_info,
    .submit = cuda_submit,
    .wait = cuda_wait,
    .max_in_flight = DKV_CU_SLOTS,
    .import = dkv_cu_import,
    .release = dkv_cu_release,
    .unroll = dkv_cu_unroll,
};
