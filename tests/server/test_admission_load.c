/* The admission queue under load, on a virtual clock: what a greedy client and an overload do to
 * everybody else.
 *
 * One device that takes 60 us and 25 us per block for a batch, two batches in flight, served in
 * order: about what a GPU does with blocks of 4,096 tokens. Clients are closed loops (so many
 * requests open, the next one 20 us after an answer) or open ones (requests come whatever the
 * answers do). Everything is deterministic; the printed figures are those the assertions judge.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "server/admission.h"

#define N_CLIENTS    16
#define N_JOBS       512
#define N_SAMPLES    200000
#define BLOCK_BYTES  (UINT64_C(16) << 20)
#define BATCH_US     60
#define BLOCK_US     25
#define BATCH_BLOCKS 64
#define RUN_US       2000000
#define THINK_US     20
#define LONG         4 /* the client that has a long prompt */

struct job {
    struct dkv_admission_entry entry;
    struct dkv_admission_part part;
    bool used;
};

struct client {
    struct dkv_admission_client side;
    uint64_t key;    /* of its parts */
    uint32_t depth;  /* closed loop; 0: open */
    uint64_t gap_us; /* open loop */
    uint64_t next_us;
};

struct world {
    struct dkv_admission *queue;
    struct client clients[N_CLIENTS];
    uint32_t n_clients;
    struct job jobs[N_JOBS];
    struct dkv_admission_batch *flight[2];
    uint64_t end_us[2];
    uint32_t n_flight;
    uint64_t now_us;
    uint64_t timeout_us;
    uint64_t rng;

    uint64_t latency_us[N_SAMPLES]; /* of OK answers to the clients that count */
    uint32_t n_samples;
    uint32_t first_counted; /* client from which on latencies count */
    uint64_t n_offered, n_accepted, n_ok, n_late, blocks_ok;
};

static const struct dkv_admission_config config = {
    .n_devices = 1,
    .n_levels = 3,
    .default_level = 2,
    .aging_batches = 8,
    .max_flight = 2,
    .batch_blocks = BATCH_BLOCKS,
    .batch_tokens = UINT64_C(1) << 40,
    .batch_bytes = UINT64_C(2) << 30,
    .max_entries = 256,
    .max_bytes = UINT64_C(8) << 30,
    .client_max_entries = 128,
    .client_max_bytes = UINT64_C(8) << 30,
    .quantum_bytes = UINT64_C(16) << 20,
    .restart_us = 200000,
};

static uint64_t random_below(struct world *w, uint64_t n)
{
    w->rng = w->rng * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (w->rng >> 33) % n;
}

static struct world *begin(uint32_t n_clients)
{
    struct world *w = calloc(1, sizeof(*w));
    assert_non_null(w);
    assert_int_equal(dkv_admission_new(&config, &w->queue, NULL), DKV_OK);
    dkv_admission_device_up(w->queue, 0);
    w->n_clients = n_clients;
    w->now_us = 1;
    w->rng = 1;
    for (uint32_t i = 0; i < n_clients; i++) {
        dkv_admission_client_init(w->queue, &w->clients[i].side);
        w->clients[i].next_us = 1 + random_below(w, 1000);
    }
    return w;
}

static void end(struct world *w)
{
    dkv_admission_device_lost(w->queue, 0, w->now_us);
    dkv_admission_fail_all(w->queue, DKV_E_DRAINING, w->now_us);
    while (dkv_admission_pop_done(w->queue) != NULL)
        continue;
    for (uint32_t i = 0; i < w->n_clients; i++)
        dkv_admission_client_fini(w->queue, &w->clients[i].side);
    dkv_admission_free(w->queue);
    free(w);
}

/* False if it was refused. */
static bool offer(struct world *w, struct client *client, uint32_t n_blocks)
{
    struct job *job = w->jobs;
    while (job->used)
        job++;
    assert_true(job < w->jobs + N_JOBS);
    job->entry = (struct dkv_admission_entry){
        .parts = &job->part, .n_parts = 1, .timeout_us = w->timeout_us};
    job->part = (struct dkv_admission_part){.key = client->key,
                                            .n_blocks = n_blocks,
                                            .n_tokens = UINT64_C(4096) * n_blocks,
                                            .n_bytes = BLOCK_BYTES * n_blocks};
    w->n_offered++;
    job->used = dkv_admission_offer(w->queue, &client->side, &job->entry, w->now_us, NULL, NULL) ==
                DKV_ADMISSION_ACCEPTED;
    w->n_accepted += job->used;
    return job->used;
}

static void arrive(struct world *w, struct client *client)
{
    if (client->depth == 0) {
        offer(w, client, 1);
        client->next_us = w->now_us + 1 + random_below(w, 2 * client->gap_us);
        return;
    }
    while (client->side.n_open < client->depth && offer(w, client, 1))
        continue;
    client->next_us = DKV_ADMISSION_NEVER;
}

static void ended(struct world *w, struct dkv_admission_entry *entry)
{
    struct job *job = DKV_LIST_OF(entry, struct job, entry);
    struct client *client = DKV_LIST_OF(entry->client, struct client, side);

    job->used = false;
    if (client->depth > 0 && client->next_us == DKV_ADMISSION_NEVER)
        client->next_us = w->now_us + THINK_US;
    if (entry->status != DKV_OK) {
        w->n_late++;
        return;
    }
    w->n_ok++;
    w->blocks_ok += job->part.n_blocks;
    if (client >= &w->clients[w->first_counted] && w->n_samples < N_SAMPLES)
        w->latency_us[w->n_samples++] = entry->done_us - entry->offered_us;
}

static void launch_all(struct world *w)
{
    struct dkv_admission_batch *batch;
    while ((batch = dkv_admission_next(w->queue, w->now_us)) != NULL) {
        const uint64_t from_us = w->n_flight > 0 ? w->end_us[w->n_flight - 1] : w->now_us;
        w->end_us[w->n_flight] = from_us + BATCH_US + BLOCK_US * batch->n_blocks;
        w->flight[w->n_flight++] = batch;
    }
}

static uint64_t next_event_us(const struct world *w)
{
    uint64_t at_us = dkv_admission_wakeup_us(w->queue, w->now_us);
    for (uint32_t i = 0; i < w->n_clients; i++)
        if (w->clients[i].next_us < at_us)
            at_us = w->clients[i].next_us;
    if (w->n_flight > 0 && w->end_us[0] < at_us)
        at_us = w->end_us[0];
    return at_us;
}

static void run_until(struct world *w, uint64_t until_us)
{
    while (w->now_us < until_us) {
        w->now_us = next_event_us(w);
        if (w->n_flight > 0 && w->end_us[0] <= w->now_us) {
            struct dkv_admission_batch *batch = w->flight[0];
            w->flight[0] = w->flight[1];
            w->end_us[0] = w->end_us[1];
            w->n_flight--;
            dkv_admission_complete(w->queue, batch, w->now_us);
        }
        for (uint32_t i = 0; i < w->n_clients; i++)
            if (w->clients[i].next_us <= w->now_us)
                arrive(w, &w->clients[i]);
        launch_all(w);
        struct dkv_admission_entry *entry;
        while ((entry = dkv_admission_pop_done(w->queue)) != NULL)
            ended(w, entry);
    }
}

static void run(struct world *w)
{
    run_until(w, RUN_US);
}

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static uint64_t quantile(struct world *w, double q)
{
    assert_true(w->n_samples > 0);
    qsort(w->latency_us, w->n_samples, sizeof(w->latency_us[0]), by_value);
    return w->latency_us[(uint32_t)((double)(w->n_samples - 1) * q)];
}

/* p99 of 15 clients that each wait for their answer, beside one with `greedy` requests open. */
static uint64_t polite_p99_us(uint32_t greedy)
{
    struct world *w = begin(N_CLIENTS);
    w->first_counted = 1;
    w->clients[0].depth = greedy;
    if (greedy == 0)
        w->clients[0].next_us = DKV_ADMISSION_NEVER;
    for (uint32_t i = 1; i < N_CLIENTS; i++)
        w->clients[i].depth = 1;
    run(w);
    const uint64_t p99_us = quantile(w, 0.99);
    printf("greedy depth %3u: polite p50 %llu us, p99 %llu us, %llu blocks/s in all\n", greedy,
           (unsigned long long)quantile(w, 0.5), (unsigned long long)p99_us,
           (unsigned long long)(w->blocks_ok * 1000000 / RUN_US));
    end(w);
    return p99_us;
}

static void a_greedy_client_leaves_the_polite_p99_within_half_more(void **state)
{
    (void)state;
    const uint64_t alone_us = polite_p99_us(0);
    for (uint32_t depth = 8; depth <= 128; depth *= 4)
        assert_true(polite_p99_us(depth) * 2 <= alone_us * 3);
}

static void overload_costs_neither_goodput_nor_the_deadline_of_what_was_accepted(void **state)
{
    (void)state;
    const double capacity = BATCH_BLOCKS / (double)(BATCH_US + BLOCK_US * BATCH_BLOCKS);

    for (uint32_t load = 3; load <= 10; load += 7) {
        struct world *w = begin(N_CLIENTS);
        w->timeout_us = 8000;
        for (uint32_t i = 0; i < N_CLIENTS; i++)
            w->clients[i].gap_us = (uint64_t)(N_CLIENTS / (capacity * load));
        run(w);
        const double goodput = (double)w->blocks_ok / RUN_US / capacity;
        printf("load x%u: goodput %.3f of capacity, %llu offered, %llu accepted, %llu late, p99 "
               "%llu us of %llu\n",
               load, goodput, (unsigned long long)w->n_offered, (unsigned long long)w->n_accepted,
               (unsigned long long)w->n_late, (unsigned long long)quantile(w, 0.99),
               (unsigned long long)w->timeout_us);
        assert_true(goodput >= 0.9);
        assert_true(w->n_late * 100 <= w->n_accepted);
        end(w);
    }
}

/* Clients whose parts share no launch, so that small batches leave a backlog behind, and one more,
 * which does nothing yet. */
static struct world *small_batches(uint32_t depth)
{
    struct world *w = begin(LONG + 1);
    for (uint32_t i = 0; i < LONG; i++) {
        w->clients[i].key = i;
        w->clients[i].depth = depth;
    }
    w->clients[LONG].next_us = DKV_ADMISSION_NEVER;
    run_until(w, 100000);
    return w;
}

/* A long prompt of 64 blocks takes 1.7 ms, its bytes at the rate of small batches up to 5.4. */
static void small_batches_do_not_have_long_prompts_refused(void **state)
{
    (void)state;
    for (uint32_t depth = 1; depth <= 6; depth++) {
        struct world *w = small_batches(depth);
        for (int i = 0; i < 4; i++) {
            run_until(w, w->now_us + 100000); /* until what it took before its turn is paid */
            w->timeout_us = 3000;
            assert_true(offer(w, &w->clients[LONG], BATCH_BLOCKS));
            w->timeout_us = 0;
            run_until(w, w->now_us + 10000);
            assert_int_equal(w->clients[LONG].side.n_open, 0);
            assert_int_equal(w->n_late, 0);
        }
        w->timeout_us = 1500; /* it cannot be done in that, which is known now */
        assert_false(offer(w, &w->clients[LONG], BATCH_BLOCKS));
        end(w);
    }
}

static void one_pause_has_nothing_refused(void **state)
{
    (void)state;
    struct world *w = small_batches(1);
    assert_int_equal(w->n_flight, 2);
    for (uint32_t i = 0; i < 2; i++)
        w->end_us[i] += 20000;
    run_until(w, w->end_us[0] + 1);
    w->timeout_us = 2000;
    assert_true(offer(w, &w->clients[LONG], 1));
    end(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_greedy_client_leaves_the_polite_p99_within_half_more),
        cmocka_unit_test(overload_costs_neither_goodput_nor_the_deadline_of_what_was_accepted),
        cmocka_unit_test(small_batches_do_not_have_long_prompts_refused),
        cmocka_unit_test(one_pause_has_nothing_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
