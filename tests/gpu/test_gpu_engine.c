/* What the CUDA engine does beside scoring well: bad input found and named, neighbours unharmed,
 * sizes at the edges, batches in flight. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "tests/gpu/device.h"
#include "tests/gpu/layout.h"
#include "tests/support/compare.h"

static struct dkv_scorer cuda;

static const struct dkv_layout_choice on_device = {.layout = DKV_LAYOUT_HEADS,
                                                   .entry_bytes = 4,
                                                   .page_tokens = 16,
                                                   .query_place = DKV_PLACE_DEVICE,
                                                   .cache_place = DKV_PLACE_DEVICE,
                                                   .table_place = DKV_PLACE_DEVICE};

struct fixture {
    struct dkv_case dense;
    struct dkv_laid laid;
    struct dkv_item item;
};

static void lay_out(struct fixture *f, const struct dkv_layout_choice *choice)
{
    struct dkv_random random = {99};
    dkv_layout_make(&f->laid, &f->dense, choice, &random);
    const size_t heads = f->dense.block.kv_heads;
    f->item = (struct dkv_item){
        .block = &f->laid.block,
        .params = &f->dense.params,
        .plan = &f->laid.plan,
        .keep_out = malloc(heads * f->laid.plan.keep_tokens * sizeof(int32_t)),
        .scores_out = malloc(heads * f->dense.block.n_tokens * sizeof(float)),
    };
}

static void make(struct fixture *f, struct dkv_shape shape, const char *window, uint64_t seed)
{
    struct dkv_random random = {seed};
    dkv_case_init(&f->dense, shape);
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
        dkv_case_fill(&f->dense, (enum dkv_side)side, &random, 1);
    dkv_case_param(&f->dense, "window", window);
    dkv_case_plan(&f->dense);
}

static void drop(struct fixture *f)
{
    dkv_layout_fini(&f->laid);
    dkv_case_fini(&f->dense);
    free(f->item.keep_out);
    free(f->item.scores_out);
}

static struct dkv_shape llama(uint64_t n)
{
    return (struct dkv_shape){.q_heads = 8,
                              .kv_heads = 2,
                              .head_dim = 128,
                              .q_rows = 8,
                              .n_tokens = n,
                              .q_dtype = DKV_BF16};
}

static void run(struct dkv_item *items, size_t n)
{
    struct dkv_error err;
    assert_int_equal(dkv_engine_run(cuda.ops, cuda.engine, items, n, &err), DKV_OK);
}

/* The item's answer is what the CPU engine says, within the accuracy rule. */
static void assert_right(struct fixture *f)
{
    struct dkv_scorer cpu = {.ops = &dkv_engine_cpu};
    struct dkv_error err;
    struct dkv_case_answer want;
    const size_t n = (size_t)f->dense.block.kv_heads * f->dense.block.n_tokens;
    double *got = malloc(n * sizeof(*got)), median, max;
    if (f->item.status != DKV_OK)
        fail_msg("%s", f->item.error.text);
    assert_int_equal(cpu.ops->open(NULL, &cpu.engine, &err), DKV_OK);
    dkv_case_run(&f->dense, &cpu, &want);
    for (size_t i = 0; i < n; i++)
        got[i] = (double)f->item.scores_out[i];
    dkv_compare_scores(want.raw, got, f->dense.block.kv_heads, f->dense.block.n_tokens, &median,
                       &max);
    const struct dkv_tolerance allowed = dkv_tolerance_of("cuda", f->dense.block.key.dtype);
    if (median > allowed.median + 1e-6 || max > allowed.max + 1e-4)
        fail_msg("median error %g, maximum %g", median, max);
    dkv_case_answer_fini(&want);
    cpu.ops->close(cpu.engine);
    free(got);
}

static void assert_refused(const struct fixture *f, const char *part, const char *other_part)
{
    if (f->item.status != DKV_E_INVALID || strstr(f->item.error.text, part) == NULL ||
        strstr(f->item.error.text, other_part) == NULL)
        fail_msg("status %d, \"%s\"; expected INVALID with \"%s\" and \"%s\"", f->item.status,
                 f->item.error.text, part, other_part);
}

/* ---- bad input ---- */

static void check_nonfinite(enum dkv_side side, uint64_t head, uint64_t row, double value,
                            const char *tensor, const char *place)
{
    for (int on_host = 0; on_host < 2; on_host++) {
        struct fixture f;
        struct dkv_layout_choice choice = on_device;
        choice.layout = DKV_LAYOUT_PAGE_PACKED;
        choice.cache_place = on_host ? DKV_PLACE_HOST : DKV_PLACE_DEVICE;
        make(&f, llama(3000), "8", 5);
        dkv_case_set(&f.dense, side, head, row, 77, value);
        lay_out(&f, &choice);
        run(&f.item, 1);
        assert_refused(&f, tensor, place);
        drop(&f);
    }
}

static void a_number_that_is_none_is_located(void **state)
{
    (void)state;
    check_nonfinite(DKV_KEY, 1, 1234, NAN, "key", "KV head 1, token 1234, element 77");
    check_nonfinite(DKV_KEY, 0, 2999, -INFINITY, "key", "KV head 0, token 2999, element 77");
    check_nonfinite(DKV_VALUE, 1, 0, INFINITY, "value", "KV head 1, token 0, element 77");
    check_nonfinite(DKV_QUERY, 6, 7, NAN, "query", "query head 6, row 7, element 77");
}

static void what_is_not_read_may_be_anything(void **state)
{
    (void)state;
    struct fixture f;
    make(&f, llama(2000), "4", 6);
    f.dense.block.valid_from = 100;
    dkv_case_plan(&f.dense);
    dkv_case_set(&f.dense, DKV_QUERY, 0, 3, 0, NAN); /* rows 4..7 are the window */
    lay_out(&f, &on_device);                         /* tokens before 100 are left as NaN */
    run(&f.item, 1);
    assert_right(&f);
    for (int i = 0; i < 100; i++)
        assert_true(f.item.scores_out[i] == 0);
    assert_true(f.item.keep_out[0] >= 100);
    drop(&f);
}

static void values_beyond_float32_are_refused(void **state)
{
    (void)state;
    struct fixture f;
    struct dkv_shape shape = llama(600);
    shape.q_dtype = DKV_FP32;
    make(&f, shape, "8", 7);
    dkv_case_set(&f.dense, DKV_VALUE, 0, 300, 5, 1e30);
    lay_out(&f, &on_device);
    run(&f.item, 1);
    assert_refused(&f, "out of range", "KV head 0");
    drop(&f);
}

static void set_entry(struct fixture *f, uint64_t index, int32_t entry)
{
    ((int32_t *)f->laid.host[3])[index] = entry;
    dkv_layout_update(&f->laid, 3);
}

static void a_bad_page_table_entry_is_named(void **state)
{
    (void)state;
    for (int place = 0; place < 4; place++) {
        const int32_t bad[] = {1 << 20, -1};
        for (int i = 0; i < 2; i++) {
            struct fixture f;
            struct dkv_layout_choice choice = on_device;
            choice.layout = DKV_LAYOUT_PAGE_TOKENS;
            choice.table_place = place & 1 ? DKV_PLACE_HOST : DKV_PLACE_DEVICE;
            choice.cache_place = place & 2 ? DKV_PLACE_HOST : DKV_PLACE_DEVICE;
            make(&f, llama(1000), "8", 8);
            lay_out(&f, &choice);
            set_entry(&f, 61, bad[i]);
            set_entry(&f, 40, bad[i]);
            run(&f.item, 1);
            assert_refused(&f, "page_table: entry 40 is", i == 0 ? "1048576" : "-1");
            drop(&f);
        }
    }
}

static void a_null_page_inside_the_valid_range_is_refused(void **state)
{
    (void)state;
    struct fixture f;
    struct dkv_layout_choice choice = on_device;
    choice.layout = DKV_LAYOUT_PAGE_HEADS;
    choice.null_pages = true;
    make(&f, llama(1000), "8", 9);
    f.dense.block.valid_from = 200;
    dkv_case_plan(&f.dense);
    lay_out(&f, &choice);
    run(&f.item, 1);
    assert_right(&f); /* pages before 200 are null */
    set_entry(&f, 13, 0);
    run(&f.item, 1);
    assert_refused(&f, "entry 13", "null entry");
    drop(&f);
}

static void a_bad_block_leaves_its_neighbours_answered(void **state)
{
    (void)state;
    struct fixture f[5];
    struct dkv_item items[5];
    for (int i = 0; i < 5; i++) {
        make(&f[i], llama(700 + 300 * (uint64_t)i), "8", 20 + (uint64_t)i);
        if (i == 2)
            dkv_case_set(&f[i].dense, DKV_KEY, 0, 50, 1, NAN);
        lay_out(&f[i], &on_device);
        items[i] = f[i].item;
    }
    run(items, 5);
    for (int i = 0; i < 5; i++) {
        f[i].item = items[i];
        if (i == 2)
            assert_refused(&f[i], "key", "token 50");
        else
            assert_right(&f[i]);
        drop(&f[i]);
    }
}

/* ---- sizes ---- */

static void five_hundred_and_twelve_rows_of_512(void **state)
{
    (void)state;
    struct fixture f;
    make(&f,
         (struct dkv_shape){.q_heads = 16,
                            .kv_heads = 1,
                            .head_dim = 512,
                            .q_rows = 32,
                            .n_tokens = 5000,
                            .q_dtype = DKV_FP16},
         "32", 30);
    lay_out(&f, &on_device);
    run(&f.item, 1);
    assert_right(&f);
    drop(&f);
}

static void a_long_block(uint64_t n)
{
    struct fixture f;
    make(&f,
         (struct dkv_shape){.q_heads = 1,
                            .kv_heads = 1,
                            .head_dim = 8,
                            .q_rows = 4,
                            .n_tokens = n,
                            .q_dtype = DKV_BF16},
         "4", n);
    lay_out(&f, &on_device);
    run(&f.item, 1);
    assert_right(&f);
    drop(&f);
}

static void blocks_of_up_to_two_million_tokens(void **state)
{
    (void)state;
    a_long_block(65537);
    a_long_block(500001);
    a_long_block(DKV_TOKENS_MAX);
}

/* Long enough for the fast scorer to compute some logits twice, and run often enough for thread
 * blocks to meet in many orders: none may show, nor may one of them wait for ever. */
static void a_long_block_gives_the_same_bits_every_time(void **state)
{
    (void)state;
    struct fixture f;
    make(&f, llama(131072), "8", 31);
    lay_out(&f, &on_device);
    run(&f.item, 1);
    assert_right(&f);
    const size_t n_scores = 2 * f.dense.block.n_tokens * sizeof(float);
    const size_t n_keep = 2 * f.laid.plan.keep_tokens * sizeof(int32_t);
    float *scores = malloc(n_scores), *first_scores = f.item.scores_out;
    int32_t *keep = malloc(n_keep);
    memcpy(scores, f.item.scores_out, n_scores);
    memcpy(keep, f.item.keep_out, n_keep);
    for (int i = 0; i < 1000; i++) {
        f.item.scores_out = i % 50 == 0 ? first_scores : NULL; /* copying them takes longest */
        run(&f.item, 1);
        assert_memory_equal(keep, f.item.keep_out, n_keep);
        if (f.item.scores_out != NULL)
            assert_memory_equal(scores, f.item.scores_out, n_scores);
    }
    f.item.scores_out = first_scores;
    free(scores);
    free(keep);
    drop(&f);
}

static void among_equals_the_lower_index_is_kept(void **state)
{
    (void)state;
    const uint64_t sizes[] = {900, 5000, 40000, 131072};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        struct fixture f;
        const uint64_t n = sizes[s];
        make(&f,
             (struct dkv_shape){.q_heads = 2,
                                .kv_heads = 1,
                                .head_dim = 16,
                                .q_rows = 8,
                                .n_tokens = n,
                                .q_dtype = DKV_BF16},
             "8", 40);
        for (uint64_t t = 0; t < n; t++)
            for (uint64_t e = 0; e < 16; e++)
                dkv_case_set(&f.dense, DKV_VALUE, 0, t, e, 1);
        lay_out(&f, &on_device);
        run(&f.item, 1);
        const uint64_t k = f.laid.plan.keep_tokens;
        for (uint64_t i = 0; i < n; i++)
            assert_true(f.item.scores_out[i] == 0);
        for (uint64_t i = 0; i < k; i++)
            assert_int_equal(f.item.keep_out[i], i < k - 8 ? i : n - k + i);
        drop(&f);
    }
}

/* Lengths that are no multiple of four, with the last tokens unprotected and no scores asked for.
 */
static void the_last_tokens_of_any_length_are_candidates(void **state)
{
    (void)state;
    const uint64_t sizes[] = {1021, 1022, 1023, 4099, 40001};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        struct fixture f;
        const uint64_t n = sizes[s];
        make(&f,
             (struct dkv_shape){.q_heads = 2,
                                .kv_heads = 1,
                                .head_dim = 16,
                                .q_rows = 8,
                                .n_tokens = n,
                                .q_dtype = DKV_BF16},
             "8", 41);
        dkv_case_param(&f.dense, "recent", "0");
        dkv_case_plan(&f.dense);
        for (uint64_t t = 0; t < n; t++)
            for (uint64_t e = 0; e < 16; e++)
                dkv_case_set(&f.dense, DKV_VALUE, 0, t, e, t == n - 1 ? 5 : 1);
        lay_out(&f, &on_device);
        float *scores = f.item.scores_out;
        f.item.scores_out = NULL;
        run(&f.item, 1);
        f.item.scores_out = scores;
        const uint64_t k = f.laid.plan.keep_tokens;
        for (uint64_t i = 1; i <= 6; i++) /* those that the last one's score is pooled into */
            assert_int_equal(f.item.keep_out[k - i], n - i);
        drop(&f);
    }
}

/* Partial results and scores of a layer of 131,072 tokens share their memory. */
static void a_long_layer_needs_less_than_8_7_mb_of_scratch(void **state)
{
    (void)state;
    const enum dkv_dtype caches[] = {DKV_BF16, DKV_F8_E4M3};
    for (int i = 0; i < 2; i++) {
        struct fixture f;
        struct dkv_engine_info info;
        struct dkv_shape shape = llama(131072);
        shape.q_heads = 32;
        shape.kv_heads = 8;
        shape.kv_dtype = caches[i];
        dkv_case_init(&f.dense, shape); /* zeros */
        dkv_case_plan(&f.dense);
        lay_out(&f, &on_device);
        run(&f.item, 1);
        cuda.ops->info(cuda.engine, &info);
        assert_int_equal(f.item.status, DKV_OK);
        assert_true(f.item.scores_out[0] == 0);
        if (info.backend[strlen(info.backend) - 2] == '9' && info.scratch_bytes > 8700000)
            fail_msg("%s: %.1f MB", dkv_dtype_name(caches[i]), (double)info.scratch_bytes / 1e6);
        drop(&f);
    }
}

static void one_token(void **state)
{
    (void)state;
    struct fixture f;
    make(&f, llama(1), "8", 50);
    lay_out(&f, &on_device);
    run(&f.item, 1);
    assert_int_equal(f.item.status, DKV_OK);
    assert_int_equal(f.item.keep_out[0], 0);
    assert_true(f.item.scores_out[0] == 0);
    drop(&f);
}

/* ---- batches ---- */

static void a_batch_of_128_blocks_gives_the_bits_of_each_alone(void **state)
{
    (void)state;
    enum { N = 128 };
    static struct fixture f[N];
    static struct dkv_item items[N];
    for (int i = 0; i < N; i++) {
        make(&f[i], llama(i % 16 == 3 ? 20000 : 200 + 37 * (uint64_t)i), i % 3 ? "8" : "16",
             100 + (uint64_t)i);
        lay_out(&f[i], &on_device);
        items[i] = f[i].item;
    }
    run(items, N);
    for (int i = 0; i < N; i++) {
        const size_t n_scores = 2 * f[i].dense.block.n_tokens * sizeof(float);
        const size_t n_keep = 2 * f[i].laid.plan.keep_tokens * sizeof(int32_t);
        float *scores = malloc(n_scores);
        int32_t *keep = malloc(n_keep);
        assert_int_equal(items[i].status, DKV_OK);
        memcpy(scores, f[i].item.scores_out, n_scores);
        memcpy(keep, f[i].item.keep_out, n_keep);
        run(&f[i].item, 1);
        assert_memory_equal(scores, f[i].item.scores_out, n_scores);
        assert_memory_equal(keep, f[i].item.keep_out, n_keep);
        free(scores);
        free(keep);
    }
    for (int i = 0; i < N; i++)
        drop(&f[i]);
}

/* More blocks than fit into the scratch at once, so that waves use the same memory one after the
 * other: what one works on, another one's scores may still lie in. A scorer of its own each. */
static void waves_of_a_batch_leave_each_other_alone(void **state)
{
    (void)state;
    enum { KINDS = 3, TIMES = 40, N = KINDS * TIMES };
    const enum dkv_dtype caches[KINDS] = {DKV_F8_E4M3, DKV_BF16, DKV_BF16};
    const char *const windows[KINDS] = {"8", "16", "32"};
    const uint64_t n = 16384;
    static struct fixture f[KINDS];
    static struct dkv_item items[N];
    const size_t n_scores = 2 * n * sizeof(float);
    for (int kind = 0; kind < KINDS; kind++) {
        struct dkv_shape shape = llama(n);
        shape.kv_dtype = caches[kind];
        shape.q_rows = 32;
        make(&f[kind], shape, windows[kind], 80 + (uint64_t)kind);
        lay_out(&f[kind], &on_device);
        run(&f[kind].item, 1);
        assert_right(&f[kind]);
    }
    for (int i = 0; i < N; i++) {
        items[i] = f[i % KINDS].item;
        items[i].scores_out = malloc(n_scores);
        items[i].keep_out = malloc(2 * items[i].plan->keep_tokens * sizeof(int32_t));
    }
    run(items, N);
    for (int i = 0; i < N; i++) {
        const struct dkv_item *alone = &f[i % KINDS].item;
        assert_int_equal(items[i].status, DKV_OK);
        assert_memory_equal(items[i].scores_out, alone->scores_out, n_scores);
        assert_memory_equal(items[i].keep_out, alone->keep_out,
                            2 * alone->plan->keep_tokens * sizeof(int32_t));
        free(items[i].scores_out);
        free(items[i].keep_out);
    }
    for (int kind = 0; kind < KINDS; kind++)
        drop(&f[kind]);
}

static void two_batches_may_be_in_flight(void **state)
{
    (void)state;
    struct fixture f[2];
    struct dkv_error err;
    for (int i = 0; i < 2; i++) {
        struct dkv_layout_choice choice = on_device;
        choice.cache_place = i == 0 ? DKV_PLACE_HOST : DKV_PLACE_DEVICE;
        make(&f[i], llama(9000), "8", 60 + (uint64_t)i);
        lay_out(&f[i], &choice);
        assert_int_equal(cuda.ops->submit(cuda.engine, &f[i].item, 1, &err), DKV_OK);
    }
    assert_int_equal(cuda.ops->submit(cuda.engine, &f[0].item, 1, &err), DKV_E_INTERNAL);
    for (int i = 0; i < 2; i++)
        assert_int_equal(cuda.ops->wait(cuda.engine, &err), DKV_OK);
    for (int i = 0; i < 2; i++) {
        assert_right(&f[i]);
        drop(&f[i]);
    }
}

static void host_tensors_larger_than_staging_go_through_in_pieces(void **state)
{
    (void)state;
    struct fixture f;
    struct dkv_layout_choice choice = on_device;
    struct dkv_scorer small = {.ops = cuda.ops}, kept = cuda;
    const struct dkv_engine_config config = {.max_batch_bytes = 12u << 20};
    struct dkv_error err;
    choice.cache_place = DKV_PLACE_HOST;
    assert_int_equal(small.ops->open(&config, &small.engine, &err), DKV_OK);
    cuda = small;
    make(&f, llama(9000), "8", 70); /* two heads of 4.6 MB, each more than half of a half */
    lay_out(&f, &choice);
    run(&f.item, 1);
    assert_right(&f);
    drop(&f);
    make(&f, llama(30000), "8", 71); /* one head is more than there is */
    lay_out(&f, &choice);
    run(&f.item, 1);
    assert_int_equal(f.item.status, DKV_E_NOMEM);
    drop(&f);
    cuda = kept;
    small.ops->close(small.engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_number_that_is_none_is_located),
        cmocka_unit_test(what_is_not_read_may_be_anything),
        cmocka_unit_test(values_beyond_float32_are_refused),
        cmocka_unit_test(a_bad_page_table_entry_is_named),
        cmocka_unit_test(a_null_page_inside_the_valid_range_is_refused),
        cmocka_unit_test(a_bad_block_leaves_its_neighbours_answered),
        cmocka_unit_test(five_hundred_and_twelve_rows_of_512),
        cmocka_unit_test(blocks_of_up_to_two_million_tokens),
        cmocka_unit_test(a_long_block_gives_the_same_bits_every_time),
        cmocka_unit_test(among_equals_the_lower_index_is_kept),
        cmocka_unit_test(the_last_tokens_of_any_length_are_candidates),
        cmocka_unit_test(a_long_layer_needs_less_than_8_7_mb_of_scratch),
        cmocka_unit_test(one_token),
        cmocka_unit_test(a_batch_of_128_blocks_gives_the_bits_of_each_alone),
        cmocka_unit_test(waves_of_a_batch_leave_each_other_alone),
        cmocka_unit_test(two_batches_may_be_in_flight),
        cmocka_unit_test(host_tensors_larger_than_staging_go_through_in_pieces),
    };
    dkv_gpu_open(&cuda);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cuda.ops->close(cuda.engine);
    return failed;
}
