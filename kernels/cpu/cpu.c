/* x86: CPUID through the compiler's builtins, which also check that the system saves the wide
 * registers. Arm: what the kernel passes to each program.
 *
 * AVX512-BF16 is a special case: vdpbf16ps retires one per cycle or better on AMD's Zen 4 and
 * later, twice the multiply-adds of a float32 FMA, but only one in two cycles on Intel's server
 * cores, half of what two FMA ports do. Choosing by a timing at start would make results depend on
 * the weather, so the vendor decides.
 */
#include "kernels/cpu/cpu.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static bool has_bf16_dot(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1u);
}

uint32_t dkv_cpu_capable(void)
{
    uint32_t flags = 0;
    __builtin_cpu_init();
    unsigned a, b, c = 0, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c)
        flags |= DKV_CPU_AVX2;
    if ((flags & DKV_CPU_AVX2) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        flags |= DKV_CPU_AVX512;
    if ((flags & DKV_CPU_AVX512) && has_bf16_dot())
        flags |= DKV_CPU_AVX512BF16;
    return flags;
}

/* What the processor has, but at a rate that does not pay. */
static uint32_t slow_flags(void)
{
    return __builtin_cpu_is("amd") ? 0 : DKV_CPU_AVX512BF16;
}

void dkv_cpu_model(char *name_out, size_t name_bytes)
{
    unsigned words[12] = {0};
    char text[sizeof(words) + 1] = "CPU";
    if ((unsigned)__get_cpuid_max(0x80000000u, NULL) >= 0x80000004u) {
        for (unsigned i = 0; i < 3; i++)
            __get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2],
                        &words[4 * i + 3]);
        memcpy(text, words, sizeof(words));
        text[sizeof(words)] = '\0';
    }
    const char *start = text + strspn(text, " ");
    size_t length = strlen(start);
    while (length > 0 && start[length - 1] == ' ')
        length--;
    if (length >= name_bytes)
        length = name_bytes - 1;
    memcpy(name_out, start, length);
    name_out[length] = '\0';
}

unsigned dkv_cpu_fpu_enter(void)
{
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80u | _MM_FLUSH_ZERO_ON); /* defaults, exceptions masked */
    return saved;
}

void dkv_cpu_fpu_leave(unsigned saved)
{
    _mm_setcsr(saved);
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

uint32_t dkv_cpu_capable(void)
{
    return getauxval(AT_HWCAP) & 1u << 1 /* HWCAP_ASIMD */ ? DKV_CPU_NEON : 0;
}

static uint32_t slow_flags(void)
{
    return 0;
}

/* Arm's own cores that servers beside NVIDIA GPUs are built of, by the part number of MIDR_EL1. */
static const struct {
    uint16_t part;
    const char *name;
} arm_cores[] = {
    {0xd0c, "Neoverse N1"}, {0xd40, "Neoverse V1"}, {0xd49, "Neoverse N2"},
    {0xd4f, "Neoverse V2"}, {0xd84, "Neoverse V3"}, {0xd8e, "Neoverse N3"},
};

void dkv_cpu_model(char *name_out, size_t name_bytes)
{
    uint64_t id = 0;
    if (getauxval(AT_HWCAP) & 1u << 11) /* HWCAP_CPUID: the kernel lets us read it */
        __asm__("mrs %0, midr_el1" : "=r"(id));
    const unsigned implementer = id >> 24 & 0xff, part = id >> 4 & 0xfff;
    const char *name = NULL;
    for (size_t i = 0; i < sizeof(arm_cores) / sizeof(arm_cores[0]); i++) {
        if (implementer == 0x41 && part == arm_cores[i].part)
            name = arm_cores[i].name;
    }
    if (name != NULL)
        snprintf(name_out, name_bytes, "Arm %s", name);
    else if (id != 0)
        snprintf(name_out, name_bytes, "Arm CPU %02x:%03x", implementer, part);
    else
        snprintf(name_out, name_bytes, "CPU");
}

unsigned dkv_cpu_fpu_enter(void)
{
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return (unsigned)saved;
}

void dkv_cpu_fpu_leave(unsigned saved)
{
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)saved));
}
#else
uint32_t dkv_cpu_capable(void)
{
    return 0;
}

static uint32_t slow_flags(void)
{
    return 0;
}

void dkv_cpu_model(char *name_out, size_t name_bytes)
{
    strncpy(name_out, "CPU", name_bytes - 1);
    name_out[name_bytes - 1] = '\0';
}

unsigned dkv_cpu_fpu_enter(void)
{
    return 0;
}

void dkv_cpu_fpu_leave(unsigned saved)
{
    (void)saved;
}
#endif

#define MASK_DEFAULT (~(uint32_t)DKV_CPU_SLOW)

/* Mask in the low half, "was set" above it, so that one atomic holds both. */
static _Atomic uint64_t mask_override;

static uint32_t mask_in_force(void)
{
    const uint64_t set = atomic_load_explicit(&mask_override, memory_order_relaxed);
    if (set >> 32)
        return (uint32_t)set;
    const char *text = getenv("DKV_CPU_MASK");
    if (text == NULL || *text == '\0')
        return MASK_DEFAULT;
    char *end;
    const unsigned long value = strtoul(text, &end, 0);
    return *end == '\0' ? (uint32_t)value : MASK_DEFAULT;
}

void dkv_cpu_mask_set(uint32_t mask)
{
    atomic_store_explicit(&mask_override, (uint64_t)1 << 32 | mask, memory_order_relaxed);
}

uint32_t dkv_cpu_flags(void)
{
    const uint32_t mask = mask_in_force();
    const uint32_t flags = dkv_cpu_capable() & mask;
    return mask & DKV_CPU_SLOW ? flags : flags & ~slow_flags();
}

unsigned dkv_cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
        return (unsigned)CPU_COUNT(&set);
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned)online : 1;
}
