/* Every operation in NEON. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/simd_neon.h"

#include "kernels/cpu/load_rest_tmpl.c"

#include "kernels/cpu/dot_tmpl.c"
#include "kernels/cpu/load_tmpl.c"
#include "kernels/cpu/softmax_tmpl.c"

extern const struct dkv_cpu_ops dkv_cpu_ops_neon;

const struct dkv_cpu_ops dkv_cpu_ops_neon = {
    .name = "neon",
    .flags = DKV_CPU_NEON,
    .lanes = LANES,
    .load = load,
    .dot = dot,
    .accumulate = accumulate,
    .softcap = softcap,
    .softmax = softmax,
    .weights = weights,
    .score = score,
    .norms = norms,
    .reduce = reduce,
};
