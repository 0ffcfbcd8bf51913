/* reduce=ema_first: from the rows' softmax states to one averaged row per query head.
 *
 *   pbar_j = sum over t of c_t p_tj      abar = sum over the prefix of pbar_j v_j
 *
 * with the weights c_t adding up to 1. abar is linear in the rows, so it is put together from their
 * panels, which left the window's values out. One key of a query head may have pbar > 1/2. Where
 * 1 - pbar and abar - v are small differences, its term is built from what the other keys weigh:
 *
 *   1 - pbar = sum of c_t (1 - p_t)      abar - v = (sum over the others) - (1 - pbar) v
 *
 * which a row whose best key it is knows without cancellation.
 */
#include "kernels/cpu/head_pass.h"

#include <math.h>

/* The key with most of pbar among the rows' best keys; -1 if no row has one. */
static int32_t find_candidate(const struct dkv_head *head, uint32_t g)
{
    int32_t found = -1;
    double most = 0.0;
    for (uint32_t r = g * head->window; r < (g + 1) * head->window; r++) {
        double mass = 0.0;
        for (uint32_t other = g * head->window; other < (g + 1) * head->window; other++)
            if (head->best_key[other] == head->best_key[r])
                mass += (double)head->row_weight[other] * head->best_p[other];
        if (mass > most) {
            most = mass;
            found = head->best_key[r];
        }
    }
    return found;
}

/* sums[d] += weight * value of a token. */
static unsigned add_value(const struct dkv_head *head, const struct dkv_tile *tile, int32_t token,
                          double weight, double *sums)
{
    const unsigned faults = dkv_head_load_values(head, tile->row, (uint64_t)token, 1, 1.0f,
                                                 head->value_shift, NULL);
    for (uint32_t d = 0; d < head->v_dim && faults == DKV_FAULT_NONE; d++)
        sums[d] += weight * (double)tile->row[d];
    return faults;
}

struct candidate {
    int32_t key;
    double p, left; /* pbar and 1 - pbar */
};

/* p of the candidate in a row whose best key is another. */
static bool p_of(const struct dkv_head *head, uint32_t r, int32_t key, double *p_out)
{
    const uint64_t last_seen = dkv_all_see(head) - 1 + r % head->window;
    double logit;
    *p_out = 0.0;
    if ((uint64_t)key > last_seen || head->best_p[r] == 0.0)
        return true;
    if (!dkv_head_logit(head, r, (uint64_t)key, &logit))
        return false;
    *p_out = exp2(logit - (double)head->ref[r]) * (double)head->inv[r];
    return true;
}

/* Adds one row: to others[d] what it gives to abar but for the candidate's part. */
static unsigned add_row(const struct dkv_head *head, const struct dkv_tile *tile, uint32_t r,
                        struct candidate *candidate, double *others)
{
    const struct dkv_split_state *state = &head->splits[0];
    const double weight = (double)head->row_weight[r];
    const int32_t best = head->best_key[r];
    double p = head->best_p[r], left = head->best_left[r];
    for (uint32_t d = 0; d < head->v_dim; d++)
        others[d] += weight * (double)head->inv[r] * (double)state->panel[d * head->n_rows + r];
    if (best != candidate->key) {
        unsigned faults = DKV_FAULT_NONE;
        if (best >= 0 && !dkv_left_out(head, (uint64_t)best))
            faults = add_value(head, tile, best, weight * p, others);
        if (!p_of(head, r, candidate->key, &p))
            faults = DKV_FAULT_TABLE;
        if (faults == DKV_FAULT_NONE && p > 0.0 && !dkv_left_out(head, (uint64_t)candidate->key))
            faults = add_value(head, tile, candidate->key, -weight * p, others);
        if (faults != DKV_FAULT_NONE)
            return faults;
        left = 1.0 - p;
    }
    candidate->p += weight * p;
    candidate->left += weight * left;
    return DKV_FAULT_NONE;
}

/* Stores abar and the candidate's term, both with values scaled. */
static unsigned store_average(struct dkv_head *head, const struct dkv_tile *tile, uint32_t g,
                              const struct candidate *candidate, const double *others)
{
    const double factor = (double)head->value_factor;
    const bool outside = dkv_left_out(head, (uint64_t)candidate->key);
    const double part = outside ? 0.0 : candidate->p, whole = outside ? 1.0 : candidate->left;
    double distance = 0.0;
    const unsigned faults = dkv_head_load_values(head, tile->row, (uint64_t)candidate->key, 1, 1.0f,
                                                 head->value_shift, NULL);
    if (faults != DKV_FAULT_NONE)
        return faults;
    for (uint32_t d = 0; d < head->v_dim; d++) {
        const double v = (double)tile->row[d];
        const float a = (float)((others[d] + part * v) * factor);
        const double x = (others[d] - whole * v) * factor;
        head->bar_outputs[d * head->n_bars + g] = a;
        head->bar_norm[g] += a * a;
        distance += x * x;
        tile->wide[d] = x; /* in the place of others[d], which is not needed any more */
    }
    double length = sqrt(distance);
    if (head->metric_dim > 0)
        length = dkv_head_metric_length(head, g, tile->wide);
    /* A token that nothing else stands beside has no odds: it is protected. */
    head->bar_term[g] = candidate->left > 0.0 ? (float)(candidate->p / candidate->left * length)
                                              : 0.0f;
    head->bar_key[g] = candidate->key;
    return DKV_FAULT_NONE;
}

unsigned dkv_head_average(struct dkv_head *head, const struct dkv_tile *tile)
{
    double *others = tile->wide;
    for (uint32_t g = 0; g < head->n_bars; g++) {
        head->bar_key[g] = -1;
        head->bar_term[g] = 0.0f;
        head->bar_norm[g] = 0.0f;
        for (uint32_t d = 0; d < head->v_dim; d++)
            head->bar_outputs[d * head->n_bars + g] = 0.0f;
    }
    for (uint32_t g = 0; g < head->item->plan->group; g++) {
        struct candidate candidate = {.key = find_candidate(head, g)};
        if (candidate.key < 0)
            continue;
        for (uint32_t d = 0; d < head->v_dim; d++)
            others[d] = 0.0;
        unsigned faults = DKV_FAULT_NONE;
        for (uint32_t r = g * head->window; r < (g + 1) * head->window; r++)
            faults |= add_row(head, tile, r, &candidate, others);
        if (faults == DKV_FAULT_NONE)
            faults = store_average(head, tile, g, &candidate, others);
        if (faults != DKV_FAULT_NONE)
            return faults;
    }
    return DKV_FAULT_NONE;
}
