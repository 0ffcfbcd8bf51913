/* What the daemon knows by number: regions (buffers), caches and stashes.
 *
 * An object is there from the moment it was added; the daemon is told as soon as the connection
 * allows, and again on every connection, since it forgets a connection's objects with it. Caches
 * and stashes name regions, so they wait until those have their numbers. What the daemon refuses is
 * not tried again before the next connection: the reason is the answer of whoever needs it. A
 * region that is refused makes no plain request fail: its tensors are sent instead.
 */
#include "client/ipc_priv.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- lists ---- */

static void append(struct dkv_transport *t, enum dkv_ipc_kind kind, struct dkv_ipc_object *object)
{
    struct dkv_ipc_object **end = &t->objects[kind];
    while (*end != NULL)
        end = &(*end)->next;
    *end = object;
}

static void unlink_object(struct dkv_transport *t, enum dkv_ipc_kind kind,
                          struct dkv_ipc_object *object)
{
    struct dkv_ipc_object **at = &t->objects[kind];
    while (*at != object)
        at = &(*at)->next;
    *at = object->next;
}

/* Regions, caches and stashes begin with their object. */
static struct dkv_ipc_region *as_region(struct dkv_ipc_object *object)
{
    return (struct dkv_ipc_region *)(void *)object;
}

static struct dkv_ipc_region *region_of(const struct dkv_transport *t,
                                        const struct dropkv_buffer *buffer)
{
    struct dkv_ipc_object *object = t->objects[DKV_IPC_REGION];
    while (object != NULL && as_region(object)->buffer != buffer)
        object = object->next;
    return as_region(object);
}

const struct dkv_ipc_region *dkv_ipc_region_find(const struct dkv_transport *t, const void *at,
                                                 uint64_t bytes, uint64_t *offset_out)
{
    for (struct dkv_ipc_object *o = t->objects[DKV_IPC_REGION]; o != NULL; o = o->next)
        if (o->number != 0 && !as_region(o)->detached &&
            dkv_buffer_holds(as_region(o)->buffer, at, bytes, offset_out))
            return as_region(o);
    return NULL;
}

enum dkv_status dkv_ipc_check_copying(const struct dkv_transport *t, const void *at, uint64_t bytes,
                                      struct dkv_error *err)
{
    uint64_t offset;
    for (struct dkv_ipc_object *o = t->objects[DKV_IPC_REGION]; o != NULL; o = o->next) {
        const struct dropkv_buffer *buffer = as_region(o)->buffer;
        if (!dkv_buffer_is_gpu_at(buffer, at))
            continue;
        if (!dkv_buffer_holds(buffer, at, bytes, &offset))
            return dkv_error_set(
                err, DKV_E_INVALID,
                "tensor: %llu bytes from its pointer on, its buffer of GPU memory ends before",
                (unsigned long long)bytes);
        if (as_region(o)->detached)
            return dkv_error_set(err, DKV_E_NOT_FOUND, "tensor: its buffer is detached");
        return dkv_error_set(err, o->why.status, "%s", o->why.text);
    }
    return DKV_OK;
}

enum dkv_status dkv_ipc_region_number(const struct dkv_transport *t,
                                      const struct dropkv_buffer *buffer, const char *what,
                                      uint32_t *number_out, struct dkv_error *err)
{
    const struct dkv_ipc_region *region = region_of(t, buffer);
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s: the buffer was not added to this client",
                             what);
    if (region->detached)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "%s: the buffer is detached", what);
    if (region->object.refused)
        return dkv_error_set(err, region->object.why.status, "%s: %.200s", what,
                             region->object.why.text);
    *number_out = region->object.number;
    return DKV_OK;
}

/* ---- registering ---- */

/* What finds no room is tried again; memory that cannot be described (GPU memory that is not
 * exported) is refused like what the daemon refuses. */
static enum dkv_status add_region(struct dkv_transport *t, struct dkv_ipc_region *region)
{
    struct dkv_buffer_message message;
    struct dkv_error err;
    const struct dkv_wire_region wire = {.region = region->object.number,
                                         .generation = region->generation,
                                         .writable = region->writable};
    enum dkv_status status = dkv_buffer_describe(region->buffer, wire, &message, &err);
    if (status != DKV_OK) {
        region->object.refused = region->buffer->on_gpu;
        region->object.why = err;
        return status;
    }
    status = dkv_wire_conn_send(
        t->conn,
        &(struct dkv_wire_conn_output){.type = wire.region != 0 ? DKV_WIRE_REGION_ATTACH
                                                                : DKV_WIRE_REGION_ADD,
                                       .id = t->last_id + 1,
                                       .payload = message.payload,
                                       .payload_bytes = message.payload_bytes,
                                       .fds = message.fds,
                                       .n_fds = message.n_fds},
        &err);
    if (status == DKV_OK)
        region->object.add_id = ++t->last_id;
    for (uint16_t i = 0; status != DKV_OK && i < message.n_fds; i++)
        close(message.fds[i]); /* else the connection closes them when they are sent */
    return status;
}

/* Finds the region of something that lies in a buffer. False: not yet, or never (`refused`). */
static bool find_dependency(const struct dkv_transport *t, struct dkv_ipc_object *object,
                            const struct dropkv_buffer *buffer, const char *what,
                            uint32_t *number_out)
{
    if (dkv_ipc_region_number(t, buffer, what, number_out, &object->why) == DKV_OK)
        return *number_out != 0;
    object->refused = true;
    return false;
}

static enum dkv_status send_object(struct dkv_transport *t, struct dkv_ipc_object *object,
                                   uint8_t type, size_t payload_bytes, struct dkv_ipc_bulk *bulk,
                                   uint64_t bulk_bytes)
{
    struct dkv_error ignored;
    const struct dkv_wire_conn_output output = {
        .type = type,
        .id = t->last_id + 1,
        .payload = t->payload,
        .payload_bytes = payload_bytes,
        .bulk = bulk != NULL ? bulk->bytes : NULL,
        .bulk_bytes = bulk_bytes,
    };
    const enum dkv_status status = dkv_wire_conn_send(t->conn, &output, &ignored);
    if (status != DKV_OK) {
        dkv_ipc_bulk_put(t, bulk);
        return status;
    }
    object->add_id = ++t->last_id;
    if (bulk != NULL)
        dkv_ipc_bulk_given(t, bulk);
    return DKV_OK;
}

static void add_cache(struct dkv_transport *t, struct dropkv_cache *cache)
{
    const uint32_t n_views = 2u * cache->wire.n_layers;
    const uint64_t bulk_bytes = dkv_wire_cache_bulk_bytes(&cache->wire);
    struct dkv_ipc_bulk *bulk = NULL;
    size_t n = dkv_wire_put_cache(t->payload, &cache->wire);
    for (uint32_t i = 0; i < n_views; i++) {
        struct dkv_ipc_view *view = &cache->views[i];
        if (!find_dependency(t, &cache->object, view->buffer, "cache", &view->wire.region))
            return;
        n += dkv_wire_put_view(t->payload + n, &view->wire);
    }
    if (bulk_bytes > 0) {
        bulk = dkv_ipc_bulk_get(t, bulk_bytes);
        if (bulk == NULL) {
            cache->object.refused = true;
            dkv_error_set(&cache->object.why, DKV_E_NOMEM, "no memory for a cache");
            return;
        }
        memcpy(bulk->bytes, cache->floats, bulk_bytes);
    }
    (void)send_object(t, &cache->object, DKV_WIRE_CACHE_ADD, n, bulk, bulk_bytes);
}

static void add_stash(struct dkv_transport *t, struct dropkv_stash *stash)
{
    if (find_dependency(t, &stash->object, stash->buffer, "stash", &stash->wire.region))
        (void)send_object(t, &stash->object, DKV_WIRE_STASH_ADD,
                          dkv_wire_put_stash(t->payload, &stash->wire), NULL, 0);
}

/* What found no room is tried again. */
void dkv_ipc_objects_register(struct dkv_transport *t)
{
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next) {
            if (o->number != 0 || o->add_id != 0 || o->refused)
                continue;
            if (kind == DKV_IPC_CACHE)
                add_cache(t, (struct dropkv_cache *)(void *)o);
            else if (kind == DKV_IPC_STASH)
                add_stash(t, (struct dropkv_stash *)(void *)o);
            else if (!as_region(o)->detached)
                (void)add_region(t, as_region(o));
        }
}

bool dkv_ipc_objects_settled(const struct dkv_transport *t)
{
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next)
            if (o->number == 0 && !o->refused &&
                !(kind == DKV_IPC_REGION && as_region(o)->detached))
                return false;
    return true;
}

void dkv_ipc_objects_forget(struct dkv_transport *t)
{
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next) {
            o->number = 0;
            o->add_id = 0;
            o->refused = false;
            if (kind == DKV_IPC_REGION)
                as_region(o)->detach_id = 0; /* nobody has it now */
        }
}

void dkv_ipc_objects_done(struct dkv_transport *t, uint64_t id, uint32_t number)
{
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next) {
            if (o->add_id == id) {
                o->number = number;
                o->add_id = 0;
            }
            if (kind == DKV_IPC_REGION && as_region(o)->detach_id == id)
                as_region(o)->detach_id = 0;
        }
}

bool dkv_ipc_objects_refused(struct dkv_transport *t, uint64_t id, const struct dkv_error *why)
{
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next) {
            if (kind == DKV_IPC_REGION && as_region(o)->detach_id == id) {
                as_region(o)->detach_id = 0;
                return true;
            }
            if (o->add_id != id)
                continue;
            o->add_id = 0;
            o->number = 0;
            o->refused = true;
            o->why = *why;
            return true;
        }
    return false;
}

/* ---- buffers ---- */

enum dkv_status dkv_ipc_add_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                                   bool writable, struct dkv_error *err)
{
    if (region_of(t, buffer) != NULL)
        return dkv_error_set(err, DKV_E_INVALID, "the buffer was added to this client already");
    struct dkv_ipc_region *region = calloc(1, sizeof(*region));
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a buffer");
    region->buffer = buffer;
    region->writable = writable;
    append(t, DKV_IPC_REGION, &region->object);
    return DKV_OK;
}

/* Tells the daemon that an object's number is no longer used. Where there is no room now the number
 * stays the daemon's until the connection ends. */
static void drop_number(struct dkv_transport *t, uint8_t type, const struct dkv_ipc_object *object)
{
    uint8_t payload[8];
    uint64_t id;
    if (object->number == 0)
        return;
    dkv_wire_put_object(payload, &(struct dkv_wire_object){object->number, 0});
    (void)dkv_ipc_send(t, type, payload, sizeof(payload), &id);
}

void dkv_ipc_remove_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer)
{
    struct dkv_ipc_region *region = region_of(t, buffer);
    if (region == NULL)
        return;
    drop_number(t, DKV_WIRE_REGION_DROP, &region->object);
    unlink_object(t, DKV_IPC_REGION, &region->object);
    free(region);
}

static bool is_let_go(const struct dkv_transport *t, const void *what)
{
    (void)t;
    return ((const struct dkv_ipc_region *)what)->detach_id == 0;
}

static bool is_settled(const struct dkv_transport *t, const void *what)
{
    (void)t;
    return ((const struct dkv_ipc_object *)what)->add_id == 0;
}

/* The connection's end lets go of the memory too. */
static enum dkv_status detach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                              int64_t deadline_ns, struct dkv_error *err)
{
    uint8_t payload[8];
    struct dkv_ipc_region *region = region_of(t, buffer);
    enum dkv_status status = DKV_OK;
    if (region == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "the buffer was not added to this client");
    if (t->conn != NULL && region->object.add_id != 0) /* it may be on its way */
        status = dkv_ipc_wait(t, is_settled, &region->object, deadline_ns, err);
    if (status == DKV_E_TIMEOUT)
        return status;
    if (t->conn == NULL || region->object.number == 0) {
        region->detached = true;
        return DKV_OK;
    }
    if (!region->detached) {
        dkv_wire_put_object(payload, &(struct dkv_wire_object){region->object.number, 0});
        status = dkv_ipc_send(t, DKV_WIRE_REGION_DETACH, payload, sizeof(payload),
                              &region->detach_id);
        if (status != DKV_OK)
            return dkv_error_set(err, status, "the connection is full");
        region->detached = true;
    }
    status = dkv_ipc_wait(t, is_let_go, region, deadline_ns, err);
    return status == DKV_E_UNAVAILABLE ? DKV_OK : status;
}

/* Caches and stashes that could not be registered without it are tried again. */
static enum dkv_status attach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                              struct dkv_error *err)
{
    struct dkv_ipc_region *region = region_of(t, buffer);
    if (region == NULL || !region->detached)
        return dkv_error_set(err, DKV_E_INVALID, "the buffer is not detached");
    region->detached = false;
    region->generation++;
    for (int kind = DKV_IPC_CACHE; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next)
            o->refused = false;
    if (t->conn != NULL && region->object.number != 0 && add_region(t, region) != DKV_OK)
        return dkv_error_set(err, DKV_E_BUSY, "the connection is full");
    return DKV_OK;
}

/* ---- caches ---- */

static enum dkv_status take_view(const struct dropkv_view *from, const char *what,
                                 struct dkv_ipc_view *to, struct dkv_error *err)
{
    if (from->buffer == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "%s: buffer is null", what);
    if (dkv_dtype_bytes((enum dkv_dtype)from->dtype) == 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "%s: dtype %d is not one of BF16, FP16, FP32, F8_E4M3, F8_E5M2", what,
                             (int)from->dtype);
    *to = (struct dkv_ipc_view){from->buffer,
                                {.dtype = (uint8_t)from->dtype,
                                 .scale = from->scale,
                                 .offset = from->offset,
                                 .page_stride = from->page_stride,
                                 .token_stride = from->token_stride,
                                 .head_stride = from->head_stride}};
    return DKV_OK;
}

/* The first of a message's floats, and where the next ones go. */
static float *copy_floats(float *to, const float *from, uint64_t n)
{
    if (from == NULL)
        return to;
    memcpy(to, from, n * sizeof(float));
    return to + n;
}

static enum dkv_status fill_cache(struct dropkv_cache *cache,
                                  const struct dropkv_cache_layout *layout, struct dkv_error *err)
{
    const uint64_t n = layout->n_layers;
    const uint64_t bulk_bytes = dkv_wire_cache_bulk_bytes(&cache->wire);
    cache->views = calloc(2 * n, sizeof(cache->views[0]));
    cache->floats = malloc(bulk_bytes > 0 ? bulk_bytes : 1);
    if (cache->views == NULL || cache->floats == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache of %llu layers",
                             (unsigned long long)n);
    float *next = copy_floats(cache->floats, layout->head_scales, 2 * n * layout->kv_heads);
    copy_floats(next, layout->sink_logits, n * layout->q_heads);
    enum dkv_status status = DKV_OK;
    for (uint64_t i = 0; status == DKV_OK && i < n; i++) {
        status = take_view(&layout->layers[i].key, "key", &cache->views[2 * i], err);
        if (status == DKV_OK)
            status = take_view(&layout->layers[i].value, "value", &cache->views[2 * i + 1], err);
    }
    return status;
}

static void free_cache(struct dropkv_cache *cache)
{
    free(cache->views);
    free(cache->floats);
    free(cache);
}

static enum dkv_status check_layout(const struct dropkv_cache_layout *layout, struct dkv_error *err)
{
    if (layout->n_layers == 0 || layout->n_layers > DKV_WIRE_LAYERS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "n_layers %u not in 1..%u", layout->n_layers,
                             DKV_WIRE_LAYERS_MAX);
    if (layout->layers == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "layers is null");
    if (layout->kv_heads == 0 || layout->kv_heads > DKV_HEADS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "kv_heads %u not in 1..%u", layout->kv_heads,
                             DKV_HEADS_MAX);
    if (layout->q_heads == 0 || layout->q_heads > DKV_HEADS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "q_heads %u not in 1..%u", layout->q_heads,
                             DKV_HEADS_MAX);
    return DKV_OK;
}

static enum dkv_status new_cache(struct dkv_transport *t, const struct dropkv_cache_layout *layout,
                                 struct dropkv_cache **cache_out, struct dkv_error *err)
{
    enum dkv_status status = check_layout(layout, err);
    if (status != DKV_OK)
        return status;
    struct dropkv_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a cache");
    cache->transport = t;
    cache->wire = (struct dkv_wire_cache){
        .q_heads = layout->q_heads,
        .kv_heads = layout->kv_heads,
        .head_dim = layout->head_dim,
        .v_dim = layout->v_dim,
        .page_tokens = layout->page_tokens,
        .n_layers = (uint16_t)layout->n_layers,
        .scales = layout->head_scales != NULL ? DKV_WIRE_SCALES_HEAD : DKV_WIRE_SCALES_VIEW,
        .has_sinks = layout->sink_logits != NULL,
        .scale = layout->scale,
        .logit_softcap = layout->logit_softcap,
    };
    status = fill_cache(cache, layout, err);
    if (status != DKV_OK) {
        free_cache(cache);
        return status;
    }
    append(t, DKV_IPC_CACHE, &cache->object);
    *cache_out = cache;
    return DKV_OK;
}

/* ---- stashes ---- */

static enum dkv_status new_stash(struct dkv_transport *t, const struct dropkv_stash_layout *layout,
                                 struct dropkv_stash **stash_out, struct dkv_error *err)
{
    if (layout->buffer == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "buffer is null");
    if (layout->n_layers == 0 || layout->n_layers > DKV_WIRE_LAYERS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "n_layers %u not in 1..%u", layout->n_layers,
                             DKV_WIRE_LAYERS_MAX);
    if (layout->n_slots == 0 || layout->n_rows == 0)
        return dkv_error_set(err, DKV_E_INVALID, "%s is 0",
                             layout->n_slots == 0 ? "n_slots" : "n_rows");
    if (dkv_dtype_bytes((enum dkv_dtype)layout->dtype) < 2)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "dtype %d is not one of BF16, FP16, FP32",
                             (int)layout->dtype);
    struct dropkv_stash *stash = calloc(1, sizeof(*stash));
    if (stash == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a stash");
    stash->transport = t;
    stash->buffer = layout->buffer;
    stash->wire = (struct dkv_wire_stash){
        .n_slots = layout->n_slots,
        .n_rows = layout->n_rows,
        .n_layers = (uint16_t)layout->n_layers,
        .dtype = (uint8_t)layout->dtype,
        .offset = layout->offset,
        .layer_stride = layout->layer_stride,
        .slot_stride = layout->slot_stride,
        .row_stride = layout->row_stride,
        .head_stride = layout->head_stride,
    };
    append(t, DKV_IPC_STASH, &stash->object);
    *stash_out = stash;
    return DKV_OK;
}

/* ---- the end ---- */

/* Prompts that name it and are not with the daemon will find nothing. */
static void forget_names(struct dkv_transport *t, const void *object)
{
    for (struct dkv_ipc_carrier *c = t->first; c != NULL; c = c->next) {
        struct dropkv_prompt *prompt = &c->job->call.prompt;
        if (!c->job->call.is_prompt)
            continue;
        prompt->cache = (const void *)prompt->cache == object ? NULL : prompt->cache;
        prompt->stash = (const void *)prompt->stash == object ? NULL : prompt->stash;
    }
}

static void remove_cache(struct dkv_transport *t, struct dropkv_cache *cache)
{
    drop_number(t, DKV_WIRE_CACHE_DROP, &cache->object);
    unlink_object(t, DKV_IPC_CACHE, &cache->object);
    forget_names(t, cache);
    free_cache(cache);
}

static void remove_stash(struct dkv_transport *t, struct dropkv_stash *stash)
{
    drop_number(t, DKV_WIRE_STASH_DROP, &stash->object);
    unlink_object(t, DKV_IPC_STASH, &stash->object);
    forget_names(t, stash);
    free(stash);
}

void dkv_ipc_objects_fini(struct dkv_transport *t)
{
    struct dkv_ipc_object *o;
    while ((o = t->objects[DKV_IPC_CACHE]) != NULL) {
        t->objects[DKV_IPC_CACHE] = o->next;
        free_cache((struct dropkv_cache *)(void *)o);
    }
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        while ((o = t->objects[kind]) != NULL) {
            t->objects[kind] = o->next;
            free(o);
        }
}

const struct dkv_transport_objects dkv_ipc_objects = {
    .add_cache = new_cache,
    .add_stash = new_stash,
    .remove_cache = remove_cache,
    .remove_stash = remove_stash,
    .detach = detach,
    .attach = attach,
};
