/* Twelve independent accumulators hide the latency of any x86 FMA unit built so far (4 cycles on
 * two ports). The loops are inline assembly: compilers spill, reorder or fold such a loop at will.
 */
#include "tests/bench/peak.h"

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define THREADS_MAX 256u
#define LOOPS       20000 /* between looks at the clock */

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#define EACH(X)   X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define FMA512(i) "vfmadd231ps %%zmm15, %%zmm14, %%zmm" #i "\n"
#define FMA256(i) "vfmadd231ps %%ymm15, %%ymm14, %%ymm" #i "\n"
#define DOT512(i) "vdpbf16ps %%zmm15, %%zmm14, %%zmm" #i "\n"
#define CLOBBER                                                                              \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
        "xmm11", "xmm14", "xmm15", "memory"

/* Zero operands: the fastest case on every unit, and never a denormal. */
static void loops_fma512(void)
{
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\nvpxor %%xmm15, %%xmm15, %%xmm15" ::
                         : CLOBBER);
    for (int i = 0; i < LOOPS; i++)
        __asm__ volatile(EACH(FMA512)::: CLOBBER);
    __asm__ volatile("vzeroupper" ::: CLOBBER);
}

static void loops_fma256(void)
{
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\nvpxor %%xmm15, %%xmm15, %%xmm15" ::
                         : CLOBBER);
    for (int i = 0; i < LOOPS; i++)
        __asm__ volatile(EACH(FMA256)::: CLOBBER);
    __asm__ volatile("vzeroupper" ::: CLOBBER);
}

static void loops_dot512(void)
{
    __asm__ volatile("vpxor %%xmm14, %%xmm14, %%xmm14\nvpxor %%xmm15, %%xmm15, %%xmm15" ::
                         : CLOBBER);
    for (int i = 0; i < LOOPS; i++)
        __asm__ volatile(EACH(DOT512)::: CLOBBER);
    __asm__ volatile("vzeroupper" ::: CLOBBER);
}
#elif defined(__aarch64__)
#define FMLA(i) "fmla v" #i ".4s, v30.4s, v31.4s\n"
/* Four cycles on up to four pipes: sixteen accumulators. */
#define EACH(X) \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#define CLOBBER                                                                               \
    "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", \
        "v22", "v23", "v30", "v31", "memory"

static void loops_neon(void)
{
    __asm__ volatile("movi v30.4s, #0\nmovi v31.4s, #0" ::: CLOBBER);
    for (int i = 0; i < LOOPS; i++)
        __asm__ volatile(EACH(FMLA)::: CLOBBER);
}
#endif

struct probe {
    void (*loops)(void);
    double flops_per_loop, seconds;
    struct dkv_peak rate_out;
    pthread_t thread;
};

static void *probe_main(void *arg)
{
    struct probe *probe = arg;
    const double start = now(CLOCK_MONOTONIC), start_cpu = now(CLOCK_THREAD_CPUTIME_ID);
    double elapsed, flops = 0;
    do {
        probe->loops();
        flops += probe->flops_per_loop * LOOPS;
        elapsed = now(CLOCK_MONOTONIC) - start;
    } while (elapsed < probe->seconds);
    probe->rate_out.wall = flops / elapsed * 1e-9;
    probe->rate_out.cpu = flops / (now(CLOCK_THREAD_CPUTIME_ID) - start_cpu) * 1e-9;
    return NULL;
}

static struct dkv_peak run(void (*loops)(void), double flops_per_loop, unsigned threads,
                           double seconds)
{
    static struct probe probes[THREADS_MAX];
    threads = threads < THREADS_MAX ? threads : THREADS_MAX;
    struct dkv_peak sum = {0};
    for (unsigned t = 0; t < threads; t++) {
        probes[t] = (struct probe){
            .loops = loops, .flops_per_loop = flops_per_loop, .seconds = seconds};
        if (pthread_create(&probes[t].thread, NULL, probe_main, &probes[t]) != 0)
            return (struct dkv_peak){0};
    }
    for (unsigned t = 0; t < threads; t++) {
        pthread_join(probes[t].thread, NULL);
        sum.wall += probes[t].rate_out.wall;
        sum.cpu += probes[t].rate_out.cpu / threads;
    }
    return sum;
}

struct dkv_peak dkv_peak_fma_f32(unsigned threads, double seconds)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return run(loops_fma512, 12 * 32, threads, seconds);
    if (__builtin_cpu_supports("fma"))
        return run(loops_fma256, 12 * 16, threads, seconds);
    return (struct dkv_peak){0};
#elif defined(__aarch64__)
    return run(loops_neon, 16 * 8, threads, seconds);
#else
    return run(NULL, 0, 0, seconds);
#endif
}

struct dkv_peak dkv_peak_dot_bf16(unsigned threads, double seconds)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bf16"))
        return run(loops_dot512, 12 * 64, threads, seconds);
#endif
    (void)threads;
    (void)seconds;
    return (struct dkv_peak){0};
}
