/* bf16 rows to float32 at one shuffle a vector.
 *
 * A bf16 is the upper half of a float, so a zeroing word permutation both spreads sixteen of them
 * over a vector and fills the lower halves. The watch works on the words as they are, two vectors'
 * worth at once. Per 32 elements that is 4 vector operations, 6 with the watch, where the plain
 * loop has 10.
 */
#define HAVE_LOAD_BF16

/* The first `dim` elements of every row, a multiple of 32. */
DKV_BLOCK vf load_bf16_blocks(float *dst, size_t ld, const void *const *src, size_t n_keys,
                              size_t dim, vf scale, const float *shift, bool watch)
{
    const __m512i low = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0,
                                         6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi32(16 << 16));
    const __mmask32 upper_halves = 0xaaaaaaaau;
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i top = _mm512_setzero_si512();
    for (size_t k = 0; k < n_keys; k++) {
        const uint8_t *row = src[k];
        float *out = dst + k * ld;
        for (size_t d = 0; d < dim; d += 32) {
            const __m512i words = _mm512_loadu_si512(row + 2 * d);
            if (watch)
                top = _mm512_max_epu16(top, _mm512_and_si512(words, magnitude));
            const __m512i x0 = _mm512_maskz_permutexvar_epi16(upper_halves, low, words);
            const __m512i x1 = _mm512_maskz_permutexvar_epi16(upper_halves, high, words);
            const vf s0 = shift != NULL ? v_load(shift + d) : v_set1(0.0f);
            const vf s1 = shift != NULL ? v_load(shift + d + 16) : v_set1(0.0f);
            v_store(out + d, v_fma(_mm512_castsi512_ps(x0), scale, s0));
            v_store(out + d + 16, v_fma(_mm512_castsi512_ps(x1), scale, s1));
        }
    }
    const __m512i even = _mm512_slli_epi32(top, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32((int)0x7fff0000));
    return _mm512_castsi512_ps(_mm512_max_epu32(even, odd));
}

static float load_bf16(float *dst, size_t ld, const void *const *src, size_t n_keys, size_t dim,
                       float factor, const float *shift, bool watch)
{
    const size_t whole = dim & ~(size_t)31;
    const vf scale = v_set1(factor);
    vf top;
    if (shift == NULL)
        top = load_bf16_blocks(dst, ld, src, n_keys, whole, scale, NULL, true);
    else if (watch)
        top = load_bf16_blocks(dst, ld, src, n_keys, whole, scale, shift, true);
    else
        top = load_bf16_blocks(dst, ld, src, n_keys, whole, scale, shift, false);
    for (size_t k = 0; k < n_keys && whole < dim; k++) {
        for (size_t d = whole; d < dim; d += 8) /* dim is a multiple of 8 */
            top = v_max_bits(top,
                             load_rest(dst + k * ld, src[k], d, d + 8, DKV_BF16, scale, shift));
    }
    return v_top(top);
}
