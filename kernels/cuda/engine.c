/* The CUDA engine's batches: submitted, waited for, answered.
 *
 * Submitting packs a batch into as few launches as there are kernels, whatever its size (wave.c),
 * and returns; waiting synchronises, checks and copies answers out (answer.c). Two batches may be
 * in flight: while one computes, the host tensors of the next are copied. All kernels run on one
 * stream, so scratch needs no second copy.
 *
 * A sticky error (illegal address, failed launch) poisons the process's context for good: it is
 * reported as DKV_E_DEVICE from then on, and the process that owns the engine must be replaced.
 */
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/threads.h"
#include "kernels/cuda/import.h"
#include "kernels/cuda/open.h"

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

static void cuda_info(const struct dkv_engine *opaque, struct dkv_engine_info *info_out)
{
    const struct dkv_cu_engine *engine = (const struct dkv_cu_engine *)opaque;
    *info_out = (struct dkv_engine_info){
        .scratch_bytes = engine->wave_scratch,
        .scratch_peak_bytes = engine->wave_scratch_peak,
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

/* A stream that is being captured would take the batch into somebody's graph. */
static enum dkv_status check_stream(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (engine->owns_stream)
        return DKV_OK;
    const enum dkv_status status = dkv_cu_check(
        engine, cudaStreamIsCapturing(engine->stream, &capture), "asking the caller's stream", err);
    if (status != DKV_OK || capture == cudaStreamCaptureStatusNone)
        return status;
    return dkv_error_set(err, DKV_E_INVALID,
                         "cuda:%d: the caller's stream is being captured to a graph",
                         engine->device.ordinal);
}

/* Not on the stream itself, which would stand still until the function has returned. */
static enum dkv_status tell_when_done(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                      struct dkv_error *err)
{
    if (engine->tidings == NULL)
        return DKV_OK;
    enum dkv_status status = dkv_cu_check(
        engine, cudaStreamWaitEvent(engine->tidings, slot->done, 0), "waiting for an event", err);
    if (status == DKV_OK)
        status = dkv_cu_check(
            engine, cudaLaunchHostFunc(engine->tidings, engine->on_done, engine->on_done_arg),
            "queueing a call", err);
    return status;
}

static enum dkv_status submit(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                              struct dkv_error *err)
{
    enum dkv_status status = check_stream(engine, err);
    if (status != DKV_OK)
        return status;
    status = dkv_cu_run_items(engine, slot, NULL, err);
    if (status == DKV_OK)
        status = tell_when_done(engine, slot, err);
    if (status == DKV_OK)
        return DKV_OK;
    (void)cudaStreamSynchronize(engine->copies); /* nothing of it may be left running */
    (void)cudaStreamSynchronize(engine->stream);
    engine->n_jobs = 0;
    engine->held = 0;
    slot->n_pending = 0;
    slot->n_pending_choices = 0;
    slot->io.used = 0;
    slot->rows.used = 0;
    return status;
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
    enum dkv_status status = dkv_cu_enter(engine, err);
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
    status = submit(engine, slot, err);
    dkv_cu_leave();
    if (status == DKV_OK)
        engine->n_in_flight++;
    else
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
    enum dkv_status status = dkv_cu_enter(engine, err);
    if (status == DKV_OK) {
        status = dkv_cu_drain(engine, slot, err);
        if (status == DKV_OK)
            status = run_again(engine, slot, err);
        dkv_cu_leave();
    }
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

/* What went wrong is wait()'s to tell. */
static bool cuda_ready(struct dkv_engine *opaque)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    if (engine->lost || engine->n_in_flight == 0 || dkv_cu_enter(engine, NULL) != DKV_OK)
        return true;
    const cudaError_t error = cudaEventQuery(engine->slots[engine->oldest].done);
    (void)cudaGetLastError();
    dkv_cu_leave();
    return error != cudaErrorNotReady;
}

/* Memory that the runtime does not know is the host's, pinned or not. */
static enum dkv_status cuda_place(struct dkv_engine *opaque, const void *at,
                                  enum dkv_place *place_out, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    struct cudaPointerAttributes is;
    enum dkv_status status = dkv_cu_enter(engine, err);
    if (status != DKV_OK)
        return status;
    status = dkv_cu_check(engine, cudaPointerGetAttributes(&is, at), "asking where memory is", err);
    dkv_cu_leave();
    if (status != DKV_OK)
        return status;
    *place_out = is.type == cudaMemoryTypeDevice || is.type == cudaMemoryTypeManaged
                     ? DKV_PLACE_DEVICE
                     : DKV_PLACE_HOST;
    if (is.type == cudaMemoryTypeDevice && is.device != engine->device.ordinal)
        return dkv_error_set(err, DKV_E_INVALID, "lies on cuda:%d, and the engine is of cuda:%d",
                             is.device, engine->device.ordinal);
    return DKV_OK;
}

/* ---- for benchmarks ---- */

__attribute__((visibility("default"))) enum dkv_status dkv_cuda_time_stages(
    struct dkv_engine *opaque, enum dkv_cuda_timing timing, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    enum dkv_status status = dkv_cu_enter(engine, err);
    if (status != DKV_OK)
        return status;
    for (unsigned i = 0; i < DKV_CU_MARKS && status == DKV_OK && engine->marks[i] == NULL; i++)
        status = dkv_cu_check(engine, cudaEventCreate(&engine->marks[i]), "creating an event", err);
    dkv_cu_leave();
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
    .open = dkv_cu_open,
    .close = dkv_cu_close,
    .info = cuda_info,
    .submit = cuda_submit,
    .wait = cuda_wait,
    .max_in_flight = DKV_CU_SLOTS,
    .ready = cuda_ready,
    .place = cuda_place,
    .import = dkv_cu_import,
    .release = dkv_cu_release,
    .unroll = dkv_cu_unroll,
};
