/* Who has been asking: totals and the last request of each stream, for the status page.
 *
 * A stream is a name that requests bear (parameter `stream`), of one client (the holder of a token,
 * or nobody in particular); requests without a name are one stream together. At most `max` are
 * remembered: a new one takes the place of the one that has been quiet longest, so a client that
 * invents names costs memory that was given out already, and a search.
 *
 * A stream's weight is what was read for it lately: bytes, halved every DKV_STREAM_HALF_LIFE_MS.
 * Its share is its weight's part of all of them.
 *
 * A keep-set is remembered as a strip: for each of DKV_STREAM_BINS parts of the last request's
 * positions, how much of it was kept, over all its layers and KV heads, 255 for all. Only where
 * `strips` is on: it says something about what was read.
 *
 * Owner   open/close.
 * Thread  loop.
 */
#ifndef DKV_SERVER_STREAMS_H
#define DKV_SERVER_STREAMS_H

#include "server/auth.h"
#include "server/job.h"
#include "server/list.h"

#define DKV_STREAM_BINS         64u
#define DKV_STREAM_HALF_LIFE_MS 30000u

struct dkv_stream {
    char name[DKV_STREAM_NAME_MAX + 1];     /* "": requests without one */
    char client[DKV_CLIENT_NAME_BYTES + 1]; /* "": no token was asked for */
    uint64_t n_answered, n_failed;
    uint64_t n_blocks, n_tokens_in, n_tokens_kept, n_bytes;
    double weight; /* at weight_ms */
    uint64_t weight_ms, last_ms;

    /* The last answered request. */
    enum dkv_transport transport;
    uint64_t last_tokens; /* of its longest block */
    uint32_t last_blocks;
    bool last_degraded;
    uint64_t queue_us, device_us, total_us;
    uint8_t strip[DKV_STREAM_BINS];
    bool has_strip;

    struct dkv_list node; /* quiet longest first */
    uint32_t next;        /* in its chain, by index + 1 */
    uint32_t chain;
};

struct dkv_streams {
    struct dkv_stream *all; /* [n] in use, of max */
    uint32_t *chains;       /* [n_chains], index + 1 of the first; 0: none */
    uint32_t n, max, n_chains;
    uint64_t seed;
    struct dkv_list order;
    uint64_t n_evicted;
    bool strips;
};

/* NOMEM. */
enum dkv_status dkv_streams_open(struct dkv_streams *streams, uint32_t max, bool strips,
                                 struct dkv_error *err);
void dkv_streams_close(struct dkv_streams *streams);

/* The stream of that name and client, as the one heard of last. */
struct dkv_stream *dkv_streams_get(struct dkv_streams *streams, const char *name,
                                   const char *client, uint64_t now_ms);

/* Adds an answered request; `job` still has its outputs. */
void dkv_stream_answered(struct dkv_streams *streams, struct dkv_stream *stream,
                         const struct dkv_job *job, enum dkv_transport transport, uint64_t total_ns,
                         uint64_t now_ms);

double dkv_stream_weight(const struct dkv_stream *stream, uint64_t now_ms);

/* The `n` heaviest, heaviest first; how many there are. */
uint32_t dkv_streams_top(const struct dkv_streams *streams, uint64_t now_ms,
                         const struct dkv_stream **out, uint32_t n);

/* All strips are forgotten, and none is kept from now on; or they are kept again. */
void dkv_streams_set_strips(struct dkv_streams *streams, bool strips);

#endif
