/* One datagram socket, made at start and never blocking: a manager that does not read must not stop
 * the daemon. */
#include "server/notify.h"

#include "server/clock.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_BYTES 512

/* A path, or a name behind '@'; false for anything else, as the protocol asks. */
static bool read_address(const char *text, struct dkv_notify *notify)
{
    const size_t n = strlen(text);
    if ((*text != '/' && *text != '@') || n < 2 || n >= sizeof(notify->address.sun_path))
        return false;
    notify->address.sun_family = AF_UNIX;
    memcpy(notify->address.sun_path, text, n);
    notify->address_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    if (*text == '@')
        notify->address.sun_path[0] = '\0';
    else
        notify->address_bytes++; /* a path ends in NUL */
    return true;
}

/* $NAME as a whole number; 0 if it is unset or none. */
static uint64_t number_of(const char *name)
{
    const char *text = getenv(name);
    char *end;
    if (text == NULL || *text < '0' || *text > '9')
        return 0;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0 ? value : 0;
}

void dkv_notify_open(struct dkv_notify *notify_out)
{
    const char *socket_name = getenv("NOTIFY_SOCKET");
    const uint64_t for_pid = number_of("WATCHDOG_PID");
    *notify_out = (struct dkv_notify){.fd = -1};
    if (socket_name != NULL && read_address(socket_name, notify_out))
        notify_out->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (notify_out->fd >= 0 && (for_pid == 0 || for_pid == (uint64_t)getpid()))
        notify_out->watchdog_us = number_of("WATCHDOG_USEC");
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
}

void dkv_notify_send(const struct dkv_notify *notify, const char *format, ...)
{
    char text[TEXT_BYTES];
    va_list args;
    if (notify->fd < 0)
        return;
    va_start(args, format);
    const int n = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (n <= 0)
        return;
    const size_t n_bytes = (size_t)n < sizeof(text) ? (size_t)n : sizeof(text) - 1;
    (void)!sendto(notify->fd, text, n_bytes, MSG_NOSIGNAL,
                  (const struct sockaddr *)&notify->address, notify->address_bytes);
}

void dkv_notify_reloading(const struct dkv_notify *notify)
{
    dkv_notify_send(notify, "RELOADING=1\nMONOTONIC_USEC=%llu",
                    (unsigned long long)(dkv_clock_ns() / 1000));
}

void dkv_notify_close(struct dkv_notify *notify)
{
    if (notify->fd >= 0)
        close(notify->fd);
    notify->fd = -1;
}
