/* The operations that the two passes are made of, and the table of their variants.
 *
 * Everything works on one tile: up to DKV_TILE_KEYS consecutive tokens of one KV head against all
 * query rows that share the head. Three layouts, all float32:
 *
 *   rows    [key][dim]        a tile of keys or values, converted; `ld` floats from key to key
 *   panel   [dim][row]        queries or outputs, transposed: the query rows are the vector lanes
 *   tile    [key][row]        logits, probabilities, terms
 *
 * With the query rows in the lanes nothing is ever transposed in the streaming part: a key element
 * is broadcast against a vector of rows, sums over keys and maxima stay inside a lane, and the tile
 * that the dot products write is the one that the output accumulation reads. `n_rows` is padded to
 * a multiple of `lanes`; padding rows hold zero queries.
 *
 * Logits are in units of log2 (products times scale * log2(e)), so a probability is a power of two.
 * Invisible entries of a tile are -inf.
 *
 * Owner   all buffers are the caller's; none need alignment; outputs must not overlap inputs except
 *         where they are one parameter.
 * Thread  any; no state. Never blocks or allocates.
 * Errors  none. Any float is safe, NaN and infinities included; a NaN stays in its key or row.
 */
#ifndef DKV_KERNELS_CPU_OPS_H
#define DKV_KERNELS_CPU_OPS_H

#include "proto/types.h"

#define DKV_TILE_KEYS 48 /* a multiple of every variant's block of keys */

/* dst[i][d] = value * factor + shift[d], for n_keys rows of dim elements (a multiple of 8) of any
 * alignment. shift NULL: zeros. top_out, unless NULL: the largest |value| met, before factor and
 * shift, compared as bits: NaN if there is one, else infinity if there is one. */
typedef void (*dkv_load_fn)(float *dst, size_t ld, const void *const *src, size_t n_keys,
                            size_t dim, enum dkv_dtype dtype, float factor, const float *shift,
                            float *top_out);

/* Stored rows that will be loaded soon. The matrix products ask for them while they compute, since
 * a burst of loads between two products would wait for memory. NULL or zeros: nothing. */
struct dkv_ahead {
    const void *const *rows;
    size_t n_rows;
    size_t row_bytes;
};

/* tile[key][row] = factor * sum over d of panel[d][row] * rows[key][d]; the order of additions
 * depends on dim alone. */
typedef void (*dkv_dot_fn)(float *tile, const float *panel, size_t n_rows, const float *rows,
                           size_t ld, size_t n_keys, size_t dim, float factor,
                           const struct dkv_ahead *ahead);

/* The same with the keys as they are stored, bf16 rows in `src`, and the queries as a panel
 * [dim/2][row] of bf16 pairs. `top_out` as for dkv_load_fn. */
typedef void (*dkv_dot_bf16_fn)(float *tile, const uint32_t *pairs, size_t n_rows,
                                const void *const *src, size_t n_keys, size_t dim, float factor,
                                float *top_out, const struct dkv_ahead *ahead);

/* panel[d][row] = panel[d][row] * keep[row] + sum over keys of tile[key][row] * rows[key][d]. */
typedef void (*dkv_accumulate_fn)(float *panel, const float *keep, size_t n_rows, const float *tile,
                                  const float *rows, size_t ld, size_t n_keys, size_t dim,
                                  const struct dkv_ahead *ahead);

/* tile = limit * tanh(tile) */
typedef void (*dkv_softcap_fn)(float *tile, size_t n, float limit);

/* One step of the online softmax that keeps each row's largest key apart. All arrays [n_rows].
 *
 * The row's state: `best` and `best_key`, its largest logit so far and the token it belongs to;
 * `ref`, the reference that the sums over all *other* keys are relative to (at least their largest
 * logit). A tile with a larger logit takes over best; the dethroned key then belongs to the others.
 *
 * tile        in: logits of tokens first_key ..; out: 2^(logit - ref) of the others, 0 for best.
 * keep        by how much sums so far shrink because ref grew: 2^(old ref - ref).
 * sum         of the tile's outputs.
 * back        weight of the dethroned key, to be added by the caller; 0: there is none.
 * back_key    its token.
 */
struct dkv_softmax_rows {
    float *best, *ref, *keep, *sum, *back;
    int32_t *best_key, *back_key;
};
typedef void (*dkv_softmax_fn)(const struct dkv_softmax_rows *rows, float *tile, size_t n_rows,
                               size_t n_keys, int32_t first_key);

/* tile = p = 2^(tile - ref) * inv, rounded to `round`; sum[row] over the tile. */
typedef void (*dkv_weights_fn)(float *tile, size_t n_rows, size_t n_keys, const float *ref,
                               const float *inv, enum dkv_dtype round, float *sum);

/* Terms of the score. For each (key, row), with p = 2^(logit - ref) * inv and
 * q = p rounded to `round`:
 *
 *   eps == 0   (gain * q / (1 - p))^2 * |a - v|^2
 *   eps > 0    (gain * q / (1 - q + eps))^2 * |a - v|^2
 *
 * |a - v|^2 is out_norm + value_norm - 2 a.v where that keeps its digits, else it is summed from
 * the differences.
 */
struct dkv_score_args {
    size_t n_rows, n_keys, v_dim, v_ld;
    const float *logits;     /* tile */
    float *terms;            /* tile; in: a.v */
    const float *ref, *inv;  /* [n_rows] */
    const float *out;        /* panel of a */
    const float *out_norm;   /* [n_rows] |a|^2 */
    const float *values;     /* rows of v */
    const float *value_norm; /* [n_keys] */
    float gain, eps;
    enum dkv_dtype round; /* DKV_FP32: none */
};
typedef void (*dkv_score_fn)(const struct dkv_score_args *args);

/* The same un-squared, in the exact form without rounding: gain * p / (1 - p) * |a - v|.
 * `score_dist` takes logits as above, `score_given` the probabilities themselves (ref and inv are
 * not read). */
typedef void (*dkv_score_dist_fn)(const struct dkv_score_args *args);

/* tile *= other, element by element. */
typedef void (*dkv_multiply_fn)(float *tile, const float *other, size_t n_rows, size_t n_keys);

/* out[key] = sum over d of rows[key][d]^2 */
typedef void (*dkv_norms_fn)(float *out, const float *rows, size_t ld, size_t n_keys, size_t dim);

/* out[key] = sum of tile[key][..] */
typedef void (*dkv_reduce_fn)(float *out, const float *tile, size_t n_rows, size_t n_keys);

/* out[key] = sum over rows of weight[row] * tile[key][row] */
typedef void (*dkv_reduce_weighted_fn)(float *out, const float *tile, const float *weight,
                                       size_t n_rows, size_t n_keys);

/* out[key] = the largest of tile[key][..], none of which is below 0; NaN if there is one */
typedef void (*dkv_reduce_largest_fn)(float *out, const float *tile, size_t n_rows, size_t n_keys);

/* out[key * ld + g] = mean + gamma * unbiased variance of tile[key][g * window ..], the variance
 * from the differences to the mean; 0 of a single row. */
typedef void (*dkv_spread_fn)(float *out, size_t ld, const float *tile, size_t n_rows, size_t group,
                              size_t window, float gamma, size_t n_keys);

/* out[key * ld + g] = sum over t of weight[g * window + t] * tile[key][g * window + t] */
typedef void (*dkv_fold_fn)(float *out, size_t ld, const float *tile, const float *weight,
                            size_t n_rows, size_t group, size_t window, size_t n_keys);

/* out[key * ld + i] = |a_i - u_key|^2; both are rows of `dim` floats, a multiple of the lanes. */
typedef void (*dkv_apart_fn)(float *out, size_t ld, const float *a, size_t n_a, const float *u,
                             size_t n_keys, size_t dim);

/* A variant: one instruction set's form of every operation. */
struct dkv_cpu_ops {
    const char *name;
    uint32_t flags; /* enum dkv_cpu_flag that all have to be there */
    uint32_t lanes; /* n_rows is a multiple of this */
    dkv_load_fn load;
    dkv_dot_fn dot;
    dkv_dot_bf16_fn dot_bf16; /* NULL: keys are converted and `dot` used */
    dkv_accumulate_fn accumulate;
    dkv_softcap_fn softcap;
    dkv_softmax_fn softmax;
    dkv_weights_fn weights;
    dkv_score_fn score;
    dkv_norms_fn norms;
    dkv_reduce_fn reduce;
    dkv_score_dist_fn score_dist, score_given;
    dkv_multiply_fn multiply;
    dkv_reduce_weighted_fn reduce_weighted;
    dkv_reduce_largest_fn reduce_largest;
    dkv_spread_fn spread;
    dkv_fold_fn fold;
    dkv_apart_fn apart;
};

/* Fastest first, ends with NULL; the last works everywhere. */
extern const struct dkv_cpu_ops *const dkv_cpu_ops_table[];

/* The first whose flags are all in `flags`. */
const struct dkv_cpu_ops *dkv_cpu_ops_choose(uint32_t flags);

#endif
