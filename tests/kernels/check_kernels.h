/* What the files of check_kernels share.
 *
 *   check_kernels.c           walks the variants, times them
 *   check_kernels_products.c  loading keys, and products of rows with them
 *   check_kernels_rows.c      softmax, weights, scores
 *
 * Thread  one.
 */
#ifndef DKV_TESTS_KERNELS_CHECK_KERNELS_H
#define DKV_TESTS_KERNELS_CHECK_KERNELS_H

#include "kernels/cpu/ops.h"

#define POISON       0x1.a5a5a6p+100f /* no operation makes it */
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

extern unsigned check_failures;
extern const char *check_variant; /* in hand */

/* Checks place floats at multiples of 4 and of nothing larger; timing where an engine would. */
extern size_t check_misaligned;

void check_fail(const char *operation, const char *what, size_t i, double got, double want);
void check_close(const char *operation, const char *what, size_t i, double got, double want,
                 double tolerance);

float check_uniform(void); /* -1..1 */

/* `n` of them at random, or POISON. Without memory it ends the program. */
float *check_floats(size_t n, bool poisoned);
void check_release(float *p);

void check_load(const struct dkv_cpu_ops *ops);
void check_products(const struct dkv_cpu_ops *ops);
void check_rows(const struct dkv_cpu_ops *ops);

#endif
