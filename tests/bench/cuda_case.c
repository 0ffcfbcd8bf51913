/* The tensors of bench_cuda's cases: contiguous, paged, or on the host. */
#include "tests/bench/cuda_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/bench/bench_kernels.h"

enum { MAX_SETS = 24 };

/* Tokens of block i: the mixed batch has 1K, 2K, .. 64K in turn, short ones more often. */
static uint32_t tokens_of(const struct bench_shape *shape, unsigned i)
{
    static const uint32_t mixed[] = {1024,  2048, 4096, 1024,  8192, 2048,
                                     16384, 4096, 1024, 32768, 8192, 65536};
    return shape->n_tokens != 0 ? shape->n_tokens : mixed[i % (sizeof(mixed) / sizeof(mixed[0]))];
}

static void describe(const struct bench *bench, const struct bench_shape *shape,
                     struct bench_set *set)
{
    const uint64_t element = dkv_dtype_bytes(shape->dtype);
    const uint64_t row = shape->head_dim * element;
    unsigned char *cache = set->host_cache != NULL ? set->host_cache : set->cache;
    unsigned char *query = set->query;
    for (unsigned i = 0; i < shape->n_blocks; i++) {
        const uint64_t n = tokens_of(shape, i);
        const uint64_t side = n * shape->kv_heads * row;
        const uint64_t q_bytes = (uint64_t)shape->q_heads * shape->window * shape->head_dim * 2;
        struct dkv_block *block = &set->blocks[i];
        *block = (struct dkv_block){
            .q_heads = shape->q_heads,
            .kv_heads = shape->kv_heads,
            .head_dim = shape->head_dim,
            .q_rows = shape->window,
            .n_tokens = n,
            .query = dkv_view_dense(query, q_bytes, DKV_BF16, shape->window, shape->head_dim),
            .key = dkv_view_dense(cache, side, shape->dtype, n, shape->head_dim),
            .value = dkv_view_dense(cache + side, side, shape->dtype, n, shape->head_dim),
        };
        block->query.place = DKV_PLACE_DEVICE;
        block->key.place = block->value.place = shape->layout == ON_HOST ? DKV_PLACE_HOST
                                                                         : DKV_PLACE_DEVICE;
        if (shape->layout == PAGE16_PACKED || shape->layout == PAGE1_SLOTS) {
            const bool packed = shape->layout == PAGE16_PACKED;
            struct dkv_view *views[] = {&block->key, &block->value};
            block->page_tokens = packed ? 16 : 1;
            block->table = (struct dkv_page_table){.entries = set->table,
                                                   .n_entries = n / block->page_tokens,
                                                   .entry_bytes = 4,
                                                   .place = DKV_PLACE_DEVICE};
            for (int v = 0; v < 2; v++) {
                views[v]->head_stride = (int64_t)(packed ? 2 * row : row);
                views[v]->token_stride = views[v]->head_stride * shape->kv_heads;
                views[v]->page_stride = views[v]->token_stride * block->page_tokens;
                if (packed) {
                    views[v]->base = cache;
                    views[v]->bytes = 2 * side;
                    views[v]->offset = v == 1 ? row : 0;
                }
            }
        }
        cache += 2 * side;
        query += q_bytes;
        const struct dkv_request request = {
            .params = bench->params, .blocks = block, .n_blocks = 1};
        struct dkv_error err;
        if (dkv_request_validate(&request, &set->plans[i], &err) != DKV_OK)
            bench_die(shape->name, err.text);
        set->items[i] = (struct dkv_item){
            .block = block, .params = &bench->params, .plan = &set->plans[i]};
    }
}

/* Keep offsets: items of all sets write to the same host memory, in order of blocks. */
static void place_outputs(struct bench *bench, const struct bench_shape *shape)
{
    size_t total = 0;
    for (unsigned i = 0; i < shape->n_blocks; i++)
        total += bench->sets[0].plans[i].keep_capacity;
    bench->keep = bench_alloc(total * sizeof(int32_t));
    bench->counts = bench_alloc(shape->n_blocks * shape->kv_heads * sizeof(uint32_t));
    for (unsigned s = 0; s < bench->n_sets; s++) {
        int32_t *at = bench->keep;
        for (unsigned i = 0; i < shape->n_blocks; i++) {
            bench->sets[s].items[i].keep_out = at;
            bench->sets[s].items[i].counts_out = bench->counts + (size_t)i * shape->kv_heads;
            at += bench->sets[s].plans[i].keep_capacity;
        }
    }
}

static int32_t *random_table(uint32_t n)
{
    int32_t *table = bench_alloc(n * sizeof(*table));
    uint64_t state = 12345;
    for (uint32_t i = 0; i < n; i++)
        table[i] = (int32_t)i;
    for (uint32_t i = n; i > 1; i--) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t j = (uint32_t)((state >> 33) % i);
        const int32_t kept = table[i - 1];
        table[i - 1] = table[j];
        table[j] = kept;
    }
    return table;
}

static void set_param(struct bench *bench, enum dkv_param_id id, const char *name, const char *text)
{
    struct dkv_error err;
    if (id != DKV_PARAM_COUNT && dkv_params_has(&bench->params, id))
        return;
    if (dkv_params_set_text(&bench->params, name, text, &err) != DKV_OK)
        bench_die("parameters", err.text);
}

/* What the command line says, then what the case has. */
static void set_params(struct bench *bench, const struct bench_shape *shape)
{
    char text[32];
    dkv_params_init(&bench->params);
    for (unsigned i = 0; i < bench->n_given; i++) {
        const char *value = strchr(bench->given[i], '=');
        char name[64];
        snprintf(name, sizeof(name), "%.*s", value != NULL ? (int)(value - bench->given[i]) : 63,
                 bench->given[i]);
        set_param(bench, DKV_PARAM_COUNT, name, value != NULL ? value + 1 : "");
    }
    snprintf(text, sizeof(text), "%u", shape->window);
    set_param(bench, DKV_PARAM_WINDOW, "window", text);
    set_param(bench, DKV_PARAM_KEEP_RATIO, "keep_ratio", "0.05");
    dkv_params_resolve(&bench->params);
}

void bench_sets_make(struct bench *bench, const struct bench_shape *shape)
{
    uint64_t tokens = 0;
    for (unsigned i = 0; i < shape->n_blocks; i++)
        tokens += tokens_of(shape, i);
    set_params(bench, shape);
    bench->cache_bytes = tokens * shape->kv_heads * shape->head_dim * 2 *
                         dkv_dtype_bytes(shape->dtype);
    bench->query_bytes = (size_t)shape->n_blocks * shape->q_heads * shape->window *
                         shape->head_dim * 2;
    bench->n_sets = (unsigned)(3 * bench->l2_bytes / bench->cache_bytes) + 2;
    if (bench->n_sets > MAX_SETS)
        bench->n_sets = MAX_SETS;
    bench->sets = bench_alloc(bench->n_sets * sizeof(*bench->sets));
    for (unsigned s = 0; s < bench->n_sets; s++) {
        struct bench_set *set = &bench->sets[s];
        set->table = NULL;
        set->host_cache = NULL;
        bench_must(cudaMalloc((void **)&set->cache, bench->cache_bytes));
        bench_must(cudaMalloc((void **)&set->query, bench->query_bytes));
        bench_must(bench_fill(set->cache, bench->cache_bytes / dkv_dtype_bytes(shape->dtype),
                              shape->dtype, (uint32_t)time(NULL) + 7 * s));
        bench_must(bench_fill(set->query, bench->query_bytes / 2, DKV_BF16,
                              (uint32_t)time(NULL) + 7 * s + 3));
        if (shape->layout == ON_HOST) { /* pageable, as a caller's is */
            unsigned char *host = bench_alloc(bench->cache_bytes);
            bench_must(cudaMemcpy(host, set->cache, bench->cache_bytes, cudaMemcpyDeviceToHost));
            set->host_cache = host;
        }
        if (shape->layout == PAGE16_PACKED || shape->layout == PAGE1_SLOTS) {
            const uint32_t entries = shape->n_tokens / (shape->layout == PAGE16_PACKED ? 16 : 1);
            int32_t *table = random_table(entries);
            bench_must(cudaMalloc((void **)&set->table, entries * sizeof(*table)));
            bench_must(
                cudaMemcpy(set->table, table, entries * sizeof(*table), cudaMemcpyHostToDevice));
            free(table);
        }
        describe(bench, shape, set);
    }
    place_outputs(bench, shape);
    bench_must(cudaDeviceSynchronize());
}

void bench_sets_free(struct bench *bench)
{
    for (unsigned s = 0; s < bench->n_sets; s++) {
        free(bench->sets[s].host_cache);
        bench_must(cudaFree(bench->sets[s].cache));
        bench_must(cudaFree(bench->sets[s].query));
        bench_must(cudaFree(bench->sets[s].table));
    }
    free(bench->sets);
    free(bench->keep);
    free(bench->counts);
}
