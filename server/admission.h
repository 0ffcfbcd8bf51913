/* The admission queue: which work is accepted, when it runs, beside whom, and how it ends.
 *
 * An *entry* is one accepted request, embedded in the caller's job. It is made of *parts*: the
 * blocks of the request that one launch can serve together (same device, same batch key). The
 * queue hands out *batches* of parts and takes them back. Every accepted entry ends exactly once,
 * in dkv_admission_pop_done(), whatever its parts, its client or the devices did.
 *
 *   offer --> waiting --> next --> in flight --> complete --> pop_done
 *                ^                     |
 *                '--- one replay ------'  device_lost
 *
 * One that fails while parts of it are in flight is handed out by pop_given_up() at once, so that
 * its caller need not wait for work that is of no use any more, and by pop_done() when they are
 * back: until then it keeps its place within the bounds, since its memory is being read.
 *
 * What it promises (tests/server/sim_admission.c checks each of these after every step):
 *
 *   bounded      accepted and unanswered entries and bytes stay within the limits, in all and per
 *                client; beyond them an offer is refused at once, with an estimate of when to
 *                come back. No allocation after dkv_admission_new().
 *   work         a device with nothing in flight gets work as long as there is any that it may
 *                run. While it is busy, requests collect; max_queue_delay_us only matters then.
 *   fair         deficit round robin over clients by bytes: between two clients that both have
 *                work waiting, service differs by a constant, however deep one's backlog is. In
 *                one batch a client gets at most its share while others have work open, or
 *                were served by the batch before.
 *   no starving  a priority level that was passed over aging_batches times is next.
 *   deadlines    never an OK at or after an entry's deadline, and no launch of work that has
 *                expired. A deadline that passes while the work runs is told when it passes.
 *   deaths       the parts of a lost batch go to the front of the queue for one more try, each
 *                in a batch of its own so that the one that kills workers takes no neighbour
 *                along; a part lost twice fails its entry.
 *
 * Time    every call that depends on it takes now_us, from any monotonic clock.
 * Owner   the queue borrows clients, entries and parts until they end; batches are the queue's.
 * Thread  one, the caller's; no call blocks.
 */
#ifndef DKV_SERVER_ADMISSION_H
#define DKV_SERVER_ADMISSION_H

#include "proto/types.h"
#include "server/list.h"

#define DKV_ADMISSION_LEVELS_MAX  8u                              /* priorities */
#define DKV_ADMISSION_DEVICES_MAX 16u                             /* workers */
#define DKV_ADMISSION_FLIGHT_MAX  4u                              /* batches in flight per device */
#define DKV_ADMISSION_LANES_MAX   (DKV_ADMISSION_DEVICES_MAX + 1) /* one per device, one for any */

/* The device of a part whose memory every worker can read (host memory). */
#define DKV_ADMISSION_ANY_DEVICE UINT32_MAX

#define DKV_ADMISSION_NEVER UINT64_MAX

struct dkv_admission_config {
    uint32_t n_devices;     /* 1..DEVICES_MAX */
    uint32_t n_levels;      /* 1..LEVELS_MAX; level 1 is served first */
    uint32_t default_level; /* of entries with priority 0 */
    uint32_t aging_batches; /* a level passed over so often comes next; >= n_levels */

    uint32_t max_flight;         /* batches in flight per device, 1..FLIGHT_MAX */
    uint64_t max_queue_delay_us; /* a busy device waits so long for a fuller batch */
    uint32_t batch_blocks;       /* limits of one batch; a single part may exceed them, alone */
    uint64_t batch_tokens;
    uint64_t batch_bytes;

    uint32_t max_entries; /* accepted and unanswered, all clients together */
    uint64_t max_bytes;
    uint32_t client_max_entries; /* and of one client */
    uint64_t client_max_bytes;

    uint64_t quantum_bytes;  /* credit of one round, 1..2^40 */
    uint64_t max_timeout_us; /* caps every entry's timeout; 0: no cap */
    uint64_t restart_us;     /* expected time until a lost worker answers again */
};

/* What offer() says. Only ACCEPTED takes the entry. */
enum dkv_admission_verdict {
    DKV_ADMISSION_ACCEPTED = 0,
    DKV_ADMISSION_DEGRADED,  /* over a bound, and the caller asked for an answer by recency */
    DKV_ADMISSION_FULL,      /* a bound of the queue (HTTP 503) */
    DKV_ADMISSION_QUOTA,     /* a bound of this client (HTTP 429) */
    DKV_ADMISSION_LATE,      /* would not be answered before its deadline (503) */
    DKV_ADMISSION_EXPIRED,   /* its deadline has passed already */
    DKV_ADMISSION_NO_DEVICE, /* no worker is up that could run it (503) */
    DKV_ADMISSION_DRAINING,  /* shutting down (503) */
    DKV_ADMISSION_TOO_LARGE, /* larger than a bound by itself: never acceptable */
    DKV_ADMISSION_VERDICTS,
};

/* One row per verdict, in order. */
struct dkv_admission_verdict_info {
    const char *name; /* "quota": for metrics labels */
    enum dkv_status status;
    unsigned http_status;
};

const struct dkv_admission_verdict_info *dkv_admission_verdict_info(
    enum dkv_admission_verdict verdict);

struct dkv_admission;
struct dkv_admission_client;
struct dkv_admission_entry;

/* Work of one launch. The caller fills the first half before offer(). */
struct dkv_admission_part {
    uint64_t key;      /* parts of one key can share a launch (dtype class, head_dim) */
    uint32_t device;   /* that holds the memory, or DKV_ADMISSION_ANY_DEVICE */
    uint32_t n_blocks; /* >= 1 */
    uint64_t n_tokens; /* >= 1 */
    uint64_t n_bytes;  /* read by the launch, >= 1 */

    /* The queue's. */
    struct dkv_admission_entry *entry;
    struct dkv_list node;     /* in its flow, the replay list, or its batch */
    struct dkv_list age_node; /* in its lane, oldest first, while waiting in a flow */
    uint64_t seq;             /* order of arrival */
    uint32_t lane;
    uint32_t n_launches; /* batches that took it: at most 2 */
    bool waiting;
};

/* One request. The caller fills the first half before offer(); all of it stays where it is until
 * dkv_admission_pop_done() returned it. */
struct dkv_admission_entry {
    struct dkv_admission_part *parts; /* [n_parts] */
    uint32_t n_parts;                 /* >= 1 */
    uint32_t priority;                /* 1..n_levels, 0: the default level; above: the last */
    uint64_t arrival_us;              /* the timeout counts from here; 0: from the offer */
    uint64_t timeout_us;              /* 0: the configured cap only */
    bool degrade;                     /* on_overload=recency */

    /* How it ended; valid after pop_done(). */
    enum dkv_status status; /* OK: every part was launched and completed in time */
    uint64_t offered_us;
    uint64_t launched_us; /* of its first part; 0: never */
    uint64_t done_us;

    /* The queue's. */
    struct dkv_admission_client *client;
    struct dkv_list node; /* among its client's open entries, then in the list of done ones */
    struct dkv_list given_up_node; /* failed with parts in flight, until that is handed out */
    uint64_t deadline_us;
    uint64_t n_bytes;     /* of all parts */
    uint32_t heap_index;  /* in the deadline heap, or UINT32_MAX */
    uint32_t n_waiting;   /* parts */
    uint32_t n_in_flight; /* parts */
    uint32_t level;       /* 0-based */
};

/* A flow's place in the round robin of one device. */
struct dkv_admission_turn {
    struct dkv_list node; /* in the ring of its level and device, while it has parts or debt */
    struct dkv_admission_flow *flow;
    int64_t deficit; /* bytes it may still take; negative: took ahead of its turn */
};

/* The waiting parts of one client at one level: what the round robin goes over. */
struct dkv_admission_flow {
    struct dkv_list fifo[DKV_ADMISSION_LANES_MAX];
    struct dkv_admission_turn turns[DKV_ADMISSION_DEVICES_MAX];
    uint32_t n_waiting;
};

/* A client of the fair share: a connection, or whatever the caller calls one. Embedded in the
 * caller's session. */
struct dkv_admission_client {
    struct dkv_list node; /* among the queue's clients */
    struct dkv_list open; /* entries accepted and not ended */
    uint32_t n_open;
    uint64_t open_bytes;
    uint64_t waiting_bytes;                      /* of its parts that wait for a batch */
    uint32_t lane_open[DKV_ADMISSION_LANES_MAX]; /* open parts by lane */
    uint64_t counted_in; /* the batch, by number, in which it was counted last */
    struct dkv_admission_flow flows[DKV_ADMISSION_LEVELS_MAX];
};

/* Parts launched together. `parts` lists dkv_admission_part.node, in the order of service. */
struct dkv_admission_batch {
    struct dkv_list parts;
    uint32_t device;
    uint32_t n_parts;
    uint64_t key;
    uint64_t n_blocks;
    uint64_t n_tokens;
    uint64_t n_bytes;
    uint64_t formed_us;
    bool solo;    /* a replay: alone in its batch and on its device */
    bool backlog; /* more was waiting for the device when it was formed */

    struct dkv_list node; /* the queue's */
};

/* Judges a configuration: INVALID names the field, its value and the range. */
enum dkv_status dkv_admission_config_check(const struct dkv_admission_config *config,
                                           struct dkv_error *err);

/* All memory the queue will ever use is taken here. INVALID, NOMEM. Devices begin down. */
enum dkv_status dkv_admission_new(const struct dkv_admission_config *config,
                                  struct dkv_admission **queue_out, struct dkv_error *err);

/* New limits for what is offered and launched from now on; what was accepted stays. Devices,
 * levels, quantum and batches in flight stay as they are whatever `config` says, and no more
 * entries can be allowed than at first. INVALID: nothing was changed. */
enum dkv_status dkv_admission_relimit(struct dkv_admission *queue,
                                      const struct dkv_admission_config *config,
                                      struct dkv_error *err);

/* Every entry must have ended and every client be gone. NULL is fine. */
void dkv_admission_free(struct dkv_admission *queue);

void dkv_admission_client_init(struct dkv_admission *queue, struct dkv_admission_client *client);

/* The client must have no open entry (client->n_open == 0). */
void dkv_admission_client_fini(struct dkv_admission *queue, struct dkv_admission_client *client);

/* Accepts the entry with all its parts, or refuses it.
 *
 * retry_us_out  may be NULL; for FULL, QUOTA, LATE, NO_DEVICE and DRAINING: when another try is
 *               likely to be accepted, 1 ms to 60 s.
 * err           may be NULL; the sentence for the client, unless ACCEPTED or DEGRADED.
 */
enum dkv_admission_verdict dkv_admission_offer(struct dkv_admission *queue,
                                               struct dkv_admission_client *client,
                                               struct dkv_admission_entry *entry, uint64_t now_us,
                                               uint64_t *retry_us_out, struct dkv_error *err);

/* The next batch to launch, or NULL if there is nothing to launch now. Call it after every other
 * call and at dkv_admission_wakeup_us(), until it returns NULL; then empty pop_given_up() and
 * pop_done(). The batch lasts until complete() or its device's loss. */
struct dkv_admission_batch *dkv_admission_next(struct dkv_admission *queue, uint64_t now_us);

/* The batch was answered and its device synchronised without error. What failed for a reason of
 * its own (a NaN in one block) is the caller's to record, or to end early by
 * dkv_admission_fail() before this call. `batch` is gone afterwards. */
void dkv_admission_complete(struct dkv_admission *queue, struct dkv_admission_batch *batch,
                            uint64_t now_us);

/* Ends an entry with `status`: waiting parts are dropped now, and it is done when the last part in
 * flight has come back; until then it is given up. Of several reasons the first counts. Nothing
 * happens if it is done. */
void dkv_admission_fail(struct dkv_admission *queue, struct dkv_admission_entry *entry,
                        enum dkv_status status, uint64_t now_us);

/* The client went away: the same, CANCELLED, for all its entries. */
void dkv_admission_client_cancel(struct dkv_admission *queue, struct dkv_admission_client *client,
                                 uint64_t now_us);

/* The entry that was given up first, with its status, if it has not come to pop_done() meanwhile;
 * or NULL. Each is handed out once, and stays the queue's. */
struct dkv_admission_entry *dkv_admission_pop_given_up(struct dkv_admission *queue);

/* The oldest entry that ended and was not yet handed out, or NULL. It is the caller's again. */
struct dkv_admission_entry *dkv_admission_pop_done(struct dkv_admission *queue);

/* When to call next() although nothing else happens: the earliest deadline or end of a delay;
 * NEVER if there is none. */
uint64_t dkv_admission_wakeup_us(const struct dkv_admission *queue, uint64_t now_us);

/* A worker answers (first start, or after a loss). */
void dkv_admission_device_up(struct dkv_admission *queue, uint32_t device);

/* Its worker died or its context is lost: every batch in flight there is gone, their parts wait for
 * a replay (or end). The device is down until device_up(). */
void dkv_admission_device_lost(struct dkv_admission *queue, uint32_t device, uint64_t now_us);

/* It will not come back: what waits for it alone ends with UNAVAILABLE, and what any device could
 * run as well if this was the last one. Implies device_lost(). device_up() undoes it. */
void dkv_admission_device_retire(struct dkv_admission *queue, uint32_t device, uint64_t now_us);

/* Refuses every offer from now on; what was accepted is still answered. */
void dkv_admission_drain(struct dkv_admission *queue);

/* Ends every open entry with `status` (the limit of a drain). */
void dkv_admission_fail_all(struct dkv_admission *queue, enum dkv_status status, uint64_t now_us);

/* Figures for metrics and health. */
struct dkv_admission_stats {
    uint32_t n_open; /* entries accepted and not ended */
    uint64_t open_bytes;
    uint32_t n_done; /* ended, not yet popped */
    uint32_t n_clients;
    struct {
        uint32_t n_waiting; /* parts that wait for a batch, replays included */
        uint64_t waiting_bytes;
        uint64_t oldest_us; /* age of the oldest of them; 0 if there is none */
    } level[DKV_ADMISSION_LEVELS_MAX];
    struct {
        bool up;
        bool retired;
        uint32_t n_batches; /* in flight */
        uint64_t bytes;     /* in flight */
    } device[DKV_ADMISSION_DEVICES_MAX];

    /* Counters, from the start of the queue. */
    uint64_t verdicts[DKV_ADMISSION_VERDICTS];
    uint64_t ended_ok;
    uint64_t ended_timeout;
    uint64_t ended_cancelled;
    uint64_t ended_failed;
    uint64_t batches;
    uint64_t batch_parts;
    uint64_t batch_blocks;
    uint64_t batch_tokens;
    uint64_t batch_bytes;
    uint64_t batches_lost;
    uint64_t parts_replayed;
};

/* O(clients x devices): for a scrape, not for every request. */
void dkv_admission_stats(const struct dkv_admission *queue, uint64_t now_us,
                         struct dkv_admission_stats *stats_out);

/* Recounts everything that the queue keeps a running figure of. INTERNAL names the first one that
 * differs. O(everything): for tests and debugging. */
enum dkv_status dkv_admission_recount(const struct dkv_admission *queue, struct dkv_error *err);

#endif
