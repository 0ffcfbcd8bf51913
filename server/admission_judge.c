/* May it come in? Everything an offer is judged by, without changing anything.
 *
 * The order of the questions is the order of what helps the caller most: what can never be accepted
 * first, then what only waiting cures, the caller's own quota before the common bounds, so that a
 * greedy client is told that it is the one. A request that would miss its deadline is refused while
 * the caller can still do something else; to accept it and let it expire would waste its time and
 * the queue's room.
 */
#include <inttypes.h>

#include "server/admission_priv.h"

static bool device_could_run(const struct dkv_admission *queue, uint32_t device)
{
    if (device != DKV_ADMISSION_ANY_DEVICE)
        return queue->device[device].up;
    for (uint32_t d = 0; d < queue->config.n_devices; d++)
        if (queue->device[d].up)
            return true;
    return false;
}

static bool devices_up(const struct dkv_admission *queue, const struct dkv_admission_entry *entry)
{
    for (uint32_t i = 0; i < entry->n_parts; i++)
        if (!device_could_run(queue, entry->parts[i].device))
            return false;
    return true;
}

bool dkv_admission_entry_bytes(const struct dkv_admission_entry *entry, uint64_t *bytes_out)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < entry->n_parts; i++)
        if (!dkv_add_u64(sum, entry->parts[i].n_bytes, &sum))
            return false;
    *bytes_out = sum;
    return true;
}

/* min(the caller's timeout, the configured cap), counted from the arrival. */
uint64_t dkv_admission_deadline(const struct dkv_admission *queue,
                                const struct dkv_admission_entry *entry, uint64_t now_us)
{
    const uint64_t cap_us = queue->config.max_timeout_us;
    const uint64_t from_us = entry->arrival_us != 0 ? entry->arrival_us : now_us;
    uint64_t timeout_us = entry->timeout_us;
    uint64_t deadline_us = DKV_ADMISSION_NEVER;

    if (timeout_us == 0 || (cap_us != 0 && cap_us < timeout_us))
        timeout_us = cap_us;
    if (timeout_us != 0)
        dkv_add_u64(from_us, timeout_us, &deadline_us); /* never, where that overflows */
    return deadline_us;
}

/* Limits may have been lowered below what is open. */
static bool has_room(uint64_t open_bytes, uint64_t limit, uint64_t n_bytes)
{
    return open_bytes <= limit && n_bytes <= limit - open_bytes;
}

enum dkv_admission_verdict dkv_admission_judge(const struct dkv_admission *queue,
                                               const struct dkv_admission_client *client,
                                               const struct dkv_admission_entry *entry,
                                               uint64_t now_us)
{
    const struct dkv_admission_config *config = &queue->config;
    const uint64_t n_bytes = entry->n_bytes;

    if (n_bytes > config->client_max_bytes) /* <= max_bytes */
        return DKV_ADMISSION_TOO_LARGE;
    if (queue->draining)
        return DKV_ADMISSION_DRAINING;
    if (dkv_admission_expired(entry, now_us))
        return DKV_ADMISSION_EXPIRED;
    if (!devices_up(queue, entry))
        return DKV_ADMISSION_NO_DEVICE;
    if (client->n_open >= config->client_max_entries ||
        !has_room(client->open_bytes, config->client_max_bytes, n_bytes))
        return DKV_ADMISSION_QUOTA;
    if (queue->n_open >= config->max_entries ||
        !has_room(queue->open_bytes, config->max_bytes, n_bytes))
        return DKV_ADMISSION_FULL;
    if (dkv_admission_estimate_us(queue, client, entry) >= entry->deadline_us - now_us)
        return DKV_ADMISSION_LATE;
    return DKV_ADMISSION_ACCEPTED;
}

/* The client's sentence for a refusal. */
void dkv_admission_explain(const struct dkv_admission *queue,
                           const struct dkv_admission_client *client,
                           const struct dkv_admission_entry *entry,
                           enum dkv_admission_verdict verdict, struct dkv_error *err)
{
    const struct dkv_admission_config *c = &queue->config;
    const enum dkv_status status = dkv_admission_verdict_info(verdict)->status;

    switch (verdict) {
    case DKV_ADMISSION_FULL:
        dkv_error_set(err, status,
                      "queue full: %u of %u requests, %" PRIu64 " of %" PRIu64 " bytes, %" PRIu64
                      " more asked for",
                      queue->n_open, c->max_entries, queue->open_bytes, c->max_bytes,
                      entry->n_bytes);
        break;
    case DKV_ADMISSION_QUOTA:
        dkv_error_set(err, status,
                      "this client's quota: %u of %u requests, %" PRIu64 " of %" PRIu64
                      " bytes unanswered, %" PRIu64 " more asked for",
                      client->n_open, c->client_max_entries, client->open_bytes,
                      c->client_max_bytes, entry->n_bytes);
        break;
    case DKV_ADMISSION_LATE:
        dkv_error_set(err, status, "the deadline could not be met with what is queued ahead");
        break;
    case DKV_ADMISSION_EXPIRED:
        dkv_error_set(err, status, "the deadline passed before the request was complete");
        break;
    case DKV_ADMISSION_NO_DEVICE:
        dkv_error_set(err, status, "no worker is up that can read this memory; it is restarting");
        break;
    case DKV_ADMISSION_DRAINING: dkv_error_set(err, status, "the server is shutting down"); break;
    case DKV_ADMISSION_TOO_LARGE:
        dkv_error_set(err, status, "request of %" PRIu64 " bytes is not in 1..%" PRIu64,
                      entry->n_bytes, c->client_max_bytes);
        break;
    case DKV_ADMISSION_ACCEPTED:
    case DKV_ADMISSION_DEGRADED:
    case DKV_ADMISSION_VERDICTS: break;
    }
}

bool dkv_admission_may_degrade(enum dkv_admission_verdict verdict)
{
    return verdict == DKV_ADMISSION_FULL || verdict == DKV_ADMISSION_QUOTA ||
           verdict == DKV_ADMISSION_LATE || verdict == DKV_ADMISSION_NO_DEVICE;
}
