/* Every variant of every kernel operation against double precision.
 *
 * Walks dkv_cpu_ops_table and never names a variant: one that is added is checked from then on.
 * Sizes are odd on purpose, sources stand at odd addresses with padded strides and NaN between
 * rows, outputs are poisoned and watched for writes outside. A variant that this processor cannot
 * execute is reported and passed over.
 *
 * usage: check_kernels [--bench]   with --bench the same operations are timed instead
 */
#include "tests/kernels/check_kernels.h"

#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

unsigned check_failures;
const char *check_variant;
size_t check_misaligned = 4;

static uint64_t random_state = 1;

void check_fail(const char *operation, const char *what, size_t i, double got, double want)
{
    if (check_failures++ < 20)
        fprintf(stderr, "%s %s: %s at %zu: got %.9g, want %.9g\n", check_variant, operation, what,
                i, got, want);
}

void check_close(const char *operation, const char *what, size_t i, double got, double want,
                 double tolerance)
{
    if (!(fabs(got - want) <= tolerance))
        check_fail(operation, what, i, got, want);
}

float check_uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(random_state >> 32) * 0x1p-31f;
}

float *check_floats(size_t n, bool poisoned)
{
    uint8_t *memory = aligned_alloc(64, (n * sizeof(float) + check_misaligned + 127) & ~(size_t)63);
    if (memory == NULL)
        exit(1);
    float *p = (float *)(void *)(memory + check_misaligned);
    for (size_t i = 0; i < n; i++)
        p[i] = poisoned ? POISON : check_uniform();
    return p;
}

void check_release(float *p)
{
    free((uint8_t *)p - check_misaligned);
}

/* ---- timing ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define TIME(NAME, FLOPS_PER_KEY, CALL)                                      \
    do {                                                                     \
        double best = 1e9;                                                   \
        for (int round = 0; round < 20; round++) {                           \
            const double start = now();                                      \
            for (int i = 0; i < 100; i++)                                    \
                CALL;                                                        \
            const double took = (now() - start) / 100 / N;                   \
            best = took < best ? took : best;                                \
        }                                                                    \
        printf("%-12s %-10s %8.2f ns/key", check_variant, NAME, best * 1e9); \
        if ((FLOPS_PER_KEY) > 0)                                             \
            printf(" %8.1f GFLOP/s", (FLOPS_PER_KEY) / best * 1e-9);         \
        printf("\n");                                                        \
    } while (0)

static void bench(const struct dkv_cpu_ops *ops)
{
    enum { N = DKV_TILE_KEYS, ROWS = 32, DIM = 128 };
    float *panel = check_floats(DIM * ROWS, false), *rows = check_floats(N * DIM, false);
    float *tile = check_floats(N * ROWS, false), *logits = check_floats(N * ROWS, false);
    float *row[6], norms[N], top;
    int32_t best_key[ROWS] = {0}, back_key[ROWS];
    uint16_t *stored = calloc(N * DIM, sizeof(*stored));
    uint32_t *pairs = calloc(DIM / 2 * ROWS, sizeof(*pairs));
    const void *src[N];
    for (size_t i = 0; i < 6; i++)
        row[i] = check_floats(ROWS, false);
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
        check_release(row[i]);
    check_release(panel);
    check_release(rows);
    check_release(tile);
    check_release(logits);
    free(stored);
    free(pairs);
}

int main(int argc, char **argv)
{
    const bool timing = argc > 1 && strcmp(argv[1], "--bench") == 0;
    check_misaligned = timing ? 0 : 4;
    const unsigned fpu = dkv_cpu_fpu_enter(); /* the mode that the engine computes in */
    for (size_t i = 0; dkv_cpu_ops_table[i] != NULL; i++) {
        const struct dkv_cpu_ops *ops = dkv_cpu_ops_table[i];
        check_variant = ops->name;
        if ((ops->flags & ~dkv_cpu_capable()) != 0) {
            printf("%s: not on this processor\n", check_variant);
            continue;
        }
        if (timing) {
            bench(ops);
            continue;
        }
        const unsigned before = check_failures;
        check_load(ops);
        check_products(ops);
        check_rows(ops);
        printf("%s: %s\n", check_variant, check_failures == before ? "ok" : "FAILED");
    }
    dkv_cpu_fpu_leave(fpu);
    return check_failures != 0;
}
