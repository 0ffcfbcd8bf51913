/* How the admission queue's entries end: by a deadline, a cancel, a device that is lost or retired,
 * a drain. */
#include "tests/server/admission_fixture.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
