/* The admission queue, promise by promise. The simulator (sim_admission.c) looks for the sequence
 * of events nobody thought of; these tests say what each promise means in the smallest case. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/admission.h"

#define N_CLIENTS 4
#define N_JOBS    64
#define ANY       DKV_ADMISSION_ANY_DEVICE

static const struct dkv_admission_config base_config = {
    .n_devices = 2,
    .n_levels = 3,
    .default_level = 2,
    .aging_batches = 3,
    .max_flight = 2,
    .batch_blocks = 8,
    .batch_tokens = 1000000,
    .batch_bytes = 1000000,
    .max_entries = 32,
    .max_bytes = 1000000,
    .client_max_entries = 16,
    .client_max_bytes = 500000,
    .quantum_bytes = 1000,
    .restart_us = 200000,
};

struct job {
    struct dkv_admission_entry entry;
    struct dkv_admission_part parts[4];
};

struct fixture {
    struct dkv_admission *queue;
    struct dkv_admission_client clients[N_CLIENTS];
    struct job jobs[N_JOBS];
    uint32_t n_jobs;
    uint64_t retry_us;
    struct dkv_error err;
};

static struct fixture *begin(const struct dkv_admission_config *config)
{
    struct fixture *f = calloc(1, sizeof(*f));
    assert_non_null(f);
    assert_int_equal(dkv_admission_new(config, &f->queue, &f->err), DKV_OK);
    for (int i = 0; i < N_CLIENTS; i++)
        dkv_admission_client_init(f->queue, &f->clients[i]);
    for (uint32_t d = 0; d < config->n_devices; d++)
        dkv_admission_device_up(f->queue, d);
    return f;
}

/* Ends whatever is open, and looks at the books once more. */
static void end(struct fixture *f)
{
    dkv_admission_fail_all(f->queue, DKV_E_DRAINING, 1u << 30);
    for (uint32_t d = 0; d < 2; d++)
        dkv_admission_device_lost(f->queue, d, 1u << 30);
    while (dkv_admission_pop_done(f->queue) != NULL)
        continue;
    assert_int_equal(dkv_admission_recount(f->queue, &f->err), DKV_OK);
    for (int i = 0; i < N_CLIENTS; i++)
        dkv_admission_client_fini(f->queue, &f->clients[i]);
    dkv_admission_free(f->queue);
    free(f);
}

/* A request of one block of 100 bytes for device 0. */
static struct job *job(struct fixture *f)
{
    assert_true(f->n_jobs < N_JOBS);
    struct job *j = &f->jobs[f->n_jobs++];
    j->entry.parts = j->parts;
    j->entry.n_parts = 1;
    for (int i = 0; i < 4; i++)
        j->parts[i] = (struct dkv_admission_part){
            .key = 1, .device = 0, .n_blocks = 1, .n_tokens = 10, .n_bytes = 100};
    return j;
}

static enum dkv_admission_verdict offer(struct fixture *f, int client, struct job *j, uint64_t now)
{
    return dkv_admission_offer(f->queue, &f->clients[client], &j->entry, now, &f->retry_us,
                               &f->err);
}

static struct job *accepted(struct fixture *f, int client, uint64_t now)
{
    struct job *j = job(f);
    assert_int_equal(offer(f, client, j, now), DKV_ADMISSION_ACCEPTED);
    return j;
}

static struct dkv_admission_batch *batch(struct fixture *f, uint64_t now, uint32_t n_parts)
{
    struct dkv_admission_batch *b = dkv_admission_next(f->queue, now);
    assert_non_null(b);
    assert_int_equal(b->n_parts, n_parts);
    return b;
}

static void nothing(struct fixture *f, uint64_t now)
{
    assert_null(dkv_admission_next(f->queue, now));
}

static void ends(struct fixture *f, const struct job *j, enum dkv_status status)
{
    assert_ptr_equal(dkv_admission_pop_done(f->queue), &j->entry);
    assert_int_equal(j->entry.status, status);
}

static bool has(const struct dkv_admission_batch *b, const struct job *j)
{
    DKV_LIST_EACH (node, &b->parts)
        if (DKV_LIST_OF(node, struct dkv_admission_part, node)->entry == &j->entry)
            return true;
    return false;
}

/* --- work and batches ---------------------------------------------------------------------- */

static void a_lone_request_on_an_idle_device_runs_at_once(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_queue_delay_us = 5000;
    struct fixture *f = begin(&config);
    struct job *j = accepted(f, 0, 10);
    dkv_admission_complete(f->queue, batch(f, 10, 1), 50);
    ends(f, j, DKV_OK);
    assert_int_equal(j->entry.offered_us, 10);
    assert_int_equal(j->entry.launched_us, 10);
    assert_int_equal(j->entry.done_us, 50);
    end(f);
}

static void a_busy_device_waits_for_a_fuller_batch_but_not_longer_than_the_delay(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_queue_delay_us = 5000;
    struct fixture *f = begin(&config);
    accepted(f, 0, 10);
    batch(f, 10, 1);
    accepted(f, 0, 20);
    nothing(f, 20);
    assert_int_equal(dkv_admission_wakeup_us(f->queue, 20), 5020);
    accepted(f, 0, 4000);
    nothing(f, 5019);
    batch(f, 5020, 2);
    end(f);
}

static void a_full_batch_leaves_a_busy_device_no_reason_to_wait(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_queue_delay_us = 5000;
    struct fixture *f = begin(&config);
    accepted(f, 0, 10);
    batch(f, 10, 1);
    for (int i = 0; i < 8; i++)
        accepted(f, 0, 20);
    batch(f, 20, 8);
    accepted(f, 0, 30);
    nothing(f, 9999); /* two are in flight */
    end(f);
}

static void lengths_are_ragged_and_keys_are_not(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *a = job(f), *other = job(f), *b = job(f);
    b->parts[0].n_tokens = 999;
    other->parts[0].key = 2;
    offer(f, 0, a, 1);
    offer(f, 0, other, 1);
    offer(f, 1, b, 1);
    struct dkv_admission_batch *first = batch(f, 1, 2);
    assert_true(has(first, a) && has(first, b));
    assert_true(has(batch(f, 1, 1), other));
    end(f);
}

static void a_part_above_a_limit_runs_alone(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *big = job(f);
    big->parts[0].n_blocks = 100;
    offer(f, 0, big, 1);
    accepted(f, 1, 1);
    struct dkv_admission_batch *b = batch(f, 1, 1);
    assert_true(has(b, big));
    end(f);
}

static void host_memory_goes_to_the_least_loaded_device(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    accepted(f, 0, 1);
    assert_int_equal(batch(f, 1, 1)->device, 0);
    struct job *j = job(f);
    j->parts[0].device = ANY;
    offer(f, 1, j, 2);
    assert_int_equal(batch(f, 2, 1)->device, 1);
    end(f);
}

static void memory_of_a_device_never_runs_elsewhere(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_flight = 1;
    struct fixture *f = begin(&config);
    accepted(f, 0, 1);
    batch(f, 1, 1);
    accepted(f, 0, 2);
    nothing(f, 2); /* device 1 idles: the memory is device 0's */
    end(f);
}

static void a_request_of_several_parts_ends_with_its_last_part(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = job(f);
    j->entry.n_parts = 2;
    j->parts[1].device = 1;
    offer(f, 0, j, 1);
    struct dkv_admission_batch *a = batch(f, 1, 1), *b = batch(f, 1, 1);
    dkv_admission_complete(f->queue, a, 5);
    assert_null(dkv_admission_pop_done(f->queue));
    dkv_admission_complete(f->queue, b, 9);
    ends(f, j, DKV_OK);
    end(f);
}

/* --- bounds -------------------------------------------------------------------------------- */

static void a_clients_own_bound_is_told_apart_from_the_common_one(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.client_max_entries = 2;
    config.max_entries = 3;
    struct fixture *f = begin(&config);
    accepted(f, 0, 1);
    accepted(f, 0, 1);
    assert_int_equal(offer(f, 0, job(f), 1), DKV_ADMISSION_QUOTA);
    assert_non_null(strstr(f->err.text, "2 of 2 requests"));
    accepted(f, 1, 1);
    assert_int_equal(offer(f, 1, job(f), 1), DKV_ADMISSION_FULL);
    assert_true(f->retry_us >= 1000 && f->retry_us <= 60000000);
    assert_int_equal(dkv_admission_verdict_info(DKV_ADMISSION_QUOTA)->http_status, 429);
    assert_int_equal(dkv_admission_verdict_info(DKV_ADMISSION_FULL)->http_status, 503);
    end(f);
}

static void limits_can_change_under_accepted_work(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_entries = config.client_max_entries = 4;
    struct fixture *f = begin(&config);
    struct job *jobs[4];
    for (int i = 0; i < 4; i++)
        jobs[i] = accepted(f, 0, 1);
    config.max_entries = config.client_max_entries = 2;
    assert_int_equal(dkv_admission_relimit(f->queue, &config, &f->err), DKV_OK);
    assert_int_equal(offer(f, 1, job(f), 1), DKV_ADMISSION_FULL);
    assert_int_equal(dkv_admission_recount(f->queue, &f->err), DKV_OK);
    dkv_admission_complete(f->queue, batch(f, 1, 4), 2);
    for (int i = 0; i < 4; i++)
        ends(f, jobs[i], DKV_OK);
    accepted(f, 0, 3);
    accepted(f, 1, 3);
    assert_int_equal(offer(f, 1, job(f), 3), DKV_ADMISSION_FULL);
    config.max_entries = config.client_max_entries = 5;
    assert_int_equal(dkv_admission_relimit(f->queue, &config, &f->err), DKV_E_INVALID);
    assert_non_null(strstr(f->err.text, "max_entries 5 is above 4"));
    config.max_entries = config.client_max_entries = 4;
    config.batch_blocks = 0;
    assert_int_equal(dkv_admission_relimit(f->queue, &config, &f->err), DKV_E_INVALID);
    assert_int_equal(offer(f, 1, job(f), 3), DKV_ADMISSION_FULL); /* nothing was changed */
    end(f);
}

static void bytes_are_bounded_to_the_byte(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.client_max_bytes = 200;
    struct fixture *f = begin(&config);
    struct job *a = job(f), *b = job(f), *c = job(f);
    a->parts[0].n_bytes = 150;
    b->parts[0].n_bytes = 51;
    c->parts[0].n_bytes = 50;
    assert_int_equal(offer(f, 0, a, 1), DKV_ADMISSION_ACCEPTED);
    assert_int_equal(offer(f, 0, b, 1), DKV_ADMISSION_QUOTA);
    assert_int_equal(offer(f, 0, c, 1), DKV_ADMISSION_ACCEPTED);
    end(f);
}

static void what_can_never_fit_is_not_told_to_come_back(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = job(f);
    j->entry.n_parts = 2;
    j->parts[0].n_bytes = j->parts[1].n_bytes = UINT64_MAX; /* the sum wraps */
    assert_int_equal(offer(f, 0, j, 1), DKV_ADMISSION_TOO_LARGE);
    j->entry.n_parts = 1;
    j->parts[0].n_bytes = base_config.client_max_bytes + 1;
    assert_int_equal(offer(f, 0, j, 1), DKV_ADMISSION_TOO_LARGE);
    assert_false(dkv_status_info(DKV_E_TOO_LARGE)->retryable);
    end(f);
}

static void work_in_flight_counts_until_it_is_answered(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.client_max_entries = 1;
    struct fixture *f = begin(&config);
    struct job *j = accepted(f, 0, 1);
    struct dkv_admission_batch *b = batch(f, 1, 1);
    assert_int_equal(offer(f, 0, job(f), 2), DKV_ADMISSION_QUOTA);
    dkv_admission_complete(f->queue, b, 3);
    ends(f, j, DKV_OK);
    accepted(f, 0, 4);
    end(f);
}

static void who_asked_for_recency_is_degraded_instead_of_refused(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_entries = config.client_max_entries = 1;
    struct fixture *f = begin(&config);
    accepted(f, 0, 1);
    struct job *j = job(f);
    j->entry.degrade = true;
    assert_int_equal(offer(f, 1, j, 1), DKV_ADMISSION_DEGRADED);
    assert_int_equal(dkv_admission_verdict_info(DKV_ADMISSION_DEGRADED)->status, DKV_OK);
    end(f);
}

static void a_refused_entry_leaves_no_trace(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_entries = config.client_max_entries = 1;
    struct fixture *f = begin(&config);
    struct job *first = accepted(f, 0, 1);
    struct job *j = job(f);
    offer(f, 1, j, 1);
    assert_int_equal(f->clients[1].n_open, 0);
    dkv_admission_fail(f->queue, &j->entry, DKV_E_CANCELLED, 1); /* harmless */
    dkv_admission_complete(f->queue, batch(f, 1, 1), 2);
    ends(f, first, DKV_OK);
    assert_null(dkv_admission_pop_done(f->queue));
    assert_int_equal(offer(f, 1, j, 3), DKV_ADMISSION_ACCEPTED); /* the same entry again */
    end(f);
}

/* --- order --------------------------------------------------------------------------------- */

static void a_better_priority_goes_first_and_none_starves(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.batch_blocks = 1;
    config.max_flight = 1;
    struct fixture *f = begin(&config);
    struct job *low = job(f);
    low->entry.priority = 3;
    offer(f, 0, low, 1);
    for (int i = 0; i < 6; i++) {
        struct job *high = job(f);
        high->entry.priority = 1;
        offer(f, 1, high, 2);
    }
    for (int i = 0; i < 3; i++) { /* aging_batches */
        struct dkv_admission_batch *b = batch(f, 3, 1);
        assert_false(has(b, low));
        dkv_admission_complete(f->queue, b, 4);
    }
    assert_true(has(batch(f, 5, 1), low));
    end(f);
}

static void priority_zero_is_the_default_and_too_large_ones_are_the_last(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = accepted(f, 0, 1);
    assert_int_equal(j->entry.level, base_config.default_level - 1);
    j = job(f);
    j->entry.priority = 1000;
    offer(f, 0, j, 1);
    assert_int_equal(j->entry.level, base_config.n_levels - 1);
    end(f);
}

static void two_clients_get_the_same_bytes_whatever_their_backlogs(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.batch_blocks = 2;
    config.max_flight = 1;
    struct fixture *f = begin(&config);
    for (int i = 0; i < 15; i++)
        accepted(f, 0, 1);
    for (int i = 0; i < 4; i++)
        accepted(f, 1, 2);
    int n_polite = 0;
    for (int i = 0; i < 4; i++) {
        struct dkv_admission_batch *b = batch(f, 3, 2);
        DKV_LIST_EACH (node, &b->parts)
            n_polite += DKV_LIST_OF(node, struct dkv_admission_part, node)->entry->client ==
                        &f->clients[1];
        dkv_admission_complete(f->queue, b, 4);
    }
    assert_int_equal(n_polite, 4); /* one in each batch, not after the fifteen */
    end(f);
}

static void a_batch_is_shared_while_the_others_work_is_still_in_flight(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    accepted(f, 1, 1);
    batch(f, 1, 1);
    for (int i = 0; i < 8; i++)
        accepted(f, 0, 2);
    batch(f, 2, 4); /* half of batch_blocks: client 1 is about to come back */
    end(f);
}

static void a_burst_taken_on_credit_is_paid_for_later(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_flight = 1;
    config.batch_blocks = 4;
    struct fixture *f = begin(&config);
    struct job *first = job(f), *rider = job(f), *waits = job(f);
    rider->parts[0].n_bytes = 100000; /* many quanta, in a launch that client 0 began */
    waits->parts[0].key = 2;          /* client 0 keeps the level busy */
    offer(f, 0, first, 1);
    offer(f, 1, rider, 1);
    offer(f, 0, waits, 1);
    struct dkv_admission_batch *b = batch(f, 1, 2);
    assert_true(has(b, rider));
    const struct dkv_admission_turn *turn = &f->clients[1].flows[1].turns[0];
    assert_true(turn->deficit < -90000);
    assert_true(dkv_list_linked(&turn->node));
    end(f);
}

/* --- deadlines, cancel --------------------------------------------------------------------- */

static void the_smaller_of_request_and_configuration_is_the_deadline(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_timeout_us = 1000;
    struct fixture *f = begin(&config);
    struct job *none = job(f), *shorter = job(f), *longer = job(f), *arrived = job(f);
    shorter->entry.timeout_us = 500;
    longer->entry.timeout_us = 5000;
    arrived->entry.arrival_us = 40; /* its body took 60 us to come in */
    offer(f, 0, none, 100);
    offer(f, 0, shorter, 100);
    offer(f, 0, longer, 100);
    offer(f, 0, arrived, 100);
    assert_int_equal(none->entry.deadline_us, 1100);
    assert_int_equal(shorter->entry.deadline_us, 600);
    assert_int_equal(longer->entry.deadline_us, 1100);
    assert_int_equal(arrived->entry.deadline_us, 1040);
    end(f);
}

static void an_expired_offer_is_not_taken(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = job(f);
    j->entry.arrival_us = 10;
    j->entry.timeout_us = 90;
    assert_int_equal(offer(f, 0, j, 100), DKV_ADMISSION_EXPIRED);
    assert_int_equal(f->err.status, DKV_E_TIMEOUT);
    end(f);
}

static void what_expires_while_waiting_is_never_launched(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_flight = 1;
    struct fixture *f = begin(&config);
    accepted(f, 0, 1);
    batch(f, 1, 1);
    struct job *j = job(f);
    j->entry.timeout_us = 100;
    offer(f, 0, j, 10);
    assert_int_equal(dkv_admission_wakeup_us(f->queue, 10), 110);
    nothing(f, 109);
    assert_null(dkv_admission_pop_done(f->queue));
    nothing(f, 110);
    ends(f, j, DKV_E_TIMEOUT);
    assert_int_equal(j->entry.launched_us, 0);
    end(f);
}

static void an_answer_at_its_deadline_is_a_timeout(void **state)
{
    (void)state;
    for (uint64_t late = 0; late < 2; late++) {
        struct fixture *f = begin(&base_config);
        struct job *j = job(f);
        j->entry.timeout_us = 100;
        offer(f, 0, j, 10);
        dkv_admission_complete(f->queue, batch(f, 10, 1), 109 + late);
        ends(f, j, late ? DKV_E_TIMEOUT : DKV_OK);
        end(f);
    }
}

static void a_deadline_that_passes_in_flight_is_told_once_and_frees_nothing(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct dkv_admission_stats stats;
    struct job *j = job(f);
    j->entry.timeout_us = 100;
    offer(f, 0, j, 10);
    struct dkv_admission_batch *b = batch(f, 10, 1);
    assert_int_equal(dkv_admission_wakeup_us(f->queue, 10), 110);
    nothing(f, 109);
    assert_null(dkv_admission_pop_given_up(f->queue));
    nothing(f, 110);
    assert_ptr_equal(dkv_admission_pop_given_up(f->queue), &j->entry);
    assert_int_equal(j->entry.status, DKV_E_TIMEOUT);
    assert_null(dkv_admission_pop_given_up(f->queue));
    assert_null(dkv_admission_pop_done(f->queue));
    dkv_admission_stats(f->queue, 200, &stats);
    assert_int_equal(stats.n_open, 1);
    assert_int_equal(stats.open_bytes, 100);
    assert_int_equal(dkv_admission_wakeup_us(f->queue, 200), DKV_ADMISSION_NEVER);
    dkv_admission_complete(f->queue, b, 200);
    assert_null(dkv_admission_pop_given_up(f->queue));
    ends(f, j, DKV_E_TIMEOUT);
    end(f);
}

static void what_ends_before_it_was_told_is_told_by_its_end(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = job(f);
    j->entry.timeout_us = 100;
    offer(f, 0, j, 10);
    struct dkv_admission_batch *b = batch(f, 10, 1);
    nothing(f, 110);
    dkv_admission_complete(f->queue, b, 111);
    assert_null(dkv_admission_pop_given_up(f->queue));
    ends(f, j, DKV_E_TIMEOUT);
    end(f);
}

static void a_request_that_would_miss_its_deadline_is_refused_at_once(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.batch_blocks = 1;
    config.max_flight = 1;
    struct fixture *f = begin(&config);
    for (int i = 0; i < 12; i++)
        accepted(f, 0, 1);
    dkv_admission_complete(f->queue, batch(f, 1, 1), 101); /* 100 bytes in 100 us */
    struct job *j = job(f);
    j->entry.timeout_us = 300; /* client 1's turn comes at once */
    assert_int_equal(offer(f, 1, j, 101), DKV_ADMISSION_ACCEPTED);
    struct job *hopeless = job(f);
    hopeless->entry.timeout_us = 300; /* behind eleven of its own */
    assert_int_equal(offer(f, 0, hopeless, 101), DKV_ADMISSION_LATE);
    assert_int_equal(dkv_admission_verdict_info(DKV_ADMISSION_LATE)->status, DKV_E_BUSY);
    end(f);
}

static void a_client_that_went_away_is_cancelled_before_launch(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *a = accepted(f, 0, 1), *b = accepted(f, 0, 1);
    struct job *other = accepted(f, 1, 1);
    dkv_admission_client_cancel(f->queue, &f->clients[0], 2);
    ends(f, a, DKV_E_CANCELLED);
    ends(f, b, DKV_E_CANCELLED);
    assert_int_equal(f->clients[0].n_open, 0);
    assert_true(has(batch(f, 2, 1), other));
    end(f);
}

static void what_is_in_flight_ends_cancelled_when_it_is_back(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = accepted(f, 0, 1);
    struct dkv_admission_batch *b = batch(f, 1, 1);
    dkv_admission_client_cancel(f->queue, &f->clients[0], 2);
    assert_null(dkv_admission_pop_done(f->queue)); /* its memory is being read */
    dkv_admission_complete(f->queue, b, 3);
    ends(f, j, DKV_E_CANCELLED);
    end(f);
}

/* --- devices ------------------------------------------------------------------------------- */

static void lost_work_is_replayed_once_alone_and_before_anything_else(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *a = accepted(f, 0, 1), *b = accepted(f, 1, 1);
    batch(f, 1, 2);
    struct job *later = accepted(f, 2, 2);
    dkv_admission_device_lost(f->queue, 0, 3);
    assert_null(dkv_admission_pop_done(f->queue));
    assert_int_equal(offer(f, 3, job(f), 3), DKV_ADMISSION_NO_DEVICE);
    assert_int_equal(f->retry_us, base_config.restart_us);
    nothing(f, 3);

    dkv_admission_device_up(f->queue, 0);
    struct dkv_admission_batch *replay = batch(f, 4, 1);
    assert_true(replay->solo && has(replay, a));
    nothing(f, 4); /* alone on its device */
    dkv_admission_device_lost(f->queue, 0, 5);
    ends(f, a, DKV_E_DEVICE); /* the one that kills workers takes no neighbour along */
    assert_true(dkv_status_info(DKV_E_DEVICE)->retryable);

    dkv_admission_device_up(f->queue, 0);
    replay = batch(f, 6, 1);
    assert_true(has(replay, b));
    dkv_admission_complete(f->queue, replay, 7);
    ends(f, b, DKV_OK);
    assert_true(has(batch(f, 7, 1), later));
    end(f);
}

static void host_memory_of_a_lost_batch_is_replayed_on_another_device(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = job(f);
    j->parts[0].device = ANY;
    offer(f, 0, j, 1);
    const uint32_t first = batch(f, 1, 1)->device;
    dkv_admission_device_lost(f->queue, first, 2);
    struct dkv_admission_batch *b = batch(f, 2, 1);
    assert_int_equal(b->device, 1 - first);
    dkv_admission_complete(f->queue, b, 3);
    ends(f, j, DKV_OK);
    end(f);
}

static void lost_work_of_a_client_that_is_gone_is_not_replayed(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = accepted(f, 0, 1);
    batch(f, 1, 1);
    dkv_admission_fail(f->queue, &j->entry, DKV_E_CANCELLED, 2);
    dkv_admission_device_lost(f->queue, 0, 3);
    ends(f, j, DKV_E_CANCELLED);
    end(f);
}

static void a_retired_devices_work_ends_unavailable(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *own = accepted(f, 0, 1), *any = job(f);
    any->parts[0].device = ANY;
    offer(f, 0, any, 1);
    dkv_admission_device_retire(f->queue, 0, 2);
    ends(f, own, DKV_E_UNAVAILABLE);
    assert_null(dkv_admission_pop_done(f->queue)); /* device 1 can run the other */
    dkv_admission_device_retire(f->queue, 1, 3);
    ends(f, any, DKV_E_UNAVAILABLE);
    end(f);
}

static void a_drain_answers_what_was_accepted_and_nothing_more(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct job *j = accepted(f, 0, 1);
    dkv_admission_drain(f->queue);
    assert_int_equal(offer(f, 0, job(f), 2), DKV_ADMISSION_DRAINING);
    dkv_admission_complete(f->queue, batch(f, 2, 1), 3);
    ends(f, j, DKV_OK);
    end(f);
}

/* --- figures, configuration ---------------------------------------------------------------- */

static void figures_show_depth_age_and_outcomes(void **state)
{
    (void)state;
    struct fixture *f = begin(&base_config);
    struct dkv_admission_stats stats;
    accepted(f, 0, 100);
    struct job *j = job(f);
    j->entry.priority = 1;
    offer(f, 0, j, 130);
    dkv_admission_stats(f->queue, 150, &stats);
    assert_int_equal(stats.n_open, 2);
    assert_int_equal(stats.open_bytes, 200);
    assert_int_equal(stats.level[0].n_waiting, 1);
    assert_int_equal(stats.level[0].oldest_us, 20);
    assert_int_equal(stats.level[1].oldest_us, 50);
    assert_int_equal(stats.level[1].waiting_bytes, 100);
    dkv_admission_complete(f->queue, batch(f, 150, 2), 160);
    dkv_admission_stats(f->queue, 160, &stats);
    assert_int_equal(stats.ended_ok, 2);
    assert_int_equal(stats.n_done, 2);
    assert_int_equal(stats.batches, 1);
    assert_int_equal(stats.batch_blocks, 2);
    assert_int_equal(stats.verdicts[DKV_ADMISSION_ACCEPTED], 2);
    end(f);
}

static void a_configuration_out_of_range_names_the_field(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    struct dkv_admission *queue = NULL;
    struct dkv_error err;
    config.aging_batches = 2;
    assert_int_equal(dkv_admission_new(&config, &queue, &err), DKV_E_INVALID);
    assert_non_null(strstr(err.text, "aging_batches 2 is not in 3.."));
    assert_null(queue);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lone_request_on_an_idle_device_runs_at_once),
        cmocka_unit_test(a_busy_device_waits_for_a_fuller_batch_but_not_longer_than_the_delay),
        cmocka_unit_test(a_full_batch_leaves_a_busy_device_no_reason_to_wait),
        cmocka_unit_test(lengths_are_ragged_and_keys_are_not),
        cmocka_unit_test(a_part_above_a_limit_runs_alone),
        cmocka_unit_test(host_memory_goes_to_the_least_loaded_device),
        cmocka_unit_test(memory_of_a_device_never_runs_elsewhere),
        cmocka_unit_test(a_request_of_several_parts_ends_with_its_last_part),
        cmocka_unit_test(a_clients_own_bound_is_told_apart_from_the_common_one),
        cmocka_unit_test(limits_can_change_under_accepted_work),
        cmocka_unit_test(bytes_are_bounded_to_the_byte),
        cmocka_unit_test(what_can_never_fit_is_not_told_to_come_back),
        cmocka_unit_test(work_in_flight_counts_until_it_is_answered),
        cmocka_unit_test(who_asked_for_recency_is_degraded_instead_of_refused),
        cmocka_unit_test(a_refused_entry_leaves_no_trace),
        cmocka_unit_test(a_better_priority_goes_first_and_none_starves),
        cmocka_unit_test(priority_zero_is_the_default_and_too_large_ones_are_the_last),
        cmocka_unit_test(two_clients_get_the_same_bytes_whatever_their_backlogs),
        cmocka_unit_test(a_batch_is_shared_while_the_others_work_is_still_in_flight),
        cmocka_unit_test(a_burst_taken_on_credit_is_paid_for_later),
        cmocka_unit_test(the_smaller_of_request_and_configuration_is_the_deadline),
        cmocka_unit_test(an_expired_offer_is_not_taken),
        cmocka_unit_test(what_expires_while_waiting_is_never_launched),
        cmocka_unit_test(an_answer_at_its_deadline_is_a_timeout),
        cmocka_unit_test(a_deadline_that_passes_in_flight_is_told_once_and_frees_nothing),
        cmocka_unit_test(what_ends_before_it_was_told_is_told_by_its_end),
        cmocka_unit_test(a_request_that_would_miss_its_deadline_is_refused_at_once),
        cmocka_unit_test(a_client_that_went_away_is_cancelled_before_launch),
        cmocka_unit_test(what_is_in_flight_ends_cancelled_when_it_is_back),
        cmocka_unit_test(lost_work_is_replayed_once_alone_and_before_anything_else),
        cmocka_unit_test(host_memory_of_a_lost_batch_is_replayed_on_another_device),
        cmocka_unit_test(lost_work_of_a_client_that_is_gone_is_not_replayed),
        cmocka_unit_test(a_retired_devices_work_ends_unavailable),
        cmocka_unit_test(a_drain_answers_what_was_accepted_and_nothing_more),
        cmocka_unit_test(figures_show_depth_age_and_outcomes),
        cmocka_unit_test(a_configuration_out_of_range_names_the_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
