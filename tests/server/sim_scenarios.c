/* The simulator's scenarios, and a world that begins in one of them.
 *
 * Times, sizes and bounds are drawn from ranges so small that every bound is met often: a queue of
 * eight entries is full all the time, a batch of two blocks is always cut.
 */
#include "tests/server/sim.h"

/* clang-format off: one paragraph per scenario */
static const struct sim_scenario scenarios[] = {
    {.name = "steady",
     .giant = 20,
     .n_clients = 4,
     .n_devices = 1,
     .n_keys = 1,
     .load = 0.7,
     .with_timeout = 300,
     .timeout_turns = 20,
     .cancel = 10,
     .multi_part = 200,
     .n_offers = 120},
    {.name = "bursts",
     .giant = 20,
     .n_clients = 6,
     .n_devices = 1,
     .n_keys = 2,
     .load = 0.9,
     .burst = 12,
     .with_timeout = 500,
     .timeout_turns = 6,
     .degrade = 100,
     .multi_part = 300,
     .n_offers = 160},
    {.name = "greedy",
     .n_clients = 5,
     .n_devices = 1,
     .n_keys = 1,
     .greedy = 24,
     .depth = 2,
     .n_offers = 300},
    {.name = "greedy, keys",
     .n_clients = 4,
     .n_devices = 1,
     .n_keys = 3,
     .greedy = 20,
     .depth = 6,
     .multi_part = 200,
     .n_offers = 300},
    {.name = "expiring",
     .giant = 20,
     .n_clients = 4,
     .n_devices = 1,
     .n_keys = 2,
     .load = 1.5,
     .with_timeout = 1000,
     .timeout_turns = 2,
     .multi_part = 300,
     .n_offers = 200},
    {.name = "cancelled",
     .giant = 20,
     .n_clients = 6,
     .n_devices = 2,
     .n_keys = 2,
     .load = 1.2,
     .burst = 4,
     .any_device = 500,
     .multi_part = 400,
     .cancel = 250,
     .fail = 60,
     .leave = 40,
     .n_offers = 200},
    {.name = "dying",
     .giant = 20,
     .n_clients = 5,
     .n_devices = 1,
     .n_keys = 2,
     .load = 0.9,
     .burst = 4,
     .with_timeout = 200,
     .timeout_turns = 20,
     .multi_part = 300,
     .cancel = 30,
     .die = 90,
     .n_offers = 200},
    {.name = "dying, devices",
     .giant = 20,
     .n_clients = 6,
     .n_devices = 3,
     .n_keys = 2,
     .load = 1.1,
     .any_device = 500,
     .multi_part = 400,
     .cancel = 30,
     .leave = 10,
     .die = 80,
     .retire = 8,
     .n_offers = 240},
    {.name = "many devices",
     .giant = 20,
     .n_clients = 8,
     .n_devices = 4,
     .n_keys = 2,
     .load = 1.0,
     .any_device = 600,
     .multi_part = 400,
     .with_timeout = 200,
     .timeout_turns = 10,
     .n_offers = 240},
    {.name = "overload x3",
     .n_clients = 6,
     .n_devices = 1,
     .n_keys = 1,
     .load = 3.0,
     .with_timeout = 1000,
     .timeout_turns = 30,
     .degrade = 200,
     .n_offers = 300},
    {.name = "overload x10",
     .giant = 20,
     .n_clients = 8,
     .n_devices = 2,
     .n_keys = 2,
     .load = 10.0,
     .burst = 6,
     .any_device = 300,
     .with_timeout = 500,
     .timeout_turns = 12,
     .degrade = 200,
     .cancel = 20,
     .n_offers = 400},
    {.name = "everything",
     .giant = 20,
     .n_clients = 8,
     .n_devices = 3,
     .n_keys = 3,
     .load = 1.6,
     .burst = 5,
     .greedy = 12,
     .any_device = 400,
     .multi_part = 400,
     .with_timeout = 500,
     .timeout_turns = 6,
     .degrade = 100,
     .cancel = 60,
     .fail = 20,
     .leave = 15,
     .die = 40,
     .retire = 4,
     .drain_early = true,
     .n_offers = 240},
};
/* clang-format on */

static void draw_config(struct sim *sim)
{
    struct dkv_admission_config *c = &sim->config;

    c->n_devices = sim->scenario.n_devices;
    c->n_levels = (uint32_t)sim_between(sim, 1, SIM_LEVELS);
    c->default_level = (uint32_t)sim_between(sim, 1, c->n_levels);
    c->aging_batches = c->n_levels + (uint32_t)sim_below(sim, 4);
    c->max_flight = (uint32_t)sim_between(sim, 1, 2);
    c->max_queue_delay_us = sim_chance(sim, 500) ? 0 : sim_between(sim, 1, 400);
    c->batch_blocks = (uint32_t)sim_between(sim, 2, 16);
    c->batch_tokens = sim_between(sim, 4000, 40000);
    c->batch_bytes = sim_between(sim, 32, 256) * 1024;
    c->max_entries = (uint32_t)sim_between(sim, 8, SIM_JOBS);
    c->max_bytes = sim_between(sim, 512, 4096) * 1024;
    c->client_max_entries = (uint32_t)sim_between(sim, 2,
                                                  c->max_entries < 32 ? c->max_entries : 32);
    c->client_max_bytes = sim_between(sim, 256, c->max_bytes / 1024) * 1024;
    c->quantum_bytes = sim_between(sim, 8, 64) * 1024;
    c->max_timeout_us = sim_chance(sim, 300) ? sim_between(sim, 5000, 50000) : 0;
    c->restart_us = 2000;
}

static void set_up_clients(struct sim *sim)
{
    const double mean_bytes = 24.0 * 1024.0;
    const double per_client_us = mean_bytes / SIM_BYTES_PER_US * (double)sim->scenario.n_clients /
                                 ((double)sim->scenario.n_devices *
                                  (sim->scenario.load > 0.0 ? sim->scenario.load : 1.0));

    for (uint32_t i = 0; i < sim->scenario.n_clients; i++) {
        struct sim_client *client = &sim->clients[i];
        dkv_admission_client_init(sim->queue, &client->queue_side);
        client->gap_us = (uint64_t)per_client_us + 1;
        client->next_us = sim->now_us + sim_below(sim, 2 * client->gap_us);
        client->depth = i == 0 && sim->scenario.greedy > 0 ? sim->scenario.greedy
                                                           : sim->scenario.depth;
        client->priority = (uint32_t)sim_below(sim, sim->config.n_levels + 1);
    }
}

void sim_set_up(struct sim *sim)
{
    struct dkv_error err;

    sim->now_us = sim_between(sim, 1, 1000000);
    sim->scenario = scenarios[sim->seed % (sizeof(scenarios) / sizeof(scenarios[0]))];
    draw_config(sim);
    if (dkv_admission_new(&sim->config, &sim->queue, &err) != DKV_OK)
        sim_fail(sim, "new: %s", err.text);
    set_up_clients(sim);
    for (uint32_t d = 0; d < sim->config.n_devices; d++) {
        sim->devices[d].up = true;
        sim->devices[d].up_us = DKV_ADMISSION_NEVER;
        dkv_admission_device_up(sim->queue, d);
    }
    sim_note(sim,
             "scenario %s: %u devices, %u levels, aging %u, flight %u, delay %llu us, batch %u"
             " blocks %llu bytes, %u entries",
             sim->scenario.name, sim->config.n_devices, sim->config.n_levels,
             sim->config.aging_batches, sim->config.max_flight,
             (unsigned long long)sim->config.max_queue_delay_us, sim->config.batch_blocks,
             (unsigned long long)sim->config.batch_bytes, sim->config.max_entries);
}
