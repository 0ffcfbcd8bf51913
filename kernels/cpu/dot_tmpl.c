/* Dot products and output accumulation: the two matrix products that all time goes into.
 *
 * Both hold a block of accumulators in registers, two vectors of query rows wide, and per step load
 * two vectors and broadcast one float per key (or per value element): DOT_KEYS + 2 loads for
 * 2 * DOT_KEYS FMAs, which keeps both FMA ports busy from L1.
 */

/* Rows to fetch ahead, dealt out in small portions between multiply-adds: a core has a dozen or so
 * line fill buffers, and a burst that fills them stalls the products' own loads. */
struct fetch {
    const void *const *row, *const *end;
    size_t at, row_bytes; /* `at`: next byte of *row to ask for */
    size_t portion;       /* lines per step */
};

static struct fetch fetch_plan(const struct dkv_ahead *ahead, size_t n_steps)
{
    if (ahead == NULL || n_steps == 0)
        return (struct fetch){0};
    const uint32_t lines = (uint32_t)(ahead->n_rows * ((ahead->row_bytes + 63) / 64));
    const uint32_t steps = (uint32_t)n_steps; /* a 64-bit division would be felt */
    return (struct fetch){
        .row = ahead->rows,
        .end = ahead->rows + ahead->n_rows,
        .row_bytes = ahead->row_bytes,
        .portion = (lines + steps - 1) / steps,
    };
}

/* Always inline: gcc takes a function that only prefetches for one without effects and drops it. */
DKV_BLOCK void fetch_step(struct fetch *fetch)
{
    for (size_t i = 0; i < fetch->portion && fetch->row < fetch->end; i++) {
        __builtin_prefetch((const char *)*fetch->row + fetch->at, 0, 2);
        fetch->at += 64;
        if (fetch->at >= fetch->row_bytes) {
            fetch->at = 0;
            fetch->row++;
        }
    }
}

#define DOT_STEP 8  /* elements between two fetches; dim is a multiple of 8 */
#define ACC_STEP 12 /* keys between two fetches */

/* Additions of one accumulator before it is set aside: shorter chains lose fewer digits. */
#define DOT_CHAIN 64

/* `vecs` vectors of rows times `keys` keys; both constants after inlining. */
DKV_BLOCK void dot_block(size_t vecs, size_t keys, float *tile, const float *panel, size_t n_rows,
                         const float *rows, size_t ld, size_t dim, vf factor, struct fetch *fetch)
{
    for (size_t start = 0; start < dim; start += DOT_CHAIN) {
        const size_t end = start + DOT_CHAIN < dim ? start + DOT_CHAIN : dim;
        vf acc[DOT_KEYS][2];
#pragma GCC unroll 12
        for (size_t k = 0; k < keys; k++)
            acc[k][0] = acc[k][1] = v_set1(0.0f);
        for (size_t step = start; step < end; step += DOT_STEP) {
            fetch_step(fetch);
            for (size_t d = step; d < step + DOT_STEP; d++) {
                const vf q0 = v_load(panel + d * n_rows);
                const vf q1 = vecs > 1 ? v_load(panel + d * n_rows + LANES) : q0;
#pragma GCC unroll 12
                for (size_t k = 0; k < keys; k++) {
                    const vf x = v_set1(rows[k * ld + d]);
                    acc[k][0] = v_fma(q0, x, acc[k][0]);
                    if (vecs > 1)
                        acc[k][1] = v_fma(q1, x, acc[k][1]);
                }
            }
        }
#pragma GCC unroll 12
        for (size_t k = 0; k < keys; k++) {
            for (size_t v = 0; v < vecs; v++) {
                float *out = tile + k * n_rows + v * LANES;
                v_store(out, start == 0 ? v_mul(acc[k][v], factor)
                                        : v_fma(acc[k][v], factor, v_load(out)));
            }
        }
    }
}

static void dot(float *tile, const float *panel, size_t n_rows, const float *rows, size_t ld,
                size_t n_keys, size_t dim, float factor, const struct dkv_ahead *ahead)
{
    const vf scale = v_set1(factor);
    const size_t n_blocks = n_keys / DOT_KEYS;
    const size_t pairs = (n_rows + 2 * LANES - 1) / (2 * LANES);
    size_t key = 0;
    struct fetch fetch = fetch_plan(ahead, n_blocks * (dim / DOT_STEP) * pairs);
    for (size_t block = 0; block < n_blocks; block++, key += DOT_KEYS) {
        float *out = tile + key * n_rows;
        const float *in = rows + key * ld;
        size_t r = 0;
        for (; r + 2 * LANES <= n_rows; r += 2 * LANES)
            dot_block(2, DOT_KEYS, out + r, panel + r, n_rows, in, ld, dim, scale, &fetch);
        if (r < n_rows)
            dot_block(1, DOT_KEYS, out + r, panel + r, n_rows, in, ld, dim, scale, &fetch);
    }
    for (; key < n_keys; key++) {
        for (size_t r = 0; r < n_rows; r += LANES)
            dot_block(1, 1, tile + key * n_rows + r, panel + r, n_rows, rows + key * ld, ld, dim,
                      scale, &fetch);
    }
}

/* `vecs` vectors of rows times `dims` output elements; both constants after inlining. */
DKV_BLOCK void accumulate_block(size_t vecs, size_t dims, float *panel, const float *keep,
                                size_t n_rows, const float *tile, const float *rows, size_t ld,
                                size_t n_keys, struct fetch *fetch)
{
    vf acc[ACC_DIMS][2];
#pragma GCC unroll 12
    for (size_t i = 0; i < dims; i++)
        acc[i][0] = acc[i][1] = v_set1(0.0f);
    for (size_t k = 0; k < n_keys; k++) {
        if (k % ACC_STEP == 0)
            fetch_step(fetch);
        const vf p0 = v_load(tile + k * n_rows);
        const vf p1 = vecs > 1 ? v_load(tile + k * n_rows + LANES) : p0;
#pragma GCC unroll 12
        for (size_t i = 0; i < dims; i++) {
            const vf x = v_set1(rows[k * ld + i]);
            acc[i][0] = v_fma(p0, x, acc[i][0]);
            if (vecs > 1)
                acc[i][1] = v_fma(p1, x, acc[i][1]);
        }
    }
#pragma GCC unroll 12
    for (size_t i = 0; i < dims; i++) {
        for (size_t v = 0; v < vecs; v++) {
            float *out = panel + i * n_rows + v * LANES;
            v_store(out, v_fma(v_load(out), v_load(keep + v * LANES), acc[i][v]));
        }
    }
}

static void accumulate(float *panel, const float *keep, size_t n_rows, const float *tile,
                       const float *rows, size_t ld, size_t n_keys, size_t dim,
                       const struct dkv_ahead *ahead)
{
    /* dim is a multiple of 8: wide blocks as long as they leave one, then narrow ones */
    const size_t wide = dim / (2 * ACC_DIMS) * (2 * ACC_DIMS);
    const size_t pairs = (n_rows + 2 * LANES - 1) / (2 * LANES);
    struct fetch fetch = fetch_plan(ahead, pairs * (dim / ACC_DIMS) * (n_keys / ACC_STEP));
    for (size_t d = 0; d < dim; d += d < wide ? ACC_DIMS : ACC_REST) {
        float *out = panel + d * n_rows;
        size_t r = 0;
        for (; r + 2 * LANES <= n_rows; r += 2 * LANES) {
            if (d < wide)
                accumulate_block(2, ACC_DIMS, out + r, keep + r, n_rows, tile + r, rows + d, ld,
                                 n_keys, &fetch);
            else
                accumulate_block(2, ACC_REST, out + r, keep + r, n_rows, tile + r, rows + d, ld,
                                 n_keys, &fetch);
        }
        if (r < n_rows && d < wide)
            accumulate_block(1, ACC_DIMS, out + r, keep + r, n_rows, tile + r, rows + d, ld, n_keys,
                             &fetch);
        else if (r < n_rows)
            accumulate_block(1, ACC_REST, out + r, keep + r, n_rows, tile + r, rows + d, ld, n_keys,
                             &fetch);
    }
}
