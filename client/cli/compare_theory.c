/* Changes by single tokens, their scores and their cone.
 *
 * The change of a row's output a when token j alone is dropped is p / (1 - p) * (a - v). For the
 * one token with p > 1/2 it is computed from the others alone: 1 - p and a - p v would cancel.
 */
#include "client/cli/compare_theory.h"

#include <math.h>
#include <stdlib.h>

/* The row's output without token j, and what the others weigh. */
static double without(const struct dkv_theory *t, uint32_t row, uint64_t token, double *from)
{
    const double *p = t->p + row * t->n;
    double mass = 0;
    for (uint32_t e = 0; e < t->v_dim; e++)
        from[e] = 0;
    for (uint64_t j = 0; j < t->n; j++) {
        if (j == token || p[j] == 0)
            continue;
        mass += p[j];
        for (uint32_t e = 0; e < t->v_dim; e++)
            from[e] += p[j] * (double)t->value[j * t->v_dim + e];
    }
    for (uint32_t e = 0; e < t->v_dim && mass > 0; e++)
        from[e] /= mass;
    return mass;
}

static void weigh_row(struct dkv_theory *t, uint32_t row)
{
    const double *p = t->p + row * t->n;
    t->heavy[row] = t->n;
    for (uint64_t j = 0; j < t->n; j++) {
        t->weight[row * t->n + j] = p[j] / (1 - p[j]);
        if (p[j] > 0.5) {
            without(t, row, j, t->from + row * t->v_dim);
            t->heavy[row] = j;
            t->weight[row * t->n + j] = p[j];
        }
    }
}

void dkv_theory_change(const struct dkv_theory *t, uint32_t row, uint64_t token, double *to)
{
    const double *from = (token == t->heavy[row] ? t->from : t->all) + row * t->v_dim;
    const double weight = t->weight[row * t->n + token];
    const float *value = t->value + token * t->v_dim;
    for (uint32_t e = 0; e < t->v_dim; e++)
        to[e] = weight * (from[e] - (double)value[e]);
}

double dkv_theory_noise(const struct dkv_theory *t)
{
    double square = 0;
    for (size_t i = 0; i < (size_t)t->rows * t->v_dim; i++)
        square += t->all[i] * t->all[i];
    return 1e-9 * sqrt(square);
}

static int by_score(const void *a, const void *b)
{
    const struct dkv_ranked *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

static void rank(struct dkv_theory *t, uint64_t first, double *change)
{
    for (uint64_t i = 0; i < t->n_ranked; i++) {
        struct dkv_ranked *ranked = &t->ranked[i];
        *ranked = (struct dkv_ranked){.token = first + i};
        for (uint32_t r = 0; r < t->rows; r++) {
            dkv_theory_change(t, r, ranked->token, change);
            for (uint32_t e = 0; e < t->v_dim; e++)
                ranked->score += change[e] * change[e];
        }
    }
    qsort(t->ranked, t->n_ranked, sizeof(*t->ranked), by_score);
}

enum dkv_status dkv_theory_new(const struct dkv_outputs *o, uint32_t kv_head,
                               struct dkv_theory **out, struct dkv_error *err)
{
    struct dkv_theory *t = calloc(1, sizeof(*t));
    double *change = calloc(o->v_dim, sizeof(*change));
    const size_t rows = (size_t)o->group * o->rows;
    if (t != NULL)
        *t = (struct dkv_theory){.outputs = o,
                                 .p = o->p + kv_head * rows * o->n,
                                 .all = o->all + kv_head * rows * o->v_dim,
                                 .value = o->value + kv_head * o->n * o->v_dim,
                                 .n = o->n,
                                 .rows = (uint32_t)rows,
                                 .v_dim = o->v_dim,
                                 .n_ranked = o->n - o->rows + 1 - o->first,
                                 .ranked = calloc(o->n, sizeof(*t->ranked)),
                                 .weight = calloc(rows * o->n, sizeof(double)),
                                 .from = calloc(rows * o->v_dim, sizeof(double)),
                                 .heavy = calloc(rows, sizeof(uint64_t))};
    if (t == NULL || change == NULL || t->ranked == NULL || t->weight == NULL || t->from == NULL ||
        t->heavy == NULL) {
        free(change);
        dkv_theory_free(t);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory to compare choices");
    }
    for (uint32_t r = 0; r < t->rows; r++)
        weigh_row(t, r);
    rank(t, o->first, change);
    free(change);
    *out = t;
    return DKV_OK;
}

void dkv_theory_free(struct dkv_theory *t)
{
    if (t == NULL)
        return;
    free(t->ranked);
    free(t->weight);
    free(t->from);
    free(t->heavy);
    free(t);
}

/* Share of ranked[first ..] whose change has a positive product with `axis` [rows][v_dim]. */
static double share_along(const struct dkv_theory *t, uint64_t first, const double *axis,
                          double *change)
{
    uint64_t along = 0;
    for (uint64_t i = first; i < t->n_ranked; i++) {
        double product = 0;
        for (uint32_t r = 0; r < t->rows; r++) {
            dkv_theory_change(t, r, t->ranked[i].token, change);
            for (uint32_t e = 0; e < t->v_dim; e++)
                product += change[e] * axis[r * t->v_dim + e];
        }
        along += product > 0;
    }
    return (double)along / (double)(t->n_ranked - first);
}

enum dkv_status dkv_theory_cone(const struct dkv_theory *t, uint64_t kept, struct dkv_cone *sum,
                                struct dkv_error *err)
{
    const uint64_t others = t->outputs->rows - 1, first = kept > others ? kept - others : 0;
    const size_t width = (size_t)t->rows * t->v_dim;
    double *axis = calloc(width + t->v_dim, sizeof(*axis)), lengths = 0, length = 0;
    if (axis == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory to compare choices");
    double *change = axis + width;
    for (uint64_t i = first; i < t->n_ranked; i++) {
        for (uint32_t r = 0; r < t->rows; r++) {
            dkv_theory_change(t, r, t->ranked[i].token, change);
            for (uint32_t e = 0; e < t->v_dim; e++)
                axis[r * t->v_dim + e] += change[e];
        }
        lengths += sqrt(t->ranked[i].score);
    }
    for (size_t i = 0; i < width; i++)
        length += axis[i] * axis[i];
    if (lengths > dkv_theory_noise(t)) {
        const double cosine = sqrt(length) / lengths;
        dkv_cone_add(sum, &(struct dkv_cone){.cosine = cosine,
                                             .lowest = cosine,
                                             .along = share_along(t, first, axis, change),
                                             .n = 1});
    }
    free(axis);
    return DKV_OK;
}

void dkv_cone_add(struct dkv_cone *sum, const struct dkv_cone *one)
{
    if (one->n == 0)
        return;
    sum->lowest = sum->n == 0 || one->lowest < sum->lowest ? one->lowest : sum->lowest;
    sum->cosine += one->cosine;
    sum->along += one->along;
    sum->n += one->n;
}
