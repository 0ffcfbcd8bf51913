/* How much memory the control group (version 2) of this process leaves it: what a container's or a
 * service's limit says. libuv 1.44 knows version 1 alone.
 *
 * Thread  any; reads files.
 * Errors  none: what cannot be read limits nothing.
 */
#ifndef DKV_SERVER_MEMORY_LIMIT_H
#define DKV_SERVER_MEMORY_LIMIT_H

#include <stdint.h>

/* The smallest memory.max from the group that `membership` (/proc/self/cgroup) names up to the root
 * of the hierarchy mounted at `mount` (/sys/fs/cgroup); UINT64_MAX if there is none. */
uint64_t dkv_memory_limit(const char *membership, const char *mount);

#endif
