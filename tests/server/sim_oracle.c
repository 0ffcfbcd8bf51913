/* What must hold, worked out from what was seen and not from the queue's own figures.
 *
 * Bounds that are proved, not tuned:
 *
 *   levels   A level with work that got nothing from aging_batches batches of a device is overdue,
 *            and of several overdue ones the longest waiting goes first. One that was just served
 *            needs aging_batches >= n_levels more to be overdue again, so at most n_levels - 1 go
 *            before it: it is passed over at most aging_batches + n_levels - 1 times in a row.
 *
 *   turns    In one ring a flow's debt is at most D = batch_bytes + the largest cost. It has credit
 *            after E = D / quantum + 1 rounds. In a round every other flow is paid one quantum, and
 *            each turn uses up at least the smallest cost c, so a round is at most
 *            n * ceil(quantum / c) turns long; once in credit it is served within n turns.
 *
 *   service  While a flow has work for a device all the time, nobody is paid more than it there, so
 *            nobody is served more than it by more than the range of a deficit, twice.
 */
#include "tests/server/sim_books.h"

#include <string.h>

static void set_base(struct sim *sim, uint32_t level, uint32_t device, uint32_t a, uint32_t b)
{
    sim->base[level][device][a][b] = sim->served[a][level][device] - sim->served[b][level][device];
}

/* For a client that begins to wait, the comparison of service starts anew. */
static void note_waiting(struct sim *sim, uint32_t level, uint32_t device)
{
    for (uint32_t b = 0; b < sim->scenario.n_clients; b++) {
        const bool waits = flow_waits(sim, b, level, device);
        if (waits && !sim->waits[b][level][device]) {
            sim->turns_waited[b][level][device] = 0;
            for (uint32_t a = 0; a < sim->scenario.n_clients; a++)
                set_base(sim, level, device, a, b);
        }
        sim->waits[b][level][device] = waits;
    }
}

void oracle_new_client(struct sim *sim, uint32_t client)
{
    for (uint32_t l = 0; l < sim->config.n_levels; l++)
        for (uint32_t d = 0; d < sim->config.n_devices; d++)
            for (uint32_t b = 0; b < sim->scenario.n_clients; b++)
                set_base(sim, l, d, client, b);
}

void oracle_refresh(struct sim *sim)
{
    memset(sim->waiting, 0, sizeof(sim->waiting));
    memset(sim->replays, 0, sizeof(sim->replays));
    for (uint32_t i = 0; i < sim->n_open; i++) {
        const struct sim_job *job = &sim->jobs[sim->open[i]];
        for (uint32_t p = 0; p < job->entry.n_parts; p++) {
            const uint32_t lane = sim_lane(sim, &job->parts[p]);
            if (job->seen[p].state != SIM_WAITING)
                continue;
            if (job->seen[p].n_launches > 0)
                sim->replays[lane]++;
            else
                sim->waiting[job->client][job->level][lane]++;
        }
    }
    for (uint32_t l = 0; l < sim->config.n_levels; l++)
        for (uint32_t d = 0; d < sim->config.n_devices; d++)
            note_waiting(sim, l, d);
}

/* --- offers -------------------------------------------------------------------------------- */

static bool device_up(const struct sim *sim, uint32_t device)
{
    if (device != DKV_ADMISSION_ANY_DEVICE)
        return sim->devices[device].up;
    for (uint32_t d = 0; d < sim->config.n_devices; d++)
        if (sim->devices[d].up)
            return true;
    return false;
}

static enum dkv_admission_verdict expected_verdict(const struct sim *sim, const struct sim_job *job)
{
    const struct sim_client *client = &sim->clients[job->client];
    const struct dkv_admission_config *c = &sim->config;

    if (job->n_bytes > c->client_max_bytes)
        return DKV_ADMISSION_TOO_LARGE;
    if (sim->draining)
        return DKV_ADMISSION_DRAINING;
    if (job->deadline_us <= sim->now_us)
        return DKV_ADMISSION_EXPIRED;
    for (uint32_t p = 0; p < job->entry.n_parts; p++)
        if (!device_up(sim, job->parts[p].device))
            return DKV_ADMISSION_NO_DEVICE;
    if (client->n_open + 1 > c->client_max_entries ||
        client->open_bytes + job->n_bytes > c->client_max_bytes)
        return DKV_ADMISSION_QUOTA;
    if (sim->n_open + 1 > c->max_entries || sim->open_bytes + job->n_bytes > c->max_bytes)
        return DKV_ADMISSION_FULL;
    return DKV_ADMISSION_ACCEPTED;
}

static bool degradable(enum dkv_admission_verdict verdict)
{
    return verdict == DKV_ADMISSION_QUOTA || verdict == DKV_ADMISSION_FULL ||
           verdict == DKV_ADMISSION_NO_DEVICE;
}

static void work_out_job(struct sim *sim, struct sim_job *job)
{
    const struct dkv_admission_entry *entry = &job->entry;
    const uint32_t priority = entry->priority != 0 ? entry->priority : sim->config.default_level;
    uint64_t timeout_us = entry->timeout_us;

    if (sim->config.max_timeout_us > 0 &&
        (timeout_us == 0 || timeout_us > sim->config.max_timeout_us))
        timeout_us = sim->config.max_timeout_us;
    job->deadline_us = DKV_ADMISSION_NEVER;
    if (timeout_us > 0)
        job->deadline_us = (entry->arrival_us > 0 ? entry->arrival_us : sim->now_us) + timeout_us;
    job->level = (priority > sim->config.n_levels ? sim->config.n_levels : priority) - 1;
    job->n_bytes = 0;
    for (uint32_t p = 0; p < entry->n_parts; p++)
        job->n_bytes += job->parts[p].n_bytes;
}

static void take_in(struct sim *sim, struct sim_job *job)
{
    job->open = true;
    job->reason = DKV_OK;
    job->told = false;
    sim->open[sim->n_open++] = (uint32_t)(job - sim->jobs);
    sim->open_bytes += job->n_bytes;
    sim->clients[job->client].n_open++;
    sim->clients[job->client].open_bytes += job->n_bytes;
    for (uint32_t p = 0; p < job->entry.n_parts; p++)
        job->seen[p] = (struct sim_part){.state = SIM_WAITING, .seq = sim->next_seq++};
    for (uint32_t p = 0; p < job->entry.n_parts; p++)
        if (cost_of(sim, job->parts[p].n_bytes) > sim->largest_cost)
            sim->largest_cost = cost_of(sim, job->parts[p].n_bytes);
    oracle_refresh(sim);
}

void oracle_offer(struct sim *sim, struct sim_job *job, enum dkv_admission_verdict verdict,
                  uint64_t retry_us)
{
    work_out_job(sim, job);
    const enum dkv_admission_verdict expected = expected_verdict(sim, job);
    sim->verdicts[verdict]++;

    /* A refusal as late is the queue's own prediction: it needs a deadline and work ahead. */
    const bool may_be_late = expected == DKV_ADMISSION_ACCEPTED && sim->n_open > 0 &&
                             job->deadline_us != DKV_ADMISSION_NEVER;
    bool right = verdict == expected || (verdict == DKV_ADMISSION_LATE && may_be_late);
    if (job->entry.degrade) {
        right = degradable(expected)
                    ? verdict == DKV_ADMISSION_DEGRADED
                    : verdict == expected || (verdict == DKV_ADMISSION_DEGRADED && may_be_late);
    }
    if (!right)
        sim_fail(sim, "offer: verdict %s, expected %s", dkv_admission_verdict_info(verdict)->name,
                 dkv_admission_verdict_info(expected)->name);
    if (verdict >= DKV_ADMISSION_FULL && verdict <= DKV_ADMISSION_LATE &&
        (retry_us < 1000 || retry_us > 60000000))
        sim_fail(sim, "retry after %llu us", (unsigned long long)retry_us);
    if (verdict == DKV_ADMISSION_ACCEPTED)
        take_in(sim, job);
}

/* --- batches ------------------------------------------------------------------------------- */

static void check_part(struct sim *sim, const struct dkv_admission_batch *batch,
                       const struct dkv_admission_part *part)
{
    struct sim_job *job = job_of(part);
    struct sim_part *seen = seen_of(part);

    if (!job->open || seen->state != SIM_WAITING)
        sim_fail(sim, "launched a part that does not wait (state %d)", (int)seen->state);
    if (job->reason != DKV_OK)
        sim_fail(sim, "launched a part of a job that was given up");
    if (job->deadline_us <= sim->now_us)
        sim_fail(sim, "launched a part after its deadline");
    if (!can_run(sim, part, batch->device))
        sim_fail(sim, "device %u was given the memory of %u", batch->device, part->device);
    if (part->key != batch->key)
        sim_fail(sim, "a batch of two keys");
    if ((seen->n_launches > 0) != batch->solo)
        sim_fail(sim, "launch %u of a part in a batch that is %s a replay", seen->n_launches + 1,
                 batch->solo ? "" : "not");
    if (seen->n_launches >= 2)
        sim_fail(sim, "launched a part a third time");
}

/* The older one is looked for in its lane up to LOOKAHEAD parts deep. */
static bool in_sight(const struct sim *sim, const struct sim_job *job, uint32_t p, uint32_t device)
{
    const uint32_t lane = sim_lane(sim, &job->parts[p]);
    return can_run(sim, &job->parts[p], device) &&
           sim->waiting[job->client][job->level][lane] <= 16;
}

/* Among the parts of one client, level and key that a device may run, the oldest goes first. */
static void check_order(struct sim *sim, const struct dkv_admission_part *part, uint32_t device)
{
    const struct sim_job *job = job_of(part);
    const uint64_t seq = seen_of(part)->seq;

    for (uint32_t i = 0; i < sim->n_open; i++) {
        const struct sim_job *other = &sim->jobs[sim->open[i]];
        if (other->client != job->client || other->level != job->level)
            continue;
        for (uint32_t p = 0; p < other->entry.n_parts; p++)
            if (other->seen[p].state == SIM_WAITING && other->seen[p].n_launches == 0 &&
                other->seen[p].seq < seq && other->parts[p].key == part->key &&
                (other->parts[p].device == part->device || in_sight(sim, other, p, device)))
                sim_fail(sim, "a part overtook an older one of its client");
    }
}

static void check_limits(struct sim *sim, const struct dkv_admission_batch *batch)
{
    uint64_t n_parts = 0, n_blocks = 0, n_tokens = 0, n_bytes = 0;

    DKV_LIST_EACH (node, &batch->parts) {
        const struct dkv_admission_part *part = DKV_LIST_OF(node, struct dkv_admission_part, node);
        n_parts++;
        n_blocks += part->n_blocks;
        n_tokens += part->n_tokens;
        n_bytes += part->n_bytes;
    }
    if (n_parts == 0)
        sim_fail(sim, "an empty batch");
    if (n_parts != batch->n_parts || n_blocks != batch->n_blocks || n_tokens != batch->n_tokens ||
        n_bytes != batch->n_bytes)
        sim_fail(sim, "a batch's sums are wrong");
    if (n_parts > 1 && (batch->solo || n_blocks > sim->config.batch_blocks ||
                        n_tokens > sim->config.batch_tokens || n_bytes > sim->config.batch_bytes))
        sim_fail(sim, "a batch of %llu parts over a limit", (unsigned long long)n_parts);
}

/* Ended in the queue, and only not handed out yet. */
static bool is_over(const struct sim_job *job)
{
    for (uint32_t p = 0; p < job->entry.n_parts; p++)
        if (job->seen[p].state == SIM_WAITING || job->seen[p].state == SIM_FLYING)
            return false;
    return true;
}

static uint32_t clients_on(const struct sim *sim, uint32_t device)
{
    uint32_t n = 0;
    for (uint32_t c = 0; c < sim->scenario.n_clients; c++) {
        bool own = false, any = false;
        for (uint32_t i = 0; i < sim->n_open; i++) {
            const struct sim_job *job = &sim->jobs[sim->open[i]];
            for (uint32_t p = 0; job->client == c && !is_over(job) && p < job->entry.n_parts; p++) {
                own = own || job->parts[p].device == device;
                any = any || job->parts[p].device == DKV_ADMISSION_ANY_DEVICE;
            }
        }
        n += own + any;
    }
    return n;
}

/* While others have work open on the device, nobody gets more than a share, or one part. */
static void check_shares(struct sim *sim, const struct dkv_admission_batch *batch)
{
    const uint32_t n_clients = clients_on(sim, batch->device);
    struct {
        uint64_t n_parts, n_blocks, n_tokens, n_bytes;
    } got[SIM_CLIENTS][SIM_LEVELS];

    memset(got, 0, sizeof(got));
    DKV_LIST_EACH (node, &batch->parts) {
        const struct dkv_admission_part *part = DKV_LIST_OF(node, struct dkv_admission_part, node);
        const struct sim_job *job = job_of(part);
        got[job->client][job->level].n_parts++;
        got[job->client][job->level].n_blocks += part->n_blocks;
        got[job->client][job->level].n_tokens += part->n_tokens;
        got[job->client][job->level].n_bytes += part->n_bytes;
    }
    for (uint32_t c = 0; c < sim->scenario.n_clients; c++)
        for (uint32_t l = 0; l < sim->config.n_levels; l++)
            if (got[c][l].n_parts > 1 &&
                (got[c][l].n_blocks > sim->config.batch_blocks / n_clients ||
                 got[c][l].n_tokens > sim->config.batch_tokens / n_clients ||
                 got[c][l].n_bytes > sim->config.batch_bytes / n_clients))
                sim_fail(sim, "client %u got more than its share of 1/%u", c, n_clients);
}

static bool device_has_solo(const struct sim_device *device)
{
    return device->n_flight > 0 && device->flight[0].solo;
}

/* A busy device takes a batch early only if one could be full. */
static void check_delay(struct sim *sim, uint32_t device)
{
    uint64_t oldest_us = DKV_ADMISSION_NEVER, n_blocks = 0, n_tokens = 0, n_bytes = 0;

    for (uint32_t i = 0; i < sim->n_open; i++) {
        const struct sim_job *job = &sim->jobs[sim->open[i]];
        for (uint32_t p = 0; p < job->entry.n_parts; p++) {
            if (job->seen[p].state != SIM_WAITING || !can_run(sim, &job->parts[p], device))
                continue;
            n_blocks += job->parts[p].n_blocks;
            n_tokens += job->parts[p].n_tokens;
            n_bytes += job->parts[p].n_bytes;
            if (job->entry.offered_us < oldest_us)
                oldest_us = job->entry.offered_us;
        }
    }
    if (sim->now_us < oldest_us + sim->config.max_queue_delay_us &&
        n_blocks < sim->config.batch_blocks && n_tokens < sim->config.batch_tokens &&
        n_bytes < sim->config.batch_bytes)
        sim_fail(sim, "a busy device did not wait for a fuller batch");
}

static void check_device(struct sim *sim, const struct dkv_admission_batch *batch)
{
    const struct sim_device *device = &sim->devices[batch->device];

    if (!device->up)
        sim_fail(sim, "launched on device %u, which is down", batch->device);
    if (device->n_flight >= sim->config.max_flight)
        sim_fail(sim, "device %u has %u batches in flight", batch->device, device->n_flight);
    if (device_has_solo(device) || (batch->solo && device->n_flight > 0))
        sim_fail(sim, "a replay is not alone on device %u", batch->device);
    if (!batch->solo && replay_waits(sim, batch->device))
        sim_fail(sim, "new work went before a replay");
    for (uint32_t d = 0; d < sim->config.n_devices; d++)
        if (sim->devices[d].up && sim->devices[d].n_flight == 0 && device->n_flight > 0 &&
            can_run(sim,
                    dkv_list_first(&batch->parts) == NULL
                        ? NULL
                        : DKV_LIST_OF(batch->parts.next, struct dkv_admission_part, node),
                    d))
            sim_fail(sim, "busy device %u was served before idle device %u", batch->device, d);
    if (device->n_flight > 0)
        check_delay(sim, batch->device);
}

/* The head's level is the best one with work, or the one that is overdue longest. */
static void check_level(struct sim *sim, const struct dkv_admission_batch *batch, uint32_t head)
{
    const uint32_t d = batch->device;
    uint32_t best = UINT32_MAX, overdue = UINT32_MAX;

    for (uint32_t l = 0; l < sim->config.n_levels; l++) {
        if (!level_waits(sim, l, d))
            continue;
        if (best == UINT32_MAX)
            best = l;
        if (sim->passed[l][d] >= sim->config.aging_batches &&
            (overdue == UINT32_MAX || sim->passed[l][d] > sim->passed[overdue][d]))
            overdue = l;
    }
    if (head != (overdue != UINT32_MAX ? overdue : best))
        sim_fail(sim, "level %u was served before level %u", head + 1,
                 (overdue != UINT32_MAX ? overdue : best) + 1);
}

static void age_levels(struct sim *sim, const struct dkv_admission_batch *batch)
{
    const uint32_t d = batch->device;
    bool served[SIM_LEVELS] = {false};

    DKV_LIST_EACH (node, &batch->parts)
        served[job_of(DKV_LIST_OF(node, struct dkv_admission_part, node))->level] = true;
    for (uint32_t l = 0; l < sim->config.n_levels; l++) {
        sim->passed[l][d] = !served[l] && level_waits(sim, l, d) ? sim->passed[l][d] + 1 : 0;
        if (sim->passed[l][d] >= sim->config.aging_batches + sim->config.n_levels)
            sim_fail(sim, "level %u starves: passed over %u times", l + 1, sim->passed[l][d]);
    }
}

static void age_turns(struct sim *sim, const struct dkv_admission_batch *batch, uint32_t head)
{
    const uint32_t d = batch->device, n = sim->scenario.n_clients;
    const uint64_t quantum = sim->config.quantum_bytes;
    const uint64_t rounds = (uint64_t)largest_debt(sim) / quantum + 2;
    const uint64_t bound = rounds * n * (quantum / (quantum / 16 + 2) + 1) + n;
    bool served[SIM_CLIENTS] = {false};

    DKV_LIST_EACH (node, &batch->parts) {
        const struct sim_job *job = job_of(DKV_LIST_OF(node, struct dkv_admission_part, node));
        served[job->client] = served[job->client] || job->level == head;
    }
    for (uint32_t c = 0; c < n; c++) {
        uint32_t *waited = &sim->turns_waited[c][head][d];
        *waited = served[c] || !flow_waits(sim, c, head, d) ? 0 : *waited + 1;
        if (*waited > bound)
            sim_fail(sim, "client %u starves: %u turns went by", c, *waited);
    }
}

void oracle_batch(struct sim *sim, const struct dkv_admission_batch *batch)
{
    struct dkv_list *first = dkv_list_first(&batch->parts);
    uint32_t head = 0;

    check_limits(sim, batch);
    check_device(sim, batch);
    if (!batch->solo) {
        head = job_of(DKV_LIST_OF(first, struct dkv_admission_part, node))->level;
        check_level(sim, batch, head);
        check_shares(sim, batch);
    }
    DKV_LIST_EACH (node, &batch->parts) {
        const struct dkv_admission_part *part = DKV_LIST_OF(node, struct dkv_admission_part, node);
        check_part(sim, batch, part);
        if (!batch->solo) {
            check_order(sim, part, batch->device);
            sim->served[job_of(part)->client][job_of(part)->level][batch->device] += cost_of(
                sim, part->n_bytes);
        }
        seen_of(part)->state = SIM_FLYING;
        seen_of(part)->n_launches++;
        sim->n_parts_launched++;
        sim->bytes_launched += part->n_bytes;
    }
    sim->n_batches++;
    oracle_refresh(sim);
    if (!batch->solo) {
        age_levels(sim, batch);
        age_turns(sim, batch, head);
    }
}

void oracle_completed(struct sim *sim, const struct dkv_admission_batch *batch)
{
    DKV_LIST_EACH (node, &batch->parts) {
        struct sim_part *seen = seen_of(DKV_LIST_OF(node, struct dkv_admission_part, node));
        if (seen->state != SIM_FLYING)
            sim_fail(sim, "a part came back that was not in flight");
        seen->state = SIM_RETURNED;
    }
}
