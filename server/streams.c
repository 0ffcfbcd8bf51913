/* A hash of chains over an array, and a list in the order of use. The hash is seeded, so that names
 * cannot be chosen to meet in one chain. */
#include "server/streams.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum dkv_status dkv_streams_open(struct dkv_streams *streams, uint32_t max, bool strips,
                                 struct dkv_error *err)
{
    *streams = (struct dkv_streams){.max = max, .n_chains = 2 * max, .strips = strips};
    streams->all = calloc(max, sizeof(*streams->all));
    streams->chains = calloc(streams->n_chains, sizeof(*streams->chains));
    dkv_list_init(&streams->order);
    if (streams->all == NULL || streams->chains == NULL) {
        dkv_streams_close(streams);
        return dkv_error_set(err, DKV_E_NOMEM, "max_streams: no memory for %u streams", max);
    }
    if (getrandom(&streams->seed, sizeof(streams->seed), 0) != sizeof(streams->seed))
        streams->seed = (uintptr_t)streams->all;
    return DKV_OK;
}

void dkv_streams_close(struct dkv_streams *streams)
{
    free(streams->all);
    free(streams->chains);
    streams->all = NULL;
    streams->chains = NULL;
    streams->n = 0;
}

/* ---- finding ---- */

/* FNV-1a over both names, with the 0 between them. */
static uint32_t chain_of(const struct dkv_streams *streams, const char *name, const char *client)
{
    uint64_t hash = streams->seed ^ 14695981039346656037u;
    for (size_t i = 0, n = strlen(name) + 1; i < n; i++)
        hash = (hash ^ (unsigned char)name[i]) * 1099511628211u;
    for (size_t i = 0, n = strlen(client); i < n; i++)
        hash = (hash ^ (unsigned char)client[i]) * 1099511628211u;
    return (uint32_t)((hash ^ hash >> 32) % streams->n_chains);
}

static struct dkv_stream *find(const struct dkv_streams *streams, uint32_t chain, const char *name,
                               const char *client)
{
    for (uint32_t i = streams->chains[chain]; i != 0; i = streams->all[i - 1].next) {
        struct dkv_stream *stream = &streams->all[i - 1];
        if (strcmp(stream->name, name) == 0 && strcmp(stream->client, client) == 0)
            return stream;
    }
    return NULL;
}

static void unlink_from_chain(struct dkv_streams *streams, struct dkv_stream *stream)
{
    const uint32_t index = (uint32_t)(stream - streams->all) + 1;
    uint32_t *at = &streams->chains[stream->chain];
    while (*at != index)
        at = &streams->all[*at - 1].next;
    *at = stream->next;
}

/* A place for a new stream: a free one, or that of the one quiet longest. */
static struct dkv_stream *make_place(struct dkv_streams *streams)
{
    if (streams->n < streams->max)
        return &streams->all[streams->n++];
    struct dkv_list *oldest = dkv_list_first(&streams->order);
    struct dkv_stream *stream = DKV_LIST_OF(oldest, struct dkv_stream, node);
    dkv_list_remove(oldest);
    unlink_from_chain(streams, stream);
    streams->n_evicted++;
    return stream;
}

struct dkv_stream *dkv_streams_get(struct dkv_streams *streams, const char *name,
                                   const char *client, uint64_t now_ms)
{
    const uint32_t chain = chain_of(streams, name, client);
    struct dkv_stream *stream = find(streams, chain, name, client);
    if (stream == NULL) {
        stream = make_place(streams);
        *stream = (struct dkv_stream){.chain = chain, .next = streams->chains[chain]};
        snprintf(stream->name, sizeof(stream->name), "%s", name);
        snprintf(stream->client, sizeof(stream->client), "%s", client);
        streams->chains[chain] = (uint32_t)(stream - streams->all) + 1;
        dkv_list_init(&stream->node);
    } else {
        dkv_list_remove(&stream->node);
    }
    dkv_list_push_back(&streams->order, &stream->node);
    stream->last_ms = now_ms;
    return stream;
}

/* ---- what is remembered ---- */

double dkv_stream_weight(const struct dkv_stream *stream, uint64_t now_ms)
{
    const double age_ms = now_ms > stream->weight_ms ? (double)(now_ms - stream->weight_ms) : 0;
    return stream->weight * exp2(-age_ms / DKV_STREAM_HALF_LIFE_MS);
}

/* How many of the ascending `keep` [n] are below `limit`. */
static uint64_t n_below(const int32_t *keep, uint64_t n, uint64_t limit)
{
    uint64_t from = 0;
    while (from < n) {
        const uint64_t middle = from + (n - from) / 2;
        if ((uint64_t)keep[middle] < limit)
            from = middle + 1;
        else
            n = middle;
    }
    return from;
}

/* Adds one head: `kept` and `room` are, per part, the tokens that were kept and those that there
 * were. Indices ascend, so the parts' bounds are searched for instead of looking at each: a prompt
 * of 128K tokens in 32 layers is a millisecond's work rather than ten. */
static void add_head(const int32_t *keep, uint64_t n_keep, uint64_t n_tokens,
                     uint64_t kept[DKV_STREAM_BINS], uint64_t room[DKV_STREAM_BINS])
{
    for (uint64_t bin = 0, from = 0, before = 0; bin < DKV_STREAM_BINS; bin++) {
        const uint64_t to = ((bin + 1) * n_tokens) / DKV_STREAM_BINS;
        const uint64_t below = before + n_below(keep + before, n_keep - before, to);
        kept[bin] += below - before;
        room[bin] += to - from;
        before = below;
        from = to;
    }
}

/* Blocks and plans are still there, or (over HTTP) gone and all alike. */
static uint64_t n_tokens_of(const struct dkv_job *job, uint32_t i)
{
    return job->blocks != NULL ? job->blocks[i].n_tokens : job->n_tokens;
}

static void take_strip(struct dkv_stream *stream, const struct dkv_job *job)
{
    uint64_t kept[DKV_STREAM_BINS] = {0}, room[DKV_STREAM_BINS] = {0};
    const int32_t *keep = job->keep, *offset = job->offsets;
    uint64_t left = job->n_keep;
    stream->has_strip = false;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const uint64_t n_keep = job->plans != NULL ? job->plans[i].keep_tokens : job->keep_tokens;
        const uint64_t kv_heads = job->blocks != NULL ? job->blocks[i].kv_heads : job->kv_heads;
        for (uint64_t head = 0; head < kv_heads; head++) {
            uint64_t count = n_keep;
            if (offset != NULL) {
                count = (uint64_t)(offset[1] - offset[0]);
                offset++;
            }
            if (count > left)
                return; /* not laid out like this */
            add_head(keep, count, n_tokens_of(job, i), kept, room);
            keep += count;
            left -= count;
        }
    }
    if (left > 0)
        return;
    for (unsigned bin = 0; bin < DKV_STREAM_BINS; bin++)
        stream->strip[bin] = (uint8_t)(room[bin] > 0 ? (255 * kept[bin] + room[bin] / 2) / room[bin]
                                                     : 0);
    stream->has_strip = true;
}

void dkv_stream_answered(struct dkv_streams *streams, struct dkv_stream *stream,
                         const struct dkv_job *job, enum dkv_transport transport, uint64_t total_ns,
                         uint64_t now_ms)
{
    stream->n_answered++;
    stream->n_blocks += job->request.n_blocks;
    stream->n_tokens_in += job->n_scored_tokens;
    stream->n_tokens_kept += job->n_keep;
    stream->n_bytes += job->n_read_bytes;
    stream->weight = dkv_stream_weight(stream, now_ms) + (double)job->n_read_bytes;
    stream->weight_ms = now_ms;
    stream->transport = transport;
    stream->last_blocks = job->request.n_blocks;
    stream->last_degraded = job->degraded;
    stream->last_tokens = 0;
    for (uint32_t i = 0; i < job->request.n_blocks; i++)
        if (n_tokens_of(job, i) > stream->last_tokens)
            stream->last_tokens = n_tokens_of(job, i);
    stream->queue_us = (job->started_ns - job->queued_ns) / 1000;
    stream->device_us = (job->finished_ns - job->started_ns) / 1000;
    stream->total_us = total_ns / 1000;
    if (streams->strips && (job->target == NULL || job->degraded))
        take_strip(stream, job);
}

void dkv_streams_set_strips(struct dkv_streams *streams, bool strips)
{
    streams->strips = strips;
    for (uint32_t i = 0; !strips && i < streams->n; i++) {
        memset(streams->all[i].strip, 0, sizeof(streams->all[i].strip));
        streams->all[i].has_strip = false;
    }
}

/* ---- the heaviest ---- */

/* Weights of one moment, so that they compare. */
struct weighed {
    double weight;
    const struct dkv_stream *stream;
};

static int heavier(const void *a, const void *b)
{
    const struct weighed *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight < y->weight ? 1 : -1;
    return x->stream->last_ms < y->stream->last_ms   ? 1
           : x->stream->last_ms > y->stream->last_ms ? -1
                                                     : 0;
}

uint32_t dkv_streams_top(const struct dkv_streams *streams, uint64_t now_ms,
                         const struct dkv_stream **out, uint32_t n)
{
    struct weighed *list = calloc(streams->n + 1u, sizeof(*list));
    if (list == NULL)
        return 0;
    for (uint32_t i = 0; i < streams->n; i++)
        list[i] = (struct weighed){dkv_stream_weight(&streams->all[i], now_ms), &streams->all[i]};
    qsort(list, streams->n, sizeof(*list), heavier);
    n = n < streams->n ? n : streams->n;
    for (uint32_t i = 0; i < n; i++)
        out[i] = list[i].stream;
    free(list);
    return n;
}
