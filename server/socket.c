/* A socket's file outlives the process that made it, so at start there may be one. Whether anybody
 * is behind it only connect() can tell: refused means nobody. Two daemons that start at the same
 * time on one path are kept apart by a lock on the directory, held while the stale
 * one is replaced.
 */
#include "server/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define BACKLOG         128
#define PEER_GROUPS_MAX 1024

enum dkv_status dkv_socket_path(const char *configured, char path[DKV_SOCKET_PATH_BYTES],
                                struct dkv_error *err)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    int n;
    if (*configured != '\0')
        n = snprintf(path, DKV_SOCKET_PATH_BYTES, "%s", configured);
    else if (runtime != NULL && *runtime == '/')
        n = snprintf(path, DKV_SOCKET_PATH_BYTES, "%s/dropkv/dropkvd.sock", runtime);
    else
        n = snprintf(path, DKV_SOCKET_PATH_BYTES, "/run/dropkv/dropkvd.sock");
    if (n < 0 || (size_t)n >= DKV_SOCKET_PATH_BYTES)
        return dkv_error_set(err, DKV_E_INVALID, "socket: the path is longer than %zu bytes",
                             DKV_SOCKET_PATH_BYTES - 1);
    if (*path != '/')
        return dkv_error_set(err, DKV_E_INVALID, "socket: '%.60s' is not an absolute path", path);
    return DKV_OK;
}

/* Makes the directory if it is not there, opens it and looks who may write to it. */
static enum dkv_status open_directory(const char *path, gid_t group, int *fd_out,
                                      struct dkv_error *err)
{
    char directory[DKV_SOCKET_PATH_BYTES];
    struct stat st;
    snprintf(directory, sizeof(directory), "%s", path);
    char *slash = strrchr(directory, '/');
    slash[slash == directory] = '\0';
    const bool made = mkdir(directory, 0700) == 0;
    if (!made && errno != EEXIST)
        return dkv_error_set(err, DKV_E_IO, "socket: cannot make the directory %.80s: %s",
                             directory, strerror(errno));
    const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool opened = fd >= 0 && (!made || group == DKV_SOCKET_NO_GROUP ||
                                    (fchown(fd, (uid_t)-1, group) == 0 && fchmod(fd, 0750) == 0));
    if (!opened || fstat(fd, &st) != 0) {
        dkv_error_set(err, DKV_E_IO, "socket: cannot open the directory %.80s: %s", directory,
                      strerror(errno));
        if (fd >= 0)
            close(fd);
        return DKV_E_IO;
    }
    if (st.st_uid != geteuid() || (st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        close(fd);
        return dkv_error_set(err, DKV_E_INVALID,
                             "socket: the directory %.80s must belong to this user and be writable "
                             "by nobody else",
                             directory);
    }
    *fd_out = fd;
    return DKV_OK;
}

/* Removes what a dead daemon left there. */
static enum dkv_status clear_path(const struct sockaddr_un *address, struct dkv_error *err)
{
    struct stat st;
    if (lstat(address->sun_path, &st) != 0)
        return errno == ENOENT ? DKV_OK
                               : dkv_error_set(err, DKV_E_IO, "socket: cannot look at %.80s: %s",
                                               address->sun_path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return dkv_error_set(err, DKV_E_INVALID, "socket: %.80s exists and is not a socket",
                             address->sun_path);
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return dkv_error_set(err, DKV_E_IO, "socket: %s", strerror(errno));
    const int result = connect(probe, (const struct sockaddr *)address, sizeof(*address));
    const bool dead = result != 0 && errno == ECONNREFUSED;
    close(probe);
    if (!dead)
        return dkv_error_set(err, DKV_E_BUSY, "socket: a daemon is listening at %.80s already",
                             address->sun_path);
    if (unlink(address->sun_path) != 0 && errno != ENOENT)
        return dkv_error_set(err, DKV_E_IO, "socket: cannot remove %.80s: %s", address->sun_path,
                             strerror(errno));
    return DKV_OK;
}

/* The group is set before anybody can be accepted; until the mode is, only the owner may connect.
 */
static enum dkv_status bind_and_listen(int fd, const struct sockaddr_un *address, gid_t group,
                                       struct dkv_error *err)
{
    const mode_t before = umask(0177);
    const int result = bind(fd, (const struct sockaddr *)address, sizeof(*address));
    umask(before);
    if (result == 0 && group != DKV_SOCKET_NO_GROUP &&
        (lchown(address->sun_path, (uid_t)-1, group) != 0 || chmod(address->sun_path, 0660) != 0))
        return dkv_error_set(err, DKV_E_IO, "socket_group: cannot give %.80s to group %u: %s",
                             address->sun_path, (unsigned)group, strerror(errno));
    if (result != 0 || listen(fd, BACKLOG) != 0)
        return dkv_error_set(err, DKV_E_IO, "socket: cannot listen at %.80s: %s", address->sun_path,
                             strerror(errno));
    return DKV_OK;
}

enum dkv_status dkv_socket_listen(const char *path, gid_t group, int *fd_out, struct dkv_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int directory_fd = -1;
    memcpy(address.sun_path, path, strlen(path) + 1);
    enum dkv_status status = open_directory(path, group, &directory_fd, err);
    if (status != DKV_OK)
        return status;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || flock(directory_fd, LOCK_EX) != 0)
        status = dkv_error_set(err, DKV_E_IO, "socket: %s", strerror(errno));
    if (status == DKV_OK)
        status = clear_path(&address, err);
    if (status == DKV_OK)
        status = bind_and_listen(fd, &address, group, err);
    close(directory_fd); /* and with it the lock */
    if (status != DKV_OK) {
        if (fd >= 0)
            close(fd);
        return status;
    }
    *fd_out = fd;
    return DKV_OK;
}

void dkv_socket_adopt(int fd, char path[DKV_SOCKET_PATH_BYTES])
{
    struct sockaddr_un address = {0};
    socklen_t bytes = sizeof(address);
    path[0] = '\0';
    if (getsockname(fd, (struct sockaddr *)&address, &bytes) == 0)
        snprintf(path, DKV_SOCKET_PATH_BYTES, "%.*s", (int)sizeof(address.sun_path) - 1,
                 address.sun_path);
}

enum dkv_status dkv_socket_group(const char *text, gid_t *group_out, struct dkv_error *err)
{
    *group_out = DKV_SOCKET_NO_GROUP;
    if (*text == '\0')
        return DKV_OK;
    const struct group *known = getgrnam(text);
    if (known != NULL) {
        *group_out = known->gr_gid;
        return DKV_OK;
    }
    if (strspn(text, "0123456789") != strlen(text) || strlen(text) > 9)
        return dkv_error_set(err, DKV_E_INVALID,
                             "socket_group: '%.40s' is neither a group of this system nor a number "
                             "in 0..999999999",
                             text);
    *group_out = (gid_t)strtoul(text, NULL, 10);
    return DKV_OK;
}

/* The groups that the peer had when it connected, beside its first. */
static bool peer_has_group(int fd, gid_t group)
{
    gid_t groups[PEER_GROUPS_MAX];
    socklen_t bytes = sizeof(groups);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) != 0)
        return false;
    for (size_t i = 0; i < bytes / sizeof(groups[0]); i++)
        if (groups[i] == group)
            return true;
    return false;
}

bool dkv_socket_peer_may_enter(int fd, gid_t group, unsigned *uid_out)
{
    struct ucred peer = {.uid = (uid_t)-1};
    socklen_t bytes = sizeof(peer);
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0;
    *uid_out = (unsigned)peer.uid;
    if (!known)
        return false;
    return peer.uid == geteuid() ||
           (group != DKV_SOCKET_NO_GROUP && (peer.gid == group || peer_has_group(fd, group)));
}
