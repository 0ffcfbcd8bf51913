/* What happens to a tile under the rules other than DropKV's: un-squared terms, and reductions over
 * the rows that are no plain sum. Comes after softmax_tmpl.c, whose helpers it uses. */

/* odds * distance; `given`: the tile holds p already. */
DKV_BLOCK void score_dist_as(const struct dkv_score_args *s, bool given)
{
    const vf one = v_set1(1.0f), minus_two = v_set1(-2.0f), gain = v_set1(s->gain);
    const vf zero = v_set1(0.0f);
    for (size_t r = 0; r < s->n_rows; r += LANES) {
        const vf ref = given ? zero : v_load(s->ref + r), inv = given ? one : v_load(s->inv + r);
        const vf out_norm = v_load(s->out_norm + r);
        for (size_t k = 0; k < s->n_keys; k++) {
            const size_t at = k * s->n_rows + r;
            const vf x = v_load(s->logits + at);
            const vf p = given ? x : v_mul(v_exp2(v_sub(x, ref)), inv);
            const vf weight = v_mul(v_mul(p, gain), v_reciprocal(v_sub(one, p)));
            const vf norms = v_add(out_norm, v_set1(s->value_norm[k]));
            vf distance = v_fma(v_load(s->terms + at), minus_two, norms);
            if (m_any(v_gt(v_mul(norms, v_set1(CANCELLED)), distance)))
                distance = distance_direct(s, r, k);
            v_store(s->terms + at, v_mul(weight, v_sqrt(v_max(zero, distance))));
        }
    }
}

static void score_dist(const struct dkv_score_args *s)
{
    score_dist_as(s, false);
}

static void score_given(const struct dkv_score_args *s)
{
    score_dist_as(s, true);
}

static void multiply(float *tile, const float *other, size_t n_rows, size_t n_keys)
{
    for (size_t i = 0; i < n_rows * n_keys; i += LANES)
        v_store(tile + i, v_mul(v_load(tile + i), v_load(other + i)));
}

static void reduce_weighted(float *out, const float *tile, const float *weight, size_t n_rows,
                            size_t n_keys)
{
    for (size_t k = 0; k < n_keys; k++) {
        vf sum = v_mul(v_load(tile + k * n_rows), v_load(weight));
        for (size_t r = LANES; r < n_rows; r += LANES)
            sum = v_fma(v_load(tile + k * n_rows + r), v_load(weight + r), sum);
        out[k] = v_sum(sum);
    }
}

static void reduce_largest(float *out, const float *tile, size_t n_rows, size_t n_keys)
{
    for (size_t k = 0; k < n_keys; k++) {
        vf top = v_set1(0.0f);
        for (size_t r = 0; r < n_rows; r += LANES)
            top = v_max_bits(top, v_load(tile + k * n_rows + r));
        out[k] = v_top(top);
    }
}

/* Sum of row[t] - centre, or of its square, over whole vectors and then the rest one by one. */
DKV_BLOCK float deviation(const float *row, size_t window, float centre, bool squared)
{
    const vf c = v_set1(centre);
    vf sum = v_set1(0.0f);
    size_t t = 0;
    for (; t + LANES <= window; t += LANES) {
        const vf x = v_sub(v_load(row + t), c);
        sum = squared ? v_fma(x, x, sum) : v_add(sum, x);
    }
    float total = t > 0 ? v_sum(sum) : 0.0f;
    for (; t < window; t++) {
        const float x = row[t] - centre;
        total += squared ? x * x : x;
    }
    return total;
}

/* A window that divides a vector: the lanes of each query head that is in it. */
static bool divides_lanes(size_t window)
{
    return window <= LANES && LANES % window == 0;
}

/* In every lane the sum of the lanes of its query head. */
DKV_BLOCK vf sum_heads(vf x, size_t window)
{
    if (window > 1)
        x = v_add(x, v_swap1(x));
    if (window > 2)
        x = v_add(x, v_swap2(x));
#if LANES > 4
    if (window > 4)
        x = v_add(x, v_swap4(x));
#endif
#if LANES > 8
    if (window > 8)
        x = v_add(x, v_swap8(x));
#endif
    return x;
}

/* One number of each query head whose rows begin in a vector that begins at row r. */
DKV_BLOCK void store_heads(float *out, vf x, size_t r, size_t group, size_t window)
{
    float lane[LANES];
    v_store(lane, x);
    for (size_t i = 0; i < LANES && (r + i) / window < group; i += window)
        out[(r + i) / window] = lane[i];
}

DKV_BLOCK void spread_lanes(float *out, size_t ld, const float *tile, size_t n_rows, size_t group,
                            size_t window, float weight, size_t n_keys)
{
    const vf inverse = v_set1(1.0f / (float)window), w = v_set1(weight);
    for (size_t k = 0; k < n_keys; k++)
        for (size_t r = 0; r < group * window; r += LANES) {
            const vf x = v_load(tile + k * n_rows + r);
            const vf mean = v_mul(sum_heads(x, window), inverse);
            const vf apart = v_sub(x, mean);
            const vf squares = sum_heads(v_mul(apart, apart), window);
            store_heads(out + k * ld, v_fma(w, squares, mean), r, group, window);
        }
}

DKV_BLOCK void fold_lanes(float *out, size_t ld, const float *tile, const float *weight,
                          size_t n_rows, size_t group, size_t window, size_t n_keys)
{
    for (size_t k = 0; k < n_keys; k++)
        for (size_t r = 0; r < group * window; r += LANES) {
            const vf terms = v_mul(v_load(tile + k * n_rows + r), v_load(weight + r));
            store_heads(out + k * ld, sum_heads(terms, window), r, group, window);
        }
}

static void spread(float *out, size_t ld, const float *tile, size_t n_rows, size_t group,
                   size_t window, float gamma, size_t n_keys)
{
    const float inverse = 1.0f / (float)window;
    const float weight = window > 1 ? gamma / (float)(window - 1) : 0.0f;
    switch (divides_lanes(window) ? window : 0) { /* known numbers leave no branches behind */
    case 8: spread_lanes(out, ld, tile, n_rows, group, 8, weight, n_keys); return;
    case 0: break;
    default: spread_lanes(out, ld, tile, n_rows, group, window, weight, n_keys); return;
    }
    for (size_t k = 0; k < n_keys; k++) {
        for (size_t g = 0; g < group; g++) {
            const float *row = tile + k * n_rows + g * window;
            const float mean = deviation(row, window, 0.0f, false) * inverse;
            out[k * ld + g] = mean + weight * deviation(row, window, mean, true);
        }
    }
}

static void fold(float *out, size_t ld, const float *tile, const float *weight, size_t n_rows,
                 size_t group, size_t window, size_t n_keys)
{
    switch (divides_lanes(window) ? window : 0) {
    case 8: fold_lanes(out, ld, tile, weight, n_rows, group, 8, n_keys); return;
    case 0: break;
    default: fold_lanes(out, ld, tile, weight, n_rows, group, window, n_keys); return;
    }
    for (size_t k = 0; k < n_keys; k++) {
        for (size_t g = 0; g < group; g++) {
            const float *row = tile + k * n_rows + g * window, *w = weight + g * window;
            vf sum = v_set1(0.0f);
            size_t t = 0;
            for (; t + LANES <= window; t += LANES)
                sum = v_fma(v_load(row + t), v_load(w + t), sum);
            float total = t > 0 ? v_sum(sum) : 0.0f;
            for (; t < window; t++)
                total += row[t] * w[t];
            out[k * ld + g] = total;
        }
    }
}

static void apart(float *out, size_t ld, const float *a, size_t n_a, const float *u, size_t n_keys,
                  size_t dim)
{
    for (size_t k = 0; k < n_keys; k++) {
        for (size_t i = 0; i < n_a; i++) {
            vf sum = v_set1(0.0f);
            for (size_t d = 0; d < dim; d += LANES) {
                const vf x = v_sub(v_load(a + i * dim + d), v_load(u + k * dim + d));
                sum = v_fma(x, x, sum);
            }
            out[k * ld + i] = v_sum(sum);
        }
    }
}
