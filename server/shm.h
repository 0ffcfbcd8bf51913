/* Shared memory that HTTP clients have registered under names: the Open Inference Protocol's system
 * and CUDA extensions, over the same regions as the local socket's (server/region.h).
 *
 * HTTP carries no identity but a token, so names belong to a token's holder, and to everybody
 * without one: the holder of another token can neither use, nor list, nor unregister them. A region
 * that is unregistered while requests use it goes when the last of them has been answered.
 *
 * Owner   the server.
 * Thread  loop.
 */
#ifndef DKV_SERVER_SHM_H
#define DKV_SERVER_SHM_H

#include "proto/oip.h"
#include "server/region.h"
#include "server/server.h"

#define DKV_SHM_REGIONS_MAX 1024u

struct dkv_shm;

/* NULL if there is no memory. */
struct dkv_shm *dkv_shm_open(struct dkv_server *server);
void dkv_shm_close(struct dkv_shm *shm); /* NULL is fine; the backend has been closed */

/* Workers have said what they think of it. */
typedef void (*dkv_shm_registered_fn)(void *waiter, const struct dkv_error *error);

/* Registers `told` for `owner`. `registered` is called once, possibly within, unless this fails or
 * the waiter is forgotten. INVALID: the name is taken, or the memory is too small; NOT_FOUND: no
 * such object may be used; BUSY: too many. */
enum dkv_status dkv_shm_register(struct dkv_shm *shm, const char *owner,
                                 const struct dkv_oip_region *told,
                                 dkv_shm_registered_fn registered, void *waiter,
                                 struct dkv_error *err);
void dkv_shm_forget(struct dkv_shm *shm, const void *waiter);

/* The region of that name; NOT_FOUND. */
enum dkv_status dkv_shm_find(const struct dkv_shm *shm, const char *owner, const char *name,
                             struct dkv_region **region_out, struct dkv_error *err);

/* The owner's regions of a kind; `name` "": all of them. NOT_FOUND, NOMEM. */
enum dkv_status dkv_shm_status(const struct dkv_shm *shm, const char *owner, bool cuda,
                               const char *name, struct dkv_oip_text *out, struct dkv_error *err);

/* The same, gone. One that does not exist is no error. */
void dkv_shm_unregister(struct dkv_shm *shm, const char *owner, bool cuda, const char *name);

#endif
