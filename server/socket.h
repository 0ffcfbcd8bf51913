/* The path and the listening end of the local socket.
 *
 * The directory belongs to the daemon's user and nobody else may write to it: it is made with mode
 * 0700. The socket has mode 0600. With a group, whose members may connect too, the modes are 0750
 * and 0660. One that a dead daemon left behind is replaced; one that answers is not.
 *
 * Thread  any; open() sets the umask for a moment, so before other threads make files.
 * Errors  INVALID, BUSY, IO: a sentence that begins with "socket".
 */
#ifndef DKV_SERVER_SOCKET_H
#define DKV_SERVER_SOCKET_H

#include "proto/types.h"

#include <sys/types.h>
#include <sys/un.h>

#define DKV_SOCKET_PATH_BYTES (sizeof(((struct sockaddr_un *)0)->sun_path))

/* "": $XDG_RUNTIME_DIR/dropkv/dropkvd.sock, or /run/dropkv/dropkvd.sock where that is unset. */
enum dkv_status dkv_socket_path(const char *configured, char path[DKV_SOCKET_PATH_BYTES],
                                struct dkv_error *err);

#define DKV_SOCKET_NO_GROUP ((gid_t)-1)

/* A group by name or number; "" is DKV_SOCKET_NO_GROUP. */
enum dkv_status dkv_socket_group(const char *text, gid_t *group_out, struct dkv_error *err);

/* Non-blocking, listening. */
enum dkv_status dkv_socket_listen(const char *path, gid_t group, int *fd_out,
                                  struct dkv_error *err);

/* The path of a socket that listens already; "" if it has none. */
void dkv_socket_adopt(int fd, char path[DKV_SOCKET_PATH_BYTES]);

/* May the peer come in? The daemon's own user, and members of `group`. */
bool dkv_socket_peer_may_enter(int fd, gid_t group, unsigned *uid_out);

#endif
