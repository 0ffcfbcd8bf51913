/* What the queue's limits do to latency on a device whose launches cost: the daemon's own admission
 * queue on a virtual clock.
 *
 *   sim_tuning window|load|batch|clients [SECONDS] > docs/tuning/window.csv
 *
 * window: by load and max_queue_delay_us; load: by load, up to twice what the device can do, and
 * max_queue_requests; batch: by load and max_batch_items; clients: by load and max_client_requests.
 * docs/draw_tuning.py draws them.
 *
 * The device is a cost model, LAUNCH_US + BLOCK_US per block, as the CUDA engine took on an H200
 * for blocks of 4,096 tokens (README.md, "Performance": 58 us for one, 309 us for 32), and HAND_US
 * each way between front and worker, which took 9 us (queue_us of an idle daemon). Requests of one
 * block come at random, evenly spread over 16 clients, at a share of the rate that full batches
 * reach. What is printed is exact for that model and the same on every machine: it shows what a
 * limit trades, not what a given machine does.
 */
#include "server/admission.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAUNCH_US   50.0
#define BLOCK_US    8.1
#define HAND_US     10.0
#define FULL_BLOCKS 64u /* of the batches that full load means */
#define CLIENTS     16u
#define FLIGHT      2u
#define ENTRIES_MAX 4096u
#define TIMES_MAX   (1u << 22)

struct setting {
    double load; /* share of full load */
    uint64_t delay_us;
    uint32_t queue, batch_items;
    uint32_t client_queue; /* 0: half of the queue, as by default */
};

struct request {
    struct dkv_admission_entry entry;
    struct dkv_admission_part part;
};

struct flight {
    struct dkv_admission_batch *batch;
    double done_us;
};

struct sim {
    struct dkv_admission *queue;
    struct dkv_admission_client clients[CLIENTS];
    struct flight flights[FLIGHT]; /* oldest first */
    unsigned n_flights;
    double free_us; /* when the device has done what it was given */
    uint64_t random;
    uint64_t n_blocks, n_batches, n_refused;
    double *times_us;
    size_t n_times;
};

/* xorshift*: the same numbers everywhere. */
static double next_random(struct sim *sim)
{
    sim->random ^= sim->random >> 12;
    sim->random ^= sim->random << 25;
    sim->random ^= sim->random >> 27;
    return (double)((sim->random * 2685821657736338717u) >> 11) / 9007199254740992.0;
}

static void arrive(struct sim *sim, double now_us)
{
    struct request *request = calloc(1, sizeof(*request));
    request->part = (struct dkv_admission_part){.key = 1,
                                                .device = DKV_ADMISSION_ANY_DEVICE,
                                                .n_blocks = 1,
                                                .n_tokens = 4096,
                                                .n_bytes = 4096 * 8 * 512};
    request->entry.parts = &request->part;
    request->entry.n_parts = 1;
    struct dkv_admission_client *client = &sim->clients[(unsigned)(next_random(sim) * CLIENTS)];
    if (dkv_admission_offer(sim->queue, client, &request->entry, (uint64_t)now_us, NULL, NULL) ==
        DKV_ADMISSION_ACCEPTED)
        return;
    sim->n_refused++;
    free(request);
}

static void launch(struct sim *sim, double now_us)
{
    struct dkv_admission_batch *batch;
    while ((batch = dkv_admission_next(sim->queue, (uint64_t)now_us)) != NULL) {
        const double here_us = now_us + HAND_US;
        const double begin_us = sim->free_us > here_us ? sim->free_us : here_us;
        sim->free_us = begin_us + LAUNCH_US + BLOCK_US * (double)batch->n_blocks;
        sim->n_batches++;
        sim->n_blocks += batch->n_blocks;
        sim->flights[sim->n_flights++] = (struct flight){batch, sim->free_us + HAND_US};
    }
}

static void complete(struct sim *sim, double now_us)
{
    struct dkv_admission_entry *entry;
    while (sim->n_flights > 0 && sim->flights[0].done_us <= now_us) {
        dkv_admission_complete(sim->queue, sim->flights[0].batch, (uint64_t)now_us);
        memmove(sim->flights, sim->flights + 1, --sim->n_flights * sizeof(sim->flights[0]));
    }
    while ((entry = dkv_admission_pop_done(sim->queue)) != NULL) {
        if (sim->n_times < TIMES_MAX)
            sim->times_us[sim->n_times++] = now_us - (double)entry->offered_us;
        free(DKV_LIST_OF(entry, struct request, entry));
    }
}

static double next_event(const struct sim *sim, double arrival_us, double now_us)
{
    const uint64_t wakeup = dkv_admission_wakeup_us(sim->queue, (uint64_t)now_us);
    double next = arrival_us;
    if (sim->n_flights > 0 && sim->flights[0].done_us < next)
        next = sim->flights[0].done_us;
    if (wakeup != DKV_ADMISSION_NEVER && (double)wakeup < next)
        next = (double)wakeup > now_us ? (double)wakeup : now_us;
    return next;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static uint32_t client_queue(const struct setting *setting)
{
    return setting->client_queue != 0 ? setting->client_queue : setting->queue / 2;
}

static void open_queue(struct sim *sim, const struct setting *setting)
{
    const struct dkv_admission_config config = {
        .n_devices = 1,
        .n_levels = 1,
        .default_level = 1,
        .aging_batches = 16,
        .max_flight = FLIGHT,
        .max_queue_delay_us = setting->delay_us,
        .batch_blocks = setting->batch_items,
        .batch_tokens = UINT64_C(1) << 40,
        .batch_bytes = UINT64_C(1) << 40,
        .max_entries = setting->queue,
        .max_bytes = UINT64_C(1) << 45,
        .client_max_entries = client_queue(setting),
        .client_max_bytes = UINT64_C(1) << 45,
        .quantum_bytes = 8u << 20,
        .restart_us = 200000,
    };
    struct dkv_error err = {0};
    if (dkv_admission_new(&config, &sim->queue, &err) != DKV_OK) {
        fprintf(stderr, "sim_window: %s\n", err.text);
        exit(1);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        dkv_admission_client_init(sim->queue, &sim->clients[i]);
    dkv_admission_device_up(sim->queue, 0);
}

static void close_queue(struct sim *sim)
{
    dkv_admission_device_lost(sim->queue, 0, UINT64_C(1) << 60);
    dkv_admission_fail_all(sim->queue, DKV_E_DRAINING, UINT64_C(1) << 60);
    complete(sim, 0); /* frees what had not ended; its times are not looked at any more */
    for (unsigned i = 0; i < CLIENTS; i++)
        dkv_admission_client_fini(sim->queue, &sim->clients[i]);
    dkv_admission_free(sim->queue);
}

static void print(const struct setting *setting, const struct sim *sim, double seconds)
{
    const size_t n = sim->n_times;
    const double n_offered = (double)(n + sim->n_refused);
    printf("%.2f,%llu,%u,%u,%u,%.0f,%.1f,%.1f,%.2f,%.4f\n", setting->load,
           (unsigned long long)setting->delay_us, setting->queue, client_queue(setting),
           setting->batch_items, (double)n / seconds, sim->times_us[n / 2],
           sim->times_us[(size_t)((double)n * 0.99)],
           (double)sim->n_blocks / (double)sim->n_batches, (double)sim->n_refused / n_offered);
}

/* One line: the setting, and what came of it. */
static void run(const struct setting *setting, double seconds, double *times_us)
{
    const double full_per_us = FULL_BLOCKS / (LAUNCH_US + BLOCK_US * FULL_BLOCKS);
    struct sim sim = {.random = 88172645463325252u, .times_us = times_us};
    double now_us = 0, arrival_us = 0;
    open_queue(&sim, setting);
    while (now_us < seconds * 1e6) {
        now_us = next_event(&sim, arrival_us, now_us);
        complete(&sim, now_us);
        while (arrival_us <= now_us) {
            arrive(&sim, arrival_us);
            arrival_us += -log(1 - next_random(&sim)) / (setting->load * full_per_us);
        }
        launch(&sim, now_us);
    }
    qsort(times_us, sim.n_times, sizeof(double), by_value);
    print(setting, &sim, seconds);
    sim.n_flights = 0;
    close_queue(&sim);
}

static void window(double seconds, double *times_us)
{
    static const double loads[] = {0.1, 0.3, 0.5, 0.7, 0.9};
    static const uint64_t delays[] = {0, 25, 50, 100, 200, 400, 800, 1600};
    for (unsigned l = 0; l < sizeof(loads) / sizeof(loads[0]); l++)
        for (unsigned d = 0; d < sizeof(delays) / sizeof(delays[0]); d++)
            run(&(struct setting){loads[l], delays[d], ENTRIES_MAX, FULL_BLOCKS, 0}, seconds,
                times_us);
}

static void load(double seconds, double *times_us)
{
    static const double loads[] = {0.25, 0.5, 0.75, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2};
    static const uint32_t queues[] = {32, 64, 128, 256, 1024};
    for (unsigned q = 0; q < sizeof(queues) / sizeof(queues[0]); q++)
        for (unsigned l = 0; l < sizeof(loads) / sizeof(loads[0]); l++)
            run(&(struct setting){loads[l], 100, queues[q], FULL_BLOCKS, 0}, seconds, times_us);
}

static void batch(double seconds, double *times_us)
{
    static const double loads[] = {0.1, 0.3, 0.5, 0.7, 2};
    static const uint32_t sizes[] = {1, 2, 4, 8, 16, 32, 64, 128};
    for (unsigned l = 0; l < sizeof(loads) / sizeof(loads[0]); l++)
        for (unsigned b = 0; b < sizeof(sizes) / sizeof(sizes[0]); b++)
            run(&(struct setting){loads[l], 100, 256, sizes[b], 0}, seconds, times_us);
}

static void clients(double seconds, double *times_us)
{
    static const double loads[] = {0.9, 1.1, 1.5};
    static const uint32_t shares[] = {8, 16, 24, 32, 64, 128, 256};
    for (unsigned l = 0; l < sizeof(loads) / sizeof(loads[0]); l++)
        for (unsigned c = 0; c < sizeof(shares) / sizeof(shares[0]); c++)
            run(&(struct setting){loads[l], 100, 256, FULL_BLOCKS, shares[c]}, seconds, times_us);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*print)(double seconds, double *times_us);
    } modes[] = {{"window", window}, {"load", load}, {"batch", batch}, {"clients", clients}};
    const double seconds = argc > 2 ? strtod(argv[2], NULL) : 3;
    double *times_us = malloc(TIMES_MAX * sizeof(double));
    for (unsigned i = 0; argc > 1 && times_us != NULL && seconds > 0 && i < 4; i++)
        if (strcmp(argv[1], modes[i].name) == 0) {
            puts("load,delay_us,queue,client_queue,batch_items,answers_per_s,p50_us,p99_us,blocks_"
                 "per_batch,"
                 "refused_share");
            modes[i].print(seconds, times_us);
            free(times_us);
            return 0;
        }
    fprintf(stderr, "usage: sim_tuning window|load|batch|clients [SECONDS]\n");
    return 64;
}
