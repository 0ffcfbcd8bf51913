/* Scoring one KV head of one block by a rule of source ROWS: the unit of work of the CPU engine.
 *
 * The keys are cut into splits, fixed ranges that depend on the block's shape alone, so that any
 * number of threads computes the same bits. A head goes through these steps; the per-split ones may
 * run on any threads at once, the others on one:
 *
 *   begin      packs the queries, chooses the centres
 *   pass_a     per split: each row's softmax sums and output, its largest key kept apart
 *   merge      folds the splits in a fixed tree; each row's probabilities and output are then known
 *   pass_a2    per split, only with p_round=input and eps > 0: the output made of rounded p
 *   merge_a2
 *   pass_b     per split: raw scores, times a positive factor that finish() knows
 *   finish     descales scores into scores_out
 *
 * Where a policy takes more rows than fit a panel, all steps up to pass_b run once per chunk of
 * rows (take_rows before begin), and pass_b adds to what the chunks before have left.
 *
 * Owner   the memory between begin and the last step is the caller's, dkv_head_bytes() of it, and
 *         what dkv_tile_bytes() says per thread. Borrows the item.
 * Errors  steps return a set of enum dkv_fault; dkv_head_explain() finds the place afterwards.
 */
#ifndef DKV_KERNELS_CPU_HEAD_H
#define DKV_KERNELS_CPU_HEAD_H

#include "kernels/cpu/ops.h"
#include "kernels/cpu/reader.h"
#include "kernels/engine.h"
#include "kernels/rule.h"

#define DKV_LOG2E 1.4426950408889634 /* logits are in units of log2 */

enum dkv_fault {
    DKV_FAULT_NONE = 0,
    DKV_FAULT_TABLE = 1 << 0,     /* a page table entry may not be followed */
    DKV_FAULT_NONFINITE = 1 << 1, /* NaN or infinity in the tensors */
    DKV_FAULT_RANGE = 1 << 2,     /* a value too large to square */
    DKV_FAULT_LOGITS = 1 << 3,    /* finite queries and keys whose product is not */
    DKV_FAULT_EXTRA = 1 << 4,     /* external_scores that are not finite */
};

/* Per-row softmax state of a split, all [n_rows] but the panel. Sums are relative to 2^ref and
 * leave out each row's best key. */
struct dkv_split_state {
    float *best;       /* largest logit, log2 units */
    int32_t *best_key; /* its token, counted from valid_from; -1: the row sees nothing */
    float *ref;
    double *sum;              /* of the other keys' weights */
    float *panel;             /* [v_dim][n_rows]: of weight * (value - centre) */
    float value_top;          /* largest |stored value| */
    double entropy, variance; /* layers=cake: sums over rows and prefix keys, from pass B */
    unsigned faults;
};

/* One thread's tile. */
struct dkv_tile {
    float *rows;           /* [DKV_TILE_KEYS][dim]: keys, then values in their place, which keeps
                              a tile in the first cache level */
    float *logits, *terms; /* [DKV_TILE_KEYS][n_rows] */
    float *keep, *sum, *back;
    int32_t *back_key;
    float *row;           /* one value row */
    float *bars;          /* averaged: two tiles [DKV_TILE_KEYS][n_bars] */
    double *wide;         /* a key or value row in double */
    float *metric_values; /* [DKV_TILE_KEYS] rows of M v */
};

struct dkv_head {
    const struct dkv_cpu_ops *ops;
    const struct dkv_item *item;
    const struct dkv_rule *rule;
    uint32_t index;           /* KV head */
    uint32_t dim, v_dim;      /* v_dim 0: the rule does not read values */
    uint32_t n_chunks, chunk; /* of rows; which one this is */
    uint32_t window;          /* rows per query head in the chunk */
    uint32_t row_first;       /* t of the first of them */
    uint32_t rows;   /* query rows: group * window, row = query head in group * window + t */
    uint32_t n_rows; /* padded to whole vectors */
    uint64_t n;      /* valid tokens; tokens are counted from valid_from below */
    uint64_t split_tokens;
    uint32_t n_splits;
    bool native_bf16; /* keys are not converted (may be; after begin: are) */
    bool mask;        /* nonfinite=mask */
    bool author_form; /* eps > 0 and rounding: the output comes from pass_a2 */
    bool averaged;    /* reduce=ema_first: rows become one before the term is taken */
    enum dkv_dtype round;
    struct dkv_reader keys, values;

    float *queries;        /* panel */
    uint32_t *query_pairs; /* native_bf16: the bf16 pairs instead */
    float query_factor;    /* of products on the way to logits: scale * log2(e) */
    float *key_shift;      /* [dim] minus the keys' centre */
    float *value_shift;    /* [v_dim] minus the values' centre */
    struct dkv_split_state *splits;

    /* after merge, [n_rows] unless said otherwise */
    float *outputs;   /* panel of (a - centre) * value_factor */
    float *out_norm;  /* |a - centre|^2, of the same numbers */
    float *ref, *inv; /* p = 2^(logit - ref) * inv */
    int32_t *best_key;
    double *best_p;      /* p of the best key; 0: the row is silent */
    double *best_exact;  /* its term of the score, values scaled, before gain */
    float *best_term;    /* the same times gain^2 */
    float value_factor;  /* power of two that brings values near 1 */
    float *scaled_shift; /* [v_dim] value_shift * value_factor */
    float gain;          /* power of two on p */

    float *row_weight; /* of a row in the reduction; unused by DropKV's */

    /* averaged: what has one column per query head, padded to whole vectors */
    uint32_t n_bars;
    double *best_left;  /* [n_rows] 1 - p of the best key */
    float *bar_outputs; /* panel of abar * value_factor */
    float *bar_norm;    /* [n_bars] */
    int32_t *bar_key;   /* the key that may have more than half of pbar */
    float *bar_term;    /* its term */

    /* value_metric given: distances are |M (a - v)| */
    uint32_t metric_dim;  /* v_dim padded to whole vectors; 0: none given */
    float *metric;        /* [group] panels [v_dim][metric_dim] of M transposed */
    float *metric_output; /* [n_rows], or averaged [n_bars], rows of M a * value_factor */

    float *raw;     /* [n] scores times gain^2 * value_factor^2 / ... (see finish) */
    uint8_t *flags; /* [n] enum dkv_token_flag, or NULL: none can occur */
};

/* Fixes the shape. `head` needs nothing else before. */
void dkv_head_init(struct dkv_head *head, const struct dkv_cpu_ops *ops,
                   const struct dkv_item *item, uint32_t index);

/* Memory that a head needs, and one thread's tile for it. Bounded by the limits of proto/params.h;
 * besides 4 bytes per token (5 where tokens may have flags) under 2 MiB for the shapes in use. */
size_t dkv_head_bytes(const struct dkv_head *head);
size_t dkv_tile_bytes(const struct dkv_head *head);

/* Hands out `memory` (aligned to 64). */
void dkv_head_place(struct dkv_head *head, void *memory);
void dkv_tile_place(struct dkv_tile *tile, const struct dkv_head *head, void *memory);

/* Chooses chunk c, 0..n_chunks-1; init has chosen the first. */
void dkv_head_take_rows(struct dkv_head *head, uint32_t c);

unsigned dkv_head_begin(struct dkv_head *head, const struct dkv_tile *tile);
void dkv_head_pass_a(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile);
unsigned dkv_head_merge(struct dkv_head *head, const struct dkv_tile *tile);
void dkv_head_pass_a2(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile);
void dkv_head_merge_a2(struct dkv_head *head, const struct dkv_tile *tile);
void dkv_head_pass_b(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile);
/* What the per-split steps met so far. merge asks itself; ask again before finish, since memory
 * shared with a client can change between the passes. */
unsigned dkv_head_faults(const struct dkv_head *head);
/* What a score reported is of one in `raw`. */
double dkv_head_score_factor(const struct dkv_head *head);
void dkv_head_finish(const struct dkv_head *head);
/* After pass_b: some token was masked (nonfinite=mask). */
bool dkv_head_has_masked(const struct dkv_head *head);
/* layers=cake, after pass_b: this head's part of the layer's entropy and variance. */
void dkv_head_spread(const struct dkv_head *head, double *entropy_out, double *variance_out);
/* The scores as they are reported, [n]. */
void dkv_head_scores(const struct dkv_head *head, double *scores_out);

/* Says what is wrong and where: reads table and tensors again in order, the first offence wins.
 * *nonfinite_out becomes true if it is a NaN or an infinity. */
enum dkv_status dkv_head_explain(const struct dkv_head *head, unsigned faults, bool *nonfinite_out,
                                 struct dkv_error *err);

/* shift_out[dim] = minus a centre of the stored rows. offset_out: how far that is from zero,
 * squared, in units of the samples' extent. `scratch` holds DKV_TILE_KEYS rows. False: a bad table
 * entry. */
bool dkv_head_centre(const struct dkv_head *head, const struct dkv_reader *reader, uint32_t dim,
                     float *scratch, float *shift_out, double *offset_out);

/* One logit in double precision, in the units and the frame of the tiles'. False: a bad table
 * entry.
 */
bool dkv_head_logit(const struct dkv_head *head, uint32_t row, uint64_t token, double *logit_out);

/* value_metric: takes the group's matrices; false if an element is not finite. Then the length of
 * M x, x [v_dim], and M times a column of a panel of outputs. */
bool dkv_head_take_metric(struct dkv_head *head);
double dkv_head_metric_length(const struct dkv_head *head, uint32_t g, const double *x);
void dkv_head_metric_outputs(struct dkv_head *head);

/* Squared distances of a tile's values to all outputs, [n][ld]: columns are rows of the chunk or,
 * if averaged, query heads. */
void dkv_head_metric_distances(const struct dkv_head *head, const struct dkv_tile *tile, size_t n,
                               float *out, size_t ld);

/* averaged: the last part of merge. */
unsigned dkv_head_average(struct dkv_head *head, const struct dkv_tile *tile);

/* pass_b of the rules that are not DropKV's. */
void dkv_head_pass_rule(struct dkv_head *head, uint32_t split, const struct dkv_tile *tile);

/* Scores of a rule whose source is not ROWS, as they are reported: scores_out [n]. Sets bits of
 * flags [n]. The head needs no memory but the tile. Returns faults. */
unsigned dkv_head_score_unseen(const struct dkv_head *head, const struct dkv_tile *tile,
                               double *scores_out, uint8_t *flags);

/* The block's query head that a row of the chunk belongs to. */
uint32_t dkv_head_query_head(const struct dkv_head *head, uint32_t row);

/* Shared by the files of this object: loads the values of `n` tokens from `first`. top_out as for
 * dkv_load_fn. */
unsigned dkv_head_load_values(const struct dkv_head *head, float *rows, uint64_t first, size_t n,
                              float factor, const float *shift, float *top_out);
#endif
