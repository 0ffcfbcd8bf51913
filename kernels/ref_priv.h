/* What the files of the reference share; nobody else includes this.
 *
 *   ref.c         the mathematics: rows, terms, heads, the whole block
 *   ref_read.c    stored elements, through the address rule, into plain arrays
 *   ref_select.c  pooling, and the total order of tokens
 *
 * Thread  any; no shared state.
 */
#ifndef DKV_KERNELS_REF_PRIV_H
#define DKV_KERNELS_REF_PRIV_H

#include "kernels/ref.h"

/* One KV head: its tokens as matrices. */
struct dkv_ref_head {
    double *key;     /* [n][d] */
    double *value;   /* [n][dv] */
    bool *invisible; /* [n]: before valid_from, or masked */
};

/* One query row's attention over the visible tokens. */
struct dkv_ref_row {
    double *z;      /* [n] */
    double *p;      /* [n]; 0 where not visible */
    double sink_p;  /* share of the sink logit; 0 without one */
    double *output; /* [dv] */
};

struct dkv_ref_job {
    const struct dkv_block *block;
    const struct dkv_params *params;
    const struct dkv_plan *plan;
    size_t n, d, dv;
    struct dkv_ref_head head;
    struct dkv_ref_row row;
    double *query;       /* [d] */
    double *without;     /* [dv]: output with one token left out */
    double *query_score; /* [n]: the sum of one query head's terms */
    struct dkv_ref_answer *answer;
    struct dkv_error *err;
};

/* ---- ref_read.c ---- */

/* `dim` elements of token `t` of head `h`, times their scale. Where not all are finite, `*bad_out`
 * is the first that is not. INVALID for a page that does not exist. */
enum dkv_status dkv_ref_read_row(const struct dkv_ref_job *job, const struct dkv_view *view,
                                 uint64_t h, uint64_t t, size_t dim, double *out, bool *finite_out,
                                 size_t *bad_out);

/* INVALID, naming the place. */
enum dkv_status dkv_ref_not_finite(const struct dkv_ref_job *job, const char *tensor,
                                   const char *kind, uint64_t h, uint64_t t, size_t e);

/* Keys and values of KV head `h` into job->head. */
enum dkv_status dkv_ref_load_head(struct dkv_ref_job *job, uint64_t h);

#endif
