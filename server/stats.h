/* The protocol's statistics, and beside them, under "dropkv", what the status page shows: devices,
 * the queue, and the streams that used most lately.
 *
 *   "dropkv": {
 *     "version", "uptime_s", "ready", "draining", "keep_sets",
 *     "devices": [{"worker", "device", "backend", "description", "pid", "up", "given_up",
 *                  "fallback", "restarts", "batches_in_flight", "busy_s", "blocks", ...}],
 *     "queue": {"waiting", "running", "accepted", "limit", "levels": [{"priority", "waiting",
 *               "bytes", "oldest_us"}]},
 *     "streams": {"known", "limit", "forgotten", "heaviest": [{"stream", "client", "share", ...}]}
 *   }
 *
 * Streams are at most DKV_STATS_STREAMS, whatever there are. A "keep_set" is there if the operator
 * lets it be shown.
 *
 * Thread  loop.
 */
#ifndef DKV_SERVER_STATS_H
#define DKV_SERVER_STATS_H

#include "server/server.h"

#define DKV_STATS_STREAMS 64u

/* NOMEM. The text is from malloc, the caller's. */
enum dkv_status dkv_stats_text(const struct dkv_server *server, const struct dkv_backend_info *info,
                               bool ready, struct dkv_oip_text *out);

#endif
