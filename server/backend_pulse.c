/* Signs of life for the service manager's watchdog: has everything moved that could? */
#include "server/backend_priv.h"

/* Requests that wait although a device is idle, and did so at the last call: the queue stands. */
static bool queue_stands(struct dkv_backend *backend)
{
    struct dkv_backend_info info;
    const bool moved = backend->n_launched != backend->pulse_launched;
    dkv_backend_info(backend, &info);
    backend->pulse_launched = backend->n_launched;
    return info.n_queued > 0 && backend->n_running == 0 && !moved;
}

bool dkv_backend_pulse(struct dkv_backend *backend, const char **why_out)
{
    unsigned n_up = 0, n_silent = 0;
    for (unsigned d = 0; d < backend->n_devices; d++)
        if (backend->devices[d].up) {
            n_up++;
            n_silent += !dkv_worker_pulse(backend->devices[d].worker);
        }
    if (n_up == 0)
        *why_out = "no device answers";
    else if (n_silent > 0)
        *why_out = "a worker is silent";
    else if (queue_stands(backend))
        *why_out = "requests wait beside an idle device";
    else
        return true;
    return false;
}
