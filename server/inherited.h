/* Listening sockets that the service manager opened for us (socket activation, sd_listen_fds(3)).
 *
 * A stream socket of the internet is for HTTP, one of the file system the local socket; there may
 * be one of each, which then takes the place of what the configuration says to listen on. So the
 * daemon can be restarted without a moment in which nobody listens: the kernel holds who comes.
 *
 * Owner   take() owns nothing: each descriptor becomes whoever's it is given to.
 * Thread  before other threads; take() changes the environment.
 * Errors  INVALID names the descriptor and what is wrong with it.
 */
#ifndef DKV_SERVER_INHERITED_H
#define DKV_SERVER_INHERITED_H

#include "proto/types.h"

struct dkv_inherited {
    int http_fd;   /* -1: none */
    int socket_fd; /* -1: none */
};

/* Reads $LISTEN_PID and $LISTEN_FDS and takes them out of the environment, so that workers do not
 * think they are meant. */
enum dkv_status dkv_inherited_take(struct dkv_inherited *inherited_out, struct dkv_error *err);

#endif
