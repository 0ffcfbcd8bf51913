/* Pass B of the rules that are not DropKV's: the same walk over the same tiles, other terms and
 * other reductions. A rule without values has no product here but the logits'.
 *
 * A row's best key is hidden from the vector arithmetic as in DropKV's pass, and the number that
 * merge has worked out for it takes its place.
 */
#include "kernels/cpu/head_pass.h"

#include <math.h>
#include <string.h>

/* The best keys' numbers into the cells of a tile that dkv_hide_best() has emptied. */
static void put_best(const struct dkv_head *head, float *cells, uint64_t first, size_t n)
{
    for (uint32_t r = 0; r < head->rows; r++) {
        const uint64_t at = (uint64_t)(int64_t)head->best_key[r] - first; /* wraps if before */
        if (at < n)
            cells[at * head->n_rows + r] = head->averaged ? (float)head->best_p[r]
                                                          : head->best_term[r];
    }
}

/* p of the tile in place of its logits. */
static void weigh(const struct dkv_head *head, const struct dkv_tile *tile, uint64_t first,
                  size_t n)
{
    head->ops->weights(tile->logits, head->n_rows, n, head->ref, head->inv, head->round, tile->sum);
    if (head->rule->psi == DKV_PSI_ONE || head->averaged)
        put_best(head, tile->logits, first, n);
}

/* A panel of outputs against the tile's values. */
struct against {
    size_t n_rows;
    const float *out, *out_norm;
    const float *logits; /* or p */
    float *terms;
};

static struct dkv_score_args score_args(const struct dkv_head *head, const struct dkv_tile *tile,
                                        const struct against *a, const float *value_norm, size_t n)
{
    return (struct dkv_score_args){
        .n_rows = a->n_rows,
        .n_keys = n,
        .v_dim = head->v_dim,
        .v_ld = head->v_dim,
        .logits = a->logits,
        .terms = a->terms,
        .ref = head->ref,
        .inv = head->inv,
        .out = a->out,
        .out_norm = a->out_norm,
        .values = tile->rows,
        .value_norm = value_norm,
        .gain = head->gain,
        .round = DKV_FP32,
    };
}

/* value_metric: p / (1 - p) * distance, both in a tile. */
static void odds_of_distances(float *terms, const float *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        terms[i] = p[i] / (1.0f - p[i]) * sqrtf(terms[i]);
}

/* odds * distance of every row. */
static void distance_terms(const struct dkv_head *head, const struct dkv_tile *tile, uint64_t first,
                           size_t n, const struct dkv_ahead *ahead)
{
    const struct dkv_cpu_ops *ops = head->ops;
    float value_norm[DKV_TILE_KEYS];
    if (head->metric_dim > 0) {
        ops->weights(tile->logits, head->n_rows, n, head->ref, head->inv, DKV_FP32, tile->sum);
        dkv_head_metric_distances(head, tile, n, tile->terms, head->n_rows);
        odds_of_distances(tile->terms, tile->logits, n * head->n_rows);
        put_best(head, tile->terms, first, n);
        return;
    }
    const struct against all = {head->n_rows, head->outputs, head->out_norm, tile->logits,
                                tile->terms};
    const struct dkv_score_args args = score_args(head, tile, &all, value_norm, n);
    ops->dot(tile->terms, head->outputs, head->n_rows, tile->rows, head->v_dim, n, head->v_dim,
             1.0f, ahead);
    ops->norms(value_norm, tile->rows, head->v_dim, n, head->v_dim);
    ops->score_dist(&args);
    put_best(head, tile->terms, first, n);
}

/* p * (a . v) of every row. */
static void projection_terms(const struct dkv_head *head, const struct dkv_tile *tile,
                             uint64_t first, size_t n, const struct dkv_ahead *ahead)
{
    const struct dkv_cpu_ops *ops = head->ops;
    ops->dot(tile->terms, head->outputs, head->n_rows, tile->rows, head->v_dim, n, head->v_dim,
             1.0f, ahead);
    weigh(head, tile, first, n);
    ops->multiply(tile->terms, tile->logits, head->n_rows, n);
    put_best(head, tile->terms, first, n);
}

/* averaged: odds(pbar) * distance, one column per query head. Returns the tile, [n][n_bars]. */
static const float *average_terms(const struct dkv_head *head, const struct dkv_tile *tile,
                                  uint64_t first, size_t n, const struct dkv_ahead *ahead)
{
    const struct dkv_cpu_ops *ops = head->ops;
    const size_t group = head->item->plan->group;
    float *bars = tile->bars, *terms = tile->bars + (size_t)DKV_TILE_KEYS * head->n_bars;
    float value_norm[DKV_TILE_KEYS];
    const struct against averages = {head->n_bars, head->bar_outputs, head->bar_norm, bars, terms};
    const struct dkv_score_args args = score_args(head, tile, &averages, value_norm, n);
    weigh(head, tile, first, n);
    memset(bars, 0, sizeof(float) * n * head->n_bars);
    ops->fold(bars, head->n_bars, tile->logits, head->row_weight, head->n_rows, group, head->window,
              n);
    for (size_t g = 0; g < group; g++) { /* 1 - pbar of these keys is a difference that may be 0 */
        const uint64_t at = (uint64_t)(int64_t)head->bar_key[g] - first;
        if (at < n)
            bars[at * head->n_bars + g] = 0.0f;
    }
    if (head->metric_dim > 0) {
        dkv_head_metric_distances(head, tile, n, terms, head->n_bars);
        odds_of_distances(terms, bars, n * head->n_bars);
    } else {
        ops->dot(terms, head->bar_outputs, head->n_bars, tile->rows, head->v_dim, n, head->v_dim,
                 1.0f, ahead);
        ops->norms(value_norm, tile->rows, head->v_dim, n, head->v_dim);
        ops->score_given(&args);
    }
    for (size_t g = 0; g < group; g++) {
        const uint64_t at = (uint64_t)(int64_t)head->bar_key[g] - first;
        if (at < n)
            terms[at * head->n_bars + g] = head->bar_term[g];
    }
    return terms;
}

/* Sum or maximum over the columns of [n][ld]. */
static void reduce_columns(float *out, const float *columns, size_t ld, size_t group, bool largest,
                           size_t n)
{
    for (size_t k = 0; k < n; k++) {
        float sum = columns[k * ld];
        for (size_t g = 1; g < group; g++) {
            const float x = columns[k * ld + g];
            if (!largest)
                sum += x;
            else if (x > sum || isnan(x))
                sum = x;
        }
        out[k] = sum;
    }
}

/* The largest of each query head's terms. */
static void largest_rows(const struct dkv_head *head, float *out, const float *terms, size_t n)
{
    const size_t group = head->item->plan->group;
    for (size_t k = 0; k < n; k++) {
        for (size_t g = 0; g < group; g++) {
            const float *row = terms + k * head->n_rows + g * head->window;
            float most = row[0];
            for (uint32_t t = 1; t < head->window; t++)
                most = row[t] > most || isnan(row[t]) ? row[t] : most;
            out[k * group + g] = most;
        }
    }
}

/* Rows, then query heads. `spare` is a tile that is free. */
static void reduce_terms(const struct dkv_head *head, float *out, const float *terms, float *spare,
                         size_t n)
{
    const struct dkv_cpu_ops *ops = head->ops;
    const struct dkv_params *params = head->item->params;
    const size_t group = head->item->plan->group;
    const bool largest = params->gqa == DKV_GQA_MAX;
    if (params->reduce == DKV_REDUCE_MAX && largest) {
        ops->reduce_largest(out, terms, head->n_rows, n);
        return;
    }
    if (!largest && params->reduce != DKV_REDUCE_MAX && !head->rule->variance) {
        ops->reduce_weighted(out, terms, head->row_weight, head->n_rows, n);
        return;
    }
    if (head->rule->variance)
        ops->spread(spare, group, terms, head->n_rows, group, head->window, (float)params->gamma,
                    n);
    else if (params->reduce == DKV_REDUCE_MAX)
        largest_rows(head, spare, terms, n);
    else
        ops->fold(spare, group, terms, head->row_weight, head->n_rows, group, head->window, n);
    reduce_columns(out, spare, group, group, largest, n);
}

/* layers=cake: adds a tile's p, which is in `logits`, to the sums that a layer is judged by. */
static void add_spread(const struct dkv_head *head, struct dkv_split_state *state, const float *p,
                       uint64_t first, size_t n)
{
    const uint64_t prefix = head->n - head->item->plan->window;
    for (size_t k = 0; k < n && first + k < prefix; k++) {
        for (uint32_t r = 0; r < head->rows; r += head->window) {
            const float *row = p + k * head->n_rows + r;
            double sum = 0.0, squares = 0.0;
            for (uint32_t t = 0; t < head->window; t++) {
                sum += (double)row[t];
                state->entropy -= (double)row[t] * log((double)row[t] + 1e-10);
            }
            for (uint32_t t = 0; t < head->window; t++) {
                const double x = (double)row[t] - sum / head->window;
                squares += x * x;
            }
            state->variance += head->window > 1 ? squares / (head->window - 1) : 0.0;
        }
    }
}

/* Scores of one tile, of this chunk's rows alone. */
static void score_tile(const struct dkv_head *head, const struct dkv_tile *tile, uint64_t first,
                       size_t n, float *out)
{
    const void *next[DKV_CONVERT_KEYS];
    const struct dkv_ahead ahead = dkv_next_keys(head, first + n, next);
    const size_t group = head->item->plan->group;
    if (head->averaged) {
        const float *terms = average_terms(head, tile, first, n, &ahead);
        reduce_columns(out, terms, head->n_bars, group, head->item->params->gqa == DKV_GQA_MAX, n);
        return;
    }
    switch (head->rule->psi) {
    case DKV_PSI_ONE:
        weigh(head, tile, first, n);
        reduce_terms(head, out, tile->logits, tile->terms, n);
        return;
    case DKV_PSI_PROJ: projection_terms(head, tile, first, n, &ahead); break;
    default: distance_terms(head, tile, first, n, &ahead); break;
    }
    reduce_terms(head, out, tile->terms, tile->logits, n);
}

/* What the chunks of rows before have left, and this one. */
static void add_chunk(const struct dkv_head *head, float *to, const float *more, size_t n)
{
    const bool largest = head->item->params->reduce == DKV_REDUCE_MAX;
    for (size_t k = 0; k < n; k++) {
        if (!largest)
            to[k] += more[k];
        else if (more[k] > to[k] || isnan(more[k]))
            to[k] = more[k];
    }
}

/* reduce=mean_seen: how many of the block's rows see a token. */
static void divide_by_rows(const struct dkv_head *head, float *scores, uint64_t first, size_t n)
{
    const uint64_t window = head->item->plan->window;
    for (size_t k = 0; k < n; k++) {
        const uint64_t left = head->n - first - k;
        scores[k] /= (float)(left < window ? left : window);
    }
}

void dkv_head_pass_rule(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile)
{
    struct dkv_split_state *state = &head->splits[split];
    const float raw_max = dkv_largest_raw(head);
    const size_t most = head->v_dim > 0 ? DKV_SCORE_KEYS : DKV_TILE_KEYS;
    float chunk[DKV_TILE_KEYS];
    uint64_t first, end;
    state->entropy = state->variance = 0.0;
    dkv_split_range(head, split, &first, &end);
    for (; first < end; first += most) {
        const size_t n = dkv_tile_keys(first, end, most);
        float *raw = head->raw + first, *out = head->chunk == 0 ? raw : chunk;
        state->faults |= dkv_open_tile(head, tile, first, n, head->value_factor, head->scaled_shift,
                                       NULL);
        if (state->faults != DKV_FAULT_NONE)
            return;
        dkv_hide_best(head, tile->logits, first, n);
        score_tile(head, tile, first, n, out);
        if (head->item->params->layers == DKV_LAYERS_CAKE)
            add_spread(head, state, tile->logits, first, n);
        if (head->chunk > 0)
            add_chunk(head, raw, chunk, n);
        if (head->chunk + 1 == head->n_chunks && head->item->params->reduce == DKV_REDUCE_MEAN_SEEN)
            divide_by_rows(head, raw, first, n);
        if (!dkv_all_within(raw, n, raw_max))
            state->faults |= DKV_FAULT_RANGE;
    }
}
