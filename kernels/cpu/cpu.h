/* What this processor can do, and what we let ourselves use of it.
 *
 * Thread  any; no state but the mask, which dkv_cpu_mask_set() replaces at program start and in
 *         tests, before engines are opened.
 */
#ifndef DKV_KERNELS_CPU_CPU_H
#define DKV_KERNELS_CPU_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bits of the flags, of DKV_CPU_MASK and of --cpu-mask. */
enum dkv_cpu_flag {
    DKV_CPU_AVX2 = 1u << 0,       /* AVX2, FMA and F16C */
    DKV_CPU_AVX512 = 1u << 1,     /* AVX-512 F, BW, DQ and VL */
    DKV_CPU_AVX512BF16 = 1u << 2, /* bf16 dot products */
    DKV_CPU_NEON = 1u << 3,       /* AArch64's Advanced SIMD */
    DKV_CPU_SLOW = 1u << 30,      /* in a mask: also what this processor has, but slowly (bf16 dot
                                     products at half the rate of FMAs, on Intel) */
};

/* Flags of everything that this processor can execute, slow or not, whatever the mask: for tests.
 */
uint32_t dkv_cpu_capable(void);

/* Flags detected and not masked. The mask is the environment's DKV_CPU_MASK (decimal, or hex after
 * 0x; absent: all but DKV_CPU_SLOW; 0: portable code only) unless dkv_cpu_mask_set() replaced it.
 */
uint32_t dkv_cpu_flags(void);

/* Replaces the mask for engines opened from now on. */
void dkv_cpu_mask_set(uint32_t mask);

/* "Intel(R) Xeon(R) Processor", "Arm Neoverse V2", or "CPU" where it does not say. */
void dkv_cpu_model(char *name_out, size_t name_bytes);

/* CPUs this process may run on, at least 1. */
unsigned dkv_cpu_count(void);

/* Puts the calling thread's FPU into the engine's mode and back: round to nearest; on x86 tiny
 * results are flushed to zero, since they cost a microcode assist each and carry no information.
 * Arm has no such cost, and its flush mode would also take tiny inputs for zero. */
unsigned dkv_cpu_fpu_enter(void);
void dkv_cpu_fpu_leave(unsigned saved);

#endif
