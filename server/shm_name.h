/* POSIX shared memory by name.
 *
 * A name is no right, so an object is opened only if nobody but one user can have made it for this:
 * a regular file of that user's in /dev/shm, open to nobody else, under one name, not a link. It is
 * never created here. Whatever is wrong, the answer is the same NOT_FOUND: a client learns nothing
 * about objects that are not its own.
 *
 * Owner   the descriptor is the caller's.
 * Thread  any; no state.
 */
#ifndef DKV_SERVER_SHM_NAME_H
#define DKV_SERVER_SHM_NAME_H

#include "proto/types.h"

#include <sys/types.h>

#define DKV_SHM_OWN_PREFIX                                                \
    "dropkv-" /* names that the daemon gives out, for one connection each \
               */
#define DKV_SHM_NAME_BYTES  255u
#define DKV_SHM_SUFFIX_MAX  32u
#define DKV_SHM_PREFIX_SIZE 64u

/* Opens an object of `uid`'s; `name` without slashes. For reading and writing if possible. */
enum dkv_status dkv_shm_name_open(const char *name, uid_t uid, int *fd_out, struct dkv_error *err);

/* The object that a client means by a key, which may begin with slashes. NOT_FOUND for what is no
 * name, or one of the reserved ones (the daemon's own, and Triton's). */
enum dkv_status dkv_shm_name_of_key(const char *key, const char **name_out, struct dkv_error *err);

/* "dropkv-UID-128 random bits-": what one connection's names begin with. False: no random numbers.
 */
bool dkv_shm_name_prefix(uid_t uid, char out[DKV_SHM_PREFIX_SIZE]);

/* Opens prefix and suffix together; the suffix is 1..32 of a-z and 0-9, `bytes` long or up to a
 * zero byte. */
enum dkv_status dkv_shm_name_open_suffix(const char *prefix, const uint8_t *suffix, size_t bytes,
                                         uid_t uid, int *fd_out, struct dkv_error *err);

#endif
