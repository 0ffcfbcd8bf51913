/* The gate: what it accepts, what it refuses and how it says so. */
#include "tests/proto/request_fixture.h"

#include <math.h>

/* ---- Shapes, types, scales ------------------------------------------------------------------ */

static void shapes_out_of_range_are_refused(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f), f.block.q_heads = 0;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "q_heads", "0", "1..1024");
    setup(&f), f.block.q_heads = 1025;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "q_heads", "1025", "1..1024");
    setup(&f), f.block.kv_heads = 0;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "kv_heads", "0", "1..8");
    setup(&f), f.block.kv_heads = 16;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "kv_heads", "16", "1..8");
    setup(&f), f.block.kv_heads = 3;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "q_heads", "8", "kv_heads 3");
    setup(&f), f.block.head_dim = 0;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "head_dim", "0", "8..512");
    setup(&f), f.block.head_dim = 100;
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "head_dim", "100", "multiple of 8", "8..512");
    setup(&f), f.block.head_dim = 520;
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "head_dim", "520", "8..512");
    setup(&f), f.block.v_dim = 516;
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "v_dim", "516", "8..512");
    setup(&f), f.block.n_tokens = 0;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "n_tokens", "0", "1..2097152");
    setup(&f), f.block.n_tokens = DKV_TOKENS_MAX + 1;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "n_tokens", "2097153", "1..2097152");
    setup(&f), f.block.q_rows = 0;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "q_rows", "0", "1..2097152");
    setup(&f), f.request.n_blocks = 0;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "n_blocks", "0", "1..4096");
}

static void rows_of_a_group_are_bounded(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    f.block.q_heads = 128;
    f.block.kv_heads = 1;
    f.block.q_rows = 5;
    lay_out(&f.block);
    ASSERT_REFUSED(&f, DKV_E_INVALID, "window", "5 rows of 128", "1..512");
    f.block.q_rows = 4;
    lay_out(&f.block);
    assert_accepted(&f);
}

static void dtypes_are_judged(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f), f.block.query.dtype = DKV_DTYPE_NONE;
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "query", "dtype 0", "BF16");
    setup(&f), f.block.key.dtype = (enum dkv_dtype)99;
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "key", "dtype 99", "F8_E5M2");
    setup(&f), f.block.value.dtype = DKV_FP16;
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "value", "FP16", "BF16");
    setup(&f), f.block.query.dtype = DKV_FP32;
    assert_accepted(&f); /* queries need not be of the cache's type */
    setup(&f), f.block.key.dtype = f.block.value.dtype = DKV_F8_E4M3;
    assert_accepted(&f);
    setup(&f), f.block.query.dtype = DKV_F8_E5M2, set(&f, "p_round", "input");
    ASSERT_REFUSED(&f, DKV_E_UNSUPPORTED, "p_round", "F8_E5M2", "FP32");
}

static void scales_are_finite_and_above_zero_and_for_fp8_only(void **state)
{
    static const float bad[] = {-1, -0.5f, NAN, INFINITY};
    float head_scales[2] = {1, 0};
    struct fixture f;
    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        setup(&f);
        f.block.key.dtype = f.block.value.dtype = DKV_F8_E4M3;
        f.block.value.scale = bad[i];
        ASSERT_REFUSED(&f, DKV_E_INVALID, "value: scale", "finite and above 0");
    }
    setup(&f), f.block.key.dtype = f.block.value.dtype = DKV_F8_E4M3;
    f.block.key.head_scales = head_scales;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key: scale 0 of head 1");
    head_scales[1] = 2;
    assert_accepted(&f);
    setup(&f), f.block.key.scale = 2;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "scale", "BF16");
}

static void sink_logits_are_finite(void **state)
{
    float sinks[8] = {0, 1, -3, 0, 0, 0, 0, 0};
    struct fixture f;
    (void)state;
    setup(&f), f.block.sink_logits = sinks;
    assert_accepted(&f);
    sinks[7] = NAN;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "sink_logits", "query head 7");
}

static void the_block_is_named_when_there_are_several(void **state)
{
    struct dkv_block blocks[3];
    struct dkv_plan plans[3];
    struct fixture f;
    (void)state;
    setup(&f);
    blocks[0] = blocks[1] = blocks[2] = f.block;
    blocks[2].n_tokens = 0;
    f.request.blocks = blocks;
    f.request.n_blocks = 3;
    dkv_params_resolve(&f.request.params);
    assert_int_equal(dkv_request_validate(&f.request, plans, &f.err), DKV_E_INVALID);
    assert_non_null(strstr(f.err.text, "block 2: n_tokens: 0"));
    assert_int_equal(dkv_request_validate(&f.request, plans, NULL), DKV_E_INVALID);
    blocks[2].n_tokens = 500;
    assert_int_equal(dkv_request_validate(&f.request, plans, &f.err), DKV_OK);
    assert_int_equal(plans[2].keep_tokens, 50);
    assert_int_equal(plans[0].keep_tokens, 100);
}

static void parameters_are_judged_too(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f), set(&f, "window", "0");
    ASSERT_REFUSED(&f, DKV_E_INVALID, "window", "0", "1..512");
    setup(&f), set(&f, "keep_ratio", "0.5"), set(&f, "keep_tokens", "5");
    ASSERT_REFUSED(&f, DKV_E_INVALID, "keep_ratio and keep_tokens");
}

/* ---- Views ---------------------------------------------------------------------------------- */

static void a_view_may_end_at_its_last_byte_and_no_further(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f);
    f.block.key.bytes = 2 * 1000 * 64 * 2;
    assert_accepted(&f);
    f.block.key.bytes--;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "256000", "255999");
    f.block.key.bytes++;
    f.block.key.offset = 1;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "256001", "256000");
}

static void a_view_without_memory_is_refused(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f), f.block.value.base = NULL;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "value", "no memory");
}

static void negative_strides_are_refused(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f), f.block.key.token_stride = -128;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "token_stride -128", "negative");
    setup(&f), f.block.query.head_stride = INT64_MIN;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "query", "head_stride");
}

static void an_unknown_place_is_refused(void **state)
{
    struct fixture f;
    (void)state;
    setup(&f), f.block.key.place = (enum dkv_place)5;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "place 5");
}

/* 1000 tokens in pages of 16: 63 entries; a pool of 100 pages. */
static void setup_paged(struct fixture *f)
{
    setup(f);
    f->block.page_tokens = 16;
    f->block.table = (struct dkv_page_table){.entries = memory, .n_entries = 63, .entry_bytes = 4};
    struct dkv_view *views[] = {&f->block.key, &f->block.value};
    for (int i = 0; i < 2; i++) {
        views[i]->token_stride = 2 * 64 * 2;
        views[i]->head_stride = 64 * 2;
        views[i]->page_stride = 16 * 2 * 64 * 2;
        views[i]->bytes = 100 * (uint64_t)views[i]->page_stride;
    }
}

static void a_paged_view_gets_its_entry_limit(void **state)
{
    struct fixture f;
    (void)state;
    setup_paged(&f);
    assert_accepted(&f);
    assert_int_equal(f.plan.k_entry_limit, 100);
    f.block.value.offset = 1; /* now the last page sticks out by a byte */
    assert_accepted(&f);
    assert_int_equal(f.plan.v_entry_limit, 99);
    assert_int_equal(f.plan.k_entry_limit, 100);
    f.block.value.offset = f.block.value.bytes - (uint64_t)f.block.value.page_stride;
    assert_accepted(&f);
    assert_int_equal(f.plan.v_entry_limit, 1);
    f.block.value.offset++;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "value", "page 0");
}

static void a_page_table_is_judged(void **state)
{
    struct fixture f;
    (void)state;
    setup_paged(&f), f.block.table.n_entries = 62;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "n_entries 62", "63");
    setup_paged(&f), f.block.table.entry_bytes = 2;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "entry_bytes 2", "4 nor 8");
    setup_paged(&f), f.block.page_tokens = DKV_PAGE_TOKENS_MAX + 1;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "page_tokens", "65537", "0..65536");
    setup_paged(&f), f.block.table.n_entries = UINT64_MAX;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "n_entries", "overflows");
    setup_paged(&f), f.block.key.page_stride = -1;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "page_stride -1");
    setup_paged(&f);
    f.block.v_table = f.block.table;
    f.block.v_table.n_entries = 1;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "value", "n_entries 1");
}

static void pages_without_a_table_are_counted_exactly(void **state)
{
    struct fixture f;
    (void)state;
    setup_paged(&f);
    f.block.table.entries = NULL;
    f.block.key.bytes = 1000 * 2 * 64 * 2; /* 62 pages and a half: nothing behind token 999 */
    assert_accepted(&f);
    assert_int_equal(f.plan.k_entry_limit, 63);
    f.block.key.bytes--;
    ASSERT_REFUSED(&f, DKV_E_INVALID, "key", "256000", "255999");
}

/* ---- Size arithmetic against 128-bit integers ----------------------------------------------- */

__extension__ typedef unsigned __int128 u128;

static u128 last_byte(const struct dkv_view *v, u128 entry, u128 tokens, u128 heads, u128 row_bytes)
{
    return (u128)v->offset + entry * (u128)v->page_stride + (tokens - 1) * (u128)v->token_stride +
           (heads - 1) * (u128)v->head_stride + row_bytes;
}

static void check_against_oracle(struct fixture *f)
{
    const struct dkv_view *v = &f->block.key;
    const u128 page = f->block.page_tokens;
    const u128 row_bytes = f->block.head_dim * 2u;
    bool fits;
    u128 limit = 0;

    if (v->token_stride < 0 || v->head_stride < 0 || (page != 0 && v->page_stride < 0)) {
        fits = false;
    } else if (page == 0) {
        struct dkv_view flat = *v;
        flat.page_stride = 0;
        fits = last_byte(&flat, 0, f->block.n_tokens, f->block.kv_heads, row_bytes) <= v->bytes;
    } else {
        const u128 end = last_byte(v, 0, page, f->block.kv_heads, row_bytes);
        fits = end <= v->bytes;
        if (fits && v->page_stride != 0)
            limit = (v->bytes - end) / (u128)v->page_stride + 1;
        else if (fits)
            limit = UINT64_MAX;
    }
    assert_int_equal(judge(f) == DKV_OK, fits);
    if (fits && page != 0) {
        assert_true(f->plan.k_entry_limit == (uint64_t)limit);
        if (v->page_stride != 0) { /* the limit is the first entry that is out */
            assert_true(last_byte(v, limit - 1, page, f->block.kv_heads, row_bytes) <= v->bytes);
            assert_true(last_byte(v, limit, page, f->block.kv_heads, row_bytes) > v->bytes);
        }
    }
}

static void size_arithmetic_agrees_with_128_bit_integers(void **state)
{
    static const uint64_t edge[] = {
        0,
        1,
        4095,
        4096,
        4097,
        0x7fffffff,
        0x80000000,
        0x80000001,
        0xffffffff,
        0x100000000,
        0x100000001,
        0x7fffffffffffffff,
        0x8000000000000000,
        0x8000000000000001,
        0xffffffffffffffff,
        256000,
    };
    const size_t n = sizeof(edge) / sizeof(edge[0]);
    struct fixture f;
    (void)state;
    for (unsigned paged = 0; paged < 2; paged++) {
        setup_paged(&f);
        if (!paged)
            f.block.page_tokens = 0;
        for (size_t bytes = 0; bytes < n; bytes++)
            for (size_t offset = 0; offset < n; offset++)
                for (size_t token = 0; token < n; token++)
                    for (size_t other = 0; other < n; other++) {
                        f.block.key.bytes = edge[bytes];
                        f.block.key.offset = edge[offset];
                        f.block.key.token_stride = (int64_t)edge[token];
                        f.block.key.head_stride = 128;
                        f.block.key.page_stride = (int64_t)edge[other];
                        if (!paged)
                            f.block.key.head_stride = (int64_t)edge[other];
                        check_against_oracle(&f);
                    }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_out_of_range_are_refused),
        cmocka_unit_test(rows_of_a_group_are_bounded),
        cmocka_unit_test(dtypes_are_judged),
        cmocka_unit_test(scales_are_finite_and_above_zero_and_for_fp8_only),
        cmocka_unit_test(sink_logits_are_finite),
        cmocka_unit_test(the_block_is_named_when_there_are_several),
        cmocka_unit_test(parameters_are_judged_too),
        cmocka_unit_test(a_view_may_end_at_its_last_byte_and_no_further),
        cmocka_unit_test(a_view_without_memory_is_refused),
        cmocka_unit_test(negative_strides_are_refused),
        cmocka_unit_test(an_unknown_place_is_refused),
        cmocka_unit_test(a_paged_view_gets_its_entry_limit),
        cmocka_unit_test(a_page_table_is_judged),
        cmocka_unit_test(pages_without_a_table_are_counted_exactly),
        cmocka_unit_test(size_arithmetic_agrees_with_128_bit_integers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
