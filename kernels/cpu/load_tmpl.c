/* Stored rows to float32, centred and scaled on the way, with an eye on the largest element. */

static inline __attribute__((always_inline)) float load_as(float *dst, size_t ld,
                                                           const void *const *src, size_t n_keys,
                                                           size_t dim, enum dkv_dtype dtype,
                                                           float factor, const float *shift)
{
    const size_t size = dkv_dtype_bytes(dtype);
    const vf scale = v_set1(factor);
    const vf zero = v_set1(0.0f);
    vf top = zero;
    for (size_t k = 0; k < n_keys; k++) {
        const uint8_t *row = src[k];
        float *out = dst + k * ld;
        size_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            const vf x = v_from(row + d * size, dtype);
            top = v_max_bits(top, v_abs(x));
            v_store(out + d, v_fma(x, scale, shift != NULL ? v_load(shift + d) : zero));
        }
        if (d < dim) { /* half a vector: nothing behind the row is ours to read or write */
            float in[LANES] = {0}, move[LANES] = {0}, result[LANES];
            memcpy(in, row + d * size, (dim - d) * size);
            if (shift != NULL)
                memcpy(move, shift + d, (dim - d) * sizeof(float));
            const vf x = v_from(in, dtype);
            top = v_max_bits(top, v_abs(x));
            v_store(result, v_fma(x, scale, v_load(move)));
            memcpy(out + d, result, (dim - d) * sizeof(float));
        }
    }
    return v_top(top);
}

static float load(float *dst, size_t ld, const void *const *src, size_t n_keys, size_t dim,
                  enum dkv_dtype dtype, float factor, const float *shift)
{
    switch (dtype) { /* constants, so that each type gets its own loop */
    case DKV_BF16: return load_as(dst, ld, src, n_keys, dim, DKV_BF16, factor, shift);
    case DKV_FP16: return load_as(dst, ld, src, n_keys, dim, DKV_FP16, factor, shift);
    case DKV_F8_E4M3: return load_as(dst, ld, src, n_keys, dim, DKV_F8_E4M3, factor, shift);
    case DKV_F8_E5M2: return load_as(dst, ld, src, n_keys, dim, DKV_F8_E5M2, factor, shift);
    default: return load_as(dst, ld, src, n_keys, dim, DKV_FP32, factor, shift);
    }
}

static void norms(float *out, const float *rows, size_t ld, size_t n_keys, size_t dim)
{
    for (size_t k = 0; k < n_keys; k++) {
        const float *row = rows + k * ld;
        vf sum = v_set1(0.0f);
        size_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            const vf x = v_load(row + d);
            sum = v_fma(x, x, sum);
        }
        if (d < dim) {
            float rest[LANES] = {0};
            memcpy(rest, row + d, (dim - d) * sizeof(float));
            const vf x = v_load(rest);
            sum = v_fma(x, x, sum);
        }
        out[k] = v_sum(sum);
    }
}
