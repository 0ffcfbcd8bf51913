/* A result is the public struct and the memory its pointers point to, in one allocation that the
 * caller knows only by its first part. */
#include "client/result.h"

#include <stdio.h>
#include <stdlib.h>

struct result {
    struct dropkv_result public; /* first: the two pointers are the same */
    int32_t *keep;
    float *scores;
    char backend[64];
    char error_text[sizeof(((struct dkv_error *)NULL)->text)];
};

struct dropkv_result *dkv_result_new(void)
{
    struct result *result = calloc(1, sizeof(*result));
    if (result == NULL)
        return NULL;
    result->public.backend = result->backend;
    result->public.error_text = result->error_text;
    return &result->public;
}

enum dkv_status dkv_result_reserve(struct dropkv_result *public, uint32_t batch, uint32_t kv_heads,
                                   uint64_t n_tokens, uint64_t keep_tokens, bool with_scores,
                                   struct dkv_error *err)
{
    struct result *result = (struct result *)public;
    const uint64_t n_heads = (uint64_t)batch * kv_heads;
    uint64_t n_keep;
    uint64_t n_scores;
    free(result->keep);
    free(result->scores);
    result->keep = NULL;
    result->scores = NULL;
    if (!dkv_mul_u64(n_heads, keep_tokens, &n_keep) || !dkv_mul_u64(n_heads, n_tokens, &n_scores))
        return dkv_error_set(err, DKV_E_NOMEM, "the answer's size overflows");
    result->keep = calloc(n_keep == 0 ? 1 : n_keep, sizeof(result->keep[0]));
    if (with_scores)
        result->scores = calloc(n_scores == 0 ? 1 : n_scores, sizeof(result->scores[0]));
    if (result->keep == NULL || (with_scores && result->scores == NULL))
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the answer");
    public->batch = batch;
    public->kv_heads = kv_heads;
    public->n_tokens = n_tokens;
    public->keep_tokens = keep_tokens;
    public->keep_indices = result->keep;
    public->scores = result->scores;
    return DKV_OK;
}

int32_t *dkv_result_keep(struct dropkv_result *public)
{
    return ((struct result *)public)->keep;
}

float *dkv_result_scores(struct dropkv_result *public)
{
    return ((struct result *)public)->scores;
}

void dkv_result_set_backend(struct dropkv_result *public, const char *backend)
{
    struct result *result = (struct result *)public;
    snprintf(result->backend, sizeof(result->backend), "%s", backend);
}

void dkv_result_set_error(struct dropkv_result *public, enum dkv_status status, const char *text)
{
    struct result *result = (struct result *)public;
    public->status = (enum dropkv_status)status;
    snprintf(result->error_text, sizeof(result->error_text), "%s", text);
}

void dropkv_result_free(struct dropkv_result *public)
{
    struct result *result = (struct result *)public;
    if (result == NULL)
        return;
    free(result->keep);
    free(result->scores);
    free(result);
}
