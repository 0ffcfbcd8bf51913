/* The door: accepts connections and looks at their first header before the HTTP library sees them.
 *
 * A guest waits at the door until its first header is complete in the socket (it is only peeked at)
 * and well formed; then its socket goes to the library. So a connection that never says anything,
 * or says it badly, costs the library nothing, and is refused in our words.
 *
 * Owner   open/close; `listen_fd` becomes the door's. Handles are freed by the loop.
 * Thread  loop only.
 */
#ifndef DKV_SERVER_DOOR_H
#define DKV_SERVER_DOOR_H

#include "server/linger.h"
#include "server/metrics.h"

#include <sys/socket.h>
#include <uv.h>

struct dkv_door;

struct dkv_door_calls {
    void *owner;
    /* Takes a socket whose first header is complete. */
    void (*welcome)(void *owner, int fd, const struct sockaddr *address, socklen_t address_bytes);
    /* A guest was refused or did not finish in time. */
    void (*refused)(void *owner, enum dkv_refusal reason, const char *text);
    /* Connections beyond the door; with the guests they are at most max_connections. */
    unsigned (*n_inside)(void *owner);
    /* Somebody may be waiting outside: ends a connection that only waits for a next request. */
    void (*make_room)(void *owner);
};

struct dkv_door_config {
    uint64_t header_timeout_ms;
    unsigned max_connections;
};

/* NULL if out of memory; `listen_fd` stays the caller's then. */
struct dkv_door *dkv_door_open(uv_loop_t *loop, int listen_fd, const struct dkv_door_config *config,
                               const struct dkv_door_calls *calls);

/* Other limits from now on. */
void dkv_door_configure(struct dkv_door *door, const struct dkv_door_config *config);

/* A connection inside has ended: listens again if the limit had been reached. */
void dkv_door_room(struct dkv_door *door);

void dkv_door_close(struct dkv_door *door);

#endif
