/* By an idle handle of libuv's, which makes its poll return at once. */
#include "server/spin.h"

#include "server/clock.h"
#include "server/group_limits.h"

#include <sched.h>
#include <string.h>

#define GPU_PATIENCE_NS UINT64_C(200000) /* some times the way of a short request */
#define BATCH_TIMES     5                /* as long for the end of a batch */
#define CPUS_TO_SPARE   4                /* front, worker, caller, and one for everybody else */

static bool uses_gpu(const struct dkv_config *config)
{
    char name[DKV_DEVICE_NAME_BYTES];
    for (unsigned i = 0; dkv_config_device(config, i, name); i++)
        if (strcmp(name, "cpu") != 0)
            return true;
    return false;
}

static bool has_cpus(unsigned n)
{
    cpu_set_t mine;
    return sched_getaffinity(0, sizeof(mine), &mine) == 0 && CPU_COUNT(&mine) >= (int)n &&
           dkv_cpu_limit("/proc/self/cgroup", "/sys/fs/cgroup") >= n * UINT64_C(1000);
}

uint64_t dkv_spin_patience_ns(const struct dkv_config *config)
{
    if (config->busy_poll_us != 0)
        return config->busy_poll_us * 1000;
    return uses_gpu(config) && has_cpus(CPUS_TO_SPARE) ? GPU_PATIENCE_NS : 0;
}

bool dkv_spin_front_learns(const struct dkv_config *config)
{
    return dkv_spin_patience_ns(config) == 0 && has_cpus(CPUS_TO_SPARE - 1);
}

bool dkv_spin_worker_learns(const struct dkv_config *config)
{
    return dkv_spin_patience_ns(config) == 0 && has_cpus(CPUS_TO_SPARE);
}

void dkv_spin_open(struct dkv_spin *spin, uv_loop_t *loop, uint64_t patience_ns, bool learns)
{
    *spin = (struct dkv_spin){.patience_ns = patience_ns, .learns = learns};
    spin->looks[0] = spin->looks[1] = DKV_LOOK_INIT;
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

void dkv_spin_poke(struct dkv_spin *spin, enum dkv_spin_for what, uint64_t now_ns)
{
    uint64_t patience_ns = what == DKV_SPIN_FOR_BATCH ? BATCH_TIMES * spin->patience_ns
                                                      : spin->patience_ns;
    if (spin->learns) {
        dkv_look_learn(&spin->looks[spin->what], now_ns - spin->since_ns);
        patience_ns = spin->looks[what].looks ? DKV_LOOK_NS : 0;
    }
    spin->what = what;
    spin->since_ns = now_ns;
    spin->until_ns = now_ns + patience_ns;
    if (patience_ns > 0)
        uv_idle_start(&spin->idle, on_idle);
}
