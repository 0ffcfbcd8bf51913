/* A result is the public struct and the memory its pointers point to; the caller knows only its
 * first part.
 *
 * Results that were freed wait in a list of their pool. Anybody may put one there, at any time; the
 * client alone takes, and takes the whole list, so that no place in it is looked at twice. Every
 * result that is out holds a reference to the pool.
 */
#include "client/result.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEPT_BYTES_MAX (UINT64_C(16) << 20) /* an array above that is not kept */

struct array {
    void *bytes;
    uint64_t room;
};

struct result {
    struct dropkv_result public; /* first: the two pointers are the same */
    struct dkv_results *results;
    struct result *next; /* while it waits */
    struct array keep;
    struct array scores;
    struct array offsets;
    struct dkv_held *held; /* or NULL */
    char backend[64];
    char error_text[sizeof(((struct dkv_error *)NULL)->text)];
};

struct dkv_results {
    _Atomic uint32_t n_refs; /* the client's, and one for each result that is out */
    _Atomic bool closed;
    _Atomic(struct result *) freed;
    struct result *idle; /* the client's: taken from `freed` */
};

static void result_delete(struct result *result)
{
    free(result->keep.bytes);
    free(result->scores.bytes);
    free(result->offsets.bytes);
    free(result);
}

static void delete_all(struct result *list)
{
    while (list != NULL) {
        struct result *result = list;
        list = result->next;
        result_delete(result);
    }
}

struct dkv_results *dkv_results_new(void)
{
    struct dkv_results *results = calloc(1, sizeof(*results));
    if (results != NULL)
        atomic_init(&results->n_refs, 1);
    return results;
}

static void results_unref(struct dkv_results *results)
{
    if (atomic_fetch_sub(&results->n_refs, 1) > 1)
        return;
    delete_all(atomic_load(&results->freed));
    free(results);
}

void dkv_results_close(struct dkv_results *results)
{
    if (results == NULL)
        return;
    atomic_store(&results->closed, true);
    delete_all(results->idle);
    delete_all(atomic_exchange(&results->freed, NULL));
    results_unref(results);
}

struct dropkv_result *dkv_result_new(struct dkv_results *results)
{
    if (results->idle == NULL)
        results->idle = atomic_exchange(&results->freed, NULL);
    struct result *result = results->idle;
    if (result != NULL)
        results->idle = result->next;
    else if ((result = calloc(1, sizeof(*result))) == NULL)
        return NULL;
    result->public = (struct dropkv_result){
        .backend = result->backend,
        .error_text = result->error_text,
    };
    result->backend[0] = '\0';
    result->error_text[0] = '\0';
    result->results = results;
    atomic_fetch_add(&results->n_refs, 1);
    return &result->public;
}

static void array_drop(struct array *array)
{
    free(array->bytes);
    *array = (struct array){0};
}

static bool array_grow(struct array *array, uint64_t bytes)
{
    if (bytes <= array->room && array->bytes != NULL)
        return true;
    array_drop(array);
    array->bytes = malloc(bytes == 0 ? 1 : bytes);
    array->room = array->bytes != NULL ? bytes : 0;
    return array->bytes != NULL;
}

enum dkv_status dkv_result_reserve(struct dropkv_result *public, uint32_t batch, uint32_t kv_heads,
                                   uint64_t n_tokens, uint64_t keep_tokens, bool with_scores,
                                   struct dkv_error *err)
{
    struct result *result = (struct result *)public;
    const uint64_t n_heads = (uint64_t)batch * kv_heads;
    uint64_t keep_bytes, scores_bytes;
    public->keep_indices = NULL;
    public->keep_offsets = NULL;
    public->scores = NULL;
    if (!dkv_mul_u64(n_heads, keep_tokens, &keep_bytes) ||
        !dkv_mul_u64(keep_bytes, sizeof(int32_t), &keep_bytes) ||
        !dkv_mul_u64(n_heads, n_tokens, &scores_bytes) ||
        !dkv_mul_u64(scores_bytes, sizeof(float), &scores_bytes))
        return dkv_error_set(err, DKV_E_NOMEM, "the answer's size overflows");
    if (!array_grow(&result->keep, keep_bytes) ||
        (with_scores && !array_grow(&result->scores, scores_bytes)))
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the answer");
    public->batch = batch;
    public->kv_heads = kv_heads;
    public->n_tokens = n_tokens;
    public->keep_tokens = keep_tokens;
    public->keep_indices = result->keep.bytes;
    public->scores = with_scores ? result->scores.bytes : NULL;
    return DKV_OK;
}

enum dkv_status dkv_result_reserve_ragged(struct dropkv_result *public, uint32_t batch,
                                          uint32_t kv_heads, uint64_t n_tokens, uint64_t n_keep,
                                          bool with_scores, struct dkv_error *err)
{
    struct result *result = (struct result *)public;
    const uint64_t n_heads = (uint64_t)batch * kv_heads;
    const enum dkv_status status = dkv_result_reserve(public, batch, kv_heads, n_tokens, 0,
                                                      with_scores, err);
    if (status != DKV_OK)
        return status;
    if (n_heads == 0 || n_keep > n_heads * n_tokens || n_keep > INT32_MAX)
        return dkv_error_set(err, DKV_E_MALFORMED, "answer: more indices than tokens");
    if (!array_grow(&result->keep, n_keep * sizeof(int32_t)) ||
        !array_grow(&result->offsets, (n_heads + 1) * sizeof(int32_t)))
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the answer");
    public->keep_tokens = n_keep / n_heads;
    public->keep_indices = result->keep.bytes;
    public->keep_offsets = result->offsets.bytes;
    return DKV_OK;
}

int32_t *dkv_result_offsets(struct dropkv_result *public)
{
    return ((struct result *)public)->offsets.bytes;
}

enum dkv_status dkv_result_judge(const struct dropkv_result *public, uint64_t n_keep,
                                 struct dkv_error *err)
{
    const uint64_t n_heads = (uint64_t) public->batch * public->kv_heads;
    const int32_t *offsets = public->keep_offsets;
    bool sound = offsets[0] == 0 && offsets[n_heads] == (int64_t)n_keep;
    for (uint64_t h = 0; h < n_heads; h++) {
        const int64_t count = (int64_t)offsets[h + 1] - offsets[h];
        sound = sound && count >= 1 && (uint64_t)count <= public->n_tokens;
    }
    if (sound)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_MALFORMED, "answer: its offsets do not ascend from 0 to %llu",
                         (unsigned long long)n_keep);
}

void dkv_result_borrow(struct dropkv_result *public, uint32_t batch, uint32_t kv_heads,
                       uint64_t n_tokens, uint64_t keep_tokens, const int32_t *keep,
                       const float *scores)
{
    public->batch = batch;
    public->kv_heads = kv_heads;
    public->n_tokens = n_tokens;
    public->keep_tokens = keep_tokens;
    public->keep_indices = keep;
    public->keep_offsets = NULL;
    public->scores = scores;
}

void dkv_result_hold(struct dropkv_result *public, struct dkv_held *held)
{
    ((struct result *)public)->held = held;
}

int32_t *dkv_result_keep(struct dropkv_result *public)
{
    return ((struct result *)public)->keep.bytes;
}

float *dkv_result_scores(struct dropkv_result *public)
{
    return public->scores != NULL ? ((struct result *)public)->scores.bytes : NULL;
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
    struct dkv_results *results = result->results;
    if (result->held != NULL)
        dkv_held_unref(result->held);
    result->held = NULL;
    if (atomic_load(&results->closed)) {
        result_delete(result);
    } else {
        if (result->keep.room > KEPT_BYTES_MAX)
            array_drop(&result->keep);
        if (result->scores.room > KEPT_BYTES_MAX)
            array_drop(&result->scores);
        result->next = atomic_load(&results->freed);
        while (!atomic_compare_exchange_weak(&results->freed, &result->next, result))
            ;
    }
    results_unref(results);
}
