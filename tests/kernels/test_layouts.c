/* Caches of serving engines, read in place.
 *
 * usage: test_layouts [ENGINE]
 *
 * Each row builds the memory of an engine's KV cache from its axes in memory order, writes the
 * valid tokens' rows into it and NaN into every other byte: other blocks, other layers, padding,
 * the null block, the rest of the last page, the tokens before valid_from. The answer must equal
 * that of the same block in dense tensors, bit for bit. Queries lie token by token, [rows][heads]
 * [dim], as engines hold them, with NaN in the rows before the window.
 *
 * Axes: L layer, B block (what the table names), S side (K, V or other buffers), H KV head, N token
 * in the block, C one row, P one row of K followed by one of V. */
#include "tests/support/case.h"
#include "tests/support/engines.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_TOKENS = 75, H = 4, Q_HEADS = 8, ROWS = 11, WINDOW = 8, MAX_BLOCKS = 200 };
static uint32_t head_dim; /* 64, then 256 */

struct layout {
    const char *name;
    const char *axes;
    uint32_t page;       /* tokens of a block */
    uint32_t blocks;     /* blocks in the pool; the table names some of 1 .. blocks-1 */
    uint32_t sides;      /* size of S */
    uint32_t k_at, v_at; /* where K and V are on S */
    uint32_t layers;     /* size of L; the middle one is read */
    uint32_t pad;        /* elements after each block */
    bool contiguous;     /* no table: block `k_at`... of B is the sequence itself */
    uint64_t valid_from;
};

static const struct layout layouts[] = {
    {"vLLM [2,NB,BS,H,D] NHD", "SBNHC", 16, 12, 2, 0, 1, 1, 0, false, 0},
    {"vLLM [2,NB,BS,H,D] HND", "SBHNC", 16, 12, 2, 0, 1, 1, 0, false, 0},
    {"vLLM blocks first NHD", "BSNHC", 16, 12, 2, 0, 1, 1, 0, false, 0},
    {"vLLM blocks first HND", "BSHNC", 16, 12, 2, 0, 1, 1, 0, false, 0},
    {"vLLM packed LBNHC", "BNHP", 16, 12, 1, 0, 0, 1, 0, false, 0},
    {"vLLM packed LBHNC", "BHNP", 16, 12, 1, 0, 0, 1, 0, false, 0},
    {"vLLM cross-layer LBHNC", "LBHNP", 16, 12, 1, 0, 0, 3, 0, false, 0},
    {"vLLM cross-layer LBNHC", "LBNHP", 16, 12, 1, 0, 0, 3, 0, false, 0},
    {"vLLM cross-layer LHBNC", "LHBNP", 16, 12, 1, 0, 0, 3, 0, false, 0},
    {"vLLM cross-layer BLHNC", "BLHNP", 16, 12, 1, 0, 0, 3, 0, false, 0},
    {"vLLM cross-layer BLNHC", "BLNHP", 16, 12, 1, 0, 0, 3, 0, false, 0},
    {"vLLM cross-layer BHLNC", "BHLNP", 16, 12, 1, 0, 0, 3, 0, false, 0},
    {"vLLM padded pages", "BNHP", 16, 12, 1, 0, 0, 1, 96, false, 0},
    {"vLLM packed backing", "BLNHP", 16, 12, 1, 0, 0, 3, 40, false, 0},
    {"vLLM null blocks before valid_from", "BNHP", 16, 12, 1, 0, 0, 1, 0, false, 37},
    {"vLLM block of 32, hybrid 48", "BSNHC", 48, 12, 2, 0, 1, 1, 0, false, 0},
    {"SGLang slots, page 1", "SBHC", 1, 200, 2, 0, 1, 1, 0, false, 0},
    {"SGLang page 8", "SBNHC", 8, 25, 2, 0, 1, 1, 0, false, 0},
    {"SGLang page-major", "BLSNHC", 8, 25, 2, 0, 1, 3, 0, false, 0},
    {"TensorRT-LLM V1, block ids", "BLSHNC", 16, 12, 2, 0, 1, 3, 0, false, 0},
    {"TensorRT-LLM V2, coalesced pool", "BSHNC", 16, 12, 7, 3, 4, 1, 0, false, 0},
    {"transformers dynamic", "SBHNC", N_TOKENS, 2, 2, 0, 1, 1, 0, true, 0},
    {"transformers static", "SBHNC", 128, 2, 2, 0, 1, 1, 0, true, 0},
    {"transformers left-padded", "SBHNC", 128, 2, 2, 0, 1, 1, 0, true, 21},
    {"transformers continuous batching", "SBHC", 1, 150, 2, 1, 0, 1, 0, false, 0},
};
enum { N_LAYOUTS = sizeof(layouts) / sizeof(layouts[0]) };

static const enum dkv_dtype dtypes[] = {DKV_BF16, DKV_FP16, DKV_FP32, DKV_F8_E4M3, DKV_F8_E5M2};
enum { N_DTYPES = 5 };

static struct dkv_scorer scorer;

/* ---- memory from axes ---- */

/* Strides of a layout, in bytes, row-major from its axes. */
struct strides {
    uint64_t layer, block, side, head, token, total;
};

static struct strides strides_of(const struct layout *l, uint64_t element_bytes)
{
    struct strides s = {0};
    uint64_t inner = element_bytes;
    for (size_t i = strlen(l->axes); i-- > 0;) {
        switch (l->axes[i]) {
        case 'C': inner *= head_dim; break;
        case 'P': inner *= 2 * head_dim; break;
        case 'N': s.token = inner, inner *= l->page; break;
        case 'H': s.head = inner, inner *= H; break;
        case 'S': s.side = inner, inner *= l->sides; break;
        case 'L': s.layer = inner, inner *= l->layers; break;
        case 'B':
            inner += l->pad * element_bytes;
            s.block = inner;
            inner *= l->blocks;
            break;
        default: abort();
        }
    }
    s.total = inner;
    return s;
}

static uint64_t base_of(const struct layout *l, const struct strides *s, enum dkv_side side,
                        uint64_t element_bytes)
{
    const bool packed = strchr(l->axes, 'P') != NULL;
    const uint64_t on_side = side == DKV_KEY ? l->k_at : l->v_at;
    return l->layers / 2 * s->layer + on_side * s->side +
           (packed && side == DKV_VALUE ? head_dim * element_bytes : 0);
}

/* ---- the dense block and the same in another memory ---- */

static void make_dense(struct dkv_case *c, enum dkv_dtype dtype, uint64_t valid_from)
{
    struct dkv_random random = {7};
    dkv_case_init(c, (struct dkv_shape){.q_heads = Q_HEADS,
                                        .kv_heads = H,
                                        .head_dim = head_dim,
                                        .q_rows = ROWS,
                                        .n_tokens = N_TOKENS,
                                        .q_dtype = dtype});
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
        dkv_case_fill(c, (enum dkv_side)side, &random, 1);
    dkv_case_param(c, "window", "8");
    dkv_case_param(c, "keep_ratio", "0.3");
    c->block.valid_from = valid_from;
    if (dtype == DKV_F8_E4M3) {
        c->block.key.scale = 0.75f;
        c->block.value.scale = 1.5f;
    }
    dkv_case_plan(c);
}

/* A block whose memory another layout holds. */
struct placed {
    struct dkv_case c; /* owns nothing */
    uint8_t *pool;
    uint8_t *queries;
    uint8_t *tables; /* two tables, each one byte off any alignment */
};

enum { TABLE_BYTES = MAX_BLOCKS * 8 + 1 };

static void set_entry(struct placed *p, int table, size_t i, unsigned entry_bytes, int64_t entry)
{
    const int32_t narrow = (int32_t)entry;
    uint8_t *at = p->tables + table * TABLE_BYTES + 1 + i * entry_bytes;
    if (entry_bytes == 4)
        memcpy(at, &narrow, sizeof(narrow));
    else
        memcpy(at, &entry, sizeof(entry));
}

/* Queries as [rows][heads][dim], rows before the window not a number. */
static void place_queries(struct placed *p, const struct dkv_case *dense)
{
    const uint64_t row_bytes = head_dim * dkv_dtype_bytes(dense->block.query.dtype);
    struct dkv_view *view = &p->c.block.query;
    p->queries = malloc(ROWS * Q_HEADS * row_bytes);
    assert_non_null(p->queries);
    memset(p->queries, 0xff, ROWS * Q_HEADS * row_bytes);
    for (uint64_t t = ROWS - WINDOW; t < ROWS; t++)
        for (uint64_t h = 0; h < Q_HEADS; h++)
            memcpy(p->queries + (t * Q_HEADS + h) * row_bytes,
                   dkv_case_at(dense, DKV_QUERY, h, t, 0), row_bytes);
    view->base = p->queries;
    view->token_stride = (int64_t)(Q_HEADS * row_bytes);
    view->head_stride = (int64_t)row_bytes;
}

static void start_placed(struct placed *p, const struct dkv_case *dense, uint64_t pool_bytes)
{
    *p = (struct placed){.c = *dense};
    p->pool = malloc(pool_bytes);
    p->tables = malloc(2 * TABLE_BYTES);
    assert_true(p->pool != NULL && p->tables != NULL);
    memset(p->pool, 0xff, pool_bytes); /* NaN in every dtype */
    place_queries(p, dense);
    struct dkv_view *views[] = {&p->c.block.key, &p->c.block.value};
    for (int i = 0; i < 2; i++) {
        views[i]->base = p->pool;
        views[i]->bytes = pool_bytes;
    }
}

static void free_placed(struct placed *p)
{
    free(p->pool);
    free(p->queries);
    free(p->tables);
}

static struct dkv_page_table table_of(const struct placed *p, int table, size_t entries,
                                      unsigned entry_bytes)
{
    return (struct dkv_page_table){.entries = p->tables + table * TABLE_BYTES + 1,
                                   .n_entries = entries,
                                   .entry_bytes = entry_bytes};
}

/* ids[i]: distinct blocks of 1 .. blocks-1, shuffled. */
static void pick_blocks(uint32_t blocks, uint32_t *ids)
{
    struct dkv_random random = {11};
    for (uint32_t i = 1; i < blocks; i++)
        ids[i - 1] = i;
    for (uint32_t i = blocks - 1; i-- > 1;) {
        const uint32_t other = (uint32_t)dkv_random_range(&random, 0, i), kept = ids[i];
        ids[i] = ids[other];
        ids[other] = kept;
    }
}

static void place(struct placed *p, const struct layout *l, const struct dkv_case *dense,
                  unsigned entry_bytes)
{
    const uint64_t element = dkv_dtype_bytes(dense->block.key.dtype);
    const struct strides s = strides_of(l, element);
    uint32_t ids[MAX_BLOCKS];
    start_placed(p, dense, s.total);
    pick_blocks(l->blocks, ids);
    if (l->contiguous)
        ids[0] = 1; /* the second member of a batch */
    for (int side = DKV_KEY; side <= DKV_VALUE; side++) {
        struct dkv_view *view = side == DKV_KEY ? &p->c.block.key : &p->c.block.value;
        const uint64_t base = base_of(l, &s, (enum dkv_side)side, element);
        view->offset = base + (l->contiguous ? s.block : 0);
        view->page_stride = (int64_t)s.block;
        view->token_stride = (int64_t)s.token;
        view->head_stride = (int64_t)s.head;
        for (uint64_t t = l->valid_from; t < N_TOKENS; t++)
            for (uint64_t h = 0; h < H; h++)
                memcpy(p->pool + base + ids[t / l->page] * s.block + t % l->page * s.token +
                           h * s.head,
                       dkv_case_at(dense, (enum dkv_side)side, h, t, 0), head_dim * element);
    }
    if (l->contiguous)
        return;
    const size_t entries = (N_TOKENS + l->page - 1) / l->page;
    for (size_t i = 0; i < entries; i++)
        set_entry(p, 0, i, entry_bytes, (i + 1) * l->page <= l->valid_from ? 0 : ids[i]);
    p->c.block.page_tokens = l->page;
    p->c.block.table = table_of(p, 0, entries, entry_bytes);
    p->c.block.table.has_null_entry = true; /* block 0 is the null block */
}

/* ---- comparing ---- */

static void check_same(const struct dkv_case *dense, struct dkv_case *placed, const char *name)
{
    struct dkv_case_answer want, got;
    struct dkv_error err = {0};
    if (dkv_case_try_plan(placed, &err) != DKV_OK)
        fail_msg("%s: the gate refused: %s", name, err.text);
    dkv_case_run(dense, &scorer, &want);
    dkv_case_run(placed, &scorer, &got);
    assert_int_equal(want.status, DKV_OK);
    if (got.status != DKV_OK)
        fail_msg("%s %s: %s", name, dkv_dtype_name(dense->block.key.dtype), got.error.text);
    if (memcmp(want.raw, got.raw, H * N_TOKENS * sizeof(double)) != 0)
        fail_msg("%s %s: scores differ", name, dkv_dtype_name(dense->block.key.dtype));
    assert_memory_equal(want.keep, got.keep, H * dense->plan.keep_tokens * sizeof(int32_t));
    dkv_case_answer_fini(&want);
    dkv_case_answer_fini(&got);
}

static void every_layout_reads_like_dense_tensors(void **state)
{
    (void)state;
    for (int i = 0; i < N_LAYOUTS; i++)
        for (int dtype = 0; dtype < N_DTYPES; dtype++)
            for (unsigned entry_bytes = 4; entry_bytes <= 8; entry_bytes += 4) {
                struct dkv_case dense;
                struct placed p;
                make_dense(&dense, dtypes[dtype], layouts[i].valid_from);
                place(&p, &layouts[i], &dense, entry_bytes);
                check_same(&dense, &p.c, layouts[i].name);
                free_placed(&p);
                dkv_case_fini(&dense);
            }
}

static void a_mask_takes_flag_bits_off_the_entries(void **state)
{
    (void)state;
    for (unsigned entry_bytes = 4; entry_bytes <= 8; entry_bytes += 4) {
        const struct layout *l = &layouts[0];
        struct dkv_case dense;
        struct placed p;
        uint32_t ids[MAX_BLOCKS];
        make_dense(&dense, DKV_BF16, 0);
        place(&p, l, &dense, entry_bytes);
        pick_blocks(l->blocks, ids);
        for (size_t i = 0; i < 5; i++)
            set_entry(&p, 0, i, entry_bytes,
                      (int64_t)ids[i] | (i % 2 ? (int64_t)INT32_MIN : 0x40000000));
        p.c.block.table.mask = 0x00ffffff;
        check_same(&dense, &p.c, "masked entries");
        free_placed(&p);
        dkv_case_fini(&dense);
    }
}

/* TensorRT-LLM V1 offsets: K and V lanes in units of one K or V block, each with its own table, the
 * base moved to the layer. */
static void place_lanes(struct placed *p, const struct dkv_case *dense, int64_t flag)
{
    enum { LAYERS = 3, LAYER = 1, PAGE = 16, BLOCKS = 12, ENTRIES = 5 };
    const uint64_t element = dkv_dtype_bytes(dense->block.key.dtype);
    const uint64_t token = head_dim * element, head = PAGE * token, unit = H * head;
    uint32_t ids[MAX_BLOCKS];
    start_placed(p, dense, (uint64_t)BLOCKS * LAYERS * 2 * unit);
    pick_blocks(BLOCKS, ids);
    for (int lane = 0; lane < 2; lane++) {
        struct dkv_view *view = lane == 0 ? &p->c.block.key : &p->c.block.value;
        view->offset = LAYER * 2 * unit;
        view->page_stride = (int64_t)unit;
        view->token_stride = (int64_t)token;
        view->head_stride = (int64_t)head;
        for (uint64_t i = 0; i < ENTRIES; i++)
            set_entry(p, lane, i, 4,
                      (int64_t)ids[i] * LAYERS * 2 + lane + (lane == 1 && i == 3 ? flag : 0));
        for (uint64_t t = 0; t < N_TOKENS; t++)
            for (uint64_t h = 0; h < H; h++)
                memcpy(p->pool +
                           ((uint64_t)ids[t / PAGE] * LAYERS * 2 + LAYER * 2 + (uint64_t)lane) *
                               unit +
                           h * head + t % PAGE * token,
                       dkv_case_at(dense, lane == 0 ? DKV_KEY : DKV_VALUE, h, t, 0), token);
    }
    p->c.block.page_tokens = PAGE;
    p->c.block.table = table_of(p, 0, ENTRIES, 4);
    p->c.block.v_table = table_of(p, 1, ENTRIES, 4);
}

static void key_and_value_lanes_have_their_own_tables(void **state)
{
    (void)state;
    for (int dtype = 0; dtype < N_DTYPES; dtype++) {
        struct dkv_case dense;
        struct placed p;
        make_dense(&dense, dtypes[dtype], 0);
        place_lanes(&p, &dense, 0);
        check_same(&dense, &p.c, "TensorRT-LLM V1, offset lanes");
        free_placed(&p);
        dkv_case_fini(&dense);
    }
}

static void an_entry_of_the_secondary_pool_is_refused(void **state)
{
    (void)state;
    struct dkv_case dense;
    struct placed p;
    struct dkv_case_answer got;
    make_dense(&dense, DKV_BF16, 0);
    place_lanes(&p, &dense, INT32_MIN);
    dkv_case_plan(&p.c);
    dkv_case_run(&p.c, &scorer, &got);
    assert_int_equal(got.status, DKV_E_INVALID);
    assert_non_null(strstr(got.error.text, "entry 3"));
    dkv_case_answer_fini(&got);
    free_placed(&p);
    dkv_case_fini(&dense);
}

/* MLA: a row is latent | rope, K is the whole row, V its first part; one KV head. DeepSeek's 512 +
 * 64 is above the limit of head_dim, so the construction is tried at 256 + 64. */
static void a_value_may_alias_the_start_of_its_key(void **state)
{
    (void)state;
    enum { PAGE = 16, BLOCKS = 12, K_DIM = 320, V_DIM = 256 };
    for (int dtype = 0; dtype < N_DTYPES; dtype++) {
        const uint64_t element = dkv_dtype_bytes(dtypes[dtype]);
        const uint64_t token = K_DIM * element;
        struct dkv_random random = {9};
        struct dkv_case dense;
        struct placed p;
        struct dkv_case_answer want, got;
        uint32_t ids[MAX_BLOCKS];
        dkv_case_init(&dense, (struct dkv_shape){.q_heads = Q_HEADS,
                                                 .kv_heads = 1,
                                                 .head_dim = K_DIM,
                                                 .v_dim = V_DIM,
                                                 .q_rows = WINDOW,
                                                 .n_tokens = N_TOKENS,
                                                 .q_dtype = dtypes[dtype]});
        dkv_case_fill(&dense, DKV_QUERY, &random, 0.5);
        dkv_case_fill(&dense, DKV_KEY, &random, 1);
        for (uint64_t t = 0; t < N_TOKENS; t++)
            memcpy(dkv_case_at(&dense, DKV_VALUE, 0, t, 0), dkv_case_at(&dense, DKV_KEY, 0, t, 0),
                   V_DIM * element);
        dkv_case_plan(&dense);

        p = (struct placed){.c = dense};
        p.pool = malloc(BLOCKS * PAGE * token);
        p.tables = malloc(2 * TABLE_BYTES);
        assert_true(p.pool != NULL && p.tables != NULL);
        memset(p.pool, 0xff, BLOCKS * PAGE * token);
        pick_blocks(BLOCKS, ids);
        for (uint64_t t = 0; t < N_TOKENS; t++) {
            memcpy(p.pool + (ids[t / PAGE] * PAGE + t % PAGE) * token,
                   dkv_case_at(&dense, DKV_KEY, 0, t, 0), token);
            set_entry(&p, 0, t / PAGE, 4, ids[t / PAGE]);
        }
        struct dkv_view *views[] = {&p.c.block.key, &p.c.block.value};
        for (int i = 0; i < 2; i++) {
            views[i]->base = p.pool;
            views[i]->bytes = BLOCKS * PAGE * token;
            views[i]->page_stride = (int64_t)(PAGE * token);
            views[i]->token_stride = (int64_t)token;
            views[i]->head_stride = 0;
        }
        p.c.block.page_tokens = PAGE;
        p.c.block.table = table_of(&p, 0, (N_TOKENS + PAGE - 1) / PAGE, 4);
        dkv_case_plan(&p.c);
        dkv_case_run(&dense, &scorer, &want);
        dkv_case_run(&p.c, &scorer, &got);
        assert_int_equal(want.status, DKV_OK);
        assert_int_equal(got.status, DKV_OK);
        assert_memory_equal(want.raw, got.raw, N_TOKENS * sizeof(double));
        assert_memory_equal(want.keep, got.keep, dense.plan.keep_tokens * sizeof(int32_t));
        dkv_case_answer_fini(&want);
        dkv_case_answer_fini(&got);
        free_placed(&p);
        dkv_case_fini(&dense);
    }
}

/* One scale per KV head, in a packed fp8 cache: the heads' answers are those of blocks whose single
 * scale is that head's. */
static void scales_may_differ_from_head_to_head(void **state)
{
    (void)state;
    float scales[H] = {0.5f, 1, 3, 0.01f};
    for (int dtype = 3; dtype < N_DTYPES; dtype++) {
        struct dkv_case dense;
        struct placed p;
        struct dkv_case_answer got;
        make_dense(&dense, dtypes[dtype], 0);
        place(&p, &layouts[4], &dense, 4);
        p.c.block.key.head_scales = scales;
        p.c.block.value.head_scales = scales;
        dkv_case_plan(&p.c);
        dkv_case_run(&p.c, &scorer, &got);
        assert_int_equal(got.status, DKV_OK);
        for (int h = 0; h < H; h++) {
            struct dkv_case_answer want;
            dense.block.key.scale = dense.block.value.scale = scales[h];
            dkv_case_run(&dense, &scorer, &want);
            assert_int_equal(want.status, DKV_OK);
            assert_memory_equal(want.raw + h * N_TOKENS, got.raw + h * N_TOKENS,
                                N_TOKENS * sizeof(double));
            dkv_case_answer_fini(&want);
        }
        dkv_case_answer_fini(&got);
        free_placed(&p);
        dkv_case_fini(&dense);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layout_reads_like_dense_tensors),
        cmocka_unit_test(a_mask_takes_flag_bits_off_the_entries),
        cmocka_unit_test(key_and_value_lanes_have_their_own_tables),
        cmocka_unit_test(an_entry_of_the_secondary_pool_is_refused),
        cmocka_unit_test(a_value_may_alias_the_start_of_its_key),
        cmocka_unit_test(scales_may_differ_from_head_to_head),
    };
    scorer = dkv_test_engine_open(dkv_test_engine_name(argc, argv), 2);
    head_dim = 64;
    int failed = cmocka_run_group_tests_name("layouts", tests, NULL, NULL);
    head_dim = 256;
    failed += cmocka_run_group_tests_name("layouts, head_dim 256", tests, NULL, NULL);
    dkv_test_engine_close(&scorer);
    return failed;
}
