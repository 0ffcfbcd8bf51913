/* The plans that the gate makes: how many tokens are kept, and which are protected. */
#include "tests/proto/request_fixture.h"

#include <math.h>

static void a_plain_block_gives_its_plan(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    assert_accepted(&f);
    assert_int_equal(f.plan.group, 4);
    assert_int_equal(f.plan.window, 8);
    assert_int_equal(f.plan.first_row, 56);
    assert_int_equal(f.plan.n_valid, 1000);
    assert_int_equal(f.plan.v_dim, 64);
    assert_int_equal(f.plan.keep_tokens, 100);
    assert_int_equal(f.plan.recent, 8);
    assert_int_equal(f.plan.sinks, 0);
    assert_false(f.plan.keep_all);
    assert_true(f.plan.scale == 0.125);
}

static void keep_of(uint64_t n, const char *name, const char *value, uint64_t k)
{
    struct fixture f;
    setup(&f);
    f.block.n_tokens = n;
    lay_out(&f.block);
    set(&f, name, value);
    set(&f, "recent", "0");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, k);
    assert_int_equal(f.plan.keep_all, k == n);
}

static void budgets_are_double_arithmetic_as_written(void **state)
{
    (void)state;
    keep_of(100, "keep_ratio", "0.29", 28);
    keep_of(100, "compression_ratio", "0.9", 9);
    keep_of(100, "compression_ratio", "0.71", 29);
    keep_of(100, "keep_ratio", "0", 1);
    keep_of(100, "keep_ratio", "1", 100);
    keep_of(100, "compression_ratio", "1", 1);
    keep_of(100, "compression_ratio", "0", 100);
    keep_of(100, "keep_tokens", "0", 1);
    keep_of(100, "keep_tokens", "57", 57);
    keep_of(100, "keep_tokens", "2147483647", 100);
    keep_of(9, "keep_ratio", "0.1", 1);
}

/* numerics.md, "How many", written down once more and literally. */
static uint64_t keep_by_the_book(const struct dkv_params *p, double n)
{
    const double protect = fmin(n, (double)(p->recent + p->sinks));
    double k;

    if (n <= (double)p->window)
        k = n;
    else if (dkv_params_has(p, DKV_PARAM_KEEP_TOKENS))
        k = fmin(n, fmax((double)p->keep_tokens, fmax(protect, 1)));
    else if (dkv_params_has(p, DKV_PARAM_COMPRESSION_RATIO))
        k = fmin(n, fmax(floor(n * (1 - p->compression_ratio)), fmax(protect, 1)));
    else {
        const double base = dkv_params_has(p, DKV_PARAM_TOTAL_TOKENS) ? (double)p->total_tokens : n;
        k = fmin(n, fmax(floor(p->keep_ratio * base), fmax(protect, 1)));
    }
    if (dkv_params_has(p, DKV_PARAM_MAX_KEEP_TOKENS))
        k = fmin(k, (double)p->max_keep_tokens);
    return (uint64_t)k;
}

static void random_budgets_are_those_of_the_book(void **state)
{
    static const char *const budgets[] = {"keep_ratio", "compression_ratio", "keep_tokens"};
    uint32_t seed = 1;
    (void)state;
#define NEXT(n) ((seed = seed * 1664525u + 1013904223u) >> 8) % (n)
    for (int i = 0; i < 20000; i++) {
        struct fixture f;
        struct dkv_value value = {.kind = DKV_VALUE_INT};
        setup(&f);
        f.block.n_tokens = 1 + NEXT(2000);
        lay_out(&f.block);
        const char *budget = budgets[NEXT(3)];
        value.integer = NEXT(2500);
        if (budget != budgets[2]) {
            value.kind = DKV_VALUE_REAL;
            value.real = (double)(NEXT(1001)) / 1000;
        }
        assert_int_equal(dkv_params_set(&f.request.params, budget, value, &f.err), DKV_OK);
        static const struct {
            const char *name;
            uint32_t least, most;
        } others[] = {{"sinks", 0, 40},
                      {"recent", 0, 80},
                      {"window", 1, 64},
                      {"total_tokens", 1, 5000},
                      {"max_keep_tokens", 1, 1500}};
        for (size_t o = 0; o < sizeof(others) / sizeof(others[0]); o++) {
            if (NEXT(2) == 0)
                continue;
            value.kind = DKV_VALUE_INT;
            value.integer = others[o].least + NEXT(others[o].most);
            assert_int_equal(dkv_params_set(&f.request.params, others[o].name, value, &f.err),
                             DKV_OK);
        }
        assert_accepted(&f);
        assert_int_equal(f.plan.keep_tokens,
                         keep_by_the_book(&f.request.params, (double)f.block.n_tokens));
        assert_true(f.plan.sinks + f.plan.recent <= f.plan.keep_tokens);
    }
#undef NEXT
}

static void total_tokens_is_the_base_of_keep_ratio(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    set(&f, "keep_ratio", "0.25");
    set(&f, "total_tokens", "2000");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, 500);

    setup(&f);
    set(&f, "keep_ratio", "0.9");
    set(&f, "total_tokens", "2147483647");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, 1000);
    assert_true(f.plan.keep_all);
}

static void protected_tokens_raise_the_budget(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    set(&f, "keep_tokens", "5");
    set(&f, "sinks", "4");
    set(&f, "recent", "32");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, 36);
    assert_int_equal(f.plan.sinks, 4);
    assert_int_equal(f.plan.recent, 32);

    setup(&f); /* more protected than there is */
    set(&f, "sinks", "600");
    set(&f, "recent", "2147483647");
    assert_accepted(&f);
    assert_true(f.plan.keep_all);
    assert_int_equal(f.plan.sinks + f.plan.recent, 1000);
}

static void a_budget_that_wins_takes_sinks_first_then_the_newest(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    set(&f, "keep_tokens", "10");
    set(&f, "sinks", "4");
    set(&f, "recent", "32");
    set(&f, "on_conflict", "budget");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, 10);
    assert_int_equal(f.plan.sinks, 4);
    assert_int_equal(f.plan.recent, 6);

    setup(&f);
    set(&f, "max_keep_tokens", "3");
    set(&f, "sinks", "4");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, 3);
    assert_int_equal(f.plan.sinks, 3);
    assert_int_equal(f.plan.recent, 0);
}

static void a_conflict_is_an_error_if_asked(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    set(&f, "keep_tokens", "10");
    set(&f, "recent", "32");
    set(&f, "on_conflict", "error");
    ASSERT_REFUSED(&f, DKV_E_INVALID, "on_conflict", "10 tokens", "32 protected");

    setup(&f);
    set(&f, "keep_tokens", "100");
    set(&f, "max_keep_tokens", "7");
    set(&f, "on_conflict", "error");
    ASSERT_REFUSED(&f, DKV_E_INVALID, "7 tokens", "8 protected");

    setup(&f);
    set(&f, "keep_tokens", "8");
    set(&f, "on_conflict", "error");
    assert_accepted(&f);
}

static void a_prompt_within_the_window_is_kept_whole(void **state)
{
    struct fixture f;
    (void)state;
    for (uint64_t n = 1; n <= 9; n++) {
        setup(&f);
        f.block.n_tokens = n;
        lay_out(&f.block);
        set(&f, "recent", "0");
        set(&f, "keep_tokens", "1");
        set(&f, "on_conflict", "budget");
        assert_accepted(&f);
        assert_int_equal(f.plan.keep_all, n <= 8);
        assert_int_equal(f.plan.keep_tokens, n <= 8 ? n : 1);
        assert_int_equal(f.plan.window, n < 8 ? n : 8);
    }
}

static void a_cap_holds_even_within_the_window(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    f.block.n_tokens = 6;
    lay_out(&f.block);
    set(&f, "max_keep_tokens", "4");
    assert_accepted(&f);
    assert_int_equal(f.plan.keep_tokens, 4);
    assert_false(f.plan.keep_all);
}

static void the_window_shrinks_to_the_rows_there_are(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    f.block.q_rows = 3;
    lay_out(&f.block);
    assert_accepted(&f);
    assert_int_equal(f.plan.window, 3);
    assert_int_equal(f.plan.first_row, 0);
    assert_int_equal(f.plan.recent, 8); /* of the parameter, not of what was left of it */
}

static void tokens_before_valid_from_do_not_count(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    f.block.valid_from = 900;
    assert_accepted(&f);
    assert_int_equal(f.plan.n_valid, 100);
    assert_int_equal(f.plan.keep_tokens, 10);

    f.block.valid_from = 999;
    assert_accepted(&f);
    assert_int_equal(f.plan.n_valid, 1);
    assert_true(f.plan.keep_all);

    f.block.valid_from = 1000;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "valid_from", "1000", "0..999");
    f.block.valid_from = UINT64_MAX;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "valid_from", "18446744073709551615", "0..999");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_block_gives_its_plan),
        cmocka_unit_test(budgets_are_double_arithmetic_as_written),
        cmocka_unit_test(random_budgets_are_those_of_the_book),
        cmocka_unit_test(total_tokens_is_the_base_of_keep_ratio),
        cmocka_unit_test(protected_tokens_raise_the_budget),
        cmocka_unit_test(a_budget_that_wins_takes_sinks_first_then_the_newest),
        cmocka_unit_test(a_conflict_is_an_error_if_asked),
        cmocka_unit_test(a_prompt_within_the_window_is_kept_whole),
        cmocka_unit_test(a_cap_holds_even_within_the_window),
        cmocka_unit_test(the_window_shrinks_to_the_rows_there_are),
        cmocka_unit_test(tokens_before_valid_from_do_not_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
