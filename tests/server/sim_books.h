/* How both halves of the oracle read its books. */
#ifndef DKV_TESTS_SERVER_SIM_BOOKS_H
#define DKV_TESTS_SERVER_SIM_BOOKS_H

#include "tests/server/sim.h"

static inline struct sim_job *job_of(const struct dkv_admission_part *part)
{
    return DKV_LIST_OF(part->entry, struct sim_job, entry);
}

static inline struct sim_part *seen_of(const struct dkv_admission_part *part)
{
    struct sim_job *job = job_of(part);
    return &job->seen[part - job->parts];
}

static inline int64_t cost_of(const struct sim *sim, uint64_t n_bytes)
{
    return (int64_t)(n_bytes + sim->config.quantum_bytes / 16 + 1);
}

static inline int64_t largest_debt(const struct sim *sim)
{
    return (int64_t)sim->config.batch_bytes + sim->largest_cost;
}

static inline bool can_run(const struct sim *sim, const struct dkv_admission_part *part,
                           uint32_t device)
{
    const uint32_t lane = sim_lane(sim, part);
    return lane == device || lane == sim->config.n_devices;
}

static inline bool flow_waits(const struct sim *sim, uint32_t client, uint32_t level,
                              uint32_t device)
{
    return sim->waiting[client][level][device] +
               sim->waiting[client][level][sim->config.n_devices] >
           0;
}

static inline bool level_waits(const struct sim *sim, uint32_t level, uint32_t device)
{
    for (uint32_t c = 0; c < sim->scenario.n_clients; c++)
        if (flow_waits(sim, c, level, device))
            return true;
    return false;
}

static inline bool replay_waits(const struct sim *sim, uint32_t device)
{
    return sim->replays[device] + sim->replays[sim->config.n_devices] > 0;
}

#endif
