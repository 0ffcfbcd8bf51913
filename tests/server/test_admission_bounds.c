/* The admission queue's bounds: what is refused, as whose, and what a refusal leaves behind. */
#include "tests/server/admission_fixture.h"

#include <string.h>

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

static void bytes_above_a_lowered_limit_refuse_until_they_are_answered(void **state)
{
    (void)state;
    struct dkv_admission_config config = base_config;
    config.max_bytes = config.client_max_bytes = 200;
    struct fixture *f = begin(&config);
    struct job *large = job(f);
    large->parts[0].n_bytes = 150;
    assert_int_equal(offer(f, 0, large, 1), DKV_ADMISSION_ACCEPTED);
    config.max_bytes = config.client_max_bytes = 100;
    assert_int_equal(dkv_admission_relimit(f->queue, &config, &f->err), DKV_OK);
    assert_int_equal(offer(f, 0, job(f), 1), DKV_ADMISSION_QUOTA);
    assert_int_equal(offer(f, 1, job(f), 1), DKV_ADMISSION_FULL);
    dkv_admission_complete(f->queue, batch(f, 1, 1), 2);
    ends(f, large, DKV_OK);
    accepted(f, 0, 3);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_clients_own_bound_is_told_apart_from_the_common_one),
        cmocka_unit_test(limits_can_change_under_accepted_work),
        cmocka_unit_test(bytes_above_a_lowered_limit_refuse_until_they_are_answered),
        cmocka_unit_test(bytes_are_bounded_to_the_byte),
        cmocka_unit_test(what_can_never_fit_is_not_told_to_come_back),
        cmocka_unit_test(work_in_flight_counts_until_it_is_answered),
        cmocka_unit_test(who_asked_for_recency_is_degraded_instead_of_refused),
        cmocka_unit_test(a_refused_entry_leaves_no_trace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
