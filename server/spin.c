/* By an idle handle of libuv's, which makes its poll return at once. */
#include "server/spin.h"

#include "server/clock.h"
#include "server/group_limits.h"

#include <sched.h>
#include <string.h>

#define GPU_PATIENCE_NS UINT64_C(200000) /* some times the way of a short request */
#define CPUS_TO_SPARE   4                /* front, worker, caller, and one for everybody else */

static bool uses_gpu(const struct dkv_config *config)
{
    char name[DKV_DEVICE_NAME_BYTES];
    for (unsigned i = 0; dkv_config_device(config, i, name); i++)
        if (strcmp(name, "cpu") != 0)
            return true;
    return false;
}

uint64_t dkv_spin_patience_ns(const struct dkv_config *config)
{
    cpu_set_t mine;
    if (config->busy_poll_us != 0)
        return config->busy_poll_us * 1000;
    if (!uses_gpu(config) || sched_getaffinity(0, sizeof(mine), &mine) != 0 ||
        CPU_COUNT(&mine) < CPUS_TO_SPARE ||
        dkv_cpu_limit("/proc/self/cgroup", "/sys/fs/cgroup") < CPUS_TO_SPARE * UINT64_C(1000))
        return 0;
    return GPU_PATIENCE_NS;
}

void dkv_spin_open(struct dkv_spin *spin, uv_loop_t *loop, uint64_t patience_ns)
{
    *spin = (struct dkv_spin){.patience_ns = patience_ns};
    uv_idle_init(loop, &spin->idle);
}

void dkv_spin_close(struct dkv_spin *spin, uv_close_cb on_closed)
{
    uv_close((uv_handle_t *)&spin->idle, on_closed);
}

static void on_idle(uv_idle_t *idle)
{
    const struct dkv_spin *spin = (const struct dkv_spin *)idle; /* its first member */
    if (dkv_clock_ns() >= spin->until_ns)
        uv_idle_stop(idle);
}

void dkv_spin_poke(struct dkv_spin *spin, unsigned times)
{
    if (spin->patience_ns == 0)
        return;
    spin->until_ns = dkv_clock_ns() + spin->patience_ns * times;
    uv_idle_start(&spin->idle, on_idle);
}
