/* A group's limit holds for all groups below it, so the way up to the root is walked. Inside a
 * container the hierarchy begins at its own group, and the path that /proc tells may lead outside
 * ("/../..") or be missing below the mount: then only the mount's own limit is found, which is the
 * container's. */
#include "server/memory_limit.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define PATH_BYTES 4096

/* memory.max of one group; UINT64_MAX for "max" or nothing. */
static uint64_t limit_of(const char *mount, const char *group)
{
    char path[PATH_BYTES];
    uint64_t bytes = UINT64_MAX;
    if (snprintf(path, sizeof(path), "%s%s/memory.max", mount, group) >= (int)sizeof(path))
        return UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return UINT64_MAX;
    if (fscanf(file, "%" SCNu64, &bytes) != 1)
        bytes = UINT64_MAX;
    fclose(file);
    return bytes;
}

/* The path behind "0::"; false if the process is in no group of version 2. */
static bool read_group(const char *membership, char group[PATH_BYTES])
{
    FILE *file = fopen(membership, "re");
    bool found = false;
    if (file == NULL)
        return false;
    while (!found && fgets(group, PATH_BYTES, file) != NULL)
        found = strncmp(group, "0::/", 4) == 0;
    fclose(file);
    if (!found)
        return false;
    group[strcspn(group, "\n")] = '\0';
    memmove(group, group + 3, strlen(group + 3) + 1);
    return true;
}

uint64_t dkv_memory_limit(const char *membership, const char *mount)
{
    char group[PATH_BYTES];
    uint64_t least = limit_of(mount, "");
    if (!read_group(membership, group) || strstr(group, "/..") != NULL)
        return least;
    for (char *end = group + strlen(group); end != NULL; end = strrchr(group, '/')) {
        *end = '\0';
        const uint64_t bytes = limit_of(mount, group);
        least = bytes < least ? bytes : least;
    }
    return least;
}
