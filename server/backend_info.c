/* What the backend tells about itself: devices, figures for metrics. */
#include "server/backend_priv.h"

#include "server/clock.h"

#include <string.h>

bool dkv_backend_ready(const struct dkv_backend *backend)
{
    for (unsigned d = 0; d < backend->n_devices; d++)
        if (backend->devices[d].up)
            return true;
    return false;
}

static void facts_of(const struct dkv_backend_device *device, struct dkv_worker_facts *facts_out)
{
    dkv_worker_facts(device->worker, facts_out);
    facts_out->backend = device->engine.backend;
    facts_out->description = device->engine.device;
    facts_out->busy_ns = device->busy_ns;
    facts_out->n_blocks = device->n_blocks;
    facts_out->scratch_bytes = device->scratch_bytes;
}

unsigned dkv_backend_uuids(const struct dkv_backend *backend,
                           uint8_t uuids_out[DKV_ADMISSION_DEVICES_MAX][DKV_UUID_BYTES])
{
    for (unsigned d = 0; d < backend->n_devices; d++)
        memcpy(uuids_out[d], backend->devices[d].engine.uuid, DKV_UUID_BYTES);
    return backend->n_devices;
}

void dkv_backend_info(struct dkv_backend *backend, struct dkv_backend_info *info_out)
{
    *info_out = (struct dkv_backend_info){
        .engine = backend->devices[0].engine,
        .n_running = backend->n_running,
        .max_queue_requests = backend->limits.max_entries,
        .n_levels = backend->limits.n_levels,
        .ready = dkv_backend_ready(backend),
    };
    info_out->n_devices = backend->n_devices;
    for (unsigned d = 0; d < backend->n_devices; d++)
        if (backend->devices[d].worker != NULL)
            facts_of(&backend->devices[d], &info_out->workers[d]);
    info_out->engine.scratch_bytes = 0;
    for (unsigned d = 0; d < backend->n_devices; d++)
        info_out->engine.scratch_bytes += backend->devices[d].scratch_bytes;
    dkv_backend_count_loans(backend, info_out);
    dkv_admission_stats(backend->queue, dkv_clock_ns() / 1000, &info_out->queue);
    for (unsigned i = 0; i < info_out->n_levels; i++)
        info_out->n_queued += info_out->queue.level[i].n_waiting;
}
