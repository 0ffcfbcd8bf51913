/* The accuracy rule of docs/numerics.md, shared by every test that holds an engine against the
 * reference.
 *
 * Scores   relative to the score itself where that is above 1e-12 of the head's largest, else to
 *          that floor (and never below what float32 can express). A head whose scores are all
 *          exactly 0 must come out as exactly 0. The median is held against its bound where a
 *          block has at least 100 scores.
 * Sets     ascending, in range, and equal, except tokens of the cut's own class whose pooled score
 *          is within the tolerance of the cut, relative to the cut itself, however small it is:
 *          that is what the range factor is for. Where only tokens of one plateau are exchanged,
 *          the raw score decides and is held to the same tolerance; exact zeros must follow the
 *          index (not of averages: their sums tie in the reference by rounding alone).
 */
#ifndef DKV_TESTS_SUPPORT_COMPARE_H
#define DKV_TESTS_SUPPORT_COMPARE_H

#include "tests/support/case.h"

struct dkv_tolerance {
    double median; /* of the raw scores' relative errors */
    double max;
    double cut; /* distance from the cut, relative, at which members may differ */
};

/* The row of the table for an engine ("cpu", "cuda") and the type of its inputs. */
struct dkv_tolerance dkv_tolerance_of(const char *engine, enum dkv_dtype dtype);

struct dkv_comparison {
    double median, max;   /* relative errors met */
    unsigned sets_equal;  /* heads whose sets are equal */
    unsigned sets_in_cut; /* heads whose sets differ within the tolerance */
    bool ok;
    char why[256]; /* the first thing that is not */
};

struct dkv_comparison dkv_compare(const struct dkv_case *c, const struct dkv_ref_answer *want,
                                  const struct dkv_case_answer *got,
                                  struct dkv_tolerance tolerance);

/* Its halves: `heads` rows of n scores; k kept of one head whose n classes and scores are given.
 * `plateaus` asks for the rule of one plateau. dkv_compare_keep() returns 1 equal, 0 within the
 * tolerance, -1 wrong, with the reason. */
void dkv_compare_scores(const double *want, const double *got, uint64_t heads, uint64_t n,
                        double *median_out, double *max_out);
int dkv_compare_keep(const double *raw, const double *pooled, const uint8_t *token_class,
                     uint64_t first, uint64_t n, const int32_t *want, const int32_t *got,
                     uint64_t k, bool plateaus, double tolerance, char *why, size_t why_bytes);

#endif
