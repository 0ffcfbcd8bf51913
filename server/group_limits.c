/* A group's limit holds for all groups below it, so the way up to the root is walked. Inside a
 * container the hierarchy begins at its own group, and the path that /proc tells may lead outside
 * ("/../..") or be missing below the mount: then only the mount's own limit is found, which is the
 * container's. */
#include "server/group_limits.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define PATH_BYTES 4096

/* A limit from its file; UINT64_MAX for "max". */
typedef uint64_t (*read_limit_fn)(FILE *file);

static uint64_t read_memory(FILE *file)
{
    uint64_t bytes;
    return fscanf(file, "%" SCNu64, &bytes) == 1 ? bytes : UINT64_MAX;
}

/* Microseconds of processor time in a period. */
static uint64_t read_cpu(FILE *file)
{
    uint64_t quota_us, period_us;
    if (fscanf(file, "%" SCNu64 " %" SCNu64, &quota_us, &period_us) != 2 || period_us == 0 ||
        quota_us > UINT64_MAX / 1000)
        return UINT64_MAX;
    return quota_us * 1000 / period_us;
}

static const struct limit {
    const char *file;
    read_limit_fn read;
} memory = {"memory.max", read_memory}, cpu = {"cpu.max", read_cpu};

/* Of one group; UINT64_MAX for nothing. */
static uint64_t limit_of(const struct limit *limit, const char *mount, const char *group)
{
    char path[PATH_BYTES];
    if (snprintf(path, sizeof(path), "%s%s/%s", mount, group, limit->file) >= (int)sizeof(path))
        return UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return UINT64_MAX;
    const uint64_t value = limit->read(file);
    fclose(file);
    return value;
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

static uint64_t smallest(const struct limit *limit, const char *membership, const char *mount)
{
    char group[PATH_BYTES];
    uint64_t least = limit_of(limit, mount, "");
    if (!read_group(membership, group) || strstr(group, "/..") != NULL)
        return least;
    for (char *end = group + strlen(group); end != NULL; end = strrchr(group, '/')) {
        *end = '\0';
        const uint64_t value = limit_of(limit, mount, group);
        least = value < least ? value : least;
    }
    return least;
}

uint64_t dkv_memory_limit(const char *membership, const char *mount)
{
    return smallest(&memory, membership, mount);
}

uint64_t dkv_cpu_limit(const char *membership, const char *mount)
{
    return smallest(&cpu, membership, mount);
}
