/* The forms for programs: JSON, safetensors, npy.
 *
 * JSON is written as it goes: the numbers of a long context's scores would be a tree of gigabytes.
 * Only names and texts, which need escaping, go through jansson.
 */
#include "client/cli/report.h"

#include "client/npy.h"
#include "client/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static enum dkv_status finish(FILE *stream, struct dkv_error *err)
{
    if (fflush(stream) != 0 || ferror(stream))
        return dkv_error_set(err, DKV_E_IO, "could not write the answer");
    return DKV_OK;
}

/* ---- JSON ---- */

static void put_text(FILE *stream, const char *text)
{
    json_t *json = json_string(text);
    char *quoted = json == NULL ? NULL : json_dumps(json, JSON_ENCODE_ANY);
    fputs(quoted != NULL ? quoted : "\"\"", stream);
    free(quoted);
    json_decref(json);
}

static void put_index(FILE *stream, const struct dropkv_result *r, uint64_t i)
{
    fprintf(stream, "%" PRId32, r->keep_indices[i]);
}

/* A masked token's score is not a number; JSON has null for that. Nine digits keep every float. */
static void put_score(FILE *stream, const struct dropkv_result *r, uint64_t i)
{
    if (isfinite(r->scores[i]))
        fprintf(stream, "%.9g", (double)r->scores[i]);
    else
        fputs("null", stream);
}

/* [batch][kv_heads][n], or of each head as many as the offsets say */
static void put_nested(FILE *stream, const struct dropkv_result *r, const int32_t *offsets,
                       uint64_t n, void (*put)(FILE *, const struct dropkv_result *, uint64_t))
{
    uint64_t at = 0;
    fputc('[', stream);
    for (uint32_t b = 0; b < r->batch; b++) {
        fputs(b > 0 ? ",[" : "[", stream);
        for (uint32_t h = 0; h < r->kv_heads; h++) {
            const uint64_t head = (uint64_t)b * r->kv_heads + h;
            if (offsets != NULL)
                n = (uint64_t)(offsets[head + 1] - offsets[head]);
            fputs(h > 0 ? ",[" : "[", stream);
            for (uint64_t i = 0; i < n; i++) {
                if (i > 0)
                    fputc(',', stream);
                put(stream, r, at++);
            }
            fputc(']', stream);
        }
        fputc(']', stream);
    }
    fputc(']', stream);
}

static void put_block(FILE *stream, const struct dkv_outcome *outcome)
{
    const struct dropkv_result *r = outcome->result;
    fputs("{\"name\":", stream);
    put_text(stream, outcome->name);
    fprintf(stream,
            ",\"batch\":%" PRIu32 ",\"q_heads\":%" PRIu32 ",\"kv_heads\":%" PRIu32
            ",\"tokens\":%" PRIu64 ",\"keep_tokens\":%" PRIu64,
            r->batch, outcome->q_heads, r->kv_heads, r->n_tokens, r->keep_tokens);
    if (r->degraded)
        fputs(",\"degraded\":true", stream);
    fputs(",\"keep_indices\":", stream);
    put_nested(stream, r, r->keep_offsets, r->keep_tokens, put_index);
    if (r->scores != NULL) {
        fputs(",\"scores\":", stream);
        put_nested(stream, r, NULL, r->n_tokens, put_score);
    }
    fputc('}', stream);
}

enum dkv_status dkv_report_json(const struct dkv_report *report, FILE *stream,
                                struct dkv_error *err)
{
    fputs("{\"endpoint\":", stream);
    put_text(stream, report->endpoint);
    fputs(",\"backend\":", stream);
    put_text(stream, report->outcomes[0].result->backend);
    fputs(",\"blocks\":[", stream);
    for (size_t i = 0; i < report->n_outcomes; i++) {
        fputs(i > 0 ? ",\n" : "\n", stream);
        put_block(stream, &report->outcomes[i]);
    }
    fputs("\n]}\n", stream);
    return finish(stream, err);
}

/* ---- safetensors ---- */

struct tensor_list {
    struct dkv_safetensors_out *tensors; /* at most two for each block */
    uint64_t (*shapes)[3];
    size_t n;
};

static bool add_tensor(struct tensor_list *list, const struct dkv_outcome *outcome,
                       const char *what, const char *type_name, uint64_t last_dim, const void *data)
{
    const struct dropkv_result *r = outcome->result;
    char *name = NULL;
    if (asprintf(&name, "%s.%s", outcome->name, what) < 0)
        return false;
    uint64_t *shape = list->shapes[list->n];
    shape[0] = r->batch;
    shape[1] = r->kv_heads;
    shape[2] = last_dim;
    list->tensors[list->n++] = (struct dkv_safetensors_out){
        name, type_name, 3, shape, data, shape[0] * shape[1] * shape[2] * 4};
    return true;
}

/* One dimension of int32. */
static bool add_list(struct tensor_list *list, const struct dkv_outcome *outcome, const char *what,
                     uint64_t count, const int32_t *data)
{
    if (!add_tensor(list, outcome, what, "I32", 1, data))
        return false;
    struct dkv_safetensors_out *tensor = &list->tensors[list->n - 1];
    list->shapes[list->n - 1][0] = count;
    tensor->n_dims = 1;
    tensor->bytes = count * sizeof(*data);
    return true;
}

static bool list_tensors(const struct dkv_report *report, struct tensor_list *list)
{
    list->tensors = calloc(3 * report->n_outcomes, sizeof(list->tensors[0]));
    list->shapes = calloc(3 * report->n_outcomes, sizeof(list->shapes[0]));
    if (list->tensors == NULL || list->shapes == NULL)
        return false;
    for (size_t i = 0; i < report->n_outcomes; i++) {
        const struct dkv_outcome *o = &report->outcomes[i];
        const struct dropkv_result *r = o->result;
        const uint64_t n_heads = (uint64_t)r->batch * r->kv_heads;
        if (r->keep_offsets != NULL &&
            !(add_list(list, o, "keep_indices", (uint64_t)r->keep_offsets[n_heads],
                       r->keep_indices) &&
              add_list(list, o, "keep_offsets", n_heads + 1, r->keep_offsets)))
            return false;
        if (r->keep_offsets == NULL &&
            !add_tensor(list, o, "keep_indices", "I32", r->keep_tokens, r->keep_indices))
            return false;
        if (o->result->scores != NULL &&
            !add_tensor(list, o, "scores", "F32", o->result->n_tokens, o->result->scores))
            return false;
    }
    return true;
}

enum dkv_status dkv_report_safetensors(const struct dkv_report *report, FILE *stream,
                                       struct dkv_error *err)
{
    const char *const metadata[][2] = {
        {"endpoint", report->endpoint},
        {"backend", report->outcomes[0].result->backend},
    };
    struct tensor_list list = {0};
    enum dkv_status status = list_tensors(report, &list)
                                 ? dkv_safetensors_write(stream, list.tensors, list.n, metadata, 2,
                                                         err)
                                 : dkv_error_set(err, DKV_E_NOMEM, "no memory for the answer");
    for (size_t i = 0; i < list.n; i++)
        free((char *)(uintptr_t)list.tensors[i].name);
    free(list.tensors);
    free(list.shapes);
    return status;
}

/* ---- npy ---- */

enum dkv_status dkv_report_npy(const struct dkv_report *report, FILE *stream, struct dkv_error *err)
{
    const struct dropkv_result *r = report->outcomes[0].result;
    const uint64_t shape[3] = {r->batch, r->kv_heads, r->keep_tokens};
    if (r->keep_offsets != NULL)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "an npy file cannot hold heads of unequal length: use json or "
                             "safetensors");
    return dkv_npy_write(stream, "<i4", 3, shape, r->keep_indices,
                         shape[0] * shape[1] * shape[2] * sizeof(int32_t), err);
}

enum dkv_status dkv_report_npy_scores(const struct dkv_report *report, FILE *stream,
                                      struct dkv_error *err)
{
    const struct dropkv_result *r = report->outcomes[0].result;
    const uint64_t shape[3] = {r->batch, r->kv_heads, r->n_tokens};
    return dkv_npy_write(stream, "<f4", 3, shape, r->scores,
                         shape[0] * shape[1] * shape[2] * sizeof(float), err);
}
