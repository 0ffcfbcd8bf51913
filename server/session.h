/* The local socket: listens, lets in who may come, and serves each connection (proto/PROTOCOL.md).
 *
 * Each connection is a session: what it registered, what it asked and was not answered yet. However
 * it ends, everything it held is given back within the same turn of the loop, but for what a
 * running batch still reads, which follows when the batch is done.
 *
 * A session that breaks the protocol is closed, with one line in the log; no other notices.
 *
 * Owner   open/close.
 * Thread  loop.
 * Errors  open: INVALID for a path that cannot be one or a directory that others may write to, BUSY
 *         if a daemon listens there already, IO.
 */
#ifndef DKV_SERVER_SESSION_H
#define DKV_SERVER_SESSION_H

#include "server/server.h"

struct dkv_sessions;

/* Listens at config->socket ("off": nothing is opened and *sessions_out is NULL). "" is the default
 * path: where that cannot be had and HTTP is served, a warning is logged and that is all. */
enum dkv_status dkv_sessions_open(struct dkv_server *server, struct dkv_sessions **sessions_out,
                                  struct dkv_error *err);

/* The path in use. */
const char *dkv_sessions_path(const struct dkv_sessions *sessions);

/* No answer is waiting to be sent. */
bool dkv_sessions_are_quiet(const struct dkv_sessions *sessions);

/* Ends every session and removes the socket. The backend must have given back all jobs. The loop
 * must be run until its handles are closed. NULL is fine. */
void dkv_sessions_close(struct dkv_sessions *sessions);

/* Frees the memory that is kept for requests to come; the last one has ended. */
void dkv_sessions_free_asks(struct dkv_server *server);

#endif
