/* The descriptors are 3 and up, without close-on-exec, as the protocol leaves them. Names
 * ($LISTEN_FDNAMES) are not needed: what a socket is for shows in its family. */
#include "server/inherited.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FIRST_FD 3
#define FDS_MAX  2

static bool option_is(int fd, int option, int wanted)
{
    int value = -1;
    socklen_t bytes = sizeof(value);
    return getsockopt(fd, SOL_SOCKET, option, &value, &bytes) == 0 && value == wanted;
}

static enum dkv_status take(int fd, struct dkv_inherited *to, struct dkv_error *err)
{
    struct sockaddr_storage address = {0};
    socklen_t bytes = sizeof(address);
    if (!option_is(fd, SO_TYPE, SOCK_STREAM) || !option_is(fd, SO_ACCEPTCONN, 1) ||
        getsockname(fd, (struct sockaddr *)&address, &bytes) != 0)
        return dkv_error_set(err, DKV_E_INVALID,
                             "LISTEN_FDS: descriptor %d is not a listening stream socket", fd);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 || fcntl(fd, F_SETFL, O_NONBLOCK) != 0)
        return dkv_error_set(err, DKV_E_IO, "LISTEN_FDS: descriptor %d: %s", fd, strerror(errno));
    const bool local = address.ss_family == AF_UNIX;
    if (!local && address.ss_family != AF_INET && address.ss_family != AF_INET6)
        return dkv_error_set(err, DKV_E_INVALID,
                             "LISTEN_FDS: descriptor %d is of address family %d, neither local nor "
                             "of the internet",
                             fd, (int)address.ss_family);
    int *slot = local ? &to->socket_fd : &to->http_fd;
    if (*slot >= 0)
        return dkv_error_set(err, DKV_E_INVALID,
                             "LISTEN_FDS: descriptors %d and %d are both %s sockets, one is served",
                             *slot, fd, local ? "local" : "internet");
    *slot = fd;
    return DKV_OK;
}

enum dkv_status dkv_inherited_take(struct dkv_inherited *inherited_out, struct dkv_error *err)
{
    const char *pid_text = getenv("LISTEN_PID"), *count_text = getenv("LISTEN_FDS");
    const bool for_us = pid_text != NULL && strtol(pid_text, NULL, 10) == (long)getpid();
    const long n = for_us && count_text != NULL ? strtol(count_text, NULL, 10) : 0;
    enum dkv_status status = DKV_OK;
    *inherited_out = (struct dkv_inherited){-1, -1};
    if (n < 0 || n > FDS_MAX)
        status = dkv_error_set(err, DKV_E_INVALID, "LISTEN_FDS: %ld is not in 0..%d", n, FDS_MAX);
    for (int i = 0; status == DKV_OK && i < n; i++)
        status = take(FIRST_FD + i, inherited_out, err);
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
    unsetenv("LISTEN_FDNAMES");
    return status;
}
