/* Looking instead of sleeping: tried where waits are short, kept where it is sooner. */
#include "proto/look.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define US UINT64_C(1000)

/* Waits take `asleep_us`, or `looking_us` where they are looked through. How many were. */
static unsigned run(struct dkv_look *look, unsigned n, uint64_t asleep_us, uint64_t looking_us)
{
    unsigned n_looked = 0;
    for (unsigned i = 0; i < n; i++) {
        n_looked += look->looks;
        dkv_look_learn(look, (look->looks ? looking_us : asleep_us) * US);
    }
    return n_looked;
}

static void looking_that_is_sooner_is_kept(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    assert_false(look.looks); /* nothing is known yet */
    assert_int_equal(run(&look, DKV_LOOK_TRIAL, 40, 20), 0);
    assert_true(look.looks);
    assert_true(run(&look, 10000, 40, 20) > 9500);
}

static void looking_that_is_not_is_tried_ever_more_seldom(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    unsigned n_before = UINT32_MAX;
    (void)unused;
    for (int i = 0; i < 4; i++) {
        const unsigned n_looked = run(&look, 2048, 40, 120);
        assert_true(n_looked <= n_before);
        n_before = n_looked;
    }
    assert_true(n_before <= DKV_LOOK_TRIAL);
    assert_true(run(&look, 100000, 40, 38) < 500); /* a gain too small to count */
}

static void long_waits_are_slept_through(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    assert_int_equal(run(&look, 10000, 160, 10), 0);
    assert_int_equal(run(&look, 10000, 5000000, 10), 0);
}

static void what_becomes_worse_is_given_up_and_taken_up_again(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    run(&look, 1000, 40, 20);
    assert_true(look.looks);
    run(&look, 2 * DKV_LOOK_TRIAL, 40, 90); /* somebody else needs the processor now */
    assert_false(look.looks);
    assert_true(run(&look, 2000, 40, 20) > 1500);
}

/* A wait that was interrupted says little. */
static void one_wait_of_a_second_decides_nothing(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    for (int i = 0; i < 10; i++) {
        run(&look, DKV_LOOK_TRIAL - 1, 40, 20);
        dkv_look_learn(&look, 1000000 * US);
    }
    assert_true(look.looks);
}

/* ---- naps ---- */

/* Long waits that are alike are slept through but for their end. */
static void long_waits_that_are_alike_are_napped_through(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    look.naps = true;
    run(&look, 2 * DKV_LOOK_TRIAL, 400, 370);
    assert_true(look.looks);
    assert_true(look.nap_ns > 0 && look.nap_ns < 400 * US - DKV_LOOK_NS / 2);
    assert_true(look.nap_ns + DKV_LOOK_NS > 400 * US);
    assert_true(run(&look, 10000, 400, 370) > 9000);
    assert_true(run(&look, 10000, 400, 400) < 600); /* for nothing */
}

static void long_waits_that_differ_are_slept_through(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    look.naps = true;
    for (int i = 0; i < 5000; i++) {
        dkv_look_learn(&look, (i % 2 == 0 ? 300 : 500) * US);
        assert_false(look.looks);
    }
}

static void no_nap_is_taken_where_waits_are_short_or_very_long(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    look.naps = true;
    run(&look, 2 * DKV_LOOK_TRIAL, 60, 40);
    assert_true(look.looks && look.nap_ns == 0);
    look = DKV_LOOK_INIT;
    look.naps = true;
    assert_int_equal(run(&look, 10000, 50000, 40), 0);
}

/* From long to short and back. */
static void what_is_waited_for_may_change(void **unused)
{
    struct dkv_look look = DKV_LOOK_INIT;
    (void)unused;
    look.naps = true;
    run(&look, 3000, 60, 40);
    run(&look, 3000, 400, 370);
    assert_true(look.looks && look.nap_ns > 0);
    run(&look, 3000, 60, 40);
    assert_true(look.looks && look.nap_ns == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(looking_that_is_sooner_is_kept),
        cmocka_unit_test(looking_that_is_not_is_tried_ever_more_seldom),
        cmocka_unit_test(long_waits_are_slept_through),
        cmocka_unit_test(what_becomes_worse_is_given_up_and_taken_up_again),
        cmocka_unit_test(one_wait_of_a_second_decides_nothing),
        cmocka_unit_test(long_waits_that_are_alike_are_napped_through),
        cmocka_unit_test(long_waits_that_differ_are_slept_through),
        cmocka_unit_test(no_nap_is_taken_where_waits_are_short_or_very_long),
        cmocka_unit_test(what_is_waited_for_may_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
