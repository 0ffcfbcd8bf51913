/* What the theory of dropkv promises on these tensors, and what it comes to (docs/policies.md,
 * "What the theory promises"): how narrow the cone is in which the changes by single tokens lie,
 * and how near dropping the lowest scores comes to the best of all choices.
 *
 * Both are our reading of the paper, whose statement we know second-hand: the decoupled scores are
 * within a constant factor of the best set under a cone condition.
 *
 * Owner   the caller's storage; the sums start as zeros.
 * Errors  NOMEM.
 */
#ifndef DKV_CLIENT_CLI_COMPARE_THEORY_H
#define DKV_CLIENT_CLI_COMPARE_THEORY_H

#include "client/cli/compare_error.h"

#define DKV_SUBSET_TOKENS 20u /* of which half are kept: 184,756 choices */
#define DKV_SUBSETS       4u  /* of each KV head */

/* What is dropped at one budget; sums over KV heads but for `lowest`. */
struct dkv_cone {
    double cosine; /* |sum of the tokens' changes| / sum of |change| */
    double lowest; /* the least of these */
    double along;  /* share of the tokens whose change has a positive product with the sum */
    uint64_t n;    /* heads that drop something */
};

/* Sums over subsets but for `worst`. */
struct dkv_optimum {
    double ratio;    /* |change by the lowest scores| / |least change of all choices| */
    double worst;    /* the largest of these */
    uint64_t n_best; /* subsets in which they are the same */
    uint64_t n;
};

void dkv_cone_add(struct dkv_cone *sum, const struct dkv_cone *one);
void dkv_optimum_add(struct dkv_optimum *sum, const struct dkv_optimum *one);

struct dkv_theory;

/* Changes and scores of one KV head. */
enum dkv_status dkv_theory_new(const struct dkv_outputs *outputs, uint32_t kv_head,
                               struct dkv_theory **out, struct dkv_error *err);
void dkv_theory_free(struct dkv_theory *theory); /* NULL is fine */

/* Adds the cone of what the scores drop when `kept` tokens stay, those counted that some row does
 * not see and that are therefore no candidates. Nothing is added if nothing is dropped. */
enum dkv_status dkv_theory_cone(const struct dkv_theory *theory, uint64_t kept,
                                struct dkv_cone *sum, struct dkv_error *err);

/* Adds the head's subsets; none if it has fewer candidates than a subset has tokens. */
enum dkv_status dkv_theory_optimum(const struct dkv_theory *theory, struct dkv_optimum *sum,
                                   struct dkv_error *err);

/* ---- between the files of this module ---- */

struct dkv_ranked {
    double score;
    uint64_t token;
};

struct dkv_theory {
    const struct dkv_outputs *outputs;
    const double *p;    /* [rows][n] of this head's stacked rows */
    const double *all;  /* [rows][v_dim] */
    const float *value; /* [n][v_dim] */
    uint64_t n;         /* stored tokens */
    uint32_t rows;      /* query heads of the group times window rows */
    uint32_t v_dim;
    uint64_t n_ranked;         /* candidates: tokens that every row sees */
    struct dkv_ranked *ranked; /* [n_ranked], highest score first, then lower index */
    double *weight;            /* [rows][n]: the change is weight * (from - v) */
    double *from;              /* [rows][v_dim]: for the row's heavy token; for others `all` */
    uint64_t *heavy;           /* [rows]: the token with p > 1/2, or n */
};

/* The change of row r's output when token j alone is dropped: to [v_dim]. */
void dkv_theory_change(const struct dkv_theory *theory, uint32_t row, uint64_t token, double *to);

/* Changes that are no longer count as none: rounding of the outputs, divided by what is left. */
double dkv_theory_noise(const struct dkv_theory *theory);

#endif
