/* SIGHUP: new log files, tokens and limits, without losing a connection.
 *
 * The configuration is read again from the same file, environment and arguments, and judged as at
 * start. Fields that a running daemon can change are taken over; of the others, a line says which
 * differ and wait for a restart. If anything is wrong, everything stays as it is.
 *
 * What memory was laid out for at start is a ceiling: max_body_bytes, max_queue_bytes,
 * max_queue_requests, max_connections and max_batch_items may be lowered and raised again, but not
 * above what they were at start.
 *
 * Thread  loop.
 */
#ifndef DKV_SERVER_RELOAD_H
#define DKV_SERVER_RELOAD_H

#include "server/server.h"

/* Remembers the ceilings. */
void dkv_reload_begin(struct dkv_server *server);

/* True if everything could be had. */
bool dkv_reload(struct dkv_server *server);

/* True for a field that reload() takes over. */
bool dkv_reload_takes(const char *field);

#endif
