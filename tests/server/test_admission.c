/* The admission queue, promise by promise. The simulator (sim_admission.c) looks for the sequence
 * of events nobody thought of; these tests say what each promise means in the smallest case: work
 * and batches, order, figures. */
#include "tests/server/admission_fixture.h"

#include <string.h>

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
        cmocka_unit_test(a_better_priority_goes_first_and_none_starves),
        cmocka_unit_test(priority_zero_is_the_default_and_too_large_ones_are_the_last),
        cmocka_unit_test(two_clients_get_the_same_bytes_whatever_their_backlogs),
        cmocka_unit_test(a_batch_is_shared_while_the_others_work_is_still_in_flight),
        cmocka_unit_test(a_burst_taken_on_credit_is_paid_for_later),
        cmocka_unit_test(figures_show_depth_age_and_outcomes),
        cmocka_unit_test(a_configuration_out_of_range_names_the_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
