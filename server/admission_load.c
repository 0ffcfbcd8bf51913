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
 * A batch takes a time of its own beside that of its bytes. A rate learnt from small ones is mostly
 * the former and would refuse long prompts that take a fraction of what it says; and what is
 * refused never runs, so it would stay like that. So a line through batches' times by size is
 * learnt, too, and work in pieces above the usual size is judged by it. Where batches were too much
 * alike for a line, a larger one is taken to need no longer: what is not known is not refused, and
 * the first one that runs tells.
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
#define FIT_MEMORY       64.0    /* over which the line is: a long prompt's trace lasts as long */
#define MARGIN           0.125   /* of an estimate, for what the rate does not know */
#define RATE_LEAST       0.5     /* of the mean, however wide the spread */
#define SIZES_VARY       0.1     /* of the mean size: deviation from which on a line is drawn */
#define PAUSE            2.0     /* times what is usual: more is not learnt from one batch */

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

/* Time per byte beside a batch's own; 0: sizes were too much alike to tell. */
static double slope(const struct dkv_admission_device *device)
{
    const double least = device->batch_bytes * SIZES_VARY;
    if (device->bytes_variance <= least * least || device->bytes_us_covariance <= 0.0)
        return 0.0;
    const double fitted = device->bytes_us_covariance / device->bytes_variance;
    const double mean = device->batch_us / device->batch_bytes; /* no batch has less than no time */
    return fitted < mean ? fitted : mean;
}

/* What a batch of that size takes under load. */
static double fitted_us(const struct dkv_admission_device *device, double n_bytes)
{
    return device->batch_us + slope(device) * (n_bytes - device->batch_bytes);
}

static void learn(struct dkv_admission_device *device, double n_bytes, double took_us)
{
    const double weight = 1.0 / RATE_MEMORY, fit_weight = 1.0 / FIT_MEMORY;
    const double more_bytes = n_bytes - device->batch_bytes, more_us = took_us - device->batch_us;

    device->bytes_variance += (more_bytes * more_bytes - device->bytes_variance) * fit_weight;
    device->bytes_us_covariance += (more_bytes * more_us - device->bytes_us_covariance) *
                                   fit_weight;
    const double usual_us = fitted_us(device, n_bytes);
    const double distance = took_us > usual_us ? 1.0 - usual_us / took_us
                                               : 1.0 - took_us / usual_us;
    const double most_us = PAUSE * (usual_us > device->batch_us ? usual_us : device->batch_us);
    device->us_spread += (distance - device->us_spread) * weight;
    device->batch_bytes += more_bytes * weight;
    device->batch_us += ((took_us < most_us ? took_us : most_us) - device->batch_us) * weight;
}

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
    if (device->batch_us > 0.0) {
        learn(device, (double)batch->n_bytes, took_us);
    } else {
        device->batch_bytes = (double)batch->n_bytes;
        device->batch_us = took_us;
    }
}

/* Bytes per microsecond of work in pieces of that size, which batches put together up to the usual
 * one; 0: not known yet. */
static double rate_of(const struct dkv_admission_device *device, double piece_bytes)
{
    const double n_bytes = piece_bytes > device->batch_bytes ? piece_bytes : device->batch_bytes;
    return device->batch_us > 0.0 ? n_bytes / fitted_us(device, n_bytes) : 0.0;
}

static double total_rate(const struct dkv_admission *queue)
{
    double rate = 0.0;
    for (uint32_t d = 0; d < queue->config.n_devices; d++)
        if (queue->device[d].up)
            rate += rate_of(&queue->device[d], 0.0);
    return rate;
}

/* What can be counted on: less than the mean where batches take very different times, as they do on
 * a machine that has other work. */
static double safe_rate(const struct dkv_admission *queue, double piece_bytes)
{
    double sum = 0.0;
    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        const struct dkv_admission_device *device = &queue->device[d];
        const double low = 1.0 - 2.0 * device->us_spread;
        if (device->up)
            sum += rate_of(device, piece_bytes) * (low > RATE_LEAST ? low : RATE_LEAST);
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

/* Work that is ahead, in `n` pieces. */
struct work {
    double bytes;
    uint64_t n;
};

static struct work in_flight(const struct dkv_admission *queue)
{
    struct work sum = {0};
    for (uint32_t d = 0; d < queue->config.n_devices; d++) {
        sum.bytes += (double)queue->device[d].n_bytes;
        sum.n += queue->device[d].n_batches;
    }
    return sum;
}

/* Of the entry's level and better ones. */
static struct work waiting(const struct dkv_admission *queue, uint32_t level)
{
    struct work sum = {0};
    for (uint32_t l = 0; l <= level; l++) {
        sum.bytes += (double)queue->level[l].waiting_bytes;
        sum.n += queue->level[l].n_waiting;
    }
    return sum;
}

static double rate_for(const struct dkv_admission *queue, struct work work)
{
    return safe_rate(queue, work.n > 0 ? work.bytes / (double)work.n : 0.0);
}

uint64_t dkv_admission_estimate_us(const struct dkv_admission *queue,
                                   const struct dkv_admission_client *client,
                                   const struct dkv_admission_entry *entry)
{
    const struct work own = {(double)entry->n_bytes, entry->n_parts};
    const struct work running = in_flight(queue), queued = waiting(queue, entry->level);

    if (safe_rate(queue, 0.0) <= 0.0 || running.bytes + queued.bytes <= 0.0)
        return 0;
    /* Its turn comes after as many bytes of every client as it has waiting itself. If fewer wait,
     * they are all there is now; of those still to come some go before it: half is assumed. */
    const uint32_t n_clients = queue->n_active_clients + (client->n_open == 0);
    const double in_turn = (double)client->waiting_bytes * (double)n_clients;
    const double before = in_turn < queued.bytes ? in_turn : (in_turn + queued.bytes) / 2.0;
    const double queued_rate = rate_for(queue, queued), queued_us = queued.bytes / queued_rate;
    const double batch_us = shortest_batch_us(queue);

    return (uint64_t)((running.bytes / rate_for(queue, running) + before / queued_rate +
                       own.bytes / rate_for(queue, own)) *
                          (1.0 + MARGIN) +
                      (batch_us < queued_us ? batch_us : queued_us));
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
