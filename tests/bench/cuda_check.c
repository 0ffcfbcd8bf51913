/* What bench_cuda's engine keeps, against the CPU engine. */
#include "tests/bench/cuda_case.h"

#include <stdlib.h>

/* The block with every tensor on the host. */
static void to_host(const struct dkv_block *from, struct dkv_block *to)
{
    const bool shared = from->value.base == from->key.base;
    struct dkv_view *views[] = {&to->query, &to->key, &to->value};
    *to = *from;
    for (int v = 0; v < (shared ? 2 : 3); v++) {
        void *copy = bench_alloc(views[v]->bytes);
        bench_must(cudaMemcpy(copy, views[v]->base, views[v]->bytes, cudaMemcpyDefault));
        views[v]->base = copy;
        views[v]->place = DKV_PLACE_HOST;
    }
    if (shared) {
        to->value.base = to->key.base;
        to->value.place = DKV_PLACE_HOST;
    }
    if (from->table.entries != NULL) {
        const size_t bytes = from->table.n_entries * from->table.entry_bytes;
        void *copy = bench_alloc(bytes);
        bench_must(cudaMemcpy(copy, from->table.entries, bytes, cudaMemcpyDeviceToHost));
        to->table.entries = copy;
        to->table.place = DKV_PLACE_HOST;
    }
}

static void free_host(const struct dkv_block *block)
{
    free((void *)(uintptr_t)block->query.base);
    free((void *)(uintptr_t)block->key.base);
    if (block->value.base != block->key.base)
        free((void *)(uintptr_t)block->value.base);
    free((void *)(uintptr_t)block->table.entries);
}

/* Tokens of `a` that are not in `b`, both ascending. */
static unsigned long missing_of(const int32_t *a, uint64_t n_a, const int32_t *b, uint64_t n_b)
{
    unsigned long missing = 0;
    for (uint64_t i = 0, j = 0; i < n_a; i++) {
        while (j < n_b && b[j] < a[i])
            j++;
        missing += j == n_b || b[j] != a[i];
    }
    return missing;
}

unsigned long bench_differing(struct bench *bench, const struct bench_shape *shape,
                              unsigned long *of_out)
{
    const unsigned last = shape->n_blocks - 1;
    struct bench_set *set = &bench->sets[0];
    const struct dkv_item *mine = &set->items[last];
    struct dkv_item item = *mine;
    struct dkv_block host;
    struct dkv_engine *cpu;
    struct dkv_error err;
    bench_run(bench, set->items, shape->n_blocks);
    to_host(item.block, &host);
    item.block = &host;
    item.keep_out = bench_alloc(item.plan->keep_capacity * sizeof(int32_t));
    item.counts_out = bench_alloc(shape->kv_heads * sizeof(uint32_t));
    if (dkv_engine_cpu.open(NULL, &cpu, &err) != DKV_OK ||
        dkv_engine_run(&dkv_engine_cpu, cpu, &item, 1, &err) != DKV_OK)
        bench_die("cpu engine", err.text);
    if (item.status != DKV_OK)
        bench_die("cpu engine", item.error.text);
    const int32_t *a = mine->keep_out, *b = item.keep_out;
    unsigned long missing = 0, kept = 0;
    for (uint32_t h = 0; h < shape->kv_heads; h++) {
        const bool ragged = item.plan->ragged;
        const uint64_t n_a = ragged ? mine->counts_out[h] : item.plan->keep_tokens;
        const uint64_t n_b = ragged ? item.counts_out[h] : item.plan->keep_tokens;
        missing += missing_of(a, n_a, b, n_b);
        kept += n_a;
        a += n_a;
        b += n_b;
    }
    dkv_engine_cpu.close(cpu);
    free(item.keep_out);
    free(item.counts_out);
    free_host(&host);
    *of_out = kept;
    return missing;
}
