/* Entries: accepted, failed, ended; and the devices they run on.
 *
 * An entry is open from ACCEPTED until finish(), which is the only place that ends one: it runs
 * when the entry has neither a waiting part nor one in flight, and puts the entry on the list of
 * done ones. The queue never calls back, so that a caller that answers, cancels or offers while
 * it handles an ended entry cannot find the queue half changed.
 *
 * A reason to fail (deadline, cancel, lost twice) takes the waiting parts away at once and leaves
 * the parts in flight: their memory is being read, so the entry ends when they are back, and is on
 * the list of those given up until then. The first reason is the one that counts.
 *
 * Bounds are on what is open, not on what waits: work in flight still holds its memory, and the
 * parts of a lost batch can come back to the queue without breaking a bound.
 */
#include "server/admission_priv.h"

#include <stdlib.h>

/* --- life cycle of the queue and of clients ------------------------------------------------ */

static void init_lists(struct dkv_admission *queue)
{
    dkv_list_init(&queue->clients);
    dkv_list_init(&queue->given_up);
    dkv_list_init(&queue->done);
    dkv_list_init(&queue->free_batches);
    for (uint32_t i = 0; i < DKV_ADMISSION_LEVELS_MAX; i++)
        for (uint32_t d = 0; d < DKV_ADMISSION_DEVICES_MAX; d++)
            dkv_list_init(&queue->level[i].ring[d]);
    for (uint32_t i = 0; i < DKV_ADMISSION_LANES_MAX; i++) {
        dkv_list_init(&queue->lane[i].ages);
        dkv_list_init(&queue->lane[i].replays);
    }
    for (uint32_t i = 0; i < DKV_ADMISSION_DEVICES_MAX; i++)
        dkv_list_init(&queue->device[i].batches);
}

enum dkv_status dkv_admission_new(const struct dkv_admission_config *config,
                                  struct dkv_admission **queue_out, struct dkv_error *err)
{
    enum dkv_status status = dkv_admission_config_check(config, err);
    if (status != DKV_OK)
        return status;

    const uint32_t n_batches = config->n_devices * config->max_flight;
    struct dkv_admission *queue = calloc(1, sizeof(*queue));
    if (queue != NULL) {
        queue->config = *config;
        init_lists(queue);
        queue->batches = calloc(n_batches, sizeof(*queue->batches));
        queue->heap = calloc(config->max_entries, sizeof(*queue->heap));
        queue->heap_entries = config->max_entries;
    }
    if (queue == NULL || queue->batches == NULL || queue->heap == NULL) {
        dkv_admission_free(queue);
        return dkv_error_set(err, DKV_E_NOMEM, "admission: no memory for %u entries",
                             config->max_entries);
    }
    for (uint32_t i = 0; i < n_batches; i++)
        dkv_list_push_back(&queue->free_batches, &queue->batches[i].node);
    *queue_out = queue;
    return DKV_OK;
}

void dkv_admission_free(struct dkv_admission *queue)
{
    if (queue == NULL)
        return;
    assert(queue->n_open == 0 && queue->n_done == 0 && queue->n_clients == 0);
    free(queue->heap);
    free(queue->batches);
    free(queue);
}

void dkv_admission_client_init(struct dkv_admission *queue, struct dkv_admission_client *client)
{
    *client = (struct dkv_admission_client){.n_open = 0};
    dkv_list_init(&client->open);
    for (uint32_t i = 0; i < DKV_ADMISSION_LEVELS_MAX; i++)
        dkv_admission_flow_init(&client->flows[i]);
    dkv_list_push_back(&queue->clients, &client->node);
    queue->n_clients++;
}

void dkv_admission_client_fini(struct dkv_admission *queue, struct dkv_admission_client *client)
{
    assert(client->n_open == 0);
    for (uint32_t i = 0; i < DKV_ADMISSION_LEVELS_MAX; i++)
        dkv_admission_flow_fini(&client->flows[i]);
    dkv_list_remove(&client->node);
    queue->n_clients--;
}

/* --- accounting of open entries ------------------------------------------------------------ */

static void open_lane(struct dkv_admission *queue, struct dkv_admission_client *client,
                      uint32_t lane)
{
    if (client->lane_open[lane]++ == 0)
        queue->lane[lane].n_clients++;
}

static void close_lane(struct dkv_admission *queue, struct dkv_admission_client *client,
                       uint32_t lane)
{
    if (--client->lane_open[lane] == 0)
        queue->lane[lane].n_clients--;
}

static void open_entry(struct dkv_admission *queue, struct dkv_admission_client *client,
                       struct dkv_admission_entry *entry)
{
    if (client->n_open++ == 0)
        queue->n_active_clients++;
    client->open_bytes += entry->n_bytes;
    queue->n_open++;
    queue->open_bytes += entry->n_bytes;
    for (uint32_t i = 0; i < entry->n_parts; i++)
        open_lane(queue, client, entry->parts[i].lane);
    dkv_list_push_back(&client->open, &entry->node);
}

static void close_entry(struct dkv_admission *queue, struct dkv_admission_entry *entry)
{
    struct dkv_admission_client *client = entry->client;

    if (--client->n_open == 0)
        queue->n_active_clients--;
    client->open_bytes -= entry->n_bytes;
    queue->n_open--;
    queue->open_bytes -= entry->n_bytes;
    for (uint32_t i = 0; i < entry->n_parts; i++)
        close_lane(queue, client, entry->parts[i].lane);
    dkv_list_remove(&entry->node);
}

/* The part waits: in its flow, or among the replays if it was launched before. */
static void part_wait(struct dkv_admission *queue, struct dkv_admission_part *part)
{
    struct dkv_admission_entry *entry = part->entry;

    if (part->n_launches == 0)
        dkv_admission_fair_push(queue, part);
    else
        dkv_list_push_back(&queue->lane[part->lane].replays, &part->node);
    part->waiting = true;
    entry->n_waiting++;
    queue->level[entry->level].n_waiting++;
    queue->level[entry->level].waiting_bytes += part->n_bytes;
    entry->client->waiting_bytes += part->n_bytes;
}

void dkv_admission_part_unwait(struct dkv_admission *queue, struct dkv_admission_part *part)
{
    struct dkv_admission_entry *entry = part->entry;

    if (part->n_launches == 0)
        dkv_admission_fair_remove(queue, part);
    else
        dkv_list_remove(&part->node);
    part->waiting = false;
    entry->n_waiting--;
    queue->level[entry->level].n_waiting--;
    queue->level[entry->level].waiting_bytes -= part->n_bytes;
    entry->client->waiting_bytes -= part->n_bytes;
}

/* --- how an entry ends --------------------------------------------------------------------- */

static void count_end(struct dkv_admission_stats *counters, enum dkv_status status)
{
    switch (status) {
    case DKV_OK: counters->ended_ok++; break;
    case DKV_E_TIMEOUT: counters->ended_timeout++; break;
    case DKV_E_CANCELLED: counters->ended_cancelled++; break;
    default: counters->ended_failed++; break;
    }
}

static void finish(struct dkv_admission *queue, struct dkv_admission_entry *entry, uint64_t now_us)
{
    if (entry->n_waiting > 0 || entry->n_in_flight > 0)
        return;
    if (entry->status == DKV_OK && dkv_admission_expired(entry, now_us))
        entry->status = DKV_E_TIMEOUT;
    entry->done_us = now_us;
    count_end(&queue->counters, entry->status);
    dkv_admission_heap_remove(queue, entry);
    dkv_list_remove(&entry->given_up_node);
    close_entry(queue, entry);
    dkv_list_push_back(&queue->done, &entry->node);
    queue->n_done++;
}

/* An entry that has not ended must not end OK any more. */
static void give_up(struct dkv_admission *queue, struct dkv_admission_entry *entry,
                    enum dkv_status status, uint64_t now_us)
{
    assert(status != DKV_OK);
    if (entry->status == DKV_OK) {
        entry->status = status;
        dkv_admission_heap_remove(queue, entry);
        dkv_list_push_back(&queue->given_up, &entry->given_up_node);
    }
    for (uint32_t i = 0; entry->n_waiting > 0; i++)
        if (entry->parts[i].waiting)
            dkv_admission_part_unwait(queue, &entry->parts[i]);
    finish(queue, entry, now_us);
}

void dkv_admission_fail(struct dkv_admission *queue, struct dkv_admission_entry *entry,
                        enum dkv_status status, uint64_t now_us)
{
    if (entry->n_waiting > 0 || entry->n_in_flight > 0)
        give_up(queue, entry, status, now_us);
}

void dkv_admission_client_cancel(struct dkv_admission *queue, struct dkv_admission_client *client,
                                 uint64_t now_us)
{
    DKV_LIST_EACH_SAFE (node, &client->open)
        dkv_admission_fail(queue, DKV_LIST_OF(node, struct dkv_admission_entry, node),
                           DKV_E_CANCELLED, now_us);
}

void dkv_admission_fail_all(struct dkv_admission *queue, enum dkv_status status, uint64_t now_us)
{
    DKV_LIST_EACH (client_node, &queue->clients) {
        struct dkv_admission_client *client = DKV_LIST_OF(client_node, struct dkv_admission_client,
                                                          node);
        DKV_LIST_EACH_SAFE (node, &client->open)
            dkv_admission_fail(queue, DKV_LIST_OF(node, struct dkv_admission_entry, node), status,
                               now_us);
    }
}

void dkv_admission_expire(struct dkv_admission *queue, uint64_t now_us)
{
    while (queue->n_heap > 0 && dkv_admission_expired(queue->heap[0], now_us))
        dkv_admission_fail(queue, queue->heap[0], DKV_E_TIMEOUT, now_us);
}

struct dkv_admission_entry *dkv_admission_pop_given_up(struct dkv_admission *queue)
{
    struct dkv_list *node = dkv_list_first(&queue->given_up);
    if (node == NULL)
        return NULL;
    dkv_list_remove(node);
    return DKV_LIST_OF(node, struct dkv_admission_entry, given_up_node);
}

struct dkv_admission_entry *dkv_admission_pop_done(struct dkv_admission *queue)
{
    struct dkv_list *node = dkv_list_first(&queue->done);
    if (node == NULL)
        return NULL;
    dkv_list_remove(node);
    queue->n_done--;
    return DKV_LIST_OF(node, struct dkv_admission_entry, node);
}

/* --- offers -------------------------------------------------------------------------------- */

static void prepare(struct dkv_admission *queue, struct dkv_admission_client *client,
                    struct dkv_admission_entry *entry, uint64_t now_us)
{
    const uint32_t n_levels = queue->config.n_levels;
    uint32_t priority = entry->priority != 0 ? entry->priority : queue->config.default_level;

    entry->level = (priority < n_levels ? priority : n_levels) - 1;
    entry->client = client;
    entry->status = DKV_OK;
    entry->offered_us = now_us;
    entry->launched_us = 0;
    entry->done_us = 0;
    entry->deadline_us = dkv_admission_deadline(queue, entry, now_us);
    entry->heap_index = DKV_ADMISSION_NO_INDEX;
    entry->n_waiting = 0;
    entry->n_in_flight = 0;
    dkv_list_init(&entry->node);
    dkv_list_init(&entry->given_up_node);
}

static void accept(struct dkv_admission *queue, struct dkv_admission_entry *entry)
{
    for (uint32_t i = 0; i < entry->n_parts; i++) {
        struct dkv_admission_part *part = &entry->parts[i];
        assert(part->n_blocks > 0 && part->n_bytes > 0);
        part->entry = entry;
        part->lane = part->device == DKV_ADMISSION_ANY_DEVICE ? dkv_admission_any_lane(queue)
                                                              : part->device;
        part->seq = queue->next_seq++;
        part->n_launches = 0;
        dkv_list_init(&part->node);
        dkv_list_init(&part->age_node);
    }
    open_entry(queue, entry->client, entry);
    dkv_admission_heap_push(queue, entry);
    for (uint32_t i = 0; i < entry->n_parts; i++)
        part_wait(queue, &entry->parts[i]);
}

enum dkv_admission_verdict dkv_admission_offer(struct dkv_admission *queue,
                                               struct dkv_admission_client *client,
                                               struct dkv_admission_entry *entry, uint64_t now_us,
                                               uint64_t *retry_us_out, struct dkv_error *err)
{
    enum dkv_admission_verdict verdict = DKV_ADMISSION_TOO_LARGE;

    assert(entry->n_parts > 0);
    prepare(queue, client, entry, now_us);
    if (dkv_admission_entry_bytes(entry, &entry->n_bytes))
        verdict = dkv_admission_judge(queue, client, entry, now_us);
    else
        entry->n_bytes = UINT64_MAX;
    if (entry->degrade && dkv_admission_may_degrade(verdict))
        verdict = DKV_ADMISSION_DEGRADED;
    queue->counters.verdicts[verdict]++;

    if (verdict == DKV_ADMISSION_ACCEPTED) {
        accept(queue, entry);
        return verdict;
    }
    dkv_admission_explain(queue, client, entry, verdict, err);
    if (retry_us_out != NULL)
        *retry_us_out = dkv_admission_retry_us(queue, client, entry, verdict, now_us);
    return verdict;
}

void dkv_admission_drain(struct dkv_admission *queue)
{
    queue->draining = true;
}

/* --- devices ------------------------------------------------------------------------------- */

static void close_batch(struct dkv_admission *queue, struct dkv_admission_batch *batch)
{
    struct dkv_admission_device *device = &queue->device[batch->device];

    assert(dkv_list_empty(&batch->parts));
    device->n_batches--;
    device->n_bytes -= batch->n_bytes;
    dkv_list_remove(&batch->node);
    dkv_list_push_back(&queue->free_batches, &batch->node);
}

void dkv_admission_complete(struct dkv_admission *queue, struct dkv_admission_batch *batch,
                            uint64_t now_us)
{
    const uint64_t number = ++queue->n_completed;
    uint32_t n_clients = 0;

    DKV_LIST_EACH_SAFE (node, &batch->parts) {
        struct dkv_admission_entry *entry = dkv_admission_part_of(node)->entry;
        n_clients += entry->client->counted_in != number;
        entry->client->counted_in = number;
        dkv_list_remove(node);
        entry->n_in_flight--;
        finish(queue, entry, now_us);
    }
    queue->device[batch->device].n_clients_done = n_clients;
    dkv_admission_learn_rate(&queue->device[batch->device], batch, now_us);
    close_batch(queue, batch);
}

void dkv_admission_device_up(struct dkv_admission *queue, uint32_t device)
{
    assert(device < queue->config.n_devices);
    queue->device[device].up = true;
    queue->device[device].retired = false;
}

/* A part whose batch is lost: one more try, unless it had that or its entry has failed already. */
static void part_lost(struct dkv_admission *queue, struct dkv_admission_part *part, uint64_t now_us)
{
    struct dkv_admission_entry *entry = part->entry;

    entry->n_in_flight--;
    if (entry->status == DKV_OK && !dkv_admission_expired(entry, now_us) && part->n_launches == 1) {
        part_wait(queue, part);
        queue->counters.parts_replayed++;
        return;
    }
    give_up(queue, entry, dkv_admission_expired(entry, now_us) ? DKV_E_TIMEOUT : DKV_E_DEVICE,
            now_us);
}

void dkv_admission_device_lost(struct dkv_admission *queue, uint32_t index, uint64_t now_us)
{
    struct dkv_admission_device *device = &queue->device[index];

    assert(index < queue->config.n_devices);
    device->up = false;
    DKV_LIST_EACH_SAFE (batch_node, &device->batches) {
        struct dkv_admission_batch *batch = DKV_LIST_OF(batch_node, struct dkv_admission_batch,
                                                        node);
        DKV_LIST_EACH_SAFE (node, &batch->parts) {
            dkv_list_remove(node);
            part_lost(queue, dkv_admission_part_of(node), now_us);
        }
        close_batch(queue, batch);
        queue->counters.batches_lost++;
    }
}

static void fail_lane(struct dkv_admission *queue, uint32_t index, uint64_t now_us)
{
    struct dkv_admission_lane *lane = &queue->lane[index];
    struct dkv_list *node;

    while ((node = dkv_list_first(&lane->ages)) != NULL)
        dkv_admission_fail(queue, DKV_LIST_OF(node, struct dkv_admission_part, age_node)->entry,
                           DKV_E_UNAVAILABLE, now_us);
    while ((node = dkv_list_first(&lane->replays)) != NULL)
        dkv_admission_fail(queue, dkv_admission_part_of(node)->entry, DKV_E_UNAVAILABLE, now_us);
}

void dkv_admission_device_retire(struct dkv_admission *queue, uint32_t index, uint64_t now_us)
{
    dkv_admission_device_lost(queue, index, now_us);
    queue->device[index].retired = true;
    fail_lane(queue, index, now_us);
    for (uint32_t d = 0; d < queue->config.n_devices; d++)
        if (!queue->device[d].retired)
            return;
    fail_lane(queue, dkv_admission_any_lane(queue), now_us);
}
