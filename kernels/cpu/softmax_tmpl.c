/* What happens to a tile between the matrix products: softmax steps and score terms. */

/* 2^x for x up to 127; below -126 it is 0. One ulp or so: the polynomial is of degree 6 on
 * [-1/2, 1/2]. NaN gives NaN. */
static inline vf v_exp2(vf x)
{
    const vf y = v_max(v_set1(-200.0f), x); /* -inf - -inf would be NaN below */
    const vf n = v_rint(y);
    const vf r = v_sub(y, n);
    vf p = v_set1(1.535336188319500e-4f);
    p = v_fma(p, r, v_set1(1.339887440266574e-3f));
    p = v_fma(p, r, v_set1(9.618437357674640e-3f));
    p = v_fma(p, r, v_set1(5.550332471162809e-2f));
    p = v_fma(p, r, v_set1(2.402264791363012e-1f));
    p = v_fma(p, r, v_set1(6.931472028550421e-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_scale2(p, n);
}

/* tanh: an odd polynomial near zero, where it keeps relative precision, and
 * 1 - 2 / (e^(2|x|) + 1) beyond. */
static void softcap(float *tile, size_t n, float limit)
{
    for (size_t i = 0; i < n; i += LANES) { /* tiles are whole vectors */
        const vf x = v_load(tile + i);
        const vf a = v_abs(x);
        const vf s = v_mul(x, x);
        vf p = v_set1(-5.70498872745e-3f);
        p = v_fma(p, s, v_set1(2.06390887954e-2f));
        p = v_fma(p, s, v_set1(-5.37397155531e-2f));
        p = v_fma(p, s, v_set1(1.33314422036e-1f));
        p = v_fma(p, s, v_set1(-3.33332819422e-1f));
        const vf small = v_fma(v_mul(p, s), x, x);
        const vf cut = v_select(v_gt(a, v_set1(20.0f)), v_set1(20.0f), a);
        const vf e = v_exp2(v_mul(cut, v_set1(2.885390081777927f)));
        const vf large = v_sub(v_set1(1.0f), v_div(v_set1(2.0f), v_add(e, v_set1(1.0f))));
        const vf signed_large = v_select(v_gt(v_set1(0.0f), x), v_sub(v_set1(0.0f), large), large);
        const vf y = v_select(v_gt(a, v_set1(0.625f)), signed_large, small);
        v_store(tile + i, v_mul(y, v_set1(limit)));
    }
}

/* The key of the tile that dethrones each row's best: its logit is taken out of the tile, and the
 * largest of the rest is returned. `now` marks the rows that this happens to. */
static vf softmax_dethrone(float *tile, size_t n_rows, size_t n_keys, vf top, vm now, vf *index_out)
{
    const vf none = v_set1(-HUGE_VALF);
    vf index = v_set1(0.0f), rest = none;
    for (size_t k = n_keys; k-- > 0;) /* backwards: of equals the first stays */
        index = v_select(v_eq(v_load(tile + k * n_rows), top), v_set1((float)k), index);
    for (size_t k = 0; k < n_keys; k++) {
        vf z = v_load(tile + k * n_rows);
        z = v_select(m_and(now, v_eq(index, v_set1((float)k))), none, z);
        v_store(tile + k * n_rows, z);
        rest = v_max(rest, z);
    }
    *index_out = index;
    return rest;
}

/* One vector of rows: the bookkeeping of `best`. Returns the largest logit of the others in the
 * tile, the dethroned included, whose logit goes to old_best (-inf: there is none). */
static vf softmax_best(const struct dkv_softmax_rows *rows, size_t r, float *tile, size_t n_rows,
                       size_t n_keys, int32_t first_key, vf *old_best)
{
    const vf none = v_set1(-HUGE_VALF);
    vf top = none, top2 = none;
    size_t k = 0;
    for (; k + 2 <= n_keys; k += 2) {
        top = v_max(top, v_load(tile + k * n_rows));
        top2 = v_max(top2, v_load(tile + (k + 1) * n_rows));
    }
    if (k < n_keys)
        top = v_max(top, v_load(tile + k * n_rows));
    top = v_max(top, top2);

    const vf best = v_load(rows->best + r);
    const vm now = v_gt(top, best);
    *old_best = none;
    if (!m_any(now))
        return top;

    vf index;
    const vf rest = softmax_dethrone(tile, n_rows, n_keys, top, now, &index);
    float taken[LANES], key[LANES];
    v_store(taken, v_select(now, v_set1(1.0f), v_set1(0.0f)));
    v_store(key, index);
    for (size_t i = 0; i < LANES; i++) {
        if (taken[i] != 0.0f) {
            rows->back_key[r + i] = rows->best_key[r + i];
            rows->best_key[r + i] = first_key + (int32_t)key[i];
        }
    }
    *old_best = v_select(now, best, none);
    v_store(rows->best + r, v_select(now, top, best));
    return v_max(rest, *old_best);
}

static void softmax(const struct dkv_softmax_rows *rows, float *tile, size_t n_rows, size_t n_keys,
                    int32_t first_key)
{
    for (size_t r = 0; r < n_rows; r += LANES) {
        float *column = tile + r;
        vf old_best;
        const vf top = softmax_best(rows, r, column, n_rows, n_keys, first_key, &old_best);
        const vf old_ref = v_load(rows->ref + r);
        const vf ref = v_max(old_ref, top);
        vf sum = v_set1(0.0f), sum2 = sum;
        size_t k = 0;
        for (; k + 2 <= n_keys; k += 2) {
            const vf p = v_exp2(v_sub(v_load(column + k * n_rows), ref));
            const vf p2 = v_exp2(v_sub(v_load(column + (k + 1) * n_rows), ref));
            v_store(column + k * n_rows, p);
            v_store(column + (k + 1) * n_rows, p2);
            sum = v_add(sum, p);
            sum2 = v_add(sum2, p2);
        }
        if (k < n_keys) {
            const vf p = v_exp2(v_sub(v_load(column + k * n_rows), ref));
            v_store(column + k * n_rows, p);
            sum = v_add(sum, p);
        }
        v_store(rows->sum + r, v_add(sum, sum2));
        v_store(rows->ref + r, ref);
        v_store(rows->keep + r, v_exp2(v_sub(old_ref, ref)));
        v_store(rows->back + r, v_exp2(v_sub(old_best, ref)));
    }
}

static void weights(float *tile, size_t n_rows, size_t n_keys, const float *ref, const float *inv,
                    enum dkv_dtype round, float *sum)
{
    for (size_t r = 0; r < n_rows; r += LANES) {
        const vf base = v_load(ref + r), scale = v_load(inv + r);
        vf total = v_set1(0.0f);
        for (size_t k = 0; k < n_keys; k++) {
            float *at = tile + k * n_rows + r;
            const vf p = v_round_to(v_mul(v_exp2(v_sub(v_load(at), base)), scale), round);
            v_store(at, p);
            total = v_add(total, p);
        }
        v_store(sum + r, total);
    }
}

/* |a - v|^2 from the differences, for rows r .. of one key. */
static vf distance_direct(const struct dkv_score_args *s, size_t r, size_t key)
{
    const float *value = s->values + key * s->v_ld;
    vf sum = v_set1(0.0f);
    for (size_t d = 0; d < s->v_dim; d++) {
        const vf difference = v_sub(v_load(s->out + d * s->n_rows + r), v_set1(value[d]));
        sum = v_fma(difference, difference, sum);
    }
    return sum;
}

/* The expanded form loses as many digits as out_norm + value_norm exceeds the result; where that is
 * more than six bits the differences are summed instead. Values are centred before they get here,
 * so this is rare unless values repeat. */
#define CANCELLED (1.0f / 64)

static inline __attribute__((always_inline)) void score_as(const struct dkv_score_args *s,
                                                           enum dkv_dtype round, bool exact)
{
    const vf one = v_set1(1.0f), minus_two = v_set1(-2.0f), gain = v_set1(s->gain);
    const vf eps = v_set1(s->eps);
    for (size_t r = 0; r < s->n_rows; r += LANES) {
        const vf ref = v_load(s->ref + r), inv = v_load(s->inv + r);
        const vf out_norm = v_load(s->out_norm + r);
        for (size_t k = 0; k < s->n_keys; k++) {
            const size_t at = k * s->n_rows + r;
            const vf p = v_mul(v_exp2(v_sub(v_load(s->logits + at), ref)), inv);
            const vf q = v_round_to(p, round);
            const vf left = exact ? v_sub(one, p) : v_add(v_sub(one, q), eps);
            const vf weight = v_mul(v_mul(q, gain), v_reciprocal(left));
            const vf norms = v_add(out_norm, v_set1(s->value_norm[k]));
            vf distance = v_fma(v_load(s->terms + at), minus_two, norms);
            if (m_any(v_gt(v_mul(norms, v_set1(CANCELLED)), distance)))
                distance = distance_direct(s, r, k);
            v_store(s->terms + at, v_mul(v_mul(weight, weight), distance));
        }
    }
}

static void score(const struct dkv_score_args *s)
{
    if (s->eps == 0.0f && s->round == DKV_FP32)
        score_as(s, DKV_FP32, true);
    else if (s->round == DKV_BF16)
        score_as(s, DKV_BF16, s->eps == 0.0f);
    else if (s->round == DKV_FP16)
        score_as(s, DKV_FP16, s->eps == 0.0f);
    else
        score_as(s, DKV_FP32, false);
}

static void reduce(float *out, const float *tile, size_t n_rows, size_t n_keys)
{
    for (size_t k = 0; k < n_keys; k++) {
        vf sum = v_load(tile + k * n_rows);
        for (size_t r = LANES; r < n_rows; r += LANES)
            sum = v_add(sum, v_load(tile + k * n_rows + r));
        out[k] = v_sum(sum);
    }
}
