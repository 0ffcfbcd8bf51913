/* The answer's memory, which is used again.
 *
 * Owner   whoever holds the pointer; dropkv_result_free() gives it back with all its arrays. A
 *         pool is its client's; it lasts until its last result was given back, also after the
 * client was closed. Thread  dropkv_result_free(): any, one at a time per result. All else: the
 * client's.
 */
#ifndef DKV_CLIENT_RESULT_H
#define DKV_CLIENT_RESULT_H

#include "client/dropkv.h"
#include "proto/types.h"

#include <stdatomic.h>

/* Memory that a result's arrays lie in and that is not the result's alone. Thread: any. */
struct dkv_held {
    _Atomic uint32_t n_refs;
    void (*free)(struct dkv_held *held); /* when nobody has a reference any more */
};

static inline void dkv_held_unref(struct dkv_held *held)
{
    if (atomic_fetch_sub(&held->n_refs, 1) == 1)
        held->free(held);
}

struct dkv_results;

struct dkv_results *dkv_results_new(void);           /* NULL if there is no memory */
void dkv_results_close(struct dkv_results *results); /* NULL is fine */

/* An empty result; NULL if there is no memory. */
struct dropkv_result *dkv_result_new(struct dkv_results *results);

/* Makes room for an answer: keep_indices [batch][kv_heads][keep_tokens], and with `with_scores`
 * scores [batch][kv_heads][n_tokens]. Whoever asks fills all of it. NOMEM. */
enum dkv_status dkv_result_reserve(struct dropkv_result *result, uint32_t batch, uint32_t kv_heads,
                                   uint64_t n_tokens, uint64_t keep_tokens, bool with_scores,
                                   struct dkv_error *err);

/* The same for an answer of unequal lengths: keep_indices [n_keep], keep_offsets
 * [batch * kv_heads + 1], which the caller fills, then calls dkv_result_judge(). */
enum dkv_status dkv_result_reserve_ragged(struct dropkv_result *result, uint32_t batch,
                                          uint32_t kv_heads, uint64_t n_tokens, uint64_t n_keep,
                                          bool with_scores, struct dkv_error *err);
int32_t *dkv_result_offsets(struct dropkv_result *result);

/* MALFORMED unless offsets ascend from 0 to n_keep in steps of 1..n_tokens. */
enum dkv_status dkv_result_judge(const struct dropkv_result *result, uint64_t n_keep,
                                 struct dkv_error *err);

/* The answer lies in the caller's own memory instead. `scores` may be NULL. */
void dkv_result_borrow(struct dropkv_result *result, uint32_t batch, uint32_t kv_heads,
                       uint64_t n_tokens, uint64_t keep_tokens, const int32_t *keep,
                       const float *scores);

/* Takes a reference, which dropkv_result_free() lets go of. */
void dkv_result_hold(struct dropkv_result *result, struct dkv_held *held);

/* The reserved arrays, to be written. */
int32_t *dkv_result_keep(struct dropkv_result *result);
float *dkv_result_scores(struct dropkv_result *result);

/* Copied, cut to fit. */
void dkv_result_set_backend(struct dropkv_result *result, const char *backend);
void dkv_result_set_error(struct dropkv_result *result, enum dkv_status status, const char *text);

#endif
