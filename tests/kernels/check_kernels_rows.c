/* Operations on rows of logits against double precision: softmax with its running state, softcap,
 * weights, scores, norms and sums. */
#include "tests/kernels/check_kernels.h"

#include "kernels/convert.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t key_counts[] = {1, 7, DKV_TILE_KEYS, 253};
static const uint32_t row_vectors[] = {1, 2, 3};

/* ---- softmax ---- */

/* Three tiles in a row, then the state against all logits at once. */
static void check_softmax_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n)
{
    enum { TILES = 3 };
    float *best = check_floats(n_rows, false), *ref = check_floats(n_rows, false),
          *keep = check_floats(n_rows, true);
    float *sum = check_floats(n_rows, true), *back = check_floats(n_rows, true);
    int32_t *best_key = malloc(sizeof(int32_t) * n_rows),
            *back_key = malloc(sizeof(int32_t) * n_rows);
    float *logits[TILES], *tile = check_floats(n * n_rows, true);
    double *total = calloc(n_rows, sizeof(double));
    const struct dkv_softmax_rows rows = {best, ref, keep, sum, back, best_key, back_key};
    for (size_t r = 0; r < n_rows; r++) {
        best[r] = -HUGE_VALF;
        ref[r] = -FLT_MAX;
        best_key[r] = -1;
    }
    for (size_t t = 0; t < TILES; t++) {
        logits[t] = check_floats(n * n_rows, false);
        for (size_t i = 0; i < n * n_rows; i++) {
            logits[t][i] *= 30.0f;
            if (i % 11 == 0)
                logits[t][i] = -HUGE_VALF; /* invisible */
            if (i % 17 == 3)
                logits[t][i] = 29.0f; /* ties */
        }
        memcpy(tile, logits[t], sizeof(float) * n * n_rows);
        ops->softmax(&rows, tile, n_rows, n, (int32_t)(t * n));
        for (size_t r = 0; r < n_rows; r++)
            total[r] = total[r] * (double)keep[r] + (double)sum[r] + (double)back[r];
        for (size_t i = 0; i < n * n_rows; i++) {
            const size_t r = i % n_rows, key = t * n + i / n_rows;
            const double want = (int32_t)key == best_key[r]
                                    ? 0.0
                                    : exp2((double)logits[t][i] - (double)ref[r]);
            const double x = fabs((double)logits[t][i] - (double)ref[r]); /* rounds to float32 */
            check_close("softmax", "weight", i, (double)tile[i], want,
                        (isinf(x) ? 0 : (4e-7 + 5e-8 * x) * want) + 1e-37);
        }
    }
    for (size_t r = 0; r < n_rows; r++) {
        int32_t want_key = -1;
        double want = 0;
        for (size_t key = 0; key < TILES * n; key++) {
            const float z = logits[key / n][key % n * n_rows + r];
            if (z > (want_key < 0
                         ? -HUGE_VALF
                         : logits[(size_t)want_key / n][(size_t)want_key % n * n_rows + r]))
                want_key = (int32_t)key;
        }
        for (size_t key = 0; key < TILES * n; key++) {
            if ((int32_t)key != want_key)
                want += exp2((double)logits[key / n][key % n * n_rows + r] - (double)ref[r]);
        }
        check_close("softmax", "best key", r, best_key[r], want_key, 0);
        check_close("softmax", "sum", r, total[r], want, 1e-6 * want);
    }
    for (size_t t = 0; t < TILES; t++)
        check_release(logits[t]);
    check_release(best);
    check_release(ref);
    check_release(keep);
    check_release(sum);
    check_release(back);
    check_release(tile);
    free(best_key);
    free(back_key);
    free(total);
}

static void check_softcap(const struct dkv_cpu_ops *ops)
{
    const size_t n = 16 * ops->lanes;
    float *tile = check_floats(n, false), *in = check_floats(n, false);
    for (size_t i = 0; i < n; i++)
        in[i] *= i % 3 == 0 ? 100.0f : i % 3 == 1 ? 1.0f : 1e-3f;
    memcpy(tile, in, sizeof(float) * n);
    ops->softcap(tile, n, 50.0f);
    for (size_t i = 0; i < n; i++) {
        const double want = 50.0 * tanh((double)in[i]);
        check_close("softcap", "tanh", i, (double)tile[i], want, 4e-7 * fabs(want));
    }
    check_release(tile);
    check_release(in);
}

static void check_weights_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n,
                               enum dkv_dtype round)
{
    float *tile = check_floats(n * n_rows, false), *in = check_floats(n * n_rows, false);
    float *ref = check_floats(n_rows, false), *inv = check_floats(n_rows, false),
          *sum = check_floats(n_rows, true);
    const double step = round == DKV_BF16 ? 0x1p-8 : round == DKV_FP16 ? 0x1p-11 : 0;
    for (size_t i = 0; i < n * n_rows; i++)
        tile[i] = in[i] = in[i] * 5.0f - 6.0f;
    for (size_t r = 0; r < n_rows; r++)
        inv[r] = fabsf(inv[r]);
    ops->weights(tile, n_rows, n, ref, inv, round, sum);
    for (size_t r = 0; r < n_rows; r++) {
        double want_sum = 0;
        for (size_t k = 0; k < n; k++) {
            const size_t i = k * n_rows + r;
            const double p = exp2((double)in[i] - (double)ref[r]) * (double)inv[r];
            check_close("weights", "p", i, (double)tile[i], p,
                        (1e-6 + step) * p + 0x1p-24 * (round == DKV_FP16));
            if (tile[i] != dkv_round_to_dtype(tile[i], round))
                check_fail("weights", "not rounded", i, (double)tile[i], p);
            want_sum += (double)tile[i];
        }
        check_close("weights", "sum", r, (double)sum[r], want_sum, 1e-5 * want_sum);
    }
    check_release(tile);
    check_release(in);
    check_release(ref);
    check_release(inv);
    check_release(sum);
}

/* ---- score ---- */

static void check_score_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n, size_t dim,
                             enum dkv_dtype round, float eps)
{
    const size_t ld = dim + 3;
    float *logits = check_floats(n * n_rows, false), *terms = check_floats(n * n_rows + 1, true);
    float *ref = check_floats(n_rows, false), *inv = check_floats(n_rows, false);
    float *out = check_floats(dim * n_rows, false), *out_norm = check_floats(n_rows, true);
    float *values = check_floats(n * ld, false), *value_norm = check_floats(n, true);
    for (size_t i = 0; i < n * n_rows; i++)
        logits[i] = logits[i] * 8.0f - 10.0f;
    for (size_t r = 0; r < n_rows; r++) {
        inv[r] = 0.3f + 0.1f * inv[r];
        double norm = 0;
        for (size_t d = 0; d < dim; d++)
            norm += (double)out[d * n_rows + r] * (double)out[d * n_rows + r];
        out_norm[r] = (float)norm;
    }
    for (size_t d = 0; d < dim; d++) /* a value almost equal to an output: cancellation */
        values[d] = out[d * n_rows] * (1.0f + 1e-3f * check_uniform());
    ops->norms(value_norm, values, ld, n, dim);
    ops->dot(terms, out, n_rows, values, ld, n, dim, 1.0f, NULL);
    const struct dkv_score_args args = {
        .n_rows = n_rows,
        .n_keys = n,
        .v_dim = dim,
        .v_ld = ld,
        .logits = logits,
        .terms = terms,
        .ref = ref,
        .inv = inv,
        .out = out,
        .out_norm = out_norm,
        .values = values,
        .value_norm = value_norm,
        .gain = 1024.0f,
        .eps = eps,
        .round = round,
    };
    ops->score(&args);
    for (size_t k = 0; k < n; k++) {
        double norm = 0;
        for (size_t d = 0; d < dim; d++)
            norm += (double)values[k * ld + d] * (double)values[k * ld + d];
        check_close("norms", "square", k, (double)value_norm[k], norm, 1e-6 * norm);
        for (size_t r = 0; r < n_rows; r++) {
            const size_t i = k * n_rows + r;
            const double p = exp2((double)logits[i] - (double)ref[r]) * (double)inv[r];
            double distance = 0;
            for (size_t d = 0; d < dim; d++) {
                const double x = (double)out[d * n_rows + r] - (double)values[k * ld + d];
                distance += x * x;
            }
            const double q = (double)dkv_round_to_dtype((float)p, round);
            const double odds = 1024.0 * q / (eps == 0 ? 1 - p : 1 - q + (double)eps);
            const double want = odds * odds * distance;
            /* where p lies on a rounding boundary either neighbour is right */
            const double step = round == DKV_BF16 ? 0x1p-7 : round == DKV_FP16 ? 0x1p-10 : 0;
            const double flips = round == DKV_FP16 ? 0x1p-24 / p * 4 : 0;
            check_close("score", "term", i, (double)terms[i], want,
                        (2e-5 + 4 * step + flips) * want + 1e-37);
        }
    }
    check_close("score", "write behind the tile", 0, (double)terms[n * n_rows], (double)POISON, 0);
    float *reduced = check_floats(n + 1, true);
    terms[0] = NAN;
    ops->reduce(reduced, terms, n_rows, n);
    for (size_t k = 0; k < n; k++) {
        double want = 0;
        for (size_t r = 0; r < n_rows; r++)
            want += (double)terms[k * n_rows + r];
        if (isnan(want) ? !isnan(reduced[k])
                        : !(fabs((double)reduced[k] - want) <= 1e-6 * fabs(want)))
            check_fail("reduce", "sum", k, (double)reduced[k], want);
    }
    check_close("reduce", "write behind", n, (double)reduced[n], (double)POISON, 0);
    float *all[] = {logits, terms, ref, inv, out, out_norm, values, value_norm, reduced};
    for (size_t i = 0; i < COUNT(all); i++)
        check_release(all[i]);
}

void check_rows(const struct dkv_cpu_ops *ops)
{
    static const enum dkv_dtype rounds[] = {DKV_FP32, DKV_BF16, DKV_FP16};
    check_softcap(ops);
    for (size_t v = 0; v < COUNT(row_vectors); v++) {
        for (size_t i = 0; i < COUNT(key_counts); i++) {
            const size_t n_rows = row_vectors[v] * ops->lanes, n = key_counts[i];
            check_softmax_case(ops, n_rows, n);
            for (size_t k = 0; k < COUNT(rounds); k++) {
                check_weights_case(ops, n_rows, n, rounds[k]);
                check_score_case(ops, n_rows, n, 72, rounds[k], 0.0f);
                check_score_case(ops, n_rows, n, 72, rounds[k], 1e-6f);
            }
        }
    }
}
