/* Opening an object by name, and the names that a connection of the local socket may use. */
#include "server/shm_name.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static enum dkv_status not_found(struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_NOT_FOUND,
                         "there is no shared memory object of that name that may be used");
}

/* What it is counts once it is open: a name can come to mean something else. */
static bool may_be_used(int fd, uid_t uid)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == uid &&
           (st.st_mode & 077) == 0 && st.st_nlink == 1;
}

enum dkv_status dkv_shm_name_open(const char *name, uid_t uid, int *fd_out, struct dkv_error *err)
{
    const int flags = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    const int folder = open("/dev/shm", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int fd = -1;
    if (folder >= 0 && strchr(name, '/') == NULL && strcmp(name, ".") != 0 &&
        strcmp(name, "..") != 0) {
        fd = openat(folder, name, O_RDWR | flags);
        if (fd < 0)
            fd = openat(folder, name, O_RDONLY | flags);
    }
    if (folder >= 0)
        close(folder);
    if (fd >= 0 && may_be_used(fd, uid)) {
        *fd_out = fd;
        return DKV_OK;
    }
    if (fd >= 0)
        close(fd);
    return not_found(err);
}

enum dkv_status dkv_shm_name_of_key(const char *key, const char **name_out, struct dkv_error *err)
{
    static const char *const reserved[] = {DKV_SHM_OWN_PREFIX, "triton_python_backend_shm_region_"};
    const char *name = key + strspn(key, "/");
    for (size_t i = 0; i < sizeof(reserved) / sizeof(reserved[0]); i++)
        if (strncmp(name, reserved[i], strlen(reserved[i])) == 0)
            return not_found(err);
    if (*name == '\0' || strchr(name, '/') != NULL || strlen(name) > DKV_SHM_NAME_BYTES)
        return not_found(err);
    *name_out = name;
    return DKV_OK;
}

bool dkv_shm_name_prefix(uid_t uid, char out[DKV_SHM_PREFIX_SIZE])
{
    uint64_t random[2];
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return false;
    snprintf(out, DKV_SHM_PREFIX_SIZE, DKV_SHM_OWN_PREFIX "%u-%016llx%016llx-", (unsigned)uid,
             (unsigned long long)random[0], (unsigned long long)random[1]);
    return true;
}

enum dkv_status dkv_shm_name_open_suffix(const char *prefix, const uint8_t *suffix, size_t bytes,
                                         uid_t uid, int *fd_out, struct dkv_error *err)
{
    char name[DKV_SHM_PREFIX_SIZE + DKV_SHM_SUFFIX_MAX + 1];
    const size_t n = strnlen((const char *)suffix, bytes);
    if (n == 0 || n > DKV_SHM_SUFFIX_MAX)
        return not_found(err);
    for (size_t i = 0; i < bytes; i++)
        if (i < n ? strchr("abcdefghijklmnopqrstuvwxyz0123456789", suffix[i]) == NULL
                  : suffix[i] != 0)
            return not_found(err);
    snprintf(name, sizeof(name), "%s%.*s", prefix, (int)n, (const char *)suffix);
    return dkv_shm_name_open(name, uid, fd_out, err);
}
