/* Two lists: mappings with loans, and those that leave. A mapping is released by one function,
 * whoever asks, and only from the second list or at the end.
 */
#include "server/imports.h"

#include "proto/memfd.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct dkv_imported {
    struct dkv_list node;
    bool shared;             /* by key */
    struct dkv_link_key key; /* owner and user alone where it is pinned */
    unsigned n_loans;
    struct dkv_mapping *mapping; /* the engine's */
    void *host;                  /* what is pinned, [host_bytes]; NULL: it is GPU memory */
    uint64_t host_bytes;
    uint32_t number; /* leaving: of the last loan; 0: it never had one */
    uint64_t due_ns;
};

void dkv_imports_init(struct dkv_imports *imports, const struct dkv_engine_ops *ops,
                      struct dkv_engine *engine)
{
    *imports = (struct dkv_imports){.ops = ops, .engine = engine};
    dkv_list_init(&imports->open);
    dkv_list_init(&imports->leaving);
}

static enum dkv_status drop(struct dkv_imports *imports, struct dkv_imported *imported,
                            struct dkv_error *err)
{
    const enum dkv_status status = imports->ops->release(imports->engine, imported->mapping, err);
    if (imported->host != NULL)
        dkv_memfd_unmap(imported->host, imported->host_bytes);
    imports->pinned_bytes -= imported->host_bytes;
    dkv_list_remove(&imported->node);
    free(imported);
    return status;
}

static void drop_all(struct dkv_imports *imports, struct dkv_list *list)
{
    struct dkv_list *node;
    struct dkv_error ignored;
    while ((node = dkv_list_first(list)) != NULL)
        (void)drop(imports, DKV_LIST_OF(node, struct dkv_imported, node), &ignored);
}

void dkv_imports_fini(struct dkv_imports *imports)
{
    if (imports->ops == NULL)
        return;
    drop_all(imports, &imports->open);
    drop_all(imports, &imports->leaving);
}

static bool same_key(const struct dkv_link_key *a, const struct dkv_link_key *b)
{
    return a->owner == b->owner && a->generation == b->generation &&
           memcmp(a->handle, b->handle, sizeof(a->handle)) == 0;
}

static struct dkv_imported *find(struct dkv_imports *imports, const struct dkv_link_loan *loan)
{
    if (loan->memory != DKV_LINK_CUDA_LEGACY)
        return NULL;
    DKV_LIST_EACH (node, &imports->open) {
        struct dkv_imported *imported = DKV_LIST_OF(node, struct dkv_imported, node);
        if (imported->shared && same_key(&imported->key, &loan->key))
            return imported;
    }
    return NULL;
}

static enum dkv_status check_bounds(const struct dkv_link_loan *loan,
                                    const struct dkv_mapping *mapping, struct dkv_error *err)
{
    if (loan->offset >= mapping->first &&
        dkv_range_fits(loan->offset - mapping->first, loan->bytes, mapping->bytes))
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "region: %" PRIu64 " bytes at %" PRIu64
                         " are not within what was allocated, %" PRIu64 " bytes at %" PRIu64,
                         loan->bytes, loan->offset, mapping->bytes, mapping->first);
}

static enum dkv_status import(struct dkv_imports *imports, const struct dkv_link_loan *loan,
                              const struct dkv_import_chunk *chunks,
                              struct dkv_imported **imported_out, struct dkv_error *err)
{
    const bool legacy = loan->memory == DKV_LINK_CUDA_LEGACY;
    const struct dkv_import from = {
        .handle = legacy ? loan->key.handle : NULL,
        .chunks = legacy ? NULL : chunks,
        .n_chunks = legacy ? 0 : loan->n_chunks,
    };
    struct dkv_imported *imported = calloc(1, sizeof(*imported));
    if (imported == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "region: out of memory");
    const enum dkv_status status = imports->ops->import(imports->engine, &from, &imported->mapping,
                                                        err);
    if (status != DKV_OK) {
        free(imported);
        return status;
    }
    imported->shared = legacy;
    imported->key = loan->key;
    dkv_list_init(&imported->node);
    dkv_list_push_back(&imports->open, &imported->node);
    *imported_out = imported;
    return DKV_OK;
}

static void leave(struct dkv_imports *imports, struct dkv_imported *imported, uint32_t number,
                  uint64_t due_ns)
{
    imported->number = number;
    imported->due_ns = due_ns;
    dkv_list_remove(&imported->node);
    dkv_list_push_back(&imports->leaving, &imported->node);
}

enum dkv_status dkv_imports_attach(struct dkv_imports *imports, const struct dkv_link_loan *loan,
                                   const struct dkv_import_chunk *chunks,
                                   struct dkv_imported **imported_out, const void **base_out,
                                   struct dkv_error *err)
{
    if (imports->ops == NULL || imports->ops->import == NULL)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "region: the %s engine cannot read GPU memory",
                             imports->ops != NULL ? imports->ops->name : "missing");
    struct dkv_imported *imported = find(imports, loan);
    enum dkv_status status = DKV_OK;
    if (imported == NULL)
        status = import(imports, loan, chunks, &imported, err);
    if (status != DKV_OK)
        return status;
    status = check_bounds(loan, imported->mapping, err);
    if (status != DKV_OK) {
        if (imported->n_loans == 0)
            leave(imports, imported, 0, 0);
        return status;
    }
    imported->n_loans++;
    *imported_out = imported;
    *base_out = (const unsigned char *)imported->mapping->base +
                (loan->offset - imported->mapping->first);
    return DKV_OK;
}

/* Of one connection, and of its user. */
struct pinned {
    uint64_t owner, user;
};

static void add_pinned(const struct dkv_list *list, const struct dkv_link_key *key,
                       struct pinned *to)
{
    DKV_LIST_EACH (node, list) {
        const struct dkv_imported *imported = DKV_LIST_OF(node, struct dkv_imported, node);
        to->owner += imported->key.owner == key->owner ? imported->host_bytes : 0;
        to->user += imported->key.user == key->user ? imported->host_bytes : 0;
    }
}

/* What leaves is still pinned. */
static bool may_pin(const struct dkv_imports *imports, const struct dkv_link_loan *loan)
{
    struct pinned held = {0, 0};
    add_pinned(&imports->open, &loan->key, &held);
    add_pinned(&imports->leaving, &loan->key, &held);
    return loan->bytes <= DKV_IMPORTS_PIN_MAX - imports->pinned_bytes &&
           held.owner <= DKV_IMPORTS_PIN_SHARE && held.user <= DKV_IMPORTS_PIN_USER &&
           loan->bytes <= DKV_IMPORTS_PIN_SHARE - held.owner &&
           loan->bytes <= DKV_IMPORTS_PIN_USER - held.user;
}

enum dkv_status dkv_imports_pin(struct dkv_imports *imports, const struct dkv_link_loan *loan,
                                void *base, struct dkv_imported **imported_out,
                                struct dkv_error *err)
{
    *imported_out = NULL;
    if (imports->ops == NULL || imports->ops->import == NULL || !may_pin(imports, loan))
        return DKV_OK;
    const struct dkv_import from = {.host = base, .host_bytes = loan->bytes};
    struct dkv_imported *imported = calloc(1, sizeof(*imported));
    if (imported == NULL)
        return DKV_OK;
    const enum dkv_status status = imports->ops->import(imports->engine, &from, &imported->mapping,
                                                        err);
    if (status != DKV_OK) {
        free(imported);
        return status == DKV_E_DEVICE ? status : DKV_OK;
    }
    imported->key = loan->key;
    imported->host = base;
    imported->host_bytes = loan->bytes;
    imported->n_loans = 1;
    imports->pinned_bytes += loan->bytes;
    dkv_list_init(&imported->node);
    dkv_list_push_back(&imports->open, &imported->node);
    *imported_out = imported;
    return DKV_OK;
}

bool dkv_imports_detach(struct dkv_imports *imports, struct dkv_imported *imported, uint32_t number,
                        uint64_t now_ns)
{
    assert(imported->n_loans > 0);
    if (--imported->n_loans > 0)
        return true;
    leave(imports, imported, number, now_ns + DKV_IMPORTS_LEAVE_NS);
    return false;
}

uint64_t dkv_imports_due_ns(const struct dkv_imports *imports)
{
    const struct dkv_list *node = dkv_list_first(&imports->leaving);
    return node != NULL ? DKV_LIST_OF(node, struct dkv_imported, node)->due_ns : UINT64_MAX;
}

enum dkv_status dkv_imports_release(struct dkv_imports *imports, uint32_t *number_out,
                                    struct dkv_error *err)
{
    struct dkv_imported *imported = DKV_LIST_OF(dkv_list_first(&imports->leaving),
                                                struct dkv_imported, node);
    *number_out = imported->number;
    return drop(imports, imported, err);
}
