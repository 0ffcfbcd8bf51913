/* Addresses to listen on.
 *
 * Thread  any; no state.
 */
#ifndef DKV_SERVER_LISTEN_H
#define DKV_SERVER_LISTEN_H

#include "proto/types.h"

#include <sys/socket.h>

struct dkv_listen_address {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    bool loopback; /* 127.0.0.0/8 or ::1: only this machine can connect */
};

/* Reads "127.0.0.1:8480", "[::1]:8480" or "localhost:8480" (which means 127.0.0.1: names are not
 * looked up). Port 0 asks for a free one. INVALID says what is wrong. */
enum dkv_status dkv_listen_parse(const char *text, struct dkv_listen_address *out,
                                 struct dkv_error *err);

/* Opens a non-blocking listening socket. The caller closes *fd_out. *port_out is the port in use.
 */
enum dkv_status dkv_listen_open(const struct dkv_listen_address *address, int *fd_out,
                                unsigned *port_out, struct dkv_error *err);

/* Takes a socket that listens already: what it listens on, and the port. False if that is no
 * internet address. */
bool dkv_listen_adopt(int fd, struct dkv_listen_address *out, unsigned *port_out);

#endif
