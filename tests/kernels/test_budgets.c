/* How budgets are dealt to heads, layers and chunks: the numbers that the authors' codes give, and
 * what must hold of every answer. check_policies holds the sets against the oracle.
 *
 * usage: test_budgets [ENGINE] */
#include "kernels/choose.h"
#include "tests/support/engines.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *engine_name;

static void *must_calloc(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    assert_non_null(memory);
    return memory;
}

/* Eight heads of 400 tokens; head h has wanted[h] of the 800 best scores of all. */
static void deal(const uint32_t *wanted, enum dkv_heads mode, uint32_t *counts)
{
    enum { HEADS = 8, N = 400 };
    struct dkv_choice_work work;
    struct dkv_choice choice = {
        .heads = HEADS,
        .spec = {.pool = DKV_POOL_NONE, .kernel = 1, .n = N, .keep = 100},
        .mode = mode,
        .alpha = 0.2,
        .min_keep = 1,
        .chunk = 1,
    };
    const size_t bytes = (dkv_choice_bytes(HEADS, N, false) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, bytes);
    int32_t *keep = must_calloc(HEADS * N, sizeof(*keep));
    assert_non_null(memory);
    memset(memory, 0, bytes);
    dkv_choice_place(&work, HEADS, N, false, memory);
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t t = 0; t < N; t++)
            work.raw[h * N + t] = (t < wanted[h] ? 1 : 0) + 1e-3 * (N - t) + 1e-6 * h;
    dkv_choose(&choice, &work, keep, counts);
    free(keep);
    free(memory);
}

static const uint32_t probe[8] = {142, 124, 46, 44, 51, 49, 172, 172};

static void the_authors_mix_gives_the_numbers_of_their_code(void **state)
{
    (void)state;
    static const uint32_t authors[8] = {134, 119, 57, 55, 61, 59, 158, 158}; /* 801, not 800 */
    uint32_t counts[8];
    deal(probe, DKV_HEADS_ADAKV_MIX, counts);
    for (int h = 0; h < 8; h++)
        assert_int_equal(counts[h], authors[h]);
}

static void kvpress_floor_keeps_the_total(void **state)
{
    (void)state;
    static const uint32_t skewed[8] = {300, 300, 200, 0, 0, 0, 0, 0};
    uint32_t counts[8], total = 0;
    deal(probe, DKV_HEADS_ADAKV_FLOOR, counts);
    for (int h = 0; h < 8; h++)
        assert_int_equal(counts[h], probe[h]); /* nobody is below 20 */
    deal(skewed, DKV_HEADS_ADAKV_FLOOR, counts);
    for (int h = 0; h < 8; h++) {
        assert_true(counts[h] >= 20);
        total += counts[h];
    }
    assert_int_equal(total, 800);
    deal(skewed, DKV_HEADS_GLOBAL, counts);
    for (int h = 3; h < 8; h++)
        assert_int_equal(counts[h], 1); /* min_keep */
}

static void cake_shares_are_exact_and_never_above_the_most(void **state)
{
    (void)state;
    struct dkv_random random = {7};
    for (int round = 0; round < 1000; round++) {
        double preferences[40];
        uint64_t shares[40], sum = 0;
        const size_t n = dkv_random_range(&random, 1, 40);
        const uint64_t most = dkv_random_range(&random, 1, 5000);
        const uint64_t total = dkv_random_range(&random, 0, n * most);
        for (size_t l = 0; l < n; l++)
            preferences[l] = dkv_random_once_in(&random, 5) ? 0 : exp(5 * dkv_random_unit(&random));
        dkv_cake_shares(preferences, n, total, most, shares);
        for (size_t l = 0; l < n; l++) {
            assert_true(shares[l] <= most);
            sum += shares[l];
        }
        assert_true(sum == total);
    }
}

static struct dkv_params params_of(const char *text)
{
    struct dkv_params params;
    struct dkv_error err;
    char copy[512], *rest = copy;
    dkv_params_init(&params);
    snprintf(copy, sizeof(copy), "%s", text);
    for (char *name; (name = strsep(&rest, " ")) != NULL;) {
        char *value = strchr(name, '=');
        *value++ = '\0';
        if (dkv_params_set_text(&params, name, value, &err) != DKV_OK)
            fail_msg("%s", err.text);
    }
    dkv_params_resolve(&params);
    return params;
}

/* Plans of `n_layers` equal blocks of 4 query and 2 KV heads. */
static enum dkv_status plan(const char *text, uint64_t n, uint32_t n_layers, struct dkv_plan *plans,
                            struct dkv_error *err)
{
    struct dkv_block *blocks = must_calloc(n_layers, sizeof(*blocks));
    void *memory = must_calloc(n * 2 * 8, 2);
    for (uint32_t l = 0; l < n_layers; l++)
        blocks[l] = (struct dkv_block){
            .q_heads = 4,
            .kv_heads = 2,
            .head_dim = 8,
            .q_rows = 8,
            .n_tokens = n,
            .query = dkv_view_dense(memory, n * 32, DKV_BF16, 8, 8),
            .key = dkv_view_dense(memory, n * 32, DKV_BF16, n, 8),
            .value = dkv_view_dense(memory, n * 32, DKV_BF16, n, 8),
        };
    const struct dkv_request request = {params_of(text), blocks, n_layers, false};
    const enum dkv_status status = dkv_request_validate(&request, plans, err);
    free(memory);
    free(blocks);
    return status;
}

static void a_pyramid_has_the_steps_of_the_authors_code(void **state)
{
    (void)state;
    struct dkv_plan plans[32];
    struct dkv_error err;
    uint64_t sum = 0;
    assert_int_equal(
        plan("policy=snapkv window=8 layers=pyramid keep_tokens=512", 4096, 32, plans, &err),
        DKV_OK);
    for (int l = 0; l < 32; l++) {
        assert_true(l == 0 || plans[l].keep_tokens + 30 == plans[l - 1].keep_tokens);
        sum += plans[l].keep_tokens;
    }
    assert_int_equal(plans[0].keep_tokens, 983 + 8);
    assert_int_equal(sum / 32, 526); /* the drift of an integer step */

    struct dkv_plan one;
    assert_int_equal(plan("policy=snapkv window=8 layers=pyramid keep_tokens=512 layer=5 "
                          "n_layers=32",
                          4096, 1, &one, &err),
                     DKV_OK);
    assert_true(one.keep_tokens == plans[5].keep_tokens);
}

static void fixed_budgets_are_taken_as_they_are(void **state)
{
    (void)state;
    struct dkv_plan plans[3];
    struct dkv_error err;
    assert_int_equal(plan("layers=fixed per_layer=100,20,3", 500, 3, plans, &err), DKV_OK);
    assert_true(plans[0].keep_tokens == 100 && plans[1].keep_tokens == 20 &&
                plans[2].keep_tokens == 8); /* the window */
    assert_int_equal(plan("layers=fixed per_head=100,20,30,40,50,60", 500, 3, plans, &err), DKV_OK);
    assert_true(plans[0].keep_capacity == 120 && plans[1].keep_capacity == 70 &&
                plans[2].keep_capacity == 110);
}

static void budgets_that_make_no_sense_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"layers=fixed", "per_layer"},
        {"per_layer=3", "layers"},
        {"layers=fixed per_layer=1,2", "2 numbers for 3 layers"},
        {"layers=fixed per_head=1,2,3", "per_head"},
        {"layers=fixed per_layer=1,2,3 keep_tokens=5", "layers"},
        {"layer=7 n_layers=8", "n_layers"},
        {"heads=global gqa=layer", "heads"},
        {"layers=cake", "layers"},
        {"granularity=64 recent=100 keep_tokens=5 on_conflict=budget", "granularity"},
        {"policy=criticalkv granularity=4", "granularity"},
        {"policy=snapkv eps=0.5", "eps"},
        {"policy=snapkv reduce=ema_first", "reduce"},
        {"policy=external", "external_scores"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct dkv_plan plans[3];
        struct dkv_error err;
        assert_int_equal(plan(bad[i][0], 500, 3, plans, &err), DKV_E_INVALID);
        if (strstr(err.text, bad[i][1]) == NULL)
            fail_msg("'%s' says '%s'", bad[i][0], err.text);
    }
}

/* Its total would be dealt of more, or less, than a block has. */
static void layers_that_share_a_budget_are_alike(void **state)
{
    (void)state;
    static const struct {
        uint64_t n_tokens[2], valid_from[2], q_rows[2];
        enum dkv_status status;
    } cases[] = {
        {{64, 64}, {0, 0}, {8, 8}, DKV_OK},         {{64, 300}, {0, 0}, {8, 8}, DKV_E_INVALID},
        {{300, 64}, {0, 0}, {8, 8}, DKV_E_INVALID}, {{300, 20}, {0, 0}, {8, 8}, DKV_E_INVALID},
        {{64, 64}, {0, 40}, {8, 8}, DKV_E_INVALID},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct dkv_block blocks[2] = {0};
        struct dkv_plan plans[2];
        struct dkv_error err;
        void *memory = must_calloc(300, 32);
        for (int l = 0; l < 2; l++)
            blocks[l] = (struct dkv_block){
                .q_heads = 4,
                .kv_heads = 2,
                .head_dim = 8,
                .q_rows = cases[i].q_rows[l],
                .n_tokens = cases[i].n_tokens[l],
                .valid_from = cases[i].valid_from[l],
                .query = dkv_view_dense(memory, 300 * 32, DKV_BF16, 8, 8),
                .key = dkv_view_dense(memory, 300 * 32, DKV_BF16, cases[i].n_tokens[l], 8),
                .value = dkv_view_dense(memory, 300 * 32, DKV_BF16, cases[i].n_tokens[l], 8),
            };
        const struct dkv_request request = {
            params_of("policy=cake window=8 layers=cake keep_ratio=0.5"), blocks, 2, false};
        assert_int_equal(dkv_request_validate(&request, plans, &err), cases[i].status);
        if (cases[i].status != DKV_OK && strstr(err.text, "block 1: layers") == NULL)
            fail_msg("%s", err.text);
        free(memory);
    }
}

/* ---- whole answers ---- */

static void make_layer(struct dkv_case *c, uint64_t seed, double sharpness)
{
    struct dkv_random random = {seed};
    dkv_case_init(c, (struct dkv_shape){.q_heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 16,
                                        .q_rows = 16,
                                        .n_tokens = 300,
                                        .q_dtype = DKV_FP32});
    dkv_case_fill(c, DKV_QUERY, &random, sharpness);
    dkv_case_fill(c, DKV_KEY, &random, 1);
    dkv_case_fill(c, DKV_VALUE, &random, 1);
}

/* p of one query head's row in float64. */
static void probabilities(const struct dkv_case *c, uint32_t head, uint32_t t, double *p)
{
    const uint64_t n = c->block.n_tokens, last = n - c->plan.window + t;
    double sum = 0;
    for (uint64_t j = 0; j < n; j++) {
        double z = 0;
        for (uint64_t e = 0; e < c->block.head_dim; e++)
            z += dkv_case_get(c, DKV_QUERY, head, c->plan.first_row + t, e) *
                 dkv_case_get(c, DKV_KEY, head / c->plan.group, j, e);
        p[j] = j <= last ? exp(z * c->plan.scale) : 0;
        sum += p[j];
    }
    for (uint64_t j = 0; j < n; j++)
        p[j] /= sum;
}

/* P = H^(1/tau1) V^(1/tau2) of a layer, from the definition. */
static double preference(const struct dkv_case *c)
{
    const uint64_t n = c->block.n_tokens, w = c->plan.window;
    double entropy = 0, variance = 0;
    double *p = must_calloc(w * n, sizeof(*p));
    for (uint32_t head = 0; head < c->block.q_heads; head++) {
        for (uint32_t t = 0; t < w; t++)
            probabilities(c, head, t, p + t * n);
        for (uint64_t j = 0; j < n - w; j++) {
            double mean = 0, squares = 0;
            for (uint32_t t = 0; t < w; t++) {
                entropy -= p[t * n + j] * log(p[t * n + j] + 1e-10);
                mean += p[t * n + j] / (double)w;
            }
            for (uint32_t t = 0; t < w; t++)
                squares += (p[t * n + j] - mean) * (p[t * n + j] - mean);
            variance += squares / (double)(w - 1);
        }
    }
    free(p);
    return pow(entropy, 1 / c->params.tau1) * pow(variance, 1 / c->params.tau2);
}

static void layers_of_a_request_get_what_they_prefer(void **state)
{
    (void)state;
    enum { LAYERS = 3 };
    struct dkv_case c[LAYERS];
    struct dkv_block blocks[LAYERS];
    struct dkv_plan plans[LAYERS];
    struct dkv_item items[LAYERS];
    struct dkv_error err;
    double preferences[LAYERS], sum = 0;
    int32_t keep[LAYERS][600];
    uint32_t counts[LAYERS][2];
    const struct dkv_params params = params_of(
        "policy=cake window=16 layers=cake tau1=1.6 tau2=0.4 keep_tokens=60");
    for (int l = 0; l < LAYERS; l++) {
        make_layer(&c[l], 10 + (uint64_t)l, 1 + l);
        blocks[l] = c[l].block;
    }
    const struct dkv_request request = {params, blocks, LAYERS, false};
    assert_int_equal(dkv_request_validate(&request, plans, &err), DKV_OK);
    for (int l = 0; l < LAYERS; l++) {
        c[l].params = params;
        c[l].plan = plans[l];
        preferences[l] = preference(&c[l]);
        sum += preferences[l];
        assert_true(plans[l].keep_capacity <= 600);
        items[l] = (struct dkv_item){.block = &blocks[l],
                                     .params = &params,
                                     .plan = &plans[l],
                                     .keep_out = keep[l],
                                     .counts_out = counts[l]};
    }
    struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 2);
    assert_int_equal(dkv_engine_run(scorer.ops, scorer.engine, items, LAYERS, &err), DKV_OK);
    uint32_t total = 0;
    for (int l = 0; l < LAYERS; l++) {
        assert_int_equal(items[l].status, DKV_OK);
        assert_int_equal(counts[l][0], counts[l][1]);
        const double share = 16 + preferences[l] / sum * LAYERS * (60 - 16);
        assert_true(fabs(counts[l][0] - share) <= 2);
        total += counts[l][0];
    }
    assert_int_equal(total, LAYERS * 60);
    assert_int_equal(dkv_engine_run(scorer.ops, scorer.engine, items, 2, &err), DKV_OK);
    assert_int_equal(items[0].status, DKV_E_INTERNAL); /* a layer is missing */
    dkv_test_engine_close(&scorer);
    for (int l = 0; l < LAYERS; l++)
        dkv_case_fini(&c[l]);
}

/* One head has all the best scores, the other its min_keep, and masked tokens that were protected
 * take nothing from it: the answer has room for all of it. */
static void a_mix_never_keeps_more_than_there_is_room_for(void **state)
{
    (void)state;
    for (int masked = 0; masked < 2; masked++) {
        struct dkv_case c;
        struct dkv_case_answer answer;
        make_layer(&c, 4, 1);
        for (uint64_t t = 0; t < 300; t++)
            for (uint64_t e = 0; e < 16; e++)
                dkv_case_set(&c, DKV_KEY, 1, t, e, masked && t < 50 ? NAN : 100);
        dkv_case_param(&c, "policy", "knorm");
        dkv_case_param(&c, "heads", "adakv_mix");
        dkv_case_param(&c, "alpha", "0");
        dkv_case_param(&c, "keep_tokens", "60");
        dkv_case_param(&c, masked ? "sinks" : "min_keep", "50");
        dkv_case_param(&c, "nonfinite", "mask");
        dkv_case_plan(&c);
        struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 1);
        dkv_case_run(&c, &scorer, &answer);
        assert_int_equal(answer.status, DKV_OK);
        assert_true(answer.counts[0] + answer.counts[1] > 2 * (60 + 1));
        assert_true(answer.counts[0] + answer.counts[1] <= c.plan.keep_capacity);
        dkv_case_answer_fini(&answer);
        dkv_test_engine_close(&scorer);
        dkv_case_fini(&c);
    }
}

/* Without scores this is answered at once; with them it goes through the mix, whose shares are
 * rounded down. */
static void a_mix_of_everything_leaves_nothing_out(void **state)
{
    (void)state;
    struct dkv_case c;
    struct dkv_case_answer answer;
    make_layer(&c, 4, 1);
    dkv_case_param(&c, "policy", "knorm");
    dkv_case_param(&c, "heads", "adakv_mix");
    dkv_case_param(&c, "alpha", "0.2533"); /* of 300: 75.99 */
    dkv_case_param(&c, "keep_tokens", "300");
    dkv_case_plan(&c);
    assert_true(c.plan.keep_all);
    struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 1);
    dkv_case_run(&c, &scorer, &answer);
    assert_int_equal(answer.status, DKV_OK);
    assert_non_null(answer.raw);
    for (uint32_t h = 0; h < 2; h++)
        assert_int_equal(answer.counts[h], 300);
    dkv_case_answer_fini(&answer);
    dkv_test_engine_close(&scorer);
    dkv_case_fini(&c);
}

static void whole_pages_are_kept(void **state)
{
    (void)state;
    struct dkv_case c;
    struct dkv_case_answer answer;
    make_layer(&c, 3, 1);
    c.block.valid_from = 5;
    dkv_case_param(&c, "granularity", "16");
    dkv_case_param(&c, "keep_tokens", "100");
    dkv_case_plan(&c);
    struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 1);
    dkv_case_run(&c, &scorer, &answer);
    assert_int_equal(answer.status, DKV_OK);
    /* the first page, which is not full, and the last, also not full, are kept */
    assert_int_equal(c.plan.sinks, 11);
    assert_true(c.plan.keep_tokens <= 100 && c.plan.keep_tokens > 100 - 16);
    for (uint32_t h = 0; h < 2; h++) {
        bool kept[300] = {0};
        for (uint64_t i = 0; i < c.plan.keep_tokens; i++)
            kept[answer.keep[h * c.plan.keep_tokens + i]] = true;
        for (uint64_t t = 16; t < 300; t++)
            assert_true(kept[t] == kept[t / 16 * 16]);
    }
    dkv_case_answer_fini(&answer);
    dkv_test_engine_close(&scorer);
    dkv_case_fini(&c);
}

enum { PAGE = 16, FIRST = 5, PAGES = (300 + PAGE - 1) / PAGE };

/* Tokens of a head that are masked: a whole page in the middle, halves, single ones, and, by turns,
 * all of the first page or of the last, neither of which is full. */
static void mask_tokens(struct dkv_case *c, uint32_t head, unsigned which, bool *masked)
{
    struct dkv_random random = {which + 1};
    for (uint64_t t = FIRST; t < 300; t++) {
        const uint64_t page = t / PAGE;
        masked[t] = page == 7 || (page == 9 && t % PAGE < 8) || (page == 0 && (which & 1)) ||
                    (page == PAGES - 1 && (which & 2)) || dkv_random_range(&random, 0, 19) == 0;
        for (uint64_t e = 0; masked[t] && e < 16; e++)
            dkv_case_set(c, DKV_KEY, head, t, e, NAN);
    }
}

/* Pages are kept whole; the two that are not full are; and one of masked tokens alone is the last
 * to be. */
static void check_pages(const int32_t *keep, uint32_t count, const bool *masked)
{
    bool kept[300] = {false};
    unsigned n_hidden = 0, n_dropped = 0;
    for (uint32_t i = 0; i < count; i++)
        kept[keep[i]] = true;
    for (uint64_t page = 0; page < PAGES; page++) {
        const uint64_t begin = page == 0 ? FIRST : page * PAGE;
        const uint64_t end = page == PAGES - 1 ? 300 : (page + 1) * PAGE;
        bool all_masked = true;
        for (uint64_t t = begin; t < end; t++) {
            assert_true(kept[t] == kept[begin]);
            all_masked = all_masked && masked[t];
        }
        if (page == 0 || page == PAGES - 1)
            assert_true(kept[begin]);
        else if (all_masked)
            n_hidden += kept[begin];
        else
            n_dropped += !kept[begin];
    }
    assert_true(n_hidden == 0 || n_dropped == 0);
}

/* A chunk at an end is kept for its place, whatever is masked in it, so none gives way to a longer
 * one: no answer has more tokens than its budget. */
static void masked_tokens_leave_pages_whole(void **state)
{
    static const char *const heads[] = {"uniform", "global", "adakv_floor", "adakv_mix"};
    static const char *const policies[] = {"dropkv", "snapkv", "knorm"};
    (void)state;
    struct dkv_scorer scorer = dkv_test_engine_open(engine_name, 1);
    for (unsigned i = 0; i < 4 * 4 * 3 * 2; i++) {
        struct dkv_case c;
        struct dkv_case_answer answer;
        bool masked[2][300] = {{false}};
        make_layer(&c, i, 1);
        c.block.valid_from = FIRST;
        for (uint32_t h = 0; h < 2; h++)
            mask_tokens(&c, h, i % 4 + 4 * h, masked[h]);
        dkv_case_param(&c, "policy", policies[i / 16 % 3]);
        dkv_case_param(&c, "heads", heads[i / 4 % 4]);
        dkv_case_param(&c, "granularity", "16");
        dkv_case_param(&c, "keep_tokens", i / 48 ? "290" : "100");
        dkv_case_param(&c, "nonfinite", "mask");
        dkv_case_plan(&c);
        dkv_case_run(&c, &scorer, &answer);
        assert_int_equal(answer.status, DKV_OK);
        uint64_t total = 0;
        for (uint32_t h = 0; h < 2; h++) {
            const uint32_t count = c.plan.ragged ? answer.counts[h] : (uint32_t)c.plan.keep_tokens;
            check_pages(answer.keep + total, count, masked[h]);
            total += count;
        }
        assert_true(total <= (c.plan.ragged ? c.plan.keep_capacity : 2 * c.plan.keep_tokens));
        if (i / 4 % 4 < 3) /* the mix rounds */
            assert_int_equal(total, 2 * c.plan.keep_tokens);
        dkv_case_answer_fini(&answer);
        dkv_case_fini(&c);
    }
    dkv_test_engine_close(&scorer);
}

int main(int argc, char **argv)
{
    engine_name = dkv_test_engine_name(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_authors_mix_gives_the_numbers_of_their_code),
        cmocka_unit_test(kvpress_floor_keeps_the_total),
        cmocka_unit_test(cake_shares_are_exact_and_never_above_the_most),
        cmocka_unit_test(a_pyramid_has_the_steps_of_the_authors_code),
        cmocka_unit_test(fixed_budgets_are_taken_as_they_are),
        cmocka_unit_test(budgets_that_make_no_sense_are_refused_by_name),
        cmocka_unit_test(layers_of_a_request_get_what_they_prefer),
        cmocka_unit_test(a_mix_never_keeps_more_than_there_is_room_for),
        cmocka_unit_test(a_mix_of_everything_leaves_nothing_out),
        cmocka_unit_test(layers_that_share_a_budget_are_alike),
        cmocka_unit_test(whole_pages_are_kept),
        cmocka_unit_test(masked_tokens_leave_pages_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
