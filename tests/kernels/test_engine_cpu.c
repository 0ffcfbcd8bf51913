/* The CPU engine as a program sees it: threads, batches, and memory that a client writes to
 * meanwhile. That its scores are right is for check_kernels (each operation) and the accuracy tests
 * (whole blocks). */
#include "tests/kernels/engine_cpu_fixture.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* A long block of one head, which threads share, a wide one, short ones, and profiles that take
 * three passes: the bits may depend on none of that. */
static void the_number_of_threads_does_not_show(void **state)
{
    (void)state;
    static const struct dkv_shape shapes[] = {
        {.q_heads = 4,
         .kv_heads = 1,
         .head_dim = 64,
         .q_rows = 8,
         .n_tokens = 20011,
         .q_dtype = DKV_BF16},
        {.q_heads = 6,
         .kv_heads = 3,
         .head_dim = 72,
         .q_rows = 5,
         .n_tokens = 9001,
         .q_dtype = DKV_FP16},
        {.q_heads = 8,
         .kv_heads = 8,
         .head_dim = 32,
         .q_rows = 8,
         .n_tokens = 333,
         .q_dtype = DKV_FP32},
    };
    static const unsigned threads[] = {1, 2, 3, 5};
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        for (int author = 0; author < 2; author++) {
            struct dkv_case c;
            struct answer first = {0};
            make_case(&c, shapes[s], s + 1);
            dkv_case_param(&c, "profile", author ? "author" : "paper");
            dkv_case_plan(&c);
            for (size_t t = 0; t < sizeof(threads) / sizeof(threads[0]); t++) {
                struct dkv_engine *engine = open_engine(threads[t]);
                struct answer a;
                make_answer(&a, &c);
                run(engine, &a.item, 1);
                if (t == 0) {
                    first = a;
                } else {
                    assert_same(&first, &a, &c);
                    free_answer(&a);
                }
                dkv_engine_cpu.close(engine);
            }
            free_answer(&first);
            dkv_case_fini(&c);
        }
    }
}

static void neighbours_in_a_batch_do_not_show(void **state)
{
    (void)state;
    enum { N = 40 };
    struct dkv_case cases[N];
    struct answer alone[N], together[N];
    struct dkv_item items[N];
    struct dkv_engine *engine = open_engine(2);
    for (size_t i = 0; i < N; i++) {
        make_case(&cases[i],
                  (struct dkv_shape){.q_heads = 4,
                                     .kv_heads = 2,
                                     .head_dim = 8u * (1 + (uint32_t)i % 5),
                                     .q_rows = 1 + i % 9,
                                     .n_tokens = 1 + 37 * i,
                                     .q_dtype = DKV_FP32},
                  i);
    }
    for (size_t i = 0; i < N; i++) {
        dkv_case_plan(&cases[i]);
        make_answer(&alone[i], &cases[i]);
        make_answer(&together[i], &cases[i]);
        run(engine, &alone[i].item, 1);
        items[i] = together[i].item;
    }
    run(engine, items, N);
    for (size_t i = 0; i < N; i++) {
        together[i].item = items[i];
        assert_same(&alone[i], &together[i], &cases[i]);
        free_answer(&alone[i]);
        free_answer(&together[i]);
        dkv_case_fini(&cases[i]);
    }
    dkv_engine_cpu.close(engine);
}

static void a_bad_item_does_not_fail_its_neighbours(void **state)
{
    (void)state;
    struct dkv_case good, bad;
    const struct dkv_shape shape = {.q_heads = 4,
                                    .kv_heads = 2,
                                    .head_dim = 16,
                                    .q_rows = 8,
                                    .n_tokens = 300,
                                    .q_dtype = DKV_BF16};
    make_case(&good, shape, 1);
    make_case(&bad, shape, 2);
    dkv_case_set(&bad, DKV_VALUE, 1, 123, 7, NAN);
    dkv_case_plan(&good);
    dkv_case_plan(&bad);
    struct answer a[3];
    struct dkv_item items[3];
    for (int i = 0; i < 3; i++) {
        make_answer(&a[i], i == 1 ? &bad : &good);
        items[i] = a[i].item;
    }
    struct dkv_engine *engine = open_engine(2);
    run(engine, items, 3);
    assert_int_equal(items[0].status, DKV_OK);
    assert_int_equal(items[2].status, DKV_OK);
    assert_int_equal(items[1].status, DKV_E_INVALID);
    assert_string_equal(items[1].error.text, "value: NaN at KV head 1, token 123, element 7");
    dkv_engine_cpu.close(engine);
    for (int i = 0; i < 3; i++)
        free_answer(&a[i]);
    dkv_case_fini(&good);
    dkv_case_fini(&bad);
}

static void the_first_of_several_faults_is_named(void **state)
{
    (void)state;
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 8,
                                 .kv_heads = 4,
                                 .head_dim = 16,
                                 .q_rows = 8,
                                 .n_tokens = 9000,
                                 .q_dtype = DKV_FP32},
              3);
    dkv_case_set(&c, DKV_KEY, 3, 10, 0, INFINITY);
    dkv_case_set(&c, DKV_KEY, 1, 8000, 5, INFINITY);
    dkv_case_set(&c, DKV_VALUE, 1, 20, 5, NAN);
    dkv_case_plan(&c);
    for (unsigned threads = 1; threads <= 3; threads++) {
        struct dkv_engine *engine = open_engine(threads);
        struct answer a;
        make_answer(&a, &c);
        run(engine, &a.item, 1);
        assert_int_equal(a.item.status, DKV_E_INVALID);
        assert_string_equal(a.item.error.text, "key: infinity at KV head 1, token 8000, element 5");
        free_answer(&a);
        dkv_engine_cpu.close(engine);
    }
    dkv_case_fini(&c);
}
/* Shared memory is a client's: it may write NaN and bad table entries whenever it likes. */
struct hostile {
    struct dkv_case *c;
    int32_t *table;
    _Atomic bool stop;
};

static void *write_nonsense(void *arg)
{
    struct hostile *hostile = arg;
    struct dkv_random random = {.state = 99};
    while (!atomic_load(&hostile->stop)) {
        const uint64_t token = dkv_random_u64(&random) % hostile->c->block.n_tokens;
        uint16_t *k = dkv_case_at(hostile->c, DKV_KEY, 0, token, 3);
        uint16_t *v = dkv_case_at(hostile->c, DKV_VALUE, 0, token, 3);
        const uint16_t k_before = *k, v_before = *v;
        const uint64_t page = dkv_random_u64(&random) % 64;
        *(volatile uint16_t *)k = 0x7fc0;
        *(volatile uint16_t *)v = 0xff80;
        *(volatile int32_t *)&hostile->table[page] = -7;
        for (unsigned wait = (unsigned)dkv_random_u64(&random) % 20000; wait > 0; wait--)
            __asm__ volatile("" ::: "memory");
        *(volatile uint16_t *)k = k_before;
        *(volatile uint16_t *)v = v_before;
        *(volatile int32_t *)&hostile->table[page] = (int32_t)page;
        for (unsigned wait = (unsigned)dkv_random_u64(&random) % 60000; wait > 0; wait--)
            __asm__ volatile("" ::: "memory");
    }
    return NULL;
}

static void a_client_that_writes_meanwhile_spoils_only_its_own_answer(void **state)
{
    (void)state;
    enum { PAGES = 64, PAGE = 128 };
    struct dkv_case c;
    int32_t table[PAGES];
    make_case(&c,
              (struct dkv_shape){.q_heads = 4,
                                 .kv_heads = 1,
                                 .head_dim = 32,
                                 .q_rows = 8,
                                 .n_tokens = PAGES * PAGE,
                                 .q_dtype = DKV_BF16},
              8);
    for (int i = 0; i < PAGES; i++)
        table[i] = i;
    c.block.page_tokens = PAGE;
    c.block.table = (struct dkv_page_table){.entries = table, .n_entries = PAGES, .entry_bytes = 4};
    c.block.key.page_stride = PAGE * c.block.key.token_stride;
    c.block.value.page_stride = PAGE * c.block.value.token_stride;
    dkv_case_plan(&c);
    struct hostile hostile = {.c = &c, .table = table};
    pthread_t thread;
    struct dkv_engine *engine = open_engine(2);
    struct answer a;
    make_answer(&a, &c);
    assert_int_equal(pthread_create(&thread, NULL, write_nonsense, &hostile), 0);
    unsigned refused = 0;
    for (int i = 0; i < 300; i++) {
        run(engine, &a.item, 1);
        if (a.item.status != DKV_OK) {
            assert_int_equal(a.item.status, DKV_E_INVALID);
            refused++;
        }
    }
    atomic_store(&hostile.stop, true);
    pthread_join(thread, NULL);
    print_message("%u of 300 batches met the nonsense\n", refused);
    run(engine, &a.item, 1);
    assert_int_equal(a.item.status, DKV_OK);
    free_answer(&a);
    dkv_engine_cpu.close(engine);
    dkv_case_fini(&c);
}
static void device_memory_is_refused(void **state)
{
    (void)state;
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 1,
                                 .kv_heads = 1,
                                 .head_dim = 8,
                                 .q_rows = 1,
                                 .n_tokens = 50,
                                 .q_dtype = DKV_FP32},
              6);
    dkv_case_plan(&c);
    c.block.key.place = DKV_PLACE_DEVICE;
    struct dkv_engine *engine = open_engine(1);
    struct answer a;
    make_answer(&a, &c);
    run(engine, &a.item, 1);
    assert_int_equal(a.item.status, DKV_E_UNSUPPORTED);
    free_answer(&a);
    dkv_engine_cpu.close(engine);
    dkv_case_fini(&c);
}

static void engines_are_found_by_name(void **state)
{
    (void)state;
    const struct dkv_engine_ops *ops = NULL;
    struct dkv_error err = {0};
    int device = -1;
    assert_int_equal(dkv_engine_find("cpu", &ops, &device, &err), DKV_OK);
    assert_ptr_equal(ops, &dkv_engine_cpu);
    static const char *const bad[] = {"",        "gpu",        "cuda:", "cuda:x",
                                      "cuda:-1", "cuda:99999", "cpu0"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char quoted[32];
        snprintf(quoted, sizeof(quoted), "'%s'", bad[i]);
        assert_int_equal(dkv_engine_find(bad[i], &ops, &device, &err), DKV_E_INVALID);
        assert_non_null(strstr(err.text, quoted));
    }
}

static void the_mask_lowers_the_variant(void **state)
{
    (void)state;
    struct dkv_engine_info info;
    dkv_engine_cpu_mask(0);
    struct dkv_engine *engine = open_engine(1);
    dkv_engine_cpu.info(engine, &info);
    assert_string_equal(info.backend, "cpu/scalar");
    assert_int_equal(info.threads, 1);
    dkv_engine_cpu.close(engine);
    dkv_engine_cpu_mask(UINT32_MAX >> 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_number_of_threads_does_not_show),
        cmocka_unit_test(neighbours_in_a_batch_do_not_show),
        cmocka_unit_test(a_bad_item_does_not_fail_its_neighbours),
        cmocka_unit_test(the_first_of_several_faults_is_named),
        cmocka_unit_test(a_client_that_writes_meanwhile_spoils_only_its_own_answer),
        cmocka_unit_test(device_memory_is_refused),
        cmocka_unit_test(engines_are_found_by_name),
        cmocka_unit_test(the_mask_lowers_the_variant),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
