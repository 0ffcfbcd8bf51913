/* Dot products of bf16 rows with bf16 queries, as stored: vdpbf16ps multiplies pairs exactly and
 * adds in float32, so a key is read by broadcasting two elements at a time and is never converted.
 *
 * Eight keys by two vectors of rows: the rows' eight addresses and the panel's fit the general
 * registers, and sixteen accumulators cover the instruction's latency. Products below 2^-126 are
 * flushed, as everywhere in the engine.
 */
#define BF16_KEYS 8

static inline __m512bh pair_of(const void *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
}

static inline __m512bh pairs_of(const uint32_t *p)
{
    return (__m512bh)_mm512_loadu_si512(p);
}

DKV_BLOCK void dot_bf16_block(size_t vecs, size_t keys, float *tile, const uint32_t *pairs,
                              size_t n_rows, const void *const *src, size_t dim, vf factor,
                              struct fetch *fetch)
{
    for (size_t start = 0; start < dim; start += DOT_CHAIN) {
        const size_t end = start + DOT_CHAIN < dim ? start + DOT_CHAIN : dim;
        vf acc[BF16_KEYS][2];
#pragma GCC unroll 8
        for (size_t k = 0; k < keys; k++)
            acc[k][0] = acc[k][1] = v_set1(0.0f);
        for (size_t step = start; step < end; step += DOT_STEP) {
            fetch_step(fetch);
            for (size_t d = step; d < step + DOT_STEP; d += 2) {
                const uint32_t *at = pairs + d / 2 * n_rows;
                const __m512bh q0 = pairs_of(at);
                const __m512bh q1 = vecs > 1 ? pairs_of(at + LANES) : q0;
#pragma GCC unroll 8
                for (size_t k = 0; k < keys; k++) {
                    const __m512bh x = pair_of((const uint8_t *)src[k] + 2 * d);
                    acc[k][0] = _mm512_dpbf16_ps(acc[k][0], q0, x);
                    if (vecs > 1)
                        acc[k][1] = _mm512_dpbf16_ps(acc[k][1], q1, x);
                }
            }
        }
#pragma GCC unroll 8
        for (size_t k = 0; k < keys; k++) {
            for (size_t v = 0; v < vecs; v++) {
                float *out = tile + k * n_rows + v * LANES;
                const vf sum = v_mul(acc[k][v], factor);
                v_store(out, start == 0 ? sum : v_add(v_load(out), sum));
            }
        }
    }
}

/* The largest magnitude of a row's words. */
static __m512i largest_word(__m512i top, const uint8_t *row, size_t dim)
{
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (size_t d = 0; d < dim; d += 32) {
        const __mmask32 there = dim - d < 32 ? ((__mmask32)1 << (dim - d)) - 1 : (__mmask32)-1;
        const __m512i words = _mm512_maskz_loadu_epi16(there, row + 2 * d);
        top = _mm512_max_epu16(top, _mm512_and_si512(words, magnitude));
    }
    return top;
}

static void dot_bf16(float *tile, const uint32_t *pairs, size_t n_rows, const void *const *src,
                     size_t n_keys, size_t dim, float factor, float *top_out,
                     const struct dkv_ahead *ahead)
{
    const size_t n_blocks = n_keys / BF16_KEYS, vectors = (n_rows + 2 * LANES - 1) / (2 * LANES);
    const vf scale = v_set1(factor);
    struct fetch fetch = fetch_plan(ahead, n_blocks * (dim / DOT_STEP) * vectors);
    __m512i top = _mm512_setzero_si512();
    for (size_t key = 0; key < n_keys && top_out != NULL; key++)
        top = largest_word(top, src[key], dim);
    size_t key = 0;
    for (; key + BF16_KEYS <= n_keys; key += BF16_KEYS) {
        float *out = tile + key * n_rows;
        size_t r = 0;
        for (; r + 2 * LANES <= n_rows; r += 2 * LANES)
            dot_bf16_block(2, BF16_KEYS, out + r, pairs + r, n_rows, src + key, dim, scale, &fetch);
        if (r < n_rows)
            dot_bf16_block(1, BF16_KEYS, out + r, pairs + r, n_rows, src + key, dim, scale, &fetch);
    }
    for (; key < n_keys; key++) {
        for (size_t r = 0; r < n_rows; r += LANES)
            dot_bf16_block(1, 1, tile + key * n_rows + r, pairs + r, n_rows, src + key, dim, scale,
                           &fetch);
    }
    if (top_out != NULL) {
        const __m512i even = _mm512_slli_epi32(top, 16);
        const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32((int)0x7fff0000));
        *top_out = v_top(_mm512_castsi512_ps(_mm512_max_epu32(even, odd)));
    }
}
