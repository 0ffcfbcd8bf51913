/* The table of variants. To add one: simd_<isa>.h with its vectors, ops_<isa>.c that includes it
 * and the _tmpl.c files, a row here, and a line in kernels/cpu/meson.build. check_kernels walks
 * this table. */
#include "kernels/cpu/ops.h"

#include "kernels/cpu/cpu.h"

extern const struct dkv_cpu_ops dkv_cpu_ops_avx512bf16, dkv_cpu_ops_avx512, dkv_cpu_ops_avx2,
    dkv_cpu_ops_neon, dkv_cpu_ops_scalar;

const struct dkv_cpu_ops *const dkv_cpu_ops_table[] = {
#ifdef DKV_HAVE_AVX512BF16
    &dkv_cpu_ops_avx512bf16,
#endif
#ifdef DKV_HAVE_AVX512
    &dkv_cpu_ops_avx512,
#endif
#ifdef DKV_HAVE_AVX2
    &dkv_cpu_ops_avx2,
#endif
#ifdef DKV_HAVE_NEON
    &dkv_cpu_ops_neon,
#endif
    &dkv_cpu_ops_scalar,     NULL,
};

const struct dkv_cpu_ops *dkv_cpu_ops_choose(uint32_t flags)
{
    size_t i = 0;
    while ((dkv_cpu_ops_table[i]->flags & ~flags) != 0)
        i++;
    return dkv_cpu_ops_table[i];
}
