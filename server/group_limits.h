/* What the control group (version 2) of this process leaves it: what a container's or a service's
 * limits say. libuv 1.44 knows version 1 alone, and the processors that may be used are not those
 * that there is time on.
 *
 * Both take the membership (/proc/self/cgroup) and where the hierarchy is mounted (/sys/fs/cgroup),
 * and answer with the smallest limit from the group that is named up to the root.
 *
 * Thread  any; reads files.
 * Errors  none: what cannot be read limits nothing.
 */
#ifndef DKV_SERVER_GROUP_LIMITS_H
#define DKV_SERVER_GROUP_LIMITS_H

#include <stdint.h>

/* memory.max in bytes; UINT64_MAX if there is none. */
uint64_t dkv_memory_limit(const char *membership, const char *mount);

/* cpu.max in thousandths of a processor; UINT64_MAX if there is none. */
uint64_t dkv_cpu_limit(const char *membership, const char *mount);

#endif
