/* From the splits' sums to each row's probabilities and output.
 *
 * Two states merge by taking the larger best key; the smaller one joins the others with its weight.
 * Splits merge in a binary tree over their numbers, whichever thread made them. What is left is one
 * state per row, from which everything that pass B needs follows in double precision: with O the
 * others' sum and e the best key's weight, both relative to 2^ref,
 *
 *   p* = e / (O + e), 1 - p* = O / (O + e)    no cancellation however close p* is to 1
 *   b  = panel / O                            the output without the best key
 *   a  = (1 - p*) b + p* v*
 *
 * and the best key's term p*^2 |b - v*|^2 is exact where p*^2 / (1-p*)^2 |a - v*|^2 would be 0/0.
 * Any other key has p <= 1/2, where the latter form is safe.
 */
#include "kernels/cpu/head_pass.h"

#include "kernels/convert.h"
#include "kernels/select.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Merges the states of one row but for the panels; returns the weight of the key that joins the
 * others, in *loser_out. */
static float merge_row(struct dkv_split_state *a, const struct dkv_split_state *b, uint32_t r,
                       float *keep_a, float *keep_b, int32_t *loser_out)
{
    const bool b_wins = b->best[r] > a->best[r]; /* of equals the earlier token stays */
    const float loser = b_wins ? a->best[r] : b->best[r];
    *loser_out = b_wins ? a->best_key[r] : b->best_key[r];
    if (b_wins) {
        a->best[r] = b->best[r];
        a->best_key[r] = b->best_key[r];
    }
    const float ref = fmaxf(fmaxf(a->ref[r], b->ref[r]), loser);
    const double scale_a = exp2((double)a->ref[r] - (double)ref);
    const double scale_b = exp2((double)b->ref[r] - (double)ref);
    const double weight = *loser_out >= 0 ? exp2((double)loser - (double)ref) : 0.0;
    a->sum[r] = a->sum[r] * scale_a + b->sum[r] * scale_b + weight;
    a->ref[r] = ref;
    *keep_a = (float)scale_a;
    *keep_b = (float)scale_b;
    return (float)weight;
}

static unsigned merge_splits(const struct dkv_head *head, struct dkv_split_state *a,
                             const struct dkv_split_state *b, const struct dkv_tile *tile)
{
    const size_t n_rows = head->n_rows;
    float *keep_a = tile->keep, *keep_b = tile->sum;
    for (uint32_t r = 0; r < n_rows; r++)
        tile->back[r] = merge_row(a, b, r, &keep_a[r], &keep_b[r], &tile->back_key[r]);
    for (uint32_t d = 0; d < head->v_dim; d++) {
        float *x = a->panel + d * n_rows;
        const float *y = b->panel + d * n_rows;
        for (uint32_t r = 0; r < n_rows; r++)
            x[r] = x[r] * keep_a[r] + y[r] * keep_b[r];
    }
    for (uint32_t r = 0; r < head->rows; r++) {
        if (tile->back[r] == 0.0f || dkv_left_out(head, (uint64_t)tile->back_key[r]))
            continue;
        const unsigned faults = dkv_head_load_values(head, tile->row, (uint64_t)tile->back_key[r],
                                                     1, 1.0f, head->value_shift, NULL);
        if (faults != DKV_FAULT_NONE)
            return faults;
        for (uint32_t d = 0; d < head->v_dim; d++)
            a->panel[d * n_rows + r] += tile->back[r] * tile->row[d];
    }
    a->value_top = fmaxf(a->value_top, b->value_top);
    return DKV_FAULT_NONE;
}

/* A row's softmax in numbers that cannot overflow. */
struct row_softmax {
    double others; /* O, the sink included, relative to 2^ref */
    double ref;
    double best_p;    /* p* */
    double best_left; /* 1 - p* */
    double sink;      /* the sink's share of O */
};

/* The sink's logit in the frame of the tile's logits, which centred keys have moved. */
static double sink_logit(const struct dkv_head *head, uint32_t r)
{
    const uint32_t q_head = dkv_head_query_head(head, r);
    double moved = 0.0;
    if (!head->native_bf16) {
        for (uint32_t d = 0; d < head->dim; d++)
            moved += (double)head->queries[d * head->n_rows + r] * (double)head->key_shift[d];
    }
    return (double)head->item->block->sink_logits[q_head] * DKV_LOG2E +
           moved * (double)head->query_factor;
}

static struct row_softmax finish_softmax(const struct dkv_head *head,
                                         const struct dkv_split_state *state, uint32_t r,
                                         double best)
{
    struct row_softmax s = {.others = state->sum[r], .ref = (double)state->ref[r]};
    if (head->item->block->sink_logits != NULL) {
        const double logit = sink_logit(head, r);
        const double ref = logit > s.ref ? logit : s.ref;
        s.sink = exp2(logit - ref);
        s.others = s.others * exp2(s.ref - ref) + s.sink;
        s.ref = ref;
    }
    const double ratio = s.others * exp2(s.ref - best); /* O / e */
    s.best_p = 1.0 / (1.0 + ratio);
    s.best_left = isinf(ratio) ? 1.0 : ratio / (1.0 + ratio);
    return s;
}

/* A row that adds nothing: it sees one token, or none. */
static void silence_row(struct dkv_head *head, uint32_t r)
{
    head->ref[r] = 0.0f;
    head->inv[r] = 0.0f;
    head->best_p[r] = 0.0;
    if (head->averaged)
        head->best_left[r] = 1.0;
    head->best_exact[r] = 0.0;
    head->best_term[r] = 0.0f;
    head->out_norm[r] = 0.0f;
    for (uint32_t d = 0; d < head->v_dim; d++)
        head->outputs[d * head->n_rows + r] = 0.0f;
}

/* Stores a (in units of stored values, minus the centre) as pass B wants it. */
static void store_output(struct dkv_head *head, uint32_t r, uint32_t d, double a)
{
    const float x = (float)(a * (double)head->value_factor);
    head->outputs[d * head->n_rows + r] = x;
    head->out_norm[r] += x * x;
}

/* The best key's term of the score, values scaled, from its p, which is exact, its distance |b -
 * v*| to the output without it, squared, and a . v*. */
static double best_term(const struct dkv_head *head, const struct row_softmax *s, double distance,
                        double projection)
{
    const double eps = head->item->params->eps;
    const double p = (double)dkv_round_to_dtype((float)s->best_p, head->round);
    const double rounded = head->round == DKV_FP32 ? s->best_p : p;
    switch (head->rule->psi) {
    case DKV_PSI_ONE: return rounded;
    case DKV_PSI_PROJ: return rounded * projection;
    case DKV_PSI_DIST: return rounded * sqrt(distance);
    case DKV_PSI_DIST2: break;
    }
    if (eps == 0)
        return rounded * rounded * distance;
    const double odds = s->best_p / (s->best_left + eps) * s->best_left; /* times |b - v*| */
    return odds * odds * distance;
}

/* One row. Returns its best key's term, with values scaled. */
static double finish_row(struct dkv_head *head, const struct dkv_split_state *state, uint32_t r,
                         double best, const struct dkv_tile *tile)
{
    const struct row_softmax s = finish_softmax(head, state, r, best);
    const double rescale = exp2((double)state->ref[r] - s.ref);
    double distance = 0.0, projection = 0.0;
    head->out_norm[r] = 0.0f;
    for (uint32_t d = 0; d < head->v_dim; d++) {
        const double sink_part = s.sink * (double)head->value_shift[d]; /* 0 - centre */
        const double others = (double)state->panel[d * head->n_rows + r] * rescale + sink_part;
        const double b = s.others > 0 ? others / s.others : 0.0;
        const double v = (double)tile->row[d];
        const double a = s.best_left * b + s.best_p * v;
        store_output(head, r, d, a);
        const double x = (b - v) * (double)head->value_factor;
        distance += x * x;
        tile->wide[d] = x;
        projection += a * v * (double)head->value_factor * (double)head->value_factor;
    }
    head->ref[r] = state->ref[r];
    head->inv[r] = (float)(s.best_left / (s.others * exp2(s.ref - (double)state->ref[r])));
    if (state->sum[r] == 0.0) { /* it sees one key; there is nothing else to weigh */
        head->ref[r] = 0.0f;
        head->inv[r] = 0.0f;
    }
    if (head->metric_dim > 0) {
        distance = dkv_head_metric_length(head, r / head->window, tile->wide);
        distance *= distance;
    }
    head->best_p[r] = s.best_p;
    if (head->averaged)
        head->best_left[r] = s.best_left;
    return best_term(head, &s, distance, projection);
}

/* The largest power of two for p that keeps the sum of a key's terms inside float32: values are
 * below 2 in each component, so distances below 16 * v_dim, and p / (1 - p) is at most 1 but for
 * the best keys, whose terms are known. */
static void choose_gain(struct dkv_head *head)
{
    if (head->rule->phi != DKV_PHI_ODDS2) { /* not squared, so not in need of one */
        head->gain = 1.0f;
        for (uint32_t r = 0; r < head->rows; r++)
            head->best_term[r] = (float)head->best_exact[r];
        return;
    }
    double bound = 16.0 * head->v_dim * head->n_rows;
    for (uint32_t r = 0; r < head->rows; r++)
        bound += head->best_exact[r];
    int exponent = (int)floor((125.0 - log2(bound)) / 2.0);
    exponent = exponent > 60 ? 60 : exponent < -60 ? -60 : exponent;
    head->gain = ldexpf(1.0f, exponent);
    for (uint32_t r = 0; r < head->rows; r++)
        head->best_term[r] = (float)ldexp(head->best_exact[r], 2 * exponent);
}

static void choose_value_factor(struct dkv_head *head, float value_top)
{
    int exponent = 0;
    if (value_top > 0)
        frexpf(value_top, &exponent);
    exponent = exponent > 100 ? 100 : exponent < -100 ? -100 : exponent;
    head->value_factor = ldexpf(1.0f, -exponent);
    for (uint32_t d = 0; d < head->v_dim; d++)
        head->scaled_shift[d] = head->value_shift[d] * head->value_factor;
}

static unsigned finish_rows(struct dkv_head *head, const struct dkv_split_state *state,
                            const struct dkv_tile *tile)
{
    for (uint32_t r = 0; r < head->n_rows; r++) {
        const int32_t key = r < head->rows ? state->best_key[r] : -1;
        head->best_key[r] = key;
        if (key >= 0 && !(isfinite(state->best[r]) && isfinite(state->sum[r])))
            return DKV_FAULT_LOGITS;
        if (key < 0 || state->sum[r] == 0.0) {
            /* without flags every row sees two keys, unless their products were minus infinity */
            if (r < head->rows && head->flags == NULL)
                return DKV_FAULT_LOGITS;
            if (key >= 0)
                head->flags[key] |= DKV_TOKEN_PROTECTED;
            /* the odds of the only key have no limit */
            if (key < 0 || (head->rule->phi != DKV_PHI_P && !head->averaged)) {
                silence_row(head, r);
                continue;
            }
        }
        const unsigned faults = dkv_head_load_values(head, tile->row, (uint64_t)key, 1, 1.0f,
                                                     head->value_shift, NULL);
        if (faults != DKV_FAULT_NONE)
            return faults;
        /* Once more, exactly: an error in this logit is one in 1 - p* and so in all other p. */
        double best;
        if (!dkv_head_logit(head, r, (uint64_t)key, &best))
            return DKV_FAULT_TABLE;
        head->best_exact[r] = finish_row(head, state, r, best, tile);
    }
    choose_gain(head);
    return DKV_FAULT_NONE;
}

unsigned dkv_head_faults(const struct dkv_head *head)
{
    unsigned faults = DKV_FAULT_NONE;
    for (uint32_t s = 0; s < head->n_splits; s++)
        faults |= head->splits[s].faults;
    return faults;
}

unsigned dkv_head_merge(struct dkv_head *head, const struct dkv_tile *tile)
{
    unsigned faults = dkv_head_faults(head);
    for (uint32_t step = 1; step < head->n_splits && faults == DKV_FAULT_NONE; step *= 2) {
        for (uint32_t s = 0; s + step < head->n_splits; s += 2 * step)
            faults |= merge_splits(head, &head->splits[s], &head->splits[s + step], tile);
    }
    if (faults != DKV_FAULT_NONE)
        return faults;
    choose_value_factor(head, head->splits[0].value_top);
    faults = finish_rows(head, &head->splits[0], tile);
    if (faults == DKV_FAULT_NONE && head->averaged)
        faults = dkv_head_average(head, tile);
    if (faults == DKV_FAULT_NONE && head->metric_dim > 0)
        dkv_head_metric_outputs(head);
    return faults;
}

/* The published form with rounding: p is rounded and a is made of the rounded p. a itself is not
 * rounded: that is what reproduces the authors' scores (kernels/ref.h). */
void dkv_head_merge_a2(struct dkv_head *head, const struct dkv_tile *tile)
{
    const double eps = head->item->params->eps;
    for (uint32_t r = 0; r < head->rows; r++) {
        if (head->best_p[r] == 0.0)
            continue; /* silent */
        (void)dkv_head_load_values(head, tile->row, (uint64_t)head->best_key[r], 1, 1.0f,
                                   head->value_shift, NULL);
        const double p = (double)dkv_round_to_dtype((float)head->best_p[r], head->round);
        double mass = p, distance = 0.0;
        for (uint32_t s = 0; s < head->n_splits; s++)
            mass += head->splits[s].sum[r];
        head->out_norm[r] = 0.0f;
        for (uint32_t d = 0; d < head->v_dim; d++) {
            const double centre = -(double)head->value_shift[d];
            double a = p * (double)tile->row[d] + mass * centre;
            for (uint32_t s = 0; s < head->n_splits; s++)
                a += (double)head->splits[s].panel[d * head->n_rows + r];
            a -= centre;
            store_output(head, r, d, a);
            const double x = (a - (double)tile->row[d]) * (double)head->value_factor;
            distance += x * x;
        }
        const double odds = p / (1.0 - p + eps);
        head->best_exact[r] = odds * odds * distance;
    }
    choose_gain(head);
}
