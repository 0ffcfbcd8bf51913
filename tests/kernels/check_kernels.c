/* Every variant of every kernel operation against double precision.
 *
 * Walks dkv_cpu_ops_table and never names a variant: one that is added is checked from then on.
 * Sizes are odd on purpose, sources stand at odd addresses with padded strides and NaN between
 * rows, outputs are poisoned and watched for writes outside. A variant that this processor cannot
 * execute is reported and passed over.
 *
 * usage: check_kernels [--bench]   with --bench the same operations are timed instead
 */
#include "kernels/convert.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ops.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define POISON 0x1.a5a5a6p+100f /* no operation makes it */

static unsigned failures;
static const char *variant;

static void fail(const char *operation, const char *what, size_t i, double got, double want)
{
    if (failures++ < 20)
        fprintf(stderr, "%s %s: %s at %zu: got %.9g, want %.9g\n", variant, operation, what, i, got,
                want);
}

static void close_to(const char *operation, const char *what, size_t i, double got, double want,
                     double tolerance)
{
    if (!(fabs(got - want) <= tolerance))
        fail(operation, what, i, got, want);
}

static uint64_t random_state = 1;

static float uniform(void) /* -1..1 */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(random_state >> 32) * 0x1p-31f;
}

/* Checks place floats at multiples of 4 and of nothing larger; timing where an engine would. */
static size_t misaligned = 4;

static float *floats(size_t n, bool poisoned)
{
    uint8_t *memory = aligned_alloc(64, (n * sizeof(float) + misaligned + 127) & ~(size_t)63);
    if (memory == NULL)
        exit(1);
    float *p = (float *)(void *)(memory + misaligned);
    for (size_t i = 0; i < n; i++)
        p[i] = poisoned ? POISON : uniform();
    return p;
}

static void release(float *p)
{
    free((uint8_t *)p - misaligned);
}

static const size_t key_counts[] = {1, 7, DKV_TILE_KEYS, 253};
static const uint32_t row_vectors[] = {1, 2, 3};
static const size_t dims[] = {8, 72, 128, 200};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- load ---- */

static void store_element(uint8_t *at, enum dkv_dtype dtype, float x)
{
    const uint16_t half = dtype == DKV_BF16 ? dkv_f32_to_bf16(x) : dkv_f32_to_fp16(x);
    if (dtype == DKV_FP32)
        memcpy(at, &x, 4);
    else if (dtype == DKV_BF16 || dtype == DKV_FP16)
        memcpy(at, &half, 2);
    else
        *at = (uint8_t)((int)(uniform() * 59.0f) + 60) ^
              (x < 0 ? 0x80 : 0); /* finite in both types */
}

static void check_load_case(const struct dkv_cpu_ops *ops, enum dkv_dtype dtype, size_t n,
                            size_t dim, bool shifted)
{
    const size_t size = dkv_dtype_bytes(dtype), stride = dim * size + 5, ld = dim + 3;
    uint8_t *bytes = malloc(n * stride + 1);
    float *dst = floats(n * ld, true), *shift = floats(dim, false);
    const void *src[253];
    float want_top = 0, top = -1;
    memset(bytes, 0xff, n * stride + 1); /* NaN in every type */
    for (size_t k = 0; k < n; k++) {
        src[k] = bytes + 1 + k * stride;
        for (size_t d = 0; d < dim; d++) {
            uint8_t *at = bytes + 1 + k * stride + d * size;
            store_element(at, dtype, 10.0f * uniform());
            want_top = fmaxf(want_top, fabsf(dkv_element_to_f32(at, dtype)));
        }
    }
    const float factor = shifted ? 0.25f : 1.0f;
    ops->load(dst, ld, src, n, dim, dtype, factor, shifted ? shift : NULL, &top);
    if (top != want_top)
        fail("load", "largest", 0, (double)top, (double)want_top);
    for (size_t k = 0; k < n; k++) {
        for (size_t d = 0; d < ld; d++) {
            const float got = dst[k * ld + d];
            if (d >= dim) {
                close_to("load", "write behind the row", d, (double)got, (double)POISON, 0);
                continue;
            }
            const double x = (double)dkv_element_to_f32((const uint8_t *)src[k] + d * size, dtype);
            const double want = x * (double)factor + (shifted ? (double)shift[d] : 0.0);
            close_to("load", dkv_dtype_name(dtype), d, (double)got, want,
                     shifted ? 1e-6 * (fabs(x) + 1) : 0.0);
        }
    }
    store_element((uint8_t *)(uintptr_t)src[n - 1] + (dim - 1) * size, dtype, NAN);
    if (dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2)
        *((uint8_t *)(uintptr_t)src[n - 1] + dim - 1) = 0x7f;
    ops->load(dst, ld, src, n, dim, dtype, factor, NULL, &top);
    if (!isnan(top))
        fail("load", "NaN not reported", 0, (double)top, NAN);
    free(bytes);
    release(dst);
    release(shift);
}

static void check_load(const struct dkv_cpu_ops *ops)
{
    for (int dtype = DKV_BF16; dtype <= DKV_F8_E5M2; dtype++) {
        for (size_t i = 0; i < COUNT(key_counts); i++) {
            for (size_t j = 0; j < COUNT(dims); j++) {
                check_load_case(ops, (enum dkv_dtype)dtype, key_counts[i], dims[j], false);
                check_load_case(ops, (enum dkv_dtype)dtype, key_counts[i], dims[j], true);
            }
        }
    }
}

/* ---- matrix products ---- */

static void check_dot_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n, size_t dim)
{
    const size_t ld = dim + 3;
    float *panel = floats(dim * n_rows, false), *rows = floats(n * ld, false);
    float *tile = floats(n * n_rows + 1, true);
    const size_t nan_key = n / 2;
    if (n > 1)
        rows[nan_key * ld + dim / 2] = NAN;
    ops->dot(tile, panel, n_rows, rows, ld, n, dim, 0.5f, NULL);
    for (size_t k = 0; k < n; k++) {
        for (size_t r = 0; r < n_rows; r++) {
            double want = 0, size = 0;
            for (size_t d = 0; d < dim; d++) {
                const double x = 0.5 * (double)panel[d * n_rows + r] * (double)rows[k * ld + d];
                want += x;
                size += fabs(x);
            }
            const float got = tile[k * n_rows + r];
            if (isnan(want) ? !isnan(got) : !(fabs((double)got - want) <= 4e-6 * size))
                fail("dot", "product", k, (double)got, want);
        }
    }
    close_to("dot", "write behind the tile", n, (double)tile[n * n_rows], (double)POISON, 0);
    release(panel);
    release(rows);
    release(tile);
}

static void check_dot_bf16_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n, size_t dim)
{
    const size_t stride = 2 * dim + 3;
    uint8_t *bytes = malloc(n * stride + 1);
    uint32_t *pairs = malloc(sizeof(*pairs) * n_rows * dim / 2);
    float *tile = floats(n * n_rows + 1, true);
    const void *src[253];
    float top = -1, want_top = 0;
    memset(bytes, 0xff, n * stride + 1);
    for (size_t k = 0; k < n; k++) {
        src[k] = bytes + 1 + k * stride;
        for (size_t d = 0; d < dim; d++) {
            uint8_t *at = bytes + 1 + k * stride + 2 * d;
            store_element(at, DKV_BF16, uniform());
            want_top = fmaxf(want_top, fabsf(dkv_element_to_f32(at, DKV_BF16)));
        }
    }
    for (size_t i = 0; i < n_rows * dim / 2; i++)
        pairs[i] = (uint32_t)dkv_f32_to_bf16(uniform()) << 16 | dkv_f32_to_bf16(uniform());
    ops->dot_bf16(tile, pairs, n_rows, src, n, dim, 0.3f, &top, NULL);
    if (top != want_top)
        fail("dot_bf16", "largest", 0, (double)top, (double)want_top);
    for (size_t k = 0; k < n; k++) {
        for (size_t r = 0; r < n_rows; r++) {
            double want = 0, size = 0;
            for (size_t d = 0; d < dim; d++) {
                const uint32_t pair = pairs[d / 2 * n_rows + r];
                const float q = dkv_bf16_to_f32((uint16_t)(d % 2 ? pair >> 16 : pair));
                const float x = dkv_element_to_f32((const uint8_t *)src[k] + 2 * d, DKV_BF16);
                want += (double)q * (double)x;
                size += fabs((double)q * (double)x);
            }
            close_to("dot_bf16", "product", k, (double)tile[k * n_rows + r],
                     0.3 * (double)1.0f * want, 4e-6 * size + 1e-7 * fabs(want));
        }
    }
    close_to("dot_bf16", "write behind the tile", n, (double)tile[n * n_rows], (double)POISON, 0);
    free(bytes);
    free(pairs);
    release(tile);
}

static void check_accumulate_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n,
                                  size_t dim)
{
    const size_t ld = dim + 3;
    float *panel = floats(dim * n_rows + 1, false), *before = floats(dim * n_rows, false);
    float *tile = floats(n * n_rows, false), *rows = floats(n * ld, false);
    float *keep = floats(n_rows, false);
    memcpy(panel, before, sizeof(float) * dim * n_rows);
    panel[dim * n_rows] = POISON;
    rows[dim / 2] = NAN;
    ops->accumulate(panel, keep, n_rows, tile, rows, ld, n, dim, NULL);
    for (size_t d = 0; d < dim; d++) {
        for (size_t r = 0; r < n_rows; r++) {
            double want = (double)before[d * n_rows + r] * (double)keep[r], size = fabs(want);
            for (size_t k = 0; k < n; k++) {
                const double x = (double)tile[k * n_rows + r] * (double)rows[k * ld + d];
                want += x;
                size += fabs(x);
            }
            const float got = panel[d * n_rows + r];
            if (isnan(want) ? !isnan(got) : !(fabs((double)got - want) <= 4e-6 * size))
                fail("accumulate", "sum", d, (double)got, want);
        }
    }
    close_to("accumulate", "write behind the panel", 0, (double)panel[dim * n_rows], (double)POISON,
             0);
    release(panel);
    release(before);
    release(tile);
    release(rows);
    release(keep);
}

static void check_products(const struct dkv_cpu_ops *ops)
{
    for (size_t v = 0; v < COUNT(row_vectors); v++) {
        for (size_t i = 0; i < COUNT(key_counts); i++) {
            for (size_t j = 0; j < COUNT(dims); j++) {
                const size_t n_rows = row_vectors[v] * ops->lanes;
                check_dot_case(ops, n_rows, key_counts[i], dims[j]);
                check_accumulate_case(ops, n_rows, key_counts[i], dims[j]);
                if (ops->dot_bf16 != NULL)
                    check_dot_bf16_case(ops, n_rows, key_counts[i], dims[j]);
            }
        }
    }
}

/* ---- softmax ---- */

/* Three tiles in a row, then the state against all logits at once. */
static void check_softmax_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n)
{
    enum { TILES = 3 };
    float *best = floats(n_rows, false), *ref = floats(n_rows, false), *keep = floats(n_rows, true);
    float *sum = floats(n_rows, true), *back = floats(n_rows, true);
    int32_t *best_key = malloc(sizeof(int32_t) * n_rows),
            *back_key = malloc(sizeof(int32_t) * n_rows);
    float *logits[TILES], *tile = floats(n * n_rows, true);
    double *total = calloc(n_rows, sizeof(double));
    const struct dkv_softmax_rows rows = {best, ref, keep, sum, back, best_key, back_key};
    for (size_t r = 0; r < n_rows; r++) {
        best[r] = -HUGE_VALF;
        ref[r] = -FLT_MAX;
        best_key[r] = -1;
    }
    for (size_t t = 0; t < TILES; t++) {
        logits[t] = floats(n * n_rows, false);
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
            close_to("softmax", "weight", i, (double)tile[i], want,
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
        close_to("softmax", "best key", r, best_key[r], want_key, 0);
        close_to("softmax", "sum", r, total[r], want, 1e-6 * want);
    }
    for (size_t t = 0; t < TILES; t++)
        release(logits[t]);
    release(best);
    release(ref);
    release(keep);
    release(sum);
    release(back);
    release(tile);
    free(best_key);
    free(back_key);
    free(total);
}

static void check_softcap(const struct dkv_cpu_ops *ops)
{
    const size_t n = 16 * ops->lanes;
    float *tile = floats(n, false), *in = floats(n, false);
    for (size_t i = 0; i < n; i++)
        in[i] *= i % 3 == 0 ? 100.0f : i % 3 == 1 ? 1.0f : 1e-3f;
    memcpy(tile, in, sizeof(float) * n);
    ops->softcap(tile, n, 50.0f);
    for (size_t i = 0; i < n; i++) {
        const double want = 50.0 * tanh((double)in[i]);
        close_to("softcap", "tanh", i, (double)tile[i], want, 4e-7 * fabs(want));
    }
    release(tile);
    release(in);
}

static void check_weights_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n,
                               enum dkv_dtype round)
{
    float *tile = floats(n * n_rows, false), *in = floats(n * n_rows, false);
    float *ref = floats(n_rows, false), *inv = floats(n_rows, false), *sum = floats(n_rows, true);
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
            close_to("weights", "p", i, (double)tile[i], p,
                     (1e-6 + step) * p + 0x1p-24 * (round == DKV_FP16));
            if (tile[i] != dkv_round_to_dtype(tile[i], round))
                fail("weights", "not rounded", i, (double)tile[i], p);
            want_sum += (double)tile[i];
        }
        close_to("weights", "sum", r, (double)sum[r], want_sum, 1e-5 * want_sum);
    }
    release(tile);
    release(in);
    release(ref);
    release(inv);
    release(sum);
}

/* ---- score ---- */

static void check_score_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n, size_t dim,
                             enum dkv_dtype round, float eps)
{
    const size_t ld = dim + 3;
    float *logits = floats(n * n_rows, false), *terms = floats(n * n_rows + 1, true);
    float *ref = floats(n_rows, false), *inv = floats(n_rows, false);
    float *out = floats(dim * n_rows, false), *out_norm = floats(n_rows, true);
    float *values = floats(n * ld, false), *value_norm = floats(n, true);
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
        values[d] = out[d * n_rows] * (1.0f + 1e-3f * uniform());
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
        close_to("norms", "square", k, (double)value_norm[k], norm, 1e-6 * norm);
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
            close_to("score", "term", i, (double)terms[i], want,
                     (2e-5 + 4 * step + flips) * want + 1e-37);
        }
    }
    close_to("score", "write behind the tile", 0, (double)terms[n * n_rows], (double)POISON, 0);
    float *reduced = floats(n + 1, true);
    terms[0] = NAN;
    ops->reduce(reduced, terms, n_rows, n);
    for (size_t k = 0; k < n; k++) {
        double want = 0;
        for (size_t r = 0; r < n_rows; r++)
            want += (double)terms[k * n_rows + r];
        if (isnan(want) ? !isnan(reduced[k])
                        : !(fabs((double)reduced[k] - want) <= 1e-6 * fabs(want)))
            fail("reduce", "sum", k, (double)reduced[k], want);
    }
    close_to("reduce", "write behind", n, (double)reduced[n], (double)POISON, 0);
    float *all[] = {logits, terms, ref, inv, out, out_norm, values, value_norm, reduced};
    for (size_t i = 0; i < COUNT(all); i++)
        release(all[i]);
}

static void check_rows(const struct dkv_cpu_ops *ops)
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

/* ---- timing ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define TIME(NAME, FLOPS_PER_KEY, CALL)                                \
    do {                                                               \
        double best = 1e9;                                             \
        for (int round = 0; round < 20; round++) {                     \
            const double start = now();                                \
            for (int i = 0; i < 100; i++)                              \
                CALL;                                                  \
            const double took = (now() - start) / 100 / N;             \
            best = took < best ? took : best;                          \
        }                                                              \
        printf("%-12s %-10s %8.2f ns/key", variant, NAME, best * 1e9); \
        if ((FLOPS_PER_KEY) > 0)                                       \
            printf(" %8.1f GFLOP/s", (FLOPS_PER_KEY) / best * 1e-9);   \
        printf("\n");                                                  \
    } while (0)

static void bench(const struct dkv_cpu_ops *ops)
{
    enum { N = DKV_TILE_KEYS, ROWS = 32, DIM = 128 };
    float *panel = floats(DIM * ROWS, false), *rows = floats(N * DIM, false);
    float *tile = floats(N * ROWS, false), *logits = floats(N * ROWS, false);
    float *row[6], norms[N], top;
    int32_t best_key[ROWS] = {0}, back_key[ROWS];
    uint16_t *stored = calloc(N * DIM, sizeof(*stored));
    uint32_t *pairs = calloc(DIM / 2 * ROWS, sizeof(*pairs));
    const void *src[N];
    for (size_t i = 0; i < 6; i++)
        row[i] = floats(ROWS, false);
    for (size_t i = 0; i < N; i++)
        src[i] = stored + i * DIM;
    for (size_t r = 0; r < ROWS; r++)
        row[0][r] = row[1][r] = 10.0f;
    const struct dkv_softmax_rows state = {row[0], row[1],   row[2],  row[3],
                                           row[4], best_key, back_key};
    const struct dkv_score_args args = {
        .n_rows = ROWS,
        .n_keys = N,
        .v_dim = DIM,
        .v_ld = DIM,
        .logits = logits,
        .terms = tile,
        .ref = row[1],
        .inv = row[5],
        .out = panel,
        .out_norm = row[2],
        .values = rows,
        .value_norm = norms,
        .gain = 1.0f,
        .round = DKV_FP32,
    };
    ops->norms(norms, rows, DIM, N, DIM);
    for (size_t r = 0; r < ROWS; r++)
        row[2][r] = 50.0f;
    TIME("load", 0.0, ops->load(rows, DIM, src, N, DIM, DKV_BF16, 1.0f, NULL, &top));
    TIME("load again", 0.0, ops->load(rows, DIM, src, N, DIM, DKV_BF16, 1.0f, NULL, NULL));
    TIME("dot", 2.0 * ROWS * DIM, ops->dot(tile, panel, ROWS, rows, DIM, N, DIM, 1.0f, NULL));
    if (ops->dot_bf16 != NULL)
        TIME("dot_bf16", 2.0 * ROWS * DIM,
             ops->dot_bf16(tile, pairs, ROWS, src, N, DIM, 1.0f, &top, NULL));
    TIME("accumulate", 2.0 * ROWS * DIM,
         ops->accumulate(panel, row[3], ROWS, logits, rows, DIM, N, DIM, NULL));
    TIME("softmax", 0.0, ops->softmax(&state, tile, ROWS, N, 0));
    TIME("score", 0.0, ops->score(&args));
    TIME("norms", 0.0, ops->norms(norms, rows, DIM, N, DIM));
    TIME("reduce", 0.0, ops->reduce(norms, tile, ROWS, N));
    for (size_t i = 0; i < 6; i++)
        release(row[i]);
    release(panel);
    release(rows);
    release(tile);
    release(logits);
    free(stored);
    free(pairs);
}

int main(int argc, char **argv)
{
    const bool timing = argc > 1 && strcmp(argv[1], "--bench") == 0;
    misaligned = timing ? 0 : 4;
    const unsigned fpu = dkv_cpu_fpu_enter(); /* the mode that the engine computes in */
    for (size_t i = 0; dkv_cpu_ops_table[i] != NULL; i++) {
        const struct dkv_cpu_ops *ops = dkv_cpu_ops_table[i];
        variant = ops->name;
        if ((ops->flags & ~dkv_cpu_capable()) != 0) {
            printf("%s: not on this processor\n", variant);
            continue;
        }
        if (timing) {
            bench(ops);
            continue;
        }
        const unsigned before = failures;
        check_load(ops);
        check_products(ops);
        check_rows(ops);
        printf("%s: %s\n", variant, failures == before ? "ok" : "FAILED");
    }
    dkv_cpu_fpu_leave(fpu);
    return failures != 0;
}
