/* A list, since there are a few dozen at most and a request looks for three to five.
 *
 * An entry is in the list from the moment its memory was found good here; workers are asked next.
 * If one of them refuses (a CUDA handle that does not open), the entry goes, and whoever waits for
 * the registration is told why.
 */
#include "server/shm.h"

#include "proto/memfd.h"
#include "server/shm_name.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct entry {
    struct dkv_list node;
    struct dkv_shm *shm;
    struct dkv_oip_region told;
    char owner[DKV_CLIENT_NAME_BYTES + 1];
    uint64_t lender; /* of system memory: see lender_of() */
    struct dkv_region *region;
    dkv_shm_registered_fn registered; /* NULL: nobody waits */
    void *waiter;
};

struct dkv_shm {
    struct dkv_server *server;
    struct dkv_list entries;
    unsigned n_entries;
    uint64_t n_ever; /* connections' numbers given to regions, which have none of their own */
};

struct dkv_shm *dkv_shm_open(struct dkv_server *server)
{
    struct dkv_shm *shm = calloc(1, sizeof(*shm));
    if (shm == NULL)
        return NULL;
    shm->server = server;
    dkv_list_init(&shm->entries);
    return shm;
}

static void drop(struct entry *entry)
{
    dkv_list_remove(&entry->node);
    entry->shm->n_entries--;
    (void)dkv_region_abandon(entry->region);
    free(entry);
}

void dkv_shm_close(struct dkv_shm *shm)
{
    struct dkv_list *node;
    if (shm == NULL)
        return;
    while ((node = dkv_list_first(&shm->entries)) != NULL)
        drop(DKV_LIST_OF(node, struct entry, node));
    free(shm);
}

static struct entry *find(const struct dkv_shm *shm, const char *owner, const char *name)
{
    DKV_LIST_EACH (node, &shm->entries) {
        struct entry *entry = DKV_LIST_OF(node, struct entry, node);
        if (strcmp(entry->told.name, name) == 0 && strcmp(entry->owner, owner) == 0)
            return entry;
    }
    return NULL;
}

/* ---- registering ---- */

/* May be called within dkv_region_new(), which has set entry->region by then. */
static void on_settled(void *owner, const struct dkv_error *error)
{
    struct entry *entry = owner;
    const dkv_shm_registered_fn registered = entry->registered;
    void *waiter = entry->waiter;
    const struct dkv_error told = *error;
    entry->registered = NULL;
    if (told.status != DKV_OK)
        drop(entry);
    if (registered != NULL)
        registered(waiter, &told);
}

/* The daemon's number for the GPU is its place in the configuration; clients mean the ordinal. */
static enum dkv_status find_gpu(const struct dkv_shm *shm, uint64_t ordinal,
                                uint8_t uuid_out[DKV_UUID_BYTES], struct dkv_error *err)
{
    uint8_t uuids[DKV_ADMISSION_DEVICES_MAX][DKV_UUID_BYTES];
    char name[DKV_DEVICE_NAME_BYTES], wanted[DKV_DEVICE_NAME_BYTES];
    const unsigned n = dkv_backend_uuids(shm->server->backend, uuids);
    snprintf(wanted, sizeof(wanted), "cuda:%llu", (unsigned long long)ordinal);
    for (unsigned d = 0; d < n && dkv_config_device(shm->server->config, d, name); d++)
        if (strcmp(name, wanted) == 0) {
            memcpy(uuid_out, uuids[d], DKV_UUID_BYTES);
            return DKV_OK;
        }
    return dkv_error_set(err, DKV_E_UNSUPPORTED, "device_id %llu: no worker of this daemon uses it",
                         (unsigned long long)ordinal);
}

static enum dkv_status lend_cuda(struct entry *entry, struct dkv_error *err)
{
    const struct dkv_oip_region *told = &entry->told;
    struct dkv_wire_region wire = {.kind = DKV_WIRE_REGION_CUDA_LEGACY, .bytes = told->bytes};
    enum dkv_status status = find_gpu(entry->shm, told->device, wire.device_uuid, err);
    if (status != DKV_OK)
        return status;
    memcpy(wire.handle, told->handle, sizeof(wire.handle));
    const struct dkv_region_source source = {
        .wire = &wire, .connection = UINT64_MAX - entry->shm->n_ever++, .trusted = true};
    return dkv_region_new(entry->shm->server->backend, &source, on_settled, entry, &entry->region,
                          err);
}

/* The number that the owner's system regions have, as those of one connection: what each owner has
 * pinned is bounded. CUDA handles have one each, so that they are never shared. */
static uint64_t lender_of(const struct entry *fresh)
{
    DKV_LIST_EACH (node, &fresh->shm->entries) {
        const struct entry *entry = DKV_LIST_OF(node, struct entry, node);
        if (entry != fresh && !entry->told.cuda && strcmp(entry->owner, fresh->owner) == 0)
            return entry->lender;
    }
    return UINT64_MAX - fresh->shm->n_ever++;
}

/* Outputs may go there if the object allows it, and where it has no pages, since clients of the
 * protocol make objects by ftruncate() and leave their outputs to the server to fill. Objects are
 * the daemon's own user's, whoever the caller is. */
static enum dkv_status lend_system(struct entry *entry, struct dkv_error *err)
{
    const struct dkv_oip_region *told = &entry->told;
    struct dkv_wire_region wire = {
        .kind = DKV_WIRE_REGION_MEMFD, .offset = told->offset, .bytes = told->bytes};
    struct dkv_memfd_info info;
    const char *name;
    int fd = -1;
    enum dkv_status status = dkv_shm_name_of_key(told->key, &name, err);
    if (status == DKV_OK)
        status = dkv_shm_name_open(name, geteuid(), &fd, err);
    if (status != DKV_OK)
        return status;
    status = dkv_memfd_inspect(fd, &info, err);
    wire.writable = status == DKV_OK && info.writable;
    entry->lender = lender_of(entry);
    const struct dkv_region_source source = {
        .wire = &wire, .fds = &fd, .connection = entry->lender, .uid = geteuid(), .fills = true};
    if (status == DKV_OK)
        status = dkv_region_new(entry->shm->server->backend, &source, on_settled, entry,
                                &entry->region, err);
    close(fd);
    return status;
}

/* Names go back into JSON and into logs: no control characters, no broken UTF-8. */
static enum dkv_status check_name(const char *name, struct dkv_error *err)
{
    for (const char *c = name; *c != '\0'; c++) {
        if (*c < 0x20 || *c > 0x7e)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "the name of a shared memory region has byte 0x%02x at %zu: "
                                 "printable ASCII is allowed",
                                 (unsigned char)*c, (size_t)(c - name));
    }
    return DKV_OK;
}

enum dkv_status dkv_shm_register(struct dkv_shm *shm, const char *owner,
                                 const struct dkv_oip_region *told,
                                 dkv_shm_registered_fn registered, void *waiter,
                                 struct dkv_error *err)
{
    if (check_name(told->name, err) != DKV_OK)
        return err->status;
    if (find(shm, owner, told->name) != NULL)
        return dkv_error_set(err, DKV_E_INVALID,
                             "a shared memory region of that name is registered already");
    if (shm->n_entries >= DKV_SHM_REGIONS_MAX)
        return dkv_error_set(err, DKV_E_BUSY,
                             "%u shared memory regions are registered, the most "
                             "allowed",
                             shm->n_entries);
    struct entry *entry = calloc(1, sizeof(*entry));
    if (entry == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    entry->shm = shm;
    entry->told = *told;
    snprintf(entry->owner, sizeof(entry->owner), "%s", owner);
    entry->registered = registered;
    entry->waiter = waiter;
    dkv_list_push_back(&shm->entries, &entry->node);
    shm->n_entries++;
    const enum dkv_status status = told->cuda ? lend_cuda(entry, err) : lend_system(entry, err);
    if (status != DKV_OK) {
        dkv_list_remove(&entry->node);
        shm->n_entries--;
        free(entry);
    }
    return status;
}

void dkv_shm_forget(struct dkv_shm *shm, const void *waiter)
{
    DKV_LIST_EACH (node, &shm->entries) {
        struct entry *entry = DKV_LIST_OF(node, struct entry, node);
        if (entry->waiter == waiter)
            entry->registered = NULL;
    }
}

/* Unregistered, perhaps before it was registered. */
static void give_up(struct entry *entry)
{
    const dkv_shm_registered_fn registered = entry->registered;
    void *waiter = entry->waiter;
    struct dkv_error err;
    drop(entry);
    dkv_error_set(&err, DKV_E_CANCELLED, "the region was unregistered meanwhile");
    if (registered != NULL)
        registered(waiter, &err);
}

/* ---- using ---- */

enum dkv_status dkv_shm_find(const struct dkv_shm *shm, const char *owner, const char *name,
                             struct dkv_region **region_out, struct dkv_error *err)
{
    const struct entry *entry = find(shm, owner, name);
    if (entry == NULL)
        return dkv_error_set(err, DKV_E_NOT_FOUND, "the shared memory region is not registered");
    if (dkv_region_on_gpu(entry->region) && entry->region->loan->error.status != DKV_OK)
        return dkv_error_set(err, DKV_E_NOT_FOUND,
                             "the shared memory region was lost with its worker and must be "
                             "registered anew");
    *region_out = entry->region;
    return DKV_OK;
}

static bool is_meant(const struct entry *entry, const char *owner, bool cuda, const char *name)
{
    return entry->told.cuda == cuda && strcmp(entry->owner, owner) == 0 &&
           (*name == '\0' || strcmp(entry->told.name, name) == 0);
}

enum dkv_status dkv_shm_status(const struct dkv_shm *shm, const char *owner, bool cuda,
                               const char *name, struct dkv_oip_text *out, struct dkv_error *err)
{
    const struct dkv_oip_region *found[DKV_SHM_REGIONS_MAX];
    size_t n = 0;
    DKV_LIST_EACH (node, &shm->entries) {
        const struct entry *entry = DKV_LIST_OF(node, struct entry, node);
        if (is_meant(entry, owner, cuda, name))
            found[n++] = &entry->told;
    }
    if (n == 0 && *name != '\0')
        return dkv_error_set(err, DKV_E_NOT_FOUND, "the shared memory region is not registered");
    return dkv_oip_region_list(found, n, out);
}

void dkv_shm_unregister(struct dkv_shm *shm, const char *owner, bool cuda, const char *name)
{
    DKV_LIST_EACH_SAFE (node, &shm->entries) {
        struct entry *entry = DKV_LIST_OF(node, struct entry, node);
        if (is_meant(entry, owner, cuda, name))
            give_up(entry);
    }
}
