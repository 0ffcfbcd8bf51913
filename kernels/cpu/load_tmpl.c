/* Stored rows to float32, centred and scaled on the way, with an eye on the largest element. */

DKV_BLOCK float load_as(float *dst, size_t ld, const void *const *src, size_t n_keys, size_t dim,
                        enum dkv_dtype dtype, float factor, const float *shift, bool watch)
{
    const size_t size = dkv_dtype_bytes(dtype), whole = dim - dim % LANES;
    const vf scale = v_set1(factor), zero = v_set1(0.0f);
    vf top = zero;
    for (size_t k = 0; k < n_keys; k++) {
        const uint8_t *row = src[k];
        float *out = dst + k * ld;
        for (size_t d = 0; d < whole; d += LANES) {
            const vf x = v_from(row + d * size, dtype);
            if (watch)
                top = v_max_bits(top, v_abs(x));
            v_store(out + d, v_fma(x, scale, shift != NULL ? v_load(shift + d) : zero));
        }
    }
    for (size_t k = 0; k < n_keys && whole < dim; k++)
        top = v_max_bits(top, load_rest(dst + k * ld, src[k], whole, dim, dtype, scale, shift));
    return v_top(top);
}

/* The type and the watch as constants, so that each gets its own loop. */
static void load(float *dst, size_t ld, const void *const *src, size_t n_keys, size_t dim,
                 enum dkv_dtype dtype, float factor, const float *shift, float *top_out)
{
    float top = 0.0f;
#define LOAD(TYPE)                                                                        \
    top = top_out != NULL ? load_as(dst, ld, src, n_keys, dim, TYPE, factor, shift, true) \
                          : load_as(dst, ld, src, n_keys, dim, TYPE, factor, shift, false)
    switch (dtype) {
    case DKV_BF16:
#ifdef HAVE_LOAD_BF16
        top = load_bf16(dst, ld, src, n_keys, dim, factor, shift, top_out != NULL);
#else
        LOAD(DKV_BF16);
#endif
        break;
    case DKV_FP16: LOAD(DKV_FP16); break;
    case DKV_F8_E4M3: LOAD(DKV_F8_E4M3); break;
    case DKV_F8_E5M2: LOAD(DKV_F8_E5M2); break;
    default: LOAD(DKV_FP32); break;
    }
#undef LOAD
    if (top_out != NULL)
        *top_out = top;
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
