/* What this machine's threads reach with nothing but multiply-adds: the yardstick of bench_cpu.
 *
 * Thread  any; makes and joins threads of its own.
 * Errors  zeros where the processor lacks the instruction.
 */
#ifndef DKV_TESTS_BENCH_PEAK_H
#define DKV_TESTS_BENCH_PEAK_H

/* Multiply-add rates (one is two operations). */
struct dkv_peak {
    double wall; /* GFLOP/s, summed over threads */
    double cpu;  /* GFLOP per second of CPU time of one thread: what is left when others also run */
};

/* `threads` threads at once for about `seconds`. Float32 FMAs in the widest vectors there are; bf16
 * dot products in AVX-512. */
struct dkv_peak dkv_peak_fma_f32(unsigned threads, double seconds);
struct dkv_peak dkv_peak_dot_bf16(unsigned threads, double seconds);

#endif
