/* What a client registers: regions, caches, stashes. Each message is answered by DONE with the
 * object's number, or by an error; a region that is dropped or detached while requests read it is
 * answered when the last of them has ended.
 *
 * Caches and stashes name regions by number, and the number is looked up when a request uses them:
 * a region may be detached and come back meanwhile, or be another size.
 */
#include "server/session_priv.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- tables of objects ---- */

enum dkv_status dkv_slots_init(struct dkv_slots *slots, uint32_t n)
{
    slots->slots = calloc(n, sizeof(*slots->slots));
    slots->n = n;
    return slots->slots != NULL ? DKV_OK : DKV_E_NOMEM;
}

/* A number holds its place (number - 1) % n and how often that place was given. */
static struct dkv_slot *slot_of(const struct dkv_slots *slots, uint32_t number)
{
    struct dkv_slot *slot = &slots->slots[(number - 1) % slots->n];
    return number != 0 && slot->number == number ? slot : NULL;
}

void *dkv_slots_find(const struct dkv_slots *slots, uint32_t number)
{
    const struct dkv_slot *slot = slot_of(slots, number);
    return slot != NULL ? slot->object : NULL;
}

/* The number of the new object; 0: the table is full. */
static uint32_t slots_add(struct dkv_slots *slots, void *object)
{
    for (uint32_t i = 0; i < slots->n; i++) {
        const uint32_t number = ++slots->n_given;
        struct dkv_slot *slot = &slots->slots[(number - 1) % slots->n];
        if (number != 0 && slot->number == 0) {
            *slot = (struct dkv_slot){number, object};
            return number;
        }
    }
    return 0;
}

static enum dkv_status full(const char *what, uint32_t n, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_BUSY, "%s: this connection has %u already, the most allowed",
                         what, n);
}

/* ---- regions ---- */

/* A message about a region that is answered when it has settled. */
struct waiting {
    struct dkv_session *session;
    uint64_t id;
    struct dkv_wire_object object;
    bool drops; /* the number is given up then, or if it fails */
};

static void forget_region(struct dkv_session *session, uint32_t number)
{
    struct dkv_slot *slot = slot_of(&session->regions, number);
    struct dkv_region *region = slot->object;
    *slot = (struct dkv_slot){0};
    free(dkv_region_abandon(region));
}

static void on_settled(void *owner, const struct dkv_error *error)
{
    struct waiting *waiting = owner;
    struct dkv_session *session = waiting->session;
    const struct waiting answer = *waiting;
    free(waiting);
    if (error->status != DKV_OK || answer.drops)
        forget_region(session, answer.object.object);
    if (error->status == DKV_OK && answer.drops)
        session->all->server->metrics.regions_released[DKV_RELEASE_ASKED]++;
    if (error->status != DKV_OK)
        dkv_session_send_error(session, answer.id, error, 0);
    else
        dkv_session_send_done(session, answer.id, answer.object.object, answer.object.generation);
    dkv_session_flush(session);
}

static struct waiting *new_waiting(struct dkv_session *session, uint64_t id, uint32_t number,
                                   uint32_t generation, struct dkv_error *err)
{
    struct waiting *waiting = calloc(1, sizeof(*waiting));
    if (waiting == NULL) {
        dkv_error_set(err, DKV_E_NOMEM, "out of memory");
        return NULL;
    }
    *waiting = (struct waiting){session, id, {number, generation}, false};
    return waiting;
}

static enum dkv_status find_region(struct dkv_session *session, uint32_t number,
                                   struct dkv_region **region_out, struct dkv_error *err)
{
    struct dkv_region *region = dkv_slots_find(&session->regions, number);
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "region %u does not exist", number);
    if (region->on_settled != NULL)
        return dkv_error_set(err, DKV_E_BUSY,
                             "region %u: an earlier message about it has no answer yet", number);
    *region_out = region;
    return DKV_OK;
}

/* The region may settle before its number is known, so the number is taken first. */
static enum dkv_status add_region(struct dkv_session *session,
                                  const struct dkv_region_source *source, uint64_t id,
                                  struct dkv_error *err)
{
    const uint32_t number = slots_add(&session->regions, NULL);
    if (number == 0)
        return full("regions", session->regions.n, err);
    struct dkv_slot *slot = slot_of(&session->regions, number);
    struct waiting *waiting = new_waiting(session, id, number, source->wire->generation, err);
    enum dkv_status status = DKV_E_NOMEM;
    if (waiting != NULL)
        status = dkv_region_new(session->all->server->backend, source, on_settled, waiting,
                                (struct dkv_region **)&slot->object, err);
    if (status != DKV_OK) {
        free(waiting);
        *slot = (struct dkv_slot){0};
    }
    return status;
}

static enum dkv_status attach_region(struct dkv_session *session,
                                     const struct dkv_region_source *source, uint64_t id,
                                     struct dkv_error *err)
{
    const struct dkv_wire_region *wire = source->wire;
    struct dkv_region *region = NULL;
    enum dkv_status status = find_region(session, wire->region, &region, err);
    if (status != DKV_OK)
        return status;
    struct waiting *waiting = new_waiting(session, id, wire->region, wire->generation, err);
    if (waiting == NULL)
        return DKV_E_NOMEM;
    status = dkv_region_attach(region, source, on_settled, waiting, err);
    if (status != DKV_OK)
        free(waiting);
    return status;
}

/* Descriptors are held as long as the regions, so that a new worker can be given them, and
 * addresses as long as anybody has them. */
static enum dkv_status check_quota(const struct dkv_session *session,
                                   const struct dkv_wire_region *wire, struct dkv_error *err)
{
    uint32_t n_fds = 0;
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < session->regions.n; i++) {
        const struct dkv_region *region = session->regions.slots[i].object;
        if (region == NULL || region->loan == NULL)
            continue;
        n_fds += dkv_loan_fds(region->loan);
        n_bytes += region->bytes;
    }
    if (n_fds + wire->n_chunks > DKV_SESSION_FDS)
        return dkv_error_set(err, DKV_E_BUSY,
                             "region: with its %u descriptors this connection would have %u, at "
                             "most %u are allowed",
                             wire->n_chunks, n_fds + wire->n_chunks, DKV_SESSION_FDS);
    if (n_bytes > DKV_SESSION_BYTES || wire->bytes > DKV_SESSION_BYTES - n_bytes)
        return dkv_error_set(err, DKV_E_BUSY,
                             "region: its %llu bytes and the %llu that this connection has are "
                             "above %llu",
                             (unsigned long long)wire->bytes, (unsigned long long)n_bytes,
                             (unsigned long long)DKV_SESSION_BYTES);
    return DKV_OK;
}

static enum dkv_status take_region(struct dkv_session *session,
                                   const struct dkv_wire_conn_message *message,
                                   struct dkv_error *err)
{
    const bool attach = message->header.type == DKV_WIRE_REGION_ATTACH;
    struct dkv_wire_region wire;
    enum dkv_status status = dkv_wire_get_region(message->payload, message->header.payload_bytes,
                                                 &wire, err);
    if (status == DKV_OK)
        status = dkv_wire_check_region_fds(&wire, message->header.n_fds, err);
    if (status == DKV_OK && (wire.region != 0) != attach)
        status = dkv_error_set(err, DKV_E_MALFORMED, "region: number %u", wire.region);
    if (status != DKV_OK)
        return status;
    const struct dkv_region_source source = {
        .wire = &wire,
        .fds = message->fds,
        .connection = session->number,
        .trusted = session->trusted,
        .shm_prefix = session->shm_prefix,
        .uid = session->uid,
    };
    status = check_quota(session, &wire, err);
    if (status != DKV_OK)
        return status;
    return attach ? attach_region(session, &source, message->header.id, err)
                  : add_region(session, &source, message->header.id, err);
}

static enum dkv_status release_region(struct dkv_session *session,
                                      const struct dkv_wire_conn_message *message,
                                      const struct dkv_wire_object *object, struct dkv_error *err)
{
    static const struct dkv_error none;
    const bool drop = message->header.type == DKV_WIRE_REGION_DROP;
    struct dkv_region *region = NULL;
    enum dkv_status status = find_region(session, object->object, &region, err);
    if (status == DKV_OK && !region->attached && !drop)
        status = dkv_error_set(err, DKV_E_INVALID, "region %u is detached already", object->object);
    if (status != DKV_OK)
        return status;
    struct waiting *waiting = new_waiting(session, message->header.id, object->object,
                                          region->generation, err);
    if (waiting == NULL)
        return DKV_E_NOMEM;
    waiting->drops = drop;
    if (region->attached)
        dkv_region_detach(region, on_settled, waiting);
    else
        on_settled(waiting, &none);
    return DKV_OK;
}

/* ---- caches and stashes ---- */

void dkv_cache_unref(struct dkv_cache *cache)
{
    if (cache == NULL || --cache->n_refs > 0)
        return;
    cache->server->cache_bytes -= cache->bytes;
    free(cache->views);
    free(cache->floats);
    free(cache);
}

/* Caches stay, and their floats were sent here: who registers many must not fill our memory. A
 * dropped one counts for all connections until the last request that uses it has ended. */
static enum dkv_status check_cache_quota(const struct dkv_session *session, uint64_t bytes,
                                         struct dkv_error *err)
{
    uint64_t n_bytes = bytes;
    for (uint32_t i = 0; i < session->caches.n; i++) {
        const struct dkv_cache *cache = session->caches.slots[i].object;
        n_bytes += cache != NULL ? cache->bytes : 0;
    }
    if (n_bytes > DKV_SESSION_FLOATS)
        return dkv_error_set(err, DKV_E_BUSY,
                             "cache: with it this connection's caches would have %llu bytes, at "
                             "most %llu are allowed",
                             (unsigned long long)n_bytes, (unsigned long long)DKV_SESSION_FLOATS);
    if (bytes > DKV_CACHES_BYTES_MAX - session->all->server->cache_bytes)
        return dkv_error_set(err, DKV_E_BUSY,
                             "cache: with it all caches would have more than %llu bytes",
                             (unsigned long long)DKV_CACHES_BYTES_MAX);
    return DKV_OK;
}

static enum dkv_status new_cache(const struct dkv_session *session,
                                 const struct dkv_wire_cache *wire, struct dkv_cache **cache_out,
                                 struct dkv_error *err)
{
    const uint32_t n_views = 2u * wire->n_layers;
    const uint64_t n_bytes = dkv_wire_cache_bulk_bytes(wire);
    const uint64_t all_bytes = n_bytes + n_views * sizeof(struct dkv_wire_view);
    const enum dkv_status status = check_cache_quota(session, all_bytes, err);
    if (status != DKV_OK)
        return status;
    struct dkv_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache");
    cache->n_refs = 1;
    cache->server = session->all->server;
    cache->bytes = all_bytes;
    cache->server->cache_bytes += all_bytes;
    cache->wire = *wire;
    cache->wire.layers = NULL;
    cache->views = calloc(n_views, sizeof(*cache->views));
    cache->floats = n_bytes > 0 ? malloc(n_bytes) : NULL;
    if (cache->views == NULL || (n_bytes > 0 && cache->floats == NULL)) {
        dkv_cache_unref(cache);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache");
    }
    for (uint32_t i = 0; i < n_views; i++)
        dkv_wire_get_view(wire->layers, i, &cache->views[i]);
    *cache_out = cache;
    return DKV_OK;
}

static enum dkv_status add_cache(struct dkv_session *session, uint64_t id, struct dkv_cache *cache,
                                 struct dkv_error *err)
{
    const uint32_t number = slots_add(&session->caches, cache);
    if (number == 0) {
        dkv_cache_unref(cache);
        return full("caches", session->caches.n, err);
    }
    dkv_session_send_done(session, id, number, 0);
    return DKV_OK;
}

/* The bulk's size is judged before any of it is read: what bounds its allocation are the counts of
 * the message, at most 1024 layers of 1024 heads. */
static enum dkv_status take_cache(struct dkv_session *session,
                                  const struct dkv_wire_conn_message *message,
                                  struct dkv_error *err)
{
    struct dkv_wire_cache wire;
    struct dkv_cache *cache = NULL;
    enum dkv_status status = dkv_wire_get_cache(message->payload, message->header.payload_bytes,
                                                &wire, err);
    if (status == DKV_OK && dkv_wire_cache_bulk_bytes(&wire) != message->header.bulk_bytes)
        status = dkv_error_set(err, DKV_E_MALFORMED, "cache_add: %llu bytes of bulk, %llu belong",
                               (unsigned long long)message->header.bulk_bytes,
                               (unsigned long long)dkv_wire_cache_bulk_bytes(&wire));
    if (status == DKV_OK && (wire.q_heads > DKV_HEADS_MAX || wire.kv_heads > DKV_HEADS_MAX ||
                             wire.kv_heads == 0 || wire.q_heads == 0))
        status = dkv_error_set(err, DKV_E_INVALID, "cache: %u query heads, %u KV heads: 1..%u",
                               wire.q_heads, wire.kv_heads, DKV_HEADS_MAX);
    if (status == DKV_OK)
        status = new_cache(session, &wire, &cache, err);
    if (status != DKV_OK)
        return status;
    if (message->header.bulk_bytes == 0)
        return add_cache(session, message->header.id, cache, err);
    session->bulk.to = (uint8_t *)cache->floats;
    session->bulk.cache = cache;
    return DKV_OK;
}

void dkv_session_cache_received(struct dkv_session *session)
{
    struct dkv_error err = {0};
    struct dkv_cache *cache = session->bulk.cache;
    session->bulk.cache = NULL;
    if (add_cache(session, session->bulk.header.id, cache, &err) != DKV_OK)
        dkv_session_send_error(session, session->bulk.header.id, &err, 0);
}

static enum dkv_status take_stash(struct dkv_session *session,
                                  const struct dkv_wire_conn_message *message,
                                  struct dkv_error *err)
{
    struct dkv_wire_stash *stash = malloc(sizeof(*stash));
    if (stash == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a stash");
    enum dkv_status status = dkv_wire_get_stash(message->payload, message->header.payload_bytes,
                                                stash, err);
    if (status == DKV_OK && (stash->layer_stride < 0 || stash->slot_stride < 0 ||
                             stash->row_stride < 0 || stash->head_stride < 0))
        status = dkv_error_set(err, DKV_E_INVALID, "stash: a stride is negative");
    const uint32_t number = status == DKV_OK ? slots_add(&session->stashes, stash) : 0;
    if (number == 0) {
        free(stash);
        return status != DKV_OK ? status : full("stashes", session->stashes.n, err);
    }
    dkv_session_send_done(session, message->header.id, number, 0);
    return DKV_OK;
}

static enum dkv_status drop_other(struct dkv_session *session,
                                  const struct dkv_wire_conn_message *message,
                                  const struct dkv_wire_object *object, struct dkv_error *err)
{
    const bool is_cache = message->header.type == DKV_WIRE_CACHE_DROP;
    struct dkv_slot *slot = slot_of(is_cache ? &session->caches : &session->stashes,
                                    object->object);
    if (slot == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s %u does not exist",
                             is_cache ? "cache" : "stash", object->object);
    if (is_cache)
        dkv_cache_unref(slot->object);
    else
        free(slot->object);
    *slot = (struct dkv_slot){0};
    dkv_session_send_done(session, message->header.id, object->object, 0);
    return DKV_OK;
}

static enum dkv_status take_drop(struct dkv_session *session,
                                 const struct dkv_wire_conn_message *message, struct dkv_error *err)
{
    struct dkv_wire_object object;
    enum dkv_status status = dkv_wire_get_object(message->payload, message->header.payload_bytes,
                                                 &object, err);
    if (status != DKV_OK)
        return status;
    return message->header.type == DKV_WIRE_REGION_DROP ||
                   message->header.type == DKV_WIRE_REGION_DETACH
               ? release_region(session, message, &object, err)
               : drop_other(session, message, &object, err);
}

bool dkv_session_handle_object(struct dkv_session *session,
                               const struct dkv_wire_conn_message *message)
{
    struct dkv_error err = {0};
    enum dkv_status status;
    switch (message->header.type) {
    case DKV_WIRE_REGION_ADD:
    case DKV_WIRE_REGION_ATTACH: status = take_region(session, message, &err); break;
    case DKV_WIRE_CACHE_ADD: status = take_cache(session, message, &err); break;
    case DKV_WIRE_STASH_ADD: status = take_stash(session, message, &err); break;
    case DKV_WIRE_REGION_DROP:
    case DKV_WIRE_REGION_DETACH:
    case DKV_WIRE_CACHE_DROP:
    case DKV_WIRE_STASH_DROP: status = take_drop(session, message, &err); break;
    default: return false;
    }
    if (status == DKV_E_MALFORMED)
        dkv_session_violation(session, message->header.id, &err);
    else if (status != DKV_OK)
        dkv_session_send_error(session, message->header.id, &err, 0);
    return true;
}

/* ---- the end ---- */

static void free_slots(struct dkv_slots *slots)
{
    free(slots->slots);
    *slots = (struct dkv_slots){0};
}

unsigned dkv_session_free_objects(struct dkv_session *session)
{
    unsigned n_regions = 0;
    for (uint32_t i = 0; session->regions.slots != NULL && i < session->regions.n; i++)
        if (session->regions.slots[i].number != 0) {
            free(dkv_region_abandon(session->regions.slots[i].object));
            n_regions++;
        }
    for (uint32_t i = 0; session->caches.slots != NULL && i < session->caches.n; i++)
        if (session->caches.slots[i].number != 0)
            dkv_cache_unref(session->caches.slots[i].object);
    for (uint32_t i = 0; session->stashes.slots != NULL && i < session->stashes.n; i++)
        if (session->stashes.slots[i].number != 0)
            free(session->stashes.slots[i].object);
    dkv_cache_unref(session->bulk.cache);
    session->bulk.cache = NULL;
    free_slots(&session->regions);
    free_slots(&session->caches);
    free_slots(&session->stashes);
    return n_regions;
}
