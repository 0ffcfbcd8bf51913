/* What the service manager is told, by systemd's notification protocol (sd_notify(3)): that the
 * daemon serves, reloads, stops, and that it is alive.
 *
 * The protocol is one datagram of NAME=VALUE lines to the socket that $NOTIFY_SOCKET names, which
 * is why this is not libsystemd: linking it would bring its compression and encryption libraries
 * into a process that handles hostile bytes.
 *
 * Owner   open/close.
 * Thread  loop only.
 * Errors  none: where nobody listens, or the datagram is lost, the daemon serves as well.
 */
#ifndef DKV_SERVER_NOTIFY_H
#define DKV_SERVER_NOTIFY_H

#include "proto/types.h"

#include <sys/socket.h>
#include <sys/un.h>

struct dkv_notify {
    int fd; /* -1: nobody listens */
    struct sockaddr_un address;
    socklen_t address_bytes;
    uint64_t watchdog_us; /* the longest pause between two signs of life; 0: none are expected */
};

/* Reads $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID and takes them out of the environment, so
 * that workers do not speak for the daemon. */
void dkv_notify_open(struct dkv_notify *notify_out);

/* Sends one message, "READY=1\nSTATUS=...". Text that does not fit into 512 bytes is cut. */
void dkv_notify_send(const struct dkv_notify *notify, const char *format, ...) DKV_PRINTF(2, 3);

/* Says that the configuration is being read again. READY=1 has to follow. */
void dkv_notify_reloading(const struct dkv_notify *notify);

void dkv_notify_close(struct dkv_notify *notify);

#endif
