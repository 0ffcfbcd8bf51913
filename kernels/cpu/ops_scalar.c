/* Every operation in Portable C. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops.h"
#include "kernels/cpu/simd_scalar.h"

#include "kernels/cpu/load_rest_tmpl.c"

#include "kernels/cpu/dot_tmpl.c"
#include "kernels/cpu/load_tmpl.c"
#include "kernels/cpu/softmax_tmpl.c"

#include "kernels/cpu/rule_tmpl.c"

extern const struct dkv_cpu_ops dkv_cpu_ops_scalar;

const struct dkv_cpu_ops dkv_cpu_ops_scalar = {
    .name = "scalar",
    .flags = 0,
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
    .score_dist = score_dist,
    .score_given = score_given,
    .multiply = multiply,
    .reduce_weighted = reduce_weighted,
    .reduce_largest = reduce_largest,
    .spread = spread,
    .fold = fold,
    .apart = apart,
};
