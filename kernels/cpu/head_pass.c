/* The streaming passes over one split.
 *
 * Every pass walks the same tiles and gets its logits from the same function, so that all see the
 * same bits. A row's best key never takes part in the vector arithmetic of a tile: pass A keeps it
 * apart, the others hide it and put the exact number, computed once per row by merge, in its place.
 */
#include "kernels/cpu/head_pass.h"

#include "kernels/convert.h"
#include "kernels/select.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define VALUE_MAX    1e18f
#define SCORE_KEYS   DKV_SCORE_KEYS
#define CONVERT_KEYS DKV_CONVERT_KEYS

static unsigned judge(float key_top, float value_top, const struct dkv_head *head)
{
    unsigned faults = DKV_FAULT_NONE;
    if (!(key_top <= FLT_MAX) || !(value_top <= FLT_MAX))
        faults |= DKV_FAULT_NONFINITE;
    else if (!(value_top * head->values.scale <= VALUE_MAX))
        faults |= DKV_FAULT_RANGE;
    return faults;
}

unsigned dkv_head_load_values(const struct dkv_head *head, float *rows, uint64_t first, size_t n,
                              float factor, const float *shift, float *top_out)
{
    const void *src[DKV_TILE_KEYS];
    if (head->v_dim == 0) {
        if (top_out != NULL)
            *top_out = 0.0f;
        return DKV_FAULT_NONE;
    }
    if (!dkv_reader_rows(&head->values, head->item->block->valid_from + first, n, src))
        return DKV_FAULT_TABLE;
    head->ops->load(rows, head->v_dim, src, n, head->v_dim, head->values.dtype, factor, shift,
                    top_out);
    return DKV_FAULT_NONE;
}

static bool row_is_finite(const struct dkv_reader *reader, const void *row, uint32_t dim)
{
    const size_t size = dkv_dtype_bytes(reader->dtype);
    for (uint32_t d = 0; d < dim; d++) {
        if (!isfinite(dkv_element_to_f32((const uint8_t *)row + d * size, reader->dtype)))
            return false;
    }
    return true;
}

static void hide_token(float *row, size_t n)
{
    for (size_t r = 0; r < n; r++)
        row[r] = -HUGE_VALF;
}

/* nonfinite=mask: flags the tokens with a non-finite key or value. */
static void find_masked(struct dkv_head *head, uint64_t first, size_t n)
{
    const uint64_t stored = head->item->block->valid_from + first;
    for (size_t k = 0; k < n; k++) {
        const void *key, *value = NULL;
        if (!dkv_reader_rows(&head->keys, stored + k, 1, &key) ||
            (head->v_dim > 0 && !dkv_reader_rows(&head->values, stored + k, 1, &value)))
            return; /* already reported by whoever loaded the tile */
        if (!row_is_finite(&head->keys, key, head->dim) ||
            !row_is_finite(&head->values, value, head->v_dim))
            head->flags[first + k] |= DKV_TOKEN_LOWEST;
    }
}

bool dkv_head_has_masked(const struct dkv_head *head)
{
    for (uint64_t t = 0; head->mask && t < head->n; t++)
        if (head->flags[t] & DKV_TOKEN_LOWEST)
            return true;
    return false;
}

/* Masked tokens become zero values that nobody sees. */
static void hide_masked(const struct dkv_head *head, const struct dkv_tile *tile, uint64_t first,
                        size_t n)
{
    for (size_t k = 0; k < n; k++) {
        if (!(head->flags[first + k] & DKV_TOKEN_LOWEST))
            continue;
        hide_token(tile->logits + k * head->n_rows, head->n_rows);
        memset(tile->rows + k * head->v_dim, 0, sizeof(float) * head->v_dim);
    }
}

/* The largest |stored value| of the tile's tokens that were not masked. */
static float top_of_unmasked(const struct dkv_head *head, uint64_t first, size_t n)
{
    const size_t size = dkv_dtype_bytes(head->values.dtype);
    float top = 0.0f;
    for (size_t k = 0; k < n && head->v_dim > 0; k++) {
        const void *row;
        if ((head->flags[first + k] & DKV_TOKEN_LOWEST) ||
            !dkv_reader_rows(&head->values, head->item->block->valid_from + first + k, 1, &row))
            continue;
        for (uint32_t d = 0; d < head->v_dim; d++) {
            const float x = fabsf(
                dkv_element_to_f32((const uint8_t *)row + d * size, head->values.dtype));
            top = x > top ? x : top;
        }
    }
    return top;
}

/* The last tokens are not visible to all rows: row t of the block sees tokens up to n - w + t. */
static void hide_future(const struct dkv_head *head, float *logits, uint64_t first, size_t n)
{
    const uint32_t window = head->window;
    const uint64_t all_see = dkv_all_see(head);
    for (uint64_t j = first > all_see ? first : all_see; j < first + n; j++) {
        float *row = logits + (j - first) * head->n_rows;
        for (uint32_t r = 0; r < head->rows; r++) {
            if (r % window < j - all_see + 1)
                row[r] = -HUGE_VALF;
        }
    }
}

/* Rows of up to `most` tokens from `first` that will be loaded next, for a product to fetch while
 * it computes. */
static struct dkv_ahead look_ahead(const struct dkv_head *head, const struct dkv_reader *reader,
                                   uint32_t dim, uint64_t first, size_t most, const void **rows)
{
    struct dkv_ahead ahead = {.rows = rows, .row_bytes = dim * dkv_dtype_bytes(reader->dtype)};
    if (first < head->n && dim > 0) {
        const size_t n = dkv_tile_keys(first, head->n, most);
        if (dkv_reader_rows(reader, head->item->block->valid_from + first, n, rows))
            ahead.n_rows = n;
    }
    return ahead;
}

struct dkv_ahead dkv_next_keys(const struct dkv_head *head, uint64_t first, const void **rows)
{
    return look_ahead(head, &head->keys, head->dim, first, CONVERT_KEYS, rows);
}

/* Logits of keys that have to be converted, a few at a time, so that their floats stay in the first
 * cache level. Meanwhile the next few are fetched, and at last the values. Returns the largest
 * element, if watched. */
static float convert_and_multiply(const struct dkv_head *head, const struct dkv_tile *tile,
                                  const void *const *src, size_t n, bool watch,
                                  const struct dkv_ahead *values)
{
    const struct dkv_cpu_ops *ops = head->ops;
    const size_t row_bytes = head->dim * dkv_dtype_bytes(head->keys.dtype);
    float largest = 0.0f;
    for (size_t k = 0; k < n; k += CONVERT_KEYS) {
        const size_t some = n - k < CONVERT_KEYS ? n - k : CONVERT_KEYS;
        const struct dkv_ahead more = {
            src + k + some, n - k - some < CONVERT_KEYS ? n - k - some : CONVERT_KEYS, row_bytes};
        float top = 0.0f;
        ops->load(tile->rows, head->dim, src + k, some, head->dim, head->keys.dtype, 1.0f,
                  head->key_shift, watch ? &top : NULL);
        ops->dot(tile->logits + k * head->n_rows, head->queries, head->n_rows, tile->rows,
                 head->dim, some, head->dim, head->query_factor, more.n_rows > 0 ? &more : values);
        if (top > largest || isnan(top)) /* NaN is largest */
            largest = top;
    }
    return largest;
}

unsigned dkv_open_tile(struct dkv_head *head, const struct dkv_tile *tile, uint64_t first, size_t n,
                       float factor, const float *shift, float *top_out)
{
    const struct dkv_cpu_ops *ops = head->ops;
    const void *src[DKV_TILE_KEYS], *values[DKV_TILE_KEYS];
    float key_top = 0.0f;
    float *watch = top_out != NULL ? &key_top : NULL;
    if (!dkv_reader_rows(&head->keys, head->item->block->valid_from + first, n, src))
        return DKV_FAULT_TABLE;
    const struct dkv_ahead ahead =
        head->v_dim > 0 ? look_ahead(head, &head->values, head->v_dim, first, n, values)
                        : look_ahead(head, &head->keys, head->dim, first + n, n, values);
    if (head->native_bf16)
        ops->dot_bf16(tile->logits, head->query_pairs, head->n_rows, src, n, head->dim,
                      head->query_factor, watch, &ahead);
    else
        key_top = convert_and_multiply(head, tile, src, n, top_out != NULL, &ahead);
    unsigned faults = dkv_head_load_values(head, tile->rows, first, n, factor, shift, top_out);
    if (faults == DKV_FAULT_NONE && top_out != NULL) {
        faults = judge(key_top, *top_out, head);
        if ((faults & DKV_FAULT_NONFINITE) && head->mask) {
            find_masked(head, first, n);
            *top_out = top_of_unmasked(head, first, n);
            faults = judge(0.0f, *top_out, head);
        }
    }
    if (faults != DKV_FAULT_NONE)
        return faults;

    const double cap = head->item->params->logit_softcap;
    if (cap > 0)
        ops->softcap(tile->logits, n * head->n_rows, (float)(cap * DKV_LOG2E));
    if (head->mask)
        hide_masked(head, tile, first, n);
    if (first + n > dkv_all_see(head))
        hide_future(head, tile->logits, first, n);
    return DKV_FAULT_NONE;
}

/* A key that is no longer its row's best joins the others. */
static unsigned give_back(struct dkv_head *head, struct dkv_split_state *state,
                          const struct dkv_tile *tile)
{
    const size_t n_rows = head->n_rows;
    for (uint32_t r = 0; r < head->rows; r++) {
        const float weight = tile->back[r];
        if (weight == 0.0f)
            continue;
        if (!(weight > 0.0f)) /* a logit is not a number: back_key was not written */
            return DKV_FAULT_LOGITS;
        const unsigned faults = dkv_head_load_values(head, tile->row, (uint64_t)tile->back_key[r],
                                                     1, 1.0f, head->value_shift, NULL);
        if (faults != DKV_FAULT_NONE)
            return faults;
        state->sum[r] += (double)weight;
        if (dkv_left_out(head, (uint64_t)tile->back_key[r]))
            continue;
        for (uint32_t d = 0; d < head->v_dim; d++)
            state->panel[d * n_rows + r] += weight * tile->row[d];
    }
    return DKV_FAULT_NONE;
}

void dkv_split_range(const struct dkv_head *head, uint32_t split, uint64_t *first_out,
                     uint64_t *end_out)
{
    *first_out = split * head->split_tokens;
    *end_out = *first_out + head->split_tokens;
    if (*end_out > head->n)
        *end_out = head->n;
}

/* averaged: the window's keys count in the softmax, their values not in the output. */
static void leave_out_window(const struct dkv_head *head, const struct dkv_tile *tile,
                             uint64_t first, size_t n)
{
    for (size_t k = 0; k < n; k++)
        if (dkv_left_out(head, first + k))
            memset(tile->logits + k * head->n_rows, 0, sizeof(float) * head->n_rows);
}

void dkv_head_pass_a(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile)
{
    const struct dkv_cpu_ops *ops = head->ops;
    struct dkv_split_state *state = &head->splits[split];
    for (uint32_t r = 0; r < head->n_rows; r++) {
        state->best[r] = -HUGE_VALF;
        state->best_key[r] = -1;
        state->ref[r] = -FLT_MAX;
        state->sum[r] = 0.0;
    }
    memset(state->panel, 0, sizeof(float) * head->v_dim * head->n_rows);
    state->value_top = 0.0f;
    state->faults = DKV_FAULT_NONE;

    const struct dkv_softmax_rows rows = {
        .best = state->best,
        .ref = state->ref,
        .keep = tile->keep,
        .sum = tile->sum,
        .back = tile->back,
        .best_key = state->best_key,
        .back_key = tile->back_key,
    };
    const void *next[CONVERT_KEYS];
    uint64_t first, end;
    dkv_split_range(head, split, &first, &end);
    for (; first < end; first += DKV_TILE_KEYS) {
        const size_t n = dkv_tile_keys(first, end, DKV_TILE_KEYS);
        float top;
        state->faults = dkv_open_tile(head, tile, first, n, 1.0f, head->value_shift, &top);
        if (state->faults != DKV_FAULT_NONE)
            return;
        state->value_top = top > state->value_top ? top : state->value_top;
        ops->softmax(&rows, tile->logits, head->n_rows, n, (int32_t)first);
        for (uint32_t r = 0; r < head->n_rows; r++)
            state->sum[r] = state->sum[r] * (double)tile->keep[r] + (double)tile->sum[r];
        if (head->averaged)
            leave_out_window(head, tile, first, n);
        const struct dkv_ahead ahead = dkv_next_keys(head, first + n, next);
        ops->accumulate(state->panel, tile->keep, head->n_rows, tile->logits, tile->rows,
                        head->v_dim, n, head->v_dim, &ahead);
        state->faults = give_back(head, state, tile);
        if (state->faults != DKV_FAULT_NONE)
            return;
    }
}

void dkv_hide_best(const struct dkv_head *head, float *logits, uint64_t first, size_t n)
{
    for (uint32_t r = 0; r < head->rows; r++) {
        const uint64_t at = (uint64_t)(int64_t)head->best_key[r] - first; /* wraps if before */
        if (at < n)
            logits[at * head->n_rows + r] = -HUGE_VALF;
    }
}

void dkv_head_pass_a2(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile)
{
    const struct dkv_cpu_ops *ops = head->ops;
    struct dkv_split_state *state = &head->splits[split];
    memset(state->panel, 0, sizeof(float) * head->v_dim * head->n_rows);
    for (uint32_t r = 0; r < head->n_rows; r++) {
        state->sum[r] = 0.0;
        tile->keep[r] = 1.0f;
    }
    const void *next[CONVERT_KEYS];
    uint64_t first, end;
    dkv_split_range(head, split, &first, &end);
    for (; first < end; first += DKV_TILE_KEYS) {
        const size_t n = dkv_tile_keys(first, end, DKV_TILE_KEYS);
        state->faults |= dkv_open_tile(head, tile, first, n, 1.0f, head->value_shift, NULL);
        if (state->faults != DKV_FAULT_NONE)
            return;
        dkv_hide_best(head, tile->logits, first, n);
        ops->weights(tile->logits, head->n_rows, n, head->ref, head->inv, head->round, tile->sum);
        for (uint32_t r = 0; r < head->n_rows; r++)
            state->sum[r] += (double)tile->sum[r];
        const struct dkv_ahead ahead = dkv_next_keys(head, first + n, next);
        ops->accumulate(state->panel, tile->keep, head->n_rows, tile->logits, tile->rows,
                        head->v_dim, n, head->v_dim, &ahead);
    }
}

/* gqa=max: the largest of the query heads' sums. */
static void reduce_max(const struct dkv_head *head, float *out, const float *terms, size_t n)
{
    const uint32_t window = head->window;
    for (size_t k = 0; k < n; k++) {
        const float *row = terms + k * head->n_rows;
        float most = 0.0f;
        for (uint32_t r = 0; r < head->rows; r += window) {
            float sum = 0.0f;
            for (uint32_t t = 0; t < window; t++)
                sum += row[r + t];
            most = sum > most ? sum : most;
        }
        out[k] = most;
    }
}

bool dkv_all_within(const float *scores, size_t n, float most)
{
    bool within = true;
    for (size_t k = 0; k < n; k++)
        within &= fabsf(scores[k]) <= most;
    return within;
}

float dkv_largest_raw(const struct dkv_head *head)
{
    const double factor = dkv_head_score_factor(head);
    return factor > 1.0 ? (float)((double)FLT_MAX / factor) : FLT_MAX;
}

void dkv_head_pass_b(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile)
{
    if (head->rule->phi != DKV_PHI_ODDS2) {
        dkv_head_pass_rule(head, split, tile);
        return;
    }
    struct dkv_split_state *state = &head->splits[split];
    const struct dkv_cpu_ops *ops = head->ops;
    const struct dkv_params *params = head->item->params;
    const float raw_max = dkv_largest_raw(head);
    float value_norm[DKV_TILE_KEYS];
    struct dkv_score_args args = {
        .n_rows = head->n_rows,
        .v_dim = head->v_dim,
        .v_ld = head->v_dim,
        .logits = tile->logits,
        .terms = tile->terms,
        .ref = head->ref,
        .inv = head->inv,
        .out = head->outputs,
        .out_norm = head->out_norm,
        .values = tile->rows,
        .value_norm = value_norm,
        .gain = head->gain,
        .eps = (float)params->eps,
        .round = head->round,
    };
    const void *next[CONVERT_KEYS];
    uint64_t first, end;
    dkv_split_range(head, split, &first, &end);
    for (; first < end; first += SCORE_KEYS) {
        const size_t n = dkv_tile_keys(first, end, SCORE_KEYS);
        state->faults |= dkv_open_tile(head, tile, first, n, head->value_factor, head->scaled_shift,
                                       NULL);
        if (state->faults != DKV_FAULT_NONE)
            return;
        dkv_hide_best(head, tile->logits, first, n);
        const struct dkv_ahead ahead = dkv_next_keys(head, first + n, next);
        ops->dot(tile->terms, head->outputs, head->n_rows, tile->rows, head->v_dim, n, head->v_dim,
                 1.0f, &ahead);
        ops->norms(value_norm, tile->rows, head->v_dim, n, head->v_dim);
        args.n_keys = n;
        ops->score(&args);
        for (uint32_t r = 0; r < head->rows; r++) {
            const uint64_t at = (uint64_t)(int64_t)head->best_key[r] - first;
            if (at < n)
                tile->terms[at * head->n_rows + r] = head->best_term[r];
        }
        if (params->gqa == DKV_GQA_MAX)
            reduce_max(head, head->raw + first, tile->terms, n);
        else
            ops->reduce(head->raw + first, tile->terms, head->n_rows, n);
        if (!dkv_all_within(head->raw + first, n, raw_max))
            state->faults |= DKV_FAULT_RANGE;
    }
}
