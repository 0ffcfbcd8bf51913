/* What the files of the admission queue share; nobody else includes this.
 *
 *   admission.c         entries: offer, fail, complete, devices, drain
 *   admission_judge.c   what an offer is judged by
 *   admission_fair.c    flows, rings and the round robin
 *   admission_batch.c   which device, which level, which parts
 *   admission_load.c    deadlines in a heap, service rate, how long until
 *   admission_config.c  tables and limits
 *   admission_stats.c   figures, and the recount that proves them
 *
 * Thread  the queue's.
 */
#ifndef DKV_SERVER_ADMISSION_PRIV_H
#define DKV_SERVER_ADMISSION_PRIV_H

#include <assert.h>

#include "server/admission.h"

/* How far behind a flow's first part one of a fitting key is looked for. */
#define DKV_ADMISSION_LOOKAHEAD 16

#define DKV_ADMISSION_NO_INDEX UINT32_MAX

/* One priority. Replays wait outside the rings; they count in n_waiting and waiting_bytes only. */
struct dkv_admission_level {
    struct dkv_list ring[DKV_ADMISSION_DEVICES_MAX]; /* turns of flows with parts or debt there */
    uint32_t lane_parts[DKV_ADMISSION_LANES_MAX];    /* parts in flows, by lane */
    uint32_t passed[DKV_ADMISSION_DEVICES_MAX]; /* batches formed while this level got nothing */
    uint32_t n_waiting;
    uint64_t waiting_bytes;
};

/* Work by where it may run: lane d is device d's memory, the last lane is any device. */
struct dkv_admission_lane {
    struct dkv_list ages;    /* parts that wait in flows, oldest first */
    struct dkv_list replays; /* parts of lost batches, in their former order */
    uint64_t n_blocks;       /* of the parts in `ages` */
    uint64_t n_tokens;
    uint64_t n_bytes;
    uint32_t n_clients; /* that have an open part here */
};

struct dkv_admission_device {
    bool up;
    bool retired;
    struct dkv_list batches; /* in flight, oldest first */
    uint32_t n_batches;
    uint64_t n_bytes;
    uint64_t last_done_us;
    double batch_bytes; /* of a batch, when loaded: means, 0 if there was none yet */
    double batch_us;
    double bytes_variance; /* of batches, and how their times vary with it: the fit */
    double bytes_us_covariance;
    double us_spread;        /* mean distance of times from the fit, as a part of them */
    uint32_t n_clients_done; /* in the batch that was completed last */
};

struct dkv_admission {
    struct dkv_admission_config config;
    uint32_t heap_entries; /* that the heap has room for */
    struct dkv_list clients;
    uint32_t n_clients;
    uint32_t n_active_clients; /* with open entries */
    uint32_t n_open;
    uint64_t open_bytes;
    uint64_t next_seq;
    uint64_t n_completed; /* batches */
    bool draining;

    struct dkv_admission_level level[DKV_ADMISSION_LEVELS_MAX];
    struct dkv_admission_lane lane[DKV_ADMISSION_LANES_MAX];
    struct dkv_admission_device device[DKV_ADMISSION_DEVICES_MAX];

    struct dkv_list given_up; /* entries that failed with parts in flight */
    struct dkv_list done;
    uint32_t n_done;
    struct dkv_list free_batches;
    struct dkv_admission_batch *batches; /* [n_devices * max_flight] */
    struct dkv_admission_entry **heap;   /* [max_entries], earliest deadline first */
    uint32_t n_heap;

    struct dkv_admission_stats counters; /* only its counters are kept here */
};

static inline uint32_t dkv_admission_any_lane(const struct dkv_admission *queue)
{
    return queue->config.n_devices;
}

static inline struct dkv_admission_part *dkv_admission_part_of(struct dkv_list *node)
{
    return DKV_LIST_OF(node, struct dkv_admission_part, node);
}

/* True if the deadline has come. The deadline itself is too late, everywhere. */
static inline bool dkv_admission_expired(const struct dkv_admission_entry *entry, uint64_t now_us)
{
    return now_us >= entry->deadline_us;
}

/* --- admission_fair.c ---------------------------------------------------------------------- */

void dkv_admission_flow_init(struct dkv_admission_flow *flow);

/* Leaves every ring. */
void dkv_admission_flow_fini(struct dkv_admission_flow *flow);

/* Appends a new part to its client's flow, or takes a waiting one out of it. */
void dkv_admission_fair_push(struct dkv_admission *queue, struct dkv_admission_part *part);
void dkv_admission_fair_remove(struct dkv_admission *queue, struct dkv_admission_part *part);

/* True if the level has a part in its flows that the device may run. */
bool dkv_admission_fair_has(const struct dkv_admission *queue, uint32_t level, uint32_t device);

/* Whose turn it is, at a level that has work for the device. */
struct dkv_admission_turn *dkv_admission_fair_pick(struct dkv_admission *queue, uint32_t level,
                                                   uint32_t device);

/* The flow's oldest part for the device, of the given key if `key` is not NULL; or NULL. */
struct dkv_admission_part *dkv_admission_fair_first(const struct dkv_admission *queue,
                                                    const struct dkv_admission_flow *flow,
                                                    uint32_t device, const uint64_t *key);

/* What the round robin charges for a part. */
int64_t dkv_admission_fair_cost(const struct dkv_admission *queue,
                                const struct dkv_admission_part *part);

/* --- admission_load.c ---------------------------------------------------------------------- */

void dkv_admission_heap_push(struct dkv_admission *queue, struct dkv_admission_entry *entry);
void dkv_admission_heap_remove(struct dkv_admission *queue, struct dkv_admission_entry *entry);

/* Learns from a completed batch how fast its device is under load. */
void dkv_admission_learn_rate(struct dkv_admission_device *device,
                              const struct dkv_admission_batch *batch, uint64_t now_us);

/* The time until an entry offered now is answered: 0 if nothing is ahead or the rate is unknown. */
uint64_t dkv_admission_estimate_us(const struct dkv_admission *queue,
                                   const struct dkv_admission_client *client,
                                   const struct dkv_admission_entry *entry);

/* When to come back after a refusal. */
uint64_t dkv_admission_retry_us(const struct dkv_admission *queue,
                                const struct dkv_admission_client *client,
                                const struct dkv_admission_entry *entry,
                                enum dkv_admission_verdict verdict, uint64_t now_us);

/* --- admission_judge.c --------------------------------------------------------------------- */

/* False if the sum of the parts overflows. */
bool dkv_admission_entry_bytes(const struct dkv_admission_entry *entry, uint64_t *bytes_out);

/* min(the caller's timeout, the configured cap), counted from the arrival. */
uint64_t dkv_admission_deadline(const struct dkv_admission *queue,
                                const struct dkv_admission_entry *entry, uint64_t now_us);

/* Ignores entry->degrade. */
enum dkv_admission_verdict dkv_admission_judge(const struct dkv_admission *queue,
                                               const struct dkv_admission_client *client,
                                               const struct dkv_admission_entry *entry,
                                               uint64_t now_us);

/* True for a refusal that an answer by recency can stand in for. */
bool dkv_admission_may_degrade(enum dkv_admission_verdict verdict);

/* The client's sentence for a refusal. */
void dkv_admission_explain(const struct dkv_admission *queue,
                           const struct dkv_admission_client *client,
                           const struct dkv_admission_entry *entry,
                           enum dkv_admission_verdict verdict, struct dkv_error *err);

/* --- admission.c --------------------------------------------------------------------------- */

/* Drops the part from where it waits; its entry's counts follow. */
void dkv_admission_part_unwait(struct dkv_admission *queue, struct dkv_admission_part *part);

/* Ends what has expired. */
void dkv_admission_expire(struct dkv_admission *queue, uint64_t now_us);

#endif
