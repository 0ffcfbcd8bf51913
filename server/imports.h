/* GPU memory that a worker has imported for its clients' loans, and host memory that its device
 * writes answers to.
 *
 * A legacy handle stands for a whole allocation: loans of one key (connection, handle, generation)
 * share one mapping of it, counted. Loans of chunks have a mapping each. Bounds are arithmetic
 * against what the driver says was allocated, since reading past it does not fault.
 *
 * A mapping whose last loan has gone is never handed out again, even while it is still there: its
 * owner may have freed the memory, and a handle may come to mean something else. It leaves when
 * nothing runs on the device, since unmapping may wait for kernels and hold up launches meanwhile;
 * whoever serves looks at due_ns() so that a busy device lets it go in time.
 *
 * Owner   the worker's; every call on the engine's thread.
 * Errors  attach: INVALID if the loan lies outside; otherwise the engine's import().
 */
#ifndef DKV_SERVER_IMPORTS_H
#define DKV_SERVER_IMPORTS_H

#include "server/link.h"
#include "server/list.h"

#define DKV_IMPORTS_LEAVE_NS  UINT64_C(50000000)  /* patience with a device that is never idle */
#define DKV_IMPORTS_PIN_MAX   (UINT64_C(1) << 30) /* bytes of host memory, of all clients */
#define DKV_IMPORTS_PIN_SHARE (DKV_IMPORTS_PIN_MAX / 2)     /* of one connection */
#define DKV_IMPORTS_PIN_USER  (DKV_IMPORTS_PIN_MAX / 4 * 3) /* of all connections of one user */

struct dkv_imports {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    struct dkv_list open;    /* mappings with loans */
    struct dkv_list leaving; /* without, oldest first */
    uint64_t pinned_bytes;
};

struct dkv_imported; /* one mapping */

void dkv_imports_init(struct dkv_imports *imports, const struct dkv_engine_ops *ops,
                      struct dkv_engine *engine);

/* Releases everything. Nothing may run. */
void dkv_imports_fini(struct dkv_imports *imports);

/* The device address of the loan's first byte goes to *base_out. The chunks' descriptors stay the
 * caller's. */
enum dkv_status dkv_imports_attach(struct dkv_imports *imports, const struct dkv_link_loan *loan,
                                   const struct dkv_import_chunk *chunks,
                                   struct dkv_imported **imported_out, const void **base_out,
                                   struct dkv_error *err);

/* Pins host memory of a loan, which dkv_memfd_map() has mapped, for a device that can write it
 * then. It is unmapped with its release; *imported_out is NULL if it was not pinned, which is no
 * error. DEVICE. */
enum dkv_status dkv_imports_pin(struct dkv_imports *imports, const struct dkv_link_loan *loan,
                                void *base, struct dkv_imported **imported_out,
                                struct dkv_error *err);

/* True: others still use the mapping, and the loan is gone. False: the mapping leaves, and its
 * release is told as that of `number`. */
bool dkv_imports_detach(struct dkv_imports *imports, struct dkv_imported *imported, uint32_t number,
                        uint64_t now_ns);

/* When the oldest of those that leave has waited long enough; UINT64_MAX: none does. */
uint64_t dkv_imports_due_ns(const struct dkv_imports *imports);

/* Releases the oldest that leaves; there must be one. *number_out is what detach() was told, or 0
 * if nobody waits. DEVICE: the device is lost. */
enum dkv_status dkv_imports_release(struct dkv_imports *imports, uint32_t *number_out,
                                    struct dkv_error *err);

#endif
