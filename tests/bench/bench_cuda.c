/* The CUDA engine against one read of the same bytes, in one run.
 *
 * For each case: K and V of all blocks are fresh random numbers in device memory, in several sets
 * that are used in turn and together exceed the L2 cache. Times are device time between events,
 * taken behind a delay that lets the host queue everything first, as the medians of many runs:
 *
 *   read     one plain read of all bytes of K and V; for K and V on the host, one copy of as many
 *            bytes from pinned memory, to be compared with wall
 *   scores   scoring kernels           keep   scoring and selection: kept indices on the device
 *   select   selection alone; in keep it starts while scoring ends
 *   all      also upload of the work list and download of the indices
 *   wall     from submit to answer on the host's clock, without the events that the others need
 *
 * `ratio` is keep / read. The kept sets of one block a case are compared with the CPU engine's.
 *
 * usage: bench_cuda [--case NAME] [--param NAME=VALUE].. [--runs N] [--no-check] [--list]
 * [--profile]
 *   --param     of the request: policy=snapkv, heads=adakv_floor, ..
 *   --profile   run the case (default llama-128k) under ncu: time, bytes moved and occupancy of
 * each of the engine's kernels
 *
 * Exit 77 without a device.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/engine.h"
#include "tests/bench/bench_kernels.h"

enum { MAX_BLOCKS = 128, MAX_SETS = 24, MAX_RUNS = 201, MAX_GIVEN = 16 };

enum layout { CONTIGUOUS, PAGE16_PACKED, PAGE1_SLOTS, ON_HOST };

struct shape {
    const char *name;
    uint32_t q_heads, kv_heads, head_dim, window;
    enum dkv_dtype dtype;
    enum layout layout;
    unsigned n_blocks;
    uint32_t n_tokens; /* 0: mixed, 1K to 64K */
};

static const struct shape shapes[] = {
    {"llama-4k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 4096},
    {"llama-16k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 16384},
    {"llama-32k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 32768},
    {"llama-64k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 65536},
    {"llama-128k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
    {"qwen2.5-7b-4k", 28, 4, 128, 8, DKV_BF16, CONTIGUOUS, 1, 4096},
    {"qwen2.5-7b-32k", 28, 4, 128, 8, DKV_BF16, CONTIGUOUS, 1, 32768},
    {"qwen2.5-7b-128k", 28, 4, 128, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
    {"qwen2-0.5b-128k", 14, 2, 64, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
    {"llama-64k-window32", 32, 8, 128, 32, DKV_BF16, CONTIGUOUS, 1, 65536},
    {"llama-64k-page16", 32, 8, 128, 8, DKV_BF16, PAGE16_PACKED, 1, 65536},
    {"llama-64k-page1", 32, 8, 128, 8, DKV_BF16, PAGE1_SLOTS, 1, 65536},
    {"llama-128k-fp8", 32, 8, 128, 8, DKV_F8_E4M3, CONTIGUOUS, 1, 131072},
    {"llama-32k-fp32", 32, 8, 128, 8, DKV_FP32, CONTIGUOUS, 1, 32768},
    {"batch-32x4k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 32, 4096},
    {"batch-128x1k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 128, 1024},
    {"batch-8x16k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 8, 16384},
    {"batch-mixed", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 24, 0},
    {"llama-32k-host", 32, 8, 128, 8, DKV_BF16, ON_HOST, 1, 32768},
    {"batch-32x4k-host", 32, 8, 128, 8, DKV_BF16, ON_HOST, 32, 4096},
};

/* One copy of a case's tensors. */
struct set {
    unsigned char *cache;      /* K and V of all blocks */
    unsigned char *host_cache; /* the same on the host, if that is where the case has them */
    unsigned char *query;
    int32_t *table; /* one for all blocks: they have the same pages */
    struct dkv_block blocks[MAX_BLOCKS];
    struct dkv_plan plans[MAX_BLOCKS];
    struct dkv_item items[MAX_BLOCKS];
};

struct bench {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    cudaStream_t stream;
    int multiprocessors;
    size_t l2_bytes;
    enum dkv_status (*time_stages)(struct dkv_engine *, int, struct dkv_error *);
    enum dkv_status (*stage_times)(struct dkv_engine *, float *, struct dkv_error *);
    struct dkv_params params;
    size_t cache_bytes;
    size_t query_bytes;
    unsigned n_sets;
    struct set *sets;
    int32_t *keep;    /* host, of all blocks */
    uint32_t *counts; /* of a ragged answer */
    const char *given[MAX_GIVEN];
    unsigned n_given;
    unsigned runs;
    bool check;
};

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_cuda: %s: %s\n", what, why);
    exit(1);
}

static void must(cudaError_t error)
{
    if (error != cudaSuccess)
        die("cuda", cudaGetErrorString(error));
}

static void *must_alloc(size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory == NULL)
        die("host memory", "out of it");
    return memory;
}

/* Tokens of block i: the mixed batch has 1K, 2K, .. 64K in turn, short ones more often. */
static uint32_t tokens_of(const struct shape *shape, unsigned i)
{
    static const uint32_t mixed[] = {1024,  2048, 4096, 1024,  8192, 2048,
                                     16384, 4096, 1024, 32768, 8192, 65536};
    return shape->n_tokens != 0 ? shape->n_tokens : mixed[i % (sizeof(mixed) / sizeof(mixed[0]))];
}

/* ---- building sets ---- */

static void describe(const struct bench *bench, const struct shape *shape, struct set *set)
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
            die(shape->name, err.text);
        set->items[i] = (struct dkv_item){
            .block = block, .params = &bench->params, .plan = &set->plans[i]};
    }
}

/* Keep offsets: items of all sets write to the same host memory, in order of blocks. */
static void place_outputs(struct bench *bench, const struct shape *shape)
{
    size_t total = 0;
    for (unsigned i = 0; i < shape->n_blocks; i++)
        total += bench->sets[0].plans[i].keep_capacity;
    bench->keep = must_alloc(total * sizeof(int32_t));
    bench->counts = must_alloc(shape->n_blocks * shape->kv_heads * sizeof(uint32_t));
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
    int32_t *table = must_alloc(n * sizeof(*table));
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
        die("parameters", err.text);
}

/* What the command line says, then what the case has. */
static void set_params(struct bench *bench, const struct shape *shape)
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

static void make_sets(struct bench *bench, const struct shape *shape)
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
    bench->sets = must_alloc(bench->n_sets * sizeof(*bench->sets));
    for (unsigned s = 0; s < bench->n_sets; s++) {
        struct set *set = &bench->sets[s];
        set->table = NULL;
        set->host_cache = NULL;
        must(cudaMalloc((void **)&set->cache, bench->cache_bytes));
        must(cudaMalloc((void **)&set->query, bench->query_bytes));
        must(bench_fill(set->cache, bench->cache_bytes / dkv_dtype_bytes(shape->dtype),
                        shape->dtype, (uint32_t)time(NULL) + 7 * s));
        must(bench_fill(set->query, bench->query_bytes / 2, DKV_BF16,
                        (uint32_t)time(NULL) + 7 * s + 3));
        if (shape->layout == ON_HOST) { /* pageable, as a caller's is */
            unsigned char *host = must_alloc(bench->cache_bytes);
            must(cudaMemcpy(host, set->cache, bench->cache_bytes, cudaMemcpyDeviceToHost));
            set->host_cache = host;
        }
        if (shape->layout == PAGE16_PACKED || shape->layout == PAGE1_SLOTS) {
            const uint32_t entries = shape->n_tokens / (shape->layout == PAGE16_PACKED ? 16 : 1);
            int32_t *table = random_table(entries);
            must(cudaMalloc((void **)&set->table, entries * sizeof(*table)));
            must(cudaMemcpy(set->table, table, entries * sizeof(*table), cudaMemcpyHostToDevice));
            free(table);
        }
        describe(bench, shape, set);
    }
    place_outputs(bench, shape);
    must(cudaDeviceSynchronize());
}

static void free_sets(struct bench *bench)
{
    for (unsigned s = 0; s < bench->n_sets; s++) {
        free(bench->sets[s].host_cache);
        must(cudaFree(bench->sets[s].cache));
        must(cudaFree(bench->sets[s].query));
        must(cudaFree(bench->sets[s].table));
    }
    free(bench->sets);
    free(bench->keep);
    free(bench->counts);
}

/* ---- measuring ---- */

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static float median(float *values, unsigned n)
{
    qsort(values, n, sizeof(*values), ascending);
    return values[n / 2];
}

static float read_once(struct bench *bench)
{
    float times[MAX_RUNS];
    uint32_t *sink;
    void *pinned = NULL;
    cudaEvent_t start, end;
    if (bench->sets[0].host_cache != NULL) {
        must(cudaMallocHost(&pinned, bench->cache_bytes));
        memset(pinned, 1, bench->cache_bytes);
    }
    must(cudaMalloc((void **)&sink, sizeof(*sink)));
    must(cudaEventCreate(&start));
    must(cudaEventCreate(&end));
    for (unsigned i = 0; i < bench->runs + 3; i++) {
        const struct set *set = &bench->sets[i % bench->n_sets];
        float ms;
        must(bench_delay(bench->stream));
        must(cudaEventRecord(start, bench->stream));
        if (set->host_cache != NULL) /* the bus is what bounds it */
            must(cudaMemcpyAsync(set->cache, pinned, bench->cache_bytes, cudaMemcpyHostToDevice,
                                 bench->stream));
        else
            must(bench_read_once(set->cache, bench->cache_bytes, sink, bench->multiprocessors,
                                 bench->stream));
        must(cudaEventRecord(end, bench->stream));
        must(cudaStreamSynchronize(bench->stream));
        must(cudaEventElapsedTime(&ms, start, end));
        if (i >= 3)
            times[i - 3] = ms * 1000;
    }
    must(cudaEventDestroy(start));
    must(cudaEventDestroy(end));
    must(cudaFree(sink));
    must(cudaFreeHost(pinned));
    return median(times, bench->runs);
}

struct figures {
    float scores, select, keep, all, wall;
};

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void run_items(struct bench *bench, struct dkv_item *items, unsigned n)
{
    struct dkv_error err;
    if (dkv_engine_run(bench->ops, bench->engine, items, n, &err) != DKV_OK)
        die("engine", err.text);
    for (unsigned i = 0; i < n; i++)
        if (items[i].status != DKV_OK)
            die("block", items[i].error.text);
}

static struct figures score(struct bench *bench, const struct shape *shape)
{
    float scores[MAX_RUNS], select[MAX_RUNS], keep[MAX_RUNS], all[MAX_RUNS], wall[MAX_RUNS], us[4];
    struct dkv_error err;
    if (bench->time_stages(bench->engine, 0, &err) != DKV_OK)
        die("times", err.text);
    for (unsigned i = 0; i < bench->runs + 3; i++) {
        struct set *set = &bench->sets[i % bench->n_sets];
        const double start = now_us();
        run_items(bench, set->items, shape->n_blocks);
        if (i >= 3)
            wall[i - 3] = (float)(now_us() - start);
    }
    for (int split = 0; split < 2; split++) {
        if (bench->time_stages(bench->engine, 1 + split, &err) != DKV_OK)
            die("times", err.text);
        for (unsigned i = 0; i < bench->runs + 3; i++) {
            struct set *set = &bench->sets[i % bench->n_sets];
            must(bench_delay(bench->stream));
            run_items(bench, set->items, shape->n_blocks);
            if (bench->stage_times(bench->engine, us, &err) != DKV_OK)
                die("times", err.text);
            if (i >= 3 && split) {
                scores[i - 3] = us[1];
                select[i - 3] = us[2];
            } else if (i >= 3) {
                keep[i - 3] = us[1];
                all[i - 3] = us[0] + us[1] + us[3];
            }
        }
    }
    return (struct figures){median(scores, bench->runs), median(select, bench->runs),
                            median(keep, bench->runs), median(all, bench->runs),
                            median(wall, bench->runs)};
}

/* ---- checking ---- */

/* The block with every tensor on the host. */
static void to_host(const struct dkv_block *from, struct dkv_block *to)
{
    const bool shared = from->value.base == from->key.base;
    struct dkv_view *views[] = {&to->query, &to->key, &to->value};
    *to = *from;
    for (int v = 0; v < (shared ? 2 : 3); v++) {
        void *copy = must_alloc(views[v]->bytes);
        must(cudaMemcpy(copy, views[v]->base, views[v]->bytes, cudaMemcpyDefault));
        views[v]->base = copy;
        views[v]->place = DKV_PLACE_HOST;
    }
    if (shared) {
        to->value.base = to->key.base;
        to->value.place = DKV_PLACE_HOST;
    }
    if (from->table.entries != NULL) {
        const size_t bytes = from->table.n_entries * from->table.entry_bytes;
        void *copy = must_alloc(bytes);
        must(cudaMemcpy(copy, from->table.entries, bytes, cudaMemcpyDeviceToHost));
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

/* Kept tokens that the CPU engine does not keep, of the last block of a set; of how many. */
static unsigned long differing(struct bench *bench, const struct shape *shape,
                               unsigned long *of_out)
{
    const unsigned last = shape->n_blocks - 1;
    struct set *set = &bench->sets[0];
    const struct dkv_item *mine = &set->items[last];
    struct dkv_item item = *mine;
    struct dkv_block host;
    struct dkv_engine *cpu;
    struct dkv_error err;
    run_items(bench, set->items, shape->n_blocks);
    to_host(item.block, &host);
    item.block = &host;
    item.keep_out = must_alloc(item.plan->keep_capacity * sizeof(int32_t));
    item.counts_out = must_alloc(shape->kv_heads * sizeof(uint32_t));
    if (dkv_engine_cpu.open(NULL, &cpu, &err) != DKV_OK ||
        dkv_engine_run(&dkv_engine_cpu, cpu, &item, 1, &err) != DKV_OK)
        die("cpu engine", err.text);
    if (item.status != DKV_OK)
        die("cpu engine", item.error.text);
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

static void run_case(struct bench *bench, const struct shape *shape)
{
    make_sets(bench, shape);
    const float read = read_once(bench);
    const struct figures f = score(bench, shape);
    char checked[48] = "unchecked";
    if (bench->check) {
        unsigned long of;
        const unsigned long missing = differing(bench, shape, &of);
        snprintf(checked, sizeof(checked), "%lu of %lu differ", missing, of);
    }
    struct dkv_engine_info info;
    bench->ops->info(bench->engine, &info);
    printf("%-20s %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f %6.2f %8.2f  %s\n", shape->name,
           (double)bench->cache_bytes / 1e6, (double)read, (double)f.scores, (double)f.select,
           (double)f.keep, (double)f.all, (double)f.wall, (double)(f.keep / read),
           (double)info.scratch_bytes / 1e6, checked);
    fflush(stdout);
    free_sets(bench);
}

static void open_engine(struct bench *bench)
{
    struct dkv_error err;
    struct dkv_engine_info info;
    struct dkv_engine_config config = {0};
    struct cudaDeviceProp prop;
    const char *name = getenv("DKV_GPU") != NULL ? getenv("DKV_GPU") : "cuda:0";
    if (dkv_engine_find(name, &bench->ops, &config.device, &err) != DKV_OK) {
        printf("skipped: %s\n", err.text);
        exit(77);
    }
    if (cudaSetDevice(config.device) == cudaSuccess)
        must(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking));
    config.stream = bench->stream;
    if (bench->ops->open(&config, &bench->engine, &err) != DKV_OK) {
        printf("skipped: %s\n", err.text);
        exit(77);
    }
    must(cudaGetDeviceProperties(&prop, config.device));
    bench->multiprocessors = prop.multiProcessorCount;
    bench->l2_bytes = (size_t)prop.l2CacheSize;
    Dl_info where;
    if (dladdr((const void *)(uintptr_t)bench->ops, &where) == 0)
        die("module", "not found");
    void *module = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *(void **)&bench->time_stages = dlsym(module, "dkv_cuda_time_stages");
    *(void **)&bench->stage_times = dlsym(module, "dkv_cuda_stage_times");
    if (bench->time_stages == NULL || bench->stage_times == NULL)
        die("module", "has no timing");
    bench->ops->info(bench->engine, &info);
    printf("%s, %s, L2 %.1f MB\n", info.backend, info.device, (double)bench->l2_bytes / 1e6);
}

static void profile(const char *self, const char *name)
{
    /* The engine's kernels alone: those of the second and third batch, up to four. */
    execlp("ncu", "ncu", "--clock-control", "none", "--kernel-name",
           "regex:^(score|accumulate|merge|merge_rounded|select_tokens)$", "--launch-skip", "4",
           "--launch-count", "4", "--metrics",
           "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_read.sum.per_second,"
           "dram__bytes_write.sum,lts__t_bytes.sum,"
           "sm__warps_active.avg.pct_of_peak_sustained_active,launch__occupancy_limit_registers,"
           "launch__occupancy_limit_shared_mem,launch__registers_per_thread",
           self, "--case", name, "--runs", "1", "--no-check", (char *)NULL);
    die("ncu", "cannot be run");
}

int main(int argc, char **argv)
{
    struct bench bench = {.runs = 21, .check = true};
    const char *only = NULL;
    bool profiled = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--list") == 0) {
            for (size_t c = 0; c < sizeof(shapes) / sizeof(shapes[0]); c++)
                puts(shapes[c].name);
            return 0;
        }
        if (strcmp(argv[i], "--case") == 0 && i + 1 < argc)
            only = argv[++i];
        else if (strcmp(argv[i], "--param") == 0 && i + 1 < argc && bench.n_given < MAX_GIVEN)
            bench.given[bench.n_given++] = argv[++i];
        else if (strcmp(argv[i], "--runs") == 0 && i + 1 < argc)
            bench.runs = (unsigned)atoi(argv[++i]);
        else if (strcmp(argv[i], "--no-check") == 0)
            bench.check = false;
        else if (strcmp(argv[i], "--profile") == 0)
            profiled = true;
        else
            die("usage", "bench_cuda [--case NAME] [--param NAME=VALUE].. [--runs N] [--no-check] "
                         "[--list] [--profile]");
    }
    if (bench.runs < 1 || bench.runs > MAX_RUNS)
        die("--runs", "not in 1..201");
    if (profiled)
        profile(argv[0], only != NULL ? only : "llama-128k");
    open_engine(&bench);
    printf("%-20s %8s %8s %8s %8s %8s %8s %8s %6s %8s  %s\n", "case (us)", "MB", "read", "scores",
           "select", "keep", "all", "wall", "ratio", "scratch", "kept, against the CPU engine");
    for (size_t c = 0; c < sizeof(shapes) / sizeof(shapes[0]); c++)
        if (only == NULL || strcmp(only, shapes[c].name) == 0)
            run_case(&bench, &shapes[c]);
    bench.ops->close(bench.engine);
    return 0;
}
