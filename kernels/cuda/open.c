/* Opening a device for the CUDA engine, and closing it: all memory, streams and events there are.
 *
 * Nothing is allocated after open. With the caller's stream everything lies in that stream's
 * context, and closing waits for what the engine has put there, not for the stream.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/threads.h"
#include "kernels/cuda/open.h"

#ifndef DKV_CUDA_ARCHS
#define DKV_CUDA_ARCHS "unknown"
#endif

/* ---- the device ---- */

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
    if ((error = cudaGetDeviceProperties(&prop, ordinal)) != cudaSuccess)
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
        error = dkv_cu_choose_prepare(device);
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
    slot->pending_choices = malloc(engine->max_items * sizeof(*slot->pending_choices));
    slot->retry = calloc(engine->max_items, 1);
    if (slot->pending == NULL || slot->pending_choices == NULL || slot->retry == NULL)
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
    b->choices = calloc(engine->max_items, sizeof(*b->choices));
    b->choice_items = calloc(engine->max_items, sizeof(*b->choice_items));
    engine->layers = calloc(engine->max_items, sizeof(*engine->layers));
    if (b->blocks == NULL || b->scorer == NULL || b->units == NULL || b->pending == NULL ||
        b->choices == NULL || b->choice_items == NULL || engine->layers == NULL)
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
    free(b->choices);
    free(b->choice_items);
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

/* ---- streams ---- */

static enum dkv_status make_stream(struct dkv_cu_engine *engine, cudaStream_t *stream_out,
                                   struct dkv_error *err)
{
    return dkv_cu_check(engine, cudaStreamCreateWithFlags(stream_out, cudaStreamNonBlocking),
                        "creating a stream", err);
}

static enum dkv_status make_streams(struct dkv_cu_engine *engine,
                                    const struct dkv_engine_config *config, struct dkv_error *err)
{
    enum dkv_status status = make_stream(engine, &engine->copies, err);
    if (status == DKV_OK && config->on_done != NULL)
        status = make_stream(engine, &engine->tidings, err);
    engine->on_done = config->on_done;
    engine->on_done_arg = config->on_done_arg;
    if (status != DKV_OK || config->stream == NULL)
        return status == DKV_OK ? make_stream(engine, &engine->stream, err) : status;
    engine->owns_stream = false;
    engine->stream = (cudaStream_t)config->stream;
    return DKV_OK;
}

/* ---- opening and closing ---- */

static void close_stream(cudaStream_t stream)
{
    if (stream == NULL)
        return;
    (void)cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
}

static void free_slot(struct dkv_cu_slot *slot)
{
    if (slot->done != NULL) { /* of a caller's stream, which may be gone: no more is asked */
        (void)cudaEventSynchronize(slot->done);
        (void)cudaEventDestroy(slot->done);
    }
    free(slot->pending);
    free(slot->pending_choices);
    free(slot->retry);
    (void)cudaFreeHost(slot->io.base);
    (void)cudaFree(slot->io_device);
    (void)cudaFree(slot->rows.base);
}

static void free_half(struct dkv_cu_half *half)
{
    (void)cudaFree(half->arena.base);
    if (half->filled != NULL)
        (void)cudaEventDestroy(half->filled);
    if (half->consumed != NULL)
        (void)cudaEventDestroy(half->consumed);
}

/* Frees what there is; on a lost device the calls fail, which changes nothing. */
static void free_memory(struct dkv_cu_engine *engine)
{
    if (engine->owns_stream)
        close_stream(engine->stream);
    close_stream(engine->copies);
    close_stream(engine->tidings);
    for (unsigned i = 0; i < DKV_CU_SLOTS; i++)
        free_slot(&engine->slots[i]);
    for (unsigned i = 0; i < 2; i++)
        free_half(&engine->halves[i]);
    dkv_cu_ring_close(engine);
    for (unsigned i = 0; i < DKV_CU_MARKS; i++)
        if (engine->marks[i] != NULL)
            (void)cudaEventDestroy(engine->marks[i]);
    (void)cudaFree(engine->scratch.base);
    (void)cudaFree(engine->shared);
    (void)cudaGetLastError();
}

void dkv_cu_close(struct dkv_engine *opaque)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    if (engine == NULL)
        return;
    if (engine->context != NULL) {
        const bool entered = dkv_cu_enter(engine, NULL) == DKV_OK;
        free_memory(engine);
        if (entered)
            dkv_cu_leave();
    }
    dkv_cu_context_close(engine);
    dkv_threads_close(engine->crew);
    free_builder(engine->builder);
    free(engine->layers);
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

/* Everything that needs the context to be current. */
static enum dkv_status open_inside(struct dkv_cu_engine *engine,
                                   const struct dkv_engine_config *config, struct dkv_error *err)
{
    const size_t stage = config->max_batch_bytes != 0 ? config->max_batch_bytes
                                                      : DKV_CU_STAGE_BYTES;
    enum dkv_status status = load_kernels(engine, err);
    if (status == DKV_OK)
        status = make_streams(engine, config, err);
    if (status == DKV_OK)
        status = make_memory(engine, stage, err);
    if (status == DKV_OK)
        status = dkv_cu_ring_open(engine, err);
    return status;
}

static enum dkv_status open_engine(struct dkv_cu_engine *engine,
                                   const struct dkv_engine_config *config, struct dkv_error *err)
{
    enum dkv_status status = find_device(engine, config->device, err);
    if (status == DKV_OK)
        status = dkv_cu_context_open(engine, config->stream, err);
    if (status == DKV_OK)
        status = dkv_cu_enter(engine, err);
    if (status == DKV_OK) {
        status = open_inside(engine, config, err);
        dkv_cu_leave();
    }
    if (status == DKV_OK)
        status = dkv_threads_open(config->threads != 0 ? config->threads : default_threads(),
                                  &engine->crew, err);
    return status;
}

enum dkv_status dkv_cu_open(const struct dkv_engine_config *config, struct dkv_engine **engine_out,
                            struct dkv_error *err)
{
    static const struct dkv_engine_config defaults;
    if (config == NULL)
        config = &defaults;
    struct dkv_cu_engine *engine = calloc(1, sizeof(*engine));
    if (engine == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "cuda: out of host memory");
    engine->owns_stream = true; /* until there is one to disown */
    engine->max_items = config->max_batch_items != 0 ? config->max_batch_items : DKV_BLOCKS_MAX;
    struct CUctx_st *before = dkv_cu_current();
    const enum dkv_status status = open_engine(engine, config, err);
    dkv_cu_set_current(before);
    if (status != DKV_OK) {
        dkv_cu_close((struct dkv_engine *)engine);
        return status;
    }
    *engine_out = (struct dkv_engine *)engine;
    return DKV_OK;
}
