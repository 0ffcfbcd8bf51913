/* The admission queue's simulator: a world of clients and devices on a virtual clock, and an oracle
 * that keeps its own books.
 *
 *   sim_scenarios.c  what worlds there are, and how each begins
 *   sim_world.c      what happens: clients, devices, the order of events
 *   sim_oracle.c     what must hold: called at every offer, batch, end and step
 *   sim_admission.c  seeds, processes, the report
 *
 * The oracle never reads the queue's figures to decide what is right. It knows what was offered,
 * launched, lost and cancelled because it saw the calls, and works everything out from that.
 *
 * Thread  one world per process.
 */
#ifndef DKV_TESTS_SERVER_SIM_H
#define DKV_TESTS_SERVER_SIM_H

#include <setjmp.h>
#include <stdio.h>

#include "server/admission.h"

#define SIM_JOBS    96 /* open at a time */
#define SIM_PARTS   4  /* of one job */
#define SIM_CLIENTS 8
#define SIM_DEVICES 4
#define SIM_LEVELS  4
#define SIM_LANES   (SIM_DEVICES + 1)

#define SIM_BYTES_PER_US 1024 /* of a device */

enum sim_part_state { SIM_WAITING, SIM_FLYING, SIM_RETURNED, SIM_DROPPED };

struct sim_part {
    enum sim_part_state state;
    uint32_t n_launches;
    uint64_t seq; /* order of the offer, over all parts */
};

struct sim_job {
    struct dkv_admission_entry entry;
    struct dkv_admission_part parts[SIM_PARTS];
    struct sim_part seen[SIM_PARTS];
    bool open;
    uint32_t client;
    uint32_t level; /* 0-based */
    uint64_t n_bytes;
    uint64_t deadline_us;
    enum dkv_status reason; /* why it must not end OK; OK: no reason yet */
    bool told;              /* that it was given up, with parts in flight */
};

struct sim_client {
    struct dkv_admission_client queue_side;
    uint32_t n_open;
    uint64_t open_bytes;
    uint32_t priority;
    uint32_t depth; /* closed loop: keeps so many requests open; 0: open loop */
    uint64_t gap_us;
    uint64_t next_us;
    bool leaving; /* cancelled; back as a new client when its last entry has ended */
};

struct sim_flight {
    struct dkv_admission_batch *batch;
    uint64_t end_us;
    uint32_t n_parts;
    bool solo;
};

struct sim_device {
    bool up;
    bool retired;
    struct sim_flight flight[DKV_ADMISSION_FLIGHT_MAX];
    uint32_t n_flight;
    uint64_t busy_until_us;
    uint64_t busy_us; /* in all */
    uint64_t up_us;   /* when it comes back; NEVER */
};

/* What a scenario is made of. Probabilities in thousandths, per event. */
struct sim_scenario {
    const char *name;
    uint32_t n_clients, n_devices, n_keys;
    double load;         /* offered work / capacity */
    uint32_t burst;      /* requests that come together */
    uint32_t greedy;     /* depth of client 0; 0: like the others */
    uint32_t depth;      /* closed loop of this depth for the others; 0: open loop */
    uint32_t giant;      /* parts that exceed a batch by themselves */
    uint32_t any_device; /* parts whose memory every device reads */
    uint32_t multi_part; /* requests of several parts */
    uint32_t with_timeout;
    uint32_t timeout_turns; /* typical timeout, in batch times */
    uint32_t degrade, cancel, fail, leave, die, retire;
    bool drain_early;
    uint32_t n_offers;
};

struct sim {
    uint64_t seed;
    uint64_t rng;
    bool verbose;
    uint64_t now_us;
    struct sim_scenario scenario;
    struct dkv_admission_config config;
    struct dkv_admission *queue;
    struct sim_client clients[SIM_CLIENTS];
    struct sim_device devices[SIM_DEVICES];
    struct sim_job jobs[SIM_JOBS];
    uint32_t open[SIM_JOBS]; /* indices of open jobs */
    uint32_t n_open;
    uint64_t open_bytes;
    uint64_t next_seq;
    bool draining;
    uint32_t n_offered;
    uint64_t steps;

    /* The oracle's books. */
    uint64_t verdicts[DKV_ADMISSION_VERDICTS];
    uint64_t ended_ok, ended_timeout, ended_cancelled, ended_failed;
    uint64_t n_batches, n_parts_launched, n_lost, n_replayed;
    uint64_t bytes_launched, bytes_ok;
    uint32_t waiting[SIM_CLIENTS][SIM_LEVELS][SIM_LANES]; /* parts never launched */
    uint32_t replays[SIM_LANES];                          /* parts that wait for a second launch */
    uint32_t passed[SIM_LEVELS][SIM_DEVICES];
    uint32_t turns_waited[SIM_CLIENTS][SIM_LEVELS][SIM_DEVICES];
    int64_t served[SIM_CLIENTS][SIM_LEVELS][SIM_DEVICES];
    bool waits[SIM_CLIENTS][SIM_LEVELS][SIM_DEVICES];
    /* served[a] - served[b] when b began to wait, or a was new. */
    int64_t base[SIM_LEVELS][SIM_DEVICES][SIM_CLIENTS][SIM_CLIENTS];
    int64_t largest_cost; /* of any part so far */

    jmp_buf failed;
    char why[512];
};

/* Runs one seed. 0: every promise held; else `sim->why` says which did not. */
int sim_run(struct sim *sim, uint64_t seed, bool verbose);

/* Ends the run: this promise did not hold. */
void sim_fail(struct sim *sim, const char *format, ...)
    __attribute__((format(printf, 2, 3), noreturn));

/* A line of --verbose. */
void sim_note(const struct sim *sim, const char *format, ...) DKV_PRINTF(2, 3);

uint64_t sim_below(struct sim *sim, uint64_t n);                    /* 0..n-1 */
uint64_t sim_between(struct sim *sim, uint64_t low, uint64_t high); /* both included */
bool sim_chance(struct sim *sim, uint32_t thousandths);

/* Draws the seed's scenario, opens its queue and brings its devices up. */
void sim_set_up(struct sim *sim);

static inline uint32_t sim_lane(const struct sim *sim, const struct dkv_admission_part *part)
{
    return part->device == DKV_ADMISSION_ANY_DEVICE ? sim->config.n_devices : part->device;
}

/* --- the oracle ---------------------------------------------------------------------------- */

void oracle_offer(struct sim *sim, struct sim_job *job, enum dkv_admission_verdict verdict,
                  uint64_t retry_us);
void oracle_batch(struct sim *sim, const struct dkv_admission_batch *batch);
void oracle_completed(struct sim *sim, const struct dkv_admission_batch *batch); /* before it is */
void oracle_lost(struct sim *sim, uint32_t device);                              /* before it is */
void oracle_retired(struct sim *sim, uint32_t device);
void oracle_new_client(struct sim *sim, uint32_t client);
void oracle_reason(struct sim *sim, struct sim_job *job, enum dkv_status reason);
void oracle_given_up(struct sim *sim, struct sim_job *job);
void oracle_ended(struct sim *sim, struct sim_job *job);

/* What the deadlines have ended by now. */
void oracle_expire(struct sim *sim);

/* Works out who waits where; after every call that could change it. */
void oracle_refresh(struct sim *sim);

/* Nothing more to launch and nothing ended is left: everything that must hold between events. */
void oracle_step(struct sim *sim);

/* All offers made, all work done: every account is back at zero. */
void oracle_end(struct sim *sim);

#endif
