/* What a prompt names, and where the query rows of a ring lie that it uses. */
#include "proto/prompt.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { RING = 11, Q_HEADS = 4, ROW = 64 };

/* Two layers of three slots, heads side by side. */
static const struct dkv_prompt_stash stash = {
    .offset = 128,
    .layer_stride = 3 * RING * Q_HEADS * ROW,
    .slot_stride = RING * Q_HEADS * ROW,
    .row_stride = Q_HEADS * ROW,
    .head_stride = ROW,
    .n_rows = RING,
};

static const struct dkv_prompt_reach whole = {
    .first_layer = 1,
    .n_layers = 2,
    .slot = 2,
    .newest_row = RING - 1,
    .q_rows = RING,
    .cache_layers = 3,
    .stash_layers = 3,
    .stash_slots = 3,
    .stash_rows = RING,
};

static void names_outside_what_there_is_are_refused(void **unused)
{
    struct dkv_error err;
    (void)unused;
    assert_int_equal(dkv_prompt_check(&whole, &err), DKV_OK);
#define REFUSED(change, says)                                            \
    do {                                                                 \
        struct dkv_prompt_reach reach = whole;                           \
        reach.change;                                                    \
        assert_int_equal(dkv_prompt_check(&reach, &err), DKV_E_INVALID); \
        assert_non_null(strstr(err.text, says));                         \
    } while (0)
    REFUSED(first_layer = 2, "layers 2..3");
    REFUSED(stash_layers = 2, "the stash 2");
    REFUSED(slot = 3, "slot 3");
    REFUSED(newest_row = RING, "newest_row 11");
    REFUSED(q_rows = 0, "q_rows 0");
    REFUSED(q_rows = RING + 1, "q_rows 12");
#undef REFUSED
}

static void no_more_rows_are_used_than_are_there(void **unused)
{
    (void)unused;
    assert_int_equal(dkv_prompt_rows_used(8, 11), 8);
    assert_int_equal(dkv_prompt_rows_used(11, 11), 11);
    assert_int_equal(dkv_prompt_rows_used(64, 11), 11);
    assert_int_equal(dkv_prompt_rows_used(0, 11), 11); /* for the gate to refuse */
    assert_int_equal(dkv_prompt_rows_used(-1, 11), 11);
    assert_int_equal(dkv_prompt_rows_used(INT64_MAX, 11), 11);
}

/* The i-th of the rows that are used, by the definition. */
static uint64_t place(uint32_t layer, uint32_t slot, uint32_t newest, uint32_t n, uint32_t i)
{
    const uint64_t row = (newest + 1 + RING - n + i) % RING;
    return 128 + ((layer * 3 + slot) * UINT64_C(11) + row) * Q_HEADS * ROW;
}

static void rows_are_found_wherever_the_newest_one_is(void **unused)
{
    (void)unused;
    for (uint32_t newest = 0; newest < RING; newest++)
        for (uint32_t n = 1; n <= RING; n++) {
            struct dkv_prompt_rows rows;
            assert_int_equal(dkv_prompt_find_rows(&stash, 1, 2, newest, n, &rows, NULL), DKV_OK);
            assert_int_equal(rows.wraps, newest + 1 < n);
            for (uint32_t i = 0; i < n; i++) {
                const uint64_t row = rows.wraps ? (rows.first + i) % RING : i;
                assert_int_equal(rows.offset + row * Q_HEADS * ROW, place(1, 2, newest, n, i));
            }
        }
}

static void a_ring_lies_within_its_memory(void **unused)
{
    const uint64_t end = 128 + UINT64_C(6) * RING * Q_HEADS * ROW;
    struct dkv_prompt_rows rows;
    struct dkv_error err;
    (void)unused;
    assert_int_equal(dkv_prompt_find_rows(&stash, 1, 2, 3, 8, &rows, &err), DKV_OK);
    assert_int_equal(dkv_prompt_check_ring(&stash, &rows, Q_HEADS, ROW, end, &err), DKV_OK);
    assert_int_equal(dkv_prompt_check_ring(&stash, &rows, Q_HEADS, ROW, end - 1, &err),
                     DKV_E_INVALID);
    assert_int_equal(dkv_prompt_check_ring(&stash, &rows, Q_HEADS, ROW, 0, &err), DKV_E_INVALID);
}

static void strides_that_overflow_are_refused(void **unused)
{
    struct dkv_prompt_rows rows;
    struct dkv_error err;
    (void)unused;
#define REFUSED(change)                                                                         \
    do {                                                                                        \
        struct dkv_prompt_stash other = stash;                                                  \
        other.change;                                                                           \
        assert_int_equal(dkv_prompt_find_rows(&other, 2, 2, 9, 8, &rows, &err), DKV_E_INVALID); \
        assert_non_null(strstr(err.text, "overflow"));                                          \
    } while (0)
    REFUSED(offset = UINT64_MAX);
    REFUSED(layer_stride = INT64_MAX);
    REFUSED(slot_stride = INT64_MAX);
    REFUSED(row_stride = INT64_MAX);
    REFUSED(layer_stride = -1);
    REFUSED(row_stride = INT64_MIN);
#undef REFUSED
    struct dkv_prompt_stash other = stash;
    other.row_stride = INT64_MAX; /* the rows that wrap take steps of their own */
    assert_int_equal(dkv_prompt_find_rows(&other, 0, 0, 0, 8, &rows, &err), DKV_OK);
    assert_int_equal(dkv_prompt_check_ring(&other, &rows, Q_HEADS, ROW, UINT64_MAX, &err),
                     DKV_E_INVALID);
    other = stash;
    other.head_stride = INT64_MAX;
    assert_int_equal(dkv_prompt_check_ring(&other, &rows, Q_HEADS, ROW, UINT64_MAX, &err),
                     DKV_E_INVALID);
}

static void rings_on_a_gpu_have_a_pitch(void **unused)
{
    struct dkv_prompt_stash other = stash;
    (void)unused;
    assert_int_equal(dkv_prompt_check_ring_on_gpu(&other, Q_HEADS, ROW, NULL), DKV_OK);
    other.row_stride = Q_HEADS * ROW - 1; /* rows that overlap */
    assert_int_equal(dkv_prompt_check_ring_on_gpu(&other, Q_HEADS, ROW, NULL), DKV_E_UNSUPPORTED);
    other.row_stride = INT64_C(1) << 31;
    assert_int_equal(dkv_prompt_check_ring_on_gpu(&other, Q_HEADS, ROW, NULL), DKV_E_UNSUPPORTED);
    other.row_stride = ROW; /* rows side by side, heads apart */
    other.head_stride = RING * ROW;
    assert_int_equal(dkv_prompt_check_ring_on_gpu(&other, Q_HEADS, ROW, NULL), DKV_OK);
    other.head_stride = RING * ROW - 1;
    assert_int_equal(dkv_prompt_check_ring_on_gpu(&other, Q_HEADS, ROW, NULL), DKV_E_UNSUPPORTED);
    other.row_stride = other.head_stride = 2 * ROW;
    assert_int_equal(dkv_prompt_check_ring_on_gpu(&other, Q_HEADS, ROW, NULL), DKV_E_UNSUPPORTED);
}

static void a_caches_own_scale_and_cap_are_defaults(void **unused)
{
    struct dkv_params params;
    (void)unused;
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set_text(&params, "scale", "0.5", NULL), DKV_OK);
    assert_int_equal(dkv_prompt_take_defaults(&params, 0.25, 30, NULL), DKV_OK);
    assert_float_equal(params.scale, 0.5, 0);
    assert_float_equal(params.logit_softcap, 30, 0);
    dkv_params_init(&params);
    assert_int_equal(dkv_prompt_take_defaults(&params, 0, 0, NULL), DKV_OK);
    assert_false(dkv_params_has(&params, DKV_PARAM_SCALE));
    assert_false(dkv_params_has(&params, DKV_PARAM_LOGIT_SOFTCAP));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_outside_what_there_is_are_refused),
        cmocka_unit_test(no_more_rows_are_used_than_are_there),
        cmocka_unit_test(rows_are_found_wherever_the_newest_one_is),
        cmocka_unit_test(a_ring_lies_within_its_memory),
        cmocka_unit_test(strides_that_overflow_are_refused),
        cmocka_unit_test(rings_on_a_gpu_have_a_pitch),
        cmocka_unit_test(a_caches_own_scale_and_cap_are_defaults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
