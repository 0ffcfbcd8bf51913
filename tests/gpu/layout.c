/* Lays out blocks; see layout.h. The page table is a random permutation of the pages of a cache
 * that is a little larger than the block needs; page 0 stays nobody's. */
#include "tests/gpu/layout.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUERY, KEY, VALUE, TABLE };

static void *must(void *memory)
{
    if (memory == NULL) {
        fputs("tests: out of memory\n", stderr);
        abort();
    }
    return memory;
}

static void must_cuda(cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "tests: %s\n", cudaGetErrorString(error));
        abort();
    }
}

static bool is_paged(enum dkv_layout layout)
{
    return layout >= DKV_LAYOUT_PAGE_TOKENS;
}

static bool is_packed(enum dkv_layout layout)
{
    return layout == DKV_LAYOUT_PACKED || layout == DKV_LAYOUT_PAGE_PACKED;
}

void dkv_layout_choose(struct dkv_layout_choice *choice_out, const struct dkv_case *c,
                       struct dkv_random *random)
{
    static const uint32_t pages[] = {2, 3, 16, 16, 32, 48, 64, 256};
    static const uint32_t paddings[] = {0, 0, 0, 16, 1};
    const uint32_t element = (uint32_t)dkv_dtype_bytes(c->block.key.dtype);
    const uint32_t padding = paddings[dkv_random_range(random, 0, 4)];
    *choice_out = (struct dkv_layout_choice){
        .layout = (enum dkv_layout)dkv_random_range(random, 0, DKV_LAYOUTS - 1),
        .page_tokens = pages[dkv_random_range(random, 0, 7)],
        .entry_bytes = dkv_random_once_in(random, 3) ? 8 : 4,
        .top_bits = dkv_random_once_in(random, 4),
        .null_pages = dkv_random_once_in(random, 2),
        .row_padding = padding == 1 ? element : padding,
        .query_place = (enum dkv_place)dkv_random_range(random, 0, 1),
        .cache_place = dkv_random_once_in(random, 4) ? DKV_PLACE_HOST : DKV_PLACE_DEVICE,
        .table_place = (enum dkv_place)dkv_random_range(random, 0, 1),
    };
}

/* Fills the view's numbers; returns the bytes of the memory behind it. */
static uint64_t shape_view(struct dkv_view *view, const struct dkv_layout_choice *choice,
                           uint64_t heads, uint64_t pages, uint64_t page_tokens, uint64_t row_bytes)
{
    const uint64_t token = heads * row_bytes;
    switch (choice->layout) {
    case DKV_LAYOUT_HEADS:
        view->token_stride = (int64_t)row_bytes;
        view->head_stride = (int64_t)(row_bytes * page_tokens);
        break;
    case DKV_LAYOUT_PAGE_HEADS:
        view->token_stride = (int64_t)row_bytes;
        view->head_stride = (int64_t)(row_bytes * page_tokens);
        view->page_stride = (int64_t)(token * page_tokens);
        break;
    default:
        view->token_stride = (int64_t)token;
        view->head_stride = (int64_t)row_bytes;
        view->page_stride = (int64_t)(token * page_tokens);
        break;
    }
    return token * page_tokens * pages;
}

/* Where a row starts in host memory, by the address rule. */
static unsigned char *row_at(const struct dkv_laid *laid, int side, const uint64_t *pages,
                             uint64_t head, uint64_t token)
{
    const struct dkv_view *view = side == QUERY ? &laid->block.query
                                  : side == KEY ? &laid->block.key
                                                : &laid->block.value;
    const int memory = side == VALUE && laid->host[VALUE] == NULL ? KEY : side;
    unsigned char *at = (unsigned char *)laid->host[memory] + view->offset +
                        head * (uint64_t)view->head_stride;
    const uint64_t page_tokens = side == QUERY ? 0 : laid->block.page_tokens;
    if (page_tokens == 0)
        return at + token * (uint64_t)view->token_stride;
    return at + pages[token / page_tokens] * (uint64_t)view->page_stride +
           token % page_tokens * (uint64_t)view->token_stride;
}

static void shuffle(uint64_t *values, uint64_t n, struct dkv_random *random)
{
    for (uint64_t i = n; i > 1; i--) {
        const uint64_t j = dkv_random_range(random, 0, i - 1);
        const uint64_t kept = values[i - 1];
        values[i - 1] = values[j];
        values[j] = kept;
    }
}

static void make_table(struct dkv_laid *laid, const struct dkv_layout_choice *choice,
                       const uint64_t *pages, uint64_t n_pages)
{
    struct dkv_page_table *table = &laid->block.table;
    laid->bytes[TABLE] = n_pages * choice->entry_bytes;
    laid->host[TABLE] = must(malloc(laid->bytes[TABLE]));
    *table = (struct dkv_page_table){
        .n_entries = n_pages,
        .entry_bytes = choice->entry_bytes,
        .place = choice->table_place,
        .mask = choice->top_bits ? 0x00ffffff : 0,
        .has_null_entry = choice->null_pages,
    };
    for (uint64_t i = 0; i < n_pages; i++) {
        const bool freed = (i + 1) * laid->block.page_tokens <= laid->block.valid_from;
        int64_t entry = (int64_t)pages[i] | (choice->top_bits ? 0x40000000 : 0);
        if (freed && choice->null_pages)
            entry = 0;
        const int32_t narrow = (int32_t)entry;
        if (choice->entry_bytes == sizeof(entry))
            ((int64_t *)laid->host[TABLE])[i] = entry;
        else
            ((int32_t *)laid->host[TABLE])[i] = narrow;
    }
}

void dkv_layout_update(struct dkv_laid *laid, int i)
{
    if (laid->device[i] != NULL)
        must_cuda(
            cudaMemcpy(laid->device[i], laid->host[i], laid->bytes[i], cudaMemcpyHostToDevice));
}

static const void *place(struct dkv_laid *laid, int i, enum dkv_place where)
{
    if (where == DKV_PLACE_HOST)
        return laid->host[i];
    must_cuda(cudaMalloc(&laid->device[i], laid->bytes[i]));
    dkv_layout_update(laid, i);
    return laid->device[i];
}

static void make_memory(struct dkv_laid *laid, const struct dkv_case *c,
                        const struct dkv_layout_choice *choice, const uint64_t *pages,
                        uint64_t n_pages, uint64_t page_tokens)
{
    struct dkv_block *block = &laid->block;
    const uint64_t element = dkv_dtype_bytes(block->key.dtype);
    const uint64_t k_bytes = block->head_dim * element;
    const uint64_t v_bytes = c->plan.v_dim * element;
    const bool packed = is_packed(choice->layout);
    const uint64_t k_row = k_bytes + (packed ? v_bytes : 0) + choice->row_padding;
    const uint64_t v_row = packed ? k_row : v_bytes + choice->row_padding;
    laid->bytes[KEY] = shape_view(&block->key, choice, block->kv_heads, n_pages, page_tokens,
                                  k_row);
    laid->bytes[VALUE] = shape_view(&block->value, choice, block->kv_heads, n_pages, page_tokens,
                                    v_row);
    laid->host[KEY] = must(malloc(laid->bytes[KEY]));
    memset(laid->host[KEY], 0xff, laid->bytes[KEY]);
    if (!packed) {
        laid->host[VALUE] = must(malloc(laid->bytes[VALUE]));
        memset(laid->host[VALUE], 0xff, laid->bytes[VALUE]);
    }
    block->value.offset = packed ? k_bytes : 0;
    for (uint64_t h = 0; h < block->kv_heads; h++)
        for (uint64_t t = block->valid_from; t < block->n_tokens; t++) {
            memcpy(row_at(laid, KEY, pages, h, t), dkv_case_at(c, DKV_KEY, h, t, 0), k_bytes);
            memcpy(row_at(laid, VALUE, pages, h, t), dkv_case_at(c, DKV_VALUE, h, t, 0), v_bytes);
        }
}

static void make_query(struct dkv_laid *laid, const struct dkv_case *c,
                       const struct dkv_layout_choice *choice)
{
    struct dkv_block *block = &laid->block;
    const uint64_t bytes = block->head_dim * dkv_dtype_bytes(block->query.dtype);
    const bool by_rows = choice->layout != DKV_LAYOUT_HEADS;
    block->query.token_stride = (int64_t)(by_rows ? bytes * block->q_heads : bytes);
    block->query.head_stride = (int64_t)(by_rows ? bytes : bytes * block->q_rows);
    laid->bytes[QUERY] = bytes * block->q_heads * block->q_rows;
    laid->host[QUERY] = must(malloc(laid->bytes[QUERY]));
    for (uint64_t h = 0; h < block->q_heads; h++)
        for (uint64_t t = 0; t < block->q_rows; t++)
            memcpy(row_at(laid, QUERY, NULL, h, t), dkv_case_at(c, DKV_QUERY, h, t, 0), bytes);
}

void dkv_layout_make(struct dkv_laid *laid_out, const struct dkv_case *c,
                     const struct dkv_layout_choice *choice, struct dkv_random *random)
{
    struct dkv_laid *laid = laid_out;
    *laid = (struct dkv_laid){.block = c->block};
    struct dkv_block *block = &laid->block;
    const bool paged = is_paged(choice->layout);
    const uint64_t page_tokens = !paged                               ? block->n_tokens
                                 : choice->layout == DKV_LAYOUT_SLOTS ? 1
                                                                      : choice->page_tokens;
    const uint64_t used = (block->n_tokens - 1) / page_tokens + 1;
    const uint64_t n_pages = paged ? used + 1 + used / 4 : 1;
    uint64_t *pages = must(calloc(n_pages, sizeof(*pages)));
    for (uint64_t i = 0; i + 1 < n_pages; i++)
        pages[i] = i + 1;
    if (paged)
        shuffle(pages, n_pages - 1, random);
    block->page_tokens = paged ? (uint32_t)page_tokens : 0;
    make_memory(laid, c, choice, pages, n_pages, page_tokens);
    make_query(laid, c, choice);

    block->query.base = place(laid, QUERY, choice->query_place);
    block->query.place = choice->query_place;
    block->query.bytes = laid->bytes[QUERY];
    block->key.base = place(laid, KEY, choice->cache_place);
    block->value.base = laid->host[VALUE] != NULL ? place(laid, VALUE, choice->cache_place)
                                                  : block->key.base;
    block->key.place = block->value.place = choice->cache_place;
    block->key.bytes = laid->bytes[KEY];
    block->value.bytes = laid->host[VALUE] != NULL ? laid->bytes[VALUE] : laid->bytes[KEY];
    if (paged) {
        make_table(laid, choice, pages, used);
        block->table.entries = place(laid, TABLE, choice->table_place);
    }
    free(pages);

    const struct dkv_request request = {
        .params = c->params, .blocks = block, .n_blocks = 1, .want_scores = true};
    struct dkv_error err;
    if (dkv_request_validate(&request, &laid->plan, &err) != DKV_OK) {
        fprintf(stderr, "tests: the gate refused a layout: %s\n", err.text);
        abort();
    }
}

void dkv_layout_fini(struct dkv_laid *laid)
{
    for (int i = QUERY; i <= TABLE; i++) {
        free(laid->host[i]);
        if (laid->device[i] != NULL)
            must_cuda(cudaFree(laid->device[i]));
    }
    *laid = (struct dkv_laid){0};
}
