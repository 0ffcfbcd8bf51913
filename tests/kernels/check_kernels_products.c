/* Loading keys of every type, and products of rows with them, against double precision. */
#include "tests/kernels/check_kernels.h"

#include "kernels/convert.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t key_counts[] = {1, 7, DKV_TILE_KEYS, 253};
static const uint32_t row_vectors[] = {1, 2, 3};
static const size_t dims[] = {8, 72, 128, 200};

/* ---- load ---- */

static void store_element(uint8_t *at, enum dkv_dtype dtype, float x)
{
    const uint16_t half = dtype == DKV_BF16 ? dkv_f32_to_bf16(x) : dkv_f32_to_fp16(x);
    if (dtype == DKV_FP32)
        memcpy(at, &x, 4);
    else if (dtype == DKV_BF16 || dtype == DKV_FP16)
        memcpy(at, &half, 2);
    else
        *at = (uint8_t)((int)(check_uniform() * 59.0f) + 60) ^
              (x < 0 ? 0x80 : 0); /* finite in both types */
}

static void check_load_case(const struct dkv_cpu_ops *ops, enum dkv_dtype dtype, size_t n,
                            size_t dim, bool shifted)
{
    const size_t size = dkv_dtype_bytes(dtype), stride = dim * size + 5, ld = dim + 3;
    uint8_t *bytes = malloc(n * stride + 1);
    float *dst = check_floats(n * ld, true), *shift = check_floats(dim, false);
    const void *src[253];
    float want_top = 0, top = -1;
    memset(bytes, 0xff, n * stride + 1); /* NaN in every type */
    for (size_t k = 0; k < n; k++) {
        src[k] = bytes + 1 + k * stride;
        for (size_t d = 0; d < dim; d++) {
            uint8_t *at = bytes + 1 + k * stride + d * size;
            store_element(at, dtype, 10.0f * check_uniform());
            want_top = fmaxf(want_top, fabsf(dkv_element_to_f32(at, dtype)));
        }
    }
    const float factor = shifted ? 0.25f : 1.0f;
    ops->load(dst, ld, src, n, dim, dtype, factor, shifted ? shift : NULL, &top);
    if (top != want_top)
        check_fail("load", "largest", 0, (double)top, (double)want_top);
    for (size_t k = 0; k < n; k++) {
        for (size_t d = 0; d < ld; d++) {
            const float got = dst[k * ld + d];
            if (d >= dim) {
                check_close("load", "write behind the row", d, (double)got, (double)POISON, 0);
                continue;
            }
            const double x = (double)dkv_element_to_f32((const uint8_t *)src[k] + d * size, dtype);
            const double want = x * (double)factor + (shifted ? (double)shift[d] : 0.0);
            check_close("load", dkv_dtype_name(dtype), d, (double)got, want,
                        shifted ? 1e-6 * (fabs(x) + 1) : 0.0);
        }
    }
    store_element((uint8_t *)(uintptr_t)src[n - 1] + (dim - 1) * size, dtype, NAN);
    if (dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2)
        *((uint8_t *)(uintptr_t)src[n - 1] + dim - 1) = 0x7f;
    ops->load(dst, ld, src, n, dim, dtype, factor, NULL, &top);
    if (!isnan(top))
        check_fail("load", "NaN not reported", 0, (double)top, NAN);
    free(bytes);
    check_release(dst);
    check_release(shift);
}

void check_load(const struct dkv_cpu_ops *ops)
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
    float *panel = check_floats(dim * n_rows, false), *rows = check_floats(n * ld, false);
    float *tile = check_floats(n * n_rows + 1, true);
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
                check_fail("dot", "product", k, (double)got, want);
        }
    }
    check_close("dot", "write behind the tile", n, (double)tile[n * n_rows], (double)POISON, 0);
    check_release(panel);
    check_release(rows);
    check_release(tile);
}

static void check_dot_bf16_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n, size_t dim)
{
    const size_t stride = 2 * dim + 3;
    uint8_t *bytes = malloc(n * stride + 1);
    uint32_t *pairs = malloc(sizeof(*pairs) * n_rows * dim / 2);
    float *tile = check_floats(n * n_rows + 1, true);
    const void *src[253];
    float top = -1, want_top = 0;
    memset(bytes, 0xff, n * stride + 1);
    for (size_t k = 0; k < n; k++) {
        src[k] = bytes + 1 + k * stride;
        for (size_t d = 0; d < dim; d++) {
            uint8_t *at = bytes + 1 + k * stride + 2 * d;
            store_element(at, DKV_BF16, check_uniform());
            want_top = fmaxf(want_top, fabsf(dkv_element_to_f32(at, DKV_BF16)));
        }
    }
    for (size_t i = 0; i < n_rows * dim / 2; i++)
        pairs[i] = (uint32_t)dkv_f32_to_bf16(check_uniform()) << 16 |
                   dkv_f32_to_bf16(check_uniform());
    ops->dot_bf16(tile, pairs, n_rows, src, n, dim, 0.3f, &top, NULL);
    if (top != want_top)
        check_fail("dot_bf16", "largest", 0, (double)top, (double)want_top);
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
            check_close("dot_bf16", "product", k, (double)tile[k * n_rows + r],
                        0.3 * (double)1.0f * want, 4e-6 * size + 1e-7 * fabs(want));
        }
    }
    check_close("dot_bf16", "write behind the tile", n, (double)tile[n * n_rows], (double)POISON,
                0);
    free(bytes);
    free(pairs);
    check_release(tile);
}

static void check_accumulate_case(const struct dkv_cpu_ops *ops, size_t n_rows, size_t n,
                                  size_t dim)
{
    const size_t ld = dim + 3;
    float *panel = check_floats(dim * n_rows + 1, false),
          *before = check_floats(dim * n_rows, false);
    float *tile = check_floats(n * n_rows, false), *rows = check_floats(n * ld, false);
    float *keep = check_floats(n_rows, false);
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
                check_fail("accumulate", "sum", d, (double)got, want);
        }
    }
    check_close("accumulate", "write behind the panel", 0, (double)panel[dim * n_rows],
                (double)POISON, 0);
    check_release(panel);
    check_release(before);
    check_release(tile);
    check_release(rows);
    check_release(keep);
}

void check_products(const struct dkv_cpu_ops *ops)
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
