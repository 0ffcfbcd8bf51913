/* The answer's memory.
 *
 * Owner   whoever holds the pointer; dropkv_result_free() frees it and all its arrays.
 * Thread  any, one at a time per result.
 */
#ifndef DKV_CLIENT_RESULT_H
#define DKV_CLIENT_RESULT_H

#include "client/dropkv.h"
#include "proto/types.h"

/* An empty result; NULL if there is no memory. */
struct dropkv_result *dkv_result_new(void);

/* Makes room for an answer, zeroed: keep_indices [batch][kv_heads][keep_tokens], and with
 * `with_scores` scores [batch][kv_heads][n_tokens]. Replaces room made before. NOMEM. */
enum dkv_status dkv_result_reserve(struct dropkv_result *result, uint32_t batch, uint32_t kv_heads,
                                   uint64_t n_tokens, uint64_t keep_tokens, bool with_scores,
                                   struct dkv_error *err);

/* The same arrays, to be written. */
int32_t *dkv_result_keep(struct dropkv_result *result);
float *dkv_result_scores(struct dropkv_result *result);

/* Copied, cut to fit. */
void dkv_result_set_backend(struct dropkv_result *result, const char *backend);
void dkv_result_set_error(struct dropkv_result *result, enum dkv_status status, const char *text);

#endif
