/* The parameter table: names, types, profiles, ranges. */
#include "proto/params.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static struct dkv_value integer(int64_t value)
{
    return (struct dkv_value){.kind = DKV_VALUE_INT, .integer = value};
}

static struct dkv_value real(double value)
{
    return (struct dkv_value){.kind = DKV_VALUE_REAL, .real = value};
}

static struct dkv_value text(const char *value)
{
    return (struct dkv_value){.kind = DKV_VALUE_STRING, .string = value};
}

static void assert_text_has(const struct dkv_error *err, const char *part)
{
    if (strstr(err->text, part) == NULL)
        fail_msg("'%s' does not say '%s'", err->text, part);
}

static struct dkv_params resolved_profile(const char *profile)
{
    struct dkv_params params;
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set_text(&params, "profile", profile, NULL), DKV_OK);
    dkv_params_resolve(&params);
    return params;
}

static void every_row_has_a_name_a_range_and_help(void **state)
{
    (void)state;
    for (int i = 0; i < DKV_PARAM_COUNT; i++) {
        const struct dkv_param_info *info = dkv_param_info((enum dkv_param_id)i);
        enum dkv_param_id found;
        assert_int_equal(info->id, i);
        assert_true(dkv_param_find(info->name, &found));
        assert_int_equal(found, i);
        assert_true(info->range[0] != '\0' && info->help[0] != '\0' && info->unit != NULL);
    }
}

static void every_parameter_can_be_set_from_text_and_read_back(void **state)
{
    static const char *const sample[DKV_PARAM_COUNT] = {
        "author",
        "dropkv",
        "16",
        "avg",
        "7",
        "prefix",
        "0.5",
        "input",
        "max",
        "4",
        "32",
        "0.25",
        "0.5",
        "100",
        "200",
        "300",
        "error",
        "0.125",
        "30.25",
        "mask",
        "3",
        "a.b_c",
        "2",
        "1000000",
        "recency",
        "sum",
        "0.25",
        "150.5",
        "plain",
        "99",
        "global",
        "0.3",
        "fixed",
        "10",
        "1.5",
        "0.5",
        "32",
        "1,2,3",
        "4,5",
        "3",
        "false",
        "16",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    };
    (void)state;
    for (int i = 0; i < DKV_PARAM_COUNT; i++) {
        const struct dkv_param_info *info = dkv_param_info((enum dkv_param_id)i);
        struct dkv_params params;
        struct dkv_error err;
        char back[80];

        dkv_params_init(&params);
        if (dkv_params_set_text(&params, info->name, sample[i], &err) != DKV_OK)
            fail_msg("%s: %s", info->name, err.text);
        assert_true(dkv_params_has(&params, info->id));
        assert_int_equal(params.set, UINT64_C(1) << i);
        const struct dkv_value value = dkv_params_get(&params, info->id);
        if (value.kind == DKV_VALUE_INT)
            snprintf(back, sizeof(back), "%lld", (long long)value.integer);
        else if (value.kind == DKV_VALUE_REAL)
            snprintf(back, sizeof(back), "%g", value.real);
        else
            snprintf(back, sizeof(back), "%s", value.string);
        assert_string_equal(back, sample[i]);
        dkv_params_resolve(&params);
        assert_int_equal(dkv_params_check(&params, &err), DKV_OK);
    }
}

static void profiles_are_those_of_the_table(void **state)
{
    (void)state;
    const struct dkv_params paper = resolved_profile("paper");
    assert_int_equal(paper.window, 8);
    assert_int_equal(paper.pool, DKV_POOL_MAX);
    assert_int_equal(paper.kernel, 11);
    assert_true(paper.eps == 0);
    assert_int_equal(paper.p_round, DKV_P_ROUND_NONE);

    const struct dkv_params author = resolved_profile("author");
    assert_int_equal(author.window, 8);
    assert_int_equal(author.pool, DKV_POOL_AVG);
    assert_int_equal(author.kernel, 11);
    assert_true(author.eps == 1e-6);
    assert_int_equal(author.p_round, DKV_P_ROUND_INPUT);

    const struct dkv_params kvpress = resolved_profile("kvpress");
    assert_int_equal(kvpress.window, 32);
    assert_int_equal(kvpress.pool, DKV_POOL_AVG);
    assert_int_equal(kvpress.kernel, 7);
    assert_true(kvpress.eps == 1e-6);
    assert_int_equal(kvpress.p_round, DKV_P_ROUND_INPUT);
    assert_int_equal(kvpress.recent, 32);
}

static void defaults_are_the_paper_and_a_tenth(void **state)
{
    struct dkv_params params;
    (void)state;
    dkv_params_init(&params);
    dkv_params_resolve(&params);
    assert_int_equal(params.profile, DKV_PROFILE_PAPER);
    assert_true(params.keep_ratio == 0.1);
    assert_int_equal(params.recent, 8);
    assert_int_equal(params.sinks, 0);
    assert_int_equal(params.gqa, DKV_GQA_MEAN);
    assert_int_equal(params.on_conflict, DKV_CONFLICT_PROTECT);
    assert_int_equal(params.set, 0);
}

static void the_order_of_the_callers_fields_does_not_matter(void **state)
{
    struct dkv_params first, last;
    (void)state;
    dkv_params_init(&first);
    dkv_params_init(&last);
    dkv_params_set_text(&first, "profile", "kvpress", NULL);
    dkv_params_set_text(&first, "window", "16", NULL);
    dkv_params_set_text(&last, "window", "16", NULL);
    dkv_params_set_text(&last, "profile", "kvpress", NULL);
    dkv_params_resolve(&first);
    dkv_params_resolve(&last);
    dkv_params_resolve(&last); /* idempotent */
    assert_memory_equal(&first, &last, sizeof(first));
    assert_int_equal(first.window, 16);
    assert_int_equal(first.kernel, 7);
    assert_int_equal(first.recent, 16);
}

static void an_unknown_name_is_refused_with_the_nearest_one(void **state)
{
    struct dkv_params params;
    struct dkv_error err;
    (void)state;
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set(&params, "keep_ration", real(0.5), &err), DKV_E_INVALID);
    assert_text_has(&err, "keep_ration");
    assert_text_has(&err, "nearest one is keep_ratio");
    assert_int_equal(params.set, 0);

    char hostile[4096];
    memset(hostile, '/', sizeof(hostile) - 1);
    hostile[sizeof(hostile) - 1] = '\0';
    assert_int_equal(dkv_params_set(&params, hostile, real(0.5), &err), DKV_E_INVALID);
    assert_null(strchr(err.text, '/'));
    assert_int_equal(dkv_params_set(&params, "", real(0.5), &err), DKV_E_INVALID);
}

static void a_wrong_type_is_refused(void **state)
{
    const struct {
        const char *name;
        struct dkv_value value;
    } cases[] = {
        {"window", real(8)},    {"window", text("8")},
        {"pool", integer(1)},   {"keep_ratio", text("0.1")},
        {"stream", integer(3)}, {"keep_ratio", {.kind = DKV_VALUE_BOOL, .boolean = true}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dkv_params params;
        struct dkv_error err;
        dkv_params_init(&params);
        assert_int_equal(dkv_params_set(&params, cases[i].name, cases[i].value, &err),
                         DKV_E_INVALID);
        assert_text_has(&err, cases[i].name);
        assert_int_equal(params.set, 0);
    }
}

static void an_integer_is_taken_where_a_real_is_expected(void **state)
{
    struct dkv_params params;
    (void)state;
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set(&params, "keep_ratio", integer(1), NULL), DKV_OK);
    assert_true(params.keep_ratio == 1.0);
}

static void an_unknown_word_is_refused_with_the_known_ones(void **state)
{
    struct dkv_params params;
    struct dkv_error err;
    (void)state;
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set(&params, "pool", text("Max"), &err), DKV_E_INVALID);
    assert_text_has(&err, "none | max | avg");
}

static void a_name_set_twice_is_refused(void **state)
{
    struct dkv_params params;
    struct dkv_error err;
    (void)state;
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set(&params, "sinks", integer(4), &err), DKV_OK);
    assert_int_equal(dkv_params_set(&params, "sinks", integer(4), &err), DKV_E_INVALID);
    assert_text_has(&err, "sinks: given twice");
}

static void text_that_is_not_a_whole_number_is_refused(void **state)
{
    static const char *const bad[] = {
        "", " 8", "8 ", "+8", "8.0", "1e3", "0x8", "-", "8a", "eight", "9223372036854775808"};
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct dkv_params params;
        struct dkv_error err;
        dkv_params_init(&params);
        assert_int_equal(dkv_params_set_text(&params, "window", bad[i], &err), DKV_E_INVALID);
        assert_text_has(&err, "window");
    }
}

static void text_that_is_not_a_number_is_refused(void **state)
{
    static const char *const bad[] = {"", " 0.1", "0.1 ", "nan", "inf", "0,1", "10%", "-"};
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct dkv_params params;
        dkv_params_init(&params);
        assert_int_equal(dkv_params_set_text(&params, "keep_ratio", bad[i], NULL), DKV_E_INVALID);
    }
}

static void two_budgets_are_refused_naming_both(void **state)
{
    struct dkv_params params;
    struct dkv_error err;
    (void)state;
    dkv_params_init(&params);
    dkv_params_set_text(&params, "keep_tokens", "5", NULL);
    dkv_params_set_text(&params, "compression_ratio", "0.5", NULL);
    dkv_params_resolve(&params);
    assert_int_equal(dkv_params_check(&params, &err), DKV_E_INVALID);
    assert_text_has(&err, "compression_ratio and keep_tokens");
}

static void values_at_the_ends_pass_and_past_them_are_refused(void **state)
{
    const struct {
        const char *name;
        struct dkv_value value;
        bool good;
    } cases[] = {
        {"window", integer(1), true},
        {"window", integer(0), false},
        {"window", integer(512), true},
        {"window", integer(513), false},
        {"window", integer(-1), false},
        {"window", integer(INT64_MIN), false},
        {"window", integer(INT64_MAX), false},
        {"kernel", integer(1), true},
        {"kernel", integer(10), false},
        {"kernel", integer(511), true},
        {"kernel", integer(513), false},
        {"eps", real(0), true},
        {"eps", real(1), true},
        {"eps", real(1e-13), false},
        {"eps", real(-1e-6), false},
        {"eps", real(NAN), false},
        {"keep_ratio", real(0), true},
        {"keep_ratio", real(1), true},
        {"keep_ratio", real(1.0000001), false},
        {"keep_ratio", real(-0.1), false},
        {"keep_ratio", real(NAN), false},
        {"keep_ratio", real(INFINITY), false},
        {"compression_ratio", real(1), true},
        {"compression_ratio", real(NAN), false},
        {"keep_tokens", integer(0), true},
        {"keep_tokens", integer(-1), false},
        {"keep_tokens", integer(INT32_MAX), true},
        {"keep_tokens", integer(INT64_C(2147483648)), false},
        {"total_tokens", integer(0), false},
        {"max_keep_tokens", integer(0), false},
        {"max_keep_tokens", integer(1), true},
        {"sinks", integer(-1), false},
        {"recent", integer(0), true},
        {"scale", real(0), false},
        {"scale", real(0.125), true},
        {"scale", real(-INFINITY), false},
        {"logit_softcap", real(0), true},
        {"logit_softcap", real(50), true},
        {"logit_softcap", real(1e-9), false},
        {"priority", integer(-1), false},
        {"timeout", integer(0), true},
        {"timeout", integer(-1), false},
        {"stream", text("model:layer-1_a.b"), true},
        {"stream", text(""), false},
        {"stream", text("a b"), false},
        {"stream", text("a/b"), false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dkv_params params;
        struct dkv_error err;
        dkv_params_init(&params);
        assert_int_equal(dkv_params_set(&params, cases[i].name, cases[i].value, &err), DKV_OK);
        dkv_params_resolve(&params);
        const enum dkv_status status = dkv_params_check(&params, &err);
        if ((status == DKV_OK) != cases[i].good)
            fail_msg("case %zu (%s) gives status %d", i, cases[i].name, status);
        if (!cases[i].good)
            assert_text_has(&err, cases[i].name);
    }
}

static void a_stream_name_of_65_bytes_is_refused(void **state)
{
    struct dkv_params params;
    char name[DKV_STREAM_NAME_MAX + 2];
    (void)state;
    memset(name, 'a', sizeof(name));
    name[DKV_STREAM_NAME_MAX + 1] = '\0';
    dkv_params_init(&params);
    assert_int_equal(dkv_params_set(&params, "stream", text(name), NULL), DKV_E_INVALID);
    name[DKV_STREAM_NAME_MAX] = '\0';
    assert_int_equal(dkv_params_set(&params, "stream", text(name), NULL), DKV_OK);
}

static void enumerations_out_of_range_are_refused(void **state)
{
    struct dkv_params params;
    struct dkv_error err;
    (void)state;
    dkv_params_init(&params);
    dkv_params_resolve(&params);
    params.pool = (enum dkv_pool)77;
    assert_int_equal(dkv_params_check(&params, &err), DKV_E_INVALID);
    assert_text_has(&err, "pool");
    assert_string_equal(dkv_pool_name((enum dkv_pool)77), "unknown");
    assert_string_equal(dkv_pool_name(DKV_POOL_AVG), "avg");
    assert_string_equal(dkv_profile_name(DKV_PROFILE_KVPRESS), "kvpress");
    assert_string_equal(dkv_policy_name(DKV_POLICY_DROPKV), "dropkv");
}

static void a_copy_has_every_value_and_resolving_keeps_the_lists(void **state)
{
    (void)state;
    static const char *const lists[] = {"", "7", "512,256,128"};
    for (int i = 0; i < 3; i++) {
        struct dkv_params params, copy;
        struct dkv_error err;
        memset(&copy, 0xa5, sizeof(copy));
        dkv_params_init(&params);
        if (i > 0)
            assert_int_equal(dkv_params_set_text(&params, "per_layer", lists[i], &err), DKV_OK);
        if (i > 1)
            assert_int_equal(dkv_params_set_text(&params, "per_head", "3,4", &err), DKV_OK);
        assert_int_equal(dkv_params_set_text(&params, "stream", "s", &err), DKV_OK);
        dkv_params_resolve(&params);
        dkv_params_copy(&copy, &params);
        assert_string_equal(copy.per_layer, lists[i]);
        assert_string_equal(copy.per_head, i > 1 ? "3,4" : "");
        for (unsigned id = 0; id < DKV_PARAM_COUNT; id++) {
            const struct dkv_value a = dkv_params_get(&params, (enum dkv_param_id)id);
            const struct dkv_value b = dkv_params_get(&copy, (enum dkv_param_id)id);
            if (a.kind == DKV_VALUE_STRING)
                assert_string_equal(a.string, b.string);
            else
                assert_true(a.kind == DKV_VALUE_REAL ? a.real == b.real : a.integer == b.integer);
        }
        assert_true(copy.set == params.set);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_has_a_name_a_range_and_help),
        cmocka_unit_test(every_parameter_can_be_set_from_text_and_read_back),
        cmocka_unit_test(profiles_are_those_of_the_table),
        cmocka_unit_test(defaults_are_the_paper_and_a_tenth),
        cmocka_unit_test(the_order_of_the_callers_fields_does_not_matter),
        cmocka_unit_test(an_unknown_name_is_refused_with_the_nearest_one),
        cmocka_unit_test(a_wrong_type_is_refused),
        cmocka_unit_test(an_integer_is_taken_where_a_real_is_expected),
        cmocka_unit_test(an_unknown_word_is_refused_with_the_known_ones),
        cmocka_unit_test(a_name_set_twice_is_refused),
        cmocka_unit_test(text_that_is_not_a_whole_number_is_refused),
        cmocka_unit_test(text_that_is_not_a_number_is_refused),
        cmocka_unit_test(two_budgets_are_refused_naming_both),
        cmocka_unit_test(values_at_the_ends_pass_and_past_them_are_refused),
        cmocka_unit_test(a_stream_name_of_65_bytes_is_refused),
        cmocka_unit_test(enumerations_out_of_range_are_refused),
        cmocka_unit_test(a_copy_has_every_value_and_resolving_keeps_the_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
