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
 *   scratch  MB of device memory that the last wave's kernels worked on, beyond inputs and results
 *
 * `ratio` is keep / read. The kept sets of one block a case are compared with the CPU engine's.
 *
 * usage: bench_cuda [--case NAME] [--param NAME=VALUE].. [--runs N] [--no-check] [--list]
 *                   [--profile]
 *
 *   --param     of the request: policy=snapkv, heads=adakv_floor, ..
 *   --profile   run the case (default llama-128k) under ncu: time, bytes moved and occupancy of
 *               the kernels that score and select
 *
 * Exit 77 without a device.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/bench_kernels.h"
#include "tests/bench/cuda_case.h"

enum { MAX_RUNS = 201 };

static const struct bench_shape shapes[] = {
    {"llama-4k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 4096},
    {"llama-16k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 16384},
    {"llama-32k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 32768},
    {"llama-64k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 65536},
    {"llama-128k", 32, 8, 128, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
    {"qwen2.5-7b-4k", 28, 4, 128, 8, DKV_BF16, CONTIGUOUS, 1, 4096},
    {"qwen2.5-7b-32k", 28, 4, 128, 8, DKV_BF16, CONTIGUOUS, 1, 32768},
    {"qwen2.5-7b-128k", 28, 4, 128, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
    {"qwen2-0.5b-128k", 14, 2, 64, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
    {"gemma2-9b-4k", 16, 8, 256, 8, DKV_BF16, CONTIGUOUS, 1, 4096},
    {"gemma2-9b-32k", 16, 8, 256, 8, DKV_BF16, CONTIGUOUS, 1, 32768},
    {"qwen3-next-128k", 16, 2, 256, 8, DKV_BF16, CONTIGUOUS, 1, 131072},
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

void bench_die(const char *what, const char *why)
{
    fprintf(stderr, "bench_cuda: %s: %s\n", what, why);
    exit(1);
}

void bench_must(cudaError_t error)
{
    if (error != cudaSuccess)
        bench_die("cuda", cudaGetErrorString(error));
}

void *bench_alloc(size_t bytes)
{
    void *memory = malloc(bytes);
    if (memory == NULL)
        bench_die("host memory", "out of it");
    return memory;
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
        bench_must(cudaMallocHost(&pinned, bench->cache_bytes));
        memset(pinned, 1, bench->cache_bytes);
    }
    bench_must(cudaMalloc((void **)&sink, sizeof(*sink)));
    bench_must(cudaEventCreate(&start));
    bench_must(cudaEventCreate(&end));
    for (unsigned i = 0; i < bench->runs + 3; i++) {
        const struct bench_set *set = &bench->sets[i % bench->n_sets];
        float ms;
        bench_must(bench_delay(bench->stream));
        bench_must(cudaEventRecord(start, bench->stream));
        if (set->host_cache != NULL) /* the bus is what bounds it */
            bench_must(cudaMemcpyAsync(set->cache, pinned, bench->cache_bytes,
                                       cudaMemcpyHostToDevice, bench->stream));
        else
            bench_must(bench_read_once(set->cache, bench->cache_bytes, sink, bench->multiprocessors,
                                       bench->stream));
        bench_must(cudaEventRecord(end, bench->stream));
        bench_must(cudaStreamSynchronize(bench->stream));
        bench_must(cudaEventElapsedTime(&ms, start, end));
        if (i >= 3)
            times[i - 3] = ms * 1000;
    }
    bench_must(cudaEventDestroy(start));
    bench_must(cudaEventDestroy(end));
    bench_must(cudaFree(sink));
    bench_must(cudaFreeHost(pinned));
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

void bench_run(struct bench *bench, struct dkv_item *items, unsigned n)
{
    struct dkv_error err;
    if (dkv_engine_run(bench->ops, bench->engine, items, n, &err) != DKV_OK)
        bench_die("engine", err.text);
    for (unsigned i = 0; i < n; i++)
        if (items[i].status != DKV_OK)
            bench_die("block", items[i].error.text);
}

static struct figures score(struct bench *bench, const struct bench_shape *shape)
{
    float scores[MAX_RUNS], select[MAX_RUNS], keep[MAX_RUNS], all[MAX_RUNS], wall[MAX_RUNS], us[4];
    struct dkv_error err;
    if (bench->time_stages(bench->engine, 0, &err) != DKV_OK)
        bench_die("times", err.text);
    for (unsigned i = 0; i < bench->runs + 3; i++) {
        struct bench_set *set = &bench->sets[i % bench->n_sets];
        const double start = now_us();
        bench_run(bench, set->items, shape->n_blocks);
        if (i >= 3)
            wall[i - 3] = (float)(now_us() - start);
    }
    for (int split = 0; split < 2; split++) {
        if (bench->time_stages(bench->engine, 1 + split, &err) != DKV_OK)
            bench_die("times", err.text);
        for (unsigned i = 0; i < bench->runs + 3; i++) {
            struct bench_set *set = &bench->sets[i % bench->n_sets];
            bench_must(bench_delay(bench->stream));
            bench_run(bench, set->items, shape->n_blocks);
            if (bench->stage_times(bench->engine, us, &err) != DKV_OK)
                bench_die("times", err.text);
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

static void run_case(struct bench *bench, const struct bench_shape *shape)
{
    bench_sets_make(bench, shape);
    const float read = read_once(bench);
    const struct figures f = score(bench, shape);
    char checked[48] = "unchecked";
    if (bench->check) {
        unsigned long of;
        const unsigned long missing = bench_differing(bench, shape, &of);
        snprintf(checked, sizeof(checked), "%lu of %lu differ", missing, of);
    }
    struct dkv_engine_info info;
    bench->ops->info(bench->engine, &info);
    printf("%-20s %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f %6.2f %8.2f  %s\n", shape->name,
           (double)bench->cache_bytes / 1e6, (double)read, (double)f.scores, (double)f.select,
           (double)f.keep, (double)f.all, (double)f.wall, (double)(f.keep / read),
           (double)info.scratch_bytes / 1e6, checked);
    fflush(stdout);
    bench_sets_free(bench);
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
        bench_must(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking));
    config.stream = bench->stream;
    if (bench->ops->open(&config, &bench->engine, &err) != DKV_OK) {
        printf("skipped: %s\n", err.text);
        exit(77);
    }
    bench_must(cudaGetDeviceProperties(&prop, config.device));
    bench->multiprocessors = prop.multiProcessorCount;
    bench->l2_bytes = (size_t)prop.l2CacheSize;
    Dl_info where;
    if (dladdr((const void *)(uintptr_t)bench->ops, &where) == 0)
        bench_die("module", "not found");
    void *module = dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *(void **)&bench->time_stages = dlsym(module, "dkv_cuda_time_stages");
    *(void **)&bench->stage_times = dlsym(module, "dkv_cuda_stage_times");
    if (bench->time_stages == NULL || bench->stage_times == NULL)
        bench_die("module", "has no timing");
    bench->ops->info(bench->engine, &info);
    printf("%s, %s, L2 %.1f MB\n", info.backend, info.device, (double)bench->l2_bytes / 1e6);
}

static void profile(const char *self, const char *name)
{
    /* The kernels that score and select: those of the second and third batch, up to four. */
    execlp("ncu", "ncu", "--clock-control", "none", "--kernel-name",
           "regex:^(score|accumulate|merge|merge_rounded|average|score_average|anchor|weigh|settle|"
           "stream_.*|select_tokens|choose)$",
           "--launch-skip", "4", "--launch-count", "4", "--metrics",
           "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_read.sum.per_second,"
           "dram__bytes_write.sum,lts__t_bytes.sum,"
           "sm__warps_active.avg.pct_of_peak_sustained_active,launch__occupancy_limit_registers,"
           "launch__occupancy_limit_shared_mem,launch__registers_per_thread",
           self, "--case", name, "--runs", "1", "--no-check", (char *)NULL);
    bench_die("ncu", "cannot be run");
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
        else if (strcmp(argv[i], "--param") == 0 && i + 1 < argc && bench.n_given < BENCH_MAX_GIVEN)
            bench.given[bench.n_given++] = argv[++i];
        else if (strcmp(argv[i], "--runs") == 0 && i + 1 < argc)
            bench.runs = (unsigned)atoi(argv[++i]);
        else if (strcmp(argv[i], "--no-check") == 0)
            bench.check = false;
        else if (strcmp(argv[i], "--profile") == 0)
            profiled = true;
        else
            bench_die("usage",
                      "bench_cuda [--case NAME] [--param NAME=VALUE].. [--runs N] [--no-check] "
                      "[--list] [--profile]");
    }
    if (bench.runs < 1 || bench.runs > MAX_RUNS)
        bench_die("--runs", "not in 1..201");
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
