/* Figures for a scrape, and the recount.
 *
 * The queue keeps running sums because it must decide in constant time. A sum that drifts by one
 * per thousand requests is a queue that is full for ever after a week, so the recount works every
 * one of them out again from the lists themselves and compares.
 */
#include <inttypes.h>
#include <string.h>

#include "server/admission_priv.h"

static uint64_t age_us(const struct dkv_admission_part *part, uint64_t now_us)
{
    return now_us > part->entry->offered_us ? now_us - part->entry->offered_us : 0;
}

static void note_age(struct dkv_admission_stats *stats, const struct dkv_admission_part *part,
                     uint64_t now_us)
{
    uint64_t *oldest_us = &stats->level[part->entry->level].oldest_us;
    if (age_us(part, now_us) > *oldest_us)
        *oldest_us = age_us(part, now_us);
}

/* Lanes keep arrival order, but mix levels. */
static void note_ages(const struct dkv_admission *queue, struct dkv_admission_stats *stats,
                      uint64_t now_us)
{
    for (uint32_t lane = 0; lane <= queue->config.n_devices; lane++) {
        DKV_LIST_EACH (node, &queue->lane[lane].ages)
            note_age(stats, DKV_LIST_OF(node, struct dkv_admission_part, age_node), now_us);
        DKV_LIST_EACH (node, &queue->lane[lane].replays)
            note_age(stats, dkv_admission_part_of(node), now_us);
    }
}

void dkv_admission_stats(const struct dkv_admission *queue, uint64_t now_us,
                         struct dkv_admission_stats *stats_out)
{
    *stats_out = queue->counters;
    stats_out->n_open = queue->n_open;
    stats_out->open_bytes = queue->open_bytes;
    stats_out->n_done = queue->n_done;
    stats_out->n_clients = queue->n_clients;
    for (uint32_t l = 0; l < queue->config.n_levels; l++) {
        stats_out->level[l].n_waiting = queue->level[l].n_waiting;
        stats_out->level[l].waiting_bytes = queue->level[l].waiting_bytes;
    }
    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        stats_out->device[d].up = queue->device[d].up;
        stats_out->device[d].retired = queue->device[d].retired;
        stats_out->device[d].n_batches = queue->device[d].n_batches;
        stats_out->device[d].bytes = queue->device[d].n_bytes;
    }
    note_ages(queue, stats_out, now_us);
}

/* --- recount ------------------------------------------------------------------------------- */

/* What the lists say. */
struct count {
    uint64_t n_open, open_bytes, waiting_bytes, n_clients, n_active, n_heap, n_in_flight;
    struct {
        uint64_t n_waiting, waiting_bytes;
        uint64_t lane_parts[DKV_ADMISSION_LANES_MAX];
    } level[DKV_ADMISSION_LEVELS_MAX];
    struct {
        uint64_t n_parts, n_blocks, n_tokens, n_bytes, n_clients, n_replays;
    } lane[DKV_ADMISSION_LANES_MAX];
};

static enum dkv_status same(struct dkv_error *err, const char *what, uint64_t kept,
                            uint64_t counted)
{
    if (kept == counted)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INTERNAL, "admission: %s is %" PRIu64 ", counted %" PRIu64,
                         what, kept, counted);
}

#define SAME(what, kept, counted)                                           \
    do {                                                                    \
        enum dkv_status same_status = same(err, (what), (kept), (counted)); \
        if (same_status != DKV_OK)                                          \
            return same_status;                                             \
    } while (0)

static void count_part(struct count *count, const struct dkv_admission_part *part)
{
    const uint32_t l = part->entry->level;

    count->level[l].n_waiting++;
    count->level[l].waiting_bytes += part->n_bytes;
    count->waiting_bytes += part->n_bytes;
    if (part->n_launches > 0) {
        count->lane[part->lane].n_replays++;
        return;
    }
    count->level[l].lane_parts[part->lane]++;
    count->lane[part->lane].n_parts++;
    count->lane[part->lane].n_blocks += part->n_blocks;
    count->lane[part->lane].n_tokens += part->n_tokens;
    count->lane[part->lane].n_bytes += part->n_bytes;
}

static enum dkv_status count_entry(const struct dkv_admission *queue,
                                   const struct dkv_admission_entry *entry, struct count *count,
                                   struct dkv_error *err)
{
    uint64_t n_waiting = 0, n_bytes = 0;

    for (uint32_t i = 0; i < entry->n_parts; i++) {
        n_bytes += entry->parts[i].n_bytes;
        if (!entry->parts[i].waiting)
            continue;
        n_waiting++;
        count_part(count, &entry->parts[i]);
    }
    SAME("an entry's waiting parts", entry->n_waiting, n_waiting);
    SAME("an entry's bytes", entry->n_bytes, n_bytes);
    SAME("an open entry with nothing to do", n_waiting + entry->n_in_flight == 0, 0);

    const bool in_heap = entry->heap_index != DKV_ADMISSION_NO_INDEX;
    SAME("an entry's place among the deadlines", in_heap,
         entry->status == DKV_OK && entry->deadline_us != DKV_ADMISSION_NEVER);
    if (in_heap)
        SAME("the heap's entry", queue->heap[entry->heap_index] == entry, true);
    count->n_heap += in_heap;
    count->n_open++;
    count->open_bytes += n_bytes;
    count->n_in_flight += entry->n_in_flight;
    return DKV_OK;
}

static enum dkv_status count_client(const struct dkv_admission *queue,
                                    const struct dkv_admission_client *client, struct count *count,
                                    struct dkv_error *err)
{
    const uint64_t open_before = count->n_open, bytes_before = count->open_bytes;
    const uint64_t waiting_before = count->waiting_bytes;
    uint64_t lane_open[DKV_ADMISSION_LANES_MAX] = {0};

    DKV_LIST_EACH (node, &client->open) {
        const struct dkv_admission_entry *entry = DKV_LIST_OF(node, struct dkv_admission_entry,
                                                              node);
        enum dkv_status status = count_entry(queue, entry, count, err);
        if (status != DKV_OK)
            return status;
        for (uint32_t i = 0; i < entry->n_parts; i++)
            lane_open[entry->parts[i].lane]++;
    }
    SAME("a client's open entries", client->n_open, count->n_open - open_before);
    SAME("a client's waiting bytes", client->waiting_bytes, count->waiting_bytes - waiting_before);
    SAME("a client's open bytes", client->open_bytes, count->open_bytes - bytes_before);
    for (uint32_t i = 0; i <= queue->config.n_devices; i++) {
        SAME("a client's open parts of a lane", client->lane_open[i], lane_open[i]);
        count->lane[i].n_clients += lane_open[i] > 0;
    }
    count->n_clients++;
    count->n_active += client->n_open > 0;
    return DKV_OK;
}

static uint64_t list_length(const struct dkv_list *list)
{
    uint64_t n = 0;
    DKV_LIST_EACH (node, list)
        n++;
    return n;
}

/* A flow is in a device's ring if it has parts for it or debt there, within the bounds of credit.
 */
static enum dkv_status check_flow(const struct dkv_admission *queue,
                                  const struct dkv_admission_flow *flow, struct dkv_error *err)
{
    const uint64_t n_any = list_length(&flow->fifo[dkv_admission_any_lane(queue)]);
    uint64_t n_waiting = n_any;

    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        const struct dkv_admission_turn *turn = &flow->turns[d];
        const uint64_t n_own = list_length(&flow->fifo[d]);
        SAME("a flow in its ring", dkv_list_linked(&turn->node),
             n_own + n_any > 0 || turn->deficit < 0);
        SAME("a flow's credit above a quantum",
             turn->deficit > (int64_t)queue->config.quantum_bytes, false);
        n_waiting += n_own;
    }
    SAME("a flow's waiting parts", flow->n_waiting, n_waiting);
    return DKV_OK;
}

static enum dkv_status check_clients(const struct dkv_admission *queue, struct count *count,
                                     struct dkv_error *err)
{
    DKV_LIST_EACH (node, &queue->clients) {
        const struct dkv_admission_client *client = DKV_LIST_OF(node, struct dkv_admission_client,
                                                                node);
        enum dkv_status status = count_client(queue, client, count, err);
        for (uint32_t l = 0; status == DKV_OK && l < queue->config.n_levels; l++)
            status = check_flow(queue, &client->flows[l], err);
        if (status != DKV_OK)
            return status;
    }
    SAME("clients", queue->n_clients, count->n_clients);
    SAME("active clients", queue->n_active_clients, count->n_active);
    SAME("open entries", queue->n_open, count->n_open);
    SAME("open bytes", queue->open_bytes, count->open_bytes);
    SAME("deadlines", queue->n_heap, count->n_heap);
    SAME("ended entries", queue->n_done, list_length(&queue->done));
    return DKV_OK;
}

static enum dkv_status check_levels(const struct dkv_admission *queue, const struct count *count,
                                    struct dkv_error *err)
{
    for (uint32_t l = 0; l < queue->config.n_levels; l++) {
        const struct dkv_admission_level *level = &queue->level[l];
        SAME("a level's waiting parts", level->n_waiting, count->level[l].n_waiting);
        SAME("a level's waiting bytes", level->waiting_bytes, count->level[l].waiting_bytes);
        for (uint32_t i = 0; i <= queue->config.n_devices; i++)
            SAME("a level's parts of a lane", level->lane_parts[i], count->level[l].lane_parts[i]);
    }
    for (uint32_t i = 0; i <= queue->config.n_devices; i++) {
        const struct dkv_admission_lane *lane = &queue->lane[i];
        SAME("a lane's parts", list_length(&lane->ages), count->lane[i].n_parts);
        SAME("a lane's replays", list_length(&lane->replays), count->lane[i].n_replays);
        SAME("a lane's blocks", lane->n_blocks, count->lane[i].n_blocks);
        SAME("a lane's tokens", lane->n_tokens, count->lane[i].n_tokens);
        SAME("a lane's bytes", lane->n_bytes, count->lane[i].n_bytes);
        SAME("a lane's clients", lane->n_clients, count->lane[i].n_clients);
    }
    return DKV_OK;
}

static enum dkv_status check_devices(const struct dkv_admission *queue, const struct count *count,
                                     struct dkv_error *err)
{
    uint64_t n_in_flight = 0, n_batches = list_length(&queue->free_batches);

    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        uint64_t n_bytes = 0;
        DKV_LIST_EACH (node, &queue->device[d].batches) {
            const struct dkv_admission_batch *batch = DKV_LIST_OF(node, struct dkv_admission_batch,
                                                                  node);
            SAME("a batch's parts", batch->n_parts, list_length(&batch->parts));
            n_in_flight += batch->n_parts;
            n_bytes += batch->n_bytes;
        }
        n_batches += queue->device[d].n_batches;
        SAME("a device's batches", queue->device[d].n_batches,
             list_length(&queue->device[d].batches));
        SAME("a device's bytes", queue->device[d].n_bytes, n_bytes);
    }
    SAME("batches, free and in flight", n_batches,
         queue->config.n_devices * queue->config.max_flight);
    SAME("parts in flight", n_in_flight, count->n_in_flight);
    return DKV_OK;
}

enum dkv_status dkv_admission_recount(const struct dkv_admission *queue, struct dkv_error *err)
{
    struct count count;
    memset(&count, 0, sizeof(count));

    for (uint32_t i = 1; i < queue->n_heap; i++)
        SAME("the order of deadlines",
             queue->heap[(i - 1) / 2]->deadline_us <= queue->heap[i]->deadline_us, true);
    enum dkv_status status = check_clients(queue, &count, err);
    if (status == DKV_OK)
        status = check_levels(queue, &count, err);
    if (status == DKV_OK)
        status = check_devices(queue, &count, err);
    return status;
}
