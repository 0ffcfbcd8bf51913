/* The server's replies to infer requests, and error bodies.
 *
 * Heads are written by hand into one growing buffer: their form is fixed, and an answer may hold
 * millions of numbers, for which a tree of JSON nodes would cost fifty bytes each. Rules of
 * existing clients that shape the head: an output has `parameters` only to tell its
 * binary_data_size (the C++ client gives up otherwise), so everything else stands in the parameters
 * of the reply; `id` is echoed only if one was given.
 */
#include "proto/oip_tensor.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BODY_BYTES_MAX INT32_MAX

/* ---- A text that grows ---------------------------------------------------------------------- */

/* The first failure sticks and turns later additions into nothing, so callers check once. */
struct text {
    char *bytes;
    size_t n_bytes;
    size_t capacity;
    enum dkv_status status;
};

static bool reserve(struct text *t, size_t more)
{
    if (t->status != DKV_OK)
        return false;
    if (t->capacity - t->n_bytes > more)
        return true;
    const size_t capacity = 2 * t->capacity + more + 256;
    char *grown = capacity <= BODY_BYTES_MAX ? realloc(t->bytes, capacity) : NULL;
    if (grown == NULL) {
        t->status = capacity <= BODY_BYTES_MAX ? DKV_E_NOMEM : DKV_E_TOO_LARGE;
        return false;
    }
    t->bytes = grown;
    t->capacity = capacity;
    return true;
}

/* For pieces of at most 255 bytes. */
static void add(struct text *t, const char *format, ...) DKV_PRINTF(2, 3);
static void add(struct text *t, const char *format, ...)
{
    va_list args;

    if (!reserve(t, 256))
        return;
    va_start(args, format);
    const int n = vsnprintf(t->bytes + t->n_bytes, 256, format, args);
    va_end(args);
    assert(n >= 0 && n < 256);
    t->n_bytes += (size_t)n;
}

/* One character of a JSON string; returns the bytes written, at most 6. */
static size_t escape(char c, char out[8])
{
    if (c == '"' || c == '\\')
        return (size_t)snprintf(out, 8, "\\%c", c);
    if ((unsigned char)c < 0x20)
        return (size_t)snprintf(out, 8, "\\u%04x", (unsigned)c);
    out[0] = c;
    return 1;
}

static void add_string(struct text *t, const char *string)
{
    add(t, "\"");
    for (; *string != '\0' && reserve(t, 8); string++)
        t->n_bytes += escape(*string, t->bytes + t->n_bytes);
    add(t, "\"");
}

/* ---- Outputs -------------------------------------------------------------------------------- */

/* Room is made once for all numbers of a list: growing step by step would copy megabytes and leave
 * them scattered over the heap. Where the numbers are too many, adding them says so. */
static void make_room(struct text *t, uint64_t count, size_t bytes_each)
{
    if (count <= BODY_BYTES_MAX / 2 / bytes_each)
        reserve(t, (size_t)count * bytes_each);
}

static void add_indices(struct text *t, const int32_t *values, uint64_t count)
{
    make_room(t, count, sizeof("2097151,") - 1);
    for (uint64_t i = 0; i < count && t->status == DKV_OK; i++)
        add(t, "%s%d", i > 0 ? "," : "", (int)values[i]);
}

/* Nine digits bring every float32 back. JSON has no word for NaN or Inf. */
static void add_scores(struct text *t, const float *values, uint64_t count)
{
    make_room(t, count, sizeof("-1.23456789e-38,") - 1);
    for (uint64_t i = 0; i < count && t->status == DKV_OK; i++) {
        if (isfinite(values[i]))
            add(t, "%s%.9g", i > 0 ? "," : "", (double)values[i]);
        else
            add(t, "%snull", i > 0 ? "," : "");
    }
}

static void add_output(struct text *t, const struct dkv_oip_infer *infer,
                       const struct dkv_oip_result *result, enum dkv_oip_output which,
                       struct dkv_oip_reply *reply)
{
    const struct dkv_oip_wanted *wanted = &infer->outputs[which];
    const bool keep = which == DKV_OIP_KEEP_INDICES, scores = which == DKV_OIP_SCORES;
    const uint64_t last = keep ? result->keep_tokens : result->n_tokens;
    const uint64_t n_heads = result->n_blocks * (uint64_t)result->kv_heads;
    const int32_t *numbers = keep ? result->keep : result->offsets;
    const uint64_t count = which == DKV_OIP_KEEP_OFFSETS ? n_heads + 1
                           : keep && result->ragged      ? (uint64_t)result->offsets[n_heads]
                                                         : n_heads * last;
    const uint64_t n_bytes = count * 4;

    add(t, "{\"name\":\"%s\",\"datatype\":\"%s\",\"shape\":", dkv_oip_output_names[which],
        scores ? "FP32" : "INT32");
    if (which == DKV_OIP_KEEP_OFFSETS || (keep && result->ragged))
        add(t, "[%llu]", (unsigned long long)count);
    else
        add(t, "[%u,%u,%llu]", result->n_blocks, result->kv_heads, (unsigned long long)last);
    if (wanted->region[0] != '\0') {
        add(t, "}"); /* the bytes are in the client's region */
        return;
    }
    if (wanted->binary) {
        add(t, ",\"parameters\":{\"binary_data_size\":%llu}}", (unsigned long long)n_bytes);
        reply->segments[reply->n_segments++] = (struct dkv_oip_segment){
            scores ? (const void *)result->scores : (const void *)numbers, n_bytes};
        reply->binary_bytes += n_bytes;
        return;
    }
    add(t, ",\"data\":[");
    if (!scores)
        add_indices(t, numbers, count);
    else
        add_scores(t, result->scores, count);
    add(t, "]}");
}

static void add_head(struct text *t, const struct dkv_oip_infer *infer,
                     const struct dkv_oip_result *result, struct dkv_oip_reply *reply)
{
    bool first = true;

    add(t, "{");
    if (infer->id[0] != '\0') {
        add(t, "\"id\":");
        add_string(t, infer->id);
        add(t, ",");
    }
    add(t,
        "\"model_name\":\"%s\",\"model_version\":\"" DKV_OIP_MODEL_VERSION
        "\",\"parameters\":{\"backend\":",
        infer->model[0] != '\0' ? infer->model : DKV_OIP_MODEL);
    add_string(t, result->backend);
    add(t, ",\"window\":%u,\"keep_tokens\":%llu,\"degraded\":%s},\"outputs\":[", result->window,
        (unsigned long long)result->keep_tokens, result->degraded ? "true" : "false");
    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        if (infer->outputs[i].wanted) {
            if (!first)
                add(t, ",");
            add_output(t, infer, result, (enum dkv_oip_output)i, reply);
            first = false;
        }
    add(t, "]}");
}

enum dkv_status dkv_oip_reply_encode(const struct dkv_oip_infer *infer,
                                     const struct dkv_oip_result *result,
                                     struct dkv_oip_reply *reply_out, struct dkv_error *err)
{
    struct dkv_oip_reply reply = {0};
    struct text t = {0};

    assert(!infer->outputs[DKV_OIP_SCORES].wanted || result->scores != NULL);
    add_head(&t, infer, result, &reply);
    if (t.status == DKV_OK && reply.binary_bytes + t.n_bytes > BODY_BYTES_MAX)
        t.status = DKV_E_TOO_LARGE;
    if (t.status != DKV_OK) {
        free(t.bytes);
        if (t.status == DKV_E_NOMEM)
            return dkv_error_set(err, t.status, "no memory for the reply");
        return dkv_error_set(err, t.status, "the reply would pass %d bytes, ask for less",
                             BODY_BYTES_MAX);
    }
    t.bytes[t.n_bytes] = '\0';
    reply.head = (struct dkv_oip_text){t.bytes, t.n_bytes};
    *reply_out = reply;
    return DKV_OK;
}

void dkv_oip_reply_fini(struct dkv_oip_reply *reply)
{
    dkv_oip_text_fini(&reply->head);
    memset(reply, 0, sizeof(*reply));
}

/* ---- Errors --------------------------------------------------------------------------------- */

size_t dkv_oip_error_encode(const char *text, char body_out[DKV_OIP_ERROR_BYTES])
{
    size_t n = (size_t)sprintf(body_out, "{\"error\":\"");

    for (; *text != '\0' && n < DKV_OIP_ERROR_BYTES - 16; text++)
        n += escape((unsigned char)*text < 0x7f ? *text : '?', body_out + n);
    return n + (size_t)sprintf(body_out + n, "\"}");
}
