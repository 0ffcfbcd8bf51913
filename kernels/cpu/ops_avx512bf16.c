/* Every operation in AVX-512 with BF16: as ops_avx512.c, and bf16 keys are multiplied as they are.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/load_rest_tmpl.c"

#include "kernels/cpu/load_bf16_avx512.c"

#include "kernels/cpu/dot_tmpl.c"
#include "kernels/cpu/load_tmpl.c"
#include "kernels/cpu/softmax_tmpl.c"

#include "kernels/cpu/rule_tmpl.c"

#include "kernels/cpu/dot_bf16_avx512.c"

extern const struct dkv_cpu_ops dkv_cpu_ops_avx512bf16;

const struct dkv_cpu_ops dkv_cpu_ops_avx512bf16 = {
    .name = "avx512bf16",
    .flags = DKV_CPU_AVX2 | DKV_CPU_AVX512 | DKV_CPU_AVX512BF16,
    .lanes = LANES,
    .load = load,
    .dot = dot,
    .dot_bf16 = dot_bf16,
    .accumulate = accumulate,
    .softcap = softcap,
    .softmax = softmax,
    .weights = weights,
    .score = score,
    .norms = norms,
    .reduce = reduce,
    .score_dist = score_dist,
    .score_given = score_given,
    .multiply = multiply,
    .reduce_weighted = reduce_weighted,
    .reduce_largest = reduce_largest,
    .spread = spread,
    .fold = fold,
    .apart = apart,
};
