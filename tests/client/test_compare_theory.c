/* The cone and the optimum of `dropkv-client compare`, against what docs/policies.md says, done the
 * slow way: every change by really leaving tokens out, every choice by its own sums. */
#include "client/cli/compare_theory.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define N      43u
#define GROUP  2u
#define WINDOW 3u
#define ROWS   (GROUP * WINDOW)
#define V_DIM  4u
#define FIRST  2u
#define LAST   (N - WINDOW) /* the last token that every row sees */
#define ALIKE  1e-9

#define assert_near(x, y, by) assert_true(fabs((x) - (y)) <= (by))

static struct {
    double p[ROWS][N], all[ROWS][V_DIM];
    float value[N][V_DIM];
    struct dkv_outputs outputs;
} block;

static double uniform(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-53;
}

/* Probabilities of rows that see tokens FIRST .. LAST + t; row 1 has nearly all of its mass on one.
 */
static void make_block(uint64_t seed, bool same_values)
{
    memset(&block, 0, sizeof(block));
    for (uint32_t j = 0; j < N; j++)
        for (uint32_t e = 0; e < V_DIM; e++)
            block.value[j][e] = (float)(same_values ? 0.7 : 2 * uniform(&seed) - 0.6);
    for (uint32_t r = 0; r < ROWS; r++) {
        double sum = 0;
        for (uint32_t j = FIRST; j <= LAST + r % WINDOW; j++)
            sum += block.p[r][j] = exp(4 * uniform(&seed)) * (r == 1 && j == 5 ? 1e6 : 1);
        for (uint32_t j = FIRST; j <= LAST + r % WINDOW; j++) {
            block.p[r][j] /= sum;
            for (uint32_t e = 0; e < V_DIM; e++)
                block.all[r][e] += block.p[r][j] * (double)block.value[j][e];
        }
    }
    block.outputs = (struct dkv_outputs){.n = N,
                                         .first = FIRST,
                                         .group = GROUP,
                                         .rows = WINDOW,
                                         .v_dim = V_DIM,
                                         .p = &block.p[0][0],
                                         .all = &block.all[0][0],
                                         .value = &block.value[0][0]};
}

/* All rows' outputs without the tokens of `gone`, less the outputs with them: to [ROWS][V_DIM].
 * Returns its squared length. */
static double leave_out(const bool *gone, double change[ROWS][V_DIM])
{
    double square = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
        double mass = 0, out[V_DIM] = {0};
        for (uint32_t j = 0; j < N; j++) {
            if (gone[j])
                continue;
            mass += block.p[r][j];
            for (uint32_t e = 0; e < V_DIM; e++)
                out[e] += block.p[r][j] * (double)block.value[j][e];
        }
        for (uint32_t e = 0; e < V_DIM; e++) {
            change[r][e] = out[e] / mass - block.all[r][e];
            square += change[r][e] * change[r][e];
        }
    }
    return square;
}

/* Candidates by the length of the change each makes alone, longest first. */
static uint32_t rank(uint32_t *ranked, double changes[N][ROWS][V_DIM], double *lengths)
{
    uint32_t n = 0;
    for (uint32_t j = FIRST; j <= LAST; j++) {
        bool gone[N] = {false};
        gone[j] = true;
        lengths[j] = sqrt(leave_out(gone, changes[j]));
        uint32_t at = n++;
        for (; at > 0 && lengths[ranked[at - 1]] < lengths[j]; at--)
            ranked[at] = ranked[at - 1];
        ranked[at] = j;
    }
    return n;
}

static struct dkv_theory *theory_of_block(void)
{
    struct dkv_theory *theory = NULL;
    struct dkv_error error;
    assert_int_equal(dkv_theory_new(&block.outputs, 0, &theory, &error), DKV_OK);
    return theory;
}

static void the_cone_is_that_of_what_is_left_out(void **state)
{
    static double changes[N][ROWS][V_DIM];
    double lengths[N], sum[ROWS][V_DIM] = {{0}}, all = 0, square = 0;
    uint32_t ranked[N], along = 0;
    const uint32_t kept = 12; /* of which WINDOW - 1 are no candidates */
    struct dkv_cone cone = {0};
    (void)state;
    make_block(1, false);
    const uint32_t n = rank(ranked, changes, lengths), first = kept - (WINDOW - 1);
    for (uint32_t i = first; i < n; i++) {
        all += lengths[ranked[i]];
        for (uint32_t x = 0; x < ROWS * V_DIM; x++)
            (&sum[0][0])[x] += (&changes[ranked[i]][0][0])[x];
    }
    for (uint32_t x = 0; x < ROWS * V_DIM; x++)
        square += (&sum[0][0])[x] * (&sum[0][0])[x];
    for (uint32_t i = first; i < n; i++) {
        double product = 0;
        for (uint32_t x = 0; x < ROWS * V_DIM; x++)
            product += (&sum[0][0])[x] * (&changes[ranked[i]][0][0])[x];
        along += product > 0;
    }
    struct dkv_theory *theory = theory_of_block();
    assert_int_equal(dkv_theory_cone(theory, kept, &cone, NULL), DKV_OK);
    assert_int_equal(cone.n, 1);
    assert_near(cone.cosine, sqrt(square) / all, ALIKE);
    assert_near(cone.lowest, cone.cosine, 0);
    assert_near(cone.along, along / (double)(n - first), ALIKE);
    dkv_theory_free(theory);
}

static void nothing_dropped_has_no_cone(void **state)
{
    struct dkv_cone cone = {0};
    (void)state;
    make_block(2, false);
    struct dkv_theory *theory = theory_of_block();
    assert_int_equal(dkv_theory_cone(theory, N - FIRST, &cone, NULL), DKV_OK);
    assert_int_equal(cone.n, 0);
    dkv_theory_free(theory);
}

static void values_alike_have_no_cone_and_every_choice_is_best(void **state)
{
    struct dkv_cone cone = {0};
    struct dkv_optimum optimum = {0};
    (void)state;
    make_block(3, true);
    struct dkv_theory *theory = theory_of_block();
    assert_int_equal(dkv_theory_cone(theory, 5, &cone, NULL), DKV_OK);
    assert_int_equal(cone.n, 0);
    assert_int_equal(dkv_theory_optimum(theory, &optimum, NULL), DKV_OK);
    assert_int_equal(optimum.n, 4);
    assert_int_equal(optimum.n_best, 4);
    assert_near(optimum.ratio, 4, 0);
    dkv_theory_free(theory);
}

/* The change by the lowest ten of a pool over the least of all, among the 2^20 sets those of ten.
 */
static double try_all(const uint32_t *pool, bool *is_best)
{
    double change[ROWS][V_DIM], least = INFINITY, lowest = 0;
    for (uint32_t set = 0; set < 1u << 20; set++) {
        bool gone[N] = {false};
        if (__builtin_popcount(set) != 10)
            continue;
        for (uint32_t i = 0; i < 20; i++)
            gone[pool[i]] = set >> i & 1;
        const double square = leave_out(gone, change);
        least = square < least ? square : least;
        if (set == 0x3ffu << 10)
            lowest = square;
    }
    *is_best = lowest == least;
    return sqrt(lowest / least);
}

static void the_optimum_is_the_best_of_all_choices(void **state)
{
    static double changes[N][ROWS][V_DIM];
    double lengths[N], sum = 0, worst = 0;
    uint32_t ranked[N], n_best = 0;
    (void)state;
    for (uint64_t seed = 4; seed < 6; seed++) {
        struct dkv_optimum optimum = {0};
        make_block(seed, false);
        const uint32_t n = rank(ranked, changes, lengths);
        sum = worst = n_best = 0;
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t pool[20];
            bool is_best;
            for (uint32_t part = 0; part < 20; part++)
                pool[part] = ranked[(8 * part + 2 * i + 1) * n / 160];
            const double ratio = try_all(pool, &is_best);
            sum += ratio;
            worst = ratio > worst ? ratio : worst;
            n_best += is_best;
        }
        struct dkv_theory *theory = theory_of_block();
        assert_int_equal(dkv_theory_optimum(theory, &optimum, NULL), DKV_OK);
        assert_int_equal(optimum.n, 4);
        assert_near(optimum.ratio, sum, ALIKE);
        assert_near(optimum.worst, worst, ALIKE);
        assert_int_equal(optimum.n_best, n_best);
        dkv_theory_free(theory);
    }
    assert_true(worst > 1.001); /* or the test says little */
}

static void a_short_head_has_no_subsets(void **state)
{
    struct dkv_optimum optimum = {0};
    (void)state;
    make_block(6, false);
    block.outputs.first = LAST - 18; /* 19 candidates */
    struct dkv_theory *theory = theory_of_block();
    assert_int_equal(dkv_theory_optimum(theory, &optimum, NULL), DKV_OK);
    assert_int_equal(optimum.n, 0);
    dkv_theory_free(theory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_cone_is_that_of_what_is_left_out),
        cmocka_unit_test(nothing_dropped_has_no_cone),
        cmocka_unit_test(values_alike_have_no_cone_and_every_choice_is_best),
        cmocka_unit_test(the_optimum_is_the_best_of_all_choices),
        cmocka_unit_test(a_short_head_has_no_subsets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
