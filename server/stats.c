/* The protocol's part is made by its codec and read again: it is a kilobyte, and so the codec need
 * not know what a daemon is. */
#include "server/stats.h"

#include "server/clock.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static json_t *number(uint64_t value)
{
    return json_integer(value <= INT64_MAX ? (json_int_t)value : INT64_MAX);
}

/* ---- the protocol's ---- */

static json_t *protocol_part(const struct dkv_server *server, const struct dkv_backend_info *info)
{
    struct dkv_oip_batch_stats batches[DKV_METRICS_SIZES];
    struct dkv_oip_memory_use memory[DKV_ADMISSION_DEVICES_MAX];
    struct dkv_oip_stats stats = server->metrics.stats;
    struct dkv_oip_text text = {0};
    stats.batches = batches;
    stats.n_batches = dkv_metrics_sizes(&server->metrics, batches);
    for (unsigned d = 0; d < info->n_devices; d++) {
        const char *device = info->workers[d].device;
        const char *colon = strchr(device, ':');
        memory[d] = (struct dkv_oip_memory_use){
            .type = strcmp(device, "cpu") == 0 ? "CPU" : "GPU",
            .id = colon != NULL ? strtoull(colon + 1, NULL, 10) : 0,
            .bytes = info->workers[d].scratch_bytes,
        };
    }
    stats.memory = memory;
    stats.n_memory = info->n_devices;
    if (dkv_oip_model_stats(&stats, &text) != DKV_OK)
        return NULL;
    json_t *root = json_loadb(text.bytes, text.n_bytes, 0, NULL);
    free(text.bytes);
    return root;
}

/* ---- ours ---- */

static json_t *device_object(const struct dkv_backend_info *info, unsigned d)
{
    const struct dkv_worker_facts *facts = &info->workers[d];
    json_t *object = json_pack("{s:i, s:s, s:s, s:s, s:i, s:b, s:b, s:b, s:o, s:o}", "worker",
                               (int)d, "device", facts->device, "backend", facts->backend,
                               "description", facts->description, "pid", (int)facts->pid, "up",
                               info->queue.device[d].up, "given_up", facts->given_up, "fallback",
                               facts->fallback, "restarts", number(facts->restarts),
                               "batches_in_flight", number(info->queue.device[d].n_batches));
    json_object_set_new(object, "busy_s", json_real((double)facts->busy_ns * 1e-9));
    json_object_set_new(object, "blocks", number(facts->n_blocks));
    json_object_set_new(object, "scratch_bytes", number(facts->scratch_bytes));
    json_object_set_new(object, "mapped_bytes", number(facts->mapped_bytes));
    return object;
}

static json_t *devices(const struct dkv_backend_info *info)
{
    json_t *list = json_array();
    for (unsigned d = 0; d < info->n_devices; d++)
        json_array_append_new(list, device_object(info, d));
    return list;
}

static json_t *queue(const struct dkv_backend_info *info)
{
    json_t *levels = json_array();
    for (unsigned i = 0; i < info->n_levels; i++)
        json_array_append_new(levels,
                              json_pack("{s:i, s:o, s:o, s:o}", "priority", (int)i + 1, "waiting",
                                        number(info->queue.level[i].n_waiting), "bytes",
                                        number(info->queue.level[i].waiting_bytes), "oldest_us",
                                        number(info->queue.level[i].oldest_us)));
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "waiting", number(info->n_queued), "running",
                     number(info->n_running), "accepted", number(info->queue.n_open), "limit",
                     number(info->max_queue_requests), "levels", levels);
}

/* Parts of the strip in percent; null where so short a request has no token. */
static json_t *keep_set(const struct dkv_stream *stream)
{
    json_t *bins = json_array();
    for (uint64_t bin = 0; bin < DKV_STREAM_BINS; bin++) {
        const uint64_t from = bin * stream->last_tokens / DKV_STREAM_BINS;
        const uint64_t to = (bin + 1) * stream->last_tokens / DKV_STREAM_BINS;
        json_array_append_new(
            bins, from == to ? json_null() : json_integer((stream->strip[bin] * 100 + 127) / 255));
    }
    return bins;
}

static json_t *stream_object(const struct dkv_stream *stream, double share, uint64_t now_ms)
{
    json_t *object = json_pack(
        "{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "stream", stream->name, "client",
        stream->client, "share", json_real(round(share * 1e4) * 1e-4), "answered",
        number(stream->n_answered), "failed", number(stream->n_failed), "blocks",
        number(stream->n_blocks), "tokens_in", number(stream->n_tokens_in), "tokens_kept",
        number(stream->n_tokens_kept), "bytes", number(stream->n_bytes));
    json_object_set_new(object, "quiet_ms",
                        number(now_ms > stream->last_ms ? now_ms - stream->last_ms : 0));
    if (stream->n_answered == 0)
        return object;
    json_object_set_new(object, "last",
                        json_pack("{s:s, s:o, s:o, s:b, s:o, s:o, s:o}", "transport",
                                  dkv_transport_name(stream->transport), "blocks",
                                  number(stream->last_blocks), "tokens",
                                  number(stream->last_tokens), "degraded", stream->last_degraded,
                                  "queue_us", number(stream->queue_us), "device_us",
                                  number(stream->device_us), "total_us", number(stream->total_us)));
    if (stream->has_strip)
        json_object_set_new(object, "keep_set", keep_set(stream));
    return object;
}

static json_t *streams(const struct dkv_streams *all, uint64_t now_ms)
{
    const struct dkv_stream *top[DKV_STATS_STREAMS];
    const uint32_t n = dkv_streams_top(all, now_ms, top, DKV_STATS_STREAMS);
    double total = 0;
    for (uint32_t i = 0; i < all->n; i++)
        total += dkv_stream_weight(&all->all[i], now_ms);
    json_t *list = json_array();
    for (uint32_t i = 0; i < n; i++) {
        const double weight = dkv_stream_weight(top[i], now_ms);
        json_array_append_new(list, stream_object(top[i], total > 0 ? weight / total : 0, now_ms));
    }
    return json_pack("{s:o, s:o, s:o, s:o}", "known", number(all->n), "limit", number(all->max),
                     "forgotten", number(all->n_evicted), "heaviest", list);
}

static json_t *our_part(const struct dkv_server *server, const struct dkv_backend_info *info,
                        bool ready)
{
    const uint64_t now_ns = dkv_clock_ns();
    json_t *part = json_pack("{s:s, s:f, s:b, s:b, s:b}", "version", DKV_VERSION, "uptime_s",
                             (double)(now_ns - server->begun_ns) * 1e-9, "ready", ready, "draining",
                             server->leaving, "keep_sets", server->streams.strips);
    json_object_set_new(part, "devices", devices(info));
    json_object_set_new(part, "queue", queue(info));
    json_object_set_new(part, "streams", streams(&server->streams, now_ns / 1000000));
    return part;
}

enum dkv_status dkv_stats_text(const struct dkv_server *server, const struct dkv_backend_info *info,
                               bool ready, struct dkv_oip_text *out)
{
    json_t *root = protocol_part(server, info);
    json_t *model = json_array_get(json_object_get(root, "model_stats"), 0);
    json_t *part = our_part(server, info, ready);
    *out = (struct dkv_oip_text){0};
    if (model != NULL && json_object_set_new(model, "dropkv", part) == 0)
        out->bytes = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    if (out->bytes == NULL)
        return DKV_E_NOMEM;
    out->n_bytes = strlen(out->bytes);
    return DKV_OK;
}
