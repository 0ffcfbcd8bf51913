/* Scores of the rules that need no query: of keys, of positions, of the caller.
 *
 * Elements are added up in float32 at least, whatever the type, and a cosine's products, which
 * cancel, in double precision.
 */
#include "kernels/cpu/head_pass.h"

#include "kernels/select.h"

#include <float.h>
#include <math.h>
#include <string.h>

static double dot(const float *a, const double *b, uint32_t dim)
{
    double sums[4] = {0};
    for (uint32_t d = 0; d < dim; d += 4) /* a multiple of 8 */
        for (uint32_t i = 0; i < 4; i++)
            sums[i] += (double)a[d + i] * b[d + i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static double length(const float *a, uint32_t dim)
{
    double sums[4] = {0};
    for (uint32_t d = 0; d < dim; d += 4)
        for (uint32_t i = 0; i < 4; i++)
            sums[i] += (double)a[d + i] * (double)a[d + i];
    return sqrt((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* Lengths of n keys in float, where squares neither overflow nor vanish, else in double. */
static void key_lengths(const struct dkv_head *head, const struct dkv_tile *tile, size_t n,
                        double *lengths_out)
{
    float squares[DKV_TILE_KEYS];
    head->ops->norms(squares, tile->rows, head->dim, n, head->dim);
    for (size_t k = 0; k < n; k++)
        lengths_out[k] = squares[k] > 1e-30f && squares[k] < 1e30f
                             ? sqrt((double)squares[k])
                             : length(tile->rows + k * head->dim, head->dim);
}

/* Loads keys; with nonfinite=mask the ones that are not finite get their flag and become zeros. */
static unsigned load_keys(const struct dkv_head *head, const struct dkv_tile *tile, uint64_t first,
                          size_t n, uint8_t *flags)
{
    const void *src[DKV_TILE_KEYS];
    float top;
    if (!dkv_reader_rows(&head->keys, head->item->block->valid_from + first, n, src))
        return DKV_FAULT_TABLE;
    head->ops->load(tile->rows, head->dim, src, n, head->dim, head->keys.dtype, 1.0f, NULL, &top);
    if (top <= FLT_MAX)
        return DKV_FAULT_NONE;
    if (!head->mask)
        return DKV_FAULT_NONFINITE;
    for (size_t k = 0; k < n; k++) {
        float *row = tile->rows + k * head->dim;
        if (isfinite(length(row, head->dim)))
            continue;
        flags[first + k] |= DKV_TOKEN_LOWEST;
        memset(row, 0, sizeof(*row) * head->dim);
    }
    return DKV_FAULT_NONE;
}

/* The vector that keys are compared with, of any length. */
static unsigned find_anchor(const struct dkv_head *head, const struct dkv_tile *tile,
                            uint8_t *flags)
{
    const bool plain = head->item->params->anchor == DKV_ANCHOR_PLAIN;
    double *anchor = tile->wide, lengths[DKV_TILE_KEYS];
    memset(anchor, 0, sizeof(*anchor) * head->dim);
    for (uint64_t first = 0; first < head->n; first += DKV_TILE_KEYS) {
        const size_t n = dkv_tile_keys(first, head->n, DKV_TILE_KEYS);
        const unsigned faults = load_keys(head, tile, first, n, flags);
        if (faults != DKV_FAULT_NONE)
            return faults;
        if (!plain)
            key_lengths(head, tile, n, lengths);
        for (size_t k = 0; k < n; k++) {
            const float *key = tile->rows + k * head->dim;
            const double norm = plain ? 1.0 : lengths[k];
            const double weight = norm > 0 ? 1.0 / norm : 0.0;
            for (uint32_t d = 0; d < head->dim; d++)
                anchor[d] += weight * (double)key[d];
        }
    }
    return DKV_FAULT_NONE;
}

static double anchor_length(const struct dkv_head *head, const double *anchor)
{
    double sum = 0.0;
    for (uint32_t d = 0; d < head->dim; d++)
        sum += anchor[d] * anchor[d];
    return sqrt(sum);
}

static unsigned score_keys(const struct dkv_head *head, const struct dkv_tile *tile,
                           double *scores_out, uint8_t *flags)
{
    const bool angle = head->rule->source == DKV_SOURCE_KEY_ANGLE;
    unsigned faults = angle ? find_anchor(head, tile, flags) : DKV_FAULT_NONE;
    const double reach = angle && faults == DKV_FAULT_NONE ? anchor_length(head, tile->wide) : 0.0;
    for (uint64_t first = 0; first < head->n && faults == DKV_FAULT_NONE; first += DKV_TILE_KEYS) {
        const size_t n = dkv_tile_keys(first, head->n, DKV_TILE_KEYS);
        double lengths[DKV_TILE_KEYS];
        faults = load_keys(head, tile, first, n, flags);
        if (faults == DKV_FAULT_NONE)
            key_lengths(head, tile, n, lengths);
        for (size_t k = 0; k < n && faults == DKV_FAULT_NONE; k++) {
            const float *key = tile->rows + k * head->dim;
            const double norm = lengths[k];
            if (!angle)
                scores_out[first + k] = -norm * (double)head->keys.scale;
            else if (norm > 0 && reach > 0)
                scores_out[first + k] = -dot(key, tile->wide, head->dim) / norm / reach;
            else
                scores_out[first + k] = 0.0;
        }
    }
    return faults;
}

static unsigned copy_given(const struct dkv_head *head, double *scores_out, uint8_t *flags)
{
    const struct dkv_block *block = head->item->block;
    const float *given = block->external_scores + (uint64_t)head->index * block->n_tokens +
                         block->valid_from;
    for (uint64_t j = 0; j < head->n; j++) {
        scores_out[j] = (double)given[j];
        if (isfinite(given[j]))
            continue;
        if (!head->mask)
            return DKV_FAULT_EXTRA;
        flags[j] |= DKV_TOKEN_LOWEST;
        scores_out[j] = 0.0;
    }
    return DKV_FAULT_NONE;
}

unsigned dkv_head_score_unseen(const struct dkv_head *head, const struct dkv_tile *tile,
                               double *scores_out, uint8_t *flags)
{
    const struct dkv_params *params = head->item->params;
    const uint64_t layer = (uint64_t)params->layer + head->item->plan->index;
    switch (head->rule->source) {
    case DKV_SOURCE_KEY_NORM:
    case DKV_SOURCE_KEY_ANGLE: return score_keys(head, tile, scores_out, flags);
    case DKV_SOURCE_GIVEN: return copy_given(head, scores_out, flags);
    case DKV_SOURCE_HASH:
        for (uint64_t j = 0; j < head->n; j++)
            scores_out[j] = dkv_rule_hash(params->seed, layer, head->index, j);
        break;
    default:
        for (uint64_t j = 0; j < head->n; j++)
            scores_out[j] = (double)(j + 1);
        break;
    }
    return DKV_FAULT_NONE;
}
