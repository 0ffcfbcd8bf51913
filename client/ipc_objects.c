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

void dkv_ipc_object_add(struct dkv_transport *t, enum dkv_ipc_kind kind,
                        struct dkv_ipc_object *object)
{
    struct dkv_ipc_object **end = &t->objects[kind];
    while (*end != NULL)
        end = &(*end)->next;
    *end = object;
}

void dkv_ipc_object_unlink(struct dkv_transport *t, enum dkv_ipc_kind kind,
                           struct dkv_ipc_object *object)
{
    struct dkv_ipc_object **at = &t->objects[kind];
    while (*at != object)
        at = &(*at)->next;
    *at = object->next;
}

bool dkv_ipc_object_has(const struct dkv_transport *t, enum dkv_ipc_kind kind, const void *handle)
{
    const struct dkv_ipc_object *object = t->objects[kind];
    while (object != NULL && object != handle)
        object = object->next;
    return object != NULL;
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
bool dkv_ipc_object_find(const struct dkv_transport *t, struct dkv_ipc_object *object,
                         const struct dropkv_buffer *buffer, const char *what, uint32_t *number_out)
{
    if (dkv_ipc_region_number(t, buffer, what, number_out, &object->why) == DKV_OK)
        return *number_out != 0;
    object->refused = true;
    return false;
}

enum dkv_status dkv_ipc_object_send(struct dkv_transport *t, struct dkv_ipc_object *object,
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

/* What found no room is tried again. */
void dkv_ipc_objects_register(struct dkv_transport *t)
{
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        for (struct dkv_ipc_object *o = t->objects[kind]; o != NULL; o = o->next) {
            if (o->number != 0 || o->add_id != 0 || o->refused)
                continue;
            if (kind == DKV_IPC_CACHE)
                dkv_ipc_cache_send(t, (struct dropkv_cache *)(void *)o);
            else if (kind == DKV_IPC_STASH)
                dkv_ipc_stash_send(t, (struct dropkv_stash *)(void *)o);
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

/* ---- objects that go before they have come ---- */

static void send_drop(struct dkv_transport *t, uint8_t type, uint32_t number)
{
    uint8_t payload[8];
    uint64_t id;
    dkv_wire_put_object(payload, &(struct dkv_wire_object){number, 0});
    (void)dkv_ipc_send(t, type, payload, sizeof(payload), &id);
}

/* The message that registers it is on its way: its number, once it is known, is dropped. */
static void drop_later(struct dkv_transport *t, uint8_t type, uint64_t add_id)
{
    struct dkv_ipc_leaving *leaving = malloc(sizeof(*leaving));
    if (leaving == NULL)
        return; /* the daemon has it until the connection ends */
    *leaving = (struct dkv_ipc_leaving){t->leaving, add_id, type};
    t->leaving = leaving;
}

/* `number` 0: the daemon refused it. */
static bool drop_now(struct dkv_transport *t, uint64_t add_id, uint32_t number)
{
    struct dkv_ipc_leaving **at = &t->leaving;
    while (*at != NULL && (*at)->add_id != add_id)
        at = &(*at)->next;
    struct dkv_ipc_leaving *leaving = *at;
    if (leaving == NULL)
        return false;
    *at = leaving->next;
    if (number != 0)
        send_drop(t, leaving->type, number);
    free(leaving);
    return true;
}

static void forget_leaving(struct dkv_transport *t)
{
    while (t->leaving != NULL) {
        struct dkv_ipc_leaving *leaving = t->leaving;
        t->leaving = leaving->next;
        free(leaving);
    }
}

/* Where there is no room now the number stays the daemon's until the connection ends. */
void dkv_ipc_object_drop(struct dkv_transport *t, uint8_t type, const struct dkv_ipc_object *object)
{
    if (object->number != 0)
        send_drop(t, type, object->number);
    else if (object->add_id != 0)
        drop_later(t, type, object->add_id);
}

/* ---- what the daemon answers ---- */

void dkv_ipc_objects_forget(struct dkv_transport *t)
{
    forget_leaving(t);
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
    if (drop_now(t, id, number))
        return;
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
    if (drop_now(t, id, 0))
        return true;
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
    dkv_ipc_object_add(t, DKV_IPC_REGION, &region->object);
    return DKV_OK;
}

void dkv_ipc_remove_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer)
{
    struct dkv_ipc_region *region = region_of(t, buffer);
    if (region == NULL)
        return;
    dkv_ipc_object_drop(t, DKV_WIRE_REGION_DROP, &region->object);
    dkv_ipc_object_unlink(t, DKV_IPC_REGION, &region->object);
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
enum dkv_status dkv_ipc_detach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
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
enum dkv_status dkv_ipc_attach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
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

/* ---- the end ---- */

void dkv_ipc_objects_fini(struct dkv_transport *t)
{
    struct dkv_ipc_object *o;
    forget_leaving(t);
    while ((o = t->objects[DKV_IPC_CACHE]) != NULL) {
        t->objects[DKV_IPC_CACHE] = o->next;
        dkv_ipc_cache_free((struct dropkv_cache *)(void *)o);
    }
    for (int kind = 0; kind < DKV_IPC_KINDS; kind++)
        while ((o = t->objects[kind]) != NULL) {
            t->objects[kind] = o->next;
            free(o);
        }
}
