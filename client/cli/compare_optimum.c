/* The best of all choices of half of 20 tokens, by trying each.
 *
 * Dropping the set E moves row t's output by d_t(E) / (1 - sum over E of p), where d_t(E) is the
 * sum over E of p (a - v): what is minimised is the sum over rows of its square. A walk over the
 * sets, one token at a time, keeps |d_t|^2 and the products of d_t with every token's term, which
 * come from the 20 x 20 products of each row. Every set is summed anew from the empty one, ten
 * additions long, so that rounding does not pile up over the 184,756 of them.
 */
#include "client/cli/compare_theory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define N     DKV_SUBSET_TOKENS
#define DROPS (DKV_SUBSET_TOKENS / 2)

/* What a set of `depth` tokens comes to in each row. */
struct step {
    double *square;  /* [rows] |d|^2 */
    double *mass;    /* [rows] 1 - sum of p */
    double *product; /* [N][rows] of d with each token's term */
};

struct search {
    uint32_t rows;
    double *p;       /* [N][rows] */
    double *product; /* [N][N][rows] of the terms */
    struct step steps[DROPS];
    uint32_t tokens[DROPS]; /* of the set in hand, ascending */
    double best;
    uint32_t best_set; /* bit i: token i is dropped */
};

static bool search_init(struct search *s, uint32_t rows, double **storage_out)
{
    const size_t step = (size_t)(N + 2) * rows;
    double *next = *storage_out = calloc((size_t)(N + N * N) * rows + DROPS * step, sizeof(*next));
    if (next == NULL)
        return false;
    *s = (struct search){.rows = rows, .p = next, .product = next + (size_t)N * rows};
    next += (size_t)(N + N * N) * rows;
    for (uint32_t d = 0; d < DROPS; d++, next += step)
        s->steps[d] = (struct step){next, next + rows, next + 2 * (size_t)rows};
    return true;
}

static double *product_of(const struct search *s, uint32_t a, uint32_t b)
{
    return s->product + ((size_t)a * N + b) * s->rows;
}

/* The terms' products in each row, and the empty set. */
static void prepare(struct search *s, const struct dkv_theory *t, const uint64_t *pool,
                    double *terms)
{
    for (uint32_t r = 0; r < s->rows; r++) {
        for (uint32_t i = 0; i < N; i++) {
            const double p = t->p[r * t->n + pool[i]];
            s->p[(size_t)i * s->rows + r] = p;
            for (uint32_t e = 0; e < t->v_dim; e++)
                terms[i * t->v_dim + e] = p * (t->all[r * t->v_dim + e] -
                                               (double)t->value[pool[i] * t->v_dim + e]);
        }
        for (uint32_t a = 0; a < N; a++)
            for (uint32_t b = 0; b < N; b++) {
                double sum = 0;
                for (uint32_t e = 0; e < t->v_dim; e++)
                    sum += terms[a * t->v_dim + e] * terms[b * t->v_dim + e];
                product_of(s, a, b)[r] = sum;
            }
        s->steps[0].square[r] = 0;
        s->steps[0].mass[r] = 1;
    }
    memset(s->steps[0].product, 0, (size_t)N * s->rows * sizeof(double));
    s->best = INFINITY;
    s->best_set = 0;
}

/* The squared change if `token` joins the set in hand. */
static double change_with(const struct search *s, const struct step *at, uint32_t token)
{
    const double *p = s->p + (size_t)token * s->rows;
    const double *with = at->product + (size_t)token * s->rows, *own = product_of(s, token, token);
    double sum = 0;
    for (uint32_t r = 0; r < s->rows; r++) {
        const double mass = at->mass[r] - p[r];
        const double square = at->square[r] + 2 * with[r] + own[r];
        if (square > 0) /* but for rounding it is never below */
            sum += square / (mass > 1e-150 ? mass * mass : 1e-300);
    }
    return sum;
}

static void join(const struct search *s, const struct step *at, uint32_t token, struct step *next)
{
    const double *p = s->p + (size_t)token * s->rows;
    const double *with = at->product + (size_t)token * s->rows, *own = product_of(s, token, token);
    for (uint32_t r = 0; r < s->rows; r++) {
        next->mass[r] = at->mass[r] - p[r];
        next->square[r] = at->square[r] + 2 * with[r] + own[r];
    }
    const size_t first = (size_t)(token + 1) * s->rows, end = (size_t)N * s->rows;
    const double *products = product_of(s, token, 0);
    for (size_t i = first; i < end; i++)
        next->product[i] = at->product[i] + products[i];
}

/* All sets that begin with the `depth` tokens in hand and go on from `token`. */
static void walk(struct search *s, uint32_t depth, uint32_t token)
{
    for (; token + DROPS - depth <= N; token++) {
        s->tokens[depth] = token;
        if (depth + 1 < DROPS) {
            join(s, &s->steps[depth], token, &s->steps[depth + 1]);
            walk(s, depth + 1, token + 1);
            continue;
        }
        const double change = change_with(s, &s->steps[depth], token);
        if (change <= s->best) { /* the last of equals: of the lowest scores */
            s->best = change;
            s->best_set = 0;
            for (uint32_t d = 0; d < DROPS; d++)
                s->best_set |= 1u << s->tokens[d];
        }
    }
}

/* The lowest scores are the pool's last tokens, and the walk's last set. */
static double change_of_lowest(struct search *s)
{
    for (uint32_t d = 0; d + 1 < DROPS; d++)
        join(s, &s->steps[d], DROPS + d, &s->steps[d + 1]);
    return change_with(s, &s->steps[DROPS - 1], N - 1);
}

/* One token of each of 20 equal parts of the ranking, at the same place in each. */
static void draw(const struct dkv_theory *t, uint32_t subset, uint64_t *pool)
{
    const double place = (2 * subset + 1) / (2.0 * DKV_SUBSETS);
    for (uint32_t i = 0; i < N; i++)
        pool[i] = t->ranked[(uint64_t)((i + place) * (double)t->n_ranked / N)].token;
}

enum dkv_status dkv_theory_optimum(const struct dkv_theory *t, struct dkv_optimum *sum,
                                   struct dkv_error *err)
{
    const uint32_t lowest = ((1u << DROPS) - 1) << DROPS;
    uint64_t pool[N];
    struct search s;
    double *storage = NULL, *terms = calloc((size_t)N * t->v_dim, sizeof(*terms));
    enum dkv_status status = DKV_OK;
    if (terms == NULL || !search_init(&s, t->rows, &storage))
        status = dkv_error_set(err, DKV_E_NOMEM, "no memory to compare choices");
    for (uint32_t i = 0; status == DKV_OK && t->n_ranked >= N && i < DKV_SUBSETS; i++) {
        draw(t, i, pool);
        prepare(&s, t, pool, terms);
        walk(&s, 0, 0);
        const double change = sqrt(change_of_lowest(&s));
        const double ratio = change <= dkv_theory_noise(t) ? 1 : change / sqrt(s.best);
        dkv_optimum_add(sum, &(struct dkv_optimum){.ratio = ratio,
                                                   .worst = ratio,
                                                   .n_best = s.best_set == lowest || ratio <= 1,
                                                   .n = 1});
    }
    free(storage);
    free(terms);
    return status;
}

void dkv_optimum_add(struct dkv_optimum *sum, const struct dkv_optimum *one)
{
    sum->worst = one->worst > sum->worst ? one->worst : sum->worst;
    sum->ratio += one->ratio;
    sum->n_best += one->n_best;
    sum->n += one->n;
}
