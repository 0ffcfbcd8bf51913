/* The client's own share is judged first, so that a greedy client is told that it is the one. */
#include "server/quota.h"

#include <stdlib.h>

struct dkv_quota_holder *dkv_quota_holder_new(void)
{
    struct dkv_quota_holder *holder = calloc(1, sizeof(*holder));
    if (holder != NULL)
        holder->n_refs = 1;
    return holder;
}

void dkv_quota_holder_unref(struct dkv_quota_holder *holder)
{
    if (holder != NULL && --holder->n_refs == 0)
        free(holder);
}

struct dkv_charge dkv_charge_begin(struct dkv_quota *quota, struct dkv_quota_holder *holder)
{
    if (quota == NULL)
        return (struct dkv_charge){0};
    if (holder != NULL)
        holder->n_refs++;
    return (struct dkv_charge){.quota = quota, .holder = holder};
}

/* Limits may have been lowered below what is held. */
static bool has_room(uint64_t held, uint64_t limit, uint64_t bytes)
{
    return held <= limit && bytes <= limit - held;
}

enum dkv_status dkv_charge_add(struct dkv_charge *charge, uint64_t bytes, struct dkv_error *err)
{
    struct dkv_quota *quota = charge->quota;
    struct dkv_quota_holder *holder = charge->holder;
    if (quota == NULL)
        return DKV_OK;
    const bool over_share = holder != NULL &&
                            !has_room(holder->charged_bytes, quota->client_bytes, bytes);
    if (holder != NULL)
        holder->over_share = over_share;
    if (over_share)
        return dkv_error_set(err, DKV_E_BUSY,
                             "this client's share of memory: its bodies and answers hold %llu of "
                             "%llu bytes, %llu more asked for",
                             (unsigned long long)holder->charged_bytes,
                             (unsigned long long)quota->client_bytes, (unsigned long long)bytes);
    if (!has_room(quota->charged_bytes, quota->limit_bytes, bytes))
        return dkv_error_set(err, DKV_E_BUSY,
                             "bodies and answers hold %llu of %llu bytes, %llu more asked for",
                             (unsigned long long)quota->charged_bytes,
                             (unsigned long long)quota->limit_bytes, (unsigned long long)bytes);
    quota->charged_bytes += bytes;
    charge->bytes += bytes;
    if (holder != NULL)
        holder->charged_bytes += bytes;
    return DKV_OK;
}

void dkv_charge_end(struct dkv_charge *charge)
{
    if (charge->quota == NULL)
        return;
    charge->quota->charged_bytes -= charge->bytes;
    if (charge->holder != NULL)
        charge->holder->charged_bytes -= charge->bytes;
    dkv_quota_holder_unref(charge->holder);
    *charge = (struct dkv_charge){0};
}
