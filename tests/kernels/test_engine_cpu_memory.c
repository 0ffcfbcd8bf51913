/* What the CPU engine allocates, at a million tokens. */
#include "tests/kernels/engine_cpu_fixture.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* ---- allocation counter: the linker sends the engine's calls here (--wrap) ---- */

static _Atomic size_t heap_now, heap_peak, heap_calls;

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void __real_free(void *memory);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
void __wrap_free(void *memory);
size_t malloc_usable_size(void *memory);

static void *count(void *memory)
{
    const size_t now = atomic_fetch_add(&heap_now, malloc_usable_size(memory)) +
                       malloc_usable_size(memory);
    atomic_fetch_add(&heap_calls, 1);
    if (now > atomic_load(&heap_peak))
        atomic_store(&heap_peak, now);
    return memory;
}

void *__wrap_malloc(size_t bytes)
{
    return count(__real_malloc(bytes));
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    return count(__real_calloc(n, bytes));
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return count(__real_aligned_alloc(alignment, bytes));
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    atomic_fetch_sub(&heap_now, malloc_usable_size(memory));
    return count(__real_realloc(memory, bytes));
}

void __wrap_free(void *memory)
{
    atomic_fetch_sub(&heap_now, malloc_usable_size(memory));
    __real_free(memory);
}

/* ---- the test ---- */

/* A million tokens that all live in a few pages: the table makes the block long, not the memory. */
static void a_million_tokens_need_less_than_8_mib(void **state)
{
    (void)state;
    enum { PAGE = 4096, PAGES = 3, TOKENS = 1u << 20 };
    struct dkv_case c;
    make_case(&c,
              (struct dkv_shape){.q_heads = 8,
                                 .kv_heads = 2,
                                 .head_dim = 128,
                                 .q_rows = 8,
                                 .n_tokens = PAGES * PAGE,
                                 .q_dtype = DKV_BF16},
              5);
    int32_t *table = calloc(TOKENS / PAGE, sizeof(*table));
    for (int i = 0; i < TOKENS / PAGE; i++)
        table[i] = (i * 7) % PAGES;
    c.block.n_tokens = TOKENS;
    c.block.page_tokens = PAGE;
    c.block.table = (struct dkv_page_table){
        .entries = table, .n_entries = TOKENS / PAGE, .entry_bytes = sizeof(*table)};
    c.block.key.page_stride = PAGE * c.block.key.token_stride;
    c.block.value.page_stride = PAGE * c.block.value.token_stride;
    dkv_case_param(&c, "keep_tokens", "1000");
    dkv_case_plan(&c);
    struct answer a;
    make_answer(&a, &c);
    a.item.scores_out = NULL;
    for (unsigned threads = 1; threads <= 4; threads *= 2) {
        const size_t before = atomic_load(&heap_now);
        atomic_store(&heap_peak, before);
        struct dkv_engine *engine = open_engine(threads);
        run(engine, &a.item, 1);
        assert_int_equal(a.item.status, DKV_OK);
        struct dkv_engine_info info;
        dkv_engine_cpu.info(engine, &info);
        const size_t used = atomic_load(&heap_peak) - before;
        print_message("%u threads: %.2f MiB allocated at the peak, %.2f reported\n", threads,
                      (double)used / 1048576, (double)info.scratch_peak_bytes / 1048576);
        assert_true(used < 8u << 20);
        assert_true(info.scratch_peak_bytes >= used - used / 16); /* nothing is hidden */
        const size_t calls = atomic_load(&heap_calls);
        run(engine, &a.item, 1);
        assert_int_equal(atomic_load(&heap_calls), calls); /* and nothing is allocated again */
        dkv_engine_cpu.close(engine);
        assert_int_equal(atomic_load(&heap_now), before);
    }
    free_answer(&a);
    free(table);
    dkv_case_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_million_tokens_need_less_than_8_mib),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
