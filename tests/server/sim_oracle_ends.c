/* The oracle's other half: how jobs must end, what must hold between events, and at the end. */
#include "tests/server/sim_books.h"

/* --- how jobs end -------------------------------------------------------------------------- */

/* Waiting parts of a job that will not end OK are dropped at once. */
void oracle_reason(struct sim *sim, struct sim_job *job, enum dkv_status reason)
{
    (void)sim;
    if (job->reason == DKV_OK)
        job->reason = reason;
    for (uint32_t p = 0; p < job->entry.n_parts; p++)
        if (job->seen[p].state == SIM_WAITING)
            job->seen[p].state = SIM_DROPPED;
}

static void part_lost(struct sim *sim, const struct dkv_admission_part *part)
{
    struct sim_job *job = job_of(part);
    struct sim_part *seen = seen_of(part);

    seen->state = SIM_RETURNED;
    if (job->reason != DKV_OK)
        return;
    if (job->deadline_us <= sim->now_us) {
        oracle_reason(sim, job, DKV_E_TIMEOUT);
    } else if (seen->n_launches == 2) {
        oracle_reason(sim, job, DKV_E_DEVICE);
    } else {
        seen->state = SIM_WAITING;
        sim->n_replayed++;
    }
}

void oracle_lost(struct sim *sim, uint32_t index)
{
    const struct sim_device *device = &sim->devices[index];

    for (uint32_t i = 0; i < device->n_flight; i++) {
        sim->n_lost++;
        DKV_LIST_EACH (node, &device->flight[i].batch->parts)
            part_lost(sim, DKV_LIST_OF(node, struct dkv_admission_part, node));
    }
}

void oracle_retired(struct sim *sim, uint32_t index)
{
    bool all = true;
    for (uint32_t d = 0; d < sim->config.n_devices; d++)
        all = all && sim->devices[d].retired;
    for (uint32_t i = 0; i < sim->n_open; i++) {
        struct sim_job *job = &sim->jobs[sim->open[i]];
        for (uint32_t p = 0; p < job->entry.n_parts; p++) {
            const uint32_t lane = sim_lane(sim, &job->parts[p]);
            if (job->seen[p].state == SIM_WAITING &&
                (lane == index || (all && lane == sim->config.n_devices)))
                oracle_reason(sim, job, DKV_E_UNAVAILABLE);
        }
    }
}

static void forget(struct sim *sim, struct sim_job *job)
{
    const uint32_t index = (uint32_t)(job - sim->jobs);

    for (uint32_t i = 0; i < sim->n_open; i++)
        if (sim->open[i] == index) {
            sim->open[i] = sim->open[--sim->n_open];
            break;
        }
    job->open = false;
    sim->open_bytes -= job->n_bytes;
    sim->clients[job->client].n_open--;
    sim->clients[job->client].open_bytes -= job->n_bytes;
}

static bool has(const struct sim_job *job, enum sim_part_state state)
{
    for (uint32_t p = 0; p < job->entry.n_parts; p++)
        if (job->seen[p].state == state)
            return true;
    return false;
}

void oracle_given_up(struct sim *sim, struct sim_job *job)
{
    if (!job->open || job->told)
        sim_fail(sim, "a job was given up %s", job->open ? "twice" : "after its end");
    if (!has(job, SIM_FLYING))
        sim_fail(sim, "a job was given up with nothing in flight");
    if (job->entry.status == DKV_OK || job->entry.status != job->reason)
        sim_fail(sim, "a job was given up as %s instead of %s",
                 dkv_status_info(job->entry.status)->name, dkv_status_info(job->reason)->name);
    job->told = true;
}

void oracle_ended(struct sim *sim, struct sim_job *job)
{
    const enum dkv_status status = job->entry.status;
    enum dkv_status expected = job->reason;

    if (!job->open)
        sim_fail(sim, "a job ended twice");
    for (uint32_t p = 0; p < job->entry.n_parts; p++) {
        if (job->seen[p].state == SIM_FLYING)
            sim_fail(sim, "a job ended with a part in flight");
        /* The queue drops what waits when a deadline comes; the oracle learns of it here. */
        if (expected == DKV_OK && job->deadline_us <= sim->now_us)
            expected = DKV_E_TIMEOUT;
        if (expected == DKV_OK && job->seen[p].state != SIM_RETURNED)
            sim_fail(sim, "a job ended with a part that never ran");
    }
    if (status != expected)
        sim_fail(sim, "a job ended %s instead of %s", dkv_status_info(status)->name,
                 dkv_status_info(expected)->name);
    sim_note(sim, "job %d ends: %s", (int)(job - sim->jobs), dkv_status_info(status)->name);
    sim->ended_ok += status == DKV_OK;
    sim->ended_timeout += status == DKV_E_TIMEOUT;
    sim->ended_cancelled += status == DKV_E_CANCELLED;
    sim->ended_failed += status != DKV_OK && status != DKV_E_TIMEOUT && status != DKV_E_CANCELLED;
    sim->bytes_ok += status == DKV_OK ? job->n_bytes : 0;
    forget(sim, job);
    oracle_refresh(sim);
}

/* --- between events ------------------------------------------------------------------------ */

/* Also of a job whose parts are all in flight, whose caller must learn of it at once. */
void oracle_expire(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->n_open; i++) {
        struct sim_job *job = &sim->jobs[sim->open[i]];
        if (job->deadline_us <= sim->now_us && (has(job, SIM_WAITING) || has(job, SIM_FLYING)))
            oracle_reason(sim, job, DKV_E_TIMEOUT);
    }
    oracle_refresh(sim);
}

static void check_open_jobs(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->n_open; i++) {
        struct sim_job *job = &sim->jobs[sim->open[i]];
        uint32_t n_waiting = 0, n_flying = 0;

        for (uint32_t p = 0; p < job->entry.n_parts; p++) {
            n_waiting += job->seen[p].state == SIM_WAITING;
            n_flying += job->seen[p].state == SIM_FLYING;
        }
        if (n_waiting + n_flying == 0)
            sim_fail(sim, "job %d is over and was not ended%s", (int)(job - sim->jobs),
                     job->reason == DKV_E_TIMEOUT ? ": its deadline has passed" : "");
        if (n_flying > 0 && job->told != (job->reason != DKV_OK))
            sim_fail(sim, "job %d has failed with parts in flight, and nobody was told",
                     (int)(job - sim->jobs));
    }
}

static void check_work(struct sim *sim)
{
    for (uint32_t d = 0; d < sim->config.n_devices; d++) {
        bool waits = replay_waits(sim, d);
        for (uint32_t l = 0; l < sim->config.n_levels; l++)
            waits = waits || level_waits(sim, l, d);
        if (waits && sim->devices[d].up && sim->devices[d].n_flight == 0)
            sim_fail(sim, "device %u idles beside waiting work", d);
    }
}

static void check_bounds(struct sim *sim)
{
    if (sim->n_open > sim->config.max_entries || sim->open_bytes > sim->config.max_bytes)
        sim_fail(sim, "%u entries, %llu bytes are open", sim->n_open,
                 (unsigned long long)sim->open_bytes);
    for (uint32_t c = 0; c < sim->scenario.n_clients; c++)
        if (sim->clients[c].n_open > sim->config.client_max_entries ||
            sim->clients[c].open_bytes > sim->config.client_max_bytes)
            sim_fail(sim, "client %u has %u entries open", c, sim->clients[c].n_open);
}

static void check_fairness(struct sim *sim, uint32_t l, uint32_t d)
{
    const int64_t range = (int64_t)sim->config.quantum_bytes + largest_debt(sim);

    for (uint32_t a = 0; a < sim->scenario.n_clients; a++) {
        const int64_t deficit = sim->clients[a].queue_side.flows[l].turns[d].deficit;
        if (deficit > (int64_t)sim->config.quantum_bytes || deficit < -largest_debt(sim))
            sim_fail(sim, "client %u has a deficit of %lld", a, (long long)deficit);
        for (uint32_t b = 0; b < sim->scenario.n_clients; b++) {
            if (!sim->waits[b][l][d])
                continue;
            const int64_t more = sim->served[a][l][d] - sim->served[b][l][d] -
                                 sim->base[l][d][a][b];
            if (more > 2 * range)
                sim_fail(sim, "client %u got %lld bytes more than client %u, which waited", a,
                         (long long)more, b);
        }
    }
}

/* The loop may sleep until wakeup_us: no deadline and no end of a delay may come before. */
static void check_wakeup(struct sim *sim)
{
    const uint64_t wakeup_us = dkv_admission_wakeup_us(sim->queue, sim->now_us);

    if (wakeup_us <= sim->now_us)
        sim_fail(sim, "the queue wants to be called again at once");
    for (uint32_t i = 0; i < sim->n_open; i++) {
        const struct sim_job *job = &sim->jobs[sim->open[i]];
        if (job->reason == DKV_OK && job->deadline_us < wakeup_us)
            sim_fail(sim, "the queue would sleep past a deadline");
    }
}

static void check_recount(struct sim *sim)
{
    struct dkv_error err;
    if (dkv_admission_recount(sim->queue, &err) != DKV_OK)
        sim_fail(sim, "recount: %s", err.text);
}

void oracle_step(struct sim *sim)
{
    check_recount(sim);
    oracle_expire(sim);
    check_open_jobs(sim);
    check_work(sim);
    check_bounds(sim);
    check_wakeup(sim);
    for (uint32_t l = 0; l < sim->config.n_levels; l++)
        for (uint32_t d = 0; d < sim->config.n_devices; d++)
            check_fairness(sim, l, d);
}

static void same(struct sim *sim, const char *what, uint64_t queue_says, uint64_t seen)
{
    if (queue_says != seen)
        sim_fail(sim, "%s: the queue says %llu, seen %llu", what, (unsigned long long)queue_says,
                 (unsigned long long)seen);
}

void oracle_end(struct sim *sim)
{
    struct dkv_admission_stats stats;
    dkv_admission_stats(sim->queue, sim->now_us, &stats);

    same(sim, "open jobs at the end", stats.n_open, 0);
    same(sim, "open jobs at the end", sim->n_open, 0);
    same(sim, "open bytes at the end", stats.open_bytes, 0);
    same(sim, "ended, not handed out", stats.n_done, 0);
    for (uint32_t l = 0; l < sim->config.n_levels; l++) {
        same(sim, "waiting at the end", stats.level[l].n_waiting, 0);
        same(sim, "bytes waiting at the end", stats.level[l].waiting_bytes, 0);
        same(sim, "age at the end", stats.level[l].oldest_us, 0);
    }
    for (uint32_t v = 0; v < DKV_ADMISSION_VERDICTS; v++)
        same(sim, dkv_admission_verdict_info(v)->name, stats.verdicts[v], sim->verdicts[v]);
    same(sim, "ended ok", stats.ended_ok, sim->ended_ok);
    same(sim, "ended by timeout", stats.ended_timeout, sim->ended_timeout);
    same(sim, "cancelled", stats.ended_cancelled, sim->ended_cancelled);
    same(sim, "failed", stats.ended_failed, sim->ended_failed);
    same(sim, "accepted = ended", stats.verdicts[DKV_ADMISSION_ACCEPTED],
         stats.ended_ok + stats.ended_timeout + stats.ended_cancelled + stats.ended_failed);
    same(sim, "batches", stats.batches, sim->n_batches);
    same(sim, "parts launched", stats.batch_parts, sim->n_parts_launched);
    same(sim, "bytes launched", stats.batch_bytes, sim->bytes_launched);
    same(sim, "batches lost", stats.batches_lost, sim->n_lost);
    same(sim, "parts replayed", stats.parts_replayed, sim->n_replayed);
}
