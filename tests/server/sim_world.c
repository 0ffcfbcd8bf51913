/* The simulated world: what happens, and when.
 *
 * One loop: find the earliest event (an arrival, a batch done, a worker back, the queue's own
 * wake-up), move the clock there, let it happen, hand out batches until there are none, pick up
 * what ended, check. All randomness comes from the seed, so a failing seed replays exactly.
 *
 * A device takes batches in order: 40 us and 1 us per KiB each. What a world is made of is in
 * sim_scenarios.c.
 */
#include "tests/server/sim.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define BATCH_OVERHEAD_US 40
#define STEPS_MAX         200000

/* --- randomness, failure, notes ------------------------------------------------------------ */

static uint64_t next_random(struct sim *sim)
{
    uint64_t z = (sim->rng += UINT64_C(0x9e3779b97f4a7c15)); /* splitmix64 */
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint64_t sim_below(struct sim *sim, uint64_t n)
{
    return next_random(sim) % n;
}

bool sim_chance(struct sim *sim, uint32_t thousandths)
{
    return sim_below(sim, 1000) < thousandths;
}

uint64_t sim_between(struct sim *sim, uint64_t low, uint64_t high)
{
    return low + sim_below(sim, high - low + 1);
}

void sim_fail(struct sim *sim, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(sim->why, sizeof(sim->why), format, args);
    va_end(args);
    longjmp(sim->failed, 1);
}

void sim_note(const struct sim *sim, const char *format, ...)
{
    if (!sim->verbose)
        return;
    va_list args;
    va_start(args, format);
    printf("%10llu us  ", (unsigned long long)sim->now_us);
    vprintf(format, args);
    printf("\n");
    va_end(args);
}
/* --- what ended ------------------------------------------------------------------------------ */

static void collect_ended(struct sim *sim)
{
    struct dkv_admission_entry *entry;
    while ((entry = dkv_admission_pop_given_up(sim->queue)) != NULL)
        oracle_given_up(sim, DKV_LIST_OF(entry, struct sim_job, entry));
    while ((entry = dkv_admission_pop_done(sim->queue)) != NULL)
        oracle_ended(sim, DKV_LIST_OF(entry, struct sim_job, entry));

    for (uint32_t i = 0; i < sim->scenario.n_clients; i++) {
        struct sim_client *client = &sim->clients[i];
        if (!client->leaving || client->n_open > 0)
            continue;
        dkv_admission_client_fini(sim->queue, &client->queue_side);
        dkv_admission_client_init(sim->queue, &client->queue_side);
        client->leaving = false;
        oracle_new_client(sim, i);
    }
    oracle_refresh(sim);
}

/* --- what clients do ----------------------------------------------------------------------- */

static struct sim_job *free_job(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_JOBS; i++)
        if (!sim->jobs[i].open)
            return &sim->jobs[i];
    return NULL;
}

static uint32_t draw_device(struct sim *sim)
{
    return sim_chance(sim, sim->scenario.any_device)
               ? DKV_ADMISSION_ANY_DEVICE
               : (uint32_t)sim_below(sim, sim->config.n_devices);
}

static void draw_part(struct sim *sim, struct dkv_admission_part *part)
{
    part->key = sim_below(sim, sim->scenario.n_keys);
    part->device = draw_device(sim);
    part->n_blocks = (uint32_t)sim_between(sim, 1, sim_chance(sim, 50) ? 20 : 2);
    part->n_tokens = sim_between(sim, 1, 4000);
    part->n_bytes = sim_chance(sim, sim->scenario.giant) ? sim_between(sim, 1, 512 * 1024)
                                                         : sim_between(sim, 1, 48 * 1024);
}

static void draw_times(struct sim *sim, struct dkv_admission_entry *entry)
{
    const uint64_t turn_us = sim->config.batch_bytes / SIM_BYTES_PER_US + BATCH_OVERHEAD_US;

    entry->arrival_us = sim_chance(sim, 200) ? sim->now_us - sim_below(sim, 200) : 0;
    if (entry->arrival_us > sim->now_us) /* before the clock's zero */
        entry->arrival_us = 0;
    entry->timeout_us = 0;
    if (sim_chance(sim, sim->scenario.with_timeout))
        entry->timeout_us = 1 +
                            turn_us * sim->scenario.timeout_turns * sim_between(sim, 50, 150) / 100;
}

/* True unless the world is out of jobs. */
static bool offer(struct sim *sim, uint32_t index)
{
    struct sim_client *client = &sim->clients[index];
    struct sim_job *job = free_job(sim);
    uint64_t retry_us = 0;

    if (job == NULL)
        return false;
    memset(job, 0, sizeof(*job));
    job->client = index;
    job->entry.parts = job->parts;
    job->entry.n_parts = sim_chance(sim, sim->scenario.multi_part)
                             ? (uint32_t)sim_between(sim, 2, SIM_PARTS)
                             : 1;
    for (uint32_t i = 0; i < job->entry.n_parts; i++)
        draw_part(sim, &job->parts[i]);
    job->entry.priority = sim_chance(sim, 800) ? client->priority : (uint32_t)sim_below(sim, 6);
    job->entry.degrade = sim_chance(sim, sim->scenario.degrade);
    draw_times(sim, &job->entry);
    sim->n_offered++;
    enum dkv_admission_verdict verdict = dkv_admission_offer(
        sim->queue, &client->queue_side, &job->entry, sim->now_us, &retry_us, NULL);
    sim_note(sim, "client %u offers job %d: %u parts, level %u: %s", index, (int)(job - sim->jobs),
             job->entry.n_parts, job->entry.level, dkv_admission_verdict_info(verdict)->name);
    oracle_offer(sim, job, verdict, retry_us);
    return true;
}

static void arrive(struct sim *sim, uint32_t index)
{
    struct sim_client *client = &sim->clients[index];
    const uint32_t n = sim->scenario.burst > 0 && sim_chance(sim, 300)
                           ? (uint32_t)sim_between(sim, 1, sim->scenario.burst)
                           : 1;

    if (client->depth > 0) { /* closed loop: as many as it lacks, then wait for an end */
        for (uint32_t tries = 0; !client->leaving && client->n_open < client->depth && tries < 4;
             tries++)
            if (!offer(sim, index))
                break;
        client->next_us = sim->now_us + sim_between(sim, 1, 60);
        return;
    }
    for (uint32_t i = 0; !client->leaving && i < n; i++)
        offer(sim, index);
    client->next_us = sim->now_us + 1 + sim_below(sim, 2 * client->gap_us * n);
}

static void cancel_one(struct sim *sim, enum dkv_status reason)
{
    if (sim->n_open == 0)
        return;
    struct sim_job *job = &sim->jobs[sim->open[sim_below(sim, sim->n_open)]];
    sim_note(sim, "job %d is given up: %s", (int)(job - sim->jobs), dkv_status_info(reason)->name);
    oracle_reason(sim, job, reason);
    dkv_admission_fail(sim->queue, &job->entry, reason, sim->now_us);
    collect_ended(sim);
}

static void leave(struct sim *sim, uint32_t index)
{
    struct sim_client *client = &sim->clients[index];

    sim_note(sim, "client %u goes away with %u open", index, client->n_open);
    client->leaving = true;
    for (uint32_t i = 0; i < sim->n_open; i++)
        if (sim->jobs[sim->open[i]].client == index)
            oracle_reason(sim, &sim->jobs[sim->open[i]], DKV_E_CANCELLED);
    dkv_admission_client_cancel(sim->queue, &client->queue_side, sim->now_us);
    collect_ended(sim);
}

/* --- what devices do ----------------------------------------------------------------------- */

static void launch(struct sim *sim, struct dkv_admission_batch *batch)
{
    struct sim_device *device = &sim->devices[batch->device];
    const uint64_t took_us = BATCH_OVERHEAD_US + batch->n_bytes / SIM_BYTES_PER_US;

    oracle_expire(sim);
    sim_note(sim, "device %u takes %u parts, %llu bytes, key %llu%s", batch->device, batch->n_parts,
             (unsigned long long)batch->n_bytes, (unsigned long long)batch->key,
             batch->solo ? ", a replay" : "");
    oracle_batch(sim, batch);
    if (device->busy_until_us < sim->now_us)
        device->busy_until_us = sim->now_us;
    device->busy_until_us += took_us;
    device->busy_us += took_us;
    device->flight[device->n_flight++] = (struct sim_flight){.batch = batch,
                                                             .end_us = device->busy_until_us,
                                                             .n_parts = batch->n_parts,
                                                             .solo = batch->solo};
}

static void complete_first(struct sim *sim, uint32_t index)
{
    struct sim_device *device = &sim->devices[index];
    struct dkv_admission_batch *batch = device->flight[0].batch;

    sim_note(sim, "device %u is done with %u parts", index, batch->n_parts);
    if (sim_chance(sim, sim->scenario.fail)) { /* one block was bad: its job fails, no other */
        struct dkv_admission_entry *entry =
            DKV_LIST_OF(batch->parts.next, struct dkv_admission_part, node)->entry;
        oracle_reason(sim, DKV_LIST_OF(entry, struct sim_job, entry), DKV_E_INVALID);
        dkv_admission_fail(sim->queue, entry, DKV_E_INVALID, sim->now_us);
    }
    oracle_completed(sim, batch);
    device->n_flight--;
    memmove(&device->flight[0], &device->flight[1], device->n_flight * sizeof(device->flight[0]));
    dkv_admission_complete(sim->queue, batch, sim->now_us);
    collect_ended(sim);
}

static void lose(struct sim *sim, uint32_t index, bool retire)
{
    struct sim_device *device = &sim->devices[index];

    sim_note(sim, "device %u is %s with %u batches", index, retire ? "retired" : "lost",
             device->n_flight);
    oracle_lost(sim, index);
    device->up = false;
    device->n_flight = 0;
    device->busy_until_us = sim->now_us;
    device->up_us = sim->now_us + sim_between(sim, 1, 3000);
    if (retire) {
        device->retired = true;
        oracle_retired(sim, index);
        dkv_admission_device_retire(sim->queue, index, sim->now_us);
        if (sim_chance(sim, 500))
            device->up_us = DKV_ADMISSION_NEVER;
    } else {
        dkv_admission_device_lost(sim->queue, index, sim->now_us);
    }
    collect_ended(sim);
}

static void come_back(struct sim *sim, uint32_t index)
{
    sim_note(sim, "device %u is up", index);
    sim->devices[index].up = true;
    sim->devices[index].retired = false;
    sim->devices[index].up_us = DKV_ADMISSION_NEVER;
    dkv_admission_device_up(sim->queue, index);
    oracle_refresh(sim);
}

/* --- the loop ------------------------------------------------------------------------------ */

static void pump(struct sim *sim)
{
    struct dkv_admission_batch *batch;
    while ((batch = dkv_admission_next(sim->queue, sim->now_us)) != NULL)
        launch(sim, batch);
    oracle_expire(sim);
    collect_ended(sim);
    oracle_step(sim);
}

static bool arrivals_left(const struct sim *sim)
{
    return sim->n_offered < sim->scenario.n_offers;
}

static uint64_t next_event_us(const struct sim *sim)
{
    uint64_t at_us = dkv_admission_wakeup_us(sim->queue, sim->now_us);

    for (uint32_t i = 0; arrivals_left(sim) && i < sim->scenario.n_clients; i++)
        if (sim->clients[i].next_us < at_us)
            at_us = sim->clients[i].next_us;
    for (uint32_t d = 0; d < sim->config.n_devices; d++) {
        const struct sim_device *device = &sim->devices[d];
        if (device->n_flight > 0 && device->flight[0].end_us < at_us)
            at_us = device->flight[0].end_us;
        if (device->up_us < at_us)
            at_us = device->up_us;
    }
    return at_us;
}

static void strike(struct sim *sim)
{
    const uint32_t d = (uint32_t)sim_below(sim, sim->config.n_devices);

    if (sim_chance(sim, sim->scenario.cancel))
        cancel_one(sim, DKV_E_CANCELLED);
    if (sim_chance(sim, sim->scenario.leave))
        leave(sim, (uint32_t)sim_below(sim, sim->scenario.n_clients));
    if (sim->devices[d].up && sim_chance(sim, sim->scenario.retire))
        lose(sim, d, true);
    else if (sim->devices[d].up && sim_chance(sim, sim->scenario.die))
        lose(sim, d, false);
    if (sim->scenario.drain_early && !sim->draining && sim_chance(sim, 2)) {
        sim_note(sim, "drain");
        sim->draining = true;
        dkv_admission_drain(sim->queue);
    }
}

static void happen(struct sim *sim)
{
    for (uint32_t d = 0; d < sim->config.n_devices; d++) {
        while (sim->devices[d].n_flight > 0 && sim->devices[d].flight[0].end_us <= sim->now_us)
            complete_first(sim, d);
        if (sim->devices[d].up_us <= sim->now_us)
            come_back(sim, d);
    }
    for (uint32_t i = 0; arrivals_left(sim) && i < sim->scenario.n_clients; i++)
        if (sim->clients[i].next_us <= sim->now_us)
            arrive(sim, i);
    if (arrivals_left(sim))
        strike(sim);
}

/* What nothing else would end: work for a device that never comes back up. */
static void end_the_rest(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->n_open; i++)
        oracle_reason(sim, &sim->jobs[sim->open[i]], DKV_E_DRAINING);
    dkv_admission_fail_all(sim->queue, DKV_E_DRAINING, sim->now_us);
    oracle_refresh(sim);
    pump(sim);
}

static void run(struct sim *sim)
{
    sim_set_up(sim);
    for (;;) {
        const uint64_t at_us = next_event_us(sim);
        if (at_us == DKV_ADMISSION_NEVER)
            break;
        if (at_us < sim->now_us)
            sim_fail(sim, "an event in the past");
        sim->now_us = at_us;
        happen(sim);
        pump(sim);
        if (++sim->steps > STEPS_MAX)
            sim_fail(sim, "%d steps without an end", STEPS_MAX);
    }
    end_the_rest(sim);
    oracle_end(sim);
    for (uint32_t i = 0; i < sim->scenario.n_clients; i++)
        dkv_admission_client_fini(sim->queue, &sim->clients[i].queue_side);
    dkv_admission_free(sim->queue);
}

int sim_run(struct sim *sim, uint64_t seed, bool verbose)
{
    memset(sim, 0, sizeof(*sim));
    sim->seed = seed;
    sim->rng = seed * UINT64_C(0xd1342543de82ef95) + 1;
    sim->verbose = verbose;
    if (setjmp(sim->failed) != 0)
        return 1; /* the queue is left as it was found, for a debugger */
    run(sim);
    return 0;
}
