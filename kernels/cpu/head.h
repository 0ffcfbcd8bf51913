/* Scoring one KV head of one block: the unit of work of the CPU engine.
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
 * Owner   the memory between begin and the last step is the caller's, dkv_head_bytes() of it, and
 *         what dkv_tile_bytes() says per thread. Borrows the item.
 * Errors  steps return a set of enum dkv_fault; dkv_head_explain() finds the place afterwards.
 */
#ifndef DKV_KERNELS_CPU_HEAD_H
#define DKV_KERNELS_CPU_HEAD_H

#include "kernels/cpu/ops.h"
#include "kernels/cpu/reader.h"
#include "kernels/engine.h"

#define DKV_LOG2E 1.4426950408889634 /* logits are in units of log2 */

enum dkv_fault {
    DKV_FAULT_NONE = 0,
    DKV_FAULT_TABLE = 1 << 0,     /* a page table entry may not be followed */
    DKV_FAULT_NONFINITE = 1 << 1, /* NaN or infinity in the tensors */
    DKV_FAULT_RANGE = 1 << 2,     /* a value too large to square */
    DKV_FAULT_LOGITS = 1 << 3,    /* finite queries and keys whose product is not */
};

/* Per-row softmax state of a split, all [n_rows] but the panel. Sums are relative to 2^ref and
 * leave out each row's best key. */
struct dkv_split_state {
    float *best;       /* largest logit, log2 units */
    int32_t *best_key; /* its token, counted from valid_from; -1: the row sees nothing */
    float *ref;
    double *sum;     /* of the other keys' weights */
    float *panel;    /* [v_dim][n_rows]: of weight * (value - centre) */
    float value_top; /* largest |stored value| */
    unsigned faults;
};

/* One thread's tile. */
struct dkv_tile {
    float *rows;           /* [DKV_TILE_KEYS][dim]: keys, then values in their place, which keeps
                              a tile in the first cache level */
    float *logits, *terms; /* [DKV_TILE_KEYS][n_rows] */
    float *keep, *sum, *back;
    int32_t *back_key;
    float *row; /* one value row */
};

struct dkv_head {
    const struct dkv_cpu_ops *ops;
    const struct dkv_item *item;
    uint32_t index; /* KV head */
    uint32_t dim, v_dim;
    uint32_t rows;   /* query rows: group * window, row = query head in group * window + t */
    uint32_t n_rows; /* padded to whole vectors */
    uint64_t n;      /* valid tokens; tokens are counted from valid_from below */
    uint64_t split_tokens;
    uint32_t n_splits;
    bool native_bf16; /* keys are not converted (may be; after begin: are) */
    bool mask;        /* nonfinite=mask */
    bool author_form; /* eps > 0 and rounding: the output comes from pass_a2 */
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

/* Shared by the files of this object: loads the values of `n` tokens from `first`. top_out as for
 * dkv_load_fn. */
unsigned dkv_head_load_values(const struct dkv_head *head, float *rows, uint64_t first, size_t n,
                              float factor, const float *shift, float *top_out);
#endif
