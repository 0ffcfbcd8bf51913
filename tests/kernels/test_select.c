/* Selection against a full sort by the order that select.h states, pooling written out from its
 * words: any difference, of one token, is a failure. */
#include "kernels/pool.h"
#include "kernels/select.h"
#include "tests/support/random.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

/* ---- the words of select.h, naively ---- */

struct token {
    int token_class;
    double pooled;
    float raw;
    int32_t index;
};

static double block_sum(const float *x, int64_t begin, int64_t end, int64_t at, int64_t size)
{
    if (size == 1)
        return at >= begin && at < end ? (double)x[at] : 0.0;
    return block_sum(x, begin, end, at, size / 2) +
           block_sum(x, begin, end, at + size / 2, size / 2);
}

static double pool_one(const struct dkv_select_spec *spec, const float *x, int64_t i)
{
    const bool prefix = spec->scope == DKV_POOL_SCOPE_PREFIX;
    const int64_t begin = prefix ? (int64_t)spec->sinks : 0;
    const int64_t end = (int64_t)(prefix ? spec->n - spec->recent : spec->n);
    const int64_t half = spec->kernel / 2;
    if (spec->pool == DKV_POOL_NONE)
        return (double)x[i];
    if (i < begin || i >= end) /* the divisor of averages is left out everywhere */
        return (double)x[i] * (spec->pool == DKV_POOL_AVG ? spec->kernel : 1);
    double result = 0;
    if (spec->pool == DKV_POOL_MAX) {
        for (int64_t j = i - half; j <= i + half; j++)
            if (j >= begin && j < end && (double)x[j] > result)
                result = (double)x[j];
        return result;
    }
    int64_t at = i - half;
    for (int64_t size = 1; size <= spec->kernel; size *= 2)
        if (spec->kernel & size) {
            result += block_sum(x, begin, end, at, size);
            at += size;
        }
    return result;
}

static int better_first(const void *left, const void *right)
{
    const struct token *a = left, *b = right;
    if (a->token_class != b->token_class)
        return b->token_class - a->token_class;
    if (a->pooled != b->pooled)
        return a->pooled > b->pooled ? -1 : 1;
    if (a->raw != b->raw)
        return a->raw > b->raw ? -1 : 1;
    return a->index - b->index;
}

static int ascending(const void *left, const void *right)
{
    return *(const int32_t *)left - *(const int32_t *)right;
}

static void select_by_sorting(const struct dkv_select_spec *spec, const float *raw,
                              const uint8_t *flags, int32_t *keep_out)
{
    struct token *tokens = malloc(spec->n * sizeof(*tokens));
    assert_non_null(tokens);
    for (int64_t i = 0; i < (int64_t)spec->n; i++) {
        const bool safe = i < (int64_t)spec->sinks || i >= (int64_t)(spec->n - spec->recent) ||
                          (flags != NULL && (flags[i] & DKV_TOKEN_PROTECTED));
        const bool lowest = flags != NULL && (flags[i] & DKV_TOKEN_LOWEST);
        tokens[i] = (struct token){lowest ? 0
                                   : safe ? 2
                                          : 1,
                                   pool_one(spec, raw, i), raw[i], (int32_t)i};
    }
    qsort(tokens, spec->n, sizeof(*tokens), better_first);
    for (uint64_t i = 0; i < spec->keep; i++)
        keep_out[i] = tokens[i].index + spec->first_index;
    qsort(keep_out, spec->keep, sizeof(*keep_out), ascending);
    free(tokens);
}

/* ---- helpers ---- */

static void *new_scratch(void)
{
    void *scratch = aligned_alloc(64, (dkv_select_scratch_bytes() + 63) / 64 * 64);
    assert_non_null(scratch);
    memset(scratch, 0xa5, dkv_select_scratch_bytes());
    return scratch;
}

static void select_into(const struct dkv_select_spec *spec, const float *raw, const uint8_t *flags,
                        int32_t *keep_out)
{
    void *scratch = new_scratch();
    dkv_select(spec, raw, flags, scratch, keep_out);
    free(scratch);
}

/* Selects both ways; the scores are copied to blocks of exactly their size. */
static void check(const struct dkv_select_spec *spec, const float *raw, const uint8_t *flags)
{
    int32_t *want = malloc(spec->keep * sizeof(*want));
    int32_t *got = malloc(spec->keep * sizeof(*got));
    float *own = malloc(spec->n * sizeof(*own));
    assert_true(want != NULL && got != NULL && own != NULL);
    memcpy(own, raw, spec->n * sizeof(*own));
    select_by_sorting(spec, own, flags, want);
    select_into(spec, own, flags, got);
    for (uint64_t i = 0; i < spec->keep; i++)
        if (want[i] != got[i])
            fail_msg("n %llu k %llu pool %d kernel %u scope %d sinks %llu recent %llu: kept[%llu] "
                     "is %d, not %d",
                     (unsigned long long)spec->n, (unsigned long long)spec->keep, (int)spec->pool,
                     spec->kernel, (int)spec->scope, (unsigned long long)spec->sinks,
                     (unsigned long long)spec->recent, (unsigned long long)i, got[i], want[i]);
    free(want);
    free(got);
    free(own);
}

enum { MAX_N = 5000 };
static float scores[1 << 20];
static uint8_t token_flags[1 << 20];

/* Score distributions, from no ties at all to nothing else. */
static void fill(struct dkv_random *random, uint64_t n, unsigned kind)
{
    for (uint64_t i = 0; i < n; i++) {
        const double u = dkv_random_unit(random);
        switch (kind % 7) {
        case 0: scores[i] = (float)u; break;
        case 1: scores[i] = (float)exp(170 * u - 85); break; /* the whole range of float */
        case 2: scores[i] = (float)(dkv_random_u64(random) % 3); break;
        case 3: scores[i] = 0; break;
        case 4: scores[i] = dkv_random_once_in(random, 50) ? 0x1p60f : (float)u * 0x1p-60f; break;
        case 5: scores[i] = dkv_random_once_in(random, 2) ? -0.0f : 0.0f; break;
        default: scores[i] = (float)(1 + 1e-6 * u); break; /* agree in many digits */
        }
    }
}

/* ---- tests ---- */

static void random_scores_select_like_a_full_sort(void **state)
{
    (void)state;
    const uint32_t kernels[] = {1, 3, 7, 11, 63, 511};
    struct dkv_random random = {1};
    for (int i = 0; i < 1500; i++) {
        const uint64_t n = dkv_random_once_in(&random, 8) ? dkv_random_range(&random, 1, MAX_N)
                                                          : dkv_random_range(&random, 1, 300);
        struct dkv_select_spec spec = {
            .pool = (enum dkv_pool)(dkv_random_u64(&random) % 3),
            .scope = (enum dkv_pool_scope)(dkv_random_u64(&random) % 2),
            .kernel = kernels[dkv_random_u64(&random) % 6],
            .n = n,
            .sinks = dkv_random_range(&random, 0, n < 9 ? n : 9),
            .keep = dkv_random_range(&random, 1, n),
            .first_index = (int32_t)dkv_random_range(&random, 0, 1000),
        };
        spec.recent = dkv_random_range(&random, 0, n - spec.sinks < 70 ? n - spec.sinks : 70);
        fill(&random, n, (unsigned)dkv_random_u64(&random));
        const bool flagged = dkv_random_once_in(&random, 3);
        const uint64_t rarity = dkv_random_range(&random, 1, 40);
        for (uint64_t t = 0; t < n; t++)
            token_flags[t] = dkv_random_once_in(&random, rarity)
                                 ? (uint8_t)dkv_random_range(&random, 0, 3)
                                 : 0;
        check(&spec, scores, flagged ? token_flags : NULL);
    }
}

static void every_k_of_a_tied_input_selects_like_a_full_sort(void **state)
{
    (void)state;
    struct dkv_random random = {2};
    for (unsigned kind = 0; kind < 7; kind++)
        for (int pool = DKV_POOL_NONE; pool <= DKV_POOL_AVG; pool++)
            for (uint64_t k = 1; k <= 67; k++) {
                const struct dkv_select_spec spec = {.pool = (enum dkv_pool)pool,
                                                     .kernel = 5,
                                                     .n = 67,
                                                     .sinks = 2,
                                                     .recent = 8,
                                                     .keep = k};
                fill(&random, spec.n, kind);
                check(&spec, scores, NULL);
            }
}

static void tile_borders_do_not_show(void **state)
{
    (void)state;
    struct dkv_random random = {3};
    const uint64_t sizes[] = {DKV_POOL_TILE - 1,     DKV_POOL_TILE,     DKV_POOL_TILE + 1,
                              2 * DKV_POOL_TILE - 1, 2 * DKV_POOL_TILE, 3 * DKV_POOL_TILE + 7};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (int pool = DKV_POOL_NONE; pool <= DKV_POOL_AVG; pool++)
            for (unsigned kind = 0; kind < 7; kind++) {
                const struct dkv_select_spec spec = {.pool = (enum dkv_pool)pool,
                                                     .kernel = kind % 2 ? 511 : 11,
                                                     .n = sizes[i],
                                                     .recent = 8,
                                                     .keep = sizes[i] / 3};
                fill(&random, spec.n, kind);
                check(&spec, scores, NULL);
            }
}

static void all_ties_keep_the_lowest_indices(void **state)
{
    (void)state;
    int32_t keep[20];
    for (int i = 0; i < 3000; i++)
        scores[i] = 7.25f;
    const struct dkv_select_spec spec = {
        .pool = DKV_POOL_MAX, .kernel = 11, .n = 3000, .recent = 8, .keep = 20};
    select_into(&spec, scores, NULL, keep);
    for (int i = 0; i < 12; i++)
        assert_int_equal(keep[i], i);
    for (int i = 0; i < 8; i++)
        assert_int_equal(keep[12 + i], 2992 + i);
}

static void the_peak_of_a_plateau_comes_first(void **state)
{
    (void)state;
    int32_t keep[1];
    memset(scores, 0, 100 * sizeof(*scores));
    scores[40] = 5;
    const struct dkv_select_spec spec = {.pool = DKV_POOL_MAX, .kernel = 11, .n = 100, .keep = 1};
    select_into(&spec, scores, NULL, keep);
    assert_int_equal(keep[0], 40);
}

static void minus_zero_equals_zero(void **state)
{
    (void)state;
    int32_t keep[2];
    const float values[] = {-0.0f, 0.0f, -0.0f, 0.0f};
    const struct dkv_select_spec spec = {.pool = DKV_POOL_NONE, .n = 4, .keep = 2};
    select_into(&spec, values, NULL, keep);
    assert_int_equal(keep[0], 0);
    assert_int_equal(keep[1], 1);
}

static void protection_beats_any_score_and_lowest_loses_to_any(void **state)
{
    (void)state;
    int32_t keep[4];
    const float values[] = {3e38f, 1, 0, 2, 5, 0};
    const uint8_t flags[] = {
        DKV_TOKEN_LOWEST | DKV_TOKEN_PROTECTED, 0, DKV_TOKEN_PROTECTED, 0, 0, 0};
    const struct dkv_select_spec spec = {.pool = DKV_POOL_NONE, .n = 6, .recent = 1, .keep = 4};
    select_into(&spec, values, flags, keep);
    const int32_t want[] = {2, 3, 4, 5};
    assert_memory_equal(keep, want, sizeof(want));
}

static void prefix_scope_keeps_a_sink_from_its_neighbours(void **state)
{
    (void)state;
    int32_t keep[3];
    const float values[] = {1e30f, 0, 0, 0, 0, 0, 3, 0, 0, 1e30f};
    struct dkv_select_spec spec = {.pool = DKV_POOL_MAX,
                                   .kernel = 3,
                                   .scope = DKV_POOL_SCOPE_PREFIX,
                                   .n = 10,
                                   .sinks = 1,
                                   .recent = 1,
                                   .keep = 3};
    const int32_t want_prefix[] = {0, 6, 9}, want_all[] = {0, 1, 9};
    select_into(&spec, values, NULL, keep);
    assert_memory_equal(keep, want_prefix, sizeof(want_prefix));
    spec.scope = DKV_POOL_SCOPE_ALL;
    select_into(&spec, values, NULL, keep);
    assert_memory_equal(keep, want_all, sizeof(want_all));
}

/* Only masks put a protected token into the prefix, where it has an average to be compared with the
 * raw scores of the other protected ones. */
static void an_average_is_compared_with_raw_scores_as_an_average(void **state)
{
    (void)state;
    int32_t keep[2];
    const float values[] = {0, 2, 2, 2, 0, 1, 3};
    const uint8_t flags[] = {0, 0, DKV_TOKEN_PROTECTED, 0, 0, 0, 0};
    struct dkv_select_spec spec = {.pool = DKV_POOL_AVG,
                                   .kernel = 3,
                                   .scope = DKV_POOL_SCOPE_PREFIX,
                                   .n = 7,
                                   .recent = 1,
                                   .keep = 1};
    select_into(&spec, values, flags, keep);
    assert_int_equal(keep[0], 6); /* 3 is above the average of 2, though not above its sum */
    spec.recent = 2;
    spec.keep = 2;
    select_into(&spec, values, flags, keep);
    const int32_t want[] = {2, 6};
    assert_memory_equal(keep, want, sizeof(want));
}

static void scaling_all_scores_by_a_power_of_two_changes_nothing(void **state)
{
    (void)state;
    struct dkv_random random = {4};
    static float scaled[2000];
    int32_t keep[200], keep_scaled[200];
    for (int pool = DKV_POOL_NONE; pool <= DKV_POOL_AVG; pool++) {
        fill(&random, 2000, 0);
        for (int i = 0; i < 2000; i++)
            scaled[i] = scores[i] * 0x1p80f;
        const struct dkv_select_spec spec = {
            .pool = (enum dkv_pool)pool, .kernel = 11, .n = 2000, .recent = 8, .keep = 200};
        select_into(&spec, scores, NULL, keep);
        select_into(&spec, scaled, NULL, keep_scaled);
        assert_memory_equal(keep, keep_scaled, sizeof(keep));
    }
}

/* Of processor time: other programs on the machine do not count. */
static double milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* No quadratic case hides behind ties: the slowest distribution at a million tokens is held to a
 * time that a full sort or a comparison of all pairs cannot meet even on a slow machine. */
static void a_million_tokens_take_linear_time_whatever_the_ties(void **state)
{
    (void)state;
    struct dkv_random random = {5};
    const uint64_t n = 1 << 20;
    int32_t *keep = malloc(n * sizeof(*keep));
    void *scratch = new_scratch();
    const uint64_t budgets[] = {1, n / 10, n - 1, n};
    double slowest = 0;
    assert_non_null(keep);
    assert_true(dkv_select_scratch_bytes() <= 128 * 1024);
    for (unsigned kind = 0; kind < 7; kind++) {
        fill(&random, n, kind);
        for (size_t b = 0; b < 4; b++) {
            const struct dkv_select_spec spec = {.pool = kind % 2 ? DKV_POOL_MAX : DKV_POOL_AVG,
                                                 .kernel = 11,
                                                 .n = n,
                                                 .recent = b == 0 ? 0 : 8,
                                                 .keep = budgets[b]};
            const double start = milliseconds();
            dkv_select(&spec, scores, NULL, scratch, keep);
            const double took = milliseconds() - start;
            slowest = took > slowest ? took : slowest;
            for (uint64_t i = 1; i < spec.keep; i++)
                assert_true(keep[i] > keep[i - 1]);
        }
    }
    print_message("slowest of 28 selections among 1,048,576 tokens: %.1f ms\n", slowest);
    assert_true(slowest < 3000);
    free(scratch);
    free(keep);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_scores_select_like_a_full_sort),
        cmocka_unit_test(every_k_of_a_tied_input_selects_like_a_full_sort),
        cmocka_unit_test(tile_borders_do_not_show),
        cmocka_unit_test(all_ties_keep_the_lowest_indices),
        cmocka_unit_test(the_peak_of_a_plateau_comes_first),
        cmocka_unit_test(minus_zero_equals_zero),
        cmocka_unit_test(protection_beats_any_score_and_lowest_loses_to_any),
        cmocka_unit_test(prefix_scope_keeps_a_sink_from_its_neighbours),
        cmocka_unit_test(an_average_is_compared_with_raw_scores_as_an_average),
        cmocka_unit_test(scaling_all_scores_by_a_power_of_two_changes_nothing),
        cmocka_unit_test(a_million_tokens_take_linear_time_whatever_the_ties),
    };
    return cmocka_run_group_tests_name("select", tests, NULL, NULL);
}
