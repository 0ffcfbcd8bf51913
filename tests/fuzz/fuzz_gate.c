/* The gate over blocks of any form: whatever it accepts is then read through the address rule of
 * proto/block.h, every row of every head, so that a sanitizer sees a plan that allows too much.
 *
 * The input is a list of fields (see take()), then the bytes of the page table; tensors are
 * zeroes in memory of the size that a field gives.
 */
#include "proto/request.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_MAX 65536u
#define ROWS_READ  4096u

struct input {
    const uint8_t *at, *end;
};

/* One number: a byte below 248 is itself; 248 + n is followed by n + 1 bytes, little-endian. Small
 * numbers are likely and every 64-bit number is possible. */
static uint64_t take(struct input *in)
{
    uint64_t value = 0;

    if (in->at == in->end)
        return 0;
    const uint8_t first = *in->at++;
    if (first < 248)
        return first;
    for (unsigned i = 0; i <= first - 248u && in->at < in->end; i++)
        value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

static struct dkv_view take_view(struct input *in, const void *memory)
{
    struct dkv_view view = {.base = memory};

    view.bytes = take(in) % (MEMORY_MAX + 1);
    view.offset = take(in);
    view.page_stride = (int64_t)take(in);
    view.token_stride = (int64_t)take(in);
    view.head_stride = (int64_t)take(in);
    view.dtype = (enum dkv_dtype)(take(in) % 7);
    view.scale = (float)take(in);
    return view;
}

/* Each view gets an allocation of exactly its size. */
static void own_memory(struct dkv_view *view)
{
    view->base = calloc(view->bytes > 0 ? view->bytes : 1, 1);
    assert(view->base != NULL);
}

static int64_t entry_at(const struct dkv_page_table *table, uint64_t i)
{
    int64_t wide = 0;
    int32_t narrow;

    if (table->entries == NULL)
        return (int64_t)i;
    if (table->entry_bytes == 8) {
        memcpy(&wide, (const char *)table->entries + i * 8, 8);
    } else {
        memcpy(&narrow, (const char *)table->entries + i * 4, 4);
        wide = narrow;
    }
    return table->mask != 0 ? wide & table->mask : wide;
}

static volatile unsigned sink;

static void read_rows(const struct dkv_view *view, const struct dkv_page_table *table,
                      uint64_t page_tokens, uint64_t heads, uint64_t first, uint64_t tokens,
                      uint64_t dim, uint64_t entry_limit)
{
    const uint64_t page = page_tokens != 0 ? page_tokens : tokens;
    const uint64_t step = heads * tokens / ROWS_READ + 1;
    const uint64_t row_bytes = dim * dkv_dtype_bytes(view->dtype);

    for (uint64_t i = 0; i < heads * tokens; i += step) {
        /* The last row is always read: it is the one that sticks out. */
        const uint64_t row = i + step < heads * tokens ? i : heads * tokens - 1;
        const uint64_t h = row / tokens, t = row % tokens;
        const int64_t entry = page_tokens != 0 ? entry_at(table, t / page) : 0;
        if (t < first || entry < 0 || (page_tokens != 0 && (uint64_t)entry >= entry_limit))
            continue; /* what an engine refuses */
        const unsigned char *bytes =
            (const unsigned char *)view->base + view->offset +
            (page_tokens != 0 ? (uint64_t)entry * (uint64_t)view->page_stride : 0) +
            t % page * (uint64_t)view->token_stride + h * (uint64_t)view->head_stride;
        sink += bytes[0];
        sink += bytes[row_bytes - 1];
    }
}

static void read_block(const struct dkv_block *b, const struct dkv_plan *plan)
{
    const struct dkv_page_table *v_table = b->v_table.entries != NULL ? &b->v_table : &b->table;

    read_rows(&b->query, NULL, 0, b->q_heads, 0, b->q_rows, b->head_dim, 0);
    read_rows(&b->key, &b->table, b->page_tokens, b->kv_heads, b->valid_from, b->n_tokens,
              b->head_dim, plan->k_entry_limit);
    read_rows(&b->value, v_table, b->page_tokens, b->kv_heads, b->valid_from, b->n_tokens,
              plan->v_dim, plan->v_entry_limit);
    assert(plan->group * b->kv_heads == b->q_heads);
    assert(plan->window >= 1 && plan->window + plan->first_row == b->q_rows);
    assert(plan->window <= plan->n_valid && plan->n_valid <= b->n_tokens);
    assert(plan->group * plan->window <= DKV_ROWS_MAX);
    assert(plan->keep_tokens >= 1 && plan->keep_tokens <= plan->n_valid);
    assert(plan->sinks + plan->recent <= plan->keep_tokens);
    assert(plan->keep_all == (plan->keep_tokens == plan->n_valid));
}

static void take_params(struct input *in, struct dkv_params *params)
{
    dkv_params_init(params);
    for (uint64_t n = take(in) % 8; n > 0; n--) {
        const struct dkv_param_info *info = dkv_param_info(
            (enum dkv_param_id)(take(in) % DKV_PARAM_COUNT));
        struct dkv_value value = {.kind = info->kind, .string = "input"};
        value.integer = (int64_t)take(in);
        value.real = (double)value.integer / 64;
        (void)dkv_params_set(params, info->name, value, NULL);
    }
    dkv_params_resolve(params);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct dkv_block block = {0};
    struct dkv_request request = {.blocks = &block, .n_blocks = 1};
    struct dkv_plan plan;
    struct dkv_error err;

    take_params(&in, &request.params);
    block.q_heads = (uint32_t)take(&in);
    block.kv_heads = (uint32_t)take(&in);
    block.head_dim = (uint32_t)take(&in) * 4;
    block.v_dim = (uint32_t)take(&in) * 4;
    block.q_rows = take(&in);
    block.n_tokens = take(&in);
    block.valid_from = take(&in);
    block.query = take_view(&in, NULL);
    block.key = take_view(&in, NULL);
    block.value = take_view(&in, NULL);
    block.page_tokens = (uint32_t)take(&in);
    block.table.entry_bytes = (uint32_t)take(&in);
    block.table.mask = (int64_t)take(&in);
    own_memory(&block.query);
    own_memory(&block.key);
    own_memory(&block.value);
    const size_t table_bytes = (size_t)(in.end - in.at);
    void *entries = malloc(table_bytes > 0 ? table_bytes : 1);
    assert(entries != NULL);
    memcpy(entries, in.at, table_bytes);
    if (table_bytes > 0 && block.table.entry_bytes > 0) {
        block.table.entries = entries;
        block.table.n_entries = table_bytes / block.table.entry_bytes;
    }

    if (dkv_request_validate(&request, &plan, &err) == DKV_OK)
        read_block(&block, &plan);
    else
        assert(err.text[0] != '\0');
    free((void *)block.query.base);
    free((void *)block.key.base);
    free((void *)block.value.base);
    free(entries);
    return 0;
}
