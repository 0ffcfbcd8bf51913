/* Time: deadlines in a heap, how fast the devices are, and how long until.
 *
 * The heap holds every open entry with a deadline that was not given up. It is an array as long as
 * the bound on entries, each entry knowing its place, so that one that ends is taken out in
 * O(log n).
 *
 * The service rate is learnt from batches that left a backlog behind, since only these ran at the
 * size and at the density the device reaches under load: what a lone request took says nothing
 * about sixty-four. Until one such batch has completed nothing is predicted.
 *
 * An entry is answered when its batch is, not when its own bytes are, so the estimate ends with the
 * time of one more batch where as much is waiting. Without that, an overloaded queue accepts what
 * then expires by half a batch: with it, almost everything that is accepted is answered in time
 * (tests/server/test_admission_load.c).
 */
#include "server/admission_priv.h"

#define RETRY_MIN_US     1000u
#define RETRY_MAX_US     60000000u
#define RETRY_UNKNOWN_US 100000u /* while the rate is not known */
#define RATE_MEMORY      4.0     /* batches over which the rate is averaged */
#define MARGIN           0.125   /* of an estimate, for what the rate does not know */
#define RATE_LEAST       0.5     /* of the mean, however wide the spread */

/* --- the heap ------------------------------------------------------------------------------ */

static void heap_place(struct dkv_admission *queue, uint32_t index,
                       struct dkv_admission_entry *entry)
{
    queue->heap[index] = entry;
    entry->heap_index = index;
}

static void sift_up(struct dkv_admission *queue, uint32_t index)
{
    struct dkv_admission_entry *entry = queue->heap[index];

    while (index > 0) {
        uint32_t parent = (index - 1) / 2;
        if (queue->heap[parent]->deadline_us <= entry->deadline_us)
            break;
        heap_place(queue, index, queue->heap[parent]);
        index = parent;
    }
    heap_place(queue, index, entry);
}

static void sift_down(struct dkv_admission *queue, uint32_t index)
{
    struct dkv_admission_entry *entry = queue->heap[index];

    for (;;) {
        uint32_t child = 2 * index + 1;
        if (child >= queue->n_heap)
            break;
        if (child + 1 < queue->n_heap &&
            queue->heap[child + 1]->deadline_us < queue->heap[child]->deadline_us)
            child++;
        if (entry->deadline_us <= queue->heap[child]->deadline_us)
            break;
        heap_place(queue, index, queue->heap[child]);
        index = child;
    }
    heap_place(queue, index, entry);
}

void dkv_admission_heap_push(struct dkv_admission *queue, struct dkv_admission_entry *entry)
{
    if (entry->deadline_us == DKV_ADMISSION_NEVER || entry->heap_index != DKV_ADMISSION_NO_INDEX)
        return;
    assert(queue->n_heap < queue->config.max_entries);
    heap_place(queue, queue->n_heap++, entry);
    sift_up(queue, entry->heap_index);
}

void dkv_admission_heap_remove(struct dkv_admission *queue, struct dkv_admission_entry *entry)
{
    const uint32_t index = entry->heap_index;
    if (index == DKV_ADMISSION_NO_INDEX)
        return;

    struct dkv_admission_entry *last = queue->heap[--queue->n_heap];
    entry->heap_index = DKV_ADMISSION_NO_INDEX;
    if (last == entry)
        return;
    heap_place(queue, index, last);
    sift_up(queue, index);
    sift_down(queue, last->heap_index);
}

/* --- the service rate ---------------------------------------------------------------------- */

void dkv_admission_learn_rate(struct dkv_admission_device *device,
                              const struct dkv_admission_batch *batch, uint64_t now_us)
{
    /* With two batches in flight the second one's time begins when the first one is done. */
    const uint64_t from_us = batch->formed_us > device->last_done_us ? batch->formed_us
                                                                     : device->last_done_us;
    const double took_us = now_us > from_us ? (double)(now_us - from_us) : 1.0;

    device->last_done_us = now_us;
    if (!batch->backlog || batch->solo)
        return;
    const double rate = (double)batch->n_bytes / took_us;
    const double weight = device->bytes_per_us > 0.0 ? 1.0 / RATE_MEMORY : 1.0;
    const double distance = rate > device->bytes_per_us ? rate - device->bytes_per_us
                                                        : device->bytes_per_us - rate;
    if (device->bytes_per_us > 0.0)
        device->rate_spread += (distance - device->rate_spread) * weight;
    device->bytes_per_us += (rate - device->bytes_per_us) * weight;
    device->batch_us += (took_us - device->batch_us) * weight;
}

static double total_rate(const struct dkv_admission *queue)
{
    double rate = 0.0;
    for (uint32_t d = 0; d < queue->config.n_devices; d++)
        if (queue->device[d].up)
            rate += queue->device[d].bytes_per_us;
    return rate;
}

/* What can be counted on: less than the mean where batches take very different times, as they do on
 * a machine that has other work. */
static double safe_rate(const struct dkv_admission *queue)
{
    double sum = 0.0;
    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        const struct dkv_admission_device *device = &queue->device[d];
        const double low = device->bytes_per_us - 2.0 * device->rate_spread;
        if (device->up)
            sum += low > device->bytes_per_us * RATE_LEAST ? low
                                                           : device->bytes_per_us * RATE_LEAST;
    }
    return sum;
}

/* --- how long until ------------------------------------------------------------------------ */

/* What a batch takes under load, on the device where it takes least. */
static double shortest_batch_us(const struct dkv_admission *queue)
{
    double shortest_us = 0.0;
    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        const struct dkv_admission_device *device = &queue->device[d];
        if (device->up && device->batch_us > 0.0 &&
            (shortest_us <= 0.0 || device->batch_us < shortest_us))
            shortest_us = device->batch_us;
    }
    return shortest_us;
}

static double bytes_in_flight(const struct dkv_admission *queue)
{
    double n_bytes = 0.0;
    for (uint32_t d = 0; d < queue->config.n_devices; d++)
        n_bytes += (double)queue->device[d].n_bytes;
    return n_bytes;
}

uint64_t dkv_admission_estimate_us(const struct dkv_admission *queue,
                                   const struct dkv_admission_client *client,
                                   const struct dkv_admission_entry *entry)
{
    const double rate = safe_rate(queue), in_flight = bytes_in_flight(queue);
    double waiting = 0.0;

    for (uint32_t l = 0; l <= entry->level; l++)
        waiting += (double)queue->level[l].waiting_bytes;
    if (rate <= 0.0 || in_flight + waiting <= 0.0)
        return 0;
    /* Its turn comes after as many bytes of every client as it has waiting itself. If fewer wait,
     * they are all there is now; of those still to come some go before it: half is assumed. */
    const uint32_t n_clients = queue->n_active_clients + (client->n_open == 0);
    const double in_turn = (double)client->waiting_bytes * (double)n_clients;
    const double before = in_turn < waiting ? in_turn : (in_turn + waiting) / 2.0;
    const double batch_us = shortest_batch_us(queue), waiting_us = waiting / rate;

    return (uint64_t)((in_flight + before + (double)entry->n_bytes) * (1.0 + MARGIN) / rate +
                      (batch_us < waiting_us ? batch_us : waiting_us));
}

static uint64_t clamp_retry_us(double us)
{
    if (us < RETRY_MIN_US)
        return RETRY_MIN_US;
    return us < RETRY_MAX_US ? (uint64_t)us : RETRY_MAX_US;
}

/* Bytes that have to end before `entry` fits: what is over the limit, or, where the number of
 * entries is, one of average size. */
static double bytes_over(uint64_t open_bytes, uint32_t n_open, uint64_t limit, uint64_t n_bytes)
{
    const double over = (double)open_bytes + (double)n_bytes - (double)limit;
    const double one = n_open > 0 ? (double)open_bytes / (double)n_open : 0.0;
    return over > one ? over : one;
}

uint64_t dkv_admission_retry_us(const struct dkv_admission *queue,
                                const struct dkv_admission_client *client,
                                const struct dkv_admission_entry *entry,
                                enum dkv_admission_verdict verdict, uint64_t now_us)
{
    const double rate = total_rate(queue);
    double over;

    if (verdict == DKV_ADMISSION_NO_DEVICE || verdict == DKV_ADMISSION_DRAINING)
        return clamp_retry_us((double)queue->config.restart_us);
    if (verdict == DKV_ADMISSION_LATE) {
        const uint64_t wait_us = dkv_admission_estimate_us(queue, client, entry);
        const uint64_t left_us = entry->deadline_us - now_us;
        return clamp_retry_us(wait_us > left_us ? (double)(wait_us - left_us) : 0.0);
    }
    if (rate <= 0.0)
        return RETRY_UNKNOWN_US;
    if (verdict == DKV_ADMISSION_QUOTA)
        over = bytes_over(client->open_bytes, client->n_open, queue->config.client_max_bytes,
                          entry->n_bytes) *
               (double)queue->n_active_clients;
    else
        over = bytes_over(queue->open_bytes, queue->n_open, queue->config.max_bytes,
                          entry->n_bytes);
    return clamp_retry_us(over / rate);
}
